package pebblestore

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// lane is a lane: its durable state, and its open messages in memory.
type lane struct {
	id     queue.LaneID
	number uint64
	log    *sourceLog
	dest   *destination

	// leasing is held by the caller that reads messages for the lane and advances next. It is
	// locked before mu.
	leasing sync.Mutex

	// mu is the lane's own lock, or the lock of its group.
	mu    *sync.Mutex
	group *group // nil for a lane without LaneID.Any.
	codec.LaneState
	opened, dropped bool
	// opening is closed when the lane is durable; nil for a lane of an earlier run.
	opening chan struct{}
	// dirty: the lane is in the flusher's list.
	dirty bool
	// aheadOfDisk: the group counted a "delete" message of the lane, or ended one of its retries,
	// and the lane was not written since. The next write of the group includes the lane;
	// otherwise the group would count the message again after a crash.
	aheadOfDisk bool
	// open are the messages taken from the log or the retry index that are not settled.
	open map[uint64]openMessage
	// released are the positions of open messages that are not leased, ascending.
	released []uint64
	// openRetries is the number of open messages with an entry in the retry index.
	openRetries int
	// nextDue is the due time of the first entry of the retry index that is not open.
	nextDue int64
	// lowDue is a lower bound of the entries of the index by due time; scans start there and
	// avoid deleted entries. lowSeq is the lower bound by position, and the first entry itself
	// unless lowStale.
	lowDue   retryKey
	lowSeq   uint64
	lowStale bool
	// lowWait is a lower bound of the failure times in the index of requested waits.
	lowWait int64
	// firstAttempts is the number of first attempts leased since the last retry, while retries are
	// due.
	firstAttempts int
	// oldest caches the oldest pending message.
	oldest acceptance
	// waiting caches the oldest message of OldestWaiting.
	waiting acceptance
	// pendingFrom: all unread messages before this one are final.
	pendingFrom uint64
	// revoked are leased first attempts that were skipped during the lease.
	revoked map[uint64]struct{}

	// lastDamaged is the last message that could not be read, the damagedRun-th in a row.
	lastDamaged, damagedRun uint64
	// cachedStats are returned by LaneStats while mu is not available.
	cachedStats statsCache

	// wantsNotify: the last Lease returned fewer messages than requested, so the lane is
	// notified of new ones.
	wantsNotify atomic.Bool

	// Guarded by the lock of retryTimer.
	notifyAt  int64
	heapIndex int
}

type retryKey struct {
	due int64
	seq uint64
}

func (k retryKey) less(o retryKey) bool { return k.due < o.due || k.due == o.due && k.seq < o.seq }

// openMessage is a message taken from the log (due is 0) or from the retry index.
type openMessage struct {
	due     int64
	attempt int
	leased  bool
	// revoked: the message was skipped to free space, and the lane no longer has it.
	revoked bool
}

func newLane(id queue.LaneID, number uint64, log *sourceLog, dest *destination, g *group) *lane {
	l := &lane{id: id, number: number, log: log, dest: dest, group: g, open: map[uint64]openMessage{}, nextDue: codec.Never, heapIndex: -1}
	if l.mu = new(sync.Mutex); g != nil {
		l.mu = &g.mu
	}
	return l
}

// loadLane reads a lane's state at the start.
func (s *Store) loadLane(l *lane) error {
	v, err := s.get(codec.Key(codec.PrefixLane, l.number))
	if err != nil {
		return s.corruptf("the state of lane %v: %w", l.id, err)
	}
	open, err := l.Decode(v)
	if err != nil {
		return s.corruptf("the state of lane %v: %w", l.id, err)
	}
	if head := l.log.durable.Load(); l.Next > head+1 || l.End > head+1 {
		return s.corruptf("the log of %s ends at message %d, but lane %v has read up to %d: a file was cut off", l.log.source, head, l.id, l.Next-1)
	}
	if first := l.log.trimmed.Load() + 1; l.Next < first && !l.ReadAll() || len(open) > 0 && open[0] < first {
		return s.corruptf("the log of %s begins at message %d, but lane %v needs an earlier one", l.log.source, first, l.id)
	}
	for _, seq := range open {
		l.open[seq] = openMessage{}
	}
	l.released = open
	if l.Retries > 0 {
		if err := s.correctDue(l); err != nil {
			return err
		}
		if err := s.scanDue(l, 0, 0, nil); err != nil {
			return err
		}
		l.lowStale = true
	}
	return nil
}

// correctAhead is the time until a retry above which its clock is examined at the start. It bounds how many
// retries are read: nearly all are due earlier, because they wait for their backoff.
const correctAhead = 10 * time.Minute

