package delivery

import (
	"errors"
	"runtime"
	"time"

	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// maxLease is the largest number of messages per lease; minLease is the number that a lane may
// always lease, because each lease costs a search in the log.
const (
	minLease = 16
	maxLease = 64
)

// worker is a goroutine that sends requests, one at a time.
type worker struct {
	// wake receives true if there may be work and false if the worker must end.
	wake chan bool
	post post
	// headers are reused for every request.
	headers []egress.Header
}

// notify is called by the store when a lane has messages to lease again.
func (e *Engine) notify(id queue.LaneID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.lanes[id]
	if l == nil {
		return
	}
	l.more, l.notified = true, true
	if e.enqueue(l) {
		e.wakeWorker()
	}
}

// enqueue appends a lane with work to the ready queue, unless it is in a queue. A lane with a lease
// in progress queues itself afterwards.
func (e *Engine) enqueue(l *lane) bool {
	if l.queued || l.parked() || !l.hasWork() || l.leasing && l.buffered() == 0 {
		return false
	}
	e.pushReady(l)
	return true
}

func (l *lane) parked() bool  { return len(l.targets) == 0 || l.broken }
func (l *lane) buffered() int { return len(l.buffer) - l.head }
func (l *lane) hasWork() bool { return l.more || l.buffered() > 0 }

// wakeWorker wakes one worker if there is work; a worker that finds work wakes the next. The lock is
// held.
func (e *Engine) wakeWorker() {
	if e.waking > 0 || !e.running || e.ready.len == 0 || e.stopped || e.paused {
		return
	}
	if n := len(e.idle); n > 0 {
		w := e.idle[n-1]
		e.idle = e.idle[:n-1]
		e.spare = min(e.spare, n-1)
		e.waking++
		w.wake <- true
		return
	}
	if e.workers < e.o.MaxInFlight {
		e.workers++
		e.waking++
		e.exits.Add(1)
		go e.work()
	}
}

// work is the main loop of a worker.
func (e *Engine) work() {
	defer e.exits.Done()
	w := &worker{wake: make(chan bool, 1)}
	e.mu.Lock()
	e.waking--
	for {
		if e.next(&w.post) {
			e.wakeWorker()
			e.mu.Unlock()
			e.send(w)
			e.mu.Lock()
			continue
		}
		if e.stopped {
			e.workers--
			e.mu.Unlock()
			return
		}
		e.idle = append(e.idle, w)
		e.mu.Unlock()
		run := <-w.wake
		e.mu.Lock()
		if !run {
			e.workers--
			e.mu.Unlock()
			return
		}
		e.waking--
	}
}

// next chooses the next request and accounts for it. It returns false if there is none. The lock is
// held, but released while the store is called.
func (e *Engine) next(p *post) bool {
	for {
		if e.stopped || e.paused {
			return false
		}
		l := e.popReady()
		if l == nil {
			return false
		}
		now := time.Now()
		e.resumeLease(l.owner, now) // l may need no lease.
		closed, probe := l.sendable(now)
		switch {
		case l.parked() || !l.hasWork() || !closed && !probe:
			e.yield(l, now)
		case e.mustWait(l):
			e.block(l)
			e.unblock()
		case !closed:
			if e.startProbe(l, p, now) {
				return true
			}
		case l.more && !l.leasing && l.owner.leases < e.maxLeases(l.owner, now) && l.buffered() < e.quantum(l)/4+1:
			e.lease(l)
		case l.buffered() > 0:
			d := l.take()
			if e.unsendable(l, &d, now) {
				if !e.enqueue(l) {
					e.yield(l, now)
				}
				continue
			}
			e.start(l, d, p, now)
			return true
		case !l.leasing:
			l.owner.toLease.push(l)
			e.load(l.owner, 1)
		}
	}
}

// processors is the number of leases that a namespace may have in progress while it is alone.
var processors = runtime.GOMAXPROCS(0)

// aloneAfter is how long no other namespace must have been active until one counts as alone. A namespace with short
// requests is active for moments only.
const aloneAfter = time.Second

// maxLeases is the number of leases that a namespace may have in progress. A lease reads the messages that filters
// exclude, so the lanes of one namespace could keep all processors busy: it gets half of them, unless it is alone.
func (e *Engine) maxLeases(n *namespace, now time.Time) int {
	if e.active > min(n.load, 1) || now.Sub(e.sharedAt) < aloneAfter {
		return max(1, processors/2)
	}
	return processors
}

// resumeLease puts a lane that waits for a lease into the ready queue if its namespace may have one more.
func (e *Engine) resumeLease(n *namespace, now time.Time) {
	if n.toLease.len > 0 && n.leases < e.maxLeases(n, now) {
		e.ready.push(n.toLease.pop())
	}
}

// share is the present limit of the requests in flight of a lane: no more than are still free, for
// all or of its namespace's part. So a few lanes may use most of the total, many lanes get equal
// shares, some capacity is always free for the next lane, and a namespace gets its part however many
// lanes another one has. Lanes whose endpoints fail, are slow, or are not proven yet share one half
// at most, so that failing endpoints cannot use up the capacity.
func (e *Engine) share(l *lane, proven bool) int {
	free := max(e.o.MaxInFlight-e.inFlight, e.o.MaxInFlight/max(1, e.active)-l.owner.inFlight)
	if proven {
		return free
	}
	half := e.freeForUnproven()
	if l.granted {
		half++
	}
	return min(free, half)
}

// freeForUnproven is the number of requests that lanes without a grant may start in the half of the
// unproven ones.
func (e *Engine) freeForUnproven() int { return e.o.MaxInFlight/2 - e.unproven - e.granted }

// grant reserves one request in the half of the unproven lanes for a lane that waited. Without it
// the lanes of namespaces with fewer requests in flight, which are earlier in the ready queue, could
// take every free request before the lane has its turn.
func (e *Engine) grant(l *lane) {
	l.granted = true
	e.granted++
}

// endGrant ends the grant of a lane, if it has one: the lane starts its request, or cannot.
func (e *Engine) endGrant(l *lane) {
	if l.granted {
		l.granted = false
		e.granted--
	}
}

func (l *lane) proven() bool {
	for _, t := range l.targets {
		if t.machine.Proven() {
			return true
		}
	}
	return false
}

// blockedLike returns the queue in which a lane waits for its share, and the place of its namespace.
func (e *Engine) blockedLike(l *lane) (*blockedQueue, *waitingLanes) {
	if l.proven() {
		return &e.blocked, &l.owner.blocked
	}
	return &e.blockedUnproven, &l.owner.blockedUnproven
}

// mustWait reports whether a lane has used its share, or another lane of its namespace is already
// waiting that has no more requests in flight than this one.
func (e *Engine) mustWait(l *lane) bool {
	if l.inFlight >= e.share(l, l.proven()) {
		return true
	}
	_, waiting := e.blockedLike(l)
	first := waiting.lanes.head
	return first != nil && !l.waited && first.inFlight <= l.inFlight
}

// block makes a lane wait for its share. A lane that had its turn and found the share used up again
// keeps its place.
func (e *Engine) block(l *lane) {
	e.endGrant(l)
	q, waiting := e.blockedLike(l)
	if l.waited {
		q.pushFront(waiting, l)
	} else {
		q.push(waiting, l)
	}
	l.waited = true
	e.load(l.owner, 1)
}

// unblock gives the turn to a waiting lane whose share is free now. It is called whenever a request
// ends, and when a lane did not use its turn.
func (e *Engine) unblock() {
	for _, q := range []*blockedQueue{&e.blocked, &e.blockedUnproven} {
		proven := q == &e.blocked
		for tries := 8; tries > 0 && q.len > 0; {
			if !proven && e.freeForUnproven() <= 0 {
				break // The limit is the same for all namespaces, so none loses its turn.
			}
			share := e.share(q.head.lanes.head, proven)
			if share <= 0 {
				q.skip()
				tries--
				continue
			}
			l := q.pop()
			e.load(l.owner, -1)
			if l.parked() || !l.hasWork() {
				continue // This lane does not use up a try, because the lanes behind it may get no other turn.
			}
			tries--
			if l.inFlight < share {
				if !proven {
					e.grant(l)
				}
				e.pushReady(l)
				break
			}
			e.load(l.owner, 1)
			if proven {
				q.push(&l.owner.blocked, l)
			} else {
				q.push(&l.owner.blockedUnproven, l)
			}
		}
	}
}

// pushReady appends a lane to the ready queue.
func (e *Engine) pushReady(l *lane) {
	e.ready.push(l)
	e.load(l.owner, 1)
}

// popReady removes the next lane of the ready queue; nil if there is none.
func (e *Engine) popReady() *lane {
	l := e.ready.pop()
	if l != nil {
		e.load(l.owner, -1)
	}
	return l
}

// load adds n to the waiting lanes, leases in progress and requests in flight of a namespace. A namespace is active
// while it has any.
func (e *Engine) load(owner *namespace, n int) {
	before := owner.load
	owner.load += n
	switch {
	case before == 0:
		e.active++
	case owner.load == 0:
		if e.active--; e.active == 1 {
			e.sharedAt = time.Now()
		}
	}
}

// quantum is the number of messages that a lane leases at once: at most its endpoints' windows or
// minLease, and fewer the more lanes there are, so that the leased messages of all lanes are
// bounded.
func (e *Engine) quantum(l *lane) int {
	window := minLease
	for _, t := range l.targets {
		window = max(window, t.machine.Window())
	}
	return max(1, min(window, maxLease, (4*e.o.MaxInFlight-e.leased)/(e.ready.len+1)))
}

// sendable reports whether an endpoint with a closed circuit can accept a request, or, if all
// circuits are open, whether a probe is due. Only the endpoints of the highest rank count: a message
// must not be sent to a failing URL only because the working one is briefly busy.
func (l *lane) sendable(now time.Time) (closed, probe bool) {
	best := 0
	for _, t := range l.targets {
		switch r := t.rank(now); {
		case r == 0:
			probe = probe || t.machine.ProbeDue(now)
		case r > best:
			closed, best = t.takes(now), r
		case r == best:
			closed = closed || t.takes(now)
		}
	}
	return closed, probe && best == 0
}

// takes reports whether the endpoint can accept an ordinary request.
func (ep *liveEndpoint) takes(now time.Time) bool {
	return ep.room() > 0 && ep.rateWait(now) == 0
}

// setRate sets the largest number of requests per second; 0 is no limit. A tenth of a second's
// requests may be sent at once.
func (ep *liveEndpoint) setRate(perSecond int) {
	switch {
	case perSecond == 0:
		ep.rate = nil
	case ep.rate == nil || ep.rate.Limit() != rate.Limit(perSecond):
		ep.rate = rate.NewLimiter(rate.Limit(perSecond), max(1, perSecond/10))
	}
}

// rateWait returns the time until the rate limit permits a request.
func (ep *liveEndpoint) rateWait(now time.Time) time.Duration {
	if ep.rate == nil {
		return 0
	}
	// The tolerance covers rounding; without it a timer could always fire just too early.
	missing := 1 - ep.rate.TokensAt(now)
	if missing <= 1e-6 {
		return 0
	}
	return time.Duration(missing/float64(ep.rate.Limit())*float64(time.Second)) + 1
}

// servedPerSecond is the request rate that an endpoint should reach even when other endpoints use
// most connections.
const servedPerSecond = 100

// room is the number of further requests that the endpoint may have in flight. While connections
// are scarce, it waits for one of its own connections instead of dialling, as long as they are fast
// enough: for a burst to a fast endpoint, dialling does not pay.
func (ep *liveEndpoint) room() int {
	room := ep.machine.Room(ep.inFlight)
	if room > 0 && ep.to != nil {
		needed := 1 + int(ep.machine.Latency()*servedPerSecond/time.Second)
		room = min(room, ep.to.Room(needed, ep.inFlight))
	}
	return room
}

// wakeNextLane gives an endpoint's free capacity to the next lane that has work for it, or sets a timer if
// capacity becomes free by time alone.
func (e *Engine) wakeNextLane(ep *liveEndpoint, now time.Time) {
	var at time.Time
	switch m := &ep.machine; {
	case m.Probing() || !m.Open() && ep.room() <= 0:
		return // The end of a request in flight calls wakeNextLane again.
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
			e.arm(ep, at, now)
			return
		}
		if closed, probe := l.sendable(now); (closed || probe) && e.enqueue(l) {
			return
		}
	}
}

