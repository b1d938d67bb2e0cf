package controllers

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/kinds"
)

const (
	isTrue    = metav1.ConditionTrue
	isFalse   = metav1.ConditionFalse
	isUnknown = metav1.ConditionUnknown
)

var _ = Describe("The live config", func() {
	It("is one Secret for each namespace", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		Eventually(func(g Gomega) {
			config, secret := w.live(g, namespace)
			g.Expect(config.Sources).To(HaveLen(1))
			g.Expect(config.Destinations).To(HaveLen(1))
			sum := sha256.Sum256([]byte("hush-web"))
			g.Expect(config.Sources[0].WriteKeySHA256).To(Equal(liveconfig.KeyHashes{hex.EncodeToString(sum[:])}))
			d := config.Destinations[0]
			g.Expect(d.State).To(Equal(liveconfig.Active))
			g.Expect(d.Signing[0].Secret.Reveal()).To(Equal("hush-crm"))
			g.Expect(d.Endpoints[0].URL.Reveal()).To(Equal("https://hooks.example/in"))
			g.Expect(d.Sources).To(Equal([]string{"web"}))
			g.Expect(secret.Data).To(HaveLen(2))
		}).Should(Succeed())
		for _, c := range []string{"Accepted", "ResolvedRefs", "Programmed", "Ready"} {
			w.expectCondition(namespace, "whd/crm", c, isTrue, c)
			w.expectCondition(namespace, "source/web", c, isTrue, c)
		}
		w.expectCondition(namespace, "whd/crm", "Delivering", isUnknown, "NoTrafficYet")
		w.expectCondition(namespace, "source/web", "Receiving", isUnknown, "NoTrafficYet")
		Eventually(func() []string { return w.source(Default, namespace, "web").Status.Destinations }).Should(Equal([]string{"crm"}))
		Expect(logs.String()).To(MatchRegexp(`"live config written" .*namespace=` + namespace + ` `))
		// A new object without problems has no Event.
		Expect(w.events(namespace, "crm")).To(BeEmpty())

		table, err := server.Kubectl("", "get", "posthorn", "--namespace", namespace)
		Expect(err).NotTo(HaveOccurred())
		Expect(strings.Fields(table)[:8]).To(Equal([]string{"NAME", "READY", "REASON", "RECEIVING", "CALLS", "LAST", "RECEIVED", "AGE"}))
		Expect(table).To(MatchRegexp(`webhookdestination.posthorn.dev/crm +True +NoTrafficYet +Unknown`))
	})

	It("has a marker Secret after all namespaces are compiled, even if there are none", func() {
		w := newWorld()
		marker := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: release, Name: liveconfig.MarkerName}}
		exists := func() error { return cluster.Get(w.ctx, client.ObjectKeyFromObject(marker), marker) }
		Eventually(exists).Should(Succeed())
		Expect(marker.Labels).To(HaveKey(liveconfig.LabelLive))
		Expect(marker.Labels).NotTo(HaveKey(liveconfig.LabelNamespace))

		By("deleting the marker")
		old := marker.UID
		Expect(cluster.Delete(w.ctx, marker)).To(Succeed())
		Eventually(func(g Gomega) { g.Expect(exists()).To(Succeed()); g.Expect(marker.UID).NotTo(Equal(old)) }).Should(Succeed())
	})

	It("pauses a destination while its Secret is missing", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmDestination)
		w.expectCondition(namespace, "whd/crm", "ResolvedRefs", isFalse, "SecretNotFound")
		w.expectCondition(namespace, "whd/crm", "Ready", isFalse, "SecretNotFound")
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "Ready")
		config, _ := w.live(Default, namespace)
		Expect(config.Destinations[0].State).To(Equal(liveconfig.Paused))
		Eventually(func() []string { return w.events(namespace, "crm") }).Should(ConsistOf("Warning SecretNotFound"))

		w.apply(namespace, crmSecret)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		config, _ = w.live(Default, namespace)
		Expect(config.Destinations[0].State).To(Equal(liveconfig.Active))
		Eventually(func() []string { return w.events(namespace, "crm") }).Should(ConsistOf("Warning SecretNotFound", "Normal ResolvedRefs"))

		By("deleting the Secret")
		w.delete(namespace, "secret", "crm")
		w.expectCondition(namespace, "whd/crm", "Ready", isFalse, "SecretNotFound")
	})

	It("reads the CAs of a ConfigMap, and reads them again after a change", func() {
		w := newWorld()
		namespace := w.newNamespace()
		authority := func() string {
			certificate, _, _, err := makeCertificate(time.Now())
			Expect(err).NotTo(HaveOccurred())
			return string(certificate)
		}
		bundle := func(pem string) string {
			return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: bundle}\ndata: {ca.crt: " + strconv.Quote(pem) + "}\n"
		}
		trusted := func(g Gomega) string {
			config, _ := w.live(g, namespace)
			g.Expect(config.Destinations).To(HaveLen(1))
			g.Expect(config.Destinations[0].Endpoints[0].TLS).NotTo(BeNil())
			return config.Destinations[0].Endpoints[0].TLS.CA
		}
		w.apply(namespace, webSource+crmSecret+named("crm", `url: "https://hooks.example/in"`, `url: "https://hooks.example/in", tls: {ca: {configMapKeyRef: {name: bundle, key: ca.crt}}}`))
		w.expectCondition(namespace, "whd/crm", "ResolvedRefs", isFalse, "ConfigMapNotFound")
		first, second := authority(), authority()
		w.apply(namespace, bundle("# first\n"+first+"# second\n"+second))
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		Expect(trusted(Default)).To(Equal(first + second))
		w.apply(namespace, bundle(second))
		Eventually(trusted).Should(Equal(second))
		w.apply(namespace, bundle("none"))
		w.expectCondition(namespace, "whd/crm", "Ready", isFalse, "InvalidConfigMap")
	})

	It("suspends a Source and a destination, which remain Ready", func() {
		w := newWorld()
		namespace := w.newNamespace()
		suspend := func(suspended string) {
			for _, object := range []string{webSource, crmSecret, crmDestination} {
				w.apply(namespace, strings.Replace(object, "\nspec:\n", "\nspec:\n  suspend: "+suspended+"\n", 1))
			}
		}
		suspend("true")
		for object, traffic := range map[string]string{"whd/crm": "Delivering", "source/web": "Receiving"} {
			w.expectCondition(namespace, object, "Accepted", isTrue, "Suspended")
			w.expectCondition(namespace, object, "Ready", isTrue, "Ready")
			w.expectCondition(namespace, object, traffic, isFalse, "Suspended")
		}
		config, _ := w.live(Default, namespace)
		Expect(config.Destinations[0].State).To(Equal(liveconfig.Suspended))
		Expect(config.Sources[0].Suspended).To(BeTrue())
		Expect(w.destination(Default, namespace, "crm").Status.Reason).To(Equal("Suspended"))

		suspend("false")
		w.expectCondition(namespace, "whd/crm", "Delivering", isUnknown, "NoTrafficYet")
		w.expectCondition(namespace, "source/web", "Receiving", isUnknown, "NoTrafficYet")
		config, _ = w.live(Default, namespace)
		Expect(config.Destinations[0].State).To(Equal(liveconfig.Active))
		Expect(config.Sources[0].Suspended).To(BeFalse())
	})

	It("is updated when a Secret changes", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		before := w.destination(Default, namespace, "crm").Status.Revision
		w.apply(namespace, strings.ReplaceAll(crmSecret, "hush-crm", "hush-new"))
		Eventually(func(g Gomega) {
			config, _ := w.live(g, namespace)
			g.Expect(config.Destinations[0].Signing[0].Secret.Reveal()).To(Equal("hush-new"))
			d := w.destination(g, namespace, "crm")
			g.Expect(d.Status.Revision).NotTo(Equal(before))
		}).Should(Succeed())
		w.expectCondition(namespace, "whd/crm", "Programmed", isTrue, "Programmed")
	})

	It("is updated when the labels of a Source change", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+named("crm", "sourceRefs: [{name: web}]", "sourceSelector: {matchLabels: {team: crm}}"))
		w.expectCondition(namespace, "whd/crm", "ResolvedRefs", isFalse, "NoSource")
		_, err := server.Kubectl("", "label", "psrc", "web", "team=crm", "--overwrite", "--namespace", namespace)
		Expect(err).NotTo(HaveOccurred())
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
	})

	It("excludes deleted objects, and is deleted after the last one", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		w.delete(namespace, "whd", "crm")
		Eventually(func(g Gomega) {
			config, _ := w.live(g, namespace)
			g.Expect(config.Destinations).To(BeEmpty())
			g.Expect(config.Sources).To(HaveLen(1))
			g.Expect(w.source(g, namespace, "web").Status.Destinations).To(BeEmpty())
		}).Should(Succeed())
		w.delete(namespace, "psrc", "web")
		w.releaseKeys(namespace, liveconfig.ReleaseAll)
		Eventually(w.hasLive(namespace)).Should(BeFalse())
	})

	It("is deleted at the start if the objects were deleted while no operator ran", func() {
		w := newWorld()
		namespace, other := w.newNamespace(), w.newNamespace()
		w.apply(namespace, webSource)
		w.apply(other, strings.ReplaceAll(webSource, "hush-web", "hush-other"))
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "Ready")
		w.expectCondition(other, "source/web", "Ready", isTrue, "Ready")
		w.stop()
		w.delete(namespace, "psrc", "web")
		w.start()
		w.releaseKeys(namespace, liveconfig.ReleaseAll)
		Eventually(w.hasLive(namespace)).Should(BeFalse())
		_, kept := w.live(Default, other)
		Expect(kept.Labels).To(HaveKeyWithValue(liveconfig.LabelNamespace, other))
	})

	It("isolates namespaces, and the objects of a namespace", func() {
		w := newWorld()
		a, b := w.newNamespace(), w.newNamespace()
		w.apply(a, webSource+crmSecret+crmDestination)
		w.apply(b, strings.ReplaceAll(webSource, "hush-web", "hush-b")+crmSecret+crmDestination)
		w.expectCondition(a, "whd/crm", "Ready", isTrue, "Ready")
		w.expectCondition(b, "whd/crm", "Ready", isTrue, "Ready")
		before := w.waitIdle()
		_, secretB := w.live(Default, b)

		w.apply(a, named("bad", "https://hooks.example/in", "http://169.254.169.254/latest")+named("worse", "[{name: web}]", "[{name: missing}]"))
		w.expectCondition(a, "whd/bad", "Accepted", isFalse, "EgressDenied")
		w.expectCondition(a, "whd/worse", "ResolvedRefs", isFalse, "NoSource")
		w.waitPolls(3)
		after := w.versions()
		Expect(after["whd/"+a+"/crm"]).To(Equal(before["whd/"+a+"/crm"]))
		Expect(after["whd/"+b+"/crm"]).To(Equal(before["whd/"+b+"/crm"]))
		_, again := w.live(Default, b)
		Expect(again.ResourceVersion).To(Equal(secretB.ResourceVersion))
	})

	It("is restored when another client deletes it, changes it or removes its labels", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		config, secret := w.live(Default, namespace)
		for _, harm := range []func() error{
			func() error { return cluster.Delete(w.ctx, secret) },
			func() error {
				changed := secret.DeepCopy()
				changed.Data[liveconfig.DataKey] = []byte("x")
				return cluster.Update(w.ctx, changed)
			},
			func() error {
				changed := secret.DeepCopy()
				changed.Labels = nil
				return cluster.Update(w.ctx, changed)
			},
		} {
			Expect(harm()).To(Succeed())
			Eventually(func(g Gomega) {
				var again liveconfig.Config
				again, secret = w.live(g, namespace)
				g.Expect(again).To(Equal(config))
			}).Should(Succeed())
		}
	})

	It("gives a write key to one Source of all namespaces", func() {
		w := newWorld()
		first, second := w.newNamespace(), w.newNamespace()
		w.apply(first, webSource)
		w.expectCondition(first, "source/web", "Ready", isTrue, "Ready")
		Eventually(func(g Gomega) { // Creation times have a precision of one second.
			g.Expect(metav1.Now().Unix()).To(BeNumerically(">", w.source(g, first, "web").CreationTimestamp.Unix()))
		}).Should(Succeed())
		w.apply(second, webSource)
		w.expectCondition(second, "source/web", "Accepted", isFalse, "WriteKeyConflict")
		w.expectCondition(first, "source/web", "Ready", isTrue, "Ready")
		config, _ := w.live(Default, second)
		Expect(config.Sources[0].WriteKeySHA256).To(BeEmpty())

		By("restarting the operator")
		before := w.waitIdle()
		w.stop()
		w.start()
		w.waitPolls(5)
		Expect(w.versions()).To(Equal(before))
	})

	It("fits into a Secret up to its size limit", func() {
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: release, Name: liveconfig.SecretName("largest")}}
		secret.Labels = map[string]string{liveconfig.LabelLive: "true", liveconfig.LabelNamespace: "largest"}
		secret.Annotations = map[string]string{liveconfig.AnnotationRevision: strings.Repeat("0", 64)}
		secret.Data = map[string][]byte{liveconfig.DataKey: make([]byte, liveconfig.MaxEncodedBytes)}
		_, _ = rand.Read(secret.Data[liveconfig.DataKey])
		Expect(cluster.Create(context.Background(), secret)).To(Succeed())
		Expect(cluster.Delete(context.Background(), secret)).To(Succeed())
	})

	It("pauses the destinations that exceed the size limit, and includes every other change", func() {
		// With the real limit, the repeated compression of megabytes takes minutes under the
		// race detector. A smaller limit causes the same decisions.
		w := newWorld(func(w *world) { w.options.limit = compile.Limit{SecretBytes: liveconfig.MaxEncodedBytes / 16} })
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")

		large := func(name string) *v1beta1.WebhookDestination {
			d := &v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
			d.Spec.SourceRefs = []v1beta1.SourceReference{{Name: "web"}}
			for i := range 5 {
				e := v1beta1.Endpoint{Name: fmt.Sprintf("e%d", i), URL: "https://hooks.example/in"}
				for j := range 32 {
					noise := make([]byte, 2800/16) // Two of them fit with room to spare, and three do not.
					_, _ = rand.Read(noise)
					value := base64.StdEncoding.EncodeToString(noise)
					e.Headers = append(e.Headers, v1beta1.Header{Name: fmt.Sprintf("X-%d", j), Value: &value})
				}
				d.Spec.Endpoints = append(d.Spec.Endpoints, e)
			}
			return d
		}
		for _, name := range []string{"large", "larger"} {
			Expect(cluster.Create(w.ctx, large(name))).To(Succeed())
			w.expectCondition(namespace, "whd/"+name, "Ready", isTrue, "Ready")
		}
		Expect(cluster.Create(w.ctx, large("too-large"))).To(Succeed())
		w.expectCondition(namespace, "whd/too-large", "Accepted", isFalse, "ConfigTooLarge")
		w.expectCondition(namespace, "whd/large", "Ready", isTrue, "Ready")
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		w.expectCondition(namespace, "whd/too-large", "Programmed", isTrue, "Programmed") // as paused
		config, _ := w.live(Default, namespace)
		Expect(config.Destinations).To(HaveLen(4))
		i := slices.IndexFunc(config.Destinations, func(d liveconfig.Destination) bool { return d.Name == "too-large" })
		Expect(config.Destinations[i].State).To(Equal(liveconfig.Paused))

		By("changing other objects")
		w.apply(namespace, strings.ReplaceAll(crmSecret, "hush-crm", "hush-new"))
		Eventually(func(g Gomega) {
			config, _ := w.live(g, namespace)
			g.Expect(config.Destinations[0].Signing[0].Secret.Reveal()).To(Equal("hush-new"))
		}).Should(Succeed())

		By("restarting the operator, which has only the Secret")
		before := w.waitIdle()
		w.stop()
		w.start()
		w.waitPolls(5)
		Expect(w.waitIdle()).To(Equal(before))

		w.delete(namespace, "whd", "large")
		w.expectCondition(namespace, "whd/too-large", "Ready", isTrue, "Ready")

		By("using a namespace that has had no config")
		first := w.newNamespace()
		namespace = first // large uses it.
		for _, name := range []string{"large", "larger", "too-large"} {
			Expect(cluster.Create(w.ctx, large(name))).To(Succeed())
		}
		w.apply(first, strings.ReplaceAll(webSource, "hush-web", "hush-first"))
		w.expectCondition(first, "source/web", "Ready", isTrue, "Ready")
		Eventually(func(g Gomega) {
			var reasons []string
			for _, name := range []string{"large", "larger", "too-large"} {
				reasons = append(reasons, meta.FindStatusCondition(w.destination(g, first, name).Status.Conditions, "Ready").Reason)
			}
			g.Expect(reasons).To(ConsistOf("Ready", "Ready", "ConfigTooLarge"))
		}).Should(Succeed())
	})
})

