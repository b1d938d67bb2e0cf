package standalone

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/kinds"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/invariants"
	"github.com/posthorn/posthorn/test/wait"
)

const (
	secret         = "apiVersion: v1\nkind: Secret\nmetadata: {name: web-key}\nstringData: {writeKey: canary-key}\n"
	webSource      = "apiVersion: posthorn.dev/v1beta1\nkind: Source\nmetadata: {name: web, labels: {app: shop}}\nspec: {writeKeys: [{name: main, secretKeyRef: {name: web-key, key: writeKey}}]}\n"
	webDestination = "apiVersion: posthorn.dev/v1beta1\nkind: WebhookDestination\nmetadata: {name: crm}\nspec: {sourceRefs: [{name: web}], endpoints: [{name: primary, url: \"https://hooks.example/in\"}]}\n"
)

// runner is a fake dispatcher. It accepts and records every config.
type runner struct {
	mu      sync.Mutex
	configs map[string]liveconfig.Revisioned
	sets    int
	deleted []string
	synced  bool
}

func (r *runner) Set(namespace string, stored liveconfig.Stored) {
	live, err := stored.Decode()
	if err != nil {
		panic(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.configs == nil {
		r.configs = map[string]liveconfig.Revisioned{}
	}
	r.configs[namespace] = live
	r.sets++
}

func (r *runner) Delete(namespace string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.configs, namespace)
	r.deleted = append(r.deleted, namespace)
}

func (r *runner) Synced(...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.synced = true
}

// destinations returns the runner's destinations as "namespace/name state".
func (r *runner) destinations() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for namespace, c := range r.configs {
		for _, d := range c.Destinations {
			out = append(out, namespace+"/"+d.Name+" "+string(d.State))
		}
	}
	slices.Sort(out)
	return out
}

func (r *runner) changes(string) *adminapi.Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	report := &adminapi.Report{Pod: "here", Ready: true}
	for namespace, c := range r.configs {
		t := adminapi.NamespaceReport{Namespace: namespace, Revision: c.Revision}
		for _, s := range c.Sources {
			t.Sources = append(t.Sources, adminapi.SourceReport{Name: s.Name, Generation: s.Generation, Revision: s.Revision, Accepted: 7,
				LastAccepted: time.Now()})
		}
		for _, d := range c.Destinations {
			t.Destinations = append(t.Destinations, adminapi.DestinationReport{Name: d.Name, Generation: d.Generation, Revision: d.Revision,
				Ledger: adminapi.Ledger{Delivered: 5, Pending: 2}})
		}
		report.Namespaces = append(report.Namespaces, t)
	}
	return report
}

// sources returns the Sources of a namespace, or of all namespaces for "".
// kindOf returns a kind of the API.
func kindOf(name string) kinds.Kind {
	k := kinds.All.ByName(name)
	if k == nil {
		panic(name)
	}
	return *k
}

func (f *folder) sources(namespace string) *v1beta1.SourceList {
	return f.control.list(kindOf("Source"), namespace, func(client.Object) bool { return true }).(*v1beta1.SourceList)
}

func (f *folder) destinations(namespace string) *v1beta1.WebhookDestinationList {
	return f.control.list(kindOf("WebhookDestination"), namespace, func(client.Object) bool { return true }).(*v1beta1.WebhookDestinationList)
}

// folder is a folder of manifests with a running Control.
type folder struct {
	*testing.T
	dir     string
	runner  *runner
	control *Control
	log     *bytes.Buffer
	stop    func()
}

func start(t *testing.T, dir, stateFile string, values ...SecretValue) *folder {
	t.Helper()
	f := &folder{T: t, dir: dir, runner: &runner{}, log: &bytes.Buffer{}}
	f.control = New(Options{Dir: dir, StateFile: stateFile, SecretValues: values, Sink: f.runner, Changes: f.runner.changes,
		Logger: slog.New(slog.NewTextHandler(f.log, nil))})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.control.Run(ctx) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		if strings.Contains(f.log.String(), "canary") {
			t.Errorf("the log contains a secret:\n%s", f.log)
		}
	})
	t.Cleanup(f.stop)
	f.until("Synced", func() bool {
		f.runner.mu.Lock()
		defer f.runner.mu.Unlock()
		return f.runner.synced
	})
	return f
}

