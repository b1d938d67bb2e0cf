package controllers

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
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
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
)

// letterBox is a fake dispatcher with dead letters of any destination. It records jobs.
type letterBox struct {
	name   string
	server *httptest.Server

	mu      sync.Mutex
	letters int
	// stranded is the number of letters without a lane.
	stranded int
	// breakAfter is the number of redeliveries after which a response breaks off; negative
	// means never.
	breakAfter int
	// gate, if set, must yield a value before each redelivery.
	gate chan struct{}
	// refuse is the status code of every response, unless it is 0.
	refuse  int
	actions []adminapi.DeadLetterAction
	aborted int
	jobs    map[string]*boxJob
}

// boxJob is a letterBox's record of a job.
type boxJob struct {
	uid                string
	matched, delivered int64
	left               int64
	done, completed    bool
	pods               []string
}

func newLetterBox(name string, letters int) *letterBox {
	b := &letterBox{name: name, letters: letters, breakAfter: -1, jobs: map[string]*boxJob{}}
	b.server = httptest.NewServer(b)
	return b
}

func (b *letterBox) pod() Pod { return Pod{Name: b.name, URL: b.server.URL} }

func (b *letterBox) set(f func(b *letterBox)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(b)
}

// steps returns the requested steps.
func (b *letterBox) steps() (steps []string) {
	b.set(func(b *letterBox) {
		for _, a := range b.actions {
			steps = append(steps, a.Job.Step)
		}
	})
	return steps
}

func (b *letterBox) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/report" {
		_ = json.NewEncoder(w).Encode(map[string]any{"pod": b.name, "ready": true})
		return
	}
	var a adminapi.DeadLetterAction
	if r.Method != http.MethodPost || r.URL.Path != "/deadletters/redeliver" || json.NewDecoder(r.Body).Decode(&a) != nil || a.Job == nil {
		http.Error(w, "not a redelivery", http.StatusBadRequest)
		return
	}
	b.mu.Lock()
	b.actions = append(b.actions, a)
	refuse, breakAfter, gate := b.refuse, b.breakAfter, b.gate
	j := b.jobs[a.Job.ID]
	if j == nil || j.uid != a.Job.UID && !j.completed {
		j = &boxJob{uid: a.Job.UID, matched: int64(b.letters), pods: a.Job.Pods, done: a.DryRun || b.letters == 0}
		b.jobs[a.Job.ID] = j
	}
	stranded := int64(b.stranded)
	b.mu.Unlock()
	if refuse != 0 {
		http.Error(w, "storage is full", refuse)
		return
	}
	out, control := json.NewEncoder(w), http.NewResponseController(w)
	progress := func(last bool) {
		b.set(func(*letterBox) {
			_ = out.Encode(adminapi.DeadLetterProgress{
				Matched: j.matched, Redelivered: j.delivered, Done: last,
				Job: &adminapi.DeadLetterJobState{AlreadyDone: j.completed && j.uid != a.Job.UID, PartDone: j.done, Left: j.left, Pods: j.pods},
			})
		})
		_ = control.Flush()
	}
	switch {
	case j.completed:
	case a.Job.Step == adminapi.JobComplete:
		b.set(func(*letterBox) { j.completed = true })
	case a.Job.Step == adminapi.JobRun:
		_ = control.Flush()
		for n := 0; j.delivered < j.matched-stranded; n++ {
			if gate != nil {
				select {
				case <-gate:
				case <-r.Context().Done():
					b.set(func(b *letterBox) { b.aborted++ })
					return
				}
			}
			if n == breakAfter {
				return
			}
			b.set(func(b *letterBox) { b.letters--; j.delivered++ })
			progress(false)
		}
		b.set(func(*letterBox) { j.left, j.done = stranded, true })
	}
	progress(true)
}