// correctDue plans the retries again that were planned with a clock that was ahead of this one. Each of them
// waits as long from now as it was to wait from its last attempt.
func (s *Store) correctDue(l *lane) (err error) {
	now := s.o.Now().UnixMilli()
	it, err := s.db.NewIter(&pebble.IterOptions{
		LowerBound: codec.Key(codec.PrefixDue, l.number, uint64(now+correctAhead.Milliseconds())),
		UpperBound: codec.After(codec.PrefixDue, l.number),
	})
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }()
	b := s.db.NewBatch()
	for ok := it.First(); ok; ok = it.Next() {
		due, seq := int64(codec.Number(it.Key(), 1)), codec.Number(it.Key(), 2)
		key := codec.Key(codec.PrefixRetry, l.number, seq)
		v, err := s.get(key)
		d := codec.Decoder{Rest: v}
		_, attempt := d.Retry()
		f := d.Failure()
		if err != nil || d.Bad || f.Time.UnixMilli() <= now {
			continue // The next attempt reports a damaged entry.
		}
		corrected := now + max(0, due-f.Time.UnixMilli())
		if backoff, err := s.get(codec.Key(codec.PrefixWait, l.number, uint64(f.Time.UnixMilli()), seq)); err == nil {
			_ = b.Set(codec.Key(codec.PrefixWait, l.number, uint64(now), seq), backoff, nil)
		}
		f.Time = codec.FromMillis(now)
		_ = b.Delete(it.Key(), nil)
		_ = b.Set(codec.Key(codec.PrefixDue, l.number, uint64(corrected), seq), it.Value(), nil)
		_ = b.Set(key, codec.AppendRetry(nil, corrected, attempt, &f), nil)
		if b.Count() >= maxCorrected {
			if err := s.apply(b); err != nil {
				return err
			}
			b = s.db.NewBatch()
		}
	}
	if err := it.Error(); err != nil || b.Count() == 0 {
		return errors.Join(err, b.Close())
	}
	return s.apply(b)
}

// maxCorrected is the largest number of changes in a batch of correctDue.
const maxCorrected = 3 << 10

// put adds the lane's state to a batch. The caller holds mu until the batch is applied.
func (l *lane) put(b *pebble.Batch) {
	l.putState(b)
	if l.group != nil {
		l.group.put(b)
	}
}

// putState is put without the state of the group.
func (l *lane) putState(b *pebble.Batch) {
	l.aheadOfDisk = false
	var buf [64]uint64
	open := buf[:0]
	for seq, t := range l.open {
		if t.due == 0 {
			open = append(open, seq)
		}
	}
	_ = b.Set(codec.Key(codec.PrefixLane, l.number), l.Encode(make([]byte, 0, 64+2*len(open)), open), nil)
}

// changed schedules a write of the state by the flusher. The caller holds mu.
func (s *Store) changed(l *lane) {
	if !l.dirty {
		l.dirty = true
		s.flusher.add(l)
	}
}

// OpenLane implements queue.Store.
func (s *Store) OpenLane(id queue.LaneID) error {
	for _, name := range []string{id.Source, id.Destination, id.Endpoint} {
		if len(name) > maxNameBytes {
			return fmt.Errorf("open a lane: a name has %d bytes; at most %d are allowed", len(name), maxNameBytes)
		}
	}
	if id.Source == "" || id.Destination == "" {
		return errors.New("open a lane: it needs a source and a destination")
	}
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	log, err := s.logFor(id.Source)
	if err != nil {
		return err
	}
	s.registry.Lock()
	if l := s.lane(id); l != nil {
		s.registry.Unlock()
		return s.reopen(l)
	}
	l, wait, err := s.create(id, log)
	s.registry.Unlock() // Other lanes can share the sync.
	if err == nil {
		err = wait()
		close(l.opening)
	}
	if err != nil {
		return fmt.Errorf("open a lane: %w", err)
	}
	l.wantsNotify.Store(true)
	return nil
}

