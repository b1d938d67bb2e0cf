package shape

import (
	"errors"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/expression"
	"github.com/posthorn/posthorn/test/check"
)

const body = `{"type":"track","event":"Paid","userId":"u 1","big":12345678901234567890,"evil":"a\r\nX-Evil: 1"}`

func request(t testing.TB, r *liveconfig.Request) (Request, error) {
	t.Helper()
	s, err := New(r)
	if err != nil {
		t.Fatal(err)
	}
	return s.Request(Message{Source: "shop/web", Destination: "shop/crm", Type: "track", Body: []byte(body), LongNumbers: true})
}

func TestRequest(t *testing.T) {
	plain, err := request(t, nil)
	if err != nil || string(plain.Body) != body {
		t.Errorf("without a shape: got %s, error %v", plain.Body, err)
	}
	r, err := request(t, &liveconfig.Request{Body: "{'b': call.big, 'a': [call.event, source.name, destination.namespace]}", Method: "PUT",
		Path: "['users', call.userId, 7, 'ü%']", Query: "{'e': call.event, 'l': ['x y', 2], 'n': null}",
		Headers: []liveconfig.RequestHeader{{Name: "X-A", Expression: "call.event"}, {Name: "X-B", Expression: "null"}}})
	if err != nil {
		t.Fatal(err)
	}
	check.Equal(t, "body", string(r.Body), `{"a":["Paid","web","shop"],"b":"12345678901234567890"}`)
	check.Equal(t, "method", r.Method, "PUT")
	check.Equal(t, "path", r.Path, "/users/u%201/7/%C3%BC%25")
	check.Equal(t, "query", r.Query, "e=Paid&l=x+y&l=2")
	check.Equal(t, "content type", r.ContentType, "")
	if len(r.Headers) != 1 || r.Headers[0].Name != "X-A" || r.Headers[0].Value != "Paid" {
		t.Errorf("headers: got %v", r.Headers)
	}
	r, err = request(t, &liveconfig.Request{Body: "{'event': call.event, 'user': call.userId}", ContentType: liveconfig.ContentForm})
	if err != nil || string(r.Body) != "event=Paid&user=u+1" || r.ContentType != "application/x-www-form-urlencoded" {
		t.Errorf("form: got %q as %s, error %v", r.Body, r.ContentType, err)
	}
	r, err = request(t, &liveconfig.Request{Body: "'New: ' + call.event", ContentType: liveconfig.ContentText})
	if err != nil || string(r.Body) != "New: Paid" || r.ContentType != "text/plain; charset=utf-8" {
		t.Errorf("text: got %q as %s, error %v", r.Body, r.ContentType, err)
	}
	if r, err = request(t, &liveconfig.Request{Method: "DELETE", Path: "[call.userId]"}); err != nil || string(r.Body) != body {
		t.Errorf("without a body: got %s, error %v", r.Body, err)
	}
	if r, err = request(t, &liveconfig.Request{Body: "null", Path: "call.missing"}); err != nil || !r.Omitted {
		t.Errorf("null: got %+v, error %v; want omitted", r, err)
	}
}

func TestBadResults(t *testing.T) {
	header := func(expr string) *liveconfig.Request {
		return &liveconfig.Request{Headers: []liveconfig.RequestHeader{{Name: "X-A", Expression: expr}}}
	}
	for name, c := range map[string]struct {
		r    *liveconfig.Request
		want string
	}{
		"..":            {&liveconfig.Request{Path: "['a', '..']"}, "spec.request.path: InvalidValue at result[1]: a segment of the path is . or .."},
		"empty":         {&liveconfig.Request{Path: "['']"}, "InvalidValue at result[0]: a segment of the path is empty"},
		"slash":         {&liveconfig.Request{Path: "['a/b']"}, "contains / or \\"},
		"encoded slash": {&liveconfig.Request{Path: "['a%2Fb']"}, "contains %2e, %2f or %5c"},
		"encoded dots":  {&liveconfig.Request{Path: "['%2E%2e']"}, "contains %2e, %2f or %5c"},
		"no list":       {&liveconfig.Request{Path: "'a'"}, "spec.request.path: WrongType: the value must be a list of texts"},
		"long path":     {&liveconfig.Request{Path: "[1,2,3,4,5,6,7,8,9].map(i, '" + strings.Repeat("x", 1000) + "')"}, "TooLarge"},
		"long query": {&liveconfig.Request{Query: "{'a': [1,2,3,4,5,6,7,8,9].map(i, '" + strings.Repeat("x", 1000) + "')}"},
			"spec.request.query: TooLarge"},
		"whole call":      {&liveconfig.Request{Query: "call"}, "spec.request.query: WrongType"},
		"header":          {header("call.evil"), "spec.request.headers[X-A]: InvalidValue: the value has a line break"},
		"list in header":  {header("[1]"), "spec.request.headers[X-A]: WrongType"},
		"text":            {&liveconfig.Request{Body: "call", ContentType: liveconfig.ContentText}, "spec.request.body: WrongType"},
		"nested form":     {&liveconfig.Request{Body: "{'a': {'b': 1}}", ContentType: liveconfig.ContentForm}, "spec.request.body: WrongType"},
		"missing in body": {&liveconfig.Request{Body: "{'a': call.x}"}, "spec.request.body: MissingField at character 11 (call.x)"},
	} {
		_, err := request(t, c.r)
		if f, ok := errors.AsType[*expression.Failure](err); !ok || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v (%v); want %q", name, err, f, c.want)
		}
		if err != nil && (strings.Contains(err.Error(), "Evil") || strings.Contains(err.Error(), "u 1")) {
			t.Errorf("%s: the error contains data of the message: %v", name, err)
		}
	}
}

func TestNewReportsTheField(t *testing.T) {
	for _, r := range []*liveconfig.Request{{Query: "call."}, {ContentType: "XML"}, {Headers: []liveconfig.RequestHeader{{Name: "X", Expression: "("}}}} {
		if _, err := New(r); err == nil || !strings.HasPrefix(err.Error(), "request.") {
			t.Errorf("%+v: got %v", r, err)
		}
	}
}
