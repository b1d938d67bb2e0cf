package pebblestore

import (
	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
)

// commitLog applies the batches of a store in one order, and makes them durable in that order.
//
// Every write of the store goes through it. A caller that must know that its batch is durable
// submits the batch and waits; everything applied before is durable then, too. So the store can
// use a log outside the database, such as a replicated one, without other changes.
type commitLog interface {
	// newCommit returns a batch for the messages of a commit; size is its expected number of
	// bytes.
	newCommit(size int) *pebble.Batch
	// apply applies a batch. The batch is durable after the next submitted batch, or after
	// sync.
	apply(b *pebble.Batch) error
	// submit applies a batch and starts to make it durable. After an error the batch is not
	// applied; otherwise the caller calls wait once before it closes the batch.
	submit(b *pebble.Batch) error
	// wait returns when a submitted batch is durable. After an error, no later write can
	// become durable.
	wait(b *pebble.Batch) error
	// sync returns when all applied batches are durable.
	sync() error
}

// localLog is the commitLog of one disk: the engine's own write-ahead log.
type localLog struct {
	db        *pebble.DB
	positions *integrity.Positions
	flusher   *flusher
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

func (l *localLog) submit(b *pebble.Batch) error {
	l.flusher.markSynced()
	return l.db.ApplyNoSyncWait(b, pebble.Sync)
}

func (l *localLog) wait(b *pebble.Batch) error { return b.SyncWait() }

func (l *localLog) sync() error {
	l.flusher.markSynced()
	return l.db.LogData(l.positions.Mark(), pebble.Sync)
}

// apply applies and closes a batch; the flusher makes it durable within SyncInterval.
func (s *Store) apply(b *pebble.Batch) error {
	defer func() { _ = b.Close() }()
	return s.commitLog.apply(b)
}

// applySync applies and closes a batch, and returns when it is durable with everything applied
// before.
func (s *Store) applySync(b *pebble.Batch) error {
	defer func() { _ = b.Close() }()
	if err := s.commitLog.submit(b); err != nil {
		return err
	}
	s.waitDurable(b)
	return nil
}

// waitDurable returns when a submitted batch is durable. It stops the process when that fails,
// because no later message can become durable.
func (s *Store) waitDurable(b *pebble.Batch) {
	if err := s.commitLog.wait(b); err != nil {
		engineLogger{s}.Fatalf("sync the log: %w", err)
	}
}
