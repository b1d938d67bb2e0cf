package reliability

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// gauge counts who is inside, and the most there ever were.
type gauge struct{ now, most atomic.Int64 }

func (g *gauge) enter() func() {
	n := g.now.Add(1)
	for {
		most := g.most.Load()
		if n <= most || g.most.CompareAndSwap(most, n) {
			return func() { g.now.Add(-1) }
		}
	}
}

// sendAll sends calls id-0, id-1, … to a Source and wants each answered 200.
func sendAll(t *testing.T, r *running, source, id string, count int) {
	t.Helper()
	c := newClient()
	defer c.close()
	for n := 0; n < count; {
		var calls []string
		for len(calls) < 500 && n < count {
			calls = append(calls, call(fmt.Sprint(id, "-", n), ""))
			n++
		}
		if a, err := c.batch(t.Context(), r.Addr(), source, calls...); err != nil || a.status != http.StatusOK {
			t.Fatalf("%+v %v", a, err)
		}
	}
}

// TestOneDeadOfTwenty: twenty destinations of one Source, one of them dead in
// each of four ways. The other nineteen get everything while the dead one has
// not delivered, and never holds more than its own window of requests.
func TestOneDeadOfTwenty(t *testing.T) {
	const calls = 300
	release := make(chan struct{})
	var held gauge
	hang := func(status int, wait func(*http.Request)) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			defer held.enter()()
			_, _ = io.Copy(io.Discard, r.Body)
			wait(r)
			w.WriteHeader(status)
		}
	}
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	for _, bad := range []struct {
		name string
		url  func(t *testing.T) string
	}{
		{"refused", func(*testing.T) string { return "http://" + closed.Addr().String() }},
		{"black hole", func(t *testing.T) string {
			return receive(t, hang(200, func(r *http.Request) { <-r.Context().Done() })).url
		}},
		// Slower than anything here lasts: what it delivers, it delivers after the others are done.
		{"slow", func(t *testing.T) string {
			return receive(t, hang(200, func(r *http.Request) {
				select {
				case <-release:
				case <-r.Context().Done():
				}
			})).url
		}},
		{"500s", func(t *testing.T) string { return receive(t, hang(500, func(*http.Request) {})).url }},
	} {
		t.Run(bad.name, func(t *testing.T) {
			held.most.Store(0)
			boxes := make([]inbox, 19)
			dead := destination("dead", "web", bad.url(t))
			dead.Delivery.MaxInFlight = 8
			all := []liveconfig.Destination{dead}
			for i := range boxes {
				all = append(all, destination(fmt.Sprintf("d%02d", i), "web", receive(t, boxes[i].ServeHTTP).url))
			}
			r := start(t, options(t, t.TempDir(), pebblestore.Options{}), config([]liveconfig.Source{source("web")}, all...))
			sendAll(t, r, "web", "m", calls)
			eventually(t, "the nineteen have all", func() error {
				for i := range boxes {
					if n := boxes[i].distinct(); n != calls {
						return fmt.Errorf("d%02d has %d", i, n)
					}
				}
				return nil
			})
			report := ledger(t, r, "dead")
			if err := balance(report); err != nil {
				t.Error(err)
			}
			if report.Delivered != 0 || report.Pending != calls {
				t.Errorf("the dead one: %+v", report)
			}
			if most := held.most.Load(); most > 8 {
				t.Errorf("the dead one held %d requests; its window is 8", most)
			}
		})
	}
	close(release)
}

// TestFloodOfOneSource: a Source that floods a shared destination leaves another
// Source its share: what the quiet one sends arrives while the flood's backlog
// is still there, not behind it.
func TestFloodOfOneSource(t *testing.T) {
	const flood, quiet = 20_000, 50
	var arrived, ahead atomic.Int64
	done := make(chan struct{})
	crm := receive(t, func(w http.ResponseWriter, r *http.Request) {
		id, err := messageID(r)
		if err != nil {
			t.Error(err)
		}
		if strings.HasPrefix(id, "quiet") {
			if arrived.Add(1) == quiet {
				close(done)
			}
			return
		}
		ahead.Add(1)
		time.Sleep(2 * time.Millisecond) // A receiver with work to do: there is a backlog.
	})
	d := destination("crm", "loud", crm.url)
	d.Sources = []string{"loud", "quiet"}
	r := start(t, options(t, t.TempDir(), pebblestore.Options{}), config([]liveconfig.Source{source("loud"), source("quiet")}, d))
	sendAll(t, r, "loud", "loud", flood)
	before := ahead.Load()
	sendAll(t, r, "quiet", "quiet", quiet)
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("the quiet Source starves")
	}
	// With equal shares some 50 of the flood go out beside the 50; a tenth of the flood would still be fair enough.
	if between := ahead.Load() - before; between > flood/10 {
		t.Errorf("%d calls of the flood went out before the %d of the quiet Source", between, quiet)
	} else {
		t.Logf("%d calls of the flood went out beside the %d of the quiet Source; %d were waiting", between, quiet, flood-before)
	}
}

