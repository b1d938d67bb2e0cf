package system

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/need"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/signature"
	"github.com/posthorn/posthorn/test/wait"
)

// Every type of call is delivered as specified, and a receiver in JavaScript that
// parses and stringifies the body verifies every signature.
func TestEveryTypeIsSignedAndVerifiesInJavaScript(t *testing.T) {
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL+"/in?x=1", `
  delivery: {timeout: 5s}
`)})
	calls := map[string]string{
		"identify": `{"userId":"u1","traits":{"email":"a@example.com","name":"A <b> & \u2028 ü","plan":"pro","logins":5.0}}`,
		"track":    `{"userId":"u1","event":"Order Completed","properties":{"total":1e21,"10":"ten","2":"two","a":"\ud800"}}`,
		"page":     `{"userId":"u1","properties":{"path":"/","referrer":"","title":"Home","url":"https://shop.example/"}}`,
		"screen":   `{"anonymousId":"a1","name":"Cart","context":{"device":{"model":"X","type":"ios"}}}`,
		"group":    `{"userId":"u1","groupId":"acme","traits":{"Plan Name":"gold"}}`,
		"alias":    `{"userId":"u1","previousId":"a1"}`,
	}
	for typ, call := range calls {
		p.mustPost("/v1/"+typ, call)
	}
	got := p.arrive(r, len(calls))
	for _, q := range got {
		check.Equal(t, "path", q.path, "/in")
		check.Equal(t, "User-Agent", q.header.Get("User-Agent"), "Posthorn/1.0")
		check.Equal(t, "Content-Type", q.header.Get("Content-Type"), "application/json")
		var m map[string]any
		if err := json.Unmarshal([]byte(q.body), &m); err != nil {
			t.Fatal(err)
		}
		if m["version"] != 1.0 || m["type"] == nil || m["context"] == nil && m["type"] == "screen" {
			t.Errorf("fields: got %s, want version 1, a type, and a context for a screen call", q.body)
		}
		if _, err := time.Parse("2006-01-02T15:04:05.000Z", fmt.Sprint(m["timestamp"])); err != nil {
			t.Errorf("timestamp: got error %v, want milliseconds in UTC", err)
		}
		if m["type"] == "alias" && (m["Previous ID"] != "a1" || m["User ID"] != "u1" || m["previousId"] != "a1" || m["userId"] != "u1") {
			t.Errorf("alias: got %s, want the ids under both names", q.body)
		}
		delete(calls, fmt.Sprint(m["type"]))
	}
	if len(calls) > 0 {
		t.Errorf("types that were not delivered: got %v, want none", calls)
	}
	verifyInNode(t, got)
	_, _, dead, _ := p.ledger("crm")
	check.Equal(t, "dead letters", dead, 0)
	p.condition("crm", "Ready", "True", "")
	p.condition("crm", "Delivering", "True", "")
}

func verifyInNode(t *testing.T, requests []request) {
	t.Helper()
	node := need.Program(t, "node")
	var input []map[string]string
	for _, q := range requests {
		input = append(input, map[string]string{"body": q.body, "signature": q.header.Get("X-Signature")})
	}
	in, _ := json.Marshal(input)
	cmd := exec.Command(node, "-e", `
const crypto = require('crypto')
for (const {body, signature} of JSON.parse(require('fs').readFileSync(0, 'utf8'))) {
  const again = JSON.stringify(JSON.parse(body))
  const digest = crypto.createHmac('sha1', process.argv[1]).update(again, 'utf8').digest('hex')
  if (again !== body || digest !== signature) { console.log('not authentic:', body, again); process.exit(1) }
}`, secret)
	cmd.Stdin = strings.NewReader(string(in))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("verification in JavaScript: got error %v\n%s", err, out)
	}
}

