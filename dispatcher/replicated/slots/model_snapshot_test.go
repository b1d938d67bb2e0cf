package slots_test

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// snapshotFault is a known fault of snapshots.
type snapshotFault int

const (
	// manifestFirst: the files are stored up to 20 s after the manifest.
	manifestFirst snapshotFault = 1 + iota
	// trimFirst: the stream is trimmed before the manifest is stored.
	trimFirst
	// positionLater: the position is the store's after the checkpoint.
	positionLater
)

// modelObjects is the connection of a pod to the object store. Requests wait, and deletions have their
// effect up to ten seconds after the pod was stopped.
type modelObjects struct {
	*model
	living context.Context
	log    *modelLog
}

// arrives waits, and returns the error of a request that does not arrive.
func (o *modelObjects) arrives(ctx context.Context) error {
	if o.oneOf(20) {
		sleep(ctx, o.upTo(10_000))
	}
	if o.log.cut.Load() || o.oneOf(20) {
		return slotstest.ErrLost
	}
	return ctx.Err()
}

func (o *modelObjects) Put(ctx context.Context, name string, data io.Reader) error {
	if err := o.arrives(ctx); err != nil {
		return err
	}
	isManifest := strings.HasSuffix(name, ".json")
	switch {
	case o.snapshotFault == manifestFirst && !isManifest:
		all, err := io.ReadAll(data)
		time.AfterFunc(time.Duration(o.upTo(20_000))*time.Millisecond, func() {
			if o.living.Err() == nil {
				_ = o.objects.Put(o.living, name, bytes.NewReader(all))
			}
		})
		return err
	case o.snapshotFault == trimFirst && isManifest:
		if s, err := o.log.State(ctx); err == nil {
			_ = o.log.Trim(ctx, s.Last)
		}
		sleep(ctx, o.upTo(1000))
	}
	return o.objects.Put(ctx, name, data)
}

func (o *modelObjects) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	if err := o.arrives(ctx); err != nil {
		return nil, err
	}
	return o.objects.Get(ctx, name)
}

func (o *modelObjects) List(ctx context.Context) ([]string, error) {
	if err := o.arrives(ctx); err != nil {
		return nil, err
	}
	return o.objects.List(ctx)
}

func (o *modelObjects) Missing(ctx context.Context, names []string) ([]string, error) {
	if err := o.arrives(ctx); err != nil {
		return nil, err
	}
	return o.objects.Missing(ctx, names)
}

func (o *modelObjects) Delete(ctx context.Context, name string) error {
	if o.oneOf(10) {
		time.AfterFunc(time.Duration(o.upTo(10_000))*time.Millisecond, func() { _ = o.objects.Delete(context.Background(), name) })
		return slotstest.ErrLost
	}
	if err := o.arrives(ctx); err != nil {
		return err
	}
	return o.objects.Delete(ctx, name)
}

// snapshotDir is the folder of the files of a snapshot.
const snapshotDir = "snapshot"

// retryingLog repeats lost reads, so that most searches of a record succeed.
type retryingLog struct{ *modelLog }

func (l retryingLog) Get(ctx context.Context, from uint64) (e slots.Entry, err error) {
	for range 5 {
		if e, err = l.modelLog.Get(ctx, from); !errors.Is(err, slotstest.ErrLost) {
			break
		}
	}
	return e, err
}

// takeSnapshots takes snapshots until ctx ends.
func (m *model) takeSnapshots(ctx context.Context, log *modelLog, w *slots.Writer, files *copied) {
	s := &slots.Snapshotter{
		Log: retryingLog{log}, Objects: &modelObjects{m, ctx, log}, Writer: w, Store: &modelCheckpoints{m, files, vfs.NewMem()},
		Dir: snapshotDir, Logger: slog.New(slog.DiscardHandler),
	}
	s.FS = s.Store.(*modelCheckpoints).fs
	for ctx.Err() == nil && w.Err() == nil {
		if s.Take(ctx) == nil {
			m.count(&m.tally.snapshots)
		}
		sleep(ctx, m.upTo(5_000))
	}
}

