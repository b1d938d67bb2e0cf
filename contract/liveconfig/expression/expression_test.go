package expression

import (
	"fmt"
	"regexp/syntax"
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
		if got := match(t, p, order); got != (Result{Matches: want}) {
			t.Errorf("%s: got %+v; want %v", expr, got, want)
		}
	}
}

func match(t testing.TB, p *Program, body string) Result {
	t.Helper()
	call, err := Parse([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	return p.Match(call)
}

func compiled(t testing.TB, expr string) *Program {
	t.Helper()
	p, err := Compile(expr)
	if err != nil {
		t.Fatalf("Compile(%s): got error %v, want none", expr, err)
	}
	return p
}

// A condition on a field that is missing, or that has another type, is not met: that is no failure.
func TestAMissingFieldDoesNotMatch(t *testing.T) {
	for _, expr := range []string{
		"call.properties.nothing == 1",
		"call.nothing.total > 1",
		"call.properties.currency > 100",
		"call.properties.total * 2 > 3", // CEL has no arithmetic between int and double.
		"call.properties.items[9].sku == 'a'",
		"call.properties.items['a'] == 1",
		"call.properties['items'].sku == 'a'",
		"call.properties[true] == 1",
		"call.event.split(' ')[2] == 'x'",
		"call.properties.currency",
		"call.properties.big > 1",
		"has(call.nothing.total)",
		"call.properties.total.exists(x, x)",
		"call.properties.total.matches('1')",
		"matches(call.properties.nothing, '1')",
		"call.properties.items.indexOf('a') == 1",
		"'a' in call.properties.total",
		"size(call.properties.total) == 1",
		"call.?properties.?nothing.value() == 1",
		"call.properties.items.exists(i, i.nothing == 1)",
		"!(call.properties.nothing == 1)",
		"call.userId",
	} {
		if got := match(t, compiled(t, expr), order); got != (Result{}) {
			t.Errorf("%s: got %+v; want no match and no failure", expr, got)
		}
	}
	for _, body := range []string{``, `[]`, `"x"`, `{`, `null`} {
		if _, err := Parse([]byte(body)); err == nil {
			t.Errorf("Parse(%q): got no error", body)
		}
	}
}

// Any other error leaves open whether the call matches. Its text has the position and no value.
func TestAFailureIsNotTheAnswerNo(t *testing.T) {
	for expr, want := range map[string]string{
		"1 / (size(call.properties.items) - 2) == 1":                "character 3 (call.properties.items): division by zero; check the divisor first",
		"size(call.event) % (size(call.event) - 15) == 1":           "character 18 (call.event): division by zero",
		"int(call.properties.currency) == 1":                        "character 4 (call.properties.currency): a value cannot be converted; check it first",
		"double(call.event) > 1.0":                                  "character 7 (call.event): a value cannot be converted",
		"timestamp(call.event) > timestamp('2026-01-01T00:00:00Z')": "character 10 (call.event): a value cannot be converted",
		"duration(call.event) > duration('1s')":                     "character 9 (call.event): a value cannot be converted",
		"timestamp(call.timestamp).getHours(call.event) == 1":       "a value cannot be converted",
		"int(call.properties.total) * 9223372036854775807 > 0":      "a number or time is too large",
		"call.event.substring(100) == 'x'":                          "character 21 (call.event): a position is outside of a text; check size() first",
		"call.?properties.?items[0].?n.orValue(0) / 0 == 1":         "character 42 (call.?properties.?items[0].?n): division by zero",
		"call.event.charAt(100) == 'x'":                             "a position is outside of a text",
	} {
		got := match(t, compiled(t, expr), order)
		if got.Matches || !strings.Contains(got.Failure, want) {
			t.Errorf("%s: got %+v; want the failure %q", expr, got, want)
		}
		for _, value := range []string{"Order", "EUR", "150"} { // The field is named, its value is not.
			if strings.Contains(got.Failure, value) {
				t.Errorf("%s: the failure contains data of the call: %s", expr, got.Failure)
			}
		}
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
		"call.event.replace('', call.event) == 'x'":                                "replace cannot be used here",
		"call.list.join(call.event) == 'x'":                                        "join cannot be used here",
		"'%s'.format([call.event]) == 'x'":                                         "format cannot be used here",
		"call.event.matches(call.userId)":                                          "the pattern of matches must be a fixed text",
		"call.event.matches('(')":                                                  "missing closing )",
		"call.event.matches('.{0,999}y')":                                          "more than 200 instructions",
		"matches(call.event, '(a{20}){20}')":                                       "more than 200 instructions",
		"call.items.exists(i, i.matches('.{0,999}y'))":                             "more than 200 instructions",
		strings.TrimSuffix(strings.Repeat("call.a.matches('a{200}')||", 11), "||"): "more than 2000 instructions in all",
		"call.a.matches('a{1001}')":                                                "invalid repeat count",
		"call.a.all(x, [call.m].exists(y, y.exists(z, true)))":                     "too expensive; an all or exists within another one",
		"[call.m, call.m].all(x, x.all(y, y.all(z, true)))":                        "too expensive",
		"call.a.all(i, i.m.all(x, i.m.all(y, true)))":                              "too expensive",
		"call.a.all(i, i.?m.orValue(call.m).all(x, true))":                         "too expensive",
		"call.a.exists(x, call.b.exists(y, x == y))":                               "too expensive",
		"call.a.all(x, call.a.all(y, call.a.all(z, x + y == z)))":                  "too expensive",
		"call.a.exists(x, call.a.indexOf(call.b) > 0)":                             "too expensive",
		strings.Repeat("a", MaxLength+1):                                           "1025 characters; at most 1024 are allowed",
		strings.Repeat("(", MaxLength):                                             "line 1, column",
		"call.a == 1 ? true : 'x'":                                                 "cannot be applied to",
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
		if got := match(t, p, string(body)); !strings.Contains(got.Failure, "units") {
			t.Errorf("%s: got %+v; want the failure of the cost limit", expr, got)
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
				if got := match(t, p, order); !got.Matches {
					t.Errorf("concurrent match: got %+v, want true", got)
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
		_ = match(t, p, order)
	})
}

func BenchmarkMatch(b *testing.B) {
	p, err := Compile("call.properties.total > 100")
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		_ = match(b, p, order)
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
		call.Units = 0
		_ = p.Match(call)
	}
}

// instructions is at least the number of instructions of the compiled pattern, without compiling it.
func TestInstructions(t *testing.T) {
	for pattern, want := range map[string]int{
		"":                    1,
		"abc":                 3,
		"^Order (Paid|Done)$": 19,
		"a{200}":              200,
		"(?:ab){3}":           6,
		"[a-z]{2,5}":          8,
		"a{3,}":               4,
		".*":                  2,
		"(?i)straße":          6,
		".{0,999}y":           1999,
		".{0,999}.{0,999}":    MaxInstructions + 1,
		"[a-fk-mx-z0-9_.-]":   1,
	} {
		got, err := instructions(pattern)
		if err != nil || got != want {
			t.Errorf("%s: got %d instructions, error %v; want %d", pattern, got, err, want)
		}
		if got > MaxInstructions {
			continue
		}
		parsed, err := syntax.Parse(pattern, syntax.Perl)
		if err != nil {
			t.Fatal(err)
		}
		program, err := syntax.Compile(parsed.Simplify())
		if err != nil {
			t.Fatal(err)
		}
		if most := len(program.Inst) - 2; got < most { // Every program has two instructions.
			t.Errorf("%s: got %d instructions; the compiled pattern has %d", pattern, got, most)
		}
	}
}

// The limit of a text times a pattern holds before the text is searched, and for all searches of an evaluation together.
func TestSearchesAreChargedBeforeTheyBegin(t *testing.T) {
	for _, c := range []struct {
		expr   string
		length int
		failed bool
	}{
		{"call.a.matches('a{199}y') || true", 10_000, false},
		{"call.a.matches('a{199}y') || true", 10_001, true},
		{"matches(call.a, 'a{199}y') || true", 10_001, true},
		{"call.a.matches('a{199}y') || call.a.matches('a{199}z') || true", 5_000, false},
		{"call.a.matches('a{199}y') || call.a.matches('a{199}z') || true", 5_001, true},
		{"call.list.all(x, call.a.matches('a{199}y') || true)", 2_500, false},
		{"call.list.all(x, call.a.matches('a{199}y') || true)", 2_501, true},
		{"call.a.indexOf(call.a + 'y') < 0", 300, false},
		{"call.a.indexOf(call.a + 'y') < 0", 1_500, true},
		{"call.a.indexOf(call.a + 'y', 1) < 0", 1_500, true},
		{"call.a.lastIndexOf(call.a + 'y') < 0", 1_500, true},
		{"call.a.lastIndexOf(call.a + 'y', 9) < 0", 1_500, true},
		{"call.nothing || call.a.matches('a{199}y')", 10_001, true},
		{"call.a.matches('a{199}y') || call.nothing", 10_001, true},
	} {
		body := fmt.Sprintf(`{"a":%q,"list":[1,2,3,4]}`, strings.Repeat("x", c.length))
		got := match(t, compiled(t, c.expr), body)
		if failed := got.Failure != ""; failed != c.failed {
			t.Errorf("%s with %d bytes: got %+v; want a failure: %v", c.expr, c.length, got, c.failed)
		}
		if c.failed && !strings.Contains(got.Failure, "bytes times instructions") {
			t.Errorf("%s: got %q; want the limit of the work", c.expr, got.Failure)
		}
	}
}

// Values that an expression repeats are charged before they are compared: nothing reads more than the budget.
func TestRepeatedValuesAreChargedBeforeTheyAreRead(t *testing.T) {
	numbers := strings.TrimSuffix(strings.Repeat("1,", 8_000), ",")
	body := fmt.Sprintf(`{"l":[%s],"m":[%s]}`, numbers, numbers)
	many := strings.TrimSuffix(strings.Repeat("call.l,", 60), ",")
	same := strings.TrimSuffix(strings.Repeat("call.m,", 60), ",")
	sum := strings.TrimSuffix(strings.Repeat("call.l+", 60), "+")
	for _, expr := range []string{
		"[" + many + "] == [" + same + "]",
		"[" + many + "] != [" + same + "]",
		"call.x in [" + many + "] || [0] in [" + many + "]",
		"2 in (" + sum + ")",
		"(" + sum + ").exists(x, x == 2)",
		"{'a':[" + many + "]} == {'a':[" + same + "]}",
	} {
		if got := match(t, compiled(t, expr), body); got.Failure == "" {
			t.Errorf("%.40s…: got %+v; want a failure", expr, got)
		}
	}
}

// The filters of one call have a budget together.
func TestTheFiltersOfACallHaveABudget(t *testing.T) {
	p := compiled(t, "call.list.all(x, x == 1)")
	call, err := Parse([]byte(`{"list":[` + strings.TrimSuffix(strings.Repeat("1,", 1_000), ",") + `]}`))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for ; n < 1_000; n++ {
		if got := p.Match(call); got.Failure != "" {
			if !strings.Contains(got.Failure, "the filters of the call") {
				t.Errorf("got %q; want the budget of the call", got.Failure)
			}
			break
		}
	}
	if n < 10 || n > 100 {
		t.Errorf("%d evaluations of 1,000 elements; want 10 to 100", n)
	}
	if call.Units > MaxCallCost+2*MaxCost {
		t.Errorf("the call cost %d units; want at most %d", call.Units, MaxCallCost+2*MaxCost)
	}
}

// The size does not depend on the machine, and counts what the macros add.
func TestSize(t *testing.T) {
	if got, want := compiled(t, "call.a.matches('a{9}') && call.b.matches('x|y')").Size(), (Size{Instructions: 10, Nodes: 9}); got != want {
		t.Errorf("got %+v; want %+v", got, want)
	}
}

// BenchmarkMostWork is a search that needs all work that an evaluation may do.
func BenchmarkMostWork(b *testing.B) {
	p := compiled(b, "call.a.matches('(x|xx|xxx|[a-z]x){0,15}y')")
	call, err := Parse(fmt.Appendf(nil, `{"a":%q}`, strings.Repeat("x", 8_000)))
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		call.Units = 0
		if r := p.Match(call); r.Failure != "" {
			b.Fatal(r.Failure)
		}
	}
}
