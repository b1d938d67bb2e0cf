package health

import (
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/compile"
)

// Outcome is the state of a run. At its end one of Complete and Failed is true.
type Outcome struct {
	Complete, Failed bool
	Reason, Message  string
}

// SetJobConditions sets the conditions of a Redelivery or DeletionRequest. Complete,
// Failed and Ready have the reason and the message of the outcome. Generic clients of
// kstatus do not evaluate Complete and Failed: they recognize a run in progress by
// Ready, which is not True, and a failed run by Stalled.
func SetJobConditions(s *v1beta1.JobStatus, generation int64, now metav1.Time, v compile.Verdict, o Outcome) {
	s.ObservedGeneration = generation
	s.Conditions = slices.Clone(s.Conditions)
	set := func(conditionType string, is bool, reason, message string) {
		meta.SetStatusCondition(&s.Conditions, metav1.Condition{
			Type: conditionType, Status: status(is), Reason: reason, Message: compile.Truncate(message, maxMessageBytes),
			ObservedGeneration: generation, LastTransitionTime: now,
		})
	}
	set(v1beta1.ConditionAccepted, v.Accepted, v.Reason, v.Message)
	resolved := facts{verdict: v}.resolvedRefs()
	set(resolved.Type, resolved.Status == metav1.ConditionTrue, resolved.Reason, resolved.Message)
	set(v1beta1.ConditionComplete, o.Complete, o.Reason, o.Message)
	set(v1beta1.ConditionFailed, o.Failed, o.Reason, o.Message)
	set(v1beta1.ConditionReady, o.Complete, o.Reason, o.Message)
	if o.Failed || !v.Accepted && needsPerson(v.Reason) {
		set(v1beta1.ConditionStalled, true, o.Reason, o.Message)
	} else {
		meta.RemoveStatusCondition(&s.Conditions, v1beta1.ConditionStalled)
	}
}

// ObserveEnded returns the status of a run that has ended, with another observed
// generation. The rest of the status is final, because only the TTL can be changed.
func ObserveEnded(s v1beta1.JobStatus, generation int64) v1beta1.JobStatus {
	s.ObservedGeneration = generation
	s.Conditions = slices.Clone(s.Conditions)
	for _, conditionType := range jobConditions {
		if c := meta.FindStatusCondition(s.Conditions, conditionType); c != nil {
			c.ObservedGeneration = generation
		}
	}
	return s
}
