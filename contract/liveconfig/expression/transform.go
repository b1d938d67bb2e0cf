package expression

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/ext"
)

const (
	// MaxTransformLength of the text of a transform, in bytes.
	MaxTransformLength = 8 << 10
	// MaxTransformCost bounds the evaluations of all transforms for one request, in the units of MaxCost. It also
	// bounds the memory of an evaluation: about ten bytes of text a unit.
	MaxTransformCost = 100_000
	// MaxResult bounds the JSON text of a result, in bytes.
	MaxResult = 256 << 10
	// maxTransformEstimate permits loops within loops, but not three over the same list.
	maxTransformEstimate = 1_000_000_000
	// workPerKey is the work to copy a key of an object before a loop over it begins.
	workPerKey = 20
)

// Transform is a compiled expression of which the value is sent. It is safe for concurrent use.
type Transform struct {
	text    string
	program cel.Program
	places  map[int64]string
	size    Size
	most    uint64
	// identity is true for the expression "call".
	identity bool
}

// Size returns the size of the program.
func (t *Transform) Size() Size { return t.size }

// MostCost is as that of Program; an evaluation ends at MaxTransformCost in any case.
func (t *Transform) MostCost() uint64 { return t.most }

// CompileTransform checks and prepares an expression. The error is written for its author, as that of Compile.
func CompileTransform(expr string) (*Transform, error) {
	if n := len(expr); n > MaxTransformLength {
		return nil, fmt.Errorf("the expression has %d bytes; at most %d are allowed", n, MaxTransformLength)
	}
	if strings.TrimSpace(expr) == "" {
		return nil, errors.New("the expression is empty; omit it or write a value, for example {'text': call.event}")
	}
	env, err := transforms()
	if err != nil {
		return nil, err
	}
	checked, issues := env.Compile(expr)
	if err := filters.explain(issues); err != nil {
		return nil, err
	}
	tree := checked.NativeRep()
	size, err := restrict(tree, "replace", "reverse", "strings.quote")
	if err != nil {
		return nil, err
	}
	estimate, err := env.EstimateCost(checked, sizes{})
	if err != nil {
		return nil, fmt.Errorf("the expression's cost cannot be estimated: %w", err)
	}
	if estimate.Max > maxTransformEstimate {
		return nil, errors.New("the expression is too expensive; use fewer loops within loops")
	}
	charged, err := bindings(env, "indexOf", "lastIndexOf", "format", "join", "base64.encode", "base64.decode", "json.encode", "sha256",
		"url.encode", "form.encode")
	if err != nil {
		return nil, err
	}
	program, err := env.Program(checked,
		cel.CustomDecoratorV2(chargeLoops(tree, chargeFunctions(charged))), matchers(),
		cel.EvalOptions(cel.OptOptimize),
		cel.CostTracking(costs{}), cel.CostLimit(MaxTransformCost))
	if err != nil {
		return nil, fmt.Errorf("the expression cannot be prepared: %w", err)
	}
	e := tree.Expr()
	return &Transform{text: expr, program: program, places: places(tree, ast.CallKind, ast.SelectKind, ast.ComprehensionKind), size: size,
		most: estimate.Max, identity: e.Kind() == ast.IdentKind && e.AsIdent() == "call"}, nil
}

// transforms is the environment of all transforms, and immutable. It has neither a clock nor random numbers.
var transforms = sync.OnceValues(func() (*cel.Env, error) {
	names := cel.MapType(cel.StringType, cel.StringType)
	return cel.NewEnv(
		cel.OptionalTypes(),
		cel.ClearMacros(), cel.Macros(cel.HasMacro, cel.AllMacro, cel.ExistsMacro, cel.MapMacro, cel.MapFilterMacro, cel.FilterMacro),
		cel.Variable("call", cel.DynType), cel.Variable("source", names), cel.Variable("destination", names),
		cel.CrossTypeNumericComparisons(true),
		ext.Strings(ext.StringsVersion(5), ext.StringsMaxPrecision(20)),
		ext.TwoVarComprehensions(),
		ext.Encoders(ext.EncodersVersion(0)),
		function("base64.encode", "base64_encode_string", cel.StringType, func(v ref.Val) (string, error) {
			return base64.StdEncoding.EncodeToString(bytesOf(v)), nil
		}),
		function("sha256", "sha256_string", cel.StringType, sumOf), function("sha256", "sha256_bytes", cel.BytesType, sumOf),
		function("json.encode", "json_encode", cel.DynType, func(v ref.Val) (string, error) {
			text, err := appendJSON(v, "")
			return string(text), err
		}),
		function("url.encode", "url_encode", cel.DynType, func(v ref.Val) (string, error) {
			text, err := scalar(v)
			return PathSegment(text), err
		}),
		function("form.encode", "form_encode", cel.MapType(cel.StringType, cel.DynType), func(v ref.Val) (string, error) {
			text, err := appendForm(v)
			return string(text), err
		}),
		cel.ParserExpressionSizeLimit(MaxTransformLength),
		cel.ParserRecursionLimit(100),
	)
})

// function declares an overload of a function from a value to a text.
func function(name, overload string, of *cel.Type, f func(ref.Val) (string, error)) cel.EnvOption {
	return cel.Function(name, cel.Overload(overload, []*cel.Type{of}, cel.StringType, cel.UnaryBinding(func(v ref.Val) ref.Val {
		text, err := f(v)
		if err != nil {
			return types.WrapErr(err)
		}
		return types.String(text)
	})))
}

func bytesOf(v ref.Val) []byte {
	if text, ok := v.(types.String); ok {
		return []byte(text)
	}
	return []byte(v.(types.Bytes))
}

