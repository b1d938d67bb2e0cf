package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/process"
)

const (
	release = env.Release
	// maxWait bounds every wait; a longer wait is an error.
	maxWait = 5 * time.Minute
)

// world is an API server with operator and dispatchers.
type world struct {
	dir    string
	server *env.Env
	client client.WithWatch // of an administrator
	binary string
	audit  string
	hook   *hook

	processes map[string]*process.Posthorn
	logs      []io.Closer
	listen    []string // the tracking API of each dispatcher
	sent      atomic.Int64
}

func newWorld() (_ *world, err error) {
	w := &world{processes: map[string]*process.Posthorn{}, hook: newHook()}
	if w.dir, err = os.MkdirTemp("", "posthorn-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.binary, err = process.Build(w.dir); err != nil {
		return nil, err
	}
	policy := filepath.Join(w.dir, "audit-policy.yaml")
	w.audit = filepath.Join(w.dir, "audit.log")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
		return nil, err
	}
	w.server, err = env.Start(func(e *envtest.Environment) {
		e.ControlPlane.GetAPIServer().Configure().Set("audit-policy-file", policy).Set("audit-log-path", w.audit)
		e.ControlPlane.Etcd = &envtest.Etcd{}
		e.ControlPlane.Etcd.Configure().Set("unsafe-no-fsync", "false")
	})
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), v1beta1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	if w.client, err = client.NewWithWatch(w.server.Config, client.Options{Scheme: scheme}); err != nil {
		return nil, err
	}
	return w, w.server.Install()
}

func (w *world) close() {
	var stopping sync.WaitGroup
	for _, p := range w.processes {
		stopping.Go(func() { _ = p.Stop(syscall.SIGTERM) })
	}
	stopping.Wait()
	for _, l := range w.logs {
		_ = l.Close()
	}
	if err := w.server.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, "bench: stop the API server:", err)
	}
	w.hook.close()
	_ = os.RemoveAll(w.dir)
}

func (w *world) namespace(i int) string { return fmt.Sprintf("namespace-%02d", i%*namespaces) }

func destinationName(i int) string { return fmt.Sprintf("hook-%02d", i) }

