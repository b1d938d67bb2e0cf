package delivery

import (
	"fmt"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/test/check"
)

// Permanent answers make dead letters until the circuit opens. Then the messages wait and are probed.
func TestPermanentAnswersOpenTheCircuit(t *testing.T) {
	long(t)
	for status, dead := range map[int]int{301: 10, 302: 10, 303: 10, 307: 10, 308: 10, 401: 10, 403: 10, 404: 10, 405: 10, 407: 10, 400: 100,
		413: 100, 415: 100, 422: 100} {
		reason := egress.Rejected
		if status < 400 {
			reason = egress.Redirected
		}
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				up := answer{status: 200, after: 10 * time.Millisecond}
				w := newWorld(t, always(up))
				w.apply(dest("crm", urlA))
				w.send("web", 1000)
				w.sleep(10 * time.Second) // The window is full.
				w.client.forget()
				w.client.set(always(answer{status: status, after: 10 * time.Millisecond}))
				w.send("web", 1000)
				w.sleep(time.Minute)
				r := w.report("crm")
				check.Equal(t, "state", r.Endpoints[0].State, adminapi.EndpointCircuitOpen)
				lost := len(w.dead("crm")) // The requests of a full window end at the same instant.
				if lost < dead || lost > dead+64 {
					t.Errorf("dead letters: got %d, want %d and at most a window more", lost, dead)
				}
				check.Equal(t, "pending messages", r.Pending, int64(1000-lost))
				check.Equal(t, "status code of a dead letter", w.dead("crm")[0].Failure.StatusCode, status)
				check.Equal(t, "reason of a dead letter", w.dead("crm")[0].Failure.Reason, string(reason))

				w.client.forget()
				w.sleep(time.Hour)
				if n := len(w.client.requests("")); n < 45 || n > 80 {
					t.Errorf("probes in an hour: got %d, want about 60", n)
				}
				check.Equal(t, "concurrent probes", w.most(""), 1)
				check.Equal(t, "dead letters after the probes", len(w.dead("crm")), lost)

				w.client.set(always(up))
				w.sleep(10 * time.Minute)
				check.Equal(t, "delivered messages after the repair", w.report("crm").Delivered, int64(2000-lost))
				w.end()
			})
		})
	}
}

// A message that waits behind an open circuit expires with its retry window, and its dead letter has
// the permanent answer.
func TestMessagesBehindAPermanentAnswerExpire(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 404}))
		d := dest("crm", urlA)
		d.Delivery.MaxInFlight = 1 // The answers have an order.
		w.apply(d)
		w.send("web", 50)
		w.sleep(4*time.Hour + 2*time.Minute)
		reasons := map[string]int{}
		for _, d := range w.dead("crm") {
			check.Equal(t, "status code of a dead letter", d.Failure.StatusCode, 404)
			reasons[d.Failure.Reason]++
		}
		check.Same(t, "dead letters by reason", reasons, map[string]int{"Rejected": 10, "Expired": 40})
		w.end()
	})
}

// An invalid message among valid ones is a dead letter at once, and the circuit remains closed.
func TestInvalidMessageAmongValidOnes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		n := 0
		w := newWorld(t, func(request) answer {
			if n++; n%9 == 0 {
				return answer{status: 200}
			}
			return answer{status: 404}
		})
		d := dest("crm", urlA)
		d.Delivery.MaxInFlight = 1 // The answers have an order.
		w.apply(d)
		w.send("web", 900)
		w.sleep(10 * time.Second)
		check.Equal(t, "dead letters", len(w.dead("crm")), 800)
		check.Equal(t, "delivered messages", w.report("crm").Delivered, 100)
		w.end()
	})
}

// An endpoint that answers 410 gets one probe an hour after a confirmation.
func TestGone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 410}))
		d := dest("crm", urlA)
		apply := func() {
			t.Helper()
			w.rev = 0 // The same config each time, as after a restart.
			w.apply(d)
		}
		apply()
		w.send("web", 100)
		w.sleep(time.Minute)
		check.Equal(t, "state", w.report("crm").Endpoints[0].State, adminapi.EndpointGone)
		check.Equal(t, "requests in the first minute", len(w.client.requests("")), 2)
		check.Equal(t, "dead letters", len(w.dead("crm")), 1)

		w.end()
		w.client.forget()
		w.restart()
		apply()
		check.Equal(t, "state after a restart", w.report("crm").Endpoints[0].State, adminapi.EndpointGone)
		w.sleep(3*time.Hour + 45*time.Minute)
		if n := len(w.client.requests("")); n < 3 || n > 4 {
			t.Errorf("probes in almost four hours: got %d, want 3 or 4", n)
		}

		w.send("web", 100)
		w.client.set(always(answer{status: 200}))
		w.apply(d) // A change triggers a probe.
		w.sleep(5 * time.Minute)
		check.Equal(t, "state after a change", w.report("crm").Endpoints[0].State, adminapi.EndpointHealthy)
		check.Equal(t, "delivered messages", w.report("crm").Delivered, 199)
		w.end()
	})
}

// A single answer 410 about one message costs a second, not an hour.
func TestOneMessageIsGone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, func(r request) answer {
			if r.body == "m7" {
				return answer{status: 410}
			}
			return answer{status: 200}
		})
		w.apply(dest("crm", urlA))
		w.send("web", 100)
		w.sleep(3 * time.Second)
		check.Equal(t, "delivered messages", w.report("crm").Delivered, 99)
		check.Equal(t, "dead letters", len(w.dead("crm")), 1)
		w.end()
	})
}

// A status code of the destination's list is retried.
func TestRetriedStatusCodes(t *testing.T) {
	for _, status := range []int{302, 404, 409, 410} {
		bubble(t, func(t *testing.T) {
			n := 0
			w := newWorld(t, func(request) answer {
				if n++; n <= 3 {
					return answer{status: status}
				}
				return answer{status: 200}
			})
			d := dest("crm", urlA)
			d.Delivery.RetryStatusCodes = []int{302, 404, 409, 410}
			w.apply(d)
			w.send("web", 1)
			w.sleep(time.Minute)
			check.Equal(t, fmt.Sprintf("messages delivered after %d", status), w.report("crm").Delivered, 1)
			check.Equal(t, fmt.Sprintf("requests with %d", status), n, 4)
			w.end()
		})
	}
}

// A message that two URLs may get waits for the one that requested no wait, also while that one is
// busy, and not for the other.
func TestRetryAfterOfOneOfTwoURLs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{
			urlA: {status: 500}, urlB: {status: 503, retryAfter: time.Hour}, urlC: {status: 200, after: time.Second},
		}))
		w.apply(dest("crm", urlA))
		w.send("web", 8)
		w.sleep(time.Second)
		d := dest("crm", urlA, urlB, urlC)
		d.Endpoints = d.Endpoints[1:] // The lane of the first URL now sends to the two others.
		w.apply(d)
		w.sleep(time.Minute)
		check.Equal(t, "delivered messages", w.report("crm").Delivered, 8)
		if n := len(w.client.requests(urlB)); n > 1 {
			t.Errorf("requests to the URL that requested a wait: got %d, want at most 1", n)
		}
		w.end()
	})
}
