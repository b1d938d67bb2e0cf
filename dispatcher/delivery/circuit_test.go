package delivery

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// While the circuit is open, pending counts messages that the filter excludes; then they are filtered.
func TestFilteredMessagesOfAnOpenCircuit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 500}))
		w.apply(dest("crm", urlA))
		w.send("web", 20)
		w.sleep(time.Minute)
		for i := range 5 {
			if _,
				err := w.store.Append(t.Context(), []queue.Message{{Source: "ns/web", ID: fmt.Sprint("f", i), AcceptedAt: time.Now(),
				Skip: []string{"ns/crm"}}}); err != nil {
				t.Fatal(err)
			}
		}
		w.sleep(time.Second)
		if r := w.report("crm"); r.Endpoints[0].State != adminapi.EndpointCircuitOpen || r.Pending != 25 || r.Filtered != 0 {
			t.Errorf("circuit open: got state %s, %d pending, %d filtered; want CircuitOpen, 25, 0", r.Endpoints[0].State, r.Pending, r.Filtered)
		}
		w.client.set(always(answer{status: 200}))
		w.sleep(10 * time.Minute)
		if r := w.report("crm"); r.Pending != 0 || r.Delivered != 20 || r.Filtered != 5 {
			t.Errorf("after recovery: got %d pending, %d delivered, %d filtered; want 0, 20, 5", r.Pending, r.Delivered, r.Filtered)
		}
		w.end()
	})
}

// While an endpoint is down it gets one probe at a time at growing intervals. After an outage
// of an hour with 100,000 pending messages its load increases gradually.
func TestOutage(t *testing.T) {
	long(t)
	for name, down := range map[string]answer{
		"refused": {reason: egress.ConnectionRefused}, "black hole": {reason: egress.TimedOut, after: time.Hour},
		"500": {status: 500, after: 10 * time.Millisecond}, "slow": {status: 200, after: 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				waiting := 5000
				if name == "500" {
					waiting = 100000 // One case is enough.
				}
				w := newWorld(t, always(answer{status: 200, after: 10 * time.Millisecond}))
				w.apply(dest("crm", urlA))
				w.send("web", 1000)
				w.sleep(10 * time.Second)
				w.client.set(always(down))
				w.send("web", waiting)
				w.sleep(time.Minute)
				if r := w.report("crm"); r.Endpoints[0].State != adminapi.EndpointCircuitOpen || r.NextAttempt.IsZero() {
					t.Errorf("a minute into the outage: %+v", r)
				}
				w.client.forget()
				leases := w.leases()
				w.sleep(time.Hour)
				probes := w.client.requests("")
				if n := len(probes); n < 45 || n > 80 {
					t.Errorf("%d probes in an hour", n)
				}
				if most := w.most(""); most != 1 {
					t.Errorf("%d probes at once", most)
				}
				for i := range probes[1:] {
					if gap := probes[i+1].at.Sub(probes[i].at); gap > 80*time.Second {
						t.Errorf("%v between two probes", gap)
					}
				}
				if n := w.leases() - leases; n > 200 {
					t.Errorf("%d leases during the outage; want few", n)
				}
				w.client.forget()
				w.client.set(always(answer{status: 200, after: 10 * time.Millisecond}))
				w.sleep(7 * time.Minute) // A message that failed as a probe waits for its retry.
				got := w.client.requests("")
				if len(got) < waiting {
					t.Fatalf("%d requests after recovery; %+v", len(got), w.report("crm"))
				}
				begin := got[0].at
				count := func(from, to time.Duration) (n int) {
					for _, r := range got {
						if at := r.at.Sub(begin); at >= from && at < to {
							n++
						}
					}
					return n
				}
				for i, limit := range []int{1, 1, 2, 4, 8, 16, 32} {
					step := 10 * time.Millisecond
					if n := count(time.Duration(i)*step, time.Duration(i+1)*step); n > limit {
						t.Errorf("%d requests in round trip %d, want at most %d", n, i, limit)
					}
				}
				if r := w.report("crm"); r.Delivered != int64(waiting+1000) || r.Endpoints[0].State != adminapi.EndpointHealthy {
					t.Errorf("%+v", r)
				}
				w.end()
			})
		})
	}
}

