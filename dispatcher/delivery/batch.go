package delivery

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
	"github.com/posthorn/posthorn/dispatcher/delivery/shape"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// A batch is the messages of one lane that are sent as one request. Its outcome is one write of the store. Messages of a
// retried batch have one due time, by which they are found again, so that its composition, and with it the Idempotency-Key,
// is the same in each attempt.

// part are leased messages that the next request of their lane sends.
type part struct {
	messages []queue.Delivery
	// split is true for a half of a batch that the endpoint rejected.
	split bool
}

// alone reports whether a message is in no batch with others.
func alone(d *queue.Delivery) bool { return d.Type == string(event.Delete) }

// nextBatch chooses the next request of a lane with batches. It returns false if none is ready: the lane leases, or waits for
// further messages. The lock is held, but released while the store is called.
func (e *Engine) nextBatch(l *lane, p *post, now time.Time) bool {
	if n := len(l.parts); n > 0 {
		next := l.parts[n-1]
		l.parts = l.parts[:n-1]
		e.scheduler.addBuffered(l, -bodies(next.messages))
		e.startBatch(l, next, p, now)
		return true
	}
	if l.leasing {
		return false // The end of the lease queues the lane again.
	}
	first, full := l.nextGroup()
	ripe := first >= 0 && (full || !e.scheduler.mayHold(l) || !now.Before(l.ripeAt(first, now)))
	switch {
	case l.more && !full && e.scheduler.mayLease(l) && (!ripe || !e.scheduler.buffersFull()):
		e.lease(l)
	case ripe:
		return e.startGroup(l, first, p, now)
	case l.more:
		e.scheduler.awaitLease(l)
	case first >= 0:
		e.hold(l, l.ripeAt(first, now), now)
		e.yield(l, now)
	default:
		e.yield(l, now)
	}
	return false
}

// nextGroup returns the index of the first buffered message of the next batch, or -1. It is full if the batch waits for no
// further messages.
func (l *lane) nextGroup() (first int, full bool) {
	first = -1
	n, size := 0, 0
	for i := l.head; i < len(l.buffer); i++ {
		d := &l.buffer[i]
		if alone(d) || !d.Due.IsZero() {
			return i, true
		}
		if first < 0 {
			first = i
		}
		n++
		size += len(d.Body)
		if n >= l.set.batch.MaxMessages || size >= int(l.set.batch.MaxBytes) {
			return first, true
		}
	}
	return first, false
}

// ripeAt is the time at which the batch of a buffered message waits no longer: now if the clock was set back since its acceptance.
func (l *lane) ripeAt(first int, now time.Time) time.Time {
	accepted := l.buffer[first].AcceptedAt
	if accepted.After(now.Add(time.Second)) {
		return now
	}
	return accepted.Add(l.set.batch.MaxDelay())
}

// hold makes a lane wait for further messages until a time.
func (e *Engine) hold(l *lane, until, now time.Time) {
	l.held = true
	if l.holding != nil {
		l.holding.Reset(until.Sub(now))
		return
	}
	l.holding = time.AfterFunc(until.Sub(now), func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		l.held = false
		if e.scheduler.enqueue(l) {
			e.wakeWorker()
		}
	})
}

// takeGroup removes the batch of a buffered message from the buffer: as many messages as fit, of the same due time.
func (s *scheduler) takeGroup(l *lane, first int) (batch []queue.Delivery, size int) {
	head, rest, full := l.buffer[first], l.buffer[:l.head], alone(&l.buffer[first])
	for i := l.head; i < len(l.buffer); i++ {
		d := l.buffer[i]
		take := i == first
		if i > first && !full && !alone(&d) && d.Due.Equal(head.Due) {
			take = l.fits(len(batch), size, len(d.Body))
			full = !take
		}
		if take {
			batch = append(batch, d)
			size += len(d.Body)
		} else {
			rest = append(rest, d)
		}
	}
	clear(l.buffer[len(rest):])
	l.buffer = rest
	if l.buffered() == 0 {
		l.emptyBuffer()
	}
	s.addBuffered(l, -size)
	return batch, size
}