func kindOf(name string) kinds.Kind {
	return *kinds.All.ByName(name)
}

// The status of a kind that runs once causes a compilation when the phase of the run changes.
func TestInputOfJobs(t *testing.T) {
	running := &v1beta1.Redelivery{}
	running.Status.StartTime = &metav1.Time{Time: time.Unix(1, 0)}
	progress := running.DeepCopy()
	progress.Status.Redelivered = ptr.To(int64(5))
	ended := &v1beta1.DeletionRequest{}
	ended.Status.Conditions = []metav1.Condition{{Type: v1beta1.ConditionFailed, Status: metav1.ConditionTrue}}
	for name, c := range map[string]struct {
		kind          string
		before, after client.Object
		want          bool
	}{
		"start of a Redelivery":    {"Redelivery", &v1beta1.Redelivery{}, running, true},
		"progress of a Redelivery": {"Redelivery", running, progress, false},
		"end of a DeletionRequest": {"DeletionRequest", &v1beta1.DeletionRequest{}, ended, true},
		"start of a DeletionRequest": {"DeletionRequest", &v1beta1.DeletionRequest{},
			&v1beta1.DeletionRequest{Status: v1beta1.DeletionRequestStatus{JobStatus: running.Status.JobStatus}}, false},
	} {
		if got := inputChanged(kindOf(c.kind)).Update(event.UpdateEvent{ObjectOld: c.before, ObjectNew: c.after}); got != c.want {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}
