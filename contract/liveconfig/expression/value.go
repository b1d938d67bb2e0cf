package expression

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/common/types/traits"

	"github.com/posthorn/posthorn/analytics/event"
)

var (
	notScalar = &Failure{Kind: WrongType, Text: "the value must be a text, a number or a boolean"}
	notList   = &Failure{Kind: WrongType, Text: "the value must be a list of texts, for example ['users', call.userId]"}
	notObject = &Failure{Kind: WrongType, Text: "the value must be an object, for example {'id': call.userId}"}
	notForm   = &Failure{Kind: WrongType, Text: "a value of a form or query must be a text, a number, a boolean, null or a list of them; use json.encode for others"}
	tooLarge  = &Failure{Kind: TooLarge, Text: fmt.Sprintf("the result is larger than %d bytes; leave fields out", MaxResult)}
)

// appendJSON returns the canonical JSON text of a value. source is the expression, for the place of a failure.
func appendJSON(v ref.Val, source string) ([]byte, error) {
	w := writer{source: source}
	if err := w.value(v); err != nil {
		if f, ok := errors.AsType[*Failure](err); ok && len(w.path) > 0 {
			slices.Reverse(w.path)
			return nil, &Failure{f.Kind, "result" + strings.Join(w.path, ""), f.Text}
		}
		return nil, err
	}
	text, err := event.FixedPoint(w.out)
	if err != nil {
		return nil, &Failure{Kind: TooLarge, Text: fmt.Sprintf("the result has more than %d levels of lists and objects", event.MaxDepth)}
	}
	if len(text) > MaxResult {
		return nil, tooLarge
	}
	return text, nil
}

// writer writes a value as JSON, in a fixed order of the keys. event.FixedPoint makes it canonical.
type writer struct {
	out []byte
	// path is the part that failed, the innermost first.
	path   []string
	source string
}

// member is the name of an object's member in a place. A key that the expression does not contain may be data of the call.
func (w *writer) member(key string) string {
	if strings.Contains(w.source, key) {
		return "." + key
	}
	return ".*"
}

// value writes a CEL value.
func (w *writer) value(v ref.Val) error {
	switch v := v.(type) {
	case types.String:
		return w.text(string(v))
	case types.Null:
		w.out = append(w.out, "null"...)
	case types.Bool:
		w.out = strconv.AppendBool(w.out, bool(v))
	case types.Int:
		w.out = strconv.AppendInt(w.out, int64(v), 10)
	case types.Uint:
		w.out = strconv.AppendUint(w.out, uint64(v), 10)
	case types.Double:
		return w.double(float64(v))
	case types.Bytes:
		return w.text(base64.StdEncoding.EncodeToString(v))
	case types.Timestamp:
		return w.text(v.UTC().Format(time.RFC3339Nano))
	case types.Duration:
		return w.text(strconv.FormatFloat(v.Seconds(), 'f', -1, 64) + "s")
	case traits.Mapper:
		switch m := v.Value().(type) {
		case map[string]any:
			return w.object(m)
		default:
			return w.mapper(v)
		}
	case traits.Lister:
		if list, ok := v.Value().([]any); ok {
			return w.native(list)
		}
		return w.lister(v)
	case *types.Optional:
		return &Failure{Kind: WrongType, Text: "the value is optional; write .orValue(null) behind it, or a ? before the key: {?'a': call.?a}"}
	default:
		return &Failure{Kind: WrongType, Text: "the value has a type that JSON does not have"}
	}
	return w.check()
}

// check bounds the text while it is written.
func (w *writer) check() error {
	if len(w.out) > MaxResult {
		return tooLarge
	}
	return nil
}

func (w *writer) lister(l traits.Lister) error {
	w.out = append(w.out, '[')
	i := 0
	for it := l.Iterator(); it.HasNext() == types.True; i++ {
		element := it.Next()
		if i > 0 {
			w.out = append(w.out, ',')
		}
		if err := w.value(element); err != nil {
			w.path = append(w.path, fmt.Sprintf("[%d]", i))
			return err
		}
	}
	w.out = append(w.out, ']')
	return w.check()
}

// mapper writes an object whose keys are texts, or numbers and booleans as texts.
func (w *writer) mapper(m traits.Mapper) error {
	type member struct {
		key   string
		value ref.Val
	}
	var members []member
	for it := m.Iterator(); it.HasNext() == types.True; {
		k := it.Next()
		key, err := scalar(k)
		if err != nil {
			return err
		}
		members = append(members, member{key, m.Get(k)})
	}
	slices.SortFunc(members, func(a, b member) int { return strings.Compare(a.key, b.key) })
	w.out = append(w.out, '{')
	for i, e := range members {
		if i > 0 {
			w.out = append(w.out, ',')
			if members[i-1].key == e.key {
				return &Failure{Kind: InvalidValue, Text: "two keys of an object are equal as texts"}
			}
		}
		if err := w.text(e.key); err != nil {
			return err
		}
		w.out = append(w.out, ':')
		if err := w.value(e.value); err != nil {
			w.path = append(w.path, w.member(e.key))
			return err
		}
	}
	w.out = append(w.out, '}')
	return w.check()
}

