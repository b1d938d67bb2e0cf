package controllers

import (
	"context"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// lease is the Lease of a release: created and renewed so long ago, held unless holder is "".
func lease(namespace, holder string, created, renewed time.Duration, now time.Time) coordinationv1.Lease {
	return coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: leaseName, Namespace: namespace, CreationTimestamp: metav1.NewTime(now.Add(-created))},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: ptr.To(int32(30)),
			RenewTime: &metav1.MicroTime{Time: now.Add(-renewed)}},
	}
}

func TestPrecedingRelease(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		leases []coordinationv1.Lease
		want   string
	}{
		"none":                    {nil, ""},
		"another one is active":   {[]coordinationv1.Lease{lease("a", "pod", time.Hour, 5*time.Second, now)}, "a"},
		"another one has ended":   {[]coordinationv1.Lease{lease("a", "", time.Hour, 5*time.Second, now)}, ""},
		"another one has crashed": {[]coordinationv1.Lease{lease("a", "pod", time.Hour, 31*time.Second, now)}, ""},
		"the own one is older": {[]coordinationv1.Lease{lease("a", "pod", time.Minute, 0, now),
			lease("own", "pod", time.Hour, 20*time.Second, now)}, ""},
		"the own one is younger": {[]coordinationv1.Lease{lease("a", "pod", time.Hour, 0, now),
			lease("own", "pod", time.Minute, 0, now)}, "a"},
		"the own one remains from before": {[]coordinationv1.Lease{lease("a", "pod", time.Minute, 0, now),
			lease("own", "", time.Hour, time.Minute, now)}, "a"},
		"both at once": {[]coordinationv1.Lease{lease("z", "pod", time.Hour, 0, now),
			lease("own", "pod", time.Hour, 0, now)}, ""},
	} {
		check.Equal(t, name, precedingRelease(c.leases, "own", now), c.want)
	}
}

var _ = Describe("A second release", func() {
	It("does not start while another one is active, and names it", func() {
		w := newWorld()
		other := w.newNamespace()
		w.stop()
		// A process that ends while it claims the Lease of this release leaves it for its duration.
		Eventually(func() string {
			var leases coordinationv1.LeaseList
			Expect(cluster.List(w.ctx, &leases, client.InNamespace(release))).To(Succeed())
			return precedingRelease(leases.Items, "", time.Now())
		}).Should(BeEmpty())
		l := lease(other, "pod", time.Hour, 0, time.Now())
		Expect(cluster.Create(w.ctx, &l)).To(Succeed())
		DeferCleanup(func() { Expect(cluster.Delete(w.ctx, &l)).To(Succeed()) })
		ctx, cancel := context.WithTimeout(w.ctx, wait.Limit)
		defer cancel()
		Expect(Run(ctx, server.As("posthorn-operator"), w.options)).To(MatchError(ContainSubstring("release in namespace " + other)))

		l.Spec.HolderIdentity = ptr.To("")
		Expect(cluster.Update(w.ctx, &l)).To(Succeed())
		w.start()
		namespace := w.newNamespace()
		w.apply(namespace, webSource)
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "Ready")
	})
})
