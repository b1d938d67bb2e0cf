package slots

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

var _ pebblestore.Log = (*Writer)(nil)

// Writer appends the batches of one session to a stream. It is the pebblestore.Log of the session's
// store. Close ends it; so does the claim of another session.
type Writer struct {
	log    Log
	logger *slog.Logger
	now    func() time.Time

	mu sync.Mutex
	p  *publisher
	// changed is signalled when batches become durable, when there is room for more, and at the
	// end.
	changed sync.Cond

	wake   chan struct{}
	cancel context.CancelFunc
	done   chan struct{}

	// durable guards setDurable, which stores the last durable batch of the session beside the local
	// files; may be nil.
	durable    sync.Mutex
	setDurable func(batch uint64) error
}

// newWriter starts the writer of a session.
func newWriter(log Log, p *publisher, o Options) *Writer {
	ctx, cancel := context.WithCancel(context.Background())
	w := &Writer{log: log, logger: o.Logger, now: o.Now, p: p, wake: make(chan struct{}, 1), cancel: cancel, done: make(chan struct{})}
	w.changed.L = &w.mu
	go w.run(ctx)
	return w
}

// Session implements pebblestore.Log.
func (w *Writer) Session() pebblestore.Session { return w.p.session }

// Epoch returns the number of the session's claim in the stream, from 1. A higher one is of a later
// session.
func (w *Writer) Epoch() uint64 { return w.p.epoch }

// Append implements pebblestore.Log. It waits while 64 MB, or 3 % of a smaller stream, are unpublished.
func (w *Writer) Append(number uint64, batch []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.p.hasRoom() {
		w.p.want(w.p.appended)
		w.signal()
	}
	for w.p.ended == nil && !w.p.hasRoom() {
		w.changed.Wait()
	}
	switch {
	case w.p.ended != nil:
		return w.p.ended
	case w.p.releasing:
		return fmt.Errorf("%w: %w", ErrSessionEnded, errReleased)
	}
	if number != w.p.appended+1 {
		w.end(errors.New("the numbers of the store's batches have a gap"))
		return w.p.ended
	}
	w.p.append(w.now(), batch)
	if len(w.p.waiting) > 1 {
		w.signal() // The first record is full.
	}
	return nil
}

// Wait implements pebblestore.Log.
func (w *Writer) Wait(number uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.p.acknowledged < number && w.p.wanted < number {
		w.p.want(number)
		w.signal()
	}
	for w.p.acknowledged < number {
		if w.p.ended != nil {
			return w.p.ended
		}
		w.changed.Wait()
	}
	return nil
}

// Ready implements pebblestore.Log.
func (w *Writer) Ready() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.p.ready(w.now())
}

// Space implements pebblestore.Log.
func (w *Writer) Space() (total, free int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.p.usage.space()
}

// Acknowledged returns the number of the last durable batch.
func (w *Writer) Acknowledged() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.p.acknowledged
}

// publishSnapshot appends the record of a snapshot whose objects are stored, and returns when it is in the
// stream. Before it, it publishes the batches up to the last one of the snapshot, also while others wait for
// space. It is called by one goroutine at a time.
func (w *Writer) publishSnapshot(batch uint64, reference []byte) error {
	w.mu.Lock()
	w.p.snapshotEnd = batch
	w.signal()
	w.mu.Unlock()
	if err := w.Wait(batch); err != nil {
		return err
	}
	if err := w.waitSnapshot(reference); err != nil {
		return err
	}
	w.storeDurable()
	return nil
}

func (w *Writer) waitSnapshot(reference []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.p.snapshot
	w.p.reference = reference
	w.signal()
	for w.p.snapshot == before {
		if w.p.ended != nil {
			return w.p.ended
		}
		w.changed.Wait()
	}
	return nil
}

// readUsage reads the size of the stream again. It is called when records were removed.
func (w *Writer) readUsage() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.p.usage.readAt = time.Time{}
	w.signal()
}

// onDurable sets the function that stores the last durable batch of the session: after each snapshot,
// and when the session ends.
func (w *Writer) onDurable(set func(batch uint64) error) {
	w.durable.Lock()
	defer w.durable.Unlock()
	w.setDurable = set
}

// storeDurable stores the last durable batch of the session.
func (w *Writer) storeDurable() {
	w.durable.Lock()
	defer w.durable.Unlock()
	w.mu.Lock()
	batch, claimed := w.p.acknowledged, w.p.claimed
	w.mu.Unlock()
	if w.setDurable == nil || batch == claimed {
		return
	}
	if err := w.setDurable(batch); err != nil {
		w.logger.Warn("storing the last durable batch failed; a log that is restored from an older backup may not be found", "error", err)
	}
}

// progress describes the stream for the schedule of snapshots.
type progress struct {
	// snapshot is the sequence of the last snapshot record.
	snapshot uint64
	// acknowledged is the last durable batch. published counts the bytes of the session's records.
	acknowledged uint64
	published    int64
	// isHalfFull: space must be freed soon.
	isHalfFull bool
}

