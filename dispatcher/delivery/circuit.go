package delivery

import (
	"math/bits"
	"time"
)

const (
	// The circuit opens after openAfter consecutive failures, or when openShare of the last
	// recentAttempts attempts failed.
	openAfter      = 10
	recentAttempts = 20
	openShare      = recentAttempts / 2
	// recoveringFor is the number of consecutive successes after which a closed circuit counts as
	// recovered. Before that, reopenAfter consecutive failures reopen it.
	recoveringFor = 10
	reopenAfter   = 3

	minProbeInterval = time.Second
	maxProbeInterval = time.Minute
	// maxProbePostponed bounds how far a receiver can push the next probe with Retry-After.
	maxProbePostponed = time.Hour
)

// circuit is an endpoint's circuit breaker and its in-flight window: the limit of requests in
// flight. It is pure; the engine's lock guards it.
//
// The window starts at 1, also after a restart, doubles per round trip up to slowStartUntil, and
// then grows by one per round trip (AIMD, as TCP does). So the load on a recovered endpoint rises
// gradually.
type circuit struct {
	limit          int
	window         float64
	slowStartUntil float64
	// cutAt is the time of the last window reduction. Failures of requests that started before it
	// have the same cause and do not reduce the window again.
	cutAt time.Time

	consecutive int
	// recent has one bit per recent attempt, 1 = failed; samples is the number of valid bits.
	recent  uint32
	samples int

	open bool
	// probing is true while the probe is in flight.
	probing  bool
	probeAt  time.Time
	interval time.Duration
	// recovering is the number of successes that are still missing since the circuit closed at
	// closedAt.
	recovering int
	closedAt   time.Time
}

func newCircuit(limit int) circuit {
	return circuit{limit: limit, window: 1, slowStartUntil: float64(limit)}
}

// setLimit changes the largest window.
func (c *circuit) setLimit(limit int) {
	c.limit = limit
	c.window = min(c.window, float64(limit))
	c.slowStartUntil = float64(limit)
}

// room returns how many more requests a closed circuit allows.
func (c *circuit) room(inFlight int) int {
	if c.open {
		return 0
	}
	return int(c.window) - inFlight
}

// mayProbe reports whether an open circuit's probe is due.
func (c *circuit) mayProbe(now time.Time) bool {
	return c.open && !c.probing && !now.Before(c.probeAt)
}

// succeeded records an attempt with a valid response. inFlight counts the requests in flight,
// including this one. closed is true if the attempt closed the circuit.
func (c *circuit) succeeded(now time.Time, inFlight int, probe bool) (closed bool) {
	if c.open {
		if !probe {
			return false // It started before the circuit opened; only the probe decides.
		}
		*c = circuit{
			limit: c.limit, window: 1, slowStartUntil: max(2, float64(c.limit)/4), cutAt: c.cutAt,
			interval: c.interval, recovering: recoveringFor, closedAt: now,
		}
		return true
	}
	c.consecutive = 0
	c.remember(0)
	if c.recovering > 0 {
		if c.recovering--; c.recovering == 0 {
			c.interval = 0
		}
	}
	// A half-empty window is no evidence that a larger one works.
	if 2*inFlight >= int(c.window) {
		if c.window < c.slowStartUntil {
			c.window++
		} else {
			c.window += 1 / c.window
		}
		c.window = min(c.window, float64(c.limit))
	}
	return false
}

// failed records an attempt that failed because of the endpoint. opened is true if the attempt
// opened the circuit. rnd in [0, 1) spreads the probes.
func (c *circuit) failed(now, started time.Time, probe bool, retryAfter time.Duration, rnd float64) (opened bool) {
	c.consecutive++
	if c.open {
		if probe {
			c.scheduleProbe(now, retryAfter, rnd)
		} else if at := now.Add(min(retryAfter, maxProbePostponed)); at.After(c.probeAt) && retryAfter > 0 {
			c.probeAt = at
		}
		return false
	}
	c.remember(1)
	if !started.Before(c.cutAt) {
		c.window = max(1, c.window/2)
		c.slowStartUntil = c.window
		c.cutAt = now
	}
	limit := openAfter
	if c.recovering > 0 {
		limit = reopenAfter
		c.recovering = recoveringFor
	}
	if c.consecutive < limit && (c.samples < recentAttempts || c.failures() < openShare) {
		return false
	}
	c.open = true
	c.scheduleProbe(now, retryAfter, rnd)
	return true
}

// abandoned records a probe without a result.
func (c *circuit) abandoned(probe bool) {
	if probe {
		c.probing = false
	}
}

// probeNow makes the next probe due, for example after a config change.
func (c *circuit) probeNow(now time.Time) {
	c.interval, c.probeAt = 0, now
}

// scheduleProbe doubles the interval and spreads it by a fifth to either side.
func (c *circuit) scheduleProbe(now time.Time, retryAfter time.Duration, rnd float64) {
	c.probing = false
	c.interval = min(max(2*c.interval, minProbeInterval), maxProbeInterval)
	wait := time.Duration(float64(c.interval) * (0.8 + 0.4*rnd))
	c.probeAt = now.Add(max(wait, min(retryAfter, maxProbePostponed)))
}

func (c *circuit) remember(failed uint32) {
	c.recent = (c.recent<<1 | failed) & (1<<recentAttempts - 1)
	c.samples = min(c.samples+1, recentAttempts)
}

func (c *circuit) failures() int { return bits.OnesCount32(c.recent) }

// bucket is a token bucket; the zero bucket has no limit.
type bucket struct {
	perSecond float64
	tokens    float64
	at        time.Time
}

// setRate changes the rate; 0 is no limit. The bucket holds the tokens of a tenth of a second.
func (b *bucket) setRate(perSecond int) {
	if b.perSecond != float64(perSecond) {
		*b = bucket{perSecond: float64(perSecond), tokens: 1}
	}
}

// wait returns the time until a token is available.
func (b *bucket) wait(now time.Time) time.Duration {
	if b.perSecond == 0 {
		return 0
	}
	if !b.at.IsZero() {
		b.tokens = min(max(1, b.perSecond/10), b.tokens+b.perSecond*now.Sub(b.at).Seconds())
	}
	b.at = now
	// The tolerance covers rounding; without it a timer could always fire just too early.
	if b.tokens >= 1-1e-6 {
		return 0
	}
	return time.Duration((1-b.tokens)/b.perSecond*float64(time.Second)) + 1
}

func (b *bucket) take() {
	if b.perSecond != 0 {
		b.tokens--
	}
}
