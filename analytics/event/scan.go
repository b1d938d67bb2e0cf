package event

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"iter"
	"math/big"
	"math/bits"
	"slices"
	"sync"
	"unicode/utf8"
)

// Canonical returns a JSON text in the form of JavaScript's
// JSON.stringify(JSON.parse(json)):
//
//   - no white space; only the escapes of JavaScript: \" \\ \b \f \n \r
//     \t, other controls and lone surrogates as \u00xx and \udxxx in lower case;
//   - numbers in JavaScript's form, the shortest decimal that reads as the nearest
//     double. The exceptions are long numbers, which are kept as written: integers
//     (without fraction and exponent) that JavaScript would print with other
//     digits, such as 12345678901234567890, and numbers beyond the range of
//     doubles, such as 1e400. [FixedPoint] has no exceptions;
//   - in each object integer-like keys (0 to 4294967294) first, ascending, the
//     others in the order of their first appearance; the last value of equal
//     keys;
//   - bytes that are not UTF-8 become U+FFFD as in browsers and Node, one for
//     each maximal invalid part (an id must not have any: see [Request.Parse]); a byte order mark in front is ignored.
//
// Time and memory are linear in the size of the input (times its depth, in the
// worst case), for any content. Errors are of type *Error, with the codes
// invalid_json and too_deep.
func Canonical(json []byte) ([]byte, error) {
	s := newScanner(json)
	defer s.release()
	if err := s.whole(); err != nil {
		return nil, err
	}
	return bytes.Clone(s.out), nil
}

// FixedPoint is Canonical with each long number as a string of the characters
// that were sent: 12345678901234567890 becomes "12345678901234567890". For the
// result, JSON.stringify(JSON.parse(result)) === result.
func FixedPoint(json []byte) ([]byte, error) {
	s := newScanner(json)
	defer s.release()
	s.longAsString = true
	if err := s.whole(); err != nil {
		return nil, err
	}
	return bytes.Clone(s.out), nil
}

// IsFixedPoint reports whether FixedPoint returns the text unchanged.
func IsFixedPoint(json []byte) bool {
	s := newScanner(json)
	defer s.release()
	s.longAsString = true
	return s.whole() == nil && bytes.Equal(s.out, json)
}

// whole scans a text that is a single value into out.
func (s *scanner) whole() error {
	err := s.document((*scanner).value)
	s.flush()
	return err
}

// scanner scans JSON and makes it canonical at the same time. Canonical input is only scanned, and
// copied in long runs between the differences.
//
// Positions in the output ("offsets") include data that is not copied yet.
type scanner struct {
	in     []byte
	pos    int // the next byte of in to read
	copied int // in[copied:pos] is canonical and not in out yet
	out    []byte
	depth  int
	err    *Error

	open []member // members of the objects being read, the innermost last

	longAsString bool // write long numbers as strings
	long         bool // true after a long number
	replaced     int  // number of invalid parts of UTF-8 that were replaced

	// Results for Parse: the calls, their members, and the number of calls beyond the limit of a
	// batch.
	calls  []rawCall
	kept   []member
	excess int

	// Scratch space.
	number, digits, ordered []byte
	mantissa, remainder     big.Int
	double                  big.Float
	table                   []uint32
	bodies, texts           []byte
	receivedAt              []byte
	places                  []placed
}

// member is one member of an object.
type member struct {
	key, value span   // of the output; the key with its quotes
	index      uint32 // of an integer-like key, else notIndex
	field      field  // for members of calls
	replaced   bool   // true if the value has replaced parts of invalid UTF-8
}

// span is the range of offsets from from up to to.
type span struct{ from, to int }

// notIndex is one more than the largest key that JavaScript treats as an index.
const notIndex = 1<<32 - 1

var scanners = sync.Pool{New: func() any { return new(scanner) }}

// maxPooled bounds the memory that an unusual body leaves in the pool.
const maxPooled = 1 << 20

