package limits

import (
	"runtime"
	"sync"
	"time"
)

// Scheduler limits how many requests use the CPU at the same time, and gives one namespace at most
// half of the slots, or a quarter for a Source whose turns are long while another namespace has turns, so
// that a CPU remains for the others. The next waiting request is one of the namespace with the lowest usage, and within it of the Source
// with the lowest usage, counted in bytes of its requests and messages, and in the time of its filters
// (start-time fair queueing). So a namespace with many Sources, a Source that floods, or
// one whose small bodies become large messages, delays itself and not the others.
type Scheduler struct {
	mu    sync.Mutex
	slots int // number of requests that compute at the same time
	busy  int
	// clock is the virtual time: the time of the last admitted request's namespace.
	clock int64
	// last is the namespace of the last admitted request. Until sharedUntil, at least two namespaces count as active.
	last        *Share
	sharedUntil time.Time
	// queues are the queues with waiting requests.
	queues []*WaitQueue
}

// longTurn is the charge from which a turn counts as long: it takes milliseconds, in which a CPU does nothing else.
// The next turns of its Source keep their threads: the kernel then prefers the threads that serve other calls, because
// they used less of the CPU. If threads alternated, each of them would wait for up to a tick of the kernel, 4 ms.
const longTurn = 256 << 10

// Share is one namespace's use of a Scheduler, whose lock guards it.
type Share struct {
	running int
	// next and clock are the virtual times of the next request, and of the last admitted Source.
	next, clock int64
}

// WaitQueue is the queue of one Source's requests; the scheduler's lock guards it.
type WaitQueue struct {
	share *Share
	// next is the virtual time of the next request; each request advances it by its bytes.
	next    int64
	waiting []chan bool // each gets whether the turn keeps its thread
	// longUntil is when the Source counts as one with short turns again.
	longUntil time.Time
}

// Turn is one request's use of the scheduler.
type Turn struct {
	scheduler *Scheduler
	queue     *WaitQueue
	began     time.Time
	// onThread is true if the goroutine keeps its thread during the turn.
	onThread bool
	// Used is how long the request was in a slot, in all its turns that ended.
	Used time.Duration
}

// Enter waits for a slot. Requests in a slot only compute and never block, so the wait ends.
func (t *Turn) Enter(s *Scheduler, q *WaitQueue) {
	began := time.Now()
	s.mu.Lock()
	if s.last != q.share {
		s.last, s.sharedUntil = q.share, began.Add(sharedFor)
	}
	long := q.isLong(began)
	if s.busy < s.slots && s.admits(q, began) {
		s.start(q)
		s.mu.Unlock()
	} else {
		admitted := make(chan bool, 1)
		if len(q.waiting) == 0 {
			s.queues = append(s.queues, q)
		}
		q.waiting = append(q.waiting, admitted)
		s.mu.Unlock()
		long = <-admitted
		began = time.Now()
	}
	t.scheduler, t.queue, t.began, t.onThread = s, q, began, long
	if long {
		runtime.LockOSThread()
	}
}

// Leave ends the turn, if there is one, and charges the request's bytes. It is called by the goroutine that entered.
func (t *Turn) Leave(bytes int) {
	s, q := t.scheduler, t.queue
	if s == nil {
		return
	}
	now := time.Now()
	t.scheduler, t.queue = nil, nil
	t.Used += now.Sub(t.began)
	if t.onThread {
		runtime.UnlockOSThread()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	q.next += int64(bytes)
	q.share.next += int64(bytes)
	if bytes >= longTurn {
		q.longUntil = now.Add(sharedFor)
	}
	q.share.running--
	s.busy--
	for s.busy < s.slots && s.startNext(now) {
	}
}

// NewScheduler returns a Scheduler for a number of requests that compute at the same time.
func NewScheduler(slots int) *Scheduler { return &Scheduler{slots: slots} }

// admits reports whether a namespace may run one more request.
func (s *Scheduler) admits(q *WaitQueue, now time.Time) bool {
	most := s.slots / 2
	if q.isLong(now) && now.Before(s.sharedUntil) {
		most = s.slots / 4
	}
	return q.share.running < max(1, most)
}

func (s *Scheduler) start(q *WaitQueue) {
	share := q.share
	share.next = max(share.next, s.clock)
	s.clock = share.next
	q.next = max(q.next, share.clock)
	share.clock = q.next
	share.running++
	s.busy++
}

// isLong reports whether the Source counts as one with long turns.
func (q *WaitQueue) isLong(now time.Time) bool { return now.Before(q.longUntil) }

// before reports whether a queue's request is next.
func (q *WaitQueue) before(o *WaitQueue) bool {
	if q.share != o.share {
		return q.share.next < o.share.next
	}
	return q.next < o.next
}

// startNext admits the first request of the Source with the lowest usage in the namespace with the lowest usage.
func (s *Scheduler) startNext(now time.Time) bool {
	least := -1
	for i, q := range s.queues {
		if s.admits(q, now) && (least < 0 || q.before(s.queues[least])) {
			least = i
		}
	}
	if least < 0 {
		return false
	}
	q := s.queues[least]
	s.start(q)
	q.waiting[0] <- q.isLong(now)
	if q.waiting = q.waiting[1:]; len(q.waiting) == 0 {
		q.waiting = nil
		s.queues = append(s.queues[:least], s.queues[least+1:]...)
	}
	return true
}
