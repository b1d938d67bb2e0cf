package ingest

import (
	"sync"
	"time"
)

// fairScheduler limits how many requests use the CPU at the same time, and gives one Source at most
// half of the slots. The next waiting request is that of the Source with the lowest usage, counted
// in bytes of its requests and messages (start-time fair queueing). So a Source that floods, or
// whose small bodies become large messages, delays itself and not the others.
type fairScheduler struct {
	mu    sync.Mutex
	slots int // number of requests that compute at the same time
	busy  int
	// clock is the virtual time: that of the last admitted request.
	clock int64
	// queues are the queues with waiting requests.
	queues []*waitQueue
}

// waitQueue is the queue of one Source's requests; the scheduler's lock guards it.
type waitQueue struct {
	running int
	// next is the virtual time of the next request; each request advances it by its bytes.
	next    int64
	waiting []chan struct{}
}

// turn is one request's use of the scheduler.
type turn struct {
	scheduler *fairScheduler
	queue     *waitQueue
	began     time.Time
	// used is how long the request was in a slot, in all its turns that ended.
	used time.Duration
}

// enter waits for a slot. Requests in a slot only compute and never block, so the wait ends.
func (t *turn) enter(s *fairScheduler, q *waitQueue) {
	s.mu.Lock()
	if s.busy < s.slots && s.admits(q) {
		s.start(q)
		s.mu.Unlock()
	} else {
		admitted := make(chan struct{})
		if len(q.waiting) == 0 {
			s.queues = append(s.queues, q)
		}
		q.waiting = append(q.waiting, admitted)
		s.mu.Unlock()
		<-admitted
	}
	t.scheduler, t.queue, t.began = s, q, time.Now()
}

// leave ends the turn, if there is one, and charges the request's bytes.
func (t *turn) leave(bytes int) {
	s, q := t.scheduler, t.queue
	if s == nil {
		return
	}
	t.scheduler, t.queue = nil, nil
	t.used += time.Since(t.began)
	s.mu.Lock()
	defer s.mu.Unlock()
	q.next += int64(bytes)
	q.running--
	s.busy--
	for s.busy < s.slots && s.startNext() {
	}
}

// admits reports whether a Source may run one more request.
func (s *fairScheduler) admits(q *waitQueue) bool { return q.running < max(1, s.slots/2) }

func (s *fairScheduler) start(q *waitQueue) {
	q.next = max(q.next, s.clock)
	s.clock = q.next
	q.running++
	s.busy++
}

// startNext admits the first request of the Source with the lowest usage.
func (s *fairScheduler) startNext() bool {
	least := -1
	for i, q := range s.queues {
		if s.admits(q) && (least < 0 || q.next < s.queues[least].next) {
			least = i
		}
	}
	if least < 0 {
		return false
	}
	q := s.queues[least]
	s.start(q)
	close(q.waiting[0])
	if q.waiting = q.waiting[1:]; len(q.waiting) == 0 {
		q.waiting = nil
		s.queues = append(s.queues[:least], s.queues[least+1:]...)
	}
	return true
}
