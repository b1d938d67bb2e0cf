package host

import (
	"context"
	"net/http"
	"sync"

	"github.com/posthorn/posthorn/dispatcher"
)

// requestGate admits the requests of a process to the Dispatcher of one slot, while it is
// open. The zero value is closed.
type requestGate struct {
	mu     sync.RWMutex
	inside *openGate
}

// openGate has the Dispatcher behind a gate and its requests in progress.
type openGate struct {
	dispatcher   *dispatcher.Dispatcher
	calls, admin http.Handler
	requests     sync.WaitGroup
	// closing is done when the gate closes, by close.
	closing context.Context
	close   context.CancelFunc
}

// Open implements dispatcher.Entrance.
func (d *requestGate) Open(to *dispatcher.Dispatcher, h dispatcher.Handlers) {
	inside := &openGate{dispatcher: to, calls: h.Calls, admin: h.Admin}
	inside.closing, inside.close = context.WithCancel(context.Background())
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inside = inside
}

// serveCalls serves a call.
func (a *openGate) serveCalls(w http.ResponseWriter, r *http.Request) { a.calls.ServeHTTP(w, r) }

// serveAdmin serves a request of the admin API until the gate closes: some of them have no end. An answer
// that ends so is aborted, because its client would use it as a complete one.
func (a *openGate) serveAdmin(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(a.closing, cancel)()
	a.admin.ServeHTTP(w, r.WithContext(ctx))
	if a.closing.Err() != nil {
		panic(http.ErrAbortHandler)
	}
}

// enter returns what is behind the gate, or nil. The caller calls requests.Done after its request.
func (d *requestGate) enter() *openGate {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.inside != nil {
		d.inside.requests.Add(1)
	}
	return d.inside
}

// Close implements dispatcher.Entrance. It ends the requests of the admin API.
func (d *requestGate) Close(ctx context.Context) error {
	d.mu.Lock()
	inside := d.inside
	d.inside = nil
	d.mu.Unlock()
	if inside == nil {
		return nil
	}
	inside.close()
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

// or returns a handler of the requests to what is behind the gate, and of the others while it is closed.
func (d *requestGate) or(behind func(*openGate, http.ResponseWriter, *http.Request), otherwise http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if inside := d.enter(); inside != nil {
			defer inside.requests.Done()
			behind(inside, w, r)
			return
		}
		otherwise(w, r)
	})
}
