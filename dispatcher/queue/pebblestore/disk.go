package pebblestore

import (
	"encoding/binary"
	"errors"
	"fmt"
	iofs "io/fs"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
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
	quota           atomic.Int64 // Bound of one Source's log in bytes; 0 for none.
	unchecked       atomic.Int64 // Bytes written since the last checkSpace.
	trimmed         atomic.Int64 // Bytes that range deletions freed and that the file system did not get back yet.
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
func (d *disk) activity() int64 { return d.s.fs.logged.Load() + d.freedAll.Load() }

// checkSpace compares the file system with the marks. A file system that does not report its
// usage has no marks.
func (d *disk) checkSpace() {
	d.unchecked.Store(0)
	usage, err := d.s.o.FS.GetDiskUsage(d.s.dir)
	if err != nil {
		// Without marks, a full disk is detected by the writes that wait for space.
		if d.s.fs.waiting.Load() == 0 {
			d.full.Store(false)
			d.exhausted.Store(false)
		}
		d.excess.Store(0)
		return
	}
	o := &d.s.o
	d.setQuota(usage)
	// The space that this process may use, as df reports it, without the blocks reserved for
	// root.
	share := float64(usage.UsedBytes) / float64(max(usage.UsedBytes+usage.AvailBytes, 1))
	free := int64(usage.AvailBytes)
	d.exhausted.Store(free < o.MinFreeBytes/2 || d.s.fs.waiting.Load() > 0)
	// The flushes to come write the memtables to tables, while their logs are kept for reuse.
	unflushed := int64(d.s.db.Metrics().MemTable.Size)
	// The level is below the marks by a part of the usable space, so that skipping starts
	// before calls are refused.
	total := float64(usage.UsedBytes + usage.AvailBytes)
	usable := min(int64(o.HighWater*total), int64(total)-o.MinFreeBytes-unflushed)
	d.excess.Store(int64(usage.UsedBytes) - usable + usable/skipDivisor)
	// The mark for leaving the full state is lower than the mark for entering it, so that the
	// state does not flap.
	mark, least := o.HighWater, o.MinFreeBytes
	if d.full.Load() {
		mark, least = mark-0.01, least+least/10
	}
	full := share > mark || free-unflushed < least || d.s.fs.waiting.Load() > 0
	if d.full.Swap(full) == full {
		return
	}
	if full {
		d.s.log.Error("disk above high-water mark; refusing new calls", "dir", d.s.dir, "used", share, "highWater", o.HighWater, "freeBytes", free, "unflushedBytes", unflushed, "minFreeBytes", o.MinFreeBytes)
	} else {
		d.s.log.Info("disk below high-water mark; accepting calls", "dir", d.s.dir, "used", share, "freeBytes", free)
	}
}

// setQuota derives the quota of a Source from the file system: half of the space below the
// high-water mark that other files do not use. The store's own files count as usable space, so
// that a backlog does not lower the quota at the next start. A configured quota is not changed.
func (d *disk) setQuota(usage vfs.DiskUsage) {
	o := &d.s.o
	if o.MaxBytesPerSource == 0 {
		others := int64(usage.UsedBytes) - d.used.Load()
		usable := int64(o.HighWater*float64(usage.UsedBytes+usage.AvailBytes)) - max(others, 0)
		d.quota.Store(max(usable/2, o.MinFreeBytes, 1))
	}
}

// SourceQuota is the number of bytes of undelivered messages that one Source may have; 0 means
// no bound.
func (s *Store) SourceQuota() int64 { return s.disk.quota.Load() }

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
	if err := s.flushLanes(pebble.NoSync); err != nil {
		return err
	}
	for _, c := range plans {
		if err := s.free(c); err != nil {
			return err
		}
	}
	return nil
}

// trimPlan is what a trim deletes of a log: all messages before need.
type trimPlan struct {
	log          *sourceLog
	need         uint64
	durable      uint64
	bytesAtLeast uint64
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
	if count := need - 1 - trimmed; !all && count < trimMessages && bytes-l.trimmedBytes.Load() < uint64(s.disk.trimBytes) && s.o.Now().Sub(l.trimTime) < trimAge {
		return trimPlan{}, nil
	}
	return trimPlan{l, need, durable, bytes}, nil
}

