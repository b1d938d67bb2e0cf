package shares

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// seeds is the number of random worlds.
const seeds = uint64(100)

const crm = "shop/destinations/crm"

var refCRM = liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: "crm"}

// dispatcher is a process, and what the operator last read of it.
type dispatcher struct {
	name string
	// document is the one that the process applies.
	document liveconfig.Shares
	// watches is false while the process gets no documents, reports is false while the operator cannot read it.
	watches, reports bool
	read             Pod
	use              Use
	// held is what the requests in flight to crm use of its limit, if that is more than its share.
	held liveconfig.Share
}

// world is a StatefulSet, its Secret and an operator.
type world struct {
	t        *testing.T
	now      time.Time
	replicas int
	pods     map[string]*dispatcher
	plan     Plan
	stored   *liveconfig.Shares
	unstored bool // The result of the last write is not known.
	operator bool
	writes   []time.Time
	others   Demand // The traffic of other objects than crm.
	// forced permits dispatchers that do not confirm for long, and so the smallest shares of new ones beside them.
	forced bool
}

func newWorld(t *testing.T, replicas int) *world {
	w := &world{t: t, now: time.Unix(1_800_000_000, 0), replicas: replicas, pods: map[string]*dispatcher{}, operator: true}
	w.scale(replicas)
	return w
}

func podName(i int) string { return fmt.Sprintf("d-%02d", i) }

func (w *world) scale(replicas int) {
	w.replicas = replicas
	for i := range replicas {
		if w.pods[podName(i)] == nil {
			w.start(podName(i))
		}
	}
	for name := range w.pods {
		if name >= podName(replicas) {
			delete(w.pods, name)
		}
	}
}

// start starts a process, which reads the stored document.
func (w *world) start(name string) {
	d := &dispatcher{name: name, watches: true, reports: true}
	if old := w.pods[name]; old != nil {
		d.read, d.use = old.read, old.use
	}
	if w.stored != nil {
		d.document = *w.stored
	}
	w.pods[name] = d
}

func (w *world) effective(d *dispatcher) liveconfig.Share {
	return max(d.document.Of(d.name).For("shop", refCRM), d.held)
}

// apply puts the stored document into effect. Requests in flight end later with the probability slow.
func (w *world) apply(d *dispatcher, r *rand.Rand, slow float64) {
	if before := w.effective(d); r.Float64() < slow {
		d.held = before
	}
	d.document = *w.stored
}

// above returns the objects above their shares in a dispatcher.
func (d *dispatcher) above() []string {
	if d.held > d.document.Of(d.name).For("shop", refCRM) {
		return []string{crm}
	}
	return nil
}

// check checks the sums of the effective shares.
func (w *world) check(when string) {
	w.t.Helper()
	sum, most := liveconfig.Share(0), liveconfig.Whole
	standard := liveconfig.Share(0)
	for _, d := range w.pods {
		sum += w.effective(d)
		standard += d.document.Of(d.name).For("shop", liveconfig.Ref{})
		if w.forced {
			most += liveconfig.Whole / 20 // The smallest share of two dispatchers.
		}
	}
	if sum > most || standard > most {
		w.t.Fatalf("%s at %v: sum of the effective shares: got %d, and %d by default, want at most %d", when, w.now, sum, standard, most)
	}
}

// sorted returns the dispatchers in an order, so that a seed has one result.
func (w *world) sorted() (list []*dispatcher) {
	for _, name := range slices.Sorted(maps.Keys(w.pods)) {
		list = append(list, w.pods[name])
	}
	return list
}

// second lets a second pass. lost is the probability that a message is lost.
func (w *world) second(r *rand.Rand, lost float64) {
	w.now = w.now.Add(time.Second)
	for _, d := range w.sorted() {
		if w.stored != nil && d.watches && r.Float64() >= lost {
			w.apply(d, r, lost)
			w.check("document applied")
		}
		if d.reports && r.Float64() >= lost {
			d.read = Pod{Applied: d.document.Number, Above: d.above()}
		}
		if lost > 0 && r.IntN(5) == 0 {
			d.held = 0
		}
	}
	if w.operator {
		w.operate(r, lost)
	}
	w.check("after a second")
}

