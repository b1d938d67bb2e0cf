// Package expression has the CEL expressions of a WebhookDestination: its filter (Program), the condition for its responses
// (Success), and the values that it sends (Transform). A filter is a condition over "call", the message as it would be
// delivered. The controllers compile it to validate a destination, the dispatcher to filter; both use this package, so
// their results are equal.
//
// A filter sees the message as JSON: numbers are doubles (150 and 150.5 compare with 100
// alike), objects are maps. A call without a field that the expression needs, or with a value of another
// type, does not match (unless the field is written as call.?properties.?total.orValue(0)). Every other error of an
// evaluation leaves open whether the call matches: Result.Failure.
// Available are CEL's standard functions, the macros has, all
// and exists, and charAt, indexOf, lastIndexOf, lowerAscii, upperAscii, split, substring and trim
// on strings.
//
// The cost of an expression is bounded three times: by an estimate and by the size of its patterns at compile time,
// before the calls of functions that take more time than their arguments are long, and by a count at run
// time. All are in units that do not depend on the machine or its load, so that equal calls always have
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

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/functions"
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/overloads"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/ext"
)

const (
	// MaxLength of an expression in characters.
	MaxLength = 1024
)

// Program is a compiled expression. It is safe for concurrent use.
type Program struct {
	program cel.Program
	// places describe the calls of functions and operators, by node, for Result.Failure.
	places map[int64]string
	size   Size
	most   uint64
}

// Size is what a compiled expression needs of the memory of the dispatchers, in units that do not depend on the
// machine.
type Size struct {
	// Instructions of its patterns, and nodes of its syntax tree.
	Instructions, Nodes int
}

// Plus returns the sum of two sizes.
func (s Size) Plus(o Size) Size { return Size{s.Instructions + o.Instructions, s.Nodes + o.Nodes} }

// Within reports whether a size is not above a limit.
func (s Size) Within(limit Size) bool {
	return s.Instructions <= limit.Instructions && s.Nodes <= limit.Nodes
}

// Size returns the size of the program.
func (p *Program) Size() Size { return p.size }

// MostCost returns the estimate of the highest cost of an evaluation, in the units of MaxCost, for a call with lists, objects and
// texts of 1,000 elements. An evaluation ends at MaxCost in any case.
func (p *Program) MostCost() uint64 { return p.most }

// dialect is what the expressions of a field can name.
type dialect struct {
	environment func() (*cel.Env, error)
	// root is the variable with JSON, and example a condition, for the texts of errors.
	root, example string
	// unknown is the fix for an unknown name; %s is the name.
	unknown string
}

var filters = dialect{newEnvironment(cel.Variable("call", cel.DynType)), "call", "call.properties.total > 100",
	"the fields of a call are written as call.%s"}

// Compile checks and prepares the expression of a filter. The error is written for the author of the expression:
// it has the reason, the position and the fix.
func Compile(expr string) (*Program, error) {
	p, _, err := filters.compile(expr)
	return p, err
}

// compile checks and prepares an expression.
func (d *dialect) compile(expr string) (*Program, *ast.AST, error) {
	if n := utf8.RuneCountInString(expr); n > MaxLength {
		return nil, nil, fmt.Errorf("the expression has %d characters; at most %d are allowed", n, MaxLength)
	}
	if strings.TrimSpace(expr) == "" {
		return nil, nil, fmt.Errorf("the expression is empty; omit it or write a condition, for example %s", d.example)
	}
	env, err := d.environment()
	if err != nil {
		return nil, nil, err
	}
	checked, issues := env.Compile(expr)
	if err := d.explain(issues); err != nil {
		return nil, nil, err
	}
	if t := checked.OutputType(); !t.IsExactType(cel.BoolType) && !t.IsExactType(cel.DynType) {
		return nil, nil, fmt.Errorf("the expression returns a value of type %s; it must be true or false, for example %s", t, d.example)
	}
	size, err := restrict(checked.NativeRep(), "replace", "format", "join", "reverse", "strings.quote")
	if err != nil {
		return nil, nil, err
	}
	if err := checkLoops(checked.NativeRep(), d.root); err != nil {
		return nil, nil, err
	}
	estimate, err := env.EstimateCost(checked, sizes{})
	if err != nil {
		return nil, nil, fmt.Errorf("the expression's cost cannot be estimated: %w", err)
	}
	if estimate.Max > maxEstimate {
		return nil, nil, errors.New("the expression is too expensive; do not compare every element of one list with every element of another, and compare with fixed texts instead of long fields")
	}
	searches, err := bindings(env, "indexOf", "lastIndexOf")
	if err != nil {
		return nil, nil, err
	}
	program, err := env.Program(checked,
		cel.CustomDecoratorV2(chargeFunctions(searches)), matchers(),
		cel.EvalOptions(cel.OptOptimize),
		cel.CostTracking(costs{}), cel.CostLimit(MaxCost))
	if err != nil {
		return nil, nil, fmt.Errorf("the expression cannot be prepared: %w", err)
	}
	return &Program{program, places(checked.NativeRep(), ast.CallKind), size, estimate.Max}, checked.NativeRep(), nil
}

