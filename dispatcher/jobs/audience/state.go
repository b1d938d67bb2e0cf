package audience

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/internal/durable"
)

// The state of an audience is one value of the Store, so that each change of it takes effect as a
// whole. It names the files, in a folder of the audience:
//
//	members-SYNC    the members after a sync, sorted
//	changes-SYNC    the users with an identify call
//	sync-SYNC/      the sorted runs of a sync that is being received
//
// A file is written once, and is durable before a state names it. Files that no state names are
// left over from an interrupted sync; they are removed at the start.
const (
	membersPrefix = "members-"
	changesPrefix = "changes-"
	workPrefix    = "sync-"

	keyPrefix    = "audience/"
	stateVersion = 1
)

// Store keeps the states. queue.Store implements it.
type Store interface {
	// PutMeta stores a value under a name; nil deletes it. A power loss may undo it.
	PutMeta(name string, value []byte) error
	// PutMetaDurable does the same and returns when the value survives a power loss.
	PutMetaDurable(name string, value []byte) error
	// AllMeta returns all values.
	AllMeta() (map[string][]byte, error)
}

// stored is the state of one audience in the Store.
type stored struct {
	Version int `json:"version"`
	// Done is the last completed sync; nil before the first one. Pending is a sync that is decided
	// and not complete: from the moment that the record has it, the sync will be completed.
	Done    *state `json:"done,omitempty"`
	Pending *state `json:"pending,omitempty"`
	// Sent is how many changes of Pending are in the queue. After a power loss it may be too low;
	// then some identify calls are appended again.
	Sent int64 `json:"sent,omitempty"`
}

// files are the names of the files that the state needs.
func (r stored) files() map[string]bool {
	named := map[string]bool{}
	if r.Done != nil {
		named[membersPrefix+r.Done.Sync] = true
	}
	if r.Pending != nil {
		named[membersPrefix+r.Pending.Sync], named[changesPrefix+r.Pending.Sync] = true, true
	}
	return named
}

// state is a completed or decided sync.
type state struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Source, Key and Kind are the sync's; members with other values do not belong to the
	// audience.
	Source string `json:"source"`
	Key    string `json:"key"`
	Kind   string `json:"kind"`
	// Sync identifies the sync, and its files.
	Sync string    `json:"sync"`
	Time time.Time `json:"time"`
	adminapi.SyncCounts
}

// of reports whether the members belong to the audience as it is configured now.
func (s *state) of(source, key, kind string) bool {
	return s != nil && s.Source == source && s.Key == key && s.Kind == kind
}

// key is the name of the state in the Store.
func (n name) key() string { return keyPrefix + n.namespace + "/" + n.name }

// folder is the name of the folder with the audience's files.
func (n name) folder() string {
	sum := sha256.Sum256([]byte(n.namespace + "/" + n.name))
	return hex.EncodeToString(sum[:16])
}

// nameOfKey is the inverse of name.key; ok is false for the keys of other packages.
func nameOfKey(key string) (n name, ok bool) {
	rest, ours := strings.CutPrefix(key, keyPrefix)
	n.namespace, n.name, ok = strings.Cut(rest, "/")
	return n, ours && ok
}

func decode(value []byte) (r stored, err error) {
	if err := json.Unmarshal(value, &r); err != nil {
		return stored{}, fmt.Errorf("%w: its state is not JSON: %w", errDamaged, err)
	}
	if r.Version != stateVersion {
		return stored{}, fmt.Errorf("its state has version %d; this program knows version %d", r.Version, stateVersion)
	}
	return r, nil
}

// put stores a state by one of the Store's methods, or removes an empty one.
func put(to func(string, []byte) error, n name, r stored) error {
	if r == (stored{}) {
		return to(n.key(), nil)
	}
	r.Version = stateVersion
	value, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return to(n.key(), value)
}

// tidy removes the files in an audience's folder that its state does not name.
func tidy(fs vfs.FS, dir string, r stored) error {
	named := r.files()
	entries, err := fs.List(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, entry := range entries {
		if !named[entry] {
			err = errors.Join(err, fs.RemoveAll(fs.PathJoin(dir, entry)))
		}
	}
	return err
}

// makeFolder creates a folder durably; its parent exists.
func makeFolder(fs vfs.FS, dir string) error {
	if _, err := fs.Stat(dir); err == nil {
		return nil
	}
	if err := fs.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return durable.Sync(fs.OpenDir(fs.PathDir(dir)))
}
