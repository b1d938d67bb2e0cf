package pebblestore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// disk monitors the free space of the file system. Above the high-water mark Append returns
// ErrFull, long before a write can fail. Lanes continue, and the messages that they settle free
// space.
type disk struct {
	s           *Store
	maintaining sync.Mutex
	// full: Append returns ErrFull. exhausted: BuryExpired does not copy expired messages to
	// the dead letters either.
	full, exhausted atomic.Bool
	used            atomic.Int64 // Bytes of the data directory; at most MaintainInterval old.
	shares          shares
	stores          atomic.Int64 // The number of stores that share Options.MaxBytesPerSource; 0 for this one.
	unchecked       atomic.Int64 // Bytes written since the last checkSpace.
	trimmed         atomic.Int64 // Bytes that range deletions freed and that the file system did not get back yet.
	lacking         atomic.Int64 // Bytes that must become free before full ends.
	excess          atomic.Int64 // Bytes above the level at which first attempts are skipped; see skip.go.
	freedAll        atomic.Int64 // Bytes freed since the start.
	// trimBytes is an eighth of a write buffer. A trim runs after this many bytes: a message
	// that is deleted before its write buffer is flushed is never written to a table.
	trimBytes int64
	unfreed   atomic.Int64 // Bytes written since the last trim.
	trimSoon  chan struct{}
}

// checkBytes is the number of written bytes after which checkSpace runs again; flushBytes is
// the number of freed bytes after which the deleted ranges are flushed.
const (
	checkBytes = 4 << 20
	flushBytes = 64 << 20
)

func (d *disk) init(s *Store) { d.s, d.trimSoon = s, make(chan struct{}, 1) }

// memTableBytes returns the size of a write buffer. It is smaller on a small file system,
// because the write-ahead log, its recycled files and the buffers being flushed use several
// times this size.
func (d *disk) memTableBytes() int64 {
	const least = 4 << 20
	o := &d.s.o
	usage, err := o.FS.GetDiskUsage(existing(o.FS, d.s.dir))
	if err != nil {
		return o.MemTableBytes
	}
	return min(o.MemTableBytes, max(int64(usage.TotalBytes/128), least))
}

// existing returns dir, or its nearest parent directory that exists.
func existing(fs vfs.FS, dir string) string {
	for {
		if _, err := fs.Stat(dir); err == nil {
			return dir
		}
		parent := fs.PathDir(dir)
		if parent == dir {
			return dir
		}
		dir = parent
	}
}

// addWritten runs a trim and checkSpace early after many written bytes.
func (d *disk) addWritten(bytes int) {
	if d.unfreed.Add(int64(bytes)) >= d.trimBytes {
		d.unfreed.Store(0)
		select {
		case d.trimSoon <- struct{}{}:
		default:
		}
	}
	if d.unchecked.Add(int64(bytes)) >= checkBytes {
		d.checkSpace()
	}
}

func (d *disk) addFreed(bytes int64) {
	d.trimmed.Add(bytes)
	d.freedAll.Add(bytes)
}

// activity is the number of bytes that were written to the engine's logs or freed since the
// start.
func (d *disk) activity() int64 { return d.s.fs.Logged() + d.freedAll.Load() }

// checkSpace compares the file system with the marks. A file system that does not report its
// usage has no marks.
func (d *disk) checkSpace() {
	d.unchecked.Store(0)
	usage, err := d.s.o.FS.GetDiskUsage(d.s.dir)
	if err != nil {
		// Without marks, a full disk is detected by the writes that wait for space.
		if d.s.fs.Waiting() == 0 {
			d.full.Store(false)
			d.exhausted.Store(false)
		}
		d.excess.Store(0)
		d.lacking.Store(0)
		d.shares.space.Store(0)
		return
	}
	o := &d.s.o
	// The space that this process may use, as df reports it, without the blocks reserved for
	// root.
	share := float64(usage.UsedBytes) / float64(max(usage.UsedBytes+usage.AvailBytes, 1))
	free := int64(usage.AvailBytes)
	d.exhausted.Store(free < o.MinFreeBytes/2 || d.s.fs.Waiting() > 0)
	// The flushes to come write the memtables to tables, while their logs are kept for reuse.
	unflushed := int64(d.s.db.Metrics().MemTable.Size)
	// The level is below the marks by a part of the usable space, so that skipping starts
	// before calls are refused.
	total := float64(usage.UsedBytes + usage.AvailBytes)
	usable := min(int64(o.HighWater*total), int64(total)-o.MinFreeBytes-unflushed)
	d.excess.Store(int64(usage.UsedBytes) - usable + usable/skipFrom)
	if o.MaxBytesPerSource == 0 {
		d.divide(usage, unflushed)
	}
	// The mark for leaving the full state is lower than the mark for entering it, so that the
	// state does not flap.
	mark, least := o.HighWater, o.MinFreeBytes
	if d.full.Load() {
		mark, least = mark-0.01, least+least/10
	}
	d.lacking.Store(max(int64(usage.UsedBytes)-int64((o.HighWater-0.01)*total), o.MinFreeBytes+o.MinFreeBytes/10-(free-unflushed), 0))
	full := share > mark || free-unflushed < least || d.s.fs.Waiting() > 0
	if d.full.Swap(full) == full {
		return
	}
	if full {
		d.s.log.Error("disk above high-water mark; refusing new calls", "dir", d.s.dir, "used", share, "highWater", o.HighWater, "freeBytes",
			free, "unflushedBytes", unflushed, "minFreeBytes", o.MinFreeBytes)
	} else {
		d.s.log.Info("disk below high-water mark; accepting calls", "dir", d.s.dir, "used", share, "freeBytes", free)
	}
}

