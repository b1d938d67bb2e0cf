package pebblestore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// group is the shared state of the lanes with LaneID.Any of one Source and destination: a lock,
// the ledger, and one bit per message that marks the message as final. A message is final when
// it is delivered, filtered out, discarded, a dead letter, or for other destinations only.
//
// Invariants:
//
//   - A message that is not final is pending in at least one lane.
//   - A message in the retry index of a lane is not final, except "delete" messages.
//   - A lane's state is written in one batch with the group's state, so the group on disk is
//     never older than its lanes.
//   - For "delete" messages the group on disk is also never newer than its lanes, because the
//     bits do not prevent that a lane counts such a message twice; see lane.aheadOfDisk.
type group struct {
	id     queue.LaneID // Without an Endpoint.
	number uint64
	log    *sourceLog
	dest   *destination

	// mu is also the mu of all lanes of the group.
	mu sync.Mutex
	codec.GroupState
	lanes []*lane
	// blocks are the bits in memory: all changed ones, and some that were read.
	blocks map[uint64]*bitBlock
	// erased: the blocks before this one are deleted.
	erased      uint64
	cachedStats statsCache
	oldest      acceptance
}

// bitBlock holds the bits of blockBits messages.
type bitBlock struct {
	codec.Block
	dirty bool
}

// maxBlocks bounds the unchanged blocks of a group in memory.
const maxBlocks = 64

func newGroup(id queue.LaneID, number uint64, log *sourceLog, dest *destination) *group {
	return &group{id: id.Group(), number: number, log: log, dest: dest, blocks: map[uint64]*bitBlock{}}
}

// put adds the group's state and the changed bits to a batch. The caller holds mu until the
// batch is applied.
func (g *group) put(b *pebble.Batch) {
	for _, l := range g.lanes {
		if l.aheadOfDisk {
			l.putState(b)
		}
	}
	_ = b.Set(codec.Key(codec.PrefixGroup, g.number), g.Encode(), nil)
	for n, k := range g.blocks {
		if !k.dirty {
			continue
		}
		_ = b.Set(codec.Key(codec.PrefixBits, g.number, n), k.Encode(), nil)
		k.dirty = false
	}
}

// putFailed marks all bits in memory, and all lanes, as changed, so that the next put writes
// them.
func (g *group) putFailed() {
	for _, l := range g.lanes {
		l.aheadOfDisk = true
	}
	for _, k := range g.blocks {
		k.dirty = true
	}
}

// block returns the n-th block of bits.
func (s *Store) block(g *group, n uint64) (*bitBlock, error) {
	if k := g.blocks[n]; k != nil {
		return k, nil
	}
	if len(g.blocks) >= maxBlocks {
		for m, k := range g.blocks {
			if !k.dirty {
				delete(g.blocks, m)
			}
		}
	}
	k := new(bitBlock)
	if v, err := s.get(codec.Key(codec.PrefixBits, g.number, n)); err == nil {
		if err := k.Decode(v); err != nil {
			return nil, s.corruptf("the bits of group %v: %w", g.id, err)
		}
	} else if !errors.Is(err, pebble.ErrNotFound) {
		return nil, s.explain(err)
	}
	g.blocks[n] = k
	return k, nil
}

// isFinal reports whether a message is final.
func (s *Store) isFinal(g *group, seq uint64) (bool, error) {
	if !g.Shared {
		return false, nil
	}
	k, err := s.block(g, seq/codec.BlockBits)
	if err != nil {
		return false, err
	}
	return k.IsFinal(seq), nil
}

// markFinal marks a message as final; first is false when it was final before.
func (s *Store) markFinal(g *group, seq uint64) (first bool, err error) {
	if !g.Shared {
		return true, nil
	}
	k, err := s.block(g, seq/codec.BlockBits)
	if err != nil || k.IsFinal(seq) {
		return false, err
	}
	k.MarkFinal(seq)
	k.dirty = true
	return true, nil
}

