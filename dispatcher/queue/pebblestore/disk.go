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

// disk watches the room on the file system. Append is refused above the
// high-water mark, long before a write could fail; lanes go on, and what they
// settle gives room again.
type disk struct {
	s           *Store
	maintaining sync.Mutex
	// full: Append is refused. exhausted: expired messages are not copied to the
	// dead letters either.
	full, exhausted atomic.Bool
	used            atomic.Int64 // By the data folder; at most a second old.
	quota           atomic.Int64 // Of one Source's log; 0 for none.
	unseen          atomic.Int64 // Bytes written since the last look.
	trimmed         atomic.Int64 // Bytes freed by ranges, and not given back to the file system yet.
	excess          atomic.Int64 // Bytes above the point from which first attempts give way; see skip.go.
	freedAll        atomic.Int64 // Bytes ever freed.
	// trimBytes is an eighth of a write buffer. After so many bytes delivered messages
	// are freed: what is freed before its buffer is flushed is never written to a table.
	trimBytes int64
	unfreed   atomic.Int64 // Bytes written since delivered messages were last freed.
	trimSoon  chan struct{}
}

// Bytes after which the next look at the disk is due, and after which freed ranges are compacted.
const (
	lookBytes  = 4 << 20
	flushBytes = 64 << 20
)

func (d *disk) init(s *Store) { d.s, d.trimSoon = s, make(chan struct{}, 1) }

// memTableBytes is the size of a write buffer. On a small file system it is
// smaller: its log, its recycled logs and the buffers being flushed take a few times as much.
func (d *disk) memTableBytes() int64 {
	const least = 4 << 20
	o := &d.s.o
	usage, err := o.FS.GetDiskUsage(existing(o.FS, d.s.dir))
	if err != nil {
		return o.MemTableBytes
	}
	return min(o.MemTableBytes, max(int64(usage.TotalBytes/128), least))
}

// existing is the nearest directory that is there.
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

// wrote has a look taken, and delivered messages freed, early when much was written
// since the last time.
func (d *disk) wrote(bytes int) {
	if d.unfreed.Add(int64(bytes)) >= d.trimBytes {
		d.unfreed.Store(0)
		select {
		case d.trimSoon <- struct{}{}:
		default:
		}
	}
	if d.unseen.Add(int64(bytes)) >= lookBytes {
		d.look()
	}
}

func (d *disk) freed(bytes int64) {
	d.trimmed.Add(bytes)
	d.freedAll.Add(bytes)
}

// activity is all that was ever written to the engine's logs and freed.
func (d *disk) activity() int64 { return d.s.fs.logged.Load() + d.freedAll.Load() }

// look compares the file system with the marks. File systems that cannot tell have no marks.
func (d *disk) look() {
	d.unseen.Store(0)
	usage, err := d.s.o.FS.GetDiskUsage(d.s.dir)
	if err != nil {
		// It has no marks; a full disk is over when no write waits for room.
		if d.s.fs.waiting.Load() == 0 {
			d.full.Store(false)
			d.exhausted.Store(false)
		}
		d.excess.Store(0)
		return
	}
	o := &d.s.o
	d.setQuota(usage)
	// Of what this process may use, like df: blocks reserved for root are not counted.
	share := float64(usage.UsedBytes) / float64(max(usage.UsedBytes+usage.AvailBytes, 1))
	free := int64(usage.AvailBytes)
	d.exhausted.Store(free < o.MinFreeBytes/2 || d.s.fs.waiting.Load() > 0)
	// Below the marks, by a part of the room, so that there is room before calls are refused.
	total := float64(usage.UsedBytes + usage.AvailBytes)
	room := min(int64(o.HighWater*total), int64(total)-o.MinFreeBytes)
	d.excess.Store(int64(usage.UsedBytes) - room + room/relief)
	// It takes a little more room to come back than it took to stop.
	mark, least := o.HighWater, o.MinFreeBytes
	if d.full.Load() {
		mark, least = mark-0.01, least+least/10
	}
	full := share > mark || free < least || d.s.fs.waiting.Load() > 0
	if d.full.Swap(full) == full {
		return
	}
	if full {
		d.s.log.Error("the disk is above the high-water mark: refusing new calls until there is space", "dir", d.s.dir, "used", share, "highWater", o.HighWater, "freeBytes", free, "minFreeBytes", o.MinFreeBytes)
	} else {
		d.s.log.Info("the disk has space again: accepting calls", "dir", d.s.dir, "used", share, "freeBytes", free)
	}
}

