//go:build !linux

package slots

import "time"

// bootClock is the clock of leases. It does not follow the wall clock.
func bootClock() time.Time { return time.Now() }