func (w *Writer) progress() progress {
	w.mu.Lock()
	defer w.mu.Unlock()
	return progress{w.p.snapshot, w.p.acknowledged, w.p.usage.published, w.p.usage.above(hurryShare)}
}

// Status describes a session for metrics.
type Status struct {
	// Bytes is the size of the stream, estimated between two reads of it, and MaxBytes its bound; 0 for
	// none.
	Bytes, MaxBytes int64
	// Sequence is the number of the last record that the session knows.
	Sequence uint64
	// Unacknowledged is the age of the oldest batch or record that is not durable; 0 for none.
	Unacknowledged time.Duration
}

// Status returns the present state of the session.
func (w *Writer) Status() Status {
	w.mu.Lock()
	defer w.mu.Unlock()
	now, u := w.now(), &w.p.usage
	return Status{Sequence: w.p.expected, Bytes: u.bytes + u.since, MaxBytes: u.max, Unacknowledged: now.Sub(w.p.oldest(now))}
}

// MaySend reports whether the session may send a request of the slot now. It is called before every
// request: no other session has claimed the slot as long as it is true, and outcomes of requests
// become durable within refuseAfter.
func (w *Writer) MaySend() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.p.maySend(w.now())
}

// Release makes all batches durable, and ends the session with a record that lets another pod claim
// the slot immediately. MaySend is false from the call on. The slot remains claimed when ctx ends
// before; then another pod claims it as after a crash.
func (w *Writer) Release(ctx context.Context) error {
	w.mu.Lock()
	w.p.release()
	w.signal()
	w.mu.Unlock()
	select {
	case <-w.done:
	case <-ctx.Done():
	}
	w.Close()
	if err := w.Err(); !errors.Is(err, errReleased) {
		return fmt.Errorf("release the slot: %w", err)
	}
	return nil
}

// Done is closed when the session has ended; Err then returns the cause.
func (w *Writer) Done() <-chan struct{} { return w.done }

// Err returns an error that wraps ErrSessionEnded when the session has ended, and nil before.
func (w *Writer) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.p.ended
}

// Close ends the session without a record; batches that are not durable are dropped. All waiting
// calls return.
func (w *Writer) Close() {
	w.mu.Lock()
	w.end(queue.ErrClosed)
	w.mu.Unlock()
	<-w.done
}

// end ends the session. The caller holds mu.
func (w *Writer) end(cause error) {
	w.p.end(cause)
	w.cancel()
	w.changed.Broadcast()
}

// signal makes run take the next step. The caller holds mu.
func (w *Writer) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// run takes the steps of the publisher until the session has ended.
func (w *Writer) run(ctx context.Context) {
	defer close(w.done)
	defer w.cancel()
	timer := time.NewTimer(heartbeatInterval)
	defer timer.Stop()
	defer w.storeDurable()
	for {
		w.mu.Lock()
		s := w.p.next(w.now())
		if s.action == actPublish {
			w.changed.Broadcast() // The record has left the waiting ones.
		}
		w.mu.Unlock()
		switch s.action {
		case actPublish:
			w.publish(ctx, s)
		case actRead:
			w.read(ctx, s.expected)
		case actReadState:
			w.readState(ctx)
		case actEnd:
			return
		case actWait:
			timer.Reset(s.until.Sub(w.now()))
			select {
			case <-w.wake:
			case <-timer.C:
			case <-ctx.Done():
			}
		}
	}
}

// publish publishes a record once.
func (w *Writer) publish(ctx context.Context, s step) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	sequence, err := w.log.Publish(ctx, s.expected, s.id, s.data)
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.p.ended != nil:
	case err == nil:
		w.p.answered(sequence)
		w.changed.Broadcast()
	default:
		w.p.refused(w.now(), err)
		w.logger.Debug("publishing to the log failed; retrying", "error", err)
	}
}

// read reads all records behind the expected one.
func (w *Writer) read(ctx context.Context, expected uint64) {
	for next := expected + 1; ; next++ {
		e, err := w.get(ctx, next)
		w.mu.Lock()
		switch {
		case errors.Is(err, ErrNoRecord):
			w.p.readEnd(w.now(), next > expected+1)
		case err != nil:
			w.p.refused(w.now(), err)
		default:
			w.p.read(e)
			w.changed.Broadcast()
		}
		ended := w.p.ended
		w.logEnd()
		w.mu.Unlock()
		if err != nil || ended != nil {
			return
		}
	}
}

func (w *Writer) get(ctx context.Context, from uint64) (Entry, error) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	return w.log.Get(ctx, from)
}

func (w *Writer) readState(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	s, err := w.log.State(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.p.stateFailed(w.now(), err)
	} else {
		w.p.stateRead(w.now(), s)
	}
	w.logEnd()
	w.changed.Broadcast()
}

// logEnd logs why a session has ended, unless its process ended it. The caller holds mu.
func (w *Writer) logEnd() {
	if ended := w.p.ended; ended != nil && !errors.Is(ended, queue.ErrClosed) && !errors.Is(ended, errReleased) {
		w.logger.Warn("session of a slot ended", "error", ended)
	}
}
