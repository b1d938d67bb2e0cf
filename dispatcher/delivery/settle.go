package delivery

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// settler records in the store what happens to a message. It has no state, and is called without a lock.
type settler struct {
	store Store
	log   *slog.Logger
	// windowsSince is Options.WindowsSince.
	windowsSince time.Time
	// mayExpire is Options.MayExpire; never nil.
	mayExpire func() bool
}

// windowEnd returns the end of the retry window of a message that was accepted at a time.
func (s *settler) windowEnd(set *destinationConfig, accepted, now time.Time) time.Time {
	return s.windowStart(set, accepted, now).Add(set.policy.Window)
}

// windowStart returns the start of a message's retry window.
func (s *settler) windowStart(set *destinationConfig, accepted, now time.Time) time.Time {
	return set.suspensions.windowStart(later(accepted, s.windowsSince), now)
}

// expired returns the failure Expired, with the text of the message's last failure.
func expired(last queue.Failure, window time.Duration) queue.Failure {
	text := fmt.Sprintf("not delivered within its retry window of %v", window)
	if last.Reason != "" {
		text += "; last failure: " + last.Reason
	}
	if last.Message != "" {
		text += ": " + last.Message
	}
	last.Reason, last.Message = string(retry.Expired), text
	return last
}

// outcome is the result of an attempt for its message.
type outcome int

const (
	delivered      outcome = iota
	deliveredAgain         // delivered again, after another endpoint accepted it
	retried
	released
	rejected
	redirected
	unaccepted // its 2xx response is no success
	transformFailed
	omitted
	timedOut   // its retry window ended
	handedOver // another endpoint accepted it or still has it
	divided    // the messages of the rejected batch are sent in two parts
)

func (s outcome) String() string {
	return [...]string{"delivered", "delivered", "retried", "released", "rejected", "redirected", "rejected", "transform failed",
		"omitted", "expired", "failed", "divided"}[s]
}

// settle stores the outcome o of the message, and logs a failed attempt.
func (s *settler) settle(p *post, r *ended, o retry.Outcome) outcome {
	s.logFailure(p, r)
	if r.cut {
		s.store.Release(p.message)
		return released
	}
	if r.omitted {
		d := p.message
		d.Omitted = true
		s.store.Ack(d)
		return omitted
	}
	decision, f, end := s.decide(p, &p.message, r, o, rand.Float64)
	switch decision.Action {
	case retry.Ack:
		if !s.store.Ack(p.message) {
			return deliveredAgain
		}
	case retry.Retry:
		s.store.Retry(p.message, decision.At, f)
	case retry.Bury:
		if !s.bury(p.message, f, r.at) {
			return handedOver
		}
	}
	return end
}

func (s *settler) logFailure(p *post, r *ended) {
	if r.cut || r.omitted || !r.outcome().Failed() {
		return
	}
	args := append(append(p.target.logArgs(), failureArgs(r.failure())...), "messageId", p.message.ID, "attempt", p.message.Attempt+1)
	if n := len(p.batch); n > 0 {
		args = append(args, "messages", n)
	}
	s.log.Warn("delivery attempt failed", args...)
}

// decide returns the decision about a message after an attempt with the outcome o, the failure if it did not succeed, and the
// result.
func (s *settler) decide(p *post, d *queue.Delivery, r *ended, o retry.Outcome, rnd func() float64) (decision retry.Decision,
	f queue.Failure, end outcome) {
	start := p.suspensions.windowStart(later(d.AcceptedAt, s.windowsSince), r.at)
	decision = retry.Decide(o, p.set.policy, d.Attempt, start, r.at, rnd)
	if decision.Reason == retry.Expired && (p.suspensions.active() || !s.mayExpire()) {
		decision = retry.Decide(o, p.set.policy, d.Attempt, r.at, r.at, rnd)
	}
	if decision.Action == retry.Ack {
		return decision, queue.Failure{}, delivered
	}
	f = queue.Failure{Time: r.at, Reason: string(r.Reason), StatusCode: r.StatusCode, Message: r.Message, Response: r.Response,
		Redact: p.set.redaction.text, Wait: decision.Wait}
	if decision.Action == retry.Retry {
		return decision, f, retried
	}
	switch decision.Reason {
	case retry.Expired:
		return decision, expired(f, p.set.policy.Window), timedOut
	case egress.Redirected:
		return decision, f, redirected
	case retry.RejectedByExpression:
		return decision, f, unaccepted
	case egress.TransformFailed:
		return decision, f, transformFailed
	}
	return decision, f, rejected
}

// bury makes a dead letter, unless another endpoint accepted the message or still has it. If that
// fails, the message is kept and retried later.
func (s *settler) bury(d queue.Delivery, f queue.Failure, now time.Time) (buried bool) {
	buried, err := s.store.Bury(d, f)
	if err != nil {
		s.log.With(d.Lane.LogArgs()...).Error("writing a dead letter failed; keeping the message", "error", err)
		s.store.Retry(d, now.Add(time.Minute), f)
	}
	return buried
}

// unsendable makes a dead letter of a leased message whose filter failed, or that is older than its window. The lock
// is held, but released while the store is called.
func (e *Engine) unsendable(l *lane, d *queue.Delivery, now time.Time) bool {
	var f queue.Failure
	switch {
	case d.FilterError != "":
		f = queue.Failure{Time: now, Reason: queue.ReasonFilterFailed, Message: d.FilterError}
		e.o.Logger.With(l.id.LogArgs()...).Warn("filter failed; the message becomes a dead letter", "messageId", d.ID, "error", d.FilterError)
		l.destination.failFilter(d, now)
	case !now.Before(e.settler.windowEnd(l.set, d.AcceptedAt, now)) && e.settler.mayExpire():
		f = l.expiry(now)
	default:
		return false
	}
	f.Redact = l.set.redaction.text
	e.scheduler.addLeased(l, -1, -len(d.Body))
	e.mu.Unlock()
	d.Attempt-- // Bury counts the lease as an attempt, but this attempt was not made.
	buried := e.settler.bury(*d, f, now)
	e.mu.Lock()
	l.destination.changed.Numbers()
	if buried {
		l.destination.countDead(f.Reason, 1)
	}
	return true
}