// After repeated kill -9 under load every call that was answered 200 is delivered, and
// the number of repeated deliveries is bounded by the deliveries in flight.
func TestKillNineLosesNothing(t *testing.T) {
	rounds := 5
	if n, err := strconv.Atoi(os.Getenv("POSTHORN_KILL_ROUNDS")); err == nil {
		rounds = n
	}
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	var mu sync.Mutex
	acknowledged := map[string]bool{}
	stop := make(chan struct{})
	var senders sync.WaitGroup
	for sender := range 8 {
		senders.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				var ids, calls []string
				for j := range 5 {
					id := fmt.Sprintf("m-%d-%d-%d", sender, i, j)
					ids = append(ids, id)
					calls = append(calls, fmt.Sprintf(`{"type":"track","event":"E","userId":"u","messageId":%q}`, id))
				}
				status, _, err := p.Post("/v1/batch", key, `{"batch":[`+strings.Join(calls, ",")+`]}`)
				if err != nil || status != http.StatusOK {
					time.Sleep(5 * time.Millisecond)
					continue
				}
				mu.Lock()
				for _, id := range ids {
					acknowledged[id] = true
				}
				mu.Unlock()
			}
		})
	}
	total := func() int { mu.Lock(); defer mu.Unlock(); return len(acknowledged) }
	for range rounds {
		before := total()
		wait.For(p.T, "200 acknowledged calls", func() error {
			if total() < before+200 {
				return fmt.Errorf("%d of 200", total()-before)
			}
			return nil
		})
		p.End(syscall.SIGKILL)
		p.Launch()
	}
	close(stop)
	senders.Wait()
	p.ledger("crm")
	count := r.count()
	lost, repeated := 0, 0
	for id := range acknowledged {
		if count[id] == 0 {
			lost++
		}
	}
	for _, n := range count {
		repeated += n - 1
	}
	t.Logf("%d rounds: %d acknowledged, %d lost, %d repeated", rounds, len(acknowledged), lost, repeated)
	check.Equal(t, "lost calls", lost, 0)
	// Per kill: 64 deliveries in flight, and those within one flush interval.
	if limit := rounds * 2000; repeated > limit {
		t.Errorf("repeated deliveries: got %d, want at most %d", repeated, limit)
	}
}

