package system

import (
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// A receiver returns 200 and the failure in the body: the message becomes a dead letter, status, attempts, why and metrics
// have the reason, and a redelivery after the repair is delivered.
func TestAResponseThatIsNoSuccess(t *testing.T) {
	r := newReceiver(t)
	var body atomic.Value
	body.Store(`{"ok":false,"error":"channel_not_found"}`)
	serve := r.Config.Handler
	r.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		serve.ServeHTTP(w, q)
		_, _ = io.WriteString(w, body.Load().(string))
	})
	rule := func(expr string) string {
		return destination("crm", r.URL, "  success: {expression: \""+expr+"\", onFalse: DeadLetter}\n")
	}
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": rule("response.json.ok")})
	p.condition("crm", "Programmed", "True", "")
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"m1"}`)
	delivered, _, dead, _ := p.ledger("crm")
	check.Equal(t, "delivered messages", delivered, 0)
	check.Equal(t, "dead letters", dead, 1)

	const why = "127.0.0.1 answered 200 OK, but spec.success.expression does not accept the response: it is false"
	message := p.condition("crm", "Delivering", "False", v1beta1.ReasonRejectedByExpression)
	check.Equal(t, "the condition has the message", strings.Contains(message, why), true)
	for args, want := range map[string][]string{
		"attempts crm -o json": {`"reason":"RejectedByExpression"`, why, `"statusCode":200`, "channel_not_found"},
		"deadletters list crm": {"m1", "RejectedByExpression"},
		"why crm":              {"RejectedByExpression", "channel_not_found", "To do: see the response: correct the receiver, or spec.success.expression"},
		"test crm":             {"failed: RejectedByExpression 200", "To do: see the response"},
		"deadletters redeliver crm --dry-run --reason RejectedByExpression": {"1 would be redelivered"},
	} {
		out, errs, _ := cli(t, "", append(strings.Fields(args), "--admin", p.Admin)...)
		for _, w := range want {
			if !strings.Contains(out+errs, w) {
				t.Errorf("%s: got\n%s%swant %q", args, out, errs, w)
			}
		}
	}
	_, metrics := p.get("/metrics")
	for _, want := range []string{
		`posthorn_messages_dead_lettered_total{namespace="default",reason="RejectedByExpression"} 1`,
		`posthorn_delivery_attempts_total{code="2xx",namespace="default",result="RejectedByExpression"} 1`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics: got no line %s", want)
		}
	}

	// While the expression does not compile, messages wait.
	p.Write("crm.yaml", rule("response.ok"))
	message = p.condition("crm", "Accepted", "False", v1beta1.ReasonInvalidSpec)
	check.Equal(t, "the message of Accepted", message,
		"spec.success.expression: line 1, column 9: response.ok is not known; available are status, headers and response.json")
	body.Store(`{"ok":true}`)
	before := len(r.got())
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"m2"}`)
	p.Write("crm.yaml", rule("headers[?'x-result'].orValue('') == '' && response.json.ok"))
	p.condition("crm", "Accepted", "True", "")
	wait.True(t, "the message that waited arrives", func() bool { return len(r.got()) > before })
	if out, errs, code := cli(t, "", "deadletters", "redeliver", "crm", "--reason", "RejectedByExpression", "--admin", p.Admin); code != 0 {
		t.Errorf("redeliver: got exit code %d and %s%s, want 0", code, out, errs)
	}
	wait.True(t, "both messages are delivered", func() bool {
		n, _, _, _ := p.ledger("crm")
		return n == 2
	})
	p.condition("crm", "Delivering", "True", "")
}
