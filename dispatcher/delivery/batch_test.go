package delivery

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// batching returns a destination with batches of 4 messages, 1 KiB and a second.
func batching(urls ...string) liveconfig.Destination {
	d := dest("crm", urls...)
	d.Batch = &liveconfig.Batch{MaxMessages: 4, MaxBytes: 1024, MaxDelayMS: 1000, Format: liveconfig.BatchJSONArray}
	return d
}

// numbers returns the values of n in a batch that is a JSON array.
func numbers(t *testing.T, r request) (list []int) {
	t.Helper()
	var all []struct{ N int }
	if err := json.Unmarshal([]byte(r.body), &all); err != nil {
		t.Fatalf("body %s: %v", r.body, err)
	}
	for _, one := range all {
		list = append(list, one.N)
	}
	return list
}

// calls returns the texts of numbers.
func calls(from, to int) (list []string) {
	for n := from; n <= to; n++ {
		list = append(list, fmt.Sprint(n))
	}
	return list
}

// A batch is sent when it is full, or a time after the acceptance of its oldest message.
func TestBatchIsSent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.apply(batching(urlA))
		start := time.Now()
		w.sendCalls("track", calls(1, 9)...)
		w.sleep(900 * time.Millisecond)
		w.sendCalls("track", "10")
		w.sleep(2 * time.Second)
		var got [][]int
		var at []time.Duration
		for _, r := range w.client.requests("") {
			got = append(got, numbers(t, r))
			at = append(at, r.at.Sub(start).Round(time.Millisecond))
		}
		check.Same(t, "batches", got, [][]int{{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10}})
		check.Same(t, "times", at, []time.Duration{0, 0, time.Second})
		a := w.engine.Attempts("ns/crm", "")
		check.Equal(t, "messages of the attempts", fmt.Sprint(a[0].Messages, a[1].Messages, a[2].Messages), "4 4 2")
		check.Equal(t, "attempts of a message", len(w.engine.AttemptsOf("m7")), 1)
		check.Equal(t, "messageId of its attempt", string(w.engine.AttemptsOf("m7")[0].MessageID), "m7")
		check.Same(t, "ledger", w.report("crm").Ledger, adminapi.Ledger{Accepted: 10, Delivered: 10})
		w.end()
	})
}

// A batch does not wait until a clock that was set back reaches the acceptance of its messages again.
func TestBatchAfterTheClockWasSetBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.apply(batching(urlA))
		_, err := w.store.Append(context.Background(), []queue.Message{{Source: "ns/web", ID: "m1", Type: "track",
			AcceptedAt: time.Now().Add(time.Hour), Body: []byte(`{"n":1}`)}})
		check.NoError(t, "append", err)
		w.sleep(time.Second)
		check.Equal(t, "requests", len(w.client.requests("")), 1)
		w.end()
	})
}

// A lane keeps no memory of a large batch.
func TestMemoryAfterABatch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		d := batching(urlA)
		d.Batch.MaxMessages, d.Batch.MaxBytes = 4000, 4<<20
		w.apply(d)
		w.sendCalls("track", calls(1, 4000)...)
		w.sleep(2 * time.Second)
		check.Equal(t, "requests", len(w.client.requests("")), 1)
		n := look(w, func(e *Engine) (n int) {
			for _, l := range e.registry.lanes {
				n += cap(l.buffer) + cap(l.scratch)
			}
			return n
		})
		if n > 1000 {
			t.Errorf("messages for which a lane has memory: got %d, want at most 1000", n)
		}
		w.end()
	})
}

