package controllers

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/process"
)

var _ = Describe("The operator", func() {
	// These specs cause errors in the log, which the checks of other specs must not find.
	AfterEach(func() { Expect(logs.take()).NotTo(ContainSubstring("hush")) })

	It("waits at the start for missing CRDs and the permission to read Secrets", func() {
		deleteKinds("--all")
		restore := revoke("secrets")
		probes := process.FreeAddr()
		w := newWorld(func(w *world) { w.options.HealthProbeBindAddress = probes })
		install := sync.OnceFunc(installKinds)
		DeferCleanup(install) // before the cleanup of the world
		probe := func(path string) string { return statusAt(probes, path) }
		Eventually(func() string { return probe("/healthz") }).Should(Equal("200 OK"))
		Eventually(logs.String).Should(ContainSubstring("if kind is a CRD, it should be installed"))
		Eventually(logs.String).Should(MatchRegexp(`secrets.* is forbidden`))
		Expect(probe("/readyz")).To(Equal("500 Internal Server Error"))

		install()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		Expect(probe("/readyz")).To(Equal("500 Internal Server Error"))
		restore()
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		Eventually(func() string { return probe("/readyz") }).Should(Equal("200 OK"))
	})

	It("parks the objects of a kind that was deleted, and restores them", func() {
		probes := process.FreeAddr()
		w := newWorld(func(w *world) { w.options.HealthProbeBindAddress, w.options.tombstoneGrace = probes, time.Hour })
		DeferCleanup(installKinds) // before the cleanup of the world
		both, alone := w.newNamespace(), w.newNamespace()
		w.apply(both, webSource+crmSecret+crmDestination)
		w.apply(alone, crmSecret+crmDestination) // Without an object of another kind.
		w.expectCondition(both, "whd/crm", "Ready", isTrue, "Ready")
		w.expectCondition(alone, "whd/crm", "ResolvedRefs", isFalse, "NoSource")
		Eventually(func() string { return statusAt(probes, "/readyz") }).Should(Equal("200 OK"))
		served := func() float64 { return counterValue("posthorn_operator_kind_served", "WebhookDestination") }
		Expect(served()).To(Equal(1.0))
		first := w.head(Default, both)
		Expect(first.Kinds).To(HaveKey(crm.Section))
		parked := func(g Gomega) {
			head := w.head(g, both)
			g.Expect(head.Number).To(BeNumerically(">", first.Number))
			g.Expect(head.UIDs).NotTo(HaveKey(crm))
		}
		notDeleted := func() {
			GinkgoHelper()
			w.waitPolls(10)
			head := w.head(Default, both)
			Expect(head.Tombstones).To(BeEmpty())
			Expect(head.Since).To(BeNumerically(">", first.Number))
			if w.hasLive(alone)() {
				Expect(w.head(Default, alone).Tombstones).To(BeEmpty())
			}
		}

		deleteKinds("webhookdestinations.posthorn.dev")
		Eventually(parked).Should(Succeed())
		w.dispatcher.set(func(d *fakeDispatcher) {
			object := []adminapi.ParkedObject{{Object: crm.String(), Number: first.Number, Since: time.Now()}}
			d.parked = map[string][]adminapi.ParkedObject{both: object, alone: object}
		})
		notDeleted()
		Eventually(served).Should(BeZero())
		Expect(statusAt(probes, "/readyz")).To(Equal("500 Internal Server Error"))
		w.expectCondition(both, "source/web", "Ready", isTrue, "Ready")

		By("restoring the kind, and later the objects")
		installKinds()
		Eventually(func() string { return statusAt(probes, "/readyz") }).Should(Equal("200 OK"))
		notDeleted()
		w.apply(both, crmDestination)
		w.apply(alone, crmDestination)
		w.expectCondition(both, "whd/crm", "Ready", isTrue, "Ready")
		w.dispatcher.set(func(d *fakeDispatcher) { d.parked = nil })

		By("replacing the kind while no operator runs")
		first = w.head(Default, both)
		w.stop()
		deleteKinds("webhookdestinations.posthorn.dev")
		installKinds()
		w.start()
		Eventually(parked).Should(Succeed())
		notDeleted()

		By("deleting an object of the restored kind")
		w.apply(both, crmDestination)
		w.expectCondition(both, "whd/crm", "Ready", isTrue, "Ready")
		w.delete(both, "whd", "crm")
		Eventually(func(g Gomega) {
			tombstones := w.head(g, both).Tombstones
			g.Expect(tombstones).To(HaveLen(1))
			g.Expect(tombstones[0].Object).To(Equal(crm))
		}).Should(Succeed())
	})

	It("recovers after the permission to read Secrets, or to write a status, was missing", func() {
		w := newWorld()
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		_, before := w.live(Default, namespace)

		restore := revoke("secrets")
		w.apply(namespace, strings.ReplaceAll(crmSecret, "hush-crm", "hush-new"))
		Eventually(logs.String).Should(MatchRegexp(`read Secret \S+/crm: secrets .* is forbidden`))
		_, after := w.live(Default, namespace)
		Expect(after.ResourceVersion).To(Equal(before.ResourceVersion)) // A Secret that cannot be read does not count as deleted.
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		restore()
		Eventually(func(g Gomega) {
			config, _ := w.live(g, namespace)
			g.Expect(config.Destinations[0].Signing[0].Secret.Reveal()).To(Equal("hush-new"))
		}).Should(Succeed())

		restore = revoke("webhookdestinations/status")
		w.apply(namespace, named("crm", "[{name: web}]", "[{name: missing}]"))
		Eventually(logs.String).Should(MatchRegexp(`write the status of WebhookDestination \S+/crm: .* is forbidden`))
		restore()
		w.expectCondition(namespace, "whd/crm", "ResolvedRefs", isFalse, "NoSource")
	})

	It("recovers after the API server was unreachable for longer than the Lease", func() {
		proxy := newProxy()
		w := newWorld(func(w *world) { w.configure, w.options.leaseDuration = proxy.configure, 3*time.Second })
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")

		started := func() int { return strings.Count(logs.String(), "Attempting to acquire leader lease") }
		before := started()
		proxy.block(true)
		Eventually(logs.String).Should(ContainSubstring("the controllers stopped; starting them again"))
		By("starting another operator while the API server is unreachable")
		late := newWorld(func(w *world) { w.configure, w.options.leaseDuration = proxy.configure, 3*time.Second })
		Eventually(started).Should(BeNumerically(">=", before+2))
		late.stop()
		w.apply(namespace, named("crm", "[{name: web}]", "[{name: missing}]"))
		w.apply(namespace, strings.ReplaceAll(webSource, "{name: web", "{name: ios")) // a conflict of write keys
		w.delete(namespace, "psrc", "web")
		proxy.block(false)
		w.expectCondition(namespace, "whd/crm", "ResolvedRefs", isFalse, "NoSource")
		w.expectCondition(namespace, "source/ios", "Ready", isTrue, "Ready")
	})

	It("reports correct statuses when the clock jumps", func() {
		var ahead atomic.Int64
		w := newWorld(func(w *world) {
			w.options.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
		})
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		report := func(state adminapi.EndpointState, failures int) {
			now := time.Now().Add(time.Duration(ahead.Load())) // The pod uses the clock of the node.
			w.dispatcher.set(func(d *fakeDispatcher) {
				d.traffic[namespace+"/crm"] = func(r *adminapi.DestinationReport) {
					r.Delivered++
					e := &r.Endpoints[0]
					e.State, e.Since, e.ConsecutiveFailures = state, now, failures
					if failures > 0 {
						e.LastFailure = &adminapi.Failure{Time: now, Reason: "TimedOut", Message: "the endpoint did not answer"}
					} else {
						e.LastSuccess = now
					}
				}
			})
		}
		for _, jump := range []time.Duration{24 * time.Hour, 0, -24 * time.Hour, 0} {
			By(fmt.Sprintf("by %v", jump))
			ahead.Store(int64(jump))
			report(adminapi.EndpointHealthy, 0)
			w.expectCondition(namespace, "whd/crm", "Delivering", isTrue, "Delivering")
			report(adminapi.EndpointDegraded, 3)
			w.expectCondition(namespace, "whd/crm", "Delivering", isFalse, "TimedOut")
			w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
			Eventually(func(g Gomega) {
				d := w.destination(g, namespace, "crm")
				for _, at := range []metav1.Time{*d.Status.LastSuccessTime, d.Status.Endpoints[0].LastFailure.Time} {
					g.Expect(at.Time).To(BeTemporally("~", time.Now().Add(jump), time.Minute))
				}
			}).Should(Succeed())
		}
	})

	It("reads only the Secrets that objects refer to and its own, and watches only metadata", func() {
		seen := &secretRequests{read: map[string]int{}}
		w := newWorld(func(w *world) { w.configure = seen.configure })
		namespace := w.newNamespace()
		noise := make([]byte, 1000<<10) // close to the size limit of the API server
		makeSecret := func(name string) {
			GinkgoHelper()
			secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
				Data: map[string][]byte{"noise": noise, "sharedSecret": []byte("hush-large")}}
			Expect(cluster.Create(w.ctx, secret)).To(Succeed())
		}
		for i := range 5 {
			makeSecret(fmt.Sprintf("unused-%d", i))
		}
		makeSecret("large")
		w.apply(namespace, webSource+named("crm", "secretKeyRef: {name: crm,", "secretKeyRef: {name: large,"))
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		config, _ := w.live(Default, namespace)
		Expect(config.Destinations[0].Signing[0].Secret.Reveal()).To(Equal("hush-large"))

		By("a signing secret of 1,000 KiB")
		w.apply(namespace, named("crm", "secretKeyRef: {name: crm, key: sharedSecret}", "secretKeyRef: {name: large, key: noise}"))
		w.expectCondition(namespace, "whd/crm", "ResolvedRefs", isFalse, "InvalidSecret")
		w.expectCondition(namespace, "source/web", "Ready", isTrue, "Ready")

		seen.mu.Lock()
		defer seen.mu.Unlock()
		Expect(seen.full).To(BeEmpty(), "lists and watches of whole Secrets")
		Expect(slices.Sorted(maps.Keys(seen.read))).To(ConsistOf(namespace+"/large", namespace+"/web-key",
			release+"/"+liveconfig.SecretName(namespace), release+"/"+liveconfig.SharesName, release+"/"+backlogSecret))
	})
})

