package expression

import (
	"encoding/json"
	"fmt"
	"strings"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/operators"
)

// MaxResponseBytes is the length of the longest body that response.json has.
const MaxResponseBytes = 4 << 10

const (
	varStatus, varHeaders, varJSON = "status", "headers", "response.json"
)

var successes = dialect{newEnvironment(cel.Variable(varStatus, cel.IntType),
	cel.Variable(varHeaders, cel.MapType(cel.StringType, cel.StringType)), cel.Variable(varJSON, cel.DynType)),
	varJSON, "response.json.ok == true", "available are status, headers and response.json"}

// Success is the compiled condition under which a 2xx response counts as a success. It is safe for concurrent use.
type Success struct {
	program   *Program
	readsJSON bool
}

// Response is a 2xx response.
type Response struct {
	Status int
	// Headers are the first values by lower-case names.
	Headers map[string]string
	// Body is the body, or its beginning if Truncated is true.
	Body      []byte
	Truncated bool
}

// CompileSuccess checks and prepares a condition over status, headers and response.json, as Compile does.
func CompileSuccess(expr string) (*Success, error) {
	p, checked, err := successes.compile(expr)
	if err != nil {
		return nil, err
	}
	s := &Success{program: p}
	ast.PreOrderVisit(checked.Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		s.readsJSON = s.readsJSON || e.Kind() == ast.IdentKind && e.AsIdent() == varJSON
		if name := headerOf(e); err == nil && name != strings.ToLower(name) {
			err = fmt.Errorf("names in headers are in lower case; write '%s' for '%s'", strings.ToLower(name), name)
		}
	}))
	if err != nil {
		return nil, err
	}
	return s, nil
}

// headerOf returns the name of the header that a part of an expression reads; empty if it reads none.
func headerOf(e ast.Expr) string {
	isHeaders := func(e ast.Expr) bool { return e.Kind() == ast.IdentKind && e.AsIdent() == varHeaders }
	literal := func(e ast.Expr) string {
		if e.Kind() != ast.LiteralKind {
			return ""
		}
		text, _ := e.AsLiteral().Value().(string)
		return text
	}
	switch e.Kind() {
	case ast.SelectKind:
		if s := e.AsSelect(); isHeaders(s.Operand()) {
			return s.FieldName()
		}
	case ast.CallKind:
		args := e.AsCall().Args()
		switch e.AsCall().FunctionName() {
		case operators.Index, operators.OptIndex, operators.OptSelect:
			if isHeaders(args[0]) {
				return literal(args[1])
			}
		case operators.In:
			if isHeaders(args[1]) {
				return literal(args[0])
			}
		}
	}
	return ""
}

// Size returns the size of the program.
func (s *Success) Size() Size { return s.program.size }

// Accepts evaluates the condition for a response. why is the reason why it is not met; it contains no data of the response.
func (s *Success) Accepts(r Response) (ok bool, why string) {
	w := new(work)
	value, noJSON := r.json()
	result, _, err := s.program.eval(map[string]any{varStatus: r.Status, varHeaders: r.Headers, varJSON: value, workVariable: w}, w)
	if err == nil {
		var isBool bool
		if ok, isBool = result.Value().(bool); ok {
			return true, ""
		}
		if why = "it is false"; !isBool {
			why = "its value is neither true nor false"
		}
	} else if why = s.program.failure(err, w); why == "" {
		why = "a field is missing or has another type"
	}
	if s.readsJSON && noJSON != "" {
		why += " (response.json is null: " + noJSON + ")"
	}
	return false, why
}

// json returns the body as JSON; null with a reason if there is none.
func (r *Response) json() (value any, why string) {
	switch {
	case r.Truncated || len(r.Body) > MaxResponseBytes:
		return nil, "the body is longer than 4 KiB"
	case len(r.Body) == 0:
		return nil, "there is no body"
	case !json.Valid(r.Body):
		return nil, "the body is not JSON"
	}
	_ = json.Unmarshal(r.Body, &value) // Only a number outside of the range of doubles fails; it becomes null.
	return value, ""
}
