package delivery

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// headerIdempotencyKey carries the key of the messageId (event.ID.Key), which is equal in every attempt.
const headerIdempotencyKey = "Idempotency-Key"

// post is one request: a message for one endpoint.
type post struct {
	lane    *lane
	set     *destinationConfig
	target  target
	message queue.Delivery
	// flight ends the request early.
	flight context.Context
	// probe is true for an open circuit's probe; unproven is true if the lane was not proven.
	probe, unproven bool
	// others is true if the lane may also send the message to other endpoints.
	others bool
	// waitsRequested is the endpoint's count at the start of the request, or at its response if that
	// requested a wait.
	waitsRequested int
}

// ended is a finished request.
type ended struct {
	egress.Result
	at       time.Time
	duration time.Duration
	// cut is true if the engine cancelled the request, in order to stop or to pause.
	cut bool
}

func (r *ended) outcome() retry.Outcome {
	return retry.Outcome{StatusCode: r.StatusCode, Reason: r.Reason, RetryAfter: r.RetryAfter}
}

func (r *ended) failure() endpoint.Failure {
	return endpoint.Failure{Time: r.at, Reason: string(r.Reason), StatusCode: r.StatusCode, Message: r.Message}
}

// result classifies the attempt for the endpoint's state machine.
func (r *ended) result(policy *retry.Policy) endpoint.Result {
	switch o := r.outcome(); {
	case r.cut:
		return endpoint.Canceled
	case !o.Failed():
		return endpoint.Succeeded
	case policy.Permanent(o) != "":
		return endpoint.Rejected
	case r.Reason == egress.Throttled, r.Reason == egress.TimedOut && r.Sent:
		return endpoint.Overloaded
	}
	return endpoint.Failed
}

// start sends a message to the lane's endpoint. A draining lane may have several endpoints: it
// alternates between those with capacity. The lock is held.
func (e *Engine) start(l *lane, d queue.Delivery, p *post, now time.Time) {
	e.post(l, d, l.choose(d.Attempt, now, func(t target) bool { return t.takes(now) }), p, now)
}

// choose returns the lane's endpoint of the highest rank that satisfies will.
func (l *lane) choose(turn int, now time.Time, will func(target) bool) (to target) {
	if len(l.targets) == 1 {
		return l.targets[0]
	}
	best := -1
	for i := range l.targets {
		t := l.targets[(turn+i)%len(l.targets)]
		if r := t.rank(now); r > best && will(t) {
			to, best = t, r
		}
	}
	return to
}

// rank orders the endpoints of a lane: 0 if the circuit is open, 1 if the endpoint requested a wait,
// 2 if it is not proven, 3 if it is.
func (ep *liveEndpoint) rank(now time.Time) int {
	switch m := &ep.machine; {
	case m.Open():
		return 0
	case m.Wait(now) > 0:
		return 1
	case m.Proven():
		return 3
	}
	return 2
}

// post makes the request for a message.
func (e *Engine) post(l *lane, d queue.Delivery, to target, p *post, now time.Time) {
	*p = post{lane: l, set: l.set, target: to, message: d, flight: e.flight, probe: to.machine.Open(), others: len(l.targets) > 1}
	e.account(p, now)
}

// account counts a request and offers the remaining capacity to the next lane.
func (e *Engine) account(p *post, now time.Time) {
	p.lane.waited = false
	p.lane.inFlight++
	p.target.inFlight++
	p.unproven = !p.lane.proven()
	p.waitsRequested = p.target.waitsRequested
	e.endGrant(p.lane)
	e.addInFlight(p.lane.owner, 1, p.unproven)
	if p.target.rate != nil {
		p.target.rate.ReserveN(now, 1)
	}
	e.wakeNextLane(p.target.liveEndpoint, now)
}

// addInFlight adds n to the requests in flight of a namespace; a negative n subtracts.
func (e *Engine) addInFlight(owner *namespace, n int, unproven bool) {
	owner.inFlight += n
	e.load(owner, n)
	e.ready.changed(owner)
	e.inFlight += n
	if unproven {
		e.unproven += n
	}
}

