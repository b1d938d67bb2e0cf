package analytics

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
)

// queue holds the undelivered calls: one open batch for new calls, closed batches that are ready to
// be sent, batches in flight, and batches that wait for a retry. No goroutine runs while none is in
// flight.
type queue struct {
	client   *Client
	size     int // number of calls that starts a flush
	maxBatch int // maximum calls of a batch

	queued atomic.Int64 // calls in the queue; changed under mu
	closed atomic.Bool  // changed under mu

	mu         sync.Mutex
	bytes      int
	open       *batch // the batch for new calls; nil if there are none
	due        bool   // the open batch is to be sent as soon as possible
	flushTimer *time.Timer
	flushed    time.Time           // when the last batch was closed, or the queue was made
	ready      []*batch            // first in, first out
	unresolved map[*batch]struct{} // all batches
	inFlight   int
	cancelled  bool
	room       chan struct{} // closed when space becomes free; nil if no call waits for it
	ended      chan struct{} // closed with the queue
}

// batch is a set of calls in one request.
type batch struct {
	body      []byte // the request's body up to the end of the last call
	items     []item
	attempts  int
	first     time.Time   // time of the first attempt
	timer     *time.Timer // for the next attempt; nil unless the batch waits for it
	scheduled bool        // the server has set the time of the next attempt
	last      error       // of the last attempt, after which the batch waits
	waiters   []*waiter
}

const (
	// growth bounds the size of a batch, relative to the size that starts a flush, while the server
	// is busy. Ten times is enough to spread the cost of a request; a batch that is much larger
	// than others waits longest for a server that limits the rate of calls.
	growth    = 10
	batchHead = `{"batch":[`
	// batchTail bounds the bytes added to a body beside the context:
	// ],"context":,"messageId":"…","sentAt":"…"}
	batchTail = 128
)

var batches = sync.Pool{New: func() any { return new(batch) }}

func (q *queue) init(c *Client) {
	q.client = c
	// The queue limit also limits the calls that can wait for a flush.
	q.size = min(c.Size, c.maxCalls, event.MaxBatchCalls)
	q.maxBatch = min(q.size*growth, event.MaxBatchCalls)
	if c.Size == 1 {
		q.maxBatch = 1
	}
	q.unresolved = make(map[*batch]struct{})
	q.ended = make(chan struct{})
	q.flushTimer = time.AfterFunc(time.Hour, q.flushOpen)
	q.flushTimer.Stop()
	q.flushed = time.Now()
}

// refuses reports without the lock whether add would fail.
func (q *queue) refuses() error {
	if q.closed.Load() {
		return ErrClosed
	}
	if !q.client.blocking && q.queued.Load() >= int64(q.client.maxCalls) {
		return ErrQueueFull
	}
	return nil
}

// add copies a serialized call into the open batch.
func (q *queue) add(ctx context.Context, call []byte, it item) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.full(len(call)) && !q.closed.Load() {
		q.due = q.open != nil // a full queue must be in flight
		q.dispatch()
		if !q.client.blocking {
			return ErrQueueFull
		}
		if err := q.awaitRoom(ctx); err != nil {
			return err
		}
	}
	if q.closed.Load() {
		return ErrClosed
	}
	if b := q.open; b != nil && !q.fits(b, call) {
		q.ready = append(q.ready, q.takeOpen())
	}
	if q.open == nil {
		q.open = batches.Get().(*batch)
		q.open.body = append(q.open.body, batchHead...)
		q.unresolved[q.open] = struct{}{}
		if q.size > 1 {
			q.flushTimer.Reset(time.Until(q.flushed.Add(q.client.Interval)))
		}
	}
	b := q.open
	if len(b.items) > 0 {
		b.body = append(b.body, ',')
	}
	it.start, it.end = uint32(len(b.body)), uint32(len(b.body)+len(call))
	b.body = append(b.body, call...)
	b.items = append(b.items, it)
	q.queued.Add(1)
	q.bytes += len(call)
	if len(b.items) >= q.size {
		q.due = true
	}
	q.dispatch()
	return nil
}

// fits reports whether a batch may have one more call. The server merges the context into each
// call, and rejects a batch whose messages become too large.
func (q *queue) fits(b *batch, call []byte) bool {
	calls, body := len(b.items)+1, len(b.body)+1+len(call)+len(q.client.context)
	messages := 2*len(b.body) + calls*(len(q.client.context)+event.MessageOverhead) // an alias has its ids twice
	return calls <= q.maxBatch && body+batchTail <= event.MaxBodyBytes && messages <= event.MaxMergedBytes(body)
}

func (q *queue) full(bytes int) bool {
	return q.queued.Load() >= int64(q.client.maxCalls) || q.bytes+bytes > q.client.maxBytes
}