// nextNotFinal returns the first message from seq to limit that is neither final nor in a gap,
// or a position after limit.
func (s *Store) nextNotFinal(g *group, seq, limit uint64) (uint64, error) {
	for seq <= limit {
		if to := g.Gaps.After(seq); to != seq {
			seq = to
			continue
		}
		if !g.Shared {
			return seq, nil
		}
		k, err := s.block(g, seq/codec.BlockBits)
		if err != nil {
			return 0, err
		}
		next, found := k.NextNotFinal(seq)
		if found && g.Gaps.After(next) == next {
			return next, nil
		}
		seq = next
	}
	return seq, nil
}

// end is the first message that is not the group's; 0 while a lane has no end.
func (g *group) end() (end uint64) {
	for _, l := range g.lanes {
		if l.End == 0 {
			return 0
		}
		end = max(end, l.End)
	}
	return end
}

// resume is called before a lane of the group is opened or continues. It records the messages
// appended since all lanes ended as a gap.
func (g *group) resume(behind uint64) {
	if end := g.end(); end != 0 && end < behind {
		g.Gaps = append(g.Gaps, codec.Gap{From: end, To: behind - 1})
		g.Passed += behind - end
	}
}

// limit is the last message of the group.
func (g *group) limit() uint64 {
	limit := g.log.durable.Load()
	if end := g.end(); end != 0 {
		limit = min(limit, end-1)
	}
	return limit
}

func (g *group) ledger() queue.Ledger {
	accepted := g.Accepted(g.limit())
	return queue.Ledger{
		Accepted: int64(accepted), Delivered: int64(g.Delivered), Filtered: int64(g.Filtered), Omitted: int64(g.Omitted),
		DeadLettered: int64(g.Buried), Discarded: int64(g.Discarded), Pending: int64(accepted - g.Settled()),
	}
}

// isPendingIn reports whether a message is pending in a lane: unread, leased, released or in
// the retry index.
func (s *Store) isPendingIn(l *lane, seq uint64) (bool, error) {
	if seq <= l.Start || l.End != 0 && seq >= l.End {
		return false, nil
	}
	if seq >= l.Next {
		return true, nil
	}
	if _, ok := l.open[seq]; ok || l.Retries == 0 || seq < l.lowSeq {
		return ok, nil
	}
	_, _, ok, err := s.retryOf(l, seq)
	return ok, err
}

// retryOf returns a message's entry in the retry index of a lane.
func (s *Store) retryOf(l *lane, seq uint64) (due int64, attempt int, ok bool, err error) {
	v, err := s.get(codec.Key(codec.PrefixRetry, l.number, seq))
	if errors.Is(err, pebble.ErrNotFound) {
		return 0, 0, false, nil
	}
	d := codec.Decoder{Rest: v}
	if due, attempt = d.Retry(); err == nil && d.Bad {
		err = s.corruptf("a retry of lane %v: %w", l.id, codec.ErrMalformed)
	}
	return due, attempt, true, s.explain(err)
}

// pendingElsewhere reports whether the message is pending in another lane of the group that
// delivers before this lane. Lanes whose endpoint was removed deliver after all others, in the
// order of their numbers.
func (s *Store) pendingElsewhere(l *lane, seq uint64) (bool, error) {
	return s.pendingInAny(l.group.lanes, seq, func(o *lane) bool {
		return o != l && (!o.EndpointRemoved || l.EndpointRemoved && o.number < l.number)
	})
}

// finalOrElsewhere reports whether a message is final, or pending in another lane of the group,
// so that the group does not count it when this lane ends it.
func (s *Store) finalOrElsewhere(l *lane, seq uint64) (bool, error) {
	if ok, err := s.isFinal(l.group, seq); ok || err != nil {
		return ok, err
	}
	return s.pendingInAny(l.group.lanes, seq, func(o *lane) bool { return o != l })
}