// native writes a part of the call, or of a list with parts of it.
func (w *writer) native(v any) error {
	switch v := v.(type) {
	case nil:
		w.out = append(w.out, "null"...)
	case string:
		return w.text(v)
	case float64:
		return w.double(v)
	case bool:
		w.out = strconv.AppendBool(w.out, v)
	case map[string]any:
		return w.object(v)
	case []any:
		w.out = append(w.out, '[')
		for i, e := range v {
			if i > 0 {
				w.out = append(w.out, ',')
			}
			if err := w.native(e); err != nil {
				return err
			}
		}
		w.out = append(w.out, ']')
	case ref.Val:
		return w.value(v)
	default:
		return w.value(types.DefaultTypeAdapter.NativeToValue(v))
	}
	return w.check()
}

func (w *writer) object(m map[string]any) error {
	w.out = append(w.out, '{')
	var few [32]string
	keys := few[:0]
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for i, k := range keys {
		if i > 0 {
			w.out = append(w.out, ',')
		}
		if err := w.text(k); err != nil {
			return err
		}
		w.out = append(w.out, ':')
		if err := w.native(m[k]); err != nil {
			return err
		}
	}
	w.out = append(w.out, '}')
	return w.check()
}

func (w *writer) double(f float64) error {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return &Failure{Kind: InvalidValue, Text: "a number is infinite or not a number, which JSON does not have"}
	}
	if i := int64(f); float64(i) == f && -1<<53 <= i && i <= 1<<53 {
		w.out = strconv.AppendInt(w.out, i, 10)
	} else {
		w.out = strconv.AppendFloat(w.out, f, 'e', -1, 64)
	}
	return w.check()
}

// text writes a JSON string.
func (w *writer) text(s string) error {
	if len(w.out)+len(s) > MaxResult {
		return tooLarge
	}
	w.out = append(w.out, '"')
	begin := 0
	for i := range len(s) {
		if c := s[i]; c < ' ' || c == '"' || c == '\\' {
			w.out = append(w.out, s[begin:i]...)
			const hex = "0123456789abcdef"
			w.out = append(w.out, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
			begin = i + 1
		}
	}
	w.out = append(append(w.out, s[begin:]...), '"')
	return w.check()
}

// scalar returns a text, number or boolean as a text.
func scalar(v ref.Val) (string, error) {
	switch v := v.(type) {
	case types.String:
		if !utf8.ValidString(string(v)) {
			return strings.ToValidUTF8(string(v), "\uFFFD"), nil
		}
		return string(v), nil
	case types.Bool, types.Int, types.Uint:
		return fmt.Sprint(v.Value()), nil
	case types.Double:
		text, err := appendJSON(v, "")
		return string(text), err
	}
	return "", notScalar
}

// texts returns the scalars of a list.
func texts(v ref.Val) (list []string, err error) {
	l, ok := v.(traits.Lister)
	if !ok {
		return nil, notList
	}
	for it := l.Iterator(); it.HasNext() == types.True; {
		text, err := scalar(it.Next())
		if err != nil {
			return nil, notList
		}
		list = append(list, text)
	}
	return list, nil
}

// appendForm returns an object in the format application/x-www-form-urlencoded, in the order of the keys. A list repeats its key, and
// null leaves it out.
func appendForm(v ref.Val) ([]byte, error) {
	m, ok := v.(traits.Mapper)
	if !ok {
		return nil, notObject
	}
	pairs := url.Values{}
	size := 0
	for it := m.Iterator(); it.HasNext() == types.True; {
		k := it.Next()
		key, err := scalar(k)
		if err != nil {
			return nil, err
		}
		values := []string{}
		switch v := m.Get(k).(type) {
		case types.Null:
			continue
		case traits.Lister:
			values, err = texts(v)
		default:
			var text string
			text, err = scalar(v)
			values = append(values, text)
		}
		if err != nil {
			return nil, notForm
		}
		for _, text := range values {
			if size += len(key) + len(text) + 2; size > MaxResult {
				return nil, tooLarge
			}
		}
		if pairs[key] != nil {
			return nil, &Failure{Kind: InvalidValue, Text: "two keys of an object are equal as texts"}
		}
		pairs[key] = values
	}
	text := pairs.Encode()
	if len(text) > MaxResult {
		return nil, tooLarge
	}
	return []byte(text), nil
}

// PathSegment percent-encodes all characters of a text but those that RFC 3986 calls unreserved.
func PathSegment(text string) string { return strings.ReplaceAll(url.QueryEscape(text), "+", "%20") }
