//go:build e2e

package e2e

import (
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
)

var _ = Describe("Nothing is lost", Serial, func() {
	It("when the dispatcher is killed under load or its node drained, and its volume comes back", func() {
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

		By("draining its node, while messages wait")
		s.stop()
		var batch []string
		for i := range 50 {
			batch = append(batch, fmt.Sprintf(`{"type":"track","userId":"u1","event":"Waiting","messageId":"waiting-%d"}`, i))
		}
		out, err := t.posthorn("", "send", "batch", "--endpoint="+ingest, `--json={"batch":[`+strings.Join(batch, ",")+`]}`)
		Expect(err).NotTo(HaveOccurred(), out)
		node := kubectl("-n", system, "get", "pod/posthorn-dispatcher-0", "-o", "jsonpath={.spec.nodeName}")
		DeferCleanup(func() { kubectl("uncordon", node) })
		// One replica, and its PodDisruptionBudget lets it go.
		kubectl("drain", node, "--pod-selector=app.kubernetes.io/name=posthorn,app.kubernetes.io/component=dispatcher", "--timeout=1m")
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

	It("when the operator is killed and stays away, and dispatchers restart without it", func() {
		t, s := running("headless")
		DeferCleanup(func() {
			kubectl("-n", system, "scale", operator, "--replicas=1")
			ready(operator)
		})
		kubectl("-n", system, "scale", operator, "--replicas=0")
		kubectl("-n", system, "delete", "pod", "-l", "app.kubernetes.io/component=operator", "--grace-period=1", "--timeout=2m")
		Expect(pods("operator")).To(BeEmpty())
		t.send("Without operator")
		s.eventually("Without operator")

		By("restarting the dispatcher")
		killDispatcher()
		ready(dispatcher)
		t.send("After restart")
		s.eventually("After restart")

		By("changing the destination meanwhile: it takes effect when the operator is back")
		other := t.newSink("other", "s3cret")
		t.inEffect("whd/crm", func() {
			t.destination("crm", other.url(), "")
			kubectl("-n", system, "scale", operator, "--replicas=1")
		})
		t.send("Operator is back")
		other.eventually("Operator is back")
	})
})

var _ = Describe("A namespace", Serial, func() {
	It("is forgotten when it is deleted, and works when it is made again", func() {
		t, s := running("phoenix")
		t.send("First life")
		s.eventually("First life")
		configs := func() string {
			return kubectl("-n", system, "get", "secrets", "-l", "posthorn.dev/live-config-namespace="+t.name, "-o", "name")
		}
		Expect(configs()).NotTo(BeEmpty())
		kubectl("delete", "namespace", t.name, "--timeout=2m")
		Eventually(configs).Should(BeEmpty(), "the live config stays")

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

// identity is what keeps a deleted object from being created again.
var identity = regexp.MustCompile(`(?m)^  (resourceVersion|uid|creationTimestamp): .*\n`)

// without deletes an object, and returns what creates it again.
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
	It("when its rights were cut down by hand", func() {
		t, s := running("rights")
		before := pods("operator") + pods("dispatcher")
		logs := func(workload string) func() string {
			start := time.Now().UTC().Format(time.RFC3339)
			return func() string { return kubectl("-n", system, "logs", workload, "--since-time="+start) }
		}
		other := t.newSink("other", "s3cret")

		By("the operator's: deliveries go on with the last config")
		t.inEffect("whd/crm", func() {
			said := logs(operator)
			restore := without("clusterrolebinding", system+"-posthorn-operator")
			t.destination("crm", other.url(), "")
			t.send("Without rights")
			s.eventually("Without rights")
			Eventually(said).Should(ContainSubstring("forbidden"), "the log must say what is missing")
			restore()
		})
		t.send("With rights")
		other.eventually("With rights")

		By("the dispatcher's: it delivers, and lets nobody look whom it cannot ask about")
		said := logs(dispatcher)
		restore := without("clusterrolebinding", system+"-posthorn-dispatcher")
		look := func() error {
			_, err := command("", "kubectl", "posthorn", "attempts", "crm", "-n", t.name)
			return err
		}
		Expect(look()).NotTo(Succeed())
		Eventually(said).Should(ContainSubstring("tokenreviews.authentication.k8s.io is forbidden"), "the log must say what is missing")
		t.send("Dispatcher without rights")
		other.eventually("Dispatcher without rights")
		restore()
		Eventually(look).Should(Succeed())
		Expect(pods("operator")+pods("dispatcher")).To(Equal(before), "something was restarted")
	})

	It("when the API server goes away and comes back", func() {
		stop, start := apiServer()
		t, s := running("away")
		before := pods("dispatcher") + pods("operator")
		began := time.Now().UTC().Format(time.RFC3339)
		load := t.load(50)
		Eventually(func() int { return len(s.received()) }).Should(BeNumerically(">", 50))
		stop()
		time.Sleep(25 * time.Second) // longer than the operator tries to renew its Lease
		start()
		t.send("Back") // first of all, before anything is mended
		s.eventually("Back")
		load.arrived(s)

		By("changing the destination")
		other := t.newSink("other", "s3cret")
		t.inEffect("whd/crm", func() { t.destination("crm", other.url(), "") })
		t.send("Changed")
		other.eventually("Changed")
		Expect(kubectl("-n", system, "logs", operator, "--since-time="+began)).To(ContainSubstring("it starts over"), "the operator kept its Lease all the time")
		Expect(pods("dispatcher")+pods("operator")).To(Equal(before), "something was restarted")
	})
})

// A clock cannot be set for one pod, so this dispatcher is built with a time.Now
// that is ahead by as much as it is told (clock/clock.go.txt).
var _ = Describe("A clock that jumps", Serial, func() {
	It("loses nothing, forwards and back", func() {
		use := func(tag string) {
			GinkgoHelper()
			kubectl("-n", system, "set", "image", dispatcher, "dispatcher="+env("E2E_REPOSITORY")+":"+tag)
			ready(dispatcher)
		}
		jump := func(ahead time.Duration) {
			GinkgoHelper()
			By(fmt.Sprint("the dispatcher's clock is ahead by ", ahead))
			kubectl("-n", system, "exec", "posthorn-dispatcher-0", "--", "posthorn", "clock", fmt.Sprint(int(ahead.Seconds())))
		}
		DeferCleanup(use, env("E2E_TAG"))
		use(env("E2E_CLOCK_TAG"))
		t, s := running("clock")
		down := t.newSink("down", "s3cret", "--status=503")
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
		Expect(pods("dispatcher")).To(Equal(before), "the dispatcher was restarted")
	})
})

// apiServer returns what kills the local cluster's API server and starts it again.
func apiServer() (stop, start func()) {
	GinkgoHelper()
	dir := os.Getenv("CLUSTER_DIR")
	if dir == "" {
		Skip("only the local cluster's API server can be stopped")
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
		// The process that hack/cluster/up started for this cluster, and no other.
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
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // it outlives the suite
		Expect(cmd.Start()).To(Succeed())
		Eventually(func() error {
			_, err := command("", "kubectl", "get", "--raw", "/readyz")
			return err
		}).Should(Succeed())
	}
	DeferCleanup(func() { start() })
	return stop, start
}
