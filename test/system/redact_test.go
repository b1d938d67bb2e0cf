package system

import (
	"bufio"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

const hashKey = "system-pseudonym-key"

// pseudonym is the hash of a value under hashKey.
func pseudonym(text string) string {
	mac := hmac.New(sha256.New, []byte(hashKey))
	mac.Write([]byte(text))
	return hex.EncodeToString(mac.Sum(nil))
}

// pseudonyms is the Secret of hashKey.
const pseudonyms = `
apiVersion: v1
kind: Secret
metadata: {name: pseudonyms}
stringData: {key: ` + hashKey + `}
`

// canaries are values that the destination redacts.
var canaries = regexp.MustCompile(`canary-[a-z]+|CANARY-[a-z]+`)

// A value that a destination redacts is in nothing that the process sends, prints or serves about it, not even if the receiver
// repeats the request in its response; the store keeps it, for a redelivery under other rules.
func TestRedactedValuesDoNotShow(t *testing.T) {
	var mu sync.Mutex
	var bodies []string
	status := http.StatusUnprocessableEntity
	echo := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		bodies = append(bodies, string(body))
		w.WriteHeader(status)
		_, _ = w.Write(body)
	}))
	t.Cleanup(echo.Close)
	last := func() string {
		mu.Lock()
		defer mu.Unlock()
		return bodies[len(bodies)-1]
	}
	archive, collector := newReceiver(t), newSpans(t)
	rules := `
    drop: [context.ip, "properties.items[*].name"]
    mask: [traits.phone, properties.phone]
    hash:
      secretKeyRef: {name: pseudonyms, key: key}
      paths: [{path: userId}, {path: traits.email, normalize: Email}]
`
	crm := func(rules string) string {
		if rules != "" {
			rules = "  redact:" + rules
		}
		return destination("crm", echo.URL, "  deadLetters: {forwardTo: {destinationRef: {name: archive}}}\n"+rules)
	}
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
	p := start(t, map[string]string{"source.yaml": source(), "pseudonyms.yaml": pseudonyms, "crm.yaml": crm(rules),
		"archive.yaml": strings.Replace(destination("archive", archive.URL, ""), "{name: web}", "{name: posthorn-dead-letters}", 1)},
		"--debug")
	p.builtIn = true
	p.condition("crm", "Ready", "True", v1beta1.ReasonReady)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	tail := exec.CommandContext(ctx, binary, "tail", "crm", "--bodies", "-o", "json", "--admin", p.Admin)
	tailed, err := tail.StdoutPipe()
	check.NoError(t, "pipe", err)
	check.NoError(t, "start tail", tail.Start())
	wait.True(t, "a reader of bodies", func() bool { return strings.Contains(p.Output.String(), "audit: reading of bodies started") })

	p.mustPost("/v1/track", `{"userId":"canary-user","event":"Paid","messageId":"m1","context":{"ip":"canary-address"},`+
		`"properties":{"phone":"canary-phone","total":1.50,"items":[{"name":"canary-item","sku":"s"}]}}`)
	p.mustPost("/v1/identify", `{"userId":"canary-user","messageId":"m2","traits":{"email":" CANARY-mail@example.org","phone":{"n":"canary-number"}}}`)
	p.ledger("crm")
	wait.True(t, "the dead letters at the archive", func() bool { return len(archive.got()) == 2 })
	lines := bufio.NewScanner(tailed)
	seen := map[string]string{}
	for i := range 2 {
		if !lines.Scan() {
			t.Fatalf("tail: got %d lines, want 2", i)
		}
		seen[fmt.Sprint("tail ", i)] = lines.Text()
	}

	letters := map[string]adminapi.DeadLetter{}
	read := func() {
		_, list := p.get("/deadletters?destination=default/crm")
		seen["dead letters"] = list
		for line := range strings.Lines(list) {
			var l adminapi.DeadLetter
			check.NoError(t, "decode "+line, json.Unmarshal([]byte(line), &l))
			letters[string(l.MessageID)] = l
			_, seen["body of "+string(l.MessageID)] = p.get("/bodies/deadletters/" + l.Key + "?destination=default/crm")
		}
		for _, path := range []string{"/attempts?destination=default/crm", "/trace?id=m1", "/trace?id=m2",
			"/trace?userId=" + pseudonym("canary-user"),
			"/report", "/metrics", "/debug/config", "/debug/lanes", "/", "/page/search?q=m1", "/page/search?q=m2",
			"/page/deadletters?destination=default/crm", "/page/destination/default/crm", "/problems"} {
			code, text := p.get(path)
			check.Equal(t, "status of "+path, code, http.StatusOK)
			seen[path] = text
		}
		for _, args := range [][]string{{"why", "crm"}, {"get", "destinations", "crm", "-o", "yaml"}, {"deadletters", "list", "crm"},
			{"deadletters", "show", "crm", letters["m1"].Key}, {"trace", "m1"}, {"attempts", "crm"}, {"status"}} {
			out, errs, code := cli(t, "", append(args, "--admin", p.Admin)...)
			if code > 1 {
				t.Errorf("%v: got exit code %d: %s", args, code, errs)
			}
			seen[strings.Join(args, " ")] = out + errs
		}
		seen["log"] = p.Output.String()
		wait.True(t, "spans of attempts", func() bool { return len(collector.of(tracev1.Span_SPAN_KIND_CLIENT)) >= 2 })
		for kind := range tracev1.Span_SPAN_KIND_CONSUMER {
			for _, span := range collector.of(kind) {
				seen["spans"] += span.String()
			}
		}
	}
	search := func(when string) {
		t.Helper()
		for _, name := range slices.Sorted(maps.Keys(seen)) {
			if found := canaries.FindString(seen[name]); found != "" {
				t.Errorf("%s, %s: got %s\n%s", when, name, found, seen[name])
			}
		}
	}
	read()
	for i, b := range append(bodies[:2:2], archive.got()[0].body, archive.got()[1].body) {
		seen[fmt.Sprint("request ", i)] = b
	}
	search("after the calls")
	for name, want := range map[string]string{"body of m1": `"properties":{"phone":"***","total":1.5,"items":[{"sku":"s"}]}`,
		"body of m2": pseudonym("canary-mail@example.org"), "request 0": pseudonym("canary-user"), "dead letters": pseudonym("canary-user"),
		"deadletters show crm " + letters["m1"].Key: pseudonym("canary-user")} {
		if text := strings.ReplaceAll(seen[name], `\"`, `"`); !strings.Contains(text, want) {
			t.Errorf("%s: got %s, want it with %s", name, seen[name], want)
		}
	}
	check.Equal(t, "unsigned requests to the archive", archive.unsigned, 0)

	// Without rules, those at the death still apply to what is shown; with other ones both, and no response is shown.
	revision := func() string {
		d, err := p.destination("crm")
		check.NoError(t, "status", err)
		return d.Status.Revision
	}
	edit := func(text string) {
		t.Helper()
		before := revision()
		p.Write("crm.yaml", text)
		wait.True(t, "another revision", func() bool { return revision() != before })
		p.condition("crm", "Programmed", "True", "")
	}
	edit(crm(""))
	read()
	search("without rules")
	edit(crm("\n    mask: [properties]\n"))
	read()
	search("with other rules")
	if body := seen["body of m1"]; !strings.Contains(body, `"properties":"***"`) {
		t.Errorf("body with other rules: got %s, want masked properties", body)
	}
	if strings.Contains(seen["dead letters"], pseudonym("canary-user")) || !strings.Contains(seen["dead letters"], "not shown") {
		t.Errorf("responses to requests under other rules: got %s, want none", seen["dead letters"])
	}

	// A redelivery is of the original, under the present rules.
	mu.Lock()
	status = http.StatusOK
	mu.Unlock()
	if out, errs, code := cli(t, "", "deadletters", "redeliver", "crm", letters["m1"].Key, "--admin", p.Admin); code != 0 {
		t.Fatalf("redeliver: got exit code %d, want 0: %s%s", code, out, errs)
	}
	wait.True(t, "the redelivery", func() bool { return strings.Contains(last(), `"messageId":"m1"`) })
	if body := last(); !strings.Contains(body, `"userId":"canary-user"`) || !strings.Contains(body, `"properties":"***"`) {
		t.Errorf("redelivered: got %s, want the original user and masked properties", body)
	}
}

