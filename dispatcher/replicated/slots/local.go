package slots

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/internal/durable"
)

// local is what a process stores beside its copy of a slot.
type local struct {
	// Stream is the ID of the stream of the copy; empty if it is unknown.
	Stream string `json:"stream"`
	// Session is the last session that a process had with the folder, in hexadecimal digits. The lock
	// of the folder proves that this process has ended.
	Session string `json:"session"`
	// Epoch is the number of the claim of Session; 0 if it is unknown.
	Epoch uint64 `json:"epoch,omitempty"`
	// Durable is the last batch of Session that is known to be in the stream; 0 for none.
	Durable uint64 `json:"durable,omitempty"`
}

// localSuffix is added to the folder of a copy for the file with its local.
const localSuffix = ".slot"

// readLocal reads the file. A missing or malformed one counts as an empty one: it costs only the
// time of a claim without it.
func readLocal(from vfs.FS, dir string) (l local, err error) {
	f, err := from.Open(dir + localSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		return l, nil
	}
	if err != nil {
		return l, err
	}
	data, err := io.ReadAll(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return l, err
	}
	if json.Unmarshal(data, &l) != nil {
		l = local{}
	}
	return l, nil
}

// write replaces the file.
func (l local) write(to vfs.FS, dir string) error {
	data, err := json.Marshal(l)
	if err != nil {
		return err
	}
	path, temporary := dir+localSuffix, dir+localSuffix+".new"
	f, err := to.Create(temporary, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return errors.Join(to.Rename(temporary, path), durable.Sync(to.OpenDir(to.PathDir(dir))))
}

func (l local) session() (s pebblestore.Session) {
	if decoded, err := hex.DecodeString(l.Session); err == nil && len(decoded) == len(s) {
		copy(s[:], decoded)
	}
	return s
}

// ErrOtherStream reports that the stream is not the one of the local files: it was created again, or
// belongs to another installation. The files may have messages that no stream has.
var ErrOtherStream = errors.New("the stream is not the one of the local files")

// ErrRecordsLost reports that a stream lacks records that it had acknowledged: it was restored from a
// backup, or its servers lost their disks. The local files may have messages that no stream has.
var ErrRecordsLost = errors.New("the stream lacks records that it had acknowledged")

// isOther reports whether a stream is not the one with a known ID.
func isOther(id, known string) bool { return id != "" && known != "" && id != known }

// checkStream returns ErrOtherStream if the copy in dir is of another stream. A stream that was adopted
// replaces the one of the copy.
func (l local) checkStream(s State, dir string) error {
	if !isOther(s.ID, l.Stream) || slices.Contains(s.Replaced, l.Stream) {
		return nil
	}
	return fmt.Errorf("%w: its id is %s, and the files in %s are of the stream with id %s; if it was created again, restore that stream and its object stores, or run posthorn replication adopt --data to continue with these files; otherwise correct --replication-url and --replication-name. To continue without the messages that only these files have, move the folder and its .slot file away", ErrOtherStream, s.ID, dir, l.Stream)
}

// durable returns the last batch of a copy that the stream is known to have had. Only the last batches of
// the last owner with these files may have no acknowledgement.
func (l local) durable(copied pebblestore.Position) pebblestore.Position {
	switch {
	case l.Stream == "":
		return pebblestore.Position{}
	case copied.Session == l.session():
		return pebblestore.Position{Batch: l.Durable, Session: copied.Session}
	}
	return copied
}

// checkDurable returns ErrRecordsLost if the stream lacks a batch that it had. Batches before its first
// one were trimmed.
func checkDurable(ctx context.Context, log Log, s State, had pebblestore.Position, dir string) error {
	if had.Batch == 0 || s.First > s.Last {
		return nil // An empty stream has errors of its own.
	}
	_, h, err := findBatch(ctx, log, s, had.Batch)
	switch {
	case err != nil && !errors.Is(err, ErrNoRecord):
		return err
	case err == nil && (h.first > had.Batch || h.session == had.Session):
		return nil
	case err == nil:
		err = fmt.Errorf("its batch %d is of session %x", had.Batch, h.session)
	default:
		err = fmt.Errorf("it ends before batch %d", had.Batch)
	}
	return fmt.Errorf("%w: the files in %s have batch %d of session %x, and %w; if the stream was restored from a backup, run posthorn replication adopt to continue with it, which delivers messages again that were delivered after the backup, or posthorn replication adopt --data to continue with these files", ErrRecordsLost, dir, had.Batch, had.Session, err)
}
