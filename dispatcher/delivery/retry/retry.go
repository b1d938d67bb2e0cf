// Package retry decides what becomes of a message after an attempt. It is pure:
// time and chance come in, a decision goes out.
package retry

import (
	"math"
	"time"

	"github.com/posthorn/posthorn/dispatcher/egress"
)

// Expired is the reason of a message that was not delivered within its retry window.
const Expired egress.Reason = "Expired"

// Action is what to do with a message.
type Action int

// The actions.
const (
	// Ack: delivered.
	Ack Action = iota
	// Retry: try again at Decision.At.
	Retry
	// Bury: give up; the message becomes a dead letter with Decision.Reason.
	Bury
)

// Outcome is what an attempt came to.
type Outcome struct {
	// StatusCode is the answer's status; 0 when there was no answer.
	StatusCode int
	// Reason says why the attempt failed. It decides when StatusCode is 0.
	Reason egress.Reason
	// RetryAfter is how long the receiver asked to wait; 0 when it did not.
	RetryAfter time.Duration
}

// Policy is a destination's retry policy. All durations are positive.
type Policy struct {
	// Window is how long after acceptance a message may be tried.
	Window time.Duration
	// MinBackoff and MaxBackoff bound the backoff before jitter.
	MinBackoff, MaxBackoff time.Duration
	// Timeout of one attempt.
	Timeout time.Duration
}

// Decision is what to do next.
type Decision struct {
	Action Action
	// At is when to try again; set for Retry.
	At time.Time
	// Reason is why the message is given up; set for Bury: Rejected, Redirected or Expired.
	Reason egress.Reason
}

// Failed reports whether an outcome is anything but a success. A success is a
// 2xx answer that arrived whole.
func (o Outcome) Failed() bool {
	return o.Reason != "" || o.StatusCode < 200 || o.StatusCode > 299
}

// Permanent returns the reason why trying again is pointless: the endpoint
// works and does not want this request. It is "" for a success and for all that
// time may mend: 5xx, 429, 408, timeouts, broken connections, DNS and TLS
// errors, answers that are not HTTP, and addresses that the egress guard denies
// (its list may change).
func (o Outcome) Permanent() egress.Reason {
	switch s := o.StatusCode; {
	case s == 408 || s == 429:
	case s >= 300 && s <= 399:
		return egress.Redirected
	case s >= 400 && s <= 499:
		return egress.Rejected
	}
	return ""
}

// Decide says what to do after an attempt. attempt counts the attempts that
// failed before this one; accepted starts the window; rnd returns numbers in
// [0, 1).
//
// The wait is exponential backoff with full jitter, on top of what the receiver
// asked for with Retry-After. A wait that would end behind the window is cut
// to one last attempt shortly before its end; after that one the message expires.
func Decide(o Outcome, p Policy, attempt int, accepted, now time.Time, rnd func() float64) Decision {
	if !o.Failed() {
		return Decision{Action: Ack}
	}
	if reason := o.Permanent(); reason != "" {
		return Decision{Action: Bury, Reason: reason}
	}
	// The last attempt needs room for its own timeout, but not so much that a short window has no retry at all.
	last := accepted.Add(p.Window - min(p.Timeout, p.Window/10))
	if !now.Before(last) {
		return Decision{Action: Bury, Reason: Expired}
	}
	wait := time.Duration(rnd()*float64(Backoff(p, attempt))) + max(0, min(o.RetryAfter, p.Window))
	at := now.Add(wait)
	if at.After(last) {
		at = last
	}
	return Decision{Action: Retry, At: at}
}

// Backoff is the longest wait after `attempt` failed attempts before this one:
// MinBackoff doubled each time, at most MaxBackoff.
func Backoff(p Policy, attempt int) time.Duration {
	d := math.Ldexp(float64(p.MinBackoff), min(max(attempt, 0), 62))
	if d > float64(p.MaxBackoff) {
		return p.MaxBackoff
	}
	return time.Duration(d)
}