func newScanner(in []byte) *scanner {
	s := scanners.Get().(*scanner)
	s.in, s.pos, s.copied, s.depth, s.err, s.excess = in, 0, 0, 0, nil, 0
	s.longAsString, s.long, s.replaced = false, false, 0
	s.out, s.open, s.calls, s.kept = s.out[:0], s.open[:0], s.calls[:0], s.kept[:0]
	s.bodies, s.texts, s.places = s.bodies[:0], s.texts[:0], s.places[:0]
	return s
}

func (s *scanner) release() {
	s.in, s.err = nil, nil
	const pooledMembers = maxPooled / 64
	if max(cap(s.out), cap(s.ordered), cap(s.number), cap(s.digits), cap(s.bodies), cap(s.texts)) <= maxPooled &&
		cap(s.open) <= pooledMembers && cap(s.kept) <= pooledMembers && cap(s.table) <= pooledMembers {
		scanners.Put(s)
	}
}

// document scans a whole text that is one value, by the given function.
func (s *scanner) document(value func(*scanner) bool) error {
	if bytes.HasPrefix(s.in, []byte("\ufeff")) {
		s.pos += 3
	}
	s.copied = s.pos
	s.space()
	if value(s) {
		s.space()
		if s.pos < len(s.in) {
			s.fail("the end of the text")
		}
	}
	if s.err != nil {
		return s.err
	}
	return nil
}

// fail sets the error for unexpected text at the current position.
func (s *scanner) fail(expected string) bool {
	if s.pos >= len(s.in) {
		s.err = &Error{CodeInvalidJSON, fmt.Sprintf("not valid JSON: the text ends at byte %d where %s is expected; send one complete JSON value", s.pos, expected)}
	} else {
		s.err = &Error{CodeInvalidJSON, fmt.Sprintf("not valid JSON: at byte %d %s is expected; send one JSON value, encoded by a JSON library", s.pos, expected)}
	}
	return false
}

// offset is the output offset of the current position.
func (s *scanner) offset() int { return len(s.out) + s.pos - s.copied }

// flush copies the canonical input to the output.
func (s *scanner) flush() {
	s.out = append(s.out, s.in[s.copied:s.pos]...)
	s.copied = s.pos
}

// text returns scanned output; it is valid until the next scan.
func (s *scanner) text(r span) []byte {
	if r.from >= len(s.out) {
		shift := s.copied - len(s.out)
		return s.in[r.from+shift : r.to+shift]
	}
	if r.to > len(s.out) {
		s.flush()
	}
	return s.out[r.from:r.to]
}

// next returns the byte at the current position, 0 at the end.
func (s *scanner) next() byte {
	if s.pos < len(s.in) {
		return s.in[s.pos]
	}
	return 0
}

// space skips white space.
func (s *scanner) space() {
	if s.pos < len(s.in) && s.in[s.pos] > ' ' {
		return
	}
	start := s.pos
	for s.pos < len(s.in) {
		if c := s.in[s.pos]; c != ' ' && c != '\n' && c != '\t' && c != '\r' {
			break
		}
		s.pos++
	}
	if s.pos > start {
		s.out = append(s.out, s.in[s.copied:start]...)
		s.copied = s.pos
	}
}

func (s *scanner) value() bool {
	switch c := s.next(); c {
	case '"':
		return s.string()
	case '{':
		return s.object()
	case '[':
		return s.array()
	case 't':
		return s.literal("true")
	case 'f':
		return s.literal("false")
	case 'n':
		return s.literal("null")
	default:
		if c == '-' || '0' <= c && c <= '9' {
			return s.numberValue()
		}
		return s.fail("a value")
	}
}

func (s *scanner) literal(word string) bool {
	if !bytes.HasPrefix(s.in[s.pos:], []byte(word)) {
		return s.fail(word)
	}
	s.pos += len(word)
	return true
}