// startProbe leases a message and sends it to an endpoint whose probe is due. It returns false if
// the lane has no message. It alternates between the oldest message and the next one in order: a
// single message that always fails must not keep the circuit open for all. The lock is held, but
// released while the store is called.
func (e *Engine) startProbe(l *lane, p *post, now time.Time) bool {
	set := l.set
	to := l.choose(l.probes, now, func(t target) bool { return t.machine.ProbeDue(now) })
	to.machine.StartProbe() // Set before the lock is released, so that there is only one probe.
	l.probes++
	next := l.probes%2 == 0
	for {
		l.notified = false
		unproven := !l.proven()
		e.endGrant(l)
		e.addInFlight(l.owner, 1, unproven) // Reserve, so that no other request takes the place meanwhile.
		e.wakeWorker()                      // This worker cannot take the lanes that are ready.
		e.mu.Unlock()
		d, ok, err := e.leaseProbe(l.id, next)
		e.mu.Lock()
		e.addInFlight(l.owner, -1, unproven)
		l.destination.changed.Numbers()
		if err != nil {
			e.breakLane(l, err)
		}
		if ok {
			l.leased++
			e.leased++
			stale := l.set != set || l.parked() || e.stopped
			if !stale && e.unsendable(l, &d, now) {
				continue
			}
			if !stale {
				e.post(l, d, to, p, now)
				return true
			}
			l.leased--
			e.leased--
			e.mu.Unlock()
			e.o.Store.Release(d)
			e.mu.Lock()
		}
		to.machine.CancelProbe()
		l.more = ok || l.notified
		e.enqueue(l)
		e.yield(l, now)
		return false
	}
}

// leaseProbe leases the lane's next message, or the oldest pending one.
func (e *Engine) leaseProbe(id queue.LaneID, next bool) (d queue.Delivery, ok bool, err error) {
	first := func() {
		var got []queue.Delivery
		if got, err = e.o.Store.Lease(id, 1, nil); len(got) > 0 {
			d, ok = got[0], true
		}
	}
	if next {
		first()
	}
	if !ok && err == nil {
		d, ok, err = e.o.Store.LeaseOldest(id)
	}
	if !ok && err == nil {
		first() // The store notifies of the next message only after a Lease that emptied the lane.
	}
	return d, ok, err
}

// unsendable makes a dead letter of a leased message whose filter failed, or that is older than its window. The lock
// is held, but released while the store is called.
func (e *Engine) unsendable(l *lane, d *queue.Delivery, now time.Time) bool {
	var f queue.Failure
	switch {
	case d.FilterError != "":
		f = queue.Failure{Time: now, Reason: queue.ReasonFilterFailed, Message: d.FilterError}
		e.log.With(l.id.LogArgs()...).Warn("filter failed; the message becomes a dead letter", "messageId", d.ID, "error", d.FilterError)
		l.destination.failFilter(d, now)
	case now.Sub(e.windowStart(d.AcceptedAt)) >= l.set.policy.Window && e.mayExpire():
		f = l.expiry(now)
	default:
		return false
	}
	l.leased--
	e.leased--
	e.mu.Unlock()
	d.Attempt-- // Bury counts the lease as an attempt, but this attempt was not made.
	buried := e.bury(*d, f, now)
	e.mu.Lock()
	l.destination.changed.Numbers()
	if buried {
		l.destination.countDead(f.Reason, 1)
	}
	return true
}

// filterFailureFor is how long the report has a failure of a filter.
const filterFailureFor = 10 * time.Minute

// failFilter records that the filter failed for a message.
func (d *destination) failFilter(m *queue.Delivery, now time.Time) {
	if m.AcceptedAt.Before(d.changedAt) {
		return // An earlier filter failed.
	}
	if before := d.filterFailure; before == nil || before.Message != m.FilterError || now.Sub(before.Time) >= filterFailureFor {
		d.changed.Transition()
	}
	d.filterFailure = &adminapi.Failure{Time: now, Reason: queue.ReasonFilterFailed, Message: m.FilterError}
}

// windowStart returns the start of a message's retry window.
func (e *Engine) windowStart(accepted time.Time) time.Time {
	if accepted.Before(e.o.WindowsSince) {
		return e.o.WindowsSince
	}
	return accepted
}

