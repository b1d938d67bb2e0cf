package system

import (
	"encoding/json"
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

	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/process"
)

// The main job: every type of call arrives as specified, and a receiver in
// JavaScript that stringifies what it parsed finds every signature authentic.
func TestEveryTypeArrivesSignedAndVerifiesInJavaScript(t *testing.T) {
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
		if q.path != "/in" || q.header.Get("User-Agent") != "Posthorn/1.0" || q.header.Get("Content-Type") != "application/json" {
			t.Errorf("path %s, headers %v", q.path, q.header)
		}
		var m map[string]any
		if err := json.Unmarshal([]byte(q.body), &m); err != nil {
			t.Fatal(err)
		}
		if m["version"] != 1.0 || m["type"] == nil || m["context"] == nil && m["type"] == "screen" {
			t.Errorf("message lacks specified fields: %s", q.body)
		}
		if _, err := time.Parse("2006-01-02T15:04:05.000Z", fmt.Sprint(m["timestamp"])); err != nil {
			t.Errorf("timestamp: %v", err)
		}
		if m["type"] == "alias" && (m["Previous ID"] != "a1" || m["User ID"] != "u1" || m["previousId"] != "a1" || m["userId"] != "u1") {
			t.Errorf("alias: %s", q.body)
		}
		delete(calls, fmt.Sprint(m["type"]))
	}
	if len(calls) > 0 {
		t.Errorf("these types did not arrive: %v", calls)
	}
	verifyInNode(t, got)
	if _, _, dead, _ := p.ledger("crm"); dead != 0 {
		t.Errorf("%d dead letters", dead)
	}
	p.condition("crm", "Ready", "True", "")
	p.condition("crm", "Delivering", "True", "")
}

func verifyInNode(t *testing.T, requests []request) {
	t.Helper()
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("node is not on PATH; the signature check in JavaScript needs it")
	}
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
		t.Errorf("in JavaScript: %v\n%s", err, out)
	}
}

// kill -9 in a loop under load: every call that was answered 200 arrives, and
// what arrives twice is bounded by what was in flight.
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
				status, _, err := p.post("/v1/batch", key, `{"batch":[`+strings.Join(calls, ",")+`]}`)
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
		p.eventually("calls are acknowledged", func() error {
			if total() < before+200 {
				return fmt.Errorf("%d of 200", total()-before)
			}
			return nil
		})
		p.kill(syscall.SIGKILL)
		p.run()
	}
	close(stop)
	senders.Wait()
	p.ledger("crm")
	count := r.count()
	lost, twice := 0, 0
	for id := range acknowledged {
		if count[id] == 0 {
			lost++
		}
	}
	for _, n := range count {
		twice += n - 1
	}
	t.Logf("%d rounds: %d acknowledged, %d lost, %d delivered again", rounds, len(acknowledged), lost, twice)
	if lost > 0 {
		t.Errorf("%d of %d acknowledged calls were lost", lost, len(acknowledged))
	}
	// In flight (64) plus what was acknowledged within one flush interval, per kill.
	if limit := rounds * 2000; twice > limit {
		t.Errorf("%d deliveries were repeated; at most %d are explained by what was in flight", twice, limit)
	}
}

