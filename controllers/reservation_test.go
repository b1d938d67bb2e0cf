package controllers

import (
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

var _ = Describe("A removed write key", func() {
	// hashOf returns the only write key of a namespace's live config.
	hashOf := func(w *world, namespace string) string {
		GinkgoHelper()
		config, _ := w.live(Default, namespace)
		Expect(config.WriteKeys()).To(HaveLen(1))
		for hash := range config.WriteKeys() {
			return hash
		}
		return ""
	}
	// started returns a world with a ready Source in a namespace.
	started := func(change ...func(*world)) (*world, string, string) {
		GinkgoHelper()
		w := newWorld(change...)
		first := w.newNamespace()
		w.apply(first, webSource)
		w.expectCondition(first, "source/web", "Ready", isTrue, "Ready")
		return w, first, hashOf(w, first)
	}

	It("is reserved for its namespace until an administrator releases it", func() {
		w, first, hash := started()
		second := w.newNamespace()

		By("deleting the namespace's only object, and using its key elsewhere")
		w.delete(first, "psrc", "web")
		Eventually(func(g Gomega) { g.Expect(w.reserved(g, first)).To(Equal([]string{hash})) }).Should(Succeed())
		w.apply(second, webSource)
		w.expectCondition(second, "source/web", "Accepted", isFalse, "WriteKeyReserved")

		By("restarting the operator")
		before := w.head(Default, first)
		w.stop()
		w.start()
		w.waitPolls(5)
		Expect(w.head(Default, first)).To(Equal(before))
		w.expectCondition(second, "source/web", "Accepted", isFalse, "WriteKeyReserved")

		By("using it in its own namespace")
		w.apply(first, webSource)
		w.expectCondition(first, "source/web", "Ready", isTrue, "Ready")
		w.expectCondition(second, "source/web", "Accepted", isFalse, "WriteKeyConflict")
		Expect(w.reserved(Default, first)).To(BeEmpty())

		By("releasing another key, and then this one")
		w.delete(first, "psrc", "web")
		w.expectCondition(second, "source/web", "Accepted", isFalse, "WriteKeyReserved")
		annotation := func() string {
			_, secret := w.live(Default, first)
			return secret.Annotations[liveconfig.AnnotationRelease]
		}
		w.releaseKeys(first, strings.Repeat("0", 64))
		Eventually(annotation).Should(BeEmpty())
		Expect(w.reserved(Default, first)).To(Equal([]string{hash}))
		w.dispatcher.set(func(d *fakeDispatcher) { d.stuck = true })
		w.releaseKeys(first, hash)
		w.expectCondition(second, "source/web", "Accepted", isTrue, "Accepted")
		By("applying the release in the pods, which know the reservation until then")
		w.waitPolls(5)
		Expect(w.hasLive(first)()).To(BeTrue())
		w.dispatcher.set(func(d *fakeDispatcher) { d.stuck = false })
		w.expectCondition(second, "source/web", "Ready", isTrue, "Ready")
		Eventually(w.hasLive(first)).Should(BeFalse())
		Expect(logs.String()).To(MatchRegexp("write key reserved for another namespace.* sha256=" + hash + " reservedFor=" + first))
	})

	It("is reserved for 7 days", func() {
		var ahead atomic.Int64
		w, first, hash := started(func(w *world) {
			w.options.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
		})
		second := w.newNamespace()
		w.apply(second, webSource)
		w.expectCondition(second, "source/web", "Accepted", isFalse, "WriteKeyConflict")
		w.apply(first, strings.ReplaceAll(webSource, "hush-web", "hush-other"))
		w.expectCondition(second, "source/web", "Accepted", isFalse, "WriteKeyReserved")
		ahead.Store(int64(liveconfig.ReservationTime - time.Hour))
		w.waitPolls(5)
		Expect(w.reserved(Default, first)).To(Equal([]string{hash}))
		ahead.Store(int64(liveconfig.ReservationTime + time.Minute))
		w.expectCondition(second, "source/web", "Ready", isTrue, "Ready")
		Eventually(func(g Gomega) { g.Expect(w.reserved(g, first)).To(BeEmpty()) }).Should(Succeed())
		w.expectCondition(first, "source/web", "Ready", isTrue, "Ready")
	})

	It("is reserved for 7 days also while the live config cannot be written", func() {
		var ahead atomic.Int64
		var failing atomic.Value
		failing.Store("")
		w, first, hash := started(func(w *world) {
			w.options.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
			w.configure = func(c *rest.Config) {
				c.Wrap(func(next http.RoundTripper) http.RoundTripper {
					return roundTripper(func(r *http.Request) (*http.Response, error) {
						if name := failing.Load().(string); name != "" && r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/secrets/"+name) {
							return nil, http.ErrHandlerTimeout
						}
						return next.RoundTrip(r)
					})
				})
			}
		})
		second := w.newNamespace()
		w.apply(first, strings.ReplaceAll(webSource, "hush-web", "hush-other"))
		Eventually(func(g Gomega) { g.Expect(w.reserved(g, first)).To(Equal([]string{hash})) }).Should(Succeed())
		w.apply(second, webSource)
		w.expectCondition(second, "source/web", "Accepted", isFalse, "WriteKeyReserved")
		failing.Store(liveconfig.SecretName(first))
		ahead.Store(int64(liveconfig.ReservationTime + time.Minute))
		w.expectCondition(second, "source/web", "Ready", isTrue, "Ready")
		Expect(w.reserved(Default, first)).To(Equal([]string{hash}))
		failing.Store("")
		Eventually(func(g Gomega) { g.Expect(w.reserved(g, first)).To(BeEmpty()) }).Should(Succeed())
		logs.take() // The errors of the namespace.
	})

	It("is kept by an older Source's namespace as little as by a younger one's", func() {
		w, first, _ := started()
		second := w.newNamespace()
		w.apply(second, strings.ReplaceAll(webSource, "hush-web", "hush-second"))
		w.expectCondition(second, "source/web", "Ready", isTrue, "Ready")
		By("changing the key of the older Source to the key of the younger one")
		w.apply(first, strings.ReplaceAll(webSource, "hush-web", "hush-second"))
		w.expectCondition(first, "source/web", "Accepted", isFalse, "WriteKeyConflict")
		w.expectCondition(second, "source/web", "Ready", isTrue, "Ready")
		Expect(w.reserved(Default, first)).To(HaveLen(1))
	})

	It("remains with a namespace that cannot be read", func() {
		var failing atomic.Value
		failing.Store("")
		w, first, hash := started(func(w *world) {
			w.configure = func(c *rest.Config) {
				c.Wrap(func(next http.RoundTripper) http.RoundTripper {
					return roundTripper(func(r *http.Request) (*http.Response, error) {
						if namespace := failing.Load().(string); namespace != "" && strings.HasSuffix(r.URL.Path, "/"+namespace+"/secrets/web-key") {
							<-r.Context().Done()
							return nil, r.Context().Err()
						}
						return next.RoundTrip(r)
					})
				})
			}
		})
		second := w.newNamespace()
		w.stop()
		failing.Store(first)
		w.apply(second, webSource)
		w.start()
		w.expectCondition(second, "source/web", "Accepted", isFalse, "WriteKeyConflict")
		config, _ := w.live(Default, first)
		Expect(config.WriteKeys()).To(HaveKey(hash))
		failing.Store("")
		w.expectCondition(first, "source/web", "Ready", isTrue, "Ready")
		logs.take() // The errors of the namespace.
	})

	It("is reserved after a restore that lost the Source and the live config", func() {
		w, first, hash := started()
		head := w.head(Default, first)
		second := w.newNamespace()
		w.stop()
		w.delete(first, "psrc", "web")
		Expect(cluster.DeleteAllOf(w.ctx, &corev1.Secret{}, client.InNamespace(release))).To(Succeed())
		w.apply(second, webSource)
		w.dispatcher.set(func(d *fakeDispatcher) {
			d.parked = map[string][]adminapi.ParkedObject{first: {{Object: "sources/web", Number: head.Number, Since: time.Now()}}}
			d.reserved = map[string][]adminapi.ReservedKey{first: {{SHA256: hash, RemovedAt: time.Now().UTC().Truncate(time.Second)}}}
		})
		w.start()
		w.expectCondition(second, "source/web", "Accepted", isFalse, "WriteKeyReserved")
		Eventually(func(g Gomega) { g.Expect(w.reserved(g, first)).To(Equal([]string{hash})) }).Should(Succeed())
		config, _ := w.live(Default, second)
		Expect(config.WriteKeys()).To(BeEmpty())
	})
})
