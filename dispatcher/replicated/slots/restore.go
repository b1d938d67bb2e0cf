package slots

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/internal/durable"
)

// errNoSnapshot reports that a slot has no snapshot, or none that can be restored.
var errNoSnapshot = errors.New("the slot has no complete snapshot")

// restorer replaces the files of a copy by a snapshot's.
type restorer struct {
	log     Log
	objects Objects // nil for none.
	fs      vfs.FS
	dir     string
	// behind is the batch that a snapshot must be behind; 0 for any.
	behind uint64
	// tried are the sequences of the snapshots that were restored.
	tried map[uint64]bool
}

// restore replaces the files in dir by the files of the newest snapshot that was not tried. The error
// wraps errNoSnapshot when there is none; dir is then unchanged.
func (r *restorer) restore(ctx context.Context) error {
	if r.objects == nil {
		return errNoSnapshot
	}
	sequence, err := newestSnapshot(ctx, r.log)
	if err != nil {
		return err
	}
	cause := errNoSnapshot
	for sequence > 0 {
		m, before, err := readManifest(ctx, r.log, r.objects, sequence)
		if err == nil && !r.tried[sequence] && (r.behind == 0 || m.Batch > r.behind) {
			if err = r.download(ctx, m); err == nil {
				r.tried[sequence] = true
				return nil
			}
		}
		if err != nil && !errors.Is(err, errNoSnapshot) {
			return fmt.Errorf("restore snapshot %d: %w", sequence, err)
		}
		if err != nil {
			cause = fmt.Errorf("snapshot %d: %w", sequence, err)
		}
		sequence = before
	}
	return cause
}

// restoreObject replaces the files in dir by the files of the newest snapshot of the object store that is
// complete, without a stream, and returns its last batch.
func (r *restorer) restoreObject(ctx context.Context) (uint64, error) {
	names, err := r.objects.List(ctx)
	if err != nil {
		return 0, fmt.Errorf("list the objects: %w", err)
	}
	manifests := slices.DeleteFunc(names, func(name string) bool { return !isManifest(name) })
	slices.SortFunc(manifests, func(a, b string) int { return cmp.Or(compareManifests(b, a), strings.Compare(b, a)) })
	cause := errNoSnapshot
	for _, name := range manifests {
		encoded, err := getAll(ctx, r.objects, name)
		var m manifest
		if err == nil {
			err = json.Unmarshal(encoded, &m)
		}
		if err == nil {
			err = r.download(ctx, m)
		}
		if err == nil {
			return m.Batch, nil
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		if errors.Is(err, pebblestore.ErrNewerFormat) {
			return 0, fmt.Errorf("snapshot %s: %w", name, err)
		}
		cause = fmt.Errorf("snapshot %s: %w", name, err)
	}
	return 0, cause
}

// compareManifests compares the names of two manifests by their epochs and last batches.
func compareManifests(a, b string) int {
	epochA, _ := epochOf(a)
	epochB, _ := epochOf(b)
	return cmp.Or(cmp.Compare(epochA, epochB), cmp.Compare(batchOf(a), batchOf(b)))
}

// newestSnapshot returns the sequence of the last snapshot record; 0 for none.
func newestSnapshot(ctx context.Context, log Log) (uint64, error) {
	s, err := log.State(ctx)
	if err != nil {
		return 0, fmt.Errorf("read the state of the log: %w", err)
	}
	if s.First > s.Last {
		return 0, nil
	}
	e, err := log.Get(ctx, s.Last)
	if errors.Is(err, ErrNoRecord) {
		err = errStaleRead
	}
	if err != nil {
		return 0, fmt.Errorf("read record %d of the log: %w", s.Last, err)
	}
	h, _, err := decodeRecord(e.Record)
	if err != nil {
		return 0, badRecord(e.Sequence, err)
	}
	return h.snapshotAt(e.Sequence), nil
}

// download writes the files of a snapshot to another folder, which then replaces dir. It returns
// pebblestore.ErrNewerFormat before it changes anything.
func (r *restorer) download(ctx context.Context, m manifest) error {
	if err := m.Formats.Check(); err != nil {
		return err
	}
	temporary := r.dir + ".restore"
	if err := errors.Join(r.fs.RemoveAll(temporary), r.fs.MkdirAll(temporary, 0o700)); err != nil {
		return err
	}
	for _, f := range m.Files {
		if err := r.getFile(ctx, temporary, f); err != nil {
			return errors.Join(fmt.Errorf("file %s: %w", f.Name, err), r.fs.RemoveAll(temporary))
		}
	}
	if err := durable.Sync(r.fs.OpenDir(temporary)); err != nil {
		return err
	}
	if err := errors.Join(r.fs.RemoveAll(r.dir), r.fs.Rename(temporary, r.dir)); err != nil {
		return err
	}
	return durable.Sync(r.fs.OpenDir(r.fs.PathDir(r.dir)))
}

// getFile writes one file. The error wraps errNoSnapshot when its object is missing or damaged.
func (r *restorer) getFile(ctx context.Context, dir string, f file) (err error) {
	if f.Name != r.fs.PathBase(f.Name) || f.Name == "." || f.Name == ".." {
		return fmt.Errorf("%w: the manifest has the file name %q", errNoSnapshot, f.Name)
	}
	created, err := r.fs.Create(r.fs.PathJoin(dir, f.Name), vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, created.Close()) }()
	if f.Size == 0 {
		return created.Sync()
	}
	object, err := r.objects.Get(ctx, f.Object)
	if errors.Is(err, ErrNoObject) {
		return fmt.Errorf("%w: %w %s", errNoSnapshot, err, f.Object)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, object.Close()) }()
	data := &limitedReader{ctx: ctx, from: io.LimitReader(object, f.Size+1)}
	_, err = io.Copy(created, data)
	switch {
	case errors.Is(err, ErrNoObject):
		return fmt.Errorf("%w: %w %s", errNoSnapshot, err, f.Object)
	case err != nil:
		return err
	case data.size != f.Size || data.checksum != f.Checksum:
		return fmt.Errorf("%w: object %s has %d bytes with checksum %08x, want %d bytes with %08x", errNoSnapshot, f.Object, data.size, data.checksum, f.Size, f.Checksum)
	}
	return created.Sync()
}
