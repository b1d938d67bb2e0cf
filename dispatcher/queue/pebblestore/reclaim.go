package pebblestore

import (
	"context"
	"errors"
	iofs "io/fs"
	"sync/atomic"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// The engine keeps what a burst took: its recycled logs, tables of deleted
// messages that no compaction visits, the block cache. Once the store is quiet,
// reclaim gives all of it back, once for each burst. An idle store does nothing.
const (
	// quietBytes and quietLooks define quiet: so many bytes between two passes of the
	// maintenance at most, in so many passes in a row.
	quietBytes = 64 << 10
	quietLooks = 10
	// reclaimBytes is the activity that makes a reclaim worth its flush.
	reclaimBytes = 4 << 20
	// deadBytes is the size of a log's deleted part that makes a compaction worth it.
	deadBytes = 1 << 20
)

// reclaimer knows whether the store is quiet. It belongs to the maintenance.
type reclaimer struct {
	seen    int64 // Activity at the last pass.
	quiet   int   // Passes in a row without much activity.
	running atomic.Bool
	done    atomic.Int64 // Activity at the last reclaim.
	// reclaimed is set from a reclaim to the next activity.
	reclaimed atomic.Bool
	// newestLog is the number of the log that the engine writes to.
	newestLog atomic.Uint64
}

// reclaimDue reports whether a reclaim should begin.
func (s *Store) reclaimDue() bool {
	r, activity := &s.reclaimer, s.disk.activity()
	calm := activity-r.seen <= quietBytes
	r.seen = activity
	if !calm {
		r.quiet = 0
		if r.reclaimed.CompareAndSwap(true, false) {
			s.o.Quiet(false)
		}
		return false
	}
	r.quiet++
	if r.quiet < quietLooks || activity-r.done.Load() < reclaimBytes || r.running.Load() || !s.disk.roomToFlush() {
		return false
	}
	r.quiet = 0
	return true
}

// startReclaim reclaims in the background: it waits for a flush and for compactions.
func (s *Store) startReclaim() {
	r := &s.reclaimer
	r.running.Store(true)
	// What this pass has freed belongs to the burst that ends.
	activity := s.disk.activity()
	r.seen = activity
	s.done.Go(func() {
		defer r.running.Store(false)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		go func() {
			select {
			case <-s.stop:
				cancel()
			case <-ctx.Done():
			}
		}()
		err := s.reclaim(ctx)
		switch {
		case ctx.Err() != nil || isFull(err):
			return // The next quiet time tries again.
		case err != nil:
			s.log.Error("reclaiming disk space failed; retrying", "error", s.explain(err))
			return
		}
		r.done.Store(activity)
		r.reclaimed.Store(true)
		s.o.Quiet(true)
	})
}

// reclaim frees the disk and the memory that nothing needs any more.
func (s *Store) reclaim(ctx context.Context) error {
	newest := s.reclaimer.newestLog.Load()
	flushed, err := s.db.AsyncFlush()
	if err != nil {
		return err
	}
	select {
	case <-flushed:
	case <-ctx.Done():
		return ctx.Err()
	}
	// All logs up to this one are in tables now. Those that still have their names wait to be recycled.
	if err := s.fs.removeLogs(s.dir, newest); err != nil {
		return err
	}
	for _, l := range s.allLogs() {
		if s.corrupt.Load() != nil {
			break // A compaction that meets damage cannot end.
		}
		first, end := key(prefixMessage, l.number, 0), key(prefixMessage, l.number, l.trimmed.Load()+1)
		dead, err := s.db.EstimateDiskUsage(first, end)
		if err == nil && dead >= deadBytes && s.disk.roomToCompact() {
			err = s.db.Compact(ctx, first, end, false)
		}
		if err != nil {
			return err
		}
	}
	// A reservation of all of the cache evicts all of it.
	s.cache.Reserve(int(s.o.CacheBytes))()
	return nil
}

// removeLogs removes the engine's logs up to a number. The engine keeps such logs
// to write to them again; it gets a new file where one is gone.
func (fs *patientFS) removeLogs(dir string, newest uint64) error {
	fs.recycling.Lock()
	defer fs.recycling.Unlock()
	names, err := fs.FS.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if n, ok := logNumber(name); ok && n <= newest {
			if err := fs.Remove(fs.PathJoin(dir, name)); err != nil && !errors.Is(err, iofs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// DiskBytes is what the data folder takes of the disk at this moment, as du counts
// it. A look takes microseconds for each file; large stores have few, large files.
func (s *Store) DiskBytes() int64 { return folderBytes(s.o.FS, s.o.DataDir) }

func folderBytes(fs vfs.FS, dir string) (total int64) {
	info, err := fs.Stat(dir)
	if err != nil {
		return 0
	}
	total = fileBytes(info)
	names, err := fs.List(dir)
	if err != nil {
		return total
	}
	for _, name := range names {
		path := fs.PathJoin(dir, name)
		switch info, err := fs.Stat(path); {
		case err != nil: // It was removed meanwhile.
		case info.IsDir():
			total += folderBytes(fs, path)
		default:
			total += fileBytes(info)
		}
	}
	return total
}

// fileBytes is what a file takes: its blocks, which are more than its size where space is preallocated.
func fileBytes(info vfs.FileInfo) int64 {
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return stat.Blocks * 512
	}
	return info.Size()
}
