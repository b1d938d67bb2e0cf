package v1beta1

import (
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestWorst(t *testing.T) {
	for _, test := range []struct{ name, conditions, want string }{
		{"no conditions", "", ""},
		{"not processed yet", "Accepted=Unknown/Pending Ready=Unknown/Pending Delivering=Unknown/Pending", "Pending"},
		{"not accepted", "Accepted=False/InvalidURL Ready=False/InvalidURL Delivering=False/Paused", "InvalidURL"},
		{"not ready and failing", "Accepted=True/Accepted Ready=False/ConfigRefused Delivering=False/TimedOut", "ConfigRefused"},
		{"a failing receiver", "Accepted=True/Accepted Ready=True/Ready Delivering=False/TimedOut", "TimedOut"},
		{"a failing receiver, and discards", "Accepted=True/Accepted Ready=True/DiscardAhead Delivering=False/TimedOut", "TimedOut"},
		{"discards", "Accepted=True/Accepted Ready=True/DiscardAhead Delivering=True/Delivering", "DiscardAhead"},
		{"suspended, and discards", "Accepted=True/Suspended Ready=True/DiscardAhead Delivering=False/Suspended", "DiscardAhead"},
		{"a suspended destination", "Accepted=True/Suspended Ready=True/Ready Delivering=False/Suspended", "Suspended"},
		{"a suspended Source", "Accepted=True/Suspended Ready=True/Ready Receiving=False/Suspended", "Suspended"},
		{"rejected calls", "Accepted=True/Accepted Ready=True/Ready Receiving=False/RejectingCalls", "RejectingCalls"},
		{"no call yet", "Accepted=True/Accepted Ready=True/Ready Receiving=Unknown/NoTrafficYet", "NoTrafficYet"},
		{"a rejected sync", "Accepted=True/Accepted Ready=True/Ready Synced=False/SyncRefused", "SyncRefused"},
		{"everything is well", "Accepted=True/Accepted Ready=True/Ready Delivering=True/Delivering", "Ready"},
		{"a run in progress", "Accepted=True/Accepted Complete=False/Running Failed=False/Running Ready=False/Running", "Running"},
		{"a completed run", "Accepted=True/Accepted Complete=True/Counted Failed=False/Counted Ready=True/Counted", "Counted"},
		{"a condition of another controller", "Ready=True/Ready Example=False/Wrong Delivering=True/Delivering", "Ready"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var conditions []metav1.Condition
			for word := range strings.FieldsSeq(test.conditions) {
				conditionType, rest, _ := strings.Cut(word, "=")
				status, reason, _ := strings.Cut(rest, "/")
				conditions = append(conditions, metav1.Condition{Type: conditionType, Status: metav1.ConditionStatus(status), Reason: reason})
			}
			for range conditions { // The order of the list has no meaning.
				conditions = slices.Concat(conditions[1:], conditions[:1])
				if got := Worst(conditions); got.Reason != test.want {
					t.Errorf("got %q, want %q", got.Reason, test.want)
				}
			}
			if got := Worst(conditions); len(conditions) == 0 && got != nil {
				t.Errorf("got %v, want nil", got)
			}
		})
	}
}
