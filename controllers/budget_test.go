package controllers

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/controllers/kinds"
	"github.com/posthorn/posthorn/test/check"
)

// virtualOperator is a status reconciler with a virtual clock and a fake API server, which
// has accepted Sources in one namespace.
type virtualOperator struct {
	*statusReconciler
	start, time time.Time
	pod         Pod
	probe       *probe
	computed    int

	mu      sync.Mutex
	sources []v1beta1.Source
	index   map[string]int
	// writes are the status writes in order.
	writes []virtualWrite
}

type virtualWrite struct {
	name string
	at   time.Duration
}

func newVirtualOperator(t *testing.T, sources int) *virtualOperator {
	start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	o := &virtualOperator{start: start, time: start, pod: Pod{Name: "dispatcher-0"}, index: map[string]int{}}
	verdicts := verdictsByUID{}
	for i := range sources {
		name := fmt.Sprintf("source-%05d", i)
		o.sources = append(o.sources, v1beta1.Source{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name), Generation: 1, ResourceVersion: "1"}})
		o.index[name] = i
		verdicts[types.UID(name)] = generationVerdict{generation: 1,
			Verdict: compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "m", State: liveconfig.Active, Revision: "r"}}
	}
	kind := kinds.All[1]
	next := kind.Health.Next
	kind.Health.Next = func(object compile.Object, v compile.Verdict, namespace string, pods []health.Pod, now time.Time) (transition,
		latest compile.Object) {
		o.mu.Lock()
		o.computed++
		o.mu.Unlock()
		return next(object, v, namespace, pods, now)
	}
	cache := newVerdictCache()
	cache.set("shop", verdicts)
	reports := newProber(nil, time.Second, nil, func(reportChange) {}, func(Pod, bool) {})
	reports.listed = true
	o.probe = newProbe(reports, o.pod, false)
	o.statusReconciler = &statusReconciler{
		Client: virtualAPI{o: o}, kinds: kinds.Table{kind}, verdicts: cache, reports: reports,
		changes: &reportChanges{byNamespace: map[string]uint64{}},
		events:  &events.FakeRecorder{}, budget: newWriteBudget(), memos: map[string]map[types.UID]*memo{},
		now: func() time.Time { return o.time }, numbersInterval: 30 * time.Second,
	}
	o.report(t, 0, nil)
	return o
}

// report makes the dispatcher report a number of calls for every Source, and lets change
// change the report about each.
func (o *virtualOperator) report(t *testing.T, calls int64, change func(*adminapi.SourceReport)) {
	r := adminapi.NamespaceReport{Namespace: "shop"}
	for i := range o.sources {
		s := adminapi.SourceReport{Name: o.sources[i].Name, Generation: 1, Revision: "r", Accepted: calls}
		if change != nil {
			change(&s)
		}
		r.Sources = append(r.Sources, s)
	}
	o.reports.record(t.Context(), o.pod, o.probe, podreport.Changes{Report: &adminapi.Report{Namespaces: []adminapi.NamespaceReport{r}}}, nil)
	o.changes.add(reportChange{namespaces: []string{"shop"}})
}

// pass reconciles the namespace and returns the wait until the next pass.
func (o *virtualOperator) pass(t *testing.T) time.Duration {
	t.Helper()
	result, err := o.Reconcile(t.Context(), namespaceRequest("shop"))
	if err != nil {
		t.Fatal(err)
	}
	return result.RequeueAfter
}

// runFor reconciles the namespace whenever it requires so, and moves the clock.
func (o *virtualOperator) runFor(t *testing.T, d time.Duration) {
	t.Helper()
	for end := o.time.Add(d); ; {
		wait := o.pass(t)
		if wait == 0 || o.time.Add(wait).After(end) {
			o.time = end
			return
		}
		o.time = o.time.Add(wait)
	}
}

// virtualAPI is the API server of a virtualOperator.
type virtualAPI struct {
	client.Client
	o *virtualOperator
}

func (a virtualAPI) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	a.o.mu.Lock()
	defer a.o.mu.Unlock()
	list.(*v1beta1.SourceList).Items = slices.Clone(a.o.sources)
	return nil
}

func (a virtualAPI) Status() client.SubResourceWriter { return virtualStatus{o: a.o} }

type virtualStatus struct {
	client.SubResourceWriter
	o *virtualOperator
}

