// Package deletion notifies webhooks that a user's data is to be deleted, once for
// each request and Source, and records the outcome of each notification.
//
// A request is planned once: its Sources and destinations are recorded durably
// before the first message is appended. The message ids follow from the request, so
// a message that a crash repeats is dropped as a duplicate. A request that
// completed is recorded in records.Records and is not sent again for another object
// with the same namespace, name and spec.
package deletion

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/jobs/records"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

const (
	tick          = time.Second
	keyPrefix     = "deletion/"
	recordVersion = 1
)

// Options configure a Service. Gate, Store and Records are required.
type Options struct {
	// Gate is the way into the queue.
	Gate *admission.Gate
	// Store records the outcomes of the messages, and keeps the records of requests; the delivery
	// engine must use it.
	Store *OutcomeTracker
	// Records has the completed requests.
	Records *records.Records
	// Passive is true if another pod sends the notifications.
	Passive bool
	// BegunOnly is true if no request begins that has no record.
	BegunOnly bool
	// OrphanGrace is the time for which the record of a deleted request is kept. Default 10 min.
	OrphanGrace time.Duration
	// Changes is marked when the report of a request changes; nil marks nothing.
	Changes *changes.Log
	Now     func() time.Time
	Logger  *slog.Logger
}

// Service sends the notifications of all namespaces and records their outcomes.
type Service struct {
	Options
	mu      sync.Mutex
	records map[string]*record
	// deletedAt has the time at which a request was first missing in the live config.
	deletedAt map[string]time.Time
}

// record is a planned request.
type record struct {
	Version   int       `json:"version"`
	ID        string    `json:"id"`
	UID       string    `json:"uid,omitempty"`
	Namespace string    `json:"namespace"`
	Time      time.Time `json:"time"`
	Sources   []source  `json:"sources,omitempty"`
	// Completed is true when records.Records has the end of this run, Exceeded when the
	// deadline ended it.
	Completed bool `json:"completed,omitempty"`
	Exceeded  bool `json:"exceeded,omitempty"`
}

// source is the message of one Source.
type source struct {
	Name      string `json:"name"`
	MessageID string `json:"messageId"`
	// Accepted is the time of the append; zero before. The message is not behind End in
	// the Source's log; End is zero while it is unknown.
	Accepted      time.Time      `json:"accepted,omitzero"`
	End           uint64         `json:"end,omitempty"`
	Notifications []notification `json:"notifications"`
}

// notification is the notification of one destination.
type notification struct {
	Destination string    `json:"destination"`
	State       string    `json:"state"`
	Reason      string    `json:"reason,omitempty"`
	Time        time.Time `json:"time"`
	// Cancelled is true if the deadline ended the notification while its message was in
	// the queue. The message becomes a dead letter instead of being attempted again.
	Cancelled bool `json:"cancelled,omitempty"`
}

// New reads the records of requests.
func New(o Options) (*Service, error) {
	o.OrphanGrace = cmp.Or(o.OrphanGrace, 10*time.Minute)
	o.Logger = cmp.Or(o.Logger, slog.Default())
	if o.Now == nil {
		o.Now = time.Now
	}
	s := &Service{Options: o, records: map[string]*record{}, deletedAt: map[string]time.Time{}}
	if o.Passive {
		return s, nil
	}
	if err := s.load(); err != nil {
		return nil, fmt.Errorf("deletion requests: %w", err)
	}
	s.trackOutcomes()
	return s, nil
}

// load reads the records.
func (s *Service) load() error {
	values, err := s.Store.AllMeta()
	if err != nil {
		return err
	}
	for key, value := range values {
		id, ours := strings.CutPrefix(key, keyPrefix)
		if !ours {
			continue
		}
		var r record
		if err := json.Unmarshal(value, &r); err != nil || r.Version != recordVersion {
			// A repeated notification is better than a missing one or a failing start.
			s.Logger.Error("deletion request record unreadable; its notifications are sent again", "record", id)
			continue
		}
		s.records[id] = &r
	}
	return nil
}

// Run sends notifications and records outcomes until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	if s.Passive {
		<-ctx.Done()
		return nil
	}
	timer := time.NewTicker(tick)
	defer timer.Stop()
	for {
		if view := s.Gate.View(); view != nil {
			s.work(ctx, view)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
	}
}