// The accepted messages and the body of a batch have at most maxBytes; a longer message is alone.
func TestBytesOfABatch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		d := shaped(batching(urlA), liveconfig.Request{Body: "{'n': call.n, 'text': ['x', 'xx'].map(x, call.text).join('')}"})
		w.apply(d)
		var msgs []queue.Message
		for i, size := range []int{300, 300, 300, 1500, 10} {
			msgs = append(msgs, queue.Message{Source: "ns/web", ID: fmt.Sprint("m", i), Type: "track", AcceptedAt: time.Now(),
				Body: fmt.Appendf(nil, `{"type":"track","n":%d,"text":%q}`, i, strings.Repeat("x", size))})
		}
		_, err := w.store.Append(context.Background(), msgs)
		check.NoError(t, "append", err)
		w.sleep(2 * time.Second)
		var got [][]int
		for _, r := range w.client.requests("") {
			list := numbers(t, r)
			got = append(got, list)
			if len(r.body) > 1024 && len(list) > 1 {
				t.Errorf("bytes of a body with %v: got %d, want at most 1024", list, len(r.body))
			}
		}
		slices.SortFunc(got, slices.Compare)
		check.Same(t, "batches", got, [][]int{{0}, {1}, {2}, {3}, {4}})
		w.end()
	})
}

// A failed batch is sent again with the same messages and key, also after a restart; others are not among them.
func TestRetriedBatchKeepsItsMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		failing := 6
		w := newWorld(t, func(request) answer {
			if failing--; failing >= 0 {
				return answer{status: 503}
			}
			return answer{status: 200}
		})
		d := batching(urlA)
		d.Batch.MaxMessages, d.Batch.MaxBytes = 1000, 1<<20
		w.apply(d)
		w.sendCalls("track", calls(1, 700)...)
		w.sleep(1100 * time.Millisecond)
		first := w.client.requests("")[0]
		check.Equal(t, "messages of the first attempt", len(numbers(t, first)), 700)
		w.sendCalls("track", "701")
		w.sleep(1100 * time.Millisecond)
		w.restartAfter(time.Minute)
		w.apply(d)
		w.sleep(10 * time.Minute)
		byKey := map[string]string{}
		for _, r := range w.client.requests("") {
			if before, ok := byKey[r.id()]; ok && before != r.body {
				t.Errorf("two bodies with the key %s", r.id())
			}
			byKey[r.id()] = r.body
		}
		check.Equal(t, "compositions of two batches", len(byKey), 2)
		check.Equal(t, "requests", len(w.client.requests("")), 8)
		check.Same(t, "ledger", w.report("crm").Ledger, adminapi.Ledger{Accepted: 701, Delivered: 701})
		w.end()
	})
}

// rejecting answers 422 to a batch with one of some numbers.
func rejecting(t *testing.T, bad ...int) func(request) answer {
	return func(r request) answer {
		if slices.ContainsFunc(numbers(t, r), func(n int) bool { return slices.Contains(bad, n) }) {
			return answer{status: 422}
		}
		return answer{status: 200}
	}
}

// A rejected batch is divided until the message that the endpoint rejects is alone.
func TestRejectedBatchIsDivided(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, rejecting(t, 5, 77))
		d := batching(urlA)
		d.Batch.MaxMessages, d.Batch.MaxBytes = 100, 1<<20
		w.apply(d)
		w.sendCalls("track", calls(1, 100)...)
		w.sleep(2 * time.Second)
		check.Same(t, "ledger", w.report("crm").Ledger, adminapi.Ledger{Accepted: 100, Delivered: 98, DeadLettered: 2})
		var dead []string
		for _, d := range w.dead("crm") {
			dead = append(dead, fmt.Sprint(d.ID, " ", d.Failure.Reason, " ", d.Failure.StatusCode, " ", d.Attempts))
		}
		slices.Sort(dead)
		check.Same(t, "dead letters", dead, []string{"m5 Rejected 422 1", "m77 Rejected 422 1"})
		if n := len(w.client.requests("")); n > 30 {
			t.Errorf("requests: got %d, want at most 30", n)
		}
		w.end()
	})
}

