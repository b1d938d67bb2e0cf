package event

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/big"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// FuzzCanonical compares the result with an independent implementation, which uses
// encoding/json and math/big.
func FuzzCanonical(f *testing.F) {
	for _, seed := range []string{`{"b":1,"10":[1.50,-0,1e21,1E-7,0.10000000000000001,12345678901234567890,1e400],"a":{"x":null,"x":true},"__proto__":"","":"\u2028\/\u001F\ud83d\ude00"}`,
		`[[],{},"",0,{"0":{"1":1,"0":0},"a":0,"0":1}]`, "\ufeff 1", `"\ud800"`, "\"\xff\"", "[1,]", "", "1e", `{"a":1,"a`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := Canonical(in)
		text := bytes.TrimPrefix(in, []byte("\ufeff"))
		if code(err) == CodeTooDeep {
			return
		}
		if valid := json.Valid(text); valid != (err == nil) {
			t.Fatalf("Canonical: got error %v, want success: %t", err, valid)
		}
		if err != nil {
			return
		}
		if again, err := Canonical(got); err != nil || !bytes.Equal(again, got) {
			t.Fatalf("canonical form of the result %s: got %s and error %v, want the same", got, again, err)
		}
		fixed, err := FixedPoint(in)
		if again, err2 := Canonical(fixed); err != nil || err2 != nil || !bytes.Equal(again, fixed) || !IsFixedPoint(fixed) {
			t.Fatalf("canonical form of the fixed point %s: got %s and errors %v, %v, want the same", fixed, again, err, err2)
		}
		if !utf8.Valid(got) {
			t.Fatalf("result: got %q, want UTF-8", got)
		}
		if !utf8.Valid(text) || loneSurrogate(text) {
			return // encoding/json reads these differently.
		}
		d := json.NewDecoder(bytes.NewReader(text))
		d.UseNumber()
		if want := oracle(t, d); want != string(got) {
			t.Fatalf("Canonical(%q): got\n%s\nwant\n%s", in, got, want)
		}
	})
}

// FuzzParse checks that Parse does not panic, and that all bodies are canonical.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"batch":[{"type":"track","userId":1,"event":"e","context":{"1":[]},"timestamp":"2009-11-10T23:00:00+0000"},{}],"context":{"a":1,"0":2},"sentAt":"2009-11-10","writeKey":"k"}`), true, "192.0.2.1")
	f.Add([]byte(`{"userId":"u","event":"e","integrations":{"All":false,"x":{}},"timestamp":1257894000,"sentAt":"","messageId":null}`), false, "")
	f.Fuzz(func(t *testing.T, in []byte, batch bool, ip string) {
		addr, _ := netip.ParseAddr(ip)
		r := Request{Type: Track, ReceivedAt: received, ClientIP: addr, FromBrowser: batch}
		if batch {
			r.Type = ""
		}
		b, err := r.Parse(in)
		if err != nil && code(err) == "" {
			t.Fatal(err)
		}
		for _, c := range b.Calls {
			if canonical, err := Canonical(c.Body); err != nil || !bytes.Equal(canonical, c.Body) {
				t.Fatalf("canonical form of the body %s: got %s and error %v, want the same", c.Body, canonical, err)
			}
			if c.LongNumbers == IsFixedPoint(c.Body) {
				t.Fatalf("LongNumbers of %s: got %t, want %t", c.Body, c.LongNumbers, !c.LongNumbers)
			}
			var m struct {
				Type, MessageID, Timestamp string
				Version                    int
				Context                    map[string]any
			}
			if err := json.Unmarshal(c.Body, &m); err != nil || m.Version != 1 || m.Type != string(c.Type) || m.MessageID == "" || m.Context == nil {
				t.Fatalf("message %s: got %+v and error %v, want version 1, its type, a messageId and a context", c.Body, m, err)
			}
			c.Integrations.Allows("Webhooks", "x")
		}
		if n := len(b.Calls) + len(b.Rejected); err == nil && n == 0 || len(b.Calls) != len(b.Indexes) {
			t.Fatalf("batch: got %d calls, %d indexes and %d rejections, want an index for each call, and at least one call or rejection", len(b.Calls), len(b.Indexes), len(b.Rejected))
		}
	})
}

var surrogates = regexp.MustCompile(`(?i)\\u(d[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}|d[89a-f][0-9a-f]{2})`)

func loneSurrogate(text []byte) bool {
	// An escaped backslash must not count as the start of an escape.
	text = bytes.ReplaceAll(text, []byte(`\\`), []byte("_"))
	return slices.ContainsFunc(surrogates.FindAll(text, -1), func(m []byte) bool { return len(m) == 6 })
}

// oracle reads one value and returns it in the form of JavaScript.
func oracle(t *testing.T, d *json.Decoder) string {
	token, err := d.Token()
	if err != nil && err != io.EOF {
		t.Fatal(err)
	}
	switch v := token.(type) {
	case json.Delim:
		if v == '[' {
			var elements []string
			for d.More() {
				elements = append(elements, oracle(t, d))
			}
			_, _ = d.Token()
			return "[" + strings.Join(elements, ",") + "]"
		}
		values, indexes, names := map[string]string{}, []int{}, []string{}
		for d.More() {
			key, err := d.Token()
			if err != nil {
				t.Fatal(err)
			}
			name := key.(string)
			if _, ok := values[name]; !ok {
				if n, err := strconv.Atoi(name); err == nil && n >= 0 && n < math.MaxUint32 && strconv.Itoa(n) == name {
					indexes = append(indexes, n)
				} else {
					names = append(names, name)
				}
			}
			values[name] = oracle(t, d)
		}
		_, _ = d.Token()
		slices.Sort(indexes)
		var members []string
		for _, n := range indexes {
			members = append(members, fmt.Sprintf(`"%d":%s`, n, values[strconv.Itoa(n)]))
		}
		for _, name := range names {
			members = append(members, oracleString(name)+":"+values[name])
		}
		return "{" + strings.Join(members, ",") + "}"
	case string:
		return oracleString(v)
	case json.Number:
		return oracleNumber(t, string(v))
	case bool:
		return strconv.FormatBool(v)
	}
	return "null"
}

func oracleString(s string) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s)
	// encoding/json escapes these two characters unnecessarily.
	text := strings.TrimSuffix(b.String(), "\n")
	return regexp.MustCompile(`\\(\\|u2028|u2029)`).ReplaceAllStringFunc(text, func(m string) string {
		return map[string]string{`\\`: `\\`, `\u2028`: "\u2028", `\u2029`: "\u2029"}[m]
	})
}

// oracleNumber implements the rules of appendNumber.
func oracleNumber(t *testing.T, text string) string {
	_, exponent, hasExponent := strings.Cut(strings.ToLower(text), "e")
	e, err := strconv.Atoi(cmp.Or(exponent, "0"))
	if err != nil || len(text) > 700 || e > 800 || e < -800 {
		t.Skip() // math/big would take too long.
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return text // It is beyond the range of doubles.
	}
	if f == 0 {
		return "0"
	}
	short, err := json.Marshal(f) // By its documentation, Marshal uses the form of JavaScript.
	if err != nil {
		t.Fatal(err)
	}
	value, ok1 := new(big.Rat).SetString(text)
	shortValue, ok2 := new(big.Rat).SetString(string(short))
	if !ok1 || !ok2 {
		t.Fatalf("SetString: got %t for %s and %t for %s, want true", ok1, text, ok2, short)
	}
	if integer := !hasExponent && !strings.Contains(text, "."); integer && value.Cmp(shortValue) != 0 {
		return text
	}
	return string(short)
}