// arm sets the endpoint's timer, unless it already fires earlier.
func (e *Engine) arm(ep *liveEndpoint, at, now time.Time) {
	if e.stopped || !ep.timerAt.IsZero() && !at.Before(ep.timerAt) {
		return
	}
	ep.timerAt = at
	if ep.timer == nil {
		ep.timer = time.AfterFunc(at.Sub(now), func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			ep.timerAt = time.Time{}
			e.wakeNextLane(ep, time.Now())
			e.wakeWorker()
		})
		return
	}
	ep.timer.Reset(at.Sub(now))
}

// yield is called for a lane that cannot use its turn; it offers the turn to other lanes.
func (e *Engine) yield(l *lane, now time.Time) {
	e.endGrant(l)
	for _, t := range l.targets {
		e.wakeNextLane(t.liveEndpoint, now)
	}
	e.unblock()
}

// take removes the first message of the lane's buffer.
func (l *lane) take() queue.Delivery {
	d := l.buffer[l.head]
	l.buffer[l.head] = queue.Delivery{}
	if l.head++; l.head == len(l.buffer) {
		l.buffer, l.head = l.buffer[:0], 0
	}
	return d
}

// takeBuffer removes all buffered messages; the caller releases them.
func (e *Engine) takeBuffer(l *lane) []queue.Delivery {
	back := append([]queue.Delivery(nil), l.buffer[l.head:]...)
	clear(l.buffer)
	l.buffer, l.head = l.buffer[:0], 0
	l.leased -= len(back)
	e.leased -= len(back)
	l.more = l.more || len(back) > 0
	return back
}

