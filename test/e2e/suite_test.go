//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

const (
	release = "posthorn"
	system  = "posthorn-system"
	// defaultWait bounds the wait for an event that usually takes seconds.
	defaultWait = 3 * time.Minute
	// ingest is the URL for calls, as in the chart's notes.
	ingest = "http://posthorn-dispatcher." + system + ".svc.cluster.local"

	dispatcher = "statefulset/posthorn-dispatcher"
	operator   = "deployment/posthorn-operator"
)

func TestE2E(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(defaultWait)
	SetDefaultEventuallyPollingInterval(300 * time.Millisecond)
	RunSpecs(t, "Posthorn on a cluster")
}

// installed is true if the suite's release is in the state after install. Only Serial specs
// change it, and these run in one process.
var installed bool

var _ = SynchronizedBeforeSuite(func() {
	apply("", `{apiVersion: v1, kind: Namespace, metadata: {name: `+system+`, labels: {pod-security.kubernetes.io/enforce: restricted}}}`)
	_, certificate := newCertificate()
	apply(system, certificate)
	install()
}, func() { installed = true })

// cleanStart is the label of specs that first remove the release.
const cleanStart = "clean-start"

// long is the label of specs that run by E2E_LONG=1 only: they take minutes.
const long = "long"

var _ = BeforeEach(func() {
	if !installed && !slices.Contains(CurrentSpecReport().Labels(), cleanStart) {
		uninstall() // The previous spec may have left any version and settings.
		install()
	}
})

var _ = ReportAfterEach(func(r SpecReport) {
	if r.Failed() {
		keepLogs(strings.ReplaceAll(r.LeafNodeText, " ", "-"))
	}
})

func env(name string) string {
	GinkgoHelper()
	value := os.Getenv(name)
	Expect(value).NotTo(BeEmpty(), "%s is not set; start the suite with hack/e2e", name)
	return value
}

// file returns the path of a file in the repository.
func file(path string) string {
	GinkgoHelper()
	return filepath.Join(env("E2E_ROOT"), path)
}

// chart returns the path of the release's chart.
func chart() string {
	GinkgoHelper()
	return filepath.Join(env("E2E_RELEASE"), "posthorn-chart-"+env("E2E_TAG")+".tgz")
}

// values are the suite's settings of a chart.
func values() []string {
	return []string{
		// The addresses of the suite's receivers: pods and Services.
		"--set", "egressAllow={10.244.0.0/16,10.96.0.0/16}",
		// Test namespaces are deleted and created quickly.
		"--set", "dispatcher.extraArgs={--orphan-grace=5s}",
		// kube-proxy is on the same node.
		"--set", "dispatcher.shutdownDelay=2s",
	}
}

// deploy installs a chart, or upgrades to it.
func deploy(chart string, more ...string) {
	GinkgoHelper()
	helm(append(append([]string{"upgrade", "--install", release, chart, "--namespace", system, "--wait", "--timeout", "3m"}, values()...),
		more...)...)
}

// install installs the release with the settings for all specs, and more.
func install(more ...string) {
	GinkgoHelper()
	deploy(chart(), append([]string{"--set", "tls.secretName=" + callsSecret}, more...)...)
	installed = true
}

func uninstall() {
	GinkgoHelper()
	installed = false
	helm("uninstall", release, "-n", system, "--ignore-not-found", "--wait", "--timeout", "3m")
}

// ready waits until all pods of a workload of the release are ready. A rolling update replaces them one by one.
func ready(workload string) {
	GinkgoHelper()
	kubectl("-n", system, "rollout", "status", workload, "--timeout=8m")
}

// pods returns the names of a component's pods and the restart counts of their containers.
func pods(component string) string {
	GinkgoHelper()
	return kubectl("-n", system, "get", "pods", "-l", "app.kubernetes.io/component="+component, "-o",
		"jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[0].restartCount}{'\\n'}{end}")
}

// killDispatcher ends the first dispatcher's pod with SIGKILL during its shutdown, and waits
// until a new pod exists.
func killDispatcher() {
	GinkgoHelper()
	By("killing the dispatcher's pod")
	uid := func() string {
		out, _ := command("", "kubectl", "-n", system, "get", "pod/posthorn-dispatcher-0", "-o", "jsonpath={.metadata.uid}")
		return out
	}
	before := uid()
	kubectl("-n", system, "delete", "pod/posthorn-dispatcher-0", "--grace-period=1", "--timeout=3m")
	Eventually(uid).ShouldNot(Or(BeEmpty(), Equal(before)))
}

// keepLogs writes objects, events and logs to the log directory.
func keepLogs(name string) {
	dir := filepath.Join(os.Getenv("E2E_LOGS"), name)
	if os.MkdirAll(dir, 0o755) != nil {
		return
	}
	logs := func(component string, more ...string) []string {
		return append([]string{"logs", "-n", system, "-l", "app.kubernetes.io/component=" + component, "--tail=-1", "--prefix"}, more...)
	}
	for file, args := range map[string][]string{
		"objects.txt":             {"get", "all,pvc,pv,secrets,events", "--all-namespaces", "-o", "wide"},
		"resources.yaml":          {"get", "posthorn", "--all-namespaces", "-o", "yaml"},
		"pods.txt":                {"describe", "pods", "--all-namespaces"},
		"operator.log":            logs("operator"),
		"operator-previous.log":   logs("operator", "--previous"),
		"dispatcher.log":          logs("dispatcher"),
		"dispatcher-previous.log": logs("dispatcher", "--previous"),
	} {
		out, err := command("", "kubectl", args...)
		if err != nil {
			out += "\n" + err.Error()
		}
		_ = os.WriteFile(filepath.Join(dir, file), []byte(out), 0o644)
	}
	fmt.Fprintln(GinkgoWriter, "objects, events and logs of the failed spec are in", dir)
}
