package egress

import (
	"container/ring"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http/httptrace"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// conn is one connection to an endpoint.
type conn struct {
	net.Conn           // TCP or TLS
	tls      *tls.Conn // nil for plain HTTP
	pool     *pool
	remote   string
	addr     netip.Addr  // that the name was resolved to; zero for a connection to the proxy
	expires  time.Time   // the certificate; zero for plain HTTP
	alive    func() bool // reports whether the connection is open and has nothing to read

	// State of the exchange in progress.
	ctx      context.Context // Read needs it, but has no parameter for it
	deadline time.Time
	// The deadlines in effect.
	readBy, writeBy time.Time

	used      bool          // has served a request before
	maxIdle   time.Duration // how long it may be unused
	idleSince time.Time
	resolved  time.Time // when addr was last an answer
	closeOnce sync.Once

	// The client's mutex guards these.
	inPool, inClient ring.Ring // the lists of unused connections
	moved            bool      // its name resolves to other addresses
}

// cancelCheck is how long a read waits before it watches its context. Most responses arrive earlier, so watching costs
// nothing, and a slow one wakes its reader once.
const cancelCheck = 250 * time.Millisecond

// begin starts an exchange on the connection. Existing deadlines are kept if they are early enough;
// one that fires too early is set again, which is rare. Setting both would cost a twentieth of an
// exchange.
func (cn *conn) begin(ctx context.Context, now, deadline time.Time) {
	cn.ctx, cn.deadline = ctx, deadline
	if cn.readBy.Sub(now) < cancelCheck/2 || cn.readBy.After(deadline) {
		cn.setReadDeadline(now)
	}
	// A TLS connection cannot be used after a write timed out.
	if cn.writeBy.Before(now) || cn.writeBy.After(deadline) || cn.tls != nil {
		cn.setWriteDeadline()
	}
}

func (cn *conn) setReadDeadline(now time.Time) {
	cn.readBy = cn.deadline
	if at := now.Add(cancelCheck); at.Before(cn.deadline) {
		cn.readBy = at
	}
	_ = cn.SetReadDeadline(cn.readBy)
}

func (cn *conn) setWriteDeadline() {
	cn.writeBy = cn.deadline
	_ = cn.SetWriteDeadline(cn.writeBy)
}

// Read reads until the exchange's deadline or the cancellation of its context.
func (cn *conn) Read(b []byte) (int, error) {
	n, err := cn.Conn.Read(b)
	for n == 0 && errors.Is(err, os.ErrDeadlineExceeded) && cn.ctx.Err() == nil && time.Now().Before(cn.deadline) {
		_ = cn.SetReadDeadline(cn.deadline)
		unwatch := context.AfterFunc(cn.ctx, func() { _ = cn.SetReadDeadline(past) })
		n, err = cn.Conn.Read(b)
		unwatch()
		cn.setReadDeadline(time.Now())
	}
	return n, err
}

// Write writes until the exchange's deadline.
func (cn *conn) Write(b []byte) (n int, err error) {
	for {
		var m int
		m, err = cn.Conn.Write(b[n:])
		n += m
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) || cn.tls != nil || !time.Now().Before(cn.deadline) {
			return n, err
		}
		cn.setWriteDeadline()
	}
}

func (cn *conn) close() {
	cn.closeOnce.Do(func() {
		_ = cn.Conn.Close()
		cn.pool.count(-1)
	})
}

// dialer checks each address of the endpoint right before it dials it. So a name that resolves differently
// the next time (DNS rebinding) bypasses nothing.
func (c *Client) dialer(e *Endpoint) net.Dialer {
	return net.Dialer{
		Resolver: c.resolver,
		ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
			addr, err := netip.ParseAddrPort(address)
			if err != nil {
				return err
			}
			return c.policy.check(e.host, addr.Addr())
		},
	}
}

// dial opens a connection to the endpoint, with the TLS handshake, and begins the exchange on it.
func (c *Client) dial(outer context.Context, e *Endpoint, deadline time.Time, t *Timing) (_ *conn, err error) {
	e.pool.count(1)
	c.trim()
	defer func() {
		if err != nil {
			e.pool.count(-1)
		}
	}()
	ctx, cancel := context.WithDeadline(outer, deadline)
	defer cancel()
	start := time.Now()
	var dns atomic.Int64
	raw, err := c.connect(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		DNSDone: func(info httptrace.DNSDoneInfo) {
			if !errors.Is(info.Err, context.Canceled) { // The other family was faster.
				dns.Store(int64(time.Since(start)))
			}
		},
	}), e)
	t.DNS = time.Duration(dns.Load())
	t.Connect = time.Since(start) - t.DNS
	if err != nil {
		if denied, ok := errors.AsType[*deniedError](err); ok && denied.resolved() {
			// The attempt's message must not contain the address.
			c.log.WarnContext(ctx, "egress policy denied a resolved address", "endpoint", e, "address", denied.addr, "kind", denied.kind)
		}
		return nil, err
	}
	cn := &conn{Conn: raw, pool: e.pool, resolved: time.Now(), remote: e.remote(raw), addr: e.resolvedTo(raw)}
	cn.inPool.Value, cn.inClient.Value = cn, cn
	if e.tls != nil {
		start = time.Now()
		cn.tls = tls.Client(raw, e.tls)
		cn.Conn = cn.tls
		err := cn.tls.HandshakeContext(ctx)
		t.TLS = time.Since(start)
		if err != nil {
			_ = raw.Close()
			return nil, &handshakeError{err: err, remote: cn.remote}
		}
		cn.expires = cn.tls.ConnectionState().PeerCertificates[0].NotAfter
	}
	probe, err := newProbe(raw)
	if err != nil {
		_ = raw.Close()
		return nil, err
	}
	cn.alive = func() bool {
		if !probe() || cn.tls != nil && !nothingBuffered(cn.tls) {
			return false
		}
		if cn.tls != nil {
			cn.setReadDeadline(time.Now())
		}
		return true
	}
	cn.begin(outer, time.Now(), deadline)
	c.log.DebugContext(ctx, "connected", "endpoint", e, "address", cn.remote, "dns", t.DNS, "connect", t.Connect, "tls", t.TLS)
	return cn, nil
}

// handshakeError is a failure after the TCP connection was established.
type handshakeError struct {
	err    error
	remote string
}

func (e *handshakeError) Error() string { return e.err.Error() }
func (e *handshakeError) Unwrap() error { return e.err }

// newProbe returns a function that reports, without blocking, whether an unused connection is open
// and silent: if the endpoint has closed it, or has sent unrequested data (a 408 before it closes),
// there is data to read.
func newProbe(raw net.Conn) (func() bool, error) {
	sc, ok := raw.(syscall.Conn)
	if !ok {
		return nil, errors.New("connection without a descriptor")
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return nil, err
	}
	var silent bool
	read := func(fd uintptr) {
		var b [1]byte
		_, err := syscall.Read(int(fd), b[:])
		silent = errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EWOULDBLOCK)
	}
	return func() bool {
		silent = false
		// Not Read: it fails when the deadline of an earlier exchange has passed.
		return rc.Control(read) == nil && silent
	}, nil
}

// nothingBuffered does the same for data that the TLS layer has already read.
func nothingBuffered(c *tls.Conn) bool {
	_ = c.SetReadDeadline(past)
	var b [1]byte
	n, err := c.Read(b[:])
	return n == 0 && errors.Is(err, os.ErrDeadlineExceeded)
}

// past is a deadline in the past.
var past = time.Unix(1, 0)
