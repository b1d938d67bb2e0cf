package delivery

import (
	"errors"
	"time"

	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// maxLease is how many messages a lane leases at once, minLease how many it
// may lease however few it has in flight: each lease costs a search in the log.
const (
	minLease = 16
	maxLease = 64
)

// worker is a goroutine that sends requests, one after the other.
type worker struct {
	// wake gets true when there may be work and false when the worker must end.
	wake chan bool
	post post
	// headers are kept from request to request for their memory.
	headers []egress.Header
}

// fifo is a queue of lanes, linked through the lanes themselves.
type fifo struct {
	head, tail *lane
	len        int
}

func (q *fifo) push(l *lane) {
	l.queued, l.next = true, nil
	if q.tail == nil {
		q.head = l
	} else {
		q.tail.next = l
	}
	q.tail = l
	q.len++
}

func (q *fifo) pushFront(l *lane) {
	l.queued, l.next = true, q.head
	q.head = l
	if q.tail == nil {
		q.tail = l
	}
	q.len++
}

func (q *fifo) pop() *lane {
	l := q.head
	if l == nil {
		return nil
	}
	if q.head = l.next; q.head == nil {
		q.tail = nil
	}
	l.queued, l.next = false, nil
	q.len--
	return l
}

// notify is called by the store when a lane has something to lease again.
func (e *Engine) notify(id queue.LaneID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.lanes[id]
	if l == nil {
		return
	}
	l.more, l.notified = true, true
	if e.enqueue(l) {
		e.kick()
	}
}

// enqueue puts a lane that has work and is nowhere queued at the end of the
// ready queue. A lane that is being leased for queues itself afterwards.
func (e *Engine) enqueue(l *lane) bool {
	if l.queued || l.parked() || !l.hasWork() || l.leasing && l.buffered() == 0 {
		return false
	}
	e.ready.push(l)
	return true
}

func (l *lane) parked() bool  { return len(l.targets) == 0 || l.broken }
func (l *lane) buffered() int { return len(l.buffer) - l.head }
func (l *lane) hasWork() bool { return l.more || l.buffered() > 0 }

// kick wakes one worker when there is work; a worker that found some kicks the
// next. The lock is held.
func (e *Engine) kick() {
	if e.waking > 0 || !e.running || e.ready.len == 0 || e.stopped {
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

// work is a worker's life.
func (e *Engine) work() {
	defer e.exits.Done()
	w := &worker{wake: make(chan bool, 1)}
	e.mu.Lock()
	e.waking--
	for {
		if e.next(&w.post) {
			e.kick()
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

// next chooses the next request to send and accounts for it. It returns false
// when there is none. The lock is held, but released while the store is asked.
func (e *Engine) next(p *post) bool {
	for {
		if e.stopped {
			return false
		}
		l := e.ready.pop()
		if l == nil {
			return false
		}
		now := time.Now()
		closed, probe := l.sendable(now)
		switch {
		case l.parked() || !l.hasWork() || !closed && !probe:
			e.pass(l, now)
		case e.mustWait(l):
			e.block(l)
			e.unblock()
		case !closed:
			if e.startProbe(l, p, now) {
				return true
			}
		case l.more && !l.leasing && l.buffered() < e.quantum(l)/4+1:
			e.lease(l)
		case l.buffered() > 0:
			d := l.take()
			if e.unsendable(l, &d, now) {
				e.enqueue(l)
				continue
			}
			e.start(l, d, p, now)
			return true
		}
	}
}

// share is how many requests a lane may have in flight at most, as things
// stand: no more than are still free for all. So a few lanes may use most of
// what there is, many lanes get equal shares, and something is always left for
// the next one. Lanes whose endpoints fail, are slow, or have not yet shown
// that they work have one half at most; dead ones cannot take what the others live on.
func (e *Engine) share(proven bool) int {
	free := e.o.MaxInFlight - e.inFlight
	if proven {
		return free
	}
	return min(free, e.o.MaxInFlight/2-e.unproven)
}

func (l *lane) proven() bool {
	for _, t := range l.targets {
		if t.health.proven() {
			return true
		}
	}
	return false
}

// blockedLike returns the queue in which a lane waits for its share.
func (e *Engine) blockedLike(l *lane) *fifo {
	if l.proven() {
		return &e.blocked
	}
	return &e.blockedUnproven
}

// mustWait reports whether a lane has all of its share, or comes behind a lane
// that waits already and has no more in flight than this one.
func (e *Engine) mustWait(l *lane) bool {
	if l.inFlight >= e.share(l.proven()) {
		return true
	}
	first := e.blockedLike(l).head
	return first != nil && !l.waited && first.inFlight <= l.inFlight
}

// block makes a lane wait for its share. One that had its turn and found the
// share taken again keeps its place.
func (e *Engine) block(l *lane) {
	if l.waited {
		e.blockedLike(l).pushFront(l)
	} else {
		e.blockedLike(l).push(l)
	}
	l.waited = true
}

// unblock gives the turn to a lane that waits for its share and has it now. It
// is called whenever a request ends, and when a lane did not use its turn.
func (e *Engine) unblock() {
	for _, q := range []*fifo{&e.blocked, &e.blockedUnproven} {
		share := e.share(q == &e.blocked)
		for looks := 8; looks > 0 && q.head != nil && share > 0; {
			l := q.pop()
			if l.parked() || !l.hasWork() {
				continue // It costs no look: nobody might come by again for those behind it.
			}
			looks--
			if l.inFlight < share {
				e.ready.push(l)
				break
			}
			q.push(l)
		}
	}
}

// quantum is how many messages a lane leases at once: no more than its
// endpoints' windows or minLease, and less the more lanes there are, so that
// what is leased stays bounded for all lanes together.
func (e *Engine) quantum(l *lane) int {
	window := minLease
	for _, t := range l.targets {
		window = max(window, int(t.circuit.window))
	}
	return max(1, min(window, maxLease, (4*e.o.MaxInFlight-e.leased)/(e.ready.len+1)))
}

// sendable reports whether some endpoint with a closed circuit has room for a
// request, or, when all circuits are open, whether some probe is due. While an
// endpoint is proven, room at others does not count: a message should not go
// to a URL that fails only because the one that works is busy for a moment.
func (l *lane) sendable(now time.Time) (closed, probe bool) {
	open, proven := true, false
	for _, t := range l.targets {
		switch {
		case t.circuit.mayProbe(now):
			probe = true
		case !t.circuit.open:
			open = false
			if p := t.health.proven(); p && !proven {
				closed, proven = t.takes(now), true
			} else if p == proven {
				closed = closed || t.takes(now)
			}
		}
	}
	return closed, probe && open
}

// takes reports whether the endpoint has room for an ordinary request.
func (ep *endpoint) takes(now time.Time) bool {
	return ep.room() > 0 && ep.bucket.wait(now) == 0
}

// servedPerSecond is how many requests an endpoint should have served however
// many others have connections too.
const servedPerSecond = 100

// room is how many more requests the endpoint may have in flight. While
// connections are scarce it waits for one of its own rather than dial, as long
// as those serve enough: a burst for an endpoint that answers at once is not
// worth the dials.
func (ep *endpoint) room() int {
	room := ep.circuit.room(ep.inFlight)
	if room > 0 && ep.to != nil {
		needed := 1 + int(ep.health.latency*servedPerSecond/time.Second)
		room = min(room, ep.to.Share(needed)-ep.inFlight)
	}
	return room
}

// offer gives the room that an endpoint has to the next lane in turn that has
// work for it, or sets a timer when room will come with time alone.
func (e *Engine) offer(ep *endpoint, now time.Time) {
	var at time.Time
	switch c := &ep.circuit; {
	case c.probing || !c.open && ep.room() <= 0:
		return // The end of a request in flight will offer again.
	case c.open:
		at = c.probeAt
	default:
		at = now.Add(ep.bucket.wait(now))
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

// arm sets the endpoint's timer, unless it fires earlier already.
func (e *Engine) arm(ep *endpoint, at, now time.Time) {
	if e.stopped || !ep.timerAt.IsZero() && !at.Before(ep.timerAt) {
		return
	}
	ep.timerAt = at
	if ep.timer == nil {
		ep.timer = time.AfterFunc(at.Sub(now), func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			ep.timerAt = time.Time{}
			e.offer(ep, time.Now())
			e.kick()
		})
		return
	}
	ep.timer.Reset(at.Sub(now))
}

// pass is called for a lane that cannot use its turn: others may.
func (e *Engine) pass(l *lane, now time.Time) {
	for _, t := range l.targets {
		e.offer(t.endpoint, now)
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

// takeBuffer removes all of it; the caller releases it.
func (e *Engine) takeBuffer(l *lane) []queue.Delivery {
	back := append([]queue.Delivery(nil), l.buffer[l.head:]...)
	clear(l.buffer)
	l.buffer, l.head = l.buffer[:0], 0
	l.leased -= len(back)
	e.leased -= len(back)
	l.more = l.more || len(back) > 0
	return back
}

// release gives messages back, the last first, without the lock.
func (e *Engine) release(back []queue.Delivery) {
	for i := len(back) - 1; i >= 0; i-- {
		e.o.Store.Release(back[i])
	}
}

// lease fills the lane's buffer and puts the lane first in the ready queue.
func (e *Engine) lease(l *lane) {
	n := e.quantum(l)
	l.leasing, l.notified = true, false
	if e.enqueue(l) {
		e.kick() // What is buffered can go on meanwhile.
	}
	e.mu.Unlock()
	got, err := e.o.Store.Lease(l.id, n, l.scratch[:0])
	e.mu.Lock()
	l.leasing = false
	l.scratch = got
	l.more = len(got) >= n || l.notified
	e.leasedFor(l, got, err)
	if !l.queued && !l.parked() && l.hasWork() {
		e.ready.pushFront(l)
	} else if !l.hasWork() {
		e.pass(l, time.Now())
	}
}

// leasedFor takes what the store gave for a lane into its buffer, or gives it
// back when meanwhile the lane was parked, its circuits opened or the engine stopped.
func (e *Engine) leasedFor(l *lane, got []queue.Delivery, err error) {
	left := copy(l.buffer, l.buffer[l.head:])
	clear(l.buffer[left:])
	l.buffer, l.head = append(l.buffer[:left], got...), 0
	l.leased += len(got)
	e.leased += len(got)
	clear(got)
	if err != nil {
		e.breakLane(l, err)
	}
	if l.parked() || e.stopped || !l.anyClosed() {
		if back := e.takeBuffer(l); len(back) > 0 {
			e.mu.Unlock()
			e.release(back)
			e.mu.Lock()
		}
	}
}

func (l *lane) anyClosed() bool {
	for _, t := range l.targets {
		if !t.circuit.open {
			return true
		}
	}
	return false
}

// breakLane parks a lane that the store failed for and tries again after a while.
func (e *Engine) breakLane(l *lane, err error) {
	l.broken = true
	if errors.Is(err, queue.ErrClosed) || errors.Is(err, queue.ErrNoLane) {
		return // Gone for good.
	}
	e.log.With(l.id.LogArgs()...).Error("reading from the queue failed; trying again in a second", "error", err)
	time.AfterFunc(time.Second, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		l.broken, l.more = false, true
		e.enqueue(l)
		e.kick()
	})
}