// apply creates the objects of all namespaces.
func (w *world) apply(ctx context.Context) error {
	var group errgroup.Group
	group.SetLimit(8)
	for n := range *namespaces {
		namespace := w.namespace(n)
		group.Go(func() error {
			key := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web-key"},
				StringData: map[string]string{"writeKey": "key-of-" + namespace}}
			source := &v1beta1.Source{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web"}}
			source.Spec.WriteKeys = []v1beta1.WriteKey{{Name: "main", SecretKeyRef: v1beta1.SecretKeyReference{Name: "web-key", Key: "writeKey"}}}
			objects := []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, key, source}
			for i := range *perNamespace {
				name := destinationName(i)
				secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
					StringData: map[string]string{"sharedSecret": firstSecret}}
				d := &v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
				d.Spec.SourceRefs = []v1beta1.SourceReference{{Name: "web"}}
				d.Spec.Endpoints = []v1beta1.Endpoint{w.endpoint(namespace, name, "first")}
				d.Spec.Signing = &v1beta1.Signing{Schemes: []v1beta1.SigningScheme{{Name: "sha1", Type: v1beta1.HMACSHA1,
					SecretKeyRef: v1beta1.SecretKeyReference{Name: name, Key: "sharedSecret"}}}}
				d.Spec.Filter = &v1beta1.Filter{Events: []string{name}}
				objects = append(objects, secret, d)
			}
			for _, o := range objects {
				if err := w.client.Create(ctx, o); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

func (w *world) endpoint(namespace, name, version string) v1beta1.Endpoint {
	return v1beta1.Endpoint{Name: "primary", URL: w.hook.URL + "/" + namespace + "/" + name,
		Headers: []v1beta1.Header{{Name: versionHeader, Value: &version}}}
}

// startProcesses starts the dispatchers, each with its own address, and the operator.
func (w *world) startProcesses(ctx context.Context) error {
	// A port that is free at this machine's first address is also free at the others.
	_, calls, _ := net.SplitHostPort(process.FreeAddr())
	_, admin, _ := net.SplitHostPort(process.FreeAddr())
	token := filepath.Join(w.dir, "token")
	made, err := w.server.Kubectl("", "create", "token", "posthorn-operator", "--namespace", release, "--audience", adminapi.TokenAudience,
		"--duration", "12h")
	if err != nil {
		return err
	}
	if err := os.WriteFile(token, []byte(made), 0o600); err != nil {
		return err
	}
	asDispatcher, err := w.kubeconfig("posthorn-dispatcher")
	if err != nil {
		return err
	}
	asOperator, err := w.kubeconfig("posthorn-operator")
	if err != nil {
		return err
	}
	for i := range *dispatchers {
		name, ip := dispatcherName(i), loopback(i)
		w.listen = append(w.listen, net.JoinHostPort(ip, calls))
		if err := w.start(name, "dispatcher", "--kubeconfig", asDispatcher, "--system-namespace", release, "--pod-name", name,
			"--listen", net.JoinHostPort(ip, calls), "--admin-listen", net.JoinHostPort(ip, admin),
			"--data", filepath.Join(w.dir, name), "--egress-allow", "127.0.0.0/8"); err != nil {
			return err
		}
		if err := w.makePod(ctx, name, ip); err != nil {
			return err
		}
	}
	return w.startOperator(asOperator, admin, token)
}

// startOperator starts the operator, which asks the pods over TLS if there is a token.
func (w *world) startOperator(kubeconfig, adminPort, tokenFile string) error {
	return w.start("operator", "operator", "--kubeconfig", kubeconfig, "--system-namespace", release, "--leader-elect",
		"--dispatcher-admin-port", adminPort, "--dispatcher-token-file", tokenFile, "--egress-allow", "127.0.0.0/8",
		"--admin-listen", "0", "--probe-listen", "0")
}

func dispatcherName(i int) string { return fmt.Sprintf("posthorn-dispatcher-%d", i) }

// loopback is the address of the i-th dispatcher.
func loopback(i int) string { return fmt.Sprintf("127.0.0.%d", i+2) }

func (w *world) start(name string, args ...string) error {
	p := &process.Posthorn{Binary: w.binary, Args: args}
	if *keepLogs != "" {
		if err := os.MkdirAll(*keepLogs, 0o700); err != nil {
			return err
		}
		file, err := os.Create(filepath.Join(*keepLogs, name+".log"))
		if err != nil {
			return err
		}
		w.logs = append(w.logs, file)
		p.Log = file
	}
	w.processes[name] = p
	return p.Start()
}

// makePod creates a dispatcher's Pod object, as the kubelet would.
func (w *world) makePod(ctx context.Context, name, ip string) error {
	no, yes, id := false, true, int64(65532)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: release, Name: name,
			Labels: map[string]string{"app.kubernetes.io/name": "posthorn", "app.kubernetes.io/component": "dispatcher"}},
		Spec: corev1.PodSpec{
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes, RunAsUser: &id,
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{Name: "dispatcher", Image: "posthorn", SecurityContext: &corev1.SecurityContext{
				AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			}}},
		},
	}
	if err := w.client.Create(ctx, pod); err != nil {
		return err
	}
	pod.Status.PodIP, pod.Status.PodIPs = ip, []corev1.PodIP{{IP: ip}}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	return w.client.Status().Update(ctx, pod)
}

