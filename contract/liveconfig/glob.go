package liveconfig

import (
	"slices"
	"strings"
)

// MatchEvent reports whether one of the patterns of a Filter or a Redelivery matches the name of an event.
func MatchEvent(patterns []string, event string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return glob(p, event) })
}

// glob matches a name with a pattern in which "*" stands for any characters. It takes each part at
// its first match, which is sufficient, so it runs in linear time.
func glob(pattern, name string) bool {
	head, rest, star := strings.Cut(pattern, "*")
	if !star {
		return name == pattern
	}
	name, ok := strings.CutPrefix(name, head)
	for ok {
		var part string
		if part, rest, star = strings.Cut(rest, "*"); !star {
			return strings.HasSuffix(name, part)
		}
		_, name, ok = strings.Cut(name, part)
	}
	return false
}
