package deletion

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// OutcomeTracker is a queue.Store that records which delete messages have an outcome in
// which lane, so that their outcome is known before the outcome of older messages. The record
// is in memory: after a restart the lane's position gives the outcome.
//
// It makes dead letters of the messages of cancelled notifications when they are
// leased or retried, so that no further attempt is made.
type OutcomeTracker struct {
	queue.Store
	mu   sync.Mutex
	done map[outcome]bool
	// cancelled is nil while no message is cancelled, so that a lease costs only one check.
	cancelled atomic.Pointer[map[cancelledMessage]bool]
	// Buried, unless nil, is called for each of their dead letters. It must be set before the first lease.
	Buried func(destination, reason string)
}

// cancelledMessage is a message of a Source for a destination ("namespace/name").
type cancelledMessage struct{ source, destination, id string }

// outcome identifies a message that was delivered or became a dead letter in a lane.
type outcome struct {
	lane queue.LaneID
	id   string
}

// NewOutcomeTracker returns a tracker for the messages of a store.
func NewOutcomeTracker(s queue.Store) *OutcomeTracker {
	return &OutcomeTracker{Store: s, done: map[outcome]bool{}}
}

// Ack implements queue.Store.
func (s *OutcomeTracker) Ack(d queue.Delivery) (first bool) {
	first = s.Store.Ack(d)
	s.record(d)
	return first
}

// Bury implements queue.Store.
func (s *OutcomeTracker) Bury(d queue.Delivery, f queue.Failure) (buried bool, err error) {
	if buried, err = s.Store.Bury(d, f); err != nil {
		return false, err
	}
	s.record(d)
	return buried, nil
}

func (s *OutcomeTracker) record(d queue.Delivery) {
	if d.Type != string(event.Delete) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done[outcome{d.Lane, d.ID}] = true
}

func (s *OutcomeTracker) hasOutcome(lane queue.LaneID, id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.done[outcome{lane, id}]
}

// keep removes the outcomes of all other messages.
func (s *OutcomeTracker) keep(wanted map[string]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.done, func(o outcome, _ bool) bool { return !wanted[o.id] })
}

// cancel replaces the set of cancelled messages.
func (s *OutcomeTracker) cancel(messages map[cancelledMessage]bool) {
	if len(messages) == 0 {
		s.cancelled.Store(nil)
		return
	}
	s.cancelled.Store(&messages)
}

func (s *OutcomeTracker) isCancelled(d queue.Delivery) bool {
	set := s.cancelled.Load()
	return set != nil && d.Type == string(event.Delete) && (*set)[cancelledMessage{d.Lane.Source, d.Lane.Destination, d.ID}]
}

// cancellation is the failure of a cancelled message.
func cancellation() queue.Failure {
	return queue.Failure{
		Time: time.Now(), Reason: adminapi.ReasonDeadlineExceeded,
		Message: "the deadline of the DeletionRequest ended before the message was delivered",
	}
}

// bury makes a dead letter of a cancelled message.
func (s *OutcomeTracker) bury(d queue.Delivery) error {
	buried, err := s.Bury(d, cancellation())
	if buried && s.Buried != nil {
		s.Buried(d.Lane.Destination, adminapi.ReasonDeadlineExceeded)
	}
	return err
}

// Lease implements queue.Store. It leases further messages in place of cancelled ones,
// because the store notifies only about lanes whose last Lease returned fewer than max.
func (s *OutcomeTracker) Lease(lane queue.LaneID, max int, buf []queue.Delivery) ([]queue.Delivery, error) {
	for {
		from := len(buf)
		got, err := s.Store.Lease(lane, max, buf)
		if err != nil || s.cancelled.Load() == nil {
			return got, err
		}
		kept, err := s.buryCancelled(got, from)
		if err != nil || len(kept) == len(got) {
			return kept, err
		}
		max, buf = max-(len(kept)-from), kept
	}
}

// LeaseDue implements queue.Store. It leases no further messages in place of cancelled ones.
func (s *OutcomeTracker) LeaseDue(lane queue.LaneID, due time.Time, max, maxBytes int, buf []queue.Delivery) ([]queue.Delivery, error) {
	from := len(buf)
	got, err := s.Store.LeaseDue(lane, due, max, maxBytes, buf)
	if err != nil || s.cancelled.Load() == nil {
		return got, err
	}
	return s.buryCancelled(got, from)
}

// buryCancelled makes dead letters of the cancelled messages from an index on, and removes them.
func (s *OutcomeTracker) buryCancelled(got []queue.Delivery, from int) ([]queue.Delivery, error) {
	kept := got[:from]
	for i, d := range got[from:] {
		if !s.isCancelled(d) {
			kept = append(kept, d)
		} else if err := s.bury(d); err != nil {
			s.Store.Release(d)
			return append(kept, got[from+i+1:]...), err
		}
	}
	return kept, nil
}

// LeaseOldest implements queue.Store.
func (s *OutcomeTracker) LeaseOldest(lane queue.LaneID) (d queue.Delivery, ok bool, err error) {
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
func (s *OutcomeTracker) Retry(d queue.Delivery, at time.Time, f queue.Failure) {
	if s.isCancelled(d) && s.bury(d) == nil {
		return
	}
	s.Store.Retry(d, at, f)
}

// SettleAll implements queue.Store. The outcome of a cancelled message that is to be retried becomes queue.Buried.
func (s *OutcomeTracker) SettleAll(lane queue.LaneID, all []queue.Settlement) error {
	for i := range all {
		if m := &all[i]; m.Outcome == queue.Retried && s.isCancelled(m.Delivery) {
			m.Outcome, m.Failure = queue.Buried, cancellation()
		}
	}
	if err := s.Store.SettleAll(lane, all); err != nil {
		return err
	}
	for i := range all {
		m := &all[i]
		if m.Outcome == queue.Acked || m.Outcome == queue.Buried {
			s.record(m.Delivery)
		}
		if m.Done && m.Failure.Reason == adminapi.ReasonDeadlineExceeded && s.Buried != nil {
			s.Buried(lane.Destination, m.Failure.Reason)
		}
	}
	return nil
}