func TestMissingSecretHoldsAndNeverSendsUnsigned(t *testing.T) {
	r, other := newReceiver(t), newReceiver(t)
	p := start(t, map[string]string{
		"source.yaml": source(),
		"crm.yaml":    strings.Replace(destination("crm", r.URL, ""), "{name: keys, key: sharedSecret}", "{name: later, key: sharedSecret}", 1),
		"ok.yaml":     destination("ok", other.URL, ""),
	})
	if m := p.condition("crm", "ResolvedRefs", "False", "SecretNotFound"); !strings.Contains(m, "later") || !strings.Contains(m, "signing") {
		t.Errorf("the message does not name the Secret and the field: %s", m)
	}
	p.condition("crm", "Ready", "False", "SecretNotFound")
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"kept"}`)
	p.arrive(other, 1) // one bad destination does not harm another
	if n := len(r.got()); n > 0 {
		t.Fatalf("%d messages were sent without the secret", n)
	}
	p.write("later.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: later}\nstringData: {sharedSecret: "+secret+"}\n")
	p.arrive(r, 1)
	p.condition("crm", "Ready", "True", "")
	if r.unsigned > 0 {
		t.Errorf("%d messages had no valid signature", r.unsigned)
	}
}

func TestChangesTakeEffectWithoutRestart(t *testing.T) {
	first, second := newReceiver(t), newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", first.URL, "")})
	p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
	p.arrive(first, 1)

	// Another URL and a header.
	p.write("crm.yaml", strings.Replace(destination("crm", second.URL, ""), "  signing:", "    headers: [{name: X-Env, value: prod}]\n  signing:", 1))
	p.eventually("messages go to the new URL", func() error {
		p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
		if len(second.got()) == 0 {
			return fmt.Errorf("none yet")
		}
		return nil
	})
	if h := second.got()[0].header.Get("X-Env"); h != "prod" {
		t.Errorf("X-Env is %q", h)
	}

	// The secret, edited in place.
	second.mu.Lock()
	second.secret = "rotated"
	second.mu.Unlock()
	p.write("source.yaml", strings.Replace(source(), secret, "rotated", 1))
	p.eventually("messages carry the new signature", func() error {
		p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
		for _, q := range second.got() {
			if q.header.Get("X-Signature") == digest("rotated", q.body) {
				return nil
			}
		}
		return fmt.Errorf("none yet")
	})

	// A manifest that is broken changes nothing.
	p.write("crm.yaml", "kind: [")
	n := len(second.got())
	p.eventually("deliveries go on with the last good manifest", func() error {
		p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
		if len(second.got()) < n+3 {
			return fmt.Errorf("%d", len(second.got())-n)
		}
		return nil
	})
}

func TestDisabledKeepsMessagesAndDeliversThemLater(t *testing.T) {
	r := newReceiver(t)
	off := strings.Replace(destination("crm", r.URL, ""), "spec:", "spec:\n  enabled: false", 1)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": off})
	for i := range 20 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	p.condition("crm", "Accepted", "True", "Disabled")
	p.kill(syscall.SIGTERM)
	p.run()
	if n := len(r.got()); n > 0 {
		t.Fatalf("%d messages were sent although the destination is disabled", n)
	}
	p.write("crm.yaml", destination("crm", r.URL, ""))
	p.arrive(r, 20)
	if delivered, _, _, _ := p.ledger("crm"); delivered != 20 {
		t.Errorf("%d delivered", delivered)
	}
}

// Status tells of real traffic: failing, with the reason and the endpoint; then recovered.
func TestStatusTellsOfFailureAndRecovery(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusServiceUnavailable })
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL+"/secret-path", "  delivery: {retry: {minBackoff: 10ms, maxBackoff: 50ms}}\n")})
	p.condition("crm", "Delivering", "Unknown", "NoTrafficYet")
	for i := range 15 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	m := p.condition("crm", "Delivering", "False", "")
	if !strings.Contains(m, "primary") || !strings.Contains(m, "503") {
		t.Errorf("the message does not name the endpoint and the status: %s", m)
	}
	p.condition("crm", "Ready", "True", "") // a receiver's outage is no mistake in the spec
	if out, _, _ := cli(t, "", "get", "destinations", "-o", "yaml", "--admin", p.Admin); strings.Contains(out[strings.Index(out, "status:"):], "secret-path") {
		t.Errorf("the status shows the URL's path:\n%s", out)
	}
	out, _, _ := cli(t, "", "get", "destinations", "--admin", p.Admin)
	if !strings.Contains(out, "NAME") || !strings.Contains(out, "DELIVERING") || !strings.Contains(out, "False") {
		t.Errorf("table:\n%s", out)
	}
	r.set(nil)
	p.arrive(r, 15)
	p.condition("crm", "Delivering", "True", "")
	p.ledger("crm")
	for id, n := range r.count() {
		if n != 1 {
			t.Errorf("%s was taken %d times", id, n)
		}
	}
}

// After a kill -9 with an open circuit the first report says so, and the dead
// endpoint gets one request at a time: its probes.
func TestOpenCircuitSurvivesAKill(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusServiceUnavailable })
	var mu sync.Mutex
	requests, inside, most := 0, 0, 0
	r.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		mu.Lock()
		requests, inside = requests+1, inside+1
		most = max(most, inside)
		mu.Unlock()
		time.Sleep(20 * time.Millisecond)
		r.serve(w, q)
		mu.Lock()
		inside--
		mu.Unlock()
	})
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "  delivery: {retry: {minBackoff: 10ms, maxBackoff: 50ms}}\n")})
	var calls []string
	for i := range 200 {
		calls = append(calls, fmt.Sprintf(`{"type":"track","userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	p.mustPost("/v1/batch", `{"batch":[`+strings.Join(calls, ",")+`]}`)
	p.condition("crm", "Delivering", "False", "CircuitOpen")
	for range 3 {
		p.kill(syscall.SIGKILL)
		mu.Lock()
		requests, most = 0, 0
		mu.Unlock()
		began := time.Now()
		p.run()
		report, err := p.report()
		if err != nil {
			t.Fatal(err)
		}
		if state := report.Namespaces[0].Destinations[0].Endpoints[0].State; state != liveconfig.EndpointCircuitOpen {
			t.Errorf("the first report says %s", state)
		}
		p.condition("crm", "Delivering", "False", "CircuitOpen")
		p.eventually("a probe", func() error {
			mu.Lock()
			defer mu.Unlock()
			if requests == 0 {
				return fmt.Errorf("none yet")
			}
			return nil
		})
		mu.Lock()
		// Probes are at least 0.8 s apart, each twice as late as the one before.
		if limit := 1 + int(time.Since(began)/(800*time.Millisecond)); most > 1 || requests > limit {
			t.Errorf("%d requests within %v, %d at once", requests, time.Since(began), most)
		}
		mu.Unlock()
	}
	r.set(nil)
	p.arrive(r, 200)
	p.condition("crm", "Delivering", "True", "")
}