// awaitRoom releases the lock until some calls have left the queue.
func (q *queue) awaitRoom(ctx context.Context) error {
	if q.room == nil {
		q.room = make(chan struct{})
	}
	room := q.room
	q.mu.Unlock()
	defer q.mu.Lock()
	select {
	case <-room:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-q.ended:
		return ErrClosed
	}
}

// takeOpen closes the open batch. Locked.
func (q *queue) takeOpen() *batch {
	b := q.open
	q.open, q.due, q.flushed = nil, false, time.Now()
	return b
}

// flushOpen makes the open batch due.
func (q *queue) flushOpen() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.open != nil {
		q.due = true
		q.dispatch()
	}
}

// dispatch starts requests up to the limit. Locked.
func (q *queue) dispatch() {
	for b := q.next(); b != nil; b = q.next() {
		go q.work(b)
	}
}

// next returns the next batch to send; nil if there is none, or the limit of requests is reached.
// Locked.
func (q *queue) next() *batch {
	if q.inFlight >= q.client.maxInFlight || q.cancelled {
		return nil
	}
	var b *batch
	switch {
	case len(q.ready) > 0:
		b, q.ready[0] = q.ready[0], nil
		q.ready = q.ready[1:]
	case q.due && q.open != nil:
		b = q.takeOpen()
	default:
		return nil
	}
	q.inFlight++
	b.body = slices.Grow(b.body, len(q.client.context)+batchTail) // send appends in place
	return b
}

// work sends a batch, and then further batches while there are any.
func (q *queue) work(b *batch) {
	for b != nil {
		if b.attempts == 0 {
			b.first = time.Now()
		}
		out := q.client.send(b)
		b.attempts++
		q.client.health.attempted(q.client.log, out)
		if out.tooLarge && q.split(b) {
			continue
		}
		if wait, again := q.client.retryIn(b, out); again {
			if next, ok := q.postpone(b, wait, out); ok {
				b = next
				continue
			}
		}
		b = q.resolve(b, out)
	}
}

// split moves the second half of a batch that is too large for the server, or for a proxy in front
// of it, to a batch of its own. It fails for a single call.
func (q *queue) split(b *batch) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if _, ok := q.unresolved[b]; !ok || q.cancelled || len(b.items) < 2 {
		return false
	}
	half := len(b.items) / 2
	from := b.items[half].start
	second := batches.Get().(*batch)
	second.body = append(append(second.body, batchHead...), b.body[from:]...)
	for _, it := range b.items[half:] {
		it.start, it.end = it.start-from+uint32(len(batchHead)), it.end-from+uint32(len(batchHead))
		second.items = append(second.items, it)
	}
	b.body, b.items = b.body[:b.items[half-1].end], b.items[:half]
	second.attempts, second.first = b.attempts, b.first
	second.waiters = append(second.waiters, b.waiters...)
	for _, w := range second.waiters {
		w.left++
	}
	q.unresolved[second] = struct{}{}
	q.ready = append(q.ready, second)
	q.dispatch()
	return true
}

// postpone schedules a retry of a batch, and returns the next batch to send now. It fails after the
// retry period.
func (q *queue) postpone(b *batch, wait time.Duration, out outcome) (*batch, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.cancelled {
		return nil, false
	}
	q.inFlight--
	b.scheduled, b.last = out.after > 0, out.err
	var timer *time.Timer
	timer = time.AfterFunc(wait, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if b.timer == timer { // otherwise a flush was faster
			q.retry(b)
			q.dispatch()
		}
	})
	b.timer = timer
	return q.next(), true
}

// retry appends a waiting batch to the ready ones. Locked.
func (q *queue) retry(b *batch) {
	b.timer.Stop()
	b.timer = nil
	q.ready = append(q.ready, b)
}

// resolve ends a batch. It returns the next one to send.
func (q *queue) resolve(b *batch, out outcome) *batch {
	q.report(b, out)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.inFlight--
	q.release(b, out)
	return q.next()
}

// report sends the outcome of a batch to the log and to the caller's function.
func (q *queue) report(b *batch, out outcome) {
	c := q.client
	failed := 0
	for i := range b.items {
		err := out.of(i)
		if err != nil {
			failed++
		}
		if c.onResult != nil {
			c.onResult(Result{
				Type: b.items[i].kind.String(), MessageID: b.messageID(i), Message: b.message(i),
				Attempts: b.attempts, Err: err,
			})
		}
	}
	if failed == 0 {
		c.log.Log(c.life, c.diagnosis, "batch delivered", "calls", len(b.items), "attempts", b.attempts)
		return
	}
	c.log.Log(c.life, c.diagnosis, "calls not delivered", "calls", failed, "of", len(b.items), "attempts", b.attempts, "error", out.first())
	c.health.lost(c.log, failed, out.first())
}

