package liveconfig

import (
	"slices"
	"strings"
)

// MatchEvent reports whether one of the patterns of a Filter or a Redelivery matches the name of an event.
func MatchEvent(patterns []string, event string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return glob(p, event) })
}

// glob matches a name with a pattern in which "*" stands for any characters, and a backslash makes the next character
// literal. It takes each part at its first match, which is sufficient, so it runs in linear time.
func glob(pattern, name string) bool {
	head, rest, star := cutStar(pattern)
	if !star {
		return name == head
	}
	name, ok := strings.CutPrefix(name, head)
	for ok {
		var part string
		if part, rest, star = cutStar(rest); !star {
			return strings.HasSuffix(name, part)
		}
		_, name, ok = strings.Cut(name, part)
	}
	return false
}

// cutStar returns the text before the first "*" of a pattern and the pattern after it.
func cutStar(pattern string) (text, rest string, star bool) {
	text, rest, star = strings.Cut(pattern, "*")
	if !strings.Contains(text, `\`) {
		return text, rest, star
	}
	var literal strings.Builder
	for i := 0; i < len(pattern); i++ {
		switch c := pattern[i]; {
		case c == '*':
			return literal.String(), pattern[i+1:], true
		case c == '\\' && i+1 < len(pattern):
			i++
		}
		literal.WriteByte(pattern[i])
	}
	return literal.String(), "", false
}
