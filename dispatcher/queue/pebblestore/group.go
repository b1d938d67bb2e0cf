package pebblestore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
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
	groupState
	lanes []*lane
	// blocks are the bits in memory: all changed ones, and some that were read.
	blocks map[uint64]*bitBlock
	// erased: the blocks before this one are deleted.
	erased      uint64
	cachedStats statsCache
	oldest      acceptance
}

// groupState is the durable state of a group without its bits: one value.
type groupState struct {
	start     uint64 // The group has the messages after this one.
	delivered uint64
	filtered  uint64
	buried    uint64
	discarded uint64
	passed    uint64 // Messages in the group's part of the log that are for other destinations.
	// extra counts the messages accepted beyond the group's part of the log: "delete" messages,
	// which count once per lane, and messages of dropped lanes.
	extra     uint64
	handovers uint64 // Number of handover records.
	shared    bool   // The group had two lanes at some time; a group that is not shared has no bits.
	gaps      []gap
}

// gap is a part of the log, both ends included, that was appended after all lanes had ended and
// before a lane continued or was opened. Its messages are not for the group.
type gap struct{ from, to uint64 }

// bitBlock holds the bits of blockBits messages.
type bitBlock struct {
	bits  [blockBits / 64]uint64
	dirty bool
}

const (
	blockBits = 4096
	// maxBlocks bounds the unchanged blocks of a group in memory.
	maxBlocks = 64
)

func newGroup(id queue.LaneID, number uint64, log *sourceLog, dest *destination) *group {
	return &group{id: id.Group(), number: number, log: log, dest: dest, blocks: map[uint64]*bitBlock{}}
}

func (g *groupState) encode() []byte {
	var v []byte
	shared := uint64(0)
	if g.shared {
		shared = 1
	}
	for _, n := range [...]uint64{g.start, g.delivered, g.filtered, g.buried, g.discarded, g.passed, g.extra, g.handovers, shared} {
		v = binary.AppendUvarint(v, n)
	}
	for _, p := range g.gaps {
		v = binary.AppendUvarint(binary.AppendUvarint(v, p.from), p.to)
	}
	return v
}

func (g *groupState) decode(v []byte) error {
	d := decoder{b: v}
	for _, n := range [...]*uint64{&g.start, &g.delivered, &g.filtered, &g.buried, &g.discarded, &g.passed, &g.extra, &g.handovers} {
		*n = d.uvarint()
	}
	g.shared = d.uvarint() != 0
	for len(d.b) > 0 {
		g.gaps = append(g.gaps, gap{d.uvarint(), d.uvarint()})
	}
	return d.err()
}

