package egress

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http/httptrace"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

// dial makes a connection to the endpoint, with the TLS handshake done and the
// deadline set.
func (c *Client) dial(ctx context.Context, e *Endpoint, deadline time.Time, t *Timing) (*conn, error) {
	// Resolves, tries one address after the other (two families in parallel),
	// and asks for each of them right before it is dialled. What was checked is
	// what is dialled: a name that resolves differently the next time gains nothing.
	dialer := net.Dialer{
		Resolver: c.resolver,
		ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
			addr, err := netip.ParseAddrPort(address)
			if err != nil {
				return err
			}
			return c.policy.check(e.host, addr.Addr())
		},
	}
	start := time.Now()
	var dns atomic.Int64
	raw, err := dialer.DialContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		DNSDone: func(httptrace.DNSDoneInfo) { dns.Store(int64(time.Since(start))) },
	}), "tcp", e.address)
	t.DNS = time.Duration(dns.Load())
	t.Connect = time.Since(start) - t.DNS
	if err != nil {
		return nil, err
	}
	cn := &conn{Conn: raw, remote: raw.RemoteAddr().String()}
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
	}
	cn.interrupt = func() { _ = raw.SetDeadline(past) }
	probe, err := newProbe(raw)
	if err != nil {
		cn.close()
		return nil, err
	}
	cn.alive = func(deadline time.Time) bool {
		_ = raw.SetDeadline(deadline)
		return probe() && (cn.tls == nil || nothingBuffered(cn.tls, deadline))
	}
	_ = raw.SetDeadline(deadline)
	c.log.DebugContext(ctx, "connected", "endpoint", e, "address", cn.remote, "dns", t.DNS, "connect", t.Connect, "tls", t.TLS)
	return cn, nil
}

// handshakeError is a failure after the TCP connection stood.
type handshakeError struct {
	err    error
	remote string
}

func (e *handshakeError) Error() string { return e.err.Error() }
func (e *handshakeError) Unwrap() error { return e.err }

// newProbe returns a function that reports whether an unused connection is
// still open and silent, without waiting: an endpoint that has closed it, or
// sent what nobody asked for (a 408 before it closes), leaves something to read.
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
	read := func(fd uintptr) bool {
		var b [1]byte
		_, err := syscall.Read(int(fd), b[:])
		silent = errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EWOULDBLOCK)
		return true
	}
	return func() bool {
		silent = false
		return rc.Read(read) == nil && silent
	}, nil
}

// nothingBuffered is the same for what the TLS layer has read already.
func nothingBuffered(c *tls.Conn, deadline time.Time) bool {
	_ = c.SetReadDeadline(past)
	var b [1]byte
	n, err := c.Read(b[:])
	_ = c.SetReadDeadline(deadline)
	return n == 0 && errors.Is(err, os.ErrDeadlineExceeded)
}
