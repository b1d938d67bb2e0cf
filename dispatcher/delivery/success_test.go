package delivery

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// judging is a receiver whose responses are 2xx, with bodies by path.
type judging struct {
	*httptest.Server
	mu       sync.Mutex
	bodies   map[string]string
	requests map[string]int
}

func newJudging(t *testing.T, bodies map[string]string) *judging {
	j := &judging{bodies: bodies, requests: map[string]int{}}
	j.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.requests[r.URL.Path]++
		w.Header().Add("X-Result", "first")
		w.Header().Add("X-Result", "second")
		w.WriteHeader(http.StatusAccepted)
		_, _ = io.WriteString(w, strings.ReplaceAll(j.bodies[r.URL.Path], "ECHO", r.Header.Get("X-Signature")+" "+r.URL.RawQuery))
	}))
	t.Cleanup(j.Close)
	return j
}

func (j *judging) set(path, body string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.bodies[path] = body
}

func (j *judging) count(path string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.requests[path]
}

func succeedsIf(d liveconfig.Destination, expr string, deadLetter bool) liveconfig.Destination {
	d.SuccessRule = &liveconfig.SuccessRule{Expression: expr, DeadLetter: deadLetter}
	d.Delivery.MinBackoffMS = 1
	return d
}

// A 2xx that the expression does not accept is retried, and delivered when it does.
func TestAResponseThatIsNoSuccessIsRetried(t *testing.T) {
	j := newJudging(t, map[string]string{"/in": `{"ok":false,"error":"busy"}`})
	w := &world{T: t, store: newTestStore(t)}
	w.engine = run(t, w.store)
	w.apply(succeedsIf(dest("crm", j.URL+"/in"), "response.json.ok && headers['x-result'] == 'first' && status == 202", false))
	w.send("web", 1)
	wait.True(t, "it is retried", func() bool { return j.count("/in") >= 2 })
	f := w.report("crm").Endpoints[0].LastFailure
	check.Equal(t, "last failure", *f, adminapi.Failure{Time: f.Time, Reason: string(retry.RejectedByExpression), StatusCode: 202,
		Message: "127.0.0.1 answered 202 Accepted, but spec.success.expression does not accept the response: it is false"})
	check.Equal(t, "delivered messages before the success", w.report("crm").Delivered, int64(0))
	j.set("/in", `{"ok":true}`)
	wait.True(t, "it is delivered", func() bool { return w.report("crm").Delivered == 1 })
	attempts := w.engine.Attempts("ns/crm", "e0")
	check.Equal(t, "reason of the first attempt", attempts[0].Reason, string(retry.RejectedByExpression))
	last := attempts[len(attempts)-1]
	check.Equal(t, "reason of the last attempt", last.Reason, "")
	check.Equal(t, "dead letters", len(w.dead("crm")), 0)
	for _, a := range attempts[:len(attempts)-1] {
		if a.Response != "" { // The endpoint keeps one response.
			check.Equal(t, "kept response", a.Response, `{"ok":false,"error":"busy"}`)
		}
	}
}