// A damaged store is refused with the way out, which the command and the flag are.
func TestDamagedStoreIsRepaired(t *testing.T) {
	r := newReceiver(t)
	off := strings.Replace(destination("crm", r.URL, ""), "spec:", "spec:\n  enabled: false", 1)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": off})
	send := func(from int) {
		t.Helper()
		for i := range 20 {
			p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, from+i))
		}
	}
	// The list of the store's tables, flipped in its middle.
	damage := func() {
		t.Helper()
		p.kill(syscall.SIGTERM)
		manifests, err := filepath.Glob(filepath.Join(p.data, "queue", "MANIFEST-*"))
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
	if _, errs, code := cli(t, "", "run", "--manifests", p.manifests, "--data", p.data, "--listen", p.Addr, "--admin-listen", p.Admin); code != 1 || !strings.Contains(errs, "MANIFEST") || !strings.Contains(errs, "posthorn repair") {
		t.Fatalf("a damaged store: exit %d: %s", code, errs)
	}
	out, _, code := cli(t, "", "repair", "--data", p.data)
	if code != 1 || !strings.Contains(out, "damaged: "+filepath.Join(p.data, "queue", "MANIFEST")) || !strings.Contains(out, "Nothing was changed") {
		t.Errorf("dry run: exit %d: %s", code, out)
	}
	out, _, code = cli(t, "", "repair", "--data", p.data, "--apply")
	if code != 0 || !strings.Contains(out, "queue.damaged-") || !strings.Contains(out, "20 messages") || strings.Contains(out, "lost:") {
		t.Errorf("repair: exit %d: %s", code, out)
	}
	if out, _, code := cli(t, "", "repair", "--data", p.data); code != 0 || !strings.Contains(out, "No file is damaged") {
		t.Errorf("again: exit %d: %s", code, out)
	}
	p.run()
	send(20)
	damage()
	p.Args = append(p.Args, "--repair")
	p.run()
	p.write("crm.yaml", destination("crm", r.URL, ""))
	p.arrive(r, 40)
	if delivered, _, dead, discarded := p.ledger("crm"); delivered != 40 || dead+discarded != 0 {
		t.Errorf("%d delivered, %d dead, %d discarded", delivered, dead, discarded)
	}
}

func TestOneDeadDestinationDoesNotHarmAnother(t *testing.T) {
	healthy := newReceiver(t)
	hang := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) { <-q.Context().Done() }))
	t.Cleanup(hang.CloseClientConnections)
	p := start(t, map[string]string{
		"source.yaml": source(), "healthy.yaml": destination("healthy", healthy.URL, ""),
		"dead.yaml": destination("dead", "http://"+process.FreeAddr(), ""), "hang.yaml": destination("hang", hang.URL, "  delivery: {timeout: 500ms}\n"),
	})
	for i := range 500 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	p.arrive(healthy, 500)
	p.condition("healthy", "Delivering", "True", "")
	p.condition("dead", "Delivering", "False", "")
	p.condition("hang", "Delivering", "False", "")
}

