package delivery

import (
	"sync"
	"time"

	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
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
	if l := e.registry.lanes[id]; l != nil {
		l.more, l.notified = true, true
		if e.scheduler.enqueue(l) {
			e.wakeWorker()
		}
	}
}

// workers are the goroutines that send requests. The engine's lock guards them.
type workers struct {
	// count counts goroutines, idle holds the waiting ones, and spare is the smallest number of idle workers since tidy
	// ran. waking counts workers that were woken and have not looked for work yet.
	count, spare, waking int
	idle                 []*worker
	exits                sync.WaitGroup
}

// wake wakes an idle worker, unless one is already waking, and reports whether the caller must start a new one: there
// are fewer than most.
func (p *workers) wake(most int) (start bool) {
	if p.waking > 0 {
		return false
	}
	if n := len(p.idle); n > 0 {
		w := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.spare = min(p.spare, n-1)
		p.waking++
		w.wake <- true
		return false
	}
	if p.count >= most {
		return false
	}
	p.count++
	p.waking++
	p.exits.Add(1)
	return true
}

// end ends the first n idle workers.
func (p *workers) end(n int) {
	for _, w := range p.idle[:n] {
		w.wake <- false
	}
	p.idle = append(p.idle[:0], p.idle[n:]...)
}

// tidy ends the workers that were idle since the last call.
func (p *workers) tidy() {
	p.end(min(p.spare, len(p.idle)))
	p.spare = len(p.idle)
}

// wakeWorker wakes one worker if there is work; a worker that finds work wakes the next. The lock is held.
func (e *Engine) wakeWorker() {
	if e.scheduler.ready.len > 0 && e.lifetime.running && !e.lifetime.halted() && e.workers.wake(e.o.MaxInFlight) {
		go e.work()
	}
}

// work is the main loop of a worker.
func (e *Engine) work() {
	defer e.workers.exits.Done()
	w := &worker{wake: make(chan bool, 1)}
	e.mu.Lock()
	e.workers.waking--
	for run := true; run; {
		if e.next(&w.post) {
			e.wakeWorker()
			e.mu.Unlock()
			e.send(w)
			e.mu.Lock()
			continue
		}
		if e.lifetime.stopped {
			break
		}
		e.workers.idle = append(e.workers.idle, w)
		e.mu.Unlock()
		run = <-w.wake
		e.mu.Lock()
		if run {
			e.workers.waking--
		}
	}
	e.workers.count--
	e.mu.Unlock()
}

// next chooses the next request and accounts for it. It returns false if there is none. The lock is
// held, but released while the store is called.
func (e *Engine) next(p *post) bool {
	for {
		if e.lifetime.halted() {
			return false
		}
		l := e.scheduler.popReady()
		if l == nil {
			return false
		}
		now := e.o.Now()
		e.scheduler.resumeLease(l.owner) // l may need no lease.
		closed, probe := l.sendable(now)
		switch {
		case l.parked() || !l.hasWork() || !closed && !probe:
			e.yield(l, now)
		case e.scheduler.mustWait(l):
			e.scheduler.block(l)
			e.scheduler.unblock()
		case !closed:
			if e.startProbe(l, p, now) {
				return true
			}
		case l.set.batch != nil:
			if e.nextBatch(l, p, now) {
				return true
			}
		case len(l.parts) > 0: // An edit has ended the batches.
			l.joinParts()
			e.scheduler.enqueue(l)
		case l.more && !l.leasing && e.scheduler.mayLease(l) && l.buffered() < e.scheduler.quantum(l)/4+1:
			e.lease(l)
		case l.buffered() > 0:
			d := e.scheduler.take(l)
			if e.unsendable(l, &d, now) {
				if !e.scheduler.enqueue(l) {
					e.yield(l, now)
				}
				continue
			}
			// A lane may have several endpoints: it alternates between those with capacity.
			e.start(l, d, l.choose(d.Attempt, now, func(t target) bool { return t.takes(now) }), p, now)
			return true
		case !l.leasing:
			e.scheduler.awaitLease(l)
		}
	}
}

// wakeNextLane gives an endpoint's free capacity to the next lane that has work for it, or sets a timer if
// capacity becomes free by time alone. The lock is held.
func (e *Engine) wakeNextLane(ep *liveEndpoint, now time.Time) {
	at := e.scheduler.wakeNextLane(ep, now)
	if at.IsZero() || e.lifetime.stopped || !ep.timerAt.IsZero() && !at.Before(ep.timerAt) {
		return
	}
	ep.timerAt = at
	if ep.timer == nil {
		ep.timer = time.AfterFunc(at.Sub(now), func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			ep.timerAt = time.Time{}
			e.wakeNextLane(ep, e.o.Now())
			e.wakeWorker()
		})
		return
	}
	ep.timer.Reset(at.Sub(now))
}

// yield is called for a lane that cannot use its turn; it offers the turn to other lanes.
func (e *Engine) yield(l *lane, now time.Time) {
	for _, t := range l.targets {
		e.wakeNextLane(t.liveEndpoint, now)
	}
	e.scheduler.unblock()
}
