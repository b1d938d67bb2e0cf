package audience

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
)

const (
	// MaxLineBytes bounds the length of a line.
	MaxLineBytes = 16 << 10
	// MaxUserIDBytes bounds the length of a userId in UTF-8. With MaxLineBytes it keeps every
	// identify call well below the size limit of a call.
	MaxUserIDBytes = 1024
)

// lines reads members, one JSON object per line. It skips blank lines.
type lines struct {
	in   *bufio.Reader
	kind string
	// full: a snapshot, whose lines must not have "member".
	full bool
	line int64
	// fields and nested are buffers of parse.
	fields map[string]json.RawMessage
	nested []byte
}

func newLines(in io.Reader, kind string, full bool) *lines {
	return &lines{in: bufio.NewReaderSize(in, MaxLineBytes+2), kind: kind, full: full, fields: map[string]json.RawMessage{}}
}

// next implements stream, but in the order of the input. An input error is a *admission.Refusal, which
// contains no input data.
func (l *lines) next() (record, error) {
	for {
		line, err := l.in.ReadSlice('\n')
		l.line++
		content := bytes.TrimSpace(line)
		if l.line == 1 {
			content = bytes.TrimPrefix(content, []byte("\ufeff")) // some exports start with a byte order mark
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull) || len(line) > MaxLineBytes+1:
			return record{}, l.bad("line_too_long", "the line is too long; at most %d bytes are allowed", MaxLineBytes)
		case err != nil && !errors.Is(err, io.EOF):
			return record{}, err
		case len(content) == 0 && err != nil:
			return record{}, io.EOF
		case len(content) == 0:
			continue
		}
		return l.parse(content)
	}
}

func (l *lines) bad(code, format string, args ...any) *admission.Refusal {
	r := admission.Refusef(http.StatusBadRequest, code, format, args...)
	r.Line = l.line
	return r
}

func (l *lines) parse(line []byte) (record, error) {
	if l.line == 1 && bytes.HasPrefix(line, []byte("\x1f\x8b")) {
		return record{}, l.bad("invalid_json", "the body is gzip but has no Content-Encoding; set Content-Encoding: gzip, or send a file that ends in .gz")
	}
	if !utf8.Valid(line) {
		return record{}, l.bad("invalid_json", "the line is not UTF-8")
	}
	// A map, because field names are case-sensitive: "userid" must not match "userId".
	clear(l.fields)
	in := l.fields
	dec := json.NewDecoder(bytes.NewReader(line))
	if err := dec.Decode(&in); err != nil {
		if _, isType := errors.AsType[*json.UnmarshalTypeError](err); isType {
			return record{}, l.bad("not_an_object", `a line must be an object like {"userId":"u1"}`)
		}
		return record{}, l.bad("invalid_json", `the line is not JSON; each line is a whole object like {"userId":"u1"}`)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return record{}, l.bad("invalid_json", "the line has data after the object; put each member on a line of its own, without commas")
	}
	for name := range in {
		if name != "userId" && name != "value" && name != "member" {
			return record{}, l.bad("unknown_field", `unknown field %q; use "userId", "value" (of a computed trait) and "member" (of a POST)`, name[:min(len(name), 100)])
		}
	}
	userID, value, member := in["userId"], in["value"], string(in["member"])
	r := record{op: opMember}
	var id string
	switch {
	case userID == nil:
		return record{}, l.bad("no_user_id", `"userId" is missing`)
	case json.Unmarshal(userID, &id) != nil || userID[0] != '"':
		return record{}, l.bad("invalid_field", `"userId" must be a string; a number needs quotes`)
	case id == "":
		return record{}, l.bad("no_user_id", `"userId" is empty`)
	case len(id) > MaxUserIDBytes:
		return record{}, l.bad("invalid_field", `"userId" is too long; at most %d bytes are allowed`, MaxUserIDBytes)
	case strings.ContainsRune(id, utf8.RuneError):
		// A lone surrogate decodes to this character, so two users could become one.
		return record{}, l.bad("invalid_field", `"userId" contains an invalid character (U+FFFD or half of a surrogate pair)`)
	}
	r.id = []byte(id)
	switch {
	case member != "" && l.full:
		return record{}, l.bad("unknown_field", `a snapshot lists members only, without "member"; leave out users that are not members, or POST an increment`)
	case member != "" && member != "true" && member != "false":
		return record{}, l.bad("invalid_field", `"member" must be true or false`)
	case member == "false":
		r.op = opRemove
		if value != nil {
			return record{}, l.bad("invalid_field", `"value" has no meaning with "member": false; leave it out`)
		}
		return r, nil
	case l.kind == liveconfig.KindAudience:
		if value != nil {
			return record{}, l.bad("invalid_field", `"value" is for computed traits; this is an audience`)
		}
		return r, nil
	case value == nil:
		return record{}, l.bad("no_value", `"value" is missing; a computed trait needs one for each user`)
	case value[0] == '{' || value[0] == 'n':
		return record{}, l.bad("invalid_field", `"value" must be a string, a number, true, false or a list`)
	}
	// The depth limit of a call applies, so that every accepted value can be sent.
	l.nested = append(append(append(l.nested[:0], "[["...), value...), "]]"...)
	canonical, err := event.Canonical(l.nested)
	if err != nil {
		return record{}, l.bad("invalid_field", `"value" is nested too deeply; at most %d levels are allowed`, event.MaxDepth-2)
	}
	r.value = canonical[2 : len(canonical)-2]
	if len(r.value) > MaxLineBytes {
		return record{}, l.bad("invalid_field", `"value" has more than %d bytes when its numbers are written out, as in 1e3: 1000`, MaxLineBytes)
	}
	return r, nil
}
