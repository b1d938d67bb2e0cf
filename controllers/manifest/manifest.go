// Package manifest defines Problem, a problem of a manifest of posthorn run. Package standalone
// finds problems, package why explains their effect on a destination, and the commands print them.
package manifest

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Problem is a problem of a manifest. It contains no values of the manifest.
type Problem struct {
	File string `json:"file"`
	// Line of the field, from 1; 0 means the whole file.
	Line int `json:"line,omitempty"`
	// Document is the position of the document, from 1; 0 means the whole file.
	Document int `json:"document,omitempty"`
	// Object is "Kind namespace/name"; it may be incomplete.
	Object string `json:"object,omitempty"`
	// Message names the field, the rule and the fix.
	Message string `json:"message"`
	// Reason is the reason of the condition of a valid object; empty for a rejected manifest.
	Reason string `json:"reason,omitempty"`
	// Since is when posthorn run found the problem first. It and the fields below are empty in
	// the output of posthorn compile.
	Since time.Time `json:"since,omitzero"`
	// Outdated are the objects, as "Kind namespace/name", of which an earlier version remains in
	// effect because of the problem.
	Outdated []string `json:"outdated,omitempty"`
	// Effect describes what is in effect in place of the manifest.
	Effect string `json:"effect,omitempty"`
	// Parked is true for an object that the store has and no manifest of this process has, although it was not deleted.
	Parked bool `json:"parked,omitempty"`
}

// Problems is the answer of posthorn run to GET /problems.
type Problems struct {
	Problems []Problem `json:"problems"`
	// NotAccepted are the valid objects that do not work: of the spec, or of what it refers to, such as
	// a missing Secret.
	NotAccepted []Problem `json:"notAccepted"`
	// Warnings are the ignored objects of other kinds, and the experimental fields.
	Warnings []Problem `json:"warnings"`
}

// EffectOfParked is the effect of a problem of a parked object of a kind.
func EffectOfParked(kind string) string {
	effect := "its messages are kept and not sent"
	if kind == "Source" {
		effect += ", and its calls are answered 503"
	}
	return effect
}

// Position is "file:line", or the file if the line is unknown.
func (p Problem) Position() string {
	if p.Line == 0 {
		return p.File
	}
	return fmt.Sprintf("%s:%d", p.File, p.Line)
}

// String is "file:line: object: message"; without a file, "object: message".
func (p Problem) String() string {
	text := ""
	if p.File != "" {
		text = p.Position() + ": "
	}
	if p.Object != "" {
		text += p.Object + ": "
	}
	return text + p.Message
}

// Detail is String with the effect.
func (p Problem) Detail() string {
	if p.Effect == "" {
		return p.String()
	}
	return p.String() + " (" + p.Effect + ")"
}

// About reports whether the problem concerns an object ("Kind namespace/name").
func (p Problem) About(object string) bool {
	return p.Object == object || slices.Contains(p.Outdated, object)
}

// Within reports whether the problem concerns a namespace: an object in it, or a whole file.
func (p Problem) Within(namespace string) bool {
	in := func(object string) bool { return strings.Contains(object, " "+namespace+"/") }
	return in(p.Object) || !strings.Contains(p.Object, "/") || slices.ContainsFunc(p.Outdated, in)
}
