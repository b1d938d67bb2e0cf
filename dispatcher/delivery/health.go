package delivery

import (
	"math/bits"
	"time"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// health is what an endpoint's state in a report is made of. It counts every
// failure, also those that say nothing against the endpoint (a 4xx), because
// its owner must see them. It is pure; the engine's lock guards it.
type health struct {
	state liveconfig.EndpointState
	since time.Time

	lastSuccess time.Time
	lastFailure *liveconfig.Failure
	consecutive int
	// streak counts successes in a row; recent has a bit for each of the last attempts, 1 = failed.
	streak int
	recent uint32
	// latency is a moving average of how long attempts take.
	latency time.Duration
}

func (h *health) record(now time.Time, took time.Duration, failure *liveconfig.Failure) {
	h.recent <<= 1
	h.latency += (took - h.latency) / 8
	if failure == nil {
		h.consecutive = 0
		h.streak++
		h.lastSuccess = now
		return
	}
	h.recent |= 1
	h.streak = 0
	h.consecutive++
	h.lastFailure = failure
}

// settle moves to the state that follows from what was recorded and reports whether it changed.
func (h *health) settle(now time.Time, c *circuit) bool {
	next := h.next(now, c)
	if next == h.state {
		return false
	}
	h.state, h.since = next, now
	return true
}

// changed forgets failures that were before the endpoint was changed. An open
// circuit stays open: a probe will tell.
func (h *health) changed(now time.Time, c *circuit) {
	if h.consecutive > 0 && !c.open {
		h.consecutive, h.recent = 0, 0
		h.settle(now, c)
	}
}

const (
	// lately is how recent a failure or a success must be to count against or
	// for an endpoint although the last attempt went the other way.
	lately = time.Second
	// recoveryShown is how long an endpoint counts as recovering at most.
	recoveryShown = 10 * time.Second
)

// next has some inertia, so that an endpoint that fails one request in a
// hundred does not change its state all the time; but one with little traffic
// shows its first failure and its recovery at once.
func (h *health) next(now time.Time, c *circuit) liveconfig.EndpointState {
	failures := bits.OnesCount32(h.recent & (1<<remembered - 1))
	switch {
	case c.open:
		return liveconfig.EndpointCircuitOpen
	case h.consecutive == 0 && h.streak == 0:
		return liveconfig.EndpointIdle
	case h.consecutive >= 3, h.consecutive > 0 && now.Sub(h.lastSuccess) > lately,
		c.recovering > 0 && now.Sub(c.closedAt) < recoveryShown:
		return liveconfig.EndpointDegraded
	case failures <= 1, h.streak >= 5, h.consecutive == 0 && now.Sub(h.lastFailure.Time) > lately:
		return liveconfig.EndpointHealthy
	case failures >= 4:
		return liveconfig.EndpointDegraded
	}
	return h.state
}

// proven reports whether the endpoint works and answers fast: what others may
// rely on when it takes a share of what all endpoints share.
func (h *health) proven() bool {
	return h.streak > 0 && h.latency < time.Second
}