// bindings returns the overloads of functions by ID.
func bindings(env *cel.Env, names ...string) (map[string]*functions.Overload, error) {
	all := map[string]*functions.Overload{}
	for _, name := range names {
		overloads, err := env.Functions()[name].Bindings()
		if err != nil {
			return nil, err
		}
		for _, o := range overloads {
			all[o.Operator] = o
		}
	}
	return all, nil
}

// newEnvironment returns the environment of a dialect, which is shared by all its expressions and immutable.
func newEnvironment(variables ...cel.EnvOption) func() (*cel.Env, error) {
	return sync.OnceValues(func() (*cel.Env, error) {
		return cel.NewEnv(append(variables,
			cel.OptionalTypes(),
			cel.ClearMacros(), cel.Macros(cel.HasMacro, cel.AllMacro, cel.ExistsMacro),
			cel.CrossTypeNumericComparisons(true),
			ext.Strings(ext.StringsVersion(5)),
			cel.ParserExpressionSizeLimit(MaxLength),
			cel.ParserRecursionLimit(100),
		)...)
	})
}

// restrict returns the size of an expression. It rejects functions with unbounded cost: functions that multiply
// texts (refused), patterns from the call, and long patterns.
func restrict(a *ast.AST, refused ...string) (size Size, err error) {
	ast.PreOrderVisit(a.Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		size.Nodes++
		if e.Kind() != ast.CallKind || err != nil {
			return
		}
		call := e.AsCall()
		switch name := call.FunctionName(); {
		case slices.Contains(refused, name):
			err = fmt.Errorf("%s cannot be used here", name)
		case name == overloads.Matches:
			pattern := call.Args()[len(call.Args())-1]
			if pattern.Kind() != ast.LiteralKind {
				err = errors.New("the pattern of matches must be a fixed text")
				return
			}
			text, _ := pattern.AsLiteral().Value().(string)
			n, invalid := instructions(text)
			size.Instructions += n
			switch {
			case invalid != nil:
				err = fmt.Errorf("the pattern of matches is invalid: %w", invalid)
			case n > MaxPatternInstructions:
				err = fmt.Errorf("a pattern of matches has more than %d instructions: each character, class and alternative is one, and repeats such as {0,100} multiply them; write a shorter pattern, with * or + instead of large repeats", MaxPatternInstructions)
			case size.Instructions > MaxInstructions:
				err = fmt.Errorf("the patterns of the expression have more than %d instructions in all; use fewer patterns", MaxInstructions)
			}
		}
	}))
	return size, err
}

// explain converts the compiler's issues to one line without its internals.
func (d *dialect) explain(issues *cel.Issues) error {
	if issues == nil || issues.Err() == nil {
		return nil
	}
	var lines []string
	for _, e := range issues.Errors() {
		if len(lines) == 3 {
			break
		}
		lines = append(lines, fmt.Sprintf("line %d, column %d: %s", max(e.Location.Line(), 1), max(e.Location.Column(), 0)+1, d.plain(e)))
	}
	return errors.New(strings.Join(lines, "; "))
}

