// Package observed merges what several dispatchers report about a WebhookDestination into numbers
// and states for its status. The operator writes them (package health), and package why explains
// live reports with them, so that both show the same. It is pure, and knows neither verdicts nor
// conditions. Its main type is Destination.
package observed

import (
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
)

// Destination is the traffic of a destination over all dispatchers. NewDestination returns one.
type Destination struct {
	// Delivery has the sums of the numbers.
	Delivery v1beta1.DeliveryStatus
	// Endpoints has the endpoints of the spec, in its order.
	Endpoints []Endpoint
	// Expires is the end of the first retry window; zero if it is not known, without pending messages, and while the destination
	// is suspended.
	Expires time.Time
	// FilterFailure is the last failure of the filter; nil if there was none lately.
	FilterFailure *adminapi.Failure
	// Unmatched are the paths of redaction that matched no message, at all dispatchers that report some; nil if none does.
	Unmatched *adminapi.UnmatchedPaths
}

// NewDestination returns the traffic of a destination without reports.
func NewDestination(spec []v1beta1.Endpoint) *Destination {
	d := &Destination{Endpoints: make([]Endpoint, len(spec)), Delivery: v1beta1.DeliveryStatus{DeadLettersForwarded: new(int64)}}
	for i := range spec {
		d.Endpoints[i] = Endpoint{Name: spec[i].Name, State: adminapi.EndpointIdle}
	}
	return d
}

// Add adds a dispatcher's report; of an outdated one, only the counters and times. It ignores endpoints
// that are not in the spec.
func (d *Destination) Add(r *adminapi.DestinationReport, outdated bool) {
	s := &d.Delivery
	s.Accepted += r.Accepted
	s.Delivered += r.Delivered
	s.Filtered += r.Filtered
	s.Omitted += r.Omitted
	s.DeadLettered += r.DeadLettered
	s.DeadLettersStored += r.DeadLettersStored
	*s.DeadLettersForwarded += r.DeadLettersForwarded
	s.Discarded += r.Discarded
	s.Pending += r.Pending
	s.Retrying += r.Retrying
	s.OldestPendingTime = earliest(s.OldestPendingTime, r.OldestPending)
	d.Expires = Earlier(d.Expires, r.OldestExpires)
	s.NextAttemptTime = earliest(s.NextAttemptTime, r.NextAttempt)
	if f := r.FilterFailure; f != nil && !outdated && (d.FilterFailure == nil || f.Time.After(d.FilterFailure.Time)) {
		d.FilterFailure = f
	}
	if !outdated {
		d.addUnmatched(r.Unmatched)
	}
	for i := range d.Endpoints {
		for _, e := range r.Endpoints {
			if e.Name == d.Endpoints[i].Name {
				d.Endpoints[i].add(e, outdated)
			}
		}
	}
}

// addUnmatched keeps the paths that are in both reports.
func (d *Destination) addUnmatched(u *adminapi.UnmatchedPaths) {
	switch before := d.Unmatched; {
	case before == nil:
		d.Unmatched = u
	case u != nil:
		d.Unmatched = &adminapi.UnmatchedPaths{Messages: before.Messages + u.Messages,
			Paths: slices.DeleteFunc(slices.Clone(before.Paths), func(path string) bool { return !slices.Contains(u.Paths, path) })}
	}
}

// LastSuccess returns the time of the last delivery; zero if there was none.
func (d *Destination) LastSuccess() (last time.Time) {
	for _, e := range d.Endpoints {
		last = Later(last, e.LastSuccess)
	}
	return last
}

// Failing returns the endpoints whose latest deliveries failed at a dispatcher, and the number of those
// that accept messages.
func (d *Destination) Failing() (failing []Endpoint, working int) {
	for _, e := range d.Endpoints {
		switch {
		case e.Failing > 0:
			failing = append(failing, e)
		case e.State != adminapi.EndpointIdle:
			working++
		}
	}
	return failing, working
}

// Statuses returns the statuses of the endpoints. before are the previous ones, whose times and failures
// are kept if they are later, and counted is true if the numbers replace the previous ones.
func (d *Destination) Statuses(before []v1beta1.EndpointStatus, now time.Time, counted bool) (list []v1beta1.EndpointStatus) {
	for _, e := range d.Endpoints {
		var old v1beta1.EndpointStatus
		if i := slices.IndexFunc(before, func(s v1beta1.EndpointStatus) bool { return s.Name == e.Name }); i >= 0 {
			old = before[i]
		}
		list = append(list, e.status(old, now, counted))
	}
	return list
}

