// Package migrate rewrites manifests of release 0.2.0 to the current API. It is pure: it
// turns text into text and notes. It uses the field names of both APIs and no Go types of
// either.
//
// File rewrites the documents of one file. It edits the YAML tree, so that comments, the
// order of fields and the style of values are kept. Documents without a change are returned
// byte for byte.
package migrate

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

const apiVersion = "posthorn.dev/v1alpha1"

// Note is information about a document for the user. It contains only names of the document.
type Note struct {
	// Document counts from 1.
	Document int
	// Object is "Kind namespace/name", without the parts that the manifest does not have.
	Object  string
	Message string
	// Problem means that the result cannot be applied without a change.
	Problem bool
}

func (n Note) String() string {
	if n.Object == "" {
		return fmt.Sprintf("document %d: %s", n.Document, n.Message)
	}
	return fmt.Sprintf("document %d, %s: %s", n.Document, n.Object, n.Message)
}

// File rewrites the documents of a YAML or JSON file. Documents of other kinds and documents
// of the current API are returned unchanged. If a document is invalid or mixes both APIs,
// File returns an error that names the document, and no result.
func File(text []byte) ([]byte, []Note, error) {
	var out bytes.Buffer
	var notes []Note
	for i, document := range split(text) {
		m := migration{document: i + 1}
		changed, err := m.rewriteDocument(document)
		if err != nil {
			return nil, nil, fmt.Errorf("document %d: %w", i+1, err)
		}
		out.Write(changed)
		notes = append(notes, m.notes...)
	}
	return out.Bytes(), notes, nil
}

// split splits a text before each separator line ("---"). The concatenated parts are the text.
func split(text []byte) [][]byte {
	var documents [][]byte
	start, at := 0, 0
	for line := range bytes.Lines(text) {
		rest, separator := bytes.CutPrefix(line, []byte("---"))
		if separator && at > start && (len(bytes.TrimSpace(rest)) == 0 || rest[0] == ' ' || rest[0] == '\t') {
			documents = append(documents, text[start:at])
			start = at
		}
		at += len(line)
	}
	return append(documents, text[start:])
}

// migration is the state of rewriting one document.
type migration struct {
	document int
	notes    []Note
	changed  bool
}

func (m *migration) rewriteDocument(text []byte) ([]byte, error) {
	var root yaml.Node
	if err := yaml.Unmarshal(text, &root); err != nil {
		return nil, fmt.Errorf("not YAML; a template has to be rendered first: %w", err)
	}
	if len(root.Content) == 0 {
		return text, nil
	}
	keep, err := m.rewrite(root.Content[0])
	switch {
	case err != nil:
		return nil, err
	case !keep:
		return []byte("---\n" + omitted(m.notes[len(m.notes)-1]) + "\n"), nil
	case !m.changed:
		return text, nil
	}
	var out bytes.Buffer
	if bytes.HasPrefix(text, []byte("---")) {
		out.WriteString("---\n")
	}
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	encoder.CompactSeqIndent()
	if err := errors.Join(encoder.Encode(&root), encoder.Close()); err != nil {
		return nil, fmt.Errorf("write YAML: %w", err)
	}
	if err := yaml.Unmarshal(out.Bytes(), &yaml.Node{}); err != nil {
		return nil, fmt.Errorf("its anchors and aliases cannot be kept; replace each alias by its value: %w", err)
	}
	return out.Bytes(), nil
}

func omitted(n Note) string { return "# Omitted: " + n.Object + ": " + n.Message }

// rewrite rewrites an object, or the objects of a list. It returns false for an object to omit.
func (m *migration) rewrite(n *yaml.Node) (keep bool, err error) {
	o := object{resolve(n)}
	if o.Kind != yaml.MappingNode {
		return true, nil
	}
	kind := o.text("kind")
	if items := o.get("items"); strings.HasSuffix(kind, "List") && items != nil && items.Kind == yaml.SequenceNode {
		return true, m.rewriteItems(items)
	}
	steps, ok := kinds[kind]
	if !ok || o.text("apiVersion") != apiVersion {
		return true, nil
	}
	metadata := o.object("metadata")
	name := kind + " " + strings.TrimPrefix(metadata.text("namespace")+"/"+metadata.text("name"), "/")
	note := func(problem bool, message string) {
		m.notes = append(m.notes, Note{Document: m.document, Object: name, Message: message, Problem: problem})
	}
	spec := o.object("spec")
	if merges(o.Node) {
		return false, fmt.Errorf("%s: the manifest has a merge key (<<); replace it by the merged fields", name)
	}
	old, err := steps.rewrite(spec)
	if err != nil {
		return false, fmt.Errorf("%s: %w", name, err)
	}
	m.changed = m.changed || old
	if len(steps.required) > 0 && !slices.ContainsFunc(steps.required, func(field string) bool { return spec.get(field) != nil }) {
		note(true, "spec has neither the fields of release 0.2.0 nor "+strings.Join(steps.required, " or ")+
			"; if it was exported from a cluster that already has the new CRDs, use the manifest that was applied before")
	}
	if steps.job {
		switch ended, suppress := ended(o), spec.text("suppress") == "true"; {
		case ended && !suppress:
			note(false, "it has finished and would run again; delete it from the cluster")
			return false, nil
		case ended:
			note(false, "it has finished; because of suppress it must be kept, and its notifications are sent again")
		case old:
			note(false, "its spec cannot be changed: delete the object of release 0.2.0 before you apply this one; if it has finished, do not apply it again")
		}
	}
	m.changed = strip(o) || m.changed
	return true, nil
}

func (m *migration) rewriteItems(items *yaml.Node) error {
	var kept []*yaml.Node
	comments := ""
	for _, item := range items.Content {
		keep, err := m.rewrite(item)
		if err != nil {
			return err
		}
		if !keep {
			comments += omitted(m.notes[len(m.notes)-1]) + "\n"
			m.changed = true
			continue
		}
		kept = append(kept, item)
	}
	items.Content = kept
	if comments != "" {
		items.HeadComment = strings.TrimSpace(items.HeadComment + "\n" + comments)
	}
	return nil
}

// strip removes the fields that only the API server and the operator set. Exported objects
// have them, and the API server rejects some of them in a manifest.
func strip(o object) (changed bool) {
	metadata := o.object("metadata")
	if metadata.get("uid") == nil && o.get("status") == nil {
		return false
	}
	o.remove("status")
	for _, field := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink"} {
		metadata.remove(field)
	}
	annotations := metadata.object("annotations")
	annotations.remove("kubectl.kubernetes.io/last-applied-configuration")
	if len(annotations.Content) == 0 {
		metadata.remove("annotations")
	}
	return true
}

// ended reports whether a Redelivery or DeletionRequest of release 0.2.0 has finished
// according to the status in its manifest.
func ended(o object) bool {
	status := o.object("status")
	if phase := status.text("phase"); phase == "Succeeded" || phase == "Failed" {
		return true
	}
	conditions := status.get("conditions")
	return conditions != nil && slices.ContainsFunc(conditions.Content, func(n *yaml.Node) bool {
		c := object{resolve(n)}
		return c.text("type") == "Finished" && c.text("status") == "True"
	})
}

// merges reports whether a mapping in n has a merge key, whose fields would be missed.
func merges(n *yaml.Node) bool {
	if n.Kind == yaml.MappingNode {
		for i := 0; i < len(n.Content); i += 2 {
			if n.Content[i].Tag == "!!merge" {
				return true
			}
		}
	}
	return slices.ContainsFunc(n.Content, merges)
}
