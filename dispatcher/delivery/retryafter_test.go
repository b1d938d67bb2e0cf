package delivery

import (
	"slices"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/test/check"
)

// bodies returns the bodies of the requests to a URL, or to all for "".
func (w *world) bodies(url string) (all []string) {
	for _, r := range w.client.requests(url) {
		all = append(all, r.body)
	}
	return all
}

// once answers the first request for each of the bodies with a, and all others with 200.
func once(a answer, bodies ...string) func(request) answer {
	left := slices.Clone(bodies)
	return func(r request) answer {
		if i := slices.Index(left, r.body); i >= 0 {
			left = slices.Delete(left, i, i+1)
			return a
		}
		return answer{status: 200}
	}
}

// The success of a later attempt ends the wait that the receiver requested for another message, whatever the wait.
func TestSuccessEndsRequestedWaits(t *testing.T) {
	for _, a := range []answer{{status: 503, retryAfter: 24 * time.Hour}, {status: 429, retryAfter: 24 * time.Hour},
		{status: 503, retryAfter: 10 * time.Minute}} {
		for _, window := range []time.Duration{5 * time.Minute, 4 * time.Hour} {
			bubble(t, func(t *testing.T) {
				w := newWorld(t, once(a, "m1"))
				d := dest("crm", urlA)
				d.Delivery.RetryWindowMS = window.Milliseconds()
				w.apply(d)
				w.send("web", 1)
				w.sleep(3 * time.Second)
				check.Same(t, "requests before the success", w.bodies(""), []string{"m1"})
				w.send("web", 1)
				w.sleep(2 * time.Second)
				check.Same(t, "requests after the success", w.bodies(""), []string{"m1", "m2", "m1"})
				check.Equal(t, "pending", w.report("crm").Pending, 0)
				w.end()
			})
		}
	}
}

// Without a success, a message waits at most an hour, also after a restart, and at most a quarter of its window.
func TestRequestedWaitIsBounded(t *testing.T) {
	for window, most := range map[time.Duration]time.Duration{4 * time.Hour: time.Hour, 5 * time.Minute: 75 * time.Second} {
		for _, restart := range []bool{false, true} {
			bubble(t, func(t *testing.T) {
				w := newWorld(t, always(answer{status: 503, retryAfter: 24 * time.Hour}))
				d := dest("crm", urlA)
				d.Delivery.RetryWindowMS = window.Milliseconds()
				w.apply(d)
				w.send("web", 1)
				w.sleep(time.Second)
				if restart {
					w.restart()
					if err := w.engine.Apply(w.sameView(d)); err != nil {
						t.Fatal(err)
					}
				}
				w.sleep(most - 2*time.Second)
				check.Equal(t, "requests before the end of the wait", len(w.client.requests("")), 1)
				w.sleep(3 * time.Second)
				check.Equal(t, "requests after the end of the wait", len(w.client.requests("")), 2)
				w.end()
			})
		}
	}
}

// A success ends only the waits of responses before its request.
func TestEarlierAttemptEndsNoWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.apply(dest("crm", urlA))
		w.send("web", 20) // The window grows.
		w.sleep(time.Second)
		w.client.forget()
		w.client.set(func(r request) answer {
			switch r.body {
			case "m21":
				return answer{status: 200, after: 4 * time.Second}
			case "m22":
				return answer{status: 503, after: time.Second, retryAfter: time.Hour}
			}
			return answer{status: 200}
		})
		w.send("web", 2)
		w.sleep(10 * time.Second)
		check.Equal(t, "requests", len(w.client.requests("")), 2)
		check.Equal(t, "retrying", w.report("crm").Retrying, 1)
		w.client.set(always(answer{status: 200}))
		w.send("web", 1)
		w.sleep(3 * time.Second)
		check.Same(t, "requests after a later success", w.bodies("")[2:], []string{"m23", "m22"})
		w.end()
	})
}

// After a short outage the messages are sent in the order of their acceptance, through the endpoint's window.
func TestWaitsEndInOrder(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		d := dest("crm", urlA)
		d.Delivery.MaxInFlight = 1 // The order of requests that start at the same time is not known.
		w.apply(d)
		w.send("web", 20)
		w.sleep(time.Second)
		w.client.set(always(answer{status: 503, after: 10 * time.Millisecond, retryAfter: 24 * time.Hour}))
		w.send("web", 9)          // The tenth failure would open the circuit.
		w.sleep(10 * time.Second) // The backoffs have ended; those differ at random.
		check.Equal(t, "retrying", w.report("crm").Retrying, 9)
		w.client.forget()
		w.client.set(always(answer{status: 200, after: 10 * time.Millisecond}))
		w.send("web", 1)
		w.sleep(3 * time.Second)
		check.Same(t, "requests", w.bodies(""), []string{"m30", "m21", "m22", "m23", "m24", "m25", "m26", "m27", "m28", "m29"})
		check.Equal(t, "most in flight", w.client.most[urlA], 1)
		w.end()
	})
}