// divide reads the space that the namespaces share: what is below the marks and is not used by other files. The
// store's own files count as usable space, so that a backlog does not change the shares at the next start.
func (d *disk) divide(usage vfs.DiskUsage, unflushed int64) {
	o := &d.s.o
	total, used := int64(usage.UsedBytes+usage.AvailBytes), int64(usage.UsedBytes)
	usable := min(int64(o.HighWater*float64(total)), total-o.MinFreeBytes)
	d.shares.buffers.Store(reserveBuffers * 8 * d.trimBytes) // trimBytes is an eighth of a buffer.
	d.shares.free.Store(usable - used - unflushed)
	d.shares.space.Store(max(usable-max(used-d.used.Load(), 0), 1))
}

// SetStores divides Options.MaxBytesPerSource among a number of stores. A Source that has more than its part stores no
// further messages; nothing is deleted.
func (s *Store) SetStores(n int) { s.disk.stores.Store(int64(n)) }

// quota is this store's part of Options.MaxBytesPerSource.
func (s *Store) quota() int64 {
	if quota := s.o.MaxBytesPerSource; quota > 0 {
		return max(1, quota/max(1, s.disk.stores.Load()))
	}
	return s.o.MaxBytesPerSource
}

// Share returns the undelivered bytes of a Source's namespace and the share of the namespace or, with a
// configured quota, the undelivered bytes of the Source and the quota. most is 0 without a bound.
func (s *Store) Share(source string) (used, most int64) {
	if quota := s.quota(); quota != 0 {
		return s.SourceStats(source).LogBytes, max(quota, 0)
	}
	return s.disk.shares.forLog(source).used.Load(), s.disk.shares.size()
}

// spaceToFlush reports whether Close or a reclaim may write the contents of the log a second
// time, as tables.
func (d *disk) spaceToFlush() bool { return !d.exhausted.Load() }

// diskFull is called when a write fails because the disk is full.
func (s *Store) diskFull() {
	s.disk.exhausted.Store(true)
	if !s.disk.full.Swap(true) {
		s.log.Error("disk full; refusing new calls, writes wait for space", "dir", s.dir)
	}
}

// Full reports whether Append returns ErrFull because the disk is above its high-water mark.
func (s *Store) Full() bool { return s.disk.full.Load() }

// Lacking returns how many bytes must become free before a full store accepts messages again; 0 if that is not known.
func (s *Store) Lacking() int64 { return s.disk.lacking.Load() }

// runMaintenance checks the disk space and deletes the messages that no lane needs.
func (s *Store) runMaintenance() {
	tick := time.NewTicker(s.o.MaintainInterval)
	defer tick.Stop()
	s.maintain(false)
	var next time.Time // The earliest time of the next trim between two ticks.
	for {
		select {
		case <-tick.C:
			s.maintain(false)
		case <-s.disk.trimSoon:
			start := time.Now()
			if start.Before(next) {
				continue
			}
			s.trimDelivered()
			// A trim of many lanes takes long; it uses at most a sixteenth of the time.
			end := time.Now()
			next = end.Add(15 * end.Sub(start))
		case <-s.stop:
			return
		}
	}
}

// trimDelivered runs a trim between two maintenance passes.
func (s *Store) trimDelivered() {
	s.disk.maintaining.Lock()
	defer s.disk.maintaining.Unlock()
	if err := s.trim(false); err != nil {
		s.log.Error("trim of delivered messages failed; retrying", "error", s.explain(err))
	}
}

func (s *Store) maintain(all bool) {
	s.disk.maintaining.Lock()
	defer s.disk.maintaining.Unlock()
	s.disk.used.Store(s.DiskBytes())
	s.disk.checkSpace()
	total, free := s.commitLog.space()
	s.disk.shares.count(s.o.Now(), total-free)
	s.syncPositions()
	reclaim := s.reclaimDue()
	if err := errors.Join(s.trim(all || reclaim || s.disk.full.Load()), s.makeSpace(), s.eraseAllBits()); err != nil {
		s.log.Error("trim of delivered messages failed; retrying", "error", s.explain(err))
	}
	if n := s.disk.trimmed.Load(); n >= flushBytes || n > 0 && (all || s.disk.full.Load()) {
		// The engine removes files after the range deletion that covers them is flushed.
		if _, err := s.db.AsyncFlush(); err != nil {
			s.log.Error("flush of deleted ranges failed; retrying", "error", err)
			return
		}
		s.disk.trimmed.Add(-n)
	}
	if reclaim {
		s.startReclaim()
	}
}

