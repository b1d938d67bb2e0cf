package pebblestore

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
)

// Bounds and defaults of Options.
const (
	DefaultDuplicateWindow = 10 * time.Minute
	MaxDuplicateWindow     = 24 * time.Hour
	DefaultHighWater       = 0.85
)

// NoQuota as Options.MaxBytesPerSource lets one Source fill the disk up to its
// high-water mark.
const NoQuota = -1

// WriteBuffers is how many write buffers there are at most: four that hold messages, one
// that is begun, and one that is kept to be used again.
const WriteBuffers = stopWrites + 2

// stopWrites is the number of full write buffers at which writes wait for a flush.
const stopWrites = 4

// Options tune a Store. The zero value works: no duplicate detection, a quota per
// Source of half the room, and a high-water mark of 85 % of the file system.
type Options struct {
	// Logger takes what operators should know; slog.Default when nil.
	Logger *slog.Logger
	// Registerer takes the metrics posthorn_queue_*; nil for none.
	Registerer prometheus.Registerer

	// DuplicateWindow is how long a messageId is remembered, up to 24 h. 0 turns
	// the detection of duplicates off.
	DuplicateWindow time.Duration
	// DuplicateMemory bounds the memory of the filters that spare a disk read per
	// message, 16 MiB when 0: enough for 8 million messages in the window. What is
	// beyond it is looked up on disk, so detection stays exact.
	DuplicateMemory int64

	// MaxBytesPerSource bounds the bytes, before compression, that one Source's log
	// may hold until they are delivered. When 0 it is half of the room below the
	// high-water mark, where what the store holds counts as room; NoQuota is no bound.
	MaxBytesPerSource int64
	// HighWater is the share of the file system, between 0 and 1, above which
	// Append answers queue.ErrFull, whoever filled it; 0.85 when 0.
	HighWater float64
	// MinFreeBytes are the bytes of the file system that Append never touches,
	// four memtables when 0.
	MinFreeBytes int64

	// MemTableBytes is the size of a write buffer, of which there are WriteBuffers at
	// most; a small file system makes it smaller. 8 MiB when 0. The write-ahead log
	// takes as much disk.
	MemTableBytes int64
	// CacheBytes is the size of the block cache; 32 MiB when 0.
	CacheBytes int64

	// FlushInterval is how long an acknowledgement may stay in memory; 50 ms when 0.
	FlushInterval time.Duration
	// SyncInterval is how long it may stay unsynced while nothing is appended; 250 ms when 0.
	SyncInterval time.Duration
	// MaintainInterval is the time between two looks at the disk and at what can be freed; 1 s when 0.
	MaintainInterval time.Duration

	// DataDir is the folder whose size DiskBytes reports; the store's own when empty.
	DataDir string
	// Quiet is called with true after a burst, when the store gave back what it had
	// taken, so that the process can return memory to the machine, and with false
	// when the next burst begins; nil for nothing.
	Quiet func(bool)

	// FS is the file system; that of the machine when nil. For tests.
	FS vfs.FS
	// Now is the clock; when nil the machine's, which is not followed when it is set back. For tests.
	Now func() time.Time
	due func(at time.Time) time.Time
	// Fatal is called, once, when the storage engine cannot go on because a write to
	// its log failed. It must not return; it exits the process when nil. What was
	// acknowledged is safe: it is read again at the next start.
	Fatal func(error)
}

func (o *Options) setDefaults() error {
	if o.DuplicateWindow < 0 || o.DuplicateWindow > MaxDuplicateWindow {
		return fmt.Errorf("duplicate window is %v; it must be between 0 (off) and %v", o.DuplicateWindow, MaxDuplicateWindow)
	}
	if o.HighWater < 0 || o.HighWater > 1 {
		return fmt.Errorf("high-water mark is %v; it must be a share between 0 and 1", o.HighWater)
	}
	if o.MaxBytesPerSource < NoQuota || o.MinFreeBytes < 0 || o.MemTableBytes < 0 || o.CacheBytes < 0 || o.DuplicateMemory < 0 {
		return errors.New("a size in the options of the queue is negative")
	}
	set(&o.DuplicateMemory, 16<<20)
	set(&o.HighWater, DefaultHighWater)
	set(&o.MemTableBytes, 8<<20)
	set(&o.CacheBytes, 32<<20)
	set(&o.FlushInterval, 50*time.Millisecond)
	set(&o.SyncInterval, 250*time.Millisecond)
	set(&o.MaintainInterval, time.Second)
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Quiet == nil {
		o.Quiet = func(bool) {}
	}
	if o.FS == nil {
		o.FS = vfs.Default
	}
	// What a caller takes from the machine's clock is as long ahead here as there.
	o.due = func(at time.Time) time.Time { return at }
	if o.Now == nil {
		now := steady(time.Now, sinceStart)
		o.Now, o.due = now, func(at time.Time) time.Time { return now().Add(time.Until(at)) }
	}
	if o.Fatal == nil {
		o.Fatal = func(error) { os.Exit(1) }
	}
	return nil
}

func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
