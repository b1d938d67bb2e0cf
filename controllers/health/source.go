package health

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/observed"
)

const (
	// maxDestinations is the API's bound of status.destinations.
	maxDestinations = 100
	// rejectingFor is the time between the last accepted and the last rejected call after
	// which Receiving is False, so that single invalid calls do not change it.
	rejectingFor = 30 * time.Second
)

// Sources are the kind Source.
var Sources = NewKind(Definition[v1beta1.Source, v1beta1.SourceStatus, *v1beta1.Source]{
	Name: "Source", Conditions: sourceConditions, Compute: Source,
	Status: func(o *v1beta1.Source) (*v1beta1.SourceStatus, *[]metav1.Condition) {
		return &o.Status, &o.Status.Conditions
	},
	Summary:         func(s *v1beta1.SourceStatus) *v1beta1.Summary { return &s.Summary },
	DelayedRecovery: v1beta1.ConditionReceiving,
	ObservedTime:    func(s *v1beta1.SourceStatus) **metav1.Time { return &s.ObservedTime },
	ClearNumbers: func(s *v1beta1.SourceStatus) {
		s.ObservedTime, s.Calls, s.Messages, s.LastReceivedTime = nil, present(s.Calls), present(s.Messages), nil
	},
})

var sourceConditions = conditionTypes(v1beta1.ConditionReceiving)

// Source returns the status of a Source, from the compiler's verdict v and the reports
// of the ready dispatcher pods.
//
// A Source without a usable write key has no effect, so it is not programmed (reason
// NotAccepted or UnresolvedRefs). A suspended Source is programmed: its calls are
// answered 503.
func Source(old v1beta1.Source, v compile.Verdict, namespace string, pods []Pod, now time.Time) v1beta1.SourceStatus {
	old.Status.Conditions = Own(old.Status.Conditions, sourceConditions)
	f := gather(v, old.ObjectMeta, old.Status.Conditions, namespace, pods, now, sourceReports)
	f.discardAhead = discardAheadOfSource(pods, namespace, old.Name)
	s := v1beta1.SourceStatus{
		ObservedGeneration: old.Generation,
		Destinations:       slices.Clone(v.Destinations[:min(len(v.Destinations), maxDestinations)]),
	}
	var t traffic
	coverage := sourceReports.each(pods, namespace, old.Name, func(pod Pod, r *adminapi.SourceReport) {
		t.add(*r, pod)
	})
	s.LastReceivedTime = observed.Latest(old.Status.LastReceivedTime, t.lastAccepted, now)
	if s.LastReceivedTime != nil { // The time is unknown to a pod that restarted.
		t.lastAccepted = observed.Later(t.lastAccepted, s.LastReceivedTime.Time)
	}
	counters := [][2]int64{}
	if c, m := old.Status.Calls, old.Status.Messages; c != nil && m != nil {
		counters = [][2]int64{
			{c.Accepted, t.calls.Accepted}, {m.Accepted, t.messages.Accepted}, {m.Delivered, t.messages.Delivered},
			{m.Filtered, t.messages.Filtered}, {m.Omitted, t.messages.Omitted},
			{m.DeadLettered, t.messages.DeadLettered}, {m.Discarded, t.messages.Discarded},
		}
	}
	counted := coverage.counts(counters...)
	s.ObservedTime = f.observed(old.Status.ObservedTime, counted)
	if counted {
		s.Calls, s.Messages = &t.calls, &t.messages
	} else {
		s.Calls, s.Messages = old.Status.Calls.DeepCopy(), old.Status.Messages.DeepCopy()
	}
	s.Conditions = f.conditions(f.state() != liveconfig.Paused, f.receiving(t))
	return s
}

var sourceReports = reports[adminapi.SourceReport]{
	find:    inMap(func(n *podreport.NamespaceIndex) map[string]*adminapi.SourceReport { return n.Sources }),
	running: func(r *adminapi.SourceReport) (string, int64) { return r.Revision, r.Generation },
}

