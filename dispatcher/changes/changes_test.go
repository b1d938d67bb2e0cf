package changes

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
)

// lanes connects every Source of a namespace to every destination of it.
type lanes struct{ configs map[string]liveconfig.Config }

func (l *lanes) DestinationsOf(source string) (keys []string) {
	namespace, _, _ := strings.Cut(source, "/")
	for _, d := range l.configs[namespace].Destinations {
		keys = append(keys, namespace+"/"+d.Name)
	}
	return keys
}

func (l *lanes) SourcesOf(destination string) (keys []string) {
	namespace, _, _ := strings.Cut(destination, "/")
	for _, s := range l.configs[namespace].Sources {
		keys = append(keys, namespace+"/"+s.Name)
	}
	return keys
}

// world is a Log with a model of the dispatcher: the configs, and one number per object.
type world struct {
	lanes
	log     *Log
	numbers map[string]int64
	refused map[string]adminapi.RefusedConfig
	built   int
}

func newWorld() *world {
	w := &world{lanes: lanes{map[string]liveconfig.Config{}}, numbers: map[string]int64{}, refused: map[string]adminapi.RefusedConfig{}}
	w.log = New(func() Lanes { return &w.lanes })
	return w
}

// update publishes the configs.
func (w *world) update() {
	var configs []liveconfig.Revisioned
	for namespace, c := range w.configs {
		c.Namespace = namespace
		configs = append(configs, liveconfig.Revisioned{Config: c, Revision: fmt.Sprintf("%+v", c)})
	}
	w.log.Update(liveconfig.NewView(configs), w.refused)
}

// namespace returns the report of a namespace.
func (w *world) namespace(name string, c liveconfig.Config) adminapi.NamespaceReport {
	n := adminapi.NamespaceReport{Namespace: name}
	if _, ok := w.configs[name]; ok {
		n.Revision = "present"
	}
	if refused, ok := w.refused[name]; ok {
		n.Refused = &refused
	}
	for _, s := range c.Sources {
		w.built++
		n.Sources = append(n.Sources, adminapi.SourceReport{Name: s.Name, Revision: s.Revision, Accepted: w.numbers[name+"/"+s.Name]})
	}
	for _, d := range c.Destinations {
		w.built++
		n.Destinations = append(n.Destinations, adminapi.DestinationReport{Name: d.Name, Revision: d.Revision,
			Retrying: w.numbers[name+"/"+d.Name]})
	}
	return n
}

// report returns the full report.
func (w *world) report() adminapi.Report {
	r := adminapi.Report{Cursor: w.log.Cursor()}
	for name, c := range w.configs {
		r.Namespaces = append(r.Namespaces, w.namespace(name, c))
	}
	for name := range w.refused {
		if _, ok := w.configs[name]; !ok {
			r.Namespaces = append(r.Namespaces, w.namespace(name, liveconfig.Config{}))
		}
	}
	return r
}

// since returns the report since a cursor, or nil.
func (w *world) since(cursor string) *adminapi.Report {
	c, ok := w.log.Since(cursor, Pod{Ready: true})
	switch {
	case !ok:
		return nil
	case c.Full:
		r := w.report()
		return &r
	}
	r := &adminapi.Report{Cursor: c.Cursor, Delta: true, RemovedNamespaces: c.Removed}
	for name, n := range c.Namespaces {
		report := w.namespace(name, n.Select(w.configs[name]))
		report.Complete, report.Removed = n.Complete, n.Removed
		r.Namespaces = append(r.Namespaces, report)
	}
	return r
}

// reader merges reports.
type reader struct{ index *podreport.Index }

func (r *reader) poll(w *world) (changed []string) {
	cursor := ""
	if r.index != nil {
		cursor = r.index.Cursor
	}
	if report := w.since(cursor); report != nil {
		r.index, changed = r.index.Merge(*report, nil)
	}
	return changed
}

// state returns what the reader knows, in a form that can be compared.
func state(x *podreport.Index, w *world) map[string]string {
	all := map[string]string{}
	for i := range 6 {
		name := fmt.Sprint("n", i)
		n := x.Namespace(name)
		if n == nil {
			continue
		}
		all[name] = fmt.Sprint(n.Revision, n.Refused)
		for _, s := range n.Sources {
			all[name+" source "+s.Name] = fmt.Sprint(s.Revision, s.Accepted)
		}
		for d := range n.Destinations() {
			all[name+" destination "+d.Name] = fmt.Sprint(d.Revision, d.Retrying)
		}
	}
	return all
}

