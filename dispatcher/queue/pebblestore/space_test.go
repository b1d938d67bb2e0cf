package pebblestore

import (
	"errors"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// TestCompactionFailsOnFullDisk: on a full disk a compaction fails at once and frees its space,
// while a flush waits for that space.
func TestCompactionFailsOnFullDisk(t *testing.T) {
	disk := &fullFS{FS: vfs.NewMem()}
	var space atomic.Bool
	space.Store(true)
	fs := &waitForSpaceFS{FS: disk, full: func() {}, hasSpace: space.Load, stop: make(chan struct{})}
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
	eventually(t, "the flush waits", func() bool { return fs.waiting.Load() == 1 })
	disk.full.Store(false) // The end of the compaction frees space.
	if err := <-flushed; err != nil {
		t.Errorf("the flush: %v", err)
	}
}
