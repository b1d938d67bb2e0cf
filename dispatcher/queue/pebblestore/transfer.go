package pebblestore

import (
	"bytes"
	"context"
	"errors"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// Pending calls fn for the messages of a Source that lanes still have to deliver, in their order, behind a position,
// until fn returns false. to are the lanes that have to deliver the message; a group that did not deliver it is one
// of them, with the ID of LaneID.Group. A first attempt for an endpoint is left out when another one of its group has
// delivered the message. A message that is damaged has no ID and no Type, and its body is the reason; after 256 of them
// in a row Pending fails. The message is valid during the call. None may be leased.
func (s *Store) Pending(ctx context.Context, source string, after uint64, fn func(seq uint64, m queue.Message, to []queue.LaneID) bool) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	log := s.sourceLog(source)
	if log == nil {
		return nil
	}
	head, damaged := log.durable.Load(), 0
	for seq := max(after, log.trimmed.Load()) + 1; seq <= head; seq++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		rec, unreadable := s.readMessage(log, seq)
		if unreadable != nil {
			rec = codec.Record{Lost: true, Body: []byte(unreadable.Error())}
		}
		to, err := s.neededBy(log, seq, &rec)
		if err != nil {
			return err
		}
		switch {
		case unreadable == nil:
			damaged = 0
		case len(to) > 0:
			if damaged++; damaged > maxDamagedRun || !pebble.IsCorruptionError(unreadable) {
				return s.explain(unreadable)
			}
		}
		if len(to) > 0 && !fn(seq, messageOf(source, &rec), to) {
			return nil
		}
	}
	return nil
}

// readMessage reads a message, as reader.read does. A damaged one is an error of the engine, for IsCorruptionError.
func (s *Store) readMessage(log *sourceLog, seq uint64) (rec codec.Record, err error) {
	v, err := s.get(codec.Key(codec.PrefixMessage, log.number, seq))
	if pebble.IsCorruptionError(err) { // The file may be sound.
		v, err = s.get(codec.Key(codec.PrefixMessage, log.number, seq))
	}
	switch {
	case errors.Is(err, pebble.ErrNotFound):
		return rec, s.corruptf("message %d of %s is missing", seq, log.source)
	case err != nil:
		return rec, err
	}
	if err := rec.Decode(v); err != nil {
		return rec, s.corruptf("message %d of %s: %w", seq, log.source, err)
	}
	return rec, nil
}

// neededBy returns the lanes and groups that have to deliver a message.
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
			l.mu.Unlock()
			if err != nil || delivered {
				return
			}
			if len(rec.Only) <= len(id.Destination) { // It is not for one endpoint only.
				id = id.Group()
			}
		}
		if !slices.Contains(to, id) {
			to = append(to, id)
		}
	})
	return to, err
}

// messageOf returns the message of a record, without Only and the names in Skip, but with the errors of filters. Its body refers to the record.
func messageOf(source string, rec *codec.Record) queue.Message {
	return queue.Message{
		Source: source, ID: string(rec.ID), Type: typeOf(rec), Event: string(rec.Event), AcceptedAt: codec.FromMillis(rec.AcceptedAt),
		TraceParent: string(rec.Trace), LongNumbers: rec.Long, Skip: rec.Failed(), Body: rec.Body,
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
