package compile

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/posthorn/posthorn/api/v1alpha1"
)

// maxMessageBytes bounds a condition's message; the API allows 32,768.
const maxMessageBytes = 2048

// reasonOrder says which of several problems gives the reason.
var reasonOrder = []string{
	v1alpha1.ReasonInvalidSpec,
	v1alpha1.ReasonInvalidURL,
	v1alpha1.ReasonEgressDenied,
	v1alpha1.ReasonInvalidFilter,
	v1alpha1.ReasonWriteKeyConflict,
	v1alpha1.ReasonKeyConflict,
	// From here on: ResolvedRefs. First the reason that needs a person.
	v1alpha1.ReasonInvalidSecret,
	v1alpha1.ReasonSecretNotFound,
	v1alpha1.ReasonSecretKeyMissing,
	// Last, because a destination works with the Sources that it has.
	v1alpha1.ReasonNoSource,
}

// order of a reason; the lowest gives the reason of an object.
func order(reason string) int { return slices.Index(reasonOrder, reason) }

// ofReference reports whether a reason belongs to ResolvedRefs; the others belong to Accepted.
func ofReference(reason string) bool { return order(reason) >= order(v1alpha1.ReasonInvalidSecret) }

type problem struct{ reason, text string }

// problems gathers what is wrong with one object.
type problems []problem

// add notes a problem: the field, the rule that it breaks, and the fix.
func (p *problems) add(reason, field, format string, args ...any) {
	*p = append(*p, problem{reason, field + ": " + fmt.Sprintf(format, args...)})
}

// verdict returns the reason of the worst problem and all of their texts, worst
// first. There must be one.
func (p problems) verdict() (reason, message string) {
	sorted := slices.Clone(p)
	slices.SortStableFunc(sorted, func(a, b problem) int {
		return order(a.reason) - order(b.reason)
	})
	texts := make([]string, len(sorted))
	for i := range sorted {
		texts[i] = sorted[i].text
	}
	return sorted[0].reason, truncate(strings.Join(texts, "; "))
}

// judge sets the conditions of a verdict that the problems make False; suffix
// is appended to their messages.
func (p problems) judge(v *Verdict, suffix string) {
	var spec, references problems
	for _, problem := range p {
		if ofReference(problem.reason) {
			references = append(references, problem)
		} else {
			spec = append(spec, problem)
		}
	}
	if len(spec) > 0 {
		v.Accepted = false
		v.Reason, v.Message = spec.verdict()
		v.Message = truncate(v.Message + suffix)
	}
	if len(references) > 0 {
		reason, message := references.verdict()
		v.Unresolved = &Unresolved{reason, truncate(message + suffix)}
	}
}

func truncate(s string) string {
	if len(s) <= maxMessageBytes {
		return s
	}
	cut := maxMessageBytes - len(" …")
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + " …"
}