// kubeconfig writes a kubeconfig file for a service account of the release.
func (w *world) kubeconfig(account string) (string, error) {
	token, err := w.server.Kubectl("", "create", "token", account, "--namespace", release, "--duration", "12h")
	if err != nil {
		return "", err
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["c"] = &clientcmdapi.Cluster{Server: w.server.Config.Host, CertificateAuthorityData: w.server.Config.CAData}
	config.AuthInfos["u"] = &clientcmdapi.AuthInfo{Token: strings.TrimSpace(token)}
	config.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	config.CurrentContext = "x"
	file := filepath.Join(w.dir, account+".kubeconfig")
	return file, clientcmd.WriteToFile(*config, file)
}

// waitReady waits until every object is Ready. It watches, because lists of many objects several times a second
// take the CPU time of the processes that are measured.
func (w *world) waitReady(ctx context.Context) error {
	return errors.Join(
		w.watchReady(ctx, &v1beta1.WebhookDestinationList{}, *namespaces**perNamespace, 0),
		w.watchReady(ctx, &v1beta1.SourceList{}, *namespaces, 0),
	)
}

// watchReady waits until a number of objects are Ready, in at least a generation.
func (w *world) watchReady(ctx context.Context, list client.ObjectList, number int, generation int64, selected ...client.ListOption) error {
	ctx, stop := context.WithTimeoutCause(ctx, maxWait, fmt.Errorf("%d objects of %T are not Ready after %s", number, list, maxWait))
	defer stop()
	watcher, err := w.client.Watch(ctx, list, selected...)
	if err != nil {
		return err
	}
	defer watcher.Stop()
	ready := map[client.ObjectKey]bool{}
	for len(ready) < number {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case event, ok := <-watcher.ResultChan():
			if !ok {
				return errors.New("the watch has ended")
			}
			var conditions []metav1.Condition
			switch o := event.Object.(type) {
			case *v1beta1.WebhookDestination:
				conditions = o.Status.Conditions
			case *v1beta1.Source:
				conditions = o.Status.Conditions
			default:
				return fmt.Errorf("watch: unexpected %s event: %v", event.Type, o)
			}
			o := event.Object.(client.Object)
			c := meta.FindStatusCondition(conditions, v1beta1.ConditionReady)
			if c != nil && c.Status == metav1.ConditionTrue && c.ObservedGeneration == o.GetGeneration() && o.GetGeneration() >= generation {
				ready[client.ObjectKeyFromObject(o)] = true
			} else {
				delete(ready, client.ObjectKeyFromObject(o))
			}
		}
	}
	return nil
}

func (w *world) until(ctx context.Context, every time.Duration, event string, ok func() (bool, error)) error {
	for deadline := time.Now().Add(maxWait); ; {
		done, err := ok()
		if done || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("no event within %s: %s", maxWait, event)
		}
		if err := sleep(ctx, every); err != nil {
			return err
		}
	}
}

// patch replaces a destination's version, as a user's apply does.
func (w *world) patch(ctx context.Context, namespace, name, version string) (*v1beta1.WebhookDestination, error) {
	body, err := json.Marshal(map[string]any{"spec": map[string]any{"endpoints": []v1beta1.Endpoint{w.endpoint(namespace, name, version)}}})
	if err != nil {
		return nil, err
	}
	d := &v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	return d, w.client.Patch(ctx, d, client.RawPatch("application/merge-patch+json", body))
}

// edit changes a destination and returns the time until it is Ready again.
func (w *world) edit(ctx context.Context, namespace string, i int, version string) (time.Duration, error) {
	begin := time.Now()
	d, err := w.patch(ctx, namespace, destinationName(i%*perNamespace), version)
	if err != nil {
		return 0, err
	}
	err = w.watchReady(ctx, &v1beta1.WebhookDestinationList{}, 1, d.Generation, client.InNamespace(namespace),
		client.MatchingFields{"metadata.name": d.Name})
	return time.Since(begin), err
}

// addBallast creates unused Secrets, and waits until the operator has read them.
func (w *world) addBallast(ctx context.Context) error {
	for i := range *ballast {
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace(i), Name: fmt.Sprintf("ballast-%d", i)},
			Data: map[string][]byte{"noise": make([]byte, 1000<<10)}}
		if err := w.client.Create(ctx, secret); err != nil {
			return err
		}
	}
	return sleep(ctx, 5*time.Second)
}

