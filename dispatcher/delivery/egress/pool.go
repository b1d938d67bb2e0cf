package egress

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// poolKey identifies connections that are interchangeable. Endpoints with the same key share a pool,
// whatever their paths, headers and namespaces are.
type poolKey struct {
	// host is the name that the policy checks and that the certificate must have; address is the
	// host and port to dial.
	host, address string
	// tls is the hash of the TLS settings; zero for http.
	tls [sha256.Size]byte
}

// tlsIdentity hashes the settings that distinguish TLS connections to a host.
func tlsIdentity(c *liveconfig.TLS) [sha256.Size]byte {
	h := sha256.New()
	add := func(part string) { _, _ = fmt.Fprintf(h, "%d:%s", len(part), part) }
	if c != nil {
		add(c.CA)
		add(c.ClientCert)
		add(c.ClientKey.Reveal())
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// pool holds unused open connections, the longest unused first. Connections in use are not in it,
// so an endpoint whose requests hang takes no connection away that another endpoint could use.
type pool struct {
	client *Client
	key    poolKey
	tls    *tls.Config // nil for http
	// users is the number of endpoints. The client's mutex guards its changes.
	users atomic.Int64
	// open counts the connections, including those in use and those being opened; idle counts conns.
	open, idle atomic.Int64

	mu     sync.Mutex
	conns  []*conn
	timer  *time.Timer // runs while there are connections
	closed bool
}

// acquire returns the pool of a key for one more endpoint; config is the TLS config of a new pool.
func (c *Client) acquire(key poolKey, config *tls.Config) *pool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pools[key]
	if p == nil {
		p = &pool{client: c, key: key, tls: config, closed: c.closed}
		c.pools[key] = p
	}
	p.users.Add(1)
	return p
}

// release ends the use of a pool by an endpoint. A pool without endpoints is closed.
func (c *Client) release(p *pool) {
	c.mu.Lock()
	unused := p.users.Add(-1) == 0
	if unused {
		delete(c.pools, p.key)
	}
	c.mu.Unlock()
	if unused {
		p.close()
	}
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
		p.addIdle(-1)
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

// addIdle adds n to the unused connections, and returns their number in the client.
func (p *pool) addIdle(n int64) int64 {
	p.idle.Add(n)
	return p.client.idle.Add(n)
}

// room is how many more requests an endpoint should start. The pool should use its present
// connections; more while it has fewer than are free of the common half, or than its equal share of
// it. Each endpoint of the pool has an equal part of that, at least one request, and may use what
// the others leave; it gets the needed ones while any are free.
func (p *pool) room(needed, inFlight int) int {
	all, half := p.client.open.Load(), p.client.maxIdle/2
	open, started := p.open.Load(), int64(inFlight)
	share := max(open, half-all, half/max(1, p.client.used.Load()), 1)
	part := max(1, share/max(1, p.users.Load()))
	room := max(share-max(open-p.idle.Load(), started), part-started)
	if all < p.client.maxIdle {
		room = max(room, int64(needed)-started)
	}
	return int(room)
}

// put keeps a connection for later use, or closes it.
func (p *pool) put(cn *conn) {
	now := time.Now()
	if now.Sub(cn.born) >= p.client.maxAge {
		cn.close()
		return
	}
	if p.addIdle(1) > p.client.maxIdle {
		p.addIdle(-1)
		cn.close()
		return
	}
	cn.idleSince, cn.ctx = now, nil
	p.mu.Lock()
	kept := !p.closed
	if kept {
		p.conns = append(p.conns, cn)
		if p.timer == nil {
			p.timer = time.AfterFunc(p.client.idleTimeout, p.sweep)
		}
	}
	p.mu.Unlock()
	if !kept {
		p.addIdle(-1)
		cn.close()
	}
}

// sweep closes connections that were unused for too long. It ends when none is left, until the next
// put.
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
		p.timer = nil
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
		p.timer.Stop()
		p.timer = nil
	}
	p.mu.Unlock()
	p.discard(conns)
}

func (p *pool) discard(conns []*conn) {
	p.addIdle(-int64(len(conns)))
	for _, cn := range conns {
		cn.close()
	}
}
