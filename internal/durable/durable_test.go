package durable

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/posthorn/posthorn/test/check"
)

// contents returns the contents of the files in a folder.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check.NoError(t, "read the folder", err)
	found := map[string]string{}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		check.NoError(t, "read a file", err)
		found[e.Name()] = string(text)
	}
	return found
}

func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for _, text := range []string{"first", "second", ""} {
		check.NoError(t, "replace", Replace(path, []byte(text), 0o640))
		check.Same(t, "files", contents(t, dir), map[string]string{"f": text})
	}
	info, err := os.Stat(path)
	check.NoError(t, "stat", err)
	check.Equal(t, "mode", info.Mode().Perm(), 0o640)
}

func TestCreate(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	check.NoError(t, "create", Create(path, []byte("first"), 0o600))
	check.ErrorIs(t, "create again", Create(path, []byte("second"), 0o600), os.ErrExist)
	check.Same(t, "files", contents(t, dir), map[string]string{"f": "first"})
}

// A file whose name cannot be changed leaves no other file.
func TestFailure(t *testing.T) {
	dir := t.TempDir()
	check.NoError(t, "make a folder", os.MkdirAll(filepath.Join(dir, "f", "inner"), 0o700))
	if err := Replace(filepath.Join(dir, "f"), []byte("text"), 0o600); err == nil {
		t.Error("replace of a folder: got no error, want one")
	}
	entries, err := os.ReadDir(dir)
	check.NoError(t, "read the folder", err)
	check.Equal(t, "files", len(entries), 1)
	check.ErrorIs(t, "replace in a missing folder", Replace(filepath.Join(dir, "missing", "f"), nil, 0o600), os.ErrNotExist)
}