// A log with fewer unneeded messages than trimMessages, and fewer bytes than disk.trimBytes, is
// trimmed after trimAge.
const (
	trimMessages = 4096
	trimAge      = 30 * time.Second
)

// trim deletes the messages that no lane needs. A log's head has a key of its own and is kept
// when all messages of the log are deleted.
func (s *Store) trim(all bool) error {
	var plans []trimPlan
	for _, l := range s.allLogs() {
		c, err := s.planTrim(l, all)
		if err != nil {
			return err
		}
		if c.log != nil {
			plans = append(plans, c)
		}
	}
	if len(plans) == 0 {
		return nil
	}
	// Invariant: a lane's position is written before the messages that it allows to delete are
	// deleted. Otherwise a crash in between would leave the lane without messages that it still
	// needs.
	if err := s.flushLanes(false); err != nil {
		return err
	}
	return s.freeAll(plans...)
}

// freeAll deletes the messages before the needs of plans. All reads come before all deletions: after each deletion of a
// range, the next read sorts all deleted ranges of the memtable again.
func (s *Store) freeAll(plans ...trimPlan) (err error) {
	for i := range plans {
		if err = s.measure(&plans[i]); err != nil {
			plans = plans[:i] // A damaged message does not prevent the deletion in the logs before it.
			break
		}
	}
	for _, c := range plans {
		if err := s.free(c); err != nil {
			return err
		}
	}
	return err
}

// trimPlan is what a trim deletes of a log: all messages before need.
type trimPlan struct {
	log          *sourceLog
	need         uint64
	durable      uint64
	bytesAtLeast uint64
	bytesBefore  uint64 // of the log, before the message need; set by measure
}

// planTrim returns the messages of a log that no lane needs. The plan's log is nil when they
// are too few.
func (s *Store) planTrim(l *sourceLog, all bool) (trimPlan, error) {
	// The ends are read before the lanes: a lane that is opened later starts behind them.
	bytes := l.durableBytes.Load()
	durable, trimmed := l.durable.Load(), l.trimmed.Load()
	need := durable + 1
	if need == trimmed+1 {
		return trimPlan{}, nil
	}
	var err error
	l.eachLane(func(lane *lane) {
		if err != nil {
			return
		}
		lane.mu.Lock()
		defer lane.mu.Unlock()
		first, e := s.first(lane)
		need, err = min(need, first), e
	})
	if err != nil || need <= trimmed+1 {
		return trimPlan{}, err
	}
	if count := need - 1 - trimmed; !all && count < trimMessages && bytes-l.trimmedBytes.Load() < uint64(s.disk.trimBytes) &&
		s.o.Now().Sub(l.trimTime) < trimAge {
		return trimPlan{}, nil
	}
	return trimPlan{log: l, need: need, durable: durable, bytesAtLeast: bytes}, nil
}

// measure reads how many bytes of the log are before a plan's need.
func (s *Store) measure(c *trimPlan) error {
	v, closer, err := s.db.Get(codec.Key(codec.PrefixMessage, c.log.number, c.need))
	switch {
	case err == nil:
		var r codec.Record
		err = r.Decode(v)
		_ = closer.Close()
		if err != nil {
			return s.corruptf("message %d of %s: %w", c.need, c.log.source, err)
		}
		c.bytesBefore = r.BytesBefore
	case errors.Is(err, pebble.ErrNotFound) && c.need > c.durable:
		// The log has no further message. Bytes appended since the plan are counted by the next
		// trim.
		c.bytesBefore = c.bytesAtLeast
	default:
		return fmt.Errorf("message %d of %s: %w", c.need, c.log.source, err)
	}
	return nil
}

// free deletes a log's messages before a plan's need.
func (s *Store) free(c trimPlan) error {
	l, trimmed := c.log, c.log.trimmed.Load()
	b := s.db.NewBatch()
	_ = b.DeleteRange(codec.Key(codec.PrefixMessage, l.number, trimmed+1), codec.Key(codec.PrefixMessage, l.number, c.need), nil)
	_ = b.Set(codec.Key(codec.PrefixFreed, l.number), binary.BigEndian.AppendUint64(nil, c.need-1), nil)
	if err := s.apply(b); err != nil {
		return err
	}
	freed := int64(c.bytesBefore - l.trimmedBytes.Load())
	s.disk.addFreed(freed)
	l.share.used.Add(-freed)
	l.trimmed.Store(c.need - 1)
	l.trimmedBytes.Store(c.bytesBefore)
	l.trimTime = s.o.Now()
	return nil
}

// spaceToCompact reports whether a compaction may write. Compactions leave space for messages,
// positions and range deletions.
func (d *disk) spaceToCompact() bool {
	usage, err := d.s.o.FS.GetDiskUsage(d.s.dir)
	return err != nil || int64(usage.AvailBytes) >= d.s.o.MinFreeBytes/2
}
