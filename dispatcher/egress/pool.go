package egress

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// pool holds an endpoint's unused open connections, the longest unused first.
type pool struct {
	client *Client
	// open counts the connections, including those in use and those being opened.
	open atomic.Int64

	mu     sync.Mutex
	conns  []*conn
	timer  *time.Timer // runs while the client has the pool in its list
	closed bool
}

// get begins an exchange on the most recently used connection, or returns nil.
func (p *pool) get(ctx context.Context, now, deadline time.Time) *conn {
	for {
		p.mu.Lock()
		n := len(p.conns)
		if n == 0 {
			p.mu.Unlock()
			return nil
		}
		cn := p.conns[n-1]
		p.conns[n-1] = nil
		p.conns = p.conns[:n-1]
		p.mu.Unlock()
		p.client.idle.Add(-1)
		if now.Sub(cn.idleSince) < cn.maxIdle {
			cn.begin(ctx, now, deadline)
			if cn.alive() {
				return cn
			}
		}
		cn.close()
	}
}

// count adds n to the connections before one is opened; -1 after one is closed.
func (p *pool) count(n int64) {
	switch open := p.open.Add(n); {
	case n > 0 && open == n:
		p.client.used.Add(1)
	case n < 0 && open == 0:
		p.client.used.Add(-1)
	}
	p.client.open.Add(n)
}

// share is how many connections the pool should use: its present ones; more while it has fewer than
// are free of the common half, or than its equal share of it; and the needed ones while any are
// free.
func (p *pool) share(needed int) int {
	all, half := p.client.open.Load(), p.client.maxIdle/2
	share := max(p.open.Load(), half-all, half/max(1, p.client.used.Load()), 1)
	if all < p.client.maxIdle {
		share = max(share, int64(needed))
	}
	return int(share)
}

// put keeps a connection for later use, or closes it.
func (p *pool) put(cn *conn) {
	now := time.Now()
	if now.Sub(cn.born) >= p.client.maxAge {
		cn.close()
		return
	}
	if p.client.idle.Add(1) > p.client.maxIdle {
		p.client.idle.Add(-1)
		cn.close()
		return
	}
	cn.idleSince, cn.ctx = now, nil
	p.mu.Lock()
	ok := !p.closed && (p.timer != nil || p.start())
	if ok {
		p.conns = append(p.conns, cn)
	}
	p.mu.Unlock()
	if !ok {
		p.client.idle.Add(-1)
		cn.close()
	}
}

// start adds the pool to the client's list, for Close, and sets the timer that closes unused
// connections. It returns false after the client was closed.
func (p *pool) start() bool {
	p.client.mu.Lock()
	defer p.client.mu.Unlock()
	if p.client.closed {
		return false
	}
	p.client.pools[p] = struct{}{}
	p.timer = time.AfterFunc(p.client.idleTimeout, p.sweep)
	return true
}

// sweep closes connections that were unused for too long. An empty pool is removed from the
// client's list until its next put.
func (p *pool) sweep() {
	now := time.Now()
	p.mu.Lock()
	if p.closed || p.timer == nil {
		p.mu.Unlock()
		return
	}
	var old []*conn
	kept := p.conns[:0]
	for _, cn := range p.conns {
		if now.Sub(cn.idleSince) < cn.maxIdle {
			kept = append(kept, cn)
		} else {
			old = append(old, cn)
		}
	}
	clear(p.conns[len(kept):])
	p.conns = kept
	if len(kept) == 0 {
		p.forget()
	} else {
		p.timer.Reset(max(time.Second, kept[0].maxIdle-now.Sub(kept[0].idleSince)))
	}
	p.mu.Unlock()
	p.discard(old)
}

func (p *pool) close() {
	p.mu.Lock()
	conns := p.conns
	p.conns, p.closed = nil, true
	if p.timer != nil {
		p.forget()
	}
	p.mu.Unlock()
	p.discard(conns)
}

// forget reverses start. Callers hold p.mu.
func (p *pool) forget() {
	p.timer.Stop()
	p.timer = nil
	p.client.mu.Lock()
	delete(p.client.pools, p)
	p.client.mu.Unlock()
}

func (p *pool) discard(conns []*conn) {
	p.client.idle.Add(-int64(len(conns)))
	for _, cn := range conns {
		cn.close()
	}
}