func TestMissingSecretPausesTheDestination(t *testing.T) {
	r, other := newReceiver(t), newReceiver(t)
	p := start(t, map[string]string{
		"source.yaml": source(),
		"crm.yaml":    strings.Replace(destination("crm", r.URL, ""), "{name: keys, key: sharedSecret}", "{name: later, key: sharedSecret}", 1),
		"ok.yaml":     destination("ok", other.URL, ""),
	})
	if m := p.condition("crm", "ResolvedRefs", "False", "SecretNotFound"); !strings.Contains(m, "later") || !strings.Contains(m, "signing") {
		t.Errorf("message of ResolvedRefs: got %q, want the Secret and the field", m)
	}
	p.condition("crm", "Ready", "False", "SecretNotFound")
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"kept"}`)
	p.arrive(other, 1) // A failing destination does not affect another one.
	if n := len(r.got()); n > 0 {
		t.Fatalf("messages without the secret: got %d, want 0", n)
	}
	p.Write("later.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: later}\nstringData: {sharedSecret: "+secret+"}\n")
	p.arrive(r, 1)
	p.condition("crm", "Ready", "True", "")
	check.Equal(t, "messages without a valid signature", r.unsigned, 0)
}

func TestChangesTakeEffectWithoutRestart(t *testing.T) {
	first, second := newReceiver(t), newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", first.URL, "")})
	p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
	p.arrive(first, 1)

	// Another URL and a header.
	p.Write("crm.yaml", strings.Replace(destination("crm", second.URL, ""), "  signing:",
		"    headers: [{name: X-Env, value: prod}]\n  signing:", 1))
	wait.For(p.T, "a message at the new URL", func() error {
		p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
		if len(second.got()) == 0 {
			return fmt.Errorf("none yet")
		}
		return nil
	})
	check.Equal(t, "X-Env", second.got()[0].header.Get("X-Env"), "prod")

	// The secret changes in place.
	second.mu.Lock()
	second.secret = "rotated"
	second.mu.Unlock()
	p.Write("source.yaml", strings.Replace(source(), secret, "rotated", 1))
	wait.For(p.T, "a message with the new signature", func() error {
		p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
		for _, q := range second.got() {
			if q.header.Get("X-Signature") == signature.SHA1("rotated", q.body) {
				return nil
			}
		}
		return fmt.Errorf("none yet")
	})

	// A malformed manifest changes nothing.
	p.Write("crm.yaml", "kind: [")
	n := len(second.got())
	wait.For(p.T, "deliveries with the last valid manifest", func() error {
		p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
		if len(second.got()) < n+3 {
			return fmt.Errorf("%d messages, want 3", len(second.got())-n)
		}
		return nil
	})
}

func TestSuspendedDestinationKeepsMessages(t *testing.T) {
	r := newReceiver(t)
	off := strings.Replace(destination("crm", r.URL, ""), "spec:", "spec:\n  suspend: true", 1)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": off})
	for i := range 20 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	p.condition("crm", "Accepted", "True", "Suspended")
	p.End(syscall.SIGTERM)
	p.Launch()
	if n := len(r.got()); n > 0 {
		t.Fatalf("messages of a suspended destination: got %d, want 0", n)
	}
	p.Write("crm.yaml", destination("crm", r.URL, ""))
	p.arrive(r, 20)
	delivered, _, _, _ := p.ledger("crm")
	check.Equal(t, "delivered", delivered, 20)
}

// The status shows the result of real traffic: a failure with its reason and endpoint, and
// the recovery.
func TestStatusShowsFailureAndRecovery(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusServiceUnavailable })
	p := start(t, map[string]string{"source.yaml": source(),
		"crm.yaml": destination("crm", r.URL+"/secret-path", "  delivery: {retry: {initialBackoff: 10ms, maxBackoff: 50ms}}\n")})
	p.condition("crm", "Delivering", "Unknown", "NoTrafficYet")
	for i := range 15 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	m := p.condition("crm", "Delivering", "False", "")
	if !strings.Contains(m, "primary") || !strings.Contains(m, "503") {
		t.Errorf("message of Delivering: got %q, want the endpoint and the status code", m)
	}
	p.condition("crm", "Ready", "True", "") // A receiver's outage is not an error in the spec.
	if out, _, _ := cli(t, "", "get", "destinations", "-o", "yaml", "--admin", p.Admin); strings.Contains(out[strings.Index(out, "status:"):],
		"secret-path") {
		t.Errorf("the status contains the URL's path:\n%s", out)
	}
	out, _, _ := cli(t, "", "get", "destinations", "--admin", p.Admin)
	if !strings.Contains(out, "NAME") || !strings.Contains(out, "DELIVERING") || !strings.Contains(out, "False") {
		t.Errorf("table: got\n%s\nwant the columns NAME and DELIVERING, and False", out)
	}
	r.set(nil)
	p.arrive(r, 15)
	p.condition("crm", "Delivering", "True", "")
	p.ledger("crm")
	for id, n := range r.count() {
		check.Equal(t, "deliveries of "+id, n, 1)
	}
}

// After a kill -9 with an open circuit the first report has the open circuit, and the
// failing endpoint gets only probes, one at a time.
func TestOpenCircuitSurvivesAKill(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusServiceUnavailable })
	var mu sync.Mutex
	requests, inFlight, peak := 0, 0, 0
	r.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		mu.Lock()
		requests, inFlight = requests+1, inFlight+1
		peak = max(peak, inFlight)
		mu.Unlock()
		time.Sleep(20 * time.Millisecond)
		r.serve(w, q)
		mu.Lock()
		inFlight--
		mu.Unlock()
	})
	p := start(t, map[string]string{"source.yaml": source(),
		"crm.yaml": destination("crm", r.URL, "  delivery: {retry: {initialBackoff: 10ms, maxBackoff: 50ms}}\n")})
	var calls []string
	for i := range 200 {
		calls = append(calls, fmt.Sprintf(`{"type":"track","userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	p.mustPost("/v1/batch", `{"batch":[`+strings.Join(calls, ",")+`]}`)
	p.condition("crm", "Delivering", "False", "CircuitOpen")
	probed := func() {
		t.Helper()
		mu.Lock()
		before := requests
		mu.Unlock()
		wait.For(p.T, "a probe", func() error {
			mu.Lock()
			defer mu.Unlock()
			if requests == before {
				return errors.New("none yet")
			}
			return nil
		})
	}
	probed() // The open circuit is stored long before.
	for range 3 {
		p.End(syscall.SIGKILL)
		mu.Lock()
		requests, peak = 0, 0
		mu.Unlock()
		began := time.Now()
		p.Launch()
		report, err := p.report()
		if err != nil {
			t.Fatal(err)
		}
		check.Equal(t, "state in the first report", report.Namespaces[0].Destinations[0].Endpoints[0].State, adminapi.EndpointCircuitOpen)
		p.condition("crm", "Delivering", "False", "CircuitOpen")
		probed()
		mu.Lock()
		// Probes are at least 0.8 s apart, and each interval is twice the previous one.
		if limit := 1 + int(time.Since(began)/(800*time.Millisecond)); requests > limit {
			t.Errorf("requests within %v: got %d, want at most %d", time.Since(began), requests, limit)
		}
		if peak > 1 {
			t.Errorf("concurrent requests: got %d, want 1", peak)
		}
		mu.Unlock()
	}
	r.set(nil)
	p.arrive(r, 200)
	p.condition("crm", "Delivering", "True", "")
}

