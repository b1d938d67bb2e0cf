package expression

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/analytics/event"
)

var (
	shopSource = map[string]string{"name": "web", "namespace": "shop"}
	crmNames   = map[string]string{"name": "crm", "namespace": "shop"}
)

const paid = `{"type":"track","event":"Order \"Paid\"","messageId":"m1","userId":"u 1","context":{"ip":"10.0.0.1"},` +
	`"properties":{"total":150.5,"count":3,"big":"9007199254740993","items":[{"sku":"a","price":10,"tags":["x","y"]},{"sku":"b","price":1e+21,"tags":[]}]}}`

func transform(t testing.TB, expr string) *Transform {
	t.Helper()
	p, err := CompileTransform(expr)
	if err != nil {
		t.Fatalf("CompileTransform(%s): %v", expr, err)
	}
	return p
}

// made returns the JSON text of an expression's value for a call, or the failure.
func made(t testing.TB, expr, call string) string {
	t.Helper()
	v, err := transform(t, expr).Eval(NewInput([]byte(call), shopSource, crmNames))
	if err != nil {
		return err.Error()
	}
	text, err := v.JSON()
	if err != nil {
		return err.Error()
	}
	if !event.IsFixedPoint(text) {
		t.Errorf("%s: JavaScript would change %s", expr, text)
	}
	return string(text)
}

func TestTransform(t *testing.T) {
	for expr, want := range map[string]string{
		"call":          paid,
		"call.context":  `{"ip":"10.0.0.1"}`,
		"call.event":    `"Order \"Paid\""`,
		"call.?nothing": "WrongType: the value is optional; write .orValue(null) behind it, or a ? before the key: {?'a': call.?a}",
		"null":          "null",
		"{'b': call.properties.total, 'a': call.properties.count, '10': 1, '9': 2u}":                         `{"9":2,"10":1,"a":3,"b":150.5}`,
		"{'text': 'New: %s, %.2f'.format([call.event, call.properties.total])}":                              `{"text":"New: Order \"Paid\", 150.50"}`,
		"[1.0, 1e21, 0.1, -0.0, 9007199254740993, 1e-7]":                                                     `[1,1e+21,0.1,0,"9007199254740993",1e-7]`,
		"call.properties.items.map(i, i.sku).join(',')":                                                      `"a,b"`,
		"call.properties.items.filter(i, i.price > 100.0).map(i, {'t': i.tags.map(t, t + '!'), 's': i.sku})": `[{"s":"b","t":[]}]`,
		"call.properties.transformMap(k, v, k != 'items', {'v': v})":                                         `{"big":{"v":"9007199254740993"},"count":{"v":3},"total":{"v":150.5}}`,
		"call.properties.items.transformMapEntry(i, v, {v.sku: i})":                                          `{"a":0,"b":1}`,
		"[7, 8].transformMap(i, v, v)":                                                                       `{"0":7,"1":8}`,
		"{?'a': call.?nothing, ?'b': call.?userId}":                                                          `{"b":"u 1"}`,
		"base64.encode(call.userId)":                                                                         `"dSAx"`,
		"base64.encode(b'abc')":                                                                              `"YWJj"`,
		"string(base64.decode('YWJj'))":                                                                      `"abc"`,
		"sha256('abc')":                                                                                      `"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"`,
		"json.encode(call.properties.items[0])":                                                              `"{\"price\":10,\"sku\":\"a\",\"tags\":[\"x\",\"y\"]}"`,
		"url.encode('a b/c?ü')":                                                                              `"a%20b%2Fc%3F%C3%BC"`,
		"form.encode({'b': [1, 'x y'], 'a': true, 'c': null})":                                               `"a=true&b=1&b=x+y"`,
		"source.name + '/' + destination.name":                                                               `"web/crm"`,
		"timestamp('2026-01-02T03:04:05.6Z')":                                                                `"2026-01-02T03:04:05.6Z"`,
		"duration('90s')":                                                                                    `"90s"`,
		"b'abc'":                                                                                             `"YWJj"`,
		"'\\u0000\\n\\u2028<'":                                                                               `"\u0000\n` + "\u2028" + `<"`,
		"call.event.matches('^Order') ? 1 : 2":                                                               "1",

		"call.properties.nothing":                                 "MissingField at character 16 (call.properties.nothing): the call has no such field or element; write call.?a.?b.orValue(null), or check it with has()",
		"{'a': 1, 'b': call.properties.items[7]}":                 "MissingField at character 36 (call.properties.items[7]): the call has no such field or element; write call.?a.?b.orValue(null), or check it with has()",
		"{'a': call.event + 1}":                                   "WrongType at character 18 (call.event): a value has another type than the expression needs; check it with type(), or convert it",
		"call.event.map(x, x)":                                    "WrongType: a value has another type than the expression needs; check it with type(), or convert it",
		"int(call.event)":                                         "InvalidValue at character 4 (call.event): a value cannot be converted; check it first, for example with matches('^[0-9]+$')",
		"{'a': [1, 1.0 / 0.0]}":                                   "InvalidValue at result.a[1]: a number is infinite or not a number, which JSON does not have",
		"[call.properties].map(p, p.transformMap(k, v, 1.0/0.0))": "InvalidValue at result[0].*: a number is infinite or not a number, which JSON does not have",
		"{1: 'a', '1': 'b'}":                                      "InvalidValue: two keys of an object are equal as texts",
		"form.encode({'a': {}})":                                  "WrongType at character 12: a value of a form or query must be a text, a number, a boolean, null or a list of them; use json.encode for others",
		"type(call)":                                              "WrongType: the value has a type that JSON does not have",
	} {
		if got := made(t, expr, paid); got != want {
			t.Errorf("%s:\n got %s\nwant %s", expr, got, want)
		}
	}
}

