package crds

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

func TestBreaking(t *testing.T) {
	const base = `{type: object, required: [a], properties: {
		a: {type: string, enum: [p, q], maxLength: 10, minLength: 1},
		b: {type: integer, minimum: 1, maximum: 9, default: 5},
		c: {type: array, maxItems: 4, items: {type: object, properties: {d: {type: string}}}},
		e: {type: object, additionalProperties: {type: string, maxLength: 3}}}}`
	for _, test := range []struct {
		name, old, new string
		want           []string
	}{
		{name: "no change", old: "", new: ""},
		{name: "a field is removed", old: "properties: {d: {type: string}}", new: "properties: {}", want: []string{"Thing c[].d: removed"}},
		{name: "a field is added", old: "d: {type: string}", new: "d: {type: string}, f: {type: string}"},
		{name: "a field becomes required", old: "required: [a]", new: "required: [a, c]", want: []string{"Thing c: required"}},
		{name: "a field with a default becomes required", old: "required: [a]", new: "required: [a, b]"},
		{name: "a field becomes optional", old: "required: [a], ", new: ""},
		{name: "another type", old: "a: {type: string, enum: [p, q], maxLength: 10, minLength: 1}", new: "a: {type: object}", want: []string{`Thing a: type "object", was "string"`}},
		{name: "an enum loses a value", old: "[p, q]", new: "[p]", want: []string{`Thing a: enum lost "q"`}},
		{name: "an enum gains a value", old: "[p, q]", new: "[p, q, r]"},
		{name: "a new enum", old: "d: {type: string}", new: "d: {type: string, enum: [x]}", want: []string{"Thing c[].d: new enum"}},
		{name: "a lower upper bound", old: "maxLength: 10", new: "maxLength: 9", want: []string{"Thing a: maxLength 9, was 10"}},
		{name: "a higher upper bound", old: "maxLength: 10", new: "maxLength: 11"},
		{name: "a new upper bound", old: "d: {type: string}", new: "d: {type: string, maxLength: 3}",
			want: []string{"Thing c[].d: maxLength 3, was none"}},
		{name: "a higher lower bound", old: "minimum: 1", new: "minimum: 2", want: []string{"Thing b: minimum 2, was 1"}},
		{name: "a lower lower bound", old: "minimum: 1", new: "minimum: 0"},
		{name: "fewer items", old: "maxItems: 4", new: "maxItems: 3", want: []string{"Thing c: maxItems 3, was 4"}},
		{name: "shorter values of a map", old: "maxLength: 3", new: "maxLength: 2", want: []string{"Thing e{}: maxLength 2, was 3"}},
		{name: "a new pattern", old: "d: {type: string}", new: "d: {type: string, pattern: ^a}",
			want: []string{`Thing c[].d: pattern "^a", was none`}},
		{name: "a new rule", old: "d: {type: string}", new: "d: {type: string, x-kubernetes-validations: [{rule: self == 'a'}]}", want: []string{"Thing c[].d: new rule: self == 'a'"}},
		{name: "another default", old: "default: 5", new: "default: 6", want: []string{"Thing b: default 6, was 5"}},
		{name: "another list type", old: "maxItems: 4", new: "maxItems: 4, x-kubernetes-list-type: set",
			want: []string{`Thing c: x-kubernetes-list-type "set", was none`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if !strings.Contains(base, test.old) {
				t.Fatalf("the schema has no %q", test.old)
			}
			got := Breaking(thing(t, base), thing(t, strings.Replace(base, test.old, test.new, 1)))
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("breaking changes (-want +got):\n%s", diff)
			}
		})
	}
	t.Run("a version is not served", func(t *testing.T) {
		now := thing(t, base)
		now.Spec.Versions[0].Name = "v2"
		if diff := cmp.Diff([]string{"Thing: version v1 is not served"}, Breaking(thing(t, base), now)); diff != "" {
			t.Errorf("breaking changes (-want +got):\n%s", diff)
		}
	})
}

func thing(t *testing.T, schema string) *apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	crd := &apiextensionsv1.CustomResourceDefinition{}
	crd.Spec.Names.Kind = "Thing"
	version := apiextensionsv1.CustomResourceDefinitionVersion{Name: "v1", Served: true,
		Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{}}}
	if err := yaml.UnmarshalStrict([]byte(strings.ReplaceAll(schema, "\t", " ")), version.Schema.OpenAPIV3Schema); err != nil {
		t.Fatal(err)
	}
	crd.Spec.Versions = []apiextensionsv1.CustomResourceDefinitionVersion{version}
	return crd
}
