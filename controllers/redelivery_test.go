package controllers

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// letterBox is a dispatcher that has dead letters, of any destination.
type letterBox struct {
	name   string
	server *httptest.Server

	mu      sync.Mutex
	letters int
	// stranded are those of letters that have no lane.
	stranded int
	// breakAfter, when not negative, ends an answer after so many; gate, when not nil, lets one through each.
	breakAfter int
	gate       chan struct{}
	// refuse is the status of every answer, unless 0.
	refuse  int
	actions []liveconfig.DeadLetterAction
	aborted int
}

func newLetterBox(name string, letters int) *letterBox {
	b := &letterBox{name: name, letters: letters, breakAfter: -1}
	b.server = httptest.NewServer(b)
	return b
}

func (b *letterBox) pod() Pod { return Pod{Name: b.name, URL: b.server.URL} }

func (b *letterBox) set(f func(b *letterBox)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(b)
}

func (b *letterBox) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/report" {
		_ = json.NewEncoder(w).Encode(map[string]any{"pod": b.name, "ready": true})
		return
	}
	var a liveconfig.DeadLetterAction
	if r.Method != http.MethodPost || r.URL.Path != "/deadletters/redeliver" || json.NewDecoder(r.Body).Decode(&a) != nil {
		http.Error(w, "what?", http.StatusBadRequest)
		return
	}
	b.mu.Lock()
	b.actions = append(b.actions, a)
	matched, stranded, refuse, breakAfter, gate := b.letters, b.stranded, b.refuse, b.breakAfter, b.gate
	b.mu.Unlock()
	if refuse != 0 {
		http.Error(w, "storage is full", refuse)
		return
	}
	out, control := json.NewEncoder(w), http.NewResponseController(w)
	p := liveconfig.DeadLetterProgress{Matched: int64(matched)}
	if !a.DryRun {
		_ = control.Flush()
		for p.Redelivered < int64(matched-stranded) {
			if gate != nil {
				select {
				case <-gate:
				case <-r.Context().Done():
					b.set(func(b *letterBox) { b.aborted++ })
					return
				}
			}
			if int(p.Redelivered) == breakAfter {
				return
			}
			b.set(func(b *letterBox) { b.letters-- })
			p.Redelivered++
			_ = out.Encode(p)
			_ = control.Flush()
		}
	}
	p.Done = true
	_ = out.Encode(p)
}

// runOnce does a redelivery to its end without an API server.
func runOnce(t *testing.T, o v1alpha1.Redelivery, boxes ...*letterBox) v1alpha1.RedeliveryStatus {
	t.Helper()
	list := pods()
	for _, b := range boxes {
		t.Cleanup(b.server.Close)
		list.pods = append(list.pods, b.pod())
		o.Status.Dispatchers = append(o.Status.Dispatchers, v1alpha1.RedeliveryDispatcher{Name: b.name})
	}
	r := &redeliveryReconciler{pods: list, http: &http.Client{}, backoff: func(int) time.Duration { return 0 }}
	return resume(t, r, o)
}

func resume(t *testing.T, r *redeliveryReconciler, o v1alpha1.Redelivery) v1alpha1.RedeliveryStatus {
	t.Helper()
	run := &redeliveryRun{namespace: o.Namespace, spec: o.Spec, started: time.Unix(1_800_000_000, 0)}
	for _, d := range o.Status.Dispatchers {
		run.parts = append(run.parts, redeliveryPart{RedeliveryDispatcher: d, resumed: d.Matched > 0})
	}
	run.ctx, run.cancel = context.WithCancel(t.Context())
	run.work(r)
	run.show(&o, time.Unix(1_800_000_060, 0))
	return o.Status
}

func redeliveryOf(change func(*v1alpha1.RedeliverySpec)) v1alpha1.Redelivery {
	o := v1alpha1.Redelivery{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "again"}, Spec: v1alpha1.RedeliverySpec{Destination: "crm", Rate: 100}}
	if change != nil {
		change(&o.Spec)
	}
	return o
}

