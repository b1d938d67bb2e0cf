package dispatcher

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/http"
)

// Listeners are the open listeners of a process.
type Listeners struct {
	calls, admin net.Listener // nil: not in Drain
	callsTLS     net.Listener // nil: no TLS listener
	probes       net.Listener // nil: no listener for probes
	peers        net.Listener // nil: standbys do not forward
}

// Listen opens the listeners that the options name. The Dispatchers that get them as
// Options.Listeners, one after the other, use the same sockets.
func Listen(o Options) (*Listeners, error) {
	l := &Listeners{}
	if o.TLSListen != "" && o.TLS == nil {
		return nil, errors.New("dispatcher: no certificate for calls over TLS; set --tls-cert and --tls-key")
	}
	calls, requests := cmp.Or(o.Listen, ":8080"), cmp.Or(o.AdminListen, "127.0.0.1:8081")
	if o.Drain {
		calls, requests, o.TLSListen, o.ProbeListen, o.PeerListen = "", o.AdminListen, "", "", ""
	}
	for _, a := range []struct {
		to            *net.Listener
		purpose, addr string
	}{
		{&l.calls, "calls", calls},
		{&l.admin, "admin requests", requests},
		{&l.callsTLS, "calls over TLS", o.TLSListen},
		{&l.probes, "probes", o.ProbeListen},
		{&l.peers, "other processes", o.PeerListen},
	} {
		if a.addr == "" {
			continue
		}
		opened, err := net.Listen("tcp", a.addr)
		if err != nil {
			l.Close()
			return nil, fmt.Errorf("listen for %s: %w", a.purpose, err)
		}
		*a.to = opened
	}
	return l, nil
}

// Addr returns the address of the tracking API.
func (l *Listeners) Addr() net.Addr { return l.calls.Addr() }

// AdminAddr returns the address of the admin listener.
func (l *Listeners) AdminAddr() net.Addr { return l.admin.Addr() }

// all returns the fields, of which some may be nil.
func (l *Listeners) all() []*net.Listener {
	return []*net.Listener{&l.calls, &l.admin, &l.callsTLS, &l.probes, &l.peers}
}

// share returns other listeners of the same sockets. A connection waits while no listener accepts it.
func (l *Listeners) share() (*Listeners, error) {
	shared := &Listeners{}
	for i, from := range l.all() {
		if *from == nil {
			continue
		}
		file, err := (*from).(*net.TCPListener).File()
		if err == nil {
			*shared.all()[i], err = net.FileListener(file)
			err = errors.Join(err, file.Close())
		}
		if err != nil {
			shared.Close()
			return nil, fmt.Errorf("share the listener %s: %w", (*from).Addr(), err)
		}
	}
	return shared, nil
}

// serve serves a listener until its server is closed.
func serve(on net.Listener, serve func(net.Listener) error) error {
	if err := serve(on); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", on.Addr(), err)
	}
	return nil
}

// Close closes the listeners.
func (l *Listeners) Close() {
	for _, opened := range l.all() {
		if *opened != nil {
			_ = (*opened).Close()
		}
	}
}

// addr returns the address of a listener, or nil.
func addr(l net.Listener) net.Addr {
	if l == nil {
		return nil
	}
	return l.Addr()
}