// reopen opens a lane of an earlier run, or waits until a new one is durable.
func (s *Store) reopen(l *lane) error {
	if l.opening != nil {
		<-l.opening
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dropped {
		return queue.ErrNoLane
	}
	if !l.opened {
		l.opened = true
		l.wantsNotify.Store(true)
		s.scheduleRetries(l)
	}
	return nil
}

// create adds a new lane. The caller holds registry.
func (s *Store) create(id queue.LaneID, log *sourceLog) (l *lane, wait func() error, err error) {
	b := s.db.NewBatch()
	dest := s.destination(id.Destination)
	var g *group
	newGroup := false
	if id.Any {
		g, newGroup = s.groupFor(b, id, log, dest)
	}
	l = newLane(id, s.nextNumber(b), log, dest, g)
	l.opened, l.opening = true, make(chan struct{})
	l.mu.Lock()
	defer l.mu.Unlock()
	// The log gets the lane before the lane's start is chosen, so that no trim deletes messages
	// behind the start.
	log.addLane(l)
	l.Start = log.durable.Load()
	l.Next = l.Start + 1
	var was codec.GroupState
	if g != nil {
		if was = g.GroupState; newGroup {
			g.Start = l.Start
		}
		g.resume(l.Next)
		g.lanes = append(slices.Clone(g.lanes), l)
		g.Shared = g.Shared || len(g.lanes) > 1
	}
	_ = b.Set(binary.BigEndian.AppendUint64(append([]byte(nil), codec.KeyLanes...), l.number), codec.AppendLaneName(nil, id), nil)
	l.put(b)
	if wait, err = s.submit(b); err != nil {
		l.dropped = true
		log.removeLane(l)
		if g != nil {
			g.GroupState, g.lanes = was, g.lanes[:len(g.lanes)-1]
			g.putFailed()
		}
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if newGroup {
		s.addGroup(g)
	}
	s.addLane(l)
	return l, wait, nil
}

// EndLane implements queue.Store.
func (s *Store) EndLane(id queue.LaneID, end queue.End) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	l := s.lane(id)
	if l == nil {
		return queue.ErrNoLane
	}
	return await(s.end(l, end))
}

func (s *Store) end(l *lane, end queue.End) (wait func() error, err error) {
	l.leasing.Lock()
	defer l.leasing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dropped {
		return nil, queue.ErrNoLane
	}
	removed := end == queue.EndpointRemoved && l.group != nil
	if (end == queue.Active) == (l.End == 0) && removed == l.EndpointRemoved {
		return nil, nil
	}
	was, groupWas := l.LaneState, codec.GroupState{}
	if l.group != nil {
		groupWas = l.group.GroupState
	}
	behind := l.log.durable.Load() + 1
	l.EndpointRemoved = removed
	switch {
	case end != queue.Active:
		if l.End == 0 {
			l.End = behind
		}
	default:
		if l.group != nil {
			l.group.resume(behind)
		}
		if l.ReadAll() {
			l.Passed += behind - l.Next
			l.Next = behind
		}
		l.End = 0
	}
	b := s.db.NewBatch()
	l.put(b)
	if wait, err = s.submit(b); err != nil {
		l.LaneState = was
		if l.group != nil {
			l.group.GroupState = groupWas
			l.group.putFailed()
		}
		return nil, fmt.Errorf("end a lane: %w", err)
	}
	return wait, nil
}

// DropLane implements queue.Store.
func (s *Store) DropLane(_ context.Context, id queue.LaneID) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	return await(s.drop(id))
}

func (s *Store) drop(id queue.LaneID) (wait func() error, err error) {
	s.registry.Lock()
	defer s.registry.Unlock()
	l := s.lane(id)
	if l == nil {
		return nil, queue.ErrNoLane
	}
	l.leasing.Lock()
	defer l.leasing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dest.mu.Lock()
	defer l.dest.mu.Unlock()
	dropped := l.ledger()
	discarded := dropped.Pending
	dropped.Discarded, dropped.Pending = dropped.Pending, 0
	b := s.db.NewBatch()
	var groupWas codec.GroupState
	if l.group != nil {
		groupWas = l.group.GroupState
		if dropped, discarded, err = s.dropFrom(b, l); err != nil {
			l.group.GroupState = groupWas
			_ = b.Close()
			return nil, fmt.Errorf("drop a lane: %w", err)
		}
	}
	ofSource, ofDestination := l.log.dropped.Plus(dropped), l.dest.dropped.Plus(dropped)
	_ = b.Set(codec.Key(codec.PrefixDropped, l.log.number), codec.AppendDropped(nil, ofSource), nil)
	l.dest.putWith(b, ofDestination)
	_ = b.Delete(binary.BigEndian.AppendUint64(append([]byte(nil), codec.KeyLanes...), l.number), nil)
	_ = b.Delete(codec.Key(codec.PrefixLane, l.number), nil)
	_ = b.DeleteRange(codec.Key(codec.PrefixWait, l.number), codec.After(codec.PrefixWait, l.number), nil)
	if l.Retries > 0 {
		_ = b.DeleteRange(codec.Key(codec.PrefixRetry, l.number), codec.After(codec.PrefixRetry, l.number), nil)
		_ = b.DeleteRange(codec.Key(codec.PrefixDue, l.number), codec.After(codec.PrefixDue, l.number), nil)
	}
	if wait, err = s.submit(b); err != nil {
		if l.group != nil {
			l.group.GroupState = groupWas
			l.group.putFailed()
		}
		return nil, fmt.Errorf("drop a lane: %w", err)
	}
	l.dropped, l.opened = true, false
	s.metrics.discard(discarded)
	s.retryTimer.forget(l)
	s.mu.Lock()
	defer s.mu.Unlock()
	l.log.removeLane(l)
	l.log.dropped, l.dest.dropped = ofSource, ofDestination
	var empty ledgerHolder = l
	if g := l.group; g != nil {
		g.lanes = slices.DeleteFunc(slices.Clone(g.lanes), func(o *lane) bool { return o == l })
		if empty = g; len(g.lanes) == 0 {
			delete(s.groups, g.id)
		}
	}
	if l.group == nil || len(l.group.lanes) == 0 {
		for _, all := range []*[]ledgerHolder{&l.log.holders, &l.dest.holders} {
			*all = slices.DeleteFunc(slices.Clone(*all), func(o ledgerHolder) bool { return o == empty })
		}
	}
	delete(s.lanes, id)
	return wait, nil
}

