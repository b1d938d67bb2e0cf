package delivery

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/internal/promtext"
)

func TestEndpointStates(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200, after: time.Millisecond}))
		w.apply(dest("crm", urlA))
		state := func(want adminapi.EndpointState) {
			t.Helper()
			if ep := w.report("crm").Endpoints[0]; ep.State != want {
				t.Errorf("%s, want %s: %+v", ep.State, want, ep)
			}
		}
		state(adminapi.EndpointIdle)
		w.send("web", 1)
		w.sleep(time.Minute)
		state(adminapi.EndpointHealthy)
		w.client.set(always(answer{status: 500}))
		w.send("web", 1)
		w.sleep(time.Millisecond)
		state(adminapi.EndpointDegraded)
		ep := w.report("crm").Endpoints[0]
		if ep.LastFailure == nil || ep.LastFailure.Reason != "ServerError" || ep.LastFailure.StatusCode != 500 || ep.LastFailure.Message == "" || ep.Since.Before(ep.LastSuccess) {
			t.Errorf("%+v", ep)
		}
		w.send("web", 20)
		w.sleep(30 * time.Second)
		state(adminapi.EndpointCircuitOpen)
		since := w.report("crm").Endpoints[0].Since
		w.sleep(10 * time.Minute)
		if w.report("crm").Endpoints[0].Since != since {
			t.Error("Since changed while the state did not")
		}
		w.client.set(always(answer{status: 200}))
		w.sleep(10 * time.Minute)
		state(adminapi.EndpointHealthy)
		if r := w.report("crm"); r.Delivered != 22 || r.Endpoints[0].LastFailure == nil ||
			!r.Endpoints[0].LastSuccess.After(r.Endpoints[0].LastFailure.Time) || !r.NextAttempt.IsZero() {
			t.Errorf("%+v", r)
		}
		w.end()
	})
}

// A few failures among many successes do not change the state repeatedly.
func TestStateIsCalm(t *testing.T) {
	bubble(t, func(t *testing.T) {
		n := 0
		w := newWorld(t, func(request) answer {
			if n++; n%50 == 0 {
				return answer{status: 500}
			}
			return answer{status: 200, after: time.Millisecond}
		})
		w.apply(dest("crm", urlA))
		w.send("web", 100)
		w.sleep(100 * time.Millisecond)
		since := w.report("crm").Endpoints[0].Since
		for range 100 {
			w.send("web", 100)
			w.sleep(100 * time.Millisecond)
		}
		if ep := w.report("crm").Endpoints[0]; ep.State != adminapi.EndpointHealthy || ep.Since != since {
			t.Errorf("%+v, want Healthy since %v", ep, since)
		}
		w.end()
	})
}

// State changes of a flapping endpoint are logged rarely; the opening and closing of its
// circuit always.
func TestStateChangesAreLoggedSparingly(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var log bytes.Buffer // Written under the engine's lock.
		n := 0
		w := newWorld(t, func(request) answer {
			if n++; n%20 < 4 { // The endpoint flaps in every round.
				return answer{status: 500}
			}
			return answer{status: 200, after: time.Millisecond}
		}, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		said := func() string {
			return look(w, func(*Engine) string {
				defer log.Reset()
				return log.String()
			})
		}
		w.apply(dest("crm", urlA))
		for range 200 {
			w.send("web", 20)
			w.sleep(100 * time.Millisecond)
		}
		w.sleep(10 * time.Second)
		flapping := said()
		if lines := strings.Count(flapping, "endpoint state changed"); lines < 2 || lines > 12 {
			t.Errorf("%d lines in half a minute: %s", lines, flapping)
		}
		w.client.set(always(answer{status: 500}))
		w.send("web", 50)
		w.sleep(time.Minute)
		if !strings.Contains(said(), "state=CircuitOpen") {
			t.Error("the log has no line for the opened circuit")
		}
		w.client.set(always(answer{status: 200}))
		w.sleep(5 * time.Minute)
		if first, _, _ := strings.Cut(said(), "\n"); strings.Contains(first, "state=CircuitOpen") ||
			!strings.Contains(first, "endpoint state changed") {
			t.Errorf("the log has no line for the closed circuit: %s", first)
		}
		w.end()
	})
}

