package limits

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A Source may use as much memory as remains free, so n busy Sources get 1/(n+1) each.
func TestMemoryIsShared(t *testing.T) {
	for sources, want := range map[int]int64{1: 500, 2: 333, 3: 250} {
		m := &Memory{Max: 1000}
		accounts := make([]Account, sources)
		for grown := true; grown; {
			grown = false
			for i := range accounts {
				r := m.For(&accounts[i])
				grown = r.Grow(1) || grown
			}
		}
		for i, a := range accounts {
			if a.used < want-1 || a.used > want+1 {
				t.Errorf("%d Sources: memory of number %d: got %d, want %d", sources, i, a.used, want)
			}
		}
	}
}

func TestReservation(t *testing.T) {
	m := &Memory{Max: 100}
	var from, to Account
	used := func() [3]int64 { return [3]int64{m.Used(), from.used, to.used} }
	r := m.For(&from)
	for _, step := range []struct {
		name string
		do   func() bool
		fits bool
		used [3]int64 // in all, of from, of to
	}{
		{"grow", func() bool { return r.Grow(30) }, true, [3]int64{30, 30, 0}},
		{"grow above the half", func() bool { return r.Grow(21) }, false, [3]int64{30, 30, 0}},
		{"move with a reservation", func() bool { r.Move(&to); return r.Grow(1) }, true, [3]int64{31, 31, 0}},
		{"replace", func() bool { return r.Replace(&to, 40) }, true, [3]int64{40, 0, 40}},
		{"replace by too much", func() bool { return r.Replace(&from, 51) }, false, [3]int64{}},
		{"move without a reservation", func() bool { r.Move(&to); return r.Grow(5) }, true, [3]int64{5, 0, 5}},
		{"release", func() bool { r.Release(); return true }, true, [3]int64{}},
		{"release again", func() bool { r.Release(); return true }, true, [3]int64{}},
	} {
		if fits := step.do(); fits != step.fits {
			t.Errorf("%s: got fits %v, want %v", step.name, fits, step.fits)
		}
		if diff := cmp.Diff(step.used, used()); diff != "" {
			t.Errorf("%s: used bytes (-want +got):\n%s", step.name, diff)
		}
	}
}
