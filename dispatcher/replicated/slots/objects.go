package slots

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"strconv"
	"strings"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// Objects keeps the files of the snapshots of one slot. All methods may be called concurrently.
type Objects interface {
	// Put stores an object. It replaces an incomplete object of the same name, and removes what it
	// has stored when it fails; after a crash the rest can remain.
	Put(ctx context.Context, name string, data io.Reader) error
	// Get returns the bytes of an object, or ErrNoObject, also while they are read. It may return
	// other bytes than those stored.
	Get(ctx context.Context, name string) (io.ReadCloser, error)
	// List returns the names of all objects, also names for the rests of incomplete ones.
	List(ctx context.Context) ([]string, error)
	// Missing returns which of some objects do not exist or are incomplete. If the store was deleted, it
	// creates the store, so that they can be stored again.
	Missing(ctx context.Context, names []string) ([]string, error)
	// Delete removes an object, or the rest of one, if it exists.
	Delete(ctx context.Context, name string) error
}

// ErrNoObject reports that there is no complete object with a name.
var ErrNoObject = fmt.Errorf("no object: %w", fs.ErrNotExist)

// manifest describes a snapshot: the files of a store after a batch. It is an object of its own,
// which the snapshot record refers to.
type manifest struct {
	// Batch is the last batch of the files.
	Batch uint64 `json:"batch"`
	Files []file `json:"files"`
	// Formats are the formats of the files. Releases that did not name them wrote formats that every release reads.
	Formats pebblestore.Formats `json:"formats,omitzero"`

	// object is the name of the manifest, sequence the number of its record.
	object   string
	sequence uint64
}

// file is a file of a snapshot. Files without bytes have no object.
type file struct {
	Name     string `json:"name"`
	Object   string `json:"object,omitempty"`
	Size     int64  `json:"size"`
	Checksum uint32 `json:"checksum"`
}

// maxManifest bounds the size of a manifest: 100,000 files.
const maxManifest = 16 << 20

// reference returns the payload of the snapshot record: the checksum and the name of the manifest.
func reference(encoded []byte, object string) []byte {
	return append(binary.BigEndian.AppendUint32(nil, crc32.Checksum(encoded, castagnoli)), object...)
}

// readManifest reads the snapshot whose record has a sequence. The error wraps errNoSnapshot when the
// snapshot cannot be used.
func readManifest(ctx context.Context, log Log, objects Objects, sequence uint64) (m manifest, before uint64, err error) {
	e, err := log.Get(ctx, sequence)
	switch {
	case errors.Is(err, ErrNoRecord):
		return m, 0, fmt.Errorf("read record %d of the log: %w", sequence, errStaleRead)
	case err == nil && e.Sequence != sequence:
		return m, 0, fmt.Errorf("%w: its record %d was trimmed", errNoSnapshot, sequence)
	case err != nil:
		return m, 0, fmt.Errorf("read record %d of the log: %w", sequence, err)
	}
	h, payload, err := decodeRecord(e.Record)
	if err == nil && (h.kind != kindSnapshot || len(payload) <= checksumBytes) {
		err = fmt.Errorf("the record is a %v, not a snapshot", h.kind)
	}
	if err != nil {
		return m, 0, badRecord(sequence, err)
	}
	m.object, m.sequence = string(payload[checksumBytes:]), sequence
	encoded, err := getAll(ctx, objects, m.object)
	switch {
	case errors.Is(err, ErrNoObject):
		return m, h.snapshot, fmt.Errorf("%w: %w %s", errNoSnapshot, err, m.object)
	case err != nil:
		return m, h.snapshot, fmt.Errorf("read object %s: %w", m.object, err)
	case crc32.Checksum(encoded, castagnoli) != binary.BigEndian.Uint32(payload):
		return m, h.snapshot, fmt.Errorf("%w: the checksum of object %s is wrong", errNoSnapshot, m.object)
	}
	if err := json.Unmarshal(encoded, &m); err != nil {
		return m, h.snapshot, fmt.Errorf("%w: object %s: %w", errNoSnapshot, m.object, err)
	}
	return m, h.snapshot, nil
}

func getAll(ctx context.Context, objects Objects, name string) (data []byte, err error) {
	r, err := objects.Get(ctx, name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if data, err = io.ReadAll(io.LimitReader(r, maxManifest+1)); len(data) > maxManifest {
		return nil, fmt.Errorf("the manifest is larger than %d bytes", maxManifest)
	}
	return data, err
}

// objectName returns the name of a file of a snapshot in a session, which begins with the epoch of its
// claim. Tables never change in a session; all other files belong to one snapshot. Two snapshots can have
// the same last batch and different files, so the batch does not identify a snapshot.
func objectName(w *Writer, snapshot, name string, isTable bool) string {
	if isTable {
		return fmt.Sprintf("%d-%x/%s", w.Epoch(), w.Session(), name)
	}
	return fmt.Sprintf("%d-%x/%s/%s", w.Epoch(), w.Session(), snapshot, name)
}

// manifestName is the last part of the name of a manifest.
const manifestName = "snapshot.json"

// isManifest reports whether an object is the manifest of a snapshot.
func isManifest(object string) bool { return strings.HasSuffix(object, "/"+manifestName) }

// epochOf returns the epoch of the session that stored an object; not for the rest of an upload.
func epochOf(object string) (epoch uint64, ok bool) {
	digits, _, _ := strings.Cut(object, "-")
	epoch, err := strconv.ParseUint(digits, 10, 64)
	return epoch, err == nil
}

// batchOf returns the last batch in the name of a manifest; 0 if it has none.
func batchOf(manifest string) (batch uint64) {
	_, name, _ := strings.Cut(manifest, "/")
	digits, _, _ := strings.Cut(name, "-")
	batch, _ = strconv.ParseUint(digits, 10, 64)
	return batch
}
