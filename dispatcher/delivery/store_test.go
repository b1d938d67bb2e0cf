package delivery

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// memStore is a simple queue.Store in memory. It records misuse, such as a message that is
// settled twice or without a lease.
type memStore struct {
	mu     sync.Mutex
	notify func(queue.LaneID)
	logs   map[string][]queue.Message
	lanes  map[queue.LaneID]*memLane
	groups map[queue.LaneID]*memGroup
	dead   map[string][]queue.DeadLetter
	// dropped are the ledgers of dropped lanes, by destination.
	dropped map[string]queue.Ledger
	meta    map[string][]byte
	misuse  []string
	leases  int // calls of Lease and LeaseOldest
	fail    error
}

type memLane struct {
	next        uint64 // Position of the next first attempt.
	released    []uint64
	leased      map[uint64]int // position to attempt
	retries     map[uint64]memRetry
	stats       queue.LaneStats
	wantsNotify bool
	timer       *time.Timer
	start       uint64
	end         uint64 // The last position, when stats.Ended.
	done        map[uint64]bool
}

// memGroup is the shared state of the lanes of a group.
type memGroup struct {
	start     uint64
	stats     queue.LaneStats
	final     map[uint64]bool
	handovers map[uint64]int // Attempts of messages that lanes handed over.
	extra     int64
	gaps      int64
}

type memRetry struct {
	at      time.Time
	attempt int
	f       queue.Failure
}

func newMemStore() *memStore {
	return &memStore{logs: map[string][]queue.Message{}, lanes: map[queue.LaneID]*memLane{}, groups: map[queue.LaneID]*memGroup{}, dead: map[string][]queue.DeadLetter{}, dropped: map[string]queue.Ledger{}, meta: map[string][]byte{}}
}

func (s *memStore) addMisuse(format string, args ...any) {
	s.misuse = append(s.misuse, fmt.Sprintf(format, args...))
}

func (s *memStore) SetNotify(f func(queue.LaneID)) { s.notify = f }

func (s *memStore) Append(_ context.Context, msgs []queue.Message) ([]bool, error) {
	s.mu.Lock()
	wake := map[queue.LaneID]bool{}
	for _, m := range msgs {
		s.logs[m.Source] = append(s.logs[m.Source], m)
		for id, l := range s.lanes {
			if id.Source != m.Source {
				continue
			}
			if l.wantsNotify {
				l.wantsNotify = false
				wake[id] = true
			}
		}
	}
	s.mu.Unlock()
	for id := range wake {
		s.notify(id)
	}
	return nil, nil
}

func (s *memStore) OpenLane(id queue.LaneID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return s.fail
	}
	if s.lanes[id] == nil {
		head := uint64(len(s.logs[id.Source]))
		if g := s.groups[id.Group()]; id.Any && g == nil {
			s.groups[id.Group()] = &memGroup{start: head, final: map[uint64]bool{}, handovers: map[uint64]int{}}
		} else if id.Any {
			s.resume(id, g)
		}
		s.lanes[id] = &memLane{next: head + 1, start: head, leased: map[uint64]int{}, retries: map[uint64]memRetry{}, done: map[uint64]bool{}}
	}
	return nil
}

func (s *memStore) DropLane(_ context.Context, id queue.LaneID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lanes[id] == nil {
		return queue.ErrNoLane
	}
	ledger := s.laneStats(id).Ledger
	ledger.Discarded, ledger.Pending = ledger.Pending, 0
	if g := s.groups[id.Group()]; id.Any {
		l, limit := s.lanes[id], s.groupLimit(id)
		for seq := l.start + 1; seq <= s.limit(id, l) && len(s.members(id)) > 1; seq++ {
			if s.isPendingIn(id, l, seq) && !s.isUnneeded(id, l, seq) {
				g.final[seq] = true
				g.stats.Discarded++
			}
		}
		ledger = s.groupStats(id).Ledger
		ledger.Discarded, ledger.Pending = ledger.Discarded+ledger.Pending, 0
		delete(s.lanes, id)
		if len(s.members(id)) > 0 {
			g.extra += int64(limit - s.groupLimit(id))
			return nil
		}
		delete(s.groups, id.Group())
	}
	s.dropped[id.Destination] = s.dropped[id.Destination].Plus(ledger)
	delete(s.lanes, id)
	return nil
}

