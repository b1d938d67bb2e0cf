package controllers

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus/testutil"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/test/check"
)

func TestNextBacklogs(t *testing.T) {
	names := func(list string) map[string]bool {
		set := map[string]bool{}
		for name := range strings.FieldsSeq(list) {
			set[name] = true
		}
		return set
	}
	for name, c := range map[string]struct {
		stored, last   backlogs
		seen, existing string
		want           backlogs
	}{
		"nothing":                        {nil, nil, "", "", backlogs{}},
		"a first backlog":                {nil, backlogs{"d-0": 5, "d-1": 0}, "d-0 d-1", "d-0 d-1", backlogs{"d-0": 5}},
		"a small change is not recorded": {backlogs{"d-0": 10}, backlogs{"d-0": 19}, "d-0", "d-0", backlogs{"d-0": 10}},
		"a large change is": {backlogs{"d-0": 10, "d-1": 10}, backlogs{"d-0": 21, "d-1": 4}, "d-0 d-1", "d-0 d-1",
			backlogs{"d-0": 21, "d-1": 4}},
		"the end of a backlog is":               {backlogs{"d-0": 10}, backlogs{"d-0": 0}, "d-0", "d-0", backlogs{}},
		"the last number of a pod that ended":   {backlogs{"d-0": 10}, backlogs{"d-0": 12}, "d-0", "", backlogs{"d-0": 12}},
		"a pod that ended without a backlog":    {backlogs{"d-0": 10}, backlogs{"d-0": 0}, "d-0", "", backlogs{}},
		"a pod that ended long ago":             {backlogs{"d-0": 12}, backlogs{"d-0": 40}, "", "", backlogs{"d-0": 12}},
		"a pod of an earlier operator":          {backlogs{"d-0": 12}, nil, "", "d-1", backlogs{"d-0": 12}},
		"its record is removed":                 {nil, backlogs{"d-0": 12}, "", "d-1", backlogs{}},
		"it exists again, and has not reported": {backlogs{"d-0": 12}, nil, "d-1", "d-0 d-1", backlogs{"d-0": 12}},
	} {
		check.Same(t, name, nextBacklogs(c.stored, c.last, names(c.seen), names(c.existing)), c.want)
	}
}

// A destination without an old message has no backlog: a pod that ends delivers its messages.
func TestBacklogsOfReports(t *testing.T) {
	p := newProber(nil, time.Second, nil, func(reportChange) {}, func(Pod, bool) {})
	now := time.Now()
	report := func(log *adminapi.ReplicationReport) lastReport {
		return lastReport{answered: now, report: podreport.NewIndex(adminapi.Report{Replication: log, Namespaces: []adminapi.NamespaceReport{
			{Namespace: "a", Destinations: []adminapi.DestinationReport{
				{Name: "old", Ledger: adminapi.Ledger{Pending: 5}, OldestPending: now.Add(-time.Minute)},
				{Name: "young", Ledger: adminapi.Ledger{Pending: 70}, OldestPending: now.Add(-59 * time.Second)},
			}},
			{Namespace: "b", Destinations: []adminapi.DestinationReport{{Name: "old", Ledger: adminapi.Ledger{Pending: 2},
				OldestPending: now.Add(-time.Hour)}}},
		}})}
	}
	p.last["d-0"], p.last["d-1"], p.last[slotStore(0)] = report(nil), lastReport{answered: now, report: podreport.NewIndex(adminapi.Report{})},
		report(&adminapi.ReplicationReport{Epoch: 1})
	check.Same(t, "backlogs", p.backlogs(), backlogs{"d-0": 7, "d-1": 0})
}