// setQuota follows the size of the file system, and what others than the store
// keep on it, unless the quota is a given number. What the store holds itself
// counts as room: a backlog must not lower the quota at the next start.
func (d *disk) setQuota(usage vfs.DiskUsage) {
	o := &d.s.o
	if o.MaxBytesPerSource == 0 {
		others := int64(usage.UsedBytes) - d.used.Load()
		room := int64(o.HighWater*float64(usage.UsedBytes+usage.AvailBytes)) - max(others, 0)
		d.quota.Store(max(room/2, o.MinFreeBytes, 1))
	}
}

// SourceQuota is how many bytes of undelivered messages one Source may keep; 0 is no bound.
func (s *Store) SourceQuota() int64 { return s.disk.quota.Load() }

// roomToFlush reports whether Close or a reclaim may write what the log already holds a second time.
func (d *disk) roomToFlush() bool { return !d.exhausted.Load() }

// diskFull is called when a write met a full disk.
func (s *Store) diskFull() {
	s.disk.exhausted.Store(true)
	if !s.disk.full.Swap(true) {
		s.log.Error("the disk is full: refusing new calls; writes wait for space", "dir", s.dir)
	}
}

// Full tells whether Append is refused because the disk is above its high-water mark.
func (s *Store) Full() bool { return s.disk.full.Load() }

// runMaintenance looks at the disk and frees what no lane needs.
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
			// With many lanes a trim takes long: at most a sixteenth of the time is for it.
			end := time.Now()
			next = end.Add(15 * end.Sub(start))
		case <-s.stop:
			return
		}
	}
}

// trimDelivered frees delivered messages between two looks at the disk.
func (s *Store) trimDelivered() {
	s.disk.maintaining.Lock()
	defer s.disk.maintaining.Unlock()
	if err := s.trim(false); err != nil {
		s.log.Error("freeing delivered messages failed; retrying", "error", s.explain(err))
	}
}

func (s *Store) maintain(all bool) {
	s.disk.maintaining.Lock()
	defer s.disk.maintaining.Unlock()
	s.disk.used.Store(s.DiskBytes())
	s.disk.look()
	s.syncPositions()
	reclaim := s.reclaimDue()
	if err := errors.Join(s.trim(all || reclaim || s.disk.full.Load()), s.makeRoom(), s.eraseAllBits()); err != nil {
		s.log.Error("freeing delivered messages failed; retrying", "error", s.explain(err))
	}
	if n := s.disk.trimmed.Load(); n >= flushBytes || n > 0 && (all || s.disk.full.Load()) {
		// Files are dropped once the range that covers them is flushed.
		if _, err := s.db.AsyncFlush(); err != nil {
			s.log.Error("flushing freed ranges failed; retrying", "error", err)
			return
		}
		s.disk.trimmed.Add(-n)
	}
	if reclaim {
		s.startReclaim()
	}
}

// What a log must have, or disk.trimBytes, to be freed before trimAge.
const (
	trimMessages = 4096
	trimAge      = 30 * time.Second
)

// trim frees the messages that no lane needs. A log's head has a key of its own
// and survives a log that is freed to its end.
func (s *Store) trim(all bool) error {
	var cuts []cut
	for _, l := range s.allLogs() {
		c, err := s.cut(l, all)
		if err != nil {
			return err
		}
		if c.log != nil {
			cuts = append(cuts, c)
		}
	}
	if len(cuts) == 0 {
		return nil
	}
	// What lanes have settled must never be on disk after what that allows to free:
	// a crash in between would leave them without messages that they still need.
	if err := s.flushLanes(pebble.NoSync); err != nil {
		return err
	}
	for _, c := range cuts {
		if err := s.free(c); err != nil {
			return err
		}
	}
	return nil
}

// cut is where a log may be cut off: need is the first position to keep.
type cut struct {
	log          *sourceLog
	need         uint64
	durable      uint64
	bytesAtLeast uint64
}