// skipGaps advances the lane over messages that are not for its group, and returns the first
// unread message. The caller holds mu.
func (l *lane) skipGaps() uint64 {
	if l.group != nil && !l.ReadAll() {
		if to := min(l.group.Gaps.After(l.Next), l.limit()+1); to != l.Next { // The lane can end between two gaps.
			l.Passed += to - l.Next
			l.Next = to
		}
	}
	return l.Next
}

// limit is the last message that the lane may read. The caller holds leasing or mu.
func (l *lane) limit() uint64 {
	durable := l.log.durable.Load()
	if l.End != 0 {
		return min(durable, l.End-1)
	}
	return durable
}

// ledger returns the lane's ledger. The caller holds mu.
func (l *lane) ledger() queue.Ledger {
	accepted := l.limit() - l.Start - l.Passed
	return queue.Ledger{
		Accepted: int64(accepted), Delivered: int64(l.Delivered), Filtered: int64(l.Filtered), Omitted: int64(l.Omitted),
		DeadLettered: int64(l.Buried), Discarded: int64(l.HandedOver), Pending: int64(accepted - l.Settled()),
	}
}

// ledgerHolder contributes to the ledgers of its Source and its destination: a lane without
// a group, or a group.
type ledgerHolder interface {
	locked() *sync.Mutex
	ledger() queue.Ledger
	cached() *statsCache
}

func (l *lane) locked() *sync.Mutex  { return l.mu }
func (l *lane) cached() *statsCache  { return &l.cachedStats }
func (g *group) locked() *sync.Mutex { return &g.mu }
func (g *group) cached() *statsCache { return &g.cachedStats }

// Lease implements queue.Store.
func (s *Store) Lease(id queue.LaneID, n int, buf []queue.Delivery) ([]queue.Delivery, error) {
	if err := s.enter(); err != nil {
		return buf, err
	}
	defer s.leave()
	l := s.lane(id)
	if l == nil {
		return buf, queue.ErrNoLane
	}
	l.leasing.Lock()
	defer l.leasing.Unlock()
	if n <= 0 {
		return buf, nil
	}
	r := newReader(s, l)
	defer r.close()
	r.want = n
	for {
		again, err := s.lease(l, r, n)
		if again && err == nil {
			continue
		}
		got := r.deliveries(buf)
		if len(got) > len(buf) {
			err = nil // The messages were read before the error; the next Lease returns it.
		}
		return got, err
	}
}

// maxScan bounds the messages for other lanes that one Lease reads; skipsPerScan names of destinations that do not
// get a message count as one.
const (
	maxScan      = 4096
	skipsPerScan = 16
)