func (w *world) operate(r *rand.Rand, lost float64) {
	if w.unstored {
		w.load()
	}
	demand := Demand{}
	maps.Copy(demand, w.others)
	for name, d := range w.pods {
		if d.reports && d.use.Used > 0 {
			demand.Add(crm, name, d.use)
		}
	}
	var changed bool
	if w.plan, changed = w.plan.Next(w.list(), func() Demand { return demand }, w.now); !changed {
		return
	}
	// A write that fails can have taken effect.
	w.unstored = r.Float64() < lost
	if !w.unstored || r.IntN(2) == 0 {
		document := w.plan.Shares
		w.stored = &document
		w.writes = append(w.writes, w.now)
	}
}

// load starts an operator.
func (w *world) load() {
	w.operator, w.unstored, w.plan = true, false, Plan{}
	if w.stored != nil {
		w.plan = Load(*w.stored)
	}
}

// list returns the dispatchers that the operator sees.
func (w *world) list() (list []Pod) {
	for i := range w.replicas {
		if w.pods[podName(i)] == nil {
			list = append(list, Pod{Name: podName(i)})
		}
	}
	for name, d := range w.pods {
		list = append(list, Pod{Name: name, Exists: true, Reports: d.reports, Applied: d.read.Applied, Above: d.read.Above})
	}
	return list
}

func (w *world) seconds(n int) {
	for range n {
		w.second(rand.New(rand.NewPCG(1, 1)), 0)
	}
}

// settled checks that the shares add up to the total and that each dispatcher has the smallest one.
func (w *world) settled() {
	w.t.Helper()
	sum := liveconfig.Share(0)
	for _, d := range w.pods {
		share := w.effective(d)
		if sum += share; share < liveconfig.Whole/liveconfig.Share(10*len(w.pods)) {
			w.t.Errorf("share of %s: got %d, less than a tenth of an equal share of %d", d.name, share, len(w.pods))
		}
	}
	if sum < liveconfig.Whole*99/100 {
		w.t.Errorf("sum of the shares of %d dispatchers: got %d, want at least %d", len(w.pods), sum, liveconfig.Whole*99/100)
	}
}

// The sum of the shares in effect never exceeds the total, whatever is lost, restarted, scaled or cut off.
func TestSumOfShares(t *testing.T) {
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 39))
			w := newWorld(t, 1+r.IntN(4))
			w.forced = seed%2 == 1
			for range 400 {
				w.event(r)
				w.second(r, 0.3)
			}
			w.load()
			w.scale(w.replicas)
			for _, d := range w.pods {
				d.watches, d.reports, d.held = true, true, 0
			}
			for range 200 {
				w.second(r, 0)
			}
			w.settled()
		})
	}
}

// event changes something in the world, with the probability of about a half.
func (w *world) event(r *rand.Rand) {
	d := w.pods[podName(r.IntN(w.replicas))]
	if d == nil {
		w.scale(w.replicas) // It starts the missing ones.
		return
	}
	switch r.IntN(40) {
	case 0:
		w.scale(1 + r.IntN(6))
	case 1:
		w.start(d.name)
	case 2:
		delete(w.pods, d.name)
	case 3:
		d.watches = !d.watches || !w.forced
	case 4:
		d.reports = !d.reports || !w.forced
	case 5:
		w.operator = false
	case 6, 7:
		if !w.operator {
			w.load()
		}
	case 8, 9, 10, 11, 12, 13, 14, 15, 16, 17:
		d.use = Use{Used: r.Float64() * float64(w.effective(d)) / float64(liveconfig.Whole), Limited: r.IntN(2) == 0}
	}
}

// traffic lets the dispatchers send calls of a rate, a part of the total, for some seconds. It returns the part of the
// total that passed in the last ten.
func (w *world) traffic(rates []float64, seconds int) (passed float64) {
	backlog := make([]float64, len(rates))
	for second := range seconds {
		for i, rate := range rates {
			d := w.pods[podName(i)]
			share := float64(w.effective(d)) / float64(liveconfig.Whole)
			backlog[i] += rate
			sent := min(share, backlog[i])
			backlog[i] -= sent
			if second%2 == 1 { // The dispatchers report numbers every two seconds.
				d.use = Use{Used: sent, Limited: backlog[i] > 5*share}
			}
			if second >= seconds-10 {
				passed += sent / 10
			}
		}
		w.seconds(1)
	}
	return passed
}

