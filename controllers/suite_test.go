package controllers

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/invariants"
	"github.com/posthorn/posthorn/test/wait"
)

// release is the namespace of config/default. The tests install it, so the operator has
// the same permissions as in a cluster.
const release = env.Release

var (
	server  *env.Env
	cluster client.Client // with the permissions of an administrator
	logs    = &lockedBuffer{}
)

func TestControllers(t *testing.T) {
	env.Need(t)
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(wait.Limit)
	SetDefaultEventuallyPollingInterval(50 * time.Millisecond)
	RunSpecs(t, "controllers")
}

// init sets the logger, because controller-runtime drops the log of a process that has none after 30
// seconds. On a busy machine the suite begins later.
func init() {
	logger := logr.FromSlogHandler(slog.NewTextHandler(logs, nil))
	ctrl.SetLogger(logger)
	klog.SetLogger(logger)
}

var _ = BeforeSuite(func() {
	var err error
	server, err = env.Start()
	Expect(err).NotTo(HaveOccurred())
	scheme := runtime.NewScheme()
	Expect(clientscheme.AddToScheme(scheme)).To(Succeed())
	Expect(v1beta1.AddToScheme(scheme)).To(Succeed())
	cluster, err = client.New(server.Config, client.Options{Scheme: scheme})
	Expect(err).NotTo(HaveOccurred())
	Expect(server.Install()).To(Succeed())
})

var _ = AfterSuite(func() {
	Expect(server.Stop()).To(Succeed())
	// Every secret in these tests contains this word.
	Expect(logs.String()).NotTo(ContainSubstring("hush"))
	Expect(logs.String()).NotTo(MatchRegexp(`is forbidden|panic`))
})

// world is a running operator with a fake dispatcher in this process.
type world struct {
	ctx        context.Context
	dispatcher *fakeDispatcher
	pods       *podList
	options    Options
	// configure, if set, changes the operator's client config.
	configure func(*rest.Config)
	stop      func()
}

// newWorld starts an operator. After the spec it stops the operator and removes all objects.
func newWorld(change ...func(*world)) *world {
	GinkgoHelper()
	w := &world{ctx: context.Background(), dispatcher: newDispatcher("dispatcher-0")}
	w.pods = pods(w.dispatcher.pod())
	w.options = Options{
		Namespace: release, Pods: w.pods, MetricsBindAddress: "0", HealthProbeBindAddress: "0",
		PollInterval: 100 * time.Millisecond, followInterval: 100 * time.Millisecond, backlogInterval: 100 * time.Millisecond,
		servedInterval: 100 * time.Millisecond, tombstoneGrace: time.Millisecond, LeaderElection: true,
		Policy: compile.Policy{CheckHost: func(host string) error {
			if host == "169.254.169.254" {
				return fmt.Errorf("%s is denied", host)
			}
			return nil
		}},
	}
	for _, c := range change {
		c(w)
	}
	DeferCleanup(func() {
		for _, o := range []client.Object{&v1beta1.Redelivery{}, &v1beta1.Audience{}, &v1beta1.DeletionRequest{}, &v1beta1.Source{},
			&v1beta1.WebhookDestination{}} {
			var namespaces corev1.NamespaceList
			Expect(cluster.List(w.ctx, &namespaces)).To(Succeed())
			for _, ns := range namespaces.Items {
				Expect(cluster.DeleteAllOf(w.ctx, o, client.InNamespace(ns.Name))).To(Succeed())
			}
		}
		w.stop()
		Expect(cluster.DeleteAllOf(w.ctx, &corev1.Secret{}, client.InNamespace(release))).To(Succeed())
		Expect(cluster.DeleteAllOf(w.ctx, &corev1.Pod{}, client.InNamespace(release), client.GracePeriodSeconds(0))).To(Succeed())
		w.dispatcher.server.Close()
	})
	w.start()
	return w
}

func (w *world) start() {
	GinkgoHelper()
	config := server.As("posthorn-operator")
	if w.configure != nil {
		w.configure(config)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, config, w.options) }()
	w.stop = func() {
		GinkgoHelper()
		cancel()
		Eventually(done).Should(Receive(BeNil()))
		w.stop = func() {}
	}
}

