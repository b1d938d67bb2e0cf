// Package cluster tests the operator and the dispatcher together against a real API
// server, each with its permissions from config/: from kubectl apply to a
// signed delivery and the output of kubectl get. test/e2e has the tests with real pods.
package cluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/admin/kubeauth"
	"github.com/posthorn/posthorn/dispatcher/configsource"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/docs"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/need"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/signature"
	"github.com/posthorn/posthorn/test/wait"
)

const release = env.Release

// receiver checks signatures and answers with a settable status.
type receiver struct {
	*httptest.Server
	mu       sync.Mutex
	secret   string
	status   int
	got      map[string]int // by messageId
	unsigned int
}

func newReceiver(t *testing.T, secret string) *receiver {
	r := &receiver{secret: secret, status: http.StatusOK, got: map[string]int{}}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		body, _ := io.ReadAll(q.Body)
		r.mu.Lock()
		defer r.mu.Unlock()
		if q.Header.Get("X-Signature") != signature.SHA1(r.secret, body) {
			r.unsigned++
		} else if r.status == http.StatusOK {
			r.got[q.Header.Get("Idempotency-Key")]++
		}
		w.WriteHeader(r.status)
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *receiver) set(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

func (r *receiver) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.got)
}

// onePod is the dispatcher of this process.
type onePod struct{ url string }

func (p onePod) List(context.Context) ([]controllers.Pod, error) {
	return []controllers.Pod{{Name: "posthorn-dispatcher-0", URL: p.url}}, nil
}