// A batch that several endpoints may get is divided, too: its valid messages do not wait for the end of their retry window.
func TestRejectedBatchOfARemovedEndpoint(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 503}))
		w.apply(batching(urlA))
		w.sendCalls("track", calls(1, 4)...)
		w.sleep(time.Second)
		w.client.set(rejecting(t, 3))
		d := batching(urlA, urlB, urlC)
		d.Endpoints = d.Endpoints[1:]
		w.apply(d)
		w.sleep(10 * time.Minute)
		check.Same(t, "ledger", w.report("crm").Ledger, adminapi.Ledger{Accepted: 4, Delivered: 3, Pending: 1})
		w.sleep(4 * time.Hour)
		check.Same(t, "ledger after the window", w.report("crm").Ledger, adminapi.Ledger{Accepted: 4, Delivered: 3, DeadLettered: 1})
		w.end()
	})
}

// Twenty rejected single messages in a row open the circuit, and the rest waits.
func TestEveryMessageIsRejected(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 400}))
		d := batching(urlA)
		d.Batch.MaxMessages, d.Batch.MaxBytes = 4000, 4<<20
		w.apply(d)
		w.sendCalls("track", calls(1, 4000)...)
		w.sleep(2 * time.Second)
		r := w.report("crm")
		check.Equal(t, "state", string(r.Endpoints[0].State), "CircuitOpen")
		if r.Ledger.DeadLettered < 15 || r.Ledger.DeadLettered > 40 || r.Ledger.Pending != 4000-r.Ledger.DeadLettered {
			t.Errorf("ledger: got %+v, want about 20 dead letters", r.Ledger)
		}
		if n := len(w.client.requests("")); n > 100 {
			t.Errorf("requests: got %d, want at most 100", n)
		}
		w.client.set(always(answer{status: 200}))
		w.sleep(5 * time.Minute)
		check.Equal(t, "pending", w.report("crm").Ledger.Pending, 0)
		w.end()
	})
}

// So does a response that lists them.
func TestEveryMessageIsListed(t *testing.T) {
	var failed []string
	for i := range 30 {
		failed = append(failed, fmt.Sprintf(`{"index":%d,"status":422}`, i))
	}
	j := newJudging(t, map[string]string{"/in": `{"failed":[` + strings.Join(failed, ",") + `]}`})
	w := &world{T: t, store: newTestStore(t)}
	w.engine = run(t, w.store)
	d := batching(j.URL + "/in")
	d.Batch = &liveconfig.Batch{MaxMessages: 30, MaxBytes: 1 << 20, MaxDelayMS: 60_000, Format: liveconfig.BatchJSONArray, PerItem: true}
	w.apply(d)
	w.sendCalls("track", calls(1, 90)...)
	wait.True(t, "the circuit opens", func() bool { return w.report("crm").Endpoints[0].State == adminapi.EndpointCircuitOpen })
	check.Equal(t, "dead letters", w.report("crm").Ledger.DeadLettered, int64(30))
}

// An answer about the URL makes no dead letters of a batch: it waits.
func TestWrongTokenForBatches(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 401}))
		d := batching(urlA)
		d.Batch.MaxMessages, d.Batch.MaxBytes = 4000, 4<<20
		w.apply(d)
		w.sendCalls("track", calls(1, 4000)...)
		w.sleep(30 * time.Minute)
		r := w.report("crm")
		check.Same(t, "ledger", r.Ledger, adminapi.Ledger{Accepted: 4000, Pending: 4000})
		check.Equal(t, "state", string(r.Endpoints[0].State), "CircuitOpen")
		if n := len(w.client.requests("")); n > 100 {
			t.Errorf("requests: got %d, want at most 100", n)
		}
		w.client.set(always(answer{status: 200}))
		w.sleep(10 * time.Minute)
		check.Same(t, "ledger with the right token", w.report("crm").Ledger, adminapi.Ledger{Accepted: 4000, Delivered: 4000})
		w.end()
	})
}

