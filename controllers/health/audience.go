package health

import (
	"fmt"
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

// Audiences are the kind Audience.
var Audiences = NewKind(Definition[v1beta1.Audience, v1beta1.AudienceStatus, *v1beta1.Audience]{
	Name: "Audience", Conditions: audienceConditions, Compute: Audience,
	Status: func(o *v1beta1.Audience) (*v1beta1.AudienceStatus, *[]metav1.Condition) {
		return &o.Status, &o.Status.Conditions
	},
	Summary:      func(s *v1beta1.AudienceStatus) *v1beta1.Summary { return &s.Summary },
	ObservedTime: func(s *v1beta1.AudienceStatus) **metav1.Time { return &s.ObservedTime },
	ClearNumbers: func(s *v1beta1.AudienceStatus) { s.ObservedTime, s.Members, s.LastSync = nil, nil, nil },
})

var audienceConditions = conditionTypes(v1beta1.ConditionSynced)

// Audience returns the status of an Audience, from the compiler's verdict v and the
// reports of the ready dispatcher pods. One pod, the owner, stores the members.
//
// An Audience that is not accepted, or whose Source does not exist, has no key, so it
// is not programmed (reason NotAccepted or UnresolvedRefs).
func Audience(old v1beta1.Audience, v compile.Verdict, namespace string, pods []Pod, now time.Time) v1beta1.AudienceStatus {
	old.Status.Conditions = Own(old.Status.Conditions, audienceConditions)
	f := gather(v, old.ObjectMeta, old.Status.Conditions, namespace, pods, now, audienceReports)
	s := v1beta1.AudienceStatus{ObservedGeneration: old.Generation}
	var owner *adminapi.AudienceReport
	audienceReports.each(pods, namespace, old.Name, func(_ Pod, r *adminapi.AudienceReport) {
		if r.Owner && (owner == nil || r.LastSync.After(owner.LastSync)) {
			owner = r
		}
	})
	if owner == nil { // While the owner restarts, the last known numbers are valid.
		kept := old.Status.DeepCopy()
		s.Members, s.LastSync = kept.Members, kept.LastSync
	} else if synced := !owner.LastSync.IsZero(); synced || owner.Unsent > 0 {
		s.LastSync = &v1beta1.AudienceSync{Time: observed.Optional(owner.LastSync), Added: owner.Added, Removed: owner.Removed,
			Changed: owner.Changed, Pending: owner.Unsent}
		if synced {
			s.Members = &owner.Members
		}
	}
	s.ObservedTime = f.observed(old.Status.ObservedTime, owner != nil)
	s.Conditions = f.conditions(f.state() != liveconfig.Paused, f.synced(owner, old.Spec.Key))
	return s
}

var audienceReports = reports[adminapi.AudienceReport]{
	find:    inMap(func(n *podreport.NamespaceIndex) map[string]*adminapi.AudienceReport { return n.Audiences }),
	running: func(r *adminapi.AudienceReport) (string, int64) { return r.Revision, r.Generation },
}

// synced returns the condition Synced of an audience with a key. owner is nil if the pod that stores the members
// does not answer.
func (f facts) synced(owner *adminapi.AudienceReport, key string) metav1.Condition {
	set := conditionOf(v1beta1.ConditionSynced)
	switch {
	case f.state() == liveconfig.Paused:
		_, message := f.verdict.Cause()
		return set(metav1.ConditionFalse, f.noEffect(), "the audience cannot be synced: "+message)
	case owner == nil:
		if before := f.before(v1beta1.ConditionSynced); before != nil {
			return set(before.Status, before.Reason, before.Message)
		}
	case owner.LastRefused.After(owner.LastSync):
		return set(metav1.ConditionFalse, v1beta1.ReasonSyncRefused,
			"the latest sync was rejected and changed nothing: "+compile.Truncate(owner.Refusal, maxQuotedBytes))
	case owner.Unsent > 0: // This includes calls of a sync with another key, kind or Source, which has no numbers.
		message := fmt.Sprintf("the last sync was accepted; %s not queued yet", plural.Count(owner.Unsent, "identify call"))
		if owner.Waits != "" {
			message += ": " + compile.Truncate(owner.Waits, maxQuotedBytes)
		}
		return set(metav1.ConditionTrue, v1beta1.ReasonSending, message)
	case owner.LastSync.IsZero():
	default:
		return set(metav1.ConditionTrue, v1beta1.ReasonSynced, fmt.Sprintf("the last sync was accepted: %d joined, %d left, %d have another value", owner.Added, owner.Removed, owner.Changed))
	}
	return set(metav1.ConditionUnknown, v1beta1.ReasonNoSyncYet, "no sync has been received yet; send members to /v1/audiences/"+key+"/members")
}
