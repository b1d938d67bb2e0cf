package delivery

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
)

// An endpoint keeps the response of its last failed attempt with one, and no other.
func TestAttemptsKeepOneResponse(t *testing.T) {
	const size = 3
	for _, c := range []struct {
		name            string
		responses, want []string
	}{
		{"none", []string{"", ""}, []string{"", ""}},
		{"the last one", []string{"a", "", "b"}, []string{"", "", "b"}},
		{"an older one", []string{"a", "", ""}, []string{"a", "", ""}},
		{"overwritten", []string{"a", "", "", ""}, []string{"", "", ""}},
		{"in a full ring", []string{"a", "b", "c", "d", ""}, []string{"", "d", ""}},
		{"after an overwritten one", []string{"a", "", "", "", "b"}, []string{"", "", "b"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var a attempts
			for i, response := range c.responses {
				a.add(size, &adminapi.Attempt{MessageID: fmt.Sprint(i), Response: response})
			}
			var got []string
			for _, attempt := range a.list() {
				got = append(got, attempt.Response)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("responses (-want +got):\n%s", diff)
			}
		})
	}
}
