package ingest

import (
	"context"
	"sync"
	"time"
)

// patience gives contexts that end after storeTimeout, or up to a second later.
// All requests of a second share one: a timer for each costs as much as
// finding its Source.
type patience struct {
	mu    sync.Mutex
	ctx   context.Context
	until time.Time
}

func (p *patience) context() context.Context {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.until.Sub(now) < storeTimeout {
		p.until = now.Add(storeTimeout + time.Second)
		ctx, cancel := context.WithDeadline(context.Background(), p.until)
		context.AfterFunc(ctx, cancel) // Nothing ends it before its time.
		p.ctx = ctx
	}
	return p.ctx
}