// apply applies YAML in a namespace with kubectl.
func (w *world) apply(namespace, text string) {
	GinkgoHelper()
	_, err := server.Kubectl(text, "apply", "--namespace", namespace, "-f", "-")
	Expect(err).NotTo(HaveOccurred())
}

func (w *world) delete(namespace, what, name string) {
	GinkgoHelper()
	_, err := server.Kubectl("", "delete", what, name, "--namespace", namespace)
	Expect(err).NotTo(HaveOccurred())
}

// newNamespace creates a namespace.
func (w *world) newNamespace() string {
	GinkgoHelper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}
	Expect(cluster.Create(w.ctx, ns)).To(Succeed())
	return ns.Name
}

// live returns a namespace's live config, decoded, and its Secret.
func (w *world) live(g Gomega, namespace string) (liveconfig.Config, *corev1.Secret) {
	var secret corev1.Secret
	g.Expect(cluster.Get(w.ctx, client.ObjectKey{Namespace: release, Name: liveconfig.SecretName(namespace)}, &secret)).To(Succeed())
	live, err := assembled(w.ctx, namespace, &secret).Decode()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(secret.Annotations[liveconfig.AnnotationRevision]).To(Equal(live.Revision))
	g.Expect(secret.Labels).To(HaveKeyWithValue(liveconfig.LabelNamespace, namespace))
	g.Expect(secret.Labels).To(HaveKey(liveconfig.LabelLive))
	return live.Config, &secret
}

// assembled returns the live config of a root Secret.
func assembled(ctx context.Context, namespace string, root *corev1.Secret) liveconfig.Stored {
	return liveconfig.Assemble(namespace, root.Data, func(name string) map[string][]byte {
		var part corev1.Secret
		if cluster.Get(ctx, client.ObjectKey{Namespace: release, Name: name}, &part) != nil {
			return nil
		}
		return part.Data
	})
}

// head returns the head of a namespace's live config.
func (w *world) head(g Gomega, namespace string) liveconfig.Head {
	_, secret := w.live(g, namespace)
	head, err := liveconfig.DecodeHead(secret.Data[liveconfig.HeadKey])
	g.Expect(err).NotTo(HaveOccurred())
	return head
}

// hasLive reports whether a namespace has a live config.
func (w *world) hasLive(namespace string) func() bool {
	return func() bool {
		return cluster.Get(w.ctx, client.ObjectKey{Namespace: release, Name: liveconfig.SecretName(namespace)}, &corev1.Secret{}) == nil
	}
}

// reserved returns the reserved write keys of a namespace.
func (w *world) reserved(g Gomega, namespace string) (hashes []string) {
	for _, k := range w.head(g, namespace).Reserved {
		hashes = append(hashes, k.SHA256)
	}
	return hashes
}

// releaseKeys ends reservations of write keys of a namespace: of one hash, or of all.
func (w *world) releaseKeys(namespace, value string) {
	GinkgoHelper()
	Eventually(func(g Gomega) { g.Expect(w.reserved(g, namespace)).NotTo(BeEmpty()) }).Should(Succeed())
	_, err := server.Kubectl("", "annotate", "secret", "--overwrite", "--namespace", release, "--selector",
		liveconfig.LabelNamespace+"="+namespace, liveconfig.AnnotationRelease+"="+value)
	Expect(err).NotTo(HaveOccurred())
}

func (w *world) destination(g Gomega, namespace, name string) v1beta1.WebhookDestination {
	var d v1beta1.WebhookDestination
	g.Expect(cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: name}, &d)).To(Succeed())
	if d.Status.ObservedGeneration > 0 {
		g.Expect(invariants.Destination(d)).To(Succeed())
	}
	return d
}

func (w *world) source(g Gomega, namespace, name string) v1beta1.Source {
	var s v1beta1.Source
	g.Expect(cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: name}, &s)).To(Succeed())
	if s.Status.ObservedGeneration > 0 {
		g.Expect(invariants.Source(s)).To(Succeed())
	}
	return s
}

