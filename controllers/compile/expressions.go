package compile

import (
	"cmp"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/liveconfig/expression"
)

// NamespaceExpressions and AllExpressions bound the filter expressions of a namespace, and of all namespaces: every
// dispatcher has all of them in memory. An instruction needs about 70 bytes, a node 150.
var (
	NamespaceExpressions = expression.Size{Instructions: 100_000, Nodes: 20_000}
	AllExpressions       = expression.Size{Instructions: 1_000_000, Nodes: 200_000}
)

// limitExpressions refuses the expressions above a budget. An object that was accepted in its present generation remains
// accepted; the others are accepted in the order of their age.
func (s Snapshot) limitExpressions(objects []*v1alpha1.WebhookDestination, results map[string]destinationMemo) {
	order := slices.SortedStableFunc(slices.Values(byAge(objects)), func(a, b *v1alpha1.WebhookDestination) int {
		return cmp.Compare(rank(a), rank(b))
	})
	var sum expression.Size
	for _, o := range order {
		r := results[o.Name]
		next := sum.Plus(r.size)
		var over string
		switch {
		case r.size == (expression.Size{}) || rank(o) == 0:
		case !next.Within(NamespaceExpressions):
			over = "of this namespace"
		case !s.ForeignExpressions.Plus(next).Within(AllExpressions):
			over = "of all namespaces"
		}
		if over == "" {
			sum = next
			r.verdict.Expression = r.size
		} else {
			r.refuseExpression(over)
		}
		results[o.Name] = r
	}
}

// rank is 0 for an object that was accepted in its present generation.
func rank(o *v1alpha1.WebhookDestination) int {
	c := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.ConditionAccepted)
	if c != nil && c.Status == metav1.ConditionTrue && c.ObservedGeneration == o.Generation && o.Generation > 0 {
		return 0
	}
	return 1
}

// refuseExpression pauses a destination and removes its expression.
func (r *destinationMemo) refuseExpression(whose string) {
	limit := NamespaceExpressions
	if whose != "of this namespace" {
		limit = AllExpressions
	}
	message := fmt.Sprintf("spec.filter.expression: it has %d nodes, and its patterns %d instructions; with them, the expressions %s would be above %d nodes or %d instructions; remove or shorten expressions, or filter by types and events",
		r.size.Nodes, r.size.Instructions, whose, limit.Nodes, limit.Instructions)
	r.verdict = r.verdict.refuseFor(v1alpha1.ReasonExpressionBudget, message)
	filter := *r.entry.Filter
	filter.Expression = ""
	r.entry.Filter = &filter
	if r.entry.State == liveconfig.Active {
		r.entry.State, r.entry.PausedReason = liveconfig.Paused, v1alpha1.ReasonExpressionBudget
	}
	r.entry.Revision = revision([]string{r.entry.Revision, v1alpha1.ReasonExpressionBudget}, nil, nil)
	r.verdict.Revision = r.entry.Revision
}

// Expressions returns the size of the accepted expressions, and whether some were refused.
func (v Verdicts) Expressions() (sum expression.Size, refused bool) {
	for _, verdict := range v[sectionDestinations] {
		sum = sum.Plus(verdict.Expression)
		refused = refused || verdict.Reason == v1alpha1.ReasonExpressionBudget
	}
	return sum, refused
}

// ExpressionSizes are the sizes of the accepted expressions of the namespaces, and which of them have refused ones.
type ExpressionSizes struct {
	sizes   map[string]expression.Size
	refused map[string]bool
}

// Foreign returns the size of the expressions of all other namespaces.
func (e *ExpressionSizes) Foreign(namespace string) (sum expression.Size) {
	for other, size := range e.sizes {
		if other != namespace {
			sum = sum.Plus(size)
		}
	}
	return sum
}

// Set records the verdicts of a namespace. It returns the other namespaces with refused expressions, which may fit now.
func (e *ExpressionSizes) Set(namespace string, v Verdicts) (again []string) {
	if e.sizes == nil {
		e.sizes, e.refused = map[string]expression.Size{}, map[string]bool{}
	}
	size, refused := v.Expressions()
	fewer := !e.sizes[namespace].Within(size)
	if e.sizes[namespace] = size; size == (expression.Size{}) {
		delete(e.sizes, namespace)
	}
	if delete(e.refused, namespace); refused {
		e.refused[namespace] = true
	}
	for other := range e.refused {
		if fewer && other != namespace {
			again = append(again, other)
		}
	}
	return again
}
