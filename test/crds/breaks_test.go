package crds

import (
	"maps"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

// change changes a schema in place, and reports whether the schema has what it changes.
type change struct {
	name  string
	apply func(schema) bool
}

// set sets a keyword in the schemas of a type.
func set(of, key string, value any) change {
	return change{"set " + key, func(s schema) bool {
		_, has := s[key]
		if has || s["type"] != of {
			return false
		}
		s[key] = value
		return true
	}}
}

// alter replaces the value of a keyword.
func alter[T any](name, key string, f func(T) any) change {
	return change{name + " " + key, func(s schema) bool {
		value, has := s[key].(T)
		if has {
			s[key] = f(value)
		}
		return has
	}}
}

func without(key string) change {
	return change{"remove " + key, func(s schema) bool {
		_, has := s[key]
		delete(s, key)
		return has
	}}
}

func plus(by float64) func(float64) any { return func(v float64) any { return v + by } }

func appended(entry any) func([]any) any {
	return func(list []any) any { return slices.Concat(list, []any{entry}) }
}

func tail(list []any) any { return list[1:] }

var (
	rule    = schema{"rule": "false", "message": "never"}
	uppers  = []string{"maxLength", "maxItems", "maxProperties", "maximum"}
	lowers  = []string{"minLength", "minItems", "minProperties", "minimum"}
	another = func(any) any { return "another" }
	// breaks are the kinds of breaking changes.
	breaks = []change{
		without("properties"), {"require a new field", func(s schema) bool {
			fields, has := s["properties"].(schema)
			if has {
				s["properties"], s["required"] = with(fields, "new", schema{"type": "string"}), appended("new")(asList(s["required"]))
			}
			return has
		}}, {"require a field", func(s schema) bool {
			for name, field := range asSchema(s["properties"]) {
				if !slices.Contains(asList(s["required"]), any(name)) && asSchema(field)["default"] == nil {
					s["required"] = appended(name)(asList(s["required"]))
					return true
				}
			}
			return false
		}}, {"remove a field", func(s schema) bool {
			fields, has := s["properties"].(schema)
			if has {
				s["properties"] = schema{}
			}
			return has && len(fields) > 0
		}}, {"replace a rule", func(s schema) bool {
			rules, has := s["x-kubernetes-validations"].([]any)
			if has {
				s["x-kubernetes-validations"] = append([]any{rule}, rules[1:]...)
			}
			return has
		}},
		alter("change", "type", another), alter("lose a value of", "enum", tail), set("string", "enum", []any{"a"}),
		set("string", "pattern", "^a"), alter("change", "pattern", another), set("string", "format", "uuid"), alter("change", "format", another),
		set("string", "maxLength", 1e6), set("string", "minLength", 1.), set("array", "maxItems", 1e6), set("array", "minItems", 1.),
		set("object", "maxProperties", 1e6), set("object", "minProperties", 1.),
		set("integer", "maximum", 1e12), set("integer", "minimum", -1e12),
		set("object", "x-kubernetes-validations", []any{rule}), set("string", "x-kubernetes-validations", []any{rule}),
		alter("add to", "x-kubernetes-validations", appended(rule)),
		without("default"), alter("change", "default", another), set("array", "x-kubernetes-list-type", "set"),
		alter("change", "x-kubernetes-list-type", another), without("x-kubernetes-list-type"),
		alter("add to", "x-kubernetes-list-map-keys", appended("other")), without("x-kubernetes-list-map-keys"),
		without("items"), without("additionalProperties"), set("object", "additionalProperties", false),
		set("string", "nullable", true), without("nullable"), without("x-kubernetes-int-or-string"), set("array", "uniqueItems", true),
		set("integer", "multipleOf", 2.), set("integer", "exclusiveMinimum", true), set("integer", "exclusiveMaximum", true),
		set("string", "not", schema{"enum": []any{"a"}}), set("object", "allOf", []any{schema{}}), set("object", "anyOf", []any{schema{}}),
		set("object", "oneOf", []any{schema{}}), set("object", "x-kubernetes-map-type", "atomic"), without("x-kubernetes-map-type"),
		set("object", "x-kubernetes-preserve-unknown-fields", true), set("object", "x-kubernetes-embedded-resource", true),
	}
	// relaxations are changes that break nothing.
	relaxations = []change{
		{"add a field", func(s schema) bool {
			fields, has := s["properties"].(schema)
			if has {
				s["properties"] = with(fields, "new", schema{"type": "string", "maxLength": 3.})
			}
			return has
		}}, {"change the message of a rule", func(s schema) bool {
			rules, has := s["x-kubernetes-validations"].([]any)
			if has {
				s["x-kubernetes-validations"] = append([]any{with(rules[0].(schema), "message", "another")}, rules[1:]...)
			}
			return has
		}},
		without("required"), without("enum"), alter("add to", "enum", appended("new")), without("pattern"), without("format"),
		without("x-kubernetes-validations"), without("description"), alter("change", "description", another), set("string", "default", "a"),
	}
)

func init() {
	for _, bound := range uppers {
		breaks = append(breaks, alter("lower", bound, plus(-1)))
		relaxations = append(relaxations, alter("raise", bound, plus(1)), without(bound))
	}
	for _, bound := range lowers {
		breaks = append(breaks, alter("raise", bound, plus(1)))
		relaxations = append(relaxations, alter("lower", bound, plus(-1)), without(bound))
	}
}

// with returns a schema with another value of a key.
func with(s schema, key string, value any) schema {
	out := maps.Clone(s)
	out[key] = value
	return out
}

// Each kind of breaking change is found at every place of every CRD where it is possible, and no change that breaks nothing is.
func TestEachBreakIsFound(t *testing.T) {
	applied := map[string]int{}
	for _, crd := range crdsOf(t, tree, "experimental") {
		kind, schemaOf := crd.Spec.Names.Kind, crd.Spec.Versions[0].Schema.OpenAPIV3Schema
		before, root := asJSON(schemaOf), asJSON(schemaOf)
		each("", root, func(path string, s schema) {
			for _, c := range breaks {
				if found, ok := try(kind, before, root, s, c); ok {
					applied[c.name]++
					if len(found) == 0 || !strings.HasPrefix(found[0], strings.TrimSuffix(kind+" "+path, " ")) {
						t.Errorf("%s %s: %s: got %q, want a breaking change at this field", kind, path, c.name, found)
					}
				}
			}
			for _, c := range relaxations {
				if found, ok := try(kind, before, root, s, c); ok {
					applied[c.name]++
					if len(found) > 0 {
						t.Errorf("%s %s: %s: got %q, want no breaking change", kind, path, c.name, found)
					}
				}
			}
		})
	}
	for _, name := range []string{"require a field", "remove a field", "lower maxLength", "raise minLength", "lose a value of enum",
		"set pattern", "lower maxItems", "lower maximum", "raise minimum", "change default",
		"add to x-kubernetes-list-map-keys", "add to x-kubernetes-validations"} {
		if applied[name] == 0 {
			t.Errorf("%s: tried at no field", name)
		}
	}
	t.Logf("%d changes tried", sum(applied))
}

func sum(counts map[string]int) (n int) {
	for _, count := range counts {
		n += count
	}
	return n
}

// try compares a schema with root, which is equal, after a change of a schema in root, which it undoes.
func try(kind string, before, root, s schema, c change) (found []string, ok bool) {
	original := maps.Clone(s)
	defer func() {
		clear(s)
		maps.Copy(s, original)
	}()
	if !c.apply(s) {
		return nil, false
	}
	comparison := &comparison{kind: kind}
	comparison.schema("", before, root)
	return comparison.found, true
}

// each calls f with each schema in a schema, and its path.
func each(path string, s schema, f func(string, schema)) {
	f(path, s)
	for name, field := range asSchema(s["properties"]) {
		each(join(path, name), asSchema(field), f)
	}
	for key, suffix := range map[string]string{"items": "[]", "additionalProperties": "{}"} {
		if entry := asSchema(s[key]); entry != nil {
			each(path+suffix, entry, f)
		}
	}
}

// The parts of a CRD beside its schema are compared too.
func TestBreaksBesideTheSchema(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*apiextensionsv1.CustomResourceDefinition)
		want   string
	}{
		"scope":       {func(c *apiextensionsv1.CustomResourceDefinition) { c.Spec.Scope = "Cluster" }, `Source: scope "Cluster", was "Namespaced"`},
		"plural":      {func(c *apiextensionsv1.CustomResourceDefinition) { c.Spec.Names.Plural = "srcs" }, `Source: plural "srcs", was "sources"`},
		"short name":  {func(c *apiextensionsv1.CustomResourceDefinition) { c.Spec.Names.ShortNames = nil }, "Source: short name psrc removed"},
		"category":    {func(c *apiextensionsv1.CustomResourceDefinition) { c.Spec.Names.Categories = nil }, "Source: category posthorn removed"},
		"version":     {func(c *apiextensionsv1.CustomResourceDefinition) { c.Spec.Versions[0].Served = false }, "Source: version v1beta1 is not served"},
		"subresource": {func(c *apiextensionsv1.CustomResourceDefinition) { c.Spec.Versions[0].Subresources = nil }, `Source: subresources none, was {"status":{}}`},
		"column": {func(c *apiextensionsv1.CustomResourceDefinition) {
			c.Spec.Versions[0].AdditionalPrinterColumns = c.Spec.Versions[0].AdditionalPrinterColumns[1:]
		}, "Source: column Ready removed"},
	} {
		t.Run(name, func(t *testing.T) {
			before := crdsOf(t, tree, "standard")["Source"]
			now := before.DeepCopy()
			c.change(now)
			if got := strings.Join(Breaking(before, now), "; "); !strings.HasPrefix(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}