// expectCondition waits until a condition of "source/NAME" or "whd/NAME" has a status and reason.
func (w *world) expectCondition(namespace, what, condition string, status metav1.ConditionStatus, reason string) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		kind, name, _ := strings.Cut(what, "/")
		var conditions []metav1.Condition
		var generation int64
		if kind == "source" {
			s := w.source(g, namespace, name)
			conditions, generation = s.Status.Conditions, s.Generation
		} else {
			d := w.destination(g, namespace, name)
			conditions, generation = d.Status.Conditions, d.Generation
		}
		i := slices.IndexFunc(conditions, func(c metav1.Condition) bool { return c.Type == condition })
		g.Expect(i).To(BeNumerically(">=", 0), "no condition %s", condition)
		c := conditions[i]
		g.Expect([]string{string(c.Status), c.Reason}).To(Equal([]string{string(status), reason}), c.Message)
		g.Expect(c.ObservedGeneration).To(Equal(generation))
		g.Expect(c.Message).NotTo(ContainSubstring("hush"))
	}).Should(Succeed())
}

// events returns the Events about an object as "Type Reason".
func (w *world) events(namespace, name string) []string {
	GinkgoHelper()
	var list eventsv1.EventList
	Expect(cluster.List(w.ctx, &list, client.InNamespace(namespace))).To(Succeed())
	var texts []string
	for _, e := range list.Items {
		Expect(e.Note).NotTo(ContainSubstring("hush"))
		if e.Regarding.Name == name {
			texts = append(texts, e.Type+" "+e.Reason)
		}
	}
	return texts
}

// versions returns the resource versions of all objects that the operator writes.
func (w *world) versions() map[string]string {
	GinkgoHelper()
	found := map[string]string{}
	for _, list := range []client.ObjectList{&v1beta1.SourceList{}, &v1beta1.WebhookDestinationList{}, &corev1.SecretList{}} {
		Expect(cluster.List(w.ctx, list)).To(Succeed())
		switch l := list.(type) {
		case *v1beta1.SourceList:
			for _, o := range l.Items {
				found["source/"+o.Namespace+"/"+o.Name] = o.ResourceVersion
			}
		case *v1beta1.WebhookDestinationList:
			for _, o := range l.Items {
				found["whd/"+o.Namespace+"/"+o.Name] = o.ResourceVersion
			}
		case *corev1.SecretList:
			for _, o := range l.Items {
				found["secret/"+o.Namespace+"/"+o.Name] = o.ResourceVersion
			}
		}
	}
	return found
}

