// Package endpoint decides how many requests an endpoint may get: its Machine is the circuit
// breaker, the in-flight window, the health and the history of one endpoint. It must not know
// messages, lanes or how requests travel.
//
// The package is pure: it has no I/O, goroutines or locks, and it reads no clock. The caller passes
// times and random numbers, and serializes the calls of a Machine.
//
// The circuit is closed, open (only probes are sent) or half-open (closed a moment ago; a few
// failures open it again). The window limits the requests in flight while the circuit is not open.
// It starts at 1, also after a restart, doubles in slow start, and then grows by its square root, as long as
// more requests do not make the responses slower (type window). So the load on a recovered endpoint rises gradually.
//
// An endpoint that fails now and then is neither down nor overloaded: fewer requests would not make
// it fail less often. So a failed attempt reduces the window only if the endpoint is overloaded
// (Overloaded), or if half of a round of attempts failed.
package endpoint

import (
	"math/bits"
	"time"
)

const (
	// The circuit opens when the strain of failures without a success in between reaches openStrain,
	// or when openShare of the last recentAttempts attempts failed. The share is large, so an
	// endpoint with random failures does not reach it: with one failure in four, ten failures in a
	// row happen once in a million attempts, and the share never.
	openStrain     = 10_000
	recentAttempts = 64
	openShare      = recentAttempts * 3 / 4
	// The circuit is half-open until halfOpenFor successes. Until then, reopenStrain opens it again.
	halfOpenFor  = 10
	reopenStrain = openStrain * 3 / 10
	// provenAttempts is the number of recent attempts of which half must have succeeded for the
	// endpoint to be proven, and not failing.
	provenAttempts = 8

	minProbeInterval = time.Second
	maxProbeInterval = time.Minute
	// unmadeInterval is the probe interval while no requests can be made.
	unmadeInterval = time.Minute
	// goneInterval is the probe interval of an endpoint that answers 410.
	goneInterval = time.Hour
	// maxProbeDelay bounds how far a receiver can postpone the next probe with Retry-After. The requests
	// that open a circuit, which end at about the same time, postpone the first probe by at most
	// maxFirstDelay: the outage may be over, and no other request would notice.
	maxProbeDelay = time.Hour
	maxFirstDelay = 5 * time.Minute
)

// Result is the result of an attempt.
type Result int

// The results.
const (
	// Succeeded: the endpoint accepted the message.
	Succeeded Result = iota
	// Failed: the endpoint cannot be reached, or answered that it cannot accept messages now.
	Failed
	// Overloaded: the endpoint failed because it gets too many requests: it answered so, or it
	// did not answer in time.
	Overloaded
	// Rejected: the endpoint gave a permanent answer. It rejected the message, or every message: that
	// depends on the status code.
	Rejected
	// Unmade: no request could be made of the message, so nothing was sent.
	Unmade
	// Omitted: the message needs no request.
	Omitted
	// Canceled: the request was canceled, so it has no result.
	Canceled
)

// Attempt is one finished request.
type Attempt struct {
	Started, Ended time.Time
	Result         Result
	// Failure describes a failed or rejected attempt.
	Failure Failure
	// RetryAfter is the wait that the endpoint requested; 0 if it requested none.
	RetryAfter time.Duration
	// InFlight counts the requests in flight to the endpoint, including this one.
	InFlight int
	// Probe is true for the probe of an open circuit.
	Probe bool
	// FirstByte is the time from the request to the first byte of a response, without the time for a connection or token.
	FirstByte time.Duration
	// Singly is the number of messages of a batch that the endpoint rejected one by one; 0 for other attempts.
	Singly int
	// Jitter in [0, 1) spreads the probes of many endpoints, and the rounds at half the window.
	Jitter float64
}

// Failure describes a failed attempt. It contains no secrets. A stored Record contains it, so its
// JSON is a file format.
type Failure struct {
	Time time.Time `json:"time"`
	// Reason is one of the delivery reasons, such as TimedOut.
	Reason string `json:"reason"`
	// StatusCode is 0 without a response.
	StatusCode int    `json:"statusCode,omitempty"`
	Message    string `json:"message,omitempty"`
}

// Change is what an attempt changed.
type Change struct {
	// Opened and Closed: the circuit opened, or closed.
	Opened, Closed bool
	// State: Status has another state.
	State bool
	// Record: the stored form of the circuit is outdated.
	Record bool
}

// Machine is the state machine of one endpoint. Make it with New.
type Machine struct {
	window window

	// failed and down have one bit per recent attempt, the latest in bit 0. failed includes
	// rejected messages, down does not. attempts counts them, and sinceClosed those since the circuit
	// closed; both up to recentAttempts.
	failed, down          uint64
	attempts, sinceClosed int
	// failures counts since the last success, successes since the last failure.
	failures, successes int
	// strain is the sum of the strains of the failures since the last success, and unmade the part of it by requests that
	// could not be made.
	strain, unmade int
	lastSuccess    time.Time
	lastFailure    Failure
	// waitUntil is the end of the latest wait that the endpoint requested.
	waitUntil time.Time
	// latency is a moving average of the duration of attempts.
	latency time.Duration

	// gone is true while the circuit is open because the endpoint answered 410, and transforming because the last probe could not
	// be made.
	open, gone, transforming bool
	// probing is true while the probe is in flight.
	probing  bool
	probeAt  time.Time
	interval time.Duration
	// halfOpen is the number of successes until the circuit, which closed at closedAt, counts as
	// recovered.
	halfOpen int
	closedAt time.Time

	state State
	since time.Time
}