// Omitted messages are not in the batch, a failing expression concerns its message only, and a deletion is alone.
func TestMessagesApart(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		d := shaped(batching(urlA), liveconfig.Request{Body: "call.n == 2.0 ? null : dyn({'n': call.n == 3.0 ? call.no : call.n})"})
		d.Batch.MaxMessages = 10
		w.apply(d)
		w.sendCalls("track", "1", "2", "3")
		w.sendCalls("delete", "4")
		w.sendCalls("track", "5")
		w.sleep(2 * time.Second)
		var got []string
		for _, r := range w.client.requests("") {
			got = append(got, r.body)
		}
		slices.Sort(got)
		check.Same(t, "bodies", got, []string{`[{"n":1},{"n":5}]`, `[{"n":4}]`})
		check.Same(t, "ledger", w.report("crm").Ledger, adminapi.Ledger{Accepted: 5, Delivered: 3, Omitted: 1, DeadLettered: 1})
		check.Equal(t, "reason", w.dead("crm")[0].Failure.Reason, string(egress.TransformFailed))
		w.end()
	})
}

// Messages whose retry window has ended are dead letters; the others of their batch are sent again.
func TestWindowsOfABatch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 503}))
		d := batching(urlA)
		d.Delivery.RetryWindowMS = 60_000
		d.Batch.MaxDelayMS = 50_000
		w.apply(d)
		w.sendCalls("track", "1")
		w.sleep(45 * time.Second)
		w.sendCalls("track", "2", "3")
		w.sleep(30 * time.Second)
		check.Same(t, "ledger", w.report("crm").Ledger, adminapi.Ledger{Accepted: 3, DeadLettered: 1, Pending: 2})
		w.client.set(always(answer{status: 200}))
		w.sleep(30 * time.Second)
		check.Same(t, "ledger", w.report("crm").Ledger, adminapi.Ledger{Accepted: 3, DeadLettered: 1, Delivered: 2})
		w.end()
	})
}

// An edit without batches, and a suspension, send or keep the messages that wait for their batch.
func TestEditWhileABatchWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		d := batching(urlA)
		d.Batch.MaxDelayMS = 60_000
		w.apply(d)
		w.sendCalls("track", "1", "2")
		w.sleep(time.Second)
		check.Equal(t, "requests", len(w.client.requests("")), 0)
		w.apply(dest("crm", urlA))
		w.sleep(time.Second)
		check.Equal(t, "requests after the edit", len(w.client.requests("")), 2)
		w.apply(d)
		w.sendCalls("track", "3", "4")
		w.sleep(time.Second)
		d.State = liveconfig.Suspended
		w.apply(d)
		w.sleep(2 * time.Minute)
		check.Equal(t, "requests while suspended", len(w.client.requests("")), 2)
		d.State = liveconfig.Active
		w.apply(d)
		w.sleep(time.Second)
		check.Same(t, "batch", numbers(t, w.client.requests("")[2]), []int{3, 4})
		w.end()
	})
}

// A config that arrives while the rest of a retried batch is leased returns the messages to the store.
func TestEditWhileABatchIsLeased(t *testing.T) {
	for name, edit := range map[string]func(d *liveconfig.Destination){
		"removed":   nil,
		"suspended": func(d *liveconfig.Destination) { d.State = liveconfig.Suspended },
		"edited":    func(d *liveconfig.Destination) { d.Batch.MaxMessages = 3 },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				w := newWorld(t, always(answer{status: 503}))
				w.apply(batching(urlA))
				w.sendCalls("track", calls(1, 3)...)
				w.sleep(time.Second)
				check.Equal(t, "requests", len(w.client.requests("")), 1)
				w.client.set(always(answer{status: 200}))
				onDue := sync.OnceFunc(func() {
					if d := batching(urlA); edit == nil {
						w.apply()
					} else {
						edit(&d)
						w.apply(d)
					}
				})
				w.store.mu.Lock()
				w.store.onDue = onDue
				w.store.mu.Unlock()
				w.sleep(10 * time.Second)
				if name != "edited" {
					check.Equal(t, "leased messages", look(w, func(e *Engine) int { return e.scheduler.batched + e.scheduler.leased }), 0)
				}
				w.apply(batching(urlA))
				w.sleep(10 * time.Second)
				check.Same(t, "ledger", w.report("crm").Ledger, adminapi.Ledger{Accepted: 3, Delivered: 3})
				w.end()
			})
		})
	}
}

