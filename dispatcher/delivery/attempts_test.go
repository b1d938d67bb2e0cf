package delivery

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
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
				a.add(size, &adminapi.Attempt{MessageID: event.ID(fmt.Sprint(i)), Response: response}, nil)
			}
			var got []string
			for attempt := range a.oldestFirst() {
				got = append(got, attempt.Response)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("responses (-want +got):\n%s", diff)
			}
		})
	}
}

// The last failed attempt is found until later attempts have replaced it.
func TestLastFailedAttempt(t *testing.T) {
	const size = 3
	for _, c := range []struct{ attempts, want string }{
		{"", ""},
		{"..", ""},
		{"x", "m0"},
		{"xx.", "m1"},
		{"x..", "m0"},
		{"x...", ""},
		{"..xx.", "m3"},
		{"xxxx..", "m3"},
	} {
		var a attempts
		for i, result := range c.attempts {
			attempt := adminapi.Attempt{MessageID: event.ID(fmt.Sprint("m", i)), CertificateExpires: time.Now()}
			if result == 'x' {
				attempt.Reason = "Rejected"
			}
			a.add(size, &attempt, nil)
		}
		got := ""
		if failed := a.lastFailed(); failed != nil {
			got = string(failed.MessageID)
			if !failed.CertificateExpires.IsZero() {
				t.Errorf("attempts %q: got a certificate's expiry, want none", c.attempts)
			}
		}
		if got != c.want {
			t.Errorf("last failed one of the attempts %q: got %q, want %q", c.attempts, got, c.want)
		}
	}
}
