package event

import (
	"strconv"
	"strings"
	"time"
)

// maxTimeText is longer than every form of a time.
const maxTimeText = 100

// parseText parses a time as text, in the forms that client libraries and the standard libraries of their
// languages write:
//
//   - ISO 8601: the forms of parseTime, the basic format, ordinal and week dates, 24:00, years with a sign;
//   - RFC 822, 850, 1123 and 2822, and the forms of asctime, date, Java's and Ruby's dates;
//   - the texts of Go's and Java's times and of JavaScript's dates;
//   - a number since 1970: see epoch.
//
// The words are read in any order, so that the forms need no list. Forms that leave the order of day and month
// open (11/10/2009), and zones with an ambiguous name, are not read.
func parseText(s string) (int64, bool) {
	if len(s) > maxTimeText {
		return 0, false
	}
	s, _, _ = strings.Cut(s, " m=")             // Go's monotonic clock
	for _, b := range [...]string{"()", "[]"} { // the name of the zone, of JavaScript and Java
		before, inside, ok := strings.Cut(s, b[:1])
		if ok && !strings.HasSuffix(inside, b[1:]) {
			return 0, false
		}
		s = before
	}
	words := strings.Fields(s)
	if len(words) == 1 {
		if ms, ok := digitText(words[0]); ok {
			return ms, true
		}
	}
	t := textTime{year: -1}
	for _, word := range words {
		if !t.word(strings.TrimSuffix(word, ",")) {
			return 0, false
		}
	}
	return t.millis()
}

// digitText reads a number since 1970 as text. 8 digits are a date, and 14 a date with a time; fewer than 9 digits
// are rather a year, or something else.
func digitText(s string) (int64, bool) {
	whole, fraction, point := strings.Cut(s, ".")
	if !isDigits(whole) || point && !isDigits(fraction) {
		return 0, false
	}
	if t := (textTime{year: -1}); len(s) == 8 && t.isoDate(s) || len(s) == 14 && t.isoDate(s[:8]) && t.clock(s[8:]) {
		return t.millis()
	}
	if len(whole) < 9 && s != "0" {
		return 0, false
	}
	return epoch(s)
}

// textTime has the parts of a time that were read: year is -1, and month and day are 0, before they are.
type textTime struct {
	year, month, day         int
	hour, minute, second, ms int
	offset                   int // in minutes
	timed                    bool
	zoned                    bool // by an offset
	named                    bool // by a name
}

func (t *textTime) millis() (int64, bool) {
	if t.year < 0 {
		return 0, false
	}
	return millis(t.year, t.month, t.day, t.hour, t.minute, t.second, t.ms, t.offset)
}

// word reads a part. It fails if the part is unknown, or was read before.
func (t *textTime) word(w string) bool {
	switch {
	case w == "":
		return false
	case isDigits(w) && len(w) <= 2 && t.day == 0:
		t.day, _ = strconv.Atoi(w)
		return t.day > 0
	case isDigits(w) && t.year < 0 && (len(w) == 4 || len(w) == 2 && t.month > 0):
		t.year = fullYear(w)
		return true
	case len(w) > 2 && w[2] == ':':
		return t.clock(w)
	case (t.timed || t.year >= 0) && (w[0] == '+' || w[0] == '-'):
		return t.zone(w)
	case w[0] == '+' || isDigits(w[:1]):
		if t.dashed(w) {
			return true
		}
		if i := strings.IndexAny(w, "Tt"); i > 0 {
			return t.isoDate(w[:i]) && t.clock(w[i+1:])
		}
		return t.isoDate(w)
	}
	if m := monthOf(w); m > 0 && t.month == 0 {
		t.month = m
		return true
	}
	for day := time.Sunday; day <= time.Saturday; day++ {
		if isName(w, day.String()) {
			return t.day == 0
		}
	}
	return t.zone(w)
}

// isName reports whether a word is a name or its first three letters.
func isName(w, name string) bool { return strings.EqualFold(w, name) || strings.EqualFold(w, name[:3]) }

// monthOf returns the month of a name, or 0.
func monthOf(w string) int {
	for m := time.January; m <= time.December; m++ {
		if isName(w, m.String()) {
			return int(m)
		}
	}
	return 0
}

// fullYear returns the year of four digits, or of two digits from 1969 on.
func fullYear(digits string) int {
	year, _ := strconv.Atoi(digits)
	switch {
	case len(digits) != 2:
		return year
	case year >= 69:
		return 1900 + year
	}
	return 2000 + year
}

