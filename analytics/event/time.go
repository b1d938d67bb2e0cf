package event

import (
	"strconv"
	"time"
)

// Times are milliseconds since 1970, the precision of the wire. Finer digits are truncated, as
// JavaScript does, so that a receiver can recompute the timestamp from the fields of the message.
const (
	minMillis  = -62167219200000 // 0000-01-01T00:00:00.000Z
	maxMillis  = 253402300799999 // 9999-12-31T23:59:59.999Z
	zeroMillis = -62135596800000 // 0001-01-01T00:00:00.000Z: the unset time of Go and .NET
	dayMillis  = 24 * 60 * 60 * 1000
)

// corrected returns the time of an event by the server's clock:
//
//	received - (sent - original)
//
// Without a readable original time, the result is the time of receipt.
// Without a time of sending, the result is the original time. The same applies if the
// call was sent more than a day before the event: then the two times are of
// different clocks (an unset clock, or an intended time in the future), and
// their difference is not the error of a clock.
func corrected(received int64, sent, original instant) int64 {
	switch {
	case !original.ok:
		return received
	case !sent.ok || sent.ms < original.ms-dayMillis:
		return original.ms
	}
	t := received - (sent.ms - original.ms)
	if t < minMillis || t > maxMillis {
		return original.ms
	}
	return t
}

// instant is a time that may be missing or unreadable.
type instant struct {
	ms int64
	ok bool
}

// readTime parses a time in a canonical JSON value: a string in ISO 8601, or a number of seconds or
// milliseconds since 1970.
func readTime(v []byte) instant {
	if len(v) == 0 {
		return instant{}
	}
	switch c := v[0]; {
	case c == '"':
		return parseTime(v[1 : len(v)-1])
	case c == '-' || '0' <= c && c <= '9':
		f, err := strconv.ParseFloat(string(v), 64)
		if err != nil || f <= 0 {
			return instant{} // zero is an unset time
		}
		if f < 1e11 { // seconds until the year 5138; as milliseconds it would be before 1973-03-03
			f *= 1000
		}
		if f > maxMillis {
			return instant{}
		}
		return instant{int64(f), true}
	}
	return instant{}
}

// parseTime parses the forms of ISO 8601 that clients write:
//
//	YYYY-MM-DD, followed by nothing or by
//	"T" or a space, hh:mm[:ss[.fraction]], and
//	nothing (UTC), Z, UTC, GMT, ±hh:mm, ±hhmm or ±hh, with an optional space before.
func parseTime(b []byte) instant {
	p := timeParser{b: b}
	year, month, day := p.digits(4), p.after('-', 2), p.after('-', 2)
	var hour, minute, second, ms, offset int
	if p.i < len(b) && !p.bad {
		if c := b[p.i]; c != 'T' && c != 't' && c != ' ' {
			return instant{}
		}
		p.i++
		hour, minute = p.digits(2), p.after(':', 2)
		if p.peek() == ':' {
			second = p.after(':', 2)
			if c := p.peek(); c == '.' || c == ',' {
				p.i++
				ms = p.fraction()
			}
		}
		offset = p.zone()
	}
	if p.bad || p.i != len(b) || month < 1 || month > 12 || day < 1 || hour > 23 || minute > 59 || second > 60 {
		return instant{}
	}
	date := time.Date(year, time.Month(month), day, hour, minute, 0, 0, time.UTC)
	if date.Day() != day { // The month does not have this day.
		return instant{}
	}
	t := date.UnixMilli() + int64(second*1000+ms-offset*60_000) // Second 60, a leap second, becomes the first second of the next minute.
	if t < minMillis || t > maxMillis || t == zeroMillis {
		return instant{}
	}
	return instant{t, true}
}

type timeParser struct {
	b   []byte
	i   int
	bad bool
}

func (p *timeParser) peek() byte {
	if p.i < len(p.b) {
		return p.b[p.i]
	}
	return 0
}

// digits reads a number of exactly n digits.
func (p *timeParser) digits(n int) (v int) {
	if len(p.b)-p.i < n {
		p.bad = true
		return 0
	}
	for range n {
		c := p.b[p.i] - '0'
		if c > 9 {
			p.bad = true
			return 0
		}
		v = v*10 + int(c)
		p.i++
	}
	return v
}

func (p *timeParser) after(c byte, n int) int {
	if p.peek() != c {
		p.bad = true
		return 0
	}
	p.i++
	return p.digits(n)
}

// fraction reads the digits after the point, at least one, as milliseconds.
func (p *timeParser) fraction() (ms int) {
	unit, start := 100, p.i
	for c := p.peek(); '0' <= c && c <= '9'; c = p.peek() {
		ms += unit * int(c-'0')
		unit /= 10
		p.i++
	}
	p.bad = p.bad || p.i == start
	return ms
}

// zone reads the rest of the text as an offset from UTC, in minutes.
func (p *timeParser) zone() int {
	if p.peek() == ' ' {
		p.i++
		if p.i == len(p.b) {
			p.bad = true
			return 0
		}
	}
	switch string(p.b[p.i:]) {
	case "", "Z", "z", "UTC", "GMT":
		p.i = len(p.b)
		return 0
	}
	sign := 1
	switch p.peek() {
	case '+':
	case '-':
		sign = -1
	default:
		p.bad = true
		return 0
	}
	p.i++
	hours, minutes := p.digits(2), 0
	if p.peek() == ':' {
		minutes = p.after(':', 2)
	} else if p.i < len(p.b) {
		minutes = p.digits(2)
	}
	p.bad = p.bad || hours > 23 || minutes > 59
	return sign * (hours*60 + minutes)
}

// appendMillis appends a time as 2006-01-02T15:04:05.000Z. Years outside of 0
// to 9999 are not expected.
func appendMillis(dst []byte, ms int64) []byte {
	t := time.UnixMilli(ms).UTC()
	year, month, day := t.Date()
	hour, minute, second := t.Clock()
	dst = append(digits2(digits2(dst, year/100), year%100), '-')
	dst = append(digits2(dst, int(month)), '-')
	dst = append(digits2(dst, day), 'T')
	dst = append(digits2(dst, hour), ':')
	dst = append(digits2(dst, minute), ':')
	dst = append(digits2(dst, second), '.')
	milli := t.Nanosecond() / 1e6
	return append(digits2(dst, milli/10), byte('0'+milli%10), 'Z')
}

func digits2(dst []byte, v int) []byte {
	return append(dst, byte('0'+v/10%10), byte('0'+v%10))
}

func appendQuotedTime(dst []byte, ms int64) []byte {
	return append(appendMillis(append(dst, '"'), ms), '"')
}
