package simulation

import (
	"context"
	"net"
	"sync"
	"syscall"
)

// network connects the processes in memory, by names of addresses.
type network struct {
	mu        sync.Mutex
	listeners map[string]*listener
}

// dial opens a connection to an address.
func (n *network) dial(ctx context.Context, _, address string) (net.Conn, error) {
	n.mu.Lock()
	l := n.listeners[address]
	n.mu.Unlock()
	if l == nil {
		return nil, syscall.ECONNREFUSED
	}
	here, there := net.Pipe()
	select {
	case l.accepted <- conn{there}:
		l.keep(here, there)
		return conn{here}, nil
	case <-l.closed:
		return nil, syscall.ECONNREFUSED
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// listen opens a listener at an address.
func (n *network) listen(address string) *listener {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := &listener{address: address, accepted: make(chan net.Conn), closed: make(chan struct{})}
	l.close = sync.OnceFunc(func() { close(l.closed) })
	n.listeners[address] = l
	return l
}

// listener is a listener of a process.
type listener struct {
	address  string
	accepted chan net.Conn
	closed   chan struct{}
	close    func()

	mu    sync.Mutex
	conns []net.Conn
}

func (l *listener) keep(conns ...net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns = append(l.conns, conns...)
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accepted:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *listener) Close() error {
	l.close()
	return nil
}

// Addr implements net.Listener.
func (l *listener) Addr() net.Addr { return address(l.address) }

// cut ends the listener with its connections, as the loss of its process does.
func (l *listener) cut() {
	l.close()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.conns {
		_ = c.Close()
	}
}

// conn is a connection with addresses.
type conn struct{ net.Conn }

// RemoteAddr implements net.Conn.
func (conn) RemoteAddr() net.Addr { return address("192.0.2.1:1") }

type address string

func (address) Network() string  { return "tcp" }
func (a address) String() string { return string(a) }
