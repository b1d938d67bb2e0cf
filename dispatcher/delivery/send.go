package delivery

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/posthorn/posthorn/contract/liveconfig/expression"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
	"github.com/posthorn/posthorn/dispatcher/delivery/shape"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// headerIdempotencyKey carries the key of the messageId (event.ID.Key), which is equal in every attempt.
const headerIdempotencyKey = "Idempotency-Key"

// post is one request: a message, or a batch, for one endpoint.
type post struct {
	lane   *lane
	set    *destinationConfig
	target target
	// message is the first one of a batch.
	message queue.Delivery
	// batch are the messages of a request for several ones, in the order of the body; nil otherwise. split is true for a part of
	// a rejected batch.
	batch []queue.Delivery
	split bool
	// omitted are messages of the batch that need no request, apart those that the next requests send, and failed the
	// statuses of messages by their index, if the response has them.
	omitted []queue.Delivery
	apart   []part
	failed  map[int]int
	// settled are the outcomes of a batch.
	settled []settled
	// body has the bytes to send, copied the bytes of it that are not in message, and matched the paths of redaction that match it.
	body    []byte
	copied  int
	matched uint64
	// flight ends the request early.
	flight context.Context
	// probe is true for an open circuit's probe; failing is true if the lane was failing, slow if the endpoint was.
	probe, failing, slow bool
	// others is true if the lane may also send the message to other endpoints.
	others bool
	// suspensions are those of the destination at the end of the request.
	suspensions suspensions
	// waitsRequested is the endpoint's count at the start of the request, or at its response if that requested a wait.
	waitsRequested int
}

// ended is a finished request.
type ended struct {
	egress.Result
	at       time.Time
	duration time.Duration
	// cut is true if the engine cancelled the request, in order to stop or to pause.
	cut bool
	// omitted is true if the destination's expression omitted the message.
	omitted bool
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
	case r.omitted:
		return endpoint.Omitted
	case r.Reason == egress.TransformFailed:
		return endpoint.Unmade
	case !o.Failed():
		return endpoint.Succeeded
	case policy.Permanent(o) != "":
		return endpoint.Rejected
	case r.Reason == egress.Throttled, r.Reason == egress.TimedOut && r.Sent:
		return endpoint.Overloaded
	}
	return endpoint.Failed
}

// start makes the request for a message, and offers the endpoint's remaining capacity to the next lane. The lock is held.
func (e *Engine) start(l *lane, d queue.Delivery, to target, p *post, now time.Time) {
	*p = post{lane: l, set: l.set, target: to, message: d, flight: e.lifetime.flight, probe: to.machine.Open(), others: len(l.targets) > 1}
	e.scheduler.account(p, now)
	e.wakeNextLane(to.liveEndpoint, now)
}

