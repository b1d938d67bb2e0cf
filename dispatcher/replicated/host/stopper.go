package host

import (
	"context"
	"sync"
)

// stopper ends an ownership in order, from another goroutine.
type stopper struct {
	mu     sync.Mutex
	cancel context.CancelFunc // nil while there is no ownership
}

// run calls a function whose context ends with ctx, or by now.
func (e *stopper) run(ctx context.Context, fn func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	e.set(cancel)
	defer e.set(nil)
	return fn(ctx)
}

func (e *stopper) set(cancel context.CancelFunc) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cancel = cancel
}

// now ends the ownership, and reports whether there was one that had not been ended.
func (e *stopper) now() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cancel == nil {
		return false
	}
	e.cancel()
	e.cancel = nil
	return true
}
