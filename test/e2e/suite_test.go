//go:build e2e

// Package e2e does on a real cluster what users do, with the tools that they
// use: helm, kubectl and the posthorn image. hack/e2e starts it.
package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

const (
	release = "posthorn"
	system  = "posthorn-system"
	// defaultWait bounds what should take seconds.
	defaultWait = 90 * time.Second
	// Where calls go, as the chart's notes tell.
	ingest = "http://posthorn-dispatcher." + system + ".svc.cluster.local"
)

func TestE2E(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(defaultWait)
	SetDefaultEventuallyPollingInterval(300 * time.Millisecond)
	RunSpecs(t, "Posthorn on a cluster")
}

var _ = BeforeSuite(func() {
	apply("", `{apiVersion: v1, kind: Namespace, metadata: {name: `+system+`, labels: {pod-security.kubernetes.io/enforce: restricted}}}`)
	install()
})

var _ = ReportAfterEach(func(r SpecReport) {
	if r.Failed() {
		keepLogs(strings.ReplaceAll(r.LeafNodeText, " ", "-"))
	}
})

// values are the suite's settings of the chart.
func values() []string {
	GinkgoHelper()
	return []string{
		"--set", "image.repository=" + env("E2E_REPOSITORY"), "--set", "image.tag=" + env("E2E_TAG"),
		// Where the suite's receivers are: pods and Services.
		"--set", "egressAllow={10.244.0.0/16,10.96.0.0/16}",
		// A Source in a test namespace comes and goes quickly.
		"--set", "dispatcher.extraArgs={--orphan-grace=5s}",
	}
}

const chart = "../../charts/posthorn"

// install installs the chart, or upgrades it, with these settings besides the suite's.
func install(settings ...string) {
	GinkgoHelper()
	args := append([]string{"upgrade", "--install", release, chart, "--namespace", system, "--wait", "--timeout", "3m"}, values()...)
	for _, s := range settings {
		args = append(args, "--set", s)
	}
	helm(args...)
}

func env(name string) string {
	GinkgoHelper()
	value := os.Getenv(name)
	Expect(value).NotTo(BeEmpty(), "%s is not set; start the suite with hack/e2e", name)
	return value
}

// keepLogs writes what explains a failure into the folder of logs.
func keepLogs(name string) {
	dir := filepath.Join(os.Getenv("E2E_LOGS"), name)
	if os.MkdirAll(dir, 0o755) != nil {
		return
	}
	for file, args := range map[string][]string{
		"objects.txt":    {"get", "all,pvc,pv,secrets,psrc,whd,events", "--all-namespaces", "-o", "wide"},
		"resources.yaml": {"get", "psrc,whd", "--all-namespaces", "-o", "yaml"},
		"pods.txt":       {"describe", "pods", "--all-namespaces"},
		"operator.log":   {"logs", "-n", system, "-l", "app.kubernetes.io/component=operator", "--tail=-1", "--prefix"},
		"dispatcher.log": {"logs", "-n", system, "-l", "app.kubernetes.io/component=dispatcher", "--tail=-1", "--prefix"},
		"previous.log":   {"logs", "-n", system, "-l", "app.kubernetes.io/component=dispatcher", "--tail=-1", "--prefix", "--previous"},
	} {
		out, err := command("", "kubectl", args...)
		if err != nil {
			out += "\n" + err.Error()
		}
		_ = os.WriteFile(filepath.Join(dir, file), []byte(out), 0o644)
	}
}

// tenant is a namespace of a user's, with a Source and its write key.
type tenant struct{ namespace, key string }

// newTenant makes a namespace with Source "web", and removes it after the spec.
func newTenant(name string) tenant {
	GinkgoHelper()
	t := tenant{namespace: name, key: "key-of-" + name}
	t.create()
	DeferCleanup(func() {
		kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=2m")
	})
	return t
}

func (t tenant) create() {
	GinkgoHelper()
	apply("", `{apiVersion: v1, kind: Namespace, metadata: {name: `+t.namespace+`, labels: {pod-security.kubernetes.io/enforce: restricted}}}`)
	t.secret("web-key", "writeKey", t.key)
	t.apply(`
apiVersion: posthorn.dev/v1alpha1
kind: Source
metadata: {name: web}
spec: {writeKeySecretRef: {name: web-key, key: writeKey}}
`)
}

