package pebblestore

import (
	"math"
	"sync/atomic"
	"time"
)

// monotonicClock returns a clock that never moves backwards. It follows the wall clock forward.
// While the wall clock is behind, it advances by the elapsed time, so that planned retries are
// due in time.
func monotonicClock(wall func() time.Time, elapsed func() time.Duration) func() time.Time {
	var started atomic.Int64 // The latest possible start of the process, in Unix nanoseconds.
	started.Store(math.MinInt64)
	return func() time.Time {
		passed := int64(elapsed())
		at := wall().UnixNano() - passed
		for b := started.Load(); at > b && !started.CompareAndSwap(b, at); b = started.Load() {
		}
		return time.Unix(0, started.Load()+passed)
	}
}

// sinceStart is the time since the start of the process, independent of the wall clock.
func sinceStart() time.Duration { return time.Since(processStart) }

var processStart = time.Now()
