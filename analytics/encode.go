package analytics

import (
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/posthorn/posthorn/analytics/event"
)

// item is a queued call: its position in its batch's body.
type item struct {
	start, end uint32 // of the call
	id         uint16 // start of its messageId, relative to start
	idLen      uint8  // 0: the id is long or has escapes, and is decoded from the JSON when needed
	kind       kind
}

// timeLayout is ISO 8601 in UTC, to the millisecond.
const timeLayout = "2006-01-02T15:04:05.000Z"

// append serializes the call. It copies everything and keeps no reference to the caller's data. The
// item's positions count from the start of b.
func (m *call) append(b []byte, now time.Time) ([]byte, item, error) {
	it := item{kind: m.kind, start: uint32(len(b))}
	for _, id := range [...]string{m.message.MessageId, m.userID, m.anonymousID, m.previousID, m.groupID} {
		if !utf8.ValidString(id) {
			return b, it, ErrInvalidID
		}
	}
	b = append(b, `{"type":"`...)
	b = append(b, m.kind.String()...)
	b = append(b, `","messageId":"`...)
	it.id = uint16(len(b) - int(it.start))
	if id := m.message.MessageId; id == "" {
		b = appendUUID(b, now)
		it.idLen = uuidLen
	} else {
		if utf8.RuneCountInString(id) > event.MaxMessageIDRunes {
			return b, it, ErrMessageIDTooLong
		}
		b = appendString(b[:len(b)-1], id)
		if n := len(b) - int(it.start) - int(it.id) - 1; n == len(id) && n <= math.MaxUint8 {
			it.idLen = uint8(n)
		}
		b = b[:len(b)-1]
	}
	b = append(b, `","timestamp":`...)
	if ts := m.message.Timestamp; ts == "" {
		b = append(b, '"')
		b = now.UTC().AppendFormat(b, timeLayout)
		b = append(b, '"')
	} else {
		b = appendString(b, ts)
	}
	b = appendField(b, `,"sentAt":`, m.message.SentAt)
	b = appendField(b, `,"userId":`, m.userID)
	b = appendField(b, `,"anonymousId":`, m.anonymousID)
	b = appendField(b, `,"previousId":`, m.previousID)
	b = appendField(b, `,"groupId":`, m.groupID)
	b = appendField(b, `,"event":`, m.event)
	b = appendField(b, `,"category":`, m.category)
	b = appendField(b, `,"name":`, m.name)
	for _, f := range [...]struct {
		name  string
		value map[string]interface{}
	}{{"context", m.context}, {"integrations", m.integrations}, {"traits", m.traits}, {"properties", m.properties}} {
		if len(f.value) == 0 {
			continue
		}
		b = append(b, `,"`...)
		b = append(b, f.name...)
		b = append(b, `":`...)
		var err error
		if b, err = appendMap(b, f.value, 2); err != nil {
			return b, it, &EncodeError{f.name, err}
		}
	}
	b = append(b, '}')
	it.end = uint32(len(b))
	return b, it, nil
}

func appendField(b []byte, name, value string) []byte {
	if value == "" {
		return b
	}
	return appendString(append(b, name...), value)
}

var (
	errTooDeep   = errors.New("nested deeper than " + strconv.Itoa(event.MaxDepth) + " levels, or a value that contains itself")
	errNotFinite = errors.New("NaN and infinities are not JSON numbers")
)

// appendValue writes the same JSON as encoding/json, but without HTML escapes and with unordered
// keys. The usual types of properties need neither reflection nor allocation; other types use
// encoding/json.
func appendValue(b []byte, value interface{}, depth int) ([]byte, error) {
	switch v := value.(type) {
	case nil:
		return append(b, "null"...), nil
	case string:
		return appendString(b, v), nil
	case bool:
		return strconv.AppendBool(b, v), nil
	case int:
		return strconv.AppendInt(b, int64(v), 10), nil
	case int64:
		return strconv.AppendInt(b, v, 10), nil
	case int32:
		return strconv.AppendInt(b, int64(v), 10), nil
	case uint:
		return strconv.AppendUint(b, uint64(v), 10), nil
	case uint64:
		return strconv.AppendUint(b, v, 10), nil
	case uint32:
		return strconv.AppendUint(b, uint64(v), 10), nil
	case float64:
		return appendFloat(b, v, 64)
	case float32:
		return appendFloat(b, float64(v), 32)
	case map[string]interface{}:
		return appendMap(b, v, depth+1)
	case []interface{}:
		return appendSlice(b, v, depth+1)
	case []string:
		if v == nil {
			return append(b, "null"...), nil
		}
		b = append(b, '[')
		for i, s := range v {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendString(b, s)
		}
		return append(b, ']'), nil
	}
	return appendJSON(b, value)
}