// lease reads messages until the reader has want of them. again is true when messages were
// appended meanwhile.
func (s *Store) lease(l *lane, r *reader, want int) (again bool, err error) {
	now := s.o.Now().UnixMilli()
	l.mu.Lock()
	if !l.opened {
		l.mu.Unlock()
		return false, queue.ErrNoLane
	}
	// The share of the lease that is reserved for due retries.
	share := 0
	if l.nextDue <= now {
		share = min((l.firstAttempts+want-len(r.got))/8, want-len(r.got))
	}
	l.mu.Unlock()

	before, retries := len(r.got), 0
	if err := r.readFirst(want - share); err != nil {
		return false, err
	}
	if !r.full(want) {
		if retries, err = r.readDue(now, want); err != nil {
			return false, err
		}
		// There may be fewer due retries than their share.
		if err := r.readFirst(want); err != nil {
			return false, err
		}
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.nextDue > now {
		l.firstAttempts = 0
	} else {
		l.firstAttempts = min(max(0, l.firstAttempts+len(r.got)-before-8*retries), 8)
	}
	if r.full(want) {
		return false, nil
	}
	if r.dropped && r.scanned < maxScan {
		r.dropped = false
		return true, nil
	}
	l.wantsNotify.Store(true)
	switch {
	case r.scanned >= maxScan:
		// Other lanes can lease now; this lane is notified again at once.
		s.retryTimer.schedule(l, now)
	case l.limit() >= l.Next:
		// A message was appended after the read and before wantsNotify was set.
		return l.wantsNotify.CompareAndSwap(true, false), nil
	default:
		s.scheduleRetries(l)
	}
	return false, nil
}

// scheduleRetries schedules a notification of a lane that wants one for the due time of its
// next retry. The caller holds mu.
func (s *Store) scheduleRetries(l *lane) {
	if l.nextDue != codec.Never && l.wantsNotify.Load() {
		s.retryTimer.schedule(l, l.nextDue)
	}
}

// LeaseOldest implements queue.Store.
func (s *Store) LeaseOldest(id queue.LaneID) (d queue.Delivery, ok bool, err error) {
	if err := s.enter(); err != nil {
		return d, false, err
	}
	defer s.leave()
	l := s.lane(id)
	if l == nil {
		return d, false, queue.ErrNoLane
	}
	l.leasing.Lock()
	defer l.leasing.Unlock()
	r := newReader(s, l)
	defer r.close()
	for r.want = 1; err == nil && len(r.got) == 0; {
		l.mu.Lock()
		if !l.opened {
			l.mu.Unlock()
			return d, false, queue.ErrNoLane
		}
		err = r.takeOldest()
		hasTaken := len(r.taken) > 0
		l.mu.Unlock()
		if err == nil {
			err = r.readTaken(1, l.release)
		}
		if !hasTaken {
			break // No message was taken; a taken one may be damaged or unneeded, and the loop continues.
		}
	}
	for err == nil && len(r.got) == 0 && r.more() {
		r.scanned = 0
		err = r.readFirstAttempts(1)
	}
	if got := r.deliveries(nil); len(got) > 0 {
		return got[0], true, nil
	}
	return d, false, err
}

// maxDueBytes bounds the maxBytes of LeaseDue.
const maxDueBytes = 1 << 30

// LeaseDue implements queue.Store.
func (s *Store) LeaseDue(id queue.LaneID, due time.Time, n, maxBytes int, buf []queue.Delivery) ([]queue.Delivery, error) {
	if err := s.enter(); err != nil {
		return buf, err
	}
	defer s.leave()
	l := s.lane(id)
	if l == nil {
		return buf, queue.ErrNoLane
	}
	l.leasing.Lock()
	defer l.leasing.Unlock()
	if n <= 0 || maxBytes <= 0 {
		return buf, nil
	}
	r := newReader(s, l)
	defer r.close()
	r.want, r.maxBytes = n, min(maxBytes, maxDueBytes)
	l.mu.Lock()
	if !l.opened {
		l.mu.Unlock()
		return buf, queue.ErrNoLane
	}
	released := slices.Clone(l.released)
	err := r.takeDue(due.UnixMilli(), n)
	l.mu.Unlock()
	putBack := func(seq uint64, t openMessage) {
		if _, was := slices.BinarySearch(released, seq); was {
			l.release(seq, t)
		} else {
			l.returnDue(seq, t)
		}
	}
	err = errors.Join(err, r.readTaken(n, putBack))
	if len(r.got) > 0 {
		err = nil // The next lease returns it.
	}
	if last := len(r.got) - 1; r.bodies > maxBytes {
		r.taken = append(r.taken, r.got[last].seq)
		r.settleTaken(0, putBack)
		r.got = r.got[:last]
	}
	return r.deliveries(buf), err
}

// settle ends a lease; ok is false when there was none. The caller holds mu.
func (l *lane) settle(seq uint64) (t openMessage, ok bool) {
	t, ok = l.open[seq]
	if _, was := l.revoked[seq]; was && !ok {
		delete(l.revoked, seq)
		return openMessage{leased: true, revoked: true}, true
	}
	if !ok || !t.leased {
		return t, false
	}
	delete(l.open, seq)
	if t.due != 0 {
		l.openRetries--
	}
	return t, true
}

// forgetRetry deletes a message's entry in the retry index. The caller holds mu.
func (l *lane) forgetRetry(b *pebble.Batch, seq uint64, due int64) {
	_ = b.Delete(codec.Key(codec.PrefixDue, l.number, uint64(due), seq), nil)
	_ = b.Delete(codec.Key(codec.PrefixRetry, l.number, seq), nil)
	l.Retries--
	if seq == l.lowSeq {
		l.lowStale = true
	}
}

// SettleAll implements queue.Store.
func (s *Store) SettleAll(id queue.LaneID, all []queue.Settlement) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	l := s.lane(id)
	if l == nil {
		return queue.ErrNoLane
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dropped {
		return nil
	}
	w := settling{s: s, l: l}
	nextDue := l.nextDue
	var failed error
	for i := range all {
		if err := w.settle(&all[i]); err != nil {
			failed = errors.Join(failed, err)
		}
	}
	err := errors.Join(failed, w.write())
	if l.nextDue < nextDue {
		s.scheduleRetries(l)
	}
	return err
}

// settling is the one write of the outcomes of leased messages. Its owner holds the lane's mu.
type settling struct {
	s       *Store
	l       *lane
	b       *pebble.Batch // nil while no outcome needs it: the flusher writes the lane.
	changed bool
	buries  bool // The destination is locked.
	// due is the due time of the retries at a time: the store's clock may have advanced since the first of them.
	at  time.Time
	due int64
}

// batch returns the batch, and creates it for a number of bytes.
func (w *settling) batch(size int) *pebble.Batch {
	if w.b == nil {
		w.b = w.s.db.NewBatchWithSize(size)
	}
	return w.b
}

// settle adds the outcome of a message.
func (w *settling) settle(m *queue.Settlement) (err error) {
	s, l, d := w.s, w.l, &m.Delivery
	m.Done = false
	t, ok := l.settle(d.Seq)
	switch {
	case !ok:
		return nil
	case m.Outcome == queue.Released:
		if !t.revoked {
			l.release(d.Seq, t)
		}
		return nil
	}
	w.changed = true
	if t.revoked {
		if l.Skipped--; m.Outcome == queue.Acked {
			l.HandedOver--
			*l.outcome(d)++
		}
		return nil
	}
	if t.due != 0 {
		l.forgetRetry(w.batch(0), d.Seq, t.due)
	}
	switch m.Outcome {
	case queue.Acked:
		w.b, m.Done, err = s.countDelivered(w.b, l, d)
	case queue.Retried:
		err = w.retry(m)
	case queue.Buried:
		if !w.buries {
			w.buries = true
			l.dest.mu.Lock()
		}
		m.Done, err = s.buryOrHandOver(w.batch(len(d.Body)+1024), l, &queue.DeadLetter{
			Lane: l.id, Seq: d.Seq, ID: d.ID, Type: d.Type, Event: d.Event, Body: d.Body,
			AcceptedAt: d.AcceptedAt, Attempts: d.Attempt + 1, Failure: m.Failure,
		})
	}
	return err
}

// retry adds a retry of a message that has none, unless another lane of the group delivered the message.
func (w *settling) retry(m *queue.Settlement) error {
	s, l, seq, f := w.s, w.l, m.Seq, &m.Failure
	if l.group != nil && !exempt(m.Type) {
		if done, err := s.isFinal(l.group, seq); done || err != nil {
			l.HandedOver++
			return err
		}
	}
	if w.due == 0 || m.At != w.at {
		w.at, w.due = m.At, max(s.o.due(m.At).UnixMilli(), 1)
	}
	l.Retries++
	b, attempt := w.batch(0), m.Attempt+1
	_ = b.Set(codec.Key(codec.PrefixDue, l.number, uint64(w.due), seq), binary.AppendUvarint(nil, uint64(attempt)), nil)
	_ = b.Set(codec.Key(codec.PrefixRetry, l.number, seq), codec.AppendRetry(nil, w.due, attempt, f), nil)
	if failed := f.Time.UnixMilli(); f.Wait > 0 {
		backoff := m.At.Add(-f.Wait).UnixMilli() - failed
		_ = b.Set(codec.Key(codec.PrefixWait, l.number, uint64(failed), seq), binary.AppendUvarint(nil, uint64(max(backoff, 0))), nil)
		l.lowWait = min(l.lowWait, failed)
	}
	if k := (retryKey{w.due, seq}); k.less(l.lowDue) {
		l.lowDue = k
	}
	if seq <= l.lowSeq || l.Retries == 1 {
		l.lowSeq, l.lowStale = seq, false
	}
	l.nextDue = min(l.nextDue, w.due)
	return nil
}

// write applies the outcomes.
func (w *settling) write() error {
	if w.buries {
		defer w.l.dest.mu.Unlock()
		w.l.dest.put(w.b)
	}
	switch {
	case w.b != nil:
		w.l.put(w.b)
		return w.s.applyFor(w.b, w.l.group)
	case w.changed:
		w.s.changed(w.l)
	}
	return nil
}

// Ack implements queue.Store.
func (s *Store) Ack(d queue.Delivery) (first bool) {
	all := []queue.Settlement{{Delivery: d, Outcome: queue.Acked}}
	s.logWriteError(d.Lane, s.SettleAll(d.Lane, all))
	return all[0].Done
}

// outcome returns the counter of a message that is settled by Ack.
func (l *lane) outcome(d *queue.Delivery) *uint64 {
	if d.Omitted {
		return &l.Omitted
	}
	return &l.Delivered
}

// logWriteError logs a write error of a method that does not return it. The change is in memory
// only, and the message is delivered again after a restart.
func (s *Store) logWriteError(lane queue.LaneID, err error) {
	if err != nil && !errors.Is(err, queue.ErrClosed) && !errors.Is(err, queue.ErrNoLane) {
		s.log.With(lane.LogArgs()...).Error("write of a lane's state failed", "error", err)
	}
}

// Release implements queue.Store.
func (s *Store) Release(d queue.Delivery) {
	s.logWriteError(d.Lane, s.SettleAll(d.Lane, []queue.Settlement{{Delivery: d, Outcome: queue.Released}}))
}

// release puts an open message back to the head of its lane.
func (l *lane) release(seq uint64, t openMessage) {
	if t.due != 0 {
		l.openRetries++
	}
	t.leased = false
	l.open[seq] = t
	i, _ := slices.BinarySearch(l.released, seq)
	l.released = slices.Insert(l.released, i, seq)
}

// returnDue puts a message that is no longer open back to the retry index, which still has its entry.
func (l *lane) returnDue(_ uint64, t openMessage) { l.nextDue = min(l.nextDue, t.due) }

// dropReleased removes a message from the released ones.
func (l *lane) dropReleased(seq uint64) {
	l.released = slices.DeleteFunc(l.released, func(o uint64) bool { return o == seq })
}

// Retry implements queue.Store.
func (s *Store) Retry(d queue.Delivery, at time.Time, f queue.Failure) {
	s.logWriteError(d.Lane, s.SettleAll(d.Lane, []queue.Settlement{{Delivery: d, Outcome: queue.Retried, At: at, Failure: f}}))
}

// maxEndedWaits bounds the waits that one EndWaits ends; each is four changes of its batch.
const maxEndedWaits = 1024

// EndWaits implements queue.Store. An entry of the index of requested waits is outdated when its message has
// no retry of the same failure; EndWaits removes it.
func (s *Store) EndWaits(id queue.LaneID, until time.Time) (ended int, left bool, err error) {
	if err := s.enter(); err != nil {
		return 0, false, err
	}
	defer s.leave()
	l := s.lane(id)
	if l == nil {
		return 0, false, queue.ErrNoLane
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dropped {
		return 0, false, queue.ErrNoLane
	}
	it, err := s.db.NewIter(&pebble.IterOptions{
		LowerBound: codec.Key(codec.PrefixWait, l.number, uint64(l.lowWait)), UpperBound: codec.After(codec.PrefixWait, l.number),
	})
	if err != nil {
		return 0, false, err
	}
	defer func() { _ = it.Close() }()
	b := s.db.NewBatch()
	now, first, low := s.o.Now().UnixMilli(), retryKey{due: codec.Never}, until.UnixMilli()
	for ok := it.First(); ok; ok = it.Next() {
		failed, seq := int64(codec.Number(it.Key(), 1)), codec.Number(it.Key(), 2)
		if failed > until.UnixMilli() || b.Count() >= 4*maxEndedWaits {
			left, low = true, failed
			break
		}
		_ = b.Delete(it.Key(), nil)
		ended++
		if _, isOpen := l.open[seq]; isOpen {
			continue // It is leased now, or next.
		}
		key := codec.Key(codec.PrefixRetry, l.number, seq)
		v, err := s.get(key)
		d := codec.Decoder{Rest: v}
		due, attempt := d.Retry()
		f := d.Failure()
		wait := codec.Decoder{Rest: it.Value()}
		at := retryKey{max(now, failed+int64(wait.Uvarint())), seq}
		if err != nil || d.Bad || wait.Bad || f.Time.UnixMilli() != failed || at.due >= due {
			continue // The next attempt reports a damaged entry.
		}
		_ = b.Delete(codec.Key(codec.PrefixDue, l.number, uint64(due), seq), nil)
		_ = b.Set(codec.Key(codec.PrefixDue, l.number, uint64(at.due), seq), binary.AppendUvarint(nil, uint64(attempt)), nil)
		_ = b.Set(key, codec.AppendRetry(nil, at.due, attempt, &f), nil)
		if at.less(first) {
			first = at
		}
	}
	if err := it.Error(); err != nil {
		return 0, true, errors.Join(err, b.Close())
	}
	l.lowWait = low
	if b.Count() == 0 {
		return 0, left, b.Close()
	}
	if err := s.applyFor(b, l.group); err != nil {
		l.lowWait = 0
		return 0, true, err
	}
	if first.less(l.lowDue) {
		l.lowDue = first
	}
	if first.due < l.nextDue {
		l.nextDue = first.due
		s.scheduleRetries(l)
	}
	return ended, left, nil
}

// needNoRetry ends a message for a lane that need not attempt it again, because another lane
// delivers or delivered it.
func (s *Store) needNoRetry(l *lane, seq uint64, t openMessage) error {
	l.HandedOver++
	if t.due == 0 {
		s.changed(l)
		return nil
	}
	b := s.db.NewBatch()
	l.forgetRetry(b, seq, t.due)
	l.put(b)
	return s.applyFor(b, l.group)
}

// scanDue calls take for entries of the retry index that are due and not open, in the order of
// their due times, at most max. It sets nextDue and lowDue. The caller holds mu.
func (s *Store) scanDue(l *lane, now int64, max int, take func(seq uint64, t openMessage)) (err error) {
	defer func(before int64) {
		if err != nil {
			l.nextDue = before
		}
	}(l.nextDue)
	l.nextDue = codec.Never
	if l.Retries == 0 {
		return nil
	}
	it, err := s.db.NewIter(&pebble.IterOptions{
		LowerBound: codec.Key(codec.PrefixDue, l.number, uint64(l.lowDue.due), l.lowDue.seq),
		UpperBound: codec.After(codec.PrefixDue, l.number),
	})
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }()
	ok := it.First()
	if ok {
		l.lowDue = retryKey{int64(codec.Number(it.Key(), 1)), codec.Number(it.Key(), 2)}
	}
	for n := 0; ok; ok = it.Next() {
		due, seq := int64(codec.Number(it.Key(), 1)), codec.Number(it.Key(), 2)
		if _, isOpen := l.open[seq]; isOpen {
			continue
		}
		if due > now || n == max {
			l.nextDue = due
			return nil
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return err
		}
		d := codec.Decoder{Rest: v}
		t := openMessage{due: due, attempt: int(d.Uvarint()), leased: true}
		if d.Bad {
			return s.corruptf("a retry of lane %v: %w", l.id, codec.ErrMalformed)
		}
		take(seq, t)
		n++
	}
	return it.Error()
}

// firstRetry returns the lowest position in the retry index; ok is false when the index is
// empty. The caller holds mu.
func (s *Store) firstRetry(l *lane) (seq uint64, ok bool, err error) {
	if l.Retries == 0 {
		return 0, false, nil
	}
	if l.lowStale {
		it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: codec.Key(codec.PrefixRetry, l.number, l.lowSeq),
			UpperBound: codec.After(codec.PrefixRetry, l.number)})
		if err != nil {
			return 0, false, err
		}
		defer func() { _ = it.Close() }()
		if !it.First() {
			return 0, false, errors.Join(it.Error(), s.corruptf("lane %v has %d retries, but its index is empty", l.id, l.Retries))
		}
		l.lowSeq, l.lowStale = codec.Number(it.Key(), 1), false
	}
	return l.lowSeq, true, nil
}

