package standalone

import (
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
)

// namespaceText has a Source and a destination with a Secret each.
func namespaceText(namespace, key, hook string) string {
	return strings.NewReplacer("NAMESPACE", namespace, "KEY", key, "HOOK", hook).Replace(`apiVersion: v1
kind: Secret
metadata: {name: web-key, namespace: NAMESPACE}
stringData: {writeKey: KEY}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: web, namespace: NAMESPACE, labels: {app: shop}}
spec: {writeKeys: [{name: main, secretKeyRef: {name: web-key, key: writeKey}}]}
---
apiVersion: v1
kind: Secret
metadata: {name: hook, namespace: NAMESPACE}
stringData: {sharedSecret: HOOK}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: hook, namespace: NAMESPACE}
spec:
  sourceSelector: {matchLabels: {app: shop}}
  endpoints: [{name: primary, url: "https://hooks.example/NAMESPACE"}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: hook, key: sharedSecret}}]}
`)
}

// compiledNamespaces returns the namespaces that change compiles, and checks that a compilation of all
// namespaces has the same result.
func compiledNamespaces(t *testing.T, c *Control, r *runner, name string, change func()) (compiled []string) {
	t.Helper()
	identity := func(v compile.Verdicts) uintptr { return reflect.ValueOf(v).Pointer() }
	before := map[string]compile.Verdicts{}
	for namespace, v := range c.verdicts {
		before[namespace] = v
	}
	change()
	for namespace, v := range c.verdicts {
		if identity(before[namespace]) != identity(v) {
			compiled = append(compiled, namespace)
		}
		delete(before, namespace)
	}
	for namespace := range before { // It has no objects any more.
		compiled = append(compiled, namespace)
	}
	slices.Sort(compiled)

	verdicts, sets, revisions := map[string]compile.Verdicts{}, r.sets, map[string]string{}
	for namespace, v := range c.verdicts {
		verdicts[namespace] = v
	}
	for namespace, live := range r.configs {
		revisions[namespace] = live.Revision
	}
	clear(c.compiled)
	c.apply()
	if diff := cmp.Diff(c.verdicts, verdicts); diff != "" {
		t.Errorf("%s: verdicts, compared with a compilation of all namespaces (-all +changed):\n%s", name, diff)
	}
	if r.sets != sets {
		t.Errorf("%s: a compilation of all namespaces gave the dispatcher %d configs, want none", name, r.sets-sets)
	}
	for namespace, live := range r.configs {
		if c.sent[namespace].Revision != live.Revision || revisions[namespace] != live.Revision {
			t.Errorf("%s: revision of namespace %s: got %s, want %s", name, namespace, revisions[namespace], live.Revision)
		}
	}
	return compiled
}

