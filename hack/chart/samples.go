package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	yamlv3 "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// writeComments writes the descriptions of the fields to the samples that have every field of a kind.
func writeComments() error {
	samples, err := filepath.Glob("config/samples/reference/*.yaml")
	if err != nil || len(samples) == 0 {
		return fmt.Errorf("no samples in config/samples/reference (%w)", err)
	}
	schemas, err := schemasByKind()
	if err != nil {
		return err
	}
	for _, file := range samples {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		out, err := commented(text, schemas)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if err := os.WriteFile(file, out, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// node is a schema of a CRD.
type node struct {
	Description string
	Properties  map[string]*node
	Items       *node
}

func schemasByKind() (map[string]*node, error) {
	files, err := filepath.Glob("config/crd/experimental/*.yaml")
	schemas := map[string]*node{}
	for _, file := range files {
		var crd struct {
			Spec struct {
				Names    struct{ Kind string }
				Versions []struct {
					Schema struct{ OpenAPIV3Schema *node }
				}
			}
		}
		text, err := os.ReadFile(file)
		if err == nil {
			err = yaml.Unmarshal(text, &crd)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		schemas[crd.Spec.Names.Kind] = crd.Spec.Versions[0].Schema.OpenAPIV3Schema
	}
	return schemas, err
}

// commented returns objects with the description of each field above its first value. A description occurs once.
func commented(text []byte, schemas map[string]*node) ([]byte, error) {
	var out bytes.Buffer
	encoder := yamlv3.NewEncoder(&out)
	encoder.SetIndent(2)
	encoder.CompactSeqIndent()
	seen := map[string]bool{}
	for decoder := yamlv3.NewDecoder(bytes.NewReader(text)); ; {
		var document yamlv3.Node
		if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
			return out.Bytes(), encoder.Close()
		} else if err != nil {
			return nil, err
		}
		var kind struct{ Kind string }
		if err := document.Decode(&kind); err != nil || schemas[kind.Kind] == nil {
			return nil, fmt.Errorf("the kind %q is unknown (%w)", kind.Kind, err)
		}
		root, first := schemas[kind.Kind], len(seen) == 0
		describe(&document, root, seen)
		document.HeadComment = comment("Another example, for the fields that exclude fields above.")
		if first {
			document.HeadComment = comment("Every field of this kind, with the values of an example. make generate writes the comments.\n\n" + root.Description)
		}
		if err := encoder.Encode(&document); err != nil {
			return nil, err
		}
	}
}

// describe replaces the comments in a value.
func describe(value *yamlv3.Node, schema *node, seen map[string]bool) {
	value.HeadComment, value.LineComment, value.FootComment = "", "", ""
	switch {
	case value.Kind == yamlv3.MappingNode:
		for i := 0; i < len(value.Content); i += 2 {
			key := value.Content[i]
			var field *node
			if schema != nil {
				field = schema.Properties[key.Value]
			}
			describe(key, nil, seen)
			if field != nil && !seen[field.Description] && field.Description != "" && schema.Properties["apiVersion"] == nil {
				seen[field.Description], key.HeadComment = true, comment(field.Description)
			}
			describe(value.Content[i+1], field, seen)
		}
	case value.Kind == yamlv3.DocumentNode:
		describe(value.Content[0], schema, seen)
	case value.Kind == yamlv3.SequenceNode && schema != nil:
		for _, entry := range value.Content {
			describe(entry, schema.Items, seen)
		}
	}
}

func comment(text string) string {
	return "# " + strings.ReplaceAll(strings.ReplaceAll(text, "\n", "\n# "), "# \n", "#\n")
}
