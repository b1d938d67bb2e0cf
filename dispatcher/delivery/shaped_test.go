package delivery

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
)

// sendCalls appends messages of the Source "web": the type, and the value of n, of each.
func (w *world) sendCalls(typ string, values ...string) {
	w.Helper()
	var msgs []queue.Message
	for _, n := range values {
		w.next++
		id := fmt.Sprint("m", w.next)
		msgs = append(msgs, queue.Message{Source: "ns/web", ID: id, Type: typ, AcceptedAt: time.Now(),
			Body: fmt.Appendf(nil, `{"type":%q,"messageId":%q,"n":%s}`, typ, id, n)})
	}
	if _, err := w.store.Append(context.Background(), msgs); err != nil {
		w.Fatal(err)
	}
}

func shaped(d liveconfig.Destination, r liveconfig.Request) liveconfig.Destination {
	d.Request = &r
	return d
}

// A request is made from the message when it is sent; the store, and the dead letter, have the original.
func TestRequestIsMadeWhenItIsSent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 503}))
		first := shaped(dest("crm", urlA), liveconfig.Request{Body: "{'n': call.n}",
			Headers: []liveconfig.RequestHeader{{Name: "X-From", Expression: "source.namespace + ' ' + source.name + ' ' + destination.name"}}})
		first.Generation = 7
		w.apply(first)
		w.sendCalls("track", "1")
		w.sleep(time.Millisecond)
		check.Equal(t, "body", w.client.requests("")[0].body, `{"n":1}`)
		check.Equal(t, "header", w.client.requests("")[0].headers.Get("X-From"), "ns web crm")
		check.Equal(t, "Idempotency-Key", w.client.requests("")[0].id(), "m1")
		check.Equal(t, "generation of the attempt", w.engine.Attempts("ns/crm", "")[0].Generation, 7)

		w.client.set(always(answer{status: 404}))
		w.client.forget()
		w.apply(shaped(dest("crm", urlA), liveconfig.Request{Body: "[call.messageId]"}))
		w.sleep(10 * time.Second)
		check.Equal(t, "body after an edit", w.client.requests("")[0].body, `["m1"]`)
		check.Equal(t, "Idempotency-Key after an edit", w.client.requests("")[0].id(), "m1")
		check.Equal(t, "body of the dead letter", string(w.dead("crm")[0].Body), `{"type":"track","messageId":"m1","n":1}`)
		w.end()
	})
}

// A message whose body is null is omitted, also while it waits for a retry; the notification of a deletion is a dead letter.
func TestNullOmitsTheMessage(t *testing.T) {
	for _, success := range []string{liveconfig.AnyEndpoint, liveconfig.EveryEndpoint} {
		bubble(t, func(t *testing.T) {
			w := newWorld(t, always(answer{status: 200}))
			d := shaped(dest("crm", urlA, urlB), liveconfig.Request{Body: "call.n > 1.0 ? call : null"})
			d.Success = success
			w.apply(d)
			w.sendCalls("track", "1", "2", "1")
			w.sendCalls("delete", "1")
			w.sleep(time.Second)
			each := map[string]int64{liveconfig.AnyEndpoint: 1, liveconfig.EveryEndpoint: 2}[success]
			r := w.report("crm")
			check.Same(t, "ledger under "+success, r.Ledger,
				adminapi.Ledger{Accepted: 3*each + 2, Delivered: each, Omitted: 2 * each, DeadLettered: 2})
			check.Equal(t, "reason of the notification's dead letter", w.dead("crm")[0].Failure.Reason, string(egress.TransformFailed))
			if text := w.dead("crm")[0].Failure.Message; !strings.Contains(text, "spec.request.body: InvalidValue: the result is null for a notification of a deletion") {
				t.Errorf("message of the dead letter: got %s", text)
			}
			w.restart()
			w.apply(d)
			w.sleep(time.Second)
			check.Same(t, "ledger after a restart", w.report("crm").Ledger, r.Ledger)
			w.end()
		})
	}
}

// While an expression fails for every message, 100 of them become dead letters. Then one a minute is tried, and the
// others wait for an edit, or for a message for which it does not fail.
func TestFailingExpressionPauses(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		d := dest("crm", urlA)
		d.Delivery.MaxInFlight = 1 // The failures have an order.
		w.apply(shaped(d, liveconfig.Request{Body: "{'n': call.n.x}"}))
		values := strings.Split(strings.Repeat("1 ", 150), " ")[:150]
		w.sendCalls("track", values...)
		w.sleep(time.Second)
		check.Equal(t, "dead letters", len(w.dead("crm")), 100)
		letter := w.dead("crm")[0].Failure
		check.Equal(t, "reason", letter.Reason, string(egress.TransformFailed))
		check.Equal(t, "failure", letter.Message, "spec.request.body: MissingField at character 13 (call.n.x): the call has no such field or element; write call.?a.?b.orValue(null), or check it with has()")
		r := w.report("crm")
		check.Equal(t, "state", r.Endpoints[0].State, adminapi.EndpointCircuitOpen)
		check.Equal(t, "reason of the endpoint", r.Endpoints[0].LastFailure.Reason, string(egress.TransformFailed))
		before := len(w.engine.Attempts("ns/crm", ""))
		w.sleep(30 * time.Minute)
		if n := len(w.engine.Attempts("ns/crm", "")); n != before {
			t.Fatalf("the ring has %d attempts; want %d", n, before)
		}
		attempts := 0
		for _, a := range w.engine.Attempts("ns/crm", "") {
			if a.Time.After(time.Now().Add(-30*time.Minute + time.Second)) {
				attempts++
			}
		}
		if attempts < 24 || attempts > 38 {
			t.Errorf("messages that were tried in 30 minutes: got %d, want about 30", attempts)
		}
		check.Equal(t, "dead letters after the tries", len(w.dead("crm")), 100)
		check.Equal(t, "requests", len(w.client.requests("")), 0)

		w.restart()
		w.apply(shaped(d, liveconfig.Request{Body: "{'n': call.n.x}"}))
		w.sleep(5 * time.Minute)
		check.Equal(t, "dead letters after a restart", len(w.dead("crm")), 100)

		w.apply(shaped(d, liveconfig.Request{Body: "{'n': call.n}"}))
		w.sleep(10 * time.Minute)
		check.Equal(t, "delivered after the edit", w.report("crm").Delivered, 50)
		check.Equal(t, "pending after the edit", w.report("crm").Pending, 0)
		w.end()
	})
}

// Messages that an expression omits, or that are delivered, are no failures: an expression that fails for some messages does
// not pause the destination. One that is omitted ends a pause.
func TestExpressionThatFailsForSome(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		d := shaped(dest("crm", urlA, urlB), liveconfig.Request{Body: "call.n == 0.0 ? dyn(null) : {'n': 1.0 / call.n, 'x': call.n > 1.0 ? call.missing : 1}"})
		d.Delivery.MaxInFlight = 1
		w.apply(d)
		for range 300 {
			w.sendCalls("track", "2", "0")
		}
		w.sleep(time.Minute)
		check.Same(t, "ledger", w.report("crm").Ledger, adminapi.Ledger{Accepted: 600, Omitted: 300, DeadLettered: 300})
		w.sendCalls("track", strings.Split(strings.Repeat("2 ", 130)+"0", " ")...)
		w.sleep(4 * time.Hour)
		w.sleep(4 * time.Hour)
		check.Equal(t, "omitted", w.report("crm").Omitted, 301)
		check.Equal(t, "pending", w.report("crm").Pending, 0)
		w.end()
	})
}
