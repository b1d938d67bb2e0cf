package pebblestore

import (
	"testing"
	"time"
)

func TestMonotonicClock(t *testing.T) {
	noon := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	wall, elapsed := noon, time.Minute
	now := monotonicClock(func() time.Time { return wall }, func() time.Duration { return elapsed })
	check := func(what string, want time.Time) {
		t.Helper()
		if got := now(); !got.Equal(want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	check("at first", noon)
	wall, elapsed = noon.Add(time.Second), elapsed+time.Second
	check("a second later", noon.Add(time.Second))
	wall = noon.Add(-3 * time.Hour)
	check("set back", noon.Add(time.Second))
	wall, elapsed = wall.Add(time.Minute), elapsed+time.Minute
	check("a minute after that", noon.Add(time.Minute+time.Second))
	wall = noon.Add(time.Hour)
	check("set forward", noon.Add(time.Hour))
	wall, elapsed = noon.Add(2*time.Minute), elapsed+time.Second
	check("and right again", noon.Add(time.Hour+time.Second))
}
