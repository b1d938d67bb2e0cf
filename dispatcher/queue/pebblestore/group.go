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

// group is what the lanes with LaneID.Any of one Source and destination share:
// a lock, the ledger, and one bit per message that says that it is final, so
// delivered, filtered out, or a dead letter.
//
// Invariants: a message that is not final is in some lane. A message in the
// retry index of a lane is not final, "delete" messages excepted. What a lane
// writes is in one batch with the state of the group, so that the group knows
// at least what its lanes know. It never knows more of "delete" messages, for which
// its bits do not prevent that a lane counts a message twice: see lane.aheadOfDisk.
type group struct {
	id     queue.LaneID // Its Endpoint is empty.
	number uint64
	log    *sourceLog
	dest   *destination

	// mu is the mu of all lanes of the group, too.
	mu sync.Mutex
	groupState
	lanes []*lane
	// blocks are the bits in memory: those that changed, and some that were read.
	blocks map[uint64]*bitBlock
	// erased: blocks below this one are deleted.
	erased uint64
	seen   seenStats
	oldest acceptance
}

// groupState is what is durable of a group but its bits: one value.
type groupState struct {
	start     uint64 // Messages up to here are not the group's.
	delivered uint64
	filtered  uint64
	buried    uint64
	discarded uint64
	passed    uint64 // Messages in the group's part of the log that are for others.
	// extra counts what is accepted beyond the group's part of the log: "delete"
	// messages, which count once per lane, and messages of lanes that were dropped.
	extra   uint64
	records uint64 // Messages that a lane gave up while another has them.
	shared  bool   // It had two lanes at some time. Without, there are no bits.
	gaps    []gap
}

// gap is a part of the log, both ends included, that was appended while all
// lanes had ended: it is not for the group.
type gap struct{ from, to uint64 }

// bitBlock holds the bits of blockBits messages.
type bitBlock struct {
	bits  [blockBits / 64]uint64
	dirty bool
}

const (
	blockBits = 4096
	// maxBlocks bounds the blocks of a group in memory that are not to be written.
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
	for _, n := range [...]uint64{g.start, g.delivered, g.filtered, g.buried, g.discarded, g.passed, g.extra, g.records, shared} {
		v = binary.AppendUvarint(v, n)
	}
	for _, p := range g.gaps {
		v = binary.AppendUvarint(binary.AppendUvarint(v, p.from), p.to)
	}
	return v
}

func (g *groupState) decode(v []byte) error {
	d := decoder{b: v}
	for _, n := range [...]*uint64{&g.start, &g.delivered, &g.filtered, &g.buried, &g.discarded, &g.passed, &g.extra, &g.records} {
		*n = d.uvarint()
	}
	g.shared = d.uvarint() != 0
	for len(d.b) > 0 {
		g.gaps = append(g.gaps, gap{d.uvarint(), d.uvarint()})
	}
	return d.err()
}

// put adds the group's state, and the bits that changed, to a batch. The caller
// holds mu until the batch is applied.
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

// putFailed has all bits and lanes in memory written again.
func (g *group) putFailed() {
	for _, l := range g.lanes {
		l.aheadOfDisk = true
	}
	for _, k := range g.blocks {
		k.dirty = true
	}
}

// block returns the bits around a message.
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

// final reports whether a message is final.
func (s *Store) final(g *group, seq uint64) (bool, error) {
	if !g.shared {
		return false, nil
	}
	k, err := s.block(g, seq/blockBits)
	if err != nil {
		return false, err
	}
	return k.bits[seq%blockBits/64]&(1<<(seq%64)) != 0, nil
}