// The last log line of an endpoint has its final state, even if that state began directly after
// the previous line or without a request.
func TestLastStateIsLogged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var log bytes.Buffer // Written under the engine's lock.
		w := newWorld(t, always(answer{status: 200}), func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		last := func() string {
			return look(w, func(*Engine) string {
				states := regexp.MustCompile(`msg="endpoint state changed".* state=\w+.*`).FindAllString(log.String(), -1)
				return states[len(states)-1]
			})
		}
		w.apply(dest("crm", urlA))
		w.send("web", 1)
		w.sleep(2 * time.Second)
		w.client.set(always(answer{status: 400, reason: egress.Rejected}))
		w.send("web", 1)
		w.sleep(15 * time.Second)
		if line := last(); !strings.Contains(line, "state=Degraded reason=Rejected statusCode=400") {
			t.Errorf("after the last change: %s", line)
		}
		w.client.set(always(answer{reason: egress.TimedOut}))
		w.send("web", 20)
		w.sleep(30 * time.Second)
		if line := last(); !strings.Contains(line, "state=CircuitOpen reason=TimedOut") || strings.Contains(line, "statusCode") {
			t.Errorf("without a response: %s", line)
		}
		w.client.set(always(answer{status: 200}))
		w.sleep(10 * time.Minute)
		w.report("crm") // The operator requests the report every second.
		w.sleep(time.Minute)
		if line := last(); !strings.Contains(line, "state=Healthy") || strings.Contains(line, "reason") {
			t.Errorf("after the recovery: %s", line)
		}
		w.end()
	})
}

// Failures before the owner changed an endpoint do not count for the changed endpoint.
func TestChangedEndpointIsIdle(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{urlB: {status: 400, reason: egress.Rejected}}))
		w.apply(dest("crm", urlB))
		w.send("web", 2)
		w.sleep(time.Second)
		failed := w.report("crm").Endpoints[0]
		if failed.State != adminapi.EndpointDegraded {
			t.Fatalf("%+v", failed)
		}
		w.apply(dest("crm", urlA))
		if e := w.report("crm").Endpoints[0]; e.State != adminapi.EndpointIdle || e.ConsecutiveFailures != 0 ||
			*e.LastFailure != *failed.LastFailure {
			t.Errorf("after the change: %+v", e)
		}
		w.send("web", 1)
		w.sleep(time.Second)
		w.apply(dest("crm", urlA)) // A working endpoint keeps its state.
		if e := w.report("crm").Endpoints[0]; e.State != adminapi.EndpointHealthy {
			t.Errorf("after a delivery: %+v", e)
		}
		w.end()
	})
}

func TestReport(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{urlB: {status: 500}}))
		a, b := dest("a", urlA), dest("b", urlB)
		b.Sources = []string{"ios", "web"}
		a.Generation, b.Generation = 3, 4
		w.apply(a, b)
		w.send("web", 5)
		w.send("ios", 3)
		begin := time.Now()
		if _, err := w.store.Append(context.Background(),
			[]queue.Message{{Source: "ns/web", ID: "f", AcceptedAt: begin, Skip: []string{"ns/a"}}}); err != nil {
			t.Fatal(err)
		}
		w.sleep(10 * time.Second)
		reports := reports(w.engine)
		if len(reports) != 2 || reports[0].Name != "a" || reports[1].Name != "b" || reports[0].Generation != 3 || reports[1].Revision != "1" {
			t.Fatalf("%+v", reports)
		}
		if r := reports[0]; r.Accepted != 6 || r.Delivered != 5 || r.Filtered != 1 || r.Pending != 0 || !r.OldestPending.IsZero() {
			t.Errorf("%+v", r)
		}
		if r := reports[1]; r.Accepted != 9 || r.Pending != 9 || r.Retrying == 0 || !r.OldestPending.Equal(begin) ||
			!r.NextAttempt.After(time.Now()) {
			t.Errorf("%+v", r)
		}
		for _, r := range reports {
			if r.Accepted != r.Delivered+r.Filtered+r.DeadLettered+r.Discarded+r.Pending {
				t.Errorf("the ledger does not balance: %+v", r)
			}
		}
		if r := w.engine.Report(liveconfig.Config{Namespace: "other", Destinations: []liveconfig.Destination{a}}); len(r) != 0 {
			t.Errorf("another namespace: %+v", r)
		}
		w.end()
	})
}

func TestAttemptsAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}), func(o *Options) { o.Attempts = 7 })
		w.apply(dest("crm", urlA))
		for want := range 20 {
			got := w.engine.Attempts("ns/crm", "e0")
			if len(got) != min(want, 7) {
				t.Fatalf("%d attempts after %d", len(got), want)
			}
			for i, a := range got {
				if string(a.MessageID) != fmt.Sprint("m", want-len(got)+i+1) || a.StatusCode != 200 || a.RemoteAddr == "" || a.Source != "ns/web" || a.Destination != "ns/crm" || a.Endpoint != "e0" {
					t.Fatalf("after %d: %+v", want, got)
				}
			}
			w.send("web", 1)
			w.sleep(time.Second)
		}
		if w.engine.Attempts("ns/crm", "nope") != nil || w.engine.Attempts("nope", "e0") != nil {
			t.Error("attempts of an unknown destination")
		}
		w.end()
	})
}

func TestTail(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{urlB: {status: 409}}))
		w.apply(dest("a", urlA), dest("b", urlB))
		ctx, cancel := context.WithCancel(context.Background())
		all := w.engine.Tail(ctx, "", "", false)
		b := w.engine.Tail(ctx, "ns/b", "e0", false)
		none := w.engine.Tail(ctx, "ns/b", "e1", false)
		w.send("web", 10)
		w.sleep(time.Second)
		if len(all.out) != 20 || len(b.out) != 10 || len(none.out) != 0 {
			t.Errorf("%d, %d and %d attempts", len(all.out), len(b.out), len(none.out))
		}
		if a := <-b.out; a.Destination != "ns/b" || a.StatusCode != 409 || a.Reason != string(egress.Rejected) || a.MessageID != "m1" {
			t.Errorf("%+v", a)
		}
		// Without a reader, excess attempts are dropped and counted, and deliveries continue.
		w.send("web", 1000)
		w.sleep(time.Second)
		if r := w.report("a"); r.Delivered != 1010 {
			t.Errorf("%+v", r)
		}
		if len(all.out) != tailBuffer || all.dropped.Load() != 2020-tailBuffer {
			t.Errorf("%d kept, %d lost", len(all.out), all.dropped.Load())
		}
		cancel()
		w.sleep(time.Second)
		for a := range all.Attempts() {
			if a.Body != nil {
				t.Errorf("body without permission: got %s, want none", a.Body)
			}
		}
		if look(w, func(e *Engine) int { return len(e.recorder.tails) }) != 0 {
			t.Error("the subscription is still there")
		}
		w.end()
	})
}

// A subscriber with bodies gets the body of each request. One that does not read keeps bodies up to a bound, and
// learns how many attempts it missed.
func TestTailWithBodies(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{urlB: {status: 409}}))
		w.apply(dest("a", urlA), dest("b", urlB))
		ctx, cancel := context.WithCancel(context.Background())
		tail := w.engine.Tail(ctx, "ns/b", "", true)
		w.send("web", 1)
		w.sleep(time.Second)
		next, stop := iter.Pull(tail.Attempts())
		first, _ := next()
		if first.MessageID != "m1" || string(first.Body) != "m1" {
			t.Errorf("first attempt: got id %q and body %q, want m1 and its body", first.MessageID, first.Body)
		}
		if got := tail.waiting.Load(); got != 0 {
			t.Errorf("waiting bytes after the read: got %d, want 0", got)
		}
		tail.waiting.Store(maxTailBytes - int64(2*len(first.Body)))
		w.send("web", 5)
		w.sleep(time.Second)
		if len(tail.out) < 1 || len(tail.out) > 2 || tail.dropped.Load() != int64(5-len(tail.out)) {
			t.Errorf("attempts at the bound: got %d kept and %d missed, want at most 2 kept and the others missed", len(tail.out), tail.dropped.Load())
		}
		missed := tail.dropped.Load()
		if second, _ := next(); second.Missed != missed {
			t.Errorf("missed attempts: got %d, want %d", second.Missed, missed)
		}
		if third, _ := next(); third.Missed != 0 {
			t.Errorf("missed attempts of the next one: got %d, want 0", third.Missed)
		}
		stop()
		cancel()
		w.sleep(time.Second)
		w.end()
	})
}

