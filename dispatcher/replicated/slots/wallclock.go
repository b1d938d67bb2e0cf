package slots

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// MaxClockSkew is the largest difference between a process's wall clock and the servers' clocks. A
// process with a larger one would end retry windows and retentions of other processes' messages early or
// late.
const MaxClockSkew = 30 * time.Second

const (
	// readInterval is the time between two readings of the servers' clocks.
	readInterval = 15 * time.Second
	// readingAge is the age, relative to the newest reading, from which a reading is not used.
	readingAge = 10 * time.Minute
)

// ServerTime reads the wall clock of a server of the log; the result is of a moment during the call.
type ServerTime func(context.Context) (time.Time, error)

// WallClock compares the wall clock of this process with the clocks of its slots' servers. Between two
// readings the clock of leases advances the servers' time, so that a change of the wall clock is noticed
// immediately, and without the servers. All methods may be called concurrently.
type WallClock struct {
	wall, lease func() time.Time

	mu sync.Mutex
	// readings are the last ones of each slot.
	readings map[int][]clockReading
}

// clockReading is a reading of a server's clock: its time minus the lease clock's, between two bounds.
type clockReading struct {
	least, most time.Duration
	// at is the time of the reading by the lease clock.
	at time.Time
}

// NewWallClock makes a WallClock. wall is the wall clock, time.Now when nil, and lease the clock of
// leases, which nil selects.
func NewWallClock(wall, lease func() time.Time) *WallClock {
	if wall == nil {
		wall = time.Now
	}
	if lease == nil {
		lease = bootClock
	}
	return &WallClock{wall: wall, lease: lease, readings: map[int][]clockReading{}}
}

// Read reads the clocks of the servers of a slot, until one of them agrees with the process's clock. It
// returns an error if no server answers.
func (c *WallClock) Read(ctx context.Context, slot int, servers []ServerTime) error {
	var readings []clockReading
	var failed error
	for _, read := range servers {
		sent := c.lease()
		at, err := read(ctx)
		received := c.lease()
		if err != nil {
			failed = fmt.Errorf("read the clock of a server of the log: %w", err)
			continue
		}
		r := clockReading{at.Sub(received), at.Sub(sent), received}
		readings = append(readings, r)
		if r.skew(c.ahead()).Abs() <= MaxClockSkew {
			break
		}
	}
	if len(readings) == 0 {
		return failed
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.readings[slot] = readings
	return nil
}

// Now returns the wall clock.
func (c *WallClock) Now() time.Time { return c.wall().Round(0) } // without the monotonic reading

// ahead returns the wall clock minus the clock of leases.
func (c *WallClock) ahead() time.Duration { return c.Now().Sub(c.lease()) }

// skew returns by how much a wall clock is ahead of the server's.
func (r clockReading) skew(ahead time.Duration) time.Duration {
	switch {
	case ahead > r.most:
		return ahead - r.most
	case ahead < r.least:
		return ahead - r.least
	}
	return 0
}

// Skew returns by how much the wall clock is ahead of the servers': the smallest difference, because the
// clock of a server can be wrong, too. It is 0 before the first reading.
func (c *WallClock) Skew() (smallest time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var newest time.Time
	for _, readings := range c.readings {
		for _, r := range readings {
			if r.at.After(newest) {
				newest = r.at
			}
		}
	}
	ahead, found := c.ahead(), false
	for _, readings := range c.readings {
		for _, r := range readings {
			if newest.Sub(r.at) > readingAge {
				continue
			}
			if skew := r.skew(ahead); !found || skew.Abs() < smallest.Abs() {
				smallest, found = skew, true
			}
		}
	}
	return smallest
}

// Watch reads the clocks of the servers of a slot until ctx is done. Readings that fail change nothing.
func (c *WallClock) Watch(ctx context.Context, slot int, servers []ServerTime) {
	for pause(ctx, readInterval) == nil {
		_ = c.Read(ctx, slot, servers)
	}
}
