package ingest

import (
	"context"
	"sync"
	"time"
)

// deadlineCache provides contexts that end after storeTimeout, or up to a second later. All
// requests of the same second share one context: a timer per request costs as much as a Source
// lookup.
type deadlineCache struct {
	mu    sync.Mutex
	ctx   context.Context
	until time.Time
}

func (c *deadlineCache) context() context.Context {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.until.Sub(now) < storeTimeout {
		c.until = now.Add(storeTimeout + time.Second)
		ctx, cancel := context.WithDeadline(context.Background(), c.until)
		context.AfterFunc(ctx, cancel) // The timeout is the only cause of cancellation.
		c.ctx = ctx
	}
	return c.ctx
}
