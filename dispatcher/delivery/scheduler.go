package delivery

import (
	"runtime"
	"time"

	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// maxLease is the largest number of messages per lease; minLease is the number that a lane may
// always lease, because each lease costs a search in the log.
const (
	minLease = 16
	maxLease = 64
)

// scheduler decides which lane gets the next request, and how many it may have: it has the queues of lanes, and the
// counts of which they and their namespaces have shares. The engine's lock guards it.
type scheduler struct {
	// maxInFlight is the limit of inFlight while the leased messages are small beside memory.RequestBytes.
	maxInFlight int
	// ready lanes have messages and an endpoint that can accept them; blocked lanes wait for their
	// share of maxInFlight.
	ready                   readyQueue
	blocked, blockedFailing blockedQueue
	// active counts the namespaces with waiting lanes, leases in progress or requests in flight.
	active int
	// inFlight counts requests, failing the requests of lanes that were failing at their start, leased the messages that
	// are leased and not settled, without those of lanes with batches, which batched counts.
	inFlight, failing, leased, batched int
	// slow counts the requests to endpoints that were slow at their start.
	slow int
	// freeLeases counts the leases in progress of dense lanes that do not count for their namespaces.
	freeLeases int
	// leasedBytes are the bodies of the leased messages, bufferedBytes the part of those without a request, leasingBytes
	// the most that leases in progress can add.
	leasedBytes, bufferedBytes, leasingBytes int
}

// limit is the present limit of the requests in flight: leased messages use the same memory. Those without a request count
// for no more than their part. Endpoints that are not slow have maxFast at most: with more, their requests would wait for a
// processor of this process, on connections that others could use again.
func (s *scheduler) limit() int {
	held := s.leasedBytes + s.batched*batchedBytes - max(0, s.bufferedBytes-s.bufferLimit())
	return max(1, min(s.maxInFlight-held/memory.RequestBytes, maxFast+s.slow))
}

const (
	// maxFast is enough for 10,000 requests a second to endpoints that are not slow.
	maxFast = 1024
	// batchedBytes is the memory of a leased message beside its body.
	batchedBytes = 512
	// slowFrom is the mean duration of attempts from which an endpoint is slow.
	slowFrom = 100 * time.Millisecond
)

// bufferLimit bounds the bodies of messages without a request, except for one of each lane.
func (s *scheduler) bufferLimit() int { return s.maxInFlight * memory.RequestBytes / 16 }

// buffersFull reports whether no lane may hold messages that it could send.
func (s *scheduler) buffersFull() bool { return s.bufferedBytes+s.leasingBytes >= s.bufferLimit() }

// mayHold reports whether a lane may hold messages that it could send: its namespace has no more of them than is still free, so that
// its batches do not make those of others smaller.
func (s *scheduler) mayHold(l *lane) bool { return l.owner.buffered <= s.bufferLimit()-s.bufferedBytes }

// enqueue appends a lane with work to the ready queue, unless it is in a queue. A lane with a lease
// in progress queues itself afterwards.
func (s *scheduler) enqueue(l *lane) bool {
	if l.queued || l.parked() || !l.hasWork() || l.leasing && l.buffered() == 0 {
		return false
	}
	s.pushReady(l)
	return true
}

// maxLeases is the number of leases of lanes that are not dense that a namespace may have in progress: half of the
// processors. They read the messages that filters exclude, so the lanes of one namespace could keep all of them busy.
var maxLeases = max(1, runtime.GOMAXPROCS(0)/2)

// maxFreeLeases bounds the leases that maxLeases does not: each may need a thread while the disk does not respond.
const maxFreeLeases = 512

// mayLease reports whether a lane may lease now.
func (s *scheduler) mayLease(l *lane) bool { return s.leasesFreely(l) || l.owner.leases < maxLeases }

func (s *scheduler) leasesFreely(l *lane) bool { return l.dense && s.freeLeases < maxFreeLeases }

// resumeLease puts a lane that waits for a lease into the ready queue if its namespace may have one more.
func (s *scheduler) resumeLease(n *namespace) {
	if n.toLease.len > 0 && n.leases < maxLeases {
		s.ready.push(n.toLease.pop())
	}
}

// awaitLease makes a lane wait for the end of a lease of its namespace.
func (s *scheduler) awaitLease(l *lane) {
	l.owner.toLease.push(l)
	s.load(l.owner, 1)
}

// beginLease counts a lease in progress of a lane, whose buffered messages can be sent meanwhile.
func (s *scheduler) beginLease(l *lane) {
	l.leasing, l.notified = true, false
	if l.free = s.leasesFreely(l); l.free {
		s.freeLeases++
	} else {
		l.owner.leases++
	}
	s.load(l.owner, 1)
	s.enqueue(l)
}

// endLease ends what beginLease began.
func (s *scheduler) endLease(l *lane) {
	l.leasing = false
	if l.free {
		s.freeLeases--
	} else {
		l.owner.leases--
		s.resumeLease(l.owner)
	}
	s.load(l.owner, -1)
}

// share is the present limit of the requests in flight of a lane: no more than are still free, for all or of its
// namespace's part. So a few lanes may use most of the total, many lanes get equal shares, some capacity is always free
// for the next lane, and a namespace gets its part however many lanes another one has. It keeps half of its part, less the memory of
// its own messages, while those of others reduce the limit. Lanes whose endpoints fail share
// one half at most: more of them than requests in flight, each with a timeout, would use up the capacity until their
// circuits open.
func (s *scheduler) share(l *lane, failing bool) int {
	free := max(s.limit()-s.inFlight, s.limit()/max(1, s.active)-l.owner.inFlight,
		min(s.maxInFlight, maxFast+s.slow)/(2*max(1, s.active))-l.owner.inFlight-l.owner.leasedBytes/memory.RequestBytes)
	if failing {
		return min(free, s.freeForFailing())
	}
	return free
}

// freeForFailing is the free part of the half that failing lanes share.
func (s *scheduler) freeForFailing() int { return max(1, s.limit()/2) - s.failing }

// blockedLike returns the queue in which a lane waits for its share, and the place of its namespace.
func (s *scheduler) blockedLike(l *lane) (*blockedQueue, *waitingLanes) {
	if l.failing() {
		return &s.blockedFailing, &l.owner.blockedFailing
	}
	return &s.blocked, &l.owner.blocked
}

// mustWait reports whether a lane has used its share, or another lane of its namespace is already
// waiting that has no more requests in flight than this one.
func (s *scheduler) mustWait(l *lane) bool {
	if l.inFlight >= s.share(l, l.failing()) {
		return true
	}
	_, waiting := s.blockedLike(l)
	first := waiting.lanes.head
	return first != nil && !l.waited && first.inFlight <= l.inFlight
}

// block makes a lane wait for its share. A lane that had its turn and found the share used up again keeps its place.
func (s *scheduler) block(l *lane) {
	q, waiting := s.blockedLike(l)
	if l.waited {
		q.pushFront(waiting, l)
	} else {
		q.push(waiting, l)
	}
	l.waited = true
	s.load(l.owner, 1)
}

// unblock gives the turn to a waiting lane whose share is free now. It is called whenever a request
// ends, and when a lane did not use its turn.
func (s *scheduler) unblock() {
	s.unblockOne(&s.blocked, false)
	if s.freeForFailing() > 0 { // The half is the same for all namespaces, so none loses its turn.
		s.unblockOne(&s.blockedFailing, true)
	}
}

// unblockOne gives the turn to a lane of a queue.
func (s *scheduler) unblockOne(q *blockedQueue, failing bool) {
	for tries := 8; tries > 0 && q.len > 0; {
		share := s.share(q.head.lanes.head, failing)
		if share <= 0 {
			q.skip()
			tries--
			continue
		}
		l := q.pop()
		s.load(l.owner, -1)
		if l.parked() || !l.hasWork() {
			continue // This lane does not use up a try, because the lanes behind it may get no other turn.
		}
		tries--
		if l.inFlight < share {
			s.pushReady(l)
			return
		}
		s.load(l.owner, 1)
		q, waiting := s.blockedLike(l)
		q.push(waiting, l)
	}
}

// pushReady appends a lane to the ready queue.
func (s *scheduler) pushReady(l *lane) {
	s.ready.push(l)
	s.load(l.owner, 1)
}

// pushFront makes a lane the next one of its namespace in the ready queue.
func (s *scheduler) pushFront(l *lane) {
	s.ready.pushFront(l)
	s.load(l.owner, 1)
}

// popReady removes the next lane of the ready queue; nil if there is none.
func (s *scheduler) popReady() *lane {
	l := s.ready.pop()
	if l != nil {
		s.load(l.owner, -1)
	}
	return l
}

// load adds n to the waiting lanes, leases in progress and requests in flight of a namespace. A namespace is active
// while it has any.
func (s *scheduler) load(owner *namespace, n int) {
	before := owner.load
	owner.load += n
	switch {
	case before == 0:
		s.active++
	case owner.load == 0:
		s.active--
	}
}

// quantum is the number of messages that a lane leases at once: at most its endpoints' windows or minLease, and fewer
// the more lanes there are, so that the leased messages of all lanes are bounded. It is 1 above bufferLimit.
func (s *scheduler) quantum(l *lane) int {
	switch {
	case s.buffersFull():
		return 1
	case l.set.batch != nil:
		return l.set.batch.MaxMessages
	}
	window := minLease
	for _, t := range l.targets {
		window = max(window, t.machine.Window())
	}
	return max(1, min(window, maxLease, (4*s.maxInFlight-s.leased)/(s.ready.len+1)))
}

// wakeNextLane gives an endpoint's free capacity to the next lane that has work for it. It returns the time at which
// capacity becomes free by time alone, if lanes wait for it; otherwise zero.
func (s *scheduler) wakeNextLane(ep *liveEndpoint, now time.Time) (at time.Time) {
	switch m := &ep.machine; {
	case m.Probing() || !m.Open() && ep.room() <= 0:
		return time.Time{} // The end of a request in flight calls wakeNextLane again.
	case m.Open():
		at = m.ProbeAt()
	default:
		at = now.Add(ep.rateWait(now))
	}
	for range ep.lanes {
		ep.turn = (ep.turn + 1) % len(ep.lanes)
		l := ep.lanes[ep.turn]
		if l.queued || l.parked() || !l.hasWork() {
			continue
		}
		if at.After(now) {
			ep.turn = (ep.turn + len(ep.lanes) - 1) % len(ep.lanes)
			return at
		}
		if closed, probe := l.sendable(now); (closed || probe) && s.enqueue(l) {
			break
		}
	}
	return time.Time{}
}

// addLeased adds n messages with bodies of a size to those of a lane that are leased and not settled.
func (s *scheduler) addLeased(l *lane, n, size int) {
	l.leased += n
	s.leasedBytes += size
	l.owner.leasedBytes += size
	counted, batched := l.leased, 0
	if l.set != nil && l.set.batch != nil {
		counted, batched = batched, counted
	}
	s.leased += counted - l.counted
	s.batched += batched - l.batched
	l.counted, l.batched = counted, batched
}

// addBuffered adds a number of bytes to the bodies of a lane's messages without a request.
func (s *scheduler) addBuffered(l *lane, size int) {
	s.bufferedBytes += size
	l.owner.buffered += size
}

// take removes the first message of a lane's buffer.
func (s *scheduler) take(l *lane) queue.Delivery {
	d := l.take()
	s.addBuffered(l, -len(d.Body))
	return d
}

// bodies is the size of the bodies of messages.
func bodies(messages []queue.Delivery) (size int) {
	for i := range messages {
		size += len(messages[i].Body)
	}
	return size
}

// fill puts leased messages into the lane's buffer.
func (s *scheduler) fill(l *lane, got []queue.Delivery) {
	rest := copy(l.buffer, l.buffer[l.head:])
	clear(l.buffer[rest:])
	l.buffer, l.head, l.held = append(l.buffer[:rest], got...), 0, false
	size := bodies(got)
	s.addLeased(l, len(got), size)
	s.addBuffered(l, size)
	clear(got)
}

// takeBuffer removes all buffered messages; the caller releases them.
func (s *scheduler) takeBuffer(l *lane) []queue.Delivery {
	l.joinParts()
	back := append([]queue.Delivery(nil), l.buffer[l.head:]...)
	clear(l.buffer)
	l.emptyBuffer()
	size := bodies(back)
	s.addLeased(l, -len(back), -size)
	s.addBuffered(l, -size)
	l.more = l.more || len(back) > 0
	return back
}

// account counts a request that starts.
func (s *scheduler) account(p *post, now time.Time) {
	p.lane.waited = false
	p.lane.inFlight++
	p.target.inFlight++
	p.target.meter.Count(now, 1, p.target.inFlight)
	p.waitsRequested = p.target.waitsRequested
	p.failing = p.lane.failing()
	s.addInFlight(p.lane.owner, 1, p.failing)
	if p.slow = p.target.machine.Latency() >= slowFrom; p.slow {
		s.slow++
	}
	s.unblock() // The limit may permit more requests than this one.
	if p.target.rate != nil {
		p.target.rate.ReserveN(now, 1)
	}
}

// addInFlight adds n to the requests in flight of a namespace; a negative n subtracts.
func (s *scheduler) addInFlight(owner *namespace, n int, failing bool) {
	owner.inFlight += n
	s.load(owner, n)
	s.ready.changed(owner)
	s.inFlight += n
	if failing {
		s.failing += n
	}
}