// members lists the lanes of a lane's group.
func (s *memStore) members(id queue.LaneID) (ids []queue.LaneID) {
	for o := range s.lanes {
		if o.Any && o.Group() == id.Group() {
			ids = append(ids, o)
		}
	}
	return ids
}

// groupLimit is the last position of the group.
func (s *memStore) groupLimit(id queue.LaneID) (limit uint64) {
	for _, o := range s.members(id) {
		limit = max(limit, s.limit(o, s.lanes[o]))
	}
	return limit
}

// resume records the messages that were appended while all lanes had ended.
func (s *memStore) resume(id queue.LaneID, g *memGroup) {
	for _, o := range s.members(id) {
		if !s.lanes[o].stats.Ended {
			return
		}
	}
	g.gaps += int64(len(s.logs[id.Source])) - int64(s.groupLimit(id))
}

// isPendingIn reports whether a message is pending in a lane.
func (s *memStore) isPendingIn(id queue.LaneID, l *memLane, seq uint64) bool {
	return seq > l.start && seq <= s.limit(id, l) && !l.done[seq]
}

// isUnneeded reports whether a message is final, or pending in another lane whose endpoint
// exists.
func (s *memStore) isUnneeded(id queue.LaneID, l *memLane, seq uint64) bool {
	return s.groups[id.Group()].final[seq] || slices.ContainsFunc(s.members(id), func(o queue.LaneID) bool {
		return o != id && !s.lanes[o].stats.EndpointRemoved && s.isPendingIn(o, s.lanes[o], seq)
	})
}

func (s *memStore) EndLane(id queue.LaneID, how queue.End) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, end := s.lanes[id], how != queue.Active
	if l == nil {
		return queue.ErrNoLane
	}
	if s.fail != nil {
		return s.fail
	}
	if g := s.groups[id.Group()]; id.Any && !end && l.stats.Ended {
		s.resume(id, g)
	}
	switch {
	case end && !l.stats.Ended:
		l.end = uint64(len(s.logs[id.Source]))
	case !end && l.stats.Ended && l.next > l.end:
		skipped := uint64(len(s.logs[id.Source])) + 1 - l.next
		l.start, l.next = l.start+skipped, l.next+skipped
	}
	l.stats.Ended, l.stats.EndpointRemoved = end, how == queue.EndpointRemoved && id.Any
	return nil
}

// limit is the last position of the lane.
func (s *memStore) limit(id queue.LaneID, l *memLane) uint64 {
	if l.stats.Ended {
		return l.end
	}
	return uint64(len(s.logs[id.Source]))
}

func (s *memStore) Lanes() (ids []queue.LaneID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.lanes {
		ids = append(ids, id)
	}
	return ids
}

func (s *memStore) message(id queue.LaneID, seq uint64) queue.Message {
	return s.logs[id.Source][seq-1]
}

func (s *memStore) delivery(id queue.LaneID, l *memLane, seq uint64, attempt int) queue.Delivery {
	m := s.message(id, seq)
	if _, twice := l.leased[seq]; twice {
		s.addMisuse("%v %d leased twice", id, seq)
	}
	l.leased[seq] = attempt
	return queue.Delivery{Lane: id, Seq: seq, ID: m.ID, Type: m.Type, Event: m.Event, TraceParent: m.TraceParent, LongNumbers: m.LongNumbers, Body: m.Body, AcceptedAt: m.AcceptedAt, Attempt: attempt}
}

// first returns the position of the next first attempt, or 0.
func (s *memStore) first(id queue.LaneID, l *memLane) uint64 {
	for len(l.released) > 0 {
		if !l.stats.EndpointRemoved || !s.isUnneeded(id, l, l.released[0]) {
			return l.released[0]
		}
		s.handOver(l, l.released[0])
		l.released = l.released[1:]
	}
	for ; l.next <= s.limit(id, l); l.next++ {
		m := s.message(id, l.next)
		switch {
		case slices.Contains(m.Skip, id.Destination):
			l.stats.Filtered++
			l.done[l.next] = true
			if g := s.groups[id.Group()]; id.Any && !g.final[l.next] {
				g.final[l.next] = true
				g.stats.Filtered++
			}
		case l.stats.EndpointRemoved && s.isUnneeded(id, l, l.next):
			s.handOver(l, l.next)
		default:
			return l.next
		}
	}
	return 0
}

