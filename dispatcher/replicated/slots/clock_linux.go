package slots

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootClock is the clock of leases. It does not follow the wall clock, and it also advances while
// the machine is suspended.
func bootClock() time.Time {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(err) // Every supported kernel has this clock.
	}
	return time.Unix(t.Unix())
}
