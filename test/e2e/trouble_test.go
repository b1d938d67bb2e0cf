//go:build e2e

package e2e

import (
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

var _ = Describe("No message is lost", Serial, func() {
	It("when the dispatcher is killed under load, or its node is drained", func() {
		t, s := running("killed")
		volume := func() string {
			return kubectl("-n", system, "get", "pvc/data-posthorn-dispatcher-0", "-o", "jsonpath={.spec.volumeName}")
		}
		before := volume()
		load := t.load(100)
		for range 2 {
			had := len(s.received())
			Eventually(func() int { return len(s.received()) }).Should(BeNumerically(">", had+100))
			killDispatcher()
			ready(dispatcher)
		}

		load.arrived(s)

		By("draining its node, while messages are pending")
		s.stop()
		var batch []string
		for i := range 50 {
			batch = append(batch, fmt.Sprintf(`{"type":"track","userId":"u1","event":"Waiting","messageId":"waiting-%d"}`, i))
		}
		out, err := t.posthorn("", "send", "batch", "--address="+ingest, `--json={"batch":[`+strings.Join(batch, ",")+`]}`)
		Expect(err).NotTo(HaveOccurred(), out)
		node := kubectl("-n", system, "get", "pod/posthorn-dispatcher-0", "-o", "jsonpath={.spec.nodeName}")
		DeferCleanup(func() { kubectl("uncordon", node) })
		// The PodDisruptionBudget of a single replica allows its eviction.
		kubectl("drain", node, "--pod-selector=app.kubernetes.io/name=posthorn,app.kubernetes.io/component=dispatcher", "--timeout=3m")
		kubectl("uncordon", node)
		ready(dispatcher)
		s.start("s3cret")
		Eventually(func() int {
			ids := s.ids()["Waiting"]
			slices.Sort(ids)
			return len(slices.Compact(ids))
		}).Should(Equal(len(batch)))
		Expect(volume()).To(Equal(before))
		t.waitReady("whd/crm")
	})

	It("when the operator is stopped, and dispatchers restart without it", func() {
		t, s := running("headless")
		DeferCleanup(func() {
			kubectl("-n", system, "scale", operator, "--replicas=1")
			ready(operator)
		})
		kubectl("-n", system, "scale", operator, "--replicas=0")
		kubectl("-n", system, "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/component=operator", "--timeout=3m")
		t.send("Without operator")
		s.eventually("Without operator")

		By("restarting the dispatcher")
		killDispatcher()
		ready(dispatcher)
		t.send("After restart")
		s.eventually("After restart")

		By("changing the destination without the operator: the change takes effect after the operator starts")
		other := t.newSink("other", "s3cret")
		t.inEffect("whd/crm", func() {
			t.destination("crm", other.url(), "")
			kubectl("-n", system, "scale", operator, "--replicas=1")
		})
		t.send("Operator is back")
		other.eventually("Operator is back")
	})
})

var _ = Describe("The kind WebhookDestination", Serial, func() {
	It("loses no message when it is deleted for longer than the grace period, and restored", func() {
		const grace = 10 * time.Second
		install("--set", "dispatcher.orphanGrace="+grace.String())
		restore := func() {
			kubectl("apply", "--server-side", "--force-conflicts", "--field-manager=helm", "-f", file("charts/posthorn/files/crds/standard"))
		}
		DeferCleanup(func() { restore(); install() })
		ready(dispatcher)
		t, s := running("kindless")
		load := t.load(50)
		s.stop()
		Eventually(func() string { return t.field("whd/crm", "{.status.delivery.pending}") }).ShouldNot(Or(BeEmpty(), Equal("0")))
		kubectl("delete", "crd", "webhookdestinations.posthorn.dev", "--timeout=3m")
		deleted := time.Now()
		why := func() string {
			out, err := command("", "kubectl", "posthorn", "why", "crm", "-n", t.name)
			Expect(err).To(HaveOccurred(), out)
			return out
		}
		Expect(why()).To(ContainSubstring("the cluster does not serve the kind WebhookDestination"))
		Eventually(func() string { return kubectl("-n", system, "get", operator, "-o", "jsonpath={.status.readyReplicas}") }).Should(BeEmpty(),
			"ready operators without the kind")
		time.Sleep(time.Until(deleted.Add(3 * grace)))
		// The lanes of a namespace that an earlier spec deleted may be dropped meanwhile.
		logged := strings.Split(kubectl("-n", system, "logs", dispatcher, "--since-time="+deleted.UTC().Format(time.RFC3339)), "\n")
		Expect(logged).NotTo(ContainElement(And(ContainSubstring("lane dropped"), ContainSubstring(t.name))))

		restore()
		ready(operator)
		t.destination("crm", s.url(), "")
		t.waitReady("whd/crm")
		s.start("s3cret")
		load.arrived(s)
		Expect(t.field("psrc/web", "{.status.messages.discarded}")).To(BeElementOf("", "0"), "discarded messages")
	})
})

var _ = Describe("A namespace", Serial, func() {
	It("has no objects and no credentials in its live config after its deletion, and works when it is created again", func() {
		t, s := running("phoenix")
		t.send("First life")
		s.eventually("First life")
		// The Secret remains for the grace period, with tombstones only.
		objects := func(g Gomega) int {
			encoded := kubectl("-n", system, "get", "secrets", "-l", "posthorn.dev/live-config-namespace="+t.name, "-o",
				`jsonpath={.items[*].data.config\.json\.gz}`)
			data, err := base64.StdEncoding.DecodeString(encoded)
			g.Expect(err).NotTo(HaveOccurred())
			config, _, err := liveconfig.Decode(data)
			g.Expect(err).NotTo(HaveOccurred())
			return len(config.Sources) + len(config.Destinations)
		}
		Eventually(objects).Should(Equal(2), "objects in the live config")
		kubectl("delete", "namespace", t.name, "--timeout=3m")
		Eventually(objects).Should(BeZero(), "objects in the live config of the deleted namespace")

		t.create()
		t.secret("crm", "secret", "another")
		s = t.newSink("crm", "another")
		t.destination("crm", s.url(), "")
		t.waitReady("psrc/web", "whd/crm")
		t.send("Second life")
		s.eventually("Second life")
		Expect(s.ids()).NotTo(HaveKey("First life"))
	})
})

// identity matches the fields that prevent creating a deleted object again.
var identity = regexp.MustCompile(`(?m)^  (resourceVersion|uid|creationTimestamp): .*\n`)

// without deletes an object, and returns a function that creates it again.
func without(args ...string) (restore func()) {
	GinkgoHelper()
	manifest := identity.ReplaceAllString(kubectl(append([]string{"get", "-o", "yaml"}, args...)...), "")
	kubectl(append([]string{"delete"}, args...)...)
	restored := false
	restore = func() {
		if !restored {
			restored = true
			apply("", manifest)
		}
	}
	DeferCleanup(restore)
	return restore
}

var _ = Describe("Posthorn recovers without a restart", Serial, func() {
	It("when its permissions were removed", func() {
		t, s := running("rights")
		before := pods("operator") + pods("dispatcher")
		logs := func(workload string) func() string {
			start := time.Now().UTC().Format(time.RFC3339)
			return func() string { return kubectl("-n", system, "logs", workload, "--since-time="+start) }
		}
		other := t.newSink("other", "s3cret")

		By("removing the operator's permissions: deliveries continue with the last config")
		t.inEffect("whd/crm", func() {
			newLogs := logs(operator)
			restore := without("clusterrolebinding", system+"-posthorn-operator")
			t.destination("crm", other.url(), "")
			t.send("Without rights")
			s.eventually("Without rights")
			Eventually(newLogs).Should(ContainSubstring("forbidden"), "the operator's log gives the missing permission")
			restore()
		})
		t.send("With rights")
		other.eventually("With rights")

		By("removing the dispatcher's permissions: it delivers, and rejects admin requests")
		newLogs := logs(dispatcher)
		restore := without("clusterrolebinding", system+"-posthorn-dispatcher")
		listAttempts := func() error {
			_, err := command("", "kubectl", "posthorn", "attempts", "crm", "-n", t.name)
			return err
		}
		Expect(listAttempts()).NotTo(Succeed())
		Eventually(newLogs).Should(ContainSubstring("tokenreviews.authentication.k8s.io is forbidden"),
			"the dispatcher's log gives the missing permission")
		t.send("Dispatcher without rights")
		other.eventually("Dispatcher without rights")
		restore()
		Eventually(listAttempts).Should(Succeed())
		Expect(pods("operator")+pods("dispatcher")).To(Equal(before), "pods and restarts")
	})

	It("when the API server stops and starts again", func() {
		stop, start := apiServer()
		t, s := running("away")
		before := pods("dispatcher") + pods("operator")
		began := time.Now().UTC().Format(time.RFC3339)
		load := t.load(50)
		Eventually(func() int { return len(s.received()) }).Should(BeNumerically(">", 50))
		stop()
		time.Sleep(25 * time.Second) // The operator tries to renew its Lease for a shorter time.
		start()
		t.send("Back") // The call is sent before any component has recovered.
		s.eventually("Back")
		load.arrived(s)

		By("changing the destination")
		other := t.newSink("other", "s3cret")
		t.inEffect("whd/crm", func() { t.destination("crm", other.url(), "") })
		// On a busy machine the node misses its heartbeats, and the pods are unready for a while.
		Eventually(func() error {
			_, err := t.call("u1", "Changed")
			return err
		}).Should(Succeed())
		other.eventually("Changed")
		Expect(kubectl("-n", system, "logs", operator, "--since-time="+began)).To(ContainSubstring("starting them again"),
			"the operator's log reports a lost Lease")
		Expect(pods("dispatcher")+pods("operator")).To(Equal(before), "pods and restarts")
	})
})

// A clock cannot be set for one pod, so this dispatcher is built with a time.Now
// with a variable offset (clock/clock.go.txt).
var _ = Describe("A clock that jumps", Serial, func() {
	It("loses no messages, forwards and back", Label(long), func() {
		use := func(tag string) {
			GinkgoHelper()
			kubectl("-n", system, "set", "image", dispatcher, "dispatcher="+env("E2E_REPOSITORY")+":"+tag)
			ready(dispatcher)
		}
		jump := func(ahead time.Duration) {
			GinkgoHelper()
			By(fmt.Sprint("setting the dispatcher's clock ahead by ", ahead))
			kubectl("-n", system, "exec", "posthorn-dispatcher-0", "--", "posthorn", "clock", fmt.Sprint(int(ahead.Seconds())))
		}
		DeferCleanup(use, env("E2E_TAG"))
		use(env("E2E_CLOCK_TAG"))
		t, s := running("clock")
		down := t.newSink("down", "s3cret", "--status-code=503")
		t.secret("waiting", "secret", "s3cret")
		t.destination("waiting", down.url(), "  filter: {events: [Waiting]}")
		t.waitReady("whd/waiting")
		before := pods("dispatcher")
		load := t.load(20)
		DeferCleanup(jump, time.Duration(0))
		works := func(event string) {
			GinkgoHelper()
			t.send(event)
			s.eventually(event)
			t.inEffect("whd/crm", func() { t.destination("crm", s.url()+"/"+event, "") })
		}
		works("Before")
		t.send("Waiting")
		Eventually(func() int { return len(down.received()) }).Should(BeNumerically(">", 1))
		jump(3 * time.Hour) // less than the retry window
		works("Ahead")
		down.stop()
		down.start("s3cret")
		down.eventually("Waiting")
		jump(0)
		works("Back")
		load.arrived(s)
		for _, name := range []string{"crm", "waiting"} {
			Expect(kubectl("posthorn", "deadletters", "list", name, "-n", t.name, "-o", "json")).To(BeEmpty())
		}
		Expect(pods("dispatcher")).To(Equal(before), "pods and restarts of the dispatcher")
	})
})

// apiServer returns functions that kill and start the local cluster's API server.
func apiServer() (stop, start func()) {
	GinkgoHelper()
	dir := os.Getenv("CLUSTER_DIR")
	if dir == "" {
		Skip("this cluster's API server cannot be stopped; the spec needs the local cluster")
	}
	pid := func() int {
		text, err := os.ReadFile(filepath.Join(dir, "pids", "apiserver"))
		Expect(err).NotTo(HaveOccurred())
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		Expect(err).NotTo(HaveOccurred())
		return pid
	}
	stopped := false
	stop = func() {
		GinkgoHelper()
		// The pid must belong to the process that hack/cluster/up started.
		name, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid()), "comm"))
		Expect(err).NotTo(HaveOccurred())
		Expect(strings.TrimSpace(string(name))).To(Equal("kube-apiserver"))
		By("killing the API server")
		Expect(syscall.Kill(pid(), syscall.SIGKILL)).To(Succeed())
		stopped = true
	}
	start = func() {
		GinkgoHelper()
		if !stopped {
			return
		}
		stopped = false
		By("starting the API server")
		cmd := exec.Command(filepath.Join(dir, "run", "apiserver"))
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // The process outlives the suite.
		Expect(cmd.Start()).To(Succeed())
		Eventually(func() error {
			_, err := command("", "kubectl", "get", "--raw", "/readyz")
			return err
		}).Should(Succeed())
	}
	DeferCleanup(func() { start() })
	return stop, start
}