// handOver ends a message in a lane of a group.
func (s *memStore) handOver(l *memLane, seq uint64) {
	l.done[seq] = true
	l.stats.Discarded++
}

func (s *memStore) leaseFirst(id queue.LaneID, l *memLane) (d queue.Delivery, ok bool) {
	seq := s.first(id, l)
	if seq == 0 {
		return d, false
	}
	if len(l.released) > 0 {
		l.released = l.released[1:]
	} else {
		l.next++
	}
	return s.delivery(id, l, seq, 0), true
}

func (s *memStore) leaseRetry(id queue.LaneID, l *memLane, due time.Time) (d queue.Delivery, ok bool) {
	var best uint64
	for seq, r := range l.retries {
		if !due.IsZero() && r.at.After(due) {
			continue
		}
		if l.stats.EndpointRemoved && s.isUnneeded(id, l, seq) {
			delete(l.retries, seq)
			s.handOver(l, seq)
			continue
		}
		if best == 0 || due.IsZero() && seq < best || !due.IsZero() && r.at.Before(l.retries[best].at) {
			best = seq
		}
	}
	if best == 0 {
		return d, false
	}
	r := l.retries[best]
	delete(l.retries, best)
	return s.delivery(id, l, best, r.attempt), true
}

func (s *memStore) Lease(id queue.LaneID, n int, buf []queue.Delivery) ([]queue.Delivery, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases++
	l := s.lanes[id]
	if l == nil {
		return buf, queue.ErrNoLane
	}
	if s.fail != nil {
		return buf, s.fail
	}
	for i := range n {
		var d queue.Delivery
		var ok bool
		if i%8 == 7 {
			d, ok = s.leaseRetry(id, l, time.Now())
		}
		if !ok {
			d, ok = s.leaseFirst(id, l)
		}
		if !ok {
			d, ok = s.leaseRetry(id, l, time.Now())
		}
		if !ok {
			l.wantsNotify = true
			s.armTimer(id, l)
			break
		}
		buf = append(buf, d)
	}
	return buf, nil
}

// armTimer schedules a notification for the earliest retry, if the lane wants one.
func (s *memStore) armTimer(id queue.LaneID, l *memLane) {
	if l.timer != nil {
		l.timer.Stop()
	}
	var at time.Time
	for _, r := range l.retries {
		if at.IsZero() || r.at.Before(at) {
			at = r.at
		}
	}
	if at.IsZero() || !l.wantsNotify {
		return
	}
	l.timer = time.AfterFunc(time.Until(at), func() {
		s.mu.Lock()
		wake := l.wantsNotify
		l.wantsNotify = false
		s.mu.Unlock()
		if wake {
			s.notify(id)
		}
	})
}

func (s *memStore) LeaseOldest(id queue.LaneID) (d queue.Delivery, ok bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases++
	l := s.lanes[id]
	if l == nil {
		return d, false, queue.ErrNoLane
	}
	oldest := s.first(id, l)
	for seq := range l.retries {
		if oldest == 0 || seq < oldest {
			oldest = seq
		}
	}
	if _, retry := l.retries[oldest]; retry {
		d, ok = s.leaseRetry(id, l, time.Time{})
	} else {
		d, ok = s.leaseFirst(id, l)
	}
	return d, ok, nil
}

// settle ends a lease. It returns nil for a lane that was dropped.
func (s *memStore) settle(d queue.Delivery, how string) *memLane {
	l := s.lanes[d.Lane]
	if l == nil {
		return nil
	}
	if attempt, ok := l.leased[d.Seq]; !ok || attempt != d.Attempt {
		s.addMisuse("%s of %v %d, which is not leased", how, d.Lane, d.Seq)
		return nil
	}
	delete(l.leased, d.Seq)
	return l
}

func (s *memStore) Ack(d queue.Delivery) (first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.settle(d, "ack")
	if l == nil {
		return false
	}
	l.stats.Delivered++
	l.done[d.Seq] = true
	if !d.Lane.Any {
		return true
	}
	g := s.groups[d.Lane.Group()]
	if g.final[d.Seq] {
		return false
	}
	g.final[d.Seq] = true
	g.stats.Delivered++
	for _, o := range s.members(d.Lane) {
		if _, ok := s.lanes[o].retries[d.Seq]; ok {
			delete(s.lanes[o].retries, d.Seq)
			s.handOver(s.lanes[o], d.Seq)
		}
	}
	return true
}

