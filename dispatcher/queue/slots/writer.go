package slots

import (
	"context"
	"errors"
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

	mu sync.Mutex
	p  *publisher
	// changed is signalled when batches become durable, when there is room for more, and at the
	// end.
	changed sync.Cond

	wake   chan struct{}
	cancel context.CancelFunc
	done   chan struct{}
}

// newWriter starts the writer of a session.
func newWriter(log Log, p *publisher, logger *slog.Logger) *Writer {
	ctx, cancel := context.WithCancel(context.Background())
	w := &Writer{log: log, logger: logger, p: p, wake: make(chan struct{}, 1), cancel: cancel, done: make(chan struct{})}
	w.changed.L = &w.mu
	go w.run(ctx)
	return w
}

// Session implements pebblestore.Log.
func (w *Writer) Session() pebblestore.Session { return w.p.session }

// Append implements pebblestore.Log. It waits while 64 MB are unpublished.
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
	if w.p.ended != nil {
		return w.p.ended
	}
	if number != w.p.appended+1 {
		w.end(errors.New("the numbers of the store's batches have a gap"))
		return w.p.ended
	}
	w.p.append(batch)
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
	return w.p.ready(time.Now())
}

// Acknowledged returns the number of the last durable batch, and the time of the first sending of
// the last acknowledged record: no other session had claimed the slot before that time.
func (w *Writer) Acknowledged() (number uint64, sent time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.p.acknowledged, w.p.leaseStart
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
	for {
		w.mu.Lock()
		s := w.p.next(time.Now())
		if s.action == actPublish {
			w.changed.Broadcast() // The record has left the waiting ones.
		}
		w.mu.Unlock()
		switch s.action {
		case actPublish:
			w.publish(ctx, s)
		case actRead:
			w.read(ctx, s.expected)
		case actReadUsage:
			w.readUsage(ctx)
		case actEnd:
			return
		case actWait:
			timer.Reset(time.Until(s.until))
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
		w.p.refused(time.Now(), err)
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
			w.p.readEnd(time.Now(), next > expected+1)
		case err != nil:
			w.p.refused(time.Now(), err)
		default:
			w.p.read(e)
			w.changed.Broadcast()
		}
		ended := w.p.ended
		w.mu.Unlock()
		if err != nil || ended != nil {
			if errors.Is(ended, ErrSessionEnded) && !errors.Is(ended, queue.ErrClosed) {
				w.logger.Warn("session of a slot ended", "error", ended)
			}
			return
		}
	}
}

func (w *Writer) get(ctx context.Context, from uint64) (Entry, error) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	return w.log.Get(ctx, from)
}

func (w *Writer) readUsage(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	s, err := w.log.State(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.p.usage.readAt = time.Now() // The estimate is unchanged.
		return
	}
	w.p.usage.set(s, time.Now())
}
