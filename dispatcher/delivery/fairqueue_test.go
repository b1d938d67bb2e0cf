package delivery

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// namedLane returns a lane of a namespace; the name has no other use.
func namedLane(owner *namespace, name string) *lane {
	return &lane{owner: owner, id: queue.LaneID{Destination: name}}
}

func names(pop func() *lane) (out string) {
	for l := pop(); l != nil; l = pop() {
		out += l.id.Destination + " "
	}
	return strings.TrimSpace(out)
}

func TestReadyQueueOrder(t *testing.T) {
	for _, test := range []struct {
		name             string
		inFlightA, after int // of namespace a, before and after the lanes are pushed
		want             string
	}{
		{"equal namespaces take turns", 0, 0, "a1 b1 a2 b2 a3"},
		{"fewer requests in flight first", 5, 5, "b1 b2 a1 a2 a3"},
		{"the order follows later changes", 5, 0, "a1 b1 a2 b2 a3"},
	} {
		t.Run(test.name, func(t *testing.T) {
			a, b := &namespace{inFlight: test.inFlightA}, &namespace{}
			var q readyQueue
			for _, l := range []*lane{namedLane(a, "a1"), namedLane(a, "a2"), namedLane(a, "a3"), namedLane(b, "b1"), namedLane(b, "b2")} {
				q.push(l)
			}
			a.inFlight = test.after
			q.changed(a)
			if diff := cmp.Diff(test.want, names(q.pop)); diff != "" {
				t.Errorf("order (-want +got):\n%s", diff)
			}
			if q.len != 0 {
				t.Errorf("length of the empty queue: got %d", q.len)
			}
		})
	}
}

