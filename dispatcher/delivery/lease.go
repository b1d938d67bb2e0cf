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

// pause cancels the requests in flight, and starts no more until resume.
func (e *Engine) pause() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.paused {
		e.paused = true
		e.cancelFlight()
		e.log.Warn("this process may not send requests now; pausing deliveries")
	}
}

// resume continues after pause.
func (e *Engine) resume() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.paused {
		e.paused = false
		e.flight, e.cancelFlight = context.WithCancel(e.hard)
		e.wakeWorker()
		e.log.Info("deliveries continue")
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
		if e.o.MaySend() {
			e.resume()
		} else {
			e.pause()
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
}

// mayExpire reports whether retry windows and retentions may end now.
func (e *Engine) mayExpire() bool { return e.o.MayExpire == nil || e.o.MayExpire() }

// maySend reports whether a request may be sent now.
func (e *Engine) maySend() bool {
	if e.o.MaySend == nil || e.o.MaySend() {
		return true
	}
	e.pause()
	return false
}