// The ledgers of a pod that has stopped balance, before and after its volume was drained.
func TestLedgersOfARemovedPod(t *testing.T) {
	now := time.Now()
	report := adminapi.Report{Pod: "d-1", Namespaces: []adminapi.NamespaceReport{{
		Namespace: "a", Sources: []adminapi.SourceReport{{Name: "web", Accepted: 20,
			Messages: adminapi.Ledger{Accepted: 40, Delivered: 5, Pending: 35}}},
		Destinations: []adminapi.DestinationReport{
			{Name: "old", Ledger: adminapi.Ledger{Delivered: 5, Pending: 15}, OldestPending: now.Add(-time.Hour)},
			{Name: "retrying", Ledger: adminapi.Ledger{Pending: 7}, Retrying: 1, OldestPending: now},
			{Name: "young", Ledger: adminapi.Ledger{Pending: 13}, OldestPending: now},
		},
	}}}
	stopped := stoppedReport(lastReport{report: podreport.NewIndex(report), answered: now})
	pending := func(r adminapi.Report) (list []adminapi.Ledger) {
		x := podreport.NewIndex(r).Namespace("a")
		var d adminapi.DestinationReport
		for _, name := range []string{"old", "retrying", "young"} {
			x.ReadDestination(name, &d)
			list = append(list, adminapi.Ledger{Delivered: d.Delivered, Pending: d.Pending})
		}
		return append(list, x.Sources["web"].Messages)
	}
	check.Same(t, "stopped", pending(stopped), []adminapi.Ledger{{Delivered: 5, Pending: 15}, {Pending: 7}, {Delivered: 13},
		{Accepted: 40, Delivered: 18, Pending: 22}})
	check.Same(t, "drained", pending(drainedReport(stopped)),
		[]adminapi.Ledger{{Delivered: 20}, {Delivered: 7}, {Delivered: 13}, {Accepted: 40, Delivered: 40}})
}