func TestTransformCompileErrors(t *testing.T) {
	for expr, want := range map[string]string{
		"":                            "the expression is empty",
		"call.":                       "line 1, column 6",
		"event":                       "event is not known",
		"now()":                       "now is not known",
		"call.a.replace('a', call.b)": "replace cannot be used here",
		"call.a.matches(call.b)":      "the pattern of matches must be a fixed text",
		"call.a.map(x, call.a.map(y, call.a.map(z, 1)))": "too expensive",
		strings.Repeat(" ", MaxTransformLength) + "1":    "8193 bytes; at most 8192",
		"call.n == 0 ? null : {'n': 1}":                  "line 1, column 13: ? : cannot be applied to (bool, null, map(string, int)); its two values must have the same type: write dyn() around one",
		"source.name.map(x, x)":                          "cannot be range of a comprehension",
	} {
		if _, err := CompileTransform(expr); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: got %v; want %q", expr, err, want)
		}
	}
}

// Every evaluation ends at the limits, whatever the call has, and what it builds is bounded while it is built.
func TestTransformsAreBounded(t *testing.T) {
	many := strings.TrimSuffix(strings.Repeat("1,", 12_000), ",")
	var keys strings.Builder
	for i := range 3_000 {
		fmt.Fprintf(&keys, `"k%d":1,`, i)
	}
	call := fmt.Sprintf(`{"list":[%s],"text":%q,"keys":{%s}}`, many, strings.Repeat("x", 30_000), strings.TrimSuffix(keys.String(), ","))
	for _, expr := range []string{
		"call.list.map(x, call.text)",
		"call.list.map(x, call.text).join(call.text)",
		"call.text.split('').join(call.text)",
		"'%s'.format([call.list.map(x, call.text)])",
		"call.list.map(x, json.encode(call))",
		"call.list.map(x, sha256(call.text))",
		"call.list.map(x, base64.encode(call.text))",
		"call.list.map(x, url.encode(call.text))",
		"call.list.map(x, form.encode({'a': call.text}))",
		"call.list.map(x, call.list.map(y, 1))",
		"call.list.map(x, call.keys.exists(k, true))",
		"call.list.map(x, call.list + call.list)",
		"call.list.transformMapEntry(i, x, {string(i): call.keys})",
		"call.list.map(x, call.keys == call.keys)",
		"[call, call, call, call, call, call, call, call]",
		"call.list.map(x, call.text.matches('(x|xx)*y'))",
		strings.TrimSuffix(strings.Repeat("call.text+", 90), "+"),
		"json.encode(json.encode(json.encode(json.encode(json.encode(json.encode(json.encode({'a': call.list.map(x, '\"')})))))))",
	} {
		p, err := CompileTransform(expr)
		if err != nil {
			if !strings.Contains(err.Error(), "too expensive") {
				t.Errorf("%.80s: %v", expr, err)
			}
			continue
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		v, err := p.Eval(NewInput([]byte(call), shopSource, crmNames))
		if err == nil {
			_, err = v.JSON()
		}
		runtime.ReadMemStats(&after)
		if f, ok := errors.AsType[*Failure](err); !ok || f.Kind != TooExpensive && f.Kind != TooLarge {
			t.Errorf("%.80s: got %v; want %s or %s", expr, err, TooExpensive, TooLarge)
		}
		if used := after.TotalAlloc - before.TotalAlloc; used > 128<<20 { // 64 MiB, and more with the race detector.
			t.Errorf("%.80s: allocated %d bytes", expr, used)
		}
	}
}

func TestTransformsOfARequestHaveABudget(t *testing.T) {
	p, in := transform(t, "call.list.map(x, x + 1.0)"), NewInput([]byte(`{"list":[`+strings.TrimSuffix(strings.Repeat("1,", 5_000), ",")+`]}`), nil, nil)
	n := 0
	for ; n < 100; n++ {
		if _, err := p.Eval(in); err != nil {
			if f, _ := errors.AsType[*Failure](err); f == nil || f.Kind != TooExpensive {
				t.Errorf("got %v; want %s", err, TooExpensive)
			}
			break
		}
	}
	if n == 0 || n > 30 {
		t.Errorf("%d evaluations; want 1 to 30", n)
	}
}

// A failure has the position, and nothing of the call.
func TestFailuresOfTransformsContainNoData(t *testing.T) {
	const secret = "s3cret-value"
	call := fmt.Sprintf(`{"a":%q,"b":{%q:1},"l":[%q]}`, secret, secret, secret)
	for _, expr := range []string{
		"int(call.a)", "call.b[call.a + 'x']", "call.a.x", "call.l[0].y", "timestamp(call.a)", "duration(call.a)", "call.a + 1", "call.b + 1",
		"base64.decode(call.a)", "call.b.transformMap(k, v, 1.0/0.0)", "call.l[9]", "call.l.map(x, int(x))", "'%d'.format([call.a])",
		"form.encode({call.a: {}})", "call.a.charAt(99)", "double(call.a)", "call.a.getFullYear()",
		"call.l.transformMapEntry(i, v, {'x': int(v)})", "'%s'.format([call.b.c])", "{'x': {call.a: dyn(type(1))}}",
	} {
		if got := made(t, expr, call); strings.Contains(got, secret) {
			t.Errorf("%s: the failure contains data of the call: %s", expr, got)
		} else if json.Valid([]byte(got)) {
			t.Errorf("%s: got the value %s; want a failure", expr, got)
		}
	}
}

// The memory of a transform is at most twice that of a filter of the same size.
func TestSizeOfTransformsBoundsMemory(t *testing.T) {
	const n = 30
	var before, after runtime.MemStats
	fields := func(i int) string {
		return "{" + strings.TrimSuffix(strings.Repeat("'a': call.a.b,", 300), ",") + fmt.Sprintf(",'c': %d}", i)
	}
	transform(t, fields(-1))
	runtime.GC()
	runtime.ReadMemStats(&before)
	var all []*Transform
	nodes := 0
	for i := range n {
		p := transform(t, fields(i))
		nodes += p.Size().Nodes
		all = append(all, p)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	used := int(after.HeapAlloc - before.HeapAlloc)
	t.Logf("%d bytes for each node", used/nodes)
	if used > 400*nodes {
		t.Errorf("%d bytes for %d nodes; want at most 400 for each", used, nodes)
	}
	runtime.KeepAlive(all)
}

func FuzzTransform(f *testing.F) {
	for _, expr := range []string{"call", "{'a': call.properties, 1: [b'x', 1.5, null]}", "call.properties.items.map(i, i.sku).join(',')",
		"call.properties.transformMap(k, v, json.encode(v))", "form.encode({'a': call.userId})", "'%s %d'.format([call.event, 1])"} {
		f.Add(expr, paid)
	}
	f.Fuzz(func(t *testing.T, expr, call string) {
		body, err := event.FixedPoint([]byte(call))
		if err != nil || len(body) > 64<<10 {
			return
		}
		p, err := CompileTransform(expr)
		if err != nil {
			return
		}
		text := func() (string, string) {
			in := NewInput(body, shopSource, crmNames)
			v, err := p.Eval(in)
			if err != nil {
				return "", err.Error()
			}
			out, err := v.JSON()
			if err != nil {
				return "", err.Error()
			}
			if !event.IsFixedPoint(out) || len(out) > max(MaxResult, len(body)) {
				t.Errorf("%s: the result of %d bytes is not canonical or too large", expr, len(out))
			}
			_, _ = v.Text()
			_, _ = v.Form()
			_, _ = v.Texts()
			return string(out), ""
		}
		first, why := text()
		if again, whyAgain := text(); again != first || why != whyAgain {
			t.Errorf("%s: two evaluations differ: %q %q, %q %q", expr, first, why, again, whyAgain)
		}
	})
}

func BenchmarkTransform(b *testing.B) {
	call := strings.Replace(paid, `"count":3`, `"count":3,"a":"some text","b":"some text","c":"some text","d":"some text","e":12,"f":"some text","g":true`, 1)
	for name, expr := range map[string]string{
		"identity": "call",
		"reshape12": "{'id': call.messageId, 'user': call.userId, 'name': call.event, 'total': call.properties.total, 'n': call.properties.count," +
			"'a': call.properties.a, 'b': call.properties.b, 'c': call.properties.c, 'd': call.properties.d, 'e': call.properties.e, 'ip': call.context.ip, 'g': call.properties.g}",
	} {
		b.Run(name, func(b *testing.B) {
			p := transform(b, expr)
			b.ReportAllocs()
			for b.Loop() {
				v, err := p.Eval(NewInput([]byte(call), shopSource, crmNames))
				if err != nil {
					b.Fatal(err)
				}
				if _, err := v.JSON(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// The estimate gives the value of an optional field the size of a field.
func TestAnOptionalFieldIsNotExpensive(t *testing.T) {
	for _, expr := range []string{"string(call.?properties.?total.orValue('unknown'))", "'a' + call.?a.orValue('').trim()", "call.?a.value().split(',')"} {
		if _, err := CompileTransform(expr); err != nil {
			t.Errorf("CompileTransform(%s): got error %v, want none", expr, err)
		}
	}
}
