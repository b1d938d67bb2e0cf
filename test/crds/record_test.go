package crds

import (
	"bytes"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	utilversion "k8s.io/apimachinery/pkg/util/version"
	"sigs.k8s.io/yaml"
)

// tree has the CRDs of both channels, and records has a folder like it for each recorded version.
var tree, records = os.DirFS("../../config/crd"), os.DirFS("testdata")

// A version has one API: the CRDs are those that are recorded for the version in Chart.yaml.
func TestRecord(t *testing.T) {
	version := treeVersion(t)
	record, err := fs.Sub(records, version)
	if err != nil {
		t.Fatal(err)
	}
	fix := "run make generate"
	if isRelease(version) {
		fix = "these are no longer the CRDs of release " + version + ": set the next version in charts/posthorn/Chart.yaml, such as 9.9.0-dev, and run make generate"
	}
	for _, file := range unequal(record, tree) {
		t.Errorf("%s differs from testdata/%s; %s", file, version, fix)
	}
}

// The standard channel breaks no object and no client of the last release. Undo a change that it finds: it needs a new
// version of the API (docs/versioning.md).
func TestBreakingChanges(t *testing.T) {
	last := lastRelease(recordedVersions(t), treeVersion(t))
	if last == "" {
		t.Skip("there is no release before this version")
	}
	record, err := fs.Sub(records, last)
	if err != nil {
		t.Fatal(err)
	}
	now := crdsOf(t, tree, "standard")
	for kind, before := range crdsOf(t, record, "standard") {
		if now[kind] == nil {
			t.Errorf("%s: the kind of release %s is removed", kind, last)
			continue
		}
		for _, change := range Breaking(before, now[kind]) {
			t.Errorf("%s, since release %s", change, last)
		}
	}
}

// The experimental CRDs accept each object of the standard ones, and docs/versioning.md lists the fields that only they have.
func TestExperimentalFields(t *testing.T) {
	page, err := os.ReadFile("../../docs/versioning.md")
	if err != nil {
		t.Fatal(err)
	}
	standard := crdsOf(t, tree, "standard")
	for kind, experimental := range crdsOf(t, tree, "experimental") {
		for _, change := range Breaking(standard[kind], experimental) {
			if !strings.Contains(change, ": new rule: ") { // About an experimental field.
				t.Errorf("the experimental CRD breaks objects of the standard one: %s", change)
			}
		}
		for _, change := range Breaking(experimental, standard[kind]) {
			field := strings.TrimSuffix(strings.TrimPrefix(change, kind+" "), ": removed")
			if !strings.Contains(string(page), "`"+field+"`") {
				t.Errorf("docs/versioning.md does not list the experimental field `%s` of %s", field, kind)
			}
		}
	}
	// A field with another text than the marker would be standard by accident.
	for kind, crd := range standard {
		each("", asJSON(crd.Spec.Versions[0].Schema.OpenAPIV3Schema), func(path string, s schema) {
			if text, _ := s["description"].(string); strings.Contains(strings.ToLower(text), "experimental") {
				t.Errorf("%s %s: begin the description with the marker of config/crd, or do not call the field experimental", kind, path)
			}
		})
	}
}

func TestUnequal(t *testing.T) {
	files := func(text string) fstest.MapFS { return fstest.MapFS{"standard/a.yaml": {Data: []byte(text)}} }
	for _, test := range []struct {
		name         string
		record, tree fs.FS
		want         string
	}{
		{"equal", files("a"), files("a"), ""},
		{"changed", files("a"), files("b"), "standard/a.yaml"},
		{"not recorded", fstest.MapFS{}, files("a"), "standard/a.yaml"},
		{"removed", files("a"), fstest.MapFS{}, "standard/a.yaml"},
	} {
		if got := strings.Join(unequal(test.record, test.tree), " "); got != test.want {
			t.Errorf("%s: got %q, want %q", test.name, got, test.want)
		}
	}
}

func TestLastRelease(t *testing.T) {
	for _, test := range []struct{ recorded, version, want string }{
		{"0.3.0-dev", "0.3.0-dev", ""},
		{"0.3.0", "0.3.0", ""},
		{"0.3.0 0.4.0-dev", "0.4.0-dev", "0.3.0"},
		{"0.3.0 0.10.0 0.9.1", "0.11.0-dev", "0.10.0"},
		{"0.3.0 0.10.0 0.9.1", "0.9.2", "0.9.1"},
	} {
		if got := lastRelease(strings.Fields(test.recorded), test.version); got != test.want {
			t.Errorf("%s of %s: got %q, want %q", test.version, test.recorded, got, test.want)
		}
	}
}

func isRelease(version string) bool { return !strings.Contains(version, "-") }

// lastRelease returns the highest recorded release before a version; "" if there is none.
func lastRelease(recorded []string, version string) (last string) {
	for _, v := range recorded {
		if isRelease(v) && utilversion.MustParseSemantic(v).LessThan(utilversion.MustParseSemantic(version)) &&
			(last == "" || utilversion.MustParseSemantic(last).LessThan(utilversion.MustParseSemantic(v))) {
			last = v
		}
	}
	return last
}

// unequal returns the names of the CRDs that differ between two trees.
func unequal(record, tree fs.FS) (names []string) {
	for _, files := range []fs.FS{record, tree} {
		found, _ := fs.Glob(files, "*/*.yaml") // The pattern is valid.
		names = append(names, found...)
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(name string) bool {
		a, errA := fs.ReadFile(record, name)
		b, errB := fs.ReadFile(tree, name)
		return errA == nil && errB == nil && bytes.Equal(a, b)
	})
}

func recordedVersions(t *testing.T) (versions []string) {
	t.Helper()
	entries, err := fs.ReadDir(records, ".")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		versions = append(versions, e.Name())
	}
	return versions
}

func treeVersion(t *testing.T) string {
	t.Helper()
	var chart struct{ Version string }
	data, err := os.ReadFile("../../charts/posthorn/Chart.yaml")
	if err == nil {
		err = yaml.Unmarshal(data, &chart)
	}
	if err != nil || chart.Version == "" {
		t.Fatalf("the version in Chart.yaml: got %q and error %v, want one", chart.Version, err)
	}
	return chart.Version
}

// crdsOf returns the CRDs of a channel by kind.
func crdsOf(t *testing.T, files fs.FS, channel string) map[string]*apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	names, err := fs.Glob(files, path.Join(channel, "*.yaml"))
	if err != nil || len(names) < 5 {
		t.Fatalf("CRDs of the channel %s: got %d and error %v, want 5", channel, len(names), err)
	}
	found := map[string]*apiextensionsv1.CustomResourceDefinition{}
	for _, name := range names {
		crd := new(apiextensionsv1.CustomResourceDefinition)
		data, err := fs.ReadFile(files, name)
		if err == nil {
			err = yaml.UnmarshalStrict(data, crd)
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		found[crd.Spec.Names.Kind] = crd
	}
	return found
}
