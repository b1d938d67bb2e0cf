//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// namespace is a user's namespace with the Source "web", its write key, and a
// pod "caller" that sends calls.
type namespace struct {
	name, key string
}

// newNamespace creates a namespace, and deletes it after the spec.
func newNamespace(name string) namespace {
	GinkgoHelper()
	t := namespace{name: name, key: "key-of-" + name}
	t.create()
	DeferCleanup(func() {
		if !CurrentSpecReport().Failed() { // After a failure the objects are kept for inspection.
			kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")
		}
	})
	return t
}

func (t namespace) create() {
	GinkgoHelper()
	apply("", `{apiVersion: v1, kind: Namespace, metadata: {name: `+t.name+`, labels: {pod-security.kubernetes.io/enforce: restricted}}}`)
	t.secret("web-key", "writeKey", t.key)
	t.source("web")
	t.kubectl("wait", "--for=create", "--timeout=3m", "serviceaccount/default") // A pod needs it.
	t.pod("caller", posthornImage(), "sink", "--listen=:9000", "--output=none")
}

// running returns a new namespace with a Ready destination, and its sink.
func running(name string) (namespace, sink) {
	GinkgoHelper()
	return newNamespace(name).running()
}

// running adds a Ready destination and its sink.
func (t namespace) running() (namespace, sink) {
	GinkgoHelper()
	t.secret("crm", "secret", "s3cret")
	s := t.newSink("crm", "s3cret")
	t.destination("crm", s.url(), "")
	t.waitReady("psrc/web", "whd/crm")
	return t, s
}

func (t namespace) kubectl(args ...string) string {
	GinkgoHelper()
	return kubectl(append([]string{"-n", t.name}, args...)...)
}

func (t namespace) apply(manifest string) {
	GinkgoHelper()
	apply(t.name, manifest)
}

// secret creates or changes a Secret with pairs of key and value.
func (t namespace) secret(name string, pairs ...string) {
	GinkgoHelper()
	data := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		data[pairs[i]] = pairs[i+1]
	}
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Secret", "metadata": map[string]string{"name": name},
		"stringData": data})
	Expect(err).NotTo(HaveOccurred())
	t.apply(string(text))
}

// source applies a Source whose write key is in the Secret NAME-key.
func (t namespace) source(name string) {
	GinkgoHelper()
	t.apply(fmt.Sprintf(`
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: %[1]s}
spec: {writeKeys: [{name: main, secretKeyRef: {name: %[1]s-key, key: writeKey}}]}
`, name))
}

// destination applies a WebhookDestination, signed with the key "secret" of the Secret with
// the same name; more is the rest of its spec.
func (t namespace) destination(name, url, more string) {
	GinkgoHelper()
	t.apply(fmt.Sprintf(`
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: %[1]s}
spec:
  endpoints:
  - {name: primary, url: %[2]q}
  sourceRefs: [{name: web}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: %[1]s, key: secret}}]}
  delivery: {retry: {initialBackoff: 1s, maxBackoff: 3s}}
%[3]s`, name, url, more))
}

// waitReady waits until objects and the caller pod are Ready.
func (t namespace) waitReady(names ...string) {
	GinkgoHelper()
	t.kubectl(append([]string{"wait", "--for=condition=Ready", "--timeout=3m", "pod/caller"}, names...)...)
}

// waitGeneration waits until the newest spec of an object is in effect everywhere.
func (t namespace) waitGeneration(object string) {
	GinkgoHelper()
	Eventually(func() bool { return t.programmed(object) }).Should(BeTrue(), "the newest generation of "+object+" is not in effect")
}

func (t namespace) programmed(object string) bool {
	GinkgoHelper()
	f := strings.Fields(t.field(object, `{.metadata.generation} {.status.conditions[?(@.type=="Programmed")].observedGeneration} {.status.conditions[?(@.type=="Programmed")].status}`))
	return len(f) == 3 && f[0] == f[1] && f[2] == "True"
}

// inEffect changes a spec or a Secret, and waits until the status reports a new revision on
// every dispatcher, with its time.
func (t namespace) inEffect(object string, change func()) {
	GinkgoHelper()
	before := t.field(object, "{.status.revision}")
	change()
	start := time.Now()
	Eventually(func() bool {
		return t.programmed(object) && t.field(object, "{.status.revision}") != before
	}, defaultWait, 100*time.Millisecond).Should(BeTrue(), "the change of "+object+" is not in effect")
	By(fmt.Sprintf("every dispatcher has the change of %s, after about %v", object, time.Since(start).Round(100*time.Millisecond)))
	since, err := time.Parse(time.RFC3339, t.field(object, "{.status.revisionTime}"))
	Expect(err).NotTo(HaveOccurred())
	Expect(since).To(BeTemporally("~", start, defaultWait), "status.revisionTime")
}