// work advances every request as far as possible now.
func (s *Service) work(ctx context.Context, view *liveconfig.View) {
	known := map[string]bool{}
	for _, namespace := range view.Namespaces() {
		config, _ := view.Namespace(namespace)
		for _, d := range config.Deletions {
			if d.ID == "" || d.Ended {
				continue
			}
			known[d.ID] = true
			if err := s.advance(ctx, config.Config, d); err != nil && ctx.Err() == nil {
				s.Logger.Error("deletion request failed; it is retried", "namespace", namespace, "request", d.Name, "error", err)
			}
		}
	}
	for id, r := range s.records {
		if !known[id] && r.cancelled() {
			if err := s.change(*r, "", func(next *record) error { return s.updateOutcomes(ctx, next) }); err != nil && ctx.Err() == nil {
				s.Logger.Error("reading the outcome of a deletion request failed; it is retried", "namespace", r.Namespace, "error", err)
			}
		}
	}
	s.trackOutcomes()
	s.removeOrphans(view, known)
}

// trackOutcomes makes the store track the outcomes of pending notifications, and make dead
// letters of the messages of cancelled ones.
func (s *Service) trackOutcomes() {
	wanted, cancelled := map[string]bool{}, map[cancelledMessage]bool{}
	for _, r := range s.records {
		for _, from := range r.Sources {
			for _, n := range from.Notifications {
				if n.State == adminapi.NotificationPending || n.Cancelled {
					wanted[from.MessageID] = true
				}
				if n.Cancelled {
					cancelled[cancelledMessage{r.Namespace + "/" + from.Name, r.Namespace + "/" + n.Destination, from.MessageID}] = true
				}
			}
		}
	}
	s.Store.keep(wanted)
	s.Store.cancel(cancelled)
}

// advance plans a request, appends its messages and updates their outcomes. Only Run calls
// it, so only one goroutine changes a record.
func (s *Service) advance(ctx context.Context, config liveconfig.Config, d liveconfig.Deletion) error {
	s.mu.Lock()
	r := s.records[d.ID]
	s.mu.Unlock()
	switch {
	case r == nil && (s.BegunOnly || s.Records.Completed(d.ID, d.UID)), r != nil && r.Completed,
		r != nil && r.UID == d.UID && r.ended() && r.failed() && !r.cancelled():
		return nil
	case r != nil && r.UID != d.UID && r.ended():
		// The run of another object failed. This object's run is a new one; it starts
		// when the messages of the other one have their outcomes.
		if r.cancelled() {
			return s.change(*r, d.Name, func(next *record) error { return s.updateOutcomes(ctx, next) })
		}
		r = nil
	}
	if r == nil {
		r = s.plan(config, d)
		if err := s.persist(*r, d.Name); err != nil {
			return err
		}
	}
	return s.change(*r, d.Name, func(next *record) error {
		next.UID = d.UID // It differs if the object was deleted and created again during the run.
		deadline := time.Duration(d.DeadlineSeconds) * time.Second
		overdue := deadline > 0 && s.Now().Sub(next.Time) >= deadline
		var err error
		if !next.ended() && !overdue {
			err = s.append(ctx, next, d.UserID)
		}
		err = errors.Join(err, s.updateOutcomes(ctx, next))
		if err == nil && overdue && !next.ended() {
			next.exceed(s.Now().UTC().Truncate(time.Millisecond))
			s.Logger.Warn("deletion request deadline exceeded; its pending notifications are cancelled", "namespace", next.Namespace, "request", d.Name)
		}
		if err == nil && next.ended() && !next.failed() && !next.Completed {
			now := s.Now().UTC()
			if err = s.Records.Put(d.ID, records.Record{Namespace: config.Namespace, UID: d.UID, Completed: now}); err == nil {
				next.Completed = true
			}
		}
		return err
	})
}

// change applies f to a copy of the record of a request, and stores the copy if it differs. name is
// empty if the live config lacks the request.
func (s *Service) change(r record, name string, f func(*record) error) error {
	next := r.clone()
	err := f(&next)
	if !next.equal(r) {
		err = errors.Join(err, s.persist(next, name))
	}
	return err
}

// exceed ends the pending notifications.
func (r *record) exceed(now time.Time) {
	r.Exceeded = true
	for i := range r.Sources {
		for j := range r.Sources[i].Notifications {
			n := &r.Sources[i].Notifications[j]
			if n.State != adminapi.NotificationPending {
				continue
			}
			n.State, n.Reason, n.Time = adminapi.NotificationDiscarded, adminapi.ReasonDeadlineExceeded, now
			if !r.Sources[i].Accepted.IsZero() {
				n.State, n.Cancelled = adminapi.NotificationDeadLettered, true
			}
		}
	}
}