// Dead letters of a destination that was deleted while the dispatcher was stopped
// get the default retention, but only after a config confirms the deletion. Those
// of an earlier deleted destination keep their retention.
func TestDeadLettersOfTheDeletedAreTrimmed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 400}))
		d := dest("crm", urlA)
		d.DeadLetters.RetentionMS = 365 * 24 * 3600_000
		w.apply(d)
		w.send("web", 3)
		w.sleep(2 * time.Minute)
		w.end()
		count := func(want int64) {
			t.Helper()
			w.sleep(2 * time.Minute)
			if n := w.store.DestinationStats("ns/crm").DeadLetters; n != want {
				t.Errorf("%d dead letters, want %d", n, want)
			}
		}
		w.restartAfter(8 * 24 * time.Hour)
		if err := w.engine.Apply(liveconfig.NewView(nil, "ns")); err != nil {
			t.Fatal(err)
		}
		count(3)
		w.apply(d)
		count(3)
		w.apply()
		w.end()
		w.restart()
		w.apply()
		count(3)
		w.apply(d)
		w.end()
		for name := range w.store.meta(t) {
			if err := w.store.PutMeta(name, nil); err != nil {
				t.Fatal(err)
			}
		}
		w.restart()
		w.apply()
		count(0)
		if look(w, func(e *Engine) int { return len(e.registry.lanes) }) != 1 {
			t.Error("its lane was dropped before the end of the grace period")
		}
		w.sleep(10 * time.Minute)
		if look(w, func(e *Engine) int { return len(e.registry.destinations) }) != 0 || len(w.store.Destinations()) != 0 ||
			len(w.store.meta(t)) != 0 {
			t.Error("the destination is still known")
		}
		w.end()
	})
}

func TestDeadLettersAreTrimmed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 400}))
		d := dest("crm", urlA)
		d.DeadLetters = liveconfig.DeadLetters{RetentionMS: 3600_000, MaxBytes: 1 << 20}
		w.apply(d)
		w.send("web", 80)
		w.sleep(time.Minute)
		d.DeadLetters.MaxBytes = w.deadLetterBytes(50, "crm")
		w.apply(d)
		w.sleep(time.Minute)
		if n := w.store.DestinationStats("ns/crm").DeadLetters; n != 50 {
			t.Errorf("%d dead letters, want as many as fit", n)
		}
		w.apply() // The destination is removed; its dead letters are kept until their retention ends.
		w.sleep(50 * time.Minute)
		if n := w.store.DestinationStats("ns/crm").DeadLetters; n != 50 {
			t.Errorf("%d dead letters before the retention ends", n)
		}
		w.sleep(12 * time.Minute)
		if n := w.store.DestinationStats("ns/crm").DeadLetters; n != 0 {
			t.Errorf("%d dead letters after their retention", n)
		}
		w.sleep(2 * time.Minute)
		if look(w, func(e *Engine) int { return len(e.registry.destinations) }) != 0 {
			t.Error("the destination is still in memory")
		}
		w.end()
	})
}

