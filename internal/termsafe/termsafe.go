// Package termsafe escapes the characters that change how a terminal shows a text or what the
// terminal does: DEL, the C1 controls (some terminals read U+009B as ESC [) and the marks and
// overrides of bidirectional text. The escapes are JSON escapes: in JSON these characters occur in
// strings only, so escaped JSON equals the original.
package termsafe

import (
	"fmt"
	"io"
	"sync"
	"unicode/utf8"
)

// Writer escapes the text written to it. It is safe for concurrent use.
type Writer struct {
	mu  sync.Mutex
	to  io.Writer
	cut []byte // the start of a character that ends in the next Write
}

// NewWriter makes a Writer.
func NewWriter(to io.Writer) *Writer { return &Writer{to: to} }

// Write implements io.Writer.
func (w *Writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := p
	if len(w.cut) > 0 {
		text = append(w.cut, p...)
		w.cut = nil
	}
	if n := cutAt(text); n < len(text) {
		w.cut = append(w.cut, text[n:]...)
		text = text[:n]
	}
	if _, err := w.to.Write(Escape(text)); err != nil {
		return 0, err
	}
	return len(p), nil
}

// cutAt returns the start of an incomplete character at the end of text, or the length of text.
func cutAt(text []byte) int {
	for n := len(text) - 1; n >= max(0, len(text)-utf8.UTFMax); n-- {
		if utf8.RuneStart(text[n]) {
			if !utf8.FullRune(text[n:]) {
				return n
			}
			break
		}
	}
	return len(text)
}

// Escape returns text without such characters; it returns text itself if there are none.
func Escape(text []byte) []byte {
	var out []byte
	done := 0
	for i := 0; i < len(text); {
		if c := text[i]; c < 0x7f {
			i++
			continue
		}
		r, size := utf8.DecodeRune(text[i:])
		if isControl(r) {
			out = append(out, text[done:i]...)
			out = fmt.Appendf(out, `\u%04x`, r)
			done = i + size
		}
		i += size
	}
	if done == 0 {
		return text
	}
	return append(out, text[done:]...)
}

// isControl reports whether Escape escapes a character.
func isControl(r rune) bool {
	switch {
	case r >= 0x7f && r <= 0x9f, // DEL and C1
		r == 0x061c, r == 0x200e, r == 0x200f, // marks
		r >= 0x202a && r <= 0x202e, // embeddings and overrides
		r >= 0x2066 && r <= 0x2069: // isolates
		return true
	}
	return false
}