// A message that is accepted while the circuit is open and the lane is empty is the next probe.
func TestProbeOfEmptyLane(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 500}))
		d := dest("crm", urlA)
		d.Delivery.RetryWindowMS = 60_000
		w.apply(d)
		w.send("web", 20)
		w.sleep(10 * time.Minute)
		if r := w.report("crm"); r.Pending != 0 || r.Endpoints[0].State != adminapi.EndpointCircuitOpen {
			t.Errorf("%+v", r)
		}
		w.client.forget()
		w.sleep(time.Hour)
		if n := len(w.client.requests("")); n != 0 {
			t.Errorf("%d requests without a message", n)
		}
		w.client.set(always(answer{status: 200}))
		w.send("web", 5)
		w.sleep(time.Second)
		if r := w.report("crm"); r.Delivered != 5 {
			t.Errorf("%+v", r)
		}
		w.end()
	})
}

// A change of the destination makes the next probe due at once: the owner may have fixed the cause.
func TestChangeProbesAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{reason: egress.CertificateRejected}))
		w.apply(dest("crm", urlA))
		w.send("web", 50)
		w.sleep(time.Hour)
		w.client.set(always(answer{status: 200}))
		w.apply(dest("crm", urlA))
		w.sleep(time.Second)
		if len(w.client.requests("")) == 0 || w.report("crm").Delivered == 0 {
			t.Errorf("%+v", w.report("crm"))
		}
		w.sleep(10 * time.Minute)
		if r := w.report("crm"); r.Delivered != 50 {
			t.Errorf("%+v", r)
		}
		w.end()
	})
}

// One of twenty destinations fails in different ways, and the others are not affected.
func TestIsolation(t *testing.T) {
	long(t)
	for name, bad := range map[string]answer{
		"healthy": {status: 200, after: 5 * time.Millisecond}, "refused": {reason: egress.ConnectionRefused},
		"black hole": {reason: egress.TimedOut, after: time.Hour}, "5 s slow": {status: 200, after: 4900 * time.Millisecond},
		"500": {status: 500},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				w := newWorld(t, func(r request) answer {
					if r.url == "http://0.test" {
						return bad
					}
					return answer{status: 200, after: 5 * time.Millisecond}
				}, func(o *Options) { o.MaxInFlight = 128 })
				var all []liveconfig.Destination
				for i := range 20 {
					d := dest(fmt.Sprintf("d%02d", i), fmt.Sprintf("http://%d.test", i))
					all = append(all, d)
				}
				w.apply(all...)
				w.send("web", 2000)
				w.sleep(10 * time.Second)
				var slowest time.Duration
				begin := w.client.requests("")[0].at
				for i := 1; i < 20; i++ {
					got := w.client.requests(fmt.Sprintf("http://%d.test", i))
					if len(got) != 2000 {
						t.Errorf("d%02d got %d messages", i, len(got))
						continue
					}
					slowest = max(slowest, got[1999].at.Sub(begin))
				}
				// 19 lanes share about 122 of 128 slots: 2000 messages need 2000/6 round trips
				// of 5 ms.
				if slowest > 2*time.Second {
					t.Errorf("the healthy destinations needed %v", slowest)
				}
				t.Logf("the healthy destinations needed %v", slowest)
				w.end()
			})
		})
	}
}

