// Package crds compares the CRDs with the last release's, if there is one, so that no
// manifest and no client breaks by accident. testdata/changes.txt lists the intended
// breaking changes; the test fails if the list differs from the changes that it finds.
package crds

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

// Breaking returns the changes from before to now that may break existing objects or
// clients, one line each, sorted: removed fields, new required fields without a
// default, changed types, narrower enums and bounds, and new validation rules.
func Breaking(before, now *apiextensionsv1.CustomResourceDefinition) []string {
	c := &comparison{kind: now.Spec.Names.Kind}
	if before.Spec.Scope != now.Spec.Scope {
		c.add("", "scope %s, was %s", now.Spec.Scope, before.Spec.Scope)
	}
	if a, b := before.Spec.Names, now.Spec.Names; a.Plural != b.Plural || a.Kind != b.Kind {
		c.add("", "names %s, %s; were %s, %s", b.Plural, b.Kind, a.Plural, a.Kind)
	}
	for _, old := range before.Spec.Versions {
		i := slices.IndexFunc(now.Spec.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool { return v.Name == old.Name })
		if i < 0 || old.Served && !now.Spec.Versions[i].Served {
			c.add("", "version %s is not served", old.Name)
			continue
		}
		c.schema("", old.Schema.OpenAPIV3Schema, now.Spec.Versions[i].Schema.OpenAPIV3Schema)
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

func (c *comparison) schema(path string, before, now *apiextensionsv1.JSONSchemaProps) {
	if before.Type != now.Type || before.XIntOrString != now.XIntOrString {
		c.add(path, "type %q, was %q", now.Type, before.Type)
		return
	}
	for name, old := range before.Properties {
		if next, ok := now.Properties[name]; ok {
			c.schema(join(path, name), &old, &next)
		} else {
			c.add(join(path, name), "removed")
		}
	}
	for _, name := range now.Required {
		if next := now.Properties[name]; !slices.Contains(before.Required, name) && next.Default == nil {
			c.add(join(path, name), "required")
		}
	}
	if before.Items != nil && now.Items != nil && before.Items.Schema != nil && now.Items.Schema != nil {
		c.schema(path+"[]", before.Items.Schema, now.Items.Schema)
	}
	if a, b := before.AdditionalProperties, now.AdditionalProperties; a != nil && b != nil && a.Schema != nil && b.Schema != nil {
		c.schema(path+"{}", a.Schema, b.Schema)
	}
	c.enum(path, before, now)
	c.bounds(path, before, now)
	for _, rule := range now.XValidations {
		if !slices.ContainsFunc(before.XValidations, func(r apiextensionsv1.ValidationRule) bool { return r.Rule == rule.Rule }) {
			c.add(path, "new rule: %s", rule.Rule)
		}
	}
	if before.Default != nil && (now.Default == nil || !bytes.Equal(compact(before.Default.Raw), compact(now.Default.Raw))) {
		c.add(path, "default %s, was %s", text(now.Default), text(before.Default))
	}
	if a, b := value(before.XListType), value(now.XListType); a != b || !slices.Equal(before.XListMapKeys, now.XListMapKeys) {
		c.add(path, "list type %s %v, was %s %v", b, now.XListMapKeys, a, before.XListMapKeys)
	}
}

func (c *comparison) enum(path string, before, now *apiextensionsv1.JSONSchemaProps) {
	if len(now.Enum) == 0 {
		return
	}
	if len(before.Enum) == 0 {
		c.add(path, "new enum")
		return
	}
	for _, old := range before.Enum {
		if !slices.ContainsFunc(now.Enum, func(v apiextensionsv1.JSON) bool { return bytes.Equal(v.Raw, old.Raw) }) {
			c.add(path, "enum lost %s", old.Raw)
		}
	}
}

func (c *comparison) bounds(path string, before, now *apiextensionsv1.JSONSchemaProps) {
	upper(c, path, "maxLength", before.MaxLength, now.MaxLength)
	upper(c, path, "maxItems", before.MaxItems, now.MaxItems)
	upper(c, path, "maxProperties", before.MaxProperties, now.MaxProperties)
	upper(c, path, "maximum", before.Maximum, now.Maximum)
	lower(c, path, "minLength", before.MinLength, now.MinLength)
	lower(c, path, "minItems", before.MinItems, now.MinItems)
	lower(c, path, "minProperties", before.MinProperties, now.MinProperties)
	lower(c, path, "minimum", before.Minimum, now.Minimum)
	if now.Pattern != "" && now.Pattern != before.Pattern {
		c.add(path, "pattern %q, was %q", now.Pattern, before.Pattern)
	}
	if now.Format != "" && now.Format != before.Format {
		c.add(path, "format %q, was %q", now.Format, before.Format)
	}
}

func upper[T cmp.Ordered](c *comparison, path, name string, before, now *T) {
	if now != nil && (before == nil || *now < *before) {
		c.add(path, "%s %v, was %v", name, *now, orNone(before))
	}
}

func lower[T cmp.Ordered](c *comparison, path, name string, before, now *T) {
	var least T
	if before != nil {
		least = *before
	}
	if now != nil && *now > least {
		c.add(path, "%s %v, was %v", name, *now, orNone(before))
	}
}

func orNone[T any](p *T) any {
	if p == nil {
		return "none"
	}
	return *p
}

func value(s *string) string {
	if s == nil {
		return "none"
	}
	return *s
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func text(v *apiextensionsv1.JSON) string {
	if v == nil {
		return "none"
	}
	return string(compact(v.Raw))
}

func compact(raw []byte) []byte {
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil {
		return raw
	}
	return b.Bytes()
}
