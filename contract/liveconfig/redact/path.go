package redact

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Limits of the paths of a destination.
const (
	MaxPaths    = 64
	MaxLength   = 256 // characters
	MaxSegments = 16
)

// fixed are the members of a message that identify it, in lists, selectors and requests. No rule changes them.
var fixed = []string{"type", "messageId", "event"}

// segment is a key, or any key and any element of an array.
type segment struct {
	key string
	any bool
}

// parse reads a path, such as properties.products[*].sku or traits["e-mail"].
func parse(path string) (segments []segment, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("path %q: %w", path, err)
		}
	}()
	if n := utf8.RuneCountInString(path); n == 0 || n > MaxLength {
		return nil, fmt.Errorf("has %d characters; 1 to %d are allowed", n, MaxLength)
	}
	for rest := path; rest != ""; {
		var s segment
		if s, rest, err = next(rest, len(segments) == 0); err != nil {
			return nil, err
		}
		segments = append(segments, s)
	}
	switch first := segments[0]; {
	case len(segments) > MaxSegments:
		return nil, fmt.Errorf("has %d parts; at most %d are allowed", len(segments), MaxSegments)
	case !first.any && slices.Contains(fixed, first.key):
		return nil, fmt.Errorf("%s identifies the message and always passes; remove the path", first.key)
	}
	return segments, nil
}

// next reads the first segment.
func next(path string, first bool) (s segment, rest string, err error) {
	if rest, ok := strings.CutPrefix(path, "[*]"); ok {
		return segment{any: true}, rest, nil
	}
	if strings.HasPrefix(path, `["`) {
		d := json.NewDecoder(strings.NewReader(path[1:]))
		err := d.Decode(&s.key)
		rest, ok := strings.CutPrefix(path[1+d.InputOffset():], "]")
		if err != nil || !ok {
			return s, "", errors.New(`a key in brackets is a JSON string, such as ["first name"]`)
		}
		return s, rest, nil
	}
	if !first {
		var ok bool
		if path, ok = strings.CutPrefix(path, "."); !ok {
			return s, "", errors.New(`a part begins with '.' or is [*] or ["KEY"], as in properties.products[*].sku`)
		}
	}
	end := strings.IndexAny(path, ".[")
	if end < 0 {
		end = len(path)
	}
	s.key, rest = path[:end], path[end:]
	switch {
	case s.key == "*":
		return segment{any: true}, rest, nil
	case s.key == "" || s.key == "$":
		return s, "", errors.New("begins with a key of the message, without $, and has no empty parts; write properties.email")
	case strings.ContainsAny(s.key, `*]"'\`) || strings.ContainsFunc(s.key, func(c rune) bool { return c <= ' ' || c == utf8.RuneError }):
		return s, "", fmt.Errorf(`the part %q is not a key; write * for any key, and other keys as ["KEY"]`, s.key)
	}
	return s, rest, nil
}
