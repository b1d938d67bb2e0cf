package system

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/jobs/notices"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// notice is the body of a notice.
type notice struct {
	Type, Event, MessageID string
	Properties             notices.Properties
}

// distinct returns the notices that a receiver got, without repeated deliveries, in the order of arrival.
func distinct(t *testing.T, r *receiver) (list []notice) {
	t.Helper()
	seen := map[string]bool{}
	for _, q := range r.got() {
		var n notice
		check.NoError(t, "decode a notice", json.Unmarshal([]byte(q.body), &n))
		if !seen[n.MessageID] {
			seen[n.MessageID] = true
			list = append(list, n)
		}
	}
	return list
}

// Notices reach the destination that lists posthorn-notices, once for each fact, also after kills. The
// failing destination of notices causes none.
func TestNotices(t *testing.T) {
	rejecting, failing, sink, broken := newReceiver(t), newReceiver(t), newReceiver(t), newReceiver(t)
	rejecting.set(func(int) int { return http.StatusConflict }) // It never opens the circuit.
	failing.set(func(int) int { return http.StatusServiceUnavailable })
	broken.set(func(int) int { return http.StatusConflict })
	// The disk of the machine may be nearly full.
	gets := func(name, url string) string {
		return strings.Replace(destination(name, url, "  filter: {events: [Dead Letters, Circuit*]}\n"), "{name: web}",
			"{name: posthorn-notices}", 1)
	}
	p := start(t, map[string]string{
		"source.yaml": source(),
		"crm.yaml":    destination("crm", rejecting.URL, "  filter: {events: [Reject]}\n"),
		"erp.yaml":    destination("erp", failing.URL, "  filter: {events: [Fail]}\n  delivery: {retry: {initialBackoff: 10ms, maxBackoff: 50ms}}\n"),
		"loop.yaml":   gets("loop", broken.URL),
		"ops.yaml":    gets("ops", sink.URL),
	})
	p.builtIn = true
	for _, name := range []string{"crm", "erp", "loop", "ops"} {
		p.condition(name, "Ready", "True", "")
	}
	p.mustPost("/v1/track", `{"userId":"u","event":"Reject","messageId":"rejected"}`)
	p.arrive(sink, 1)
	list := distinct(t, sink)
	check.Equal(t, "notices", len(list), 1)
	check.Equal(t, "notice", fmt.Sprint(list[0].Type, " ", list[0].Event, " ", list[0].Properties.Destination, " ",
		list[0].Properties.Messages, " ", list[0].Properties.Pod), "track Dead Letters crm 1 standalone")

	for i := range 20 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"Fail","messageId":"failed-%d"}`, i))
	}
	wait.For(p.T, "an open circuit of erp, and a dead letter of loop", func() error {
		r, err := p.report()
		if err != nil {
			return err
		}
		open, dead := false, int64(0)
		for _, n := range r.Namespaces {
			for _, d := range n.Destinations {
				if d.Name == "erp" {
					open = d.Endpoints[0].State == adminapi.EndpointCircuitOpen
				}
				if d.Name == "loop" {
					dead = d.DeadLettered
				}
			}
		}
		if !open || dead == 0 {
			return fmt.Errorf("got open %v and %d dead letters", open, dead)
		}
		return nil
	})
	p.End(syscall.SIGKILL) // With or without the notice about the circuit; any point is valid.
	p.Launch()
	// The notices of a pass are in the order of the destinations' names: repeated ones about crm, and one
	// about loop of the pass before, would arrive before this one or are pending with it.
	wait.For(p.T, "the notice about the circuit", func() error {
		for _, n := range distinct(t, sink) {
			if n.Event == notices.CircuitOpened {
				return nil
			}
		}
		return fmt.Errorf("none yet")
	})
	p.ledger("ops")
	p.ledger("loop")
	var got []string
	for _, n := range distinct(t, sink) {
		check.Equal(t, "id", strings.HasPrefix(n.MessageID, "notice-"), true)
		got = append(got, n.Event+" "+n.Properties.Destination+"/"+n.Properties.Endpoint)
	}
	check.Equal(t, "notices", strings.Join(got, ", "), "Dead Letters crm/, Circuit Opened erp/primary")
	check.Equal(t, "unsigned requests", sink.unsigned, 0)
	check.Equal(t, "rejected notices", len(broken.failures()), 2)
}
