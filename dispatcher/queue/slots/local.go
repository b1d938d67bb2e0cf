package slots

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// local is what a process stores beside its copy of a slot.
type local struct {
	// Stream is the ID of the stream of the copy; empty if it is unknown.
	Stream string `json:"stream"`
	// Session is the last session that a process had with the folder, in hexadecimal digits. The lock
	// of the folder proves that this process has ended.
	Session string `json:"session"`
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
	return errors.Join(to.Rename(temporary, path), syncFolder(to, to.PathDir(dir)))
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

// checkStream returns ErrOtherStream if the copy in dir is of another stream.
func (l local) checkStream(s State, dir string) error {
	if l.Stream == "" || s.ID == "" || l.Stream == s.ID {
		return nil
	}
	return fmt.Errorf("%w: its id is %s, and the files in %s are of the stream with id %s; restore that stream and its objects, or move the folder and its .slot file away to continue without the messages that only the folder has", ErrOtherStream, s.ID, dir, l.Stream)
}