// free deletes a log's messages before a plan's need.
func (s *Store) free(c trimPlan) error {
	l, trimmed := c.log, c.log.trimmed.Load()
	var r record
	v, closer, err := s.db.Get(key(prefixMessage, l.number, c.need))
	switch {
	case err == nil:
		err = r.decode(v)
		_ = closer.Close()
		if err != nil {
			return s.corruptf("message %d of %s: %w", c.need, l.source, err)
		}
	case errors.Is(err, pebble.ErrNotFound) && c.need > c.durable:
		// The log has no further message. Bytes appended since the plan are counted by the next
		// trim.
		r.bytesBefore = c.bytesAtLeast
	default:
		return fmt.Errorf("message %d of %s: %w", c.need, l.source, err)
	}
	b := s.db.NewBatch()
	_ = b.DeleteRange(key(prefixMessage, l.number, trimmed+1), key(prefixMessage, l.number, c.need), nil)
	_ = b.Set(key(prefixFreed, l.number), binary.BigEndian.AppendUint64(nil, c.need-1), nil)
	if err := s.apply(b); err != nil {
		return err
	}
	s.disk.addFreed(int64(r.bytesBefore - l.trimmedBytes.Load()))
	l.trimmed.Store(c.need - 1)
	l.trimmedBytes.Store(r.bytesBefore)
	l.trimTime = s.o.Now()
	return nil
}

// spaceToCompact reports whether a compaction may write. Compactions leave space for messages,
// positions and range deletions.
func (d *disk) spaceToCompact() bool {
	usage, err := d.s.o.FS.GetDiskUsage(d.s.dir)
	return err != nil || int64(usage.AvailBytes) >= d.s.o.MinFreeBytes/2
}

// waitForSpaceFS is a file system whose writes wait for space while the disk is full. The
// engine would stop the process on such an error.
//
// Compactions do not wait, because two compactions could wait for each other's space without
// end. They fail, which frees their space, and the engine retries them.
type waitForSpaceFS struct {
	vfs.FS
	full     func()
	hasSpace func() bool
	// stop is closed, once, when the store is closed.
	stop     chan struct{}
	stopOnce sync.Once
	// waiting counts the writes that wait for space.
	waiting atomic.Int64
	// nextCompaction is the earliest start of the next compaction, in nanoseconds since 1970.
	nextCompaction atomic.Int64
	// synced is called with the duration of each sync of the engine's log.
	synced func(time.Duration)
	// positions are the synced positions of the logs and the manifest.
	positions syncedFiles
	// logged counts the bytes written to the engine's logs.
	logged atomic.Int64
	// recycling is held while a log is renamed for reuse, and while logs are removed.
	recycling sync.Mutex
}

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

// stopWaiting bounds the present and future waits for space to closingTries tries each.
func (fs *waitForSpaceFS) stopWaiting() { fs.stopOnce.Do(func() { close(fs.stop) }) }

func (fs *waitForSpaceFS) try(write func() error) error {
	err := write()
	if !isFull(err) {
		return err
	}
	fs.waiting.Add(1)
	defer fs.waiting.Add(-1)
	for grace := closingTries; isFull(err) && grace > 0; err = write() {
		fs.full()
		select {
		case <-fs.stop:
			grace--
		default:
		}
		time.Sleep(spaceInterval)
	}
	return err
}

func isFull(err error) bool {
	return err != nil && (errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT))
}

func (fs *waitForSpaceFS) file(name string, c vfs.DiskWriteCategory, open func() (vfs.File, error)) (f vfs.File, err error) {
	err = fs.try(func() error {
		f, err = open()
		return err
	})
	if err != nil {
		return nil, err
	}
	p := &waitForSpaceFile{File: f, fs: fs}
	journal := &journalFile{waitForSpaceFile: p, name: fs.PathBase(name)}
	switch c {
	case writeAhead:
		return &logFile{journalFile: journal}, nil
	case manifests:
		return journal, nil
	}
	return p, nil
}

