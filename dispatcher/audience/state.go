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
//	state.json        the last sync that is done, and which file holds its members
//	members-SYNC      members, sorted
//	pending.json      a sync that is decided and not done: from the moment that
//	                  this file has its name the sync will be carried through
//	sync-SYNC/        what a sync works with: runs, and then
//	  members         the new members
//	  changes         whom identify calls are for
//	  progress        how many of them are in the queue
//
// What no other file names is left over from a sync that broke off; it is
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

// step is called between any two changes of the files, and does nothing: tests
// crash there.
var step = func() {}

// state is a sync that is done or decided.
type state struct {
	Version int    `json:"version"`
	Tenant  string `json:"tenant"`
	Name    string `json:"name"`
	// Source, Key and Kind are those of the sync; members under others are not the audience's.
	Source string `json:"source"`
	Key    string `json:"key"`
	Kind   string `json:"kind"`
	// Sync names the sync, and the files.
	Sync string    `json:"sync"`
	Time time.Time `json:"time"`
	Counts
}

// of reports whether the members are those of an audience as it is configured now.
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

// writeState makes a state durable under a name, as a whole or not at all.
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

// conclude makes a decided sync the last one that is done. It may be repeated
// from any point at which it was interrupted.
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

// tidy removes what belongs to no sync: keep is the one that is done, pending
// the one that is decided. What stays costs room and nothing else.
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
		log.Error("what is left of an audience's syncs cannot be removed", "error", err)
	}
}

// progress remembers how many changes are in the queue. It is not made durable:
// after a power loss some identify calls are appended once more.
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