// expiry is the failure of messages that were not delivered in time. It includes the last failure
// of the lane's endpoints.
func (l *lane) expiry(now time.Time) queue.Failure {
	var last endpoint.Failure
	for _, t := range l.targets {
		if f := t.machine.Status().LastFailure; f.Time.After(last.Time) {
			last = f
		}
	}
	f := queue.Failure{Time: now, Reason: last.Reason, StatusCode: last.StatusCode, Message: last.Message}
	return expired(f, l.set.policy.Window)
}

// expired returns the failure Expired, with the text of the message's last failure.
func expired(last queue.Failure, window time.Duration) queue.Failure {
	text := fmt.Sprintf("not delivered within %v after it was accepted", window)
	if last.Reason != "" {
		text += "; last failure: " + last.Reason
	}
	if last.Message != "" {
		text += ": " + last.Message
	}
	last.Reason, last.Message = string(retry.Expired), text
	return last
}

// send sends the worker's request and settles its message. The lock is not held.
func (e *Engine) send(w *worker) {
	p := &w.post
	started := time.Now()
	key := event.ID(p.message.ID).Key()
	w.headers = append(w.headers[:0], egress.Header{Name: headerIdempotencyKey, Value: key})
	body := p.set.body(&p.message)
	w.headers = p.set.signer.Headers(w.headers, key, started, body)
	var span trace.Span
	if e.o.Tracer != nil {
		span = e.trace(w, started)
	}
	r := ended{Result: egress.Result{Reason: egress.ConnectionFailed}}
	if e.maySend() {
		// The context is only cancelled when the engine stops or pauses: a timer per request would
		// cost more than the rest of send.
		ctx := egress.WithDeadline(p.flight, started.Add(p.set.policy.Timeout))
		r.Result = e.o.Client.Post(ctx, p.target.to, w.headers, body)
	}
	r.at = time.Now()
	r.duration = r.at.Sub(started)
	r.Response = p.set.signer.Redact(r.Response, w.headers)
	r.cut = r.outcome().Failed() && p.flight.Err() != nil

	// The endpoint observes the result before the store does: the store needs longer for a failure
	// than for a success, so the failures of concurrent requests would follow each other and open
	// the circuit.
	o := e.messageOutcome(p, &r)
	e.mu.Lock()
	ep := p.target.liveEndpoint
	back, changed := e.observe(p, &r, started)
	e.mu.Unlock()
	s := e.settle(p, &r, o)
	if span != nil {
		endTrace(span, p, &r, s)
	}
	e.mu.Lock()
	if p.message.LongNumbers {
		p.target.destination.metrics.longNumbers++
	}
	p.target.destination.changed.Numbers()
	e.finish(p, &r, s)
	waiting, until := p.waitsOver(&r, s, started)
	*p = post{}
	e.mu.Unlock()
	for _, l := range waiting {
		e.endWaits(l, until)
	}
	e.release(back)
	if changed.Record || changed.State {
		e.storeHealth(ep)
	}
}

// waitsOver returns the lanes with waits to end, and the time of the last response whose wait has ended: a success ends
// the waits of all responses before its request. The lock is held.
func (p *post) waitsOver(r *ended, s outcome, started time.Time) (lanes []*lane, until time.Time) {
	ep := p.target.liveEndpoint
	if r.outcome().Failed() {
		if s != retried || r.RetryAfter == 0 {
			return nil, until
		}
		p.lane.waits = true
		if p.waitsRequested > ep.waitsEnded {
			return nil, until
		}
		return []*lane{p.lane}, r.at // The success was faster than the store.
	}
	ep.waitsEnded = max(ep.waitsEnded, p.waitsRequested)
	if until = r.at; ep.waitsRequested > p.waitsRequested {
		until = started.Add(-time.Millisecond) // The store has the times of failures in milliseconds.
	}
	for _, l := range ep.lanes {
		if l.waits {
			l.waits = false // Until endWaits, or a further wait, sets it.
			lanes = append(lanes, l)
		}
	}
	return lanes, until
}