func (s *Store) pendingInAny(lanes []*lane, seq uint64, counts func(*lane) bool) (bool, error) {
	for _, o := range lanes {
		if !counts(o) {
			continue
		}
		ok, err := s.isPendingIn(o, seq)
		if ok && seq >= o.Next {
			ok, err = s.isAddressedTo(o, seq)
		}
		if ok || err != nil {
			return ok, err
		}
	}
	return false, nil
}

// isAddressedTo reports whether an unread message is for a lane. A damaged message is for every
// lane.
func (s *Store) isAddressedTo(l *lane, seq uint64) (bool, error) {
	v, closer, err := s.db.Get(codec.Key(codec.PrefixMessage, l.log.number, seq))
	if err == nil {
		defer func() { _ = closer.Close() }()
		var rec codec.Record
		if err = rec.Decode(v); err == nil {
			return rec.Verdict(l.id) != codec.Passed, nil
		}
	}
	if pebble.IsCorruptionError(err) || errors.Is(err, pebble.ErrNotFound) {
		return true, nil
	}
	return false, s.explain(err)
}

// isUnneeded reports whether a lane whose endpoint was removed need not deliver a message.
func (s *Store) isUnneeded(l *lane, seq uint64) (bool, error) {
	if ok, err := s.isFinal(l.group, seq); ok || err != nil {
		return ok, err
	}
	return s.pendingElsewhere(l, seq)
}

// exempt reports whether each lane of a group delivers messages of a type by itself.
func exempt(typ string) bool { return typ == codec.Types[codec.CodeDelete] }

// countDelivered counts a message that a lane's endpoint accepted, or that the destination omitted. The first delivery in the
// group removes the message from the retry indexes of the other lanes. The changes are added to
// b; when b is nil and a batch is needed, countDelivered creates and returns one. The caller puts the lane into the batch.
func (s *Store) countDelivered(b *pebble.Batch, l *lane, d *queue.Delivery) (_ *pebble.Batch, first bool, err error) {
	*l.outcome(d)++
	g := l.group
	if g == nil {
		return b, true, nil
	}
	if exempt(d.Type) {
		*g.outcome(d)++
		l.aheadOfDisk = true
		return b, true, nil
	}
	if first, err = s.markFinal(g, d.Seq); !first || err != nil {
		return b, first, err
	}
	*g.outcome(d)++
	if len(g.lanes) == 1 {
		return b, true, nil
	}
	for _, o := range g.lanes {
		if o == l {
			continue
		}
		t, open := o.open[d.Seq]
		switch {
		case open && (t.leased || t.due == 0):
			continue // The outcome of the attempt decides.
		case open:
			delete(o.open, d.Seq)
			o.openRetries--
			o.dropReleased(d.Seq)
		case o.Retries == 0 || d.Seq < o.lowSeq || d.Seq >= o.Next:
			continue
		default:
			var ok bool
			if t.due, _, ok, err = s.retryOf(o, d.Seq); err != nil {
				return b, first, err
			} else if !ok {
				continue
			}
		}
		if b == nil {
			b = s.db.NewBatch()
		}
		o.forgetRetry(b, d.Seq, t.due)
		if o.Retries == uint64(o.openRetries) {
			o.nextDue = codec.Never
		}
		o.HandedOver++
		o.aheadOfDisk = true
	}
	if g.Handovers > 0 {
		var ok bool
		if _, ok, err = s.handoverOf(g, d.Seq); !ok || err != nil {
			return b, first, err
		}
		if b == nil {
			b = s.db.NewBatch()
		}
		g.deleteHandover(b, d.Seq)
	}
	return b, true, nil
}

// outcome returns the counter of a message that is settled by Ack.
func (g *group) outcome(d *queue.Delivery) *uint64 {
	if d.Omitted {
		return &g.Omitted
	}
	return &g.Delivered
}

// handover is the record of a message that a lane handed over to the other lanes of its group
// after failed attempts: the attempts so far and the last failure.
type handover struct {
	attempts int
	failure  queue.Failure
}

