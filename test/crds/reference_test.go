package crds

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/standalone"
)

// referenceDir has an example of each kind with every field.
const referenceDir = "../../config/samples/reference"

// The reference samples have every field of their kind, and no other. To add a field, give it a value in the sample; then
// `make generate` writes its comment. If another field excludes it, give it a value in a further document of the file.
func TestReferenceSamples(t *testing.T) {
	crds := crdsOf(t, tree, "experimental")
	files, err := filepath.Glob(filepath.Join(referenceDir, "*.yaml"))
	if err != nil || len(files) != len(crds) {
		t.Errorf("samples in %s: got %d and error %v, want one for each of %d kinds", referenceDir, len(files), err, len(crds))
	}
	for _, file := range files {
		objects := documents(t, file)
		crd := crds[objects[0].(schema)["kind"].(string)]
		root := asJSON(crd.Spec.Versions[0].Schema.OpenAPIV3Schema)
		for _, field := range []string{"apiVersion", "kind", "metadata"} {
			delete(asSchema(root["properties"]), field)
		}
		missing, unknown := coverage("", root, objects)
		for _, path := range missing {
			t.Errorf("%s has no value for %s: add one, then run make generate", file, path)
		}
		for _, path := range unknown {
			t.Errorf("%s has %s, which %s does not have: remove or rename it, then run make generate", file, path, crd.Spec.Names.Kind)
		}
		validator, _, err := validation.NewSchemaValidator(internal(t, crd).Spec.Validation.OpenAPIV3Schema)
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range objects { // With the status, which Compile removes.
			for _, err := range validation.ValidateCustomResource(nil, object, validator) {
				t.Errorf("%s: %v", file, err)
			}
		}
	}
	compiled, err := standalone.Compile(referenceDir, nil, compile.Policy{})
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range compiled.Problems {
		t.Errorf("the API server rejects the sample: %v", problem)
	}
}

func TestCoverage(t *testing.T) {
	s := schema{"properties": schema{
		"a": schema{"type": "string"}, "b": schema{"items": schema{"properties": schema{"c": schema{}, "d": schema{}}}}}}
	missing, unknown := coverage("", s, []any{schema{"b": []any{schema{"c": 1}, schema{"e": 2}}}})
	slices.Sort(missing)
	if !slices.Equal(missing, []string{"a", "b[].d"}) || !slices.Equal(unknown, []string{"b[].e"}) {
		t.Errorf("got missing %q and unknown %q, want a, b[].d and b[].e", missing, unknown)
	}
}

// coverage returns the fields of a schema that none of the values has, and the fields of the values that it does not have.
func coverage(path string, s schema, values []any) (missing, unknown []string) {
	properties := asSchema(s["properties"])
	for name, property := range properties {
		of := values[:0:0]
		for _, v := range values {
			if value, ok := asSchema(v)[name]; ok {
				of = append(of, value)
			}
		}
		if len(of) == 0 {
			missing = append(missing, join(path, name))
			continue
		}
		m, u := coverage(join(path, name), asSchema(property), of)
		missing, unknown = append(missing, m...), append(unknown, u...)
	}
	if items := asSchema(s["items"]); items != nil {
		var entries []any
		for _, v := range values {
			entries = append(entries, asList(v)...)
		}
		return coverage(path+"[]", items, entries)
	}
	for _, v := range values {
		for name := range asSchema(v) {
			if properties != nil && properties[name] == nil && (path != "" || name != "apiVersion" && name != "kind" && name != "metadata") {
				unknown = append(unknown, join(path, name))
			}
		}
	}
	return missing, unknown
}

// documents returns the objects in a file.
func documents(t *testing.T, file string) (objects []any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		var object schema
		if err := decoder.Decode(&object); errors.Is(err, io.EOF) {
			return objects
		} else if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		objects = append(objects, object)
	}
}