func (s *scanner) enter() bool {
	s.pos++
	if s.depth++; s.depth > MaxDepth {
		s.err = &Error{CodeTooDeep, fmt.Sprintf("arrays and objects nest deeper than the %d levels allowed; flatten them", MaxDepth)}
		return false
	}
	return true
}

func (s *scanner) array() bool {
	if !s.enter() {
		return false
	}
	s.space()
	if s.next() == ']' {
		s.pos++
		s.depth--
		return true
	}
	for {
		if !s.value() {
			return false
		}
		if more, ok := s.separator(']', "',' or ']'"); !ok {
			return false
		} else if !more {
			s.depth--
			return true
		}
	}
}

// separator scans the text after an element: a comma and the space after it, or the closing
// bracket.
func (s *scanner) separator(closing byte, expected string) (more, ok bool) {
	s.space()
	switch s.next() {
	case ',':
		s.pos++
		s.space()
		return true, true
	case closing:
		s.pos++
		return false, true
	}
	return false, s.fail(expected)
}

func (s *scanner) object() bool {
	start, base := s.offset(), len(s.open)
	reordered, ok := s.members(false)
	if ok && reordered {
		s.rewrite(start, s.open[base:])
	}
	s.open = s.open[:base]
	return ok
}

// rewrite replaces the object that was read last with its members in order.
func (s *scanner) rewrite(start int, members []member) {
	s.flush()
	b := append(s.ordered[:0], '{')
	for i, m := range members {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, s.out[m.key.from:m.key.to]...)
		b = append(b, ':')
		b = append(b, s.out[m.value.from:m.value.to]...)
	}
	b = append(b, '}')
	s.ordered = b
	s.out = append(s.out[:start], b...)
}

// members scans an object and pushes its members onto s.open, in JavaScript's order and without
// duplicates. It reports whether that order differs from the text's. With batch, the value of a key
// "batch" is scanned as calls.
func (s *scanner) members(batch bool) (reordered, ok bool) {
	if !s.enter() {
		return false, false
	}
	s.space()
	if s.next() == '}' {
		s.pos++
		s.depth--
		return false, true
	}
	base := len(s.open)
	var seen uint64 // a filter for duplicates: one bit for each (hash of a) key
	duplicates, disorder, last := false, false, uint32(0)
	for {
		if s.next() != '"' {
			return false, s.fail("a key in double quotes")
		}
		m := member{index: notIndex}
		m.key.from = s.offset()
		if !s.string() {
			return false, false
		}
		m.key.to = s.offset()
		key := s.text(m.key)
		if c := key[1]; c <= '9' && c >= '0' {
			m.index = arrayIndex(key[1 : len(key)-1])
		}
		// The order is: ascending indexes first, then all other keys.
		disorder = disorder || m.index < last
		last = m.index
		if n := len(s.open) - base; n < fewMembers {
			bit := uint64(1) << ((uint(len(key))*7 ^ uint(key[1])*3 ^ uint(key[len(key)-2])*11 ^ uint(key[len(key)/2])*17) & 63)
			if seen&bit != 0 && !duplicates {
				duplicates = s.contains(base, key)
			}
			seen |= bit
		}
		isBatch := batch && string(key) == `"batch"`
		s.space()
		if s.next() != ':' {
			return false, s.fail("':' after a key")
		}
		s.pos++
		s.space()
		m.value.from = s.offset()
		replaced := s.replaced
		if isBatch {
			ok = s.batch()
		} else {
			ok = s.value()
		}
		if !ok {
			return false, false
		}
		m.value.to = s.offset()
		m.replaced = s.replaced > replaced
		s.open = append(s.open, m)
		if more, ok := s.separator('}', "',' or '}'"); !ok {
			return false, false
		} else if !more {
			break
		}
		if s.next() == '}' {
			return false, s.fail("a key in double quotes, not a trailing comma,")
		}
	}
	s.depth--
	many := len(s.open)-base > fewMembers
	if duplicates || disorder || many {
		return s.order(base, disorder), true
	}
	return false, true
}

