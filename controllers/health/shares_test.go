package health

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/test/check"
)

// The condition Programmed states that maxInFlight is less than the number of dispatchers, whose shares are 1.
func TestMaxInFlightBelowTheDispatchers(t *testing.T) {
	removed := Pod{Name: "d-3", Absent: true, Removed: true}
	for maxInFlight, want := range map[int32]bool{1: true, 2: true, 3: false, 1000: false, 0: false} {
		d := destination(v1beta1.AnyEndpoint, "primary")
		d.Spec.Delivery.MaxInFlight = maxInFlight
		pods := []Pod{runs("d-0", healthy("primary")), runs("d-1", healthy("primary")), runs("d-2", healthy("primary")), removed}
		s := Destination(d, accepted(), namespace, pods, t0)
		programmed := meta.FindStatusCondition(s.Conditions, v1beta1.ConditionProgrammed)
		check.Equal(t, "status of Programmed", programmed.Status, "True")
		check.Equal(t, "message with the limit", strings.Contains(programmed.Message, "maxInFlight is less than the number of dispatchers"), want)
	}
}
