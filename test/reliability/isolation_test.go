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

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// gauge counts concurrent requests, and their peak.
type gauge struct{ now, peak atomic.Int64 }

func (g *gauge) enter() func() {
	n := g.now.Add(1)
	for {
		peak := g.peak.Load()
		if n <= peak || g.peak.CompareAndSwap(peak, n) {
			return func() { g.now.Add(-1) }
		}
	}
}

// sendAll sends calls id-0, id-1, … to a Source. Each must be answered 200.
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
			t.Fatalf("batch: got %+v and error %v, want 200", a, err)
		}
	}
}

// TestOneFailingOfTwenty tests twenty destinations of one Source, one of which fails in one
// of four ways. The other nineteen get all calls while the failing one gets none, and the
// failing one never has more requests than its in-flight window.
func TestOneFailingOfTwenty(t *testing.T) {
	const calls = 300
	release := make(chan struct{})
	var requests gauge
	hang := func(status int, wait func(*http.Request)) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			defer requests.enter()()
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
		// It answers after the other destinations have all calls.
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
			requests.peak.Store(0)
			boxes := make([]inbox, 19)
			dead := destination("dead", "web", bad.url(t))
			dead.Delivery.MaxInFlight = 8
			// No attempt times out meanwhile: on a busy machine the receiver detects the end of one after the next one begins.
			dead.Delivery.TimeoutMS = 60_000
			all := []liveconfig.Destination{dead}
			for i := range boxes {
				all = append(all, destination(fmt.Sprintf("d%02d", i), "web", receive(t, boxes[i].ServeHTTP).url))
			}
			r := start(t, options(t, t.TempDir(), pebblestore.Options{}), config([]liveconfig.Source{source("web")}, all...))
			sendAll(t, r, "web", "m", calls)
			wait.For(t, "all calls at the nineteen destinations", func() error {
				for i := range boxes {
					if n := boxes[i].distinct(); n != calls {
						return fmt.Errorf("d%02d has %d of %d", i, n, calls)
					}
				}
				return nil
			})
			report := ledger(t, r, "dead")
			if err := balance(report); err != nil {
				t.Error(err)
			}
			check.Equal(t, "Delivered of the failing destination", report.Delivered, 0)
			check.Equal(t, "Pending of the failing destination", report.Pending, calls)
			if peak := requests.peak.Load(); peak > 8 {
				t.Errorf("concurrent requests of the failing destination: got %d, want at most 8", peak)
			}
		})
	}
	close(release)
}

// TestFloodOfOneSource tests that a Source that floods a shared destination leaves another
// Source its share: the calls of the quiet Source are delivered before the backlog of the
// flood.
func TestFloodOfOneSource(t *testing.T) {
	const flood, quiet = 20_000, 50
	var quietDelivered, loudDelivered atomic.Int64
	done := make(chan struct{})
	crm := receive(t, func(w http.ResponseWriter, r *http.Request) {
		id, err := messageID(r)
		if err != nil {
			t.Error(err)
		}
		if strings.HasPrefix(id, "quiet") {
			if quietDelivered.Add(1) == quiet {
				close(done)
			}
			return
		}
		loudDelivered.Add(1)
		// The slow receiver causes a backlog. It takes 400 calls of the flood a second, so that a delay of the test
		// adds fewer than the limit.
		time.Sleep(40 * time.Millisecond)
	})
	d := destination("crm", "loud", crm.url)
	d.Sources = []string{"loud", "quiet"}
	r := start(t, options(t, t.TempDir(), pebblestore.Options{}), config([]liveconfig.Source{source("loud"), source("quiet")}, d))
	sendAll(t, r, "loud", "loud", flood)
	sendAll(t, r, "quiet", "quiet", quiet)
	before := loudDelivered.Load()
	select {
	case <-done:
	case <-time.After(waitLimit):
		t.Fatalf("calls of the quiet Source within %s: got %d, want %d", waitLimit, quietDelivered.Load(), quiet)
	}
	// With equal shares about 50 calls of the flood are delivered meanwhile; a tenth of the flood is the limit.
	if between := loudDelivered.Load() - before; between > flood/10 {
		t.Errorf("calls of the flood before the %d of the quiet Source: got %d, want at most %d", quiet, between, flood/10)
	} else {
		t.Logf("%d calls of the flood were delivered before the %d of the quiet Source; %d were pending", between, quiet, flood-before)
	}
}

