package pebblestore

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// Replica is a closed store with a replicated log that applies the batches of another process.
// Open opens it as a store after Close. The methods are not safe for concurrent use.
type Replica struct {
	s    *Store
	last Position
}

// OpenReplica opens the files of a store with a replicated log, and creates them when they are
// missing. It fails as Open does. Only the options of files and memory apply.
func OpenReplica(dir string, o Options) (*Replica, error) {
	o.Registerer = nil
	s, err := newStore(dir, o)
	if err != nil {
		return nil, fmt.Errorf("open a replica: %w", err)
	}
	s.withoutWAL = true
	r := &Replica{s: s}
	if err := s.runSteps(s.lockDir, s.inspect, s.openPositions, s.openDB, r.load); err != nil {
		return nil, fmt.Errorf("open a replica in %s: %w", dir, err)
	}
	return r, nil
}

func (r *Replica) load() (err error) {
	format, err := r.s.storedFormat()
	if err != nil {
		return err
	}
	if r.last, err = readPosition(r.s.db); err != nil || r.last.Batch > 0 {
		return err
	}
	if format > 0 {
		return errors.New("the store has no replicated log; use another directory")
	}
	return nil
}

// Position returns the last applied batch.
func (r *Replica) Position() Position { return r.last }

// Apply applies the batch at a position, whose number must be the next one. It keeps and changes
// the batch. It returns ErrNewerFormat, and does not apply the batch, if the batch raises the format of the
// store above those that this release reads.
func (r *Replica) Apply(at Position, batch []byte) error {
	if at.Batch != r.last.Batch+1 {
		return fmt.Errorf("batch %d follows batch %d: batches are missing", at.Batch, r.last.Batch)
	}
	if len(batch) >= sequenceBytes {
		clear(batch[:sequenceBytes])
	}
	b := r.s.db.NewBatch()
	defer func() { _ = b.Close() }()
	if err := b.SetRepr(batch); err != nil {
		return fmt.Errorf("batch %d: %w", at.Batch, err)
	}
	stored, err := positionOf(b)
	if err != nil {
		return fmt.Errorf("batch %d: %w", at.Batch, err)
	}
	if stored != at {
		return fmt.Errorf("batch %d of session %x is stored as batch %d of session %x", at.Batch, at.Session, stored.Batch, stored.Session)
	}
	if err := r.s.db.Apply(b, pebble.NoSync); err != nil {
		return fmt.Errorf("batch %d: %w", at.Batch, err)
	}
	r.last = at
	return nil
}

// AllMeta returns the values that the owner has stored by Store.PutMeta.
func (r *Replica) AllMeta() (map[string][]byte, error) { return r.s.AllMeta() }

// Skip makes the batch behind a later one the next one: those up to it are lost. The store must be repaired.
func (r *Replica) Skip(to uint64) { r.last.Batch = to }

// sequenceBytes is the size of the sequence number at the start of a batch. Another engine assigned
// it; this engine assigns its own.
const sequenceBytes = 8

// positionOf returns the position that a batch stores, and checks its encoding and its format.
func positionOf(b *pebble.Batch) (p Position, err error) {
	for entries := b.Reader(); ; {
		kind, key, value, ok, err := entries.Next()
		if err != nil || !ok {
			return p, err
		}
		if kind != pebble.InternalKeyKindSet {
			continue
		}
		switch string(key) {
		case string(codec.KeyLogPosition):
			p, err = decodePosition(value)
		case string(codec.KeyFormat):
			d := codec.Decoder{Rest: value}
			err = CheckFormat("log", "store", d.Uvarint(), codec.Format)
		}
		if err != nil {
			return p, err
		}
	}
}

// Close flushes and closes the files.
func (r *Replica) Close() error {
	r.s.fs.StopWaiting()
	return errors.Join(r.s.db.Flush(), r.s.closeDB())
}

// Detach turns the files into a store with a log of its own, which Open opens, and closes them.
func (r *Replica) Detach() error {
	err := r.s.db.Delete(codec.KeyLogPosition, pebble.NoSync)
	return errors.Join(err, r.Close())
}