func TestReadyQueuePushFront(t *testing.T) {
	a, b := &namespace{}, &namespace{}
	var q readyQueue
	q.push(namedLane(a, "a1"))
	q.push(namedLane(b, "b1"))
	q.pushFront(namedLane(b, "b2"))
	q.pushFront(namedLane(b, "b3"))
	if diff := cmp.Diff("a1 b3 b2 b1", names(q.pop)); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func TestBlockedQueueOrder(t *testing.T) {
	a, b := &waitingLanes{}, &waitingLanes{}
	owner := &namespace{}
	var q blockedQueue
	for i := range 3 {
		q.push(a, namedLane(owner, fmt.Sprintf("a%d", i+1)))
	}
	q.push(b, namedLane(owner, "b1"))
	first := q.pop()
	if got := first.id.Destination; got != "a1" {
		t.Errorf("first lane: got %s, want a1", got)
	}
	q.pushFront(a, first)
	q.pushFront(b, namedLane(owner, "b0"))
	if diff := cmp.Diff("b0 a1 b1 a2 a3", names(q.pop)); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
	q.pushFront(a, namedLane(owner, "a9"))
	q.push(b, namedLane(owner, "b9"))
	if diff := cmp.Diff("a9 b9", names(q.pop)); diff != "" {
		t.Errorf("order of the queue that was empty (-want +got):\n%s", diff)
	}
}

// Random operations: each pop returns a lane of a namespace with the fewest requests in flight, and
// no lane is lost.
func TestReadyQueueAtRandom(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	namespaces := make([]*namespace, 20)
	for i := range namespaces {
		namespaces[i] = &namespace{}
	}
	var q readyQueue
	pushed, popped := 0, 0
	for range 20_000 {
		n := namespaces[random.IntN(len(namespaces))]
		switch random.IntN(3) {
		case 0:
			q.push(namedLane(n, ""))
			pushed++
		case 1:
			n.inFlight = random.IntN(10)
			q.changed(n)
		case 2:
			least := 10
			for _, other := range namespaces {
				if other.ready.len > 0 {
					least = min(least, other.inFlight)
				}
			}
			l := q.pop()
			if l == nil {
				continue
			}
			popped++
			if l.owner.inFlight != least {
				t.Fatalf("requests in flight of the next namespace: got %d, want %d", l.owner.inFlight, least)
			}
		}
	}
	for q.pop() != nil {
		popped++
	}
	if popped != pushed {
		t.Errorf("lanes: got %d out, want the %d that were pushed", popped, pushed)
	}
}

// A namespace with 500 slow destinations leaves half of the requests in flight to one with a single
// fast destination, and uses all of them while the other has no messages.
func TestNamespacesShareCapacity(t *testing.T) {
	long(t)
	const limit, crowd = 64, 500
	bubble(t, func(t *testing.T) {
		w := newWorld(t, func(r request) answer {
			if strings.Contains(r.url, "small") {
				return answer{status: 200, after: 10 * time.Millisecond}
			}
			return answer{status: 200, after: 500 * time.Millisecond}
		}, func(o *Options) { o.MaxInFlight = limit })
		large := liveconfig.Config{Version: 1, Namespace: "large", Sources: []liveconfig.Source{{Name: "web"}}}
		for i := range crowd {
			large.Destinations = append(large.Destinations, dest(fmt.Sprintf("d%03d", i), fmt.Sprintf("http://large%d.test", i)))
		}
		small := liveconfig.Config{Version: 1, Namespace: "small", Sources: []liveconfig.Source{{Name: "web"}}, Destinations: []liveconfig.Destination{dest("one", "http://small.test")}}
		if err := w.engine.Apply(liveconfig.NewView([]liveconfig.Revisioned{{Config: large, Revision: "1"},
			{Config: small, Revision: "1"}})); err != nil {
			t.Fatal(err)
		}
		inFlight := func(namespace string) int {
			return look(w, func(e *Engine) int { return e.registry.perNamespace[namespace].inFlight })
		}
		delivered := func() int64 { return w.store.DestinationStats("small/one").Ledger.Delivered }

		w.sendTo("large/web", 30)
		w.sleep(10 * time.Second)
		if got := inFlight("large"); got < limit*9/10 {
			t.Errorf("requests in flight of the only namespace with messages: got %d, want nearly %d", got, limit)
		}
		w.sendTo("small/web", 20_000)
		w.sleep(5 * time.Second) // The window of the endpoint grows, and the slow requests end.
		before := delivered()
		w.sleep(time.Second)
		// A lane alone in its namespace keeps half of its part free, as one alone in all does: 16
		// requests in flight, 100 a second each. How many of these turns it uses depends on the order
		// in which the goroutines run. A share among 501 lanes is a single request in flight.
		if got, want := delivered()-before, int64(2*100); got < want {
			t.Errorf("deliveries of the small namespace in a second: got %d, want at least %d", got, want)
		}
		if got := inFlight("large"); got < limit/2-1 {
			t.Errorf("requests in flight of the large namespace beside the small one: got %d, want at least its part, %d", got, limit/2)
		}
		w.sleep(time.Minute)
		if got := look(w, func(e *Engine) int { return e.scheduler.active }); got != 1 {
			t.Errorf("active namespaces: got %d, want 1", got)
		}
		w.stop()
	})
}

// slowLeases is a store whose leases take a second, and that counts those in progress of each namespace.
type slowLeases struct {
	*testStore
	mu            sync.Mutex
	running, most map[string]int
}

func (s *slowLeases) add(namespace string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[namespace] += n
	s.most[namespace] = max(s.most[namespace], s.running[namespace])
}

func (s *slowLeases) Lease(id queue.LaneID, n int, buf []queue.Delivery) ([]queue.Delivery, error) {
	namespace, _ := split(id.Destination)
	s.add(namespace, 1)
	defer s.add(namespace, -1)
	time.Sleep(time.Second)
	return s.testStore.Lease(id, n, buf)
}

// leasesWorld applies a namespace "large" with n destinations of each of the Sources, and "small" with one fast
// destination, "one" of the Source "web", and one that responds after 10 minutes, of the Source "slow". New lanes have
// ended their leases when it returns.
func leasesWorld(t *testing.T, n int, sources ...string) (w *world, store *slowLeases, large []string) {
	store = &slowLeases{running: map[string]int{}, most: map[string]int{}}
	w = newWorld(t, func(r request) answer {
		if strings.Contains(r.url, "slow") {
			return answer{status: 200, after: 10 * time.Minute}
		}
		return answer{status: 200}
	}, func(o *Options) {
		store.testStore = o.Store.(*testStore)
		o.Store = store
	})
	config := liveconfig.Config{Version: 1, Namespace: "large"}
	for _, source := range sources {
		config.Sources = append(config.Sources, liveconfig.Source{Name: source})
		for i := range n {
			d := dest(fmt.Sprintf("%s-%02d", source, i), fmt.Sprintf("http://%s%d.test", source, i))
			d.Sources = []string{source}
			config.Destinations, large = append(config.Destinations, d), append(large, "large/"+d.Name)
		}
	}
	slow := dest("slow", "http://slow.test")
	slow.Sources, slow.Delivery.TimeoutMS = []string{"slow"}, time.Hour.Milliseconds()
	small := liveconfig.Config{Version: 1, Namespace: "small", Sources: []liveconfig.Source{{Name: "web"}, {Name: "slow"}}, Destinations: []liveconfig.Destination{dest("one", "http://small.test"), slow}}
	if err := w.engine.Apply(liveconfig.NewView([]liveconfig.Revisioned{{Config: config, Revision: "1"},
		{Config: small, Revision: "1"}})); err != nil {
		t.Fatal(err)
	}
	w.sleep(time.Duration(2*len(large)) * time.Second)
	clear(store.most)
	return w, store, large
}

// skip appends a message of a Source that the filters of destinations, which may be none, exclude.
func (w *world) skip(source string, destinations []string) {
	w.Helper()
	if _,
		err := w.store.Append(w.Context(), []queue.Message{{Source: source, ID: "m", Type: "track", AcceptedAt: time.Now(), Skip: destinations,
		Body: []byte("m")}}); err != nil {
		w.Fatal(err)
	}
}

// A namespace with many lanes, whose messages its filters exclude, has a bounded number of leases in progress while
// another one is active, and each of its lanes has its turn.
func TestLeasesOfANamespaceAreBounded(t *testing.T) {
	const crowd = 50
	bubble(t, func(t *testing.T) {
		w, store, all := leasesWorld(t, crowd, "web")
		w.sendTo("small/slow", 1)
		w.sleep(1500 * time.Millisecond)
		w.skip("large/web", all)
		w.sleep(100 * time.Millisecond)
		w.sendTo("small/web", 1)
		w.sleep(1500 * time.Millisecond)
		if got := w.store.DestinationStats("small/one").Ledger.Delivered; got != 1 {
			t.Errorf("deliveries of the small namespace after one lease: got %d, want 1", got)
		}
		w.sleep(2 * crowd * time.Second)
		for _, key := range all {
			if got := w.store.DestinationStats(key).Ledger.Filtered; got != 1 {
				t.Errorf("%s: got %d filtered messages, want 1", key, got)
			}
		}
		if got, most := store.most["large"], maxLeases; got > most {
			t.Errorf("leases of a namespace in progress: got %d, want at most %d", got, most)
		}
		w.sleep(10 * time.Minute)
		if got := look(w, func(e *Engine) int { return e.scheduler.active + e.registry.perNamespace["large"].leases }); got != 0 {
			t.Errorf("active namespaces and leases at the end: got %d, want 0", got)
		}
		w.stop()
	})
}

// Lanes that got every message by their last lease do not wait for each other, since they read none in vain.
func TestLeasesOfDenseLanesAreFree(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var sources []string
		for i := range 2*maxLeases + 2 {
			sources = append(sources, fmt.Sprintf("s%d", i))
		}
		w, store, all := leasesWorld(t, 1, sources...)
		for i, step := range []struct {
			skip []string
			want int
		}{{nil, maxLeases}, {nil, len(sources)}, {all, len(sources)}, {all, maxLeases}} {
			clear(store.most)
			for _, source := range sources { // The leases take a second, and each notification wakes a worker.
				w.skip("large/"+source, step.skip)
				w.sleep(10 * time.Millisecond)
			}
			w.sleep(time.Minute)
			if got := store.most["large"]; got != step.want {
				t.Errorf("step %d: most leases in progress: got %d, want %d", i, got, step.want)
			}
		}
		w.stop()
	})
}

