package controllers

import (
	"strings"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
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
		"nothing":                               {nil, nil, "", "", backlogs{}},
		"a first backlog":                       {nil, backlogs{"d-0": 5, "d-1": 0}, "d-0 d-1", "d-0 d-1", backlogs{"d-0": 5}},
		"a small change is not recorded":        {backlogs{"d-0": 10}, backlogs{"d-0": 19}, "d-0", "d-0", backlogs{"d-0": 10}},
		"a large change is":                     {backlogs{"d-0": 10, "d-1": 10}, backlogs{"d-0": 21, "d-1": 4}, "d-0 d-1", "d-0 d-1", backlogs{"d-0": 21, "d-1": 4}},
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
	report := func(log *adminapi.LogReport) lastReport {
		return lastReport{answered: now, report: adminapi.NewIndex(adminapi.Report{Log: log, Namespaces: []adminapi.NamespaceReport{
			{Namespace: "a", Destinations: []adminapi.DestinationReport{
				{Name: "old", Ledger: adminapi.Ledger{Pending: 5}, OldestPending: now.Add(-time.Minute)},
				{Name: "young", Ledger: adminapi.Ledger{Pending: 70}, OldestPending: now.Add(-59 * time.Second)},
			}},
			{Namespace: "b", Destinations: []adminapi.DestinationReport{{Name: "old", Ledger: adminapi.Ledger{Pending: 2}, OldestPending: now.Add(-time.Hour)}}},
		}})}
	}
	p.last["d-0"], p.last["d-1"], p.last[logStore] = report(nil), lastReport{answered: now, report: adminapi.NewIndex(adminapi.Report{})}, report(&adminapi.LogReport{Epoch: 1})
	check.Same(t, "backlogs", p.backlogs(), backlogs{"d-0": 7, "d-1": 0})
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
})