func (t tenant) kubectl(args ...string) string {
	GinkgoHelper()
	return kubectl(append([]string{"-n", t.namespace}, args...)...)
}

func (t tenant) apply(manifest string) {
	GinkgoHelper()
	apply(t.namespace, manifest)
}

// secret creates or changes a Secret with pairs of key and value.
func (t tenant) secret(name string, pairs ...string) {
	GinkgoHelper()
	data := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		data[pairs[i]] = pairs[i+1]
	}
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Secret", "metadata": map[string]string{"name": name}, "stringData": data})
	Expect(err).NotTo(HaveOccurred())
	t.apply(string(text))
}

// destination declares WebhookDestination name, signed with Secret name's key
// "secret", to a receiver; more is the rest of its spec.
func (t tenant) destination(name, url, more string) {
	GinkgoHelper()
	t.apply(fmt.Sprintf(`
apiVersion: posthorn.dev/v1alpha1
kind: WebhookDestination
metadata: {name: %s}
spec:
  sources: {names: [web]}
  endpoints:
  - {name: primary, url: %q}
  signing: {secretRef: {name: %s, key: secret}}
  delivery: {minBackoff: 1s, maxBackoff: 3s}
%s`, name, url, name, more))
}

// waitReady waits as GitOps does.
func (t tenant) waitReady(names ...string) {
	GinkgoHelper()
	t.kubectl(append([]string{"wait", "--for=condition=Ready", "--timeout=90s"}, names...)...)
}

// waitGeneration waits until the newest spec of an object is in effect everywhere.
func (t tenant) waitGeneration(object string) {
	GinkgoHelper()
	Eventually(func() bool {
		f := strings.Fields(t.field(object, `{.metadata.generation} {.status.conditions[?(@.type=="Programmed")].observedGeneration} {.status.conditions[?(@.type=="Programmed")].status}`))
		return len(f) == 3 && f[0] == f[1] && f[2] == "True"
	}).Should(BeTrue(), "the newest generation of "+object+" is not in effect")
}

// condition is "status/reason" of an object's condition.
func (t tenant) condition(object, kind string) string {
	GinkgoHelper()
	return t.kubectl("get", object, "-o", fmt.Sprintf(`jsonpath={.status.conditions[?(@.type==%q)].status}/{.status.conditions[?(@.type==%q)].reason}`, kind, kind))
}

func (t tenant) eventually(object, kind, want string) {
	GinkgoHelper()
	Eventually(func() string { return t.condition(object, kind) }).Should(Equal(want), "%s of %s", kind, object)
}

func (t tenant) field(object, path string) string {
	GinkgoHelper()
	return t.kubectl("get", object, "-o", "jsonpath="+path)
}

const hardened = `
  automountServiceAccountToken: false
  securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
`

const hardenedContainer = `
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
`

// sink is a receiver in a pod of its own, reached through a Service.
type sink struct {
	tenant
	name string
}

// newSink starts `posthorn sink`, which answers 401 to what is not signed with
// secret, and waits until it receives.
func (t tenant) newSink(name, secret string, args ...string) sink {
	GinkgoHelper()
	s := sink{t, name}
	s.start(secret, args...)
	return s
}

func (s sink) start(secret string, args ...string) {
	GinkgoHelper()
	s.serve(s.name, env("E2E_REPOSITORY")+":"+env("E2E_TAG"), append([]string{"sink", "--listen=:9000", "--output=json", "--secret=" + secret}, args...)...)
}