// Destinations that hold messages for their batches do not make the leases of others smaller.
func TestBatchesDoNotUseTheLeasesOfOthers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}), func(o *Options) { o.MaxInFlight = 16 })
		d := batching(urlA)
		d.Batch.MaxMessages, d.Batch.MaxBytes, d.Batch.MaxDelayMS = 4000, 4<<20, 60_000
		other := dest("other", urlB)
		other.Sources = []string{"app"}
		w.apply(d, other)
		w.send("web", 500)
		w.sleep(time.Second)
		check.Equal(t, "messages of the batch", look(w, func(e *Engine) int { return e.scheduler.batched }), 500)
		before := w.leases()
		w.send("app", 320)
		w.sleep(time.Second)
		check.Equal(t, "requests of the other", len(w.client.requests(urlB)), 320)
		if n := w.leases() - before; n > 40 {
			t.Errorf("leases of 320 messages: got %d, want at most 40", n)
		}
		w.sleep(time.Minute)
		check.Equal(t, "requests of the batch", len(w.client.requests(urlA)), 1)
		w.end()
	})
}

// A namespace whose batches fill the memory for waiting messages does not make the batches of another one smaller.
func TestBatchesOfANamespaceLeaveSpace(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}), func(o *Options) { o.MaxInFlight = 16 }) // 20,000 bytes may wait.
		var configs []liveconfig.Revisioned
		for namespace, url := range map[string]string{"large": urlA, "small": urlB} {
			d := batching(url)
			d.Batch.MaxMessages, d.Batch.MaxBytes, d.Batch.MaxDelayMS = 4000, 4<<20, 60_000
			configs = append(configs, liveconfig.Revisioned{Revision: "1", Config: liveconfig.Config{Version: 1, Namespace: namespace,
				Sources: []liveconfig.Source{{Name: "web"}}, Destinations: []liveconfig.Destination{d}}})
		}
		check.NoError(t, "apply", w.engine.Apply(liveconfig.NewView(configs)))
		send := func(namespace string, n, size int) {
			for range n {
				_, err := w.store.Append(context.Background(), []queue.Message{{Source: namespace + "/web", ID: "m", Type: "track",
					AcceptedAt: time.Now(), Body: fmt.Appendf(nil, `{"text":%q}`, strings.Repeat("x", size))}})
				check.NoError(t, "append", err)
				w.sleep(10 * time.Millisecond)
			}
		}
		send("large", 39, 500)
		send("small", 10, 50)
		send("large", 1, 500)
		send("small", 10, 50)
		w.sleep(time.Minute)
		check.Equal(t, "requests of the small namespace", len(w.client.requests(urlB)), 1)
		w.end()
	})
}

// A namespace whose batches in flight use the memory for requests does not stop another one.
func TestBatchesInFlightLeaveSpace(t *testing.T) {
	s := &scheduler{maxInFlight: 1000, active: 1} // The other namespace is active.
	large, small := &lane{owner: &namespace{}}, &lane{owner: &namespace{}}
	for range 10 {
		s.addLeased(large, 1000, 100*memory.RequestBytes)
		s.addInFlight(large.owner, 1, false)
	}
	check.Equal(t, "limit", s.limit(), 1)
	if n := s.share(large, false); n > 0 {
		t.Errorf("share of the namespace with batches: got %d, want none", n)
	}
	check.Equal(t, "share of the other", s.share(small, false), 250)
}