// deleteKinds deletes CustomResourceDefinitions and all of their objects.
func deleteKinds(names ...string) {
	GinkgoHelper()
	_, err := server.Kubectl("", append([]string{"delete", "crd"}, names...)...)
	Expect(err).NotTo(HaveOccurred())
}

// installKinds creates the CustomResourceDefinitions that do not exist.
func installKinds() {
	GinkgoHelper()
	root, err := env.Root()
	Expect(err).NotTo(HaveOccurred())
	_, err = server.Kubectl("", "apply", "--server-side", "-k", filepath.Join(root, "config", "crd", "experimental"))
	Expect(err).NotTo(HaveOccurred())
	_, err = server.Kubectl("", "wait", "--for=condition=Established", "crd", "--all")
	Expect(err).NotTo(HaveOccurred())
}

// statusAt returns the status of the response at a path of an address, or the error.
func statusAt(address, path string) string {
	response, err := http.Get("http://" + address + path)
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, response.Body)
	return response.Status
}

// revoke removes a resource from the operator's ClusterRole; restore adds it again.
func revoke(resource string) (restore func()) {
	GinkgoHelper()
	var role rbacv1.ClusterRole
	key := client.ObjectKey{Name: "posthorn-operator"}
	ctx := context.Background()
	Expect(cluster.Get(ctx, key, &role)).To(Succeed())
	rules := role.DeepCopy().Rules
	for i := range role.Rules {
		role.Rules[i].Resources = slices.DeleteFunc(role.Rules[i].Resources, func(r string) bool { return r == resource })
	}
	role.Rules = slices.DeleteFunc(role.Rules, func(r rbacv1.PolicyRule) bool { return len(r.Resources)+len(r.NonResourceURLs) == 0 })
	Expect(cluster.Update(ctx, &role)).To(Succeed())
	restore = func() {
		GinkgoHelper()
		Expect(cluster.Get(ctx, key, &role)).To(Succeed())
		role.Rules = rules
		Expect(cluster.Update(ctx, &role)).To(Succeed())
	}
	DeferCleanup(restore)
	return restore
}

