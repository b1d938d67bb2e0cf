package controllers

import (
	"fmt"
	"net"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

var _ = Describe("status", func() {
	// began is a time that survives the API.
	began := time.Now().Add(-time.Minute).Truncate(time.Second)

	healthy := func(delivered int64) func(*adminapi.DestinationReport) {
		return func(r *adminapi.DestinationReport) {
			r.Accepted, r.Delivered = delivered, delivered
			r.Endpoints[0].State, r.Endpoints[0].Since, r.Endpoints[0].LastSuccess = adminapi.EndpointHealthy, began, began
		}
	}
	failing := func(r *adminapi.DestinationReport) {
		r.Accepted, r.Delivered, r.Pending, r.Retrying = 12, 10, 2, 2
		r.Endpoints[0] = adminapi.EndpointReport{
			Name: r.Endpoints[0].Name, State: adminapi.EndpointDegraded, Since: began, ConsecutiveFailures: 3,
			LastFailure: &adminapi.Failure{Time: began, Reason: "ServerError", StatusCode: 500, Message: "the endpoint answered 500"},
		}
	}

	It("reports deliveries from real traffic, with Events at transitions", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")

		w.dispatcher.set(func(d *fakeDispatcher) {
			d.traffic[namespace+"/crm"] = healthy(10)
			d.calls[namespace+"/web"] = func(r *adminapi.SourceReport) { r.Accepted, r.LastAccepted = 10, began }
		})
		w.expectCondition(namespace, "whd/crm", "Delivering", isTrue, "Delivering")
		w.expectCondition(namespace, "source/web", "Receiving", isTrue, "Receiving")
		d := w.destination(Default, namespace, "crm")
		Expect(d.Status.Delivery.Delivered).To(BeEquivalentTo(10))
		Expect(d.Status.LastSuccessTime.Time).To(BeTemporally("==", began))
		Expect(d.Status.Endpoints[0].State).To(Equal(v1beta1.EndpointHealthy))
		Expect(w.source(Default, namespace, "web").Status.Calls.Accepted).To(BeEquivalentTo(10))

		w.dispatcher.set(func(d *fakeDispatcher) { d.traffic[namespace+"/crm"] = failing })
		w.expectCondition(namespace, "whd/crm", "Delivering", isFalse, "ServerError")
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready") // A receiver's outage is not an error in the spec.
		d = w.destination(Default, namespace, "crm")
		Expect(d.Status.Endpoints[0].LastFailure.StatusCode).To(BeEquivalentTo(500))
		Expect(d.Status.Delivery.Retrying).To(BeEquivalentTo(2))
		Eventually(func() []string { return w.events(namespace, "crm") }).Should(ContainElement("Warning ServerError"))
		Expect(server.Kubectl("", "get", "whd", "crm", "--namespace", namespace)).To(MatchRegexp(`crm +True +ServerError +False`))

		w.dispatcher.set(func(d *fakeDispatcher) { d.traffic[namespace+"/crm"] = healthy(12) })
		w.expectCondition(namespace, "whd/crm", "Delivering", isTrue, "Delivering")
		Eventually(func() []string { return w.events(namespace, "crm") }).Should(ContainElement("Normal Delivering"))
		table, err := server.Kubectl("", "get", "whd", "crm", "--namespace", namespace)
		Expect(err).NotTo(HaveOccurred())
		Expect(table).To(MatchRegexp(`crm +True +Ready +True +0 +0`))
	})

	It("is programmed only when every ready pod has confirmed", func() {
		w := newWorld()
		second := newDispatcher("dispatcher-1")
		DeferCleanup(second.server.Close)
		namespace := w.newNamespace()
		w.pods.set(w.dispatcher.pod(), second.pod())
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")

		By("one pod rejects a config")
		second.set(func(d *fakeDispatcher) { d.refuse = true })
		w.apply(namespace, named("crm", "https://hooks.example/in", "https://hooks.example/out"))
		w.expectCondition(namespace, "whd/crm", "Programmed", isFalse, "ConfigRefused")
		second.set(func(d *fakeDispatcher) { d.refuse = false })
		w.expectCondition(namespace, "whd/crm", "Programmed", isTrue, "Programmed")

		By("one pod does not answer, and the destination is edited")
		second.set(func(d *fakeDispatcher) { d.down = true })
		w.apply(namespace, crmDestination)
		w.expectCondition(namespace, "whd/crm", "Programmed", isFalse, "Pending")
		w.pods.set(w.dispatcher.pod())
		w.expectCondition(namespace, "whd/crm", "Programmed", isTrue, "Programmed")

		By("no pod is ready, and the destination is edited")
		w.pods.set()
		w.apply(namespace, named("crm", "https://hooks.example/in", "https://hooks.example/out"))
		w.expectCondition(namespace, "whd/crm", "Ready", isFalse, "NoDispatcher")
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "Ready") // It was not changed.
	})

	It("does not change when pods are replaced one by one, or all at once", func() {
		// Numbers are written without a delay, so that lower sums would be found.
		w := newWorld(func(w *world) { w.options.numbersInterval = time.Millisecond })
		namespace := w.newNamespace()
		start := func(i int) *fakeDispatcher {
			d := newDispatcher(fmt.Sprintf("dispatcher-%d", i))
			DeferCleanup(d.server.Close)
			d.set(func(d *fakeDispatcher) {
				d.traffic[namespace+"/crm"] = healthy(10)
				d.calls[namespace+"/web"] = func(r *adminapi.SourceReport) { r.Accepted, r.LastAccepted = 10, began }
			})
			return d
		}
		dispatchers := []*fakeDispatcher{start(0), start(1), start(2)}
		ready := func() (pods []Pod) {
			for _, d := range dispatchers {
				if d != nil {
					pods = append(pods, d.pod())
				}
			}
			return pods
		}
		w.pods.set(ready()...)
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		Eventually(func(g Gomega) {
			g.Expect(w.destination(g, namespace, "crm").Status.Delivery.Delivered).To(BeEquivalentTo(30))
			g.Expect(w.source(g, namespace, "web").Status.Calls.Accepted).To(BeEquivalentTo(30))
		}).Should(Succeed())
		w.dispatcher = dispatchers[2]
		before := w.waitIdle()
		writes := counterSum("posthorn_operator_status_writes_total")
		polled := func(d *fakeDispatcher) {
			start := d.requestCount()
			Eventually(d.requestCount).Should(BeNumerically(">=", start+5))
		}
		for i := range dispatchers {
			dispatchers[i] = nil
			w.pods.set(ready()...)
			polled(dispatchers[(i+1)%3])
			dispatchers[i] = start(i)
			w.pods.set(ready()...)
			polled(dispatchers[i])
		}
		By("all at once")
		w.pods.set()
		Eventually(func() float64 { return counterValue("posthorn_operator_dispatchers", "true") }).Should(BeZero())
		dispatchers = []*fakeDispatcher{start(0), start(1), start(2)}
		w.pods.set(ready()...)
		polled(dispatchers[0])
		polled(dispatchers[2])
		Expect(w.versions()).To(Equal(before))
		Expect(counterSum("posthorn_operator_status_writes_total")).To(Equal(writes))
	})

	It("does not change when one request for a report fails", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		before := w.waitIdle()
		w.dispatcher.set(func(d *fakeDispatcher) { d.down = true })
		w.waitPolls(2)
		w.dispatcher.set(func(d *fakeDispatcher) { d.down = false })
		w.waitPolls(3)
		Expect(w.versions()).To(Equal(before))
	})

	It("is not written without a change, nor when an operator starts", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination+named("gone", "[{name: web}]", "[{name: missing}]"))
		w.dispatcher.set(func(d *fakeDispatcher) {
			d.traffic[namespace+"/crm"] = failing
			d.calls[namespace+"/web"] = func(r *adminapi.SourceReport) { r.Accepted, r.LastAccepted = 10, began }
		})
		w.expectCondition(namespace, "whd/crm", "Delivering", isFalse, "ServerError")
		w.expectCondition(namespace, "whd/gone", "ResolvedRefs", isFalse, "NoSource")
		w.expectCondition(namespace, "source/web", "Receiving", isTrue, "Receiving")
		before := w.waitIdle()
		w.waitPolls(20)
		Expect(w.versions()).To(Equal(before))

		w.stop()
		w.start()
		w.waitPolls(20)
		Expect(w.versions()).To(Equal(before))
	})

	It("is written once for each change, when every pod has confirmed it", func() {
		// A long grace period, so that the pods confirm in time on a busy machine, too.
		w := newWorld(func(w *world) { w.options.confirmGrace = wait.Limit })
		second := newDispatcher("dispatcher-1")
		DeferCleanup(second.server.Close)
		w.pods.set(w.dispatcher.pod(), second.pod())
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		w.waitIdle()
		written := func() [2]float64 {
			return [2]float64{counterValue("posthorn_operator_compiles_total", "written"),
				counterValue("posthorn_operator_status_writes_total", "WebhookDestination")}
		}
		before := written()
		const changes = 5
		for i := range changes {
			w.apply(namespace, named("crm", "https://hooks.example/in", fmt.Sprintf("https://hooks.example/%d", i)))
			w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		}
		By("a new signing secret")
		revision := w.destination(Default, namespace, "crm").Status.Revision
		w.apply(namespace, strings.ReplaceAll(crmSecret, "hush-crm", "hush-rotated"))
		Eventually(func() string { return w.destination(Default, namespace, "crm").Status.Revision }).ShouldNot(Equal(revision))
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		w.waitIdle()
		Expect(written()).To(Equal([2]float64{before[0] + changes + 1, before[1] + changes + 1}))

		By("a pod does not confirm")
		w.stop()
		w.options.confirmGrace = 0
		w.start()
		second.set(func(d *fakeDispatcher) { d.stuck = true })
		w.apply(namespace, crmDestination)
		w.expectCondition(namespace, "whd/crm", "Programmed", isFalse, "Pending")
		second.set(func(d *fakeDispatcher) { d.stuck = false })
		w.expectCondition(namespace, "whd/crm", "Programmed", isTrue, "Programmed")
	})

	It("keeps conditions of other controllers, and takes over the fields that another client wrote", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.stop()
		w.apply(namespace, webSource+crmSecret+crmDestination+named("bad", "https://hooks.example/in", "https://169.254.169.254/in"))
		d := w.destination(Default, namespace, "crm")
		By("the defaults of the CRD")
		for _, conditionType := range []string{"Accepted", "ResolvedRefs", "Programmed", "Ready", "Delivering"} {
			c := meta.FindStatusCondition(d.Status.Conditions, conditionType)
			Expect(c).NotTo(BeNil(), conditionType)
			Expect([]string{string(c.Status), c.Reason}).To(Equal([]string{"Unknown", "Pending"}), conditionType)
		}

		By("a restore of a backup has written a status by update")
		yesterday := metav1.NewTime(time.Now().Add(-24 * time.Hour).Truncate(time.Second))
		old := []metav1.Condition{
			{Type: "Accepted", Status: isTrue, Reason: "Accepted", Message: "m", LastTransitionTime: yesterday, ObservedGeneration: 1},
			{Type: "Stalled", Status: isTrue, Reason: "InvalidURL", Message: "m", LastTransitionTime: yesterday, ObservedGeneration: 1},
		}
		d.Status = v1beta1.WebhookDestinationStatus{
			Conditions: old, ObservedGeneration: 1,
			Endpoints: []v1beta1.EndpointStatus{{Name: "gone", State: v1beta1.EndpointHealthy, LastSuccessTime: &yesterday}},
		}
		Expect(cluster.Status().Update(w.ctx, &d, client.FieldOwner("restore"))).To(Succeed())
		By("another controller writes a condition")
		foreign := func(name string) {
			patch := fmt.Sprintf(`{"apiVersion": "posthorn.dev/v1beta1", "kind": "WebhookDestination", "metadata": {"name": %q, "namespace": %q},
				"status": {"conditions": [{"type": "example.org/Audited", "status": "True", "reason": "Audited", "message": "m", "lastTransitionTime": "2026-01-02T03:04:05Z"}]}}`, name, namespace)
			o := v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
			Expect(cluster.Status().Patch(w.ctx, &o, client.RawPatch(types.ApplyPatchType, []byte(patch)),
				client.FieldOwner("auditor"))).To(Succeed())
		}
		foreign("crm")
		w.start()
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		w.expectCondition(namespace, "whd/bad", "Stalled", isTrue, "EgressDenied")
		foreign("bad")

		d = w.destination(Default, namespace, "crm")
		Expect(meta.FindStatusCondition(d.Status.Conditions, "Stalled")).To(BeNil(), "a condition that is not true any more is removed")
		Expect(meta.FindStatusCondition(d.Status.Conditions, "Accepted").LastTransitionTime.Time).To(BeTemporally("==", yesterday.Time),
			"the time of the last transition is kept")
		Expect(d.Status.Endpoints).To(HaveLen(1), "an endpoint that the spec does not have is removed")
		Expect(d.Status.Endpoints[0].Name).To(Equal("primary"))
		Expect(slices.ContainsFunc(d.ManagedFields, func(m metav1.ManagedFieldsEntry) bool {
			return m.Manager == "posthorn-operator" && m.Operation == metav1.ManagedFieldsOperationApply && m.Subresource == "status"
		})).To(BeTrue(), "%+v", d.ManagedFields)

		By("later transitions")
		w.apply(namespace, named("bad", "https://hooks.example/in", "https://hooks.example/out"))
		w.expectCondition(namespace, "whd/bad", "Ready", isTrue, "Ready")
		w.apply(namespace, named("crm", "https://hooks.example/in", "https://169.254.169.254/in"))
		w.expectCondition(namespace, "whd/crm", "Ready", isFalse, "EgressDenied")
		for name, stalled := range map[string]bool{"crm": true, "bad": false} {
			d := w.destination(Default, namespace, name)
			Expect(meta.IsStatusConditionTrue(d.Status.Conditions, "Stalled")).To(Equal(stalled), "Stalled of %s", name)
			Expect(meta.IsStatusConditionTrue(d.Status.Conditions, "example.org/Audited")).To(BeTrue(),
				"the condition of another controller of %s", name)
		}
		before := w.waitIdle()
		w.waitPolls(5)
		Expect(w.versions()).To(Equal(before))
	})

	It("updates numbers at intervals and transitions immediately", func() {
		w := newWorld(func(w *world) { w.options.numbersInterval = time.Hour })
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.dispatcher.set(func(d *fakeDispatcher) { d.traffic[namespace+"/crm"] = healthy(1) })
		w.expectCondition(namespace, "whd/crm", "Delivering", isTrue, "Delivering")
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		w.waitIdle()
		before := w.destination(Default, namespace, "crm")
		for i := range int64(15) {
			w.dispatcher.set(func(d *fakeDispatcher) { d.traffic[namespace+"/crm"] = healthy(i + 2) })
			w.waitPolls(1)
		}
		Expect(w.destination(Default, namespace, "crm").ResourceVersion).To(Equal(before.ResourceVersion))
		w.dispatcher.set(func(d *fakeDispatcher) { d.traffic[namespace+"/crm"] = failing })
		w.expectCondition(namespace, "whd/crm", "Delivering", isFalse, "ServerError")

		By("the interval ends without another report")
		w.stop()
		w.options.numbersInterval = 2 * time.Second
		w.start()
		for _, delivered := range []int64{17, 18} {
			w.dispatcher.set(func(d *fakeDispatcher) { d.traffic[namespace+"/crm"] = healthy(delivered) })
			Eventually(func(g Gomega) {
				g.Expect(w.destination(g, namespace, "crm").Status.Delivery.Delivered).To(Equal(delivered))
			}).Should(Succeed())
		}
	})

	It("uses the reports of the ready pods in the release's namespace", func() {
		var port int
		w := newWorld(func(w *world) {
			o := &w.options
			o.Pods, o.DispatcherSelector = nil, "app.kubernetes.io/component=dispatcher"
			address, err := netip.ParseAddrPort(process.FreeAddr())
			Expect(err).NotTo(HaveOccurred())
			port = int(address.Port())
			o.DispatcherAdminPort = port
		})
		server := httptest.NewUnstartedServer(w.dispatcher)
		_ = server.Listener.Close()
		var err error
		server.Listener, err = net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		Expect(err).NotTo(HaveOccurred())
		server.Start()
		DeferCleanup(server.Close)
		u, err := url.Parse(server.URL)
		Expect(err).NotTo(HaveOccurred())

		namespace := w.newNamespace()
		w.apply(namespace, webSource)
		w.expectCondition(namespace, "source/web", "Ready", isFalse, "NoDispatcher")

		makePod := func(i int, component string, ready corev1.ConditionStatus) {
			no, id := false, int64(65532)
			yes := true
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: release, Name: fmt.Sprintf("%s-%d", component, i),
					Labels: map[string]string{"app.kubernetes.io/component": component}},
				Spec: corev1.PodSpec{
					SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes, RunAsUser: &id,
						SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
					Containers: []corev1.Container{{Name: "c", Image: "posthorn", SecurityContext: &corev1.SecurityContext{
						AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
					}}},
				},
			}
			Expect(cluster.Create(w.ctx, pod)).To(Succeed())
			pod.Status.PodIP, pod.Status.PodIPs = u.Hostname(), []corev1.PodIP{{IP: u.Hostname()}}
			pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}
			Expect(cluster.Status().Update(w.ctx, pod)).To(Succeed())
		}
		makePod(0, "dispatcher", corev1.ConditionFalse)
		makePod(0, "operator", corev1.ConditionTrue)
		w.waitPolls(0)
		w.expectCondition(namespace, "source/web", "Ready", isFalse, "NoDispatcher")
		makePod(1, "dispatcher", corev1.ConditionTrue)
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "Ready")
	})
})
