// Package retry decides what happens to a message after an attempt. It is pure: the time and the
// random numbers are inputs, the decision is the result.
package retry

import (
	"math"
	"slices"
	"time"

	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
)

// Expired is the reason of a message that was not delivered within its retry window.
const Expired egress.Reason = "Expired"

// RejectedByExpression is the reason of a 2xx response that is no success by the destination's expression.
const RejectedByExpression egress.Reason = "RejectedByExpression"

// Action is what to do with a message.
type Action int

// The actions.
const (
	// Ack: delivered.
	Ack Action = iota
	// Retry: try again at Decision.At.
	Retry
	// Bury: stop retrying; the message becomes a dead letter with Decision.Reason.
	Bury
)

// Outcome is the result of an attempt.
type Outcome struct {
	// StatusCode is the response's status; 0 without a response.
	StatusCode int
	// Reason is the cause of a failed attempt. It decides if StatusCode is 0.
	Reason egress.Reason
	// RetryAfter is the wait that the receiver requested; 0 if it requested none.
	RetryAfter time.Duration
}

// Policy is a destination's retry policy. All durations are positive.
type Policy struct {
	// Window is how long after its acceptance a message is retried.
	Window time.Duration
	// MinBackoff and MaxBackoff bound the backoff before jitter.
	MinBackoff, MaxBackoff time.Duration
	// Timeout of one attempt.
	Timeout time.Duration
	// StatusCodes are retried in addition to 408, 429 and 5xx.
	StatusCodes []int
	// BuryRejected makes RejectedByExpression permanent.
	BuryRejected bool
}

// Decision is the next action for a message.
type Decision struct {
	Action Action
	// At is the time of the next attempt; set for Retry. Wait is its part that the receiver requested.
	At   time.Time
	Wait time.Duration
	// Reason is the reason of the dead letter; set for Bury: Rejected, Redirected, RejectedByExpression,
	// TransformFailed or Expired.
	Reason egress.Reason
}

// Failed reports whether an outcome is anything but a success. A success is a complete 2xx
// response without a reason.
func (o Outcome) Failed() bool {
	return o.Reason != "" || o.StatusCode < 200 || o.StatusCode > 299
}

// Permanent returns the reason why a retry is pointless: the endpoint works and rejects this
// request. It is "" for a success and for all temporary failures: 5xx, 429, 408, timeouts, broken
// connections, DNS and TLS errors, responses that are not HTTP, and addresses that the egress guard
// denies (its list may change), for the policy's StatusCodes, and for RejectedByExpression unless the policy has BuryRejected.
// A request that could not be made is permanent as well.
func (p *Policy) Permanent(o Outcome) egress.Reason {
	switch s := o.StatusCode; {
	case o.Reason == egress.TransformFailed:
		return egress.TransformFailed
	case s == 408 || s == 429 || slices.Contains(p.StatusCodes, s):
	case s >= 300 && s <= 399:
		return egress.Redirected
	case s >= 400 && s <= 499:
		return egress.Rejected
	case s >= 200 && s <= 299 && p.BuryRejected && o.Reason == RejectedByExpression:
		return RejectedByExpression
	}
	return ""
}

// Decide returns the action after an attempt. attempt counts the failed attempts before this one;
// accepted is the start of the window; rnd returns numbers in [0, 1).
//
// The wait is exponential backoff with full jitter, plus the wait that the receiver requested with
// Retry-After, at most maxWait and a quarter of the window, so that no single response decides about
// the message. A wait beyond the end of the window is shortened to one last attempt shortly before
// the end; after that attempt the message expires.
func Decide(o Outcome, p Policy, attempt int, accepted, now time.Time, rnd func() float64) Decision {
	if !o.Failed() {
		return Decision{Action: Ack}
	}
	if reason := p.Permanent(o); reason != "" {
		return Decision{Action: Bury, Reason: reason}
	}
	// The last attempt needs time for its own timeout, but a short window must still have a retry.
	last := accepted.Add(p.Window - min(p.Timeout, p.Window/10))
	if !now.Before(last) {
		return Decision{Action: Bury, Reason: Expired}
	}
	backoff := min(time.Duration(rnd()*float64(Backoff(p, attempt))), last.Sub(now))
	wait := min(max(0, o.RetryAfter), maxWait, p.Window/4, last.Sub(now)-backoff)
	return Decision{Action: Retry, At: now.Add(backoff + wait), Wait: wait}
}

// maxWait bounds the wait of a message that the receiver requested.
const maxWait = time.Hour

// Backoff is the longest wait after `attempt` failed attempts before this one: MinBackoff doubled
// each time, at most MaxBackoff.
func Backoff(p Policy, attempt int) time.Duration {
	d := math.Ldexp(float64(p.MinBackoff), min(max(attempt, 0), 62))
	if d > float64(p.MaxBackoff) {
		return p.MaxBackoff
	}
	return time.Duration(d)
}
