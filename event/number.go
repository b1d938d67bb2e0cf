package event

import (
	"bytes"
	"strconv"
)

const (
	// safeDigits: decimals of up to this many significant digits survive the
	// way through a double unchanged, so their JavaScript form is found without
	// going through one.
	safeDigits = 15
	// maxDigits: no double has more significant digits when written out in full.
	maxDigits = 767
	// shortDigits: JavaScript needs at most this many digits for any double.
	shortDigits = 17
	// maxSlowNumbers bounds, per document, the numbers with more digits than that
	// which are looked at. Each can take 0.1 ms, where a text is made for it.
	// Nobody sends that many; those beyond are kept as written.
	maxSlowNumbers = 1024
)

// decimal is the value 0.digits * 10^point; digits has no zero at either end.
type decimal struct {
	digits   []byte
	point    int
	negative bool
}

// appendNumber appends a JSON number (the text must be valid) as JavaScript
// prints it if that loses nothing, otherwise as written. What loses nothing:
//
//   - The same decimal value in another spelling: 1.10 is 1.1, 1E3 is 1000.
//   - For a number with a fraction or an exponent, that is for what was
//     floating-point at the sender: the value of a double rounded to the digits
//     that are written. 0.10000000000000001 is how some languages print the
//     double 0.1.
//
// A plain integer is never rounded, since it may be an identifier:
// 1152921504606846976 stays although JavaScript prints the same double as
// 1152921504606847000.
func (s *scanner) appendNumber(dst, text []byte) []byte {
	d, integer := s.split(text)
	n := len(d.digits)
	switch {
	case n == 0:
		return append(dst, '0') // -0 too
	case n <= safeDigits && -290 < d.point && d.point < 290:
		return d.appendTo(dst)
	case n > maxDigits || n > shortDigits && integer || d.point < -400 || d.point > 400:
		return append(dst, text...)
	case n > shortDigits:
		if s.slowNumbers++; s.slowNumbers > maxSlowNumbers {
			return append(dst, text...)
		}
	}
	scientific := append(s.number[:0], d.digits[0], '.')
	scientific = append(scientific, d.digits[1:]...)
	scientific = append(scientific, 'e')
	scientific = strconv.AppendInt(scientific, int64(d.point-1), 10)
	s.number = scientific[:0]
	double, err := strconv.ParseFloat(string(scientific), 64)
	if err != nil || double == 0 {
		return append(dst, text...) // beyond the range of doubles
	}
	var shortBuf [32]byte
	short := fromScientific(strconv.AppendFloat(shortBuf[:0], double, 'e', -1, 64))
	short.negative = d.negative
	if d.sameMagnitude(short) {
		return short.appendTo(dst)
	}
	if integer {
		return append(dst, text...)
	}
	s.number = strconv.AppendFloat(s.number[:0], double, 'e', n-1, 64)
	if d.sameMagnitude(fromScientific(s.number)) {
		return short.appendTo(dst)
	}
	return append(dst, text...)
}

// split takes a JSON number apart and says whether it is written as an
// integer, without fraction or exponent.
func (s *scanner) split(text []byte) (d decimal, integer bool) {
	if text[0] == '-' {
		d.negative = true
		text = text[1:]
	}
	exponent := 0
	if i := bytes.IndexAny(text, "eE"); i >= 0 {
		e, minus := text[i+1:], false
		if e[0] == '+' || e[0] == '-' {
			minus = e[0] == '-'
			e = e[1:]
		}
		for _, c := range e {
			// Clamped far beyond what the digits of any body can make up for.
			exponent = min(exponent*10+int(c-'0'), 1<<40)
		}
		if minus {
			exponent = -exponent
		}
		text = text[:i]
	} else {
		integer = true
	}
	d.point = len(text)
	if i := bytes.IndexByte(text, '.'); i >= 0 {
		integer = false
		d.point = i
		s.digits = append(append(s.digits[:0], text[:i]...), text[i+1:]...)
		text = s.digits
	}
	trimmed := bytes.TrimLeft(text, "0")
	d.point += exponent - (len(text) - len(trimmed))
	d.digits = bytes.TrimRight(trimmed, "0")
	return d, integer
}

// fromScientific reads what strconv wrote in format 'e', without a sign. It
// overwrites the text.
func fromScientific(text []byte) (d decimal) {
	e := bytes.IndexByte(text, 'e')
	exponent, _ := strconv.Atoi(string(text[e+1:]))
	if e > 1 {
		copy(text[1:], text[2:e]) // over the point
		e--
	}
	d.digits = bytes.TrimRight(text[:e], "0")
	d.point = exponent + 1
	return d
}

func (d decimal) sameMagnitude(o decimal) bool {
	return d.point == o.point && bytes.Equal(d.digits, o.digits)
}

const zeros = "00000000000000000000000"

// appendTo appends the number as ECMAScript's Number::toString writes it.
func (d decimal) appendTo(dst []byte) []byte {
	if d.negative {
		dst = append(dst, '-')
	}
	n := len(d.digits)
	switch {
	case n <= d.point && d.point <= 21:
		dst = append(dst, d.digits...)
		return append(dst, zeros[:d.point-n]...)
	case 0 < d.point && d.point <= 21:
		dst = append(dst, d.digits[:d.point]...)
		dst = append(dst, '.')
		return append(dst, d.digits[d.point:]...)
	case -6 < d.point && d.point <= 0:
		dst = append(dst, "0."...)
		dst = append(dst, zeros[:-d.point]...)
		return append(dst, d.digits...)
	}
	dst = append(dst, d.digits[0])
	if n > 1 {
		dst = append(dst, '.')
		dst = append(dst, d.digits[1:]...)
	}
	dst = append(dst, 'e')
	if d.point > 0 {
		dst = append(dst, '+')
	}
	return strconv.AppendInt(dst, int64(d.point-1), 10)
}
