package storetest

import "github.com/cockroachdb/pebble/v2/vfs"

// Watch returns a file system that calls changing before each operation that changes it, and
// syncing, unless nil, before each operation that makes changes durable. A test can thus choose
// the time of a power loss.
func Watch(fs vfs.FS, changing, syncing func()) vfs.FS {
	if syncing == nil {
		syncing = func() {}
	}
	return &watchedFS{fs, changing, syncing}
}

type watchedFS struct {
	vfs.FS
	changing, syncing func()
}

func (w *watchedFS) file(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return &watchedFile{f, w}, nil
}

func (w *watchedFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	w.changing()
	return w.file(w.FS.Create(name, c))
}

func (w *watchedFS) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	w.changing()
	return w.file(w.FS.ReuseForWrite(from, to, c))
}

func (w *watchedFS) OpenDir(name string) (vfs.File, error) { return w.file(w.FS.OpenDir(name)) }

func (w *watchedFS) Rename(from, to string) error {
	w.changing()
	return w.FS.Rename(from, to)
}

func (w *watchedFS) Remove(name string) error {
	w.changing()
	return w.FS.Remove(name)
}

type watchedFile struct {
	vfs.File
	fs *watchedFS
}

func (f *watchedFile) Write(p []byte) (int, error) {
	f.fs.changing()
	return f.File.Write(p)
}

func (f *watchedFile) Sync() error {
	f.fs.changing()
	f.fs.syncing()
	return f.File.Sync()
}

func (f *watchedFile) SyncData() error {
	f.fs.changing()
	f.fs.syncing()
	return f.File.SyncData()
}

func (f *watchedFile) SyncTo(n int64) (bool, error) {
	f.fs.changing()
	return f.File.SyncTo(n)
}