// fewMembers is the number of members up to which they are compared one by one.
const fewMembers = 16

func (s *scanner) contains(base int, key []byte) bool {
	for _, m := range s.open[base:] {
		if bytes.Equal(s.text(m.key), key) {
			return true
		}
	}
	return false
}

var seed = maphash.MakeSeed()

// order removes duplicates from the members from base on, and sorts them if necessary. It reports
// whether anything changed.
func (s *scanner) order(base int, disorder bool) (changed bool) {
	s.flush()
	members := s.open[base:]
	// An open-addressing table from the keys' hashes to positions in unique (plus one). The seed is
	// random, so a sender cannot prepare colliding keys.
	size := 1 << bits.Len(uint(len(members)*2-1))
	s.table = slices.Grow(s.table[:0], size)[:size]
	clear(s.table)
	unique := members[:0]
next:
	for _, m := range members {
		key := s.out[m.key.from:m.key.to]
		slot := int(maphash.Bytes(seed, key)) & (size - 1)
		for s.table[slot] != 0 {
			first := &unique[s.table[slot]-1]
			if bytes.Equal(s.out[first.key.from:first.key.to], key) {
				first.value, first.replaced = m.value, m.replaced // The last value takes the position of the first one.
				continue next
			}
			slot = (slot + 1) & (size - 1)
		}
		unique = append(unique, m)
		s.table[slot] = uint32(len(unique))
	}
	s.open = s.open[:base+len(unique)]
	changed = disorder || len(unique) < len(members)
	if disorder {
		slices.SortFunc(unique, func(a, b member) int {
			return cmp.Or(cmp.Compare(a.index, b.index), cmp.Compare(a.key.from, b.key.from))
		})
	}
	return changed
}

// arrayIndex returns the value of an integer-like key, or notIndex.
func arrayIndex(key []byte) uint32 {
	if len(key) > 10 || key[0] == '0' && len(key) > 1 {
		return notIndex
	}
	v := uint64(0)
	for _, c := range key {
		if c < '0' || c > '9' {
			return notIndex
		}
		v = v*10 + uint64(c-'0')
	}
	return uint32(min(v, notIndex))
}

// numberValue reads a number.
func (s *scanner) numberValue() bool {
	start := s.pos
	i := start
	in := s.in
	if in[i] == '-' {
		i++
	}
	whole := i
	for i < len(in) && in[i]-'0' <= 9 {
		i++
	}
	wholeDigits := i - whole
	if wholeDigits == 0 || wholeDigits > 1 && in[whole] == '0' {
		s.pos = min(whole+wholeDigits, whole+1)
		if wholeDigits == 0 {
			return s.fail("a digit")
		}
		return s.fail("a number without leading zeros")
	}
	canonical := wholeDigits <= safeDigits
	if i < len(in) && in[i] == '.' {
		i++
		fraction := i
		for i < len(in) && in[i]-'0' <= 9 {
			i++
		}
		if i == fraction {
			s.pos = i
			return s.fail("a digit after the decimal point")
		}
		// JavaScript's form has no zero at the end; a small number has an exponent.
		canonical = wholeDigits+i-fraction <= safeDigits && in[i-1] != '0' &&
			(in[whole] != '0' || !bytes.HasPrefix(in[fraction:i], []byte("000000")))
	} else if in[whole] == '0' && whole > start {
		canonical = false // -0
	}
	if i < len(in) && in[i]|0x20 == 'e' {
		canonical = false
		i++
		if i < len(in) && (in[i] == '+' || in[i] == '-') {
			i++
		}
		exponent := i
		for i < len(in) && in[i]-'0' <= 9 {
			i++
		}
		if i == exponent {
			s.pos = i
			return s.fail("a digit in the exponent")
		}
	}
	if canonical {
		s.pos = i
		return true
	}
	s.flush()
	s.out = s.appendNumber(s.out, in[start:i])
	s.pos, s.copied = i, i
	return true
}