func (f *folder) until(what string, ok func() bool) {
	f.Helper()
	for deadline := time.Now().Add(wait.Limit); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			problems, _ := f.control.Problems()
			f.Fatalf("%s did not come; destinations %v, problems %v", what, f.runner.destinations(), problems)
		}
	}
}

func put(t testing.TB, dir, name, text string) {
	t.Helper()
	// As editors do, replace the old file by a new one.
	temporary := filepath.Join(dir, "."+name+".tmp")
	if err := os.WriteFile(temporary, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(temporary, filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

func (f *folder) runs(want ...string) {
	f.Helper()
	f.until(fmt.Sprintf("%v", want), func() bool { return slices.Equal(f.runner.destinations(), want) })
}

func (f *folder) problem(text string) {
	f.Helper()
	f.until("problem "+text, func() bool {
		problems, _ := f.control.Problems()
		return slices.ContainsFunc(problems, func(p manifest.Problem) bool { return strings.Contains(p.String(), text) }) == (text != "") &&
			(text != "" || len(problems) == 0)
	})
}

func TestRunAppliesChanges(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "web.yaml", secret+"---\n"+webSource)
	put(t, dir, "crm.yaml", webDestination)
	put(t, dir, "README.md", "not a manifest")
	f := start(t, dir, "")
	f.runs("default/crm Active")

	condition := func(conditionType string) metav1.Condition {
		list := f.destinations("default")
		if len(list.Items) != 1 {
			return metav1.Condition{}
		}
		c := meta.FindStatusCondition(list.Items[0].Status.Conditions, conditionType)
		if c == nil {
			return metav1.Condition{}
		}
		return *c
	}
	f.until("Ready", func() bool { return condition("Ready").Status == metav1.ConditionTrue })
	d := f.destinations("").Items[0]
	if err := invariants.Destination(d); err != nil {
		t.Error(err)
	}
	if d.Generation != 1 || d.CreationTimestamp.IsZero() || d.UID == "" || d.Status.Delivery.Delivered != 5 {
		t.Errorf("%+v", d)
	}
	sources := f.sources("")
	if len(sources.Items) != 1 || !slices.Equal(sources.Items[0].Status.Destinations, []string{"crm"}) {
		t.Errorf("%+v", sources.Items)
	}
	if err := invariants.Source(sources.Items[0]); err != nil {
		t.Error(err)
	}

	// A change of the spec increments the generation; a change of a comment does not.
	put(t, dir, "crm.yaml", "# a comment\n"+strings.Replace(webDestination, "spec: {", "spec: {suspend: true, ", 1))
	f.runs("default/crm Suspended")
	f.until("generation 2", func() bool { return f.destinations("").Items[0].Status.ObservedGeneration == 2 })
	if again := f.destinations("").Items[0]; again.UID != d.UID || !again.CreationTimestamp.Equal(&d.CreationTimestamp) {
		t.Error("a change created a new object")
	}

	// Without its Secret the Source is paused; another value is another revision.
	f.runner.mu.Lock()
	before := f.runner.configs["default"].Sources[0]
	f.runner.mu.Unlock()
	put(t, dir, "web.yaml", strings.Replace(secret, "canary-key", "canary-other", 1)+"---\n"+webSource)
	f.until("another write key", func() bool {
		f.runner.mu.Lock()
		defer f.runner.mu.Unlock()
		now := f.runner.configs["default"].Sources[0]
		return !slices.Equal(now.WriteKeySHA256, before.WriteKeySHA256) && now.Revision != before.Revision && now.Generation == 1
	})
	put(t, dir, "web.yaml", webSource)
	f.until("SecretNotFound", func() bool {
		return meta.FindStatusCondition(f.sources("").Items[0].Status.Conditions, "Ready").Reason == v1beta1.ReasonSecretNotFound
	})

	// Another namespace is added and removed.
	put(t, dir, "other.json", `{"apiVersion":"posthorn.dev/v1beta1","kind":"WebhookDestination","metadata":{"name":"x","namespace":"other"},"spec":{"sourceSelector":{},"endpoints":[{"name":"a","url":"https://a.example"}]}}`)
	f.runs("default/crm Suspended", "other/x Paused")
	if err := os.Remove(filepath.Join(dir, "other.json")); err != nil {
		t.Fatal(err)
	}
	f.runs("default/crm Suspended")
	f.runner.mu.Lock()
	defer f.runner.mu.Unlock()
	x := liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: "x"}
	if other := f.runner.configs["other"]; !other.Head.Buried(x) {
		t.Errorf("head of the removed namespace: got %+v, want a tombstone of %s", other.Head, x)
	}
}

// The CAs of an endpoint follow the ConfigMap in a manifest.
func TestAuthoritiesOfAConfigMap(t *testing.T) {
	pem, err := os.ReadFile("../compile/testdata/ca.pem")
	check.NoError(t, "read a certificate", err)
	dir, bundle := t.TempDir(), func(text string) string {
		return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: bundle}\ndata: {ca.crt: " + strconv.Quote(text) + "}\n"
	}
	put(t, dir, "web.yaml", secret+"---\n"+webSource)
	put(t, dir, "crm.yaml", strings.Replace(webDestination, "/in\"", "/in\", tls: {ca: {configMapKeyRef: {name: bundle, key: ca.crt}}}", 1))
	f := start(t, dir, "")
	resolved := func(reason string) {
		f.until(reason, func() bool {
			list := f.destinations("default").Items
			return len(list) == 1 && meta.FindStatusCondition(list[0].Status.Conditions, "ResolvedRefs").Reason == reason
		})
	}
	resolved("ConfigMapNotFound")
	for _, text := range []string{"# one\n" + string(pem), string(pem) + "# again\n" + string(pem)} {
		put(t, dir, "bundle.yaml", bundle(text))
		f.until("the certificates", func() bool {
			f.runner.mu.Lock()
			defer f.runner.mu.Unlock()
			d := f.runner.configs["default"].Destinations[0]
			return d.State == liveconfig.Active && strings.Count(d.Endpoints[0].TLS.CA, "BEGIN") == strings.Count(text, "BEGIN")
		})
	}
	put(t, dir, "bundle.yaml", bundle("none"))
	resolved("InvalidConfigMap")
}