// Apply stores a status and returns the object in configuration.
func (a virtualStatus) Apply(_ context.Context, configuration runtime.ApplyConfiguration, _ ...client.SubResourceApplyOption) error {
	applied, err := json.Marshal(configuration)
	if err != nil {
		return err
	}
	var source v1beta1.Source
	if err := json.Unmarshal(applied, &source); err != nil {
		return err
	}
	a.o.mu.Lock()
	defer a.o.mu.Unlock()
	a.o.writes = append(a.o.writes, virtualWrite{source.Name, a.o.time.Sub(a.o.start)})
	stored := &a.o.sources[a.o.index[source.Name]]
	stored.TypeMeta, stored.Status, stored.ResourceVersion = source.TypeMeta, source.Status, fmt.Sprint(len(a.o.writes)+1)
	result, err := json.Marshal(stored)
	if err != nil {
		return err
	}
	return json.Unmarshal(result, configuration)
}

// writesUntil counts the writes up to a time, and the written objects.
func (o *virtualOperator) writesUntil(d time.Duration) (writes, objects int) {
	names := map[string]bool{}
	for _, w := range o.writes {
		if w.at <= d {
			writes++
			names[w.name] = true
		}
	}
	return writes, len(names)
}

func TestBurstOfTransitions(t *testing.T) {
	o := newVirtualOperator(t, transitionBurst)
	o.pass(t)
	writes, objects := o.writesUntil(0)
	check.Equal(t, "writes in the first pass", writes, transitionBurst)
	check.Equal(t, "written objects", objects, transitionBurst)
}

func TestTransitionsBeyondTheBurst(t *testing.T) {
	const sources = transitionBurst + 10*transitionsPerSecond
	o := newVirtualOperator(t, sources)
	o.runFor(t, 15*time.Second)
	for _, c := range []struct {
		after time.Duration
		want  int
	}{{0, transitionBurst}, {time.Second, transitionBurst + transitionsPerSecond}, {9 * time.Second, transitionBurst + 9*transitionsPerSecond},
		{15 * time.Second, sources}} {
		writes, objects := o.writesUntil(c.after)
		check.Equal(t, fmt.Sprintf("writes until %s", c.after), writes, c.want)
		check.Equal(t, fmt.Sprintf("written objects until %s", c.after), objects, c.want)
	}
}

// An outage of all dispatchers is written once for each object, at the rate of transitions.
func TestOutageWithinTheBudget(t *testing.T) {
	const sources = transitionBurst + 5*transitionsPerSecond
	o := newVirtualOperator(t, sources)
	o.runFor(t, time.Hour)
	o.start, o.writes = o.time, nil
	delete(o.reports.probes, o.pod)
	o.changes.add(reportChange{pods: true})
	o.runFor(t, downAfter)
	check.Equal(t, "writes without a ready pod for less than 2 minutes", len(o.writes), 0)
	o.start, o.reports.down = o.time, true
	o.changes.add(reportChange{all: true})
	o.runFor(t, time.Hour)
	for _, c := range []struct {
		after time.Duration
		want  int
	}{{0, transitionBurst}, {time.Second, transitionBurst + transitionsPerSecond}, {time.Hour, sources}} {
		writes, objects := o.writesUntil(c.after)
		check.Equal(t, fmt.Sprintf("writes until %s", c.after), writes, c.want)
		check.Equal(t, fmt.Sprintf("written objects until %s", c.after), objects, c.want)
	}
}

// Passes over several namespaces run side by side, and each uses the time of its start. Tokens are
// given once, whatever the order of the reservations.
func TestBucketWithSeveralClocks(t *testing.T) {
	b := newWriteBudget().transitions
	start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	var last time.Time
	for i := range transitionBurst + 10*transitionsPerSecond {
		last = b.reserve(start.Add(time.Duration(i%2) * time.Second))
	}
	if got, want := last.Sub(start), 10*time.Second; got < want || got > want+time.Second {
		t.Errorf("the last of 1,500 reservations: got %v, want %v to %v", got, want, want+time.Second)
	}
	if got := b.reserve(start.Add(-time.Hour)); got.After(start.Add(-time.Hour + 11*time.Second)) {
		t.Errorf("after the clock was set back by an hour: got %v, want no wait of more than 11 s", got.Sub(start))
	}
}

