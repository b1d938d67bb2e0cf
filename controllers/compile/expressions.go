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

// NamespaceExpressions and AllExpressions bound the filter expressions of a namespace, and of all namespaces: every
// dispatcher has all of them in memory. An instruction needs about 70 bytes, a node 150.
var (
	NamespaceExpressions = expression.Size{Instructions: 100_000, Nodes: 20_000}
	AllExpressions       = expression.Size{Instructions: 1_000_000, Nodes: 200_000}
)

// The two budgets, as words of a message.
const (
	ofNamespace = "of this namespace"
	ofAll       = "of all namespaces"
)

// Expressions are the filter expressions of all namespaces, and which of them are above a budget. One that was accepted
// in its present generation, according to its status or by an earlier decision, remains accepted; the others are
// accepted in the order of their age. The zero value has none. It must not be used concurrently.
type Expressions struct {
	byNamespace map[string][]*filterExpression
	// over are the budgets that refused expressions exceed, by namespace and name.
	over map[string]map[string]string
}

// filterExpression is the expression of a generation of a destination.
type filterExpression struct {
	namespace, name string
	uid             types.UID
	generation      int64
	created         time.Time
	text            string
	size            expression.Size
	accepted        bool
}

// Set replaces the expressions of namespaces, by their objects. It decides about all namespaces at once, so that the
// result does not depend on their order. It returns the other namespaces whose refused expressions have changed.
func (e *Expressions) Set(namespaces map[string][]Object) (again []string) {
	if e.byNamespace == nil {
		e.byNamespace = map[string][]*filterExpression{}
	}
	changed := false
	for namespace, objects := range namespaces {
		before := map[string]*filterExpression{}
		for _, x := range e.byNamespace[namespace] {
			before[x.name] = x
		}
		delete(e.byNamespace, namespace)
		for _, o := range objectsOf[*v1beta1.WebhookDestination](Snapshot{Objects: objects}) {
			if o.Spec.Filter == nil || o.Spec.Filter.Expression == "" {
				continue
			}
			x := &filterExpression{namespace: namespace, name: o.Name, uid: o.UID, generation: o.Generation, created: o.CreationTimestamp.Time,
				text: o.Spec.Filter.Expression, accepted: isAccepted(o)}
			if last := before[x.name]; last != nil && last.uid == x.uid && last.generation == x.generation && last.text == x.text {
				changed = changed || x.accepted && !last.accepted
				x.size, x.accepted = last.size, x.accepted || last.accepted
				delete(before, x.name)
			} else if p, err := expression.Compile(x.text); err == nil {
				x.size, changed = p.Size(), true
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

// Over returns the budgets that refused expressions of a namespace exceed, by the name of the destination.
func (e *Expressions) Over(namespace string) map[string]string { return e.over[namespace] }

// decide accepts expressions while the budgets last.
func (e *Expressions) decide() {
	var all []*filterExpression
	for _, list := range e.byNamespace {
		all = append(all, list...)
	}
	slices.SortFunc(all, func(a, b *filterExpression) int {
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

// refuseExpression pauses a destination and removes its expression.
func (r *destinationMemo) refuseExpression(whose string) {
	limit := NamespaceExpressions
	if whose == ofAll {
		limit = AllExpressions
	}
	message := fmt.Sprintf("spec.filter.expression: it has %d nodes, and its patterns %d instructions; with them, the expressions %s would be above %d nodes or %d instructions; remove or shorten expressions, or filter by types and events",
		r.size.Nodes, r.size.Instructions, whose, limit.Nodes, limit.Instructions)
	r.verdict = r.verdict.refuseFor(v1beta1.ReasonExpressionBudget, message)
	filter := *r.entry.Filter
	filter.Expression, filter.Invalid = "", true
	r.entry.Filter = &filter
	if r.entry.State == liveconfig.Active {
		r.entry.State, r.entry.PausedReason = liveconfig.Paused, v1beta1.ReasonExpressionBudget
	}
	r.entry.Revision = revision([]string{r.entry.Revision, v1beta1.ReasonExpressionBudget}, nil, nil)
	r.verdict.Revision = r.entry.Revision
}