// With onFalse: DeadLetter there is one request. The dead letter has the reason and the response without secrets.
func TestAResponseThatIsNoSuccessMakesADeadLetter(t *testing.T) {
	long := `{"ok":true,"pad":"` + strings.Repeat("x", 4096) + `"}`
	cases := map[string]struct{ body, message, response string }{
		"false":   {`{"ok":false,"echo":"ECHO"}`, "it is false", `{"ok":false,"echo":"[redacted] [redacted]"}`},
		"text":    {`<h1>Welcome</h1>`, "a field is missing or has another type (response.json is null: the body is not JSON)", `<h1>Welcome</h1>`},
		"empty":   {``, "a field is missing or has another type (response.json is null: there is no body)", ``},
		"long":    {long, "a field is missing or has another type (response.json is null: the body is longer than 4 KiB)", long[:1024]},
		"string":  {`{"ok":"no"}`, "its value is neither true nor false", `{"ok":"no"}`},
		"missing": {`{"error":"x"}`, "a field is missing or has another type", `{"error":"x"}`},
	}
	bodies := map[string]string{}
	for name, c := range cases {
		bodies["/"+name] = c.body
	}
	j := newJudging(t, bodies)
	w := &world{T: t, store: newTestStore(t)}
	w.engine = run(t, w.store)
	var all []liveconfig.Destination
	for name := range cases {
		d := succeedsIf(dest(name, j.URL+"/"+name+"?token=s3cr3t-token"), "response.json.ok", true)
		d.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret("s3cr3t")}}
		all = append(all, d)
	}
	w.apply(all...)
	w.send("web", 1)
	for name, c := range cases {
		wait.True(t, name+": it is a dead letter", func() bool { return len(w.dead(name)) == 1 })
		f := w.dead(name)[0].Failure
		check.Equal(t, name+": reason", f.Reason, string(retry.RejectedByExpression))
		check.Equal(t, name+": status code", f.StatusCode, 202)
		check.Equal(t, name+": message", f.Message,
			"127.0.0.1 answered 202 Accepted, but spec.success.expression does not accept the response: "+c.message)
		check.Equal(t, name+": response", string(f.Response), c.response)
		check.Equal(t, name+": requests", j.count("/"+name), 1)
		check.Equal(t, name+": dead letters in the ledger", w.report(name).DeadLettered, int64(1))
	}
	check.Equal(t, "counted dead letters", look(w, func(e *Engine) uint64 {
		return e.registry.perNamespace["ns"].dead[string(retry.RejectedByExpression)]
	}), uint64(len(cases)))
}

// Under AnyEndpoint, another endpoint can accept the message.
func TestAnotherEndpointAcceptsWhatAnExpressionRejects(t *testing.T) {
	j := newJudging(t, map[string]string{"/a": `{"ok":false}`, "/b": `{"ok":true}`})
	w := &world{T: t, store: newTestStore(t)}
	w.engine = run(t, w.store)
	w.apply(succeedsIf(dest("crm", j.URL+"/a", j.URL+"/b"), "response.json.ok", true))
	w.send("web", 3)
	wait.True(t, "all are delivered", func() bool { return w.report("crm").Delivered == 3 && j.count("/a") == 3 })
	check.Equal(t, "dead letters", len(w.dead("crm")), 0)
	check.Equal(t, "requests to the endpoint that accepts", j.count("/b"), 3)
}

// A rule that is added, changed or removed applies to the next request.
func TestAChangedRuleApplies(t *testing.T) {
	j := newJudging(t, map[string]string{"/in": `{"ok":false}`})
	w := &world{T: t, store: newTestStore(t)}
	w.engine = run(t, w.store)
	for i, step := range []struct {
		expr string
		dead int
	}{{"", 0}, {"response.json.ok", 1}, {"!response.json.ok", 1}, {"response.json.ok", 2}, {"", 2}} {
		d := dest("crm", j.URL+"/in")
		if step.expr != "" {
			d = succeedsIf(d, step.expr, true)
		}
		w.apply(d)
		w.send("web", 1)
		wait.True(t, fmt.Sprintf("step %d: all messages have an outcome", i), func() bool {
			r := w.report("crm")
			return r.Delivered+r.DeadLettered == int64(i+1)
		})
		check.Equal(t, fmt.Sprintf("dead letters after step %d", i), len(w.dead("crm")), step.dead)
	}
}

// A test event is judged as a delivery is.
func TestATestEventIsJudged(t *testing.T) {
	j := newJudging(t, map[string]string{"/in": `{"ok":false}`})
	w := &world{T: t, store: newTestStore(t)}
	w.engine = run(t, w.store)
	w.apply(succeedsIf(dest("crm", j.URL+"/in"), "response.json.ok", true))
	list, err := w.engine.SendTest(t.Context(), "ns/crm", "")
	check.NoError(t, "send a test event", err)
	check.Equal(t, "reason of the test", list[0].Reason, string(retry.RejectedByExpression))
	check.Equal(t, "response of the test", list[0].Response, `{"ok":false}`)
}