// plain explains an issue in words.
func (d *dialect) plain(e *common.Error) string {
	text := e.Message
	if name, ok := between(text, "undeclared reference to '", "'"); ok {
		if slices.Contains([]string{"map", "filter", "exists_one", "existsOne"}, name) {
			return name + " is not available; use has, all or exists"
		}
		return name + " is not known; " + strings.ReplaceAll(d.unknown, "%s", strings.TrimPrefix(name, "."))
	}
	if name, ok := between(text, "found no matching overload for '", "'"); ok {
		types, _ := between(text, "applied to '", "'")
		if name == operators.Conditional {
			return fmt.Sprintf("? : cannot be applied to %s; its two values must have the same type: write dyn() around one, for example dyn(null)", types)
		}
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

// Call is a message parsed for expressions. It must not be used concurrently.
type Call struct {
	variables map[string]any
	work      *work
	// Units are the units that all evaluations have cost, and Parse.
	Units uint64
}

// bytesPerUnit is the number of bytes that cost a unit to parse.
const bytesPerUnit = 10

// Parse parses a message, the JSON object that would be delivered.
func Parse(body []byte) (*Call, error) {
	var object map[string]any
	// Within an object, only a number outside of the range of doubles fails; it becomes null.
	if _ = json.Unmarshal(body, &object); object == nil {
		return nil, errors.New("the call is not a JSON object")
	}
	w := new(work)
	return &Call{variables: map[string]any{"call": object, workVariable: w}, work: w, Units: uint64(len(body) / bytesPerUnit)}, nil
}

// Result is the result of an expression for a call.
type Result struct {
	Matches bool
	// Failure is the reason why the expression did not decide about the call; empty if it did. It contains no data of the call.
	Failure string
}

// Match evaluates the expression for a message.
func (p *Program) Match(call *Call) (r Result) {
	if call.Units >= MaxCallCost {
		return Result{Failure: fmt.Sprintf("the filters of the call cost more than %d units; use fewer or cheaper expressions on the destinations of the Source", MaxCallCost)}
	}
	value, units, err := p.eval(call.variables, call.work)
	call.Units += units
	if err == nil {
		matches, ok := value.Value().(bool)
		return Result{Matches: ok && matches}
	}
	return Result{Failure: p.failure(err, call.work)}
}

// eval evaluates the expression. units is what that has cost.
func (p *Program) eval(variables map[string]any, w *work) (value ref.Val, units uint64, err error) {
	*w = work{}
	value, details, err := p.program.Eval(variables)
	units = MaxCost
	if cost := details.ActualCost(); cost != nil {
		units = *cost
	}
	return value, units + w.done/workPerUnit, err
}

// absent are the beginnings of cel-go's errors for a missing field or element, and for a value of another type.
var absent = []string{
	"no such key", "no such attribute", "no such overload", "index out of bounds", "no such field", "optional.none() dereference",
	"unsupported comprehension range type", "invalid qualifier type", "unsupported index", "index '", "got '",
}

const (
	outside     = "a position is outside of a text; check size() first"
	unconverted = "a value cannot be converted; check it first, for example with matches('^[0-9]+$')"
)

// failures are fixed texts for cel-go's errors, which may contain data of the call.
var failures = []struct{ part, text string }{
	{"actual cost limit exceeded", fmt.Sprintf("the evaluation costs more than %d units; check a cheaper condition first, or read fewer elements", MaxCost)},
	{"insert failed", "two entries of an object have the same key; use another key"},
	{"by zero", "division by zero; check the divisor first"},
	{"overflow", "a number or time is too large; check it first"},
	{"index out of range", outside},
	{"substring range", outside},
	{"conver", unconverted},
	{"strconv", unconverted},
	{"timestamp", unconverted},
	{"duration", unconverted},
	{"time", unconverted},
}

// failure explains why an evaluation failed; it is empty if a field is missing or has another type.
func (p *Program) failure(err error, w *work) string {
	if w.over != 0 {
		return p.places[w.over] + fmt.Sprintf("the text to search is too long: the evaluation needs more than %d bytes times instructions; check size() first, or write a shorter pattern", MaxWork)
	}
	text, node := err.Error(), int64(0)
	if e, ok := errors.AsType[*types.Err](err); ok {
		node = e.NodeID()
	}
	for _, start := range absent {
		if strings.HasPrefix(text, start) {
			return ""
		}
	}
	for _, f := range failures {
		if strings.Contains(text, f.part) {
			return p.places[node] + f.text
		}
	}
	return p.places[node] + "the evaluation failed"
}

// maxPlace bounds the field of a place, which is stored with every message whose evaluation fails there.
const maxPlace = 100

// places describe the nodes of some kinds: the position in the expression, and the field that they read.
func places(a *ast.AST, kinds ...ast.ExprKind) map[int64]string {
	all := map[int64]string{}
	ast.PreOrderVisit(a.Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		o, ok := a.SourceInfo().GetOffsetRange(e.ID())
		if !ok || !slices.Contains(kinds, e.Kind()) {
			return
		}
		place := fmt.Sprintf("character %d", o.Start+1)
		if field := fieldOf(e); field != "" && len(field) <= maxPlace && field[0] != '@' {
			place += " (" + field + ")"
		}
		all[e.ID()] = place + ": "
	}))
	return all
}

// fieldOf returns the first field that a part of an expression reads, as it is written; empty without one.
func fieldOf(e ast.Expr) string {
	switch e.Kind() {
	case ast.IdentKind:
		return e.AsIdent()
	case ast.SelectKind:
		if of := fieldOf(e.AsSelect().Operand()); of != "" {
			return of + "." + e.AsSelect().FieldName()
		}
	case ast.CallKind:
		call := e.AsCall()
		args := call.Args()
		if call.IsMemberFunction() {
			args = append([]ast.Expr{call.Target()}, args...)
		}
		if name := call.FunctionName(); slices.Contains([]string{operators.Index, operators.OptIndex, operators.OptSelect}, name) &&
			args[1].Kind() == ast.LiteralKind {
			of, key := fieldOf(args[0]), args[1].AsLiteral().Value()
			if name == operators.OptSelect {
				return fmt.Sprintf("%s.?%v", of, key)
			}
			return fmt.Sprintf("%s[%v]", of, key)
		}
		for _, arg := range args {
			if field := fieldOf(arg); field != "" {
				return field
			}
		}
	}
	return ""
}