// traffic is a Source's traffic over all pods.
type traffic struct {
	// pods counts the reports that are not outdated.
	pods                       int
	calls                      v1beta1.CallCounts
	messages                   v1beta1.MessageCounts
	lastAccepted, lastRejected time.Time
	lastRejection              string
	// pressure is why calls are answered 503; empty if they are not.
	pressure string
}

// add adds a pod's report; of an outdated one, only the counters and times.
func (t *traffic) add(r adminapi.SourceReport, pod Pod) {
	t.calls.Accepted += r.Accepted
	t.calls.Rejected += r.Rejected
	t.calls.Duplicates += r.Duplicates
	t.messages.Accepted += r.Messages.Accepted
	t.messages.Delivered += r.Messages.Delivered
	t.messages.Filtered += r.Messages.Filtered
	t.messages.Omitted += r.Messages.Omitted
	t.messages.DeadLettered += r.Messages.DeadLettered
	t.messages.Discarded += r.Messages.Discarded
	t.messages.Pending += r.Messages.Pending
	t.lastAccepted = observed.Later(t.lastAccepted, r.LastAccepted)
	if pod.Outdated {
		return
	}
	t.pods++
	if r.LastRejected.After(t.lastRejected) {
		t.lastRejected, t.lastRejection = r.LastRejected, r.LastRejection
	}
	t.pressure = cmp.Or(t.pressure, pressure(r, pod))
}

// pressure returns why a pod rejects the calls of a Source for lack of storage; empty if it does not.
func pressure(r adminapi.SourceReport, pod Pod) string {
	s := r.Share
	switch {
	case pod.Report.Storage.Pressure, r.StoragePressure && (s == nil || s.MaxBytes == 0 || s.UsedBytes < s.MaxBytes*9/10):
		return "a dispatcher's storage is full"
	case !r.StoragePressure:
		return ""
	case s.Quota:
		return fmt.Sprintf("the undelivered calls of this Source use %s, and its quota on dispatcher %s is %s", size(s.UsedBytes), pod.Name, size(s.MaxBytes))
	}
	return fmt.Sprintf("the undelivered calls of this namespace use %s, and its share of the storage of dispatcher %s is %s", size(s.UsedBytes), pod.Name, size(s.MaxBytes))
}

// size formats a number of bytes. It is coarse, so that a condition changes seldom.
func size(bytes int64) string {
	if bytes >= 1e9 {
		return fmt.Sprintf("%.1f GB", float64(bytes)/1e9)
	}
	return fmt.Sprintf("%.0f MB", float64(bytes)/1e6)
}

// receiving returns the condition Receiving.
func (f facts) receiving(t traffic) metav1.Condition {
	set := conditionOf(v1beta1.ConditionReceiving)
	switch {
	case f.state() == liveconfig.Suspended:
		return set(metav1.ConditionFalse, v1beta1.ReasonSuspended, "spec.suspend is true: calls are answered 503, and clients send them again")
	case f.state() == liveconfig.Paused:
		_, message := f.verdict.Cause()
		return set(metav1.ConditionFalse, f.noEffect(), "this Source has no valid write key, so it cannot receive calls: "+message)
	case f.down:
		return set(metav1.ConditionUnknown, v1beta1.ReasonNoDispatcher, noneReady)
	case t.pressure != "":
		return set(metav1.ConditionFalse, v1beta1.ReasonStoragePressure,
			"calls are answered 503: "+t.pressure+"; see the pending messages of the destinations")
	case !t.lastRejected.IsZero() && t.lastRejected.Sub(t.lastAccepted) > rejectingFor:
		message := "all of the latest calls were rejected"
		if t.lastRejection != "" {
			message += ": " + compile.Truncate(t.lastRejection, maxQuotedBytes)
		}
		return set(metav1.ConditionFalse, v1beta1.ReasonRejectingCalls, message)
	case t.calls.Accepted > 0:
		return set(metav1.ConditionTrue, v1beta1.ReasonReceiving, "calls are accepted")
	}
	if t.pods == 0 {
		if before := f.before(v1beta1.ConditionReceiving); before != nil {
			return set(before.Status, before.Reason, before.Message)
		}
	}
	return set(metav1.ConditionUnknown, v1beta1.ReasonNoTrafficYet, "no call has been received yet")
}