// first returns the lowest position that the lane needs. The caller holds mu.
func (s *Store) first(l *lane) (uint64, error) {
	seq := l.Next
	if l.ReadAll() {
		seq = codec.Never
	}
	for o := range l.open {
		seq = min(seq, o)
	}
	retry, ok, err := s.firstRetry(l)
	if ok {
		seq = min(seq, retry)
	}
	return seq, err
}

// Position implements queue.Store.
func (s *Store) Position(id queue.LaneID) (read, end uint64) {
	l := s.lane(id)
	if l == nil || !s.lockUnlessFull(l.mu) {
		return 0, 0
	}
	defer l.mu.Unlock()
	return l.Next - 1, l.log.durable.Load()
}

// LaneStats implements queue.Store.
func (s *Store) LaneStats(id queue.LaneID) queue.LaneStats {
	if err := s.enter(); err != nil {
		return queue.LaneStats{}
	}
	defer s.leave()
	if id.Any && id.Endpoint == "" {
		s.mu.RLock()
		g := s.groups[id]
		s.mu.RUnlock()
		if g == nil {
			return queue.LaneStats{}
		}
		return s.groupStats(g)
	}
	l := s.lane(id)
	if l == nil {
		return queue.LaneStats{}
	}
	if !s.lockUnlessFull(l.mu) {
		return l.cachedStats.load()
	}
	defer l.mu.Unlock()
	st := queue.LaneStats{
		Ledger:          l.ledger(),
		Retrying:        l.retrying(),
		InFlight:        int64(len(l.open) - len(l.released)),
		Skipped:         int64(l.Skipped),
		Ended:           l.End != 0,
		EndpointRemoved: l.EndpointRemoved,
	}
	st.FirstAttempts = st.Pending - int64(l.Retries)
	if l.nextDue != codec.Never {
		st.NextRetry = codec.FromMillis(l.nextDue)
	}
	if st.Pending > 0 {
		var err error
		if st.First, st.OldestPending, err = s.oldestPending(l); err != nil {
			s.log.With(id.LogArgs()...).Error("read of a lane's oldest message failed", "error", s.explain(err))
		}
	}
	l.cachedStats.store(st)
	return st
}

