package health

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/observed"
	"github.com/posthorn/posthorn/internal/plural"
)

const (
	// maxFailureReasonBytes and maxFailureMessageBytes are the bounds in the API.
	maxFailureReasonBytes  = 64
	maxFailureMessageBytes = 512
	// maxQuotedBytes bounds the text of a failure in a condition.
	maxQuotedBytes = 256
)

// Destinations are the kind WebhookDestination.
var Destinations = NewKind(Definition[v1beta1.WebhookDestination, v1beta1.WebhookDestinationStatus, *v1beta1.WebhookDestination]{
	Name: "WebhookDestination", Conditions: destinationConditions, Compute: Destination,
	Status: func(o *v1beta1.WebhookDestination) (*v1beta1.WebhookDestinationStatus, *[]metav1.Condition) {
		return &o.Status, &o.Status.Conditions
	},
	Summary:         func(s *v1beta1.WebhookDestinationStatus) *v1beta1.Summary { return &s.Summary },
	DelayedRecovery: v1beta1.ConditionDelivering,
	ObservedTime:    func(s *v1beta1.WebhookDestinationStatus) **metav1.Time { return &s.ObservedTime },
	WithoutIdle: func(s v1beta1.WebhookDestinationStatus) v1beta1.WebhookDestinationStatus {
		if s.Delivery != nil {
			delivery := *s.Delivery
			delivery.Accepted, delivery.Filtered, delivery.Omitted = 0, 0, 0
			// Messages that the filter excludes are pending for a moment.
			if oldest := delivery.OldestPendingTime; oldest == nil || s.ObservedTime != nil && s.ObservedTime.Sub(oldest.Time) < recoveryDelay {
				delivery.Pending, delivery.OldestPendingTime = 0, nil
			}
			s.Delivery = &delivery
		}
		s.ObservedTime = nil
		return s
	},
	ClearNumbers: func(s *v1beta1.WebhookDestinationStatus) {
		s.ObservedTime, s.Delivery, s.LastSuccessTime = nil, present(s.Delivery), nil
		for i, e := range s.Endpoints {
			s.Endpoints[i] = v1beta1.EndpointStatus{Name: e.Name}
			if e.State == v1beta1.EndpointCircuitOpen || e.State == v1beta1.EndpointGone {
				s.Endpoints[i].State = e.State
			}
		}
	},
})

var destinationConditions = conditionTypes(v1beta1.ConditionDelivering)

// Destination returns the status of a WebhookDestination, from the compiler's verdict v
// and the reports of the ready dispatcher pods.
//
// A paused destination is in the config, so Programmed can be True; Ready is False
// with the reason of Accepted or ResolvedRefs. Under AnyEndpoint, Delivering is True
// while one endpoint accepts messages; its message names those that fail.
func Destination(old v1beta1.WebhookDestination, v compile.Verdict, namespace string, pods []Pod,
	now time.Time) v1beta1.WebhookDestinationStatus {
	old.Status.Conditions = Own(old.Status.Conditions, destinationConditions)
	f := gather(v, old.ObjectMeta, old.Status.Conditions, namespace, pods, now, destinationReports)
	f.discardAhead = discardAheadOfDestination(pods, namespace, old.Name)
	f.belowDispatchers = int(old.Spec.Delivery.MaxInFlight) < dispatchers(pods) && old.Spec.Delivery.MaxInFlight > 0
	s := v1beta1.WebhookDestinationStatus{
		ObservedGeneration: old.Generation,
		Revision:           v.Revision,
		RevisionTime:       old.Status.RevisionTime.DeepCopy(),
	}
	if f.recompiled = s.Revision != old.Status.Revision; f.recompiled || s.RevisionTime == nil {
		s.RevisionTime = f.now.DeepCopy()
	}

	var stranded []string
	merged := observed.NewDestination(old.Spec.Endpoints)
	coverage := destinationReports.each(pods, namespace, old.Name, func(pod Pod, d *adminapi.DestinationReport) {
		merged.Add(d, pod.Outdated)
		if pod.Removed && d.Pending > 0 {
			stranded = append(stranded, fmt.Sprintf("%s on the volume of %s", plural.Count(d.Pending, "message"), pod.Name))
		}
	})
	f.stranded = describeStranded(stranded)
	s.LastSuccessTime = observed.Latest(old.Status.LastSuccessTime, merged.LastSuccess(), now)
	counted := coverage.counts(counters(old.Status.Delivery, merged.Delivery)...)
	s.Endpoints = merged.Statuses(old.Status.Endpoints, now, counted)
	for _, e := range s.Endpoints {
		if f := e.LastFailure; f != nil {
			f.Reason, f.Message = compile.Truncate(f.Reason, maxFailureReasonBytes), compile.Truncate(f.Message, maxFailureMessageBytes)
		}
	}
	s.ObservedTime = f.observed(old.Status.ObservedTime, counted)
	if s.Delivery = old.Status.Delivery.DeepCopy(); counted {
		s.Delivery = &merged.Delivery
	}
	if s.Delivery != nil && old.Spec.DeadLetters.ForwardTo == nil { // The standard CRDs do not have the field.
		s.Delivery.DeadLettersForwarded = nil
	}
	delivering := f.delivering(old.Spec.SuccessPolicy, merged)
	if failure := merged.FilterFailure; failure != nil && delivering.Status != metav1.ConditionFalse {
		delivering = conditionOf(v1beta1.ConditionDelivering)(metav1.ConditionFalse, v1beta1.ReasonFilterFailed,
			"spec.filter.expression fails for some calls, which become dead letters: "+compile.Truncate(failure.Message, maxQuotedBytes))
	}
	s.Conditions = f.conditions(true, delivering)
	return s
}

