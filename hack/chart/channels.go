package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/config/crd"
)

// writeChannels adds the annotations of channel and version to the experimental CRDs, which controller-gen
// writes, and derives the standard ones.
func writeChannels(version string) error {
	files, err := filepath.Glob("config/crd/experimental/*.yaml")
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no CRDs in config/crd/experimental (%w); run it from the root of the repository", err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		for _, channel := range []string{"experimental", "standard"} {
			out, err := inChannel(data, channel, version)
			if err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			if err := os.WriteFile(filepath.Join("config/crd", channel, filepath.Base(file)), out, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// record copies the CRDs of both channels to the folder of the version in dir. The CRDs of a release are recorded
// once, so that test/crds finds later changes; the copy of a version before a release, such as
// 0.3.0-dev, is replaced, and removed when the next version is recorded.
func record(crds fs.FS, dir, version string) error {
	target := filepath.Join(dir, version)
	if _, err := os.Stat(target); err == nil && !strings.Contains(version, "-") {
		return nil
	}
	superseded, err := filepath.Glob(filepath.Join(dir, "*-*"))
	if err != nil {
		return err
	}
	for _, old := range superseded {
		if err := os.RemoveAll(old); err != nil {
			return err
		}
	}
	for _, channel := range []string{"experimental", "standard"} {
		of, err := fs.Sub(crds, channel)
		if err == nil {
			err = os.CopyFS(filepath.Join(target, channel), of)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// inChannel returns the form of a CRD in a channel.
func inChannel(data []byte, channel, version string) ([]byte, error) {
	json, err := yaml.YAMLToJSON(data)
	if err != nil {
		return nil, err
	}
	var o unstructured.Unstructured
	if err := o.UnmarshalJSON(json); err != nil {
		return nil, err
	}
	annotations := o.GetAnnotations()
	annotations["posthorn.dev/channel"], annotations["posthorn.dev/bundle-version"] = channel, version
	o.SetAnnotations(annotations)
	versions, _, err := unstructured.NestedSlice(o.Object, "spec", "versions")
	if err != nil {
		return nil, err
	}
	for _, v := range versions {
		schema, found, err := unstructured.NestedMap(v.(map[string]any), "schema", "openAPIV3Schema")
		if err != nil || !found {
			return nil, fmt.Errorf("no schema (%w)", err)
		}
		if channel == "standard" {
			strip(schema)
		}
		if err := unstructured.SetNestedMap(v.(map[string]any), schema, "schema", "openAPIV3Schema"); err != nil {
			return nil, err
		}
	}
	if err := unstructured.SetNestedSlice(o.Object, versions, "spec", "versions"); err != nil {
		return nil, err
	}
	out, err := yaml.Marshal(o.Object)
	return append([]byte("---\n"), out...), err
}

// strip removes the experimental fields of a schema, and the rules of the objects around them that name them. It returns
// the names of the removed fields.
func strip(schema map[string]any) (removed []string) {
	properties, _ := schema["properties"].(map[string]any)
	for name, property := range properties {
		property := property.(map[string]any)
		if text, _ := property["description"].(string); strings.HasPrefix(text, crd.Experimental) {
			delete(properties, name)
			removed = append(removed, name)
		} else {
			removed = append(removed, strip(property)...)
		}
	}
	for _, inner := range []string{"items", "additionalProperties"} {
		if inner, ok := schema[inner].(map[string]any); ok {
			removed = append(removed, strip(inner)...)
		}
	}
	for _, list := range []string{"x-kubernetes-validations", "required"} {
		entries, _ := schema[list].([]any)
		if schema[list] = slices.DeleteFunc(entries, func(entry any) bool { return namesAny(entry, removed) }); len(schema[list].([]any)) == 0 {
			delete(schema, list)
		}
	}
	return removed
}

// namesAny reports whether a rule selects a field with one of these names, or an entry of required is one of them.
func namesAny(entry any, fields []string) bool {
	rule, isRule := entry.(map[string]any)
	if !isRule {
		return slices.Contains(fields, entry.(string))
	}
	return slices.ContainsFunc(fields, func(name string) bool {
		return regexp.MustCompile(`\.\??` + name + `\b`).MatchString(rule["rule"].(string))
	})
}
