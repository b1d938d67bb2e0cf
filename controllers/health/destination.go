package health

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

const (
	// maxFailureReasonBytes and maxFailureMessageBytes are the bounds in the API.
	maxFailureReasonBytes  = 64
	maxFailureMessageBytes = 512
	// maxQuotedBytes bounds the text of a failure in a condition.
	maxQuotedBytes = 256
)

// Destinations are the kind WebhookDestination.
var Destinations = NewKind(Definition[v1alpha1.WebhookDestination, v1alpha1.WebhookDestinationStatus, *v1alpha1.WebhookDestination]{
	Name: "WebhookDestination", Conditions: destinationConditions, Compute: Destination,
	Status: func(o *v1alpha1.WebhookDestination) (*v1alpha1.WebhookDestinationStatus, *[]metav1.Condition) {
		return &o.Status, &o.Status.Conditions
	},
	DelayedRecovery: v1alpha1.ConditionDelivering,
	ObservedTime:    func(s *v1alpha1.WebhookDestinationStatus) **metav1.Time { return &s.ObservedTime },
	ClearNumbers: func(s *v1alpha1.WebhookDestinationStatus) {
		s.ObservedTime, s.Delivery, s.LastSuccessTime = nil, present(s.Delivery), nil
		for i, e := range s.Endpoints {
			s.Endpoints[i] = v1alpha1.EndpointStatus{Name: e.Name}
			if e.State == v1alpha1.EndpointCircuitOpen || e.State == v1alpha1.EndpointGone {
				s.Endpoints[i].State = e.State
			}
		}
	},
})

var destinationConditions = conditionTypes(v1alpha1.ConditionDelivering)

// Destination returns the status of a WebhookDestination, from the compiler's verdict v
// and the reports of the ready dispatcher pods.
//
// A paused destination is in the config, so Programmed can be True; Ready is False
// with the reason of Accepted or ResolvedRefs. Under AnyEndpoint, Delivering is True
// while one endpoint accepts messages; its message names those that fail.
func Destination(old v1alpha1.WebhookDestination, v compile.Verdict, namespace string, pods []Pod, now time.Time) v1alpha1.WebhookDestinationStatus {
	old.Status.Conditions = Own(old.Status.Conditions, destinationConditions)
	f := gather(v, old.ObjectMeta, old.Status.Conditions, namespace, pods, now, destinationReports)
	s := v1alpha1.WebhookDestinationStatus{
		ObservedGeneration: old.Generation,
		Revision:           v.Revision,
		RevisionTime:       old.Status.RevisionTime.DeepCopy(),
	}
	if f.recompiled = s.Revision != old.Status.Revision; f.recompiled || s.RevisionTime == nil {
		s.RevisionTime = f.now.DeepCopy()
	}

	var total adminapi.DestinationReport
	var lastSuccess time.Time
	endpoints := make([]endpoint, len(old.Spec.Endpoints))
	for i := range endpoints {
		endpoints[i] = endpoint{name: old.Spec.Endpoints[i].Name, state: adminapi.EndpointIdle}
	}
	coverage := destinationReports.each(pods, namespace, old.Name, func(pod Pod, d *adminapi.DestinationReport) {
		total.Delivered += d.Delivered
		total.Filtered += d.Filtered
		total.DeadLettered += d.DeadLettered
		total.DeadLettersStored += d.DeadLettersStored
		total.DeadLettersForwarded += d.DeadLettersForwarded
		total.Discarded += d.Discarded
		total.Pending += d.Pending
		total.Retrying += d.Retrying
		total.OldestPending = earlier(total.OldestPending, d.OldestPending)
		total.NextAttempt = earlier(total.NextAttempt, d.NextAttempt)
		for i := range endpoints {
			for _, e := range d.Endpoints {
				if e.Name == endpoints[i].name {
					endpoints[i].add(e, pod.Outdated)
					lastSuccess = later(lastSuccess, e.LastSuccess)
				}
			}
		}
	})

	s.LastSuccessTime = latest(old.Status.LastSuccessTime, lastSuccess, now)
	delivery := v1alpha1.DeliveryStatus{
		Delivered: total.Delivered, Filtered: total.Filtered, DeadLettered: total.DeadLettered, DeadLettersStored: total.DeadLettersStored,
		DeadLettersForwarded: total.DeadLettersForwarded,
		Discarded:            total.Discarded, Pending: total.Pending, Retrying: total.Retrying,
		OldestPendingTime: optional(total.OldestPending), NextAttemptTime: optional(total.NextAttempt),
	}
	counted := coverage.counts(counters(old.Status.Delivery, delivery)...)
	for _, e := range endpoints {
		var before v1alpha1.EndpointStatus
		if i := slices.IndexFunc(old.Status.Endpoints, func(o v1alpha1.EndpointStatus) bool { return o.Name == e.name }); i >= 0 {
			before = old.Status.Endpoints[i]
		}
		s.Endpoints = append(s.Endpoints, e.status(before, now, counted))
	}
	s.ObservedTime = f.observed(old.Status.ObservedTime, counted)
	if s.Delivery = old.Status.Delivery.DeepCopy(); counted {
		s.Delivery = &delivery
	}
	s.Conditions = f.conditions(true, f.delivering(old.Spec.SuccessPolicy, endpoints))
	return s
}