// At a steady rate below the receivers' capacity, one of twenty endpoints fails with many
// requests in flight. The p99 of the others changes by less than a tenth.
func TestIsolationOfLatency(t *testing.T) {
	long(t)
	const total, messages, bad = 20, 4000, "http://0.test"
	p99 := func(t *testing.T, dead answer) (slow time.Duration) {
		bubble(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(1, 2))
			took := map[string]time.Duration{}
			died := false // Guarded by the client's lock, as is took.
			w := newWorld(t, func(r request) answer {
				if r.url == bad && died {
					return dead
				}
				a := answer{status: 200, after: time.Duration(2000+rnd.IntN(5000)) * time.Microsecond}
				took[r.id()+r.url] = a.after
				return a
			}, func(o *Options) { o.MaxInFlight = 128 }) // The failing one has 64 slots, the others need about 45.
			var all []liveconfig.Destination
			for i := range total {
				all = append(all, dest(fmt.Sprintf("d%02d", i), fmt.Sprintf("http://%d.test", i)))
			}
			all[0].Sources = append(all[0].Sources, "extra")
			w.apply(all...)
			w.send("web", 100)
			w.send("extra", 2000) // All endpoints are proven, and the failing one has its largest window.
			w.sleep(5 * time.Second)
			w.client.mu.Lock()
			died = true
			w.client.mu.Unlock()
			w.client.forget()
			sent := map[string]time.Time{}
			w.send("extra", 200)
			for range messages { // 500 a second
				w.send("web", 1)
				sent[fmt.Sprintf("m%d", w.next)] = time.Now()
				time.Sleep(2 * time.Millisecond)
			}
			w.sleep(time.Second)
			var latencies []time.Duration
			for _, r := range w.client.requests("") {
				if r.url != bad {
					latencies = append(latencies, r.at.Sub(sent[r.id()])+took[r.id()+r.url])
				}
			}
			if len(latencies) != messages*(total-1) {
				t.Errorf("the healthy destinations got %d messages", len(latencies))
			}
			slices.Sort(latencies)
			slow = latencies[len(latencies)*99/100]
			w.stop()
		})
		return slow
	}
	healthy := p99(t, answer{status: 200, after: 5 * time.Millisecond})
	for name, dead := range map[string]answer{
		"refused": {reason: egress.ConnectionRefused}, "black hole": {reason: egress.TimedOut, after: time.Hour},
		"5 s slow": {status: 200, after: 4900 * time.Millisecond}, "500": {status: 500},
	} {
		t.Run(name, func(t *testing.T) {
			got := p99(t, dead)
			t.Logf("p99 of the healthy destinations %v, of %v with all healthy", got, healthy)
			if got >= healthy+healthy/10 {
				t.Error("p99 changed by more than a tenth")
			}
		})
	}
}

// A thousand lanes, of which 900 cannot deliver, share 256 slots: after the first turn of every
// lane, the healthy lanes deliver at once. The number of goroutines is bounded.
func TestThousandLanes(t *testing.T) {
	long(t)
	bubble(t, func(t *testing.T) {
		before := runtime.NumGoroutine()
		const slots = 512
		w := newWorld(t, func(r request) answer {
			if r.url == urlA {
				return answer{status: 200, after: 5 * time.Millisecond}
			}
			return answer{reason: egress.TimedOut, after: time.Hour}
		}, func(o *Options) { o.MaxInFlight = slots })
		var all []liveconfig.Destination
		for i := range 1000 {
			url := "http://dead.test"
			if i%10 == 0 {
				url = urlA
			}
			all = append(all, dest(fmt.Sprintf("d%04d", i), url))
		}
		w.apply(all...)
		w.send("web", 10)
		w.sleep(25 * time.Second) // 900 dead lanes on 256 slots, 5 s each: four rounds, and one for the order.
		if n := len(w.client.requests(urlA)); n != 1000 {
			t.Errorf("%d of 1000 messages reached the live endpoints in the end", n)
		}
		for range 60 {
			w.sleep(time.Second)
			if n := runtime.NumGoroutine() - before; n > slots+4+20 {
				t.Fatalf("%d goroutines", n)
			}
			w.client.forget()
			w.send("web", 1)
			w.sleep(50 * time.Millisecond)
			if n := len(w.client.requests(urlA)); n != 100 {
				t.Fatalf("%d of 100 messages reached the live endpoints", n)
			}
		}
		w.sleep(20 * time.Minute) // The probes of the lanes are spread over their minute.
		if most := w.most("http://dead.test"); most > slots/2 {
			t.Errorf("%d requests at once to dead endpoints", most)
		}
		// A parked lane needs no goroutine: the rest are probes in flight and a few idle
		// workers.
		if n := runtime.NumGoroutine() - before; n > 150 {
			t.Errorf("%d goroutines while 900 lanes are parked", n)
		}
		w.end()
	})
}

