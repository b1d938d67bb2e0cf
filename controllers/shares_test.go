package controllers

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// storedShares returns the shares of limits in the Secret.
func (w *world) storedShares(g Gomega) liveconfig.Shares {
	var secret corev1.Secret
	g.Expect(cluster.Get(w.ctx, client.ObjectKey{Namespace: release, Name: liveconfig.SharesName}, &secret)).To(Succeed())
	g.Expect(secret.Labels).To(HaveKey(liveconfig.LabelLive))
	shares, err := liveconfig.DecodeShares(secret.Data)
	g.Expect(err).NotTo(HaveOccurred())
	return shares
}

// thousandths returns shares in thousandths, rounded down.
func thousandths(list []liveconfig.Share) (all []int) {
	for _, share := range list {
		all = append(all, share.Count(1000))
	}
	return all
}

var _ = Describe("The shares of limits", func() {
	It("are equal at first, follow the traffic, and are divided again for a new dispatcher when all have confirmed", func() {
		w := newWorld()
		others := []*fakeDispatcher{newDispatcher("dispatcher-1"), newDispatcher("dispatcher-2"), newDispatcher("dispatcher-3")}
		for _, d := range others {
			DeferCleanup(d.server.Close)
		}
		w.pods.set(w.dispatcher.pod(), others[0].pod(), others[1].pod())
		Eventually(func(g Gomega) {
			shares := w.storedShares(g)
			g.Expect(shares.Pods).To(Equal([]string{"dispatcher-0", "dispatcher-1", "dispatcher-2"}))
			g.Expect(thousandths(shares.Default)).To(Equal([]int{333, 333, 333}))
		}).Should(Succeed())

		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		for d, use := range map[*fakeDispatcher]adminapi.LimitUse{
			w.dispatcher: {Used: 333_000, Limited: true}, others[0]: {Used: 100_000}, others[1]: {Used: 100_000},
		} {
			d.set(func(d *fakeDispatcher) {
				d.traffic[namespace+"/crm"] = func(r *adminapi.DestinationReport) { r.Limit = use }
			})
		}
		object := liveconfig.ShareKey(namespace, liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: "crm"})
		Eventually(func(g Gomega) {
			shares := w.storedShares(g)
			g.Expect(thousandths(shares.Objects[object])).To(Equal([]int{760, 120, 120}))
			g.Expect(thousandths(shares.Default)).To(Equal([]int{333, 333, 333}))
		}).Should(Succeed())

		others[0].set(func(d *fakeDispatcher) { d.stuck = true })
		w.pods.set(w.dispatcher.pod(), others[0].pod(), others[1].pod(), others[2].pod())
		Eventually(func(g Gomega) {
			g.Expect(thousandths(w.storedShares(g).Default)).To(Equal([]int{250, 250, 250, 0}))
		}).Should(Succeed())
		others[0].set(func(d *fakeDispatcher) { d.stuck = false })
		Eventually(func(g Gomega) {
			g.Expect(thousandths(w.storedShares(g).Default)).To(Equal([]int{250, 250, 250, 250}))
		}).Should(Succeed())
	})

	It("are kept by the next operator, and written again after another client has deleted them", func() {
		w := newWorld()
		Eventually(func(g Gomega) { g.Expect(w.storedShares(g).Pods).To(HaveLen(1)) }).Should(Succeed())
		before := w.storedShares(Default)
		w.stop()
		w.start()
		Consistently(func(g Gomega) { g.Expect(w.storedShares(g)).To(Equal(before)) }, "3s").Should(Succeed())
		secret := &corev1.Secret{}
		secret.Namespace, secret.Name = release, liveconfig.SharesName
		Expect(cluster.Delete(w.ctx, secret)).To(Succeed())
		Eventually(func(g Gomega) { g.Expect(w.storedShares(g).Default).To(Equal(before.Default)) }).Should(Succeed())
	})
})
