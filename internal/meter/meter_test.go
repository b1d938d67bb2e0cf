package meter

import (
	"testing"
	"time"
)

func TestMeter(t *testing.T) {
	var m Meter
	start := time.Unix(1_800_000_000, 0)
	for i := range 100 { // Ten a second.
		m.Count(start.Add(time.Duration(i)*100*time.Millisecond), 1, i%7)
	}
	for _, c := range []struct {
		after time.Duration
		rate  float64
		peak  int
	}{{9900 * time.Millisecond, 10, 6}, {12 * time.Second, 10, 6}, {14 * time.Second, 10, 6}, {25 * time.Second, 0, 0}} {
		if got := m.PerSecond(start.Add(c.after)); got < c.rate || got > c.rate*1.1 {
			t.Errorf("rate after %v: got %v, want %v", c.after, got, c.rate)
		}
		if got := m.Peak(start.Add(c.after)); got != c.peak {
			t.Errorf("peak after %v: got %d, want %d", c.after, got, c.peak)
		}
	}
}