func sumOf(v ref.Val) (string, error) {
	sum := sha256.Sum256(bytesOf(v))
	return hex.EncodeToString(sum[:]), nil
}

// Input is what the transforms of one request read. It must not be used concurrently.
type Input struct {
	body      []byte
	variables map[string]any
	work      work
	units     uint64
}

// NewInput returns the input for a message, of which body is the fixed point (event.FixedPoint) of its JSON object, and for
// the names of its Source and destination. It must not change body, and neither may the caller.
func NewInput(body []byte, source, destination map[string]string) *Input {
	in := &Input{body: body, variables: map[string]any{"source": source, "destination": destination}}
	in.variables[workVariable] = &in.work
	return in
}

// Failure is why a transform has no value for a call. It contains no data of the call.
type Failure struct {
	// Kind is one of the constants.
	Kind string
	// Place is the position in the expression and the field that it reads there, or the part of the result.
	Place string
	// Text is the rule and the fix.
	Text string
}

// The kinds of failures.
const (
	MissingField   = "MissingField"
	WrongType      = "WrongType"
	InvalidValue   = "InvalidValue"
	TooExpensive   = "TooExpensive"
	TooLarge       = "TooLarge"
	EvaluationFail = "EvaluationFailed"
)

// Error implements error.
func (f *Failure) Error() string {
	if f.Place == "" {
		return f.Kind + ": " + f.Text
	}
	return f.Kind + " at " + f.Place + ": " + f.Text
}

// Value is a value of a transform. It is valid until the next evaluation with the same Input.
type Value struct {
	of  *Transform
	val ref.Val
	// text is the JSON text of the call if the value is the whole call.
	text []byte
}

// Eval evaluates the transform. The error is a *Failure.
func (t *Transform) Eval(in *Input) (Value, error) {
	if in.units >= MaxTransformCost {
		return Value{}, &Failure{Kind: TooExpensive, Text: tooExpensive}
	}
	if t.identity {
		in.units++
		return Value{of: t, text: in.body}, nil
	}
	if in.variables["call"] == nil {
		var object map[string]any
		if _ = json.Unmarshal(in.body, &object); object == nil { // See Parse.
			return Value{}, &Failure{Kind: WrongType, Text: "the call is not a JSON object"}
		}
		in.variables["call"] = object
		in.units += uint64(len(in.body) / bytesPerUnit)
	}
	in.work = work{}
	val, details, err := t.program.Eval(in.variables)
	in.units += in.work.done / workPerUnit
	if cost := details.ActualCost(); cost != nil {
		in.units += *cost
	} else {
		in.units += MaxTransformCost
	}
	switch {
	case err == nil:
		return Value{of: t, val: val}, nil
	case in.work.over != 0:
		return Value{}, &Failure{TooExpensive, t.place(in.work.over), fmt.Sprintf("the evaluation needs more than %d bytes times instructions to search texts, or reads too many objects; check size() first, or write a shorter pattern", MaxWork)}
	}
	return Value{}, t.failure(err)
}

var tooExpensive = fmt.Sprintf("the expressions of the request cost more than %d units; read fewer elements", MaxTransformCost)

// place returns the description of a node.
func (t *Transform) place(node int64) string { return strings.TrimSuffix(t.places[node], ": ") }

// failure explains why an evaluation failed.
func (t *Transform) failure(err error) *Failure {
	text, place := err.Error(), ""
	if own, ok := errors.AsType[*Failure](err); ok {
		f := *own
		if e, ok := errors.AsType[*types.Err](err); ok && f.Place == "" {
			f.Place = t.place(e.NodeID())
		}
		return &f
	}
	if e, ok := errors.AsType[*types.Err](err); ok {
		place = t.place(e.NodeID())
	}
	for _, start := range missing {
		if strings.HasPrefix(text, start) {
			return &Failure{MissingField, place, "the call has no such field or element; write call.?a.?b.orValue(null), or check it with has()"}
		}
	}
	for _, start := range absent {
		if strings.HasPrefix(text, start) {
			return &Failure{WrongType, place, "a value has another type than the expression needs; check it with type(), or convert it"}
		}
	}
	if strings.Contains(text, "actual cost limit exceeded") {
		return &Failure{TooExpensive, place, tooExpensive}
	}
	for _, f := range failures {
		if strings.Contains(text, f.part) {
			return &Failure{InvalidValue, place, f.text}
		}
	}
	return &Failure{EvaluationFail, place, "the evaluation failed"}
}

// missing are those of absent that report a missing field or element.
var missing = []string{"no such key", "no such attribute", "no such field", "index out of bounds", "optional.none() dereference"}

// Null reports whether the value is null.
func (v Value) Null() bool { return v.val != nil && v.val.Type() == types.NullType }

// JSON returns the JSON text of the value, which JavaScript's JSON.parse and JSON.stringify do not change. It must not be changed.
func (v Value) JSON() ([]byte, error) {
	if v.text != nil {
		return v.text, nil
	}
	return appendJSON(v.val, v.of.text)
}

// Text returns a text, number or boolean as a text.
func (v Value) Text() (string, error) {
	if v.text != nil {
		return "", notScalar
	}
	return scalar(v.val)
}

// Form returns an object of texts, numbers, booleans and lists of them in the format of HTML forms.
func (v Value) Form() ([]byte, error) {
	if v.text != nil {
		return nil, notForm
	}
	return appendForm(v.val)
}

// Texts returns a list of texts, numbers and booleans.
func (v Value) Texts() ([]string, error) {
	if v.text != nil {
		return nil, notList
	}
	return texts(v.val)
}