func TestNumbersAtARate(t *testing.T) {
	const sources, seconds = transitionBurst, 60
	o := newVirtualOperator(t, sources)
	o.report(t, 1, nil)
	o.pass(t) // The transitions.
	o.start, o.writes = o.time, nil
	for second := range seconds {
		o.report(t, int64(second+2), nil)
		o.runFor(t, time.Second)
	}
	perSecond, perObject := map[time.Duration]int{}, map[string]int{}
	for _, w := range o.writes {
		perSecond[w.at.Truncate(time.Second)]++
		perObject[w.name]++
	}
	for second, writes := range perSecond {
		if writes > numbersPerSecond+1 {
			t.Errorf("writes in second %s: got %d, want at most %d", second, writes, numbersPerSecond+1)
		}
	}
	for name, writes := range perObject {
		if writes > 2 {
			t.Errorf("writes of %s in %d s: got %d, want at most 2", name, seconds, writes)
		}
	}
	check.Equal(t, "objects that were written", len(perObject), sources)
	if first := o.writes[0].at; first < o.numbersInterval {
		t.Errorf("the first numbers after the transitions: got %s, want at least %s", first, o.numbersInterval)
	}

	t.Run("a transition does not wait", func(t *testing.T) {
		o.start, o.writes = o.time, nil
		rejecting := o.sources[7].Name
		o.report(t, seconds+2, func(r *adminapi.SourceReport) { r.StoragePressure = r.Name == rejecting })
		o.pass(t)
		var names []string
		for _, w := range o.writes {
			names = append(names, w.name)
		}
		if !slices.Contains(names, rejecting) {
			t.Errorf("writes of the first pass: got %v, want %s among them", names, rejecting)
		}
	})
}

// A pass computes only the objects whose inputs changed, or for which something is due.
func TestPassesSkipUnchangedObjects(t *testing.T) {
	o := newVirtualOperator(t, 100)
	kept := func() (n int) {
		for _, m := range o.memos["shop"] {
			if m.written != nil {
				n++
			}
		}
		return n
	}
	check.Equal(t, "wait after the transitions", o.pass(t), writtenKept)
	check.Equal(t, "written objects that are kept", kept(), 100)
	o.pass(t) // The written objects have another resource version.
	check.Equal(t, "written objects that are kept after the second pass", kept(), 0)
	o.computed = 0
	check.Equal(t, "wait until the next pass", o.pass(t), 0)
	check.Equal(t, "computed statuses without a change", o.computed, 0)
	o.sources[3].Generation++
	o.pass(t)
	check.Equal(t, "computed statuses of an object without a verdict", o.computed, 0)
	o.sources[4].ResourceVersion = "x"
	o.pass(t)
	check.Equal(t, "computed statuses after a change of one object", o.computed, 1)
}

// A pod that leaves, and its successor with the same report, change no settled object, so a pass
// computes none. Another report of the successor is computed.
func TestReplacedPodComputesNothing(t *testing.T) {
	o := newVirtualOperator(t, 100)
	o.reports.changed = o.changes.add
	o.report(t, 1, nil)
	o.pass(t)
	o.pass(t)
	report := func(calls int64) *adminapi.Report {
		n := adminapi.NamespaceReport{Namespace: "shop"}
		for i := range o.sources {
			n.Sources = append(n.Sources, adminapi.SourceReport{Name: o.sources[i].Name, Generation: 1, Revision: "r", Accepted: calls})
		}
		return &adminapi.Report{Namespaces: []adminapi.NamespaceReport{n}}
	}
	var running sync.WaitGroup
	o.computed = 0
	o.reports.follow(t.Context(), nil, &running)
	o.pass(t)
	check.Equal(t, "computed statuses after a pod left", o.computed, 0)
	successor := Pod{Name: o.pod.Name, URL: "https://successor"}
	probe := newProbe(o.reports, successor, true)
	o.reports.record(t.Context(), successor, probe, podreport.Changes{Report: report(1)}, nil)
	o.pass(t)
	check.Equal(t, "computed statuses after its successor sent the same report", o.computed, 0)
	o.reports.record(t.Context(), successor, probe, podreport.Changes{Report: report(2)}, nil)
	o.pass(t)
	check.Equal(t, "computed statuses after another report", o.computed, 100)
}

