package compile

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/expression"
)

// thousand is an expression whose patterns have 1,000 instructions.
var thousand = strings.TrimSuffix(strings.Repeat("call.a.matches('a{200}') || ", 5), " || ")

// filtered returns a destination that was created at a minute.
func filtered(name, filter string, minute int) *v1beta1.WebhookDestination {
	d := &v1beta1.WebhookDestination{}
	d.Name, d.Generation, d.CreationTimestamp = name, 1, metav1.NewTime(time.Unix(int64(minute)*60, 0))
	d.Spec.SourceSelector = &metav1.LabelSelector{}
	d.Spec.Endpoints = []v1beta1.Endpoint{{Name: "e", URL: "https://a.example/"}}
	d.Spec.Filter = &v1beta1.Filter{Expression: filter}
	return d
}

func accepted(d *v1beta1.WebhookDestination, generation int64) {
	d.Status.Conditions = []metav1.Condition{{Type: v1beta1.ConditionAccepted, Status: metav1.ConditionTrue, Reason: v1beta1.ReasonAccepted,
		ObservedGeneration: generation}}
}

// inNamespaces returns destinations as the argument of Set, for each namespace.
func inNamespaces(destinations map[string][]*v1beta1.WebhookDestination) map[string][]Object {
	all := map[string][]Object{}
	for namespace, list := range destinations {
		all[namespace] = nil
		for _, d := range list {
			all[namespace] = append(all[namespace], d)
		}
	}
	return all
}

// refused compiles a namespace with destinations, beside others, and returns the names of the ones above a budget.
func refused(t *testing.T, others map[string][]*v1beta1.WebhookDestination, objects ...*v1beta1.WebhookDestination) (names string) {
	t.Helper()
	source := &v1beta1.Source{}
	source.Name = "web"
	s := Snapshot{Namespace: "shop", Objects: []Object{source}}
	for _, o := range objects {
		s.Objects = append(s.Objects, o)
	}
	all := inNamespaces(others)
	all["shop"] = s.Objects
	var e Expressions
	e.Set(all)
	s.ExpressionsOver = e.Over("shop")
	config, verdicts := Table{Sources, Destinations}.Compile(s)
	for _, d := range config.Destinations {
		v := verdicts[sectionDestinations][d.Name]
		if v.Reason != v1beta1.ReasonExpressionBudget {
			if d.Filter.Expression == "" || !v.Accepted {
				t.Errorf("%s: got the filter %+v and the verdict %+v; want it accepted with its expression", d.Name, d.Filter, v)
			}
			continue
		}
		names += d.Name
		if v.Accepted || d.State != liveconfig.Paused || d.PausedReason != v1beta1.ReasonExpressionBudget || d.Filter.Expression != "" ||
			v.Revision != d.Revision {
			t.Errorf("%s is refused: got %+v, verdict %+v; want it paused, without the expression", d.Name, d, v)
		}
	}
	return names
}

// The youngest expressions above a budget are refused; accepted objects remain accepted.
func TestExpressionsAboveTheBudgetAreRefused(t *testing.T) {
	var many []*v1beta1.WebhookDestination
	for i := range 100 {
		many = append(many, filtered(fmt.Sprintf("d%02d", i), thousand, i))
	}
	if got := refused(t, nil, many...); got != "" {
		t.Errorf("100,000 instructions: refused %s; want none", got)
	}
	younger := filtered("a", thousand, 1000)
	if got := refused(t, nil, append(many, younger)...); got != "a" {
		t.Errorf("101,000 instructions: refused %q; want the youngest", got)
	}
	accepted(younger, 1)
	if got := refused(t, nil, append(many, younger)...); got != "d99" {
		t.Errorf("the youngest was accepted before: refused %q; want the youngest of the others", got)
	}
	accepted(younger, 0) // It was accepted before it was edited.
	if got := refused(t, nil, append(many, younger)...); got != "a" {
		t.Errorf("the youngest was edited: refused %q; want the youngest", got)
	}
	for _, d := range many {
		accepted(d, 1)
	}
	all := AllExpressions
	t.Cleanup(func() { AllExpressions = all })
	AllExpressions.Instructions = 2_500
	other := filtered("x", thousand, 2000)
	accepted(other, 1)
	if got := refused(t, map[string][]*v1beta1.WebhookDestination{"z": {other}}, many[0], younger); got != "a" {
		t.Errorf("the budget of all namespaces: refused %q; want what was not accepted", got)
	}
	AllExpressions = expression.Size{Instructions: all.Instructions, Nodes: 25}
	if got := refused(t, map[string][]*v1beta1.WebhookDestination{"z": {other}}, younger); got != "a" {
		t.Errorf("the nodes of all namespaces: refused %q; want the destination", got)
	}
}

