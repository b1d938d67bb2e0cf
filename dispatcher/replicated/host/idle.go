package host

import (
	"sync"
)

// idleTracker reports whether all stores of a process are idle.
type idleTracker struct {
	report func(quiet bool)

	mu   sync.Mutex
	busy map[int]bool
}

// set takes the state of a slot's store.
func (q *idleTracker) set(slot int, quiet bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.busy == nil {
		q.busy = map[int]bool{}
	}
	before := len(q.busy)
	if quiet {
		delete(q.busy, slot)
	} else {
		q.busy[slot] = true
	}
	if before > 0 != (len(q.busy) > 0) {
		q.report(len(q.busy) == 0)
	}
}

// end removes the state of a slot's store that was closed.
func (q *idleTracker) end(slot int) {
	q.set(slot, true)
}