func TestInvalidManifestsKeepTheLastValidForm(t *testing.T) {
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "data", "manifests.json")
	put(t, dir, "a.yaml", secret+"---\n"+webSource+"---\n"+webDestination+"---\n"+strings.ReplaceAll(webDestination, "crm", "erp"))
	put(t, dir, "b.yaml", strings.ReplaceAll(webDestination, "crm", "dwh"))
	f := start(t, dir, state)
	f.runs("default/crm Active", "default/dwh Active", "default/erp Active")

	// An invalid object keeps its last valid form; the others in the file are updated.
	put(t, dir, "a.yaml", secret+"---\n"+webSource+"---\n"+strings.Replace(webDestination, "https://", "ftp://", 1))
	f.runs("default/crm Active", "default/dwh Active")
	f.problem("WebhookDestination default/crm: spec.endpoints[0].url: must be a full URL")

	// The objects of an unreadable file are kept.
	put(t, dir, "a.yaml", "apiVersion: [")
	f.problem("a.yaml:1: not YAML")
	put(t, dir, "b.yaml", strings.ReplaceAll(webDestination, "crm", "lake"))
	f.runs("default/crm Active", "default/lake Active")

	// They are kept after a restart, too.
	f.stop()
	if info, err := os.Stat(state); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("state file: %v %v", info, err)
	}
	created := f.destinations("").Items[0].CreationTimestamp
	f = start(t, dir, state)
	f.runs("default/crm Active", "default/lake Active")
	f.problem("a.yaml:1: not YAML")
	if d := f.destinations("").Items[0]; !d.CreationTimestamp.Equal(&created) {
		t.Errorf("created %v, before %v", d.CreationTimestamp, created)
	}

	// Of an object in two files, one form is in effect.
	put(t, dir, "a.yaml", secret+"---\n"+webSource+"---\n"+webDestination)
	put(t, dir, "c.yaml", strings.Replace(webDestination, "https://", "http://", 1))
	f.problem("c.yaml:1: WebhookDestination default/crm: the object is also in " + filepath.Join(dir, "a.yaml") + ", which takes precedence")
	if err := os.Remove(filepath.Join(dir, "c.yaml")); err != nil {
		t.Fatal(err)
	}
	f.problem("")

	// The objects are kept if the folder was removed.
	if err := os.Rename(dir, dir+"-away"); err != nil {
		t.Fatal(err)
	}
	time.Sleep(20 * time.Millisecond)
	f.runs("default/crm Active", "default/lake Active")
	if err := os.Rename(dir+"-away", dir); err != nil {
		t.Fatal(err)
	}
	put(t, dir, "b.yaml", noObjects)
	f.runs("default/crm Active")
}

