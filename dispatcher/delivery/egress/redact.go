package egress

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"slices"
	"strconv"
	"sync"
	"unicode/utf8"
)

const (
	redacted = "[redacted]"
	// minEncoded is the shortest secret that is also looked for in encoded forms.
	minEncoded = 6
	// minCut is the length of the shortest part of a secret that is removed from a text's end.
	minCut = 4
	// minPart is the length of the shortest beginning or end of a secret that is removed anywhere, if it is at
	// least half of the secret.
	minPart = 8
)

// Redactor removes secrets from texts of a receiver. It finds a secret unchanged, in another case,
// in hex, in base64 (standard or URL alphabet, padded or not, at any position of the encoded text),
// percent-encoded and with JSON escapes.
type Redactor struct{ forms func() [][]byte }

// NewRedactor makes a Redactor. The encoded forms are made at the first use.
func NewRedactor(secrets ...string) *Redactor {
	return &Redactor{sync.OnceValue(func() [][]byte { return formsOf(secrets) })}
}

// formsOf lists the normalized forms of secrets, longest first.
func formsOf(secrets []string) (forms [][]byte) {
	for _, s := range secrets {
		if s == "" {
			continue
		}
		forms = append(forms, normalise([]byte(s)))
		if len(s) < minEncoded {
			continue
		}
		forms = append(forms, []byte(hex.EncodeToString([]byte(s))), normalise([]byte(base64.RawStdEncoding.EncodeToString([]byte(s)))))
		for before := range 3 {
			// Inside a longer text, the characters at both ends also depend on the bytes around the secret.
			encoded := base64.RawStdEncoding.EncodeToString(append(make([]byte, before), s...))
			forms = append(forms, normalise([]byte(encoded[(before*8+5)/6:(before+len(s))*8/6])))
		}
	}
	slices.SortFunc(forms, func(a, b []byte) int {
		if len(a) != len(b) {
			return len(b) - len(a)
		}
		return bytes.Compare(a, b)
	})
	return slices.CompactFunc(forms, bytes.Equal)
}

// Redact returns text without the secrets of the Redactor and of more. The result has at most 1
// KiB.
func (r *Redactor) Redact(text []byte, more ...string) []byte {
	if len(text) == 0 {
		return nil
	}
	forms := r.forms()
	if len(more) > 0 {
		forms = append(formsOf(more), forms...)
	}
	f := finder{end: len(text)}
	f.find(forms, normalise(text), nil)
	if bytes.ContainsAny(text, `%\`) {
		plain, offsets := unescape(text)
		f.find(forms, normalise(plain), offsets)
	}
	slices.SortFunc(f.spans, func(a, b span) int { return a.from - b.from })
	shown := make([]byte, 0, len(text))
	done := 0
	for i, s := range f.spans {
		if s.from >= f.end {
			break // Text between f.end and s.from belongs to the truncated secret.
		}
		if s.to <= done {
			continue
		}
		if i == 0 || s.from > done {
			shown = append(append(shown, text[done:s.from]...), redacted...)
		}
		done = s.to
	}
	if done < f.end {
		shown = append(shown, text[done:f.end]...)
	}
	return shown[:min(len(shown), maxShownBytes)]
}

type span struct{ from, to int }

// finder collects the positions of secrets in a text.
type finder struct {
	spans []span
	// end is the start of a secret that the end of the text truncates, or the text's length.
	end int
}

// find searches a view of the text for forms; offsets maps positions of the view to positions
// of the text; nil means that they are equal.
func (f *finder) find(forms [][]byte, view []byte, offsets []int) {
	at := func(i int) int {
		if offsets == nil {
			return i
		}
		return offsets[i]
	}
	for _, form := range forms {
		for from := 0; ; {
			i := bytes.Index(view[from:], form)
			if i < 0 {
				break
			}
			from += i + len(form)
			f.spans = append(f.spans, span{at(from - len(form)), at(from)})
		}
		for n := min(len(form)-1, len(view)); n >= minCut; n-- {
			if bytes.HasSuffix(view, form[:n]) {
				f.end = min(f.end, at(len(view)-n))
				break
			}
		}
	}
	found := slices.Clone(f.spans)
	for _, form := range forms {
		if least := max(minPart, (len(form)+1)/2); least < len(form) {
			f.findParts(form, view, least, found, at)
		}
	}
}

// findParts searches for the beginnings and ends of a form with at least so many bytes. found are the secrets that
// were found as a whole.
func (f *finder) findParts(form, view []byte, least int, found []span, at func(int) int) {
	add := func(from, to int) {
		if !slices.ContainsFunc(found, func(s span) bool { return s.from < at(to) && at(from) < s.to }) {
			f.spans = append(f.spans, span{at(from), at(to)})
		}
	}
	for from := 0; ; {
		i := bytes.Index(view[from:], form[:least])
		if i < 0 {
			break
		}
		from += i
		n := least
		for n < len(form) && from+n < len(view) && view[from+n] == form[n] {
			n++
		}
		add(from, from+n)
		from += n
	}
	for from := 0; ; {
		i := bytes.Index(view[from:], form[len(form)-least:])
		if i < 0 {
			break
		}
		end := from + i + least
		n := least
		for n < len(form) && end-n > from && view[end-n-1] == form[len(form)-n-1] {
			n++
		}
		add(end-n, end)
		from = end
	}
}

// normalize returns a copy of b in lower case, with the standard base64 alphabet and with plus
// signs for spaces, so that one comparison covers all these forms.
func normalise(b []byte) []byte {
	out := make([]byte, len(b))
	for i, c := range b {
		switch {
		case c >= 'A' && c <= 'Z':
			c += 'a' - 'A'
		case c == '-', c == ' ': // a query encodes a space as a plus sign
			c = '+'
		case c == '_':
			c = '/'
		}
		out[i] = c
	}
	return out
}

// unescape decodes the percent-encoding and JSON escapes of text. offsets has the position in text
// of each byte of plain, and of its end.
func unescape(text []byte) (plain []byte, offsets []int) {
	for i := 0; i < len(text); {
		var decoded [utf8.UTFMax]byte
		decoded[0] = text[i]
		n, size := 1, 1
		if (text[i] == '%' && i+3 > len(text)) || (text[i] == '\\' && (i+1 == len(text) || text[i+1] == 'u' && i+6 > len(text))) {
			return plain, append(offsets, i) // an escape that the end of the text truncates
		}
		if code, ok := number(text, i+1, 2); text[i] == '%' && ok {
			decoded[0], size = byte(code), 3
		} else if text[i] == '\\' && i+1 < len(text) {
			if code, ok := number(text, i+2, 4); text[i+1] == 'u' && ok {
				n, size = utf8.EncodeRune(decoded[:], rune(code)), 6
			} else {
				decoded[0], size = text[i+1], 2
			}
		}
		for _, b := range decoded[:n] {
			plain, offsets = append(plain, b), append(offsets, i)
		}
		i += size
	}
	return plain, append(offsets, len(text))
}

// number parses a hexadecimal number of n digits.
func number(text []byte, from, n int) (uint64, bool) {
	if from+n > len(text) {
		return 0, false
	}
	code, err := strconv.ParseUint(string(text[from:from+n]), 16, 32)
	return code, err == nil
}
