package endpoint

import "time"

// Record is the stored form of an open circuit, so that a restart does not start with a burst of
// requests to an endpoint that is known to be down. Its JSON is a file format: records of release
// 0.2.0 must remain readable.
type Record struct {
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
}

// Record returns the stored form of an open circuit.
func (m *Machine) Record(revision string) Record {
	failure := m.lastFailure
	return Record{
		Revision: revision, Since: m.since, ProbeAt: m.probeAt, IntervalMS: m.interval.Milliseconds(),
		LastSuccess: m.lastSuccess, LastFailure: &failure, ConsecutiveFailures: m.failures, Gone: m.gone,
	}
}

// Restore opens the circuit of a new Machine again.
func (m *Machine) Restore(r Record, revision string, now time.Time) {
	m.open, m.gone = true, r.Gone
	m.interval = time.Duration(r.IntervalMS) * time.Millisecond
	m.probeAt = r.ProbeAt
	// After the clock was set back, the probe must not be postponed without a bound.
	if latest := now.Add(2 * maxProbeDelay); latest.Before(r.ProbeAt) {
		m.probeAt = latest
	}
	if r.Revision != revision {
		m.interval, m.probeAt = 0, now
	}
	m.state, m.since = m.next(now), r.Since
	m.lastSuccess, m.failures = r.LastSuccess, r.ConsecutiveFailures
	if r.LastFailure != nil {
		m.lastFailure = *r.LastFailure
	}
	m.failed, m.attempts = 1<<stateAttempts-1, stateAttempts
}