// A message that always gets a Retry-After keeps its backoff, although others succeed all the time.
func TestEndedWaitsKeepTheBackoff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, func(r request) answer {
			if r.body == "m1" {
				return answer{status: 503, retryAfter: time.Second}
			}
			return answer{status: 200}
		})
		w.apply(dest("crm", urlA))
		for range 1000 {
			w.send("web", 1)
			w.sleep(100 * time.Millisecond)
		}
		n := 0
		for _, body := range w.bodies("") {
			if body == "m1" {
				n++
			}
		}
		if n < 3 || n > 20 {
			t.Errorf("%d attempts of the message in 100 s, want 3 to 20", n)
		}
		if w.store.ends > 40 {
			t.Errorf("%d calls of EndWaits for %d attempts of a message with a wait", w.store.ends, n)
		}
		w.end()
	})
}

// Deliveries without Retry-After do not ask the store for waits.
func TestSuccessesWithoutWaitsAreFree(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.apply(dest("crm", urlA))
		w.send("web", 500)
		w.sleep(10 * time.Second)
		check.Equal(t, "delivered", w.report("crm").Delivered, 500)
		check.Equal(t, "calls of EndWaits", w.store.ends, 1)
		w.end()
	})
}

// An edit of the destination ends the waits, also one while the dispatcher was stopped.
func TestEditEndsRequestedWaits(t *testing.T) {
	for _, restart := range []bool{false, true} {
		bubble(t, func(t *testing.T) {
			w := newWorld(t, once(answer{status: 503, retryAfter: 24 * time.Hour}, "m1"))
			w.apply(dest("crm", urlA))
			w.send("web", 1)
			w.sleep(2 * time.Minute)
			if restart {
				w.restart()
			}
			w.apply(dest("crm", urlB))
			w.sleep(3 * time.Second)
			check.Same(t, "requests to the new URL", w.bodies(urlB), []string{"m1"})
			w.end()
		})
	}
}

// The waits are in the store: a success of the next process ends them.
func TestSuccessAfterARestartEndsWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, once(answer{status: 503, retryAfter: 24 * time.Hour}, "m1"))
		d := dest("crm", urlA)
		w.apply(d)
		w.send("web", 1)
		w.sleep(2 * time.Minute)
		w.restart()
		if err := w.engine.Apply(w.sameView(d)); err != nil {
			t.Fatal(err)
		}
		w.sleep(time.Minute)
		check.Same(t, "requests before a success", w.bodies(""), []string{"m1"})
		w.send("web", 1)
		w.sleep(3 * time.Second)
		check.Same(t, "requests", w.bodies(""), []string{"m1", "m2", "m1"})
		w.end()
	})
}

// A success for one Source ends the waits of another, at the same URL.
func TestWaitsEndInAllLanes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, once(answer{status: 503, retryAfter: 24 * time.Hour}, "m1"))
		d := dest("crm", urlA)
		d.Sources = []string{"web", "app"}
		w.apply(d)
		w.send("web", 1)
		w.sleep(time.Second)
		w.send("app", 1)
		w.sleep(3 * time.Second)
		check.Same(t, "requests", w.bodies(""), []string{"m1", "m2", "m1"})
		w.end()
	})
}

// Under AnyEndpoint the other URL delivers; a success of that URL ends no wait of the first one.
func TestWaitsOfOneURL(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{urlA: {status: 503, retryAfter: 24 * time.Hour}}))
		w.apply(dest("crm", urlA, urlB))
		w.send("web", 1)
		w.sleep(time.Second)
		w.send("web", 1)
		w.sleep(10 * time.Minute)
		check.Equal(t, "pending", w.report("crm").Pending, 0)
		check.Equal(t, "requests to the first URL", len(w.client.requests(urlA)), 2)
		w.end()
	})
}

// The responses that open a circuit do not postpone its first probe by an hour; responses to probes do.
func TestOutageWithRetryAfter(t *testing.T) {
	for _, test := range []struct{ outage, most time.Duration }{{3 * time.Second, 6 * time.Minute}, {20 * time.Minute, 80 * time.Minute}} {
		bubble(t, func(t *testing.T) {
			begin := time.Now()
			w := newWorld(t, func(request) answer {
				if time.Since(begin) < test.outage {
					return answer{status: 503, reason: egress.ServerError, retryAfter: 24 * time.Hour}
				}
				return answer{status: 200}
			})
			w.apply(dest("crm", urlA))
			for range 160 {
				w.send("web", 1)
				w.sleep(50 * time.Millisecond)
			}
			during := len(w.client.requests(""))
			if r := w.report("crm"); during > 20 || time.Until(r.NextAttempt) > 5*time.Minute {
				t.Errorf("%d requests during the outage, the next one in %v", during, time.Until(r.NextAttempt))
			}
			w.sleep(test.most)
			check.Equal(t, "pending", w.report("crm").Pending, 0)
			var first []string
			for _, body := range w.bodies("")[during:] {
				if !slices.Contains(first, body) {
					first = append(first, body)
				}
			}
			check.Equal(t, "messages after the outage", len(first), 160)
			w.end()
		})
	}
}

// The failure of an attempt shows the requested wait.
func TestAttemptShowsTheWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, once(answer{status: 503, retryAfter: 24 * time.Hour}, "m1"))
		w.apply(dest("crm", urlA))
		w.send("web", 2)
		w.sleep(time.Second)
		var waits []string
		for _, a := range w.engine.Attempts("ns/crm", "") {
			waits = append(waits, string(a.MessageID)+" "+a.RetryAfter.String())
		}
		check.Same(t, "waits", waits[:2], []string{"m1 24h0m0s", "m2 0s"})
		w.end()
	})
}
