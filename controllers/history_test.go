package controllers

import (
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
)

// crm is the destination of the specs below.
var crm = liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: "crm"}

// parks makes the dispatcher report crm as parked.
func (w *world) parks(namespace string, number int64, since time.Time) {
	w.dispatcher.set(func(d *fakeDispatcher) {
		d.parked = map[string][]adminapi.ParkedObject{namespace: {{Object: crm.String(), Number: number, Since: since}}}
	})
}

// expectNewHistory waits until the operator has written a config that begins a history, and expects
// no tombstone in it.
func (w *world) expectNewHistory(namespace string, last liveconfig.Head) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		head := w.head(g, namespace)
		g.Expect(head.Number).To(BeNumerically(">", last.Number))
		g.Expect(head.Since).To(Equal(head.Number))
	}).Should(Succeed())
	w.waitPolls(5)
	Expect(w.head(Default, namespace).Tombstones).To(BeEmpty(), "tombstones without a proof of the deletion")
}

var _ = Describe("The history of a live config", func() {
	keep := func(w *world) { w.options.tombstoneGrace = time.Hour }
	web := liveconfig.Ref{Section: liveconfig.SectionSources, Name: "web"}
	// refs returns the objects of a head's tombstones.
	refs := func(h liveconfig.Head) (list []liveconfig.Ref) {
		for _, t := range h.Tombstones {
			list = append(list, t.Object)
		}
		return list
	}

	It("has tombstones of deleted objects until they are restored, and growing numbers", func() {
		w := newWorld(keep)
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		first := w.head(Default, namespace)
		Expect(first.Number).To(BeNumerically("~", time.Now().UnixMilli(), 60_000))
		uid := string(w.destination(Default, namespace, "crm").UID)
		Expect(first.UIDs).To(HaveKeyWithValue(crm, uid))

		w.delete(namespace, "whd", "crm")
		var second liveconfig.Head
		Eventually(func(g Gomega) {
			second = w.head(g, namespace)
			g.Expect(refs(second)).To(Equal([]liveconfig.Ref{crm}))
		}).Should(Succeed())
		Expect(second.Number).To(BeNumerically(">", first.Number))
		t := second.Tombstones[0]
		Expect(t.UID).To(Equal(uid))
		Expect(t.Sources).To(Equal([]string{"web"}))
		Expect(t.DeletedAt).To(BeTemporally("~", time.Now(), time.Minute))

		By("restarting the operator")
		before := w.waitIdle()
		w.stop()
		w.start()
		w.waitPolls(5)
		Expect(w.waitIdle()).To(Equal(before))

		By("restoring the object")
		w.apply(namespace, crmDestination)
		Eventually(func(g Gomega) {
			head := w.head(g, namespace)
			g.Expect(head.Tombstones).To(BeEmpty())
			g.Expect(head.UIDs).To(HaveKey(crm))
			g.Expect(head.Number).To(BeNumerically(">", second.Number))
		}).Should(Succeed())
	})

	It("announces the discard of pending messages by Events and conditions", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		discards := func(list ...adminapi.Discard) {
			w.dispatcher.set(func(d *fakeDispatcher) { d.discards = map[string][]adminapi.Discard{namespace: list} })
		}
		ahead := adminapi.Discard{Messages: 7, At: time.Now().Add(time.Hour)}
		ofSource, ofDestination, ofNamespace := ahead, ahead, ahead
		ofSource.Source, ofSource.Destination = "web", "old"
		ofDestination.Source, ofDestination.Destination = "gone", "crm"
		ofNamespace.Source, ofNamespace.Destination = "gone", "old"
		get := func(what string) string {
			GinkgoHelper()
			out, err := server.Kubectl("", "get", what, "--namespace", namespace)
			Expect(err).NotTo(HaveOccurred())
			return out
		}

		By("deleting a destination: the Source exists")
		discards(ofSource)
		Eventually(func() []string { return w.events(namespace, "web") }).Should(ContainElement("Warning DiscardAhead"))
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "DiscardAhead")
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		Expect(get("psrc")).To(MatchRegexp(`(?m)^web +True +DiscardAhead `))

		By("deleting a Source: the destination exists")
		discards(ofDestination)
		Eventually(func() []string { return w.events(namespace, "crm") }).Should(ContainElement("Warning DiscardAhead"))
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "DiscardAhead")
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "Ready")
		Expect(get("whd")).To(MatchRegexp(`(?m)^crm +True +DiscardAhead `))

		By("counting fewer messages")
		written := w.waitIdle()
		ofDestination.Messages = 3
		discards(ofDestination)
		w.waitPolls(5)
		Expect(w.waitIdle()).To(Equal(written))

		By("deleting both: the namespace is left")
		discards(ofNamespace)
		Eventually(func() []string { return w.events(metav1.NamespaceDefault, namespace) }).Should(ContainElement("Warning DiscardAhead"))
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		for _, name := range []string{"web", "crm"} {
			Expect(slices.DeleteFunc(w.events(namespace, name), func(e string) bool { return e != "Warning DiscardAhead" })).To(HaveLen(1),
				"Events of "+name)
		}
	})

	It("ends with the last object when every pod has confirmed it", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource)
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "Ready")
		w.dispatcher.set(func(d *fakeDispatcher) { d.stuck = true })
		w.delete(namespace, "psrc", "web")
		Eventually(func(g Gomega) {
			config, _ := w.live(g, namespace)
			g.Expect(config.Sources).To(BeEmpty())
			g.Expect(refs(w.head(g, namespace))).To(Equal([]liveconfig.Ref{web}))
		}).Should(Succeed())
		w.waitPolls(5)
		w.releaseKeys(namespace, liveconfig.ReleaseAll)
		w.waitPolls(5)
		Expect(w.hasLive(namespace)()).To(BeTrue(), "the Secret while a pod has not confirmed")
		w.dispatcher.set(func(d *fakeDispatcher) { d.stuck = false })
		Eventually(w.hasLive(namespace)).Should(BeFalse())
	})

	It("continues after the Secret was deleted, with the operator running or stopped", func() {
		w := newWorld(keep)
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		first := w.head(Default, namespace)
		harm := func() {
			GinkgoHelper()
			_, secret := w.live(Default, namespace)
			Expect(cluster.Delete(w.ctx, secret)).To(Succeed())
		}
		harm()
		Eventually(func(g Gomega) {
			head := w.head(g, namespace)
			g.Expect(head.Number).To(BeNumerically(">=", first.Number))
			g.Expect(head.Since).To(Equal(first.Since))
		}).Should(Succeed())

		By("deleting the Secret and an object while no operator runs")
		w.waitPolls(2)
		w.stop()
		harm()
		w.delete(namespace, "whd", "crm")
		w.parks(namespace, first.Number, time.Now())
		w.start()
		w.expectNewHistory(namespace, first)

		By("parking the object for a week")
		w.parks(namespace, first.Number, time.Now().Add(-liveconfig.ParkingTime))
		Eventually(func(g Gomega) { g.Expect(refs(w.head(g, namespace))).To(Equal([]liveconfig.Ref{crm})) }).Should(Succeed())
	})

	It("replaces a Secret from a backup by a newer one, without deletions", func() {
		w := newWorld(keep)
		namespace := w.newNamespace()
		w.apply(namespace, webSource)
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "Ready")
		_, backup := w.live(Default, namespace)
		w.apply(namespace, crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		newest := w.head(Default, namespace)
		restore := func() {
			GinkgoHelper()
			_, secret := w.live(Default, namespace)
			secret.Data, secret.Annotations = backup.Data, backup.Annotations
			Expect(cluster.Update(w.ctx, secret)).To(Succeed())
		}
		restored := func(g Gomega) {
			head := w.head(g, namespace)
			g.Expect(head.Number).To(BeNumerically(">=", newest.Number))
			g.Expect(head.Tombstones).To(BeEmpty())
			g.Expect(head.UIDs).To(HaveKey(crm))
		}
		restore()
		Eventually(restored).Should(Succeed())

		By("restoring it, and the objects, while no operator runs")
		w.stop()
		restore()
		w.delete(namespace, "whd", "crm") // As in a cluster from a backup, in which crm did not exist.
		w.parks(namespace, newest.Number, time.Now())
		w.start()
		w.expectNewHistory(namespace, newest)
	})

	It("starts again with the first change that no pod has compared", func() {
		w := newWorld(keep)
		namespace := w.newNamespace()
		w.apply(namespace, webSource)
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "Ready")
		first := w.head(Default, namespace)

		By("restarting the operator with the pod ready")
		w.stop()
		w.start()
		w.waitPolls(5)
		w.apply(namespace, crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		Expect(w.head(Default, namespace).Since).To(Equal(first.Since))

		By("restarting the operator while the pod is not ready")
		w.stop()
		w.pods.set(Pod{Name: w.dispatcher.name})
		w.start()
		w.delete(namespace, "whd", "crm")
		Eventually(func(g Gomega) {
			head := w.head(g, namespace)
			g.Expect(head.UIDs).NotTo(HaveKey(crm))
			g.Expect(head.Since).To(Equal(head.Number))
		}).Should(Succeed())
	})

	It("replaces a config that pods refused and that made them unready", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource)
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "Ready")
		restored := w.head(Default, namespace)
		unready := w.dispatcher.pod()
		unready.Unready = true
		w.pods.set(unready)
		w.dispatcher.set(func(d *fakeDispatcher) { d.stuck, d.numbers[namespace] = true, restored.Number+1_000_000 })
		Eventually(func(g Gomega) {
			head := w.head(g, namespace)
			g.Expect(head.Number).To(Equal(restored.Number + 1_000_001))
			g.Expect(head.Since).To(Equal(head.Number))
		}).Should(Succeed())
		w.apply(namespace, crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Programmed", isFalse, "NoDispatcher")
	})

	It("does not keep the other namespaces waiting for one that fails at the start", func() {
		var failing atomic.Value
		failing.Store("")
		w := newWorld(func(w *world) {
			w.configure = func(c *rest.Config) {
				c.Wrap(func(next http.RoundTripper) http.RoundTripper {
					return roundTripper(func(r *http.Request) (*http.Response, error) {
						if namespace := failing.Load().(string); namespace != "" && strings.HasSuffix(r.URL.Path, "/"+namespace+"/secrets/web-key") {
							return nil, http.ErrHandlerTimeout
						}
						return next.RoundTrip(r)
					})
				})
			}
		})
		w.stop()
		Expect(cluster.DeleteAllOf(w.ctx, &corev1.Secret{}, client.InNamespace(release))).To(Succeed())
		a, b := w.newNamespace(), w.newNamespace()
		w.apply(a, webSource)
		w.apply(b, strings.ReplaceAll(webSource, "hush-web", "hush-b"))
		failing.Store(a)
		w.start()
		failed := func() ([]string, error) {
			var marker corev1.Secret
			err := cluster.Get(w.ctx, client.ObjectKey{Namespace: release, Name: liveconfig.MarkerName}, &marker)
			return liveconfig.FailedNamespaces(marker.Data), err
		}
		Eventually(failed).Should(Equal([]string{a}))
		w.expectCondition(b, "source/web", "Ready", isTrue, "Ready")
		failing.Store("")
		Eventually(failed).Should(BeEmpty())
		w.expectCondition(a, "source/web", "Ready", isTrue, "Ready")
		logs.take() // The errors of the namespace.
	})
})

