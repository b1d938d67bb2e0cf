package compile

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/posthorn/posthorn/api/v1beta1"
)

// maxMessageBytes bounds a condition's message; the API allows 32,768.
const maxMessageBytes = 2048

// reasonOrder determines the reason of a condition with several problems: the first one.
var reasonOrder = []string{
	v1beta1.ReasonInvalidSpec,
	v1beta1.ReasonInvalidURL,
	v1beta1.ReasonEgressDenied,
	v1beta1.ReasonCeilingExceeded,
	v1beta1.ReasonInvalidFilter,
	v1beta1.ReasonWriteKeyConflict,
	v1beta1.ReasonWriteKeyReserved,
	v1beta1.ReasonKeyConflict,
	// The following ones are reasons of ResolvedRefs. Only those that start with Invalid require a person.
	v1beta1.ReasonInvalidSecret,
	v1beta1.ReasonInvalidConfigMap,
	v1beta1.ReasonSecretNotFound,
	v1beta1.ReasonConfigMapNotFound,
	v1beta1.ReasonSecretKeyMissing,
	v1beta1.ReasonConfigMapKeyMissing,
	// The last ones, because a destination with them is active (v1beta1.ReasonsWithDelivery).
	v1beta1.ReasonInvalidForwardTarget,
	v1beta1.ReasonDestinationNotFound,
	v1beta1.ReasonNoSource,
}

// order returns the position of a reason in reasonOrder.
func order(reason string) int { return slices.Index(reasonOrder, reason) }

// ofReference reports whether a reason belongs to ResolvedRefs; the others belong to Accepted.
func ofReference(reason string) bool { return order(reason) >= order(v1beta1.ReasonInvalidSecret) }

type problem struct{ reason, text string }

// problems are the problems of one object.
type problems []problem

// add adds a problem: the field, the violated rule, and the fix.
func (p *problems) add(reason, field, format string, args ...any) {
	*p = append(*p, problem{reason, field + ": " + fmt.Sprintf(format, args...)})
}

// verdict returns the reason of the first problem, by reasonOrder, and the texts of all
// problems in this order. There must be at least one problem.
func (p problems) verdict() (reason, message string) {
	sorted := slices.Clone(p)
	slices.SortStableFunc(sorted, func(a, b problem) int {
		return order(a.reason) - order(b.reason)
	})
	texts := make([]string, len(sorted))
	for i := range sorted {
		texts[i] = sorted[i].text
	}
	return sorted[0].reason, Truncate(strings.Join(texts, "; "), maxMessageBytes)
}

// apply sets the conditions of a verdict that are False because of the problems. suffix is
// appended to their messages.
func (p problems) apply(v *Verdict, suffix string) {
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
		v.Message = Truncate(v.Message+suffix, maxMessageBytes)
	}
	if len(references) > 0 {
		reason, message := references.verdict()
		v.Unresolved = &Unresolved{reason, Truncate(message+suffix, maxMessageBytes)}
	}
}

// Truncate returns at most maxBytes bytes of a text, and no part of a rune.
func Truncate(s string, maxBytes int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= maxBytes {
		return s
	}
	cut := maxBytes - len("…")
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}