// fits reports whether a batch of n messages of a size has place for a further one.
func (l *lane) fits(n, size, more int) bool {
	return n < l.set.batch.MaxMessages && size+more <= int(l.set.batch.MaxBytes)
}

// startGroup starts the batch of a buffered message. It returns false if the messages cannot be sent now.
func (e *Engine) startGroup(l *lane, first int, p *post, now time.Time) bool {
	set := l.set
	batch, size := e.scheduler.takeGroup(l, first)
	if due := batch[0].Due; !due.IsZero() && !alone(&batch[0]) && l.fits(len(batch), size, 1) {
		batch = append(batch, e.leaseDue(l, due, set.batch.MaxMessages-len(batch), int(set.batch.MaxBytes)-size)...)
	}
	// The lock was released, and is for each unsendable message.
	batch = slices.DeleteFunc(batch, func(d queue.Delivery) bool { return l.set == set && e.unsendable(l, &d, now) })
	next := part{messages: batch}
	closed, _ := l.sendable(now)
	switch {
	case len(batch) == 0:
	case l.set == set && !l.parked() && !e.lifetime.stopped && closed:
		e.startBatch(l, next, p, now)
		return true
	default:
		e.scheduler.keepApart(l, next)
		e.releaseUnsendable(l, set)
	}
	if !e.scheduler.enqueue(l) {
		e.yield(l, now)
	}
	return false
}

// leaseDue leases the rest of a batch, whose messages are due at the same time.
func (e *Engine) leaseDue(l *lane, due time.Time, n, size int) []queue.Delivery {
	e.scheduler.leasingBytes += size
	e.scheduler.beginLease(l)
	e.mu.Unlock()
	got, err := e.o.Store.LeaseDue(l.id, due, n, size, nil)
	e.mu.Lock()
	e.scheduler.leasingBytes -= size
	e.scheduler.endLease(l)
	e.scheduler.addLeased(l, len(got), bodies(got))
	if err != nil {
		e.breakLane(l, err)
	}
	return slices.DeleteFunc(got, func(d queue.Delivery) bool {
		if alone(&d) { // It is due at the same time by chance.
			e.scheduler.keepApart(l, part{messages: []queue.Delivery{d}})
		}
		return alone(&d)
	})
}

// startBatch makes the request for messages. The lock is held.
func (e *Engine) startBatch(l *lane, next part, p *post, now time.Time) {
	d := next.messages[0]
	e.start(l, d, l.choose(d.Attempt, now, func(t target) bool { return t.takes(now) }), p, now)
	p.split = next.split
	if len(next.messages) > 1 {
		p.batch, p.copied = next.messages, 2*bodies(next.messages) // Until its body is made, so that fewer batches start at once.
		e.scheduler.addLeased(l, 0, p.copied)
	}
}

// keepApart makes leased messages the next requests of their lane, the last part first.
func (s *scheduler) keepApart(l *lane, parts ...part) {
	for _, next := range parts {
		s.addBuffered(l, bodies(next.messages))
	}
	l.parts = append(l.parts, parts...)
}

// joinParts puts the parts of a lane into its buffer.
func (l *lane) joinParts() {
	for _, next := range l.parts {
		l.buffer = append(l.buffer, next.messages...)
	}
	l.parts = nil
}