// change makes the i-th change, of a header or a secret, and returns the time until
// each dispatcher had made a delivery with it.
func (w *world) change(ctx context.Context, i int) (time.Duration, error) {
	// Strides without a common factor with the counts visit all of them.
	namespace, name := w.namespace(i*7), destinationName((i*3)%*perNamespace)
	version := fmt.Sprintf("change-%d", i)
	seen := w.hook.expect("/"+namespace+"/"+name, version, i%2 == 1)
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	begin := time.Now()
	group.Go(func() (err error) {
		if i%2 == 0 {
			_, err = w.patch(ctx, namespace, name, version)
			return err
		}
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
		body, _ := json.Marshal(map[string]any{"stringData": map[string]string{"sharedSecret": version}})
		return w.client.Patch(ctx, secret, client.RawPatch("application/merge-patch+json", body))
	})
	latest := make([]time.Time, len(w.listen))
	for pod, address := range w.listen {
		group.Go(func() error {
			pace := time.NewTicker(5 * time.Millisecond)
			defer pace.Stop()
			for {
				select {
				case latest[pod] = <-seen[pod]:
					return nil
				case <-ctx.Done():
					return fmt.Errorf("change %d did not take effect on dispatcher %d: %w", i, pod, ctx.Err())
				case <-pace.C:
					if err := w.send(ctx, address, pod, namespace, name); err != nil {
						return err
					}
				}
			}
		})
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	return slices.MaxFunc(latest, time.Time.Compare).Sub(begin), nil
}

// send sends one call that only one destination gets.
func (w *world) send(ctx context.Context, address string, pod int, namespace, name string) error {
	body := fmt.Sprintf(`{"messageId":"%d-%d","userId":"u","event":%q}`, pod, w.sent.Add(1), name)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/v1/track", strings.NewReader(body))
	if err != nil {
		return err
	}
	request.SetBasicAuth("key-of-"+namespace, "")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	answer, _ := io.ReadAll(response.Body)
	if err := response.Body.Close(); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", response.Status, answer)
	}
	return nil
}

// auditPolicy records only the writes of Posthorn's accounts.
const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: ["system:serviceaccount:posthorn-system:posthorn-operator", "system:serviceaccount:posthorn-system:posthorn-dispatcher"]
  verbs: [create, update, patch, delete, deletecollection]
- level: None
`

// tally counts writes: secrets, status, leases, reviews, or the resource's name.
type tally map[string]int

// objects are the writes that change stored objects, except the Lease.
func (t tally) objects() (n int) {
	for what, count := range t {
		if what != "leases" && what != "reviews" {
			n += count
		}
	}
	return n
}

func (t tally) String() string {
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(t)) {
		if what != "leases" && what != "reviews" {
			parts = append(parts, fmt.Sprintf("%d %s", t[what], what))
		}
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

// written counts the writes since a time.
func (w *world) written(since time.Time) (tally, error) {
	t := tally{}
	err := w.eachWrite(func(at time.Time, what string) {
		if !at.Before(since) {
			t[what]++
		}
	})
	return t, err
}

func (w *world) eachWrite(f func(at time.Time, what string)) error {
	data, err := os.ReadFile(w.audit)
	if err != nil {
		return err
	}
	for lines := bufio.NewReader(bytes.NewReader(data)); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil { // The last line may be incomplete.
			return nil
		}
		var e struct {
			Received  time.Time `json:"requestReceivedTimestamp"`
			ObjectRef struct{ Resource, Subresource string }
		}
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("read the audit log: %w", err)
		}
		what := e.ObjectRef.Resource
		switch {
		case e.ObjectRef.Subresource == "status":
			what = "status"
		case what == "tokenreviews" || what == "subjectaccessreviews":
			what = "reviews"
		}
		f(e.Received, what)
	}
}

// quiet waits until nothing has been written for a while.
func (w *world) quiet(ctx context.Context) error {
	begin := time.Now()
	return w.until(ctx, time.Second, "the writes to end", func() (bool, error) {
		last := begin
		err := w.eachWrite(func(at time.Time, what string) {
			if what != "leases" && what != "reviews" && at.After(last) {
				last = at
			}
		})
		return time.Since(last) > settled, err
	})
}

// memory prints the memory of each process.
func (w *world) memory(when string) {
	for _, name := range slices.Sorted(maps.Keys(w.processes)) {
		now, _ := process.Memory(w.processes[name].Pid())
		row(fmt.Sprintf("memory (RSS) of %s %s", name, when), fmt.Sprintf("%d MB", now>>20), "", true)
	}
}

// cpu returns the CPU time of each process.
func (w *world) cpu() map[string]time.Duration {
	used := map[string]time.Duration{}
	for name, p := range w.processes {
		used[name] = process.CPU(p.Pid())
	}
	return used
}
