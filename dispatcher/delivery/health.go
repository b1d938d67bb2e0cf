package delivery

import (
	"math/bits"
	"time"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
)

// health determines an endpoint's state in a report. It counts every failure, also those that are
// not the endpoint's fault (a 4xx), because its owner must see them. It is pure; the engine's lock
// guards it.
type health struct {
	state adminapi.EndpointState
	since time.Time

	lastSuccess time.Time
	lastFailure *adminapi.Failure
	consecutive int
	// streak counts consecutive successes; recent has one bit per recent attempt, 1 = failed.
	streak int
	recent uint32
	// latency is a moving average of the duration of attempts.
	latency time.Duration
}

func (h *health) record(now time.Time, took time.Duration, failure *adminapi.Failure) {
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

// settle enters the state that follows from the recorded attempts and reports whether it changed.
func (h *health) settle(now time.Time, c *circuit) bool {
	next := h.next(now, c)
	if next == h.state {
		return false
	}
	h.state, h.since = next, now
	return true
}

// changed drops the failures from before a change of the endpoint. An open circuit remains open
// until a probe succeeds.
func (h *health) changed(now time.Time, c *circuit) {
	if h.consecutive > 0 && !c.open {
		h.consecutive, h.recent = 0, 0
		h.settle(now, c)
	}
}

const (
	// lately is the maximum age of a failure or success that counts although the last attempt had
	// the opposite result.
	lately = time.Second
	// recoveryShown is the longest time that an endpoint counts as recovering.
	recoveryShown = 10 * time.Second
)

// next has some inertia: an endpoint that fails one request in a hundred does not change its state
// all the time, but an endpoint with little traffic shows its first failure and its recovery
// immediately.
func (h *health) next(now time.Time, c *circuit) adminapi.EndpointState {
	failures := bits.OnesCount32(h.recent & (1<<recentAttempts - 1))
	switch {
	case c.open:
		return adminapi.EndpointCircuitOpen
	case h.consecutive == 0 && h.streak == 0:
		return adminapi.EndpointIdle
	case h.consecutive >= 3, h.consecutive > 0 && now.Sub(h.lastSuccess) > lately,
		c.recovering > 0 && now.Sub(c.closedAt) < recoveryShown:
		return adminapi.EndpointDegraded
	case failures <= 1, h.streak >= 5, h.consecutive == 0 && now.Sub(h.lastFailure.Time) > lately:
		return adminapi.EndpointHealthy
	case failures >= 4:
		return adminapi.EndpointDegraded
	}
	return h.state
}

// proven reports whether the endpoint works and responds fast. Only proven endpoints may use more
// than half of the shared requests in flight.
func (h *health) proven() bool {
	return h.streak > 0 && h.latency < time.Second
}
