package expression

import (
	"fmt"
	"regexp/syntax"
	"strings"
)

const (
	// MaxPatternInstructions bounds the compiled size of a pattern. The time to match grows with it, and so does
	// the memory.
	MaxPatternInstructions = 200
	// MaxInstructions bounds the compiled size of all patterns of an expression.
	MaxInstructions = 2_000
	// rangesPerInstruction is the number of a class's character ranges that need the memory of an instruction.
	rangesPerInstruction = 8
)

// instructions returns the number of instructions of a pattern: as many as the pattern has at most when it is compiled.
// It counts them without compiling it. The number ends at MaxInstructions+1.
func instructions(pattern string) (int, error) {
	parsed, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return 0, fmt.Errorf("%s", strings.TrimPrefix(err.Error(), "error parsing regexp: "))
	}
	return min(count(parsed), MaxInstructions+1), nil
}

func count(r *syntax.Regexp) int {
	sum := 0
	for _, sub := range r.Sub {
		sum = min(sum+count(sub), MaxInstructions+1) // Repeats in repeats multiply, but never overflow.
	}
	switch r.Op {
	case syntax.OpLiteral:
		return len(r.Rune)
	case syntax.OpCharClass:
		return 1 + len(r.Rune)/2/rangesPerInstruction
	case syntax.OpConcat:
		return sum
	case syntax.OpAlternate:
		return sum + len(r.Sub) - 1
	case syntax.OpCapture:
		return sum + 2
	case syntax.OpRepeat:
		if r.Max < 0 {
			return sum*max(r.Min, 1) + 1
		}
		return sum*r.Max + r.Max - r.Min
	default:
		return sum + 1
	}
}