// string reads a string, key or value.
func (s *scanner) string() bool {
	in := s.in
	i := s.pos + 1
	for {
		i = plain(in, i)
		if i >= len(in) {
			s.pos = i
			return s.fail("'\"' at the end of a string")
		}
		switch c := in[i]; {
		case c == '"':
			s.pos = i + 1
			return true
		case c == '\\':
			s.pos = i
			if !s.escape() {
				return false
			}
			i = s.pos
		case c < ' ':
			s.pos = i
			return s.fail("no control character, or its escape,")
		default:
			if _, size := utf8.DecodeRune(in[i:]); size > 1 {
				i += size
				continue
			}
			s.pos = i
			s.flush()
			s.replaced++
			s.out = append(s.out, "\ufffd"...)
			i += invalidPart(in[i:])
			s.pos, s.copied = i, i
		}
	}
}

// plain returns the position of the first byte from i on that is a quote, a
// backslash, a control character or not ASCII.
func plain(in []byte, i int) int {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	for ; i+8 <= len(in); i += 8 {
		// mask has the highest bit of each special byte set. Bytes after a special one may be
		// marked incorrectly; the first one is correct.
		w := binary.LittleEndian.Uint64(in[i:])
		quote, backslash := w^(ones*'"'), w^(ones*'\\')
		mask := (w | (w - ones*' ') | (quote - ones) | (backslash - ones)) & highs
		if mask != 0 {
			// A byte of 0x80 or more is special.
			return i + bits.TrailingZeros64(mask)/8
		}
	}
	for i < len(in) && in[i] >= ' ' && in[i] < utf8.RuneSelf && in[i] != '"' && in[i] != '\\' {
		i++
	}
	return i
}

// invalidPart returns the length of the maximal part of an invalid UTF-8 sequence that becomes one
// U+FFFD, as in the WHATWG's Encoding Standard.
func invalidPart(b []byte) int {
	low, high, more := byte(0x80), byte(0xbf), 0
	switch c := b[0]; {
	case 0xc2 <= c && c <= 0xdf:
		more = 1
	case 0xe0 <= c && c <= 0xef:
		more = 2
		switch c {
		case 0xe0:
			low = 0xa0
		case 0xed:
			high = 0x9f
		}
	case 0xf0 <= c && c <= 0xf4:
		more = 3
		switch c {
		case 0xf0:
			low = 0x90
		case 0xf4:
			high = 0x8f
		}
	}
	n := 1
	for ; more > 0 && n < len(b) && low <= b[n] && b[n] <= high; more-- {
		n++
		low, high = 0x80, 0xbf
	}
	return n
}

// escape scans an escape sequence, or the two of a surrogate pair.
func (s *scanner) escape() bool {
	in, i := s.in, s.pos
	if i+1 >= len(in) {
		s.pos = len(in)
		return s.fail("an escape sequence")
	}
	switch in[i+1] {
	case '"', '\\', 'b', 'f', 'n', 'r', 't':
		s.pos += 2
		return true
	case '/':
		s.flush()
		s.copied++ // drops the backslash
		s.pos += 2
		return true
	case 'u':
	default:
		return s.fail("a known escape sequence")
	}
	r, ok := hex4(in, i+2)
	if !ok {
		return s.fail("\\u with four hexadecimal digits")
	}
	s.flush()
	i += 6
	if 0xd800 <= r && r < 0xdc00 && i+1 < len(in) && in[i] == '\\' && in[i+1] == 'u' {
		if low, ok := hex4(in, i+2); ok && 0xdc00 <= low && low < 0xe000 {
			r = (r-0xd800)<<10 + (low - 0xdc00) + 0x10000
			i += 6
		}
	}
	s.out = appendRune(s.out, r)
	s.pos, s.copied = i, i
	return true
}

