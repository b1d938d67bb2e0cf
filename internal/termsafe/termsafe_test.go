package termsafe

import (
	"bytes"
	"encoding/json"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
)

// Every character of Unicode that controls a terminal or the direction of text is
// escaped, every other one is not, and JSON keeps its meaning.
func TestEveryCharacter(t *testing.T) {
	var block []rune
	for r := rune(0x20); r <= 0x10ffff; r++ {
		if r < 0xd800 || r > 0xdfff {
			block = append(block, r)
		}
		if len(block) < 4096 && r < 0x10ffff {
			continue
		}
		text, err := json.Marshal(string(block))
		if err != nil {
			t.Fatal(err)
		}
		escaped := Escape(text)
		var back string
		if err := json.Unmarshal(escaped, &back); err != nil || back != string(block) {
			t.Fatalf("%U to %U: the escaped JSON has another meaning, %v", block[0], r, err)
		}
		raw := map[rune]bool{}
		for _, shown := range string(escaped) {
			raw[shown] = true
		}
		for _, c := range string(text) {
			control := c >= 0x7f && unicode.IsControl(c) || unicode.Is(unicode.Bidi_Control, c)
			if raw[c] == control {
				t.Errorf("%U: raw is %v, want %v", c, raw[c], !control)
			}
		}
		block = block[:0]
	}
}

// A character may be split over two writes.
func TestWriterAcrossWrites(t *testing.T) {
	const text = "plain, \u009b31m, \u202eevil\u202c, ☃ \U0001f600 and \u0085"
	const want = `plain, \u009b31m, \u202eevil\u202c, ☃ ` + "\U0001f600" + ` and \u0085`
	for size := 1; size < 8; size++ {
		var out bytes.Buffer
		w := NewWriter(&out)
		for rest := []byte(text); len(rest) > 0; {
			n := min(size, len(rest))
			if got, err := w.Write(rest[:n]); got != n || err != nil {
				t.Fatalf("%d, %v", got, err)
			}
			rest = rest[n:]
		}
		if diff := cmp.Diff(want, out.String()); diff != "" {
			t.Errorf("in writes of %d: -want +got:\n%s", size, diff)
		}
	}
}
