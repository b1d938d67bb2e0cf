package delivery

import (
	"context"
	"time"
)

const (
	// leaseCheck is the time between two checks of the permission to send.
	leaseCheck = 100 * time.Millisecond
	// pausedInterval is the time between two passes of the maintenance without that permission.
	pausedInterval = time.Second
)

// lifetime is whether requests may start, and what ends those in flight. The engine's lock guards it.
type lifetime struct {
	running, stopped bool
	// paused is true while Options.MaySend is false.
	paused bool
	// hard ends requests in flight; soft ends everything else. flight is the parent of new requests, cancelled by a
	// pause.
	hard, soft, flight               context.Context
	cancel, cancelSoft, cancelFlight context.CancelFunc
}

func newLifetime() (t lifetime) {
	t.hard, t.cancel = context.WithCancel(context.Background())
	t.soft, t.cancelSoft = context.WithCancel(t.hard)
	t.flight, t.cancelFlight = context.WithCancel(t.hard)
	return t
}

// halted reports whether no request may start.
func (t *lifetime) halted() bool { return t.stopped || t.paused }

// setPaused cancels the requests in flight, or permits new ones again. It reports whether this is a change.
func (t *lifetime) setPaused(paused bool) (changed bool) {
	if t.paused == paused {
		return false
	}
	if t.paused = paused; paused {
		t.cancelFlight()
	} else {
		t.flight, t.cancelFlight = context.WithCancel(t.hard)
	}
	return true
}

// setPaused cancels the requests in flight and starts no more, or continues.
func (e *Engine) setPaused(paused bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch changed := e.lifetime.setPaused(paused); {
	case changed && paused:
		e.o.Logger.Warn("this process may not send requests now; pausing deliveries")
	case changed:
		e.wakeWorker()
		e.o.Logger.Info("deliveries continue")
	}
}

// followLease pauses and resumes the engine as Options.MaySend requires, until ctx is done.
func (e *Engine) followLease(ctx context.Context) {
	if e.o.MaySend == nil {
		return
	}
	ticker := time.NewTicker(leaseCheck)
	defer ticker.Stop()
	for ctx.Err() == nil {
		e.setPaused(!e.o.MaySend())
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
}

// maySend reports whether a request may be sent now.
func (e *Engine) maySend() bool {
	if e.o.MaySend == nil || e.o.MaySend() {
		return true
	}
	e.setPaused(true)
	return false
}