// resume runs a redelivery to its end without an API server.
func resume(t *testing.T, o v1alpha1.Redelivery, deadline time.Duration, boxes ...*letterBox) v1alpha1.RedeliveryStatus {
	t.Helper()
	list := pods()
	for _, b := range boxes {
		list.pods = append(list.pods, b.pod())
	}
	r := &redeliveryReconciler{pods: list, http: &http.Client{}, backoff: func(int) time.Duration { return 0 }, calls: make(chan struct{}, 2)}
	started, end := time.Unix(1_800_000_000, 0), time.Time{}
	if deadline > 0 {
		end = started.Add(deadline)
	}
	start := metav1.NewTime(started)
	o.Status.StartTime = &start
	run := newRedeliveryRun(t.Context(), &o, end, started)
	run.execute(r)
	run.setStatus(&o, time.Unix(1_800_000_060, 0))
	return o.Status
}

func redeliveryOf(change func(*v1alpha1.RedeliverySpec)) v1alpha1.Redelivery {
	o := v1alpha1.Redelivery{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "again", UID: "1", Generation: 1}, Spec: v1alpha1.RedeliverySpec{DestinationRef: v1alpha1.ObjectReference{Name: "crm"}, Rate: 100}}
	if change != nil {
		change(&o.Spec)
	}
	return o
}