// The merged reports of readers that poll at random times equal the full report when the changes
// have ended, whatever changed in between.
func TestMergedChangesEqualTheReport(t *testing.T) {
	for seed := range uint64(30) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			w := newWorld()
			readers := []*reader{{}, {}, {}}
			for range 400 {
				w.step(random)
				for i, r := range readers {
					if random.IntN(2+20*i) == 0 { // The last one often has a cursor that is too old.
						r.poll(w)
					}
				}
				time.Sleep(time.Duration(random.Int64N(int64(time.Second))))
			}
			want := state(podreport.NewIndex(w.report()), w)
			for i, r := range readers {
				for range 10 {
					time.Sleep(NumbersInterval)
					r.poll(w)
				}
				if diff := cmp.Diff(want, state(r.index, w)); diff != "" {
					t.Errorf("seed %d, reader %d (-report +merged):\n%s", seed, i, diff)
				}
			}
			w.log.mu.Lock()
			defer w.log.mu.Unlock()
			if n := w.log.order.Len(); n > 6*(2*25+2*minRemoved) {
				t.Errorf("seed %d: the order has %d entries", seed, n)
			}
		})
	}
}

// step changes something.
func (w *world) step(random *rand.Rand) {
	name := fmt.Sprint("n", random.IntN(6))
	c, exists := w.configs[name]
	object := fmt.Sprint(random.IntN(20))
	revision := fmt.Sprint(random.IntN(1000))
	switch random.IntN(12) {
	case 0:
		delete(w.configs, name)
	case 1:
		w.refused[name] = adminapi.RefusedConfig{Revision: revision}
	case 2:
		delete(w.refused, name)
	case 3, 4:
		c.Sources = toggle(c.Sources, "s"+object, func(s liveconfig.Source) string { return s.Name }, liveconfig.Source{Name: "s" + object, Revision: revision})
		w.configs[name] = c
	case 5, 6, 7:
		c.Destinations = toggle(c.Destinations, "d"+object, func(d liveconfig.Destination) string { return d.Name }, liveconfig.Destination{Name: "d" + object, Revision: revision})
		w.configs[name] = c
	default:
		if !exists {
			return
		}
		for _, s := range c.Sources {
			w.numbers[name+"/"+s.Name]++
			for _, d := range c.Destinations {
				w.numbers[name+"/"+d.Name]++
			}
			w.log.Object(Sources, name, s.Name).Appended()
		}
		for _, d := range c.Destinations {
			if random.IntN(3) > 0 {
				continue
			}
			w.numbers[name+"/"+d.Name]++
			for _, s := range c.Sources {
				w.numbers[name+"/"+s.Name]++
			}
			if o := w.log.Object(Destinations, name, d.Name); random.IntN(10) == 0 {
				o.Transition()
			} else {
				o.Numbers()
			}
		}
		return
	}
	w.update()
}

// toggle removes an object if it exists, and adds it otherwise.
func toggle[O any](all []O, name string, nameOf func(O) string, o O) []O {
	rest := slices.DeleteFunc(slices.Clone(all), func(o O) bool { return nameOf(o) == name })
	if len(rest) < len(all) {
		return rest
	}
	return append(rest, o)
}

// numbered returns a world with one namespace of n destinations.
func numbered(n int) *world {
	w := newWorld()
	c := liveconfig.Config{Sources: []liveconfig.Source{{Name: "web", Revision: "1"}}}
	for i := range n {
		c.Destinations = append(c.Destinations, liveconfig.Destination{Name: fmt.Sprintf("d%05d", i), Revision: "1"})
	}
	w.configs["n0"] = c
	w.update()
	return w
}

func TestIdlePollCostsNothing(t *testing.T) {
	w := numbered(1000)
	r := &reader{}
	r.poll(w)
	built := w.built
	object := w.log.Object(Destinations, "n0", "d00001")
	object.Numbers()
	r.poll(w)
	if got := w.built - built; got != 2 {
		t.Errorf("reports built for a changed destination with one Source: got %d, want 2", got)
	}
	built = w.built
	cursor := r.index.Cursor
	if n := testing.AllocsPerRun(100, func() {
		if _, ok := w.log.Since(cursor, Pod{Ready: true}); ok {
			t.Error("an idle poll has changes")
		}
	}); n > 0 {
		t.Errorf("allocations of an idle poll: got %v, want 0", n)
	}
	if w.built != built {
		t.Errorf("reports built by idle polls: got %d, want 0", w.built-built)
	}
	object.Numbers()
	if n := testing.AllocsPerRun(100, object.Numbers); n > 0 {
		t.Errorf("allocations of a mark: got %v, want 0", n)
	}
}

