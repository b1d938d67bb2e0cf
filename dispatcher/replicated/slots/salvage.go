package slots

import (
	"context"
	"errors"
	"fmt"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/repair"
)

// errIncomplete reports that a stream lacks batches behind the newest snapshot, or cannot be read.
var errIncomplete = errors.New("the stream lacks records behind the newest snapshot")

// Batches are consecutive batches of a slot.
type Batches struct{ First, Last uint64 }

// checkComplete returns errIncomplete if a copy may not be able to follow the stream from the newest snapshot.
func (s Slot) checkComplete(ctx context.Context, state State) error {
	if state.Missing > 0 {
		return fmt.Errorf("%w: the server that leads it has lost %d", errIncomplete, state.Missing)
	}
	batch := uint64(1)
	sequence, err := newestSnapshot(ctx, s.Log)
	if err == nil && sequence > 0 {
		var m manifest
		if m, _, err = readManifest(ctx, s.Log, s.Objects, sequence); errors.Is(err, errNoSnapshot) {
			return fmt.Errorf("%w: %w", errIncomplete, err)
		}
		batch = m.Batch
	}
	var h header
	if err == nil {
		_, h, err = findBatch(ctx, s.Log, state, batch)
	}
	_, isDamaged := errors.AsType[*DamageError](err)
	switch {
	case isDamaged:
		return fmt.Errorf("%w: %w", errIncomplete, err)
	case err == nil && h.first > batch:
		return fmt.Errorf("%w: it begins with batch %d, and the snapshot ends with batch %d", errIncomplete, h.first, batch)
	case errors.Is(err, ErrNoRecord): // The objects are newer than the stream.
		return nil
	}
	return err
}

// salvage writes to Dir what the newest snapshot and the records of the stream have of the slot, in spite of lost
// records. Later batches refer to missing ones, so it repairs the store, and returns what was lost.
func (s Slot) salvage(ctx context.Context) (missing []Batches, lost []string, err error) {
	if err := s.Store.FS.RemoveAll(s.Dir); err != nil { // Of an earlier call.
		return nil, nil, err
	}
	r := &restorer{log: s.Log, objects: s.Objects, fs: s.Store.FS, dir: s.Dir, tried: map[uint64]bool{}}
	if r.restore(ctx) != nil {
		if _, err := r.restoreObject(ctx); err != nil && !errors.Is(err, errNoSnapshot) {
			return nil, nil, err
		}
	}
	copied, err := pebblestore.OpenReplica(s.Dir, s.Store)
	if err != nil {
		return nil, nil, err
	}
	v := salvager{follower: follower{copy: copied, last: copied.Position().Batch}, skip: copied.Skip}
	if err := v.read(ctx, s.Log); err != nil {
		return nil, nil, errors.Join(err, copied.Close())
	}
	if len(v.missing) > 0 && v.missing[0].First == 1 {
		return nil, nil, errors.Join(fmt.Errorf("%w, and the stream begins with batch %d", errNoSnapshot, v.missing[0].Last+1), copied.Close())
	}
	if err := copied.Detach(); err != nil {
		return v.missing, nil, err
	}
	repaired, err := repair.Run(s.Dir, true, pebblestore.Verify)
	if err != nil {
		return v.missing, nil, fmt.Errorf("repair the store without the missing batches: %w", err)
	}
	return v.missing, repaired.Lost, pebblestore.Attach(s.Dir, s.Store, func(*pebblestore.Store) error { return nil })
}

// salvager applies all batches that a stream has to a copy.
type salvager struct {
	follower
	skip    func(to uint64)
	missing []Batches
}

// read applies the records that the stream has now.
func (v *salvager) read(ctx context.Context, log Log) error {
	state, err := log.State(ctx)
	if err != nil {
		return fmt.Errorf("read the state of the log: %w", err)
	}
	v.next = state.First
	if v.next > state.Last {
		return nil
	}
	err = log.Tail(ctx, state.First, func(e Entry) error {
		for v.next < e.Sequence { // Another server can have what the reader's lacks.
			lost, err := log.Get(ctx, v.next)
			if err != nil {
				return fmt.Errorf("read record %d of the log: %w", v.next, err)
			}
			if err := v.apply(lost); err != nil {
				return err
			}
		}
		if err := v.apply(e); err != nil {
			return err
		}
		if v.next > state.Last {
			return errRead
		}
		return nil
	})
	if errors.Is(err, errRead) {
		return nil
	}
	return err
}

// apply applies a record if it can be read.
func (v *salvager) apply(e Entry) error {
	if e.Sequence < v.next {
		return nil
	}
	v.next = e.Sequence + 1
	h, payload, err := decodeRecord(e.Record)
	switch {
	case errors.Is(err, pebblestore.ErrNewerFormat):
		return err
	case err != nil || h.kind == kindSuspect:
		return nil
	case h.kind == kindClaim:
		v.parts = nil
	}
	have := v.copy.Position().Batch
	if h.first > have+1 {
		v.lose(have+1, h.first-1)
	}
	if h.first != v.last+1 {
		v.parts = nil
	}
	v.last, v.session = h.first-1, h.session
	switch h.kind {
	case kindBatches:
		err = v.applyBatches(h, payload)
	case kindPart, kindLastPart:
		err = v.applyPart(h, payload)
	}
	if errors.Is(err, pebblestore.ErrNewerFormat) {
		return err
	}
	if have := v.copy.Position().Batch; err != nil && h.last > have { // Its first parts are missing.
		v.lose(have+1, h.last)
		v.last = h.last
	}
	return nil
}

// lose continues behind missing batches.
func (v *salvager) lose(first, last uint64) {
	v.missing = append(v.missing, Batches{first, last})
	v.skip(last)
}
