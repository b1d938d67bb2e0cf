// Package crds compares the CRDs of the tree with those that are recorded in testdata, a folder for each version:
// the standard channel may not break objects and clients of the last release, and a version has one API.
// `make generate` writes the record of the tree's version.
package crds

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

// schema is an OpenAPI schema as JSON.
type schema = map[string]any

// Breaking returns the changes from before to now that may break existing objects or
// clients, one line each, sorted: what is removed, renamed, newly required, narrower or another default. A
// change of a part of a schema that it does not know counts as breaking.
func Breaking(before, now *apiextensionsv1.CustomResourceDefinition) []string {
	c := &comparison{kind: now.Spec.Names.Kind}
	c.equal("", "scope", before.Spec.Scope, now.Spec.Scope)
	c.equal("", "plural", before.Spec.Names.Plural, now.Spec.Names.Plural)
	c.equal("", "kind", before.Spec.Names.Kind, now.Spec.Names.Kind)
	c.subset("", "short name", before.Spec.Names.ShortNames, now.Spec.Names.ShortNames)
	c.subset("", "category", before.Spec.Names.Categories, now.Spec.Names.Categories)
	for _, old := range before.Spec.Versions {
		i := slices.IndexFunc(now.Spec.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool { return v.Name == old.Name })
		if i < 0 || old.Served && !now.Spec.Versions[i].Served {
			c.add("", "version %s is not served", old.Name)
			continue
		}
		c.version(old, now.Spec.Versions[i])
	}
	slices.Sort(c.found)
	return c.found
}

type comparison struct {
	kind  string
	found []string
}

func (c *comparison) add(path, format string, args ...any) {
	if path != "" {
		path = " " + path
	}
	c.found = append(c.found, c.kind+path+": "+fmt.Sprintf(format, args...))
}

func (c *comparison) equal(path, what string, before, now any) {
	if !reflect.DeepEqual(before, now) {
		c.add(path, "%s %s, was %s", what, text(now), text(before))
	}
}

// subset reports the entries of before that now does not have.
func (c *comparison) subset(path, what string, before, now []string) {
	for _, old := range before {
		if !slices.Contains(now, old) {
			c.add(path, "%s %s removed", what, old)
		}
	}
}

func (c *comparison) version(before, now apiextensionsv1.CustomResourceDefinitionVersion) {
	columns := func(v apiextensionsv1.CustomResourceDefinitionVersion) (names []string) {
		for _, column := range v.AdditionalPrinterColumns {
			names = append(names, column.Name)
		}
		return names
	}
	c.subset("", "column", columns(before), columns(now))
	c.equal("", "subresources", before.Subresources, now.Subresources)
	c.equal("", "selectable fields", before.SelectableFields, now.SelectableFields)
	c.schema("", asJSON(before.Schema.OpenAPIV3Schema), asJSON(now.Schema.OpenAPIV3Schema))
}

func (c *comparison) schema(path string, before, now schema) {
	if before["type"] != now["type"] {
		c.equal(path, "type", before["type"], now["type"])
		return
	}
	for key := range merged(before, now) {
		c.part(path, key, before, now)
	}
}

// part compares one keyword of a schema.
func (c *comparison) part(path, key string, before, now schema) {
	a, b := before[key], now[key]
	switch key {
	case "description", "title", "example", "externalDocs":
	case "properties":
		c.properties(path, asSchema(a), asSchema(b))
	case "required":
		c.required(path, before, now)
	case "items", "additionalProperties":
		c.values(path, key, a, b)
	case "enum":
		c.enum(path, asList(a), asList(b))
	case "maxLength", "maxItems", "maxProperties", "maximum":
		if b != nil && (a == nil || b.(float64) < a.(float64)) {
			c.equal(path, key, a, b)
		}
	case "minLength", "minItems", "minProperties", "minimum":
		if b != nil && b.(float64) > least(key, a) {
			c.equal(path, key, a, b)
		}
	case "pattern", "format":
		if b != nil {
			c.equal(path, key, a, b)
		}
	case "default":
		if a != nil {
			c.equal(path, key, a, b)
		}
	case "x-kubernetes-validations":
		c.rules(path, asList(a), asList(b))
	default:
		c.equal(path, key, a, b)
	}
}

// least returns a lower bound; without one, what is below every value.
func least(key string, bound any) float64 {
	switch {
	case bound != nil:
		return bound.(float64)
	case key == "minimum":
		return -1 << 62
	}
	return 0
}

func (c *comparison) properties(path string, before, now schema) {
	for name, old := range before {
		if next, ok := now[name]; ok {
			c.schema(join(path, name), asSchema(old), asSchema(next))
		} else {
			c.add(join(path, name), "removed")
		}
	}
}

// required reports new required fields without a default.
func (c *comparison) required(path string, before, now schema) {
	for _, name := range asList(now["required"]) {
		field := asSchema(asSchema(now["properties"])[name.(string)])
		if !slices.Contains(asList(before["required"]), name) && field["default"] == nil {
			c.add(join(path, name.(string)), "required")
		}
	}
}

// values compares the schemas of the entries of a list or a map.
func (c *comparison) values(path, key string, before, now any) {
	a, b := asSchema(before), asSchema(now)
	if a == nil || b == nil {
		c.equal(path, key, before, now)
		return
	}
	c.schema(path+map[string]string{"items": "[]", "additionalProperties": "{}"}[key], a, b)
}

func (c *comparison) enum(path string, before, now []any) {
	if len(now) > 0 && len(before) == 0 {
		c.add(path, "new enum")
		return
	}
	for _, old := range before {
		if len(now) > 0 && !slices.Contains(now, old) {
			c.add(path, "enum lost %s", text(old))
		}
	}
}

// rules reports the rules that before does not have, whatever their messages.
func (c *comparison) rules(path string, before, now []any) {
	for _, rule := range now {
		text := asSchema(rule)["rule"]
		if !slices.ContainsFunc(before, func(old any) bool { return asSchema(old)["rule"] == text }) {
			c.add(path, "new rule: %s", text)
		}
	}
}

// merged returns the keys of both schemas.
func merged(a, b schema) map[string]bool {
	keys := map[string]bool{}
	for _, s := range []schema{a, b} {
		for key := range maps.Keys(s) {
			keys[key] = true
		}
	}
	return keys
}

func asJSON(s *apiextensionsv1.JSONSchemaProps) schema {
	var out schema
	data, err := json.Marshal(s)
	if err == nil {
		err = json.Unmarshal(data, &out)
	}
	if err != nil {
		panic("crds: a schema is not JSON: " + err.Error()) // It was read from JSON.
	}
	return out
}

func asSchema(v any) schema {
	s, _ := v.(schema)
	return s
}

func asList(v any) []any {
	list, _ := v.([]any)
	return list
}

func join(path, name string) string { return strings.TrimPrefix(path+"."+name, ".") }

func text(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	if string(data) == "null" {
		return "none"
	}
	return string(data)
}
