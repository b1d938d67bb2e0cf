package egress

import (
	"context"
	"errors"
	"net"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// resolutionDelay is how long a connection to an IPv4 address waits for the lookup of the IPv6
	// addresses (RFC 8305), and fallbackDelay how long it waits for a connection to one of them.
	resolutionDelay = 50 * time.Millisecond
	fallbackDelay   = 300 * time.Millisecond
)

// newResolver returns a resolver whose queries end with their context; queries of net.DefaultResolver
// wait until their own timeout.
func newResolver() *net.Resolver {
	return &net.Resolver{Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		if err == nil {
			context.AfterFunc(ctx, func() { _ = conn.SetDeadline(past) })
		}
		return conn, err
	}}
}

// dialHost connects to an address of a host. It looks up and dials IPv6 and IPv4 separately, with a preference
// for IPv6: a query that is never answered, as by some resolvers for AAAA, does not delay the other family.
func dialHost(ctx context.Context, d net.Dialer, address string) (net.Conn, error) {
	if host, _, err := net.SplitHostPort(address); err != nil || net.ParseIP(host) != nil {
		return d.DialContext(ctx, "tcp", address)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		conn net.Conn
		err  error
	}
	results := make(chan result, 2)
	var connected atomic.Bool
	dial := func(ctx context.Context, d net.Dialer, network string) {
		conn, err := d.DialContext(ctx, network, address)
		if err == nil && connected.Swap(true) {
			_ = conn.Close() // The other family was faster.
			return
		}
		results <- result{conn, err}
	}
	resolved, failed := make(chan struct{}), make(chan struct{})
	go dial(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{DNSDone: func(info httptrace.DNSDoneInfo) {
		if info.Err == nil {
			close(resolved)
		}
	}}), d, "tcp6")
	guard, first := d.ControlContext, sync.OnceFunc(func() {
		waitAtMost(ctx, resolved, failed, resolutionDelay)
		select {
		case <-resolved:
			waitAtMost(ctx, failed, nil, fallbackDelay)
		default:
		}
	})
	d.ControlContext = func(ctx context.Context, network, address string, c syscall.RawConn) error {
		first()
		if guard == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		return guard(ctx, network, address, c)
	}
	go dial(ctx, d, "tcp4")
	r := <-results
	if r.err == nil {
		return r.conn, nil
	}
	close(failed)
	other := <-results
	switch {
	case other.err == nil:
		return other.conn, nil
	case severity(other.err) > severity(r.err):
		r = other
	}
	if errors.As(r.err, new(*net.AddrError)) {
		return d.DialContext(ctx, "tcp", address) // The AAAA records contain IPv4 addresses.
	}
	return nil, r.err
}

// waitAtMost waits until a channel is closed, for at most a time.
func waitAtMost(ctx context.Context, a, b <-chan struct{}, most time.Duration) {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-a:
	case <-b:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// severity selects the error to report when both families failed: the one that says more about the host.
func severity(err error) int {
	dns, isDNS := errors.AsType[*net.DNSError](err)
	switch {
	case errors.As(err, new(*deniedError)):
		return 4
	case isDNS && dns.IsNotFound:
		return 0
	case isDNS:
		return 1
	case errors.As(err, new(*net.AddrError)):
		return 2
	}
	return 3
}