// cut looks for what no lane of a log needs; log is nil when that is too little to be worth it.
func (s *Store) cut(l *sourceLog, all bool) (cut, error) {
	// Before the lanes: a lane that comes now starts behind it.
	bytes := l.durableBytes.Load()
	durable, trimmed := l.durable.Load(), l.trimmed.Load()
	need := durable + 1
	if need == trimmed+1 {
		return cut{}, nil
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
		return cut{}, err
	}
	if count := need - 1 - trimmed; !all && count < trimMessages && bytes-l.trimmedBytes.Load() < uint64(s.disk.trimBytes) && s.o.Now().Sub(l.trimTime) < trimAge {
		return cut{}, nil
	}
	return cut{l, need, durable, bytes}, nil
}

// free deletes a log's messages up to a cut.
func (s *Store) free(c cut) error {
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
		// Nothing is left. What came meanwhile is counted the next time.
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
	s.disk.freed(int64(r.bytesBefore - l.trimmedBytes.Load()))
	l.trimmed.Store(c.need - 1)
	l.trimmedBytes.Store(r.bytesBefore)
	l.trimTime = s.o.Now()
	return nil
}

// roomToCompact tells whether a compaction may write: what it takes would lack
// where messages, positions and what frees them must be written.
func (d *disk) roomToCompact() bool {
	usage, err := d.s.o.FS.GetDiskUsage(d.s.dir)
	return err != nil || int64(usage.AvailBytes) >= d.s.o.MinFreeBytes/2
}

// patientFS waits for room where a write meets a full disk. The engine would
// stop the process instead, although nothing is wrong but the lack of room.
//
// Compactions do not wait: they hold what they have written so far, and two that
// waited for each other's room would wait for ever. They fail, which gives their
// room back, and the engine tries them again.
type patientFS struct {
	vfs.FS
	full func()
	room func() bool
	// stop is closed, once, when the store is being closed.
	stop     chan struct{}
	stopOnce sync.Once
	// waiting counts the writes that wait for room.
	waiting atomic.Int64
	// compact is when the next compaction may begin, in nanoseconds since 1970.
	compact atomic.Int64
	// synced takes how long each sync of the engine's log took.
	synced func(time.Duration)
	// positions are how far the logs and the manifest were synced.
	positions syncedFiles
	// logged counts the bytes written to the engine's logs.
	logged atomic.Int64
	// recycling is held while a log is renamed to be written again, and while logs are removed.
	recycling sync.Mutex
}

// patience is the time between two tries, and how long a closing store tries.
// A compaction that lacked room is tried again after compactPause.
const (
	fullInterval = 100 * time.Millisecond
	fullGrace    = 50 // Tries.
	compactPause = time.Second
)

// compaction is the engine's category for the files that compactions write,
// which look at the room every compactStep bytes.
const (
	compaction  vfs.DiskWriteCategory = "pebble-compaction"
	compactStep                       = 256 << 10
	// writeAhead is the category of the engine's log, whose syncs make messages durable.
	writeAhead vfs.DiskWriteCategory = "pebble-wal"
	manifests  vfs.DiskWriteCategory = "pebble-manifest"
)

// giveUp ends the patience of writes that wait, and of those to come, after fullGrace tries.
func (fs *patientFS) giveUp() { fs.stopOnce.Do(func() { close(fs.stop) }) }

func (fs *patientFS) try(write func() error) error {
	err := write()
	if !isFull(err) {
		return err
	}
	fs.waiting.Add(1)
	defer fs.waiting.Add(-1)
	for grace := fullGrace; isFull(err) && grace > 0; err = write() {
		fs.full()
		select {
		case <-fs.stop:
			grace--
		default:
		}
		time.Sleep(fullInterval)
	}
	return err
}

func isFull(err error) bool {
	return err != nil && (errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT))
}

func (fs *patientFS) file(name string, c vfs.DiskWriteCategory, open func() (vfs.File, error)) (f vfs.File, err error) {
	err = fs.try(func() error {
		f, err = open()
		return err
	})
	if err != nil {
		return nil, err
	}
	p := &patientFile{File: f, fs: fs}
	journal := &journalFile{patientFile: p, name: fs.PathBase(name)}
	switch c {
	case writeAhead:
		return &logFile{journalFile: journal}, nil
	case manifests:
		return journal, nil
	}
	return p, nil
}

