package audience

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// Until release 0.2.0 the state of an audience was in files, in a folder of the audience:
//
//	state.json        the last completed sync
//	members-SYNC      its members
//	pending.json      a decided sync
//	sync-SYNC/        its members, changes and progress
//
// upgrade moves such a folder into the Store and the folder of the new form, in this order: the
// files get their new names, the Store gets the state, and the old folder is renamed. A crash in
// between repeats the upgrade of the folder. The old folder replaces an older state in the Store,
// which is there if release 0.2.0 made the folder after a rollback. It never replaces a newer one.
const (
	oldStateFile    = "state.json"
	oldPendingFile  = "pending.json"
	oldMembersFile  = "members"
	oldChangesFile  = "changes"
	oldProgressFile = "progress"
	upgradedSuffix  = ".upgraded"
)

// oldState is a state in a file.
type oldState struct {
	Version int    `json:"version"`
	Tenant  string `json:"tenant"`
	state
}

// upgrade upgrades the folders in root. A folder with an error is kept; failed has the errors by the
// names of the folders. cleanUp is the error of removing upgraded folders. After err nothing was
// upgraded.
func upgrade(fs vfs.FS, root, dir string, store Store) (failed map[string]error, cleanUp, err error) {
	folders, err := fs.List(root)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	values, err := store.AllMeta()
	if err != nil {
		return nil, nil, err
	}
	failed = map[string]error{}
	for _, folder := range folders {
		old := fs.PathJoin(root, folder)
		if !strings.HasSuffix(folder, upgradedSuffix) {
			if err := upgradeFolder(fs, old, dir, store, values); err != nil {
				failed[folder] = err
				continue
			}
			if err := errors.Join(fs.Rename(old, old+upgradedSuffix), syncFolder(fs, root)); err != nil {
				failed[folder] = err
				continue
			}
			old += upgradedSuffix
		}
		cleanUp = errors.Join(cleanUp, fs.RemoveAll(old))
	}
	if len(failed) == 0 && cleanUp == nil {
		cleanUp = fs.RemoveAll(root)
	}
	return failed, cleanUp, nil
}

// upgradeFolder upgrades the folder of an audience, except for its renaming. values are those of the
// store.
func upgradeFolder(fs vfs.FS, old, dir string, store Store, values map[string][]byte) error {
	done, doneErr := readOldState(fs, fs.PathJoin(old, oldStateFile))
	pending, pendingErr := readOldState(fs, fs.PathJoin(old, oldPendingFile))
	if err := errors.Join(doneErr, pendingErr); err != nil {
		return err
	}
	last := cmp.Or(pending, done)
	if last == nil {
		return nil // An interrupted first sync.
	}
	owner := name{last.Namespace, last.Name}
	if value, ok := values[owner.key()]; ok {
		current, err := decode(value)
		if err != nil {
			return err
		}
		if kept := current.last(); kept != nil && !kept.Time.Before(last.Time) {
			return nil // The store has this state, or a newer one.
		}
	}
	to := fs.PathJoin(dir, owner.folder())
	if err := makeFolder(fs, to); err != nil {
		return err
	}
	if done != nil {
		file := membersPrefix + done.Sync
		ok, err := moveFile(fs, fs.PathJoin(old, file), fs.PathJoin(to, file))
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("%s: %w: it does not exist", fs.PathJoin(old, file), errDamaged)
		}
	}
	r := stored{Done: done}
	if pending != nil {
		var err error
		if r, err = upgradePending(fs, old, to, r, pending); err != nil {
			return err
		}
	}
	if r == (stored{}) {
		return nil
	}
	if err := syncFolder(fs, to); err != nil {
		return err
	}
	return put(store.PutMetaDurable, owner, r)
}

// upgradePending adds the decided sync of an old folder to a state.
func upgradePending(fs vfs.FS, old, to string, r stored, pending *state) (stored, error) {
	work := fs.PathJoin(old, workPrefix+pending.Sync)
	changes, err := moveFile(fs, fs.PathJoin(work, oldChangesFile), fs.PathJoin(to, changesPrefix+pending.Sync))
	if err != nil {
		return r, err
	}
	target := fs.PathJoin(to, membersPrefix+pending.Sync)
	members, err := moveFile(fs, fs.PathJoin(work, oldMembersFile), target)
	if err == nil && !members { // The sync was nearly complete.
		members, err = moveFile(fs, fs.PathJoin(old, membersPrefix+pending.Sync), target)
		changes = false
	}
	switch {
	case err != nil:
		return r, err
	case changes:
		r.Pending, r.Sent = pending, readOldProgress(fs, fs.PathJoin(work, oldProgressFile))
	case members: // Every call is in the queue.
		r.Done = pending
	}
	return r, nil // Without files the sync was cancelled.
}

// moveFile renames a file, if an interrupted upgrade has not done so; ok is false if there is none.
func moveFile(fs vfs.FS, from, to string) (ok bool, err error) {
	if err := fs.Rename(from, to); err == nil || !errors.Is(err, os.ErrNotExist) {
		return err == nil, err
	}
	_, err = fs.Stat(to)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

func readOldState(fs vfs.FS, path string) (*state, error) {
	text, err := readFile(fs, path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var s oldState
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, fmt.Errorf("%s: %w: not JSON", path, errDamaged)
	}
	if s.Version != 1 {
		return nil, fmt.Errorf("%s has version %d; this program knows version 1", path, s.Version)
	}
	s.Namespace = s.Tenant
	return &s.state, nil
}

// readOldProgress returns how many changes are in the queue; 0 if it is unknown.
func readOldProgress(fs vfs.FS, path string) int64 {
	text, err := readFile(fs, path)
	if err != nil || len(text) < 8 {
		return 0
	}
	return int64(binary.LittleEndian.Uint64(text))
}

func readFile(fs vfs.FS, path string) ([]byte, error) {
	f, err := fs.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(f)
}