func TestSelfSignedCertificateGetsNothing(t *testing.T) {
	r := &receiver{secret: secret}
	server := httptest.NewTLSServer(http.HandlerFunc(r.serve))
	t.Cleanup(server.Close)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", server.URL, "")})
	p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
	if m := p.condition("crm", "Delivering", "False", "CertificateRejected"); !strings.Contains(m, "certificate") {
		t.Error(m)
	}
	if n := len(r.got()); n > 0 {
		t.Errorf("%d requests left", n)
	}
}

func TestRejectedMessageBecomesADeadLetter(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusUnprocessableEntity })
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
	if delivered, _, dead, _ := p.ledger("crm"); delivered != 0 || dead != 1 {
		t.Errorf("%d delivered, %d dead letters", delivered, dead)
	}
}

func TestFilterAndIntegrationsKeepMessagesOut(t *testing.T) {
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
	if delivered, filtered, _, _ := p.ledger("crm"); delivered != 2 || filtered != 5 {
		t.Errorf("%d delivered, %d filtered", delivered, filtered)
	}
	if c := r.count(); c["in"] != 1 || c["named"] != 1 {
		t.Errorf("arrived: %v", c)
	}
}

func TestAnyAndEveryEndpoint(t *testing.T) {
	for _, policy := range []string{"AnyEndpoint", "EveryEndpoint"} {
		t.Run(policy, func(t *testing.T) {
			good, bad := newReceiver(t), newReceiver(t)
			bad.set(func(int) int { return http.StatusInternalServerError })
			p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": strings.Replace(
				destination("crm", good.URL, "  successPolicy: "+policy+"\n  delivery: {retry: {minBackoff: 10ms, maxBackoff: 50ms}}\n"),
				"  signing:", "  - name: second\n    url: "+bad.URL+"\n  signing:", 1)})
			for i := range 10 {
				p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
			}
			p.arrive(good, 10)
			if policy == "AnyEndpoint" {
				if delivered, _, _, _ := p.ledger("crm"); delivered != 10 {
					t.Errorf("%d delivered", delivered)
				}
				p.eventually("each message is sent to the URL that fails, too", func() error {
					if n := len(bad.failures()); n < 10 {
						return fmt.Errorf("%d messages", n)
					}
					return nil
				})
				bad.set(nil)
				time.Sleep(2 * time.Second) // Longer than an open circuit's first probe takes to come.
				if n := len(bad.got()); n > 0 {
					t.Errorf("%d messages that one URL took were sent to the other again", n)
				}
			} else {
				bad.set(nil)
				p.arrive(bad, 10)
				p.ledger("crm")
			}
			for id, n := range good.count() {
				if n != 1 {
					t.Errorf("%s reached the good URL %d times", id, n)
				}
			}
		})
	}
}

