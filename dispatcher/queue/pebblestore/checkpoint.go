package pebblestore

import (
	"errors"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
	"github.com/posthorn/posthorn/internal/durable"
)

// Checkpoint writes a consistent copy of the store to dir, which must not exist and is on the same
// file system. It has every write that was applied before the call, and a prefix of the later
// ones. Tables are hard links. Open opens the copy like a store after a crash.
//
// The returned position is the position of the copy, for a store with a replicated log: batches applied
// meanwhile are in it only if they are before the position.
func (s *Store) Checkpoint(dir string) (Position, error) {
	if err := s.enter(); err != nil {
		return Position{}, err
	}
	defer s.leave()
	p, err := s.checkpoint(dir)
	if err != nil {
		return p, fmt.Errorf("checkpoint: %w", s.explain(err))
	}
	return p, nil
}

func (s *Store) checkpoint(dir string) (Position, error) {
	if err := s.checkSpaceFor(dir); err != nil {
		return Position{}, err
	}
	if err := s.flushForCheckpoint(); err != nil {
		return Position{}, err
	}
	if s.withoutWAL {
		if err := s.db.Checkpoint(dir); err != nil {
			return Position{}, err
		}
		return ReadPosition(s.o.FS, dir)
	}
	if err := s.commitLog.sync(); err != nil {
		return Position{}, err
	}
	log, end := s.positions.NewestLog()
	if err := s.db.Checkpoint(dir); err != nil {
		return Position{}, err
	}
	return Position{}, s.cutLogs(dir, log, end)
}

// flushForCheckpoint flushes the log. It returns queue.ErrFull when the disk gets full meanwhile: the
// engine would retry the flush without end, and Close waits for the checkpoint.
func (s *Store) flushForCheckpoint() error {
	flushed, err := s.db.AsyncFlush()
	if err != nil {
		return err
	}
	check := time.NewTicker(100 * time.Millisecond)
	defer check.Stop()
	for {
		select {
		case <-flushed:
			return nil
		case <-s.noFlush:
			return queue.ErrFull
		case <-check.C:
			if s.fs.Waiting() > 0 {
				return queue.ErrFull
			}
		}
	}
}

// checkSpaceFor returns queue.ErrFull when the copies of the logs and of the manifest, and of the
// tables on a file system without hard links, would leave too little free space: a write that
// waits for space would delay the removal of unneeded files.
func (s *Store) checkSpaceFor(dir string) error {
	if s.Full() {
		return queue.ErrFull
	}
	usage, err := s.o.FS.GetDiskUsage(s.dir)
	if errors.Is(err, vfs.ErrUnsupported) {
		return nil
	}
	if err != nil {
		return err
	}
	m := s.db.Metrics()
	need := s.o.MinFreeBytes + int64(m.WAL.PhysicalSize) + int64(m.MemTable.Size) + 1<<20
	probe := dir + ".link"
	if err := s.o.FS.Link(s.path("LOCK"), probe); err != nil {
		need += int64(m.DiskSpaceUsage())
	} else if err := s.o.FS.Remove(probe); err != nil {
		return err
	}
	if free := int64(usage.AvailBytes); free < need {
		return fmt.Errorf("%w: %d bytes are free, but the checkpoint needs %d", queue.ErrFull, free, need)
	}
	return nil
}

// cutLogs cuts the copies of the logs at a position that was synced before they were copied.
// Records that the engine appended meanwhile may have gaps in the copy, because the file was
// written while it was read.
func (s *Store) cutLogs(dir string, log uint64, end int64) error {
	names, err := s.o.FS.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		number, ok := integrity.LogNumber(name)
		if !ok || number < log {
			continue
		}
		path := s.o.FS.PathJoin(dir, name)
		data, err := integrity.ReadFile(s.o.FS, path)
		if err != nil {
			return err
		}
		keep := min(end, int64(len(data)))
		if number > log {
			keep = 0
		}
		f, err := s.o.FS.Create(path, vfs.WriteCategoryUnspecified)
		if err != nil {
			return err
		}
		_, err = f.Write(data[:keep])
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return durable.Sync(s.o.FS.OpenDir(dir))
}