// A burst of one Source does not delay the other Source of a shared destination.
func TestFloodFromOneSource(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200, after: 10 * time.Millisecond}))
		d := dest("crm", urlA)
		d.Sources = []string{"ios", "web"}
		d.Delivery.MaxInFlight = 10
		w.apply(d)
		w.send("web", 100000)
		w.sleep(time.Second)
		w.send("ios", 100)
		begin := time.Now()
		for w.store.LaneStats(queue.LaneID{Source: "ns/ios", Destination: "ns/crm", Any: true}).Pending > 0 {
			w.sleep(10 * time.Millisecond)
		}
		// 5 of 10 slots: 100 messages need 20 round trips.
		if took := time.Since(begin); took > 400*time.Millisecond {
			t.Errorf("the messages of the other Source needed %v", took)
		}
		w.end()
	})
}

// An idle engine does not lease and has no workers.
func TestIdle(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200, after: time.Millisecond}))
		w.apply(dest("crm", urlA))
		w.send("web", 5000)
		w.sleep(5 * time.Minute)
		if n := look(w, func(e *Engine) int { return len(e.workers.idle) }); n > 1 {
			t.Errorf("%d idle workers minutes after the work", n)
		}
		leases := w.leases()
		w.sleep(time.Hour)
		if w.leases() != leases {
			t.Errorf("%d leases of an empty lane", w.leases()-leases)
		}
		w.end()
	})
}

// A waiting retry is not polled before it is due.
func TestWaitingRetriesAreFree(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 503, retryAfter: time.Hour}))
		w.apply(dest("crm", urlA))
		w.send("web", 5)
		w.sleep(time.Minute)
		if r := w.report("crm"); r.Retrying != 5 {
			t.Fatalf("%+v", r)
		}
		leases, requests := w.leases(), len(w.client.requests(""))
		w.sleep(58 * time.Minute)
		if w.leases() != leases || len(w.client.requests("")) != requests {
			t.Errorf("%d leases and %d requests before the retries were due", w.leases()-leases, len(w.client.requests(""))-requests)
		}
		w.sleep(2 * time.Minute)
		if n := len(w.client.requests("")) - requests; n != 5 {
			t.Errorf("%d requests when they were due, want 5", n)
		}
		w.end()
	})
}

// With several URLs, each URL gets at most one probe at a time.
func TestOneProbePerEndpoint(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{urlA: {reason: egress.TimedOut, after: time.Hour}, urlB: {status: 500, after: time.Second}}))
		d := dest("crm", urlA, urlB)
		d.Sources = []string{"ios", "web"}
		w.apply(d)
		w.send("web", 500)
		w.send("ios", 500)
		w.sleep(5 * time.Minute)
		w.client.forget()
		for range 600 {
			w.send("web", 1)
			w.sleep(time.Second)
		}
		for _, url := range []string{urlA, urlB} {
			if most, n := w.most(url), len(w.client.requests(url)); most != 1 || n < 8 || n > 16 {
				t.Errorf("%s: %d probes, %d at once", url, n, most)
			}
		}
		// With a third URL that works, ordinary messages are the probes.
		w.apply(func() liveconfig.Destination {
			d := dest("crm", urlA, urlB, urlC)
			d.Sources = []string{"ios", "web"}
			return d
		}())
		w.sleep(5 * time.Minute)
		w.client.forget()
		for range 600 {
			w.send("web", 1)
			w.sleep(time.Second)
		}
		if n := len(w.client.requests(urlC)); n != 600 {
			t.Errorf("%d of 600 messages reached the URL that works", n)
		}
		for _, url := range []string{urlA, urlB} {
			if most, n := w.most(url), len(w.client.requests(url)); most != 1 || n < 8 || n > 16 {
				t.Errorf("with another URL that works, %s: %d probes, %d at once", url, n, most)
			}
		}
		w.end()
	})
}
