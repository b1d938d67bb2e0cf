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

// NoQuota allows, as Options.MaxBytesPerSource, one Source to fill the disk up to its
// high-water mark.
const NoQuota = -1

// WriteBuffers is the maximum number of write buffers: stopWrites full ones, the active one,
// and one that is kept for reuse.
const WriteBuffers = stopWrites + 2

// stopWrites is the number of full write buffers at which writes wait for a flush.
const stopWrites = 4

// Options configure a Store. The zero value works: no duplicate detection, shares of the usable space for the
// namespaces, and a high-water mark of 85 % of the file system.
type Options struct {
	// Logger is the destination of log messages; slog.Default when nil.
	Logger *slog.Logger
	// Registerer registers the metrics posthorn_queue_*; nil for none.
	Registerer prometheus.Registerer

	// DuplicateWindow is the time for which a messageId is kept to detect duplicates, up to
	// 24 h. 0 disables the detection.
	DuplicateWindow time.Duration
	// DuplicateMemory bounds the memory of the filters that avoid a disk read per message,
	// 16 MiB when 0: enough for 8 million messages in the window. IDs without a filter are looked
	// up on disk, so the detection remains exact.
	DuplicateMemory int64

	// MaxBytesPerSource bounds the bytes, before compression, of one Source's undelivered
	// messages; NoQuota means no bound. With 0 the namespaces share the space below the
	// high-water mark that other files do not use; see shares.
	MaxBytesPerSource int64
	// HighWater is the share of the file system, between 0 and 1, above which Append returns
	// queue.ErrFull, also when other files use the space; 0.85 when 0.
	HighWater float64
	// MinFreeBytes are the free bytes of the file system below which Append returns
	// queue.ErrFull; four write buffers when 0.
	MinFreeBytes int64

	// MemTableBytes is the size of a write buffer; 8 MiB when 0, and less on a small file
	// system. At most WriteBuffers of them exist. The write-ahead log uses as much disk.
	MemTableBytes int64
	// CacheBytes is the size of the block cache; 32 MiB when 0.
	CacheBytes int64
	// Shared are the block cache, the open tables and the compactions of several stores; nil for a store that
	// shares none. CacheBytes is not used with it.
	Shared *Shared

	// FlushInterval is how long an acknowledgement may be in memory only; 50 ms when 0.
	FlushInterval time.Duration
	// SyncInterval is how long a write may be unsynced while nothing is appended; 250 ms when
	// 0.
	SyncInterval time.Duration
	// MaintainInterval is the time between two maintenance passes; 1 s when 0. A pass checks
	// the disk space and deletes unneeded messages.
	MaintainInterval time.Duration

	// DataDir is the directory whose size DiskBytes reports; the store's own when empty.
	DataDir string
	// Quiet, if not nil, is called with true after a burst, when the store has released its
	// unneeded memory and disk space, so that the process can return memory to the system. It
	// is called with false when the next burst begins.
	Quiet func(bool)

	// Log, when not nil, makes all writes durable in place of the engine's write-ahead log. The
	// files then lack the newest writes after a crash; OpenReplica restores them.
	Log Log

	// FS is the file system, replaced by tests; the operating system's when nil.
	FS vfs.FS
	// Now is the clock, replaced by tests. When nil, it is the system clock, except that it
	// never moves backwards.
	Now func() time.Time
	due func(at time.Time) time.Time
	// Fatal is called, once, when the storage engine cannot write to its log. It must not
	// return; when nil, it exits the process. Acknowledged messages are safe: the next start
	// reads them from the log.
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
	// A time that a caller derives from the system clock is converted, so that it is as far
	// ahead on the store's clock.
	o.due = func(at time.Time) time.Time { return at }
	if o.Now == nil {
		now := monotonicClock(time.Now, sinceStart)
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
