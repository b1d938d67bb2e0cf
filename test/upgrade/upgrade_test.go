// Package upgrade tests the upgrade of stored objects of release 0.2.0, in the order of
// docs/upgrading.md, on a real API server: first the new CRDs, then the migrated manifests.
// It also tests the rollback.
package upgrade

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/api/migrate"
	"github.com/posthorn/posthorn/test/env"
)

const (
	oldCRDs = "../crds/testdata/0.2.0"
	newCRDs = "../../charts/posthorn/files/crds"
	kinds   = "sources.posthorn.dev,webhookdestinations.posthorn.dev,audiences.posthorn.dev,redeliveries.posthorn.dev,deletionrequests.posthorn.dev"
)

// Methods to apply a manifest. Each file has a namespace for each method.
const (
	clientSide = "client"
	serverSide = "server"
	replaced   = "replaced"
	exported   = "exported"
	fresh      = "fresh" // without stored objects
)

func TestUpgrade(t *testing.T) {
	env.Need(t)
	server, err := env.Start(func(e *envtest.Environment) { e.CRDDirectoryPaths = []string{oldCRDs} })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	kubectl := func(stdin string, args ...string) string {
		t.Helper()
		out, err := server.Kubectl(stdin, args...)
		if err != nil {
			t.Fatalf("kubectl %s: got error %v, want none", strings.Join(args, " "), err)
		}
		return out
	}
	olds, news := files(t)

	// Release 0.2.0, with jobs, one of which has finished.
	var namespaces []unstructured.Unstructured
	for name := range olds {
		for _, method := range []string{clientSide, serverSide, replaced, exported, fresh} {
			namespaces = append(namespaces, unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": name + "-" + method}}})
		}
	}
	kubectl(list(t, namespaces), "create", "-f", "-")
	methods := []string{clientSide, serverSide, replaced, exported}
	for _, method := range methods {
		kubectl(list(t, in(olds, method)), "apply", "-f", "-")
	}
	kubectl("", "patch", "redelivery/crm-after-the-fix", "--namespace=sample-redelivery-"+exported, "--subresource=status", "--type=merge", "-p", `{"status":{"phase":"Succeeded"}}`)
	before := specs(t, kubectl)
	export := kubectl("", "get", kinds, "--all-namespaces", "-o", "yaml")

	// The new CRDs. The API server prunes the stored objects when it reads them, and still lists
	// them.
	kubectl("", "apply", "--server-side", "--force-conflicts", "-f", newCRDs)
	kubectl("", "wait", "--for=condition=Established", "crd", "--all")
	if got := len(specs(t, kubectl)); got != len(before) {
		t.Fatalf("objects under the new CRDs: got %d, want %d", got, len(before))
	}

	// The specs of jobs are immutable; docs/upgrading.md deletes them first.
	kubectl("", "delete", "redeliveries.posthorn.dev,deletionrequests.posthorn.dev", "--all", "--all-namespaces")
	kubectl(list(t, in(news, fresh)), "create", "-f", "-")
	kubectl(list(t, in(news, clientSide)), "apply", "-f", "-")
	kubectl(list(t, in(news, serverSide)), "apply", "--server-side", "--force-conflicts", "-f", "-")
	kubectl(list(t, slices.DeleteFunc(in(news, replaced), isJob)), "replace", "-f", "-")
	kubectl(list(t, slices.DeleteFunc(in(news, replaced), func(o unstructured.Unstructured) bool { return !isJob(o) })), "create", "-f", "-")
	kubectl(list(t, fromExport(t, export)), "apply", "--server-side", "--force-conflicts", "-f", "-")

	// The specs equal those of new objects, for every method.
	after := specs(t, kubectl)
	for id, want := range after {
		file, ok := strings.CutSuffix(id.namespace, "-"+fresh)
		if !ok {
			continue
		}
		for _, method := range methods {
			got, stored := after[object{id.kind, file + "-" + method, id.name}]
			if file == "sample-redelivery" && method == exported {
				if stored {
					t.Errorf("%s %s: got a new object for a finished one, want none", id.kind, id.name)
				}
				continue
			}
			if method == exported { // An export has the defaults of release 0.2.0.
				delete(got, "ttlSecondsAfterFinished")
				want := withoutTTL(want)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%s %s/%s, %s (-new +migrated):\n%s", id.kind, file, id.name, method, diff)
				}
				continue
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s %s/%s, %s (-new +migrated):\n%s", id.kind, file, id.name, method, diff)
			}
		}
	}

	// The rollback: the CRDs and the manifests of release 0.2.0.
	kubectl("", "apply", "--server-side", "--force-conflicts", "-f", oldCRDs)
	kubectl("", "wait", "--for=condition=Established", "crd", "--all")
	kubectl("", "delete", "redeliveries.posthorn.dev,deletionrequests.posthorn.dev", "--all", "--all-namespaces")
	for _, method := range methods {
		kubectl(list(t, in(olds, method)), "apply", "--server-side", "--force-conflicts", "-f", "-")
	}
	back := specs(t, kubectl)
	for id, want := range before {
		if diff := cmp.Diff(want, back[id]); diff != "" {
			t.Errorf("%v after the rollback (-before +after):\n%s", id, diff)
		}
	}
}

