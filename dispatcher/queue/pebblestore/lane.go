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
)

// lane is one lane: its durable state, and in memory the messages in flight.
type lane struct {
	id     queue.LaneID
	number uint64
	log    *sourceLog
	dest   *destination

	// leasing is held by the one who reads messages for the lane and moves next
	// on. It is taken before mu.
	leasing sync.Mutex

	// mu is the lane's own, or that of its group.
	mu    *sync.Mutex
	group *group // nil for a lane without LaneID.Any.
	laneState
	opened, dropped bool
	// dirty: the lane is in the flusher's list.
	dirty bool
	// aheadOfDisk: the group counted a "delete" message of the lane, and the lane was
	// not written since. The next write of the group includes the lane; else the group
	// would count the message again after a crash.
	aheadOfDisk bool
	// open holds what was taken from the log or the retry index and is not settled.
	open map[uint64]taking
	// released are the positions of open that wait, ascending.
	released []uint64
	// openRetries counts those of open that have an entry in the retry index.
	openRetries int
	// nextDue is when the first entry of the retry index that is not open is due.
	nextDue int64
	// lowDue: no entry of the index by due time sorts before it. It spares scans
	// the walk over what was deleted. lowSeq is the same by position, and the first
	// entry itself unless lowStale.
	lowDue   retryKey
	lowSeq   uint64
	lowStale bool
	// firsts counts first tries since the last retry, while retries are due.
	firsts int
	// oldest is the oldest pending message.
	oldest acceptance
	// pendingFrom: no unread message before this one is not final.
	pendingFrom uint64
	// revoked are first attempts that were skipped while they were leased.
	revoked map[uint64]struct{}

	// lastDamaged is the last message that could not be read, the damagedRun-th in a row.
	lastDamaged, damagedRun uint64
	// seen is what LaneStats tells while mu cannot be had.
	seen seenStats

	// hungry: the last Lease came back short, so news are told.
	hungry atomic.Bool

	// Of the waker, guarded by its lock.
	wakeAt    int64
	heapIndex int
}

type retryKey struct {
	due int64
	seq uint64
}

func (k retryKey) less(o retryKey) bool { return k.due < o.due || k.due == o.due && k.seq < o.seq }

// taking is a message that was taken from the log (due is 0) or the retry index.
type taking struct {
	due     int64
	attempt int
	leased  bool
	// revoked: the room was needed, and the message is not the lane's any more.
	revoked bool
}

func newLane(id queue.LaneID, number uint64, log *sourceLog, dest *destination, g *group) *lane {
	l := &lane{id: id, number: number, log: log, dest: dest, group: g, open: map[uint64]taking{}, nextDue: never, heapIndex: -1}
	if l.mu = new(sync.Mutex); g != nil {
		l.mu = &g.mu
	}
	return l
}

// loadLane reads a lane's state after a start.
func (s *Store) loadLane(l *lane) error {
	v, err := s.get(key(prefixLane, l.number))
	if err != nil {
		return s.corruptf("the state of lane %v: %w", l.id, err)
	}
	open, err := l.decode(v)
	if err != nil {
		return s.corruptf("the state of lane %v: %w", l.id, err)
	}
	if head := l.log.durable.Load(); l.next > head+1 || l.end > head+1 {
		return s.corruptf("the log of %s ends at message %d, but lane %v has read up to %d: a file was cut off", l.log.source, head, l.id, l.next-1)
	}
	if first := l.log.trimmed.Load() + 1; l.next < first && !l.readAll() || len(open) > 0 && open[0] < first {
		return s.corruptf("the log of %s begins at message %d, but lane %v needs an earlier one", l.log.source, first, l.id)
	}
	for _, seq := range open {
		l.open[seq] = taking{}
	}
	l.released = open
	if l.retries > 0 {
		if _, err := s.scanDue(l, 0, 0, nil); err != nil {
			return err
		}
		l.lowStale = true
	}
	return nil
}

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
	_ = b.Set(key(prefixLane, l.number), l.encode(make([]byte, 0, 64+2*len(open)), open), nil)
}

