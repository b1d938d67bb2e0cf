package pebblestore

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
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

// A store whose retries were planned with a clock that was six hours ahead plans them again: they wait as long
// as they were to wait. Retries of this clock remain as planned, also those after a long Retry-After.
func TestRetriesOfAClockThatWasAhead(t *testing.T) {
	const ahead, wait = 6 * time.Hour, 90 * time.Minute
	dir, right := t.TempDir(), time.Now().Truncate(time.Millisecond)
	var clock atomic.Int64
	o := Options{Now: func() time.Time { return right.Add(time.Duration(clock.Load())) }}
	s := open(t, dir, o)
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	const early, late = maxCorrected, 10
	appendAll(t, s, early+late)
	retry := func(n int) {
		for n > 0 {
			got, err := s.Lease(lane1, min(n, 64), nil)
			if err != nil || len(got) == 0 {
				t.Fatalf("%d messages, error %v; %d are left", len(got), err, n)
			}
			for _, d := range got {
				s.Retry(d, o.Now().Add(wait), queue.Failure{Time: o.Now(), Reason: "TimedOut"})
			}
			n -= len(got)
		}
	}
	clock.Store(int64(ahead))
	retry(early)
	clock.Store(0)
	retry(late)
	for range 2 { // The second time nothing is left to correct.
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		clock.Store(int64(time.Minute))
		s = open(t, dir, o)
		if err := s.OpenLane(lane1); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		after time.Duration
		due   int
	}{{wait - time.Millisecond, 0}, {wait, late}, {wait + time.Minute - time.Millisecond, 0}, {wait + time.Minute, early}, {2 * ahead, 0}} {
		clock.Store(int64(c.after))
		n := 0
		for {
			got, err := s.Lease(lane1, 64, nil)
			if err != nil {
				t.Fatal(err)
			}
			if len(got) == 0 {
				break
			}
			for _, d := range got {
				if d.Attempt != 1 {
					t.Errorf("message %s has %d failed attempts, want 1", d.ID, d.Attempt)
				}
				s.Ack(d)
			}
			n += len(got)
		}
		if n != c.due {
			t.Errorf("%v after the start: %d retries are due, want %d", c.after, n, c.due)
		}
	}
	if st := s.LaneStats(lane1); st.Pending != 0 {
		t.Errorf("%d messages are pending at the end, want 0", st.Pending)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
