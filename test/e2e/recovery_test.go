//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// regexpResourceVersion finds what keeps a deleted object from being created again.
var regexpResourceVersion = regexp.MustCompile(`(?m)^  (resourceVersion|uid|creationTimestamp): .*\n`)

// pods are the names of a component's pods and how often their containers were restarted.
func pods(component string) string {
	GinkgoHelper()
	return kubectl("-n", system, "get", "pods", "-l", "app.kubernetes.io/component="+component, "-o",
		"jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[0].restartCount}{'\\n'}{end}")
}

var _ = Describe("Posthorn recovers without a restart", Serial, func() {
	It("when the operator's rights were cut down by hand", func() {
		t, s := running("rights")
		before := pods("operator")
		binding := system + "-posthorn-operator"
		manifest := kubectl("get", "clusterrolebinding", binding, "-o", "yaml")
		kubectl("delete", "clusterrolebinding", binding)
		restored := false
		restore := func() {
			if !restored {
				restored = true
				apply("", regexpResourceVersion.ReplaceAllString(manifest, ""))
			}
		}
		DeferCleanup(restore)

		By("deliveries go on with the last config")
		other := t.newSink("other", "s3cret")
		t.destination("crm", other.url(), "")
		t.send("Without rights")
		s.eventually("Without rights")
		Eventually(func() string {
			return kubectl("-n", system, "logs", operator, "--since=2m")
		}).Should(ContainSubstring("forbidden"), "the log must say what is missing")

		By("giving the rights back")
		restore()
		Eventually(func() []string {
			t.send("With rights")
			return other.events()
		}, 3*time.Minute, 2*time.Second).Should(ContainElement("With rights"))
		t.waitReady("whd/crm")
		Expect(pods("operator")).To(Equal(before), "the operator was restarted")
	})

	It("when the API server hangs and comes back", func() {
		dir := os.Getenv("CLUSTER_DIR")
		if dir == "" {
			dir = "/tmp/posthorn-cluster"
		}
		text, err := os.ReadFile(filepath.Join(dir, "pids", "apiserver"))
		if err != nil {
			Skip("only the local cluster's API server can be stopped: " + err.Error())
		}
		// The process that hack/cluster/up started for this cluster, and no other.
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		Expect(err).NotTo(HaveOccurred())
		name, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
		Expect(err).NotTo(HaveOccurred())
		Expect(strings.TrimSpace(string(name))).To(Equal("kube-apiserver"))

		t, s := running("hang")
		before := pods("dispatcher")
		t.load("hang", 1500, 50)
		Eventually(func() int { return len(s.received()) }).Should(BeNumerically(">", 50))
		Expect(syscall.Kill(pid, syscall.SIGSTOP)).To(Succeed())
		resume := func() { _ = syscall.Kill(pid, syscall.SIGCONT) }
		DeferCleanup(resume)
		time.Sleep(20 * time.Second) // longer than any watch or lease renewal waits
		resume()
		t.loaded("hang", 1500, s)
		By("a change takes effect again")
		ready(operator)
		other := t.newSink("other", "s3cret")
		t.destination("crm", other.url(), "")
		t.waitGeneration("whd/crm")
		t.send("After the hang")
		other.eventually("After the hang")
		Expect(pods("dispatcher")).To(Equal(before), "the dispatcher was restarted")
	})

	It("when it was installed without its CRDs", func() {
		helm("uninstall", release, "-n", system, "--wait", "--timeout", "3m")
		for _, crd := range strings.Fields(kubectl("get", "crd", "-o", "name")) {
			if strings.HasSuffix(crd, ".posthorn.dev") {
				kubectl("delete", crd, "--timeout=2m")
			}
		}
		// Neither --wait nor success is to be expected of this one.
		_, err := command("", "helm", append([]string{"install", release, chart, "--namespace", system, "--set", "crds.enabled=false"}, values()...)...)
		Expect(err).NotTo(HaveOccurred())
		Eventually(func() string {
			out, _ := command("", "kubectl", "-n", system, "logs", operator)
			previous, _ := command("", "kubectl", "-n", system, "logs", operator, "--previous")
			return out + previous
		}).Should(ContainSubstring("posthorn.dev"), "the log must name what is missing")
		install()
		t, s := running("late")
		t.send("Late")
		s.eventually("Late")
	})
})