// serve starts a pod that listens on port 9000, with a Service in front, and waits until it does.
func (t tenant) serve(name, image string, args ...string) {
	GinkgoHelper()
	more, err := json.Marshal(args)
	Expect(err).NotTo(HaveOccurred())
	t.apply(fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec: {selector: {sink: %[1]s}, ports: [{port: 80, targetPort: 9000}]}
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, labels: {sink: %[1]s}}
spec:
%[2]s
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: %[3]s
    args: %[4]s
    ports: [{containerPort: 9000}]
    readinessProbe: {tcpSocket: {port: 9000}, periodSeconds: 1}
%[5]s`, name, hardened, image, more, hardenedContainer))
	t.kubectl("wait", "--for=condition=Ready", "--timeout=90s", "pod/"+name)
}

func (s sink) stop() {
	GinkgoHelper()
	s.kubectl("delete", "pod", s.name, "--timeout=1m")
}

func (s sink) url() string { return "http://" + s.name + "." + s.namespace + ".svc.cluster.local/in" }

// received is a message that a sink printed.
type received struct {
	Path, Event, Signature string
	Status                 int
	Body                   struct {
		MessageID string `json:"messageId"`
	}
}

// received are all messages that the sink got so far, authentic or not.
func (s sink) received() []received {
	GinkgoHelper()
	var list []received
	for line := range strings.Lines(s.kubectl("logs", s.name)) {
		var r received
		Expect(json.Unmarshal([]byte(line), &r)).To(Succeed(), line)
		list = append(list, r)
	}
	return list
}

// events are the names of the track events that the sink took as authentic.
func (s sink) events() []string {
	GinkgoHelper()
	var names []string
	for _, r := range s.received() {
		if r.Signature == "ok" && r.Status == 200 {
			names = append(names, r.Event)
		}
	}
	return names
}

func (s sink) eventually(events ...any) {
	GinkgoHelper()
	Eventually(s.events).Should(ContainElements(events...), "events at "+s.name)
}

// send sends one track call from a pod and returns what `posthorn send` printed.
func (t tenant) send(event string) string {
	GinkgoHelper()
	out, code := t.run("send", env("E2E_REPOSITORY")+":"+env("E2E_TAG"), "send", "track", "--endpoint="+ingest, "--user=u1", "--event="+event)
	Expect(code).To(Equal("0"), out)
	return out
}

// load starts a pod that sends calls at a rate, each until it is acknowledged.
func (t tenant) load(prefix string, calls, rate int) {
	GinkgoHelper()
	t.pod("load-"+prefix, env("E2E_TOOL"), "-url="+ingest, "-prefix="+prefix, fmt.Sprint("-calls=", calls), fmt.Sprint("-rate=", rate))
}

// loaded waits for the end of load, and that the sink has got every call, once or more.
func (t tenant) loaded(prefix string, calls int, s sink) {
	GinkgoHelper()
	code := t.finished("load-"+prefix, 5*time.Minute)
	By(strings.TrimSpace(t.kubectl("logs", "load-"+prefix)))
	Expect(code).To(Equal("0"), "calls were never acknowledged")
	var missing []string
	Eventually(func() int {
		got := map[string]int{}
		for _, r := range s.received() {
			if r.Signature == "ok" && r.Status == 200 {
				got[r.Body.MessageID]++
			}
		}
		missing = nil
		duplicates := 0
		for i := range calls {
			id := fmt.Sprintf("%s-%d", prefix, i)
			if got[id] == 0 {
				missing = append(missing, id)
			}
			duplicates += max(0, got[id]-1)
		}
		if len(missing) == 0 {
			By(fmt.Sprintf("all %d calls arrived, %d of them twice", calls, duplicates))
		}
		return len(missing)
	}, 3*time.Minute, time.Second).Should(BeZero(), func() string { return fmt.Sprintf("acknowledged, but not delivered: %.10v", missing) })
}

// pod starts a pod that runs to its end, with the tenant's write key.
func (t tenant) pod(name, image string, args ...string) {
	GinkgoHelper()
	more, err := json.Marshal(args)
	Expect(err).NotTo(HaveOccurred())
	t.apply(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
%s
  restartPolicy: Never
  containers:
  - name: main
    image: %s
    args: %s
    env: [{name: POSTHORN_WRITE_KEY, valueFrom: {secretKeyRef: {name: web-key, key: writeKey}}}]
%s`, name, hardened, image, more, hardenedContainer))
}

// finished waits for the end of a pod and returns its exit code.
func (t tenant) finished(name string, within time.Duration) string {
	GinkgoHelper()
	code := ""
	Eventually(func() string {
		code = t.field("pod/"+name, "{.status.containerStatuses[0].state.terminated.exitCode}")
		return code
	}, within).ShouldNot(BeEmpty(), "pod "+name+" does not end")
	return code
}

// run runs a pod to its end and returns what it printed and its exit code.
func (t tenant) run(name, image string, args ...string) (string, string) {
	GinkgoHelper()
	t.kubectl("delete", "pod", name, "--ignore-not-found", "--timeout=1m")
	t.pod(name, image, args...)
	code := t.finished(name, time.Minute)
	return t.kubectl("logs", name), code
}
