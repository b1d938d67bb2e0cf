package pebblestore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// Pending calls fn for the messages of a Source that lanes still have to deliver, in their order, behind a position,
// until fn returns false. to are the lanes that have to deliver the message; a group that did not deliver it is one
// of them, with the ID of LaneID.Group. The message is valid during the call. No message may be leased. It fails at a
// message that cannot be read and that a lane has to deliver.
func (s *Store) Pending(ctx context.Context, source string, after uint64, fn func(seq uint64, m queue.Message, to []queue.LaneID) bool) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	log := s.sourceLog(source)
	if log == nil {
		return nil
	}
	head := log.durable.Load()
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: codec.Key(codec.PrefixMessage, log.number, after+1), UpperBound: codec.After(codec.PrefixMessage, log.number)})
	if err != nil {
		return s.explain(err)
	}
	defer func() { _ = it.Close() }()
	last := max(after, log.trimmed.Load()) // Read after the iterator was opened: it has all later messages.
	for ok := it.First(); ok; ok = it.Next() {
		if err := ctx.Err(); err != nil {
			return err
		}
		seq := codec.Number(it.Key(), 1)
		if seq <= last {
			continue
		}
		if seq > head {
			break
		}
		if err := s.checkUnneeded(log, last+1, seq); err != nil {
			return err
		}
		last = seq
		v, err := it.ValueAndErr()
		if err != nil {
			return s.explain(err)
		}
		var rec codec.Record
		if rec.Decode(v) != nil || rec.Lost {
			if err := s.checkUnneeded(log, seq, seq+1); err != nil {
				return err
			}
			continue
		}
		to, err := s.neededBy(log, seq, &rec)
		if err != nil {
			return err
		}
		if len(to) > 0 && !fn(seq, messageOf(source, &rec), to) {
			return nil
		}
	}
	return errors.Join(s.explain(it.Error()), s.checkUnneeded(log, last+1, head+1))
}

// checkUnneeded returns an error if a lane has to deliver one of the unreadable messages from first to before end.
func (s *Store) checkUnneeded(log *sourceLog, first, end uint64) error {
	for seq := first; seq < end; seq++ {
		to, err := s.neededBy(log, seq, &codec.Record{Lost: true})
		if err != nil {
			return err
		}
		if len(to) > 0 {
			return fmt.Errorf("message %d of Source %s is damaged; run posthorn drain with the data directory, which makes it a dead letter, and try again", seq, log.source)
		}
	}
	return nil
}

// neededBy returns the lanes, and the groups that did not deliver it, that have to deliver a message.
func (s *Store) neededBy(log *sourceLog, seq uint64, rec *codec.Record) (to []queue.LaneID, err error) {
	log.eachLane(func(l *lane) {
		if err != nil {
			return
		}
		var t queue.LaneTrace
		var found, delivered bool
		if t, found, err = s.traceLane(l, seq, rec); err != nil || !found || t.State == queue.TraceFiltered || t.State == queue.TraceEnded {
			return
		}
		id := l.id
		if l.group != nil && !exempt(typeOf(rec)) {
			l.mu.Lock()
			delivered, err = s.isFinal(l.group, seq)
			removed := l.EndpointRemoved
			l.mu.Unlock()
			if err != nil || delivered && removed {
				return
			}
			if !delivered {
				id = id.Group()
			}
		}
		if !slices.Contains(to, id) {
			to = append(to, id)
		}
	})
	return to, err
}

// messageOf returns the message of a record, without Skip and Only. Its body refers to the record.
func messageOf(source string, rec *codec.Record) queue.Message {
	return queue.Message{
		Source: source, ID: string(rec.ID), Type: typeOf(rec), Event: string(rec.Event), AcceptedAt: codec.FromMillis(rec.AcceptedAt),
		TraceParent: string(rec.Trace), LongNumbers: rec.Long, Body: rec.Body,
	}
}

// AddDeadLetters stores dead letters of a destination that another store had, and returns when they are durable. The
// ledgers do not change, because their messages were accepted by the other store. One that is stored already, because
// of an earlier call, is not stored twice.
func (s *Store) AddDeadLetters(destination string, letters []queue.DeadLetter) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	d := s.destination(destination)
	d.mu.Lock()
	defer d.mu.Unlock()
	b := s.db.NewBatch()
	count, size := d.count.Load(), d.bytes.Load()
	added := map[string][]byte{}
	for i := range letters {
		v := codec.AppendDeadLetter(nil, &letters[i])
		at := codec.Millis(letters[i].Failure.Time)
		if at <= 0 {
			at = s.o.Now().UnixMilli()
		}
		at = max(at, d.floor)
		k, stored, err := s.freeLetter(destination, at, letters[i].Seq, v, added)
		if err != nil {
			_ = b.Close()
			return s.explain(err)
		}
		if stored {
			continue
		}
		d.last = max(d.last, codec.DeadLetterMillis(k))
		_ = b.Set(k, v, nil)
		added[string(k)] = v
		count++
		size += int64(len(k) + len(v))
	}
	return s.applyCounts(d, b, count, size)
}

// freeLetter returns the first free key of a dead letter from a time on; stored is true if a key has its value. added
// are those that are not applied yet. No lane has the number 0, so the keys are not those of the store's own ones.
func (s *Store) freeLetter(destination string, at int64, seq uint64, value []byte, added map[string][]byte) (k []byte, stored bool, err error) {
	for ; ; at++ {
		k = codec.DeadLetterKey(destination, at, 0, seq)
		v, isAdded := added[string(k)]
		if !isAdded {
			if v, err = s.get(k); errors.Is(err, pebble.ErrNotFound) {
				return k, false, nil
			}
			if err != nil {
				return nil, false, err
			}
		}
		if bytes.Equal(v, value) {
			return k, true, nil
		}
	}
}
