package controllers

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

var _ = Describe("The owner of the operator's Secrets", func() {
	const statefulSet = "posthorn-dispatcher" // of config/dispatcher
	withOwner := func(w *world) { w.options.DispatcherStatefulSet = statefulSet }

	// owners returns the UIDs of a Secret's owners.
	owners := func(name string) []types.UID {
		var secret corev1.Secret
		if err := cluster.Get(context.Background(), client.ObjectKey{Namespace: release, Name: name}, &secret); err != nil {
			return nil
		}
		var uids []types.UID
		for _, o := range secret.OwnerReferences {
			uids = append(uids, o.UID)
		}
		return uids
	}
	uid := func() types.UID {
		GinkgoHelper()
		var o appsv1.StatefulSet
		Expect(cluster.Get(context.Background(), client.ObjectKey{Namespace: release, Name: statefulSet}, &o)).To(Succeed())
		return o.UID
	}

	It("is the dispatchers' StatefulSet", func() {
		w := newWorld(withOwner)
		namespace := w.newNamespace()
		w.apply(namespace, webSource)
		Eventually(owners).WithArguments(liveconfig.SecretName(namespace)).Should(Equal([]types.UID{uid()}))
		Eventually(owners).WithArguments(liveconfig.MarkerName).Should(Equal([]types.UID{uid()}))
	})

	It("is added once to the Secrets of a release without owners", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource)
		Eventually(func(g Gomega) { w.live(g, namespace) }).Should(Succeed())
		Eventually(func() error {
			return cluster.Get(w.ctx, client.ObjectKey{Namespace: release, Name: liveconfig.MarkerName}, &corev1.Secret{})
		}).Should(Succeed())
		_, before := w.live(Default, namespace)
		Expect(before.OwnerReferences).To(BeEmpty())
		w.stop()

		withOwner(w)
		w.start()
		Eventually(owners).WithArguments(liveconfig.SecretName(namespace)).Should(Equal([]types.UID{uid()}))
		Eventually(owners).WithArguments(liveconfig.MarkerName).Should(Equal([]types.UID{uid()}))
		_, after := w.live(Default, namespace)
		Expect(after.Data).To(Equal(before.Data), "live config after the owner was added")
		w.waitIdle()
		_, last := w.live(Default, namespace)
		Expect(last.ResourceVersion).To(Equal(after.ResourceVersion), "writes after the owner was added")
	})

	It("must exist: the operator writes no Secret that would remain", func() {
		logs.take()
		w := newWorld(func(w *world) { w.options.DispatcherStatefulSet = "removed" })
		namespace := w.newNamespace()
		w.apply(namespace, webSource)
		Eventually(logs.String).Should(ContainSubstring(`statefulsets.apps \"removed\" not found`))
		Expect(cluster.Get(w.ctx, client.ObjectKey{Namespace: release, Name: liveconfig.SecretName(namespace)},
			&corev1.Secret{})).To(MatchError(ContainSubstring("not found")))
	})

	It("is added to an existing admin certificate without replacing it", func() {
		ctx := context.Background()
		own, err := client.New(server.As("posthorn-operator"), client.Options{})
		Expect(err).NotTo(HaveOccurred())
		key := client.ObjectKey{Namespace: release, Name: adminapi.CertificateSecret}
		DeferCleanup(func() {
			Expect(client.IgnoreNotFound(cluster.Delete(ctx,
				&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}))).To(Succeed())
		})
		Expect(newAdminCertificate(own, secretOwner{direct: own, namespace: release}, time.Now).ensure(ctx)).To(Succeed())
		var before, after corev1.Secret
		Expect(cluster.Get(ctx, key, &before)).To(Succeed())
		Expect(before.OwnerReferences).To(BeEmpty())

		withOwner := newAdminCertificate(own, secretOwner{direct: own, namespace: release, statefulSet: statefulSet}, time.Now)
		Expect(withOwner.ensure(ctx)).To(Succeed())
		Expect(owners(key.Name)).To(Equal([]types.UID{uid()}))
		Expect(cluster.Get(ctx, key, &after)).To(Succeed())
		Expect(after.Data).To(Equal(before.Data))
	})
})