// dashed reads a date as in 10-Nov-09.
func (t *textTime) dashed(w string) bool {
	parts := strings.Split(w, "-")
	if len(parts) != 3 || t.year >= 0 || monthOf(parts[1]) == 0 || !isDigits(parts[0]) || !isDigits(parts[2]) ||
		len(parts[2]) != 2 && len(parts[2]) != 4 {
		return false
	}
	t.day, _ = strconv.Atoi(parts[0])
	t.month, t.year = monthOf(parts[1]), fullYear(parts[2])
	return true
}

// isoDate reads a calendar, ordinal or week date, with or without separators.
func (t *textTime) isoDate(w string) bool {
	if t.year >= 0 {
		return false
	}
	p, years := timeParser{b: []byte(w)}, 4
	if p.peek() == '+' {
		p.i, years = 1, 6
	}
	year := p.digits(years)
	separator := p.peek()
	if separator == '-' || separator == '/' {
		p.i++
	} else {
		separator = 0
	}
	rest := w[min(p.i, len(w)):]
	day := time.Date(year, 1, 1, 0, 0, 0, 0, time.UTC)
	switch {
	case p.peek() == 'W' && separator != '/':
		p.i++
		week, weekday := p.digits(2), 1
		if separator == '-' && p.i < len(w) {
			weekday = p.after('-', 1)
		} else if p.i < len(w) {
			weekday = p.digits(1)
		}
		fourth := day.AddDate(0, 0, 3) // It is in the first week.
		day = fourth.AddDate(0, 0, 7*(week-1)+weekday-1-(int(fourth.Weekday())+6)%7)
		if of, number := day.ISOWeek(); of != year || number != week || weekday < 1 || weekday > 7 {
			return false
		}
	case len(rest) == 3 && separator != '/':
		day = day.AddDate(0, 0, p.digits(3)-1)
		if day.Year() != year {
			return false
		}
	default:
		month := p.digits(2)
		if separator != 0 && p.peek() == separator {
			p.i++
		} else if separator != 0 {
			return false
		}
		if t.year, t.month, t.day = year, month, p.digits(2); p.bad || p.i != len(w) || t.day == 0 {
			return false
		}
		return true
	}
	t.year, t.month, t.day = day.Year(), int(day.Month()), day.Day()
	return !p.bad && p.i == len(w)
}

// clock reads the time of the day, with or without separators, and a zone that follows it.
func (t *textTime) clock(w string) bool {
	if t.timed {
		return false
	}
	p := timeParser{b: []byte(w)}
	digit := func() bool { return '0' <= p.peek() && p.peek() <= '9' }
	t.timed, t.hour = true, p.digits(2)
	if p.peek() == ':' {
		if t.minute = p.after(':', 2); p.peek() == ':' {
			t.second = p.after(':', 2)
		}
	} else if digit() {
		if t.minute = p.digits(2); digit() {
			t.second = p.digits(2)
		}
	}
	if c := p.peek(); c == '.' || c == ',' {
		p.i++
		t.ms = p.fraction()
	}
	return !p.bad && (p.i == len(w) || t.zone(w[p.i:]))
}

// zones are the names of RFC 822, and others that name one zone only, with their offsets in hours.
var zones = map[string]int{
	"Z": 0, "UT": 0, "UTC": 0, "GMT": 0, "EST": -5, "EDT": -4, "CST": -6, "CDT": -5, "MST": -7, "MDT": -6, "PST": -8, "PDT": -7,
	"AKST": -9, "AKDT": -8, "HST": -10, "WET": 0, "WEST": 1, "CET": 1, "CEST": 2, "EET": 2, "EEST": 3, "MSK": 3, "JST": 9, "KST": 9,
	"AEST": 10, "AEDT": 11, "NZST": 12, "NZDT": 13,
}

// zone reads an offset or the name of a zone. An offset takes precedence over the name after it, which Go writes
// behind it: +0100 CET, +0530 +0530.
func (t *textTime) zone(w string) bool {
	hours, known := zones[strings.ToUpper(w)]
	if len(w) > 3 && (w[3] == '+' || w[3] == '-') && (w[:3] == "GMT" || w[:3] == "UTC") {
		w = w[3:]
	}
	switch isOffset := w[0] == '+' || w[0] == '-'; {
	case isOffset:
		p := timeParser{b: []byte(w)}
		offset := p.zone()
		if p.bad || t.named || t.zoned && offset != t.offset {
			return false
		}
		t.offset, t.zoned = offset, true
		return true
	case t.named:
		return false
	case t.zoned:
		t.named = len(w) <= 5 && strings.Trim(w, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") == ""
		return t.named
	}
	t.offset, t.named = hours*60, known
	return known
}

func isDigits(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }
