package expression

import (
	"fmt"
	"regexp"
	"strings"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/cost"
	"cel.dev/cel-go/common/functions"
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/overloads"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/common/types/traits"
	"cel.dev/cel-go/interpreter"
)

const (
	// MaxCost bounds one evaluation in CEL's units: about one per field access, comparison or ten
	// characters of text. It is enough for a simple condition on each of some 2,000 elements and
	// takes a few milliseconds.
	MaxCost = 10_000
	// MaxCallCost bounds the evaluations of one call with all filters of its Source.
	MaxCallCost = 10 * MaxCost
	// MaxWork bounds the texts of one evaluation that are searched for a pattern or another text: the sum
	// of bytes times instructions.
	MaxWork = 2_000_000
	// workPerUnit is the work that costs as much time as a unit.
	workPerUnit = MaxWork / MaxCost
	// maxEstimate permits one pass over a long list, also over the lists in its elements, but not a
	// comparison of every element of one list with every element of another.
	maxEstimate = 1_000_000
	// assumedSize is the length that the estimate assumes for a list, object or text of a call;
	// assumedInner is that within the elements of a list.
	assumedSize, assumedInner = 1000, 16
)

// workVariable is the hidden variable of an evaluation with its work.
const workVariable = "@work"

// work is what one evaluation has searched.
type work struct {
	done uint64
	// over is the node of the call that would exceed MaxWork; 0 if there is none.
	over int64
}

// charged is a call of a function whose time is more than proportional to its arguments, or whose arguments
// may have many times the size of the message. cel-go charges a call after it ran; this one is charged before.
type charged struct {
	interpreter.InterpretableCall
	// instructions of the pattern or text that is searched for in the first argument; nil for no search.
	instructions func(args []ref.Val) int
	run          func(args ...ref.Val) ref.Val
}

// Exec implements interpreter.InterpretableV2.
func (c *charged) Exec(frame *interpreter.ExecutionFrame) ref.Val {
	args := make([]ref.Val, len(c.Args()))
	for i, arg := range c.Args() {
		if args[i] = arg.Exec(frame); types.IsUnknownOrError(args[i]) {
			return args[i]
		}
	}
	if c.instructions != nil {
		spend(frame, c.ID(), uint64(length(args[0]))*uint64(c.instructions(args)))
	}
	if costs := frame.CostTracker(); costs != nil {
		var call cost.Call = c
		if c.instructions == nil {
			call = estimated{c}
		}
		costs.EvalVarArgs(frame, c.ID(), call, args, nil)
	}
	return types.LabelErrNode(c.ID(), c.run(args...))
}

// estimated is a call without an overload, for which costs decides: the cost models of cel-go's libraries need the result.
type estimated struct{ *charged }

// OverloadID implements cost.Call.
func (estimated) OverloadID() string { return "" }

// spend charges work of a node, and ends the whole evaluation above MaxWork: an error could be hidden by another one, of
// a missing field.
func spend(frame *interpreter.ExecutionFrame, node int64, n uint64) {
	v, _ := frame.ResolveName(workVariable)
	w := v.(*work)
	if w.done += n; w.done > MaxWork {
		w.over = node
		panic(interpreter.EvalCancelledError{Cause: interpreter.CostLimitExceeded, Message: "too much work"})
	}
}

// Eval implements interpreter.Interpretable.
func (c *charged) Eval(vars interpreter.Activation) ref.Val {
	return interpreter.EvalActivation(vars, c.Exec)
}

// length returns the bytes of a text.
func length(v ref.Val) int {
	text, _ := v.Value().(string)
	return len(text)
}

// chargeFunctions decorates the calls of functions that must be charged before they run. bindings has the overloads
// of those that are not operators.
func chargeFunctions(bindings map[string]*functions.Overload) interpreter.InterpretableDecoratorV2 {
	return func(i interpreter.InterpretableV2) (interpreter.InterpretableV2, error) {
		call, ok := i.(interpreter.InterpretableCall)
		if !ok {
			return i, nil
		}
		switch call.Function() {
		case operators.Equals:
			return &charged{call, nil, func(args ...ref.Val) ref.Val { return types.Equal(args[0], args[1]) }}, nil
		case operators.NotEquals:
			return &charged{call, nil, func(args ...ref.Val) ref.Val { return types.Bool(types.Equal(args[0], args[1]) != types.True) }}, nil
		case operators.In, operators.OldIn:
			return &charged{call, nil, contains}, nil
		}
		b := bindings[call.OverloadID()]
		if b == nil {
			return i, nil
		}
		c := &charged{call, nil, func(args ...ref.Val) ref.Val {
			switch {
			case b.Unary != nil && len(args) == 1:
				return b.Unary(args[0])
			case b.Binary != nil && len(args) == 2:
				return b.Binary(args[0], args[1])
			}
			return b.Function(args...)
		}}
		if name := call.Function(); name == "indexOf" || name == "lastIndexOf" {
			c.instructions = func(args []ref.Val) int { return length(args[1]) }
		}
		return c, nil
	}
}

