package system

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/wait"
)

// why prints the cause and the action.
func TestWhy(t *testing.T) {
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL+"/secret-path", "")})
	why := func(want int, words ...string) {
		t.Helper()
		deadline := time.Now().Add(wait.Limit)
		for {
			stdout, stderr, code := cli(t, "", "why", "crm", "--admin", p.Admin)
			ok := code == want && !strings.Contains(stdout, "secret-path")
			for _, w := range words {
				ok = ok && strings.Contains(stdout, w)
			}
			if ok {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("why: got exit code %d, want %d and %q:\n%s%s", code, want, words, stdout, stderr)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	why(1, `no call has ever been accepted for Source "web"`, "write key")
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"m1"}`)
	p.arrive(r, 1)
	why(0, "no problem found", "1 message delivered so far")
	r.set(func(int) int { return http.StatusServiceUnavailable })
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"m2"}`)
	why(1, "ServerError", "receiver's log", "1 message pending")
	if stdout, _, code := cli(t, "", "why", "cmr", "--admin", p.Admin); code != 1 || !strings.Contains(stdout, "did you mean one of these: crm") {
		t.Errorf("why for a misspelled name: got exit code %d and %s, want 1 and a suggestion", code, stdout)
	}
}