// changed has the state written soon. The caller holds mu.
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
		l.mu.Lock() // Of one that is being opened: until it is durable.
		defer l.mu.Unlock()
		if l.dropped {
			return queue.ErrNoLane
		}
		if !l.opened {
			l.opened = true
			l.hungry.Store(true)
			s.scheduleRetries(l)
		}
		return nil
	}
	b := s.db.NewBatch()
	dest := s.destination(id.Destination)
	var g *group
	newGroup := false
	if id.Any {
		g, newGroup = s.groupFor(b, id, log, dest)
	}
	l := newLane(id, s.nextNumber(b), log, dest, g)
	l.opened = true
	l.mu.Lock()
	defer l.mu.Unlock()
	// Known to the log before its start is chosen: nothing behind the start is freed.
	log.addLane(l)
	l.start = log.durable.Load()
	l.next = l.start + 1
	var was groupState
	if g != nil {
		if was = g.groupState; newGroup {
			g.start = l.start
		}
		g.resume(l.next)
		g.lanes = append(slices.Clone(g.lanes), l)
		if g.shared = g.shared || len(g.lanes) > 1; g.shared {
			_ = b.Set(keyFormat, binary.AppendUvarint(nil, formatGroups), nil)
		}
	}
	_ = b.Set(binary.BigEndian.AppendUint64(append([]byte(nil), keyLanes...), l.number), appendLaneName(nil, id), nil)
	l.put(b)
	s.flusher.syncing()
	if err := s.db.ApplyNoSyncWait(b, pebble.Sync); err != nil {
		l.dropped = true
		log.removeLane(l)
		if g != nil {
			g.groupState, g.lanes = was, g.lanes[:len(g.lanes)-1]
			g.putFailed()
		}
		s.registry.Unlock()
		return fmt.Errorf("open a lane: %w", err)
	}
	s.mu.Lock()
	if newGroup {
		s.addGroup(g)
	}
	s.addLane(l)
	s.mu.Unlock()
	s.registry.Unlock() // Others share the sync.
	if err := b.SyncWait(); err != nil {
		engineLogger{s}.Fatalf("sync the log: %w", err)
	}
	_ = b.Close()
	l.hungry.Store(true)
	return nil
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
	l.leasing.Lock()
	defer l.leasing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dropped {
		return queue.ErrNoLane
	}
	left := end == queue.Left && l.group != nil
	if (end == queue.GoOn) == (l.end == 0) && left == l.left {
		return nil
	}
	was, groupWas := l.laneState, groupState{}
	if l.group != nil {
		groupWas = l.group.groupState
	}
	behind := l.log.durable.Load() + 1
	l.left = left
	switch {
	case end != queue.GoOn:
		if l.end == 0 {
			l.end = behind
		}
	default:
		if l.group != nil {
			l.group.resume(behind)
		}
		if l.readAll() {
			l.passed += behind - l.next
			l.next = behind
		}
		l.end = 0
	}
	b := s.db.NewBatch()
	l.put(b)
	if err := s.applySync(b); err != nil {
		l.laneState = was
		if l.group != nil {
			l.group.groupState = groupWas
			l.group.putFailed()
		}
		return fmt.Errorf("end a lane: %w", err)
	}
	return nil
}

