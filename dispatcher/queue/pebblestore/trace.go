package pebblestore

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sort"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// traceDelays are the distances between the time of a message in the index, when it was written,
// and its acceptance, in the order in which they are tried.
var traceDelays = []time.Duration{50 * time.Millisecond, 5 * time.Second}

// traceMessages bounds the messages of a Source that a search reads.
const traceMessages = 1_000_000

// Trace implements queue.Stats.
func (s *Store) Trace(ctx context.Context, id string, since time.Time) (queue.TraceResult, error) {
	result := queue.TraceResult{Complete: true}
	if err := s.enter(); err != nil {
		return result, err
	}
	defer s.leave()
	for _, log := range s.allLogs() {
		t, found, err := s.traceIn(ctx, log, id, since, &result)
		if err != nil {
			return result, s.explain(err)
		}
		if found {
			result.Traces = append(result.Traces, t)
		}
		if ctx.Err() != nil {
			result.Complete = false
			break
		}
	}
	return result, nil
}

// Search implements queue.Stats.
func (s *Store) Search(ctx context.Context, match func(body []byte) bool, since time.Time, max int) (queue.TraceResult, error) {
	result := queue.TraceResult{Complete: true}
	if err := s.enter(); err != nil {
		return result, err
	}
	defer s.leave()
	logs := s.allLogs()
	for i, log := range logs {
		if err := s.searchIn(ctx, log, match, since, max, &result); err != nil {
			return result, s.explain(err)
		}
		if ctx.Err() != nil || len(result.Traces) >= max {
			result.Complete = result.Complete && i == len(logs)-1
			break
		}
	}
	return result, nil
}

// searchIn adds the matching pending messages of one Source.
func (s *Store) searchIn(ctx context.Context, log *sourceLog, match func([]byte) bool, since time.Time, max int,
	result *queue.TraceResult) error {
	head := log.durable.Load()
	first := log.trimmed.Load() + 1
	if !since.IsZero() {
		var err error
		if first, err = s.firstAfter(log, head, since); err != nil {
			return err
		}
	}
	var failed error
	whole, err := s.readLog(ctx, log, first, func(n uint64, rec *codec.Record, _ []byte) bool {
		if n > head {
			return false
		}
		if len(result.Traces) >= max {
			result.Complete = false
			return false
		}
		result.Scanned++
		result.Until = codec.FromMillis(rec.AcceptedAt)
		if rec.Lost || !match(rec.Body) {
			return true
		}
		t := queue.Trace{Source: log.source}
		if failed = s.describe(log, n, rec, &t); failed == nil && t.Pending() {
			result.Traces = append(result.Traces, t)
		}
		return failed == nil
	})
	result.Complete = result.Complete && whole
	return errors.Join(failed, err)
}

// traceIn looks for a message in the log of one Source.
func (s *Store) traceIn(ctx context.Context, log *sourceLog, id string, since time.Time, result *queue.TraceResult) (t queue.Trace,
	found bool, err error) {
	t.Source = log.source
	at, indexed, err := s.duplicates.acceptedAt(log.source, id)
	if err != nil {
		return t, false, err
	}
	head := log.durable.Load()
	var seq uint64
	var rec codec.Record
	switch {
	case indexed:
		t.AcceptedAt = codec.FromMillis(at)
		for _, delay := range traceDelays {
			first, err := s.firstAfter(log, head, t.AcceptedAt.Add(-delay))
			if err != nil {
				return t, false, err
			}
			end := codec.Millis(t.AcceptedAt.Add(delay))
			var whole bool
			seq, rec, whole, err = s.findIn(ctx, log, id, first, func(_ uint64, r *codec.Record) bool {
				return r.AcceptedAt <= end
			}, nil)
			if err != nil {
				return t, false, err
			}
			if seq > 0 {
				break
			}
			if !whole { // Whether the message was removed is unknown.
				result.Complete = false
				return t, false, nil
			}
		}
	case !since.IsZero():
		first, err := s.firstAfter(log, head, since)
		if err != nil {
			return t, false, err
		}
		var whole bool
		seq, rec, whole, err = s.findIn(ctx, log, id, first, func(n uint64, _ *codec.Record) bool { return n <= head }, result)
		if err != nil {
			return t, false, err
		}
		result.Complete = result.Complete && (whole || seq > 0)
	}
	switch {
	case seq == 0:
		return t, indexed, nil
	case seq > log.durable.Load():
		result.Storing = true
		return t, false, nil
	}
	return t, true, s.describe(log, seq, &rec, &t)
}

// describe fills a trace from a message's record and its state in the lanes.
func (s *Store) describe(log *sourceLog, seq uint64, rec *codec.Record, t *queue.Trace) (err error) {
	t.Seq, t.ID, t.AcceptedAt, t.Type, t.Event = seq, string(rec.ID), codec.FromMillis(rec.AcceptedAt), typeOf(rec), string(rec.Event)
	log.eachLane(func(l *lane) {
		if err != nil {
			return
		}
		var lt queue.LaneTrace
		var found bool
		if lt, found, err = s.traceLane(l, seq, rec); found {
			t.Lanes = append(t.Lanes, lt)
		}
	})
	return err
}

