package dispatcher

import (
	"context"
	"net/http"
	"sync"
)

// door admits the requests of a process with several slots to the Dispatcher of one slot, while it is
// open. The zero value is closed.
type door struct {
	mu     sync.RWMutex
	inside *admitted
}

// admitted are the Dispatcher behind an open door and its requests in progress.
type admitted struct {
	dispatcher   *Dispatcher
	calls, admin http.Handler
	requests     sync.WaitGroup
}

// open admits requests to a Dispatcher.
func (d *door) open(to *Dispatcher, calls, admin http.Handler) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inside = &admitted{dispatcher: to, calls: calls, admin: admin}
}

// enter returns what is behind the door, or nil. The caller calls requests.Done after its request.
func (d *door) enter() *admitted {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.inside != nil {
		d.inside.requests.Add(1)
	}
	return d.inside
}

// close admits no more requests, and waits for those in progress until ctx is done.
func (d *door) close(ctx context.Context) error {
	d.mu.Lock()
	inside := d.inside
	d.inside = nil
	d.mu.Unlock()
	if inside == nil {
		return nil
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		inside.requests.Wait()
	}()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