// DropLane implements queue.Store.
func (s *Store) DropLane(_ context.Context, id queue.LaneID) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	s.registry.Lock()
	defer s.registry.Unlock()
	l := s.lane(id)
	if l == nil {
		return queue.ErrNoLane
	}
	l.leasing.Lock()
	defer l.leasing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dest.mu.Lock()
	defer l.dest.mu.Unlock()
	gone := l.ledger()
	discarded := gone.Pending
	gone.Discarded, gone.Pending = gone.Pending, 0
	b := s.db.NewBatch()
	var groupWas groupState
	if l.group != nil {
		var err error
		groupWas = l.group.groupState
		if gone, discarded, err = s.dropFrom(b, l); err != nil {
			l.group.groupState = groupWas
			_ = b.Close()
			return fmt.Errorf("drop a lane: %w", err)
		}
	}
	ofSource, ofDestination := l.log.dropped.Plus(gone), l.dest.dropped.Plus(gone)
	_ = b.Set(key(prefixDropped, l.log.number), appendDropped(nil, ofSource), nil)
	l.dest.putWith(b, ofDestination)
	_ = b.Delete(binary.BigEndian.AppendUint64(append([]byte(nil), keyLanes...), l.number), nil)
	_ = b.Delete(key(prefixLane, l.number), nil)
	if l.retries > 0 {
		_ = b.DeleteRange(key(prefixRetry, l.number), after(prefixRetry, l.number), nil)
		_ = b.DeleteRange(key(prefixDue, l.number), after(prefixDue, l.number), nil)
	}
	if err := s.applySync(b); err != nil {
		if l.group != nil {
			l.group.groupState = groupWas
			l.group.putFailed()
		}
		return fmt.Errorf("drop a lane: %w", err)
	}
	l.dropped, l.opened = true, false
	s.metrics.discard(discarded)
	s.waker.forget(l)
	s.mu.Lock()
	defer s.mu.Unlock()
	l.log.removeLane(l)
	l.log.dropped, l.dest.dropped = ofSource, ofDestination
	var empty counted = l
	if g := l.group; g != nil {
		g.lanes = slices.DeleteFunc(slices.Clone(g.lanes), func(o *lane) bool { return o == l })
		if empty = g; len(g.lanes) == 0 {
			delete(s.groups, g.id)
		}
	}
	if l.group == nil || len(l.group.lanes) == 0 {
		for _, all := range []*[]counted{&l.log.counted, &l.dest.counted} {
			*all = slices.DeleteFunc(slices.Clone(*all), func(o counted) bool { return o == empty })
		}
	}
	delete(s.lanes, id)
	return nil
}

// readAll reports whether the lane has read all that it will ever read. The caller holds mu.
func (l *lane) readAll() bool { return l.end != 0 && l.next >= l.end }

// skipGaps moves the lane over what is not for its group, and returns the first
// message that it has not read. The caller holds mu.
func (l *lane) skipGaps() uint64 {
	if l.group != nil && !l.readAll() {
		if to := l.group.behindGap(l.next); to != l.next {
			l.passed += to - l.next
			l.next = to
		}
	}
	return l.next
}

// limit is the last message that the lane may read. The caller holds leasing or mu.
func (l *lane) limit() uint64 {
	durable := l.log.durable.Load()
	if l.end != 0 {
		return min(durable, l.end-1)
	}
	return durable
}

// ledger counts the lane's messages. The caller holds mu.
func (l *lane) ledger() queue.Ledger {
	accepted := l.limit() - l.start - l.passed
	return queue.Ledger{
		Accepted: int64(accepted), Delivered: int64(l.delivered), Filtered: int64(l.filtered),
		DeadLettered: int64(l.buried), Discarded: int64(l.letGo), Pending: int64(accepted - l.settled()),
	}
}

// counted is what counts messages for the ledgers of its Source and its
// destination: a lane, or the group of several.
type counted interface {
	locked() *sync.Mutex
	ledger() queue.Ledger
	last() *seenStats
}

func (l *lane) locked() *sync.Mutex  { return l.mu }
func (l *lane) last() *seenStats     { return &l.seen }
func (g *group) locked() *sync.Mutex { return &g.mu }
func (g *group) last() *seenStats    { return &g.seen }

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
	for {
		again, err := s.lease(l, r, n)
		if again && err == nil {
			continue
		}
		got := r.deliveries(buf)
		if len(got) > len(buf) {
			err = nil // What was read first; the next Lease meets the error again.
		}
		return got, err
	}
}

// maxScan bounds the messages that one Lease passes over because they are for others.
const maxScan = 4096