func TestFailedItems(t *testing.T) {
	for body, want := range map[string]string{
		`{"failed":[{"index":0,"status":422},{"index":2,"status":503}]}`: "map[0:422 2:503]",
		`{"failed":[]}`: "map[]", `{}`: "map[]", `{"other":1}`: "map[]",
		`{"failed":[{"index":3,"status":422}]}`:                          "index",
		`{"failed":[{"index":-1,"status":422}]}`:                         "index",
		`{"failed":[{"index":1,"status":422},{"index":1,"status":500}]}`: "index",
		`{"failed":[{"index":1,"status":200}]}`:                          "status",
		`{"failed":[{"index":1}]}`:                                       "status",
		`{"failed":[{"status":422}]}`:                                    "index",
		`null`:                                                           "JSON",
		`[]`:                                                             "JSON",
		``:                                                               "JSON",
		`{"failed":[{"index":"1","status":422}]}`:                        "JSON",
	} {
		failed, why := failedItems(&egress.Accepted{Body: []byte(body)}, 3)
		if got := fmt.Sprint(failed); why == "" && got != want || why != "" && !strings.Contains(why, want) {
			t.Errorf("%s: got %s and %q, want %s", body, got, why, want)
		}
	}
	if _, why := failedItems(&egress.Accepted{Body: []byte(`{}`), Truncated: true}, 3); !strings.Contains(why, "64 KiB") {
		t.Errorf("long body: got %q", why)
	}
}

// With random answers, restarts and edits, each message has one outcome, and only a message that the receiver always rejects
// becomes a dead letter.
func TestRandomBatches(t *testing.T) {
	for seed := range uint64(30) {
		bubble(t, func(t *testing.T) {
			rnd, answers := rand.New(rand.NewPCG(seed, 9)), rand.New(rand.NewPCG(seed, 10))
			accepted := map[int]int{}
			largest := 1 + rnd.IntN(60)
			receiver := func(r request) answer {
				list := numbers(t, r)
				after := time.Duration(answers.IntN(100)) * time.Millisecond
				switch n := answers.IntN(20); {
				case len(list) > largest:
					return answer{status: 413, after: after}
				case n == 0:
					return answer{status: 503, after: after}
				case n == 1:
					return answer{status: 429, after: after, retryAfter: 3 * time.Second}
				case n == 2:
					return answer{status: 401, after: after}
				case n == 3:
					return answer{reason: egress.ConnectionRefused, after: after}
				case slices.ContainsFunc(list, func(n int) bool { return n%50 == 0 }):
					return answer{status: 422, after: after}
				}
				for _, n := range list {
					accepted[n]++
				}
				return answer{status: 200, after: after}
			}
			w := newWorld(t, receiver)
			d := batching(urlA)
			if rnd.IntN(2) == 0 {
				d = batching(urlA, urlB)
				d.Success = []string{liveconfig.AnyEndpoint, liveconfig.EveryEndpoint}[rnd.IntN(2)]
			}
			d.Batch.MaxMessages, d.Batch.MaxBytes = 2+rnd.IntN(100), int64(1024+rnd.IntN(8192))
			w.apply(d)
			const n = 600
			for first := 1; first <= n; first += 50 {
				w.sendCalls("track", calls(first, first+49)...)
				w.sleep(time.Duration(rnd.IntN(1500)) * time.Millisecond)
				switch rnd.IntN(6) {
				case 0:
					w.restart()
					w.apply(d)
				case 1:
					d.Batch = &liveconfig.Batch{MaxMessages: 2 + rnd.IntN(100), MaxBytes: 4096, MaxDelayMS: int64(rnd.IntN(3000)),
						Format: liveconfig.BatchJSONArray}
					w.apply(d)
				}
			}
			w.sleep(30 * time.Minute)
			lanes := int64(1)
			if d.Success == liveconfig.EveryEndpoint {
				lanes = int64(len(d.Endpoints))
			}
			check.Same(t, fmt.Sprint("ledger with seed ", seed), w.report("crm").Ledger,
				adminapi.Ledger{Accepted: n * lanes, Delivered: n * lanes * 49 / 50, DeadLettered: n * lanes / 50})
			for i := 1; i <= n; i++ {
				if (accepted[i] == 0) != (i%50 == 0) {
					t.Errorf("seed %d: message %d was accepted %d times", seed, i, accepted[i])
				}
			}
			w.end()
		})
	}
}
