package ingest

import (
	"context"
	"sync"
	"time"
)

// deadlineCache gives contexts that end after storeTimeout, or up to a second
// later. All requests of a second share one: a timer for each costs as much as
// the lookup of its Source.
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
		context.AfterFunc(ctx, cancel) // Nothing else cancels it.
		c.ctx = ctx
	}
	return c.ctx
}
