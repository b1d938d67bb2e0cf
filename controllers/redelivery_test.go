package controllers

import (
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// letterBox has the dead letters of a fakeDispatcher, of any destination, and the records
// of its runs.
type letterBox struct {
	letters int64
	// held is true if runs wait before the next dead letter, unless allowed is positive.
	held    bool
	allowed int64
	runs    map[string]*boxRun // by ID
}

type boxRun struct {
	uid                  string
	counted              bool
	matched, redelivered int64
	completed            bool
}

// report runs a Redelivery as its phase requires, and returns its report.
func (b *letterBox) report(o liveconfig.Redelivery) adminapi.RedeliveryReport {
	r := adminapi.RedeliveryReport{Name: o.Name, Generation: o.Generation, Revision: o.Revision, UID: o.UID}
	run := b.runs[o.ID]
	switch {
	case run != nil && run.completed && run.uid != o.UID:
		r.AlreadyDone = true
		return r
	case o.Phase == liveconfig.RedeliveryBegin && (run == nil || run.uid != o.UID):
		run = &boxRun{uid: o.UID}
		b.runs[o.ID] = run
	case run == nil || run.uid != o.UID:
		return r
	}
	if o.Phase == liveconfig.RedeliveryRun && !run.counted {
		run.counted, run.matched = true, b.letters
	}
	for o.Phase == liveconfig.RedeliveryRun && !o.DryRun && run.redelivered < run.matched && (!b.held || b.allowed > 0) {
		b.allowed--
		b.letters--
		run.redelivered++
	}
	r.Begun, r.Matched, r.Redelivered = true, run.matched, run.redelivered
	r.Done = run.counted && (o.DryRun || run.redelivered == run.matched)
	run.completed = run.completed || o.Phase == liveconfig.RedeliveryRecord && r.Done
	r.Completed = run.completed
	return r
}

// ended returns the condition that ended a run, and its reason.
func ended(s v1beta1.JobStatus) string {
	for _, conditionType := range []string{v1beta1.ConditionComplete, v1beta1.ConditionFailed} {
		if c := meta.FindStatusCondition(s.Conditions, conditionType); c != nil && c.Status == metav1.ConditionTrue {
			return conditionType + " " + c.Reason
		}
	}
	return ""
}

var _ = Describe("A Redelivery", func() {
	var w *world
	var namespace string
	BeforeEach(func() {
		w = newWorld(func(w *world) { w.dispatcher.box.letters = 5 })
		namespace = w.newNamespace()
	})
	redelivery := func(name, spec string) string {
		return `
---
apiVersion: posthorn.dev/v1beta1
kind: Redelivery
metadata: {name: ` + name + `}
spec: {destinationRef: {name: crm}` + spec + `}
`
	}
	get := func(g Gomega, name string) v1beta1.Redelivery {
		var o v1beta1.Redelivery
		g.Expect(cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: name}, &o)).To(Succeed())
		return o
	}
	// state returns the end of a Redelivery, or the reason of Ready before its end.
	state := func(name string) func() string {
		return func() string {
			var o v1beta1.Redelivery
			if err := cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: name}, &o); err != nil {
				return err.Error()
			}
			if end := ended(o.Status.JobStatus); end != "" {
				return end
			}
			return meta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionReady).Reason
		}
	}
	box := func(change func(*letterBox)) { w.dispatcher.set(func(d *fakeDispatcher) { change(d.box) }) }
	letters := func() (n int64) { box(func(b *letterBox) { n = b.letters }); return n }
	inConfig := func(g Gomega) []liveconfig.Redelivery {
		config, _ := w.live(g, namespace)
		return config.Redeliveries
	}

	It("waits for its destination, runs once, and is already done when it is created again", func() {
		w.apply(namespace, redelivery("again", ""))
		Eventually(state("again")).Should(Equal(v1beta1.ReasonDestinationNotFound))
		Expect(meta.IsStatusConditionFalse(get(Default, "again").Status.Conditions, v1beta1.ConditionResolvedRefs)).To(BeTrue())
		w.apply(namespace, crmSecret+webSource+crmDestination)
		Eventually(state("again")).Should(Equal("Complete Redelivered"))
		o := get(Default, "again")
		Expect([]*int64{o.Status.Matched, o.Status.Redelivered, o.Status.NotRedelivered}).To(
			Equal([]*int64{ptr.To(int64(5)), ptr.To(int64(5)), nil}))
		Expect(o.Status.Parts).To(Equal(&v1beta1.RedeliveryParts{Total: 1, Done: 1}))
		Expect(o.Status.ObservedGeneration).To(Equal(o.Generation))
		Expect(o.Status.StartTime).NotTo(BeNil())
		Expect(o.Status.CompletionTime).NotTo(BeNil())
		Eventually(inConfig).Should(BeEmpty())
		Eventually(func() []string { return w.events(namespace, "again") }).Should(ContainElement("Normal Redelivered"))
		table, err := server.Kubectl("", "get", "rdl", "again", "--namespace", namespace)
		Expect(err).NotTo(HaveOccurred())
		Expect(table).To(MatchRegexp(`NAME +DESTINATION +COMPLETE +FAILED +REASON +MATCHED +REDELIVERED +AGE\nagain +crm +True +False +Redelivered +5 +5 +\S+\n`))

		By("applied again, and with a new operator, it changes nothing")
		box(func(b *letterBox) { b.letters = 3 })
		w.apply(namespace, redelivery("again", ""))
		w.stop()
		w.start()
		w.apply(namespace, redelivery("another", ", dryRun: true, ttlSecondsAfterFinished: 0"))
		Eventually(func() bool {
			return apierrors.IsNotFound(cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: "another"}, &v1beta1.Redelivery{}))
		}).Should(BeTrue(), "it is deleted when its TTL ends")
		Expect(get(Default, "again").Status).To(Equal(o.Status))
		Expect(letters()).To(BeEquivalentTo(3))

		By("the spec cannot be changed, but the TTL can")
		_, err = server.Kubectl(redelivery("again", ", deadLettersPerSecond: 7"), "apply", "--namespace", namespace, "-f", "-")
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
		Expect(letters()).To(BeEquivalentTo(3))
		w.delete(namespace, "redelivery", "again")
		w.apply(namespace, redelivery("again", ", requestID: second"))
		Eventually(state("again")).Should(Equal("Complete Redelivered"))
		Expect(letters()).To(BeEquivalentTo(0))
	})

	It("continues when a new operator starts, and stops when it is deleted", func() {
		box(func(b *letterBox) { b.held, b.allowed = true, 2 })
		w.apply(namespace, crmSecret+webSource+crmDestination+redelivery("again", ""))
		Eventually(func(g Gomega) { g.Expect(get(g, "again").Status.Redelivered).To(HaveValue(BeEquivalentTo(2))) }).Should(Succeed())
		Expect(state("again")()).To(Equal(v1beta1.ReasonRunning))
		started := get(Default, "again").Status.StartTime

		By("another Redelivery of the same destination waits")
		w.apply(namespace, redelivery("later", ", deadLettersPerSecond: 7"))
		Eventually(state("later")).Should(Equal(v1beta1.ReasonWaiting))

		w.stop()
		box(func(b *letterBox) { b.allowed = 1 })
		w.start()
		Eventually(func(g Gomega) { g.Expect(get(g, "again").Status.Redelivered).To(HaveValue(BeEquivalentTo(3))) }).Should(Succeed())
		Expect(get(Default, "again").Status.StartTime).To(Equal(started))
		Expect(get(Default, "again").Status.Matched).To(HaveValue(BeEquivalentTo(5)))

		By("deleting it")
		w.delete(namespace, "redelivery", "again")
		Eventually(func(g Gomega) {
			g.Expect(inConfig(g)).To(HaveLen(1))
			g.Expect(inConfig(g)[0].Name).To(Equal("later"))
			g.Expect(inConfig(g)[0].Rate).To(Equal(7.0))
		}).Should(Succeed())
		box(func(b *letterBox) { b.held = false })
		Eventually(state("later")).Should(Equal("Complete Redelivered"))
		Expect(get(Default, "later").Status.Redelivered).To(HaveValue(BeEquivalentTo(2)))
	})

	It("waits until every ready dispatcher has recorded the run, and for each one's part", func() {
		second := newDispatcher("dispatcher-1")
		DeferCleanup(second.server.Close)
		second.set(func(d *fakeDispatcher) { d.stuck, d.box.letters = true, 4 })
		w.pods.set(w.dispatcher.pod(), second.pod())
		w.apply(namespace, crmSecret+webSource+crmDestination+redelivery("again", ""))
		Eventually(state("again")).Should(Equal(v1beta1.ReasonWaiting))
		w.waitPolls(10)
		Expect(letters()).To(BeEquivalentTo(5))
		second.set(func(d *fakeDispatcher) { d.stuck, d.box.held = false, true })
		Eventually(letters).Should(BeEquivalentTo(0))
		Eventually(func(g Gomega) {
			g.Expect(get(g, "again").Status.Parts).To(Equal(&v1beta1.RedeliveryParts{Total: 2, Done: 1}))
		}).Should(Succeed())
		Expect(state("again")()).To(Equal(v1beta1.ReasonRunning))
		second.set(func(d *fakeDispatcher) { d.box.held = false })
		Eventually(state("again")).Should(Equal("Complete Redelivered"))
		Expect(get(Default, "again").Status.Redelivered).To(HaveValue(BeEquivalentTo(9)))
	})

	It("fails at its deadline, even if no operator runs at that time", func() {
		box(func(b *letterBox) { b.held = true })
		w.apply(namespace, crmSecret+webSource+crmDestination+redelivery("short", ", activeDeadlineSeconds: 3"))
		Eventually(state("short")).Should(Equal("Failed DeadlineExceeded"))
		o := get(Default, "short")
		Expect(o.Status.CompletionTime).To(BeNil())
		Expect(meta.IsStatusConditionTrue(o.Status.Conditions, v1beta1.ConditionStalled)).To(BeTrue())
		Eventually(func() []string { return w.events(namespace, "short") }).Should(ContainElement("Warning DeadlineExceeded"))
		Eventually(inConfig).Should(BeEmpty())

		w.apply(namespace, redelivery("unattended", ", activeDeadlineSeconds: 3600"))
		Eventually(state("unattended")).Should(Equal(v1beta1.ReasonRunning))
		w.stop()
		w.options.Now = func() time.Time { return time.Now().Add(2 * time.Hour) }
		w.start()
		Eventually(state("unattended")).Should(Equal("Failed DeadlineExceeded"))
	})
})
