package health

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
)

// recoveryDelay is the minimum time that the traffic condition remains False while
// numbers are not due, so that an endpoint that fails every other request does not
// cause a write and an Event every second.
const recoveryDelay = 5 * time.Second

// present returns zero numbers if there are numbers, and otherwise nil: the first
// numbers are a transition.
func present[T any](numbers *T) *T {
	if numbers == nil {
		return nil
	}
	return new(T)
}

// delayRecovery returns the fresh conditions, with the old traffic condition if that
// has been False for less than recoveryDelay.
func delayRecovery(old, fresh []metav1.Condition, conditionType string, now time.Time) []metav1.Condition {
	before, after := meta.FindStatusCondition(old, conditionType), meta.FindStatusCondition(fresh, conditionType)
	if before == nil || after == nil || before.Status != metav1.ConditionFalse || after.Status != metav1.ConditionTrue ||
		aboutSpec(before.Reason) {
		return fresh
	}
	// After the clock was set back, the condition must not remain False until that time.
	if age := now.Sub(before.LastTransitionTime.Time); age >= recoveryDelay || age < -recoveryDelay {
		return fresh
	}
	fresh = slices.Clone(fresh)
	*meta.FindStatusCondition(fresh, conditionType) = *before
	return fresh
}

// SameStatuses reports whether two lists of conditions have the same statuses.
func SameStatuses(a, b []metav1.Condition) bool {
	return slices.EqualFunc(a, b, func(a, b metav1.Condition) bool { return a.Type == b.Type && a.Status == b.Status })
}

// withoutNumbers removes the reason and message of the traffic condition, unless its
// reason describes the spec.
func withoutNumbers(conditions []metav1.Condition) []metav1.Condition {
	out := slices.Clone(conditions)
	for _, conditionType := range []string{v1beta1.ConditionDelivering, v1beta1.ConditionReceiving, v1beta1.ConditionSynced} {
		if c := meta.FindStatusCondition(out, conditionType); c != nil && !aboutSpec(c.Reason) {
			c.Reason, c.Message = "", ""
		}
	}
	return out
}

// aboutSpec reports whether the reason of a traffic condition describes the spec.
func aboutSpec(reason string) bool {
	return slices.Contains(v1beta1.ReasonsOfSpec, reason)
}
