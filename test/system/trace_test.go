package system

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/wait"
)

// trace shows a message at each destination: delivered, filtered, in retry, dead, and removed.
func TestTrace(t *testing.T) {
	works, rejects, fails := newReceiver(t), newReceiver(t), newReceiver(t)
	rejects.set(func(int) int { return http.StatusUnprocessableEntity })
	fails.set(func(int) int { return http.StatusServiceUnavailable })
	p := start(t, map[string]string{
		"source.yaml": source(), "works.yaml": destination("works", works.URL, ""),
		"rejects.yaml": destination("rejects", rejects.URL, ""), "fails.yaml": destination("fails", fails.URL, ""),
		"filters.yaml": destination("filters", works.URL, "  filter: {types: [identify]}\n"),
	})
	trace := func(want int, id string, words ...string) string { // id is a messageId or --user-id.
		t.Helper()
		deadline := time.Now().Add(wait.Limit)
		for {
			stdout, stderr, code := cli(t, "", "trace", id, "--admin", p.Admin)
			text := strings.Join(strings.Fields(stdout+stderr), " ")
			missing := slices.IndexFunc(words, func(w string) bool { return !strings.Contains(text, w) })
			if code == want && missing < 0 {
				return stdout
			}
			if time.Now().After(deadline) {
				t.Fatalf("trace %s: got exit code %d, want %d and %q:\n%s%s", id, code, want, words, stdout, stderr)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	trace(1, "m1", `no message m1: it was not accepted within the duplicate window`, "--since 6h")
	p.mustPost("/v1/track", `{"userId":"u","event":"Order Completed","messageId":"m1","properties":{"note":"private"}}`)
	stdout := trace(0, "m1", `m1: track "Order Completed", accepted by Source default/web`,
		"default/works primary Delivered answered 200", "default/filters primary Filtered", "default/fails primary Retrying",
		"default/rejects primary DeadLetter see below", "Dead letter of default/rejects since", "deadletters show rejects ", "Attempts:")
	if strings.Contains(stdout, "private") || strings.Contains(stdout, secret) {
		t.Errorf("the trace has the body or the secret:\n%s", stdout)
	}
	// By userId: what is pending, and dead letters; a similar name of a property does not count.
	p.mustPost("/v1/track", `{"userId":"é\"u","event":"E","messageId":"m3"}`)
	p.mustPost("/v1/track", `{"userId":"other","event":"E","messageId":"m4","properties":{"userId":"é\"u"}}`)
	byUser := trace(0, "--user-id=é\"u", `m3: track "E", accepted by Source default/web`, "default/works primary Delivered answered 200",
		"default/fails primary Retrying", "Dead letter of default/rejects with message m3")
	if strings.Contains(byUser, "m1") || strings.Contains(byUser, "m4") {
		t.Errorf("trace --user-id: got messages of other users:\n%s", byUser)
	}
	trace(0, "--user-id=u", "m1: track")
	trace(1, "--user-id=v", "no message of user v")
	for range 101 {
		p.mustPost("/v1/track", `{"userId":"busy","event":"E"}`)
	}
	trace(0, "--user-id=busy", "not complete: the search ended after 1", "accepted at", "with a shorter --since")
	wait.For(p.T, "m1 between two attempts, as JSON", func() error {
		stdout, _, _ := cli(t, "", "trace", "m1", "--admin", p.Admin, "-o", "json")
		for _, want := range []string{`"messageId":"m1"`, `"state":"Retrying"`, `"nextAttempt":"20`, `"type":"track"`} {
			if !strings.Contains(stdout, want) {
				return fmt.Errorf("got\n%s\nwant %q", stdout, want)
			}
		}
		return nil
	})

	// After a restart the attempts are forgotten, and the rest is known.
	p.End(syscall.SIGTERM) // After kill -9 the last delivery may be repeated, and is then remembered.
	p.Launch()
	trace(0, "m1", "default/rejects primary DeadLetter", "default/works primary Ended", "default/fails primary Retrying")
	if _, stderr, code := cli(t, "", "trace", "m1", "--since", "-1s", "--admin", p.Admin); code != 2 || !strings.Contains(stderr, "--since") {
		t.Errorf("trace --since -1s: got exit code %d and %s, want 2", code, stderr)
	}
	trace(1, "m2", "no message m2")
}