// files reads and migrates the manifests of release 0.2.0. It returns both by file name.
func files(t *testing.T) (olds, news map[string][]unstructured.Unstructured) {
	t.Helper()
	olds, news = map[string][]unstructured.Unstructured{}, map[string][]unstructured.Unstructured{}
	paths, err := filepath.Glob("../../api/migrate/testdata/*.in.yaml")
	if err != nil || len(paths) < 30 {
		t.Fatalf("files: got %d and error %v, want at least 30", len(paths), err)
	}
	for _, path := range paths {
		name := strings.ReplaceAll(strings.TrimSuffix(filepath.Base(path), ".in.yaml"), "_", "-")
		if slices.Contains([]string{"exported", "finished", "pruned", "comments"}, name) {
			continue // A cluster of release 0.2.0 does not have these objects.
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		migrated, _, err := migrate.File(text)
		if err != nil {
			t.Fatalf("migrating %s: got error %v, want none", path, err)
		}
		olds[name], news[name] = unique(parse(t, text)), unique(parse(t, migrated))
	}
	return olds, news
}

func parse(t *testing.T, text []byte) (objects []unstructured.Unstructured) {
	t.Helper()
	for _, document := range regexp.MustCompile(`(?m)^---.*$`).Split(string(text), -1) {
		var o unstructured.Unstructured
		if err := yaml.Unmarshal([]byte(document), &o.Object); err != nil {
			t.Fatalf("parsing a document: got error %v, want none; the document:\n%s", err, document)
		}
		if o.Object != nil {
			objects = append(objects, o)
		}
	}
	return objects
}

// unique keeps the first object of each kind and name.
func unique(objects []unstructured.Unstructured) []unstructured.Unstructured {
	seen := map[object]bool{}
	return slices.DeleteFunc(objects, func(o unstructured.Unstructured) bool {
		id := object{o.GetKind(), "", o.GetName()}
		defer func() { seen[id] = true }()
		return seen[id]
	})
}

// in returns the objects of all files, each in the namespace of its file for a method.
func in(files map[string][]unstructured.Unstructured, method string) (objects []unstructured.Unstructured) {
	for name, all := range files {
		for _, o := range all {
			o := *o.DeepCopy()
			o.SetNamespace(name + "-" + method)
			objects = append(objects, o)
		}
	}
	return objects
}

// fromExport migrates an export, and returns its objects in the namespaces of this method.
func fromExport(t *testing.T, export string) (objects []unstructured.Unstructured) {
	t.Helper()
	text, notes, err := migrate.File([]byte(export))
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range notes {
		if n.Problem {
			t.Errorf("migration note: got the problem %v, want none", n)
		}
	}
	var all unstructured.UnstructuredList
	if err := yaml.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	for _, o := range all.Items {
		if strings.HasSuffix(o.GetNamespace(), "-"+exported) {
			objects = append(objects, o)
		}
	}
	if len(objects) < 30 {
		t.Fatalf("objects of the export: got %d, want at least 30", len(objects))
	}
	return objects
}

func isJob(o unstructured.Unstructured) bool {
	return o.GetKind() == "Redelivery" || o.GetKind() == "DeletionRequest"
}

func list(t *testing.T, objects []unstructured.Unstructured) string {
	t.Helper()
	items := make([]any, len(objects))
	for i, o := range objects {
		items[i] = o.Object
	}
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

type object struct{ kind, namespace, name string }

func (o object) String() string { return fmt.Sprintf("%s %s/%s", o.kind, o.namespace, o.name) }

// specs reads the specs of all objects.
func specs(t *testing.T, kubectl func(string, ...string) string) map[object]map[string]any {
	t.Helper()
	var all unstructured.UnstructuredList
	if err := json.Unmarshal([]byte(kubectl("", "get", kinds, "--all-namespaces", "-o", "json")), &all); err != nil {
		t.Fatal(err)
	}
	found := map[object]map[string]any{}
	for _, o := range all.Items {
		spec, _, err := unstructured.NestedMap(o.Object, "spec")
		if err != nil {
			t.Fatal(err)
		}
		found[object{o.GetKind(), o.GetNamespace(), o.GetName()}] = spec
	}
	return found
}

func withoutTTL(spec map[string]any) map[string]any {
	spec = (&unstructured.Unstructured{Object: spec}).DeepCopy().Object
	delete(spec, "ttlSecondsAfterFinished")
	return spec
}
