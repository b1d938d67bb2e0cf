package deletion

import (
	"maps"
	"sync"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/event"
)

// Settled is a queue.Store that remembers which delete messages were settled in
// which lane, so that their outcome is known before that of older messages. It
// is in memory: after a restart the outcome is found by the lane's position.
type Settled struct {
	queue.Store
	mu   sync.Mutex
	done map[settled]bool
}

// settled is a message in a lane.
type settled struct {
	lane queue.LaneID
	id   string
}

// NewSettled watches what is settled through it.
func NewSettled(s queue.Store) *Settled { return &Settled{Store: s, done: map[settled]bool{}} }

// Ack implements queue.Store.
func (s *Settled) Ack(d queue.Delivery) (first bool) {
	first = s.Store.Ack(d)
	s.remember(d)
	return first
}

// Bury implements queue.Store.
func (s *Settled) Bury(d queue.Delivery, f queue.Failure) (buried bool, err error) {
	if buried, err = s.Store.Bury(d, f); err != nil {
		return false, err
	}
	s.remember(d)
	return buried, nil
}

func (s *Settled) remember(d queue.Delivery) {
	if d.Type != string(event.Delete) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done[settled{d.Lane, d.ID}] = true
}

func (s *Settled) is(lane queue.LaneID, id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.done[settled{lane, id}]
}

// keep forgets all messages but those whose outcome is still wanted.
func (s *Settled) keep(wanted map[string]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.done, func(m settled, _ bool) bool { return !wanted[m.id] })
}
