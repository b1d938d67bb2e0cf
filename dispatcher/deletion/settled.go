package deletion

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/event"
)

// Settled is a queue.Store that remembers which delete messages were settled in
// which lane, so that their outcome is known before that of older messages. It
// is in memory: after a restart the outcome is found by the lane's position.
//
// It turns the messages of cancelled notifications into dead letters when they are
// leased or retried, so that no further attempt is made.
type Settled struct {
	queue.Store
	mu   sync.Mutex
	done map[settled]bool
	// cancelled is nil as long as nothing is cancelled, which costs a lease nothing.
	cancelled atomic.Pointer[map[cancelledMessage]bool]
}

// cancelledMessage is a message of a Source for a destination ("namespace/name").
type cancelledMessage struct{ source, destination, id string }

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

// cancel replaces the set of messages that are not to be attempted.
func (s *Settled) cancel(messages map[cancelledMessage]bool) {
	if len(messages) == 0 {
		s.cancelled.Store(nil)
		return
	}
	s.cancelled.Store(&messages)
}

func (s *Settled) isCancelled(d queue.Delivery) bool {
	set := s.cancelled.Load()
	return set != nil && d.Type == string(event.Delete) && (*set)[cancelledMessage{d.Lane.Source, d.Lane.Destination, d.ID}]
}

// bury makes a dead letter of a cancelled message.
func (s *Settled) bury(d queue.Delivery) error {
	_, err := s.Bury(d, queue.Failure{
		Time: time.Now(), Reason: liveconfig.ReasonDeadlineExceeded, Message: "the deadline of the DeletionRequest ended before the message was delivered",
	})
	return err
}

// Lease implements queue.Store. It fills up what cancelled messages leave free, since
// the store notifies only of lanes whose last Lease came back short.
func (s *Settled) Lease(lane queue.LaneID, max int, buf []queue.Delivery) ([]queue.Delivery, error) {
	for {
		from := len(buf)
		got, err := s.Store.Lease(lane, max, buf)
		if err != nil || s.cancelled.Load() == nil {
			return got, err
		}
		kept := got[:from]
		for i, d := range got[from:] {
			if !s.isCancelled(d) {
				kept = append(kept, d)
			} else if err := s.bury(d); err != nil {
				s.Store.Release(d)
				return append(kept, got[from+i+1:]...), err
			}
		}
		if len(kept) == len(got) {
			return kept, nil
		}
		max, buf = max-(len(kept)-from), kept
	}
}

// LeaseOldest implements queue.Store.
func (s *Settled) LeaseOldest(lane queue.LaneID) (d queue.Delivery, ok bool, err error) {
	for {
		d, ok, err = s.Store.LeaseOldest(lane)
		if err != nil || !ok || !s.isCancelled(d) {
			return d, ok, err
		}
		if err := s.bury(d); err != nil {
			s.Store.Release(d)
			return queue.Delivery{}, false, err
		}
	}
}

// Retry implements queue.Store.
func (s *Settled) Retry(d queue.Delivery, at time.Time, f queue.Failure) {
	if s.isCancelled(d) && s.bury(d) == nil {
		return
	}
	s.Store.Retry(d, at, f)
}