// tableBatches is the number of batches in a table of a modelled snapshot. The other batches are in
// the file restName, which changes with every snapshot.
const (
	tableBatches = 10
	restName     = "MANIFEST"
)

// modelCheckpoints takes the checkpoints of a copy.
type modelCheckpoints struct {
	*model
	files *copied
	fs    *vfs.MemFS
}

func (*modelCheckpoints) PutMeta(string, []byte) error { return nil }

func (*modelCheckpoints) Formats() (pebblestore.Formats, error) { return pebblestore.Formats{}, nil }

func (c *modelCheckpoints) Checkpoint(dir string) (pebblestore.Position, error) {
	batches := c.files.all()
	if err := c.fs.MkdirAll(dir, 0o700); err != nil {
		return pebblestore.Position{}, err
	}
	position := (&copied{batches: batches}).Position()
	for i := 0; len(batches) >= tableBatches; i++ {
		if err := writeBatches(c.fs, c.fs.PathJoin(dir, fmt.Sprintf("%06d.sst", i)), batches[:tableBatches]); err != nil {
			return position, err
		}
		batches = batches[tableBatches:]
	}
	if c.snapshotFault == positionLater {
		time.Sleep(time.Duration(c.upTo(4000)) * time.Millisecond)
		position = (&copied{batches: c.files.all()}).Position()
	}
	return position, writeBatches(c.fs, c.fs.PathJoin(dir, restName), batches)
}

type encodedBatch struct {
	Session pebblestore.Session
	Data    []byte
}

func writeBatches(fs vfs.FS, path string, batches []copiedBatch) error {
	encoded := make([]encodedBatch, len(batches))
	for i, b := range batches {
		encoded[i] = encodedBatch{b.session, b.data}
	}
	f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	return errors.Join(gob.NewEncoder(f).Encode(encoded), f.Close())
}

// readBatches reads the files of a snapshot.
func readBatches(fs vfs.FS) (batches []copiedBatch, err error) {
	for i := 0; ; i++ {
		path := fs.PathJoin(snapshotDir, fmt.Sprintf("%06d.sst", i))
		isTable := true
		if _, err := fs.Stat(path); err != nil {
			path, isTable = fs.PathJoin(snapshotDir, restName), false
		}
		f, err := fs.Open(path)
		if err != nil {
			return nil, err
		}
		var encoded []encodedBatch
		err = errors.Join(gob.NewDecoder(f).Decode(&encoded), f.Close())
		for _, b := range encoded {
			batches = append(batches, copiedBatch{b.Session, b.Data})
		}
		if err != nil || !isTable {
			return batches, err
		}
	}
}

// recover returns the files of the newest snapshot that was not tried; none when the log has no
// snapshot.
func (m *model) recover(ctx context.Context, log slots.Log, objects slots.Objects, tried map[uint64]bool) (*copied, error) {
	fs := vfs.NewMem()
	err := slots.RestoreFiles(ctx, log, objects, fs, snapshotDir, tried)
	if errors.Is(err, slots.ErrNoSnapshot) {
		return &copied{}, err
	}
	if err != nil {
		return nil, err
	}
	batches, err := readBatches(fs)
	return &copied{batches: batches}, err
}

// checkSnapshots restores the log from each of the last two snapshots.
func (m *model) checkSnapshots(ctx context.Context, restored *copied) {
	log := slotstest.NewLog(m.stream)
	newest, err := slots.NewestSnapshot(ctx, log)
	if err != nil || newest == 0 {
		return
	}
	tried := map[uint64]bool{}
	for _, which := range []string{"last", "second last"} {
		files, err := m.recover(ctx, log, m.objects, tried)
		switch {
		case errors.Is(err, slots.ErrNoSnapshot) && len(tried) > 0:
			return // The only one.
		case err != nil:
			m.fail("the %s snapshot: got error %v, want none", which, err)
			return
		case which == "last" && !tried[newest]:
			m.fail("the last snapshot, %d: got an incomplete one", newest)
			return
		}
		if err := m.restore(ctx, files); err != nil {
			m.fail("restore from the %s snapshot: got error %v, want none", which, err)
		} else if !files.equal(restored) {
			m.fail("restore from the %s snapshot: got another copy than from the last one", which)
		}
	}
}