// dispatchers counts the dispatchers that divide the limits of an object.
func dispatchers(pods []Pod) (n int) {
	for _, pod := range pods {
		if !pod.Removed {
			n++
		}
	}
	return n
}

// describeStranded returns the part of the message of Ready about messages on the volumes of removed pods.
// Package why recognizes the first word.
func describeStranded(volumes []string) string {
	switch len(volumes) {
	case 0:
		return ""
	case 1:
		return "stranded: " + volumes[0] + ", which does not run"
	}
	most := min(len(volumes), maxNamedInDiscard)
	text := "stranded: " + strings.Join(volumes[:most], ", ")
	if more := len(volumes) - most; more > 0 {
		text += fmt.Sprintf(" and %s", plural.Count(more, "other"))
	}
	return text + ", which do not run"
}

// counters returns the counters of a ledger that never decrease, before and now.
func counters(before *v1beta1.DeliveryStatus, now v1beta1.DeliveryStatus) [][2]int64 {
	if before == nil {
		return nil
	}
	return [][2]int64{
		{before.Accepted, now.Accepted}, {before.Delivered, now.Delivered}, {before.Filtered, now.Filtered},
		{before.Omitted, now.Omitted},
		{before.DeadLettered, now.DeadLettered}, {before.Discarded, now.Discarded},
	}
}

var destinationReports = reports[adminapi.DestinationReport]{
	find: func(n *podreport.NamespaceIndex, name string, scratch *adminapi.DestinationReport) *adminapi.DestinationReport {
		if !n.ReadDestination(name, scratch) {
			return nil
		}
		return scratch
	},
	running: func(r *adminapi.DestinationReport) (string, int64) { return r.Revision, r.Generation },
}