func sockets(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc here")
	}
	n := 0
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// TestThousandDestinations: a thousand destinations, half of them black holes,
// work with bounded goroutines, sockets and memory, and the good half gets all.
func TestThousandDestinations(t *testing.T) {
	const destinations, calls = 1000, 20
	var held gauge
	hole, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer hole.Close()
	go func() {
		for {
			c, err := hole.Accept()
			if err != nil {
				return
			}
			go func() {
				defer held.enter()()
				defer c.Close()
				_, _ = io.Copy(io.Discard, c)
			}()
		}
	}()
	var mu sync.Mutex
	got := map[string]int{}
	good := receive(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		mu.Lock()
		defer mu.Unlock()
		got[r.URL.Path]++
	})
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var all []liveconfig.Destination
	for i := range destinations {
		url := fmt.Sprintf("%s/%d", good.url, i)
		if i%2 == 1 {
			url = "http://" + hole.Addr().String()
		}
		d := destination(fmt.Sprintf("d%04d", i), "web", url)
		d.Delivery.TimeoutMS = 1000
		all = append(all, d)
	}
	r := start(t, options(t, t.TempDir(), pebblestore.Options{}), config([]liveconfig.Source{source("web")}, all...))
	sendAll(t, r, "web", "m", calls)
	goroutines, most := 0, 0
	eventually(t, "the good half has all", func() error {
		goroutines, most = max(goroutines, runtime.NumGoroutine()), max(most, sockets(t))
		mu.Lock()
		defer mu.Unlock()
		if len(got) != destinations/2 {
			return fmt.Errorf("%d of %d receivers got something", len(got), destinations/2)
		}
		for path, n := range got {
			if n < calls {
				return fmt.Errorf("%s got %d", path, n)
			}
		}
		return nil
	})
	runtime.ReadMemStats(&after)
	heap := (int64(after.HeapInuse) - int64(before.HeapInuse)) >> 20
	t.Logf("at most %d goroutines, %d sockets (both ends of each), %d in black holes; %d MB of heap more", goroutines, most, held.most.Load(), heap)
	// By default 512 requests in flight and 4,096 unused connections, here with
	// both their ends, and a goroutine for each on the receivers' side.
	// The black hole sees late, on a busy machine, that one was closed.
	const inFlight, unused = 512, 4096
	if goroutines > unused+4*inFlight || most > 2*(unused+inFlight)+100 || held.most.Load() > 2*inFlight || heap > 256 {
		t.Error("that is not bounded by the requests in flight")
	}
}

// TestRecoveryIsARamp: a receiver comes back after an outage with 100,000
// messages waiting (POSTHORN_BACKLOG). While it was dead it saw one probe at a
// time; now it sees a few requests first and more only after those went well.
func TestRecoveryIsARamp(t *testing.T) {
	backlog := number("POSTHORN_BACKLOG", 100_000)
	const window = 64
	var up atomic.Bool
	var inside gauge
	var mu sync.Mutex
	var peaks []int64 // The most at once among the first 10, 100, 1000 … successes.
	var successes, outage int64
	var box inbox
	crm := receive(t, func(w http.ResponseWriter, r *http.Request) {
		defer inside.enter()()
		if !up.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		box.ServeHTTP(w, r)
		time.Sleep(time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		if successes++; successes == 1 || successes == 10 || successes == 100 || successes == 1000 || successes == 10_000 {
			peaks = append(peaks, inside.most.Load())
		}
	})
	d := destination("crm", "web", crm.url)
	d.Delivery.MaxInFlight = window
	r := start(t, options(t, t.TempDir(), pebblestore.Options{}), config([]liveconfig.Source{source("web")}, d))
	sendAll(t, r, "web", "first", 100)
	eventually(t, "the circuit opens", func() error {
		if s := ledger(t, r, "crm").Endpoints[0].State; s != liveconfig.EndpointCircuitOpen {
			return fmt.Errorf("it is %s", s)
		}
		return nil
	})
	eventually(t, "what was in flight has ended", func() error {
		if n := inside.now.Load(); n > 1 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	inside.most.Store(0)
	sendAll(t, r, "web", "m", backlog)
	if outage = inside.most.Load(); outage > 1 {
		t.Errorf("%d probes at once during the outage", outage)
	}
	inside.most.Store(0)
	up.Store(true)
	eventually(t, "the backlog is delivered", func() error {
		if n := box.distinct(); n != backlog+100 {
			return fmt.Errorf("%d of %d", n, backlog+100)
		}
		return nil
	})
	mu.Lock()
	defer mu.Unlock()
	t.Logf("at most %d at once during the outage; after it %v by the 1st, 10th, 100th, 1,000th, 10,000th success; %d at most", outage, peaks, inside.most.Load())
	if peaks[0] > 2 || peaks[1] > window/2 || inside.most.Load() > window {
		t.Error("that is a wall, not a ramp")
	}
}