// An object that a pod has not confirmed is computed after each change of the pods.
func TestUnconfirmedObjectFollowsThePods(t *testing.T) {
	o := newVirtualOperator(t, 1)
	o.reports.changed = o.changes.add
	o.report(t, 1, func(r *adminapi.SourceReport) { r.Revision = "old" })
	o.pass(t)
	o.pass(t)
	o.computed = 0
	var running sync.WaitGroup
	o.reports.follow(t.Context(), nil, &running)
	o.pass(t)
	check.Equal(t, "computed statuses after a pod left", o.computed, 1)
}

func TestJitter(t *testing.T) {
	const interval = 30 * time.Second
	distinct := map[time.Duration]bool{}
	for i := range 1000 {
		j := jitter(types.UID(fmt.Sprint(i)), interval)
		distinct[j] = true
		if j < 0 || j >= interval/4 {
			t.Errorf("jitter of %d: got %s, want less than %s", i, j, interval/4)
		}
	}
	check.Equal(t, "distinct jitters of 1000 objects", len(distinct), 1000)
}

// A pod that starts extends the time to confirm a config only for itself.
func TestConfirmationBesideAStartingPod(t *testing.T) {
	const grace = 2 * time.Second
	for _, c := range []struct {
		name string
		// running and starting are the revisions that the pods report.
		running, starting string
		want              time.Duration
	}{
		{"only the starting pod has not confirmed", "new", "old", startGrace},
		{"another pod has not confirmed, either", "old", "old", grace},
		{"only the other pod has not confirmed", "old", "new", grace},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := newVirtualOperator(t, 1)
			o.confirmGrace = grace
			o.pass(t)
			o.start, o.writes = o.time, nil
			uid := o.sources[0].UID
			o.verdicts.set("shop", verdictsByUID{uid: generationVerdict{generation: 1, Verdict: compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "m", State: liveconfig.Active, Revision: "new"}}})
			second := Pod{Name: "dispatcher-1"}
			newProbe(o.reports, second, true)
			for pod, revision := range map[Pod]string{o.pod: c.running, second: c.starting} {
				o.reports.record(t.Context(), pod, o.reports.probes[pod],
					podreport.Changes{Report: &adminapi.Report{Namespaces: []adminapi.NamespaceReport{{
						Namespace: "shop", Sources: []adminapi.SourceReport{{Name: o.sources[0].Name, Generation: 1, Revision: revision}},
					}}}}, nil)
			}
			o.changes.add(reportChange{namespaces: []string{"shop"}})
			o.runFor(t, 2*startGrace)
			if len(o.writes) != 1 {
				t.Fatalf("writes: got %v, want one", o.writes)
			}
			if got := o.writes[0].at; got < c.want || got > c.want+recheckInterval {
				t.Errorf("time until the status is Pending: got %v, want %v", got, c.want)
			}
		})
	}
}

// Until the pods have confirmed a change, or the time for it ends, the passes over its namespace have the
// priority of changes.
func TestPriorityOfUnconfirmedChanges(t *testing.T) {
	o := newVirtualOperator(t, 1)
	o.confirmGrace = 2 * time.Second
	priority := func() int {
		t.Helper()
		result, err := o.Reconcile(t.Context(), namespaceRequest("shop"))
		if err != nil {
			t.Fatal(err)
		}
		return *result.Priority
	}
	set := func(revision string) {
		o.verdicts.set("shop", verdictsByUID{o.sources[0].UID: generationVerdict{generation: 1, Verdict: compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "m", State: liveconfig.Active, Revision: revision}}})
	}
	for _, step := range []struct {
		name string
		do   func()
		want int
	}{
		{"without a change", func() {}, otherPriority},
		{"with calls", func() { o.report(t, 7, nil) }, otherPriority},
		{"after a change", func() { set("new") }, changePriority},
		{"with calls, before it is confirmed", func() { o.time = o.time.Add(time.Second); o.report(t, 8, nil) }, changePriority},
		{"after it is confirmed", func() { o.report(t, 8, func(s *adminapi.SourceReport) { s.Revision = "new" }) }, otherPriority},
		{"after another change", func() { set("newer") }, changePriority},
		{"that is not confirmed in time", func() { o.time = o.time.Add(2 * time.Second) }, otherPriority},
	} {
		step.do()
		if got := priority(); got != step.want {
			t.Errorf("priority %s: got %d, want %d", step.name, got, step.want)
		}
	}
}