// A namespace without a Secret is compiled only if a pod parks something there.
func TestUnsettled(t *testing.T) {
	parked := []adminapi.ParkedObject{{Object: "sources/web", Number: 3}}
	report := func(ready bool, n adminapi.ConfigReport) *podreport.Index {
		n.Namespace = "shop"
		return podreport.NewIndex(adminapi.Report{Ready: ready, Configs: []adminapi.ConfigReport{n}})
	}
	known := map[string]liveSecret{"shop": {history: compile.History{Known: true, Verified: true, Head: liveconfig.Head{
		Number: 5, UIDs: map[liveconfig.Ref]string{{Section: liveconfig.SectionSources, Name: "web"}: "u"},
	}}}}
	empty := map[string]liveSecret{"shop": {history: compile.History{Known: true, Verified: true, Head: liveconfig.Head{Number: 5}}}}
	for name, c := range map[string]struct {
		written map[string]liveSecret
		pod     health.Pod
		want    []string
	}{
		"removed, a number":           {nil, health.Pod{Report: report(true, adminapi.ConfigReport{Number: 5})}, nil},
		"removed, parked":             {nil, health.Pod{Report: report(true, adminapi.ConfigReport{Number: 5, Parked: parked})}, []string{"shop"}},
		"removed, parked, not ready":  {nil, health.Pod{Absent: true, Configs: report(false, adminapi.ConfigReport{Number: 5, Parked: parked})}, []string{"shop"}},
		"present, the number":         {known, health.Pod{Report: report(true, adminapi.ConfigReport{Number: 5})}, nil},
		"old parts, not applied":      {known, health.Pod{Report: report(true, adminapi.ConfigReport{Number: 4})}, nil},
		"old parts, applied":          {known, health.Pod{Report: report(true, adminapi.ConfigReport{Number: 5})}, []string{"shop"}},
		"empty, not applied":          {empty, health.Pod{Report: report(true, adminapi.ConfigReport{Number: 4})}, nil},
		"empty, applied":              {empty, health.Pod{Report: report(true, adminapi.ConfigReport{Number: 5})}, []string{"shop"}},
		"present, a higher number":    {known, health.Pod{Report: report(true, adminapi.ConfigReport{Number: 6})}, []string{"shop"}},
		"present, higher, not ready":  {known, health.Pod{Absent: true, Configs: report(false, adminapi.ConfigReport{Number: 6})}, []string{"shop"}},
		"present, higher, old report": {known, health.Pod{Absent: true, Report: report(true, adminapi.ConfigReport{Number: 6})}, []string{"shop"}},
	} {
		t.Run(name, func(t *testing.T) {
			pods := []health.Pod{c.pod}
			secrets := newPartSecrets(nil, nil, "", secretOwner{})
			if strings.Contains(name, "old parts") {
				secrets.superseded["shop"] = true
			}
			s := &liveSecrets{parts: secrets, written: c.written}
			if diff := cmp.Diff(c.want, s.unsettled(pods, true, time.Now())); diff != "" {
				t.Errorf("namespaces (-want +got):\n%s", diff)
			}
		})
	}
}