// counters returns the counters of a ledger that never decrease, before and now.
func counters(before *v1alpha1.DeliveryStatus, now v1alpha1.DeliveryStatus) [][2]int64 {
	if before == nil {
		return nil
	}
	accepted := func(d *v1alpha1.DeliveryStatus) int64 {
		return d.Delivered + d.Filtered + d.DeadLettered + d.Discarded + d.Pending
	}
	return [][2]int64{
		{accepted(before), accepted(&now)}, {before.Delivered, now.Delivered}, {before.Filtered, now.Filtered},
		{before.DeadLettered, now.DeadLettered}, {before.Discarded, now.Discarded},
	}
}

var destinationReports = reports[adminapi.DestinationReport]{
	find: func(n *adminapi.NamespaceIndex, name string, scratch *adminapi.DestinationReport) *adminapi.DestinationReport {
		if !n.ReadDestination(name, scratch) {
			return nil
		}
		return scratch
	},
	running: func(r *adminapi.DestinationReport) (string, int64) { return r.Revision, r.Generation },
}

// delivering returns the condition Delivering.
func (f facts) delivering(success v1alpha1.SuccessPolicy, endpoints []endpoint) metav1.Condition {
	set := conditionOf(v1alpha1.ConditionDelivering)
	if state := f.state(); state != liveconfig.Active {
		_, message := f.verdict.Cause()
		if state == liveconfig.Disabled && f.verdict.Accepted {
			message = f.verdict.Message
		} else {
			message = "messages are kept up to the retry window, not sent: " + message
		}
		return set(metav1.ConditionFalse, v1alpha1.ReasonPaused, message)
	}
	var failing []endpoint
	working := 0
	for _, e := range endpoints {
		switch {
		case e.failing > 0:
			failing = append(failing, e)
		case e.state != adminapi.EndpointIdle:
			working++
		}
	}
	descriptions := make([]string, len(failing))
	for i, e := range failing {
		descriptions[i] = e.describe()
	}
	described := strings.Join(descriptions, "; ")
	switch {
	case working == 0 && len(failing) == 0:
		if slices.ContainsFunc(endpoints, func(e endpoint) bool { return e.lastFailure != nil }) {
			return set(metav1.ConditionUnknown, v1alpha1.ReasonNoTrafficYet, "nothing has been sent since the last change")
		}
		if before := f.before(v1alpha1.ConditionDelivering); before != nil && before.ObservedGeneration == f.generation {
			return set(before.Status, before.Reason, before.Message)
		}
		return set(metav1.ConditionUnknown, v1alpha1.ReasonNoTrafficYet, "nothing has been sent yet")
	case len(failing) == 0:
		return set(metav1.ConditionTrue, v1alpha1.ReasonDelivering, "the latest deliveries succeeded")
	case working > 0 && success != v1alpha1.EveryEndpoint:
		return set(metav1.ConditionTrue, v1alpha1.ReasonDelivering, "delivered to another endpoint, but "+described)
	}
	return set(metav1.ConditionFalse, commonReason(failing), described)
}

// commonReason returns the reason of all failing endpoints if it is the same, and
// otherwise EndpointFailing.
func commonReason(failing []endpoint) string {
	reason := failing[0].reason()
	for _, e := range failing[1:] {
		if e.reason() != reason {
			return v1alpha1.ReasonEndpointFailing
		}
	}
	return reason
}

// endpoint is one endpoint's traffic over all pods.
type endpoint struct {
	name string
	// reported is true if a report that is not outdated contains the endpoint.
	reported bool
	// state is the worst over all pods.
	state adminapi.EndpointState
	// failing is the number of pods whose latest deliveries failed, and open is the number
	// of those with an open circuit. failingSince is the start of the first failure.
	failing, open int
	failingSince  time.Time
	lastSuccess   time.Time
	lastFailure   *adminapi.Failure
	// firstPending is the number of messages without a first attempt, and firstSkipped the
	// number of messages that are never sent to this endpoint.
	firstPending, firstSkipped int64
}