// Endpoint is one endpoint's traffic over all dispatchers.
type Endpoint struct {
	Name string
	// State is the worst over all dispatchers.
	State adminapi.EndpointState
	// Failing is the number of dispatchers whose latest deliveries failed, and Open is the number
	// of those with an open circuit. FailingSince is the start of the first failure.
	Failing, Open int
	FailingSince  time.Time
	LastSuccess   time.Time
	LastFailure   *adminapi.Failure

	// reported is true if a report that is not outdated contains the endpoint.
	reported bool
	// firstPending is the number of messages without a first attempt, and firstSkipped the
	// number of messages that are never sent to this endpoint.
	firstPending, firstSkipped int64
	compressionRefused         bool
}

func (e *Endpoint) add(r adminapi.EndpointReport, outdated bool) {
	e.LastSuccess = Later(e.LastSuccess, r.LastSuccess)
	e.firstPending += r.FirstAttemptsPending
	e.firstSkipped += r.FirstAttemptsSkipped
	if outdated {
		return
	}
	e.reported = true
	e.compressionRefused = e.compressionRefused || r.CompressionRefused
	if severity(r.State) > severity(e.State) {
		e.State = r.State
	}
	if r.LastFailure != nil && (e.LastFailure == nil || r.LastFailure.Time.After(e.LastFailure.Time)) {
		e.LastFailure = r.LastFailure
	}
	// An endpoint that recovers is Degraded for a while, although its deliveries succeed.
	if r.State.Open() || r.State == adminapi.EndpointDegraded && r.ConsecutiveFailures > 0 {
		e.Failing++
		e.FailingSince = Earlier(e.FailingSince, r.Since)
	}
	if r.State.Open() {
		e.Open++
	}
}

func severity(s adminapi.EndpointState) int {
	return slices.Index([]adminapi.EndpointState{adminapi.EndpointIdle, adminapi.EndpointHealthy, adminapi.EndpointDegraded,
		adminapi.EndpointCircuitOpen, adminapi.EndpointGone}, s)
}

func (e Endpoint) status(before v1beta1.EndpointStatus, now time.Time, counted bool) v1beta1.EndpointStatus {
	s := v1beta1.EndpointStatus{
		Name: e.Name, State: v1beta1.EndpointState(e.State),
		LastSuccessTime: Latest(before.LastSuccessTime, e.LastSuccess, now),
		LastFailure:     before.LastFailure.DeepCopy(),

		FirstAttemptsPending: before.FirstAttemptsPending, FirstAttemptsSkipped: before.FirstAttemptsSkipped,
	}
	if counted {
		s.FirstAttemptsPending, s.FirstAttemptsSkipped = e.firstPending, e.firstSkipped
	}
	s.CompressionRefused = e.compressionRefused
	if !e.reported && before.State != "" {
		s.State, s.CompressionRefused = before.State, before.CompressionRefused
	}
	if severity(adminapi.EndpointState(s.State)) < 0 {
		s.State = v1beta1.EndpointIdle
	}
	if f := e.LastFailure; f != nil && (s.LastFailure == nil || Ahead(&s.LastFailure.Time, now) ||
		!Timestamp(f.Time).Time.Before(s.LastFailure.Time.Time)) {
		s.LastFailure = &v1beta1.DeliveryFailure{Time: Timestamp(f.Time), Reason: f.Reason, StatusCode: int32(f.StatusCode), Message: f.Message}
	}
	return s
}

// Timestamp returns a time with the precision of the API.
func Timestamp(t time.Time) metav1.Time { return metav1.NewTime(t.UTC().Truncate(time.Second)) }

// maxSkew bounds the skew of a dispatcher's clock.
const maxSkew = time.Minute

// Ahead reports whether a time is in the future by more than the clock skew. If it were
// kept, it would hide all events until then.
func Ahead(t *metav1.Time, now time.Time) bool { return t != nil && t.After(now.Add(maxSkew)) }

// Latest returns the later one of a time in the old status and a time in a report; nil
// if there is none.
func Latest(old *metav1.Time, t, now time.Time) *metav1.Time {
	if Ahead(old, now) {
		old = nil
	}
	if t.IsZero() {
		return old.DeepCopy()
	}
	if next := Timestamp(t); old == nil || old.Before(&next) {
		return &next
	}
	return old.DeepCopy()
}

// Optional returns nil for the zero time.
func Optional(t time.Time) *metav1.Time {
	if t.IsZero() {
		return nil
	}
	out := Timestamp(t)
	return &out
}

// earliest returns the earlier one of a time in a status and a time in a report, either of which may
// be missing.
func earliest(a *metav1.Time, b time.Time) *metav1.Time {
	if a == nil {
		return Optional(b)
	}
	return Optional(Earlier(a.Time, b))
}

// Earlier returns the earlier one of two times, either of which may be zero.
func Earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// Later returns the later one of two times.
func Later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