// condition returns "status/reason" of an object's condition.
func (t namespace) condition(object, kind string) string {
	GinkgoHelper()
	return t.kubectl("get", object, "-o", fmt.Sprintf(`jsonpath={.status.conditions[?(@.type==%q)].status}/{.status.conditions[?(@.type==%q)].reason}`, kind, kind))
}

func (t namespace) eventually(object, kind, want string) {
	GinkgoHelper()
	Eventually(func() string { return t.condition(object, kind) }).Should(Equal(want), "%s of %s", kind, object)
}

func (t namespace) field(object, path string) string {
	GinkgoHelper()
	return t.kubectl("get", object, "-o", "jsonpath="+path)
}

// posthorn runs a posthorn command in the caller pod, with the write key and stdin, and
// returns its output.
func (t namespace) posthorn(stdin string, args ...string) (string, error) {
	return command(stdin, "kubectl", append([]string{"-n", t.name, "exec", "-i", "caller", "--", "posthorn"}, args...)...)
}

// send sends one track call from a pod through the Service, and returns the answer.
func (t namespace) send(event string) string {
	GinkgoHelper()
	out, err := t.call("u1", event)
	Expect(err).NotTo(HaveOccurred(), out)
	return out
}

// call sends one track call of a user; it returns an error if the call is rejected. It
// retries while no dispatcher gets the call: a Service routes to a ready pod only after the
// node's rules are updated.
func (t namespace) call(user, event string) (out string, err error) {
	for deadline := time.Now().Add(defaultWait); ; time.Sleep(500 * time.Millisecond) {
		out, err = t.posthorn("", "send", "track", "--address="+ingest, "--user-id="+user, "--event="+event)
		if err == nil || !regexp.MustCompile(unreached).MatchString(err.Error()) || time.Now().After(deadline) {
			return out, err
		}
	}
}

// unreached matches the errors of calls that no dispatcher got.
const unreached = `connection refused|no such host|no route to host|Is Posthorn running there`

func posthornImage() string { return os.Getenv("E2E_REPOSITORY") + ":" + os.Getenv("E2E_TAG") }

// pod starts a pod with the write key of the namespace, and in /config the files of the ConfigMap with
// the pod's name, if there is one.
func (t namespace) pod(name, image string, args ...string) {
	GinkgoHelper()
	more, err := json.Marshal(args)
	Expect(err).NotTo(HaveOccurred())
	t.apply(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, labels: {pod: %[1]s}}
spec:
  automountServiceAccountToken: false
  securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
  terminationGracePeriodSeconds: 1
  restartPolicy: Never
  volumes: [{name: config, configMap: {name: %[1]s, optional: true}}]
  containers:
  - name: main
    image: %[2]s
    args: %[3]s
    volumeMounts: [{name: config, mountPath: /config}]
    env: [{name: POSTHORN_WRITE_KEY, valueFrom: {secretKeyRef: {name: web-key, key: writeKey}}}]
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
`, name, image, more))
}

// serve starts a pod that listens on port 9000, with a Service, and waits until it is ready.
func (t namespace) serve(name, image string, args ...string) {
	GinkgoHelper()
	t.apply(fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec: {selector: {pod: %[1]s}, ports: [{port: 80, targetPort: 9000}]}
`, name))
	t.pod(name, image, args...)
	t.kubectl("wait", "--for=condition=Ready", "--timeout=3m", "pod/"+name)
}

// sink is a receiver in a pod with a Service.
type sink struct {
	namespace
	name string
}

// newSink starts `posthorn sink`, which answers 401 to requests that are not signed with
// secret, and waits until it is ready.
func (t namespace) newSink(name, secret string, args ...string) sink {
	GinkgoHelper()
	s := sink{t, name}
	s.start(secret, args...)
	return s
}

func (s sink) start(secret string, args ...string) {
	GinkgoHelper()
	s.serve(s.name, posthornImage(), append([]string{"sink", "--listen=:9000", "--output=json", "--secret-value=" + secret}, args...)...)
}