// makeBatch makes the request for a batch. It leaves out the messages that the destination omits, and keeps those apart for
// which no request can be made, and those after MaxBytes.
func (p *post) makeBatch() (r shape.Request) {
	var body []byte
	kept := p.batch[:0]
	for i := range p.batch {
		d := p.batch[i]
		one, matched, err := p.set.element(&d)
		p.matched |= matched
		if err == nil && !one.Omitted && len(kept) > 0 && len(body)+len(one.Body) >= int(p.set.batch.MaxBytes) {
			p.apart = append(p.apart, part{messages: slices.Clone(p.batch[i:])})
			break
		}
		switch {
		case err != nil:
			p.apart = append(p.apart, part{messages: []queue.Delivery{d}})
		case one.Omitted:
			d.Omitted = true
			p.omitted = append(p.omitted, d)
		default:
			body = p.set.appendElement(body, one.Body)
			kept = append(kept, d)
			r.Line = one.Line
		}
	}
	p.batch = kept
	if r.Omitted = len(kept) == 0; !r.Omitted {
		p.message = kept[0]
		r = p.set.endBatch(r, body)
	}
	return r
}

// appendElement appends a message to the body of a batch.
func (s *destinationConfig) appendElement(body, element []byte) []byte {
	if s.batch.Format == liveconfig.BatchNDJSON {
		return append(append(body, element...), '\n')
	}
	separator := byte('[')
	if len(body) > 0 {
		separator = ','
	}
	return append(append(body, separator), element...)
}

// endBatch completes the request for a batch with a body of elements.
func (s *destinationConfig) endBatch(r shape.Request, body []byte) shape.Request {
	switch {
	case s.batch.Format == liveconfig.BatchNDJSON:
		r.ContentType = "application/x-ndjson"
	case r.ContentType != "": // Only CloudEvents have another type.
		r.ContentType = "application/cloudevents-batch+json; charset=utf-8"
		fallthrough
	default:
		body = append(body, ']')
	}
	r.Body = body
	return r
}

// key returns the Idempotency-Key: it is equal in each attempt, for a batch as long as its composition is.
func (p *post) key() string {
	if p.set.batch == nil {
		return event.ID(p.message.ID).Key()
	}
	all := p.batch
	if all == nil {
		all = []queue.Delivery{p.message}
	}
	ids := sha256.New()
	for i := range all {
		ids.Write(binary.AppendUvarint(nil, uint64(len(all[i].ID))))
		ids.Write([]byte(all[i].ID))
	}
	return "batch_" + hex.EncodeToString(ids.Sum(nil)[:16])
}

// judgeItems reads the response to a batch with an outcome for each message, and sets the failed ones.
func (p *post) judgeItems(r *egress.Result, now time.Time) {
	if p.set.batch == nil || !p.set.batch.PerItem || r.Accepted == nil || r.Reason != "" {
		return
	}
	n := max(1, len(p.batch))
	failed, why := failedItems(r.Accepted, n)
	switch {
	case why != "":
		p.target.to.Reject(r, egress.InvalidResponse, "with response: PerItem "+why, now)
	case len(failed) == n: // No message was accepted, so the endpoint fails.
		p.target.to.Reject(r, reasonOf(failed[0]), fmt.Sprintf("its list failed has each message, the first one with status %d", failed[0]), now)
		r.StatusCode = failed[0]
		fallthrough
	default:
		p.failed = failed
	}
}

// failedItems returns the statuses of failed messages by their indexes in a batch of n, or what is wrong with the response.
func failedItems(a *egress.Accepted, n int) (failed map[int]int, why string) {
	var response *struct {
		Failed []struct {
			Index  *int
			Status int
		}
	}
	if a.Truncated {
		return nil, "the body must have at most 64 KiB"
	}
	if err := json.Unmarshal(a.Body, &response); err != nil || response == nil {
		return nil, `the body must be JSON like {"failed": [{"index": 0, "status": 422}]}`
	}
	failed = map[int]int{}
	for _, f := range response.Failed {
		if f.Index == nil || *f.Index < 0 || *f.Index >= n || failed[*f.Index] != 0 {
			return nil, fmt.Sprintf("each index in failed must be that of one of %d messages, once", n)
		}
		if f.Status < 300 || f.Status > 599 {
			return nil, "each status in failed must be from 300 to 599"
		}
		failed[*f.Index] = f.Status
	}
	return failed, ""
}