func (s *memStore) Release(d queue.Delivery) {
	s.mu.Lock()
	l := s.settle(d, "release")
	wake := false
	if l != nil {
		if d.Attempt == 0 {
			l.released = append(l.released, d.Seq)
			slices.Sort(l.released)
		} else {
			l.retries[d.Seq] = memRetry{at: time.Now(), attempt: d.Attempt}
		}
		wake, l.wantsNotify = l.wantsNotify, false
	}
	s.mu.Unlock()
	if wake {
		s.notify(d.Lane)
	}
}

func (s *memStore) Retry(d queue.Delivery, at time.Time, f queue.Failure) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.settle(d, "retry"); l != nil && d.Lane.Any && s.groups[d.Lane.Group()].final[d.Seq] {
		s.handOver(l, d.Seq)
	} else if l != nil {
		l.retries[d.Seq] = memRetry{at: at, attempt: d.Attempt + 1, f: f}
		s.armTimer(d.Lane, l)
	}
}

func (s *memStore) Bury(d queue.Delivery, f queue.Failure) (buried bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.settle(d, "bury"); l != nil {
		buried = s.bury(d.Lane, l, d.Seq, d.Attempt+1, f)
	}
	return buried, nil
}

func (s *memStore) bury(id queue.LaneID, l *memLane, seq uint64, attempts int, f queue.Failure) bool {
	l.done[seq] = true
	if g := s.groups[id.Group()]; id.Any {
		if attempts == 0 && len(s.members(id)) > 1 && !l.stats.EndpointRemoved {
			l.stats.Skipped++
		}
		if s.isUnneeded(id, l, seq) {
			if !g.final[seq] {
				g.handovers[seq] += attempts
			}
			l.stats.Discarded++
			return false
		}
		attempts += g.handovers[seq]
		g.final[seq] = true
		g.stats.DeadLettered++
		id.Endpoint, id.Any = "", false
	}
	l.stats.DeadLettered++
	m := s.message(id, seq)
	s.dead[id.Destination] = append(s.dead[id.Destination], queue.DeadLetter{
		Key: fmt.Sprint(len(s.dead[id.Destination])), Lane: id, Seq: seq, ID: m.ID, Type: m.Type, Body: m.Body, AcceptedAt: m.AcceptedAt, Attempts: attempts, Failure: f,
	})
	return true
}

func (s *memStore) BuryExpired(_ context.Context, id queue.LaneID, cut time.Time, f queue.Failure) (n int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.lanes[id]
	if l == nil {
		return 0, queue.ErrNoLane
	}
	for seq := s.first(id, l); seq != 0 && s.message(id, seq).AcceptedAt.Before(cut); seq = s.first(id, l) {
		if len(l.released) > 0 {
			l.released = l.released[1:]
		} else {
			l.next++
		}
		if s.bury(id, l, seq, 0, f) {
			n++
		}
	}
	for seq, r := range l.retries {
		if s.message(id, seq).AcceptedAt.Before(cut) {
			delete(l.retries, seq)
			if s.bury(id, l, seq, r.attempt, f) {
				n++
			}
		}
	}
	return n, nil
}

func (s *memStore) DeadLetters(_ context.Context, destination, _ string, fn func(queue.DeadLetter) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.dead[destination] {
		if !fn(d) {
			break
		}
	}
	return nil
}

func (s *memStore) DeleteDeadLetters(context.Context, string, ...string) error { panic("not used") }

func (s *memStore) TrimDeadLetters(_ context.Context, destination string, before, young time.Time, maxBytes int64) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := len(s.dead[destination])
	s.dead[destination] = slices.DeleteFunc(s.dead[destination], func(d queue.DeadLetter) bool { return d.Failure.Time.Before(before) })
	for dead := s.dead[destination]; int64(len(dead)) > maxBytes && dead[0].Failure.Time.Before(young); dead = dead[1:] {
		s.dead[destination] = dead[1:] // A dead letter is a byte here.
	}
	return was - len(s.dead[destination]), nil
}

