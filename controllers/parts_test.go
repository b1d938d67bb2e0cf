package controllers

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"maps"
	"slices"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
)

// withSmallSecrets makes the operator divide live configs of more than 64 KiB.
func withSmallSecrets(w *world) {
	w.options.limit = compile.Limit{SecretBytes: 64 << 10, Parts: liveconfig.MaxParts}
}

// noisy returns a destination with 6 KB that cannot be compressed.
func noisy(namespace, name string) *v1beta1.WebhookDestination {
	d := &v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	d.Spec.SourceRefs = []v1beta1.SourceReference{{Name: "web"}}
	e := v1beta1.Endpoint{Name: "e", URL: "https://hooks.example/in"}
	for i := range 2 {
		noise := make([]byte, 3000)
		_, _ = rand.Read(noise)
		value := base64.StdEncoding.EncodeToString(noise)
		e.Headers = append(e.Headers, v1beta1.Header{Name: fmt.Sprintf("X-%d", i), Value: &value})
	}
	d.Spec.Endpoints = []v1beta1.Endpoint{e}
	return d
}

// parts returns the parts of a namespace's live config by name.
func (w *world) parts(g Gomega, namespace string) map[string]corev1.Secret {
	var list corev1.SecretList
	g.Expect(cluster.List(w.ctx, &list, client.InNamespace(release), client.MatchingLabels{liveconfig.LabelPart: namespace})).To(Succeed())
	found := map[string]corev1.Secret{}
	for _, s := range list.Items {
		found[s.Name] = s
	}
	return found
}

// expectParts waits until the parts that exist are those that the root lists, and returns their
// resource versions.
func (w *world) expectParts(namespace string) map[string]string {
	GinkgoHelper()
	versions := map[string]string{}
	Eventually(func(g Gomega) {
		_, root := w.live(g, namespace)
		clear(versions)
		for name, part := range w.parts(g, namespace) {
			versions[name] = part.ResourceVersion
			g.Expect(part.Labels).To(HaveKeyWithValue(liveconfig.LabelLive, "part"))
			g.Expect(part.Immutable).To(HaveValue(BeTrue()))
		}
		g.Expect(slices.Sorted(maps.Keys(versions))).To(ConsistOf(liveconfig.PartNames(namespace, root.Data)), "parts")
	}).Should(Succeed())
	return versions
}

// newIn returns the keys of after that before lacks, or has with another value.
func newIn(before, after map[string]string) (names []string) {
	for name, version := range after {
		if before[name] != version {
			names = append(names, name)
		}
	}
	return names
}