func TestRedeliveryRuns(t *testing.T) {
	box := func(name string, letters int, change func(*letterBox)) *letterBox {
		b := newLetterBox(name, letters)
		t.Cleanup(b.server.Close)
		if change != nil {
			change(b)
		}
		return b
	}
	gone := box("gone", 1, nil)
	gone.server.Close()
	for _, c := range []struct {
		name           string
		spec           func(*v1alpha1.RedeliverySpec)
		boxes          []*letterBox
		matched, again int64
		not            int64
		condition      string
		message        string
	}{
		{"nothing to do", nil, []*letterBox{box("a", 0, nil)}, 0, 0, 0, "Complete Redelivered", "0 dead letters redelivered"},
		{"two pods", nil, []*letterBox{box("a", 3, nil), box("b", 4, nil)}, 7, 7, 0, "Complete Redelivered", "7 dead letters redelivered"},
		{"dry run", func(s *v1alpha1.RedeliverySpec) { s.DryRun = true }, []*letterBox{box("a", 3, nil), box("b", 4, nil)}, 7, 0, 0, "Complete Counted", "7 dead letters would be redelivered"},
		{"a pod whose responses break off after two", nil, []*letterBox{box("a", 7, func(b *letterBox) { b.breakAfter = 2 })}, 7, 7, 0, "Complete Redelivered", "7 dead letters redelivered"},
		{"a pod whose responses break off at once", nil, []*letterBox{box("a", 7, func(b *letterBox) { b.breakAfter = 0 }), box("b", 2, nil)}, 9, 2, 7, "Failed NotRedelivered", "2 of 9 dead letters redelivered; the dispatcher stopped before the end of the request; the operator's log names the dispatcher"},
		{"a pod that refuses", nil, []*letterBox{box("a", 7, func(b *letterBox) { b.refuse = 503 })}, 0, 0, 0, "Failed NotRedelivered", "0 of 0 dead letters redelivered; 503 Service Unavailable: storage is full; the operator's log names the dispatcher"},
		{"a pod that cannot be reached", nil, []*letterBox{box("a", 2, nil), gone}, 2, 2, 0, "Failed NotRedelivered", "2 of 2 dead letters redelivered; cannot connect to the dispatcher; the operator's log names the dispatcher"},
		{"no pod", nil, nil, 0, 0, 0, "Failed NotRedelivered", "0 of 0 dead letters redelivered; no dispatcher could begin; the operator's log names the dispatcher"},
		{"letters without a lane", nil, []*letterBox{box("a", 7, func(b *letterBox) { b.stranded = 3 })}, 7, 4, 3, "Failed NotRedelivered", "4 of 7 dead letters redelivered; 3 dead letters belong to a Source or an endpoint that was removed from the destination; the operator's log names the dispatcher"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := resume(t, redeliveryOf(c.spec), 0, c.boxes...)
			want := []any{c.condition, c.matched, c.again, c.not, c.message, strings.HasPrefix(c.condition, "Complete")}
			if diff := cmp.Diff(want, []any{ended(got.JobStatus), got.Matched, got.Redelivered, got.NotRedelivered, meta.FindStatusCondition(got.Conditions, "Ready").Message, got.CompletionTime != nil}); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// ended returns the condition that ended a run, and its reason.
func ended(s v1alpha1.JobStatus) string {
	for _, conditionType := range []string{v1alpha1.ConditionComplete, v1alpha1.ConditionFailed} {
		if c := meta.FindStatusCondition(s.Conditions, conditionType); c != nil && c.Status == metav1.ConditionTrue {
			return conditionType + " " + c.Reason
		}
	}
	return ""
}

// A new operator continues a run with the records of the pods. It includes a pod that is
// not ready when the operator starts, because the other pods have recorded its name.
func TestRedeliverySuccessor(t *testing.T) {
	o := redeliveryOf(nil)
	id := compile.RedeliveryID(&o)
	all := []string{"a", "b", "gone"}
	a, b := newLetterBox("a", 4), newLetterBox("b", 5)
	t.Cleanup(a.server.Close)
	t.Cleanup(b.server.Close)
	a.jobs[id] = &boxJob{uid: "1", matched: 10, delivered: 6, pods: all}
	b.jobs[id] = &boxJob{uid: "1", matched: 8, delivered: 8, done: true, pods: all}
	o.Status.Matched, o.Status.Redelivered = 20, 12
	got := resume(t, o, 0, a, b)
	if got.Matched != 20 || got.Redelivered != 18 || got.NotRedelivered != 2 || ended(got.JobStatus) != "Failed NotRedelivered" {
		t.Errorf("%+v", got)
	}
	if diff := cmp.Diff([]string{"begin"}, b.steps()); diff != "" {
		t.Errorf("steps of the pod whose part has ended (-want +got):\n%s", diff)
	}
	if a.letters != 0 {
		t.Errorf("%d dead letters are left", a.letters)
	}
}

// If one of two dispatchers has the record of a completed run, none of them redelivers.
// The other one may be new, or may have lost its store.
func TestRedeliveryAlreadyDone(t *testing.T) {
	first := redeliveryOf(nil)
	a, b := newLetterBox("a", 4), newLetterBox("b", 5)
	t.Cleanup(a.server.Close)
	t.Cleanup(b.server.Close)
	if got := resume(t, first, 0, a, b); ended(got.JobStatus) != "Complete Redelivered" {
		t.Fatalf("%+v", got)
	}
	a.set(func(b *letterBox) { b.letters = 3 })
	again := redeliveryOf(nil)
	again.UID = "2"
	newcomer := newLetterBox("c", 7)
	t.Cleanup(newcomer.server.Close)
	for name, boxes := range map[string][]*letterBox{"both": {a, b}, "a new one": {newcomer, b}} {
		got := resume(t, again, 0, boxes...)
		if ended(got.JobStatus) != "Complete AlreadyDone" || got.Matched != 0 || got.Redelivered != 0 || got.CompletionTime == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if a.letters != 3 || newcomer.letters != 7 {
		t.Errorf("%d and %d dead letters are left, want 3 and 7", a.letters, newcomer.letters)
	}
	other := redeliveryOf(func(s *v1alpha1.RedeliverySpec) { s.RequestID = "2" })
	if got := resume(t, other, 0, a, b); ended(got.JobStatus) != "Complete Redelivered" || got.Redelivered != 3 {
		t.Errorf("with a requestId: %+v", got)
	}
}

// A failed run is repeated for another object.
func TestRedeliveryAfterAFailure(t *testing.T) {
	a := newLetterBox("a", 4)
	t.Cleanup(a.server.Close)
	a.stranded = 1
	if got := resume(t, redeliveryOf(nil), 0, a); ended(got.JobStatus) != "Failed NotRedelivered" {
		t.Fatalf("%+v", got)
	}
	a.set(func(b *letterBox) { b.stranded = 0 })
	again := redeliveryOf(nil)
	again.UID = "2"
	if got := resume(t, again, 0, a); ended(got.JobStatus) != "Complete Redelivered" || got.Redelivered != 1 {
		t.Errorf("%+v", got)
	}
}

// At the deadline the operator cancels the requests to the pods.
func TestRedeliveryDeadline(t *testing.T) {
	a := newLetterBox("a", 4)
	t.Cleanup(a.server.Close)
	a.gate = make(chan struct{}, 1)
	a.gate <- struct{}{}
	got := resume(t, redeliveryOf(nil), 500*time.Millisecond, a)
	if ended(got.JobStatus) != "Failed DeadlineExceeded" || got.CompletionTime != nil || got.Redelivered+got.NotRedelivered != got.Matched {
		t.Errorf("%+v", got)
	}
	deadline := time.Now().Add(time.Minute)
	for aborted := 0; aborted == 0; time.Sleep(10 * time.Millisecond) {
		a.set(func(b *letterBox) { aborted = b.aborted })
		if time.Now().After(deadline) {
			t.Fatal("the request to the pod did not end")
		}
	}
	if slices.Contains(a.steps(), adminapi.JobComplete) {
		t.Error("a run that failed was recorded as complete")
	}
}

func TestRedeliveryAction(t *testing.T) {
	at := func(s int64) *metav1.Time { m := metav1.NewTime(time.Unix(s, 0)); return &m }
	run := &redeliveryRun{id: "id", uid: "1", parts: map[string]*redeliveryPart{"a": {}, "b": {}, "c": {}, "d": {}}, namespace: "shop", started: time.Unix(1000, 0), spec: v1alpha1.RedeliverySpec{
		DestinationRef: v1alpha1.ObjectReference{Name: "crm"}, Rate: 100,
		Selector: &v1alpha1.DeadLetterSelector{Since: at(500), Until: at(2000), Reasons: []string{"Expired"}, Types: []v1alpha1.CallType{"track"}, Events: []string{"E"}},
	}}
	var want adminapi.DeadLetterAction
	want.Destination, want.Rate = "shop/crm", 25
	want.Job = &adminapi.DeadLetterJob{ID: "id", UID: "1", Step: adminapi.JobRun, SliceMS: 10_000}
	want.Selector.Since, want.Selector.Until = time.Unix(500, 0), time.Unix(1000, 0) // not beyond the start
	want.Selector.Reasons, want.Selector.Types, want.Selector.Events = []string{"Expired"}, []string{"track"}, []string{"E"}
	if diff := cmp.Diff(want, run.action(adminapi.JobRun, nil), cmpopts.EquateApproxTime(0)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	run.spec.Selector.Until = at(900)
	if got := run.action(adminapi.JobRun, nil).Selector.Until; !got.Equal(time.Unix(900, 0)) {
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
		t.Errorf("a part fails after %s, want 5m to 10m", total)
	}
	if redeliveryBackoff(1) != time.Second {
		t.Error("the first wait is not a second")
	}
	if got := truncate("aé", 2); got != "a" {
		t.Errorf("truncate returns %q, want no part of a rune", got)
	}
}

var _ = Describe("A Redelivery", func() {
	var w *world
	var box *letterBox
	var namespace string
	BeforeEach(func() {
		box = newLetterBox("dispatcher-0", 5)
		DeferCleanup(box.server.Close)
		w = newWorld(func(w *world) { w.options.Pods.(*podList).set(box.pod()) })
		namespace = w.newNamespace()
	})
	redelivery := func(name, spec string) string {
		return `
---
apiVersion: posthorn.dev/v1alpha1
kind: Redelivery
metadata: {name: ` + name + `}
spec: {destinationRef: {name: crm}` + spec + `}
`
	}
	destination := func(name string) string { return strings.ReplaceAll(crmDestination, "name: crm}", "name: "+name+"}") }
	get := func(g Gomega, name string) v1alpha1.Redelivery {
		var o v1alpha1.Redelivery
		g.Expect(cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: name}, &o)).To(Succeed())
		return o
	}
	// state returns the end of a Redelivery, or the reason of Ready before its end.
	state := func(name string) func() string {
		return func() string {
			var o v1alpha1.Redelivery
			if err := cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: name}, &o); err != nil {
				return err.Error()
			}
			if end := ended(o.Status.JobStatus); end != "" {
				return end
			}
			return meta.FindStatusCondition(o.Status.Conditions, v1alpha1.ConditionReady).Reason
		}
	}
	letters := func() (n int) { box.set(func(b *letterBox) { n = b.letters }); return n }

	It("waits for its destination, runs once, and is already done when it is created again", func() {
		w.apply(namespace, redelivery("again", ""))
		Eventually(state("again")).Should(Equal(v1alpha1.ReasonDestinationNotFound))
		Expect(meta.IsStatusConditionFalse(get(Default, "again").Status.Conditions, v1alpha1.ConditionAccepted)).To(BeTrue())
		w.apply(namespace, crmSecret+webSource+crmDestination)
		Eventually(state("again")).Should(Equal("Complete Redelivered"))
		o := get(Default, "again")
		Expect([]int64{o.Status.Matched, o.Status.Redelivered, o.Status.NotRedelivered}).To(Equal([]int64{5, 5, 0}))
		Expect(o.Status.ObservedGeneration).To(Equal(o.Generation))
		Expect(o.Status.StartTime).NotTo(BeNil())
		Expect(o.Status.CompletionTime).NotTo(BeNil())
		Eventually(func() []string { return w.events(namespace, "again") }).Should(ContainElement("Normal Redelivered"))
		table, err := server.Kubectl("", "get", "rdl", "again", "--namespace", namespace)
		Expect(err).NotTo(HaveOccurred())
		Expect(table).To(MatchRegexp(`NAME +DESTINATION +COMPLETE +FAILED +REASON +MATCHED +REDELIVERED +AGE\nagain +crm +True +False +Redelivered +5 +5 +\S+\n`))

		By("applied again, and with a new operator, it changes nothing")
		box.set(func(b *letterBox) { b.letters = 3 })
		w.apply(namespace, redelivery("again", ""))
		w.stop()
		w.start()
		w.apply(namespace, redelivery("another", ", dryRun: true, ttlSecondsAfterFinished: 0"))
		Eventually(func() bool {
			return apierrors.IsNotFound(cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: "another"}, &v1alpha1.Redelivery{}))
		}).Should(BeTrue(), "it is deleted when its TTL ends")
		Expect(get(Default, "again").Status).To(Equal(o.Status))
		Expect(letters()).To(Equal(3))

		By("the spec cannot be changed, but the TTL can")
		_, err = server.Kubectl(redelivery("again", ", rate: 7"), "apply", "--namespace", namespace, "-f", "-")
		Expect(err).To(MatchError(ContainSubstring("spec is immutable except for ttlSecondsAfterFinished")))
		w.apply(namespace, redelivery("again", ", ttlSecondsAfterFinished: 31536000"))
		Eventually(func(g Gomega) {
			o := get(g, "again")
			g.Expect(o.Generation).To(BeEquivalentTo(2))
			g.Expect(o.Status.ObservedGeneration).To(Equal(o.Generation))
			g.Expect(ended(o.Status.JobStatus)).To(Equal("Complete Redelivered"))
		}).Should(Succeed())

		By("deleting and creating it again")
		w.delete(namespace, "redelivery", "again")
		w.apply(namespace, redelivery("again", ""))
		Eventually(state("again")).Should(Equal("Complete AlreadyDone"))
		Expect(letters()).To(Equal(3))
		w.delete(namespace, "redelivery", "again")
		w.apply(namespace, redelivery("again", ", requestId: second"))
		Eventually(state("again")).Should(Equal("Complete Redelivered"))
		Expect(letters()).To(Equal(0))
	})

	It("continues when a new operator starts, and stops when it is deleted", func() {
		gate := make(chan struct{})
		box.set(func(b *letterBox) { b.gate = gate })
		w.apply(namespace, crmSecret+webSource+crmDestination+redelivery("again", ""))
		gate <- struct{}{}
		gate <- struct{}{}
		Eventually(func(g Gomega) { g.Expect(get(g, "again").Status.Redelivered).To(BeEquivalentTo(2)) }).Should(Succeed())
		Expect(state("again")()).To(Equal(v1alpha1.ReasonRunning))

		By("another Redelivery of the same destination waits")
		w.apply(namespace, redelivery("later", ", rate: 7"))
		Eventually(state("later")).Should(Equal(v1alpha1.ReasonWaiting))

		aborted := 0
		box.set(func(b *letterBox) { aborted = b.aborted })
		connectionClosed := func() {
			GinkgoHelper()
			Eventually(func() (n int) { box.set(func(b *letterBox) { n = b.aborted }); return n }).Should(BeNumerically(">", aborted))
		}
		w.stop()
		connectionClosed() // Otherwise the old operator could consume the next token.
		w.start()
		gate <- struct{}{}
		Eventually(func(g Gomega) { g.Expect(get(g, "again").Status.Redelivered).To(BeEquivalentTo(3)) }).Should(Succeed())
		Expect(get(Default, "again").Status.Matched).To(BeEquivalentTo(5))

		By("deleting it")
		box.set(func(b *letterBox) { aborted = b.aborted })
		w.delete(namespace, "redelivery", "again")
		connectionClosed()
		close(gate)
		Eventually(state("later")).Should(Equal("Complete Redelivered"))
		Expect(get(Default, "later").Status.Redelivered).To(BeEquivalentTo(2))
		box.set(func(b *letterBox) { Expect(b.actions[len(b.actions)-1].Rate).To(Equal(7.0)) })
	})

	It("fails at its deadline, even if no operator runs at that time", func() {
		gate := make(chan struct{})
		box.set(func(b *letterBox) { b.gate = gate })
		DeferCleanup(func() { close(gate) })
		w.apply(namespace, crmSecret+webSource+crmDestination+redelivery("short", ", activeDeadlineSeconds: 3"))
		Eventually(state("short")).Should(Equal("Failed DeadlineExceeded"))
		o := get(Default, "short")
		Expect(o.Status.CompletionTime).To(BeNil())
		Expect(meta.IsStatusConditionTrue(o.Status.Conditions, v1alpha1.ConditionStalled)).To(BeTrue())
		Eventually(func() []string { return w.events(namespace, "short") }).Should(ContainElement("Warning DeadlineExceeded"))

		w.apply(namespace, redelivery("unattended", ", activeDeadlineSeconds: 2"))
		Eventually(state("unattended")).Should(Equal(v1alpha1.ReasonRunning))
		w.stop()
		Eventually(func() bool { return time.Now().After(get(Default, "unattended").Status.StartTime.Add(3 * time.Second)) }).Should(BeTrue())
		w.start()
		Eventually(state("unattended")).Should(Equal("Failed DeadlineExceeded"))
	})

	It("is limited for each namespace, and waits for no other namespace", func() {
		gate := make(chan struct{})
		box.set(func(b *letterBox) { b.gate = gate })
		first := namespace
		var all string
		for i := range maxNamespaceRedeliveries + 1 {
			name := fmt.Sprint("crm", i)
			all += "---" + destination(name) + strings.ReplaceAll(redelivery(fmt.Sprint("r", i), ", rate: 10"), "{name: crm}", "{name: "+name+"}")
		}
		w.apply(first, crmSecret+webSource+all)
		states := func() map[string]int {
			count := map[string]int{}
			for i := range maxNamespaceRedeliveries + 1 {
				count[state(fmt.Sprint("r", i))()]++
			}
			return count
		}
		Eventually(states).Should(Equal(map[string]int{v1alpha1.ReasonRunning: maxNamespaceRedeliveries, v1alpha1.ReasonWaiting: 1}))
		namespace = w.newNamespace()
		w.apply(namespace, crmSecret+webSource+crmDestination+"---"+destination("fast")+redelivery("again", ", rate: 9000")+
			strings.ReplaceAll(redelivery("fast", ", rate: 9000"), "{name: crm}", "{name: fast}"))
		Eventually(func() map[string]int {
			return map[string]int{state("again")(): 1, state("fast")(): 2}
		}).Should(Or(Equal(map[string]int{v1alpha1.ReasonRunning: 1, v1alpha1.ReasonWaiting: 2}), Equal(map[string]int{v1alpha1.ReasonWaiting: 1, v1alpha1.ReasonRunning: 2})))
		close(gate)
		Eventually(state("again")).Should(Equal("Complete Redelivered"))
		Eventually(state("fast")).Should(Equal("Complete Redelivered"))
		namespace = first
		Eventually(states).Should(Equal(map[string]int{"Complete Redelivered": maxNamespaceRedeliveries + 1}))
	})
})