// A dispatcher with a damaged store does not start, and its error names the repair command.
// The command repairs the store.
func TestDamagedStoreIsRepaired(t *testing.T) {
	r := newReceiver(t)
	off := strings.Replace(destination("crm", r.URL, ""), "spec:", "spec:\n  suspend: true", 1)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": off})
	send := func(from int) {
		t.Helper()
		for i := range 20 {
			p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, from+i))
		}
	}
	// damage flips a byte in the manifest of the store.
	damage := func() {
		t.Helper()
		p.End(syscall.SIGTERM)
		manifests, err := filepath.Glob(filepath.Join(p.Data, "queue", "MANIFEST-*"))
		if err != nil || len(manifests) == 0 {
			t.Fatal(manifests, err)
		}
		newest := manifests[len(manifests)-1]
		b, err := os.ReadFile(newest)
		if err != nil {
			t.Fatal(err)
		}
		b[len(b)/2] ^= 0xff
		if err := os.WriteFile(newest, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	send(0)
	damage()
	if _, errs, code := cli(t, "", "run", "-f", p.Manifests, "--data", p.Data, "--listen", p.Addr, "--admin-listen",
		p.Admin); code != 1 || !strings.Contains(errs, "MANIFEST") || !strings.Contains(errs, "posthorn repair") {
		t.Fatalf("start with a damaged store: got exit code %d and %s, want 1, the MANIFEST and `posthorn repair`", code, errs)
	}
	out, _, code := cli(t, "", "repair", "--data", p.Data)
	if code != 1 || !strings.Contains(out, "damaged: "+filepath.Join(p.Data, "queue", "MANIFEST")) ||
		!strings.Contains(out, "Nothing was changed") {
		t.Errorf("dry run: got exit code %d and %s, want 1 and the damaged file", code, out)
	}
	out, _, code = cli(t, "", "repair", "--data", p.Data, "--apply")
	if code != 0 || !strings.Contains(out, "queue.damaged-") || !strings.Contains(out, "20 messages") || strings.Contains(out, "lost:") {
		t.Errorf("repair: got exit code %d and %s, want 0 and 20 messages without losses", code, out)
	}
	if out, _, code := cli(t, "", "repair", "--data", p.Data); code != 0 || !strings.Contains(out, "No file is damaged") {
		t.Errorf("repair of a repaired store: got exit code %d and %s, want 0 and no damage", code, out)
	}
	p.Launch()
	send(20)
	p.Write("crm.yaml", destination("crm", r.URL, ""))
	p.arrive(r, 40)
	delivered, _, dead, discarded := p.ledger("crm")
	check.Equal(t, "delivered", delivered, 40)
	check.Equal(t, "dead letters", dead, 0)
	check.Equal(t, "discarded", discarded, 0)
}

func TestFailingDestinationDoesNotAffectAnother(t *testing.T) {
	healthy := newReceiver(t)
	hang := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) { <-q.Context().Done() }))
	t.Cleanup(hang.CloseClientConnections)
	p := start(t, map[string]string{
		"source.yaml": source(), "healthy.yaml": destination("healthy", healthy.URL, ""),
		"dead.yaml": destination("dead", "http://"+process.FreeAddr(), ""),
		"hang.yaml": destination("hang", hang.URL, "  delivery: {timeout: 500ms}\n"),
	})
	for i := range 500 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	p.arrive(healthy, 500)
	p.condition("healthy", "Delivering", "True", "")
	p.condition("dead", "Delivering", "False", "")
	p.condition("hang", "Delivering", "False", "")
}