func TestNumbersAreCoalesced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := numbered(3)
		r := &reader{}
		r.poll(w)
		value := func() int64 {
			var d adminapi.DestinationReport
			r.index.Namespace("n0").ReadDestination("d00000", &d)
			return d.Retrying
		}
		object := w.log.Object(Destinations, "n0", "d00000")
		change := func(mark func()) {
			w.numbers["n0/d00000"]++
			mark()
			r.poll(w)
		}
		change(object.Numbers)
		if value() != 1 {
			t.Errorf("the first change of an idle object: got %d, want 1", value())
		}
		change(object.Numbers)
		if value() != 1 {
			t.Errorf("numbers within the interval: got %d, want 1", value())
		}
		change(object.Transition)
		if value() != 3 {
			t.Errorf("a transition within the interval: got %d, want 3", value())
		}
		change(object.Numbers)
		time.Sleep(NumbersInterval)
		r.poll(w)
		if value() != 4 {
			t.Errorf("numbers after the interval: got %d, want 4", value())
		}
	})
}

func TestNumbersAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const objects = 5000
		w := numbered(objects)
		r := &reader{}
		r.poll(w)
		built := w.built
		for range 10 {
			w.log.Object(Sources, "n0", "web").Appended()
			r.poll(w)
			time.Sleep(time.Second)
		}
		most := NumbersPerSecond * (10 + int(NumbersInterval/time.Second))
		if got := w.built - built; got > most || got < NumbersPerSecond*10 {
			t.Errorf("reports in 10 s with %d busy objects: got %d, want %d to %d", objects, got, NumbersPerSecond*10, most)
		}
	})
}

func TestTransitionAt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := numbered(1)
		r := &reader{}
		r.poll(w)
		object := w.log.Object(Destinations, "n0", "d00000")
		object.TransitionAt(time.Now().Add(time.Hour))
		object.TransitionAt(time.Now().Add(time.Minute))
		object.TransitionAt(time.Now().Add(time.Hour))
		time.Sleep(time.Minute - time.Nanosecond)
		if changed := r.poll(w); changed != nil {
			t.Errorf("before the time: changes of %v", changed)
		}
		time.Sleep(time.Nanosecond)
		if changed := r.poll(w); len(changed) != 1 {
			t.Errorf("at the time: changes of %v, want n0", changed)
		}
	})
}

func TestUnknownCursors(t *testing.T) {
	w, other := numbered(1), numbered(1)
	cursor := w.log.Cursor()
	for name, cursor := range map[string]string{
		"none": "", "of another process": other.log.Cursor(), "of the future": strings.Split(cursor, ".")[0] + ".1000000", "an ETag": `"abc"`,
	} {
		if c, _ := w.log.Since(cursor, Pod{}); !c.Full {
			t.Errorf("%s: not a full report", name)
		}
	}
	if c, _ := w.log.Since(cursor, Pod{Ready: true}); c.Full {
		t.Error("a known cursor: a full report")
	}
}

func TestRemovedNamespacesAreBounded(t *testing.T) {
	w := newWorld()
	cursor := w.log.Cursor()
	for i := range 10 * minRemoved {
		name := fmt.Sprint("x", i)
		w.configs[name] = liveconfig.Config{Sources: []liveconfig.Source{{Name: "web"}}}
		w.update()
		delete(w.configs, name)
		w.update()
	}
	if n := w.log.order.Len(); n > 2*minRemoved {
		t.Errorf("entries of removed namespaces: got %d, want at most %d", n, 2*minRemoved)
	}
	if n := len(w.log.namespaces); n > 2*minRemoved {
		t.Errorf("removed namespaces in memory: got %d, want at most %d", n, 2*minRemoved)
	}
	if c, _ := w.log.Since(cursor, Pod{}); !c.Full {
		t.Error("a cursor before forgotten removals: not a full report")
	}
}

func TestNilLog(t *testing.T) {
	var l *Log
	l.Update(liveconfig.NewView(nil), nil)
	o := l.Object(Sources, "a", "b")
	o.Appended()
	o.Numbers()
	o.Transition()
	o.TransitionAt(time.Now())
}

func BenchmarkMark(b *testing.B) {
	o := numbered(1).log.Object(Destinations, "n0", "d00000")
	for b.Loop() {
		o.Numbers()
	}
}