// New returns the Machine of an endpoint without traffic. limit is the largest window, at least 1.
func New(limit int, now time.Time) Machine {
	return Machine{window: newWindow(limit), state: Idle, since: now}
}

// Reconfigure applies a change of the endpoint. The change may have fixed the endpoint: the next
// probe is due, and earlier failures count no longer unless the circuit is open.
func (m *Machine) Reconfigure(limit int, now time.Time) {
	m.window.reconfigure(limit)
	m.interval, m.probeAt = 0, now
	if m.failures > 0 && !m.open {
		m.failures, m.failed, m.strain, m.unmade = 0, 0, 0, 0
		m.Refresh(now)
	}
}

// Limit changes the largest window, at least 1, and nothing else.
func (m *Machine) Limit(limit int) { m.window.setLimit(limit) }

// Room returns how many more requests the endpoint may get, with inFlight in flight: none while the
// circuit is open. It may be negative.
func (m *Machine) Room(inFlight int) int {
	if m.open {
		return 0
	}
	return int(m.window.size) - inFlight
}

// Window returns the limit of requests in flight; 1 while the circuit is open, for the probe.
func (m *Machine) Window() int {
	if m.open {
		return 1
	}
	return int(m.window.size)
}

// Open reports whether only probes may be sent.
func (m *Machine) Open() bool { return m.open }

// ProbeAt returns when the next probe of an open circuit is due.
func (m *Machine) ProbeAt() time.Time { return m.probeAt }

// Probing reports whether the probe is in flight. An open circuit has at most one.
func (m *Machine) Probing() bool { return m.probing }

// ProbeDue reports whether the probe of an open circuit may start.
func (m *Machine) ProbeDue(now time.Time) bool {
	return m.open && !m.probing && !now.Before(m.probeAt)
}

// StartProbe marks the probe as in flight, until its attempt is observed or CancelProbe is called.
func (m *Machine) StartProbe() { m.probing = true }

// CancelProbe ends a probe that was not sent; the next one is due at once.
func (m *Machine) CancelProbe() { m.probing = false }

// Proven reports whether the endpoint works most of the time and responds fast.
func (m *Machine) Proven() bool {
	return m.attempts > 0 && !m.lastSuccess.IsZero() && !m.Failing() && m.latency < time.Second
}

// Failing reports whether more than half of the last attempts failed. An endpoint without an attempt does not fail.
func (m *Machine) Failing() bool {
	n := min(m.attempts, provenAttempts)
	return 2*recent(m.failed, n) > n
}

// Latency returns a moving average of the duration of attempts.
func (m *Machine) Latency() time.Duration { return m.latency }

// Wait returns the rest of the latest wait that the endpoint requested with Retry-After, at most an
// hour. It holds for the messages that the endpoint answered so, not for others.
func (m *Machine) Wait(now time.Time) time.Duration { return max(0, m.waitUntil.Sub(now)) }

// Holds reports whether a message with this permanent answer must be kept: the circuit is open, and
// the answer may be the same for every message.
func (m *Machine) Holds(statusCode int) bool { return m.open && rejectionStrain(statusCode) > 0 }

// HoldsUnmade reports whether a message of which no request could be made must be kept: the same may hold for every message.
func (m *Machine) HoldsUnmade() bool { return m.open }

// Observe records a finished attempt and reports what it changed.
func (m *Machine) Observe(a Attempt) Change {
	wasOpen, wasProbeAt := m.open, m.probeAt
	switch {
	case a.Result == Omitted && m.transforming && a.Probe: // Requests can be made again.
		m.close(a.Ended)
		m.failures, m.failed = 0, 0
		return Change{Closed: true, State: m.Refresh(a.Ended), Record: true}
	case a.Result == Omitted:
		m.strain, m.unmade = m.strain-m.unmade, 0
		fallthrough
	case a.Result == Canceled:
		m.probing = m.probing && !a.Probe
		return Change{}
	}
	m.remember(&a)
	switch {
	case m.open && a.strain() > 0:
		m.failedWhileOpen(&a)
	case m.open && a.Probe:
		m.close(a.Ended)
	case m.open: // The request started before the circuit opened; only the probe decides.
	default:
		m.window.resize(&a)
		m.openIfStrained(&a)
	}
	return Change{
		Opened: !wasOpen && m.open, Closed: wasOpen && !m.open,
		State: m.Refresh(a.Ended), Record: !wasProbeAt.Equal(m.probeAt),
	}
}

