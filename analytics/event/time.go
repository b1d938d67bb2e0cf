package event

import (
	"math"
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

const (
	// maxTransit is the difference of sentAt and receivedAt, in milliseconds, up to which a clock counts as right:
	// the time that a request needs must not change the order of calls.
	maxTransit = 5_000
	// maxCorrection is the largest error of a clock. A larger difference means that sentAt is not the time of
	// this request.
	maxCorrection = dayMillis
	// setClock is before the time of any clock that was ever set: 2005-01-01T00:00:00Z.
	setClock = 1_104_537_600_000
)

// corrected returns the time of an event by the server's clock: the client's clock was wrong by the
// difference of the times of receipt and of sending. known is false if the difference is too large for the
// error of a clock, so that the event keeps its time. The exception is a clock that was never set.
func corrected(received int64, sent, original instant) (ms int64, known bool) {
	if !sent.ok {
		return original.ms, true
	}
	wrong := received - sent.ms
	neverSet := max(sent.ms, original.ms) < setClock && original.ms-sent.ms <= dayMillis
	switch {
	case -maxTransit < wrong && wrong < maxTransit:
		return original.ms, true
	case (wrong < -maxCorrection || wrong > maxCorrection) && !neverSet:
		return original.ms, false
	}
	t := original.ms + wrong
	if t < minMillis || t > maxMillis {
		return original.ms, false
	}
	return t, true
}

// EventTime reads the own time of a call, without a correction, from the JSON values of its timestamp and
// originalTimestamp; nil is a missing one. The time is zero if the call has none. unread has the bits of the
// values that were not read.
func EventTime(timestamp, originalTimestamp []byte) (t time.Time, unread Defects) {
	var v values
	v[fieldTimestamp], _ = Canonical(timestamp)
	v[fieldOriginalTimestamp], _ = Canonical(originalTimestamp)
	own, unread := v.eventTime()
	if own.ok {
		t = time.UnixMilli(own.ms).UTC()
	}
	return t, unread
}

// eventTime returns the own time of a call, and moves its value to originalTimestamp. An originalTimestamp
// replaces a timestamp that is missing or was not read.
func (v *values) eventTime() (own instant, unread Defects) {
	own = readTime(v[fieldTimestamp])
	unread = own.unread(DefectTimestamp)
	if !own.ok {
		original := readTime(v[fieldOriginalTimestamp])
		unread |= original.unread(DefectOriginalTimestamp)
		if original.ok || missing(v[fieldTimestamp]) {
			return original, unread
		}
	}
	if !missing(v[fieldTimestamp]) {
		v[fieldOriginalTimestamp] = v[fieldTimestamp]
	}
	return own, unread
}

// instant is a time that may be missing or unreadable.
type instant struct {
	ms int64
	ok bool
	// failed is true if there is a value that is not a time.
	failed bool
}

// unread returns the defect if the time was not read.
func (i instant) unread(d Defects) Defects {
	if i.failed {
		return d
	}
	return 0
}

// readTime parses a time in a canonical JSON value. The zero time of Go and .NET and the number 0 are missing
// times.
func readTime(v []byte) instant {
	if missing(v) {
		return instant{}
	}
	t := instant{failed: true}
	switch c := v[0]; {
	case c == '"':
		text := v[1 : len(v)-1]
		if t = parseTime(text); !t.ok {
			t.ms, t.ok = parseText(string(text))
		}
	case c == '-' || '0' <= c && c <= '9':
		t.ms, t.ok = epoch(string(v))
	}
	t.failed = !t.ok
	if t.ok && t.ms == zeroMillis {
		return instant{}
	}
	return t
}

// epoch reads a number of seconds, milliseconds, microseconds or nanoseconds since 1970. Its size determines the
// unit: each unit counts until the year 5138 in numbers that are too small for 1973 in the next one.
func epoch(number string) (ms int64, ok bool) {
	f, err := strconv.ParseFloat(number, 64)
	switch {
	case err != nil || f < 0:
		return 0, false
	case f == 0:
		return zeroMillis, true
	case f < 1e11:
		f *= 1000
	case f < 1e14:
	case f < 1e17:
		f /= 1000
	case f <= math.MaxInt64: // of nanoseconds, in the year 2262
		f /= 1e6
	default:
		return 0, false
	}
	return int64(min(f, maxMillis+1)), f <= maxMillis
}

// parseTime parses the forms of ISO 8601 that nearly all clients write; parseText reads all forms.
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
	if p.bad || p.i != len(b) {
		return instant{}
	}
	t, ok := millis(year, month, day, hour, minute, second, ms, offset)
	return instant{ms: t, ok: ok}
}

// millis returns the time of a date, a clock and an offset in minutes, if they exist.
func millis(year, month, day, hour, minute, second, ms, offset int) (int64, bool) {
	endOfDay := hour == 24 && minute == 0 && second == 0 && ms == 0
	if month < 1 || month > 12 || day < 1 || hour > 23 && !endOfDay || minute > 59 || second > 60 {
		return 0, false
	}
	date := time.Date(year, time.Month(month), day, 0, 0, 0, 0, time.UTC)
	if date.Day() != day { // The month does not have this day.
		return 0, false
	}
	// Second 60, a leap second, becomes the first second of the next minute.
	t := date.UnixMilli() + int64(((hour*60+minute-offset)*60+second)*1000+ms)
	return t, t >= minMillis && t <= maxMillis
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
