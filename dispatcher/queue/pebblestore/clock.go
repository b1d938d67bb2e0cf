package pebblestore

import (
	"math"
	"sync/atomic"
	"time"
)

// steady makes a clock that never goes back. It follows one that is set
// forward; while the machine's is behind where it was, time goes on by what has
// elapsed, so that retries that were planned before stay due in time.
func steady(wall func() time.Time, elapsed func() time.Duration) func() time.Time {
	var begun atomic.Int64 // the latest that the elapsed time can have begun, in Unix nanoseconds
	begun.Store(math.MinInt64)
	return func() time.Time {
		passed := int64(elapsed())
		at := wall().UnixNano() - passed
		for b := begun.Load(); at > b && !begun.CompareAndSwap(b, at); b = begun.Load() {
		}
		return time.Unix(0, begun.Load()+passed)
	}
}

// sinceStart is the time since the process began, whatever the clock does.
func sinceStart() time.Duration { return time.Since(processStart) }

var processStart = time.Now()
