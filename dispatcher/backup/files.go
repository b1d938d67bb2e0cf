package backup

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/posthorn/posthorn/internal/durable"
)

// FreeBytes returns the free bytes of the file system of a folder.
type FreeBytes func(dir string) (int64, error)

// Save writes an archive to a target that must not exist: a tar file if its name ends in .tar,
// otherwise a folder. The target appears only when it is whole and durable; until then its
// contents have another name, with ".posthorn-partial-".
func Save(r io.Reader, target string, free FreeBytes) (index Index, err error) {
	target = filepath.Clean(target)
	if err := CheckTarget(target); err != nil {
		return index, err
	}
	parent := filepath.Dir(target)
	partial, err := newPartial(target)
	if err != nil {
		return index, err
	}
	defer partial.remove()
	if strings.HasSuffix(target, ".tar") {
		return index, saveFile(r, target, filepath.Join(partial.path, "tar"), &index, free)
	}
	if index, err = Extract(r, partial.path, free); err != nil {
		return index, err
	}
	// Rename replaces an empty folder, but no other.
	if err := os.Rename(partial.path, target); err != nil {
		return index, err
	}
	return index, durable.SyncFolder(parent)
}

// CheckTarget returns an error if a target exists.
func CheckTarget(target string) error {
	if _, err := os.Lstat(target); err == nil {
		return fmt.Errorf("%s exists; use another name", target)
	}
	return nil
}

// IsInside reports whether a file, which need not exist, is in a folder or below it.
func IsInside(file, dir string) (bool, error) {
	folder, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	at, err := filepath.Abs(filepath.Dir(file))
	if err != nil {
		return false, err
	}
	if at, err = filepath.EvalSymlinks(at); err != nil {
		return false, err
	}
	for {
		info, err := os.Stat(at)
		if err != nil {
			return false, err
		}
		if os.SameFile(info, folder) {
			return true, nil
		}
		if at == filepath.Dir(at) {
			return false, nil
		}
		at = filepath.Dir(at)
	}
}

func saveFile(r io.Reader, target, partial string, index *Index, free FreeBytes) error {
	f, err := os.OpenFile(partial, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	*index, err = Read(io.TeeReader(r, f), spaceCheck{filepath.Dir(target), free})
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := publish(partial, target, os.Link); err != nil {
		return err
	}
	return durable.SyncFolder(filepath.Dir(target))
}

// publish gives a file its name unless that exists. Unlike a rename, a link does not replace a file.
// On a file system without links an empty file reserves the name; a crash in between leaves it.
func publish(partial, target string, link func(from, to string) error) error {
	err := link(partial, target)
	if err == nil || !withoutLinks(err) {
		return err
	}
	f, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Rename(partial, target))
}

// Extract writes the files of an archive to an existing folder, durably.
func Extract(r io.Reader, dir string, free FreeBytes) (Index, error) {
	index, err := Read(r, folder{spaceCheck{dir, free}})
	if err != nil {
		return index, err
	}
	err = filepath.WalkDir(dir, func(p string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return err
		}
		return durable.SyncFolder(p)
	})
	return index, err
}

// Open returns the archive in a tar file or a folder.
func Open(from string) (io.ReadCloser, error) {
	info, err := os.Stat(from)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return os.Open(from)
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(Pack(from, w)) }()
	return r, nil
}

// spaceCheck is a Sink that discards the files.
type spaceCheck struct {
	dir  string
	free FreeBytes
}

// spareBytes and a twentieth of the archive remain free: the headers of the archive, and the other
// programs.
const spareBytes = 16 << 20

func (s spaceCheck) Start(index Index) error {
	free, err := s.free(s.dir)
	if err != nil {
		return err
	}
	if need := index.Bytes + index.Bytes/20 + spareBytes; free < need {
		return fmt.Errorf("%s has %d bytes of free space, but the backup needs %d; free space or use another file system", s.dir, free, need)
	}
	return nil
}

func (spaceCheck) Create(string) (io.WriteCloser, error) { return discard{io.Discard}, nil }

type discard struct{ io.Writer }

func (discard) Close() error { return nil }

// folder is a Sink that writes the files to a folder.
type folder struct{ spaceCheck }

func (s folder) Create(name string) (io.WriteCloser, error) {
	file := filepath.Join(s.dir, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	return syncedFile{f}, err
}

type syncedFile struct{ *os.File }

func (f syncedFile) Close() error { return errors.Join(f.Sync(), f.File.Close()) }