func (s *memStore) DestinationStats(destination string) queue.DestinationStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := int64(len(s.dead[destination]))
	ledger := s.dropped[destination]
	for id := range s.lanes {
		if id.Destination == destination && !id.Any {
			ledger = ledger.Plus(s.laneStats(id).Ledger)
		}
	}
	for id := range s.groups {
		if id.Destination == destination {
			ledger = ledger.Plus(s.groupStats(id).Ledger)
		}
	}
	return queue.DestinationStats{Ledger: ledger, DeadLetters: n, DeadLetterBytes: n}
}

func (s *memStore) Destinations() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, letters := range s.dead {
		if len(letters) > 0 {
			names = append(names, name)
		}
	}
	for name := range s.dropped {
		names = append(names, name)
	}
	return names
}

func (s *memStore) ForgetDestination(destination string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.dropped, destination)
	return nil
}

func (s *memStore) PutMeta(name string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.meta[name] = value; value == nil {
		delete(s.meta, name)
	}
	return nil
}

func (s *memStore) PutMetaDurable(name string, value []byte) error { return s.PutMeta(name, value) }

func (s *memStore) AllMeta() (map[string][]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.meta), nil
}

func (s *memStore) LaneStats(id queue.LaneID) queue.LaneStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id.Any && id.Endpoint == "" {
		return s.groupStats(id)
	}
	return s.laneStats(id)
}

// groupStats returns the stats of a lane's group.
func (s *memStore) groupStats(id queue.LaneID) queue.LaneStats {
	g := s.groups[id.Group()]
	if g == nil {
		return queue.LaneStats{}
	}
	st := g.stats
	st.Accepted = int64(s.groupLimit(id)-g.start) + g.extra - g.gaps
	st.Pending = st.Accepted - st.Delivered - st.Filtered - st.DeadLettered - st.Discarded
	for _, o := range s.members(id) {
		l := s.laneStats(o)
		st.Retrying = max(st.Retrying, l.Retrying)
		if st.NextRetry.IsZero() || !l.NextRetry.IsZero() && l.NextRetry.Before(st.NextRetry) {
			st.NextRetry = l.NextRetry
		}
		for seq := s.lanes[o].start + 1; seq <= s.limit(o, s.lanes[o]); seq++ {
			if at := s.message(o, seq).AcceptedAt; !g.final[seq] && s.isPendingIn(o, s.lanes[o], seq) && (st.OldestPending.IsZero() || at.Before(st.OldestPending)) {
				st.OldestPending = at
			}
		}
	}
	return st
}

func (s *memStore) Position(id queue.LaneID) (read, end uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.lanes[id]; l != nil {
		return l.next - 1, uint64(len(s.logs[id.Source]))
	}
	return 0, 0
}

func (s *memStore) laneStats(id queue.LaneID) queue.LaneStats {
	l := s.lanes[id]
	if l == nil {
		return queue.LaneStats{}
	}
	first := s.first(id, l) // Counts filtered messages.
	st := l.stats
	st.Accepted = int64(s.limit(id, l) - l.start)
	st.Pending = st.Accepted - st.Delivered - st.Filtered - st.DeadLettered - st.Discarded
	st.Retrying, st.InFlight = int64(len(l.retries)), int64(len(l.leased))
	st.FirstAttempts = st.Pending - st.Retrying
	for _, attempt := range l.leased {
		if attempt > 0 {
			st.FirstAttempts--
		}
	}
	var oldest uint64
	addPending := func(seq uint64) {
		if seq != 0 && (oldest == 0 || seq < oldest) {
			oldest = seq
		}
	}
	addPending(first)
	for seq, r := range l.retries {
		addPending(seq)
		if st.NextRetry.IsZero() || r.at.Before(st.NextRetry) {
			st.NextRetry = r.at
		}
	}
	for seq := range l.leased {
		addPending(seq)
	}
	if oldest != 0 {
		st.OldestPending = s.message(id, oldest).AcceptedAt
	}
	return st
}

func (s *memStore) SourceStats(source string) queue.SourceStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return queue.SourceStats{Accepted: int64(len(s.logs[source]))}
}

func (s *memStore) Close() error { return nil }

// problems lists the recorded misuse and the messages that are still leased.
func (s *memStore) problems() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := slices.Clone(s.misuse)
	for id, l := range s.lanes {
		for seq := range l.leased {
			out = append(out, fmt.Sprintf("%v %d is still leased", id, seq))
		}
	}
	slices.SortFunc(out, cmp.Compare[string])
	return out
}

var _ queue.Store = (*memStore)(nil)
