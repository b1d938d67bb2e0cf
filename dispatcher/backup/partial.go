package backup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// partialMark is in the names of partial copies.
const partialMark = ".posthorn-partial-"

// partialCopy is the folder of a partial copy. Its lock shows that its process is alive, and ends with it.
type partialCopy struct {
	path string
	dir  *os.File
}

// newPartial makes a locked folder beside a target.
func newPartial(target string) (p partialCopy, err error) {
	for {
		if p.path, err = os.MkdirTemp(filepath.Dir(target), "."+filepath.Base(target)+partialMark); err != nil {
			return p, err
		}
		p.dir, err = lockFolder(p.path)
		if errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, fs.ErrNotExist) {
			continue // RemovePartial of another process is removing it.
		}
		if err != nil && p.dir == nil {
			return p, errors.Join(err, os.Remove(p.path))
		}
		return p, nil // A file system without locks never has its leftovers removed.
	}
}

func (p partialCopy) remove() {
	_ = os.RemoveAll(p.path)
	_ = p.dir.Close()
}

// lockFolder opens and locks a folder. With an error of the lock alone it also returns the open folder,
// unless another process has the lock.
func lockFolder(path string) (*os.File, error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.Join(err, dir.Close())
		}
		return dir, err
	}
	// It may have been removed before the lock.
	opened, err := dir.Stat()
	if err == nil {
		var named fs.FileInfo
		if named, err = os.Lstat(path); err == nil && !os.SameFile(opened, named) {
			err = fs.ErrNotExist
		}
	}
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// RemovePartial removes the partial copies that killed backups left beside a target, and returns their
// paths. It keeps the copies of running backups, and all on a file system without locks.
func RemovePartial(target string) (removed []string, err error) {
	all, err := os.ReadDir(filepath.Dir(target))
	if err != nil {
		return nil, nil //nolint:nilerr // Save reports it, if it matters.
	}
	var failed []error
	for _, entry := range all {
		if ours, _ := filepath.Match(".*"+partialMark+"*", entry.Name()); !ours || !entry.IsDir() {
			continue
		}
		path := filepath.Join(filepath.Dir(target), entry.Name())
		dir, err := lockFolder(path)
		if err == nil {
			if err = os.RemoveAll(path); err == nil {
				removed = append(removed, path)
			} else {
				failed = append(failed, err)
			}
		}
		if dir != nil {
			_ = dir.Close()
		}
	}
	return removed, errors.Join(failed...)
}