func TestFromApplyToStatus(t *testing.T) {
	server, kubectl, logs := cluster(t)
	log := slog.New(slog.NewTextHandler(logs, nil))
	if err := server.Install(); err != nil {
		t.Fatal(err)
	}

	// The dispatcher starts first, and waits for the operator.
	policy, err := egress.ParsePolicy([]string{"127.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(server.As("posthorn-dispatcher"))
	if err != nil {
		t.Fatal(err)
	}
	var certificate kubeauth.Certificate
	d, err := dispatcher.New(dispatcher.Options{
		DataDir: t.TempDir(), Pod: "posthorn-dispatcher-0", Egress: policy, Logger: log,
		ServerOptions: dispatcher.ServerOptions{
			Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0",
			AdminTLS: certificate.Config(), AdminGuard: kubeauth.New(client, log).Wrap,
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	run := func(component string, f func() error) {
		running.Go(func() {
			if err := f(); err != nil {
				t.Errorf("%s: got error %v, want none", component, err)
			}
		})
	}
	run("dispatcher", func() error { return d.Run(ctx) })
	run("certificate", func() error { return certificate.Watch(ctx, client, release, log) })
	run("configsource", func() error { return configsource.Watch(ctx, client, release, d, log) })

	writeKey := "hush-web-key"
	var body string // the body of the latest answer
	send := func(id string) int {
		request, err := http.NewRequest(http.MethodPost, "http://"+d.Addr().String()+"/v1/track",
			strings.NewReader(fmt.Sprintf(`{"messageId": %q, "userId": "u1", "event": "Order Completed", "properties": {"total": 30}}`, id)))
		if err != nil {
			t.Fatal(err)
		}
		request.SetBasicAuth(writeKey, "")
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(response.Body)
		_ = response.Body.Close()
		body = string(text)
		return response.StatusCode
	}
	check.Equal(t, "status of a call before the first config", send("early"), http.StatusServiceUnavailable)

	hook := newReceiver(t, "hush-crm-secret")
	kubectl(webToCRM(hook.URL)+"  delivery: {retry: {initialBackoff: 100ms, maxBackoff: 200ms}}\n", "apply", "-f", "-")

	// The token that the kubelet would project into the operator's pod.
	token := filepath.Join(t.TempDir(), "token")
	made := kubectl("", "create", "token", "posthorn-operator", "--namespace", release, "--audience", adminapi.TokenAudience)
	if err := os.WriteFile(token, []byte(made), 0o600); err != nil {
		t.Fatal(err)
	}
	startOperator := func() (stop func()) {
		return operator(t, server.As("posthorn-operator"), controllers.Options{
			Pods: onePod{"https://" + d.AdminAddr().String()}, DispatcherTokenFile: token, Policy: compile.Policy{CheckHost: policy.CheckHost},
		})
	}
	stopOperator := startOperator()
	becomes := func(condition, status string) {
		t.Helper()
		kubectl("", "wait", "whd/crm", "--for=condition="+condition+"="+status)
	}
	becomes("Ready", "True")
	kubectl("", "wait", "psrc/web", "--for=condition=Ready")

	for i := range 10 {
		if status := send(fmt.Sprintf("first-%d", i)); status != http.StatusOK {
			t.Fatalf("status of a call: got %d %s, want 200", status, body)
		}
	}
	wait.True(t, "10 deliveries", func() bool { return hook.count() == 10 })
	becomes("Delivering", "True")

	// The receiver fails. The spec is still valid.
	hook.set(func() { hook.status = http.StatusInternalServerError })
	for i := range 10 {
		send(fmt.Sprintf("second-%d", i))
	}
	becomes("Delivering", "False")
	becomes("Ready", "True")

	// Without the operator deliveries continue.
	stopOperator()
	hook.set(func() { hook.status = http.StatusOK })
	wait.True(t, "20 deliveries", func() bool { return hook.count() == 20 })
	stopOperator = startOperator()
	becomes("Delivering", "True")

	// A new secret takes effect without a restart.
	hook.set(func() { hook.secret = "hush-rotated" })
	kubectl("", "patch", "secret", "keys", "--patch", `{"stringData": {"sharedSecret": "hush-rotated"}}`)
	wait.True(t, "a delivery under the new secret", func() bool {
		before := hook.count()
		send(fmt.Sprintf("probe-%d", time.Now().UnixNano()))
		time.Sleep(50 * time.Millisecond) // It limits the rate of the probes.
		return hook.count() > before
	})
	becomes("Ready", "True")

	// Dead letters of rejected messages can be redelivered.
	hook.set(func() { hook.status = http.StatusConflict })
	before := hook.count()
	for i := range 150 {
		send(fmt.Sprintf("rejected-%d", i))
	}
	wait.True(t, "150 dead letters", func() bool {
		return kubectl("", "get", "whd", "crm", "-o", "jsonpath={.status.delivery.deadLettered}") == "150"
	})
	hook.set(func() { hook.status = http.StatusOK })
	redeliver := func(name, spec string) string {
		t.Helper()
		kubectl(fmt.Sprintf("apiVersion: posthorn.dev/v1beta1\nkind: Redelivery\nmetadata: {name: %s}\nspec: {destinationRef: {name: crm}, deadLettersPerSecond: 1000, %s}\n", name, spec), "apply", "-f", "-")
		kubectl("", "wait", "redelivery/"+name, "--for=condition=Complete")
		return kubectl("", "get", "redelivery", name, "-o", "jsonpath={.status.conditions[?(@.type==\"Ready\")].reason} {.status.matched} {.status.redelivered} {.status.notRedelivered}")
	}
	check.Equal(t, "redelivery of another reason", redeliver("other-reason", "match: {reasons: [Expired]}"), "Redelivered 0 0 ")
	check.Equal(t, "dry run", redeliver("dry", "dryRun: true, match: {reasons: [Rejected], types: [track], events: [Order Completed]}"), "Counted 150 0 ")
	check.Equal(t, "deliveries of a dry run", hook.count()-before, 0)
	check.Equal(t, "redelivery", redeliver("all", "match: {reasons: [Rejected]}"), "Redelivered 150 150 ")
	wait.True(t, "150 more deliveries", func() bool { return hook.count() == before+150 })

	// The ledger balances: a redelivered message counts as another message.
	wait.True(t, "the ledger to balance in status", func() bool {
		number := func(object, path string) (n int) {
			_, _ = fmt.Sscan(kubectl("", "get", object, "-o", "jsonpath={.status."+path+"}"), &n)
			return n
		}
		accepted, delivered := number("psrc/web", "calls.accepted"), number("whd/crm", "delivery.delivered")
		return accepted > 300 && accepted == delivered+150 && number("whd/crm", "delivery.pending") == 0 &&
			number("whd/crm", "delivery.deadLettered") == 150
	})
	if table := kubectl("", "get", "whd"); !strings.Contains(strings.Join(strings.Fields(table), " "), "crm True Ready True 0 0") {
		t.Errorf("kubectl get whd: got\n%s\nwant a line with crm True Ready True 0 0", table)
	}

	t.Run("vendor's client", func(t *testing.T) { vendorToJavaScript(t, kubectl, d.Addr().String()) })

	// The commands in docs/source.md rotate the write key without a rejected call.
	steps := rotation(t, server)
	check.Equal(t, "status before the rotation", send("before"), http.StatusOK)
	steps[0]()
	check.Equal(t, "status of the old key, with two keys", send("old"), http.StatusOK)
	old := writeKey
	text, err := base64.StdEncoding.DecodeString(kubectl("", "get", "secret", "web-key-2", "-o", "jsonpath={.data.writeKey}"))
	if err != nil {
		t.Fatal(err)
	}
	writeKey = string(text)
	check.Equal(t, "status of the new key, with two keys", send("new"), http.StatusOK)
	steps[1]()
	check.Equal(t, "status of the new key after the rotation", send("new alone"), http.StatusOK)
	writeKey = old
	if status := send("late"); status != http.StatusServiceUnavailable || !strings.Contains(body, "use the current write key") {
		t.Errorf("old key after the rotation: got %d %s, want 503 write_key_removed", status, body)
	}
	writeKey = "never"
	check.Equal(t, "status of an unknown key", send("unknown"), http.StatusUnauthorized)

	// The deletion of all objects removes the live config.
	writeKey = string(text)
	kubectl("", "delete", "whd,psrc", "--all")
	wait.True(t, "503 for a key that is removed", func() bool {
		return send("late") == http.StatusServiceUnavailable && strings.Contains(body, "the Source of this write key was removed")
	})
	stopOperator()
	for _, word := range []string{"hush", "is forbidden", "panic"} {
		if strings.Contains(logs.String(), word) {
			t.Errorf("the logs contain %q", word)
		}
	}
}

// rotation returns the commands of docs/source.md that rotate a write key, one step each.
// The page's Secret web-key replaces the test's.
func rotation(t *testing.T, server *env.Env) (steps []func()) {
	t.Helper()
	need.Program(t, "openssl")
	blocks, err := docs.Blocks("../..", "docs/source.md")
	if err != nil {
		t.Fatal(err)
	}
	kubectl, err := env.Binary("kubectl")
	if err != nil {
		t.Fatal(err)
	}
	run := func(commands string) {
		t.Helper()
		shell := exec.Command("bash", "-c", "set -euo pipefail\n"+commands)
		shell.Env = append(os.Environ(), "KUBECONFIG="+server.Kubeconfig(), "PATH="+filepath.Dir(kubectl)+":"+os.Getenv("PATH"))
		if out, err := shell.CombinedOutput(); err != nil {
			t.Fatalf("commands of docs/source.md: got error %v\n%s\noutput:\n%s", err, commands, out)
		}
	}
	run(`kubectl create secret generic web-key --from-literal=writeKey=hush-web-key
kubectl patch psrc web --type json -p '[{"op": "replace", "path": "/spec/writeKeys", "value": [{"name": "main", "secretKeyRef": {"name": "web-key", "key": "writeKey"}}]}]'
kubectl wait --for=condition=Ready psrc/web --timeout=60s`)
	for _, b := range blocks {
		if b.Heading == "Rotate a write key" && b.Commands() != "" {
			steps = append(steps, func() { t.Helper(); run(b.Commands()) })
		}
	}
	if len(steps) != 2 {
		t.Fatalf("command blocks in \"Rotate a write key\": got %d, want 2", len(steps))
	}
	return steps
}

// vendorToJavaScript tests the main use with real traffic: the vendor's client sends every
// type of call, a receiver in JavaScript verifies each by the specification, and the status
// shows the deliveries. Then the receiver answers 500 for a minute, and no call is lost.
func vendorToJavaScript(t *testing.T, kubectl func(stdin string, args ...string) string, addr string) {
	node := need.Program(t, "node")
	outage := time.Minute
	if testing.Short() {
		outage = 5 * time.Second
	}
	program := filepath.Join(t.TempDir(), "goclient")
	if err := process.Compile("../compat/goclient", ".", program); err != nil {
		t.Fatal(err)
	}
	receiver := exec.Command(node, "../compat/node/receiver.js")
	receiver.Env = append(os.Environ(), "SECRET=hush-js-secret")
	in, err := receiver.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := receiver.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := receiver.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = in.Close(); _ = receiver.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	url := strings.TrimSpace(line)
	kubectl(fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {name: js}
stringData: {writeKey: hush-app-key, sharedSecret: hush-js-secret}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: app}
spec: {writeKeys: [{name: main, secretKeyRef: {name: js, key: writeKey}}]}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: js}
spec:
  sourceRefs: [{name: app}]
  endpoints: [{name: primary, url: %q}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: js, key: sharedSecret}}]}
`, url), "apply", "-f", "-")
	kubectl("", "wait", "whd/js", "psrc/app", "--for=condition=Ready")

	var sent []string
	send := func(args ...string) {
		t.Helper()
		out, err := exec.Command(program, append([]string{"-endpoint", "http://" + addr, "-write-key", "hush-app-key"}, args...)...).Output()
		if err != nil {
			t.Fatalf("the vendor's client: got error %v, want none", err)
		}
		for text := range bytes.Lines(out) {
			var result struct{ ID, Error string }
			if err := json.Unmarshal(text, &result); err != nil || result.Error != "" {
				t.Fatalf("line of the vendor's client: got %s and error %v, want a result without an error", text, err)
			}
			// One call excludes webhooks in its integrations.
			if !strings.HasSuffix(result.ID, "elsewhere") {
				sent = append(sent, result.ID)
			}
		}
	}
	arrived := func() bool {
		response, err := http.Get(url) //nolint:noctx // a local poll
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		var messages []struct {
			ID               string
			Authentic, Fixed bool
		}
		if err := json.NewDecoder(response.Body).Decode(&messages); err != nil {
			t.Fatal(err)
		}
		have := map[string]bool{}
		for _, m := range messages {
			if !m.Authentic || !m.Fixed {
				t.Fatalf("verification in JavaScript: got %+v, want Authentic and Fixed", m)
			}
			have[m.ID] = true
		}
		return !slices.ContainsFunc(sent, func(id string) bool { return !have[id] })
	}
	answer := func(status int) {
		//nolint:noctx // a local request
		request, _ := http.NewRequest(http.MethodPut, fmt.Sprintf("%s/%d", strings.TrimSuffix(url, "/in"), status), nil)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
	}
	shows := func(want string) {
		t.Helper()
		wait.True(t, "kubectl get whd js: "+want, func() bool {
			row := strings.Join(strings.Fields(kubectl("", "get", "whd", "js", "--no-headers")), " ")
			return regexp.MustCompile("^js " + want).MatchString(row)
		})
	}

	send("showcase")
	wait.True(t, "every type of call at the receiver in JavaScript", arrived)
	shows("True Ready True 0 0")

	answer(http.StatusInternalServerError)
	begin := time.Now()
	send("-calls", "200", "-batch", "20", "many")
	shows("True (ServerError|CircuitOpen) False")
	time.Sleep(outage - time.Since(begin)) // The outage itself; no assertion depends on its length.
	answer(http.StatusOK)
	wait.True(t, "all calls of the outage", arrived)
	shows("True Ready True 0 0")
	wait.True(t, "the number of deliveries in the status", func() bool {
		return kubectl("", "get", "whd", "js", "-o", "jsonpath={.status.delivery.delivered} {.status.delivery.deadLettered}") == fmt.Sprint(len(sent), " 0")
	})
}

// cluster starts an API server. The logs are printed if the test fails.
func cluster(t *testing.T) (server *env.Env, kubectl func(stdin string, args ...string) string, logs *process.Log) {
	server, kubectl = env.For(t)
	logs = &process.Log{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(logs.String())
		}
	})
	handler := logr.FromSlogHandler(slog.NewTextHandler(logs, nil))
	ctrl.SetLogger(handler)
	klog.SetLogger(handler)
	return server, kubectl, logs
}

// webToCRM returns manifests of the Source web and the destination crm with a URL.
func webToCRM(url string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {writeKey: hush-web-key, sharedSecret: hush-crm-secret}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: web}
spec:
  writeKeys: [{name: main, secretKeyRef: {name: keys, key: writeKey}}]
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: primary, url: %q}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: keys, key: sharedSecret}}]}
`, url)
}

// operator runs the operator until the test ends, or until it is stopped.
func operator(t *testing.T, config *rest.Config, o controllers.Options) (stop func()) {
	t.Helper()
	o.Namespace, o.MetricsBindAddress, o.HealthProbeBindAddress, o.PollInterval = release, "0", "0", 200*time.Millisecond
	manager, err := controllers.NewManager(config, o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := manager.Start(ctx); err != nil {
			t.Errorf("operator: got error %v, want none", err)
		}
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return stop
}
