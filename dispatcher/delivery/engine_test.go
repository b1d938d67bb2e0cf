package delivery

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
)

// request is a request that a fake endpoint received.
type request struct {
	url     string
	headers http.Header
	body    string
	at      time.Time
}

func (r request) id() string { return r.headers.Get(headerIdempotencyKey) }

// answer is the result of a fake endpoint: a status with a body, or a reason, after a delay.
type answer struct {
	status     int
	body       string
	reason     egress.Reason
	after      time.Duration
	retryAfter time.Duration
}

// fakeClient is a Poster whose endpoints are functions.
type fakeClient struct {
	mu        sync.Mutex
	urls      map[*egress.Endpoint]string
	forgotten []string
	// egress prepares endpoints that know the number of free connections; nil for endpoints
	// that do not.
	egress *egress.Client
	answer func(r request) answer
	got    []request
	// inFlight and most are the current and the maximum number of concurrent requests by URL,
	// and in total ("").
	inFlight, most map[string]int
}

func newFakeClient(f func(request) answer) *fakeClient {
	return &fakeClient{urls: map[*egress.Endpoint]string{}, answer: f, inFlight: map[string]int{}, most: map[string]int{}}
}

func (c *fakeClient) Prepare(e liveconfig.Endpoint) (*egress.Endpoint, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.URL.Reveal() == "http://unpreparable.test" {
		return nil, fmt.Errorf("url: cannot be prepared")
	}
	p := &egress.Endpoint{}
	if c.egress != nil {
		var err error
		if p, err = c.egress.Prepare(e); err != nil {
			return nil, err
		}
	}
	c.urls[p] = e.URL.Reveal()
	return p, nil
}

func (c *fakeClient) Forget(e *egress.Endpoint) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgotten = append(c.forgotten, c.urls[e])
}

func (c *fakeClient) Post(ctx context.Context, e *egress.Endpoint, headers []egress.Header, body []byte) egress.Result {
	h := http.Header{}
	for _, header := range headers {
		h.Set(header.Name, header.Value)
	}
	c.mu.Lock()
	r := request{c.urls[e], h, string(body), time.Now()}
	c.got = append(c.got, r)
	for _, key := range []string{r.url, ""} {
		c.inFlight[key]++
		c.most[key] = max(c.most[key], c.inFlight[key])
	}
	a := c.answer(r)
	c.mu.Unlock()
	result := egress.Result{StatusCode: a.status, Reason: a.reason, RetryAfter: a.retryAfter, RemoteAddr: "192.0.2.1:443", Sent: true,
		Response: []byte(a.body)}
	deadline, ok := ctx.Deadline()
	late := ok && a.after >= time.Until(deadline)
	if late {
		a.after = time.Until(deadline)
	}
	timer := time.NewTimer(a.after)
	defer timer.Stop()
	select {
	case <-timer.C:
		switch {
		case late:
			result.StatusCode, result.Reason = 0, egress.TimedOut
		case a.status >= 200 && a.status < 300:
			result.Timing.FirstByte = a.after
		case a.status >= 500:
			result.Reason = egress.ServerError
		case a.status == 429 || a.status == 408:
			result.Reason = egress.Throttled
		case a.status >= 400:
			result.Reason = egress.Rejected
		case a.status >= 300:
			result.Reason = egress.Redirected
		}
	case <-ctx.Done():
		result.StatusCode, result.Reason = 0, egress.TimedOut
	}
	if result.Reason != "" {
		result.Message = "failed: " + string(result.Reason)
	}
	c.mu.Lock()
	c.inFlight[r.url]--
	c.inFlight[""]--
	c.mu.Unlock()
	return result
}

func (c *fakeClient) set(f func(request) answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answer = f
}

// requests returns the requests to a URL, or all for "".
func (c *fakeClient) requests(url string) []request {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.got), func(r request) bool { return url != "" && r.url != url })
}

func (c *fakeClient) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.got = nil
	clear(c.most)
}

func always(a answer) func(request) answer { return func(request) answer { return a } }

// byURL returns answers by URL; a status of 200 for other URLs.
func byURL(m map[string]answer) func(request) answer {
	return func(r request) answer {
		if a, ok := m[r.url]; ok {
			return a
		}
		return answer{status: 200}
	}
}