// strain returns how much an attempt is evidence that the endpoint accepts no message at all: the
// circuit opens after 10 failures in a row, or 10 answers that are about the URL or its
// credentials, or 100 answers that are about the message. Other permanent answers are no evidence.
// With many requests in flight, half as many failures in a row are needed, at most recentAttempts, because requests that
// end at the same time are in no order.
func (a *Attempt) strain() int {
	switch {
	case a.Result == Succeeded:
		return 0
	case a.Result == Unmade:
		return openStrain / 100
	case a.down():
		return openStrain / max(10, min(a.InFlight/2, recentAttempts))
	case a.Singly > 0 && rejectionStrain(a.Failure.StatusCode) > 0:
		return openStrain * min(a.Singly, 20) / 20
	}
	return rejectionStrain(a.Failure.StatusCode)
}

func rejectionStrain(statusCode int) int {
	switch statusCode {
	case statusGone:
		return openStrain
	case 301, 302, 303, 307, 308, 401, 403, 404, 405, 407:
		return openStrain / 10
	case 400, 413, 415, 422:
		return openStrain / 100
	}
	if statusCode/100 == 2 { // The destination's expression rejected the response.
		return openStrain / 100
	}
	return 0
}

// AboutURL reports whether a permanent answer is about the URL, its credentials or the form of requests, and so the same for every
// message.
func AboutURL(statusCode int) bool {
	return rejectionStrain(statusCode) >= openStrain/10 || statusCode == 415
}

// statusGone is the answer of an endpoint that was removed.
const statusGone = 410

// down reports whether the endpoint failed, and not only for this message.
func (a *Attempt) down() bool { return a.Result == Failed || a.Result == Overloaded }

// remember adds an attempt to the history.
func (m *Machine) remember(a *Attempt) {
	m.failed, m.down = m.failed<<1, m.down<<1
	m.attempts = min(m.attempts+1, recentAttempts)
	m.sinceClosed = min(m.sinceClosed+1, recentAttempts)
	m.latency += (a.Ended.Sub(a.Started) - m.latency) / 8
	m.window.count(a)
	if a.down() {
		m.down |= 1
	}
	m.strain += a.strain()
	if a.Result == Unmade {
		m.unmade += a.strain()
	}
	if a.Result == Succeeded {
		m.failures, m.strain, m.unmade = 0, 0, 0
		m.successes++
		m.lastSuccess = a.Ended
		return
	}
	m.failed |= 1
	m.successes = 0
	m.failures++
	m.lastFailure = a.Failure
	if until := a.Ended.Add(min(a.RetryAfter, maxProbeDelay)); a.RetryAfter > 0 && until.After(m.waitUntil) {
		m.waitUntil = until
	}
}

// recent returns the number of set bits of the last n attempts, at most recentAttempts.
func recent(history uint64, n int) int { return bits.OnesCount64(history & (1<<n - 1)) }

// openIfStrained opens the circuit if too many attempts failed. Otherwise a success brings a
// half-open circuit nearer to its recovery.
func (m *Machine) openIfStrained(a *Attempt) {
	limit := openStrain
	if m.halfOpen > 0 {
		limit = reopenStrain
	}
	switch {
	case m.strain >= limit, a.down() && m.sinceClosed == recentAttempts && recent(m.down, recentAttempts) >= openShare:
		m.open = true
		m.scheduleProbe(a)
	case a.strain() == 0 && m.halfOpen > 0:
		if m.halfOpen--; m.halfOpen == 0 {
			m.interval = 0
		}
	}
}

// failedWhileOpen postpones the next probe.
func (m *Machine) failedWhileOpen(a *Attempt) {
	if a.Probe {
		m.scheduleProbe(a)
	} else if at := a.Ended.Add(a.probeDelay()); a.RetryAfter > 0 && at.After(m.probeAt) {
		m.probeAt = at
	}
}

// scheduleProbe doubles the interval and spreads it by a fifth to either side. The first answer 410
// is confirmed soon, because it may be about one message only; then the probes are rare.
func (m *Machine) scheduleProbe(a *Attempt) {
	m.probing = false
	m.interval = min(max(2*m.interval, minProbeInterval), maxProbeInterval)
	interval, wasGone := m.interval, m.gone
	if m.gone = a.Failure.StatusCode == statusGone && a.Result == Rejected; m.gone {
		m.interval, interval = 0, minProbeInterval
		if wasGone {
			interval = goneInterval
		}
	}
	if m.transforming = a.Result == Unmade; m.transforming {
		m.interval, interval = 0, unmadeInterval
	}
	wait := time.Duration(float64(interval) * (0.8 + 0.4*a.Jitter))
	m.probeAt = a.Ended.Add(max(wait, a.probeDelay()))
}

// probeDelay returns how far the attempt's Retry-After postpones the next probe.
func (a *Attempt) probeDelay() time.Duration {
	if a.Probe {
		return min(a.RetryAfter, maxProbeDelay)
	}
	return min(a.RetryAfter, maxFirstDelay)
}

// close closes the circuit, with the smallest window.
func (m *Machine) close(now time.Time) {
	m.open, m.gone, m.transforming, m.probing, m.probeAt = false, false, false, false, time.Time{}
	m.window.restart()
	m.unmade = 0
	m.strain, m.sinceClosed, m.halfOpen, m.closedAt = 0, 0, halfOpenFor, now
}
