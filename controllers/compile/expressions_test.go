package compile

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/liveconfig/expression"
)

// thousand is an expression whose patterns have 1,000 instructions.
var thousand = strings.TrimSuffix(strings.Repeat("call.a.matches('a{200}') || ", 5), " || ")

// filtered returns a destination that was created at a minute.
func filtered(name, filter string, minute int) *v1alpha1.WebhookDestination {
	d := &v1alpha1.WebhookDestination{}
	d.Name, d.Generation, d.CreationTimestamp = name, 1, metav1.NewTime(time.Unix(int64(minute)*60, 0))
	d.Spec.SourceSelector = &metav1.LabelSelector{}
	d.Spec.Endpoints = []v1alpha1.Endpoint{{Name: "e", URL: "https://a.example/"}}
	d.Spec.Filter = &v1alpha1.Filter{Expression: filter}
	return d
}

func accepted(d *v1alpha1.WebhookDestination, generation int64) {
	d.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAccepted, ObservedGeneration: generation}}
}

// refused compiles a namespace with destinations, and returns the names of those above a budget.
func refused(t *testing.T, foreign expression.Size, objects ...*v1alpha1.WebhookDestination) (names string) {
	t.Helper()
	source := &v1alpha1.Source{}
	source.Name = "web"
	s := Snapshot{Namespace: "shop", ForeignExpressions: foreign, Objects: []Object{source}}
	for _, o := range objects {
		s.Objects = append(s.Objects, o)
	}
	config, verdicts := Table{Sources, Destinations}.Compile(s)
	for _, d := range config.Destinations {
		v := verdicts[sectionDestinations][d.Name]
		if v.Reason != v1alpha1.ReasonExpressionBudget {
			if d.Filter.Expression == "" || v.Expression.Instructions != 1000 {
				t.Errorf("%s: got the filter %+v and the size %+v; want them complete", d.Name, d.Filter, v.Expression)
			}
			continue
		}
		names += d.Name
		if v.Accepted || d.State != liveconfig.Paused || d.PausedReason != v1alpha1.ReasonExpressionBudget || d.Filter.Expression != "" || v.Revision != d.Revision {
			t.Errorf("%s is refused: got %+v, verdict %+v; want it paused, without the expression", d.Name, d, v)
		}
	}
	return names
}

// The youngest expressions above a budget are refused; accepted objects remain accepted.
func TestExpressionsAboveTheBudgetAreRefused(t *testing.T) {
	var many []*v1alpha1.WebhookDestination
	for i := range 100 {
		many = append(many, filtered(fmt.Sprintf("d%02d", i), thousand, i))
	}
	if got := refused(t, expression.Size{}, many...); got != "" {
		t.Errorf("100,000 instructions: refused %s; want none", got)
	}
	younger := filtered("a", thousand, 1000)
	if got := refused(t, expression.Size{}, append(many, younger)...); got != "a" {
		t.Errorf("101,000 instructions: refused %q; want the youngest", got)
	}
	accepted(younger, 1)
	if got := refused(t, expression.Size{}, append(many, younger)...); got != "d99" {
		t.Errorf("the youngest was accepted before: refused %q; want the youngest of the others", got)
	}
	accepted(younger, 0) // It was accepted before it was edited.
	if got := refused(t, expression.Size{}, append(many, younger)...); got != "a" {
		t.Errorf("the youngest was edited: refused %q; want the youngest", got)
	}
	for _, d := range many {
		accepted(d, 1)
	}
	almost := expression.Size{Instructions: 999_500}
	if got := refused(t, almost, many[0], many[1], younger); got != "a" {
		t.Errorf("the budget of all namespaces: refused %q; want what was not accepted", got)
	}
	if got := refused(t, expression.Size{Nodes: 199_999}, younger); got != "a" {
		t.Errorf("the nodes of all namespaces: refused %q; want the destination", got)
	}
}

// When a namespace has fewer expressions, those with refused ones are compiled again.
func TestExpressionSizes(t *testing.T) {
	of := func(instructions int, reason string) Verdicts {
		return Verdicts{sectionDestinations: {"d": {Reason: reason, Expression: expression.Size{Instructions: instructions}}}}
	}
	var e ExpressionSizes
	if again := e.Set("a", of(10, "Accepted")); again != nil {
		t.Errorf("got %v; want none", again)
	}
	if again := e.Set("b", of(0, v1alpha1.ReasonExpressionBudget)); again != nil {
		t.Errorf("got %v; want none", again)
	}
	e.Set("c", of(5, "Accepted"))
	if got := e.Foreign("a").Instructions; got != 5 {
		t.Errorf("the others have %d instructions, want 5", got)
	}
	if again := e.Set("a", of(9, "Accepted")); len(again) != 1 || again[0] != "b" {
		t.Errorf("after fewer expressions: got %v; want b", again)
	}
	if again := e.Set("a", of(9, "Accepted")); again != nil {
		t.Errorf("without a change: got %v; want none", again)
	}
	if again := e.Set("c", nil); len(again) != 1 {
		t.Errorf("after a deletion: got %v; want b", again)
	}
}