// world is an engine with a store in memory and a fake client. It must be used inside a synctest
// bubble.
type world struct {
	*testing.T
	store  *testStore
	client *fakeClient
	engine *Engine
	stop   func() // Returns when Run has returned.
	next   int
	rev    int
}

func newWorld(t *testing.T, f func(request) answer, tune ...func(*Options)) *world {
	w := &world{T: t, store: newTestStore(t), client: newFakeClient(f)}
	w.start(tune...)
	return w
}

// restart opens the store again, and creates a new engine on it.
func (w *world) restart(tune ...func(*Options)) { w.restartAfter(0, tune...) }

// restartAfter starts the next process after a time without one. Days of it cost nothing; with an
// open store, each virtual second costs ten timers of Pebble.
func (w *world) restartAfter(d time.Duration, tune ...func(*Options)) {
	w.Helper()
	w.stop()
	w.store.reopen(w, d)
	w.start(tune...)
}

// start creates an engine on the store; the cleanup stops it.
func (w *world) start(tune ...func(*Options)) {
	o := Options{Store: w.store, Client: w.client, Logger: slog.New(slog.DiscardHandler)}
	for _, f := range tune {
		f(&o)
	}
	w.engine = New(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := w.engine.Run(ctx); err != nil {
			w.Errorf("Run: %v", err)
		}
	}()
	w.stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	w.Cleanup(w.stop)
}

// dest returns an active destination of the Source "web" with one endpoint per URL, named e0,
// e1 …
func dest(name string, urls ...string) liveconfig.Destination {
	d := liveconfig.Destination{
		Name: name, State: liveconfig.Active, Sources: []string{"web"}, Success: liveconfig.AnyEndpoint,
		Delivery: liveconfig.Delivery{TimeoutMS: 5000, RetryWindowMS: 4 * 3600 * 1000, MinBackoffMS: 1000, MaxBackoffMS: 300000,
			MaxInFlight: 64},
		DeadLetters: liveconfig.DeadLetters{RetentionMS: 7 * 24 * 3600 * 1000, MaxBytes: 1 << 30},
	}
	for i, url := range urls {
		d.Endpoints = append(d.Endpoints, liveconfig.Endpoint{Name: "e" + strconv.Itoa(i), URL: liveconfig.NewSecret(url)})
	}
	return d
}

// apply applies destinations of the namespace "ns".
func (w *world) apply(destinations ...liveconfig.Destination) {
	w.Helper()
	if err := w.engine.Apply(w.view(destinations...)); err != nil {
		w.Fatalf("Apply: %v", err)
	}
}

// sameView is view with the revision of the last one.
func (w *world) sameView(destinations ...liveconfig.Destination) *liveconfig.View {
	w.rev--
	return w.view(destinations...)
}

func (w *world) view(destinations ...liveconfig.Destination) *liveconfig.View {
	w.rev++
	c := liveconfig.Config{Version: 1, Namespace: "ns"}
	sources := map[string]bool{}
	for i := range destinations {
		destinations[i].Revision = strconv.Itoa(w.rev)
		for _, s := range destinations[i].Sources {
			sources[s] = true
		}
	}
	for s := range sources {
		c.Sources = append(c.Sources, liveconfig.Source{Name: s})
	}
	c.Destinations = destinations
	return liveconfig.NewView([]liveconfig.Revisioned{{Config: c, Revision: strconv.Itoa(w.rev)}})
}

// send appends n messages of a Source of the namespace "ns"; their bodies are m1, m2 …
func (w *world) send(source string, n int) {
	w.Helper()
	w.sendTo("ns/"+source, n)
}

// sendTo is send for a Source of any namespace.
func (w *world) sendTo(source string, n int) {
	w.Helper()
	var msgs []queue.Message
	for range n {
		w.next++
		id := "m" + strconv.Itoa(w.next)
		msgs = append(msgs, queue.Message{Source: source, ID: id, Type: "track", AcceptedAt: time.Now(), Body: []byte(id)})
	}
	if _, err := w.store.Append(context.Background(), msgs); err != nil {
		w.Fatal(err)
	}
}