var _ = Describe("A live config that does not fit into one Secret", func() {
	const destinations = 30
	// large returns a world and a namespace with a config in parts.
	large := func(change ...func(*world)) (*world, string) {
		GinkgoHelper()
		w := newWorld(append(change, withSmallSecrets)...)
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		Expect(w.parts(Default, namespace)).To(BeEmpty(), "parts of a small config")
		for i := range destinations {
			Expect(cluster.Create(w.ctx, noisy(namespace, fmt.Sprintf("d-%02d", i)))).To(Succeed())
		}
		for i := range destinations {
			w.expectCondition(namespace, fmt.Sprintf("whd/d-%02d", i), "Ready", isTrue, "Ready")
		}
		return w, namespace
	}
	edit := func(w *world, namespace, url string) {
		GinkgoHelper()
		d := w.destination(Default, namespace, "crm")
		patch := client.MergeFrom(d.DeepCopy())
		d.Spec.Endpoints[0].URL = url
		Expect(cluster.Patch(w.ctx, &d, patch)).To(Succeed())
		Eventually(func(g Gomega) {
			config, _ := w.live(g, namespace)
			i := slices.IndexFunc(config.Destinations, func(d liveconfig.Destination) bool { return d.Name == "crm" })
			g.Expect(config.Destinations[i].Endpoints[0].URL.Reveal()).To(Equal(url))
		}).Should(Succeed())
	}

	It("is in parts; an edit writes one of them, and a small config is one Secret again", func() {
		w, namespace := large()
		before := w.expectParts(namespace)
		Expect(len(before)).To(BeNumerically(">=", 4), "parts")
		_, root := w.live(Default, namespace)
		Expect(slices.Collect(maps.Keys(root.Data))).To(ConsistOf(liveconfig.HeadKey, liveconfig.IndexKey))

		edit(w, namespace, "https://hooks.example/edited")
		after := w.expectParts(namespace)
		Expect(newIn(before, after)).To(HaveLen(1), "parts written by an edit")
		Expect(newIn(after, before)).To(HaveLen(1), "parts removed after the edit")
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")

		By("restarting the operator")
		idle := w.waitIdle()
		w.stop()
		w.start()
		w.waitPolls(5)
		Expect(w.waitIdle()).To(Equal(idle))
		Expect(w.expectParts(namespace)).To(Equal(after))

		By("keeping old parts until every pod has confirmed the root")
		w.dispatcher.set(func(d *fakeDispatcher) { d.stuck = true })
		edit(w, namespace, "https://hooks.example/stuck")
		w.waitPolls(5)
		kept := w.parts(Default, namespace)
		for name := range after {
			Expect(kept).To(HaveKey(name), "a part that a pod may need")
		}
		Expect(kept).To(HaveLen(len(after)+1), "parts")
		w.dispatcher.set(func(d *fakeDispatcher) { d.stuck = false })
		w.expectParts(namespace)

		By("removing destinations")
		Expect(cluster.DeleteAllOf(w.ctx, &v1beta1.WebhookDestination{}, client.InNamespace(namespace))).To(Succeed())
		w.apply(namespace, crmDestination)
		Eventually(func(g Gomega) {
			config, root := w.live(g, namespace)
			g.Expect(config.Destinations).To(HaveLen(1))
			g.Expect(root.Data).To(HaveKey(liveconfig.DataKey))
			g.Expect(root.Data).NotTo(HaveKey(liveconfig.IndexKey))
			g.Expect(w.parts(g, namespace)).To(BeEmpty())
		}).Should(Succeed())
	})

	It("gets a part again that was deleted or replaced, and has an owner", func() {
		w, namespace := large(func(w *world) { w.options.DispatcherStatefulSet = "posthorn-dispatcher" })
		before := w.expectParts(namespace)
		names := slices.Sorted(maps.Keys(before))
		deleted, replaced, orphaned := names[0], names[1], names[2]
		original := w.parts(Default, namespace)
		for _, part := range original {
			Expect(part.OwnerReferences).To(HaveLen(1), "owners of a part")
		}

		Expect(cluster.Delete(w.ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: release, Name: deleted}})).To(Succeed())
		other := original[replaced]
		Expect(cluster.Delete(w.ctx, other.DeepCopy())).To(Succeed())
		other.ObjectMeta = metav1.ObjectMeta{Namespace: release, Name: replaced, Labels: other.Labels}
		other.Data = map[string][]byte{liveconfig.PartKey: []byte("other")}
		// The operator may create it first.
		_ = cluster.Create(w.ctx, &other)
		alone := original[orphaned]
		Expect(cluster.Patch(w.ctx, alone.DeepCopy(), client.RawPatch("application/merge-patch+json",
			[]byte(`{"metadata": {"ownerReferences": null}}`)))).To(Succeed())
		Eventually(func(g Gomega) {
			parts := w.parts(g, namespace)
			g.Expect(parts).To(HaveLen(len(before)))
			for _, part := range parts {
				g.Expect(part.Data).To(Equal(original[part.Name].Data))
				g.Expect(part.OwnerReferences).To(HaveLen(1))
			}
		}).Should(Succeed())
		w.waitIdle()
		after := w.expectParts(namespace)
		Expect(newIn(before, after)).To(ConsistOf(deleted, replaced, orphaned))
	})

	It("removes parts that no root lists: an operator stopped before it wrote the root", func() {
		w, namespace := large()
		before := w.expectParts(namespace)
		other := w.newNamespace() // It never has an object.
		w.stop()
		var names []string
		for _, of := range []string{namespace, other} {
			name := "posthorn-part-" + of + "-" + strings.Repeat("0", 64)
			Expect(cluster.Create(w.ctx, &corev1.Secret{
				ObjectMeta: metav1.ObjectMeta{Namespace: release, Name: name,
					Labels: map[string]string{liveconfig.LabelLive: "part", liveconfig.LabelPart: of}},
				Data: map[string][]byte{liveconfig.PartKey: []byte("orphan")},
			})).To(Succeed())
			names = append(names, name)
		}
		w.start()
		Expect(w.expectParts(namespace)).To(Equal(before))
		for _, name := range names {
			Eventually(func() error {
				return cluster.Get(context.Background(), client.ObjectKey{Namespace: release, Name: name}, &corev1.Secret{})
			}).Should(MatchError(ContainSubstring("not found")))
		}
	})

	It("has neither parts nor a root after the namespace's objects were deleted", func() {
		w, namespace := large()
		Expect(cluster.DeleteAllOf(w.ctx, &v1beta1.WebhookDestination{}, client.InNamespace(namespace))).To(Succeed())
		w.delete(namespace, "psrc", "web")
		Eventually(func(g Gomega) {
			g.Expect(w.parts(g, namespace)).To(BeEmpty())
			head := w.head(g, namespace)
			g.Expect(head.UIDs).To(BeEmpty())
		}).Should(Succeed())
		w.releaseKeys(namespace, liveconfig.ReleaseAll)
		Eventually(w.hasLive(namespace)).Should(BeFalse())
	})

	It("pauses the destinations that exceed the parts", func() {
		w := newWorld(func(w *world) { w.options.limit = compile.Limit{SecretBytes: 64 << 10, Parts: 4} })
		namespace := w.newNamespace()
		w.apply(namespace, webSource)
		for i := range destinations {
			Expect(cluster.Create(w.ctx, noisy(namespace, fmt.Sprintf("d-%02d", i)))).To(Succeed())
		}
		Eventually(func(g Gomega) {
			paused := 0
			config, _ := w.live(g, namespace)
			g.Expect(config.Destinations).To(HaveLen(destinations))
			for _, d := range config.Destinations {
				if d.State == liveconfig.Paused {
					paused++
					g.Expect(d.PausedReason).To(Equal("ConfigTooLarge"))
				}
			}
			g.Expect(paused).To(And(BeNumerically(">", 0), BeNumerically("<", destinations)))
		}).Should(Succeed())
	})
})