// chargeLoops decorates what the loops of an expression read, and the rest as inner does: cel-go copies the keys of an object
// before it begins a loop, and does not charge it.
func chargeLoops(a *ast.AST, inner func(interpreter.InterpretableV2) (interpreter.InterpretableV2, error),
) interpreter.InterpretableDecoratorV2 {
	ranges := map[int64]bool{}
	for _, loop := range ast.MatchDescendants(ast.NavigateAST(a), ast.KindMatcher(ast.ComprehensionKind)) {
		ranges[loop.AsComprehension().IterRange().ID()] = true
	}
	return func(i interpreter.InterpretableV2) (interpreter.InterpretableV2, error) {
		out, err := inner(i)
		if err == nil && ranges[i.ID()] {
			out = &chargedRange{out}
		}
		return out, err
	}
}

// chargedRange is a value that a loop reads.
type chargedRange struct{ interpreter.InterpretableV2 }

// Exec implements interpreter.InterpretableV2.
func (r *chargedRange) Exec(frame *interpreter.ExecutionFrame) ref.Val {
	v := r.InterpretableV2.Exec(frame)
	if m, ok := v.(traits.Mapper); ok {
		n, _ := m.Size().(types.Int)
		spend(frame, r.ID(), uint64(n)*workPerKey)
	}
	return v
}

// Eval implements interpreter.Interpretable.
func (r *chargedRange) Eval(vars interpreter.Activation) ref.Val {
	return interpreter.EvalActivation(vars, r.Exec)
}

func contains(args ...ref.Val) ref.Val {
	if c, ok := args[1].(traits.Container); ok {
		return c.Contains(args[0])
	}
	return types.MaybeNoSuchOverloadErr(args[1])
}

// matchers compile the patterns of matches. Each needs its overload's ID: without it, cel-go's own
// factory replaces it.
func matchers() cel.ProgramOption {
	var all []*interpreter.RegexOptimization
	for _, overload := range []string{overloads.Matches, overloads.MatchesString} {
		all = append(all, &interpreter.RegexOptimization{Function: overloads.Matches, OverloadID: overload, RegexIndex: 1, Factory: matcher})
	}
	return cel.OptimizeRegex(all...)
}

func matcher(call interpreter.InterpretableCall, pattern string) (interpreter.InterpretableCall, error) {
	n, err := instructions(pattern)
	if err != nil {
		return nil, err
	}
	compiled, err := regexp.Compile(pattern)
	if err != nil {
		return nil, err
	}
	return &charged{call, func([]ref.Val) int { return n }, func(args ...ref.Val) ref.Val {
		if text, ok := args[0].Value().(string); ok {
			return types.Bool(compiled.MatchString(text))
		}
		return types.NoSuchOverloadErr()
	}}, nil
}

// sizes are the assumptions of the estimate about a call, whose fields have no declared types.
type sizes struct{}

// EstimateSize implements cost.Estimator.
func (sizes) EstimateSize(element cost.AstNode) *cost.SizeEstimate {
	for _, part := range element.Path() {
		if strings.HasPrefix(part, "@") { // The element is within a list or object.
			return &cost.SizeEstimate{Max: assumedInner}
		}
	}
	return &cost.SizeEstimate{Max: assumedSize}
}

// EstimateCallCost implements cost.Estimator. The value of an optional field has the size of a field.
func (sizes) EstimateCallCost(function, _ string, _ *cost.AstNode, _ []cost.AstNode) *cost.CallEstimate {
	if function == "orValue" || function == "value" {
		return &cost.CallEstimate{CostEstimate: cost.Estimate{Min: 1, Max: 1}, ResultSize: &cost.SizeEstimate{Max: assumedSize}}
	}
	return nil
}

// costs counts operations that CEL assumes to be constant but are not: comparing whole objects,
// measuring and converting texts, adding lists, looking up time zones.
type costs struct{}

// CallCost implements interpreter.ActualCostEstimator.
func (costs) CallCost(function, overload string, args []ref.Val, _ ref.Val) *uint64 {
	cost := uint64(1)
	switch function {
	case overloads.Contains, overloads.StartsWith, overloads.EndsWith:
		return nil // CEL's own count is correct.
	case operators.Index, operators.OptIndex, operators.OptSelect:
		return &cost
	case operators.Equals, operators.NotEquals: // It ends at the first difference.
		cost += min(weight(args[0], MaxCost+1), weight(args[1], MaxCost+1))
		return &cost
	case operators.In, operators.OldIn:
		cost += weight(args[1], MaxCost+1)
		return &cost
	}
	switch function {
	case "join", "format", "json.encode", "form.encode":
		if list, ok := args[0].(traits.Lister); ok && len(args) == 2 && function == "join" {
			n, _ := list.Size().(types.Int)
			cost += uint64(n) * uint64(length(args[1])) / 10
		}
		for _, arg := range args {
			cost += textIn(arg, 10*MaxTransformCost) / 10
		}
		return &cost
	case "cel.@mapInsert":
		if entries, ok := args[1].(traits.Mapper); ok && len(args) == 2 {
			n, _ := entries.Size().(types.Int)
			cost += uint64(n)
		}
		return &cost
	}
	if strings.HasSuffix(overload, "_tz") {
		cost += 500
	}
	for _, arg := range args {
		switch v := arg.(type) {
		case types.String:
			cost += uint64(len(v) / 10)
		case types.Bytes:
			cost += uint64(len(v) / 10)
		case traits.MutableLister: // The result of a loop, which grows in place.
		case traits.Lister:
			if n, ok := v.Size().(types.Int); ok && function == operators.Add {
				cost += uint64(n)
			}
		}
	}
	return &cost
}