func TestSelfSignedCertificateIsRejected(t *testing.T) {
	r := &receiver{secret: secret}
	server := httptest.NewTLSServer(http.HandlerFunc(r.serve))
	t.Cleanup(server.Close)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", server.URL, "")})
	p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
	if m := p.condition("crm", "Delivering", "False", "CertificateRejected"); !strings.Contains(m, "certificate") {
		t.Errorf("message of Delivering: got %q, want one with \"certificate\"", m)
	}
	check.Equal(t, "requests", len(r.got()), 0)
}

func TestRejectedMessageBecomesADeadLetter(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusUnprocessableEntity })
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
	delivered, _, dead, _ := p.ledger("crm")
	check.Equal(t, "delivered", delivered, 0)
	check.Equal(t, "dead letters", dead, 1)
}

func TestFilterAndIntegrations(t *testing.T) {
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, `
  filter: {types: [track], events: ["Order *"], expression: "call.properties.total > 100"}
`)})
	for _, call := range []string{
		`{"type":"track","userId":"u","event":"Order Completed","messageId":"in","properties":{"total":150.5}}`,
		`{"type":"track","userId":"u","event":"Order Completed","properties":{"total":50}}`,
		`{"type":"track","userId":"u","event":"Order Completed"}`,
		`{"type":"track","userId":"u","event":"Signed Up","properties":{"total":150}}`,
		`{"type":"identify","userId":"u"}`,
		`{"type":"track","userId":"u","event":"Order Completed","properties":{"total":150},"integrations":{"All":false}}`,
		`{"type":"track","userId":"u","event":"Order Completed","messageId":"named","properties":{"total":150},"integrations":{"All":false,"Webhooks":true}}`,
	} {
		p.mustPost("/v1/batch", `{"batch":[`+call+`]}`)
	}
	delivered, filtered, _, _ := p.ledger("crm")
	check.Equal(t, "delivered", delivered, 2)
	check.Equal(t, "filtered", filtered, 5)
	check.Same(t, "deliveries by messageId", r.count(), map[string]int{"in": 1, "named": 1})
}

func TestAnyAndEveryEndpoint(t *testing.T) {
	for _, policy := range []string{"AnyEndpoint", "EveryEndpoint"} {
		t.Run(policy, func(t *testing.T) {
			good, bad := newReceiver(t), newReceiver(t)
			bad.set(func(int) int { return http.StatusInternalServerError })
			p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": strings.Replace(
				destination("crm", good.URL, "  successPolicy: "+policy+"\n  delivery: {retry: {initialBackoff: 10ms, maxBackoff: 50ms}}\n"),
				"  signing:", "  - name: second\n    url: "+bad.URL+"\n  signing:", 1)})
			for i := range 10 {
				p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
			}
			p.arrive(good, 10)
			if policy == "AnyEndpoint" {
				delivered, _, _, _ := p.ledger("crm")
				check.Equal(t, "delivered", delivered, 10)
				wait.For(p.T, "an attempt of each message at the failing URL", func() error {
					if n := len(bad.failures()); n < 10 {
						return fmt.Errorf("%d messages, want 10", n)
					}
					return nil
				})
				bad.set(nil)
				time.Sleep(2 * time.Second) // Longer than the interval before the first probe.
				check.Equal(t, "retries of messages that another URL accepted", len(bad.got()), 0)
			} else {
				bad.set(nil)
				p.arrive(bad, 10)
				p.ledger("crm")
			}
			for id, n := range good.count() {
				check.Equal(t, "deliveries of "+id+" at the working URL", n, 1)
			}
		})
	}
}