// createCompactionFile creates an output file of a compaction.
func (fs *waitForSpaceFS) createCompactionFile(name string) (vfs.File, error) {
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
func (fs *waitForSpaceFS) noteCompactionError(err error) error {
	if isFull(err) {
		fs.nextCompaction.Store(time.Now().Add(compactPause).UnixNano())
	}
	return err
}

// Create syncs the directory before it creates one of the engine's markers, which name the
// valid files: not every file system keeps the order of directory entries.
func (fs *waitForSpaceFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if err := fs.syncDir(name); err != nil {
		return nil, err
	}
	if c == compaction {
		return fs.createCompactionFile(name)
	}
	return fs.file(name, c, func() (vfs.File, error) { return fs.FS.Create(name, c) })
}

func (fs *waitForSpaceFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return fs.file(name, c, func() (vfs.File, error) { return fs.FS.OpenReadWrite(name, c, opts...) })
}

// ReuseForWrite creates a new file when a reclaim removed the old one.
func (fs *waitForSpaceFS) ReuseForWrite(oldname, newname string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.file(newname, c, func() (vfs.File, error) {
		fs.recycling.Lock()
		defer fs.recycling.Unlock()
		fs.positions.removed(fs.PathBase(oldname))
		f, err := fs.FS.ReuseForWrite(oldname, newname, c)
		if errors.Is(err, iofs.ErrNotExist) {
			return fs.FS.Create(newname, c)
		}
		return f, err
	})
}

func (fs *waitForSpaceFS) Link(oldname, newname string) error {
	return fs.try(func() error { return fs.FS.Link(oldname, newname) })
}

func (fs *waitForSpaceFS) Rename(oldname, newname string) error {
	return fs.try(func() error { return fs.FS.Rename(oldname, newname) })
}

// MkdirAll creates directories that only their owner can access; the engine would make them
// readable for all users.
func (fs *waitForSpaceFS) MkdirAll(dir string, _ os.FileMode) error {
	return fs.try(func() error { return fs.FS.MkdirAll(dir, 0o700) })
}

// Remove removes an old marker only after the new one is durable.
func (fs *waitForSpaceFS) Remove(name string) error {
	if err := fs.syncDir(name); err != nil {
		return err
	}
	fs.positions.removed(fs.PathBase(name))
	return fs.FS.Remove(name)
}

// syncDir syncs the directory of a marker; the engine syncs the directory for other files.
func (fs *waitForSpaceFS) syncDir(name string) error {
	if !strings.HasPrefix(fs.PathBase(name), "marker.") {
		return nil
	}
	dir, err := fs.OpenDir(fs.PathDir(name))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// Unwrap implements vfs.FS.
func (fs *waitForSpaceFS) Unwrap() vfs.FS { return fs.FS }

type waitForSpaceFile struct {
	vfs.File
	fs *waitForSpaceFS
}

func (f *waitForSpaceFile) Write(p []byte) (n int, err error) {
	err = f.fs.try(func() error {
		m, err := f.File.Write(p[n:])
		n += m
		return err
	})
	return n, err
}

func (f *waitForSpaceFile) WriteAt(p []byte, off int64) (n int, err error) {
	err = f.fs.try(func() error {
		m, err := f.File.WriteAt(p[n:], off+int64(n))
		n += m
		return err
	})
	return n, err
}

// Preallocate ignores a full disk, because preallocation is an optimization.
func (f *waitForSpaceFile) Preallocate(off, n int64) error {
	if err := f.File.Preallocate(off, n); !isFull(err) {
		return err
	}
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
		_ = f.waitForSpaceFile.Preallocate(f.allocated, logStep) // An optimization; a write reports errors.
		f.allocated += logStep
	}
	n, err := f.journalFile.Write(p)
	f.fs.logged.Add(int64(n))
	return n, err
}

func (f *logFile) SyncData() error {
	started := time.Now()
	err := f.journalFile.SyncData()
	f.fs.synced(time.Since(started))
	return err
}

// compactionFile is an output file of a compaction; its writes fail on a full disk.
type compactionFile struct {
	vfs.File
	fs *waitForSpaceFS
	// unchecked is the number of bytes written since the last check of the free space.
	unchecked int
}

func (f *compactionFile) Write(p []byte) (int, error) {
	if f.unchecked += len(p); f.unchecked >= compactStep {
		f.unchecked = 0
		if !f.fs.hasSpace() {
			return 0, f.fs.noteCompactionError(syscall.ENOSPC)
		}
	}
	n, err := f.File.Write(p)
	return n, f.fs.noteCompactionError(err)
}

// Preallocate ignores a full disk, because preallocation is an optimization.
func (f *compactionFile) Preallocate(off, n int64) error {
	if err := f.File.Preallocate(off, n); !isFull(err) {
		return err
	}
	return nil
}