func TestMetrics(t *testing.T) {
	bubble(t, func(t *testing.T) {
		registry := prometheus.NewPedanticRegistry()
		w := newWorld(t, byURL(map[string]answer{urlB: {status: 404}, urlC: {reason: egress.ConnectionRefused}}), func(o *Options) {
			o.Registerer, o.DetailedMetrics = registry, true
		})
		a, b, c := dest("a", urlA), dest("b", urlB), dest("c", urlC)
		w.apply(a, b, c)
		w.send("web", 5)
		w.sleep(time.Minute)
		got := scrape(t, registry, w.engine)
		for series, want := range map[string]float64{
			"posthorn_messages_dead_lettered_total Rejected":      5,
			"posthorn_delivery_attempts_total 2xx Delivered":      5,
			"posthorn_delivery_attempts_total 4xx Rejected":       5,
			"posthorn_message_delivery_latency_seconds":           5,
			"posthorn_delivery_in_flight":                         0,
			"posthorn_delivery_first_attempt_age_seconds":         0,
			"posthorn_delivery_in_flight_limit":                   1024,
			"posthorn_destination_messages_total a delivered":     5,
			"posthorn_destination_messages_total a dead_lettered": 0,
			"posthorn_destination_messages_total b delivered":     0,
			"posthorn_destination_messages_total b dead_lettered": 5,
			"posthorn_destination_pending_messages a":             0,
			"posthorn_destination_pending_messages c":             5,
			"posthorn_destination_oldest_pending_seconds a":       0,
			"posthorn_destination_oldest_pending_seconds c":       60,
			"posthorn_endpoint_attempts_total a e0 delivered":     5,
			"posthorn_endpoint_attempts_total a e0 failed":        0,
			"posthorn_endpoint_attempts_total b e0 failed":        5,
			"posthorn_endpoint_circuit_open a e0":                 0,
			"posthorn_endpoint_circuit_open c e0":                 1,
			"posthorn_endpoint_in_flight a e0":                    0,
			"posthorn_destination_dead_lettered_total b Rejected": 5,
			"posthorn_endpoint_failures_total b e0 Rejected 4xx":  5,
			"posthorn_endpoint_attempt_duration_seconds a e0":     5,
			"posthorn_destination_delivery_latency_seconds a":     5,
			"posthorn_destination_delivery_latency_seconds b":     0,
			"posthorn_endpoint_first_attempts_pending a e0":       0,
			"posthorn_endpoint_first_attempts_skipped a e0":       0,
			"posthorn_lane_pending_messages c web ":               5,
		} {
			if n, ok := got[series]; !ok || n != want {
				t.Errorf("%s: got %v (present: %v), want %v", series, n, ok, want)
			}
		}
		w.apply(a)
		for series := range scrape(t, registry, w.engine) {
			if labels := strings.Fields(series); slices.Contains(labels, "b") || slices.Contains(labels, "c") {
				t.Errorf("series of a removed destination: %s", series)
			}
			for _, canary := range []string{"http://", "m1"} {
				if strings.Contains(series, canary) {
					t.Errorf("%s holds %q", series, canary)
				}
			}
		}
		w.end()
	})
}

// Counters begin at 0 in each process; the ledger is durable.
func TestCountersBeginAtZero(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(nil))
		w.apply(dest("a", urlA))
		w.send("web", 5)
		w.sleep(time.Second)
		w.restart()
		w.apply(dest("a", urlA))
		w.send("web", 2)
		w.sleep(time.Second)
		if got := w.store.DestinationStats("ns/a").Ledger.Delivered; got != 7 {
			t.Errorf("delivered in the ledger: got %d, want 7", got)
		}
		if got := scrape(t, prometheus.NewRegistry(), w.engine)["posthorn_destination_messages_total a delivered"]; got != 2 {
			t.Errorf("delivered since the start: got %v, want 2", got)
		}
		w.end()
	})
}

// A destination with one endpoint has 12 series by default, whatever happens to it, and each
// further endpoint has 4.
func TestSeriesPerDestination(t *testing.T) {
	for _, test := range []struct {
		name     string
		urls     []string
		detailed bool
		most     int
	}{
		{"one endpoint", []string{urlA}, false, 12},
		{"two endpoints", []string{urlA, urlB}, false, 16},
		{"detailed", []string{urlA}, true, 70},
	} {
		t.Run(test.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				answers := []answer{{status: 200}, {status: 404}, {status: 503}, {status: 429}, {status: 302}, {reason: egress.ConnectionRefused}}
				var n atomic.Int64
				w := newWorld(t, func(request) answer { return answers[int(n.Add(1))%len(answers)] }, func(o *Options) {
					o.DetailedMetrics = test.detailed
				})
				d := dest("a", test.urls...)
				d.Sources = []string{"web", "ios"}
				w.apply(d)
				w.send("web", 20)
				w.send("ios", 20)
				w.sleep(time.Minute)
				if got := len(scrape(t, prometheus.NewRegistry(), w.engine)); got == 0 {
					t.Error("no metric was written")
				}
				if got := seriesOf(t, w.engine); got > test.most || !test.detailed && got != test.most {
					t.Errorf("series: got %d, want %d", got, test.most)
				}
			})
		})
	}
}

// seriesOf counts the series of all destinations, each bucket of a histogram as one.
func seriesOf(t *testing.T, e *Engine) (n int) {
	t.Helper()
	var out strings.Builder
	w := promtext.NewWriter(&out)
	e.WriteMetrics(w)
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		if !strings.HasPrefix(line, "#") {
			n++
		}
	}
	return n
}

