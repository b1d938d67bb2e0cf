package controllers

import (
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
)

var _ = Describe("An Audience", func() {
	const vip = `
apiVersion: posthorn.dev/v1beta1
kind: Audience
metadata: {name: vip}
spec: {sourceRef: {name: web}, key: very_important_people}
`
	// expectCondition waits until a condition of an Audience has a status and reason.
	expectCondition := func(w *world, namespace, name, condition string, status metav1.ConditionStatus, reason string) v1beta1.Audience {
		GinkgoHelper()
		var a v1beta1.Audience
		Eventually(func(g Gomega) {
			g.Expect(cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: name}, &a)).To(Succeed())
			c := meta.FindStatusCondition(a.Status.Conditions, condition)
			g.Expect(c).NotTo(BeNil())
			g.Expect([]string{string(c.Status), c.Reason}).To(Equal([]string{string(status), reason}), c.Message)
			g.Expect(c.ObservedGeneration).To(Equal(a.Generation))
		}).Should(Succeed())
		return a
	}

	It("waits for its Source, gets its key, and reports its syncs", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, vip)
		expectCondition(w, namespace, "vip", "Ready", isFalse, "NoSource")
		w.apply(namespace, webSource)
		expectCondition(w, namespace, "vip", "Ready", isTrue, "Ready")
		expectCondition(w, namespace, "vip", "Synced", metav1.ConditionUnknown, "NoSyncYet")

		at := time.Now().Truncate(time.Second)
		w.dispatcher.set(func(d *fakeDispatcher) {
			d.syncs[namespace+"/vip"] = func(r *adminapi.AudienceReport) { r.Members, r.Added, r.LastSync = 7, 7, at }
		})
		a := expectCondition(w, namespace, "vip", "Synced", isTrue, "Synced")
		Expect(*a.Status.Members).To(BeEquivalentTo(7))
		Expect(a.Status.LastSync.Time.Time).To(BeTemporally("==", at))
		table, err := server.Kubectl("", "get", "paud", "vip", "--namespace", namespace)
		Expect(err).NotTo(HaveOccurred())
		Expect(table).To(MatchRegexp(`NAME +READY +REASON +SYNCED +MEMBERS +PENDING +LAST SYNC +AGE\nvip +True +Ready +True +7 +0 +\S+ +\S+\n`))

		w.dispatcher.set(func(d *fakeDispatcher) {
			d.syncs[namespace+"/vip"] = func(r *adminapi.AudienceReport) {
				r.Members, r.LastSync, r.LastRefused, r.Refusal = 7, at, at.Add(time.Second), "invalid_json: line 3: the line is not JSON"
			}
		})
		a = expectCondition(w, namespace, "vip", "Synced", isFalse, "SyncRefused")
		Expect(meta.FindStatusCondition(a.Status.Conditions, "Synced").Message).To(ContainSubstring("line 3"))
		expectCondition(w, namespace, "vip", "Ready", isTrue, "Ready")
		Eventually(func() []string { return w.events(namespace, "vip") }).Should(ContainElement("Warning SyncRefused"))
	})

	It("is not accepted while an older one has its key", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+vip)
		expectCondition(w, namespace, "vip", "Ready", isTrue, "Ready")
		w.apply(namespace, `
apiVersion: posthorn.dev/v1beta1
kind: Audience
metadata: {name: young}
spec: {sourceRef: {name: web}, key: very_important_people}
`)
		expectCondition(w, namespace, "young", "Accepted", isFalse, "KeyConflict")
		w.delete(namespace, "audience", "vip")
		expectCondition(w, namespace, "young", "Ready", isTrue, "Ready")
	})
})

var _ = Describe("A DeletionRequest", func() {
	It("reports each notification, and is deleted when its TTL ends", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination+`
apiVersion: posthorn.dev/v1beta1
kind: DeletionRequest
metadata: {name: forget}
spec: {userID: u1, ttlSecondsAfterFinished: 1}
---
apiVersion: posthorn.dev/v1beta1
kind: DeletionRequest
metadata: {name: suppress}
spec: {userID: u1, suppress: true}
`)
		get := func(g Gomega, name string) (o v1beta1.DeletionRequest) {
			g.Expect(cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: name}, &o)).To(Succeed())
			return o
		}
		reports := func(state string) {
			w.dispatcher.set(func(d *fakeDispatcher) {
				for _, name := range []string{"forget", "suppress"} {
					d.deletions[namespace+"/"+name] = func(r *adminapi.DeletionReport) {
						r.Completed = state == adminapi.NotificationDelivered
						r.Started = time.Now().Add(-time.Hour).Truncate(time.Second)
						r.Notifications = []adminapi.NotificationReport{{Source: "web", Destination: "crm", State: state, Time: r.Started}}
					}
				}
			})
		}
		Eventually(func(g Gomega) {
			config, _ := w.live(g, namespace)
			g.Expect(config.Deletions).To(HaveLen(2))
			g.Expect(config.Deletions[1].Suppress).To(BeTrue())
		}).Should(Succeed())
		reports(adminapi.NotificationPending)
		Eventually(func(g Gomega) {
			o := get(g, "forget")
			g.Expect(meta.FindStatusCondition(o.Status.Conditions, "Ready").Reason).To(Equal(v1beta1.ReasonRunning))
			g.Expect(o.Status.Notifications).To(HaveLen(1))
			g.Expect(o.Status.CompletionTime).To(BeNil())
		}).Should(Succeed())
		reports(adminapi.NotificationDelivered)
		Eventually(func(g Gomega) {
			o := get(g, "suppress")
			g.Expect(meta.IsStatusConditionTrue(o.Status.Conditions, "Complete")).To(BeTrue())
			g.Expect(o.Status.Notifications[0].State).To(Equal(v1beta1.NotificationDelivered))
		}).Should(Succeed())
		table, err := server.Kubectl("", "get", "pdel", "suppress", "--namespace", namespace)
		Expect(err).NotTo(HaveOccurred())
		Expect(table).To(MatchRegexp(`NAME +COMPLETE +FAILED +REASON +TOTAL +DELIVERED +PENDING +AGE\nsuppress +True +False +Delivered +1 +1 +0 +\S+\n`))
		Eventually(func() bool {
			return apierrors.IsNotFound(cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: "forget"}, &v1beta1.DeletionRequest{}))
		}).Should(BeTrue())
		Eventually(func(g Gomega) {
			config, _ := w.live(g, namespace)
			g.Expect(config.Deletions).To(HaveLen(1))
			g.Expect(config.Deletions[0].Ended).To(BeTrue(), "the config has the request for suppression only")
		}).Should(Succeed())
		Expect(get(Default, "suppress").Name).To(Equal("suppress"), "a request with suppress is kept")
	})
})
