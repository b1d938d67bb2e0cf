package audience

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// The files of an audience, in a folder of its own:
//
//	state.json        the last completed sync, and the name of its members' file
//	members-SYNC      members, sorted
//	pending.json      a sync that is decided and not complete: from the moment that
//	                  this file has its name, the sync will be completed
//	sync-SYNC/        the work files of a sync: runs, and then
//	  members         the new members
//	  changes         the users with an identify call
//	  progress        how many of the calls are in the queue
//
// Files that no other file names are left over from an interrupted sync; they are
// removed at the start.
const (
	stateFile    = "state.json"
	pendingFile  = "pending.json"
	membersFile  = "members"
	changesFile  = "changes"
	progressFile = "progress"
	syncPrefix   = "sync-"
	storePrefix  = "members-"
	stateVersion = 1
)

// step is called between any two changes of the files and does nothing: tests simulate crashes
// there.
var step = func() {}

// state is a completed or decided sync.
type state struct {
	Version int `json:"version"`
	// Namespace has the key of release 0.2.0, which reads the file after a rollback.
	Namespace string `json:"tenant"`
	Name      string `json:"name"`
	// Source, Key and Kind are those of the sync; members with other values do not belong to the
	// audience.
	Source string `json:"source"`
	Key    string `json:"key"`
	Kind   string `json:"kind"`
	// Sync identifies the sync, and its files.
	Sync string    `json:"sync"`
	Time time.Time `json:"time"`
	Counts
}

// of reports whether the members belong to the audience as it is configured now.
func (s *state) of(source, key, kind string) bool {
	return s != nil && s.Source == source && s.Key == key && s.Kind == kind
}

func readState(path string) (*state, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var s state
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, fmt.Errorf("%s: %w: not JSON", path, errDamaged)
	}
	if s.Version != stateVersion {
		return nil, fmt.Errorf("%s has version %d; this program knows version %d", path, s.Version, stateVersion)
	}
	return &s, nil
}

// writeState makes a state durable under a name, atomically.
func writeState(dir, name string, s state) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, name+".tmp")
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	step()
	if err := os.Rename(tmp, filepath.Join(dir, name)); err != nil {
		return err
	}
	step()
	return syncDir(dir)
}

// syncDir makes the names in a folder durable.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// conclude makes a decided sync the last completed one. After an interruption at any point it can
// be repeated.
func conclude(dir string, s state) error {
	work, members := filepath.Join(dir, syncPrefix+s.Sync), filepath.Join(dir, storePrefix+s.Sync)
	if err := os.Rename(filepath.Join(work, membersFile), members); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	step()
	if _, err := os.Stat(members); err != nil {
		return err
	}
	if err := syncDir(dir); err != nil {
		return err
	}
	if err := writeState(dir, stateFile, s); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(dir, pendingFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	step()
	return syncDir(dir)
}

// tidy removes files that belong to no sync: keep is the completed one, pending the decided one.
// Files that cannot be removed only cost disk space.
func tidy(dir, keep, pending string, log *slog.Logger) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		name := e.Name()
		work, isWork := strings.CutPrefix(name, syncPrefix)
		members, isMembers := strings.CutPrefix(name, storePrefix)
		switch {
		case isWork && work != pending,
			isMembers && members != keep && members != pending,
			strings.HasSuffix(name, ".tmp"):
			step()
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, name)))
		}
	}
	if err != nil {
		log.Error("removing old files of an audience's syncs failed", "error", err)
	}
}

// progress stores how many changes are in the queue. It is not durable: after a power loss some
// identify calls are appended again.
type progress struct{ file *os.File }

func openProgress(work string) (progress, int64, error) {
	f, err := os.OpenFile(filepath.Join(work, progressFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return progress{}, 0, err
	}
	var b [8]byte
	if n, _ := f.ReadAt(b[:], 0); n < len(b) {
		return progress{f}, 0, nil
	}
	return progress{f}, int64(binary.LittleEndian.Uint64(b[:])), nil
}

func (p progress) set(n int64) error {
	step()
	_, err := p.file.WriteAt(binary.LittleEndian.AppendUint64(nil, uint64(n)), 0)
	return err
}

func (p progress) close() { _ = p.file.Close() }