// counterValue returns the value of an operator's counter or gauge with this label.
func counterValue(name, label string) float64 {
	GinkgoHelper()
	families, err := metrics.Registry.Gather()
	Expect(err).NotTo(HaveOccurred())
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && len(m.GetLabel()) == 1 && m.GetLabel()[0].GetValue() == label {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

// counterSum returns the sum of an operator's counter over all labels.
func counterSum(name string) (sum float64) {
	GinkgoHelper()
	families, err := metrics.Registry.Gather()
	Expect(err).NotTo(HaveOccurred())
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// waitIdle waits until the operator writes no more objects, and returns versions.
func (w *world) waitIdle() map[string]string {
	GinkgoHelper()
	versions := w.versions()
	Eventually(func(g Gomega) {
		before := versions
		w.waitPolls(20) // Numbers are written a moment after the transitions, and a busy machine delays them.
		versions = w.versions()
		g.Expect(versions).To(Equal(before))
	}).Should(Succeed())
	return versions
}

// waitPolls waits for n more requests for the dispatcher's report.
func (w *world) waitPolls(n int) {
	GinkgoHelper()
	start := w.dispatcher.requestCount()
	Eventually(w.dispatcher.requestCount).Should(BeNumerically(">=", start+n))
}

// podList is a list of dispatchers that a test can change while the operator runs.
type podList struct {
	mu   sync.Mutex
	pods []Pod
}

func pods(p ...Pod) *podList { return &podList{pods: p} }

func (l *podList) set(p ...Pod) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pods = p
}

// List implements Pods.
func (l *podList) List(context.Context) ([]Pod, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.pods), nil
}

// fakeDispatcher loads the live-config Secrets, as a dispatcher does. Tests determine
// its reports.
type fakeDispatcher struct {
	name   string
	server *httptest.Server

	mu sync.Mutex
	// requests counts the requests for the report.
	requests int
	// down means that it answers 500, refuse that it rejects later configs, and stuck that
	// it does not load later configs.
	down, refuse, stuck bool
	// decoded caches the configs of the Secrets by UID and version, because decoding them
	// for every request is slow under the race detector.
	decoded   map[string]decodedConfig
	running   map[string]liveconfig.Config
	revisions map[string]string
	// numbers are the highest numbers of the loaded configs, and parked the parked objects.
	numbers map[string]int64
	parked  map[string][]adminapi.ParkedObject
	// reserved are the reserved write keys, by namespace.
	reserved map[string][]adminapi.ReservedKey
	// discards are the discards ahead, by namespace.
	discards map[string][]adminapi.Discard
	// traffic changes a destination's report, by "namespace/name"; calls a Source's.
	traffic map[string]func(*adminapi.DestinationReport)
	calls   map[string]func(*adminapi.SourceReport)
	// syncs changes an audience's report, and deletions a deletion request's.
	syncs     map[string]func(*adminapi.AudienceReport)
	deletions map[string]func(*adminapi.DeletionReport)
	// box runs Redeliveries.
	box *letterBox
	// shares is the number of the shares of limits.
	shares int64
}

type decodedConfig struct {
	config   liveconfig.Config
	revision string
	number   int64
	err      error
}

func newDispatcher(name string) *fakeDispatcher {
	d := &fakeDispatcher{
		name: name, running: map[string]liveconfig.Config{}, revisions: map[string]string{}, numbers: map[string]int64{},
		traffic: map[string]func(*adminapi.DestinationReport){}, calls: map[string]func(*adminapi.SourceReport){},
		syncs: map[string]func(*adminapi.AudienceReport){}, deletions: map[string]func(*adminapi.DeletionReport){},
		box: &letterBox{runs: map[string]*boxRun{}},
	}
	d.server = httptest.NewServer(d)
	return d
}

func (d *fakeDispatcher) pod() Pod { return Pod{Name: d.name, URL: d.server.URL} }

func (d *fakeDispatcher) set(f func(d *fakeDispatcher)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(d)
}

func (d *fakeDispatcher) requestCount() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.requests
}

func (d *fakeDispatcher) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.requests++
	if d.down || r.URL.Path != "/report" {
		http.Error(w, "down", http.StatusInternalServerError)
		return
	}
	report := d.report(context.WithoutCancel(r.Context())) // A config that could not be read in time would count as invalid.
	body, err := json.Marshal(report)
	if err != nil {
		panic(err)
	}
	if cursor := fmt.Sprintf("%x", sha256.Sum256(body)); r.FormValue(adminapi.ReportCursor) == cursor {
		w.WriteHeader(http.StatusNotModified)
	} else {
		report.Cursor = cursor
		_ = json.NewEncoder(w).Encode(report)
	}
}

