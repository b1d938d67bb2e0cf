//go:build e2e

package e2e

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// ready waits until a workload of the release has all its pods ready.
func ready(workload string) {
	GinkgoHelper()
	kubectl("-n", system, "rollout", "status", workload, "--timeout=3m")
}

const (
	dispatcher = "statefulset/posthorn-dispatcher"
	operator   = "deployment/posthorn-operator"
)

// running is a tenant with one destination that is Ready and its sink.
func running(name string) (tenant, sink) {
	GinkgoHelper()
	t := newTenant(name)
	t.secret("crm", "secret", "s3cret")
	s := t.newSink("crm", "s3cret")
	t.destination("crm", s.url(), "")
	t.waitReady("psrc/web", "whd/crm")
	return t, s
}

var _ = Describe("Nothing is lost", Serial, func() {
	It("when the dispatcher is killed under load", func() {
		t, s := running("killed")
		t.load("kill", 1500, 100)
		for range 2 {
			Eventually(func() int { return len(s.received()) }).Should(BeNumerically(">", 50))
			before := kubectl("-n", system, "get", "pod/posthorn-dispatcher-0", "-o", "jsonpath={.metadata.uid}")
			// One second of grace ends in SIGKILL in the midst of the shutdown.
			kubectl("-n", system, "delete", "pod/posthorn-dispatcher-0", "--grace-period=1", "--timeout=2m")
			Eventually(func() string {
				out, _ := command("", "kubectl", "-n", system, "get", "pod/posthorn-dispatcher-0", "-o", "jsonpath={.metadata.uid}")
				return out
			}).ShouldNot(Or(BeEmpty(), Equal(before)))
			ready(dispatcher)
		}
		t.loaded("kill", 1500, s)
		t.waitReady("whd/crm")
	})

	It("when the dispatcher is killed while messages wait", func() {
		t, s := running("waiting")
		s.stop()
		t.load("wait", 200, 100)
		Expect(t.finished("load-wait", defaultWait)).To(Equal("0"))
		kubectl("-n", system, "delete", "pod/posthorn-dispatcher-0", "--grace-period=1", "--timeout=2m")
		s.start("s3cret")
		t.loaded("wait", 200, s)
	})

	It("when the operator is away, and dispatchers restart without it", func() {
		t, s := running("headless")
		kubectl("-n", system, "scale", operator, "--replicas=0")
		DeferCleanup(func() {
			kubectl("-n", system, "scale", operator, "--replicas=1")
			ready(operator)
		})
		kubectl("-n", system, "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/component=operator", "--timeout=2m")
		t.send("Without operator")
		s.eventually("Without operator")

		By("restarting the dispatcher")
		kubectl("-n", system, "delete", "pod/posthorn-dispatcher-0", "--timeout=2m")
		ready(dispatcher)
		t.send("After restart")
		s.eventually("After restart")

		By("changing the destination meanwhile: it takes effect when the operator is back")
		other := t.newSink("other", "s3cret")
		t.destination("crm", other.url(), "")
		kubectl("-n", system, "scale", operator, "--replicas=1")
		ready(operator)
		t.waitGeneration("whd/crm")
		t.send("Operator is back")
		other.eventually("Operator is back")
	})

	It("when the dispatchers are scaled to 3 and back", func() {
		t, s := running("scaled")
		t.load("scale", 2000, 50)
		kubectl("-n", system, "scale", dispatcher, "--replicas=3")
		ready(dispatcher)
		Eventually(func() string {
			return t.field("whd/crm", "{.status.dispatchers.ready}/{.status.dispatchers.programmed}")
		}).Should(Equal("3/3"))
		t.waitReady("whd/crm", "psrc/web")

		By("scaling back while calls flow")
		kubectl("-n", system, "scale", dispatcher, "--replicas=1")
		Eventually(func() string {
			return kubectl("-n", system, "get", "pods", "-l", "app.kubernetes.io/component=dispatcher", "-o", "name")
		}).Should(Equal("pod/posthorn-dispatcher-0\n"))
		t.loaded("scale", 2000, s)
		Eventually(func() string {
			return t.field("whd/crm", "{.status.dispatchers.ready}/{.status.dispatchers.programmed}")
		}).Should(Equal("1/1"))
	})

	It("when the release is upgraded and rolled back while calls flow", func() {
		t, s := running("upgraded")
		t.load("upgrade", 2000, 40)
		install("image.tag=" + env("E2E_NEXT_TAG"))
		Expect(image()).To(HaveSuffix(":" + env("E2E_NEXT_TAG")))
		t.send("On the next version")
		s.eventually("On the next version")
		helm("rollback", release, "-n", system, "--wait", "--timeout", "3m")
		Expect(image()).To(HaveSuffix(":" + env("E2E_TAG")))
		t.loaded("upgrade", 2000, s)
		t.waitReady("whd/crm", "psrc/web")
	})

	It("when the release is uninstalled and installed again", func() {
		t, s := running("reinstalled")
		s.stop()
		t.send("Before the uninstall")
		Eventually(func() string { return t.field("whd/crm", "{.status.delivery.pending}") }).Should(Equal("1"))
		helm("uninstall", release, "-n", system, "--wait", "--timeout", "3m")
		Expect(t.kubectl("get", "psrc,whd", "-o", "name")).To(ContainSubstring("webhookdestination.posthorn.dev/crm"), "resources must survive")
		Expect(kubectl("-n", system, "get", "pvc", "-o", "name")).To(ContainSubstring("data-posthorn-dispatcher-0"), "volumes must survive")
		install()
		s.start("s3cret")
		s.eventually("Before the uninstall")
		t.waitReady("psrc/web", "whd/crm")
		t.send("After it")
		s.eventually("After it")
	})
})

var _ = Describe("A namespace", Serial, func() {
	It("is forgotten when it is deleted, and works when it is made again", func() {
		t, s := running("phoenix")
		t.send("First life")
		s.eventually("First life")
		configs := func() string {
			return kubectl("-n", system, "get", "secrets", "-l", "posthorn.dev/live-config-tenant="+t.namespace, "-o", "name")
		}
		Expect(configs()).NotTo(BeEmpty())
		kubectl("delete", "namespace", t.namespace, "--timeout=2m")
		Eventually(configs).Should(BeEmpty(), "the live config stays")

		t.create()
		t.secret("crm", "secret", "another")
		s = t.newSink("crm", "another")
		t.destination("crm", s.url(), "")
		t.waitReady("psrc/web", "whd/crm")
		t.send("Second life")
		s.eventually("Second life")
		Expect(s.events()).NotTo(ContainElement("First life"))
	})
})

// image is what the dispatcher runs.
func image() string {
	GinkgoHelper()
	return kubectl("-n", system, "get", "pod/posthorn-dispatcher-0", "-o", "jsonpath={.spec.containers[0].image}")
}