func TestIngestAnswers(t *testing.T) {
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	for name, tc := range map[string]struct {
		path, key, body string
		status          int
		contains        string
	}{
		"unknown key":      {"/v1/track", "unknown", `{"userId":"u","event":"E"}`, 401, `"success":false`},
		"key in the body":  {"/v1/track", "", `{"writeKey":"` + key + `","userId":"u","event":"E"}`, 200, `"success":true`},
		"not JSON":         {"/v1/track", key, `{`, 400, `invalid_json`},
		"no id":            {"/v1/track", key, `{"event":"E"}`, 400, `userId`},
		"too large":        {"/v1/track", key, `{"userId":"u","event":"E","properties":{"x":"` + strings.Repeat("x", 33<<10) + `"}}`, 413, `32`},
		"unknown path":     {"/v1/nothing", key, `{}`, 404, `"success":false`},
		"bad one in batch": {"/v1/batch", key, `{"batch":[{"type":"track","userId":"u"},{"type":"track","userId":"u","event":"E"}]}`, 200, `"rejected":[{"index":0`},
	} {
		t.Run(name, func(t *testing.T) {
			status, answer, err := p.Post(tc.path, tc.key, tc.body)
			if err != nil || status != tc.status || !strings.Contains(strings.ReplaceAll(answer, `": `, `":`), tc.contains) {
				t.Errorf("answer: got status %d, body %s and error %v, want status %d and a body with %s", status, answer, err, tc.status, tc.contains)
			}
		})
	}
}

func TestCommandLine(t *testing.T) {
	for name, tc := range map[string]struct {
		args   []string
		stdin  string
		code   int
		stdout string
		stderr string
	}{
		"no command":        {nil, "", 0, "signed HTTP POST", ""},
		"unknown command":   {[]string{"frobnicate"}, "", 2, "", "unknown command"},
		"unknown flag":      {[]string{"sink", "--nope"}, "", 2, "", "--nope"},
		"run, no manifests": {[]string{"run"}, "", 2, "", "-f"},
		"run, bad egress":   {[]string{"run", "-f", t.TempDir(), "--egress-allow", "10.0.0.0/99"}, "", 2, "", "--egress-allow"},
		"verify, authentic": {[]string{"verify", "--secret-value", "k", "--signature", signature.SHA1("k", "body")}, "body", 0, "authentic", ""},
		"verify, changed": {[]string{"verify", "--secret-value", "k", "--signature", signature.SHA1("k", "body")}, "body\n", 1,
			"NOT AUTHENTIC", ""},
		"verify, no secret": {[]string{"verify", "--signature", "00"}, "", 2, "", "--secret-value"},
		"send, no type":     {[]string{"send"}, "", 2, "", "TYPE"},
		"send, no server": {[]string{"send", "track", "--write-key", "k", "--user-id", "u", "--event", "E", "--address", "http://127.0.0.1:1"},
			"", 1, "", "Is Posthorn running"},
		"get, no server": {[]string{"get", "sources", "--admin", "127.0.0.1:1"}, "", 1, "", "127.0.0.1:1"},
		"get, bad kind":  {[]string{"get", "frobs"}, "", 2, "", "frobs"},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, code := cli(t, tc.stdin, tc.args...)
			if code != tc.code || !strings.Contains(stdout, tc.stdout) || !strings.Contains(stderr, tc.stderr) {
				t.Errorf("got exit code %d\nstdout: %s\nstderr: %s\nwant exit code %d, stdout with %q and stderr with %q", code, stdout, stderr, tc.code, tc.stdout, tc.stderr)
			}
		})
	}
	for _, command := range []string{"run", "operator", "dispatcher", "get", "compile", "attempts", "tail", "deadletters", "send", "sink",
		"verify"} {
		stdout, _, code := cli(t, "", command, "--help")
		if code != 0 || !strings.Contains(stdout, "Usage:") || !strings.Contains(stdout, "posthorn "+command) {
			t.Errorf("%s --help: got exit code %d and\n%s\nwant 0 and its usage", command, code, stdout)
		}
	}
}