func sockets(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("this machine has no /proc")
	}
	n := 0
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// TestThousandDestinations tests that a thousand destinations, half of them black holes,
// need bounded goroutines, sockets and memory, and that the working half gets all calls.
func TestThousandDestinations(t *testing.T) {
	const destinations, calls = 1000, 20
	var holes gauge
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
				defer holes.enter()()
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
	goroutines, peak := 0, 0
	wait.For(t, "all calls at the working half", func() error {
		goroutines, peak = max(goroutines, runtime.NumGoroutine()), max(peak, sockets(t))
		mu.Lock()
		defer mu.Unlock()
		if len(got) != destinations/2 {
			return fmt.Errorf("%d of %d receivers have a call", len(got), destinations/2)
		}
		for path, n := range got {
			if n < calls {
				return fmt.Errorf("%s has %d of %d", path, n, calls)
			}
		}
		return nil
	})
	runtime.ReadMemStats(&after)
	heap := (int64(after.HeapInuse) - int64(before.HeapInuse)) >> 20
	t.Logf("at most %d goroutines, %d sockets (both ends of each), %d in black holes; %d MB of heap growth", goroutines, peak, holes.peak.Load(), heap)
	// The defaults are 512 requests in flight and 4,096 unused connections. This process has
	// both ends of each, and the receivers have a goroutine for each.
	// On a busy machine the black hole detects closed connections late.
	const inFlight, unused = 512, 4096
	atMost := func(fact string, got, limit int) {
		t.Helper()
		if got > limit {
			t.Errorf("%s: got %d, want at most %d", fact, got, limit)
		}
	}
	atMost("goroutines", goroutines, unused+4*inFlight)
	atMost("sockets", peak, 2*(unused+inFlight)+100)
	atMost("connections of the black hole", int(holes.peak.Load()), 2*inFlight)
	atMost("MB of heap growth", int(heap), 256)
}

// TestRecoveryIsARamp tests the recovery of a receiver with 100,000 pending messages
// (POSTHORN_BACKLOG). During the outage it gets one probe at a time. After it, the number of
// concurrent requests grows with the successes.
func TestRecoveryIsARamp(t *testing.T) {
	backlog := number("POSTHORN_BACKLOG", 100_000)
	const window = 64
	var up atomic.Bool
	var requests gauge
	var mu sync.Mutex
	var peaks []int64 // The peaks of concurrent requests by the 1st, 10th, 100th … success.
	var successes, outage int64
	var box inbox
	crm := receive(t, func(w http.ResponseWriter, r *http.Request) {
		defer requests.enter()()
		if !up.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		box.ServeHTTP(w, r)
		time.Sleep(time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		if successes++; successes == 1 || successes == 10 || successes == 100 || successes == 1000 || successes == 10_000 {
			peaks = append(peaks, requests.peak.Load())
		}
	})
	d := destination("crm", "web", crm.url)
	d.Delivery.MaxInFlight = window
	r := start(t, options(t, t.TempDir(), pebblestore.Options{}), config([]liveconfig.Source{source("web")}, d))
	sendAll(t, r, "web", "first", 100)
	wait.For(t, "an open circuit", func() error {
		if s := ledger(t, r, "crm").Endpoints[0].State; s != adminapi.EndpointCircuitOpen {
			return fmt.Errorf("state %s", s)
		}
		return nil
	})
	wait.For(t, "at most one request in flight", func() error {
		if n := requests.now.Load(); n > 1 {
			return fmt.Errorf("got %d", n)
		}
		return nil
	})
	requests.peak.Store(0)
	sendAll(t, r, "web", "m", backlog)
	if outage = requests.peak.Load(); outage > 1 {
		t.Errorf("concurrent probes during the outage: got %d, want at most 1", outage)
	}
	requests.peak.Store(0)
	up.Store(true)
	wait.For(t, "the delivery of the backlog", func() error {
		if n := box.distinct(); n != backlog+100 {
			return fmt.Errorf("%d of %d", n, backlog+100)
		}
		return nil
	})
	mu.Lock()
	defer mu.Unlock()
	t.Logf("peak of %d concurrent requests during the outage; after it %v by the 1st, 10th, 100th, 1,000th, 10,000th success; %d in total", outage, peaks, requests.peak.Load())
	for _, c := range []struct {
		fact       string
		got, limit int64
	}{
		{"concurrent requests by the first success", peaks[0], 2},
		{"concurrent requests by the 10th success", peaks[1], window / 2},
		{"concurrent requests", requests.peak.Load(), window},
	} {
		if c.got > c.limit {
			t.Errorf("%s: got %d, want at most %d", c.fact, c.got, c.limit)
		}
	}
}
