package standalone

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/manifest"
)

// positions finds the lines of fields in the present files of a store.
type positions struct {
	*store
	documents map[string][]*document
}

func (s *store) positions() positions { return positions{s, map[string][]*document{}} }

// line returns the line of a field of an object, or where its document begins.
func (p positions) line(o *stored, field string) int {
	documents, ok := p.documents[o.file]
	if f := p.files[o.file]; !ok && f != nil {
		documents, _ = documentsOf(f.path, f.text) // The errors are problems of the file.
		p.documents[o.file] = documents
	}
	if o.document < 1 || o.document > len(documents) {
		return o.line
	}
	return documents[o.document-1].line(o.path + field)
}

// fieldBegin matches where the text about a field begins in the message of a verdict.
var fieldBegin = regexp.MustCompile(`(?:^|; )(spec(?:\.\w+|\[[^\]]*\])*): `)

// problems returns a problem for each field that a message is about, with the line of the field and with similar
// names in place of unknown ones. A message about no field is one problem of the object.
func (p positions) problems(o *stored, message, reason string) (list []manifest.Problem) {
	begins := fieldBegin.FindAllStringSubmatchIndex(message, -1)
	if len(begins) == 0 || begins[0][0] > 0 {
		return []manifest.Problem{p.problem(o, "", message, reason)}
	}
	for i, m := range begins {
		end := len(message)
		if i+1 < len(begins) {
			end = begins[i+1][0]
		}
		list = append(list, p.problem(o, message[m[2]:m[3]], message[m[2]:end], reason))
		reason = "" // It is the reason of the first one.
	}
	return list
}

func (p positions) problem(o *stored, field, text, reason string) manifest.Problem {
	line := o.line
	if field != "" {
		line = p.line(o, field)
	}
	text += p.advice(o.namespace, text)
	if reason != "" {
		text += " (" + reason + ")"
	}
	return manifest.Problem{File: o.file, Line: line, Object: o.String(), Message: text, Reason: reason}
}

// warnings returns a warning for each note in the message of an accepted object: what why shows as a notice, and a
// suspension.
func (p positions) warnings(o *stored, v compile.Verdict) (list []manifest.Problem) {
	if v.Accepted && v.Reason == v1beta1.ReasonSuspended {
		list = append(list, p.problem(o, "spec.suspend", v.Message, v.Reason))
	}
	if _, notes, ok := strings.Cut(v.Message, "; spec"); ok && v.Accepted {
		list = append(list, p.problems(o, "spec"+notes, "")...)
	}
	return list
}

// missing matches the kind and the name of an object that does not exist, missingSource a Source of a list of
// references, and missingKey the kind, the name and the key.
var (
	missing       = regexp.MustCompile(`\b([A-Z]\w+) "([^"]*)" does not exist in this namespace`)
	missingSource = regexp.MustCompile(`\bno (Source) in this namespace is named "([^"]*)"`)
	missingKey    = regexp.MustCompile(`\b(Secret|ConfigMap) "([^"]*)" has no key "([^"]*)"`)
)

// advice returns the similar name of an object or a key that does not exist, or the namespaces that have the name; "" if
// there is none.
func (p positions) advice(namespace, text string) string {
	if m := missingKey.FindStringSubmatch(text); m != nil {
		if o := p.objects[id{m[1], namespace, m[2]}]; o != nil {
			return didYouMean(m[3], slices.Sorted(maps.Keys(o.values)))
		}
	}
	m := missing.FindStringSubmatch(text)
	if m == nil {
		m = missingSource.FindStringSubmatch(text)
	}
	if m == nil {
		return ""
	}
	var names, elsewhere []string
	for o := range p.objects {
		if o.kind == m[1] && o.namespace == namespace {
			names = append(names, o.name)
		} else if o.kind == m[1] && o.name == m[2] {
			elsewhere = append(elsewhere, o.namespace)
		}
	}
	slices.Sort(names)
	slices.Sort(elsewhere)
	suggestion := didYouMean(m[2], names)
	if suggestion == "" && len(elsewhere) > 0 {
		suggestion = "; it exists in namespace " + strings.Join(elsewhere, ", ")
	}
	return suggestion
}

// didYouMean returns a similar name as a part of a sentence; "" if there is none.
func didYouMean(typed string, known []string) string {
	if name := nearest(typed, known); name != "" {
		return fmt.Sprintf("; did you mean %q?", name)
	}
	return ""
}