// The fields that identify an audience cannot be changed, neither by an edit nor by an edit
// before a restart.
func TestAudienceIdentity(t *testing.T) {
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "manifests.json")
	audience := func(spec string) string {
		return "apiVersion: posthorn.dev/v1beta1\nkind: Audience\nmetadata: {name: vip}\nspec: {" + spec + "}\n"
	}
	put(t, dir, "a.yaml", secret+"---\n"+webSource)
	put(t, dir, "vip.yaml", audience(`sourceRef: {name: web}, key: first_name`))
	f := start(t, dir, state)
	compiled := func() liveconfig.Audience {
		f.runner.mu.Lock()
		defer f.runner.mu.Unlock()
		if a := f.runner.configs["default"].Audiences; len(a) == 1 {
			return a[0]
		}
		return liveconfig.Audience{}
	}
	is := func(key string, maxRemovalPercent int) {
		t.Helper()
		f.until(fmt.Sprintf("key %s, maxRemovalPercent %d", key, maxRemovalPercent), func() bool {
			a := compiled()
			return a.Key == key && a.MaxRemovalPercent == maxRemovalPercent
		})
	}
	is("first_name", 50)
	put(t, dir, "vip.yaml", audience(`sourceRef: {name: web}, key: first_name, displayName: Second Name, maxRemovalPercent: 51`))
	is("first_name", 51)

	f.stop()
	put(t, dir, "vip.yaml", audience(`sourceRef: {name: web}, key: first_name, displayName: Third Name, maxRemovalPercent: 52`))
	f = start(t, dir, state)
	is("first_name", 52)

	for spec, want := range map[string]string{
		`sourceRef: {name: web}, key: first_name, type: ComputedTrait`: "spec.type: type cannot be changed",
		`sourceRef: {name: tv}, key: first_name`:                       "spec.sourceRef: sourceRef cannot be changed",
		`sourceRef: {name: web}, key: another`:                         "spec.key: key cannot be changed",
	} {
		put(t, dir, "vip.yaml", audience(spec))
		f.problem(want)
		is("first_name", 52)
	}
	put(t, dir, "vip.yaml", audience(`sourceRef: {name: web}, key: first_name, maxRemovalPercent: 53`))
	f.problem("")
	is("first_name", 53)

	// An audience that is deleted and created again is a new one.
	if err := os.Remove(filepath.Join(dir, "vip.yaml")); err != nil {
		t.Fatal(err)
	}
	f.until("no audience", func() bool { return compiled().Name == "" })
	put(t, dir, "vip.yaml", audience(`sourceRef: {name: web}, key: a, type: ComputedTrait, maxRemovalPercent: 54`))
	is("a", 54)
}

// noObjects is a manifest with an empty List.
const noObjects = "apiVersion: v1\nkind: List\nitems: []\n"

// An empty folder can be a volume that is not mounted, so its objects are kept.
func TestEmptyFolderKeepsTheObjects(t *testing.T) {
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "manifests.json")
	put(t, dir, "a.yaml", secret+"---\n"+webSource+"---\n"+webDestination)
	f := start(t, dir, state)
	f.runs("default/crm Active")
	f.stop()
	if err := os.Remove(filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	f = start(t, dir, state)
	f.runs("default/crm Active")
	put(t, dir, "a.yaml", noObjects)
	f.runs()
}