// apiProxy forwards connections from the operator to the API server, unless it is blocked.
type apiProxy struct {
	listener net.Listener
	mu       sync.Mutex
	blocked  bool
	open     map[net.Conn]bool
}

func newProxy() *apiProxy {
	GinkgoHelper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	Expect(err).NotTo(HaveOccurred())
	p := &apiProxy{listener: listener, open: map[net.Conn]bool{}}
	target, err := url.Parse(server.Config.Host)
	Expect(err).NotTo(HaveOccurred())
	address := target.Host
	if address == "" {
		address = server.Config.Host
	}
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", address)
			if err != nil || !p.add(from, to) {
				_ = from.Close()
				continue
			}
			for _, pair := range [][2]net.Conn{{from, to}, {to, from}} {
				go func() {
					_, _ = io.Copy(pair[1], pair[0])
					p.end(from, to)
				}()
			}
		}
	}()
	DeferCleanup(func() { _ = listener.Close(); p.block(true) })
	return p
}

func (p *apiProxy) add(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		if p.blocked {
			_ = c.Close()
		} else {
			p.open[c] = true
		}
	}
	return !p.blocked
}

func (p *apiProxy) end(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
		delete(p.open, c)
	}
}

// block closes all connections and refuses new ones while blocked is true.
func (p *apiProxy) block(blocked bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.blocked = blocked
	if blocked {
		for c := range p.open {
			_ = c.Close()
		}
	}
}

func (p *apiProxy) configure(c *rest.Config) { c.Host = "https://" + p.listener.Addr().String() }

// secretRequests records the requests for Secrets.
type secretRequests struct {
	mu   sync.Mutex
	read map[string]int // namespace/name
	full []string
}

func (s *secretRequests) configure(c *rest.Config) {
	c.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/api/v1/"), "/")
			if at := slices.Index(parts, "secrets"); at >= 0 && r.Method == http.MethodGet {
				s.mu.Lock()
				switch {
				case len(parts) > at+1:
					s.read[parts[at-1]+"/"+parts[at+1]]++
				case !strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadata"):
					s.full = append(s.full, r.URL.String())
				}
				s.mu.Unlock()
			}
			return next.RoundTrip(r)
		})
	})
}
