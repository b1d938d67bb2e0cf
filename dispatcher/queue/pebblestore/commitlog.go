package pebblestore

import (
	"errors"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
)

// commitLog applies the batches of a store in one order, and makes them durable in that order.
//
// Every write of the store goes through it. A caller that must know that its batch is durable
// submits the batch and waits; everything applied before is durable then, too. localLog is the
// engine's write-ahead log, replicatedLog a log outside of the store's files.
type commitLog interface {
	// newCommit returns a batch for the messages of a commit; size is its expected number of
	// bytes.
	newCommit(size int) *pebble.Batch
	// apply applies a batch. The batch is durable after the next submitted batch, or after
	// sync.
	apply(b *pebble.Batch) error
	// submit applies a batch and starts to make it durable. After an error the batch is not
	// durable; otherwise the caller calls wait once before it closes the batch. wait returns
	// when the batch is durable; after its error no later write becomes durable. A batch without
	// writes is not applied: it is durable with the batches that were submitted before.
	submit(b *pebble.Batch) (wait func() error, err error)
	// sync returns when all applied batches are durable.
	sync() error
	// ready returns an error that wraps queue.ErrUnavailable while a submitted batch would not
	// become durable soon.
	ready() error
	// space returns the bytes that the log has for calls, and how many of them are free; 0 if it has no bound of
	// its own.
	space() (total, free int64)
	// blocked reports whether a write waits for the log, whose caller can hold the lock of a lane.
	blocked() bool
}

// localLog is the commitLog of one disk: the engine's own write-ahead log. The process ends when
// a sync fails, because no later message can become durable.
type localLog struct {
	db        *pebble.DB
	positions *integrity.Positions
	flusher   *flusher
	fatal     func(format string, args ...any)
}

func (l *localLog) newCommit(size int) *pebble.Batch {
	b := l.db.NewBatchWithSize(size)
	_ = b.LogData(l.positions.Mark(), nil)
	return b
}

func (l *localLog) apply(b *pebble.Batch) error {
	err := l.db.Apply(b, pebble.NoSync)
	l.flusher.markUnsynced()
	return err
}

func (l *localLog) submit(b *pebble.Batch) (wait func() error, err error) {
	if b.Count() == 0 { // The process ends when a sync of a former batch fails.
		return func() error { return nil }, nil
	}
	l.flusher.markSynced()
	err = l.db.ApplyNoSyncWait(b, pebble.Sync)
	return func() error {
		if err := b.SyncWait(); err != nil {
			l.fatal("sync the log: %w", err)
		}
		return nil
	}, err
}

func (l *localLog) sync() error {
	l.flusher.markSynced()
	return l.db.LogData(l.positions.Mark(), pebble.Sync)
}

func (l *localLog) ready() error { return nil }

func (l *localLog) space() (total, free int64) { return 0, 0 }

func (l *localLog) blocked() bool { return false }

// apply applies and closes a batch; the flusher makes it durable within SyncInterval.
func (s *Store) apply(b *pebble.Batch) error {
	defer func() { _ = b.Close() }()
	return s.commitLog.apply(b)
}

// applySync applies and closes a batch, and returns when it is durable with everything applied
// before.
func (s *Store) applySync(b *pebble.Batch) error { return await(s.submit(b)) }

// submit applies a batch. wait closes it, and returns when it is durable with everything applied before. It can take as long
// as a replicated log does not answer, so its caller holds no lock that readers need.
func (s *Store) submit(b *pebble.Batch) (wait func() error, err error) {
	durable, err := s.commitLog.submit(b)
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return func() error {
		defer func() { _ = b.Close() }()
		return durable()
	}, nil
}

// await waits for the batch of a change, if it has one.
func await(wait func() error, err error) error {
	if err != nil || wait == nil {
		return err
	}
	return wait()
}
