// Package durable writes files that survive a power loss: a file has all of its contents, or does
// not exist, or is the one before. It is the only writer of such files outside of the engine's
// folder, whose files are written through its own file system.
package durable

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
)

// Replace writes a file, or replaces it, with the mode perm.
func Replace(path string, content []byte, perm os.FileMode) error {
	return write(path, content, perm, os.Rename)
}

// Create writes a file that must not exist; otherwise the error is os.ErrExist.
func Create(path string, content []byte, perm os.FileMode) error {
	return write(path, content, perm, os.Link)
}

// write writes a temporary file, which publish gives its name.
func write(path string, content []byte, perm os.FileMode, publish func(from, to string) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // Without effect after a rename.
	_, err = f.Write(content)
	if err := errors.Join(err, f.Chmod(perm), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := publish(f.Name(), path); err != nil {
		return err
	}
	return SyncFolder(filepath.Dir(path))
}

// SyncFolder makes the names of a folder durable. Windows has no such operation.
func SyncFolder(path string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	return Sync(os.Open(path))
}

// Sync syncs and closes a file or a folder that was opened, in any file system: Sync(fs.OpenDir(name)).
func Sync(f interface {
	Sync() error
	Close() error
}, err error) error {
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