// plan selects the destinations to notify: all that do not ignore deletions, even if they are suspended or paused.
// Filters do not apply, because the data of calls that passed a former filter is to be deleted, too.
func (s *Service) plan(config liveconfig.Config, d liveconfig.Deletion) *record {
	now := s.Now().UTC().Truncate(time.Millisecond)
	r := &record{Version: recordVersion, ID: d.ID, UID: d.UID, Namespace: config.Namespace, Time: now}
	for _, c := range config.Sources {
		if len(d.Sources) > 0 && !slices.Contains(d.Sources, c.Name) {
			continue
		}
		planned := source{Name: c.Name, MessageID: messageID(d.ID, d.UID, c.Name)}
		for _, to := range config.Destinations {
			if !to.IgnoreDeletions && slices.Contains(to.Sources, c.Name) {
				planned.Notifications = append(planned.Notifications,
					notification{Destination: to.Name, State: adminapi.NotificationPending, Time: now})
			}
		}
		if len(planned.Notifications) > 0 {
			r.Sources = append(r.Sources, planned)
		}
	}
	return r
}

// messageID is the id of a run's message of one Source. It differs between Sources,
// because receivers drop a second message with the same id, and between objects,
// because a new run after a failed one is not a duplicate.
func messageID(request, uid, source string) string {
	sum := sha256.Sum256([]byte(uid + "/" + source))
	return fmt.Sprintf("delete-%s-%x", request, sum[:6])
}

// append appends the messages that are not in the queue yet.
func (s *Service) append(ctx context.Context, r *record, userID string) error {
	for i := range r.Sources {
		to := &r.Sources[i]
		if !to.Accepted.IsZero() || !to.pending() {
			continue
		}
		now := s.Now().UTC().Truncate(time.Millisecond)
		if err := s.appendOne(ctx, r, to, queue.Message{
			Source: r.Namespace + "/" + to.Name, ID: to.MessageID, Type: string(event.Delete), AcceptedAt: now,
			Body: event.DeleteMessage(userID, r.Time),
		}); err != nil {
			return err
		}
		to.Accepted = now
	}
	return nil
}

// appendOne appends the message of a Source, only for the destinations of the plan, even if the
// config has changed since.
func (s *Service) appendOne(ctx context.Context, r *record, to *source, message queue.Message) error {
	routing := s.Gate.Begin()
	defer routing.End()
	message.Skip = routing.SkipAllBut(r.Namespace, to.Name, func(key string) bool {
		return to.any(func(n notification) bool {
			return r.Namespace+"/"+n.Destination == key && n.State == adminapi.NotificationPending
		})
	})
	_, err := routing.Append(ctx, []queue.Message{message})
	return err
}

// updateOutcomes updates the states of pending notifications. A message has an outcome if
// the store recorded one, or if its lane has no pending message up to its position; then it
// is a dead letter, or was delivered.
func (s *Service) updateOutcomes(ctx context.Context, r *record) error {
	var lanes []queue.LaneID
	for i := range r.Sources {
		from := &r.Sources[i]
		for j := range from.Notifications {
			n := &from.Notifications[j]
			if n.State != adminapi.NotificationPending && !n.Cancelled || from.Accepted.IsZero() {
				continue
			}
			if lanes == nil {
				lanes = s.Store.Lanes()
			}
			if from.End == 0 {
				from.End = s.end(lanes, r.Namespace+"/"+from.Name)
			}
			state, reason, err := s.outcome(ctx, lanes, r.Namespace+"/"+from.Name, r.Namespace+"/"+n.Destination, from)
			if err != nil {
				return err
			}
			switch {
			case state == adminapi.NotificationPending:
			case n.Cancelled: // It was already reported as a dead letter.
				n.Cancelled = false
			default:
				n.State, n.Reason, n.Time = state, reason, s.Now().UTC().Truncate(time.Millisecond)
			}
		}
	}
	return nil
}

// end returns the last position in a Source's log; 0 if it is unknown now.
func (s *Service) end(lanes []queue.LaneID, source string) (end uint64) {
	for _, lane := range lanes {
		if lane.Source == source {
			_, last := s.Store.Position(lane)
			end = max(end, last)
		}
	}
	return end
}