// Dead letters can be listed, shown, redelivered and purged.
func TestDeadLettersFromTheCommandLine(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusUnprocessableEntity })
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL+"/secret-path", "")})
	for i := range 5 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E%d","messageId":"m%d"}`, i%2, i))
	}
	p.ledger("crm")
	admin := []string{"--admin", p.Admin}
	run := func(code int, args ...string) string {
		t.Helper()
		stdout, stderr, got := cli(t, "", append(args, admin...)...)
		if got != code {
			t.Fatalf("%v: got exit code %d, want %d: %s%s", args, got, code, stdout, stderr)
		}
		return stdout + stderr
	}
	list := run(0, "deadletters", "list", "crm")
	if strings.Count(list, "Rejected") != 5 || !strings.Contains(list, "422") || !strings.Contains(list, "m4") {
		t.Errorf("list: got\n%s\nwant 5 rejected messages with status 422, and m4", list)
	}
	letter := strings.Fields(strings.Split(list, "\n")[1])[0]
	shown := run(0, "deadletters", "show", "crm", letter)
	if !strings.Contains(shown, `"userId": "u"`) || !strings.Contains(shown, `"attempts": 1`) || strings.Contains(shown, "secret-path") {
		t.Errorf("show: got\n%s\nwant the user, 1 attempt and no URL path", shown)
	}
	prints := func(want string, code int, args ...string) {
		t.Helper()
		if out := run(code, args...); !strings.Contains(out, want) {
			t.Errorf("output of %v: got %q, want one with %q", args, out, want)
		}
	}
	prints("2 of 5 shown; set --limit to see more", 0, "deadletters", "list", "crm", "--limit", "2")
	prints("5 dead letters stored; 5 messages became dead letters so far", 1, "why", "crm")
	prints("--all", 2, "deadletters", "redeliver", "crm")
	prints("1 of 1 key: no such dead letter of default/crm", 1, "deadletters", "redeliver", "crm", "absent")
	prints("3 would be redelivered", 0, "deadletters", "redeliver", "crm", "--event", "E0", "--dry-run")
	r.set(nil)
	prints("3 redelivered", 0, "deadletters", "redeliver", "crm", "--event", "E0")
	p.arrive(r, 3)
	check.Equal(t, "redelivered messages without a valid signature", r.unsigned, 0)
	prints("2 removed", 0, "deadletters", "purge", "crm", "--all", "--yes")
	prints("No dead letters of default/crm.", 0, "deadletters", "list", "crm")
	prints("none stored; 5 messages became dead letters so far", 0, "why", "crm")
	delivered, _, dead, _ := p.ledger("crm")
	check.Equal(t, "delivered", delivered, 3)
	check.Equal(t, "dead letters", dead, 5)
	attempts := run(0, "attempts", "crm")
	if strings.Count(attempts, "Rejected 422") != 5 || strings.Count(attempts, " 200 ") != 3 || strings.Contains(attempts, "secret-path") {
		t.Errorf("attempts: got\n%s\nwant 5 with Rejected 422, 3 with 200, and no URL path", attempts)
	}
	// Each attempt has its remote address and the durations of its parts.
	address, dialled := strings.TrimPrefix(r.URL, "http://"), 0
	for line := range strings.Lines(run(0, "attempts", "crm", "-o", "json")) {
		var a adminapi.Attempt
		if err := json.Unmarshal([]byte(line), &a); err != nil {
			t.Fatalf("attempt %s: got error %v, want JSON", line, err)
		}
		if a.RemoteAddr != address || a.Timing.FirstByte <= 0 || a.Timing.Total < a.Timing.DNS+a.Timing.Connect+a.Timing.TLS+a.Timing.FirstByte {
			t.Errorf("attempt: got address %s and timing %+v, want %s and consistent durations", a.RemoteAddr, a.Timing, address)
		}
		if a.Timing.Connect > 0 {
			dialled++
		}
	}
	if dialled == 0 {
		t.Error("attempts with a new connection: got 0, want at least 1")
	}
	// A name that does not exist among others is an error after the others.
	mixed := run(1, "get", "destinations", "cmr", "crm")
	if !strings.Contains(mixed, "\ncrm ") || !strings.Contains(mixed, "did you mean crm?") {
		t.Errorf("get with an unknown name: got\n%s\nwant crm and a suggestion", mixed)
	}
	if out, errs, code := cli(t, "", "attempts", "crm", "--admin", p.Addr); code != 1 || !strings.Contains(errs, "this is the address for calls; set the address of the admin API (default port 8081)") {
		t.Errorf("attempts at the address for calls: got exit code %d and %s%s, want 1 and the admin address", code, out, errs)
	}
	prints("no dead letter nonsense", 1, "deadletters", "show", "crm", "nonsense")
}

