package egress

import (
	"container/ring"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
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

// pool holds unused open connections. Connections in use are not in it, so an endpoint whose requests
// hang takes no connection away that another endpoint could use.
type pool struct {
	client *Client
	key    poolKey
	tls    *tls.Config // nil for http
	// users is the number of endpoints. The client's mutex guards its changes.
	users atomic.Int64
	// open counts the connections, including those in use and those being opened; idle counts unused.
	open, idle atomic.Int64

	// The client's mutex guards these.
	unused ring.Ring // of *conn, the one used last is the previous one of the root
	closed bool
}

// acquire returns the pool of a key for one more endpoint; config is the TLS config of a new pool.
func (c *Client) acquire(key poolKey, config *tls.Config) *pool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pools[key]
	if p == nil {
		if config != nil {
			config.ClientSessionCache = poolSession{c.sessions, key}
		}
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
		c.sessions.drop(p.key)
	}
}

// get begins an exchange on the most recently used connection, or returns nil.
func (p *pool) get(ctx context.Context, now, deadline time.Time) *conn {
	for {
		cn := p.takeLast()
		if cn == nil {
			return nil
		}
		if now.Sub(cn.idleSince) < cn.maxIdle {
			cn.begin(ctx, now, deadline)
			if cn.alive() {
				return cn
			}
		}
		cn.close()
	}
}

func (p *pool) takeLast() *conn {
	p.client.mu.Lock()
	defer p.client.mu.Unlock()
	last := p.unused.Prev()
	if last == &p.unused {
		return nil
	}
	return last.Value.(*conn).take()
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

// room is how many more requests an endpoint should start. The pool should use its present
// connections; more while it has fewer than are free of the common half, or than its equal share of
// it. Each endpoint of the pool has an equal part of that, at least one request, and may use what
// the others leave; it gets the needed ones while not all are in use.
func (p *pool) room(needed, inFlight int) int {
	all, half := p.client.open.Load(), p.client.maxOpen/2
	open, started := p.open.Load(), int64(inFlight)
	share := max(open, half-all, half/max(1, p.client.used.Load()), 1)
	part := max(1, share/max(1, p.users.Load()))
	room := max(share-max(open-p.idle.Load(), started), part-started)
	if all-p.client.idle.Load() < p.client.maxOpen {
		room = max(room, int64(needed)-started)
	}
	return int(room)
}

// put keeps a connection for later use, or closes it. An old one is resolved again while it may be used. One through
// the proxy, which resolves the name, or with an expired certificate is closed.
func (p *pool) put(cn *conn) {
	now := time.Now()
	old := now.Sub(cn.resolved) >= p.client.maxAge
	if old {
		cn.resolved = now
	}
	cn.idleSince, cn.ctx = now, nil
	switch expired := !cn.expires.IsZero() && now.After(cn.expires); {
	case old && (expired || !cn.addr.IsValid()) || !p.add(cn):
		cn.close()
	case old:
		go p.resolve(cn)
	}
	p.client.trim()
}

// add adds a connection to the unused ones, unless it must be closed.
func (p *pool) add(cn *conn) bool {
	c := p.client
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.closed || cn.moved {
		return false
	}
	p.unused.Prev().Link(&cn.inPool)
	c.unused.Prev().Link(&cn.inClient)
	p.idle.Add(1)
	c.idle.Add(1)
	if c.sweeper == nil {
		c.sweeper = time.AfterFunc(c.idleTimeout/sweeps, c.sweep)
	}
	return true
}

// take removes a connection from the unused ones. The client's mutex must be held.
func (cn *conn) take() *conn {
	cn.inPool.Prev().Unlink(1)
	cn.inClient.Prev().Unlink(1)
	cn.pool.idle.Add(-1)
	cn.pool.client.idle.Add(-1)
	return cn
}

// resolve resolves the name of a connection again, and closes the connection if its address is no answer any more. While
// the name cannot be resolved, the connection is kept: a new one would not be possible.
func (p *pool) resolve(cn *conn) {
	ctx, cancel := context.WithTimeout(context.Background(), defaultTimeout)
	defer cancel()
	network := "ip6" // Of the address's family only: the query for the other one may never be answered.
	if cn.addr.Is4() {
		network = "ip4"
	}
	host, _, _ := net.SplitHostPort(p.key.address)
	answers, err := p.client.resolver.LookupNetIP(ctx, network, host)
	dns, failed := errors.AsType[*net.DNSError](err)
	if failed && !dns.IsNotFound || slices.ContainsFunc(answers, func(a netip.Addr) bool { return a.Unmap() == cn.addr }) {
		return
	}
	p.client.mu.Lock()
	cn.moved = true // If it is in use now, it is closed after that.
	unused := cn.inPool.Next() != &cn.inPool
	if unused {
		cn.take()
	}
	p.client.mu.Unlock()
	if unused {
		cn.close()
	}
}

// trim closes the connections that were unused longest, of any pool, while more than the bound are open.
func (c *Client) trim() {
	for c.open.Load() > c.maxOpen {
		c.mu.Lock()
		longest := c.unused.Next()
		if longest == &c.unused || c.open.Load() <= c.maxOpen {
			c.mu.Unlock()
			return
		}
		cn := longest.Value.(*conn).take()
		cn.pool.count(-1) // With the lock: others must not close one more for this one.
		c.mu.Unlock()
		_ = cn.Conn.Close()
	}
}

// sweeps is how often, in the time that a connection may be unused, such connections are looked for.
const sweeps = 16

// sweep closes connections that were unused for too long. It ends when none is left, until the next
// put.
func (c *Client) sweep() {
	now := time.Now()
	c.discard(&c.unused, func(cn *conn) bool { return now.Sub(cn.idleSince) >= cn.maxIdle })
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle.Load() == 0 {
		c.sweeper = nil
	} else {
		c.sweeper.Reset(c.idleTimeout / sweeps)
	}
}

// close closes the unused connections, and those in use after their request.
func (p *pool) close() {
	p.client.mu.Lock()
	p.closed = true
	p.client.mu.Unlock()
	p.client.discard(&p.unused, func(*conn) bool { return true })
}

// discard closes the unused connections of a list that match.
func (c *Client) discard(list *ring.Ring, matches func(*conn) bool) {
	var matching []*conn
	c.mu.Lock()
	for at := list.Next(); at != list; {
		cn := at.Value.(*conn)
		at = at.Next()
		if matches(cn) {
			matching = append(matching, cn.take())
		}
	}
	c.mu.Unlock()
	for _, cn := range matching {
		cn.close()
	}
}