// finish makes a message final; first is false when it was before.
func (s *Store) finish(g *group, seq uint64) (first bool, err error) {
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

// notFinal returns the first message from seq on that is neither final nor in a gap.
func (s *Store) notFinal(g *group, seq, limit uint64) (uint64, error) {
	for seq <= limit {
		if to := g.behindGap(seq); to != seq {
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
			if to := g.behindGap(seq + n); to == seq+n {
				return to, nil
			}
			seq += n
			continue
		}
		seq = seq - seq%64 + 64
	}
	return seq, nil
}

// behindGap returns seq, or the message behind the gap that it is in.
func (g *group) behindGap(seq uint64) uint64 { return behindGap(g.gaps, seq) }

func behindGap(gaps []gap, seq uint64) uint64 {
	for _, p := range gaps {
		if seq >= p.from && seq <= p.to {
			seq = p.to + 1
		}
	}
	return seq
}

// end is the first message that is not the group's any more, 0 while there is none.
func (g *group) end() (end uint64) {
	for _, l := range g.lanes {
		if l.end == 0 {
			return 0
		}
		end = max(end, l.end)
	}
	return end
}

// resume is called before a lane of the group is opened or continues. What was
// appended since all lanes ended is a gap.
func (g *group) resume(behind uint64) {
	if end := g.end(); end != 0 && end < behind {
		g.gaps = append(g.gaps, gap{end, behind - 1})
		g.passed += behind - end
	}
}

// limit is the last message that is the group's.
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

// has reports whether a message is in a lane: unread, leased, given back or waiting for a retry.
func (s *Store) has(l *lane, seq uint64) (bool, error) {
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

// elsewhere reports whether another lane of the group has a message that is for
// it, and delivers the message before this lane does: lanes that have left come
// after all others, the youngest last.
func (s *Store) elsewhere(l *lane, seq uint64) (bool, error) {
	return s.inOneOf(l.group.lanes, seq, func(o *lane) bool {
		return o != l && (!o.left || l.left && o.number < l.number)
	})
}

// settledWithout reports whether a message is final, or in another lane of the
// group that it is for, so that this lane is not the last one to count it.
func (s *Store) settledWithout(l *lane, seq uint64) (bool, error) {
	if ok, err := s.final(l.group, seq); ok || err != nil {
		return ok, err
	}
	return s.inOneOf(l.group.lanes, seq, func(o *lane) bool { return o != l })
}

func (s *Store) inOneOf(lanes []*lane, seq uint64, counts func(*lane) bool) (bool, error) {
	for _, o := range lanes {
		if !counts(o) {
			continue
		}
		ok, err := s.has(o, seq)
		if ok && seq >= o.next {
			ok, err = s.concerns(o, seq)
		}
		if ok || err != nil {
			return ok, err
		}
	}
	return false, nil
}

// concerns reports whether a message that a lane has not read is for it. One that
// is damaged concerns every lane.
func (s *Store) concerns(l *lane, seq uint64) (bool, error) {
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

// needless reports whether a lane that has left need not deliver a message.
func (s *Store) needless(l *lane, seq uint64) (bool, error) {
	if ok, err := s.final(l.group, seq); ok || err != nil {
		return ok, err
	}
	return s.elsewhere(l, seq)
}

// exempt reports whether each lane of a group delivers a message by itself.
func exempt(typ string) bool { return typ == types[codeDelete] }

// took counts a message that a lane's endpoint took. The first one of the group
// ends its retries in the other lanes. It adds to b, which it makes when it is nil and needed.
func (s *Store) took(b *pebble.Batch, l *lane, d *queue.Delivery) (_ *pebble.Batch, first bool, err error) {
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
	if first, err = s.finish(g, d.Seq); !first || err != nil {
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
			continue // Its own outcome decides.
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
		o.letGo++
		o.put(b)
	}
	if g.records > 0 {
		var ok bool
		if _, ok, err = s.givenUp(g, d.Seq); !ok || err != nil {
			return b, first, err
		}
		if b == nil {
			b = s.db.NewBatch()
		}
		g.forget(b, d.Seq)
	}
	return b, true, nil
}

// letGo is what a lane knows of a message that it gave up while another lane has it.
type letGo struct {
	attempts int
	failure  queue.Failure
}

// givenUp returns what lanes knew that gave a message up.
func (s *Store) givenUp(g *group, seq uint64) (was letGo, ok bool, err error) {
	if g.records == 0 {
		return was, false, nil
	}
	v, err := s.get(key(prefixGivenUp, g.number, seq))
	if errors.Is(err, pebble.ErrNotFound) {
		return was, false, nil
	}
	if err != nil {
		return was, false, s.explain(err)
	}
	d := decoder{b: v}
	was.attempts, was.failure = int(d.uvarint()), d.failure()
	if d.bad {
		return was, false, s.corruptf("a message that a lane of group %v gave up: %w", g.id, errMalformed)
	}
	return was, true, nil
}

// forget removes what lanes knew that gave a message up.
func (g *group) forget(b *pebble.Batch, seq uint64) {
	_ = b.Delete(key(prefixGivenUp, g.number, seq), nil)
	g.records--
}

// giveUp ends a message for a lane, from whose books it is removed already: it
// becomes a dead letter, unless the group can do without. The caller holds the
// destination's lock and puts lane and destination into the batch.
func (s *Store) giveUp(b *pebble.Batch, l *lane, letter *queue.DeadLetter) (buried bool, err error) {
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
	done, err := s.final(g, letter.Seq)
	if err != nil {
		return false, err
	}
	if letter.Attempts == 0 {
		l.skip()
	}
	had, err := s.elsewhere(l, letter.Seq)
	if err != nil {
		return false, err
	}
	if done || had && l.left {
		l.letGo++
		return false, nil
	}
	was, known, err := s.givenUp(g, letter.Seq)
	if err != nil {
		return false, err
	}
	letter.Attempts += was.attempts
	if had {
		if !known {
			g.records++
		}
		_ = b.Set(key(prefixGivenUp, g.number, letter.Seq), appendFailure(binary.AppendUvarint(nil, uint64(letter.Attempts)), &letter.Failure), nil)
		l.letGo++
		return false, nil
	}
	if known {
		g.forget(b, letter.Seq)
	}
	if _, err := s.finish(g, letter.Seq); err != nil {
		return false, err
	}
	letter.Lane.Endpoint = ""
	g.buried++
	s.bury(b, l, letter)
	return true, nil
}

// skip counts a first attempt that is never made. A single URL has none of
// these: what it does not get is a dead letter.
func (l *lane) skip() {
	if len(l.group.lanes) > 1 && !l.left {
		l.skipped++
	}
}

// countRead counts what a lane reads for the first time.
func (s *Store) countRead(l *lane, typ string, seq uint64) error {
	if l.group == nil || !exempt(typ) {
		return nil
	}
	l.aheadOfDisk = true
	first, err := s.finish(l.group, seq)
	if !first && err == nil {
		l.group.extra++
	}
	return err
}

// filter counts a message that is filtered out.
func (s *Store) filter(l *lane, seq uint64) error {
	l.filtered++
	if l.group == nil {
		return nil
	}
	first, err := s.finish(l.group, seq)
	if first && err == nil {
		l.group.filtered++
	}
	return err
}

// pass counts a message that is not for the lane. The lane may be the last one of
// the group that reads it. A message for an endpoint that is gone is then a dead
// letter when it was attempted, and discarded otherwise.
func (s *Store) pass(b *pebble.Batch, l *lane, r *reader, seq uint64, sibling bool) (buried bool, err error) {
	l.passed++
	if l.group == nil {
		return false, nil
	}
	if done, err := s.settledWithout(l, seq); done || err != nil {
		return false, err
	}
	g := l.group
	was, known, err := s.givenUp(g, seq)
	if err != nil {
		return false, err
	}
	if _, err := s.finish(g, seq); err != nil {
		return false, err
	}
	switch {
	case !known && sibling:
		g.discarded++
		l.passed--
		l.letGo++
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
	g.forget(b, seq)
	letter := rec.letter(queue.LaneID{Source: g.id.Source, Destination: g.id.Destination}, seq)
	letter.Attempts, letter.Failure = was.attempts, was.failure
	g.buried++
	l.passed-- // The dead letter is counted here.
	s.bury(b, l, &letter)
	return true, nil
}

// firstOpen is the first message of a lane that is not final.
func (s *Store) firstOpen(l *lane) (uint64, error) {
	seq, err := s.notFinal(l.group, max(l.next, l.pendingFrom), l.limit())
	if err != nil {
		return 0, err
	}
	if l.pendingFrom = seq; seq > l.limit() {
		seq = never
	}
	for o := range l.open {
		if o < seq {
			if done, err := s.final(l.group, o); err != nil {
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

// groupStats are the stats of a group.
func (s *Store) groupStats(g *group) queue.LaneStats {
	if !s.lockUnlessFull(&g.mu) {
		return g.seen.load()
	}
	defer g.mu.Unlock()
	st := queue.LaneStats{Ledger: g.ledger(), Ended: g.end() != 0}
	due, first := int64(never), uint64(never)
	leased := map[uint64]bool{}
	for _, l := range g.lanes {
		st.Retrying = max(st.Retrying, l.retrying())
		for seq, t := range l.open {
			if done, err := s.final(g, seq); err == nil && t.leased && !done {
				leased[seq] = true
			}
		}
		due = min(due, l.nextDue)
		if st.Pending > 0 {
			seq, err := s.firstOpen(l)
			if err != nil {
				s.log.With(g.id.LogArgs()...).Error("reading the oldest message of a group failed", "error", s.explain(err))
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
			s.log.With(g.id.LogArgs()...).Error("reading the oldest message of a group failed", "error", s.explain(err))
		}
	}
	g.seen.store(st)
	return st
}

// acceptance is a message and when it was accepted: a cache of one.
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

// loadGroup reads a group after a start.
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

// alignGroups takes over what a release that does not know groups did to lanes
// that were alone in theirs: it counted in the lane, and may have dropped it.
func (s *Store) alignGroups() error {
	b := s.db.NewBatch()
	for id, g := range s.groups {
		if len(g.lanes) == 0 {
			delete(s.groups, id)
			for _, all := range []*[]counted{&g.log.counted, &g.dest.counted} {
				*all = slices.DeleteFunc(slices.Clone(*all), func(o counted) bool { return o == counted(g) })
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
	for _, prefix := range []byte{prefixBits, prefixGivenUp} {
		_ = b.DeleteRange(key(prefix, g.number), after(prefix, g.number), nil)
	}
}

// groupFor returns the group of a lane, which it makes when it is missing. The caller holds registry.
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

// dropFrom removes a lane from its group, and the group with its last one. It
// returns what the ledger of dropped lanes gets. The caller holds all locks.
func (s *Store) dropFrom(b *pebble.Batch, l *lane) (gone queue.Ledger, discarded int64, err error) {
	g := l.group
	if len(g.lanes) > 1 {
		before := g.discarded
		if err := s.discardOrphans(b, l); err != nil {
			return gone, 0, err
		}
		// Where the other lanes have ended before this one, its messages stay accepted.
		limit, lanes := g.limit(), g.lanes
		g.lanes = slices.DeleteFunc(slices.Clone(lanes), func(o *lane) bool { return o == l })
		g.extra += limit - g.limit()
		g.lanes = lanes
		g.put(b)
		return queue.Ledger{}, int64(g.discarded - before), nil
	}
	gone = g.ledger()
	discarded = gone.Pending
	gone.Discarded += gone.Pending
	gone.Pending = 0
	s.deleteGroup(b, g)
	return gone, discarded, nil
}

// discardOrphans discards what only this lane of its group has.
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
			g.discarded++ // It was this lane's own.
			return nil
		}
		if done, err := s.settledWithout(l, seq); done || err != nil {
			return err
		}
		if _, known, err := s.givenUp(g, seq); err != nil {
			return err
		} else if known {
			g.forget(b, seq)
		}
		if _, err := s.finish(g, seq); err != nil {
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
	// Lanes that go on have all that they have not read.
	limit := l.limit()
	for _, o := range g.lanes {
		if o != l && o.end == 0 {
			limit = min(limit, o.next-1)
		}
	}
	for seq := l.next; ; seq++ {
		var err error
		if seq, err = s.notFinal(g, seq, limit); err != nil || seq > limit {
			return err
		}
		if err := orphan(seq); err != nil {
			return err
		}
	}
}

// eraseBits deletes the bits behind all lanes of a group.
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
		l.put(b) // No lane may need the bits again after a crash.
	}
	return s.applyFor(b, g)
}

// eraseAllBits does it for all groups.
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
