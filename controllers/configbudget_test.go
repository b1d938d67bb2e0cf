package controllers

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestConfigBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newConfigBudget(2, 3)
		expect := func(step, namespace string, want time.Duration) {
			t.Helper()
			if got := b.wait(namespace); got < want-time.Millisecond || got > want+time.Millisecond {
				t.Errorf("%s: wait of %s: got %v, want %v", step, namespace, got, want)
			}
		}
		for range 3 {
			expect("burst", "a", 0)
			b.take("a")
		}
		expect("after the burst", "a", 500*time.Millisecond)
		expect("after the burst of another namespace", "b", 0)
		time.Sleep(200 * time.Millisecond)
		expect("later", "a", 300*time.Millisecond)
		time.Sleep(b.wait("a"))
		expect("with one token", "a", 0)
		b.take("a")
		expect("without it", "a", 500*time.Millisecond)
		b.forget("a")
		expect("a new namespace", "a", 0)
		if len(b.byNamespace) != 0 {
			t.Errorf("the budget still has %v", b.byNamespace)
		}
	})
}

var _ = Describe("The writes of a live config", func() {
	It("are bounded for each namespace, and the last edit is written", func() {
		w := newWorld(func(w *world) { w.options.configBurst, w.options.configRate = 3, 1 })
		namespace, other := w.newNamespace(), w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
		url := func(namespace string) string {
			config, _ := w.live(Default, namespace)
			return config.Destinations[0].Endpoints[0].URL.Reveal()
		}
		written := func() float64 { return counterValue("posthorn_operator_compiles_total", "written") }
		before, begin := written(), time.Now()
		edit := func(namespace string, i int) string {
			GinkgoHelper()
			address := fmt.Sprintf("https://hooks.example/%d", i)
			d := w.destination(Default, namespace, "crm")
			patch := client.MergeFrom(d.DeepCopy())
			d.Spec.Endpoints[0].URL = address
			Expect(cluster.Patch(w.ctx, &d, patch)).To(Succeed())
			return address
		}
		for i := range 60 {
			edit(namespace, i)
			time.Sleep(settleTime) // Without a bound, each edit is written.
		}
		bound := 3 + time.Since(begin).Seconds()
		Expect(written()-before).To(BeNumerically("<=", bound+1), "writes")
		Expect(written()-before).To(BeNumerically(">=", 1), "writes")
		Eventually(func() string { return url(namespace) }).Should(Equal("https://hooks.example/59"))

		By("editing in another namespace during the next storm")
		w.apply(other, `{apiVersion: v1, kind: Secret, metadata: {name: crm}, stringData: {sharedSecret: hush-crm}}`+"\n---\n"+crmDestination)
		Eventually(func(g Gomega) {
			config, _ := w.live(g, other)
			g.Expect(config.Destinations).To(HaveLen(1))
		}).Should(Succeed())
		delayed := counterValue("posthorn_operator_compiles_total", "delayed")
		next, last := 100, ""
		Eventually(func(g Gomega) { // An API server that takes a second for an edit delays no compilation.
			for range 20 {
				last = edit(namespace, next)
				next++
				time.Sleep(settleTime)
			}
			g.Expect(counterValue("posthorn_operator_compiles_total", "delayed")).To(BeNumerically(">", delayed), "delayed compilations")
		}).Should(Succeed())
		want := edit(other, 1)
		Eventually(func() string { return url(other) }).Should(Equal(want))
		Eventually(func() string { return url(namespace) }).Should(Equal(last))
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")
	})
})