func (d *fakeDispatcher) report(ctx context.Context) adminapi.Report {
	var secret corev1.Secret
	if !d.stuck && cluster.Get(ctx, client.ObjectKey{Namespace: release, Name: liveconfig.SharesName}, &secret) == nil {
		if shares, err := liveconfig.DecodeShares(secret.Data); err == nil {
			d.shares = shares.Number
		}
	}
	report := adminapi.Report{Pod: d.name, Ready: true, Shares: d.shares}
	var secrets corev1.SecretList
	if err := cluster.List(ctx, &secrets, client.InNamespace(release), client.HasLabels{liveconfig.LabelNamespace}); err != nil {
		return report
	}
	refused := map[string]*adminapi.RefusedConfig{}
	if d.refuse {
		for _, s := range secrets.Items {
			if revision := s.Annotations[liveconfig.AnnotationRevision]; d.revisions[s.Labels[liveconfig.LabelNamespace]] != revision {
				refused[s.Labels[liveconfig.LabelNamespace]] = &adminapi.RefusedConfig{Revision: revision, Error: "not today"}
			}
		}
	} else if !d.stuck {
		decoded := map[string]decodedConfig{}
		d.running, d.revisions = map[string]liveconfig.Config{}, map[string]string{}
		for _, s := range secrets.Items {
			version := string(s.UID) + "/" + s.ResourceVersion
			c, known := d.decoded[version]
			if !known {
				live, err := assembled(ctx, s.Labels[liveconfig.LabelNamespace], &s).Decode()
				c.config, c.revision, c.number, c.err = live.Config, live.Revision, live.Head.Number, err
			}
			decoded[version] = c
			if namespace := c.config.Namespace; c.err == nil && c.number >= d.numbers[namespace] {
				d.running[namespace], d.revisions[namespace], d.numbers[namespace] = c.config, c.revision, c.number
			}
		}
		d.decoded = decoded
	}
	namespaces := maps.Clone(d.running)
	for namespace := range d.parked {
		namespaces[namespace] = d.running[namespace]
	}
	for _, namespace := range slices.Sorted(maps.Keys(namespaces)) {
		config := d.running[namespace]
		t := adminapi.NamespaceReport{Namespace: namespace, Revision: d.revisions[namespace], Refused: refused[namespace]}
		report.Configs = append(report.Configs, adminapi.ConfigReport{Namespace: namespace, Number: d.numbers[namespace],
			Parked: d.parked[namespace], Discards: d.discards[namespace], Reserved: d.reserved[namespace]})
		for _, s := range config.Sources {
			r := adminapi.SourceReport{Name: s.Name, Generation: s.Generation, Revision: s.Revision}
			if f := d.calls[namespace+"/"+s.Name]; f != nil {
				f(&r)
			}
			t.Sources = append(t.Sources, r)
		}
		for _, dest := range config.Destinations {
			r := adminapi.DestinationReport{Name: dest.Name, Generation: dest.Generation, Revision: dest.Revision}
			for _, e := range dest.Endpoints {
				r.Endpoints = append(r.Endpoints, adminapi.EndpointReport{Name: e.Name, State: adminapi.EndpointIdle})
			}
			if f := d.traffic[namespace+"/"+dest.Name]; f != nil {
				f(&r)
			}
			t.Destinations = append(t.Destinations, r)
		}
		for _, a := range config.Audiences {
			r := adminapi.AudienceReport{Name: a.Name, Generation: a.Generation, Revision: a.Revision, Owner: true}
			if f := d.syncs[namespace+"/"+a.Name]; f != nil {
				f(&r)
			}
			t.Audiences = append(t.Audiences, r)
		}
		for _, del := range config.Deletions {
			r := adminapi.DeletionReport{Name: del.Name, Generation: del.Generation, Revision: del.Revision, Owner: true}
			if f := d.deletions[namespace+"/"+del.Name]; f != nil {
				f(&r)
			}
			t.Deletions = append(t.Deletions, r)
		}
		for _, o := range config.Redeliveries {
			t.Redeliveries = append(t.Redeliveries, d.box.report(o))
		}
		report.Namespaces = append(report.Namespaces, t)
	}
	return report
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, _ = GinkgoWriter.Write(p)
	return b.b.Write(p)
}

// take returns the logged text and empties the buffer.
func (b *lockedBuffer) take() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer b.b.Reset()
	return b.b.String()
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Manifests that the specs apply.
const (
	webSource = `
apiVersion: v1
kind: Secret
metadata: {name: web-key}
stringData: {writeKey: hush-web}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: web, labels: {team: shop}}
spec:
  writeKeys: [{name: main, secretKeyRef: {name: web-key, key: writeKey}}]
---
`
	crmSecret = `
apiVersion: v1
kind: Secret
metadata: {name: crm}
stringData: {sharedSecret: hush-crm}
---
`
	crmDestination = `
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: primary, url: "https://hooks.example/in"}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: crm, key: sharedSecret}}]}
---
`
)

// named returns crmDestination with another name and further replacements. The spec
// fails if crmDestination does not contain a text to replace.
func named(name string, replace ...string) string {
	GinkgoHelper()
	pairs := append([]string{"metadata: {name: crm}", "metadata: {name: " + name + "}"}, replace...)
	for i := 0; i < len(pairs); i += 2 {
		Expect(crmDestination).To(ContainSubstring(pairs[i]))
	}
	return strings.NewReplacer(pairs...).Replace(crmDestination)
}
