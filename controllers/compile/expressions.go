package compile

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/expression"
)

// NamespaceExpressions and AllExpressions bound the expressions of filters, requests and responses of a namespace, and of
// all namespaces: every dispatcher has all of them in memory. An instruction needs about 70 bytes, a node 150.
var (
	NamespaceExpressions = expression.Size{Instructions: 100_000, Nodes: 20_000}
	AllExpressions       = expression.Size{Instructions: 1_000_000, Nodes: 200_000}
)

// The two budgets, as words of a message.
const (
	ofNamespace = "of this namespace"
	ofAll       = "of all namespaces"
)

// Expressions are the expressions of all namespaces, and which of them are above a budget. One that was accepted
// in its present generation, according to its status or by an earlier decision, remains accepted; the others are
// accepted in the order of their age. The zero value has none. It must not be used concurrently.
type Expressions struct {
	byNamespace map[string][]*expressions
	// over are the budgets that refused expressions exceed, by namespace and name.
	over map[string]map[string]string
}

// expressions are those of a generation of a destination.
type expressions struct {
	namespace, name string
	uid             types.UID
	generation      int64
	created         time.Time
	texts           [3]string
	size            expression.Size
	accepted        bool
}

// Set replaces the expressions of namespaces, by their objects. It decides about all namespaces at once, so that the
// result does not depend on their order. It returns the other namespaces whose refused expressions have changed.
func (e *Expressions) Set(namespaces map[string][]Object) (again []string) {
	if e.byNamespace == nil {
		e.byNamespace = map[string][]*expressions{}
	}
	changed := false
	for namespace, objects := range namespaces {
		before := map[string]*expressions{}
		for _, x := range e.byNamespace[namespace] {
			before[x.name] = x
		}
		delete(e.byNamespace, namespace)
		for _, o := range objectsOf[*v1beta1.WebhookDestination](Snapshot{Objects: objects}) {
			texts := textsOf(o)
			if texts == [3]string{} {
				continue
			}
			x := &expressions{namespace: namespace, name: o.Name, uid: o.UID, generation: o.Generation, created: o.CreationTimestamp.Time,
				texts: texts, accepted: isAccepted(o)}
			if last := before[x.name]; last != nil && last.uid == x.uid && last.generation == x.generation && last.texts == x.texts {
				changed = changed || x.accepted && !last.accepted
				x.size, x.accepted = last.size, x.accepted || last.accepted
				delete(before, x.name)
			} else {
				x.size, changed = sizeOf(texts), true
			}
			e.byNamespace[namespace] = append(e.byNamespace[namespace], x)
		}
		changed = changed || len(before) > 0
	}
	if !changed {
		return nil
	}
	before := e.over
	e.decide()
	for namespace := range e.byNamespace {
		if _, own := namespaces[namespace]; !own && !maps.Equal(before[namespace], e.over[namespace]) {
			again = append(again, namespace)
		}
	}
	slices.Sort(again)
	return again
}

// textsOf returns the expressions of the filter, of the responses, and of the requests of a destination; empty if it has none.
func textsOf(o *v1beta1.WebhookDestination) (texts [3]string) {
	if o.Spec.Filter != nil {
		texts[0] = o.Spec.Filter.Expression
	}
	if o.Spec.Success != nil {
		texts[1] = o.Spec.Success.Expression
	}
	if r := o.Spec.Request; r != nil {
		all := []string{r.Body, r.Path, r.Query}
		for _, h := range r.Headers {
			all = append(all, h.Expression)
		}
		texts[2] = strings.TrimRight(strings.Join(all, betweenTexts), betweenTexts)
	}
	return texts
}

// betweenTexts is not part of an expression.
const betweenTexts = "\x00"

// sizeOf returns the size of the expressions that are valid.
func sizeOf(texts [3]string) (size expression.Size) {
	if p, err := expression.Compile(texts[0]); err == nil {
		size = p.Size()
	}
	if p, err := expression.CompileSuccess(texts[1]); err == nil {
		size = size.Plus(p.Size())
	}
	for text := range strings.SplitSeq(texts[2], betweenTexts) {
		if t, err := expression.CompileTransform(text); err == nil {
			size = size.Plus(t.Size())
		}
	}
	return size
}

// Over returns the budgets that refused expressions of a namespace exceed, by the name of the destination.
func (e *Expressions) Over(namespace string) map[string]string { return e.over[namespace] }

// decide accepts expressions while the budgets last.
func (e *Expressions) decide() {
	var all []*expressions
	for _, list := range e.byNamespace {
		all = append(all, list...)
	}
	slices.SortFunc(all, func(a, b *expressions) int {
		switch {
		case a.accepted && !b.accepted:
			return -1
		case b.accepted && !a.accepted:
			return 1
		}
		return cmp.Or(a.created.Compare(b.created), strings.Compare(a.namespace, b.namespace), strings.Compare(a.name, b.name))
	})
	e.over = map[string]map[string]string{}
	var sum expression.Size
	sums := map[string]expression.Size{}
	for _, x := range all {
		own, over := sums[x.namespace].Plus(x.size), ""
		switch {
		case x.accepted:
		case !own.Within(NamespaceExpressions):
			over = ofNamespace
		case !sum.Plus(x.size).Within(AllExpressions):
			over = ofAll
		}
		if over != "" {
			if e.over[x.namespace] == nil {
				e.over[x.namespace] = map[string]string{}
			}
			e.over[x.namespace][x.name] = over
			continue
		}
		sum, sums[x.namespace], x.accepted = sum.Plus(x.size), own, true
	}
}

// isAccepted reports whether an object was accepted in its present generation.
func isAccepted(o *v1beta1.WebhookDestination) bool {
	c := meta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionAccepted)
	return c != nil && c.Status == metav1.ConditionTrue && c.ObservedGeneration == o.Generation && o.Generation > 0
}

// refuseExpression pauses a destination and removes its expressions.
func (r *destinationMemo) refuseExpression(whose string) {
	limit := NamespaceExpressions
	if whose == ofAll {
		limit = AllExpressions
	}
	var with []string
	if r.entry.Filter != nil && r.entry.Filter.Expression != "" {
		with = append(with, "spec.filter.expression")
	}
	if r.entry.SuccessRule != nil {
		with = append(with, "spec.success.expression")
	}
	if r.entry.Request != nil {
		with = append(with, "spec.request")
	}
	fields := strings.Join(with, " and ")
	message := fmt.Sprintf("%s: %d nodes, and patterns with %d instructions; with them, the expressions %s would be above %d nodes or %d instructions; remove or shorten expressions, or filter by types and events",
		fields, r.size.Nodes, r.size.Instructions, whose, limit.Nodes, limit.Instructions)
	r.verdict = r.verdict.refuseFor(v1beta1.ReasonExpressionBudget, message)
	if r.entry.Filter != nil && r.entry.Filter.Expression != "" {
		filter := *r.entry.Filter
		filter.Expression, filter.Invalid = "", true
		r.entry.Filter = &filter
	}
	r.entry.SuccessRule, r.entry.Request = nil, nil
	if r.entry.State == liveconfig.Active {
		r.entry.State, r.entry.PausedReason = liveconfig.Paused, v1beta1.ReasonExpressionBudget
	}
	r.entry.Revision = revision([]string{r.entry.Revision, v1beta1.ReasonExpressionBudget}, nil, nil)
	r.verdict.Revision = r.entry.Revision
}
