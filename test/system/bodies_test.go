package system

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// get returns the answer of the admin API.
func (p *posthorn) get(path string) (int, string) {
	p.T.Helper()
	resp, err := http.Get("http://" + p.Admin + path)
	if err != nil {
		p.T.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		p.T.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// Only the paths of bodies have bodies, and each read, redelivery and purge leaves a line in the log.
func TestBodiesAndTheAuditLog(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusUnprocessableEntity })
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	for i := range 3 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"hush-user","event":"E","messageId":"m%d"}`, i))
	}
	p.ledger("crm")
	_, list := p.get("/deadletters?destination=default/crm")
	var letter adminapi.DeadLetter
	if err := json.NewDecoder(strings.NewReader(list)).Decode(&letter); err != nil {
		t.Fatalf("list %q: got error %v, want JSON", list, err)
	}
	_, trace := p.get("/trace?id=m0")
	_, shown := p.get("/deadletters/" + letter.Key + "?destination=default/crm")
	_, attempts := p.get("/attempts?destination=default/crm")
	_, page := p.get("/?q=m0")
	for name, text := range map[string]string{"list": list, "trace": trace, "one dead letter": shown, "attempts": attempts,
		"status page": page} {
		if strings.Contains(text, "hush-user") {
			t.Errorf("%s: got the user of a message\n%s", name, text)
		}
	}
	if log := p.Output.String(); strings.Contains(log, "audit: ") {
		t.Errorf("log before the first body: got an audit line:\n%s", log)
	}
	if status, text := p.get("/bodies/deadletters/" + letter.Key + "?destination=default/crm"); status != http.StatusOK ||
		!strings.Contains(text, "hush-user") {
		t.Errorf("body: got %d %s, want the message", status, text)
	}
	for _, args := range [][]string{{"redeliver", "crm", "--all", "--dry-run"}, {"purge", "crm", letter.Key, "--yes"},
		{"redeliver", "crm", "--all"}} {
		if out, errs, code := cli(t, "", append(append([]string{"deadletters"}, args...), "--admin", p.Admin)...); code != 0 {
			t.Fatalf("%v: got exit code %d, want 0: %s%s", args, code, out, errs)
		}
	}
	var lines []string
	wait.For(p.T, "three audit lines", func() error {
		lines = nil
		for line := range strings.Lines(p.Output.String()) {
			if at := strings.Index(line, `msg="audit: `); at >= 0 {
				line = regexp.MustCompile(`127\.0\.0\.1:\d+`).ReplaceAllString(strings.TrimSpace(line[at:]), "ADDRESS")
				lines = append(lines, strings.ReplaceAll(line, letter.Key, "KEY"))
			}
		}
		if len(lines) < 3 {
			return fmt.Errorf("got %q", lines)
		}
		return nil
	})
	check.Same(t, "audit lines", lines, []string{
		`msg="audit: body of a dead letter read" user=unauthenticated remoteAddr=ADDRESS destination=default/crm key=KEY messageId=m0`,
		`msg="audit: dead letters purged" user=unauthenticated remoteAddr=ADDRESS destination=default/crm matched=1 processed=1`,
		`msg="audit: dead letters redelivered" user=unauthenticated remoteAddr=ADDRESS destination=default/crm matched=2 processed=2`,
	})
}

// tail --forward-to sends the body of each attempt to another receiver, signed with its own secret, and
// without the headers of the destination.
func TestTailForwardTo(t *testing.T) {
	production, developer := newReceiver(t), newReceiver(t)
	developer.secret = "test-secret"
	production.set(func(n int) int { return http.StatusOK })
	p := start(t, map[string]string{
		"source.yaml": source(),
		"crm.yaml": strings.Replace(destination("crm", production.URL, ""), "    url:", `    headers:
    - {name: Authorization, value: hush-header}
    url:`, 1),
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, "tail", "crm", "--forward-to", developer.URL+"/hook", "--secret-value", "test-secret",
		"-o", "json",
		"--admin", p.Admin)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	wait.For(p.T, "a reader of bodies", func() error {
		if !strings.Contains(p.Output.String(), "audit: reading of bodies started") {
			return fmt.Errorf("the log has no audit line")
		}
		return nil
	})
	for i := range 20 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	sent, got := p.arrive(production, 20), p.arrive(developer, 20)
	check.Equal(t, "requests to the developer without a valid signature", developer.unsigned, 0)
	bodies := func(requests []request) map[string]string {
		m := map[string]string{}
		for _, q := range requests {
			m[q.id()] = q.body
		}
		return m
	}
	check.Same(t, "bodies of both receivers", bodies(got), bodies(sent))
	for _, q := range got {
		if q.path != "/hook" || q.header.Get("Authorization") != "" || q.header.Get("Idempotency-Key") != q.id() {
			t.Errorf("request to the developer: got path %s and headers %v, want /hook, no Authorization and the messageId", q.path, q.header)
		}
	}
	in := bufio.NewScanner(stdout)
	for range 20 {
		var line struct {
			ForwardStatus int             `json:"forwardStatus"`
			Body          json.RawMessage `json:"body"`
		}
		if !in.Scan() {
			t.Fatalf("output: got its end, want 20 lines; error %v", in.Err())
		}
		if err := json.Unmarshal(in.Bytes(), &line); err != nil || line.ForwardStatus != http.StatusOK || line.Body != nil {
			t.Errorf("line %s: got error %v, want status 200 and no body", in.Bytes(), err)
		}
	}
	cancel()
	_ = cmd.Wait()
	wait.For(p.T, "the end of the reader", func() error {
		if !regexp.MustCompile(`audit: reading of bodies ended.* bodies=20`).MatchString(p.Output.String()) {
			return fmt.Errorf("the log has no audit line with 20 bodies")
		}
		return nil
	})
	p.ledger("crm")
}