// A folder without a Source, such as an empty one at the first start, is probably a mistake. The log has
// one warning until there is a Source.
func TestFolderWithoutSourceIsLogged(t *testing.T) {
	dir := t.TempDir()
	f := start(t, dir, filepath.Join(t.TempDir(), "manifests.json"))
	put(t, dir, "crm.yaml", webDestination)
	f.runs("default/crm Paused")
	put(t, dir, "web.yaml", secret+"---\n"+webSource)
	f.runs("default/crm Active")
	put(t, dir, "web.yaml", noObjects)
	f.runs("default/crm Paused")
	f.stop()
	want := []string{"empty at the first start", "without the Source again"}
	var got []string
	for line := range strings.Lines(f.log.String()) {
		if strings.Contains(line, "every call gets 401") {
			got = append(got, line)
		}
	}
	if len(got) != len(want) {
		t.Fatalf("warnings: got %d, want %d (%s):\n%s", len(got), len(want), strings.Join(want, ", "), f.log)
	}
	for _, part := range []string{"level=WARN", `msg="the manifests have no valid Source; every call gets 401 until there is one"`, "dir=" + dir} {
		if !strings.Contains(got[0], part) {
			t.Errorf("first warning: got %q, want %q in it", got[0], part)
		}
	}
	if strings.Contains(f.log.String(), "folder of manifests is empty") {
		t.Errorf("log of a folder that never had an object: got\n%s\nwant no error about kept objects", f.log)
	}
}

// A mounted ConfigMap or Secret is a folder of links, which change atomically.
func TestMountedConfigMap(t *testing.T) {
	dir := t.TempDir()
	version := func(name, text string) {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name, "all.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(name, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	version("..1", secret+"---\n"+webSource+"---\n"+webDestination)
	if err := os.Symlink("..data/all.yaml", filepath.Join(dir, "all.yaml")); err != nil {
		t.Fatal(err)
	}
	f := start(t, dir, "")
	f.runs("default/crm Active")
	version("..2", secret+"---\n"+webSource+"---\n"+strings.Replace(webDestination, "name: crm", "name: erp", 1))
	f.runs("default/erp Active")
}

func TestWriteKeysOfTwoNamespaces(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "a.yaml", secret+"---\n"+webSource)
	f := start(t, dir, "")
	other := strings.NewReplacer("metadata: {name: web", "metadata: {namespace: aaa, name: web")
	put(t, dir, "b.yaml", other.Replace(secret)+"---\n"+other.Replace(webSource))
	reason := func(namespace string) string {
		list := f.sources(namespace)
		if len(list.Items) != 1 || len(list.Items[0].Status.Conditions) == 0 {
			return ""
		}
		return list.Items[0].Status.Conditions[0].Reason
	}
	decided := func(reason string) bool { return reason != "" && reason != v1beta1.ReasonPending }
	f.until("both", func() bool { return decided(reason("aaa")) && decided(reason("default")) })
	// Objects of the same second have equal age, so the name is decisive.
	got := []string{reason("aaa"), reason("default")}
	if slices.Sort(got); !slices.Equal(got, []string{v1beta1.ReasonAccepted, v1beta1.ReasonWriteKeyConflict}) {
		t.Errorf("got %v", got)
	}
}

func TestRunFailsWithoutAFolder(t *testing.T) {
	err := New(Options{Dir: filepath.Join(t.TempDir(), "nowhere"), Sink: &runner{}, Changes: (&runner{}).changes}).Run(context.Background())
	if err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Error(err)
	}
	state := filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(state, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	err = New(Options{Dir: t.TempDir(), StateFile: state, Sink: &runner{}, Changes: (&runner{}).changes}).Run(context.Background())
	if err == nil || !strings.Contains(err.Error(), state) {
		t.Error(err)
	}
}