func hex4(in []byte, i int) (r rune, ok bool) {
	if i+4 > len(in) {
		return 0, false
	}
	for _, c := range in[i : i+4] {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			c = c | 0x20 - 'a' + 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// appendRune appends a character of a string as JSON.stringify does.
func appendRune(dst []byte, r rune) []byte {
	const hex = "0123456789abcdef"
	switch {
	case r == '"' || r == '\\':
		return append(dst, '\\', byte(r))
	case r == '\b':
		return append(dst, `\b`...)
	case r == '\f':
		return append(dst, `\f`...)
	case r == '\n':
		return append(dst, `\n`...)
	case r == '\r':
		return append(dst, `\r`...)
	case r == '\t':
		return append(dst, `\t`...)
	case r < ' ':
		return append(dst, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
	case 0xd800 <= r && r < 0xe000: // a lone surrogate, otherwise it would be part of a pair
		return append(dst, '\\', 'u', 'd', hex[r>>8&15], hex[r>>4&15], hex[r&15])
	}
	return utf8.AppendRune(dst, r)
}

// appendString appends a Go string as a JSON string. The three bytes of a lone surrogate become its escape
// again; other bytes that are not UTF-8 become U+FFFD.
func appendString(dst []byte, v string) []byte {
	dst = append(dst, '"')
	for i := 0; i < len(v); {
		r, size := utf8.DecodeRuneInString(v[i:])
		if size == 1 && v[i] == 0xed && i+2 < len(v) && 0xa0 <= v[i+1] && v[i+1] <= 0xbf && 0x80 <= v[i+2] && v[i+2] <= 0xbf {
			r, size = 0xd000|rune(v[i+1]&0x3f)<<6|rune(v[i+2]&0x3f), 3
		}
		dst = appendRune(dst, r)
		i += size
	}
	return append(dst, '"')
}

// appendDecoded appends the characters of a canonical JSON string. A lone surrogate, which UTF-8 does not have,
// becomes the three bytes that UTF-8 would use (WTF-8), so that different strings remain different.
func appendDecoded(dst, quoted []byte) []byte {
	b := quoted[1 : len(quoted)-1]
	for {
		i := bytes.IndexByte(b, '\\')
		if i < 0 {
			return append(dst, b...)
		}
		dst = append(dst, b[:i]...)
		switch c := b[i+1]; c {
		case 'b':
			dst = append(dst, '\b')
		case 'f':
			dst = append(dst, '\f')
		case 'n':
			dst = append(dst, '\n')
		case 'r':
			dst = append(dst, '\r')
		case 't':
			dst = append(dst, '\t')
		case 'u':
			r, _ := hex4(b, i+2)
			if 0xd800 <= r && r < 0xe000 {
				dst = append(dst, byte(0xe0|r>>12), byte(0x80|r>>6&0x3f), byte(0x80|r&0x3f))
			} else {
				dst = utf8.AppendRune(dst, r)
			}
			i += 4
		default:
			dst = append(dst, c)
		}
		b = b[i+2:]
	}
}

// skipCanonical returns the end of the canonical value at b[i].
func skipCanonical(b []byte, i int) int {
	depth := 0
	for {
		switch b[i] {
		case '"':
			i++
			for b[i] != '"' {
				if b[i] == '\\' {
					i++
				}
				i++
			}
			i++
		case '{', '[':
			depth++
			i++
		case '}', ']':
			depth--
			i++
		case ',', ':':
			i++
			continue
		default: // a number or a literal
			for i < len(b) && b[i] != ',' && b[i] != '}' && b[i] != ']' {
				i++
			}
		}
		if depth == 0 {
			return i
		}
	}
}

// membersOf iterates over the keys (with their quotes) and values of a
// canonical object.
func membersOf(object []byte) iter.Seq2[span, span] {
	return func(yield func(key, value span) bool) {
		for i := 1; i < len(object)-1; i++ { // i++ steps over the comma
			key := span{i, skipCanonical(object, i)}
			i = skipCanonical(object, key.to+1)
			if !yield(key, span{key.to + 1, i}) {
				return
			}
		}
	}
}