// release returns messages to the store, the last first, without the lock.
func (e *Engine) release(back []queue.Delivery) {
	for i := len(back) - 1; i >= 0; i-- {
		e.o.Store.Release(back[i])
		if i == 0 || back[i].Lane != back[i-1].Lane {
			e.markChanged(back[i].Lane.Destination)
		}
	}
}

// lease fills the lane's buffer and puts the lane first in the ready queue.
func (e *Engine) lease(l *lane) {
	n, set := e.quantum(l), l.set
	l.leasing, l.notified = true, false
	l.owner.leases++
	e.load(l.owner, 1)
	e.enqueue(l)   // Buffered messages can be sent meanwhile.
	e.wakeWorker() // This worker cannot take the lanes that are ready.
	e.mu.Unlock()
	got, err := e.o.Store.Lease(l.id, n, l.scratch[:0])
	e.mu.Lock()
	l.leasing = false
	l.owner.leases--
	e.resumeLease(l.owner, time.Now())
	e.load(l.owner, -1)
	l.destination.changed.Numbers() // The store may have counted messages that the lane does not get.
	l.scratch = got
	l.more = len(got) >= n || l.notified
	e.leasedFor(l, set, got, err)
	if !l.queued && !l.parked() && l.hasWork() {
		e.ready.pushFront(l)
		e.load(l.owner, 1)
	} else if l.parked() || !l.hasWork() {
		e.yield(l, time.Now())
	}
}

// leasedFor puts leased messages into the lane's buffer, or releases them if meanwhile the lane's
// settings changed, it was parked, its circuits opened or the engine stopped.
func (e *Engine) leasedFor(l *lane, set *destinationConfig, got []queue.Delivery, err error) {
	rest := copy(l.buffer, l.buffer[l.head:])
	clear(l.buffer[rest:])
	l.buffer, l.head = append(l.buffer[:rest], got...), 0
	l.leased += len(got)
	e.leased += len(got)
	clear(got)
	if err != nil {
		e.breakLane(l, err)
	}
	if l.set != set || l.parked() || e.stopped || !l.anyClosed() {
		if back := e.takeBuffer(l); len(back) > 0 {
			e.mu.Unlock()
			e.release(back)
			e.mu.Lock()
		}
	}
}

func (l *lane) anyClosed() bool {
	for _, t := range l.targets {
		if !t.machine.Open() {
			return true
		}
	}
	return false
}

// breakLane parks a lane after a store error and retries later.
func (e *Engine) breakLane(l *lane, err error) {
	l.broken = true
	if errors.Is(err, queue.ErrClosed) || errors.Is(err, queue.ErrNoLane) {
		return // The lane no longer exists.
	}
	e.log.With(l.id.LogArgs()...).Error("reading from the queue failed; retrying in a second", "error", err)
	time.AfterFunc(time.Second, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		l.broken, l.more = false, true
		e.enqueue(l)
		e.wakeWorker()
	})
}