// messageOutcome returns the outcome of an attempt for its message. It differs from that for the
// endpoint: a permanent answer is final only if no other endpoint may get the message and the
// circuit is closed, and a message that other endpoints may get waits only as long as all of them
// require.
func (e *Engine) messageOutcome(p *post, r *ended) retry.Outcome {
	o := r.outcome()
	permanent := p.set.policy.Permanent(o) != ""
	if !permanent && !p.others {
		return o
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if permanent && (p.others || p.target.machine.Holds(o.StatusCode)) {
		o.StatusCode = 0
	}
	for _, t := range p.lane.targets {
		if p.others && t.liveEndpoint != p.target.liveEndpoint {
			o.RetryAfter = min(o.RetryAfter, t.machine.Wait(r.at))
		}
	}
	return o
}

// body returns the bytes to sign and to send. Only messages that are marked for long numbers need a
// conversion.
func (s *destinationConfig) body(d *queue.Delivery) []byte {
	if !d.LongNumbers || s.exactNumbers {
		return d.Body
	}
	fixed, err := event.FixedPoint(d.Body)
	if err != nil {
		return d.Body // cannot happen: accepted messages are JSON
	}
	return fixed
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
	timedOut   // its retry window ended
	handedOver // another endpoint accepted it or still has it
)

func (s outcome) String() string {
	return [...]string{"delivered", "delivered", "retried", "released", "rejected", "redirected", "expired", "failed"}[s]
}

// settle stores the outcome o of the message, and logs a failed attempt.
func (e *Engine) settle(p *post, r *ended, o retry.Outcome) outcome {
	if !r.cut && r.outcome().Failed() {
		args := append(p.target.logArgs(), failureArgs(r.failure())...)
		e.log.Warn("delivery attempt failed", append(args, "messageId", p.message.ID, "attempt", p.message.Attempt+1)...)
	}
	if r.cut {
		e.o.Store.Release(p.message)
		return released
	}
	decision := retry.Decide(o, p.set.policy, p.message.Attempt, e.windowStart(p.message.AcceptedAt), r.at, rand.Float64)
	if decision.Reason == retry.Expired && !e.mayExpire() {
		decision = retry.Decide(o, p.set.policy, p.message.Attempt, r.at, r.at, rand.Float64)
	}
	if decision.Action == retry.Ack {
		if !e.o.Store.Ack(p.message) {
			return deliveredAgain
		}
		return delivered
	}
	f := queue.Failure{Time: r.at, Reason: string(r.Reason), StatusCode: r.StatusCode, Message: r.Message, Response: r.Response, Wait: decision.Wait}
	if decision.Action == retry.Retry {
		e.o.Store.Retry(p.message, decision.At, f)
		return retried
	}
	s := rejected
	switch decision.Reason {
	case retry.Expired:
		s, f = timedOut, expired(f, p.set.policy.Window)
	case egress.Redirected:
		s = redirected
	}
	if !e.bury(p.message, f, r.at) {
		s = handedOver
	}
	return s
}

// bury makes a dead letter, unless another endpoint accepted the message or still has it. If that
// fails, the message is kept and retried later.
func (e *Engine) bury(d queue.Delivery, f queue.Failure, now time.Time) (buried bool) {
	buried, err := e.o.Store.Bury(d, f)
	if err != nil {
		e.log.With(d.Lane.LogArgs()...).Error("writing a dead letter failed; keeping the message", "error", err)
		e.o.Store.Retry(d, now.Add(time.Minute), f)
	}
	return buried
}

// observe updates the endpoint with the result of a request. It returns messages to release: leased
// messages that cannot be sent because the circuit opened. The lock is held.
func (e *Engine) observe(p *post, r *ended, started time.Time) (back []queue.Delivery, changed endpoint.Change) {
	ep := p.target.liveEndpoint
	a := endpoint.Attempt{
		Started: started, Ended: r.at, Result: r.result(&p.set.policy), RetryAfter: r.RetryAfter,
		InFlight: ep.inFlight, Probe: p.probe,
	}
	if a.Result != endpoint.Succeeded {
		a.Failure, a.Jitter = r.failure(), rand.Float64()
	}
	if a.RetryAfter > 0 {
		ep.waitsRequested++
		p.waitsRequested = ep.waitsRequested
	}
	changed = ep.machine.Observe(a)
	if changed.Opened || changed.Closed {
		for _, other := range ep.lanes {
			other.more = true // A probe may use any message, also retries that are not due.
			if !other.anyClosed() {
				back = append(back, e.takeBuffer(other)...)
			}
		}
	}
	if !r.cut {
		e.record(p, r)
	}
	if changed.State {
		ep.destination.changed.Transition()
		e.logState(ep, r.at)
	}
	return back, changed
}

// finish accounts for a request's end and offers the free capacity to other lanes. The lock is held.
func (e *Engine) finish(p *post, r *ended, s outcome) {
	l, ep, now := p.lane, p.target.liveEndpoint, r.at
	e.addInFlight(l.owner, -1, p.unproven)
	l.inFlight--
	ep.inFlight--
	e.leased--
	l.leased--
	e.countOutcome(l.destination, s, now.Sub(p.message.AcceptedAt))
	if p.probe || s == released {
		// A probe leases the oldest message, so the store's last answer about the lane may be
		// outdated.
		l.more = true
	}
	e.wakeNextLane(ep, now)
	for _, t := range l.targets {
		if t.liveEndpoint != ep {
			e.wakeNextLane(t.liveEndpoint, now) // This endpoint may be next, because the other one fails.
		}
	}
	e.unblock()
	if l.draining && l.leased == 0 {
		e.wakeMaintenance()
	}
}

// record keeps and publishes the attempt.
func (e *Engine) record(p *post, r *ended) {
	ep := p.target.liveEndpoint
	e.countAttempt(ep, r)
	a := adminapi.Attempt{
		Time: r.at, Duration: r.duration, Timing: adminapi.Timing(r.Timing),
		Source: p.message.Lane.Source, Destination: ep.destination.key, Endpoint: ep.name,
		Seq: p.message.Seq, MessageID: event.ID(p.message.ID), Number: p.message.Attempt + 1,
		StatusCode: r.StatusCode, Reason: string(r.Reason), Message: r.Message, RetryAfter: r.RetryAfter, RemoteAddr: r.RemoteAddr, CertificateExpires: r.CertificateExpires, Probe: p.probe,
	}
	if r.Reason != "" {
		a.Response = strings.ToValidUTF8(string(r.Response[:min(len(r.Response), maxKeptResponse)]), "\uFFFD")
	}
	ep.attempts.add(e.o.Attempts, &a)
	if len(e.tails) > 0 {
		e.publish(&a, p)
	}
}

const stateLogEvery = 10 * time.Second

// logState logs an endpoint's new state. A flapping endpoint changes it all the time, so changes
// other than an opened or closed circuit are logged by the maintenance, at least stateLogEvery
// after the last log line.
func (e *Engine) logState(ep *liveEndpoint, now time.Time) {
	ep.suppressed++
	if ep.machine.Open() || ep.loggedState == endpoint.CircuitOpen || ep.loggedState == endpoint.Gone {
		ep.loggedAt = time.Time{}
	}
	if e.logSuppressed(ep, now) > 0 && ep.suppressed == 1 {
		e.wakeMaintenance()
	}
}

// logSuppressed logs suppressed state changes, or returns how long to wait.
func (e *Engine) logSuppressed(ep *liveEndpoint, now time.Time) (wait time.Duration) {
	if ep.suppressed == 0 {
		return 0
	}
	if wait := ep.loggedAt.Add(stateLogEvery).Sub(now); wait > 0 {
		return wait
	}
	suppressed := ep.suppressed - 1
	ep.suppressed = 0
	status := ep.machine.Status()
	if status.State == ep.loggedState {
		return 0
	}
	ep.loggedState, ep.loggedAt = status.State, now
	level, args := slog.LevelInfo, append(ep.logArgs(), "state", string(ep.loggedState))
	if status.Failures > 0 {
		level, args = slog.LevelWarn, append(args, failureArgs(status.LastFailure)...)
	}
	e.log.Log(context.Background(), level, "endpoint state changed", append(args, "suppressed", suppressed)...)
	return 0
}

func (ep *liveEndpoint) logArgs() []any {
	return []any{"namespace", ep.destination.namespace, "destination", ep.destination.name, "endpoint", ep.name}
}

// failureArgs has no status code if there was no response.
func failureArgs(f endpoint.Failure) []any {
	args := []any{"reason", f.Reason}
	if f.StatusCode != 0 {
		args = append(args, "statusCode", f.StatusCode)
	}
	return append(args, "message", f.Message)
}