// lease takes up to want messages, less those that the reader has already. again
// is true when messages came in after it had looked.
func (s *Store) lease(l *lane, r *reader, want int) (again bool, err error) {
	now := s.o.Now().UnixMilli()
	l.mu.Lock()
	if !l.opened {
		l.mu.Unlock()
		return false, queue.ErrNoLane
	}
	// The share of due retries that first tries may not take.
	share := 0
	if l.nextDue <= now {
		share = min((l.firsts+want-len(r.got))/8, want-len(r.got))
	}
	firsts := r.takeReleased(want - share - len(r.got))
	l.mu.Unlock()

	if err := r.readTaken(); err != nil {
		return false, err
	}
	n, err := r.readFirsts(want - share)
	if err != nil {
		return false, err
	}
	firsts += n

	retries := 0
	if room := want - len(r.got); room > 0 {
		l.mu.Lock()
		if l.nextDue <= now {
			retries, err = r.takeDue(now, room)
		}
		// When there were fewer retries than their share.
		firsts += r.takeReleased(room - retries)
		l.mu.Unlock()
		if err := errors.Join(err, r.readTaken()); err != nil {
			return false, err
		}
		n, err := r.readFirsts(want)
		if err != nil {
			return false, err
		}
		firsts += n
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.nextDue > now {
		l.firsts = 0
	} else {
		l.firsts = min(max(0, l.firsts+firsts-7*retries), 8)
	}
	if len(r.got) >= want {
		return false, nil
	}
	if r.dropped && r.scanned < maxScan {
		r.dropped = false
		return true, nil
	}
	l.hungry.Store(true)
	switch {
	case r.scanned >= maxScan:
		// Others have their turn; this lane goes on as if news had come.
		s.waker.schedule(l, now)
	case l.limit() >= l.next:
		// An append came between the look and the word that its news are wanted.
		return l.hungry.CompareAndSwap(true, false), nil
	default:
		s.scheduleRetries(l)
	}
	return false, nil
}

// scheduleRetries has a hungry lane notified when its next retry is due. The caller holds mu.
func (s *Store) scheduleRetries(l *lane) {
	if l.nextDue != never && l.hungry.Load() {
		s.waker.schedule(l, l.nextDue)
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
	for err == nil && len(r.got) == 0 {
		l.mu.Lock()
		if !l.opened {
			l.mu.Unlock()
			return d, false, queue.ErrNoLane
		}
		err = r.takeOldest()
		took := len(r.taken) > 0
		l.mu.Unlock()
		if err == nil {
			err = r.readTaken()
		}
		if !took {
			break // A message that was taken may be damaged, or needless.
		}
	}
	for err == nil && len(r.got) == 0 && r.more() {
		r.scanned = 0
		_, err = r.readFirsts(1)
	}
	if got := r.deliveries(nil); len(got) > 0 {
		return got[0], true, nil
	}
	return d, false, err
}

// settle ends a lease; ok is false when there was none. The caller holds mu.
func (l *lane) settle(seq uint64) (t taking, ok bool) {
	t, ok = l.open[seq]
	if _, was := l.revoked[seq]; was && !ok {
		delete(l.revoked, seq)
		return taking{leased: true, revoked: true}, true
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
	_ = b.Delete(key(prefixDue, l.number, uint64(due), seq), nil)
	_ = b.Delete(key(prefixRetry, l.number, seq), nil)
	l.retries--
	if seq == l.lowSeq {
		l.lowStale = true
	}
}

// leased calls fn for a leased message with its lane locked; it does nothing
// for one that is not leased.
func (s *Store) leased(d *queue.Delivery, fn func(*lane, taking) error) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	l := s.lane(d.Lane)
	if l == nil {
		return queue.ErrNoLane
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if t, ok := l.settle(d.Seq); ok && !l.dropped {
		return fn(l, t)
	}
	return nil
}

// Ack implements queue.Store.
func (s *Store) Ack(d queue.Delivery) (first bool) {
	s.complain(d.Lane, s.leased(&d, func(l *lane, t taking) error {
		var b *pebble.Batch
		if t.revoked {
			l.skipped, l.letGo, l.delivered = l.skipped-1, l.letGo-1, l.delivered+1
			s.changed(l)
			return nil
		}
		if t.due != 0 {
			b = s.db.NewBatch()
			l.forgetRetry(b, d.Seq, t.due)
		}
		var err error
		b, first, err = s.took(b, l, &d)
		if b == nil {
			s.changed(l)
			return err
		}
		l.put(b)
		return errors.Join(err, s.applyFor(b, l.group))
	}))
	return first
}

// complain logs an error that a caller is not told of: the change is in memory
// alone then, and the message is delivered again after a restart.
func (s *Store) complain(lane queue.LaneID, err error) {
	if err != nil && !errors.Is(err, queue.ErrClosed) && !errors.Is(err, queue.ErrNoLane) {
		s.log.With(lane.LogArgs()...).Error("writing the state of a lane failed", "error", err)
	}
}

// Release implements queue.Store.
func (s *Store) Release(d queue.Delivery) {
	s.complain(d.Lane, s.leased(&d, func(l *lane, t taking) error {
		if !t.revoked {
			l.release(d.Seq, t)
		}
		return nil
	}))
}

// release lets a message wait at the head of its lane.
func (l *lane) release(seq uint64, t taking) {
	if t.due != 0 {
		l.openRetries++
	}
	t.leased = false
	l.open[seq] = t
	i, _ := slices.BinarySearch(l.released, seq)
	l.released = slices.Insert(l.released, i, seq)
}

// dropReleased removes a message that was given back.
func (l *lane) dropReleased(seq uint64) {
	l.released = slices.DeleteFunc(l.released, func(o uint64) bool { return o == seq })
}

// Retry implements queue.Store.
func (s *Store) Retry(d queue.Delivery, at time.Time, f queue.Failure) {
	s.complain(d.Lane, s.leased(&d, func(l *lane, t taking) error {
		if t.revoked {
			l.skipped--
			s.changed(l)
			return nil
		}
		if l.group != nil && !exempt(d.Type) {
			if done, err := s.final(l.group, d.Seq); done || err != nil {
				return errors.Join(err, s.needNoRetry(l, d.Seq, t))
			}
		}
		due := max(s.o.due(at).UnixMilli(), 1)
		b := s.db.NewBatch()
		if t.due != 0 {
			l.forgetRetry(b, d.Seq, t.due)
		}
		l.retries++
		attempt := d.Attempt + 1
		_ = b.Set(key(prefixDue, l.number, uint64(due), d.Seq), binary.AppendUvarint(nil, uint64(attempt)), nil)
		_ = b.Set(key(prefixRetry, l.number, d.Seq), appendRetry(nil, due, attempt, &f), nil)
		l.put(b)
		if k := (retryKey{due, d.Seq}); k.less(l.lowDue) {
			l.lowDue = k
		}
		if d.Seq <= l.lowSeq || l.retries == 1 {
			l.lowSeq, l.lowStale = d.Seq, false
		}
		err := s.applyFor(b, l.group)
		if due < l.nextDue {
			l.nextDue = due
			s.scheduleRetries(l)
		}
		return err
	}))
}

// needNoRetry ends a message for a lane whose attempt failed, because another lane delivered it.
func (s *Store) needNoRetry(l *lane, seq uint64, t taking) error {
	l.letGo++
	if t.due == 0 {
		s.changed(l)
		return nil
	}
	b := s.db.NewBatch()
	l.forgetRetry(b, seq, t.due)
	l.put(b)
	return s.applyFor(b, l.group)
}

// scanDue calls take for entries of the retry index that are due and not open,
// in the order of their due time, and returns how many it took. It sets
// nextDue and lowDue. The caller holds mu.
func (s *Store) scanDue(l *lane, now int64, max int, take func(seq uint64, t taking)) (n int, err error) {
	defer func(before int64) {
		if err != nil {
			l.nextDue = before
		}
	}(l.nextDue)
	l.nextDue = never
	if l.retries == 0 {
		return 0, nil
	}
	it, err := s.db.NewIter(&pebble.IterOptions{
		LowerBound: key(prefixDue, l.number, uint64(l.lowDue.due), l.lowDue.seq),
		UpperBound: after(prefixDue, l.number),
	})
	if err != nil {
		return 0, err
	}
	defer func() { _ = it.Close() }()
	ok := it.First()
	if ok {
		l.lowDue = retryKey{int64(number(it.Key(), 1)), number(it.Key(), 2)}
	}
	for ; ok; ok = it.Next() {
		due, seq := int64(number(it.Key(), 1)), number(it.Key(), 2)
		if _, isOpen := l.open[seq]; isOpen {
			continue
		}
		if due > now || n == max {
			l.nextDue = due
			return n, nil
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return n, err
		}
		d := decoder{b: v}
		t := taking{due: due, attempt: int(d.uvarint()), leased: true}
		if d.bad {
			return n, s.corruptf("a retry of lane %v: %w", l.id, errMalformed)
		}
		take(seq, t)
		n++
	}
	return n, it.Error()
}

// firstRetry is the lowest position in the retry index, ok is false when there
// is none. The caller holds mu.
func (s *Store) firstRetry(l *lane) (seq uint64, ok bool, err error) {
	if l.retries == 0 {
		return 0, false, nil
	}
	if l.lowStale {
		it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: key(prefixRetry, l.number, l.lowSeq), UpperBound: after(prefixRetry, l.number)})
		if err != nil {
			return 0, false, err
		}
		defer func() { _ = it.Close() }()
		if !it.First() {
			return 0, false, errors.Join(it.Error(), s.corruptf("lane %v has %d retries, but its index is empty", l.id, l.retries))
		}
		l.lowSeq, l.lowStale = number(it.Key(), 1), false
	}
	return l.lowSeq, true, nil
}

// first is the lowest position that the lane needs. The caller holds mu.
func (s *Store) first(l *lane) (uint64, error) {
	seq := l.next
	if l.readAll() {
		seq = never
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
	return l.next - 1, l.log.durable.Load()
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
		return l.seen.load()
	}
	defer l.mu.Unlock()
	st := queue.LaneStats{
		Ledger:   l.ledger(),
		Retrying: l.retrying(),
		InFlight: int64(len(l.open) - len(l.released)),
		Skipped:  int64(l.skipped),
		Ended:    l.end != 0,
		Left:     l.left,
	}
	st.FirstAttempts = st.Pending - int64(l.retries)
	if l.nextDue != never {
		st.NextRetry = fromMillis(l.nextDue)
	}
	if st.Pending > 0 {
		var err error
		if st.First, st.OldestPending, err = s.oldestPending(l); err != nil {
			s.log.With(id.LogArgs()...).Error("reading the oldest message of a lane failed", "error", s.explain(err))
		}
	}
	l.seen.store(st)
	return st
}

// retrying counts the messages that failed before and are not leased.
func (l *lane) retrying() int64 {
	n := int64(l.retries) - int64(l.openRetries)
	for _, seq := range l.released { // Given back, and waiting again.
		if l.open[seq].due != 0 {
			n++
		}
	}
	return n
}

// lockUnlessFull takes a lock that is held while changes are written. It gives
// up while a full disk may hold up the one who has it.
func (s *Store) lockUnlessFull(mu *sync.Mutex) bool {
	for !mu.TryLock() {
		if s.disk.exhausted.Load() {
			return false
		}
		time.Sleep(100 * time.Microsecond)
	}
	return true
}

// seenStats are the stats that were told last.
type seenStats struct {
	mu    sync.Mutex
	stats queue.LaneStats
}

func (s *seenStats) store(st queue.LaneStats) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats = st
}

func (s *seenStats) load() queue.LaneStats {
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