// handoverOf returns the handover record of a message.
func (s *Store) handoverOf(g *group, seq uint64) (was handover, ok bool, err error) {
	if g.Handovers == 0 {
		return was, false, nil
	}
	v, err := s.get(codec.Key(codec.PrefixHandover, g.number, seq))
	if errors.Is(err, pebble.ErrNotFound) {
		return was, false, nil
	}
	if err != nil {
		return was, false, s.explain(err)
	}
	d := codec.Decoder{Rest: v}
	was.attempts, was.failure = int(d.Uvarint()), d.Failure()
	if d.Bad {
		return was, false, s.corruptf("a handover record of group %v: %w", g.id, codec.ErrMalformed)
	}
	return was, true, nil
}

// deleteHandover deletes the handover record of a message.
func (g *group) deleteHandover(b *pebble.Batch, seq uint64) {
	_ = b.Delete(codec.Key(codec.PrefixHandover, g.number, seq), nil)
	g.Handovers--
}

// buryOrHandOver ends a message for a lane that has already removed it from its index and its
// open messages. The message becomes a dead letter, unless it is final or another lane of the
// group delivers it. The caller holds the destination's lock and puts lane and destination into
// the batch.
func (s *Store) buryOrHandOver(b *pebble.Batch, l *lane, letter *queue.DeadLetter) (buried bool, err error) {
	g := l.group
	if g == nil {
		s.bury(b, l, letter)
		return true, nil
	}
	letter.Lane.Any = false
	if exempt(letter.Type) {
		g.Buried++
		s.bury(b, l, letter)
		return true, nil
	}
	done, err := s.isFinal(g, letter.Seq)
	if err != nil {
		return false, err
	}
	if letter.Attempts == 0 {
		l.countSkipped()
	}
	had, err := s.pendingElsewhere(l, letter.Seq)
	if err != nil {
		return false, err
	}
	if done || had && l.EndpointRemoved {
		l.HandedOver++
		return false, nil
	}
	was, known, err := s.handoverOf(g, letter.Seq)
	if err != nil {
		return false, err
	}
	letter.Attempts += was.attempts
	if had {
		if !known {
			g.Handovers++
		}
		_ = b.Set(codec.Key(codec.PrefixHandover, g.number, letter.Seq),
			codec.AppendFailure(binary.AppendUvarint(nil, uint64(letter.Attempts)), &letter.Failure), nil)
		l.HandedOver++
		return false, nil
	}
	if known {
		g.deleteHandover(b, letter.Seq)
	}
	if _, err := s.markFinal(g, letter.Seq); err != nil {
		return false, err
	}
	letter.Lane.Endpoint = ""
	g.Buried++
	s.bury(b, l, letter)
	return true, nil
}

// countSkipped counts a first attempt that is never made. A lane that is alone in its group
// counts none: its messages become dead letters instead.
func (l *lane) countSkipped() {
	if len(l.group.lanes) > 1 && !l.EndpointRemoved {
		l.Skipped++
	}
}

// countRead updates the group when a lane reads a message for the first time.
func (s *Store) countRead(l *lane, typ string, seq uint64) error {
	if l.group == nil || !exempt(typ) {
		return nil
	}
	l.aheadOfDisk = true
	first, err := s.markFinal(l.group, seq)
	if !first && err == nil {
		l.group.Extra++
	}
	return err
}

// countFiltered counts a message that is filtered out.
func (s *Store) countFiltered(l *lane, seq uint64) error {
	l.Filtered++
	if l.group == nil {
		return nil
	}
	first, err := s.markFinal(l.group, seq)
	if first && err == nil {
		l.group.Filtered++
	}
	return err
}