// add adds a pod's report; of an outdated one, only the counters and times.
func (e *endpoint) add(r adminapi.EndpointReport, outdated bool) {
	e.lastSuccess = later(e.lastSuccess, r.LastSuccess)
	e.firstPending += r.FirstAttemptsPending
	e.firstSkipped += r.FirstAttemptsSkipped
	if outdated {
		return
	}
	e.reported = true
	if severity(r.State) > severity(e.state) {
		e.state = r.State
	}
	if r.LastFailure != nil && (e.lastFailure == nil || r.LastFailure.Time.After(e.lastFailure.Time)) {
		e.lastFailure = r.LastFailure
	}
	// An endpoint that recovers is Degraded for a while, although its deliveries succeed.
	if r.State.Open() || r.State == adminapi.EndpointDegraded && r.ConsecutiveFailures > 0 {
		e.failing++
		e.failingSince = earlier(e.failingSince, r.Since)
	}
	if r.State.Open() {
		e.open++
	}
}

func severity(s adminapi.EndpointState) int {
	return slices.Index([]adminapi.EndpointState{adminapi.EndpointIdle, adminapi.EndpointHealthy, adminapi.EndpointDegraded, adminapi.EndpointCircuitOpen, adminapi.EndpointGone}, s)
}

// reason returns the reason of a failing endpoint.
func (e endpoint) reason() string {
	switch {
	case e.state == adminapi.EndpointGone:
		return v1alpha1.ReasonEndpointGone
	case e.behindFailedProxy():
		return v1alpha1.ReasonProxyFailed
	case e.open > 0:
		return v1alpha1.ReasonCircuitOpen
	case e.lastFailure == nil || e.lastFailure.Reason == "":
		return v1alpha1.ReasonEndpointFailing
	}
	return compile.Truncate(e.lastFailure.Reason, maxFailureReasonBytes)
}

// behindFailedProxy reports whether the latest failure is the egress proxy's. The circuit is open
// then, so that few requests reach the proxy, but that is no evidence against the endpoint.
func (e endpoint) behindFailedProxy() bool {
	return e.state != adminapi.EndpointGone && e.lastFailure != nil && e.lastFailure.Reason == v1alpha1.ReasonProxyFailed
}

// describe returns a description of a failing endpoint: its name, the failure, and the
// start of the failure. The text is constant while the failure is the same.
func (e endpoint) describe() string {
	var b strings.Builder
	if e.behindFailedProxy() {
		fmt.Fprintf(&b, "the egress proxy has no connection to endpoint %s", e.name)
	} else {
		fmt.Fprintf(&b, "endpoint %s fails", e.name)
	}
	switch {
	case e.state == adminapi.EndpointGone:
		fmt.Fprintf(&b, ", it answered 410 Gone and gets hourly probes")
	case e.open > 0:
		fmt.Fprintf(&b, ", its circuit is open")
	}
	if !e.failingSince.IsZero() {
		fmt.Fprintf(&b, " since %s", timestamp(e.failingSince).Format(time.RFC3339))
	}
	if f := e.lastFailure; f != nil {
		fmt.Fprintf(&b, ": %s", cmp.Or(f.Reason, v1alpha1.ReasonEndpointFailing))
		if f.StatusCode != 0 {
			fmt.Fprintf(&b, ", status %d", f.StatusCode)
		}
		if f.Message != "" {
			fmt.Fprintf(&b, ": %s", compile.Truncate(f.Message, maxQuotedBytes))
		}
	}
	return b.String()
}

func (e endpoint) status(before v1alpha1.EndpointStatus, now time.Time, counted bool) v1alpha1.EndpointStatus {
	s := v1alpha1.EndpointStatus{
		Name: e.name, State: v1alpha1.EndpointState(e.state),
		LastSuccessTime: latest(before.LastSuccessTime, e.lastSuccess, now),
		LastFailure:     before.LastFailure.DeepCopy(),

		FirstAttemptsPending: before.FirstAttemptsPending, FirstAttemptsSkipped: before.FirstAttemptsSkipped,
	}
	if counted {
		s.FirstAttemptsPending, s.FirstAttemptsSkipped = e.firstPending, e.firstSkipped
	}
	if !e.reported && before.State != "" {
		s.State = before.State
	}
	if severity(adminapi.EndpointState(s.State)) < 0 {
		s.State = v1alpha1.EndpointIdle
	}
	if f := e.lastFailure; f != nil && (s.LastFailure == nil || ahead(&s.LastFailure.Time, now) || !timestamp(f.Time).Time.Before(s.LastFailure.Time.Time)) {
		s.LastFailure = &v1alpha1.DeliveryFailure{
			Time: timestamp(f.Time), Reason: compile.Truncate(f.Reason, maxFailureReasonBytes),
			StatusCode: int32(f.StatusCode), Message: compile.Truncate(f.Message, maxFailureMessageBytes),
		}
	}
	return s
}
