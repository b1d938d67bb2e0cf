// Package plural writes counts in messages.
package plural

import (
	"fmt"
	"strings"
)

// Count returns a number with its noun in the singular or the plural: "1 call", "2 calls",
// "2 retries".
func Count[N ~int | ~int32 | ~int64 | ~uint64](n N, noun string) string {
	return Formatted(fmt.Sprint(n), noun)
}

// Formatted is Count for a number that is a text, such as "1 234".
func Formatted(n, noun string) string {
	if n != "1" {
		if stem, ok := strings.CutSuffix(noun, "ry"); ok {
			noun = stem + "rie"
		}
		noun += "s"
	}
	return n + " " + noun
}