func TestAnswersOfIngest(t *testing.T) {
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	for name, tc := range map[string]struct {
		path, key, body string
		status          int
		contains        string
	}{
		"unknown key":      {"/v1/track", "nobody", `{"userId":"u","event":"E"}`, 401, `"success":false`},
		"key in the body":  {"/v1/track", "", `{"writeKey":"` + key + `","userId":"u","event":"E"}`, 200, `"success":true`},
		"not JSON":         {"/v1/track", key, `{`, 400, `invalid_json`},
		"no id":            {"/v1/track", key, `{"event":"E"}`, 400, `userId`},
		"too large":        {"/v1/track", key, `{"userId":"u","event":"E","properties":{"x":"` + strings.Repeat("x", 33<<10) + `"}}`, 413, `32`},
		"unknown path":     {"/v1/nothing", key, `{}`, 404, `"success":false`},
		"bad one in batch": {"/v1/batch", key, `{"batch":[{"type":"track","userId":"u"},{"type":"track","userId":"u","event":"E"}]}`, 200, `"rejected":[{"index":0`},
	} {
		t.Run(name, func(t *testing.T) {
			status, answer, err := p.post(tc.path, tc.key, tc.body)
			if err != nil || status != tc.status || !strings.Contains(strings.ReplaceAll(answer, `": `, `":`), tc.contains) {
				t.Errorf("%d %s %v; want %d and %s", status, answer, err, tc.status, tc.contains)
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
		"run, no manifests": {[]string{"run"}, "", 2, "", "--manifests"},
		"run, bad egress":   {[]string{"run", "--manifests", t.TempDir(), "--egress-allow", "10.0.0.0/99"}, "", 2, "", "--egress-allow"},
		"verify, authentic": {[]string{"verify", "--secret", "k", "--signature", digest("k", "body")}, "body", 0, "authentic", ""},
		"verify, changed":   {[]string{"verify", "--secret", "k", "--signature", digest("k", "body")}, "body\n", 1, "NOT AUTHENTIC", ""},
		"verify, no secret": {[]string{"verify", "--signature", "00"}, "", 2, "", "--secret"},
		"send, no type":     {[]string{"send"}, "", 2, "", "TYPE"},
		"send, nobody":      {[]string{"send", "track", "--write-key", "k", "--user", "u", "--event", "E", "--endpoint", "http://127.0.0.1:1"}, "", 1, "", "Is Posthorn running"},
		"get, nobody":       {[]string{"get", "sources", "--admin", "127.0.0.1:1"}, "", 1, "", "127.0.0.1:1"},
		"get, bad kind":     {[]string{"get", "frobs"}, "", 2, "", "frobs"},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, code := cli(t, tc.stdin, tc.args...)
			if code != tc.code || !strings.Contains(stdout, tc.stdout) || !strings.Contains(stderr, tc.stderr) {
				t.Errorf("exit %d\nstdout: %s\nstderr: %s", code, stdout, stderr)
			}
		})
	}
	for _, command := range []string{"run", "operator", "dispatcher", "get", "compile", "attempts", "tail", "deadletters", "send", "sink", "verify"} {
		stdout, _, code := cli(t, "", command, "--help")
		if code != 0 || !strings.Contains(stdout, "Usage:") || !strings.Contains(stdout, "posthorn "+command) {
			t.Errorf("%s --help: exit %d\n%s", command, code, stdout)
		}
	}
}

// Dead letters can be listed, looked at, redelivered and purged.
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
			t.Fatalf("%v: exit %d: %s%s", args, got, stdout, stderr)
		}
		return stdout + stderr
	}
	list := run(0, "deadletters", "list", "crm")
	if strings.Count(list, "Rejected") != 5 || !strings.Contains(list, "422") || !strings.Contains(list, "m4") {
		t.Errorf("list:\n%s", list)
	}
	letter := strings.Fields(strings.Split(list, "\n")[1])[0]
	shown := run(0, "deadletters", "show", "crm", letter)
	if !strings.Contains(shown, `"userId": "u"`) || !strings.Contains(shown, `"attempts": 1`) || strings.Contains(shown, "secret-path") {
		t.Errorf("show:\n%s", shown)
	}
	if out := run(2, "deadletters", "redeliver", "crm"); !strings.Contains(out, "--all") {
		t.Errorf("without a choice: %s", out)
	}
	if out := run(0, "deadletters", "redeliver", "crm", "--event", "E0", "--dry-run"); !strings.Contains(out, "3 would be redelivered") {
		t.Errorf("dry run: %s", out)
	}
	r.set(nil)
	if out := run(0, "deadletters", "redeliver", "crm", "--event", "E0"); !strings.Contains(out, "3 redelivered") {
		t.Errorf("redeliver: %s", out)
	}
	p.arrive(r, 3)
	if r.unsigned > 0 {
		t.Error("a redelivered message was not signed")
	}
	if out := run(0, "deadletters", "purge", "crm", "--all"); !strings.Contains(out, "2 removed") {
		t.Errorf("purge: %s", out)
	}
	if out := run(0, "deadletters", "list", "crm"); !strings.Contains(out, "No dead letters of default/crm.") {
		t.Errorf("after purge: %s", out)
	}
	if delivered, _, dead, _ := p.ledger("crm"); delivered != 3 || dead != 5 {
		t.Errorf("%d delivered, %d dead letters", delivered, dead)
	}
	attempts := run(0, "attempts", "crm")
	if strings.Count(attempts, "Rejected 422") != 5 || strings.Count(attempts, " 200 ") != 3 || strings.Contains(attempts, "secret-path") {
		t.Errorf("attempts:\n%s", attempts)
	}
	// Each attempt says whom it reached, and where its time went.
	address, dialled := strings.TrimPrefix(r.URL, "http://"), 0
	for line := range strings.Lines(run(0, "attempts", "crm", "-o", "json")) {
		var a delivery.Attempt
		if err := json.Unmarshal([]byte(line), &a); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if a.RemoteAddr != address || a.Timing.FirstByte <= 0 || a.Timing.Total < a.Timing.DNS+a.Timing.Connect+a.Timing.TLS+a.Timing.FirstByte {
			t.Errorf("attempt at %s: %+v", a.RemoteAddr, a.Timing)
		}
		if a.Timing.Connect > 0 {
			dialled++
		}
	}
	if dialled == 0 {
		t.Error("no attempt made a connection")
	}
	if out := run(1, "deadletters", "show", "crm", "nonsense"); !strings.Contains(out, "no dead letter nonsense") {
		t.Errorf("unknown key: %s", out)
	}
}

