// Package expression is the CEL filter of a WebhookDestination: a condition over "call", the
// message as it would be delivered. The controllers compile it to validate a destination, the
// dispatcher to filter; both use this package, so their results are equal.
//
// An expression sees the message as JSON: numbers are doubles (150 and 150.5 compare with 100
// alike), objects are maps, a missing field is an error (unless written as
// call.?properties.?total.orValue(0)). Available are CEL's standard functions, the macros has, all
// and exists, and charAt, indexOf, lastIndexOf, lowerAscii, upperAscii, split, substring and trim
// on strings.
//
// The cost of an expression is bounded twice: by an estimate at compile time, and by a count at run
// time, in units that do not depend on the machine or its load, so that equal calls always have
// equal results.
package expression

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/checker"
	"github.com/google/cel-go/common"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/overloads"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/ext"
)

const (
	// MaxLength of an expression in characters.
	MaxLength = 1024
	// MaxCost bounds one evaluation in CEL's units: about one per field access, comparison or ten
	// characters of text. It is enough for a simple condition on each of some 2,000 elements and
	// takes a few milliseconds. The time per unit grows with the count: ten times as many units
	// took a second.
	MaxCost = 10_000
	// maxEstimate permits one pass over a long list, also over the lists in its elements, but not a
	// comparison of every element of one list with every element of another.
	maxEstimate = 1_000_000
	// assumedSize is the length that the estimate assumes for a list, object or text of a call;
	// assumedInner is that within the elements of a list.
	assumedSize, assumedInner = 1000, 16
)

// ErrNotBool is returned for a call for which the result is neither true nor false.
var ErrNotBool = errors.New("the expression returned a value that is neither true nor false")

// Program is a compiled expression. It is safe for concurrent use.
type Program struct{ program cel.Program }

// Compile checks and prepares an expression. The error is written for the author of the expression:
// it has the reason, the position and the fix.
func Compile(expr string) (*Program, error) {
	if n := utf8.RuneCountInString(expr); n > MaxLength {
		return nil, fmt.Errorf("the expression has %d characters; at most %d are allowed", n, MaxLength)
	}
	if strings.TrimSpace(expr) == "" {
		return nil, errors.New("the expression is empty; omit it or write a condition, for example call.properties.total > 100")
	}
	env, err := environment()
	if err != nil {
		return nil, err
	}
	checked, issues := env.Compile(expr)
	if err := explain(issues); err != nil {
		return nil, err
	}
	if t := checked.OutputType(); !t.IsExactType(cel.BoolType) && !t.IsExactType(cel.DynType) {
		return nil, fmt.Errorf("the expression returns a value of type %s; it must be true or false, for example call.properties.total > 100", t)
	}
	if err := restrict(checked.NativeRep()); err != nil {
		return nil, err
	}
	estimate, err := env.EstimateCost(checked, sizes{})
	if err != nil {
		return nil, fmt.Errorf("the expression's cost cannot be estimated: %w", err)
	}
	if estimate.Max > maxEstimate {
		return nil, errors.New("the expression is too expensive; do not compare every element of one list with every element of another, and compare with fixed texts instead of long fields")
	}
	program, err := env.Program(checked,
		cel.EvalOptions(cel.OptOptimize),
		cel.CostTracking(costs{}), cel.CostLimit(MaxCost))
	if err != nil {
		return nil, fmt.Errorf("the expression cannot be prepared: %w", err)
	}
	return &Program{program}, nil
}

// environment is shared by all expressions and immutable.
var environment = sync.OnceValues(func() (*cel.Env, error) {
	return cel.NewEnv(
		cel.OptionalTypes(),
		cel.ClearMacros(), cel.Macros(cel.HasMacro, cel.AllMacro, cel.ExistsMacro),
		cel.Variable("call", cel.DynType),
		cel.CrossTypeNumericComparisons(true),
		ext.Strings(ext.StringsVersion(5)),
		cel.ParserExpressionSizeLimit(MaxLength),
		cel.ParserRecursionLimit(100),
	)
})

// restrict rejects functions with unbounded cost: functions that multiply texts, and patterns from
// the call.
func restrict(a *ast.AST) error {
	var err error
	ast.PreOrderVisit(a.Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		if e.Kind() != ast.CallKind || err != nil {
			return
		}
		call := e.AsCall()
		switch name := call.FunctionName(); name {
		case "replace", "format", "join", "reverse", "strings.quote":
			err = fmt.Errorf("%s cannot be used in a filter", name)
		case overloads.Matches:
			if args := call.Args(); args[len(args)-1].Kind() != ast.LiteralKind {
				err = errors.New("the pattern of matches must be a fixed text")
			}
		}
	}))
	return err
}

