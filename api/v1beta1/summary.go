package v1beta1

import (
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Summary is the state of an object in one word and one sentence, as kubectl get prints it.
type Summary struct {
	// The worst reason of the conditions, in this order: of Ready, if Ready is not True; of Delivering,
	// Receiving or Synced, if it is False; DiscardAhead; Suspended; of Delivering, Receiving or Synced, if it
	// is Unknown; of Ready. It changes only with a condition.
	// +kubebuilder:validation:MaxLength=64
	// +optional
	Reason string `json:"reason,omitempty"`

	// The message of the condition that has this reason, at most 512 bytes of it.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	Message string `json:"message,omitempty"`
}

// Worst returns the condition that has status.reason, in the order that Summary documents; nil without
// the condition Ready.
func Worst(conditions []metav1.Condition) *metav1.Condition {
	ready := meta.FindStatusCondition(conditions, ConditionReady)
	if ready == nil || ready.Status != metav1.ConditionTrue {
		return ready
	}
	traffic, accepted := trafficOf(conditions), meta.FindStatusCondition(conditions, ConditionAccepted)
	switch {
	case traffic != nil && traffic.Status == metav1.ConditionFalse:
		return traffic
	case ready.Reason == ReasonDiscardAhead:
		return ready
	case accepted != nil && accepted.Reason == ReasonSuspended:
		return accepted
	case traffic != nil && traffic.Status == metav1.ConditionUnknown:
		return traffic
	}
	return ready
}

// trafficOf returns the traffic condition, unless it only repeats the spec; nil if there is none.
func trafficOf(conditions []metav1.Condition) *metav1.Condition {
	for _, conditionType := range []string{ConditionDelivering, ConditionReceiving, ConditionSynced} {
		if c := meta.FindStatusCondition(conditions, conditionType); c != nil && !slices.Contains(ReasonsOfSpec, c.Reason) {
			return c
		}
	}
	return nil
}

// ReasonsOfSpec are the reasons with which a traffic condition repeats another condition.
var ReasonsOfSpec = []string{ReasonPaused, ReasonSuspended, ReasonNotAccepted, ReasonUnresolvedRefs}