// output makes a file of a compaction.
func (fs *patientFS) output(name string) (vfs.File, error) {
	if pause := time.Until(time.Unix(0, fs.compact.Load())); pause > 0 {
		select {
		case <-time.After(pause):
		case <-fs.stop:
		}
	}
	f, err := fs.FS.Create(name, compaction)
	if err != nil {
		return nil, fs.compacted(err)
	}
	return &compactionFile{File: f, fs: fs}, nil
}

// compacted notes that a compaction lacked room.
func (fs *patientFS) compacted(err error) error {
	if isFull(err) {
		fs.compact.Store(time.Now().Add(compactPause).UnixNano())
	}
	return err
}

// Create orders the engine's markers, which name the files that count, behind
// the files: not every file system keeps the order of names by itself.
func (fs *patientFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if err := fs.syncDir(name); err != nil {
		return nil, err
	}
	if c == compaction {
		return fs.output(name)
	}
	return fs.file(name, c, func() (vfs.File, error) { return fs.FS.Create(name, c) })
}

func (fs *patientFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return fs.file(name, c, func() (vfs.File, error) { return fs.FS.OpenReadWrite(name, c, opts...) })
}

// ReuseForWrite makes a new file when the old one was removed to give its room back.
func (fs *patientFS) ReuseForWrite(oldname, newname string, c vfs.DiskWriteCategory) (vfs.File, error) {
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

func (fs *patientFS) Link(oldname, newname string) error {
	return fs.try(func() error { return fs.FS.Link(oldname, newname) })
}

func (fs *patientFS) Rename(oldname, newname string) error {
	return fs.try(func() error { return fs.FS.Rename(oldname, newname) })
}

// MkdirAll makes folders for their user alone, where Pebble would let everybody read what is stored.
func (fs *patientFS) MkdirAll(dir string, _ os.FileMode) error {
	return fs.try(func() error { return fs.FS.MkdirAll(dir, 0o700) })
}

// Remove removes an old marker only when the new one is on disk.
func (fs *patientFS) Remove(name string) error {
	if err := fs.syncDir(name); err != nil {
		return err
	}
	fs.positions.removed(fs.PathBase(name))
	return fs.FS.Remove(name)
}

// syncDir syncs the directory of a marker; names of other files are left to the engine.
func (fs *patientFS) syncDir(name string) error {
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
func (fs *patientFS) Unwrap() vfs.FS { return fs.FS }

type patientFile struct {
	vfs.File
	fs *patientFS
}

func (f *patientFile) Write(p []byte) (n int, err error) {
	err = f.fs.try(func() error {
		m, err := f.File.Write(p[n:])
		n += m
		return err
	})
	return n, err
}

func (f *patientFile) WriteAt(p []byte, off int64) (n int, err error) {
	err = f.fs.try(func() error {
		m, err := f.File.WriteAt(p[n:], off+int64(n))
		n += m
		return err
	})
	return n, err
}

// Preallocate only spares work later, so lack of room is no failure of it.
func (f *patientFile) Preallocate(off, n int64) error {
	if err := f.File.Preallocate(off, n); !isFull(err) {
		return err
	}
	return nil
}

// logFile is a log of the engine. It tells how long its syncs take.
type logFile struct {
	*journalFile
	allocated int64
}

// logStep is how far ahead of its end a log is preallocated.
const logStep = 4 << 20

// Preallocate does nothing: the engine asks for as much as a whole write buffer, also of an idle store.
func (*logFile) Preallocate(int64, int64) error { return nil }

func (f *logFile) Write(p []byte) (int, error) {
	for f.written+int64(len(p)) > f.allocated {
		_ = f.patientFile.Preallocate(f.allocated, logStep) // It only spares work later.
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

// compactionFile fails where others wait.
type compactionFile struct {
	vfs.File
	fs *patientFS
	// unseen bytes were written since the last look at the room.
	unseen int
}

func (f *compactionFile) Write(p []byte) (int, error) {
	if f.unseen += len(p); f.unseen >= compactStep {
		f.unseen = 0
		if !f.fs.room() {
			return 0, f.fs.compacted(syscall.ENOSPC)
		}
	}
	n, err := f.File.Write(p)
	return n, f.fs.compacted(err)
}

// Preallocate only spares work later, so lack of room is no failure of it.
func (f *compactionFile) Preallocate(off, n int64) error {
	if err := f.File.Preallocate(off, n); !isFull(err) {
		return err
	}
	return nil
}