func TestCompile(t *testing.T) {
	dir := t.TempDir()
	if _, err := Compile(dir, nil, compile.Policy{}); err == nil {
		t.Error("Compile returns no error for an empty folder")
	}
	put(t, dir, "a.yaml", secret+"---\n"+webSource+"---\n"+webDestination)
	c, err := Compile(dir, nil, compile.Policy{})
	if err != nil || !c.OK() || len(c.Namespaces) != 1 || c.Namespaces[0].Config.Destinations[0].State != liveconfig.Active {
		t.Fatalf("%+v %v", c, err)
	}
	if text, err := json.Marshal(c); err != nil || strings.Contains(string(text), "canary") ||
		strings.Contains(string(text), "hooks.example") {
		t.Errorf("%s %v", text, err)
	}
	one, err := Compile(filepath.Join(dir, "a.yaml"), nil, compile.Policy{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c.Namespaces[0].Verdicts["destinations"], one.Namespaces[0].Verdicts["destinations"]); diff != "" {
		t.Error(diff)
	}
	denied, err := Compile(dir, nil, compile.Policy{CheckHost: func(string) error { return fmt.Errorf("denied") }})
	if err != nil || denied.OK() || denied.Namespaces[0].Verdicts["destinations"]["crm"].Reason != v1beta1.ReasonEgressDenied {
		t.Errorf("%+v %v", denied, err)
	}
	put(t, dir, "b.yaml", "kind: [")
	if c, err := Compile(dir, nil, compile.Policy{}); err != nil || c.OK() || len(c.Problems) != 1 {
		t.Errorf("%+v %v", c, err)
	}
}

// compile and run refuse the same expression above a budget, with the same text.
func TestExpressionsAboveTheBudget(t *testing.T) {
	own := compile.NamespaceExpressions
	compile.NamespaceExpressions.Instructions = 200
	dir := t.TempDir()
	filtered := func(name string) string {
		return strings.Replace(strings.Replace(webDestination, "crm", name, 1), "spec: {",
			"spec: {filter: {expression: \"call.a.matches('a{200}')\"}, ", 1)
	}
	put(t, dir, "a.yaml", secret+"---\n"+webSource+"---\n"+filtered("a")+"---\n"+filtered("b"))
	compiled, err := Compile(dir, nil, compile.Policy{})
	if err != nil {
		t.Fatal(err)
	}
	f := start(t, dir, "")
	t.Cleanup(func() {
		f.stop()
		compile.NamespaceExpressions = own
	})
	f.runs("default/a Active", "default/b Paused")
	const want = "spec.filter.expression: 4 nodes, and patterns with 200 instructions; with them, the expressions of this namespace would be above 20000 nodes or 200 instructions; remove or shorten expressions, or filter by types and events"
	var text string
	f.until("the condition of b", func() bool {
		for _, d := range f.destinations("default").Items {
			if c := meta.FindStatusCondition(d.Status.Conditions, v1beta1.ConditionAccepted); d.Name == "b" && c != nil &&
				c.Reason == v1beta1.ReasonExpressionBudget {
				text = c.Message
			}
		}
		return text != ""
	})
	if text != want {
		t.Errorf("condition of run:\n got %s\nwant %s", text, want)
	}
	if len(compiled.NotAccepted) != 1 || compiled.NotAccepted[0].Message != want+" (ExpressionBudget)" {
		t.Errorf("problems of compile: got %v; want one, %s", compiled.NotAccepted, want)
	}
	put(t, dir, "a.yaml", secret+"---\n"+webSource+"---\n"+filtered("b"))
	f.until("b is accepted", func() bool { return slices.Contains(f.runner.destinations(), "default/b Active") })
}

func TestHandler(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "a.yaml", secret+"---\n"+webSource+"---\n"+webDestination+"---\n"+strings.Replace(webDestination, "name: crm",
		"name: crm, namespace: other", 1))
	f := start(t, dir, "")
	f.until("status", func() bool {
		for _, d := range f.destinations("").Items {
			if d.Status.Delivery == nil {
				return false
			}
		}
		return len(f.sources("").Items[0].Status.Conditions) > 0
	})
	server := httptest.NewServer(f.control.Handler())
	defer server.Close()
	get := func(path, accept string, into any) int {
		t.Helper()
		request, _ := http.NewRequest(http.MethodGet, server.URL+path, nil)
		request.Header.Set("Accept", accept)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(body), "canary") {
			t.Errorf("%s contains a secret: %s", path, body)
		}
		if err := json.Unmarshal(body, into); err != nil {
			t.Fatalf("%s: %v in %s", path, err, body)
		}
		return response.StatusCode
	}
	const table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"

	var list v1beta1.WebhookDestinationList
	if get(Prefix+"/webhookdestinations", "application/json", &list); len(list.Items) != 2 || list.Kind != "WebhookDestinationList" ||
		list.Items[0].Kind != "WebhookDestination" {
		t.Errorf("%+v", list)
	}
	var one v1beta1.WebhookDestination
	if get(Prefix+"/namespaces/other/webhookdestinations/crm", "application/json", &one); one.Namespace != "other" ||
		one.Kind != "WebhookDestination" {
		t.Errorf("%+v", one)
	}
	var sources v1beta1.SourceList
	if get(Prefix+"/namespaces/default/sources?labelSelector=app%3Dshop", "", &sources); len(sources.Items) != 1 {
		t.Errorf("%+v", sources)
	}
	if get(Prefix+"/namespaces/default/sources?labelSelector=app%3Dother", "", &sources); len(sources.Items) != 0 {
		t.Errorf("%+v", sources)
	}

	var rows metav1.Table
	get(Prefix+"/namespaces/default/webhookdestinations", table, &rows)
	var columns []string
	for _, c := range rows.ColumnDefinitions {
		if c.Priority == 0 {
			columns = append(columns, c.Name)
		}
	}
	if diff := cmp.Diff([]string{"Name", "Ready", "Reason", "Delivering", "Pending", "Retrying", "Last Success", "Age"}, columns); diff != "" {
		t.Error(diff)
	}
	if len(rows.Rows) != 1 || rows.Kind != "Table" {
		t.Fatalf("%+v", rows)
	}
	if diff := cmp.Diff([]any{"crm", "True", "NoTrafficYet", "Unknown", float64(2), float64(0), nil}, rows.Rows[0].Cells[:7]); diff != "" {
		t.Error(diff)
	}
	if raw := string(rows.Rows[0].Object.Raw); !strings.Contains(raw, `"PartialObjectMetadata"`) || strings.Contains(raw, `"spec"`) {
		t.Errorf("row's object: %s", raw)
	}
	if get(Prefix+"/namespaces/default/webhookdestinations/crm?includeObject=Object", table, &rows); !strings.Contains(string(rows.Rows[0].Object.Raw), `"spec"`) {
		t.Errorf("row's object: %s", rows.Rows[0].Object.Raw)
	}

	var status metav1.Status
	for path, want := range map[string]int{
		Prefix + "/namespaces/default/sources/nobody":     http.StatusNotFound,
		Prefix + "/secrets":                               http.StatusNotFound,
		Prefix + "/sources?watch=true":                    http.StatusMethodNotAllowed,
		Prefix + "/sources?labelSelector=%21%21%28":       http.StatusBadRequest,
		Prefix + "/namespaces/default/secrets/web-key":    http.StatusNotFound,
		Prefix + "/namespaces/nowhere/sources/web?watch=": http.StatusNotFound,
	} {
		if got := get(path, table, &status); got != want || status.Kind != "Status" || status.Message == "" {
			t.Errorf("%s: %d %+v, want %d", path, got, status, want)
		}
	}

	var resources metav1.APIResourceList
	if get(Prefix, "", &resources); len(resources.APIResources) != len(kinds.All) || !slices.Equal(resources.APIResources[0].ShortNames, []string{"whd", "pwhd"}) {
		t.Errorf("%+v", resources)
	}
	var groups metav1.APIGroupList
	if get("/apis", "", &groups); len(groups.Groups) != 1 || groups.Groups[0].Name != "posthorn.dev" {
		t.Errorf("%+v", groups)
	}
	problems := map[string][]manifest.Problem{}
	if get("/problems", "", &problems); problems["problems"] == nil || len(problems["problems"]) != 0 || len(problems["notAccepted"]) != 1 {
		t.Errorf("%+v", problems)
	}
}

// GET /problems lists an object whose Secret is missing, with its position.
func TestProblemsOfReferences(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "all.yaml", "# the Source\n"+webSource)
	f := start(t, dir, "")
	answer := func() manifest.Problems {
		r := httptest.NewRecorder()
		f.control.Handler().ServeHTTP(r, httptest.NewRequest(http.MethodGet, "/problems", nil))
		var p manifest.Problems
		if err := json.Unmarshal(r.Body.Bytes(), &p); err != nil {
			t.Fatal(err)
		}
		return p
	}
	f.until("the missing Secret is a problem", func() bool { return len(answer().NotAccepted) == 1 })
	p := answer()
	if got := p.NotAccepted[0]; len(p.Problems) != 0 || filepath.Base(got.Position()) != "all.yaml:5" ||
		!strings.HasSuffix(got.Message, "(SecretNotFound)") {
		t.Errorf("got %+v, want SecretNotFound at all.yaml:5 and no rejected manifest", p)
	}
	put(t, dir, "secret.yaml", secret)
	f.until("no problem remains", func() bool { return len(answer().NotAccepted) == 0 })
}
