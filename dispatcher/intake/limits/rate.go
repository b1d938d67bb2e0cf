package limits

import (
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/internal/meter"
)

// CallRate is the rate of one Source's calls. Its zero value is ready for use.
type CallRate struct {
	mu      sync.Mutex
	limiter *rate.Limiter
	// used measures the calls that were accepted, and missedAt is when calls were last refused.
	used     meter.Meter
	missedAt time.Time
}

// Take takes n calls from the rate and returns 0, or takes none and returns the time to wait. With
// n = 0 it reports whether one call would be accepted. A batch larger than the burst is accepted when the full
// burst is available; the excess is a debt that delays later calls, so the rate holds. A changed rate keeps what is
// available.
func (r *CallRate) Take(perSecond float64, burst int, clock func() time.Time, n int) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := clock()
	switch {
	case r.limiter == nil:
		r.limiter = rate.NewLimiter(rate.Limit(perSecond), burst)
	case r.limiter.Limit() != rate.Limit(perSecond) || r.limiter.Burst() != burst:
		r.limiter.SetLimitAt(now, rate.Limit(perSecond))
		r.limiter.SetBurstAt(now, burst)
	}
	missing := float64(min(max(n, 1), burst)) - r.limiter.TokensAt(now)
	if missing > 0 {
		r.missedAt = now
		return time.Duration(missing / perSecond * float64(time.Second))
	}
	r.used.Count(now, n, 0)
	for n > 0 {
		part := min(n, burst)
		r.limiter.ReserveN(now, part)
		n -= part
	}
	return 0
}

// Use returns the calls a second that were accepted, and whether calls were refused a moment ago.
func (r *CallRate) Use(now time.Time) (perSecond float64, limited bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.used.PerSecond(now), !r.missedAt.IsZero() && now.Sub(r.missedAt) < limitedFor
}

// limitedFor is how long a rate counts as limited after calls were refused.
const limitedFor = 5 * time.Second