var _ = Describe("The backlog of a dispatcher pod", func() {
	It("is reported after the pod has ended, also by the next operator, until its record is removed", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.dispatcher.set(func(d *fakeDispatcher) {
			d.traffic[namespace+"/crm"] = func(r *adminapi.DestinationReport) {
				r.Pending, r.OldestPending = 120, time.Now().Add(-time.Hour)
			}
		})
		record := func(g Gomega) map[string]string {
			var secret corev1.Secret
			g.Expect(client.IgnoreNotFound(cluster.Get(w.ctx, types.NamespacedName{Namespace: release, Name: backlogSecret}, &secret))).To(Succeed())
			all := map[string]string{}
			for name, value := range secret.Data {
				all[name] = string(value)
			}
			return all
		}
		orphaned := func() float64 { return testutil.ToFloat64(orphanedPending.WithLabelValues("dispatcher-0")) }
		Eventually(record).Should(Equal(map[string]string{"dispatcher-0": "120"}))
		Expect(testutil.CollectAndCount(orphanedPending)).To(BeZero(), "series of a pod that exists")

		By("ending the pod with a larger backlog, as a scaled StatefulSet does")
		w.dispatcher.set(func(d *fakeDispatcher) {
			d.traffic[namespace+"/crm"] = func(r *adminapi.DestinationReport) {
				r.Pending, r.OldestPending = 150, time.Now().Add(-time.Hour)
			}
		})
		w.waitPolls(3)
		w.pods.set()
		Eventually(record).Should(Equal(map[string]string{"dispatcher-0": "150"}))
		Eventually(orphaned).Should(BeEquivalentTo(150))

		By("restarting the operator")
		w.stop()
		Expect(testutil.CollectAndCount(orphanedPending)).To(BeZero(), "series of an operator that has stopped")
		w.start()
		Eventually(orphaned).Should(BeEquivalentTo(150))

		By("removing the record")
		var secret corev1.Secret
		Expect(cluster.Get(w.ctx, types.NamespacedName{Namespace: release, Name: backlogSecret}, &secret)).To(Succeed())
		patch := client.RawPatch(types.JSONPatchType, []byte(`[{"op": "remove", "path": "/data/dispatcher-0"}]`))
		Expect(cluster.Patch(w.ctx, &secret, patch)).To(Succeed())
		Eventually(func() int { return testutil.CollectAndCount(orphanedPending) }).Should(BeZero())
		Consistently(record, time.Second).Should(BeEmpty())
	})

	It("is not reported when the pod exists again", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.dispatcher.set(func(d *fakeDispatcher) {
			d.traffic[namespace+"/crm"] = func(r *adminapi.DestinationReport) {
				r.Pending, r.OldestPending = 3, time.Now().Add(-time.Hour)
			}
		})
		series := func() int { return testutil.CollectAndCount(orphanedPending) }
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		w.pods.set()
		Eventually(series).Should(Equal(1))
		w.pods.set(w.dispatcher.pod())
		Eventually(series).Should(BeZero())
	})

	It("is announced after a scale-in, and the counters of the removed pod remain", func() {
		const statefulSet = "posthorn-dispatcher" // of config/dispatcher
		scale := func(replicas int) {
			GinkgoHelper()
			patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))
			Expect(cluster.Patch(context.Background(), &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: release, Name: statefulSet}},
				patch)).To(Succeed())
		}
		scale(2)
		DeferCleanup(func() { scale(1) })
		removed := newDispatcher(statefulSet + "-1")
		w := newWorld(func(w *world) {
			w.options.DispatcherStatefulSet, w.options.numbersInterval = statefulSet, 100*time.Millisecond
			w.dispatcher.name = statefulSet + "-0"
			w.pods.set(w.dispatcher.pod(), removed.pod())
		})
		DeferCleanup(removed.server.Close)
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		for i, d := range []*fakeDispatcher{w.dispatcher, removed} {
			n := int64(100 * (i + 1))
			d.set(func(d *fakeDispatcher) {
				d.calls[namespace+"/web"] = func(r *adminapi.SourceReport) {
					r.Accepted, r.Messages = n+10, adminapi.Ledger{Accepted: n + 10, Delivered: n}
					if d == removed {
						r.Messages.Pending = 10
					} else {
						r.Messages.Delivered += 10
					}
				}
				d.traffic[namespace+"/crm"] = func(r *adminapi.DestinationReport) {
					r.Delivered = n + 10
					r.Endpoints[0].State = adminapi.EndpointHealthy
					if d == removed {
						r.Delivered, r.Pending, r.Retrying, r.OldestPending = n, 10, 10, time.Now()
						r.Endpoints[0].State = adminapi.EndpointCircuitOpen
					}
				}
			})
		}
		numbers := func(pending int64) func(Gomega) {
			return func(g Gomega) {
				d, s := w.destination(g, namespace, "crm"), w.source(g, namespace, "web")
				g.Expect(d.Status.Delivery).NotTo(BeNil())
				g.Expect([]int64{d.Status.Delivery.Delivered + d.Status.Delivery.Pending, d.Status.Delivery.Pending, s.Status.Calls.Accepted,
					s.Status.Messages.Pending}).To(Equal([]int64{320, pending, 320, pending}))
			}
		}
		ready := func() string {
			return meta.FindStatusCondition(w.destination(Default, namespace, "crm").Status.Conditions, "Ready").Message
		}
		const stranded = "stranded: 10 messages on the volume of posthorn-dispatcher-1, which does not run"
		Eventually(numbers(10)).Should(Succeed())
		w.expectCondition(namespace, "whd/crm", "Delivering", isFalse, "CircuitOpen")

		By("restarting the pod")
		w.pods.set(w.dispatcher.pod())
		w.waitPolls(5)
		Expect(ready()).NotTo(ContainSubstring("stranded"))
		w.expectCondition(namespace, "whd/crm", "Delivering", isFalse, "CircuitOpen")

		By("scaling in")
		scale(1)
		w.expectCondition(namespace, "whd/crm", "Delivering", isTrue, "Delivering")
		Eventually(ready).Should(ContainSubstring(stranded))
		Expect(w.events(release, statefulSet)).To(ContainElement("Warning MessagesStranded"))

		By("restarting the operator")
		w.stop()
		w.start()
		w.waitPolls(10)
		Expect(ready()).To(ContainSubstring(stranded))
		numbers(10)(Default)

		By("removing the record after the volume was drained")
		var secret corev1.Secret
		key := types.NamespacedName{Namespace: release, Name: backlogSecret}
		Expect(cluster.Get(w.ctx, key, &secret)).To(Succeed())
		Expect(secret.OwnerReferences).To(BeEmpty(), "owners of a record that remains after an uninstall")
		Expect(cluster.Patch(w.ctx, &secret, client.RawPatch(types.JSONPatchType,
			[]byte(`[{"op": "remove", "path": "/data/posthorn-dispatcher-1"}]`)))).To(Succeed())
		Eventually(numbers(0)).Should(Succeed())
		Eventually(ready).ShouldNot(ContainSubstring("stranded"))
		w.stop()
		w.start()
		w.waitPolls(10)
		numbers(0)(Default)

		By("scaling out")
		scale(2)
		w.pods.set(w.dispatcher.pod(), removed.pod())
		Eventually(numbers(10)).Should(Succeed())
		Eventually(func() error {
			return cluster.Get(w.ctx, types.NamespacedName{Namespace: release, Name: ledgersPrefix + removed.name}, &secret)
		}).Should(MatchError(ContainSubstring("not found")))
	})
})