// reasonOf is the reason of a failure with a status.
func reasonOf(status int) egress.Reason {
	switch {
	case status == 408 || status == 429:
		return egress.Throttled
	case status < 400:
		return egress.Redirected
	case status < 500:
		return egress.Rejected
	}
	return egress.ServerError
}

// settled is the outcome of a message.
type settled struct {
	queue.Delivery
	outcome outcome
}

// settleBatch stores the outcomes of the messages of a batch, as one write, and logs a failed attempt. The halves of a batch
// that the endpoint rejects are sent next.
func (s *settler) settleBatch(p *post, r *ended, o retry.Outcome) outcome {
	s.logFailure(p, r)
	var all []queue.Settlement
	var ends []outcome
	add := func(one queue.Settlement, end outcome) { all, ends = append(all, one), append(ends, end) }
	for _, d := range p.omitted {
		add(queue.Settlement{Delivery: d, Outcome: queue.Acked}, omitted)
	}
	roll, n := rand.Float64(), len(p.batch)
	var next retry.Decision // of the first message that is retried: all have its time.
	switch {
	case r.cut:
		for _, next := range append(p.apart, part{messages: p.batch}) {
			for _, d := range next.messages {
				add(queue.Settlement{Delivery: d, Outcome: queue.Released}, released)
			}
		}
		p.apart = nil
	case n > 1 && p.failed == nil && p.set.policy.Permanent(o) != "":
		ends = append(ends, divided)
		p.apart = append(p.apart, part{slices.Clone(p.batch[n/2:]), true}, part{slices.Clone(p.batch[:n/2]), true})
	default:
		for i := range p.batch {
			d := &p.batch[i]
			one, o := p.item(i, r, o)
			decision, f, end := s.decide(p, d, one, o, func() float64 { return roll })
			switch decision.Action {
			case retry.Ack:
				add(queue.Settlement{Delivery: *d, Outcome: queue.Acked}, end)
			case retry.Retry:
				if next.At.IsZero() {
					next = decision
				}
				f.Wait = next.Wait
				add(queue.Settlement{Delivery: *d, Outcome: queue.Retried, At: next.At, Failure: f}, end)
			case retry.Bury:
				add(queue.Settlement{Delivery: *d, Outcome: queue.Buried, Failure: f}, end)
			}
		}
	}
	if len(all) == 0 {
		return append(ends, omitted)[0]
	}
	if err := s.store.SettleAll(p.message.Lane, all); err != nil {
		s.log.With(p.message.Lane.LogArgs()...).Error("writing the outcomes of a batch failed; after a restart its messages may be sent again", "error", err)
	}
	for i := range all {
		switch m := &all[i]; {
		case m.Done:
		case m.Outcome == queue.Acked && ends[i] == delivered:
			ends[i] = deliveredAgain
		case m.Outcome == queue.Buried:
			ends[i] = handedOver
		}
		p.settled = append(p.settled, settled{all[i].Delivery, ends[i]})
	}
	for _, worst := range []outcome{retried, released, divided} {
		if slices.Contains(ends, worst) {
			return worst
		}
	}
	return append(ends, omitted)[0]
}

// item returns the result and the outcome of a message of a batch with the result r and the outcome o.
func (p *post) item(i int, r *ended, o retry.Outcome) (*ended, retry.Outcome) {
	status, failed := p.failed[i]
	switch {
	case failed:
		one := *r
		one.StatusCode, one.Reason = status, reasonOf(status)
		one.Message = fmt.Sprintf("the response has status %d for message %d of %d", status, i, len(p.batch))
		r, o = &one, retry.Outcome{StatusCode: status, Reason: one.Reason}
		if p.others || endpoint.AboutURL(status) {
			o.StatusCode = 0
		}
	case p.failed != nil:
		o = retry.Outcome{StatusCode: 200}
	}
	return r, o
}