// appendJSON encodes the types that appendValue does not know. It is a separate function so that
// values of other types need no heap allocation.
func appendJSON(b []byte, value interface{}) ([]byte, error) {
	text, err := json.Marshal(value)
	return append(b, text...), err
}

func appendMap(b []byte, m map[string]interface{}, depth int) ([]byte, error) {
	if m == nil {
		return append(b, "null"...), nil
	}
	if depth > event.MaxDepth {
		return b, errTooDeep
	}
	b = append(b, '{')
	first := true
	for key, value := range m {
		if !first {
			b = append(b, ',')
		}
		first = false
		b = appendString(b, key)
		b = append(b, ':')
		var err error
		if b, err = appendValue(b, value, depth); err != nil {
			return b, err
		}
	}
	return append(b, '}'), nil
}

func appendSlice(b []byte, s []interface{}, depth int) ([]byte, error) {
	if s == nil {
		return append(b, "null"...), nil
	}
	if depth > event.MaxDepth {
		return b, errTooDeep
	}
	b = append(b, '[')
	for i, value := range s {
		if i > 0 {
			b = append(b, ',')
		}
		var err error
		if b, err = appendValue(b, value, depth); err != nil {
			return b, err
		}
	}
	return append(b, ']'), nil
}

// appendFloat writes the shortest number that parses as f, with an exponent where JavaScript has
// one.
func appendFloat(b []byte, f float64, bits int) ([]byte, error) {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return b, errNotFinite
	}
	format := byte('f')
	if abs := math.Abs(f); abs != 0 && (abs < 1e-6 || abs >= 1e21) {
		format = 'e'
	}
	return strconv.AppendFloat(b, f, format, -1, bits), nil
}

const hexDigits = "0123456789abcdef"

// appendString writes a JSON string. Bytes that are not UTF-8 become U+FFFD, as in encoding/json.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= utf8.RuneSelf {
			r, n := utf8.DecodeRuneInString(s[i:])
			if r == utf8.RuneError && n == 1 {
				b = append(b, s[start:i]...)
				b = append(b, "\uFFFD"...)
				start = i + 1
			}
			i += n
			continue
		}
		if c >= ' ' && c != '"' && c != '\\' {
			i++
			continue
		}
		b = append(b, s[start:i]...)
		switch c {
		case '"', '\\':
			b = append(b, '\\', c)
		case '\n':
			b = append(b, `\n`...)
		case '\r':
			b = append(b, `\r`...)
		case '\t':
			b = append(b, `\t`...)
		default:
			b = append(b, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		}
		i++
		start = i
	}
	b = append(b, s[start:]...)
	return append(b, '"')
}

const uuidLen = 36

// appendUUID appends a UUID of version 7: the time in ms and 74 random bits. Ids must be unique, not
// secret, so it uses the runtime's random generator, which the operating system seeds; a system
// call would cost ten times as much.
func appendUUID(b []byte, now time.Time) []byte {
	hi := uint64(now.UnixMilli())<<16 | 0x7000 | rand.Uint64()&0xfff
	lo := rand.Uint64()&(1<<62-1) | 1<<63
	for i := 60; i >= 0; i -= 4 {
		if i == 28 || i == 12 {
			b = append(b, '-')
		}
		b = append(b, hexDigits[hi>>i&15])
	}
	for i := 60; i >= 0; i -= 4 {
		if i == 60 || i == 44 {
			b = append(b, '-')
		}
		b = append(b, hexDigits[lo>>i&15])
	}
	return b
}
