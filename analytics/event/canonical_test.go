package event

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/analytics/internal/check"
)

func TestCanonical(t *testing.T) {
	tests := []struct{ name, in, want string }{
		{"white space", " \t\r\n{ \"b\" : [ 1 , { } , [ ] , true ] , \"a\" : null } ", `{"b":[1,{},[],true],"a":null}`},
		{"scalar", ` "x" `, `"x"`},
		{"byte order mark", "\ufeff{}", `{}`},

		{"no HTML escapes", `"\u003cb\u003e \u0026 <&>"`, `"<b> & <&>"`},
		{"line separators raw", `"\u2028\u2029"`, "\"\u2028\u2029\""},
		{"controls", `"\u0008\u0009\u000a\u000C\u000d\u0000\u001F\u000b\u007f"`, "\"\\b\\t\\n\\f\\r\\u0000\\u001f\\u000b\u007f\""},
		{"quote, backslash, solidus", `"\u0022\"\u005C\\\/\u002f"`, `"\"\"\\\\//"`},
		{"escaped letters", `"\u0061\u00E9\u20ac"`, `"aé€"`},
		{"surrogate pair", `"\uD83D\uDE00"`, `"😀"`},
		{"lone surrogates", `"\uD83D\u0041\uDE00\uDBFF"`, `"\ud83dA\ude00\udbff"`},
		{"high surrogate before a pair", `"\ud83d\ud83d\ude00"`, `"\ud83d😀"`},
		{"pair in the wrong order", `"\ude00\ud83d"`, `"\ude00\ud83d"`},
		{"high surrogate and an escape", `"\ud83d\n"`, `"\ud83d\n"`},
		{"noncharacters", `"\uFFFF\uFFFE"`, "\"\uffff\ufffe\""},

		{"invalid UTF-8: stray byte", "\"a\xffb\x80\"", `"a�b�"`},
		{"invalid UTF-8: truncated sequence is one", "\"\xe2\x82\"", `"�"`},
		{"invalid UTF-8: surrogate is three", "\"\xed\xa0\x80\"", `"���"`},
		{"invalid UTF-8: overlong is three", "\"\xe0\x80\xaf\"", `"���"`},
		{"invalid UTF-8: overlong is two", "\"\xc0\xaf\"", `"��"`},
		{"invalid UTF-8: beyond Unicode", "\"\xf4\x90\x80\x80\"", `"����"`},
		{"invalid UTF-8: truncated four", "\"\xf0\x9f\x98x\"", `"�x"`},
		{"invalid UTF-8 in equal keys", "{\"\xff\":1,\"\xfe\":2}", `{"�":2}`},

		{"integer-like keys first, ascending", `{"b":1,"10":2,"9":3,"a":4,"0":5}`, `{"0":5,"9":3,"10":2,"b":1,"a":4}`},
		{"largest index", `{"a":1,"4294967295":2,"4294967294":3}`, `{"4294967294":3,"a":1,"4294967295":2}`},
		{"not indexes", `{"01":1,"-1":2,"1.0":3,"1e1":4,"":5,"99999999999":6,"5":7}`,
			`{"5":7,"01":1,"-1":2,"1.0":3,"1e1":4,"":5,"99999999999":6}`},
		{"escaped index", `{"a":0,"\u0031":1}`, `{"1":1,"a":0}`},
		{"last duplicate wins, at the first place", `{"a":1,"b":2,"\u0061":3}`, `{"a":3,"b":2}`},
		{"duplicate index", `{"1":1,"0":2,"1":3}`, `{"0":2,"1":3}`},
		{"three equal keys", `{"a":{"x":1},"a":[],"a":"z"}`, `{"a":"z"}`},
		{"__proto__ is an ordinary key", `{"__proto__":1,"constructor":2,"__proto__":3}`, `{"__proto__":3,"constructor":2}`},
		{"empty key", `{"":1,"":2}`, `{"":2}`},
		{"nested", `{"z":[{"1":{"b":1,"0":{"a":1,"a":2}},"0":0}]}`, `{"z":[{"0":0,"1":{"0":{"a":2},"b":1}}]}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Canonical([]byte(tt.in))
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != tt.want {
				t.Errorf("canonical form: got\n%s\nwant\n%s", got, tt.want)
			}
			again, err := Canonical(got)
			if err != nil || !bytes.Equal(again, got) {
				t.Errorf("canonical form of the result: got %s and error %v, want %s", again, err, got)
			}
		})
	}
}

func TestCanonicalNumbers(t *testing.T) {
	tests := []struct{ in, want string }{
		{"0", "0"}, {"-0", "0"}, {"-0.0", "0"}, {"0.00e5", "0"}, {"-0e-9", "0"}, {"0e99999999999999999999", "0"},
		{"1.0", "1"}, {"-1.50", "-1.5"}, {"1.10", "1.1"}, {"0.1", "0.1"}, {"100", "100"}, {"10.00", "10"},
		{"1e2", "100"}, {"1E+2", "100"}, {"12e-1", "1.2"}, {"-1.5e3", "-1500"}, {"0.5e1", "5"},
		{"1e20", "100000000000000000000"}, {"1e21", "1e+21"}, {"123e20", "1.23e+22"}, {"1000000000000000000000", "1e+21"},
		{"0.000001", "0.000001"}, {"0.0000001", "1e-7"}, {"1e-6", "0.000001"}, {"1.5e-7", "1.5e-7"}, {"0.00000123", "0.00000123"},
		{"0.0000012300", "0.00000123"}, {"1e-10", "1e-10"}, {"100e-9", "1e-7"},
		{"123456789012345.6", "123456789012345.6"},
		// Doubles with all their digits.
		{"0.30000000000000004", "0.30000000000000004"},
		{"0.10000000000000001", "0.1"}, {"3.1400000000000001", "3.14"}, {"1.15292150460684698E18", "1152921504606847000"},
		{"0.1000000000000000055511151231257827021181583404541015625", "0.1"},
		{"0.10000000000000000555", "0.1"},
		{"1.7976931348623157e308", "1.7976931348623157e+308"}, {"1.7976931348623157081e308", "1.7976931348623157e+308"},
		{"4.9E-324", "5e-324"}, {"5e-324", "5e-324"}, {"2.2250738585072014e-308", "2.2250738585072014e-308"},
		// Integers that a double represents.
		{"9007199254740991", "9007199254740991"}, {"9007199254740992", "9007199254740992"}, {"9007199254740994", "9007199254740994"},
		{"123456789012345680000", "123456789012345680000"},
		{"0." + strings.Repeat("0", 20000) + "1e20001", "1"}, {"1" + strings.Repeat("0", 20000) + "e-20000", "1"},
		// Literals with a fraction or an exponent become the nearest double.
		{"12345678901234567890.5", "12345678901234567000"}, {"12345678901234567890.0", "12345678901234567000"},
		{"9007199254740993e0", "9007199254740992"},
		{"0.1234567890123456789", "0.12345678901234568"}, {"0.100000000000000000001", "0.1"}, {"0.1000000000000000055", "0.1"}, {"1e25", "1e+25"},
		{"1e-400", "0"}, {"-1e-400", "0"}, {"2e-324", "0"}, {"3e-324", "5e-324"}, {"1e-99999999999999999999", "0"},
		{"2.470328229206232720882843964341106861825299013071623822127928412503377536351043e-324", "0"},
		{"2.470328229206232720882843964341106861825299013071623822127928412503377536351044e-324", "5e-324"},
		{"1.7976931348623158e308", "1.7976931348623157e+308"},
		// Long numbers are unchanged.
		{"9007199254740993", "9007199254740993"}, {"12345678901234567890", "12345678901234567890"},
		{"-12345678901234567890", "-12345678901234567890"},
		{"1152921504606846976", "1152921504606846976"}, // a double, but JavaScript prints ...7000
		{"72057594037927936", "72057594037927936"},
		{"1e400", "1e400"}, {"-1E400", "-1E400"}, {"1.7976931348623159e308", "1.7976931348623159e308"},
		{"1e99999999999999999999", "1e99999999999999999999"},
		{strings.Repeat("9", 800), strings.Repeat("9", 800)},
	}
	for _, tt := range tests {
		got, err := Canonical([]byte(tt.in))
		if err != nil || string(got) != tt.want {
			t.Errorf("Canonical(%.60s) = %.60s, %v, want %.60s", tt.in, got, err, tt.want)
		}
	}
}

func TestFixedPoint(t *testing.T) {
	tests := []struct{ in, want string }{
		{"12345678901234567890", `"12345678901234567890"`}, {"-9007199254740993", `"-9007199254740993"`},
		{"1152921504606846976", `"1152921504606846976"`},
		{"1e400", `"1e400"`}, {"-1E+400", `"-1E+400"`},
		{"9007199254740992", "9007199254740992"}, {"1e25", "1e+25"}, {"-0", "0"}, {"0.1000000000000000055", "0.1"},
		{`{"12345678901234567890":[9007199254740993,"9007199254740993",{"a":" 9007199254740993 "}]}`,
			`{"12345678901234567890":["9007199254740993","9007199254740993",{"a":" 9007199254740993 "}]}`},
	}
	for _, tt := range tests {
		got, err := FixedPoint([]byte(tt.in))
		if err != nil || string(got) != tt.want {
			t.Errorf("FixedPoint(%s) = %s, %v, want %s", tt.in, got, err, tt.want)
		}
		if !IsFixedPoint(got) {
			t.Errorf("IsFixedPoint(%s) = false, want true", got)
		}
		if is := IsFixedPoint([]byte(tt.in)); is != (tt.in == tt.want) {
			t.Errorf("IsFixedPoint(%s) = %t, want %t", tt.in, is, !is)
		}
	}
	if IsFixedPoint([]byte("[1")) {
		t.Error("IsFixedPoint([1), which is not JSON, = true, want false")
	}
}

func TestCanonicalErrors(t *testing.T) {
	tests := []struct {
		in     string
		offset int
	}{
		{"", 0}, {"  ", 2}, {"{", 1}, {"[1,", 3}, {`{"a"`, 4}, {`{"a":`, 5}, {`{"a":1`, 6}, {`"abc`, 4},
		{"[1,]", 3}, {`{"a":1,}`, 7}, {"{,}", 1}, {"[,]", 1}, {`{a:1}`, 1}, {`{'a':1}`, 1}, {`{"a" 1}`, 5}, {`{"a":1 "b":2}`, 7}, {"[1 2]", 3},
		{"{} {}", 3}, {"1 x", 2}, {"]", 0},
		{"tru", 0}, {"nulL", 0}, {"True", 0}, {"NaN", 0}, {"Infinity", 0}, {"undefined", 0},
		{"+1", 0}, {".5", 0}, {"-", 1}, {"-x", 1}, {"01", 1}, {"-01", 2}, {"1.", 2}, {"1.x", 2}, {"1e", 2}, {"1e+", 3}, {"0x10", 1}, {"1_000", 1},
		{`"\x"`, 1}, {`"\u12"`, 1}, {`"\u12G4"`, 1}, {`"\`, 2}, {`"\u`, 1}, {`"\'"`, 1},
		{"\"a\nb\"", 2}, {"\"a\x00b\"", 2}, {"\"\x1f\"", 1}, {"\"abcdefghij\tb\"", 11},
		{"\u00a01", 0}, {"// x\n1", 0}, {"[1]\x00", 3}, {"\xff", 0}, {"\ufeff\ufeff1", 3}, {"{\ufeff}", 1},
	}
	for _, tt := range tests {
		got, err := Canonical([]byte(tt.in))
		e := new(Error)
		if !errors.As(err, &e) || e.Code != CodeInvalidJSON || !strings.Contains(e.Message, fmt.Sprintf("at byte %d ", tt.offset)) {
			t.Errorf("Canonical(%q) = %s, %v, want %s at byte %d", tt.in, got, err, CodeInvalidJSON, tt.offset)
		}
		if json.Valid([]byte(tt.in)) {
			t.Errorf("json.Valid(%q) = true, want false", tt.in)
		}
	}
}

// TestPlain tests each byte at each position of the eight bytes that plain reads at once.
func TestPlain(t *testing.T) {
	for c := range 256 {
		for at := range 20 {
			in := bytes.Repeat([]byte("~"), 20)
			in[at] = byte(c)
			want := len(in)
			if c < ' ' || c == '"' || c == '\\' || c >= 0x80 {
				want = at
			}
			for from := range at + 1 {
				if got := plain(in, from); got != want {
					t.Fatalf("plain with byte %#x at %d, from %d: got %d, want %d", c, at, from, got, want)
				}
			}
		}
	}
}

func TestCanonicalDepth(t *testing.T) {
	deepest := strings.Repeat("[", MaxDepth) + strings.Repeat("]", MaxDepth)
	if got, err := Canonical([]byte(deepest)); err != nil || string(got) != deepest {
		t.Errorf("%d levels: got error %v, want the same text", MaxDepth, err)
	}
	for _, in := range []string{"[" + deepest + "]", `{"a":` + deepest + "}", strings.Repeat(`{"a":`, 5_000_000),
		strings.Repeat("[", 5_000_000)} {
		if _, err := Canonical([]byte(in)); code(err) != CodeTooDeep {
			t.Errorf("Canonical(%.20s...): got error %v, want %s", in, err, CodeTooDeep)
		}
	}
	siblings := "[" + strings.Repeat("[[]],{\"a\":{}},", MaxDepth) + "0]"
	if got, err := Canonical([]byte(siblings)); err != nil || string(got) != siblings {
		t.Errorf("siblings: got error %v, want the same text", err)
	}
}

// TestManyKeys uses inputs for which a quadratic algorithm would take many minutes.
func TestManyKeys(t *testing.T) {
	const n = 200_000
	object := func(key func(i int) string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `,"%s":%d`, key(i), i%10)
		}
		return "{" + b.String()[1:] + "}"
	}
	check := func(name, in, wantStart, wantEnd string, wantKeys int) {
		t.Helper()
		got, err := Canonical([]byte(in))
		if err != nil {
			t.Fatalf("%s: got error %v, want none", name, err)
		}
		if keys := bytes.Count(got, []byte(":")); keys != wantKeys || !bytes.HasPrefix(got, []byte(wantStart)) ||
			!bytes.HasSuffix(got, []byte(wantEnd)) {
			t.Errorf("%s: got %d keys, %.40s ... %s, want %d, %s ... %s", name, keys, got, got[len(got)-20:], wantKeys, wantStart, wantEnd)
		}
	}
	check("different", object(func(i int) string { return fmt.Sprint("k", i) }), `{"k0":0,"k1":1,`, `"k199999":9}`, n)
	check("the same", object(func(int) string { return "k" }), `{"k":9}`, `{"k":9}`, 1)
	check("each twice", object(func(i int) string { return fmt.Sprint("k", i%(n/2)) }), `{"k0":0,"k1":1,`, `"k99999":9}`, n/2)
	check("indexes, descending", object(func(i int) string { return fmt.Sprint(n - i - 1) }), `{"0":9,"1":8,`, `"199999":0}`, n)
	check("nested objects to reorder", strings.Repeat(`{"a":0,"0":`, MaxDepth-1)+object(func(i int) string { return fmt.Sprint("k", i) })+strings.Repeat("}", MaxDepth-1),
		`{"0":{"0":`, `,"a":0},"a":0}`, n+2*(MaxDepth-1))
}

// TestDuplicatesOfAnyNumber tests numbers of members around fewMembers, at which the
// comparison of members changes.
func TestDuplicatesOfAnyNumber(t *testing.T) {
	for n := 1; n <= 3*fewMembers; n++ {
		for dup := range n {
			in, want := "{", "{"
			for i := range n {
				in += fmt.Sprintf(`"key%d":%d,`, i, i)
				if i == dup {
					want += fmt.Sprintf(`"key%d":"x",`, i)
				} else {
					want += fmt.Sprintf(`"key%d":%d,`, i, i)
				}
			}
			in += fmt.Sprintf(`"key%d":"x"}`, dup)
			want = want[:len(want)-1] + "}"
			got, err := Canonical([]byte(in))
			check.NoError(t, "Canonical("+in+")", err)
			check.Equal(t, "canonical form of "+in, string(got), want)
		}
	}
}

func TestCanonicalKeepsItsInput(t *testing.T) {
	in := []byte(`{"1":"\/","b":1.0,"0":[],"b":2}`)
	want := bytes.Clone(in)
	got, err := Canonical(in)
	if err != nil || !bytes.Equal(in, want) {
		t.Errorf("input after Canonical: got %s and error %v, want %s", in, err, want)
	}
	second, _ := Canonical([]byte(`["something else, longer than the first text"]`))
	if string(got) != `{"0":[],"1":"/","b":2}` {
		t.Errorf("first result after a second call with the result %s: got %s, want no change", second, got)
	}
}

// code returns the code of an *Error, "" for nil.
func code(err error) string {
	if err == nil {
		return ""
	}
	if e := new(Error); errors.As(err, &e) {
		return e.Code
	}
	return fmt.Sprintf("%T: %v", err, err)
}
