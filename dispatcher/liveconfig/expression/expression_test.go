package expression

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
)

const order = `{"type":"track","event":"Order Completed","userId":"u1","version":1,"context":{"ip":"203.0.113.9"},
"properties":{"total":150.5,"count":150,"vip":true,"coupon":null,"currency":"EUR","Order Total":7,"big":1e400,
"items":[{"sku":"a","price":5,"tags":["x","y"]},{"sku":"b","price":120,"tags":[]}]},"timestamp":"2026-01-02T03:04:05.678Z"}`

func TestMatch(t *testing.T) {
	for expr, want := range map[string]bool{
		"true":                                                                 true,
		"call.properties.total > 100":                                          true,
		"call.properties.total > 100.0":                                        true,
		"call.properties.count > 100":                                          true,
		"call.properties.count >= 150.0":                                       true,
		"call.properties.count == 150":                                         true,
		"call.properties.count == 150u":                                        true,
		"call.properties.count != 150":                                         false,
		"150 in [call.properties.count]":                                       true,
		"call.properties.count in [1, 150]":                                    true,
		"100 < call.properties.total":                                          true,
		"call.version == 1":                                                    true,
		"call.properties.total * 2.0 > 300.0":                                  true,
		"call.properties['Order Total'] == 7":                                  true,
		"call.properties.vip":                                                  true,
		"call.properties.coupon == null":                                       true,
		"has(call.properties.total)":                                           true,
		"has(call.properties.nothing)":                                         false,
		"!has(call.properties.nothing)":                                        true,
		"call.?nothing.?total.orValue(200) > 100":                              true,
		"call.properties[?'total'].orValue(0) > 100":                           true,
		"call.properties[?'refund'].orValue(0) == 0":                           true,
		"call.?properties.?total.hasValue()":                                   true,
		"call.properties.items[0].sku == 'a'":                                  true,
		"size(call.properties.items) == 2":                                     true,
		"call.properties.items.all(i, i.price > 1)":                            true,
		"call.context.exists(k, k == 'ip')":                                    true,
		"call.type in ['track', 'page']":                                       true,
		"call.properties.items.exists(i, i.price > 500)":                       false,
		"call.properties.items.exists(i, i.price > 100 && i.sku == 'b')":       true,
		"call.properties.items.exists(i, i.tags.exists(t, t == 'y'))":          true,
		"call.properties.items.exists(i, i.sku in ['z', 'b'])":                 true,
		"call.event.startsWith('Order') && call.event.contains('Comp')":        true,
		"call.event.matches('^Order (Completed|Paid)$')":                       true,
		"call.event.lowerAscii() == 'order completed'":                         true,
		"call.event.split(' ')[1] == 'Completed'":                              true,
		"call.event.substring(0, 5) == 'Order' && call.event.indexOf('C') > 0": true,
		"call.event.trim().charAt(0) == 'O'":                                   true,
		"timestamp(call.timestamp) > timestamp('2026-01-01T00:00:00Z')":        true,
		"call.properties.nothing == 1 || call.type == 'track'":                 true, // || ignores an error beside true.
		"call.properties.currency == 'USD'":                                    false,
	} {
		p, err := Compile(expr)
		if err != nil {
			t.Errorf("Compile(%s): got error %v, want none", expr, err)
			continue
		}
		if got, err := p.Match([]byte(order)); err != nil || got != want {
			t.Errorf("%s: got %v, %v; want %v", expr, got, err, want)
		}
	}
}

func TestACallWithAnEvaluationErrorDoesNotMatch(t *testing.T) {
	for _, expr := range []string{
		"call.properties.nothing == 1",
		"call.nothing.total > 1",
		"call.properties.currency > 100",
		"call.properties.total * 2 > 3", // CEL has no arithmetic between int and double.
		"call.properties.items[9].sku == 'a'",
		"call.properties.currency",
		"call.properties.big > 1",
		"has(call.nothing.total)",
		"call.properties.total.exists(x, x)",
	} {
		p, err := Compile(expr)
		if err != nil {
			t.Errorf("Compile(%s): got error %v, want none", expr, err)
			continue
		}
		if got, err := p.Match([]byte(order)); got || err == nil {
			t.Errorf("%s: got %v, %v; want an error", expr, got, err)
		}
	}
	p, err := Compile("call.type == 'track'")
	if err != nil {
		t.Fatal(err)
	}
	for _, body := range []string{``, `[]`, `"x"`, `{`, `null`} {
		if got, err := p.Match([]byte(body)); got || err == nil {
			t.Errorf("body %q: got %v, %v; want an error", body, got, err)
		}
	}
	if p, err = Compile("call.userId"); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Match([]byte(order)); !errors.Is(err, ErrNotBool) {
		t.Errorf("got %v; want ErrNotBool", err)
	}
}