// The expressions of filters and of responses have one budget, and a destination without a filter has a part of it.
func TestTheBudgetIncludesResponses(t *testing.T) {
	all := NamespaceExpressions
	t.Cleanup(func() { NamespaceExpressions = all })
	NamespaceExpressions.Instructions = 1_500
	d := func(name, filter, success string, minute int) *v1beta1.WebhookDestination {
		d := filtered(name, filter, minute)
		if filter == "" {
			d.Spec.Filter = nil
		}
		if success != "" {
			d.Spec.Success = &v1beta1.Success{Expression: success}
		}
		return d
	}
	responses := strings.ReplaceAll(thousand, "call.", "response.json.")
	for name, test := range map[string]struct {
		younger *v1beta1.WebhookDestination
		field   string
	}{
		"a response": {d("b", "", responses, 1), "spec.success.expression: 24 nodes"},
		"both":       {d("b", "true", responses, 1), "spec.filter.expression and spec.success.expression: 25 nodes"},
	} {
		source := &v1beta1.Source{}
		source.Name = "web"
		s := Snapshot{Namespace: "shop", Objects: []Object{source, d("a", "", responses, 0), test.younger}}
		var e Expressions
		e.Set(map[string][]Object{"shop": s.Objects})
		s.ExpressionsOver = e.Over("shop")
		config, verdicts := Table{Sources, Destinations}.Compile(s)
		if a, b := config.Destinations[0], config.Destinations[1]; a.SuccessRule == nil || b.SuccessRule != nil || b.State != liveconfig.Paused {
			t.Errorf("%s: got %+v and %+v; want the rule of the older one only, and the younger one paused", name, a, b)
		}
		v := verdicts[sectionDestinations]["b"]
		if v.Reason != v1beta1.ReasonExpressionBudget || !strings.HasPrefix(v.Message, test.field) {
			t.Errorf("%s: got %s: %s; want the budget and %q", name, v.Reason, v.Message, test.field)
		}
	}
}

// The order of namespaces has no influence: expressions that were accepted, according to their status or by a decision of
// this process, keep their part, and the oldest of the others are accepted.
func TestTheBudgetOfAllNamespaces(t *testing.T) {
	all := AllExpressions
	t.Cleanup(func() { AllExpressions = all })
	AllExpressions.Instructions = 2_000
	list := func(d ...*v1beta1.WebhookDestination) []*v1beta1.WebhookDestination { return d }
	kept, older, newer := filtered("kept", thousand, 9), filtered("older", thousand, 1), filtered("newer", thousand, 2)
	accepted(kept, 1)
	of := map[string][]*v1beta1.WebhookDestination{"a": list(newer), "b": list(older), "c": list(kept),
		"d": list(filtered("broken", "call.a ==", 0))}
	var e Expressions
	over := func(step, want string, again ...string) {
		t.Helper()
		var got []string
		for _, namespace := range []string{"a", "b", "c", "d", "e"} {
			for name, whose := range e.Over(namespace) {
				got = append(got, name)
				if whose != ofAll {
					t.Errorf("%s: %s is above the budget %s; want that %s", step, name, whose, ofAll)
				}
			}
		}
		if text := strings.Join(got, " "); text != want {
			t.Errorf("%s: refused %q; want %q", step, text, want)
		}
		if text := strings.Join(again, " "); step != "the start" && text != "" {
			t.Errorf("%s: compiled again: %s", step, text)
		}
	}
	e.Set(inNamespaces(of))
	over("the start", "newer")
	ancient := filtered("ancient", thousand, 0)
	over("an older object that is new", "newer ancient", e.Set(inNamespaces(map[string][]*v1beta1.WebhookDestination{"e": list(ancient)}))...)
	over("without a change", "newer ancient", e.Set(inNamespaces(map[string][]*v1beta1.WebhookDestination{"b": list(older)}))...)
	if again := e.Set(inNamespaces(map[string][]*v1beta1.WebhookDestination{"c": nil})); strings.Join(again, " ") != "e" {
		t.Errorf("after a deletion: compiled again %v; want the namespace of the oldest one", again)
	}
	over("after a deletion", "newer")
	ancient.Generation = 2
	if again := e.Set(inNamespaces(map[string][]*v1beta1.WebhookDestination{"e": list(ancient), "b": nil})); strings.Join(again, " ") != "a" {
		t.Errorf("after an edit and a deletion: compiled again %v; want the namespace of the one that fits now", again)
	}
	over("after an edit and a deletion", "")
}