// explain converts the compiler's issues to one line without its internals.
func explain(issues *cel.Issues) error {
	if issues == nil || issues.Err() == nil {
		return nil
	}
	var lines []string
	for _, e := range issues.Errors() {
		if len(lines) == 3 {
			break
		}
		lines = append(lines, fmt.Sprintf("line %d, column %d: %s", max(e.Location.Line(), 1), max(e.Location.Column(), 0)+1, plain(e)))
	}
	return errors.New(strings.Join(lines, "; "))
}

// plain explains an issue in words.
func plain(e *common.Error) string {
	text := e.Message
	if name, ok := between(text, "undeclared reference to '", "'"); ok {
		if slices.Contains([]string{"map", "filter", "exists_one", "existsOne"}, name) {
			return name + " is not available; use has, all or exists"
		}
		return fmt.Sprintf("%s is not known; the fields of a call are written as call.%s", name, strings.TrimPrefix(name, "."))
	}
	if name, ok := between(text, "found no matching overload for '", "'"); ok {
		types, _ := between(text, "applied to '", "'")
		if symbol, ok := operators.FindReverse(name); ok && symbol != "" {
			name = symbol
		}
		return fmt.Sprintf("%s cannot be applied to %s", name, types)
	}
	text, _, _ = strings.Cut(text, " expecting ")
	return strings.TrimPrefix(strings.Join(strings.Fields(text), " "), "Syntax error: ")
}

func between(s, before, after string) (string, bool) {
	_, s, ok := strings.Cut(s, before)
	if !ok {
		return "", false
	}
	s, _, _ = strings.Cut(s, after)
	return s, true
}

// Call is a message parsed for expressions.
type Call struct{ variables map[string]any }

// Parse parses a message, the JSON object that would be delivered.
func Parse(body []byte) (Call, error) {
	var object map[string]any
	// Within an object, only a number outside of the range of doubles fails; it becomes null.
	if _ = json.Unmarshal(body, &object); object == nil {
		return Call{}, errors.New("the call is not a JSON object")
	}
	return Call{map[string]any{"call": object}}, nil
}

// Match reports whether the expression is true for a message. An error (a missing field, a value of
// the wrong type, a cost above MaxCost) means that it does not match; the error may contain data of
// the call and must not be logged.
func (p *Program) Match(body []byte) (bool, error) {
	call, err := Parse(body)
	if err != nil {
		return false, err
	}
	return p.MatchCall(call)
}

// MatchCall is Match for a message that is matched with several expressions.
func (p *Program) MatchCall(call Call) (bool, error) {
	value, _, err := p.program.Eval(call.variables)
	if err != nil {
		return false, err
	}
	matches, ok := value.Value().(bool)
	if !ok {
		return false, ErrNotBool
	}
	return matches, nil
}

// sizes are the assumptions of the estimate about a call, whose fields have no declared types.
type sizes struct{}

// EstimateSize implements checker.CostEstimator.
func (sizes) EstimateSize(element checker.AstNode) *checker.SizeEstimate {
	for _, part := range element.Path() {
		if strings.HasPrefix(part, "@") { // The element is within a list or object.
			return &checker.SizeEstimate{Max: assumedInner}
		}
	}
	return &checker.SizeEstimate{Max: assumedSize}
}

// EstimateCallCost implements checker.CostEstimator.
func (sizes) EstimateCallCost(string, string, *checker.AstNode, []checker.AstNode) *checker.CallEstimate {
	return nil
}

// costs counts operations that CEL assumes to be constant but are not: comparing whole objects,
// measuring and converting texts, looking up time zones.
type costs struct{}

// CallCost implements interpreter.ActualCostEstimator.
func (costs) CallCost(function, overload string, args []ref.Val, _ ref.Val) *uint64 {
	cost := uint64(1)
	switch function {
	case overloads.Matches, overloads.Contains, overloads.StartsWith, overloads.EndsWith:
		return nil // CEL's own count is correct.
	case operators.Index, operators.OptIndex, operators.OptSelect:
		return &cost
	case operators.Equals, operators.NotEquals:
		cost += min(weight(args[0].Value()), weight(args[1].Value()))
		return &cost
	}
	if strings.HasSuffix(overload, "_tz") {
		cost += 500
	}
	for _, arg := range args {
		v := arg.Value()
		if _, text := v.(string); text || function == operators.In || function == operators.OldIn {
			cost += weight(v)
		}
	}
	return &cost
}

// weight estimates the cost of reading a whole value.
func weight(v any) uint64 {
	sum := uint64(1)
	switch v := v.(type) {
	case string:
		sum += uint64(len(v) / 10)
	case []any:
		for _, e := range v {
			sum += weight(e)
		}
	case map[string]any:
		for _, e := range v {
			sum += 1 + weight(e)
		}
	case []ref.Val:
		for _, e := range v {
			sum += weight(e.Value())
		}
	case map[ref.Val]ref.Val:
		for k, e := range v {
			sum += weight(k.Value()) + weight(e.Value())
		}
	}
	return sum
}