// OldestWaiting implements queue.Store.
func (s *Store) OldestWaiting(id queue.LaneID) time.Time {
	if err := s.enter(); err != nil {
		return time.Time{}
	}
	defer s.leave()
	l := s.lane(id)
	if l == nil || !s.lockUnlessFull(l.mu) {
		return time.Time{}
	}
	defer l.mu.Unlock()
	seq := l.Next
	if l.group != nil {
		seq = l.group.Gaps.After(seq)
	}
	for _, released := range l.released {
		if l.open[released].due == 0 {
			seq = released
			break
		}
	}
	if seq > l.limit() {
		return time.Time{}
	}
	_, at, err := s.acceptedAt(l.log, seq, &l.waiting)
	if err != nil {
		s.log.With(id.LogArgs()...).Error("read of a lane's oldest message failed", "error", s.explain(err))
	}
	return at
}

// retrying is the number of messages that failed before and are not leased.
func (l *lane) retrying() int64 {
	n := int64(l.Retries) - int64(l.openRetries)
	for _, seq := range l.released { // Released retries wait again.
		if l.open[seq].due != 0 {
			n++
		}
	}
	return n
}

// lockUnlessFull locks a mutex that is held during writes. It returns false while a full disk or a slow replicated log
// may block the holder.
func (s *Store) lockUnlessFull(mu *sync.Mutex) bool {
	for !mu.TryLock() {
		if s.disk.exhausted.Load() || s.commitLog.blocked() {
			return false
		}
		time.Sleep(100 * time.Microsecond)
	}
	return true
}

// statsCache holds the last returned stats.
type statsCache struct {
	mu    sync.Mutex
	stats queue.LaneStats
}

func (s *statsCache) store(st queue.LaneStats) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats = st
}

func (s *statsCache) load() queue.LaneStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.stats
	st.Stale = true
	return st
}

func (s *Store) oldestPending(l *lane) (seq uint64, at time.Time, err error) {
	if seq, err = s.first(l); err != nil {
		return 0, at, err
	}
	return s.acceptedAt(l.log, seq, &l.oldest)
}
