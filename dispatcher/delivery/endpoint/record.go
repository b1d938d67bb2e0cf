package endpoint

import "time"

// Record is the stored form of an endpoint's health, so that a restart does not start with a burst
// of requests to an endpoint that is known to be down, and that reports keep the last success and
// failure.
type Record struct {
	State State `json:"state"`
	// Revision of the destination's config. With another revision the probe is due at once.
	Revision            string    `json:"revision"`
	Since               time.Time `json:"since"`
	ProbeAt             time.Time `json:"probeAt"`
	IntervalMS          int64     `json:"intervalMs"`
	LastSuccess         time.Time `json:"lastSuccess,omitzero"`
	LastFailure         *Failure  `json:"lastFailure,omitempty"`
	ConsecutiveFailures int       `json:"consecutiveFailures"`
	// Gone: the endpoint answered 410.
	Gone bool `json:"gone,omitempty"`
	// Unmade: the last request could not be made.
	Unmade bool `json:"unmade,omitempty"`
}

// Record returns the stored form of the endpoint's health.
func (m *Machine) Record(revision string) Record {
	r := Record{
		State: m.state, Revision: revision, Since: m.since, ProbeAt: m.probeAt, IntervalMS: m.interval.Milliseconds(),
		LastSuccess: m.lastSuccess, ConsecutiveFailures: m.failures, Gone: m.gone, Unmade: m.transforming,
	}
	if !m.lastFailure.Time.IsZero() {
		failure := m.lastFailure
		r.LastFailure = &failure
	}
	return r
}

// Restore gives a new Machine the health of an earlier run. It opens an open circuit again. Other
// restored attempts count neither for the circuit nor for the window.
func (m *Machine) Restore(r Record, revision string, now time.Time) {
	m.lastSuccess = r.LastSuccess
	if r.LastFailure != nil {
		m.lastFailure = *r.LastFailure
	}
	if open := r.State == CircuitOpen || r.State == Gone; open {
		m.restoreOpen(r, revision, now)
		return
	}
	switch {
	case r.State == Idle, r.ConsecutiveFailures > 0 && r.Revision != revision: // See Reconfigure.
		return
	case r.ConsecutiveFailures > 0:
		m.failures = r.ConsecutiveFailures
	default:
		m.successes = 1
	}
	m.state, m.since = m.next(now), r.Since
}

func (m *Machine) restoreOpen(r Record, revision string, now time.Time) {
	m.open, m.gone, m.transforming = true, r.Gone, r.Unmade
	m.interval = time.Duration(r.IntervalMS) * time.Millisecond
	m.probeAt = r.ProbeAt
	// The clock was set back, or the clock of another process was ahead: the probe waits as long as planned.
	if f := r.LastFailure; f != nil && f.Time.After(now) {
		m.probeAt = now.Add(r.ProbeAt.Sub(f.Time))
	}
	if latest := now.Add(2 * maxProbeDelay); latest.Before(m.probeAt) {
		m.probeAt = latest
	}
	if r.Revision != revision {
		m.interval, m.probeAt = 0, now
	}
	m.state, m.since = m.next(now), r.Since
	m.failures = r.ConsecutiveFailures
	m.failed, m.attempts = 1<<stateAttempts-1, stateAttempts
}