// crowdedView returns a view of eight namespaces with slow destinations, "slow0" to "slow7", and one,
// "mixed", with a healthy destination of the Source "web" and a new one of the Source "ios".
func crowdedView() *liveconfig.View {
	var configs []liveconfig.Revisioned
	for i := range 8 {
		name := fmt.Sprintf("slow%d", i)
		c := liveconfig.Config{Version: 1, Namespace: name, Sources: []liveconfig.Source{{Name: "web"}}}
		for j := range 20 {
			c.Destinations = append(c.Destinations, dest(fmt.Sprintf("d%02d", j), fmt.Sprintf("http://%s-%d.test", name, j)))
		}
		configs = append(configs, liveconfig.Revisioned{Config: c, Revision: "1"})
	}
	late := dest("new", "http://new.test")
	late.Sources = []string{"ios"}
	mixed := liveconfig.Config{
		Version: 1, Namespace: "mixed", Sources: []liveconfig.Source{{Name: "web"}, {Name: "ios"}},
		Destinations: []liveconfig.Destination{dest("healthy", "http://healthy.test"), late},
	}
	return liveconfig.NewView(append(configs, liveconfig.Revisioned{Config: mixed, Revision: "1"}))
}

// A new destination of a namespace with many healthy requests in flight gets its turn, although namespaces with fewer
// requests in flight always have failing lanes that wait.
func TestNewcomerOfABusyNamespace(t *testing.T) {
	const limit = 64
	bubble(t, func(t *testing.T) {
		n := 0 // Guarded by the client.
		w := newWorld(t, func(r request) answer {
			switch {
			case strings.Contains(r.url, "slow"):
				n++ // The slow requests end one by one.
				return answer{status: 500, after: 3*time.Second + time.Duration(n%100)*7*time.Millisecond}
			case strings.Contains(r.url, "healthy"):
				return answer{status: 200, after: 100 * time.Millisecond}
			}
			return answer{status: 200, after: 10 * time.Millisecond}
		}, func(o *Options) { o.MaxInFlight = limit })
		if err := w.engine.Apply(crowdedView()); err != nil {
			t.Fatal(err)
		}
		w.sendTo("mixed/web", 50_000)
		w.sleep(20 * time.Second) // The window of the healthy endpoint grows.
		for i := range 8 {
			w.sendTo(fmt.Sprintf("slow%d/web", i), 200)
		}
		w.sleep(20 * time.Second)
		type state struct{ Failing, MostOfASlowNamespace, Mixed int }
		before := look(w, func(e *Engine) (s state) {
			for i := range 8 {
				s.MostOfASlowNamespace = max(s.MostOfASlowNamespace, e.registry.perNamespace[fmt.Sprintf("slow%d", i)].inFlight)
			}
			s.Failing, s.Mixed = e.scheduler.failing, e.registry.perNamespace["mixed"].inFlight
			return s
		})
		if before.Failing != limit/2 || before.Mixed <= before.MostOfASlowNamespace {
			t.Fatalf("requests in flight: %+v, want all %d of the failing half, and most in the namespace mixed", before, limit/2)
		}
		w.sendTo("mixed/ios", 20)
		w.sleep(time.Minute)
		if got := w.store.DestinationStats("mixed/new").Ledger.Delivered; got != 20 {
			t.Errorf("deliveries of the new destination in a minute: got %d, want 20", got)
		}
		w.stop()
	})
}
