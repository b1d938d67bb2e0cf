package fulldisk

import (
	"errors"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/test/wait"
)

// diskFS is a file system without space while full is set.
type diskFS struct {
	vfs.FS
	full atomic.Bool
}

func (f *diskFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	file, err := f.FS.Create(name, c)
	return &diskFile{file, f}, err
}

type diskFile struct {
	vfs.File
	fs *diskFS
}

func (f *diskFile) Write(b []byte) (int, error) {
	if f.fs.full.Load() {
		return 0, syscall.ENOSPC
	}
	return f.File.Write(b)
}

// TestCompactionFailsOnFullDisk: on a full disk a compaction fails at once and frees its space,
// while a flush waits for that space.
func TestCompactionFailsOnFullDisk(t *testing.T) {
	disk := &diskFS{FS: vfs.NewMem()}
	var space atomic.Bool
	space.Store(true)
	fs := New(disk, Options{Full: func() {}, HasSpace: space.Load})
	output, err := fs.Create("1.sst", compaction)
	if err != nil {
		t.Fatal(err)
	}
	flush, err := fs.Create("2.sst", "pebble-memtable-flush")
	if err != nil {
		t.Fatal(err)
	}
	block := make([]byte, compactStep)
	if _, err := output.Write(block); err != nil {
		t.Errorf("with space: %v", err)
	}
	space.Store(false)
	if _, err := output.Write(block); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("with little space a compaction continues to write: %v", err)
	}
	space.Store(true)
	disk.full.Store(true)
	if _, err := output.Write(block[:10]); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("without space a compaction continues to write: %v", err)
	}
	flushed := make(chan error)
	go func() {
		_, err := flush.Write(block)
		flushed <- err
	}()
	for limit := time.Now().Add(wait.Limit); fs.Waiting() != 1; time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatal("timeout: the flush does not wait")
		}
	}
	disk.full.Store(false) // The end of the compaction frees space.
	if err := <-flushed; err != nil {
		t.Errorf("the flush: %v", err)
	}
}
