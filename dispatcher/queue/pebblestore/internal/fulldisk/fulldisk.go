// Package fulldisk is the file system below the storage engine: a write waits while the disk is
// full, and a compaction fails. It also reports the synced length of each log and manifest.
//
// It knows the engine's files by their category and name only, and nothing of their contents.
// The main type is FS.
package fulldisk

import (
	"errors"
	iofs "io/fs"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/wal"

	"github.com/posthorn/posthorn/internal/durable"
)

// FS is a file system whose writes wait for space while the disk is full. The engine would stop
// the process on such an error.
//
// Compactions do not wait, because two compactions could wait for each other's space without
// end. They fail, which frees their space, and the engine retries them.
type FS struct {
	vfs.FS
	o Options
	// stop is closed, once, when the store is closed; stopped is the time, in nanoseconds since
	// 1970.
	stop     chan struct{}
	stopOnce sync.Once
	stopped  atomic.Int64
	// waiting counts the writes that wait for space.
	waiting atomic.Int64
	// nextCompaction is the earliest start of the next compaction, in nanoseconds since 1970.
	nextCompaction atomic.Int64
	// logged counts the bytes written to the engine's logs.
	logged atomic.Int64
	// recycling is held while a log is renamed for reuse, and while logs are removed.
	recycling sync.Mutex
}

// Options are the callbacks of an FS; all are required and are called from many goroutines.
type Options struct {
	// Full is called for each try of a write that fails because the disk is full.
	Full func()
	// HasSpace reports whether a compaction may write.
	HasSpace func() bool
	// LogSynced is called with the duration of each sync of the engine's log.
	LogSynced func(time.Duration)
	// Journal records the synced lengths of the logs and the manifests.
	Journal Journal
}

// Journal records how far the logs and the manifests of the engine are durable.
type Journal interface {
	// Synced is called after the file was synced up to offset.
	Synced(name string, offset int64)
	// Removed is called before the file is removed or reused.
	Removed(name string)
}

// New returns a file system on fs.
func New(fs vfs.FS, o Options) *FS { return &FS{FS: fs, o: o, stop: make(chan struct{})} }

// Waiting is the number of writes that wait for space.
func (fs *FS) Waiting() int64 { return fs.waiting.Load() }

// Logged is the number of bytes written to the engine's logs.
func (fs *FS) Logged() int64 { return fs.logged.Load() }

// spaceInterval is the time between two tries of a write that waits for space; closingTries
// bounds the tries while the store is closed. The engine retries a compaction that failed for
// lack of space after compactPause.
const (
	spaceInterval = 100 * time.Millisecond
	closingTries  = 50
	compactPause  = time.Second
)

// compaction is the engine's category of the files that compactions write. Such a file checks
// the free space every compactStep bytes.
const (
	compaction  vfs.DiskWriteCategory = "pebble-compaction"
	compactStep                       = 256 << 10
	// writeAhead is the category of the engine's log, whose syncs make messages durable.
	writeAhead vfs.DiskWriteCategory = "pebble-wal"
	manifests  vfs.DiskWriteCategory = "pebble-manifest"
)

// StopWaiting bounds the present and future waits for space to closingTries tries each.
func (fs *FS) StopWaiting() {
	fs.stopOnce.Do(func() {
		fs.stopped.Store(time.Now().UnixNano())
		close(fs.stop)
	})
}

// WaitedEnough reports whether the waits since StopWaiting have taken as long as they may.
func (fs *FS) WaitedEnough() bool {
	stopped := fs.stopped.Load()
	return stopped != 0 && time.Since(time.Unix(0, stopped)) >= closingTries*spaceInterval
}

func (fs *FS) try(write func() error) error {
	err := write()
	if !IsFull(err) {
		return err
	}
	fs.waiting.Add(1)
	defer fs.waiting.Add(-1)
	for grace := closingTries; IsFull(err) && grace > 0; err = write() {
		fs.o.Full()
		select {
		case <-fs.stop:
			grace--
		default:
		}
		time.Sleep(spaceInterval)
	}
	return err
}

// IsFull reports whether an error means that the disk, or the quota of its user, is full.
func IsFull(err error) bool {
	return err != nil && (errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT))
}

func (fs *FS) file(name string, c vfs.DiskWriteCategory, open func() (vfs.File, error)) (f vfs.File, err error) {
	err = fs.try(func() error {
		f, err = open()
		return err
	})
	if err != nil {
		return nil, err
	}
	p := &file{File: f, fs: fs}
	journal := &journalFile{file: p, name: fs.PathBase(name)}
	switch c {
	case writeAhead:
		return &logFile{journalFile: journal}, nil
	case manifests:
		return journal, nil
	}
	return p, nil
}

// createCompactionFile creates an output file of a compaction.
func (fs *FS) createCompactionFile(name string) (vfs.File, error) {
	if pause := time.Until(time.Unix(0, fs.nextCompaction.Load())); pause > 0 {
		select {
		case <-time.After(pause):
		case <-fs.stop:
		}
	}
	f, err := fs.FS.Create(name, compaction)
	if err != nil {
		return nil, fs.noteCompactionError(err)
	}
	return &compactionFile{File: f, fs: fs}, nil
}

// noteCompactionError delays the next compaction after an error for lack of space.
func (fs *FS) noteCompactionError(err error) error {
	if IsFull(err) {
		fs.nextCompaction.Store(time.Now().Add(compactPause).UnixNano())
	}
	return err
}

// Create syncs the directory before it creates one of the engine's markers, which name the
// valid files: not every file system keeps the order of directory entries.
func (fs *FS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if err := fs.syncDir(name); err != nil {
		return nil, err
	}
	if c == compaction {
		return fs.createCompactionFile(name)
	}
	return fs.file(name, c, func() (vfs.File, error) { return fs.FS.Create(name, c) })
}