func (s sink) stop() {
	GinkgoHelper()
	s.kubectl("delete", "pod", s.name, "--timeout=3m")
}

func (s sink) url() string {
	return "http://" + s.name + "." + s.namespace.name + ".svc.cluster.local/in"
}

// received is a message that a sink printed.
type received struct {
	Path, Event, Signature string
	Status                 int
	Body                   struct {
		MessageID string `json:"messageId"`
	}
}

// received returns all messages of the sink so far, authentic or not.
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

// ids returns the messageIds of the authentic messages, by the names of their events.
func (s sink) ids() map[string][]string {
	GinkgoHelper()
	ids := map[string][]string{}
	for _, r := range s.received() {
		if r.Signature == "ok" && r.Status == 200 {
			ids[r.Event] = append(ids[r.Event], r.Body.MessageID)
		}
	}
	return ids
}

func (s sink) eventually(event string) {
	GinkgoHelper()
	Eventually(s.ids).Should(HaveKey(event), "events at "+s.name)
}

// recorder is a receiver that accepts and records all requests unchanged.
type recorder struct {
	namespace
	name string
}

func (t namespace) newRecorder(name string) recorder {
	GinkgoHelper()
	t.serve(name, env("E2E_TOOL"), "-listen=:9000")
	return recorder{t, name}
}

func (r recorder) url() string { return sink(r).url() }

// verified is the result of a message's verification in JavaScript.
type verified struct {
	// Authentic is true if the signature holds for the body, parsed and stringified again.
	// Fixed is true if that text equals the body.
	Authentic, Fixed bool
	Message          map[string]any
}

// verified verifies all messages so far with Node. All must be authentic.
func (r recorder) verified(secret string) []verified {
	GinkgoHelper()
	node := exec.Command("node", file("test/e2e/verify.js"))
	node.Env = append(os.Environ(), "SECRET="+secret)
	node.Stdin = strings.NewReader(r.kubectl("logs", r.name))
	out, err := node.Output()
	Expect(err).NotTo(HaveOccurred())
	var list []verified
	Expect(json.Unmarshal(out, &list)).To(Succeed())
	for _, v := range list {
		Expect(v.Authentic && v.Fixed).To(BeTrue(), "verification in JavaScript: %v", v)
	}
	return list
}

// load is a pod that sends calls at a rate, each until it is acknowledged.
type load struct {
	namespace
	prefix string // of its messageIds
}

func (t namespace) load(rate int) load {
	GinkgoHelper()
	// A namespace that is created again must not repeat ids, because duplicates are dropped.
	l := load{t, fmt.Sprintf("%s-%d", t.name, time.Now().Unix())}
	t.pod("load", env("E2E_TOOL"), "-url="+ingest, "-prefix="+l.prefix, fmt.Sprint("-rate=", rate))
	return l
}

// end stops the load and returns the number of its calls, all of which were acknowledged.
func (l load) end() (calls int) {
	GinkgoHelper()
	_, _ = command("", "kubectl", "-n", l.name, "exec", "load", "--", "tool", "-stop") // It can end after the pod that it stops.
	code := ""
	Eventually(func() string {
		code = l.field("pod/load", "{.status.containerStatuses[0].state.terminated.exitCode}")
		return code
	}, 4*time.Minute).ShouldNot(BeEmpty(), "exit code of the load")
	out := l.kubectl("logs", "load")
	By(strings.TrimSpace(out))
	Expect(code).To(Equal("0"), "exit code of the load; 1 means calls without an acknowledgement")
	_, err := fmt.Sscanf(out, "%d acknowledged", &calls)
	Expect(err).NotTo(HaveOccurred(), out)
	return calls
}

// arrived ends the load and waits until the sink has every call at least once.
func (l load) arrived(s sink) {
	GinkgoHelper()
	calls := l.end()
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
			id := fmt.Sprintf("%s-%d", l.prefix, i)
			if got[id] == 0 {
				missing = append(missing, id)
			}
			duplicates += max(0, got[id]-1)
		}
		if len(missing) == 0 {
			By(fmt.Sprintf("all %d calls were delivered, with %d duplicates", calls, duplicates))
		}
		return len(missing)
	}, 3*time.Minute, time.Second).Should(BeZero(), func() string {
		return fmt.Sprintf("acknowledged calls that were not delivered: %.10v", missing)
	})
}