// sleep advances the time and waits until all due work is done.
func (w *world) sleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// reports returns the reports of all destinations, sorted by name.
func reports(e *Engine) []adminapi.DestinationReport {
	c := liveconfig.Config{Namespace: "ns"}
	e.mu.Lock()
	for _, key := range slices.Sorted(maps.Keys(e.registry.destinations)) {
		c.Destinations = append(c.Destinations, liveconfig.Destination{Name: e.registry.destinations[key].name})
	}
	e.mu.Unlock()
	return e.Report(c)
}

// report returns the report of a destination.
func (w *world) report(name string) adminapi.DestinationReport {
	w.Helper()
	for _, r := range reports(w.engine) {
		if r.Name == name {
			return r
		}
	}
	w.Fatalf("no report of %s", name)
	return adminapi.DestinationReport{}
}

// dead returns the dead letters of a destination.
func (w *world) dead(name string) (out []queue.DeadLetter) {
	_ = w.store.DeadLetters(context.Background(), "ns/"+name, "", func(d queue.DeadLetter) bool {
		out = append(out, d)
		return true
	})
	return out
}

// deadLetterBytes returns a size with space for n, but not n+1, of the dead letters of
// destinations.
func (w *world) deadLetterBytes(n int64, destinations ...string) int64 {
	var letters, bytes int64
	for _, name := range destinations {
		stats := w.store.DestinationStats("ns/" + name)
		letters += stats.DeadLetters
		bytes += stats.DeadLetterBytes
	}
	return (2*n + 1) * bytes / letters / 2
}

// leases returns the number of Lease and LeaseOldest calls.
func (w *world) leases() int {
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	return w.store.leases
}

// fail makes the store return an error; nil ends the failure.
func (w *world) fail(err error) {
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	w.store.fail = err
}

// most returns the maximum number of concurrent requests to a URL, or in total ("").
func (w *world) most(url string) int {
	w.client.mu.Lock()
	defer w.client.mu.Unlock()
	return w.client.most[url]
}

// forgotten returns the URLs whose connections the engine has closed.
func (w *world) forgotten() []string {
	w.client.mu.Lock()
	defer w.client.mu.Unlock()
	return slices.Clone(w.client.forgotten)
}

// look calls fn with the engine's lock held.
func look[T any](w *world, f func(e *Engine) T) T {
	w.engine.mu.Lock()
	defer w.engine.mu.Unlock()
	return f(w.engine)
}

// end stops the engine and checks that every message was settled at most once and that none is
// leased.
func (w *world) end() {
	w.Helper()
	w.stop()
	synctest.Wait()
	for _, p := range w.store.problems() {
		w.Error(p)
	}
	if s := &w.engine.scheduler; s.inFlight != 0 || s.leased != 0 || s.batched != 0 || s.leasedBytes != 0 || s.bufferedBytes != 0 ||
		w.engine.workers.count != 0 {
		w.Errorf("at the end: %d in flight, %d leased, %d of batches, %d and %d bytes, %d workers", s.inFlight, s.leased, s.batched,
			s.leasedBytes, s.bufferedBytes, w.engine.workers.count)
	}
}

// long skips a test of many events with -short, which the race detector's run sets: there an event
// costs about 20 times as much, and the order of events is the same.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short is set, and the test has many events")
	}
}

func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

func TestDelivers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200, after: time.Millisecond}))
		w.apply(dest("crm", "http://a.test"))
		w.send("web", 1000)
		w.sleep(time.Second)
		if n := len(w.client.requests("")); n != 1000 {
			t.Errorf("%d requests, want 1000", n)
		}
		r := w.report("crm")
		if r.Delivered != 1000 || r.Pending != 0 || r.Endpoints[0].State != adminapi.EndpointHealthy {
			t.Errorf("report %+v", r)
		}
		if most := w.most(""); most != 64 {
			t.Errorf("%d requests at once, want the window of 64", most)
		}
		w.end()
	})
}

