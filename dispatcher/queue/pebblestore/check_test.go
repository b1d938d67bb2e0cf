package pebblestore

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/repair"
)

// A check reads every byte of every table that a start does not read, and changes nothing.
func TestCheckFindsDamage(t *testing.T) {
	x := makeFilledStore(t, rand.New(rand.NewPCG(3, 4)))
	proceed := func() error { return nil }
	if _, _, err := Verify(x.dir); err != nil { // Its open removes the tables that compactions have replaced.
		t.Fatal(err)
	}
	if err := repair.Check(x.dir, proceed); err != nil {
		t.Errorf("sound store: got %v, want no error", err)
	}
	for _, path := range files(t, x.dir, "*.sst") {
		sound, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 10 {
			at := len(sound) * i / 10
			edit(t, path, func(b []byte) []byte { b[at] ^= 4; return b })
			if err := repair.Check(x.dir, proceed); err == nil || !strings.Contains(err.Error(), filepath.Base(path)) {
				t.Errorf("flip at byte %d of %d of %s: got %v, want an error that names the file", at, len(sound), filepath.Base(path), err)
			}
			edit(t, path, func([]byte) []byte { return sound })
		}
	}
	if err := repair.Check(x.dir, proceed); err != nil {
		t.Errorf("after the checks: got %v, want no error", err)
	}
	if _, _, err := Verify(x.dir); err != nil {
		t.Errorf("open after the checks: got %v, want no error", err)
	}
	stopped := errors.New("stopped")
	if err := repair.Check(x.dir, func() error { return stopped }); !errors.Is(err, stopped) {
		t.Errorf("stopped check: got %v, want %v", err, stopped)
	}
}

// deniedFS denies to open the files whose names have a prefix.
type deniedFS struct {
	vfs.FS
	prefix string
}

func (f deniedFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	if strings.HasPrefix(filepath.Base(name), f.prefix) {
		return nil, &os.PathError{Op: "open", Path: name, Err: os.ErrPermission}
	}
	return f.FS.Open(name, opts...)
}

// A file of another user, as root leaves it, is not reported as damage.
func TestDeniedFileIsNotDamage(t *testing.T) {
	x := makeFilledStore(t, rand.New(rand.NewPCG(5, 6)))
	for _, prefix := range []string{"MANIFEST", "0", "OPTIONS", "accepted", "clean"} {
		s, err := Open(x.dir, Options{Logger: discard, FS: deniedFS{vfs.Default, prefix}})
		if err == nil {
			_ = s.Close()
			continue
		}
		var corrupt *CorruptError
		if errors.As(err, &corrupt) || !strings.Contains(err.Error(), "must belong to the user who runs Posthorn") {
			t.Errorf("%s…: got %v, want an error about the owner of the files", prefix, err)
		}
	}
	if _, err := Open(x.dir, Options{Logger: discard, FS: deniedFS{vfs.Default, "MANIFEST"}}); err == nil {
		t.Error("denied manifest: got no error, want one")
	}
}

// noFolderFS creates no folders, as /proc.
type noFolderFS struct{ vfs.FS }

func (noFolderFS) MkdirAll(name string, _ os.FileMode) error {
	return &os.PathError{Op: "mkdir", Path: name, Err: os.ErrNotExist}
}

// A directory that cannot be created is not reported as a missing file of the store.
func TestDirectoryThatCannotBeCreated(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	s, err := Open(dir, Options{Logger: discard, FS: noFolderFS{vfs.Default}})
	if err == nil {
		_ = s.Close()
		t.Fatal("open: got no error, want one")
	}
	if want := "the directory cannot be created; use one on a writable file system: mkdir " + dir; !strings.Contains(err.Error(), want) {
		t.Errorf("open: got error %q, want %q in it", err, want)
	}
	var corrupt *CorruptError
	if errors.As(err, &corrupt) || errors.Is(err, os.ErrNotExist) {
		t.Errorf("open: got error %v, want neither damage nor a missing file", err)
	}
}