// weight estimates the cost of reading a whole value, and ends at a limit.
func weight(v any, limit uint64) uint64 {
	if value, ok := v.(ref.Val); ok {
		v = value.Value()
	}
	sum := uint64(1)
	add := func(v any) bool {
		if sum < limit {
			sum += weight(v, limit-sum)
		}
		return sum < limit
	}
	switch v := v.(type) {
	case string:
		sum += uint64(len(v) / 10)
	case []any:
		for _, e := range v {
			if !add(e) {
				break
			}
		}
	case map[string]any:
		for k, e := range v {
			if sum += uint64(len(k) / 10); !add(e) {
				break
			}
		}
	case []ref.Val:
		for _, e := range v {
			if !add(e) {
				break
			}
		}
	case map[ref.Val]ref.Val:
		for k, e := range v {
			if !add(k) || !add(e) {
				break
			}
		}
	}
	return sum
}

// textIn returns the bytes of all texts in a value, and ten for each other one; it ends at a limit.
func textIn(v ref.Val, limit uint64) (sum uint64) {
	sum = 10
	add := func(v ref.Val) {
		if sum < limit {
			sum += textIn(v, limit-sum)
		}
	}
	switch v := v.(type) {
	case types.String:
		sum += uint64(len(v))
	case types.Bytes:
		sum += uint64(len(v))
	case traits.Mapper:
		for it := v.Iterator(); sum < limit && it.HasNext() == types.True; {
			key := it.Next()
			add(key)
			add(v.Get(key))
		}
	case traits.Lister:
		for it := v.Iterator(); sum < limit && it.HasNext() == types.True; {
			add(it.Next())
		}
	}
	return sum
}

// checkLoops rejects loops whose time is not proportional to the message: an all or exists within another one that
// does not go through a field of the outer element, or within one over a list that repeats values of the call.
// cel-go copies the keys of an object before it begins a loop, and does not charge it.
func checkLoops(a *ast.AST, root string) error {
	for _, loop := range ast.MatchDescendants(ast.NavigateAST(a), ast.KindMatcher(ast.ComprehensionKind)) {
		outer := outerLoop(loop)
		if outer == nil {
			continue
		}
		repeats := false
		ast.PreOrderVisit(outer.IterRange(), ast.NewExprVisitor(func(e ast.Expr) {
			repeats = repeats || (e.Kind() == ast.ListKind || e.Kind() == ast.MapKind) && !isConstant(e)
		}))
		if repeats || !goesThrough(loop.AsComprehension().IterRange(), outer.IterVar()) {
			return fmt.Errorf("the expression is too expensive; an all or exists within another one must go through a field of the outer element, for example %s.items.exists(i, i.tags.exists(t, t == 'x'))", root)
		}
	}
	return nil
}

// outerLoop returns the loop around another one; nil without one.
func outerLoop(inner ast.NavigableExpr) ast.ComprehensionExpr {
	for {
		outer, ok := inner.Parent()
		if !ok {
			return nil
		}
		if outer.Kind() == ast.ComprehensionKind && outer.AsComprehension().IterRange().ID() != inner.ID() {
			return outer.AsComprehension()
		}
		inner = outer
	}
}

// goesThrough reports whether a value is constant or a part of a variable.
func goesThrough(e ast.Expr, variable string) bool {
	switch e.Kind() {
	case ast.IdentKind:
		return e.AsIdent() == variable
	case ast.SelectKind:
		return goesThrough(e.AsSelect().Operand(), variable)
	case ast.CallKind:
		call := e.AsCall()
		switch call.FunctionName() {
		case operators.Index, operators.OptIndex, operators.OptSelect:
			return goesThrough(call.Args()[0], variable)
		}
		for _, arg := range call.Args() {
			if !isConstant(arg) {
				return false
			}
		}
		return call.IsMemberFunction() && goesThrough(call.Target(), variable)
	}
	return isConstant(e)
}

// isConstant reports whether a value does not depend on the call.
func isConstant(e ast.Expr) bool {
	constant := true
	ast.PreOrderVisit(e, ast.NewExprVisitor(func(e ast.Expr) { constant = constant && e.Kind() != ast.IdentKind }))
	return constant
}
