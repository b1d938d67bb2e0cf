package system

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
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
	if stdout, _, code := cli(t, "", "why", "cmr", "--admin", p.Admin); code != 1 ||
		!strings.Contains(stdout, "did you mean one of these: crm") {
		t.Errorf("why for a misspelled name: got exit code %d and %s, want 1 and a suggestion", code, stdout)
	}
}

// The receiver's answer, and a line break at the end of the secret, explain a 401.
func TestWhyUnauthorized(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusUnauthorized })
	keys := strings.Replace(source(), "sharedSecret: "+secret, `sharedSecret: "`+secret+`\n"`, 1)
	p := start(t, map[string]string{"source.yaml": keys, "crm.yaml": destination("crm", r.URL, "")})
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"m1"}`)
	p.ledger("crm")
	stdout, _, _ := cli(t, "", "why", "crm", "--admin", p.Admin)
	for _, want := range []string{"To do: let the receiver use the secret without the line break at its end", "NOTICE    Destination", "answered 401"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("why: got\n%s\nwant %q", stdout, want)
		}
	}
}

// After a kill -9, why and attempts show the last failure with the receiver's answer. The status, the report, the
// metrics and the log do not have the answer.
func TestAnswerSurvivesAKill(t *testing.T) {
	const answer = "the customer is unknown here"
	r := newReceiver(t)
	var killed atomic.Bool // Attempts that are repeated after the kill have no answer.
	r.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		if !killed.Load() {
			_, _ = w.Write([]byte(answer))
		}
	})
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	for i := range 2 { // The first failure is stored long before the second one.
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
		p.ledger("crm")
	}
	p.End(syscall.SIGKILL)
	killed.Store(true)
	p.Launch()
	wait.For(p.T, "why with the receiver's answer", func() error {
		stdout, _, _ := cli(t, "", "why", "crm", "--admin", p.Admin)
		if !strings.Contains(stdout, fmt.Sprintf("it answered %q", answer)) {
			return errors.New(stdout)
		}
		return nil
	})
	stdout, _, _ := cli(t, "", "attempts", "crm", "--admin", p.Admin, "-o", "json")
	if n := strings.Count(stdout, fmt.Sprintf(`"response":%q`, answer)); n != 1 {
		t.Errorf("attempts with the answer: got %d in\n%s\nwant 1", n, stdout)
	}
	status, _, _ := cli(t, "", "get", "destinations", "crm", "-o", "json", "--admin", p.Admin)
	_, report := p.get("/report")
	_, metrics := p.get("/metrics")
	for name, text := range map[string]string{"status": status, "report": report, "metrics": metrics, "log": p.Output.String()} {
		if text == "" || strings.Contains(text, answer) {
			t.Errorf("%s: got %q, want a text without the receiver's answer", name, text)
		}
	}
}

// A rejected manifest is visible in get, why, problems and compile, with its line and the version
// in effect.
func TestRejectedManifest(t *testing.T) {
	valid := destination("crm", "https://hooks.example/in", "")
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": valid})
	p.condition("crm", "Ready", "True", "")
	if _, stderr, code := cli(t, "", "problems", "--admin", p.Admin); code != 0 || !strings.Contains(stderr, "No problems found") {
		t.Errorf("problems without a problem: got exit code %d and %q, want 0", code, stderr)
	}

	p.Write("erp.yaml", strings.Replace(destination("erp", "https://hooks.example/in", ""), "endpoints:", "endpionts:", 1))
	p.Write("crm.yaml", strings.Replace(valid, "endpoints:", "endpionts:", 1))
	const problem = `crm.yaml:7: WebhookDestination default/crm: unknown field "spec.endpionts"; did you mean "endpoints"?`
	if message := p.condition("crm", "Ready", "False", "ManifestRejected"); !strings.Contains(message, problem) || !strings.Contains(message, "Z remains in effect") {
		t.Errorf("message of Ready: got %q, want %q and the version in effect", message, problem)
	}
	for _, c := range []struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		{[]string{"get", "destinations", "--admin", p.Admin}, 0, "ManifestRejected", problem},
		{[]string{"get", "destination", "erp", "--admin", p.Admin}, 1, "", "its manifest was rejected"},
		{[]string{"why", "crm", "--admin", p.Admin}, 1, problem, ""},
		{[]string{"why", "erp", "--admin", p.Admin}, 1, "no earlier valid version, so the object does not exist", ""},
		{[]string{"problems", "--admin", p.Admin}, 1, problem, ""},
		{[]string{"problems", "--admin", p.Admin, "-o", "json"}, 1, `"line":7`, ""},
		{[]string{"compile", "-f", p.Manifests}, 1, "", problem},
		{[]string{"compile", "-f", p.Manifests}, 1, "", "2 valid objects, 4 problems"},
	} {
		stdout, stderr, code := cli(t, "", c.args...)
		if code != c.code {
			t.Errorf("%v: got exit code %d, want %d", c.args, code, c.code)
		}
		if !strings.Contains(stdout, c.stdout) {
			t.Errorf("%v: got stdout\n%s\nwant %q", c.args, stdout, c.stdout)
		}
		if !strings.Contains(stderr, c.stderr) {
			t.Errorf("%v: got stderr\n%s\nwant %q", c.args, stderr, c.stderr)
		}
	}
	p.Write("crm.yaml", valid)
	p.condition("crm", "Ready", "True", "")
}

// A rejected manifest is a problem of every kind, with the version in effect, or with the reason why the
// object does not exist.
func TestRejectedManifestOfOtherKinds(t *testing.T) {
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", "https://hooks.example/in", "")})
	p.condition("crm", "Ready", "True", "")
	if stdout, stderr, code := cli(t, "", "why", "source/web", "--admin", p.Admin); code != 0 {
		t.Errorf("why of a valid Source: got exit code %d, want 0:\n%s%s", code, stdout, stderr)
	}
	p.Write("source.yaml", strings.Replace(source(), "writeKeys:", "writeKey:", 1))
	p.Write("vip.yaml", "apiVersion: posthorn.dev/v1beta1\nkind: Audience\nmetadata: {name: vip}\nspec: {source: web}\n")
	p.Write("broken.yaml", "kind: [\n")
	wait.For(p.T, "3 files with problems", func() error {
		stdout, _, _ := cli(t, "", "problems", "--admin", p.Admin)
		for _, file := range []string{"source.yaml:", "vip.yaml:", "broken.yaml:"} {
			if !strings.Contains(stdout, file) {
				return fmt.Errorf("got\n%s\nwant %s", stdout, file)
			}
		}
		return nil
	})
	for _, c := range []struct {
		args string
		want []string
		not  string
	}{
		{"why source/web", []string{"Source default/web: rejected ", `unknown field "spec.writeKey"; did you mean "writeKeys"?`,
			"Z remains in effect", "To do: correct the manifest.", "NOTICE    Manifest       rejected", "broken.yaml:1: not YAML"},
			"ManifestRejected"},
		{"why audience/vip", []string{"Audience default/vip: rejected ", `unknown field "spec.source"`,
			"no earlier valid version, so the object does not exist"}, "there is no Audience"},
		{"why redelivery/gone", []string{`there is no Redelivery "gone" in namespace "default"`, "NOTICE    Manifest"}, ""},
		{"why sources", []string{"source.yaml:", "broken.yaml:", "1 of 1 object in namespace default has a problem."}, "vip.yaml"},
		{"why audiences", []string{"vip.yaml:", "broken.yaml:"}, "source.yaml"},
		{"why", []string{"source.yaml:", "vip.yaml:", "broken.yaml:", "1 of 2 objects in namespace default has a problem."}, ""},
	} {
		stdout, stderr, code := cli(t, "", append(strings.Fields(c.args), "--admin", p.Admin)...)
		out := stdout + stderr
		if code != 1 {
			t.Errorf("%s: got exit code %d, want 1", c.args, code)
		}
		for _, want := range c.want {
			if !strings.Contains(out, want) {
				t.Errorf("%s: got\n%s\nwant %q", c.args, out, want)
			}
		}
		if c.not != "" && strings.Contains(out, c.not) {
			t.Errorf("%s: got\n%s\nwant no %q", c.args, out, c.not)
		}
	}
}

// After a deletion, the object that remains announces the discard of the messages of both.
func TestDiscardAheadInStatus(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusServiceUnavailable })
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"m1"}`)
	p.condition("crm", "Delivering", "False", "")
	p.remove("crm.yaml")
	wait.For(p.T, "the reason DiscardAhead of the Source", func() error {
		stdout, stderr, code := cli(t, "", "get", "source", "web", "--admin", p.Admin)
		if code != 0 || !strings.Contains(stdout, "DiscardAhead") {
			return fmt.Errorf("get: got exit code %d and\n%s%s", code, stdout, stderr)
		}
		return nil
	})
	stdout, _, code := cli(t, "", "why", "source/web", "--admin", p.Admin)
	if want := `pending messages for WebhookDestination "crm" will be discarded at `; code != 0 || !strings.Contains(stdout, want) {
		t.Errorf("why source/web: got exit code %d and\n%s\nwant 0 and %q", code, stdout, want)
	}
	p.Write("crm.yaml", destination("crm", r.URL, ""))
	wait.For(p.T, "no announcement after the destination was restored", func() error {
		if stdout, _, _ := cli(t, "", "get", "source", "web", "--admin", p.Admin); strings.Contains(stdout, "DiscardAhead") {
			return fmt.Errorf("get: got\n%s", stdout)
		}
		return nil
	})
}

