package liveconfig

import (
	"strings"
	"testing"
)

func TestGlob(t *testing.T) {
	for _, tc := range []struct {
		pattern, name string
		want          bool
	}{
		{"Order", "Order", true}, {"Order", "Orders", false}, {"*", "", true}, {"*", "x", true},
		{"Order *", "Order Done", true}, {"Order *", "order Done", false}, {"* Done", "Order Done", true},
		{"O*r*e", "Order Done", true}, {"a*a", "a", false}, {"a*a", "aa", true}, {"a*b*c", "abxbc", true},
		{"**", "x", true}, {"a**c", "abc", true}, {"*ab", "aab", true}, {"", "", true}, {"", "x", false},
		{`Save \*`, "Save *", true}, {`Save \*`, "Save all", false}, {`\**`, "*x", true}, {`*\*`, "x*", true}, {`*\*`, "x", false},
		{`a\\*`, `a\b`, true}, {`a\\*`, "ab", false}, {`a\`, `a\`, true},
		{"a*bc", "abcbc", true}, {"a*b*b", "ab", false},
	} {
		if got := glob(tc.pattern, tc.name); got != tc.want {
			t.Errorf("glob(%q, %q) = %v", tc.pattern, tc.name, got)
		}
	}
	// A pattern that takes exponential time with backtracking.
	if glob(strings.Repeat("a*", 120)+"b", strings.Repeat("a", 100_000)) {
		t.Error("matched")
	}
}
