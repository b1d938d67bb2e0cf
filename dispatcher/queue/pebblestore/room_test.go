package pebblestore

import (
	"errors"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// TestCompactionGivesWay: on a full disk a compaction fails at once, so that its
// room comes back, while a flush waits for just that room.
func TestCompactionGivesWay(t *testing.T) {
	disk := &fullFS{FS: vfs.NewMem()}
	var room atomic.Bool
	room.Store(true)
	fs := &patientFS{FS: disk, full: func() {}, room: room.Load, stop: make(chan struct{})}
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
		t.Errorf("with room: %v", err)
	}
	room.Store(false)
	if _, err := output.Write(block); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("with little room a compaction writes on: %v", err)
	}
	room.Store(true)
	disk.full.Store(true)
	if _, err := output.Write(block[:10]); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("without room a compaction writes on: %v", err)
	}
	flushed := make(chan error)
	go func() {
		_, err := flush.Write(block)
		flushed <- err
	}()
	eventually(t, "the flush waits", func() bool { return fs.waiting.Load() == 1 })
	disk.full.Store(false) // What the compaction's end gives.
	if err := <-flushed; err != nil {
		t.Errorf("the flush: %v", err)
	}
}
