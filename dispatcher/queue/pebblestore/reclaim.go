package pebblestore

import (
	"context"
	"sync/atomic"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/fulldisk"
)

// The engine keeps the resources of a burst: its recycled logs, tables of deleted messages that
// no compaction rewrites, and the block cache. When the store is quiet, reclaim releases all of
// them, once per burst. An idle store does nothing.
const (
	// The store is quiet after quietPasses maintenance passes in a row with at most quietBytes
	// of activity each.
	quietBytes  = 64 << 10
	quietPasses = 10
	// reclaimBytes is the minimum activity since the last reclaim.
	reclaimBytes = 4 << 20
	// deadBytes is the minimum size of the deleted part of a log for a compaction.
	deadBytes = 1 << 20
)

// reclaimer detects that the store is quiet. The maintenance goroutine owns it, except for the
// atomic fields.
type reclaimer struct {
	lastActivity int64 // Activity at the last pass.
	quiet        int   // Quiet passes in a row.
	running      atomic.Bool
	done         atomic.Int64 // Activity at the last reclaim.
	// reclaimed is set from a reclaim to the next activity.
	reclaimed atomic.Bool
	// newestLog is the number of the log that the engine writes to.
	newestLog atomic.Uint64
}

// ReclaimWhenQuiet makes the store reclaim the next time that it is quiet, also if it has written little
// since the last time: after something else in the process used much memory.
func (s *Store) ReclaimWhenQuiet() { s.reclaimer.done.Store(-reclaimBytes) }

// reclaimDue reports whether a reclaim should start.
func (s *Store) reclaimDue() bool {
	r, activity := &s.reclaimer, s.disk.activity()
	isQuiet := activity-r.lastActivity <= quietBytes
	r.lastActivity = activity
	if !isQuiet {
		r.quiet = 0
		if r.reclaimed.CompareAndSwap(true, false) {
			s.o.Quiet(false)
		}
		return false
	}
	r.quiet++
	if r.quiet < quietPasses || activity-r.done.Load() < reclaimBytes || r.running.Load() || !s.disk.spaceToFlush() {
		return false
	}
	r.quiet = 0
	return true
}

// startReclaim reclaims in the background, because it waits for a flush and for compactions.
func (s *Store) startReclaim() {
	r := &s.reclaimer
	r.running.Store(true)
	// The bytes freed by this pass belong to the burst that ends.
	activity := s.disk.activity()
	r.lastActivity = activity
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
		case ctx.Err() != nil || fulldisk.IsFull(err):
			return // The store tries again when it is quiet again.
		case err != nil:
			s.log.Error("reclaim of disk space failed; retrying", "error", s.explain(err))
			return
		}
		r.done.Store(activity)
		r.reclaimed.Store(true)
		s.o.Quiet(true)
	})
}

// reclaim releases unneeded disk space and memory.
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
	if !s.withoutWAL {
		// The contents of all logs up to newest are in tables. The remaining files wait to be
		// recycled.
		if err := s.fs.RemoveLogs(s.dir, newest); err != nil {
			return err
		}
	}
	for _, l := range s.allLogs() {
		if s.corrupt.Load() != nil {
			break // A compaction that reads a damaged block cannot finish.
		}
		first, end := codec.Key(codec.PrefixMessage, l.number, 0), codec.Key(codec.PrefixMessage, l.number, l.trimmed.Load()+1)
		dead, err := s.db.EstimateDiskUsage(first, end)
		if err == nil && dead >= deadBytes && s.disk.spaceToCompact() {
			err = s.db.Compact(ctx, first, end, false)
		}
		if err != nil {
			return err
		}
	}
	if s.cache != nil {
		// A reservation of the whole cache evicts all of it.
		s.cache.Reserve(int(s.o.CacheBytes))()
	}
	return nil
}

// DiskBytes is the disk space that the data directory uses now, as du counts it. It takes
// microseconds per file; large stores have few, large files.
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
		case err != nil: // The file was removed meanwhile.
		case info.IsDir():
			total += folderBytes(fs, path)
		default:
			total += fileBytes(info)
		}
	}
	return total
}

// fileBytes is the disk space of a file: its blocks, which can exceed its size because of
// preallocation. A file of a backup in progress is a second name of a file of the store; each
// counts half.
func fileBytes(info vfs.FileInfo) int64 {
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return stat.Blocks * 512 / max(int64(stat.Nlink), 1)
	}
	return info.Size()
}