// countPassed counts a message that is not for the lane. When no other lane of the group has
// the message, the group counts it, too: as a dead letter when it has a handover record, as
// discarded when it is for a removed endpoint (sibling), and as passed otherwise.
func (s *Store) countPassed(b *pebble.Batch, l *lane, r *reader, seq uint64, sibling bool) (buried bool, err error) {
	l.Passed++
	if l.group == nil {
		return false, nil
	}
	if done, err := s.finalOrElsewhere(l, seq); done || err != nil {
		return false, err
	}
	g := l.group
	was, known, err := s.handoverOf(g, seq)
	if err != nil {
		return false, err
	}
	if _, err := s.markFinal(g, seq); err != nil {
		return false, err
	}
	switch {
	case !known && sibling:
		g.Discarded++
		l.Passed--
		l.HandedOver++
		s.metrics.discard(1)
		return false, nil
	case !known:
		g.Passed++
		return false, nil
	}
	rec, err := r.read(seq)
	if err != nil {
		return false, err
	}
	g.deleteHandover(b, seq)
	letter := letterOf(&rec, queue.LaneID{Source: g.id.Source, Destination: g.id.Destination}, seq)
	letter.Attempts, letter.Failure = was.attempts, was.failure
	g.Buried++
	l.Passed-- // bury counts the message.
	s.bury(b, l, &letter)
	return true, nil
}

// firstNotFinal returns the first pending message of a lane that is not final.
func (s *Store) firstNotFinal(l *lane) (uint64, error) {
	seq, err := s.nextNotFinal(l.group, max(l.Next, l.pendingFrom), l.limit())
	if err != nil {
		return 0, err
	}
	if l.pendingFrom = seq; seq > l.limit() {
		seq = codec.Never
	}
	for o := range l.open {
		if o < seq {
			if done, err := s.isFinal(l.group, o); err != nil {
				return 0, err
			} else if !done {
				seq = o
			}
		}
	}
	retry, ok, err := s.firstRetry(l)
	if ok {
		seq = min(seq, retry)
	}
	return seq, err
}

// groupStats returns the stats of a group.
func (s *Store) groupStats(g *group) queue.LaneStats {
	if !s.lockUnlessFull(&g.mu) {
		return g.cachedStats.load()
	}
	defer g.mu.Unlock()
	st := queue.LaneStats{Ledger: g.ledger(), Ended: g.end() != 0}
	due, first := int64(codec.Never), uint64(codec.Never)
	leased := map[uint64]bool{}
	for _, l := range g.lanes {
		st.Retrying = max(st.Retrying, l.retrying())
		for seq, t := range l.open {
			if done, err := s.isFinal(g, seq); err == nil && t.leased && !done {
				leased[seq] = true
			}
		}
		due = min(due, l.nextDue)
		if st.Pending > 0 {
			seq, err := s.firstNotFinal(l)
			if err != nil {
				s.log.With(g.id.LogArgs()...).Error("read of a group's oldest message failed", "error", s.explain(err))
				continue
			}
			first = min(first, seq)
		}
	}
	st.InFlight = int64(len(leased))
	if due != codec.Never {
		st.NextRetry = codec.FromMillis(due)
	}
	if first != codec.Never {
		var err error
		if st.First, st.OldestPending, err = s.acceptedAt(g.log, first, &g.oldest); err != nil {
			s.log.With(g.id.LogArgs()...).Error("read of a group's oldest message failed", "error", s.explain(err))
		}
	}
	g.cachedStats.store(st)
	return st
}

// acceptance caches the acceptance time of one message.
type acceptance struct {
	seq uint64
	at  int64
}

// acceptedAt returns when a message was accepted.
func (s *Store) acceptedAt(log *sourceLog, seq uint64, cache *acceptance) (uint64, time.Time, error) {
	if seq != cache.seq {
		var r codec.Record
		v, closer, err := s.db.Get(codec.Key(codec.PrefixMessage, log.number, seq))
		if err != nil {
			return 0, time.Time{}, fmt.Errorf("message %d of %s: %w", seq, log.source, err)
		}
		defer func() { _ = closer.Close() }()
		if err := r.Decode(v); err != nil {
			return seq, time.Time{}, err
		}
		*cache = acceptance{seq, r.AcceptedAt}
	}
	return seq, codec.FromMillis(cache.at), nil
}