func TestSharesFollowTheTraffic(t *testing.T) {
	for _, c := range []struct {
		name  string
		rates []float64
	}{
		{"80/10/10 of the total", []float64{0.8, 0.1, 0.1}},
		{"80/10/10 of twice the total", []float64{1.6, 0.2, 0.2}},
		{"one dispatcher", []float64{1, 0, 0}},
		{"all equal", []float64{1, 1, 1}},
		{"90/5/5 of the total and seven without traffic", []float64{0.9, 0.05, 0.05, 0, 0, 0, 0, 0, 0, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, len(c.rates))
			w.seconds(60)
			if passed := w.traffic(c.rates, 30); passed < 0.9 {
				t.Errorf("part of the total that passed 20 to 30 s after the traffic began: got %.3f, want at least 0.9", passed)
			}
			w.settled()
			for _, d := range w.pods {
				d.use = Use{}
			}
			w.seconds(int(quietFor/time.Second) + 30)
			if n := len(w.stored.Objects); n != 0 {
				t.Errorf("objects with unequal shares after the traffic ended: got %d, want 0", n)
			}
		})
	}
}

// Traffic that begins in a dispatcher with the smallest share gets its part.
func TestTrafficBegins(t *testing.T) {
	w := newWorld(t, 3)
	w.seconds(60)
	w.traffic([]float64{1, 0, 0}, 60)
	if passed := w.traffic([]float64{0.2, 0.2, 0.8}, 30); passed < 0.9 {
		t.Errorf("part of the total that passed: got %.3f, want at least 0.9", passed)
	}
}

// Traffic that was a little higher at first does not leave a part of the total unused.
func TestTrafficSettles(t *testing.T) {
	w := newWorld(t, 3)
	w.seconds(60)
	w.traffic([]float64{1, 0.14, 0.12}, 30)
	if passed := w.traffic([]float64{1, 0.105, 0.105}, 60); passed < 0.92 {
		t.Errorf("part of the total that passed: got %.3f, want at least 0.92", passed)
	}
}

// shares returns the effective shares in thousandths, by dispatcher.
func (w *world) shares() (list []int64) {
	for i := range len(w.pods) {
		list = append(list, int64(w.effective(w.pods[podName(i)])/(liveconfig.Whole/1000)))
	}
	return list
}

func (w *world) want(when string, want ...int64) {
	w.t.Helper()
	if got := w.shares(); !slices.Equal(got, want) {
		w.t.Errorf("%s: shares in thousandths: got %v, want %v", when, got, want)
	}
}

func TestScale(t *testing.T) {
	w := newWorld(t, 3)
	w.seconds(5)
	w.want("three dispatchers", 333, 333, 333)
	w.scale(5)
	w.want("two more have started", 333, 333, 333, 0, 0)
	w.seconds(5)
	w.want("the others have confirmed", 200, 200, 200, 200, 200)
	w.scale(2)
	w.seconds(59)
	w.want("59 s after three have ended", 200, 200)
	w.seconds(5)
	w.want("64 s after three have ended", 500, 500)
}

// A new dispatcher waits at most 30 s for one that does not confirm.
func TestNewDispatcherBesideASilentOne(t *testing.T) {
	w := newWorld(t, 2)
	w.seconds(5)
	w.pods["d-01"].watches, w.forced = false, true
	w.scale(4)
	w.seconds(9)
	w.want("9 s later", 250, 500, 0, 0)
	w.seconds(5)
	w.want("14 s later, by what the first one has left", 250, 500, 125, 125)
	w.pods["d-00"].watches = false
	w.scale(5)
	w.seconds(23)
	w.want("23 s after a third one", 250, 500, 125, 125, 0)
	w.seconds(7)
	if share := w.shares()[4]; share < 20 {
		t.Errorf("share of the new dispatcher after 30 s in thousandths: got %d, want at least 20", share)
	}
}

// The others divide the share of a dispatcher that does not exist, for example of a pod without a node, after a minute.
func TestAbsentDispatcher(t *testing.T) {
	w := newWorld(t, 3)
	w.seconds(5)
	delete(w.pods, "d-02")
	if passed := w.traffic([]float64{1, 1}, 58); passed > 0.67 {
		t.Errorf("part of the total that passed in the first minute: got %.3f, want two thirds", passed)
	}
	if passed := w.traffic([]float64{1, 1}, 40); passed < 0.95 {
		t.Errorf("part of the total that passed after that: got %.3f, want at least 0.95", passed)
	}
	w.start("d-02")
	w.seconds(30)
	w.want("after its start without traffic", 483, 483, 33)
}

// A dispatcher that restarts keeps its share, and a rolling update writes nothing.
func TestRollingUpdate(t *testing.T) {
	w := newWorld(t, 3)
	w.seconds(5)
	before := len(w.writes)
	for i := range 3 {
		delete(w.pods, podName(i))
		w.seconds(20)
		w.start(podName(i))
		w.seconds(20)
	}
	if n := len(w.writes) - before; n != 0 {
		t.Errorf("documents during a rolling update: got %d, want 0", n)
	}
	w.want("after a rolling update", 333, 333, 333)
}

