package host

import (
	"testing"
	"time"
)

// A condition lasts only while it holds in each check.
func TestLasting(t *testing.T) {
	start := time.Unix(1000, 0)
	var l lasting
	for _, c := range []struct {
		at          time.Duration
		holds, want bool
	}{
		{0, true, false}, {4 * time.Second, true, false}, {5 * time.Second, true, true}, {6 * time.Second, true, true},
		{7 * time.Second, false, false}, {8 * time.Second, true, false}, {12 * time.Second, true, false}, {13 * time.Second, true, true},
	} {
		if got := l.lasts(c.holds, start.Add(c.at), 5*time.Second); got != c.want {
			t.Errorf("after %v: got %v, want %v", c.at, got, c.want)
		}
	}
}