// loadGroup reads a group's state at the start.
func (s *Store) loadGroup(g *group) error {
	v, err := s.get(codec.Key(codec.PrefixGroup, g.number))
	if err == nil {
		err = g.Decode(v)
	}
	if err != nil {
		return s.corruptf("the state of group %v: %w", g.id, err)
	}
	return nil
}

// alignGroups adopts changes by a release without groups to lanes that are alone in their
// group: that release counted in the lane only, and may have dropped it.
func (s *Store) alignGroups() error {
	b := s.db.NewBatch()
	for id, g := range s.groups {
		if len(g.lanes) == 0 {
			delete(s.groups, id)
			for _, all := range []*[]ledgerHolder{&g.log.holders, &g.dest.holders} {
				*all = slices.DeleteFunc(slices.Clone(*all), func(o ledgerHolder) bool { return o == ledgerHolder(g) })
			}
			s.deleteGroup(b, g)
		} else if !g.Shared {
			l := g.lanes[0]
			g.Start, g.Delivered, g.Filtered, g.Buried, g.Passed = l.Start, l.Delivered, l.Filtered, l.Buried, l.Passed
			g.Omitted = l.Omitted
		}
	}
	if b.Count() == 0 {
		return b.Close()
	}
	return s.apply(b)
}

// deleteGroup deletes all keys of a group.
func (s *Store) deleteGroup(b *pebble.Batch, g *group) {
	_ = b.Delete(codec.Key(codec.PrefixGroup, g.number), nil)
	_ = b.Delete(binary.BigEndian.AppendUint64(append([]byte(nil), codec.KeyGroups...), g.number), nil)
	for _, prefix := range []byte{codec.PrefixBits, codec.PrefixHandover} {
		_ = b.DeleteRange(codec.Key(prefix, g.number), codec.After(prefix, g.number), nil)
	}
}

// groupFor returns the group of a lane, and creates it when it is missing. The caller holds
// registry.
func (s *Store) groupFor(b *pebble.Batch, id queue.LaneID, log *sourceLog, dest *destination) (g *group, fresh bool) {
	s.mu.RLock()
	g = s.groups[id.Group()]
	s.mu.RUnlock()
	if g != nil {
		return g, false
	}
	g = newGroup(id, s.nextNumber(b), log, dest)
	_ = b.Set(binary.BigEndian.AppendUint64(append([]byte(nil), codec.KeyGroups...), g.number), codec.AppendLaneName(nil, g.id), nil)
	return g, true
}

// dropFrom removes a lane from its group, and deletes the group after its last lane. It returns
// the ledger that the caller adds to the ledgers of dropped lanes. The caller holds all locks.
func (s *Store) dropFrom(b *pebble.Batch, l *lane) (dropped queue.Ledger, discarded int64, err error) {
	g := l.group
	if len(g.lanes) > 1 {
		before := g.Discarded
		if err := s.discardOrphans(b, l); err != nil {
			return dropped, 0, err
		}
		// When the other lanes ended before this one, the messages between the ends remain
		// accepted.
		limit, lanes := g.limit(), g.lanes
		g.lanes = slices.DeleteFunc(slices.Clone(lanes), func(o *lane) bool { return o == l })
		g.Extra += limit - g.limit()
		g.lanes = lanes
		g.put(b)
		return queue.Ledger{}, int64(g.Discarded - before), nil
	}
	dropped = g.ledger()
	discarded = dropped.Pending
	dropped.Discarded += dropped.Pending
	dropped.Pending = 0
	s.deleteGroup(b, g)
	return dropped, discarded, nil
}