// The messages of a deleted destination are kept for the grace period and then discarded.
func TestGracePeriodOfADeletedDestination(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusServiceUnavailable })
	quick := "  delivery: {retry: {initialBackoff: 10ms, maxBackoff: 50ms}}\n"
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, quick),
		"keep.yaml": "# The directory must not be empty.\n"})
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"kept"}`)
	p.condition("crm", "Delivering", "False", "")
	p.remove("crm.yaml")
	wait.For(p.T, "the removal of the destination", func() error {
		if _, _, code := cli(t, "", "get", "destination", "crm", "--admin", p.Admin); code == 0 {
			return fmt.Errorf("the destination exists")
		}
		return nil
	})
	r.set(nil)
	p.Write("crm.yaml", destination("crm", r.URL, quick))
	p.arrive(r, 1)

	// Without a grace period the messages are discarded.
	p.End(syscall.SIGTERM)
	p.Args = append(p.Args, "--orphan-grace", "1ms")
	p.Launch()
	r.set(func(int) int { return http.StatusServiceUnavailable })
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"discarded"}`)
	p.condition("crm", "Delivering", "False", "")
	p.remove("crm.yaml")
	wait.For(p.T, "the removal of its lane", func() error {
		if !strings.Contains(p.Output.String(), "lane dropped") {
			return fmt.Errorf("the log has no message about a dropped lane")
		}
		return nil
	})
	r.set(nil)
	p.Write("crm.yaml", destination("crm", r.URL, quick))
	p.condition("crm", "Programmed", "True", "")
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"after"}`)
	p.arrive(r, 2)
	p.ledger("crm")
	check.Same(t, "deliveries by messageId", r.count(), map[string]int{"kept": 1, "after": 1})
	// Discarded messages remain in the ledgers: always in the Source's, and in the
	// destination's if it was created again before its ledger was removed.
	ledgers := func(destination queue.Ledger, sources ...queue.Ledger) {
		t.Helper()
		wait.For(p.T, "discarded messages in the ledgers", func() error {
			report, err := p.report()
			if err != nil {
				return err
			}
			for i, want := range sources {
				if got := queue.Ledger(report.Namespaces[0].Sources[i].Messages); got != want {
					return fmt.Errorf("ledger of Source %d: got %+v, want %+v", i, got, want)
				}
			}
			if got := queue.Ledger(report.Namespaces[0].Destinations[0].Ledger); got != destination {
				return fmt.Errorf("ledger of the destination: got %+v, want %+v", got, destination)
			}
			return nil
		})
	}
	web := queue.Ledger{Accepted: 3, Delivered: 2, Discarded: 1}
	crm := web
	if report, err := p.report(); err == nil && report.Namespaces[0].Destinations[0].Discarded == 0 {
		crm = queue.Ledger{Accepted: 1, Delivered: 1}
	}
	ledgers(crm, web)

	// Both ledgers count them when a destination no longer selects a Source.
	// It is written before the Source, which accepts no call without it.
	p.Write("crm.yaml", strings.Replace(destination("crm", r.URL, quick), "[{name: web}]", "[{name: ios}, {name: web}]", 1))
	p.Write("ios.yaml", `
apiVersion: v1
kind: Secret
metadata: {name: ios-keys}
stringData: {writeKey: ios-key}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: ios}
spec:
  writeKeys: [{name: main, secretKeyRef: {name: ios-keys, key: writeKey}}]
`)
	r.set(func(int) int { return http.StatusServiceUnavailable })
	wait.For(p.T, "an accepted call of the other Source", func() error {
		status, answer, err := p.Post("/v1/track", "ios-key", `{"userId":"u","event":"E","messageId":"ios"}`)
		if err != nil || status != http.StatusOK {
			return fmt.Errorf("%d %s %w", status, answer, err)
		}
		return nil
	})
	ios := queue.Ledger{Accepted: 1, Discarded: 1}
	both := crm.Plus(ios)
	p.Write("crm.yaml", destination("crm", r.URL, quick))
	ledgers(both, ios, web)
	p.End(syscall.SIGKILL)
	p.Launch()
	ledgers(both, ios, web)
	wait.For(p.T, "discarded messages in the status", func() error {
		if d, err := p.destination("crm"); err != nil || d.Status.Delivery == nil || d.Status.Delivery.Discarded != both.Discarded {
			return fmt.Errorf("delivery status: got %+v and error %w, want %d discarded messages", d.Status.Delivery, err, both.Discarded)
		}
		return nil
	})
}
