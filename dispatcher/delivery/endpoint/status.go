package endpoint

import "time"

// State is the state of an endpoint, as in the API.
type State string

// The states.
const (
	// Idle: nothing was sent, or not since the last change of the endpoint.
	Idle State = "Idle"
	// Healthy: the latest attempts succeeded.
	Healthy State = "Healthy"
	// Degraded: some of the latest attempts failed.
	Degraded State = "Degraded"
	// CircuitOpen: only probes are sent.
	CircuitOpen State = "CircuitOpen"
	// Gone: the endpoint answered 410, and only rare probes are sent.
	Gone State = "Gone"
)

const (
	// stateAttempts is the number of recent attempts that determine the state.
	stateAttempts = 20
	// lately is the maximum age of a failure or success that counts although the last attempt had
	// the opposite result.
	lately = time.Second
	// halfOpenShown is the longest time that a half-open circuit counts as Degraded.
	halfOpenShown = 10 * time.Second
)

// Status is the state of an endpoint for reports. It includes every failure, also rejected
// messages, because the owner of the endpoint must see them.
type Status struct {
	State State
	// Since is when the endpoint entered State.
	Since time.Time
	// LastSuccess is zero without a success. LastFailure is kept after a recovery; it has the zero
	// time without a failure.
	LastSuccess time.Time
	LastFailure Failure
	// Failures since the last success.
	Failures int
}

// Status returns the state of the endpoint as of the last Observe or Refresh.
func (m *Machine) Status() Status {
	return Status{State: m.state, Since: m.since, LastSuccess: m.lastSuccess, LastFailure: m.lastFailure, Failures: m.failures}
}

// Refresh updates the state, because some states end by time alone, and reports whether it changed.
func (m *Machine) Refresh(now time.Time) bool {
	next := m.next(now)
	if next == m.state {
		return false
	}
	m.state, m.since = next, now
	return true
}

// RefreshAt returns the next time at which Refresh changes the state without a further attempt; zero
// if there is none.
func (m *Machine) RefreshAt(now time.Time) (at time.Time) {
	for _, end := range [...]time.Time{m.lastSuccess.Add(lately), m.lastFailure.Time.Add(lately), m.closedAt.Add(halfOpenShown)} {
		after := end.Add(1)
		if after.After(now) && m.next(after) != m.state && (at.IsZero() || after.Before(at)) {
			at = after
		}
	}
	return at
}

// next returns the state that follows from the history. It has some inertia: an endpoint that fails
// one request in a hundred does not change its state all the time, but an endpoint with little
// traffic shows its first failure and its recovery immediately.
func (m *Machine) next(now time.Time) State {
	failures := recent(m.failed, stateAttempts)
	switch {
	case m.gone:
		return Gone
	case m.open:
		return CircuitOpen
	case m.failures == 0 && m.successes == 0:
		return Idle
	case m.failures >= 3, m.failures > 0 && now.Sub(m.lastSuccess) > lately,
		m.halfOpen > 0 && now.Sub(m.closedAt) < halfOpenShown:
		return Degraded
	case failures <= 1, m.successes >= 5, m.failures == 0 && now.Sub(m.lastFailure.Time) > lately:
		return Healthy
	case failures >= 4:
		return Degraded
	}
	return m.state
}
