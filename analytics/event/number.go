package event

import (
	"bytes"
	"math"
	"math/big"
	"strconv"
	"sync/atomic"
)

const (
	// safeDigits is a number of significant digits with which a decimal does not change when it is
	// converted to a double and back, so its JavaScript form needs no double. From
	// minSafePoint to maxSafePoint, doubles have full precision.
	safeDigits   = 15
	minSafePoint = -306
	maxSafePoint = 308
	minPoint     = -323 // smaller numbers round to zero
	maxPoint     = 309  // larger numbers exceed the doubles
	fastPoint    = 60   // strconv is fast for numbers of at most this many places
	significant  = 790  // more digits than the border between any two doubles, and fewer than the 800 that strconv reads of an integer
	maxFive      = significant + 1 - minPoint
	quotientBits = 64
)

// decimal is the value 0.digits * 10^point; digits has no zero at either end.
type decimal struct {
	digits   []byte
	point    int
	negative bool
}

// appendNumber appends a JSON number, whose text must be valid, in JavaScript's
// form: the shortest decimal that reads as the nearest double. This changes
//
//   - the spelling of a number that JavaScript prints with the same value
//     (1.10 is 1.1, 1E3 is 1000), and
//   - the value of a number with a fraction or an exponent that has no short decimal:
//     the sender had a floating-point number, and every receiver that reads doubles
//     rounds it.
//
// A long number is appended as written, or as a string when longAsString is set:
// an integer (a literal without fraction and exponent) that JavaScript would
// print with other digits, because it may be an identifier, and a number beyond
// the range of doubles.
func (s *scanner) appendNumber(dst, text []byte) []byte {
	d, integer := s.split(text)
	if len(d.digits) == 0 {
		return append(dst, '0') // -0 too
	}
	if len(d.digits) <= safeDigits && minSafePoint <= d.point && d.point <= maxSafePoint {
		return d.appendTo(dst)
	}
	double := s.nearest(d)
	if double == 0 {
		return append(dst, '0')
	}
	if !math.IsInf(double, 0) {
		var buf [32]byte
		short := fromScientific(strconv.AppendFloat(buf[:0], double, 'e', -1, 64))
		short.negative = d.negative
		if !integer || d.sameMagnitude(short) {
			return short.appendTo(dst)
		}
	}
	s.long = true
	if !s.longAsString {
		return append(dst, text...)
	}
	return append(append(append(dst, '"'), text...), '"')
}

// nearest returns the double nearest to a number's magnitude, +Inf beyond the
// largest. Its time is linear in the number of digits for every number;
// strconv takes up to 50 µs for some numbers with few digits and a large exponent.
func (s *scanner) nearest(d decimal) float64 {
	switch {
	case d.point < minPoint:
		return 0
	case d.point > maxPoint:
		return math.Inf(1)
	}
	text := append(s.number[:0], d.digits[:min(len(d.digits), significant)]...)
	if len(d.digits) > significant {
		text = append(text, '1') // represents the remaining digits, which are not all zero
	}
	s.number = text[:0]
	exponent := d.point - len(text)
	if -fastPoint <= d.point && d.point <= fastPoint {
		text = strconv.AppendInt(append(text, 'e'), int64(exponent), 10)
		s.number = text[:0]
		double, _ := strconv.ParseFloat(string(text), 64)
		return double
	}
	// The number is m * 5^exponent * 2^exponent. A quotient of at least 64 bits, whose lowest bit
	// represents the remainder, rounds like the whole.
	m := &s.mantissa
	m.SetString(string(text), 10)
	if exponent >= 0 {
		m.Mul(m, powerOfFive(exponent))
	} else {
		divisor := powerOfFive(-exponent)
		shift := max(0, quotientBits+divisor.BitLen()-m.BitLen())
		m.Lsh(m, uint(shift))
		exponent -= shift
		if m.QuoRem(m, divisor, &s.remainder); s.remainder.Sign() != 0 {
			m.SetBit(m, 0, 1)
		}
	}
	double, _ := s.double.SetMantExp(s.double.SetPrec(0).SetInt(m), exponent).Float64()
	return double
}

var five = big.NewInt(5)

// fives are the cached powers of five, less than 200 KB in all.
var fives [maxFive + 1]atomic.Pointer[big.Int]

func powerOfFive(n int) *big.Int {
	if p := fives[n].Load(); p != nil {
		return p
	}
	p := new(big.Int).Exp(five, big.NewInt(int64(n)), nil)
	fives[n].Store(p)
	return p
}

// split splits a JSON number and reports whether it is written as an integer, without fraction or
// exponent.
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
			// The limit is far beyond the number of digits of any body.
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

// fromScientific parses the output of strconv in format 'e', without a sign. It overwrites the
// text.
func fromScientific(text []byte) (d decimal) {
	e := bytes.IndexByte(text, 'e')
	exponent, _ := strconv.Atoi(string(text[e+1:]))
	if e > 1 {
		copy(text[1:], text[2:e]) // over the decimal point
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
