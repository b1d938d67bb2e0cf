package limits

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// CallRate is the rate of one Source's calls. Its zero value is ready for use.
type CallRate struct {
	mu      sync.Mutex
	limiter *rate.Limiter
	// perSecond and burst are the settings of limiter.
	perSecond, burst int
}

// Take takes n calls from the rate and returns 0, or takes none and returns the time to wait. With
// n = 0 it reports whether one call would be accepted. perSecond = 0 means no limit, burst = 0
// means 2*perSecond. A batch larger than the burst is accepted when the full burst is available;
// the excess is a debt that delays later calls, so the rate holds.
func (r *CallRate) Take(perSecond, burst int, clock func() time.Time, n int) time.Duration {
	if perSecond == 0 {
		return 0
	}
	if burst == 0 {
		burst = 2 * perSecond
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.limiter == nil || r.perSecond != perSecond || r.burst != burst {
		r.limiter, r.perSecond, r.burst = rate.NewLimiter(rate.Limit(perSecond), burst), perSecond, burst
	}
	now := clock()
	missing := float64(min(max(n, 1), burst)) - r.limiter.TokensAt(now)
	if missing > 0 {
		return time.Duration(missing / float64(perSecond) * float64(time.Second))
	}
	for n > 0 {
		part := min(n, burst)
		r.limiter.ReserveN(now, part)
		n -= part
	}
	return 0
}