// Without the Secret of its pseudonyms a destination sends nothing, and then everything redacted. A deletion notice has the
// pseudonym of the calls.
func TestRedactionWaitsForItsKey(t *testing.T) {
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, `  redact:
    hash: {secretKeyRef: {name: pseudonyms, key: key}, paths: [{path: userId}]}
`)})
	message := p.condition("crm", "ResolvedRefs", "False", v1beta1.ReasonSecretNotFound)
	if want := `spec.redact.hash.secretKeyRef: Secret "pseudonyms" does not exist`; !strings.HasPrefix(message, want) {
		t.Errorf("message: got %q, want it to begin with %q", message, want)
	}
	p.mustPost("/v1/track", `{"userId":"canary-user","event":"Paid","messageId":"m1"}`)
	p.Write("delete.yaml", `
apiVersion: posthorn.dev/v1beta1
kind: DeletionRequest
metadata: {name: gone}
spec: {userID: canary-user}
`)
	wait.True(t, "both messages wait", func() bool {
		d, err := p.destination("crm")
		return err == nil && d.Status.Delivery != nil && d.Status.Delivery.Pending == 2
	})
	check.Equal(t, "requests without the key", len(r.got()), 0)
	p.Write("pseudonyms.yaml", pseudonyms)
	for _, q := range p.arrive(r, 2) {
		if !strings.Contains(q.body, `"userId":"`+pseudonym("canary-user")+`"`) || canaries.MatchString(q.body) {
			t.Errorf("request: got %s, want the pseudonym of the user only", q.body)
		}
	}
	check.Equal(t, "unsigned requests", r.unsigned, 0)
}