func (s *Service) outcome(ctx context.Context, lanes []queue.LaneID, source, destination string, from *source) (state, reason string,
	err error) {
	found, known := false, false
	for _, lane := range lanes {
		if lane.Source != source || lane.Destination != destination {
			continue
		}
		found = true
		if s.Store.hasOutcome(lane, from.MessageID) {
			known = true
			continue
		}
		if stats := s.Store.LaneStats(lane); from.End == 0 || stats.Stale || stats.Pending > 0 && stats.First <= from.End {
			return adminapi.NotificationPending, "", nil
		}
	}
	state = adminapi.NotificationDelivered
	if !found {
		state = adminapi.NotificationDiscarded
	}
	err = s.Store.DeadLetters(ctx, destination, "", func(d queue.DeadLetter) bool {
		// A damaged message has no id. A false alarm is better than a missing one.
		lost := !known && d.Failure.Reason == queue.ReasonDamaged && d.Failure.Time.After(from.Accepted)
		if d.Lane.Source == source && (d.ID == from.MessageID || lost) {
			state, reason = adminapi.NotificationDeadLettered, strings.Clone(d.Failure.Reason)
		}
		return state != adminapi.NotificationDeadLettered
	})
	return state, reason, err
}

// persist writes the record of a request durably and replaces the one in memory.
func (s *Service) persist(r record, name string) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := s.Store.PutMetaDurable(keyPrefix+r.ID, text); err != nil {
		return err
	}
	s.mu.Lock()
	s.records[r.ID] = &r
	s.mu.Unlock()
	if name != "" {
		s.Changes.Object(changes.Deletions, r.Namespace, name).Transition()
	}
	return nil
}

// removeOrphans removes the records of requests that were deleted OrphanGrace ago.
func (s *Service) removeOrphans(view *liveconfig.View, known map[string]bool) {
	now := s.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, r := range maps.Clone(s.records) {
		since, missing := s.deletedAt[id]
		switch {
		case known[id] || view.Unusable(r.Namespace) || r.cancelled():
			delete(s.deletedAt, id)
		case !missing:
			s.deletedAt[id] = now
		case now.Sub(since) >= s.OrphanGrace:
			if err := s.Store.PutMeta(keyPrefix+id, nil); err != nil {
				s.Logger.Error("removing the record of a deleted deletion request failed", "error", err)
				continue
			}
			delete(s.records, id)
			delete(s.deletedAt, id)
		}
	}
}

// Report returns the state of a namespace's requests.
func (s *Service) Report(config liveconfig.Config) []adminapi.DeletionReport {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []adminapi.DeletionReport
	for _, d := range config.Deletions {
		out := adminapi.DeletionReport{Name: d.Name, Generation: d.Generation, Revision: d.Revision, Owner: !s.Passive}
		r := s.records[d.ID]
		switch {
		case s.Passive || d.ID == "" || d.Ended:
		case r != nil && r.UID == d.UID:
			out.Started, out.Completed, out.DeadlineExceeded = r.Time, r.Completed, r.Exceeded
			for _, from := range r.Sources {
				for _, n := range from.Notifications {
					out.Notifications = append(out.Notifications, adminapi.NotificationReport{
						Source: from.Name, Destination: n.Destination, State: n.State, Reason: n.Reason, Time: n.Time,
					})
				}
			}
		case r != nil && r.Completed, r == nil && s.Records.Completed(d.ID, d.UID):
			out.AlreadyDone = true
		}
		list = append(list, out)
	}
	return list
}

func (s source) any(is func(notification) bool) bool { return slices.ContainsFunc(s.Notifications, is) }

func (s source) pending() bool {
	return s.any(func(n notification) bool { return n.State == adminapi.NotificationPending })
}

// ended reports whether every notification has its final state.
func (r record) ended() bool { return !slices.ContainsFunc(r.Sources, source.pending) }

// failed reports whether a notification did not reach its destination.
func (r record) failed() bool {
	return r.Exceeded || slices.ContainsFunc(r.Sources, func(s source) bool {
		return s.any(func(n notification) bool {
			return n.State == adminapi.NotificationDeadLettered || n.State == adminapi.NotificationDiscarded
		})
	})
}

// cancelled reports whether messages of cancelled notifications are in the queue.
func (r record) cancelled() bool {
	return slices.ContainsFunc(r.Sources, func(s source) bool {
		return s.any(func(n notification) bool { return n.Cancelled })
	})
}

func (r record) clone() record {
	r.Sources = slices.Clone(r.Sources)
	for i := range r.Sources {
		r.Sources[i].Notifications = slices.Clone(r.Sources[i].Notifications)
	}
	return r
}

func (r record) equal(o record) bool {
	return r.UID == o.UID && r.Completed == o.Completed && r.Exceeded == o.Exceeded &&
		slices.EqualFunc(r.Sources, o.Sources, func(a, b source) bool {
			return a.Accepted.Equal(b.Accepted) && a.End == b.End && slices.Equal(a.Notifications, b.Notifications)
		})
}