// send sends the worker's request and settles its message. The lock is not held.
func (e *Engine) send(w *worker) {
	p := &w.post
	request, failed := p.makeRequest()
	started := e.o.Now()
	if len(p.body) > 0 && &p.body[0] != &p.message.Body[0] {
		copied := len(p.body)
		if p.batch != nil {
			copied *= 2 // The request is larger than memory.RequestBytes.
		}
		e.mu.Lock()
		e.scheduler.addLeased(p.lane, 0, copied-p.copied)
		p.copied = copied
		e.mu.Unlock()
	}
	w.headers = p.headers(w.headers[:0], &request, started)
	var span trace.Span
	if e.o.Tracer != nil {
		span = startTrace(e.lifetime.hard, e.o.Tracer, w, started)
	}
	r := ended{Result: egress.Result{Reason: egress.ConnectionFailed}}
	switch {
	case failed != nil:
		r.Result = unmade(failed)
	case request.Omitted:
		r.Result, r.omitted = egress.Result{}, true
	case e.maySend():
		// The context is only cancelled when the engine stops or pauses: a timer per request would
		// cost more than the rest of send.
		ctx := egress.WithDeadline(p.flight, started.Add(p.set.policy.Timeout))
		r.Result = e.o.Client.Post(ctx, p.target.to.With(request.Line), w.headers, p.body)
	}
	r.at = e.o.Now()
	r.duration = r.at.Sub(started)
	r.cut = !r.omitted && r.outcome().Failed() && p.flight.Err() != nil
	p.set.judge(p.target, &r.Result, r.at)
	p.judgeItems(&r.Result, r.at)
	r.Response = p.set.signer.Redact(r.Response, w.headers)

	// The endpoint observes the result before the store does: the store needs longer for a failure than for a success,
	// so the failures of concurrent requests would follow each other and open the circuit.
	e.mu.Lock()
	ep, o := p.target.liveEndpoint, p.messageOutcome(&r)
	back, changed := e.observe(p, &r, started)
	p.suspensions = p.target.destination.suspensions
	e.mu.Unlock()
	settle := e.settler.settle
	if p.batch != nil {
		settle = e.settler.settleBatch
	}
	s := settle(p, &r, o)
	if span != nil {
		endTrace(span, p, &r, s)
	}
	e.mu.Lock()
	p.target.destination.changed.Numbers()
	back = append(back, e.finish(p, &r, s)...)
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

// unmade is the result of an attempt whose request cannot be made.
func unmade(err error) egress.Result {
	r := egress.Result{Reason: egress.TransformFailed, Message: err.Error()}
	if _, ok := errors.AsType[*expression.Failure](err); !ok {
		r.Reason = egress.ConnectionFailed // Cannot happen: accepted messages are JSON.
	}
	return r
}

// makeRequest makes the request for the message.
func (p *post) makeRequest() (request shape.Request, err error) {
	if p.set.shape != nil {
		p.lane.owner.evaluating.Lock()
		defer p.lane.owner.evaluating.Unlock()
	}
	if p.batch != nil {
		request = p.makeBatch()
	} else {
		request, p.matched, err = p.set.request(&p.message)
	}
	p.body = request.Body
	return request, err
}

// headers appends the headers of the attempt.
func (p *post) headers(dst []egress.Header, request *shape.Request, now time.Time) []egress.Header {
	key := p.key()
	dst = append(append(dst, egress.Header{Name: headerIdempotencyKey, Value: key}), request.Headers...)
	return p.set.signer.Headers(dst, key, now, p.body)
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

// messageOutcome returns the outcome of an attempt for its message. It differs from that for the endpoint: a permanent
// answer is final only if no other endpoint may get the message and the circuit is closed, and a message that other
// endpoints may get waits only as long as all of them require. The lock is held.
func (p *post) messageOutcome(r *ended) retry.Outcome {
	o := r.outcome()
	switch {
	case o.Reason == egress.TransformFailed: // The requests of the other endpoints cannot be made, either.
		if p.target.machine.HoldsUnmade() {
			o.Reason = egress.ConnectionFailed
		}
	case p.set.policy.Permanent(o) != "" && (p.others && len(p.batch) < 2 || p.target.machine.Holds(o.StatusCode) ||
		p.set.batch != nil && endpoint.AboutURL(o.StatusCode)): // All messages of a batch would become dead letters.
		o.StatusCode = 0
	}
	for _, t := range p.lane.targets {
		if p.others && t.liveEndpoint != p.target.liveEndpoint {
			o.RetryAfter = min(o.RetryAfter, t.machine.Wait(r.at))
		}
	}
	return o
}

// observe updates the endpoint with the result of a request. It returns messages to release: leased
// messages that cannot be sent because the circuit opened. The lock is held.
func (e *Engine) observe(p *post, r *ended, started time.Time) (back []queue.Delivery, changed endpoint.Change) {
	ep := p.target.liveEndpoint
	a := endpoint.Attempt{
		Started: started, Ended: r.at, Result: r.result(&p.set.policy), RetryAfter: r.RetryAfter,
		InFlight: ep.inFlight, Probe: p.probe, FirstByte: r.Timing.FirstByte, Jitter: rand.Float64(), Singly: len(p.failed),
	}
	if p.split {
		a.Singly = max(a.Singly, 1)
	}
	switch {
	case p.batch == nil:
	case len(p.batch)+len(p.omitted) == 0, p.split && a.Result == endpoint.Rejected:
		a.Result = endpoint.Canceled // Nothing was sent, or the endpoint has rejected the whole batch before.
	}
	if a.Result != endpoint.Succeeded {
		a.Failure = r.failure()
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
				back = append(back, e.scheduler.takeBuffer(other)...)
			}
		}
	}
	if !r.cut && !r.omitted {
		e.recorder.record(p, r)
	}
	if changed.State {
		ep.destination.changed.Transition()
		if ep.logState(e.o.Logger, r.at) {
			e.early.set()
		}
	}
	return back, changed
}

// finish accounts for a request's end and offers the free capacity to other lanes. It returns messages to release. The lock is held.
func (e *Engine) finish(p *post, r *ended, s outcome) (back []queue.Delivery) {
	l, ep, now := p.lane, p.target.liveEndpoint, r.at
	e.scheduler.addInFlight(l.owner, -1, p.failing)
	if p.slow {
		e.scheduler.slow--
	}
	l.inFlight--
	ep.inFlight--
	e.scheduler.addLeased(l, 0, -p.copied)
	n := len(p.settled)
	if p.batch == nil { // A list of one would be an allocation for each message.
		n = 1
		e.finishMessage(l, &p.message, s, now)
	}
	for i := range p.settled {
		e.finishMessage(l, &p.settled[i].Delivery, p.settled[i].outcome, now)
	}
	if p.set.redaction.redactor != nil && p.set == l.destination.set {
		l.destination.matches.add(n, p.matched)
	}
	if e.scheduler.keepApart(l, p.apart...); len(p.apart) > 0 && (l.parked() || e.lifetime.stopped || !l.anyClosed()) {
		back = e.scheduler.takeBuffer(l)
	}
	if p.probe || s == released {
		// A probe leases the oldest message, so the store's last answer about the lane may be outdated.
		l.more = true
	}
	e.wakeNextLane(ep, now)
	for _, t := range l.targets {
		if t.liveEndpoint != ep {
			e.wakeNextLane(t.liveEndpoint, now) // This endpoint may be next, because the other one fails.
		}
	}
	e.scheduler.unblock()
	if l.draining && l.leased == 0 {
		e.early.set()
	}
	return back
}

// finishMessage accounts for a message whose request has ended. The lock is held.
func (e *Engine) finishMessage(l *lane, d *queue.Delivery, o outcome, now time.Time) {
	e.scheduler.addLeased(l, -1, -len(d.Body))
	e.recorder.countOutcome(l.destination, o, now.Sub(d.AcceptedAt))
	if d.LongNumbers {
		l.destination.metrics.longNumbers++
	}
}