// A scrape of ten thousand idle destinations.
func BenchmarkWriteMetrics(b *testing.B) {
	e := New(Options{Store: emptyStore{}, Client: newFakeClient(nil), Logger: slog.New(slog.DiscardHandler)})
	for i := range 10_000 {
		in := fmt.Sprintf("namespace-%d", i%50)
		d := e.registry.destination(fmt.Sprintf("%s/destination-%d", in, i))
		d.set = &destinationConfig{targets: []target{{liveEndpoint: &liveEndpoint{destination: d, name: "primary"}}}}
		d.lanes = []*lane{{id: queue.LaneID{Source: in + "/web", Destination: d.key, Any: true, Endpoint: "primary"}}}
	}
	b.ReportAllocs()
	for b.Loop() {
		e.WriteMetrics(promtext.NewWriter(io.Discard))
	}
}

// emptyStore has no messages.
type emptyStore struct{ Store }

func (emptyStore) SetNotify(func(queue.LaneID))                       {}
func (emptyStore) DestinationStats(string) (s queue.DestinationStats) { return s }
func (emptyStore) OldestWaiting(queue.LaneID) (at time.Time)          { return at }
func (emptyStore) LaneStats(queue.LaneID) (s queue.LaneStats)         { return s }

// scrape returns all series: name and label values (without the namespace) to value, or to the
// number of observations.
func scrape(t *testing.T, registry prometheus.Gatherer, e *Engine) map[string]float64 {
	t.Helper()
	answer := httptest.NewRecorder()
	promtext.Handler(registry, e.WriteMetrics).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for name, f := range families {
		for _, m := range f.GetMetric() {
			series := name
			for _, l := range m.GetLabel() {
				if l.GetName() != "namespace" {
					series += " " + l.GetValue()
				}
			}
			out[series] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return out
}

// A failed attempt is logged, also if the endpoint's state does not change.
func TestFailedAttemptIsLogged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var log bytes.Buffer
		w := newWorld(t, func(r request) answer {
			if r.body == "m50" {
				return answer{reason: egress.TimedOut, after: 5 * time.Second}
			}
			return answer{status: 200}
		}, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		w.apply(dest("crm", urlA))
		for range 100 {
			w.send("web", 1)
			w.sleep(100 * time.Millisecond)
		}
		w.stop()
		line := regexp.MustCompile(`level=WARN msg="delivery attempt failed" namespace=ns destination=crm endpoint=e0 reason=TimedOut message="failed: TimedOut" messageId=m50 attempt=1`)
		if !line.Match(log.Bytes()) || strings.Contains(log.String(), "messageId=m49") {
			t.Errorf("the log is:\n%s", log.String())
		}
	})
}

// The age grows while the engine has more to send than it may, and not with receivers that fail, are
// slow, or have a limit.
func TestFirstAttemptAge(t *testing.T) {
	slow := answer{status: 200, after: 4 * time.Second}
	for name, c := range map[string]struct {
		answer   answer
		tune     func(*liveconfig.Destination)
		requests int // MaxInFlight
		want     func(age time.Duration) bool
	}{
		"too few requests in flight": {slow, nil, 2, func(age time.Duration) bool { return age >= 20*time.Second }},
		"idle":                       {answer{status: 200}, nil, 2, func(age time.Duration) bool { return age == 0 }},
		"slow receivers": {slow, func(d *liveconfig.Destination) { d.Delivery.MaxInFlight = 1 }, 1024, func(age time.Duration) bool {
			return age == 0
		}},
		"failing receivers": {answer{status: 503}, nil, 1024, func(age time.Duration) bool { return age == 0 }},
		"paused": {slow, func(d *liveconfig.Destination) { d.State = liveconfig.Paused }, 2, func(age time.Duration) bool {
			return age == 0
		}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				w := newWorld(t, always(c.answer), func(o *Options) { o.MaxInFlight = c.requests })
				defer w.end()
				var all []liveconfig.Destination
				for _, name := range []string{"a", "b", "c", "d"} {
					d := dest(name, "http://"+name+".test")
					if c.tune != nil {
						c.tune(&d)
					}
					all = append(all, d)
				}
				w.apply(all...)
				w.send("web", 100)
				w.sleep(30 * time.Second)
				if age := (collector{w.engine}).firstAttemptAge(time.Now()); !c.want(age) {
					t.Errorf("got %v", age)
				}
			})
		})
	}
}
