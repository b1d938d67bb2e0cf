package delivery

import (
	"errors"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// release returns messages to the store, the last first, without the lock.
func (e *Engine) release(back []queue.Delivery) {
	for i := len(back) - 1; i >= 0; i-- {
		e.o.Store.Release(back[i])
		if i == 0 || back[i].Lane != back[i-1].Lane {
			e.markChanged(back[i].Lane.Destination)
		}
	}
}

// lease fills the lane's buffer and puts the lane first in the ready queue. The lock is held, but released while the
// store is called.
func (e *Engine) lease(l *lane) {
	n, set := e.scheduler.quantum(l), l.set
	size := min(n*event.MaxCallBytes, queue.MaxLeaseBytes)
	e.scheduler.leasingBytes += size
	e.scheduler.beginLease(l)
	e.wakeWorker() // This worker cannot take the lanes that are ready.
	e.mu.Unlock()
	got, err := e.o.Store.Lease(l.id, n, l.scratch[:0])
	e.mu.Lock()
	e.scheduler.leasingBytes -= size
	e.scheduler.endLease(l)
	l.judgeLease(got)
	l.destination.changed.Numbers() // The store may have counted messages that the lane does not get.
	l.scratch = got
	l.more = len(got) >= n || bodies(got) >= queue.MaxLeaseBytes || l.notified
	e.scheduler.fill(l, got)
	if err != nil {
		e.breakLane(l, err)
	}
	e.releaseUnsendable(l, set)
	if !l.queued && !l.parked() && l.hasWork() {
		e.scheduler.pushFront(l)
	} else if l.parked() || !l.hasWork() {
		e.yield(l, e.o.Now())
	}
}

// releaseUnsendable returns a lane's leased messages to the store, unless its settings are still set and they can be sent. The
// lock is held, but released while the store is called.
func (e *Engine) releaseUnsendable(l *lane, set *destinationConfig) {
	if l.set != set || l.parked() || e.lifetime.stopped || !l.anyClosed() {
		back := e.scheduler.takeBuffer(l)
		e.mu.Unlock()
		e.release(back)
		e.mu.Lock()
	}
}

// breakLane parks a lane after a store error and retries later.
func (e *Engine) breakLane(l *lane, err error) {
	l.broken = true
	if errors.Is(err, queue.ErrClosed) || errors.Is(err, queue.ErrNoLane) {
		return // The lane no longer exists.
	}
	e.o.Logger.With(l.id.LogArgs()...).Error("reading from the queue failed; retrying in a second", "error", err)
	time.AfterFunc(time.Second, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		l.broken, l.more = false, true
		e.scheduler.enqueue(l)
		e.wakeWorker()
	})
}

// startProbe leases a message and sends it to an endpoint whose probe is due. It returns false if the lane has no
// message. It alternates between the oldest message and the next one in order: a single message that always fails must
// not keep the circuit open for all. The lock is held, but released while the store is called.
func (e *Engine) startProbe(l *lane, p *post, now time.Time) bool {
	set := l.set
	to := l.choose(l.probes, now, func(t target) bool { return t.machine.ProbeDue(now) })
	to.machine.StartProbe() // Set before the lock is released, so that there is only one probe.
	l.probes++
	next := l.probes%2 == 0
	for {
		l.notified = false
		failing := l.failing()
		e.scheduler.addInFlight(l.owner, 1, failing) // Reserve, so that no other request takes the place meanwhile.
		e.wakeWorker()                               // This worker cannot take the lanes that are ready.
		e.mu.Unlock()
		d, ok, err := leaseProbe(e.o.Store, l.id, next)
		e.mu.Lock()
		e.scheduler.addInFlight(l.owner, -1, failing)
		l.destination.changed.Numbers()
		if err != nil {
			e.breakLane(l, err)
		}
		if ok {
			e.scheduler.addLeased(l, 1, len(d.Body))
			stale := l.set != set || l.parked() || e.lifetime.stopped
			if !stale && e.unsendable(l, &d, now) {
				continue
			}
			if !stale {
				e.start(l, d, to, p, now)
				return true
			}
			e.scheduler.addLeased(l, -1, -len(d.Body))
			e.mu.Unlock()
			e.o.Store.Release(d)
			e.mu.Lock()
		}
		to.machine.CancelProbe()
		l.more = ok || l.notified
		e.scheduler.enqueue(l)
		e.yield(l, now)
		return false
	}
}

// leaseProbe leases the lane's next message, or the oldest pending one.
func leaseProbe(s Store, id queue.LaneID, next bool) (d queue.Delivery, ok bool, err error) {
	first := func() {
		var got []queue.Delivery
		if got, err = s.Lease(id, 1, nil); len(got) > 0 {
			d, ok = got[0], true
		}
	}
	if next {
		first()
	}
	if !ok && err == nil {
		d, ok, err = s.LeaseOldest(id)
	}
	if !ok && err == nil {
		first() // The store notifies of the next message only after a Lease that emptied the lane.
	}
	return d, ok, err
}