// An edit compiles only the namespaces that it affects, and the result equals a compilation of all.
func TestApplyCompilesAffectedNamespaces(t *testing.T) {
	dir, r := t.TempDir(), &runner{}
	c := New(Options{Dir: dir, Sink: r, Changes: r.changes, Logger: slog.New(slog.DiscardHandler)})
	load := func() {
		t.Helper()
		marks, err := c.marks()
		if err != nil {
			t.Fatal(err)
		}
		c.load(marks)
	}
	write := func(file, text string) func() {
		return func() {
			t.Helper()
			put(t, dir, file, text)
			load()
		}
	}
	const jobs = `apiVersion: posthorn.dev/v1beta1
kind: Redelivery
metadata: {name: again, namespace: c}
spec: {destinationRef: {name: hook}}
---
apiVersion: posthorn.dev/v1beta1
kind: Audience
metadata: {name: vip, namespace: d}
spec: {sourceRef: {name: web}, key: first_name}
`
	a, b, d := namespaceText("a", "key-a", "hook-a"), namespaceText("b", "key-b", "hook-b"), namespaceText("d", "key-d", "hook-d")
	change := func(kind, namespace, name string, edit func(compile.Object)) func() {
		return func() {
			t.Helper()
			o := c.store.objects[id{kind, namespace, name}]
			if o == nil {
				t.Fatalf("%s %s/%s does not exist", kind, namespace, name)
			}
			next := o.resource.DeepCopyObject().(compile.Object)
			edit(next)
			o.resource = next
			c.apply()
		}
	}
	for _, step := range []struct {
		name string
		do   func()
		want []string
	}{
		{"start", func() {
			put(t, dir, "a.yaml", a)
			put(t, dir, "b.yaml", b)
			put(t, dir, "shared.yaml", namespaceText("c", "key-c", "hook-c")+"---\n"+d)
			put(t, dir, "jobs.yaml", jobs)
			load()
		}, []string{"a", "b", "c", "d"}},
		{"nothing", load, nil},
		{"an earlier creation", func() {
			o := c.store.objects[id{"Source", "d", "web"}]
			o.Created = seconds(time.Now().Add(-time.Hour))
			o.setServerFields(nil, c.store.nextVersion())
			c.apply()
		}, []string{"d"}},
		{"a destination", write("a.yaml", strings.Replace(a, "primary", "edited", 1)), []string{"a"}},
		{"a signing secret", write("b.yaml", namespaceText("b", "key-b", "edited")), []string{"b"}},
		{"a comment", write("b.yaml", "# a comment\n"+namespaceText("b", "key-b", "edited")), nil},
		{"an invalid manifest", write("b.yaml", strings.Replace(b, "https://", "ftp://", 1)), []string{"b"}}, // Its Secret is the first one.
		{"one namespace of a file", write("shared.yaml", namespaceText("c", "key-c", "edited")+"---\n"+d), []string{"c"}},
		{"labels", write("a.yaml", strings.Replace(a, "app: shop}}\nspec", "app: other}}\nspec", 1)), []string{"a"}},
		{"a key of another namespace", write("b.yaml", namespaceText("b", "key-a", "hook-b")), []string{"b"}},
		{"the owner removes the key", write("a.yaml", namespaceText("a", "key-new", "hook-a")), []string{"a", "b"}},
		{"another key of the former owner", write("a.yaml", namespaceText("a", "key-newer", "hook-a")), []string{"a"}},
		{"a key of an older Source of a later namespace", write("a.yaml", namespaceText("a", "key-d", "hook-a")), []string{"a"}},
		{"a key that another namespace took over", write("a.yaml", a), []string{"a", "b"}},
		{"the removal of a Secret", write("a.yaml", strings.Replace(a, "name: hook, namespace: a}\nstringData",
			"name: unused, namespace: a}\nstringData", 1)), []string{"a"}},
		{"the removal of a namespace", func() {
			if err := os.Remove(filepath.Join(dir, "b.yaml")); err != nil {
				t.Fatal(err)
			}
			load()
		}, []string{"b"}},
		{"the namespace again", write("b.yaml", b), []string{"b"}},
		{"a status that the compiler does not read", change("WebhookDestination", "a", "hook", func(o compile.Object) {
			o.(*v1beta1.WebhookDestination).Status.ObservedGeneration++
		}), nil},
		{"the start of a run", change("Redelivery", "c", "again", func(o compile.Object) {
			now := metav1.NewTime(time.Now())
			o.(*v1beta1.Redelivery).Status.StartTime = &now
		}), []string{"c"}},
	} {
		compiled := compiledNamespaces(t, c, r, step.name, step.do)
		if diff := cmp.Diff(step.want, compiled); diff != "" {
			t.Errorf("%s: compiled namespaces (-want +got):\n%s", step.name, diff)
		}
	}
}

// A config that the dispatcher does not have is sent, although its objects have not changed.
func TestApplySendsAMissingConfig(t *testing.T) {
	dir, r := t.TempDir(), &runner{}
	c := New(Options{Dir: dir, Sink: r, Changes: r.changes, Logger: slog.New(slog.DiscardHandler)})
	put(t, dir, "a.yaml", namespaceText("a", "key-a", "hook-a"))
	if _, err := c.start(); err != nil {
		t.Fatal(err)
	}
	delete(c.sent, "a")
	c.apply()
	if r.sets != 2 {
		t.Errorf("configs of a namespace that the dispatcher does not have: got %d, want 2", r.sets)
	}
	if got := r.configs["a"]; len(got.Destinations) != 1 || got.Destinations[0].State != liveconfig.Active {
		t.Errorf("destinations: got %v, want an active one", got.Destinations)
	}
}
