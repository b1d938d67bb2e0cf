package plural_test

import (
	"testing"

	"github.com/posthorn/posthorn/internal/plural"
)

func TestCount(t *testing.T) {
	for _, c := range []struct {
		n          int
		noun, want string
	}{{0, "call", "0 calls"}, {1, "call", "1 call"}, {2, "dead letter", "2 dead letters"}, {1, "retry", "1 retry"}, {3, "retry", "3 retries"},
		{2, "day", "2 days"}} {
		if got := plural.Count(c.n, c.noun); got != c.want {
			t.Errorf("%d %s: got %q, want %q", c.n, c.noun, got, c.want)
		}
	}
}