// discardOrphans discards the messages that are pending in this lane of its group only.
func (s *Store) discardOrphans(b *pebble.Batch, l *lane) error {
	g := l.group
	orphan := func(seq uint64) error {
		var rec codec.Record
		v, err := s.get(codec.Key(codec.PrefixMessage, l.log.number, seq))
		if err == nil {
			err = rec.Decode(v)
		}
		if err != nil && !pebble.IsCorruptionError(err) {
			return fmt.Errorf("message %d of %s: %w", seq, l.log.source, err)
		}
		if seq < l.Next && rec.Code == codec.CodeDelete {
			g.Discarded++ // "delete" messages count once per lane.
			return nil
		}
		if done, err := s.finalOrElsewhere(l, seq); done || err != nil {
			return err
		}
		if _, known, err := s.handoverOf(g, seq); err != nil {
			return err
		} else if known {
			g.deleteHandover(b, seq)
		}
		if _, err := s.markFinal(g, seq); err != nil {
			return err
		}
		if rec.Verdict(l.id) == codec.Passed && !rec.ForSibling(l.id) {
			g.Passed++
		} else {
			g.Discarded++
		}
		return nil
	}
	for seq := range l.open {
		if err := orphan(seq); err != nil {
			return err
		}
	}
	if l.Retries > 0 {
		it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: codec.Key(codec.PrefixRetry, l.number),
			UpperBound: codec.After(codec.PrefixRetry, l.number)})
		if err != nil {
			return err
		}
		defer func() { _ = it.Close() }()
		for ok := it.First(); ok; ok = it.Next() {
			seq := codec.Number(it.Key(), 1)
			if _, open := l.open[seq]; open {
				continue
			}
			if err := orphan(seq); err != nil {
				return err
			}
		}
		if err := it.Error(); err != nil {
			return err
		}
	}
	// All messages that a lane without an end has not read are pending there.
	limit := l.limit()
	for _, o := range g.lanes {
		if o != l && o.End == 0 {
			limit = min(limit, o.Next-1)
		}
	}
	for seq := l.Next; ; seq++ {
		var err error
		if seq, err = s.nextNotFinal(g, seq, limit); err != nil || seq > limit {
			return err
		}
		if err := orphan(seq); err != nil {
			return err
		}
	}
}

// eraseBits deletes the bits of the messages before the first one that a lane needs.
func (s *Store) eraseBits(g *group) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.Shared || len(g.lanes) == 0 {
		return nil
	}
	need := uint64(codec.Never)
	for _, l := range g.lanes {
		first, err := s.first(l)
		if err != nil {
			return err
		}
		need = min(need, first)
	}
	if need == codec.Never || need/codec.BlockBits <= g.erased {
		return nil
	}
	b := s.db.NewBatch()
	_ = b.DeleteRange(codec.Key(codec.PrefixBits, g.number), codec.Key(codec.PrefixBits, g.number, need/codec.BlockBits), nil)
	for n := range g.blocks {
		if n < need/codec.BlockBits {
			delete(g.blocks, n)
		}
	}
	g.Gaps = slices.DeleteFunc(slices.Clone(g.Gaps), func(p codec.Gap) bool { return p.To < need })
	g.erased = need / codec.BlockBits
	for _, l := range g.lanes {
		l.put(b) // After a crash no lane may be at a position that needs the deleted bits.
	}
	return s.applyFor(b, g)
}

// eraseAllBits deletes the unneeded bits of all groups.
func (s *Store) eraseAllBits() error {
	s.mu.RLock()
	groups := slices.Collect(maps.Values(s.groups))
	s.mu.RUnlock()
	for _, g := range groups {
		if err := s.eraseBits(g); err != nil {
			return err
		}
	}
	return nil
}

// applyFor applies a batch with the state of a group, if g is not nil.
func (s *Store) applyFor(b *pebble.Batch, g *group) error {
	err := s.apply(b)
	if err != nil && g != nil {
		g.putFailed()
	}
	return err
}