// release removes a batch from the queue. Locked.
func (q *queue) release(b *batch, out outcome) {
	if _, ok := q.unresolved[b]; !ok {
		return // Close has abandoned it
	}
	delete(q.unresolved, b)
	q.queued.Add(-int64(len(b.items)))
	for _, it := range b.items {
		q.bytes -= int(it.end - it.start)
	}
	if q.room != nil {
		close(q.room)
		q.room = nil
	}
	b.endWait(out)
	*b = batch{body: b.body[:0], items: b.items[:0], waiters: b.waiters[:0]}
	batches.Put(b)
}

// flush starts the delivery of all queued calls, and returns a waiter for it; with end, it also
// closes the queue.
func (q *queue) flush(end bool) *waiter {
	q.mu.Lock()
	defer q.mu.Unlock()
	if end && !q.closed.Load() {
		q.closed.Store(true)
		close(q.ended)
		q.flushTimer.Stop()
	}
	w := &waiter{left: len(q.unresolved), done: make(chan struct{})}
	if w.left == 0 {
		close(w.done)
	}
	for b := range q.unresolved {
		b.waiters = append(b.waiters, w)
		if b.timer != nil && !b.scheduled {
			q.retry(b)
		}
	}
	q.due = q.open != nil
	q.dispatch()
	return w
}

// leave ends a waiter at its deadline and returns the calls that are still queued.
func (q *queue) leave(w *waiter, cause error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for b := range q.unresolved {
		if i := slices.Index(b.waiters, w); i >= 0 {
			b.waiters = slices.Delete(b.waiters, i, i+1)
			w.pending += len(b.items)
		}
	}
	return w.result(cause)
}

// cancel cancels the requests in flight, which end their batches, and ends all other batches.
func (q *queue) cancel(cause error) {
	q.mu.Lock()
	q.cancelled = true
	q.client.endLife()
	rest := q.ready
	q.ready = nil
	if q.open != nil {
		rest = append(rest, q.takeOpen())
	}
	for b := range q.unresolved {
		if b.timer != nil {
			b.timer.Stop()
			b.timer = nil
			rest = append(rest, b)
		}
	}
	q.mu.Unlock()
	for _, b := range rest {
		out := outcome{err: closedError{cause, b.last}}
		q.report(b, out)
		q.mu.Lock()
		q.release(b, out)
		q.mu.Unlock()
	}
}

// abandon removes the waiter; the batches in flight end on their own.
func (q *queue) abandon(w *waiter, cause error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for b := range q.unresolved {
		if slices.Contains(b.waiters, w) {
			w.failed = append(w.failed, b.failures(outcome{err: closedError{cause, b.last}})...)
			delete(q.unresolved, b)
		}
	}
	return w.result(cause)
}

// message is the JSON of a call.
func (b *batch) message(i int) []byte {
	it := b.items[i]
	return b.body[it.start:it.end:it.end]
}

func (b *batch) messageID(i int) string {
	it, message := b.items[i], b.message(i)
	if it.idLen > 0 {
		return string(message[it.id:][:it.idLen])
	}
	var m struct{ MessageID string }
	if err := json.Unmarshal(message, &m); err != nil {
		return ""
	}
	return m.MessageID
}

func (b *batch) failures(out outcome) []Failure {
	var failed []Failure
	for i := range b.items {
		if err := out.of(i); err != nil {
			failed = append(failed, Failure{
				Type: b.items[i].kind.String(), MessageID: b.messageID(i), Message: slices.Clone(b.message(i)), Err: err,
			})
		}
	}
	return failed
}

// endWait ends the wait of the batch's waiters. Locked.
func (b *batch) endWait(out outcome) {
	if len(b.waiters) == 0 {
		return
	}
	failed := b.failures(out)
	for _, w := range b.waiters {
		w.failed = append(w.failed, failed...)
		if w.left--; w.left == 0 {
			close(w.done)
		}
	}
}

// waiter waits for some batches to be resolved. Its fields are guarded by the
// queue's lock until done is closed.
type waiter struct {
	left    int
	failed  []Failure
	pending int
	done    chan struct{}
}

func (w *waiter) result(cause error) error {
	if len(w.failed) == 0 && w.pending == 0 {
		return nil
	}
	return &DeliveryError{Failed: w.failed, Pending: w.pending, Err: cause}
}

// closedError is the cause of failures at the deadline of Close; last is the error of the last attempt, nil if there was none.
type closedError struct{ cause, last error }

func (e closedError) Error() string {
	text := ErrClosed.Error() + ": " + e.cause.Error()
	if e.last != nil {
		text += "; last attempt: " + e.last.Error()
	}
	return text
}

func (e closedError) Unwrap() []error {
	if e.last == nil {
		return []error{ErrClosed, e.cause}
	}
	return []error{ErrClosed, e.cause, e.last}
}
