package slots

import (
	"context"
	"errors"
	"testing"
	"time"
)

// clocks are the clocks of a process and of the servers.
type clocks struct {
	wall, lease time.Time
	servers     [2]time.Time
	reads       [2]int
	// duration is how long an answer takes.
	duration time.Duration
	lost     bool
}

func (c *clocks) advance(d time.Duration) {
	c.wall, c.lease = c.wall.Add(d), c.lease.Add(d)
	for i := range c.servers {
		c.servers[i] = c.servers[i].Add(d)
	}
}

func (c *clocks) read(server int) ServerTime {
	return func(context.Context) (time.Time, error) {
		c.reads[server]++
		c.advance(c.duration / 2)
		at := c.servers[server]
		c.advance(c.duration / 2)
		if c.lost {
			return at, errors.New("no answer")
		}
		return at, nil
	}
}

func TestWallClock(t *testing.T) {
	now := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	c := &clocks{wall: now, lease: time.Unix(1000, 0), servers: [2]time.Time{now, now}, duration: time.Second}
	w := NewWallClock(func() time.Time { return c.wall }, func() time.Time { return c.lease })
	servers := []ServerTime{c.read(0), c.read(1)}
	want := func(what string, skew time.Duration) {
		t.Helper()
		if got := w.Skew(); got != skew {
			t.Errorf("%s: got a skew of %v, want %v", what, got, skew)
		}
	}
	read := func() {
		t.Helper()
		if err := w.Read(t.Context(), 0, servers); err != nil {
			t.Fatal(err)
		}
	}
	c.wall = now.Add(time.Hour)
	want("before the first reading", 0)
	c.wall = c.servers[0]
	read()
	want("right clock", 0)
	if c.reads != [2]int{1, 0} {
		t.Errorf("readings of the servers: got %v, want one of the first", c.reads)
	}

	// The wall clock is set; the bound is the answer's duration.
	c.wall = c.wall.Add(6 * time.Hour)
	want("wall clock ahead", 6*time.Hour-c.duration/2)
	c.wall = c.wall.Add(-12 * time.Hour)
	want("wall clock behind", -6*time.Hour+c.duration/2)
	c.advance(time.Hour)
	want("wall clock behind, later", -6*time.Hour+c.duration/2)
	read()
	want("wall clock behind, after another reading", -6*time.Hour+c.duration/2)
	if c.reads != [2]int{2, 1} {
		t.Errorf("readings of the servers: got %v, want one more of each", c.reads)
	}
	c.wall = c.wall.Add(6 * time.Hour)
	want("wall clock that was corrected", 0)

	// One server is wrong.
	c.servers[0] = c.servers[0].Add(-time.Hour)
	read()
	want("one wrong server", 0)
	c.servers[1] = c.servers[1].Add(-time.Hour)
	read()
	want("two wrong servers", time.Hour-c.duration/2)
	if err := w.Read(t.Context(), 1, nil); err != nil {
		t.Errorf("reading without servers: got %v", err)
	}
	want("another slot without servers", time.Hour-c.duration/2)
	c.lost = true
	if err := w.Read(t.Context(), 0, servers); err == nil {
		t.Error("servers that do not answer: got no error")
	}
	want("servers that do not answer", time.Hour-c.duration/2)

	// The server of another slot is right; its reading is not used when it is old.
	c.lost = false
	right := now.Add(c.wall.Sub(now))
	if err := w.Read(t.Context(), 1, []ServerTime{func(context.Context) (time.Time, error) { return right, nil }}); err != nil {
		t.Fatal(err)
	}
	want("right server of another slot", 0)
	c.advance(readingAge)
	want("without newer readings", 0)
	c.advance(time.Minute)
	read()
	want("with a newer reading", time.Hour-c.duration/2)
}