func TestWithoutOperator(t *testing.T) {
	w := newWorld(t, 3)
	w.seconds(60)
	w.traffic([]float64{0.8, 0.1, 0.1}, 30)
	before := w.shares()
	w.operator = false
	w.start("d-00")
	w.traffic([]float64{0.1, 0.8, 0.1}, 60)
	w.want("a minute without the operator", before...)
	w.load()
	if passed := w.traffic([]float64{0.1, 0.8, 0.1}, 30); passed < 0.9 {
		t.Errorf("part of the total that passed after the operator started again: got %.3f, want at least 0.9", passed)
	}
}

// Changing traffic causes at most three documents in ten seconds.
func TestWritesAreBounded(t *testing.T) {
	w := newWorld(t, 3)
	w.seconds(5)
	before, r := len(w.writes), rand.New(rand.NewPCG(7, 7))
	for range 60 {
		w.traffic([]float64{r.Float64(), r.Float64(), r.Float64()}, 10)
	}
	if n := len(w.writes) - before; n > 3*60 {
		t.Errorf("documents in 600 s: got %d, want at most 180", n)
	}
}

// One namespace does not take all places of objects with unequal shares.
func TestPlacesOfNamespaces(t *testing.T) {
	w := newWorld(t, 3)
	w.seconds(5)
	demand := Demand{}
	for _, c := range []struct {
		namespace string
		objects   int
		want      map[string]int
	}{
		{"shop", 3000, map[string]int{"shop": maxObjects}},
		{"other", 10, map[string]int{"shop": maxObjects - 10, "other": 10}},
		{"third", 2000, map[string]int{"shop": maxObjects/2 - 5, "other": 10, "third": maxObjects/2 - 5}},
	} {
		for i := range c.objects {
			demand[fmt.Sprintf("%s/destinations/d%d", c.namespace, i)] = map[string]Use{"d-00": {Used: 0.33, Limited: true}}
		}
		for range 60 {
			w.now = w.now.Add(time.Second)
			var pods []Pod
			for i := range 3 {
				pods = append(pods, Pod{Name: podName(i), Exists: true, Reports: true, Applied: w.plan.Shares.Number})
			}
			w.plan, _ = w.plan.Next(pods, func() Demand { return demand }, w.now)
		}
		got := map[string]int{}
		for key := range w.plan.Shares.Objects {
			namespace, _, _ := strings.Cut(key, "/")
			got[namespace]++
		}
		if !maps.Equal(got, c.want) {
			t.Errorf("objects with unequal shares, by namespace, a minute after %d of %s want them: got %v, want %v", c.objects, c.namespace, got, c.want)
		}
	}
}

// A slow receiver of one object delays the shares of no other one, and the sum of its own is always below the total.
func TestRequestsAboveTheShareOfOneObject(t *testing.T) {
	w := newWorld(t, 3)
	w.seconds(5)
	w.pods["d-00"].held = liveconfig.Whole / 3
	w.scale(4)
	w.seconds(8)
	for name, d := range w.pods {
		if got := d.document.Of(name).For("shop", liveconfig.Ref{}); got != liveconfig.Whole/4 {
			t.Errorf("share of another object in %s 8 s after a scale-up: got %d, want %d", name, got, liveconfig.Whole/4)
		}
	}
	w.want("8 s later", 333, 250, 250, 0)
	w.seconds(10)
	w.want("18 s later, by what is free", 333, 250, 250, 166)
	w.pods["d-00"].held = 0
	w.seconds(10)
	w.want("10 s after the requests ended", 250, 250, 250, 250)
	if n := len(w.stored.Objects); n != 0 {
		t.Errorf("objects with unequal shares after the requests ended: got %d, want 0", n)
	}
}

// An object whose raise waits for a dispatcher that gets no documents is raised by what is free, however often others change.
func TestChangesOfOthersDelayNoRaise(t *testing.T) {
	w := newWorld(t, 3)
	other := func(pod string) { w.others = Demand{"other/destinations/d": {pod: {Used: 0.3, Limited: true}}} }
	w.seconds(5)
	other("d-00")
	w.seconds(30)
	w.pods["d-01"].watches = false
	w.pods["d-02"].use = Use{Used: 0.3, Limited: true}
	for i := range 4 {
		other(podName(2 - i%2*2))
		w.seconds(10)
	}
	w.want("40 s after the traffic moved", 33, 333, 633)
}