// Requests with an unknown write key are visible with their sender, without the key.
func TestUnknownWriteKey(t *testing.T) {
	const wrong = "qzxv-system-write-key"
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", newReceiver(t).URL, "")})
	for range 3 {
		if status, answer, err := p.Post("/v1/track", wrong, `{"userId":"u","event":"E"}`); err != nil || status != http.StatusUnauthorized {
			t.Fatalf("call with an unknown key: got status %d, body %s and error %v, want 401", status, answer, err)
		}
	}
	const want = `3 from 127.0.0.1 with "qzxv…"`
	why, _, _ := cli(t, "", "why", "crm", "--admin", p.Admin)
	_, warnings, _ := cli(t, "", "get", "sources", "--admin", p.Admin)
	for command, text := range map[string]string{"why": why, "get sources": warnings} {
		if !strings.Contains(text, "3 requests with an unknown write key") || !strings.Contains(text, want) {
			t.Errorf("%s: got\n%s\nwant %q", command, text, want)
		}
		if strings.Contains(text, wrong[:5]) {
			t.Errorf("%s: got more than the prefix of the key:\n%s", command, text)
		}
	}
	if log := p.Output.Tail(); strings.Contains(log, wrong[:4]) {
		t.Errorf("the log has a part of the key:\n%s", log)
	}
}
