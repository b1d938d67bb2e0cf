package limits

import (
	"context"
	"sync"
	"time"
)

// StoreTimeout bounds the wait of a request for the store, to within a second. Its calls may be
// stored nevertheless; if the client sends them again with the same messageId, they are duplicates.
const StoreTimeout = 30 * time.Second

// Deadlines provides contexts that end after StoreTimeout, or up to a second later. All
// requests of the same second share one context: a timer per request costs as much as a Source
// lookup.
type Deadlines struct {
	mu    sync.Mutex
	ctx   context.Context
	until time.Time
}

// Context returns the shared context of the present second.
func (d *Deadlines) Context() context.Context {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.until.Sub(now) < StoreTimeout {
		d.until = now.Add(StoreTimeout + time.Second)
		ctx, cancel := context.WithDeadline(context.Background(), d.until)
		context.AfterFunc(ctx, cancel) // The timeout is the only cause of cancellation.
		d.ctx = ctx
	}
	return d.ctx
}
