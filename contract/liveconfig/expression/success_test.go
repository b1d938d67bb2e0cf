package expression

import (
	"maps"
	"strings"
	"testing"
)

func success(t testing.TB, expr string) *Success {
	t.Helper()
	s, err := CompileSuccess(expr)
	if err != nil {
		t.Fatalf("CompileSuccess(%s): got error %v, want none", expr, err)
	}
	return s
}

var answered = Response{Status: 202, Headers: map[string]string{"content-type": "application/json", "x-result": "queued"},
	Body: []byte(`{"ok":true,"error":null,"count":3,"items":[{"status":201},{"status":409}],"secret":"s3cr3t","big":1e400}`)}

func TestAccepts(t *testing.T) {
	for expr, want := range map[string]string{
		"response.json.ok":                                      "",
		"response.json.ok == true && status == 202":             "",
		"response.json.count > 2 && response.json.count == 3":   "",
		"response.json.?failed.orValue(0) == 0":                 "",
		"!has(response.json.failed)":                            "",
		"response.json.error == null":                           "",
		"headers['x-result'] == 'queued'":                       "",
		"headers[?'x-missing'].orValue('none') == 'none'":       "",
		"headers['content-type'].startsWith('application/')":    "",
		"'x-result' in headers && !('retry-after' in headers)":  "",
		"status in [200, 202]":                                  "",
		"response.json.items.exists(i, i.status >= 400)":        "",
		"response.json.items.all(i, i.status < 400)":            "it is false",
		"status == 200":                                         "it is false",
		"response.json.secret":                                  "its value is neither true nor false",
		"response.json.nothing":                                 "a field is missing or has another type",
		"response.json.secret > 1":                              "a field is missing or has another type",
		"response.json.big > 1":                                 "a field is missing or has another type",
		"headers['x-missing'] == 'a'":                           "a field is missing or has another type",
		"int(response.json.secret) == 1":                        "character 4 (response.json.secret): a value cannot be converted; check it first, for example with matches('^[0-9]+$')",
		"size(response.json.items) / (size(headers) - 2) == 1":  "character 27 (response.json.items): division by zero; check the divisor first",
		"response.json.nothing == 1 || response.json.ok":        "", // || ignores an error beside true.
		"response.json.items.all(i, i.status < 300 || i.retry)": "a field is missing or has another type",
	} {
		ok, why := success(t, expr).Accepts(answered)
		if ok != (want == "") || why != want {
			t.Errorf("%s: got %v, %q; want %q", expr, ok, why, want)
		}
		if strings.Contains(why, "s3cr3t") {
			t.Errorf("%s: the reason contains a value of the response: %s", expr, why)
		}
	}
}

// A body that is missing, too long or not JSON is null, and the reason names it if the expression reads it.
func TestJSONOfAResponse(t *testing.T) {
	long := `{"ok":true,"pad":"` + strings.Repeat("x", MaxResponseBytes-20) + `"}`
	for name, c := range map[string]struct {
		body      string
		truncated bool
		null      string
	}{
		"4,096 bytes": {body: long},
		"4,097 bytes": {body: long + "\n", null: "the body is longer than 4 KiB"},
		"truncated":   {body: `{"ok":true}`, truncated: true, null: "the body is longer than 4 KiB"},
		"empty":       {null: "there is no body"},
		"text":        {body: "ok", null: "the body is not JSON"},
		"two values":  {body: `{"ok":true}{"ok":true}`, null: "the body is not JSON"},
		"cut":         {body: `{"ok":true`, null: "the body is not JSON"},
		"spaces":      {body: " {\"ok\":true}\r\n"},
		"not UTF-8":   {body: "{\"ok\":true,\"a\":\"\xff\"}"},
		"deep":        {body: strings.Repeat("[", 2000) + strings.Repeat("]", 2000), null: "-"},
	} {
		r := Response{Status: 200, Body: []byte(c.body), Truncated: c.truncated}
		ok, why := success(t, "response.json.ok").Accepts(r)
		if ok != (c.null == "") {
			t.Errorf("%s: got %v, %q; want %v", name, ok, why, c.null == "")
		}
		if suffix := " (response.json is null: " + c.null + ")"; c.null != "" && c.null != "-" && !strings.HasSuffix(why, suffix) {
			t.Errorf("%s: got %q; want the end %q", name, why, suffix)
		}
		if _, why := success(t, "status == 500").Accepts(r); why != "it is false" {
			t.Errorf("%s: a condition without response.json: got %q", name, why)
		}
	}
	if ok, why := success(t, "response.json == null").Accepts(Response{Status: 204}); !ok {
		t.Errorf("a response without a body: got %q, want response.json to be null", why)
	}
}

func TestErrorsOfASuccess(t *testing.T) {
	for expr, want := range map[string]string{
		"":                                     "for example response.json.ok == true",
		"status":                               "a value of type int; it must be true or false, for example response.json.ok == true",
		"call.type == 'track'":                 "call is not known; available are status, headers and response.json",
		"response.body == 'ok'":                "line 1, column 9: response.body is not known; available are status, headers and response.json",
		"response.json.map(i, i)[0]":           "map is not available; use has, all or exists",
		"status == '200'":                      "== cannot be applied to (int, string)",
		"headers['X-Result'] == 'a'":           "names in headers are in lower case; write 'x-result' for 'X-Result'",
		"headers[?'X-Result'].hasValue()":      "write 'x-result' for 'X-Result'",
		"'X-Result' in headers":                "write 'x-result' for 'X-Result'",
		"has(headers.Server)":                  "write 'server' for 'Server'",
		"headers.?Server.hasValue()":           "write 'server' for 'Server'",
		"headers['a'] > 1":                     "> cannot be applied to (string, int)",
		"response.json.a.matches('.{0,999}y')": "more than 200 instructions",
		"response.json.a.exists(x, response.json.b.exists(y, x == y))": "for example response.json.items.exists(i, i.tags.exists(t, t == 'x'))",
	} {
		if _, err := CompileSuccess(expr); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v; want an error with %q", expr, err, want)
		}
	}
}

// An expression is bounded as a filter is: by units, and by bytes times instructions.
func TestTheCostOfASuccessIsBounded(t *testing.T) {
	headers := maps.Clone(answered.Headers)
	headers["x-long"] = strings.Repeat("x", 60_000)
	list := "[" + strings.TrimSuffix(strings.Repeat("1,", 2_000), ",") + "]"
	for expr, want := range map[string]string{
		"response.json.all(x, response.json == response.json)": "the evaluation costs more than 10000 units",
		"headers['x-long'].matches('a{199}y')":                 "the evaluation needs more than 2000000 bytes times instructions",
	} {
		ok, why := success(t, expr).Accepts(Response{Status: 200, Headers: headers, Body: []byte(list)})
		if ok || !strings.Contains(why, want) {
			t.Errorf("%s: got %v, %q; want %q", expr, ok, why, want)
		}
	}
}

func BenchmarkAccepts(b *testing.B) {
	s := success(b, "response.json.ok == true && !has(response.json.failed)")
	b.ReportAllocs()
	for b.Loop() {
		if ok, why := s.Accepts(answered); !ok {
			b.Fatal(why)
		}
	}
}