// OpenReadWrite waits for space as Create does.
func (fs *FS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return fs.file(name, c, func() (vfs.File, error) { return fs.FS.OpenReadWrite(name, c, opts...) })
}

// ReuseForWrite creates a new file when a reclaim removed the old one.
func (fs *FS) ReuseForWrite(oldname, newname string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.file(newname, c, func() (vfs.File, error) {
		fs.recycling.Lock()
		defer fs.recycling.Unlock()
		fs.o.Journal.Removed(fs.PathBase(oldname))
		f, err := fs.FS.ReuseForWrite(oldname, newname, c)
		if errors.Is(err, iofs.ErrNotExist) {
			return fs.FS.Create(newname, c)
		}
		return f, err
	})
}

// Link waits for space.
func (fs *FS) Link(oldname, newname string) error {
	return fs.try(func() error { return fs.FS.Link(oldname, newname) })
}

// Rename waits for space.
func (fs *FS) Rename(oldname, newname string) error {
	return fs.try(func() error { return fs.FS.Rename(oldname, newname) })
}

// MkdirAll creates directories that only their owner can access; the engine would make them
// readable for all users.
func (fs *FS) MkdirAll(dir string, _ os.FileMode) error {
	return fs.try(func() error { return fs.FS.MkdirAll(dir, 0o700) })
}

// Remove removes an old marker only after the new one is durable.
func (fs *FS) Remove(name string) error {
	if err := fs.syncDir(name); err != nil {
		return err
	}
	fs.o.Journal.Removed(fs.PathBase(name))
	return fs.FS.Remove(name)
}

// syncDir syncs the directory of a marker; the engine syncs the directory for other files.
func (fs *FS) syncDir(name string) error {
	if !strings.HasPrefix(fs.PathBase(name), "marker.") {
		return nil
	}
	return durable.Sync(fs.OpenDir(fs.PathDir(name)))
}

// Unwrap implements vfs.FS.
func (fs *FS) Unwrap() vfs.FS { return fs.FS }

type file struct {
	vfs.File
	fs *FS
}

func (f *file) Write(p []byte) (n int, err error) {
	err = f.fs.try(func() error {
		m, err := f.File.Write(p[n:])
		n += m
		return err
	})
	return n, err
}

func (f *file) WriteAt(p []byte, off int64) (n int, err error) {
	err = f.fs.try(func() error {
		m, err := f.File.WriteAt(p[n:], off+int64(n))
		n += m
		return err
	})
	return n, err
}

// Preallocate ignores a full disk, because preallocation is an optimization.
func (f *file) Preallocate(off, n int64) error {
	if err := f.File.Preallocate(off, n); !IsFull(err) {
		return err
	}
	return nil
}

// journalFile is a log or a manifest. It counts the written bytes and records the synced
// length.
type journalFile struct {
	*file
	name    string
	written int64
}

func (f *journalFile) Write(p []byte) (int, error) {
	n, err := f.file.Write(p)
	f.written += int64(n)
	return n, err
}

func (f *journalFile) Sync() error { return f.sync(f.file.Sync) }

func (f *journalFile) SyncData() error { return f.sync(f.file.SyncData) }

// sync is called only by the goroutine that writes the file.
func (f *journalFile) sync(sync func() error) error {
	end := f.written
	if err := sync(); err != nil {
		return err
	}
	f.fs.o.Journal.Synced(f.name, end)
	return nil
}

// logFile is a write-ahead log of the engine. It reports the durations of its syncs.
type logFile struct {
	*journalFile
	allocated int64
}

// logStep is the number of bytes by which a log is preallocated.
const logStep = 4 << 20

// Preallocate does nothing: the engine requests the size of a whole write buffer, even for an
// idle store.
func (*logFile) Preallocate(int64, int64) error { return nil }

func (f *logFile) Write(p []byte) (int, error) {
	for f.written+int64(len(p)) > f.allocated {
		_ = f.file.Preallocate(f.allocated, logStep) // An optimization; a write reports errors.
		f.allocated += logStep
	}
	n, err := f.journalFile.Write(p)
	f.fs.logged.Add(int64(n))
	return n, err
}

func (f *logFile) SyncData() error {
	started := time.Now()
	err := f.journalFile.SyncData()
	f.fs.o.LogSynced(time.Since(started))
	return err
}

// compactionFile is an output file of a compaction; its writes fail on a full disk.
type compactionFile struct {
	vfs.File
	fs *FS
	// unchecked is the number of bytes written since the last check of the free space.
	unchecked int
}

func (f *compactionFile) Write(p []byte) (int, error) {
	if f.unchecked += len(p); f.unchecked >= compactStep {
		f.unchecked = 0
		if !f.fs.o.HasSpace() {
			return 0, f.fs.noteCompactionError(syscall.ENOSPC)
		}
	}
	n, err := f.File.Write(p)
	return n, f.fs.noteCompactionError(err)
}

// Preallocate ignores a full disk, because preallocation is an optimization.
func (f *compactionFile) Preallocate(off, n int64) error {
	if err := f.File.Preallocate(off, n); !IsFull(err) {
		return err
	}
	return nil
}

// RemoveLogs removes the engine's logs up to a number. The engine keeps such logs for reuse,
// and ReuseForWrite creates a new file for a removed one.
func (fs *FS) RemoveLogs(dir string, newest uint64) error {
	fs.recycling.Lock()
	defer fs.recycling.Unlock()
	names, err := fs.FS.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if n, _, ok := wal.ParseLogFilename(name); ok && uint64(n) <= newest {
			if err := fs.Remove(fs.PathJoin(dir, name)); err != nil && !errors.Is(err, iofs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}