// An edit of a destination compiles only this one.
func TestOtherDestinationsAreUnchanged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		destinations := []liveconfig.Destination{dest("a", urlA), dest("b", urlB), dest("c", urlC)}
		revision := 0
		apply := func() (settings map[string]*destinationConfig) {
			t.Helper()
			revision++
			check.NoError(t, "apply", w.engine.Apply(liveconfig.NewView([]liveconfig.Revisioned{{
				Config: liveconfig.Config{Version: 1, Namespace: "ns", Sources: []liveconfig.Source{{Name: "web"}, {Name: "ios"}},
					Destinations: slices.Clone(destinations)},
				Revision: strconv.Itoa(revision),
			}})))
			return look(w, func(e *Engine) map[string]*destinationConfig {
				all := map[string]*destinationConfig{}
				for key, d := range e.registry.destinations {
					all[key] = d.set
				}
				return all
			})
		}
		before := apply()
		for _, edit := range []struct {
			name   string
			change func(*liveconfig.Destination)
		}{
			{"limit", func(d *liveconfig.Destination) { d.Delivery.MaxInFlight++ }},
			{"generation", func(d *liveconfig.Destination) { d.Generation++ }},
			{"source", func(d *liveconfig.Destination) { d.Sources = []string{"web", "ios"} }},
			{"url", func(d *liveconfig.Destination) {
				d.Endpoints = []liveconfig.Endpoint{{Name: "e0", URL: liveconfig.NewSecret(urlA + "/edited")}}
			}},
			{"pause", func(d *liveconfig.Destination) { d.State = liveconfig.Paused }},
		} {
			edit.change(&destinations[0])
			after := apply()
			if after["ns/a"] == before["ns/a"] {
				t.Errorf("%s: the edited destination has the same settings, want new ones", edit.name)
			}
			if after["ns/b"] != before["ns/b"] {
				t.Errorf("%s: the other destination has new settings, want the same", edit.name)
			}
			before = after
		}
		destinations = destinations[:2]
		if after := apply(); after["ns/a"] != before["ns/a"] || after["ns/b"] != before["ns/b"] || after["ns/c"] != nil {
			t.Errorf("after the removal of a destination: got %v, want the settings of the others: %v", after, before)
		}
		w.end()
	})
}

// A view changes only the lanes of the namespaces in which it differs from the view in effect.
func TestOtherNamespacesAreUnchanged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		config := func(namespace, revision string, destinations ...liveconfig.Destination) liveconfig.Revisioned {
			return liveconfig.Revisioned{Config: liveconfig.Config{Version: 1, Namespace: namespace, Sources: []liveconfig.Source{{Name: "web"}},
				Destinations: destinations}, Revision: revision}
		}
		a := config("a", "1", dest("crm", urlA), dest("gone", urlB))
		apply := func(configs ...liveconfig.Revisioned) {
			t.Helper()
			check.NoError(t, "apply", w.engine.Apply(liveconfig.NewView(configs)))
		}
		apply(a, config("b", "1", dest("crm", urlC)))
		orphaned := config("a", "2", dest("crm", urlA))
		apply(orphaned, config("b", "1", dest("crm", urlC)))
		dropAt := func() map[string]time.Time {
			return look(w, func(e *Engine) map[string]time.Time {
				all := map[string]time.Time{}
				for l := range e.orphans.lanes {
					all[l.id.Destination] = l.dropAt
				}
				return all
			})
		}
		before := dropAt()
		check.Equal(t, "orphans of namespace a", len(before), 1)
		settings := look(w, func(e *Engine) *destinationConfig { return e.registry.destinations["a/crm"].set })

		w.sleep(time.Second)
		apply(orphaned, config("b", "2", dest("crm", urlB)))
		if diff := cmp.Diff(before, dropAt()); diff != "" {
			t.Errorf("orphans after the edit of namespace b (-want +got):\n%s", diff)
		}
		if look(w, func(e *Engine) *destinationConfig { return e.registry.destinations["a/crm"].set }) != settings {
			t.Error("settings in namespace a: got new ones, want the same ones after the edit of namespace b")
		}
		for _, source := range []string{"a/web", "b/web"} {
			w.sendTo(source, 5)
		}
		w.sleep(time.Second)
		for url, want := range map[string]int{urlA: 5, urlB: 5, urlC: 0} {
			check.Equal(t, "requests to "+url, len(w.client.requests(url)), want)
		}

		apply(config("b", "2", dest("crm", urlB)))
		check.Equal(t, "orphans after the removal of namespace a", len(dropAt()), 2)
	})
}
