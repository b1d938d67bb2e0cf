package system

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// forwarded returns status.delivery.deadLettersForwarded of a destination.
func (p *posthorn) forwarded(name string) (int64, error) {
	d, err := p.destination(name)
	if err != nil || d.Status.Delivery == nil || d.Status.Delivery.DeadLettersForwarded == nil {
		return 0, err
	}
	return *d.Status.Delivery.DeadLettersForwarded, nil
}

// Dead letters reach the destination in forwardTo with the reason of their failure, also when
// processes are killed in between, and the ledger of the target has them.
func TestForwardedDeadLetters(t *testing.T) {
	const calls, kills = 300, 3
	broken, sink := newReceiver(t), newReceiver(t)
	broken.set(func(int) int { return http.StatusConflict }) // It never opens the circuit.
	p := start(t, map[string]string{
		"source.yaml": source(),
		"crm.yaml":    destination("crm", broken.URL, "  deadLetters: {forwardTo: {destinationRef: {name: ops}}}\n"),
	})
	p.builtIn = true
	message := p.condition("crm", "ResolvedRefs", "False", v1beta1.ReasonDestinationNotFound)
	check.Equal(t, "the message names the destination", strings.Contains(message, `"ops"`), true)
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"waits"}`)
	ops := strings.Replace(destination("ops", sink.URL, ""), "{name: web}", "{name: posthorn-dead-letters}", 1)
	p.Write("ops.yaml", ops)
	p.condition("crm", "Ready", "True", v1beta1.ReasonReady)
	for i := range kills {
		for n := range calls / kills {
			p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d-%d"}`, i, n))
		}
		time.Sleep(time.Duration(300*i) * time.Millisecond) // Any point during the forwarding is valid.
		p.End(syscall.SIGKILL)
		p.Launch()
	}
	wait.For(p.T, "all dead letters at the target", func() error {
		if got := len(sink.count()); got != calls+1 {
			return fmt.Errorf("got %d, want %d", got, calls+1)
		}
		return nil
	})
	check.Equal(t, "unsigned requests", sink.unsigned, 0)
	for _, r := range sink.got() {
		var body struct {
			Event      string `json:"event"`
			DeadLetter struct {
				Destination, Source, Reason string
				StatusCode, Attempts        int
			} `json:"deadLetter"`
		}
		check.NoError(t, "decode the body", json.Unmarshal([]byte(r.body), &body))
		d := body.DeadLetter
		check.Equal(t, "event", body.Event, "E")
		check.Equal(t, "details", fmt.Sprint(d.Destination, " ", d.Source, " ", d.Reason, " ", d.StatusCode), "crm web Rejected 409")
		check.Equal(t, "id", strings.HasPrefix(r.header.Get("Idempotency-Key"), "dead-letter-"), true)
	}
	delivered, _, dead, discarded := p.ledger("ops")
	check.Equal(t, "dead letters of the target", dead, 0)
	check.Equal(t, "discarded by the target", discarded, 0)
	// A kill makes the dispatcher repeat a delivery, a dead letter, or a page of forwarded ones.
	if delivered < calls+1 || delivered > 2*(calls+1) {
		t.Errorf("delivered to the target: got %d, want %d, or some repeated ones", delivered, calls+1)
	}
	wait.For(p.T, "the status counts them", func() error {
		n, err := p.forwarded("crm")
		if err == nil && n < calls+1 {
			err = fmt.Errorf("got %d, want at least %d", n, calls+1)
		}
		return err
	})

	// A destination that forwards cannot be a target, which stops nothing but the forwarding.
	p.Write("ops.yaml", ops+"  deadLetters: {forwardTo: {destinationRef: {name: crm}}}\n")
	message = p.condition("crm", "ResolvedRefs", "False", v1beta1.ReasonInvalidForwardTarget)
	check.Equal(t, "the message has the rule", strings.Contains(message, "forwards its own dead letters"), true)
	broken.set(nil)
	p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"delivered"}`)
	p.arrive(broken, 1)
}

// The name of a built-in Source is rejected.
func TestBuiltInSourceName(t *testing.T) {
	p := start(t, map[string]string{"source.yaml": source(),
		"reserved.yaml": strings.Replace(source()[strings.Index(source(), "---"):], "{name: web}", "{name: posthorn-dead-letters}", 1)})
	wait.For(p.T, "the manifest is rejected", func() error {
		if !strings.Contains(p.Output.Tail(), "names that begin with posthorn- are reserved for built-in Sources; choose another name") {
			return fmt.Errorf("the log does not mention it")
		}
		return nil
	})
	p.mustPost("/v1/track", `{"userId":"u","event":"E"}`)
}
