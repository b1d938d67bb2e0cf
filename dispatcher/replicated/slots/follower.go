package slots

import (
	"context"
	"errors"
	"fmt"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// Replica is a copy of a store that applies the batches of a stream; pebblestore.Replica.
type Replica interface {
	// Position is the last batch of the copy.
	Position() pebblestore.Position
	// Apply applies the batch at the next position. It may keep and change the batch. It does not apply a
	// batch of a newer release, and returns pebblestore.ErrNewerFormat.
	Apply(at pebblestore.Position, batch []byte) error
	// AllMeta returns the values of queue.Store.PutMeta.
	AllMeta() (map[string][]byte, error)
}

// DamageError reports a record that cannot follow the records before it: it is malformed, it is of
// a session without a claim, or batches are missing before it.
type DamageError struct {
	// Sequence is the record's number in the stream.
	Sequence uint64
	Err      error
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("the log is damaged at record %d: %v", e.Sequence, e.Err)
}

func (e *DamageError) Unwrap() error { return e.Err }

// GapError reports that the server that leads the stream has lost records behind those that a copy has. The copy is
// kept: another server may have the records, and a newer snapshot replaces them.
type GapError struct {
	// From and To are the sequences of the lost records. Copied is the last batch of the copy.
	From, To, Copied uint64
}

func (e *GapError) Error() string {
	return fmt.Sprintf("the log lacks the records %d to %d behind batch %d, which the copy has: a server of the log has lost them; the copy is kept, and follows the log again when another server leads the stream or the owner has stored a snapshot. Without an owner, move the leader (nats stream cluster step-down), or run posthorn replication adopt", e.From, e.To, e.Copied)
}

// badRecord returns the error for a record that cannot be used: a DamageError, except for a record of a
// newer release.
func badRecord(sequence uint64, err error) error {
	if errors.Is(err, pebblestore.ErrNewerFormat) {
		return fmt.Errorf("record %d: %w", sequence, err)
	}
	return &DamageError{sequence, err}
}

// follower applies the records of a stream to a copy. It skips the batches that the copy has.
type follower struct {
	copy Replica
	// next is the sequence of the next record.
	next uint64
	// session and epoch are the last claim's; epoch is 0 until a record names them.
	session pebblestore.Session
	epoch   uint64
	// last is the last batch of the records so far.
	last uint64
	// parts has the parts of the batch last + 1.
	parts []byte
	// lastKind and lastSession are the last record's, also a suspect's; 0 before the first.
	lastKind    kind
	lastSession pebblestore.Session
	// snapshot is the sequence of the last snapshot record; 0 for none.
	snapshot uint64
}

// apply applies the next record.
func (f *follower) apply(e Entry) error {
	h, payload, err := decodeRecord(e.Record)
	if e.Sequence != f.next {
		return fmt.Errorf("%w: records %d to %d were trimmed before it applied them", ErrForeignCopy, f.next, e.Sequence-1)
	}
	if err == nil && f.lastKind == 0 && h.first > f.last+1 { // A stale state had another first record.
		return fmt.Errorf("%w: it ends with batch %d, and the log begins with batch %d", ErrForeignCopy, f.last, h.first)
	}
	if err == nil {
		err = f.applyRecord(h, payload)
	}
	if err != nil {
		return badRecord(e.Sequence, err)
	}
	f.next, f.lastKind, f.lastSession, f.snapshot = e.Sequence+1, h.kind, h.session, h.snapshotAt(e.Sequence)
	return nil
}

func (f *follower) applyRecord(h header, payload []byte) error {
	if h.kind == kindSuspect {
		return nil
	}
	if h.kind == kindClaim {
		return f.applyClaim(h)
	}
	if f.epoch == 0 { // The first record of a part of the stream.
		f.session, f.epoch = h.session, h.epoch
	}
	if h.session != f.session || h.epoch != f.epoch {
		return fmt.Errorf("the record is of session %x, but session %x claimed the slot", h.session, f.session)
	}
	if h.first != f.last+1 {
		return fmt.Errorf("batch %d follows batch %d: batches are missing or repeated", h.first, f.last)
	}
	switch h.kind {
	case kindBatches:
		return f.applyBatches(h, payload)
	case kindPart, kindLastPart:
		return f.applyPart(h, payload)
	case kindHeartbeat, kindReleased, kindSnapshot:
		return nil
	}
	return fmt.Errorf("the record has the unknown %v", h.kind)
}

func (f *follower) applyClaim(h header) error {
	if f.epoch != 0 && h.epoch != f.epoch+1 {
		return fmt.Errorf("a claim of epoch %d follows epoch %d", h.epoch, f.epoch)
	}
	if h.last != f.last {
		return fmt.Errorf("a claim continues behind batch %d, but the last one is %d", h.last, f.last)
	}
	f.session, f.epoch, f.parts = h.session, h.epoch, nil
	return nil
}

func (f *follower) applyBatches(h header, payload []byte) error {
	for number := h.first; number <= h.last; number++ {
		var batch []byte
		var err error
		if batch, payload, err = cutBatch(payload); err != nil {
			return err
		}
		if err := f.applyBatch(number, batch); err != nil {
			return err
		}
	}
	if len(payload) > 0 {
		return fmt.Errorf("%d bytes follow the last batch", len(payload))
	}
	return nil
}

func (f *follower) applyPart(h header, payload []byte) error {
	if h.kind == kindPart {
		f.parts = append(f.parts, payload...)
		return nil
	}
	batch := append(f.parts, payload...)
	f.parts = nil
	return f.applyBatch(h.last, batch)
}

func (f *follower) applyBatch(number uint64, batch []byte) error {
	f.last = number
	if number <= f.copy.Position().Batch {
		return nil
	}
	return f.copy.Apply(pebblestore.Position{Batch: number, Session: f.session}, batch)
}

// ErrForeignCopy reports that a copy is not a part of the stream: it has batches that the stream
// does not have, batches of another session, or it ends before the stream begins. A snapshot
// replaces it.
var ErrForeignCopy = errors.New("the copy is not a part of the log")

// ErrEmptied reports that a stream has no records, but had some before: it was emptied, or deleted
// and created again. The pod must not remove its copy, which may be the last one.
var ErrEmptied = errors.New("the records of the stream were removed by another program; restore the stream")

// errStaleRead reports that a read did not see a record that exists.
var errStaleRead = errors.New("the server that answered does not have the record yet")

// newFollower finds the record with the last batch of a copy. The record must be in the stream and
// of the copy's session. A copy without batches begins with the first batch.
func newFollower(ctx context.Context, log Log, s State, copied Replica) (*follower, error) {
	position := copied.Position()
	if s.First > s.Last && (s.Last > 0 || position.Batch > 0) {
		return nil, ErrEmptied
	}
	e, h, err := findBatch(ctx, log, s, max(position.Batch, 1))
	isNew := position.Batch == 0
	switch {
	case isNew && (errors.Is(err, ErrNoRecord) || err == nil && h.first <= 1):
		return &follower{copy: copied, next: s.First}, nil
	case errors.Is(err, ErrNoRecord):
		return nil, fmt.Errorf("%w: it ends with batch %d, which the log does not have", ErrForeignCopy, position.Batch)
	case err != nil:
		return nil, err
	case isNew || h.first > position.Batch:
		if err := checkGap(ctx, log, e.Sequence, position.Batch); err != nil && !isNew {
			return nil, err
		}
		return nil, fmt.Errorf("%w: it ends with batch %d, and the log begins with batch %d", ErrForeignCopy, position.Batch, h.first)
	case h.session != position.Session:
		return nil, fmt.Errorf("%w: its batch %d is of session %x, and that of the log is of session %x", ErrForeignCopy, position.Batch, position.Session, h.session)
	}
	return &follower{copy: copied, next: e.Sequence, last: h.first - 1}, nil
}

// checkGap returns a GapError if records before one are lost, and not trimmed: the stream has earlier ones.
func checkGap(ctx context.Context, log Log, sequence, copied uint64) error {
	s, err := log.State(ctx)
	if err != nil {
		return fmt.Errorf("read the state of the log: %w", err)
	}
	if s.First >= sequence {
		return nil
	}
	from := sequence
	for low := s.First; low < from; {
		middle := low + (from-low)/2
		e, err := log.Get(ctx, middle)
		switch {
		case err != nil:
			return fmt.Errorf("read record %d of the log: %w", middle, err)
		case e.Sequence >= sequence:
			from = middle
		default:
			low = e.Sequence + 1
		}
	}
	return &GapError{from, sequence - 1, copied}
}

// findBatch returns the first record with which a batch is complete. The last batches of the
// records ascend, so that a binary search finds it.
func findBatch(ctx context.Context, log Log, s State, batch uint64) (found Entry, h header, err error) {
	err = ErrNoRecord
	for low, high := s.First, s.Last+1; low < high; {
		middle := low + (high-low)/2
		e, getErr := log.Get(ctx, middle)
		if errors.Is(getErr, ErrNoRecord) {
			return found, h, fmt.Errorf("read record %d of the log: %w", middle, errStaleRead)
		}
		if getErr != nil {
			return found, h, fmt.Errorf("read record %d of the log: %w", middle, getErr)
		}
		if e.Sequence >= high {
			high = middle // The records before e were trimmed meanwhile.
			continue
		}
		head, _, decodeErr := decodeRecord(e.Record)
		if decodeErr != nil {
			return found, h, badRecord(e.Sequence, decodeErr)
		}
		if head.last >= batch {
			found, h, err, high = e, head, nil, middle
		} else {
			low = e.Sequence + 1
		}
	}
	return found, h, err
}