// delivering returns the condition Delivering.
func (f facts) delivering(success v1beta1.SuccessPolicy, merged *observed.Destination) metav1.Condition {
	set := conditionOf(v1beta1.ConditionDelivering)
	if state := f.state(); state != liveconfig.Active {
		if state == liveconfig.Suspended {
			return set(metav1.ConditionFalse, v1beta1.ReasonSuspended, "spec.suspend is true: messages wait")
		}
		_, message := f.verdict.Cause()
		return set(metav1.ConditionFalse, v1beta1.ReasonPaused, "messages are kept up to the retry window, not sent: "+message)
	}
	failing, working := merged.Failing()
	descriptions := make([]string, len(failing))
	for i, e := range failing {
		descriptions[i] = describe(e)
	}
	described := strings.Join(descriptions, "; ")
	switch {
	case working == 0 && len(failing) == 0:
		if slices.ContainsFunc(merged.Endpoints, func(e observed.Endpoint) bool { return e.LastFailure != nil }) {
			return set(metav1.ConditionUnknown, v1beta1.ReasonNoTrafficYet, "nothing has been sent since the last change")
		}
		if before := f.before(v1beta1.ConditionDelivering); before != nil && before.ObservedGeneration == f.generation {
			return set(before.Status, before.Reason, before.Message)
		}
		return set(metav1.ConditionUnknown, v1beta1.ReasonNoTrafficYet, "nothing has been sent yet")
	case len(failing) == 0:
		return set(metav1.ConditionTrue, v1beta1.ReasonDelivering, "the latest deliveries succeeded")
	case working > 0 && success != v1beta1.EveryEndpoint:
		return set(metav1.ConditionTrue, v1beta1.ReasonDelivering, "delivered to another endpoint, but "+described)
	}
	return set(metav1.ConditionFalse, commonReason(failing), described)
}

// commonReason returns the reason of all failing endpoints if it is the same, and
// otherwise EndpointFailing.
func commonReason(failing []observed.Endpoint) string {
	reason := reasonOf(failing[0])
	for _, e := range failing[1:] {
		if reasonOf(e) != reason {
			return v1beta1.ReasonEndpointFailing
		}
	}
	return reason
}

// reasonOf returns the reason of a failing endpoint.
func reasonOf(e observed.Endpoint) string {
	switch {
	case e.State == adminapi.EndpointGone:
		return v1beta1.ReasonEndpointGone
	case behindFailedProxy(e):
		return v1beta1.ReasonProxyFailed
	case transformFailing(e):
		return v1beta1.ReasonTransformFailing
	case e.Open > 0:
		return v1beta1.ReasonCircuitOpen
	case e.LastFailure == nil || e.LastFailure.Reason == "":
		return v1beta1.ReasonEndpointFailing
	}
	return compile.Truncate(e.LastFailure.Reason, maxFailureReasonBytes)
}

// behindFailedProxy reports whether the latest failure is the egress proxy's. The circuit is open
// then, so that few requests reach the proxy, but that is no evidence against the endpoint.
func behindFailedProxy(e observed.Endpoint) bool {
	return e.State != adminapi.EndpointGone && e.LastFailure != nil && e.LastFailure.Reason == v1beta1.ReasonProxyFailed
}

// transformFailing reports whether an expression of spec.request fails for every message.
func transformFailing(e observed.Endpoint) bool {
	return e.Open > 0 && e.LastFailure != nil && e.LastFailure.Reason == v1beta1.ReasonTransformFailed
}

// describe returns a description of a failing endpoint: its name, the failure, and the
// start of the failure. The text is constant while the failure is the same.
func describe(e observed.Endpoint) string {
	var b strings.Builder
	if behindFailedProxy(e) {
		fmt.Fprintf(&b, "the egress proxy has no connection to endpoint %s", e.Name)
	} else if transformFailing(e) {
		fmt.Fprintf(&b, "no requests can be made for endpoint %s", e.Name)
	} else {
		fmt.Fprintf(&b, "endpoint %s fails", e.Name)
	}
	switch {
	case e.State == adminapi.EndpointGone:
		fmt.Fprintf(&b, ", it answered 410 Gone and gets hourly probes")
	case transformFailing(e):
		fmt.Fprintf(&b, ", so one message a minute is tried")
	case e.Open > 0:
		fmt.Fprintf(&b, ", its circuit is open")
	}
	if !e.FailingSince.IsZero() {
		fmt.Fprintf(&b, " since %s", observed.Timestamp(e.FailingSince).Format(time.RFC3339))
	}
	if f := e.LastFailure; f != nil {
		fmt.Fprintf(&b, ": %s", cmp.Or(f.Reason, v1beta1.ReasonEndpointFailing))
		if f.StatusCode != 0 {
			fmt.Fprintf(&b, ", status %d", f.StatusCode)
		}
		if f.Message != "" {
			fmt.Fprintf(&b, ": %s", compile.Truncate(f.Message, maxQuotedBytes))
		}
	}
	return b.String()
}
