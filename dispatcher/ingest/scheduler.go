package ingest

import "sync"

// fairScheduler lets a few requests at a time use the CPU, of one Source at most
// half of these. When more wait, the next request is that of the Source which has
// used least, counted by the bytes that its requests made: a Source that floods,
// or sends small bodies that become large, waits for itself and not in front of
// the others (start-time fair queueing).
type fairScheduler struct {
	mu    sync.Mutex
	slots int // how many requests compute at the same time
	busy  int
	// clock is the virtual time: that of the request which was let in last.
	clock int64
	// queues are those in which requests wait.
	queues []*waitQueue
}

// waitQueue holds the requests of one Source; the scheduler's lock guards it.
type waitQueue struct {
	running int
	// next is the virtual time of the next request: it advances by the bytes that
	// each request made.
	next    int64
	waiting []chan struct{}
}

// turn is one request's use of the scheduler.
type turn struct {
	scheduler *fairScheduler
	queue     *waitQueue
}

// enter waits for a slot. A request that holds one only computes, so the wait ends.
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
	t.scheduler, t.queue = s, q
}

// leave ends the turn, if there is one, and charges the bytes that it made.
func (t *turn) leave(bytes int) {
	s, q := t.scheduler, t.queue
	if s == nil {
		return
	}
	t.scheduler, t.queue = nil, nil
	s.mu.Lock()
	defer s.mu.Unlock()
	q.next += int64(bytes)
	q.running--
	s.busy--
	for s.busy < s.slots && s.startNext() {
	}
}

// admits reports whether a Source may have one more request running.
func (s *fairScheduler) admits(q *waitQueue) bool { return q.running < max(1, s.slots/2) }

func (s *fairScheduler) start(q *waitQueue) {
	q.next = max(q.next, s.clock)
	s.clock = q.next
	q.running++
	s.busy++
}

// startNext lets in the first request of the Source that has used least.
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