func TestRedeliveryRuns(t *testing.T) {
	box := func(name string, letters int, change func(*letterBox)) *letterBox {
		b := newLetterBox(name, letters)
		if change != nil {
			change(b)
		}
		return b
	}
	for _, c := range []struct {
		name            string
		spec            func(*v1alpha1.RedeliverySpec)
		boxes           []*letterBox
		phase           v1alpha1.RedeliveryPhase
		matched, again  int64
		failed          int64
		reason, message string
	}{
		{"nothing to do", nil, []*letterBox{box("a", 0, nil)}, "Succeeded", 0, 0, 0, "Redelivered", "0 dead letters redelivered"},
		{"two pods", nil, []*letterBox{box("a", 3, nil), box("b", 4, nil)}, "Succeeded", 7, 7, 0, "Redelivered", "7 dead letters redelivered"},
		{"dry run", func(s *v1alpha1.RedeliverySpec) { s.DryRun = true }, []*letterBox{box("a", 3, nil), box("b", 4, nil)}, "Succeeded", 7, 0, 0, "Counted", "7 dead letters would be redelivered"},
		{"a pod that breaks off every time after two", nil, []*letterBox{box("a", 7, func(b *letterBox) { b.breakAfter = 2 })}, "Succeeded", 7, 7, 0, "Redelivered", "7 dead letters redelivered"},
		{"a pod that breaks off at once, again and again", nil, []*letterBox{box("a", 7, func(b *letterBox) { b.breakAfter = 0 }), box("b", 2, nil)}, "Failed", 9, 2, 7, "RedeliveryFailed", "2 of 9 dead letters redelivered; pod a: the pod ended before it was done"},
		{"a pod that refuses", nil, []*letterBox{box("a", 7, func(b *letterBox) { b.refuse = 503 })}, "Failed", 0, 0, 0, "RedeliveryFailed", "0 of 0 dead letters redelivered; pod a: 503 Service Unavailable: storage is full"},
		{"letters that have no way", nil, []*letterBox{box("a", 7, func(b *letterBox) { b.stranded = 3 })}, "Failed", 7, 4, 3, "RedeliveryFailed", "4 of 7 dead letters redelivered; pod a: 3 are of a Source or an endpoint that the destination does not have any more"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := runOnce(t, redeliveryOf(c.spec), c.boxes...)
			complete := meta.FindStatusCondition(got.Conditions, v1alpha1.ConditionComplete)
			if complete == nil || got.FinishTime == nil {
				t.Fatalf("it did not end: %+v", got)
			}
			if diff := cmp.Diff([]any{c.phase, c.matched, c.again, c.failed, c.reason, c.message}, []any{got.Phase, got.Matched, got.Redelivered, got.Failed, complete.Reason, complete.Message}); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if (complete.Status == metav1.ConditionTrue) != (c.phase == v1alpha1.RedeliverySucceeded) {
				t.Errorf("Complete is %s in phase %s", complete.Status, got.Phase)
			}
		})
	}
}

// TestRedeliverySuccessor goes on with what an operator left behind: its
// numbers are of some seconds before it ended.
func TestRedeliverySuccessor(t *testing.T) {
	a, b := newLetterBox("a", 4), newLetterBox("b", 5)
	t.Cleanup(a.server.Close)
	t.Cleanup(b.server.Close)
	o := redeliveryOf(nil)
	o.Status.Dispatchers = []v1alpha1.RedeliveryDispatcher{
		{Name: "a", Matched: 10, Redelivered: 3}, // 6 are gone by now
		{Name: "b", Matched: 8, Redelivered: 8, Done: true},
		{Name: "gone", Matched: 2, Redelivered: 1},
	}
	r := &redeliveryReconciler{pods: pods(a.pod(), b.pod()), http: &http.Client{}, backoff: func(int) time.Duration { return 0 }}
	got := resume(t, r, o)
	want := []v1alpha1.RedeliveryDispatcher{
		{Name: "a", Matched: 10, Redelivered: 10, Done: true},
		{Name: "b", Matched: 8, Redelivered: 8, Done: true},
		{Name: "gone", Matched: 2, Redelivered: 1, Done: true, Message: "the pod is not ready"},
	}
	if diff := cmp.Diff(want, got.Dispatchers); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got.Matched != 20 || got.Redelivered != 19 || got.Failed != 1 || got.Phase != v1alpha1.RedeliveryFailed {
		t.Errorf("%+v", got)
	}
	if len(b.actions) != 0 {
		t.Error("a pod that was done was asked again")
	}
}