// firstAfter returns the first stored message of a log that was accepted at a time or later. The
// times of a log ascend, but for the order in which concurrent requests were written.
func (s *Store) firstAfter(log *sourceLog, head uint64, at time.Time) (uint64, error) {
	first := log.trimmed.Load() + 1
	if head < first {
		return first, nil
	}
	var failed error
	n := sort.Search(int(head-first+1), func(i int) bool {
		seq := first + uint64(i)
		v, closer, err := s.db.Get(codec.Key(codec.PrefixMessage, log.number, seq))
		if errors.Is(err, pebble.ErrNotFound) {
			return seq > log.trimmed.Load() // It was trimmed meanwhile, or it is damaged.
		}
		if err != nil {
			failed = err
			return true
		}
		defer func() { _ = closer.Close() }()
		var r codec.Record
		return r.DecodeHead(v) != nil || r.AcceptedAt >= codec.Millis(at)
	})
	return first + uint64(n), failed
}

// findIn reads a log from a message on, while in returns true, and returns the position of the message
// with an ID; 0 if there is none. The record is valid until the next write of the caller. whole is false
// if the bounds of the read ended it.
func (s *Store) findIn(ctx context.Context, log *sourceLog, id string, from uint64, in func(uint64, *codec.Record) bool,
	result *queue.TraceResult) (seq uint64, rec codec.Record, whole bool, err error) {
	var failed error
	whole, err = s.readLog(ctx, log, from, func(n uint64, r *codec.Record, v []byte) bool {
		if !in(n, r) {
			return false
		}
		if result != nil {
			result.Scanned++
			result.Until = codec.FromMillis(r.AcceptedAt)
		}
		if string(r.ID) != id {
			return true
		}
		// The record refers to the iterator's memory.
		seq, failed = n, rec.Decode(append([]byte(nil), v...))
		return false
	})
	return seq, rec, whole, errors.Join(failed, err)
}

// readLog calls fn for each readable message of a log from a position on, until fn returns false. The record
// and its encoded form are valid during the call. whole is false if the bounds of the read ended it.
func (s *Store) readLog(ctx context.Context, log *sourceLog, from uint64, fn func(n uint64, rec *codec.Record, v []byte) bool) (whole bool,
	err error) {
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: codec.Key(codec.PrefixMessage, log.number, from),
		UpperBound: codec.After(codec.PrefixMessage, log.number)})
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	read := 0
	for ok := it.First(); ok; ok = it.Next() {
		if read++; read > traceMessages || read%1024 == 1 && ctx.Err() != nil {
			return false, nil
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return false, err
		}
		var rec codec.Record
		if rec.Decode(v) != nil {
			continue // The lanes report damaged messages.
		}
		if !fn(codec.Number(it.Key(), 1), &rec, v) {
			break
		}
	}
	return true, it.Error()
}

// traceLane returns the state of a message in a lane; found is false if the lane does not have it.
func (s *Store) traceLane(l *lane, seq uint64, rec *codec.Record) (t queue.LaneTrace, found bool, err error) {
	t.Lane = l.id
	switch rec.Verdict(l.id) {
	case codec.Passed:
		return t, false, nil
	case codec.Filtered:
		t.State = queue.TraceFiltered
	}
	if !s.lockUnlessFull(l.mu) {
		return t, false, fmt.Errorf("the state of lane %v waits for space on the disk or in the log: %w", l.id, queue.ErrFull)
	}
	defer l.mu.Unlock()
	if l.dropped || seq <= l.Start || l.End != 0 && seq >= l.End || l.group != nil && l.group.Gaps.After(seq) != seq {
		return t, false, nil
	}
	if t.State != "" {
		return t, true, nil
	}
	due, attempts, retrying, err := s.retryOf(l, seq)
	if err != nil {
		return t, false, err
	}
	t.Attempts = attempts
	open, isOpen := l.open[seq]
	switch {
	case isOpen && open.leased && !open.revoked:
		t.State = queue.TraceInFlight
	case retrying:
		t.State, t.Due = queue.TraceRetrying, codec.FromMillis(due)
	case isOpen && !open.revoked, seq >= l.Next:
		t.State = queue.TraceWaiting
	default:
		t.State = queue.TraceEnded
	}
	return t, true, nil
}

// acceptedAt returns when a message of a Source was accepted, by the index of the duplicate window.
func (d *duplicates) acceptedAt(source, id string) (at int64, ok bool, err error) {
	if d.s.o.DuplicateWindow <= 0 {
		return 0, false, nil
	}
	h, _ := hashOf(nil, &queue.Message{Source: source, ID: id})
	d.mu.Lock()
	var starts []int64
	for i := len(d.buckets) - 1; i >= 0; i-- {
		if d.buckets[i].mayHave(&h) {
			starts = append(starts, d.buckets[i].start)
		}
	}
	d.mu.Unlock()
	for _, start := range starts {
		v, closer, err := d.s.db.Get(append(codec.Key(codec.PrefixDuplicate, uint64(start)), h[:]...))
		if errors.Is(err, pebble.ErrNotFound) {
			continue
		}
		if err != nil {
			return 0, false, err
		}
		n := len(v)
		if n == 4 {
			at = start + int64(binary.BigEndian.Uint32(v))
		}
		if err := closer.Close(); err != nil {
			return 0, false, err
		}
		if n != 4 {
			return 0, false, fmt.Errorf("a messageId: %w", codec.ErrMalformed)
		}
		return at, true, nil
	}
	return 0, false, nil
}