func TestCompileErrorsGiveTheFix(t *testing.T) {
	for expr, want := range map[string]string{
		"":                                "the expression is empty",
		" \n":                             "the expression is empty",
		"call.properties.total >":         "line 1, column 24: mismatched input '<EOF>'",
		"properties.total > 100":          "line 1, column 1: properties is not known; the fields of a call are written as call.properties",
		"call.total > 1 && \n event == 1": "line 2, column 2: event is not known; the fields of a call are written as call.event",
		"call.items.map(i, i.price)[0]":   "map is not available; use has, all or exists",
		"call.items.filter(i, true)[0]":   "filter is not available; use has, all or exists",
		"call.?a.optMap(x, x + x) == 1":   "is not known",
		"lists.range(100000000) == []":    "is not known",
		"1 > 'a'":                         "line 1, column 3: > cannot be applied to (int, string)",
		"size(call.event)":                "a value of type int; it must be true or false",
		"'yes'":                           "a value of type string; it must be true or false",
		"call.event.replace('', call.event) == 'x'":               "replace cannot be used in a filter",
		"call.list.join(call.event) == 'x'":                       "join cannot be used in a filter",
		"'%s'.format([call.event]) == 'x'":                        "format cannot be used in a filter",
		"call.event.matches(call.userId)":                         "the pattern of matches must be a fixed text",
		"call.event.matches('(')":                                 "missing closing )",
		"call.a.exists(x, call.b.exists(y, x == y))":              "too expensive",
		"call.a.all(x, call.a.all(y, call.a.all(z, x + y == z)))": "too expensive",
		"call.a.exists(x, call.a.indexOf(call.b) > 0)":            "too expensive",
		strings.Repeat("a", MaxLength+1):                          "1025 characters; at most 1024 are allowed",
		strings.Repeat("(", MaxLength):                            "line 1, column",
		"call.a == 1 ? true : 'x'":                                "cannot be applied to",
	} {
		_, err := Compile(expr)
		if err == nil {
			t.Errorf("%.60s: compiled; want an error with %q", expr, want)
			continue
		}
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s:\n got %s\nwant %s", expr, err, want)
		}
		for _, internal := range []string{"container", "expecting", "_>_", "\n", "<input>"} {
			if strings.Contains(err.Error(), internal) {
				t.Errorf("%.60s: the error exposes internals (%q): %s", expr, internal, err)
			}
		}
	}
}

// The count ends every evaluation above the limit, for any call.
func TestCostIsBounded(t *testing.T) {
	many := strings.TrimSuffix(strings.Repeat("1,", 12_000), ",")
	deep := strings.TrimSuffix(strings.Repeat(strings.Repeat("[", 200)+strings.Repeat("]", 200)+",", 20), ",")
	text := strings.Repeat("x", 8_000)
	body := fmt.Appendf(nil, `{"list":[%s],"a":[[%s]],"b":[[%s]],"text":%q,"digits":"%s","inner":[{"l":[%s]}]}`, many, deep, deep, text, strings.Repeat("1", 8_000), many)
	for _, expr := range []string{
		"call.list.all(x, call.a == call.b)",
		"call.list.all(x, size(call.text) > 0)",
		"call.list.all(x, double(call.digits) > 0.0)",
		"call.list.all(x, call.text.contains('xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxy') == false)",
		"call.list.all(x, call.text.matches('(x|xx)*y') == false)",
		"call.list.all(x, timestamp('2026-01-01T00:00:00Z').getHours('Europe/Berlin') < 24)",
		"call.list.all(x, call.text.lowerAscii() != '')",
		"call.list.all(x, call.a in call.b || true)",
		"call.list.all(x, call.text + call.text != '')",
		"call.inner.all(i, i.l.all(x, i.l.all(y, x == y)))",
	} {
		p, err := Compile(expr)
		if err != nil {
			if !strings.Contains(err.Error(), "too expensive") {
				t.Errorf("Compile(%s): got error %v, want none or one with \"too expensive\"", expr, err)
			}
			continue
		}
		if _, err := p.Match(body); err == nil || !strings.Contains(err.Error(), "cost limit exceeded") {
			t.Errorf("%s: got %v; want the cost limit", expr, err)
		}
	}
}

func TestAProgramIsSafeForConcurrentUse(t *testing.T) {
	p, err := Compile("call.properties.items.exists(i, i.price > 100) && call.event.matches('^Order')")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				if ok, err := p.Match([]byte(order)); !ok || err != nil {
					t.Errorf("concurrent match: got %v and error %v, want true", ok, err)
				}
			}
		})
	}
	wg.Wait()
}

func FuzzCompile(f *testing.F) {
	f.Add("call.properties.total > 100")
	f.Add("call.items.exists(i, i.tags.all(t, t.matches('^a+$')))")
	f.Add("has(call.a) ? call.a['b'][0] : {'x': [1u, 2.5, b'a', null]} == call.c")
	f.Fuzz(func(t *testing.T, expr string) {
		p, err := Compile(expr)
		if err != nil {
			if strings.TrimSpace(err.Error()) == "" {
				t.Errorf("Compile(%q): the error has no text", expr)
			}
			return
		}
		_, _ = p.Match([]byte(order))
	})
}

func BenchmarkMatch(b *testing.B) {
	p, err := Compile("call.properties.total > 100")
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		_, _ = p.Match([]byte(order))
	}
}

func BenchmarkMostExpensive(b *testing.B) {
	p, err := Compile("call.list.all(x, x == 1)")
	if err != nil {
		b.Fatal(err)
	}
	call, err := Parse([]byte(`{"list":[` + strings.TrimSuffix(strings.Repeat("1,", 16_000), ",") + `]}`))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		_, _ = p.MatchCall(call)
	}
}