// put adds the group's state and the changed bits to a batch. The caller holds mu until the
// batch is applied.
func (g *group) put(b *pebble.Batch) {
	for _, l := range g.lanes {
		if l.aheadOfDisk {
			l.putState(b)
		}
	}
	_ = b.Set(key(prefixGroup, g.number), g.encode(), nil)
	for n, k := range g.blocks {
		if !k.dirty {
			continue
		}
		v := make([]byte, 0, blockBits/8)
		for _, w := range k.bits {
			v = binary.BigEndian.AppendUint64(v, w)
		}
		_ = b.Set(key(prefixBits, g.number, n), v, nil)
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
	v, err := s.get(key(prefixBits, g.number, n))
	switch {
	case errors.Is(err, pebble.ErrNotFound):
	case err != nil:
		return nil, s.explain(err)
	case len(v) != blockBits/8:
		return nil, s.corruptf("the bits of group %v: %w", g.id, errMalformed)
	default:
		for i := range k.bits {
			k.bits[i] = binary.BigEndian.Uint64(v[8*i:])
		}
	}
	g.blocks[n] = k
	return k, nil
}

// isFinal reports whether a message is final.
func (s *Store) isFinal(g *group, seq uint64) (bool, error) {
	if !g.shared {
		return false, nil
	}
	k, err := s.block(g, seq/blockBits)
	if err != nil {
		return false, err
	}
	return k.bits[seq%blockBits/64]&(1<<(seq%64)) != 0, nil
}

// markFinal marks a message as final; first is false when it was final before.
func (s *Store) markFinal(g *group, seq uint64) (first bool, err error) {
	if !g.shared {
		return true, nil
	}
	k, err := s.block(g, seq/blockBits)
	if err != nil {
		return false, err
	}
	w, bit := &k.bits[seq%blockBits/64], uint64(1)<<(seq%64)
	if *w&bit != 0 {
		return false, nil
	}
	*w |= bit
	k.dirty = true
	return true, nil
}

// nextNotFinal returns the first message from seq to limit that is neither final nor in a gap,
// or a position after limit.
func (s *Store) nextNotFinal(g *group, seq, limit uint64) (uint64, error) {
	for seq <= limit {
		if to := g.afterGap(seq); to != seq {
			seq = to
			continue
		}
		if !g.shared {
			return seq, nil
		}
		k, err := s.block(g, seq/blockBits)
		if err != nil {
			return 0, err
		}
		if w := ^k.bits[seq%blockBits/64] >> (seq % 64); w != 0 {
			n := uint64(bits.TrailingZeros64(w))
			if to := g.afterGap(seq + n); to == seq+n {
				return to, nil
			}
			seq += n
			continue
		}
		seq = seq - seq%64 + 64
	}
	return seq, nil
}

// afterGap returns seq, or the first message after the gap that contains seq.
func (g *group) afterGap(seq uint64) uint64 { return afterGap(g.gaps, seq) }

func afterGap(gaps []gap, seq uint64) uint64 {
	for _, p := range gaps {
		if seq >= p.from && seq <= p.to {
			seq = p.to + 1
		}
	}
	return seq
}

// end is the first message that is not the group's; 0 while a lane has no end.
func (g *group) end() (end uint64) {
	for _, l := range g.lanes {
		if l.end == 0 {
			return 0
		}
		end = max(end, l.end)
	}
	return end
}

// resume is called before a lane of the group is opened or continues. It records the messages
// appended since all lanes ended as a gap.
func (g *group) resume(behind uint64) {
	if end := g.end(); end != 0 && end < behind {
		g.gaps = append(g.gaps, gap{end, behind - 1})
		g.passed += behind - end
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
	accepted := g.limit() - g.start - g.passed + g.extra
	return queue.Ledger{
		Accepted: int64(accepted), Delivered: int64(g.delivered), Filtered: int64(g.filtered), DeadLettered: int64(g.buried),
		Discarded: int64(g.discarded), Pending: int64(accepted - g.settled()),
	}
}

func (g *groupState) settled() uint64 { return g.delivered + g.filtered + g.buried + g.discarded }

// isPendingIn reports whether a message is pending in a lane: unread, leased, released or in
// the retry index.
func (s *Store) isPendingIn(l *lane, seq uint64) (bool, error) {
	if seq <= l.start || l.end != 0 && seq >= l.end {
		return false, nil
	}
	if seq >= l.next {
		return true, nil
	}
	if _, ok := l.open[seq]; ok || l.retries == 0 || seq < l.lowSeq {
		return ok, nil
	}
	_, _, ok, err := s.retryOf(l, seq)
	return ok, err
}

// retryOf returns a message's entry in the retry index of a lane.
func (s *Store) retryOf(l *lane, seq uint64) (due int64, attempt int, ok bool, err error) {
	v, err := s.get(key(prefixRetry, l.number, seq))
	if errors.Is(err, pebble.ErrNotFound) {
		return 0, 0, false, nil
	}
	d := decoder{b: v}
	if due, attempt = d.retry(); err == nil && d.bad {
		err = s.corruptf("a retry of lane %v: %w", l.id, errMalformed)
	}
	return due, attempt, true, s.explain(err)
}

// pendingElsewhere reports whether the message is pending in another lane of the group that
// delivers before this lane. Lanes whose endpoint was removed deliver after all others, in the
// order of their numbers.
func (s *Store) pendingElsewhere(l *lane, seq uint64) (bool, error) {
	return s.pendingInAny(l.group.lanes, seq, func(o *lane) bool {
		return o != l && (!o.endpointRemoved || l.endpointRemoved && o.number < l.number)
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
		if ok && seq >= o.next {
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
	v, closer, err := s.db.Get(key(prefixMessage, l.log.number, seq))
	if err == nil {
		defer func() { _ = closer.Close() }()
		var rec record
		if err = rec.decode(v); err == nil {
			return rec.verdict(l.id) != passed, nil
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
func exempt(typ string) bool { return typ == types[codeDelete] }

// countDelivered counts a message that a lane's endpoint accepted. The first delivery in the
// group removes the message from the retry indexes of the other lanes. The changes are added to
// b; when b is nil and a batch is needed, countDelivered creates and returns one.
func (s *Store) countDelivered(b *pebble.Batch, l *lane, d *queue.Delivery) (_ *pebble.Batch, first bool, err error) {
	l.delivered++
	g := l.group
	if g == nil {
		return b, true, nil
	}
	if exempt(d.Type) {
		g.delivered++
		l.aheadOfDisk = true
		return b, true, nil
	}
	if first, err = s.markFinal(g, d.Seq); !first || err != nil {
		return b, first, err
	}
	g.delivered++
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
		case o.retries == 0 || d.Seq < o.lowSeq || d.Seq >= o.next:
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
		if o.retries == uint64(o.openRetries) {
			o.nextDue = never
		}
		o.handedOver++
		o.put(b)
	}
	if g.handovers > 0 {
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

// handover is the record of a message that a lane handed over to the other lanes of its group
// after failed attempts: the attempts so far and the last failure.
type handover struct {
	attempts int
	failure  queue.Failure
}

// handoverOf returns the handover record of a message.
func (s *Store) handoverOf(g *group, seq uint64) (was handover, ok bool, err error) {
	if g.handovers == 0 {
		return was, false, nil
	}
	v, err := s.get(key(prefixHandover, g.number, seq))
	if errors.Is(err, pebble.ErrNotFound) {
		return was, false, nil
	}
	if err != nil {
		return was, false, s.explain(err)
	}
	d := decoder{b: v}
	was.attempts, was.failure = int(d.uvarint()), d.failure()
	if d.bad {
		return was, false, s.corruptf("a handover record of group %v: %w", g.id, errMalformed)
	}
	return was, true, nil
}

// deleteHandover deletes the handover record of a message.
func (g *group) deleteHandover(b *pebble.Batch, seq uint64) {
	_ = b.Delete(key(prefixHandover, g.number, seq), nil)
	g.handovers--
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
		g.buried++
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
	if done || had && l.endpointRemoved {
		l.handedOver++
		return false, nil
	}
	was, known, err := s.handoverOf(g, letter.Seq)
	if err != nil {
		return false, err
	}
	letter.Attempts += was.attempts
	if had {
		if !known {
			g.handovers++
		}
		_ = b.Set(key(prefixHandover, g.number, letter.Seq), appendFailure(binary.AppendUvarint(nil, uint64(letter.Attempts)), &letter.Failure), nil)
		l.handedOver++
		return false, nil
	}
	if known {
		g.deleteHandover(b, letter.Seq)
	}
	if _, err := s.markFinal(g, letter.Seq); err != nil {
		return false, err
	}
	letter.Lane.Endpoint = ""
	g.buried++
	s.bury(b, l, letter)
	return true, nil
}

// countSkipped counts a first attempt that is never made. A lane that is alone in its group
// counts none: its messages become dead letters instead.
func (l *lane) countSkipped() {
	if len(l.group.lanes) > 1 && !l.endpointRemoved {
		l.skipped++
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
		l.group.extra++
	}
	return err
}

// countFiltered counts a message that is filtered out.
func (s *Store) countFiltered(l *lane, seq uint64) error {
	l.filtered++
	if l.group == nil {
		return nil
	}
	first, err := s.markFinal(l.group, seq)
	if first && err == nil {
		l.group.filtered++
	}
	return err
}

// countPassed counts a message that is not for the lane. When no other lane of the group has
// the message, the group counts it, too: as a dead letter when it has a handover record, as
// discarded when it is for a removed endpoint (sibling), and as passed otherwise.
func (s *Store) countPassed(b *pebble.Batch, l *lane, r *reader, seq uint64, sibling bool) (buried bool, err error) {
	l.passed++
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
		g.discarded++
		l.passed--
		l.handedOver++
		s.metrics.discard(1)
		return false, nil
	case !known:
		g.passed++
		return false, nil
	}
	rec, err := r.read(seq)
	if err != nil {
		return false, err
	}
	g.deleteHandover(b, seq)
	letter := rec.letter(queue.LaneID{Source: g.id.Source, Destination: g.id.Destination}, seq)
	letter.Attempts, letter.Failure = was.attempts, was.failure
	g.buried++
	l.passed-- // bury counts the message.
	s.bury(b, l, &letter)
	return true, nil
}

// firstNotFinal returns the first pending message of a lane that is not final.
func (s *Store) firstNotFinal(l *lane) (uint64, error) {
	seq, err := s.nextNotFinal(l.group, max(l.next, l.pendingFrom), l.limit())
	if err != nil {
		return 0, err
	}
	if l.pendingFrom = seq; seq > l.limit() {
		seq = never
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
	due, first := int64(never), uint64(never)
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
	if due != never {
		st.NextRetry = fromMillis(due)
	}
	if first != never {
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
		var r record
		v, closer, err := s.db.Get(key(prefixMessage, log.number, seq))
		if err != nil {
			return 0, time.Time{}, fmt.Errorf("message %d of %s: %w", seq, log.source, err)
		}
		defer func() { _ = closer.Close() }()
		if err := r.decode(v); err != nil {
			return seq, time.Time{}, err
		}
		*cache = acceptance{seq, r.acceptedAt}
	}
	return seq, fromMillis(cache.at), nil
}

// loadGroup reads a group's state at the start.
func (s *Store) loadGroup(g *group) error {
	v, err := s.get(key(prefixGroup, g.number))
	if err == nil {
		err = g.decode(v)
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
		} else if !g.shared {
			l := g.lanes[0]
			g.start, g.delivered, g.filtered, g.buried, g.passed = l.start, l.delivered, l.filtered, l.buried, l.passed
		}
	}
	if b.Count() == 0 {
		return b.Close()
	}
	return s.apply(b)
}

// deleteGroup deletes all keys of a group.
func (s *Store) deleteGroup(b *pebble.Batch, g *group) {
	_ = b.Delete(key(prefixGroup, g.number), nil)
	_ = b.Delete(binary.BigEndian.AppendUint64(append([]byte(nil), keyGroups...), g.number), nil)
	for _, prefix := range []byte{prefixBits, prefixHandover} {
		_ = b.DeleteRange(key(prefix, g.number), after(prefix, g.number), nil)
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
	_ = b.Set(binary.BigEndian.AppendUint64(append([]byte(nil), keyGroups...), g.number), appendLaneName(nil, g.id), nil)
	return g, true
}

// dropFrom removes a lane from its group, and deletes the group after its last lane. It returns
// the ledger that the caller adds to the ledgers of dropped lanes. The caller holds all locks.
func (s *Store) dropFrom(b *pebble.Batch, l *lane) (dropped queue.Ledger, discarded int64, err error) {
	g := l.group
	if len(g.lanes) > 1 {
		before := g.discarded
		if err := s.discardOrphans(b, l); err != nil {
			return dropped, 0, err
		}
		// When the other lanes ended before this one, the messages between the ends remain
		// accepted.
		limit, lanes := g.limit(), g.lanes
		g.lanes = slices.DeleteFunc(slices.Clone(lanes), func(o *lane) bool { return o == l })
		g.extra += limit - g.limit()
		g.lanes = lanes
		g.put(b)
		return queue.Ledger{}, int64(g.discarded - before), nil
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
		var rec record
		v, err := s.get(key(prefixMessage, l.log.number, seq))
		if err == nil {
			err = rec.decode(v)
		}
		if err != nil && !pebble.IsCorruptionError(err) {
			return fmt.Errorf("message %d of %s: %w", seq, l.log.source, err)
		}
		if seq < l.next && rec.code == codeDelete {
			g.discarded++ // "delete" messages count once per lane.
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
		if rec.verdict(l.id) == passed && !rec.forSibling(l.id) {
			g.passed++
		} else {
			g.discarded++
		}
		return nil
	}
	for seq := range l.open {
		if err := orphan(seq); err != nil {
			return err
		}
	}
	if l.retries > 0 {
		it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: key(prefixRetry, l.number), UpperBound: after(prefixRetry, l.number)})
		if err != nil {
			return err
		}
		defer func() { _ = it.Close() }()
		for ok := it.First(); ok; ok = it.Next() {
			seq := number(it.Key(), 1)
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
		if o != l && o.end == 0 {
			limit = min(limit, o.next-1)
		}
	}
	for seq := l.next; ; seq++ {
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
	if !g.shared || len(g.lanes) == 0 {
		return nil
	}
	need := uint64(never)
	for _, l := range g.lanes {
		first, err := s.first(l)
		if err != nil {
			return err
		}
		need = min(need, first)
	}
	if need == never || need/blockBits <= g.erased {
		return nil
	}
	b := s.db.NewBatch()
	_ = b.DeleteRange(key(prefixBits, g.number), key(prefixBits, g.number, need/blockBits), nil)
	for n := range g.blocks {
		if n < need/blockBits {
			delete(g.blocks, n)
		}
	}
	g.gaps = slices.DeleteFunc(slices.Clone(g.gaps), func(p gap) bool { return p.to < need })
	g.erased = need / blockBits
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