// What was deleted by its owner is kept for the grace period and then given up.
func TestDeletedDestinationComesBackWithinItsGraceOrIsGivenUp(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusServiceUnavailable })
	quick := "  delivery: {retry: {minBackoff: 10ms, maxBackoff: 50ms}}\n"
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, quick), "keep.yaml": "# so that the folder is not empty\n"})
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"kept"}`)
	p.condition("crm", "Delivering", "False", "")
	p.remove("crm.yaml")
	p.eventually("the destination is gone", func() error {
		if _, _, code := cli(t, "", "get", "destination", "crm", "--admin", p.Admin); code == 0 {
			return fmt.Errorf("it is still there")
		}
		return nil
	})
	r.set(nil)
	p.write("crm.yaml", destination("crm", r.URL, quick))
	p.arrive(r, 1)

	// Without a grace it is given up, and does not come back.
	p.kill(syscall.SIGTERM)
	p.Args = append(p.Args, "--orphan-grace", "1ms")
	p.run()
	r.set(func(int) int { return http.StatusServiceUnavailable })
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"given-up"}`)
	p.condition("crm", "Delivering", "False", "")
	p.remove("crm.yaml")
	p.eventually("its lane is gone", func() error {
		if !strings.Contains(p.log.String(), "lane dropped") {
			return fmt.Errorf("no word of it in the log")
		}
		return nil
	})
	r.set(nil)
	p.write("crm.yaml", destination("crm", r.URL, quick))
	p.condition("crm", "Programmed", "True", "")
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"after"}`)
	p.arrive(r, 2)
	p.ledger("crm")
	if c := r.count(); c["kept"] != 1 || c["given-up"] != 0 || c["after"] != 1 {
		t.Errorf("arrived: %v", c)
	}
	// What was given up stays on the books: of its Source always, of the destination
	// when it came back before it was forgotten.
	books := func(destination queue.Ledger, sources ...queue.Ledger) {
		t.Helper()
		p.eventually("the books tell of what was given up", func() error {
			report, err := p.report()
			if err != nil {
				return err
			}
			for i, want := range sources {
				if got := queue.Ledger(report.Namespaces[0].Sources[i].Messages); got != want {
					return fmt.Errorf("the Source's ledger is %+v, want %+v", got, want)
				}
			}
			if got := queue.Ledger(report.Namespaces[0].Destinations[0].Ledger); got != destination {
				return fmt.Errorf("the destination's ledger is %+v, want %+v", got, destination)
			}
			return nil
		})
	}
	web := queue.Ledger{Accepted: 3, Delivered: 2, Discarded: 1}
	crm := web
	if report, err := p.report(); err == nil && report.Namespaces[0].Destinations[0].Discarded == 0 {
		crm = queue.Ledger{Accepted: 1, Delivered: 1}
	}
	books(crm, web)

	// And of both, when the destination exists and gives up a Source.
	p.write("ios.yaml", `
apiVersion: v1
kind: Secret
metadata: {name: ios-keys}
stringData: {writeKey: ios-key}
---
apiVersion: posthorn.dev/v1alpha1
kind: Source
metadata: {name: ios}
spec:
  writeKeys: [{secretKeyRef: {name: ios-keys, key: writeKey}}]
`)
	p.write("crm.yaml", strings.Replace(destination("crm", r.URL, quick), "[{name: web}]", "[{name: ios}, {name: web}]", 1))
	r.set(func(int) int { return http.StatusServiceUnavailable })
	p.eventually("the other Source takes calls", func() error {
		status, answer, err := p.post("/v1/track", "ios-key", `{"userId":"u","event":"E","messageId":"ios"}`)
		if err != nil || status != http.StatusOK {
			return fmt.Errorf("%d %s %w", status, answer, err)
		}
		return nil
	})
	ios := queue.Ledger{Accepted: 1, Discarded: 1}
	both := crm.Plus(ios)
	p.write("crm.yaml", destination("crm", r.URL, quick))
	books(both, ios, web)
	p.kill(syscall.SIGKILL)
	p.run()
	books(both, ios, web)
	p.eventually("status tells of it", func() error {
		if d, err := p.destination("crm"); err != nil || d.Status.Delivery == nil || d.Status.Delivery.Discarded != both.Discarded {
			return fmt.Errorf("%+v %w", d.Status.Delivery, err)
		}
		return nil
	})
}
