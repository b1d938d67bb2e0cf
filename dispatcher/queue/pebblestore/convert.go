package pebblestore

import (
	"crypto/rand"
	"errors"
	"fmt"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// AttachedBatch is the last batch of an attached store. It is not the first one: a copy without files, which begins
// with batch 1, cannot begin with a log that lacks the content of the store.
const AttachedBatch = 2

// Attach makes the closed store in dir, with a log of its own, one with which a replicated log can begin: all of it
// counts as the first batches of a session. prepare is called with the store before that. A store that has a position
// is not changed. It fails as Open does, and when there is no store.
func Attach(dir string, o Options, prepare func(*Store) error) error {
	o.Log, o.Registerer, o.DuplicateWindow = nil, nil, MaxDuplicateWindow // A shorter one removes messageIds.
	checked, err := newStore(dir, o)
	if err != nil {
		return err
	}
	at, err := ReadPosition(checked.o.FS, dir)
	if err != nil || at.Batch > 0 {
		return checked.explain(err)
	}
	s, err := Open(dir, o) // It applies the log and compares the files with the acknowledged messages.
	if err != nil {
		return err
	}
	if err := prepare(s); err != nil {
		return errors.Join(err, s.Close())
	}
	at.Batch = AttachedBatch
	_, _ = rand.Read(at.Session[:]) // It never fails.
	b := s.db.NewBatch()
	_ = b.Set(codec.KeyLogPosition, at.encode(), nil) // A batch accepts each set.
	if err := errors.Join(s.applySync(b), s.Close()); err != nil {
		return fmt.Errorf("attach the store in %s to a log: %w", dir, err)
	}
	return nil
}