func TestRedeliveryAction(t *testing.T) {
	at := func(s int64) *metav1.Time { m := metav1.NewTime(time.Unix(s, 0)); return &m }
	run := &redeliveryRun{namespace: "shop", started: time.Unix(1000, 0), spec: v1alpha1.RedeliverySpec{
		Destination: "crm", Rate: 100,
		Selector: &v1alpha1.DeadLetterSelector{Since: at(500), Until: at(2000), Reasons: []string{"Expired"}, Types: []v1alpha1.CallType{"track"}, Events: []string{"E"}},
	}}
	var want liveconfig.DeadLetterAction
	want.Destination, want.Rate = "shop/crm", 25
	want.Selector.Since, want.Selector.Until = time.Unix(500, 0), time.Unix(1000, 0) // not beyond the start
	want.Selector.Reasons, want.Selector.Types, want.Selector.Events = []string{"Expired"}, []string{"track"}, []string{"E"}
	if diff := cmp.Diff(want, run.action(4), cmpopts.EquateApproxTime(0)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	run.spec.Selector.Until = at(900)
	if got := run.action(4).Selector.Until; !got.Equal(time.Unix(900, 0)) {
		t.Errorf("until is %s", got)
	}
}

func TestRedeliveryBackoff(t *testing.T) {
	total := time.Duration(0)
	for n := 1; n < redeliveryTries; n++ {
		d := redeliveryBackoff(n)
		if d <= 0 || d > time.Minute {
			t.Errorf("backoff %d is %s", n, d)
		}
		total += d
	}
	if total < 5*time.Minute || total > 10*time.Minute {
		t.Errorf("a pod is given up after %s", total)
	}
	if redeliveryBackoff(1) != time.Second {
		t.Error("the first wait is not a second")
	}
	if err := errors.New(bounded("aé", 2)); err.Error() != "a" {
		t.Errorf("bounded cuts within a rune: %q", err)
	}
}

var _ = Describe("A Redelivery", func() {
	var w *world
	var box *letterBox
	var tenant string
	BeforeEach(func() {
		box = newLetterBox("dispatcher-0", 5)
		DeferCleanup(box.server.Close)
		w = newWorld(func(w *world) { w.options.Pods.(*podList).set(box.pod()) })
		tenant = w.namespace()
	})
	const again = `
apiVersion: posthorn.dev/v1alpha1
kind: Redelivery
metadata: {name: again}
spec: {destination: crm, ttlSecondsAfterFinished: 100000}
`
	get := func(g Gomega, name string) v1alpha1.Redelivery {
		var o v1alpha1.Redelivery
		g.Expect(cluster.Get(w.ctx, client.ObjectKey{Namespace: tenant, Name: name}, &o)).To(Succeed())
		return o
	}
	phase := func(name string) func() v1alpha1.RedeliveryPhase {
		return func() v1alpha1.RedeliveryPhase {
			var o v1alpha1.Redelivery
			if err := cluster.Get(w.ctx, client.ObjectKey{Namespace: tenant, Name: name}, &o); err != nil {
				return v1alpha1.RedeliveryPhase(err.Error())
			}
			return o.Status.Phase
		}
	}

	It("waits for its destination, runs once, and tells how it went", func() {
		w.apply(tenant, again)
		Eventually(func(g Gomega) {
			o := get(g, "again")
			c := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.ConditionAccepted)
			g.Expect(c).NotTo(BeNil())
			g.Expect(c.Reason).To(Equal(v1alpha1.ReasonDestinationNotFound))
			g.Expect(o.Status.Phase).To(Equal(v1alpha1.RedeliveryPending))
		}).Should(Succeed())
		w.apply(tenant, crmSecret+webSource+crmDestination)
		Eventually(phase("again")).Should(Equal(v1alpha1.RedeliverySucceeded))
		o := get(Default, "again")
		Expect([]int64{o.Status.Matched, o.Status.Redelivered, o.Status.Failed}).To(Equal([]int64{5, 5, 0}))
		Expect(o.Status.ObservedGeneration).To(Equal(o.Generation))
		Expect(meta.IsStatusConditionTrue(o.Status.Conditions, v1alpha1.ConditionComplete)).To(BeTrue())
		Eventually(func() []string { return w.events(tenant, "again") }).Should(ContainElement("Normal Redelivered"))

		By("new dead letters are not its business, nor a new operator's")
		box.set(func(b *letterBox) { b.letters = 3 })
		w.stop()
		w.start()
		w.apply(tenant, `
apiVersion: posthorn.dev/v1alpha1
kind: Redelivery
metadata: {name: another}
spec: {destination: crm, dryRun: true, ttlSecondsAfterFinished: 0}
`)
		Eventually(func() bool {
			return apierrors.IsNotFound(cluster.Get(w.ctx, client.ObjectKey{Namespace: tenant, Name: "another"}, &v1alpha1.Redelivery{}))
		}).Should(BeTrue(), "it is deleted when its time is over")
		Expect(get(Default, "again").Status).To(Equal(o.Status))
		box.set(func(b *letterBox) { Expect(b.letters).To(Equal(3)) })
	})

	It("goes on when a new operator starts, and stops when it is deleted", func() {
		gate := make(chan struct{})
		box.set(func(b *letterBox) { b.gate = gate })
		w.apply(tenant, crmSecret+webSource+crmDestination+again)
		gate <- struct{}{}
		gate <- struct{}{}
		Eventually(func(g Gomega) { g.Expect(get(g, "again").Status.Redelivered).To(BeEquivalentTo(2)) }).Should(Succeed())

		By("another of the same destination waits")
		w.apply(tenant, `
apiVersion: posthorn.dev/v1alpha1
kind: Redelivery
metadata: {name: later}
spec: {destination: crm, rate: 7}
`)
		Eventually(phase("later")).Should(Equal(v1alpha1.RedeliveryPending))

		aborted := 0
		box.set(func(b *letterBox) { aborted = b.aborted })
		hungUp := func() {
			GinkgoHelper()
			Eventually(func() (n int) { box.set(func(b *letterBox) { n = b.aborted }); return n }).Should(BeNumerically(">", aborted))
		}
		w.stop()
		hungUp() // Or the next token would be the old operator's.
		w.start()
		gate <- struct{}{}
		Eventually(func(g Gomega) { g.Expect(get(g, "again").Status.Redelivered).To(BeEquivalentTo(3)) }).Should(Succeed())
		Expect(get(Default, "again").Status.Matched).To(BeEquivalentTo(5))

		By("deleting it")
		box.set(func(b *letterBox) { aborted = b.aborted })
		w.delete(tenant, "redelivery", "again")
		hungUp()
		close(gate)
		Eventually(phase("later")).Should(Equal(v1alpha1.RedeliverySucceeded))
		Expect(get(Default, "later").Status.Redelivered).To(BeEquivalentTo(2))
		box.set(func(b *letterBox) { Expect(b.actions[len(b.actions)-1].Rate).To(Equal(7.0)) })
	})
})
