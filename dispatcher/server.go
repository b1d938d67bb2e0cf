package dispatcher

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/dispatcher/admin"
	"github.com/posthorn/posthorn/dispatcher/intake/ingest"
	"github.com/posthorn/posthorn/dispatcher/intake/listen"
)

// Limits of open connections. A connection takes 20 KB; limits.Conns bounds the heads of all requests.
const (
	// MaxConns is the limit of a listener for calls.
	MaxConns      = 4096
	maxAdminConns = 256
)

// ServerOptions configure the server of a process.
type ServerOptions struct {
	// Listen is the address of the tracking API, AdminListen of /report, /metrics and the
	// admin API: host:port, where port 0 selects a free port (see Addr). Default ":8080" and
	// "127.0.0.1:8081".
	Listen, AdminListen string
	// TLSListen, when set, is the address of the tracking API over TLS, with the certificate of
	// TLS; host:port like Listen.
	TLSListen string
	TLS       *tls.Config
	// ProbeListen, when set, is the address of a listener that serves only /healthz and /readyz,
	// without TLS, so that probes never wait for calls.
	ProbeListen string
	// Listeners are used, and closed, in place of new ones: the zero value for a Dispatcher that gets all of its
	// requests by Entrance.
	Listeners *Listeners
	// DrainTimeout bounds how long shutdown waits for requests in flight, for ingest and delivery
	// each. Default 10 s.
	DrainTimeout time.Duration
	// ShutdownDelay is how long calls are still accepted after the stop signal while the pod is not
	// ready, so that a Service removes it first. Default 0.
	ShutdownDelay time.Duration
	// Extra serves the other paths of the admin listener.
	Extra http.Handler
	// AdminTLS, when set, makes the admin listener use TLS, and AdminGuard admits only authorized
	// callers.
	AdminTLS   *tls.Config
	AdminGuard func(http.Handler) http.Handler
}

// Listeners are the open listeners of a process.
type Listeners struct {
	calls, admin net.Listener // nil: not in Drain
	callsTLS     net.Listener // nil: no TLS listener
	probes       net.Listener // nil: no listener for probes
}

// Listen opens the listeners that the options name.
func Listen(o Options) (*Listeners, error) {
	l := &Listeners{}
	if o.TLSListen != "" && o.TLS == nil {
		return nil, errors.New("dispatcher: no certificate for calls over TLS; set --tls-cert and --tls-key")
	}
	calls, requests := cmp.Or(o.Listen, ":8080"), cmp.Or(o.AdminListen, "127.0.0.1:8081")
	if o.Drain {
		calls, requests, o.TLSListen, o.ProbeListen = "", o.AdminListen, "", ""
	}
	for _, a := range []struct {
		to            *net.Listener
		purpose, addr string
	}{
		{&l.calls, "calls", calls},
		{&l.admin, "admin requests", requests},
		{&l.callsTLS, "calls over TLS", o.TLSListen},
		{&l.probes, "probes", o.ProbeListen},
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

// NewListeners returns listeners for calls and for admin requests that are open.
func NewListeners(calls, admin net.Listener) *Listeners {
	return &Listeners{calls: calls, admin: admin}
}

// Addr returns the address of the tracking API, or nil.
func (l *Listeners) Addr() net.Addr { return addr(l.calls) }

// AdminAddr returns the address of the admin listener, or nil.
func (l *Listeners) AdminAddr() net.Addr { return addr(l.admin) }

// all returns the fields, of which some may be nil.
func (l *Listeners) all() []*net.Listener {
	return []*net.Listener{&l.calls, &l.admin, &l.callsTLS, &l.probes}
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

// Handlers are what the listeners of a process serve.
type Handlers struct {
	// Calls serves the tracking API, and Admin the admin API. Both include the health checks.
	Calls, Admin http.Handler
	// Ready returns why the process must not get calls, or nil. The listener for probes serves only it.
	Ready func() error
	// Drain, when set, ends what does not come by the listeners. It is called with the end of the calls, and returns
	// at the latest when its context is done.
	Drain func(context.Context) error
}

// Serve serves h until ctx is done, or a listener fails. Then it calls leave, and the calls in progress have the
// time that leave returns until they are cancelled. Requests to the admin API end after the calls.
func (l *Listeners) Serve(ctx context.Context, o Options, h Handlers, leave func() time.Duration) error {
	l.warnOfOpenAccess(o)
	calls := NewServer(ingest.NewServer(ingest.Normalize(h.Calls)), MaxConns, o.Logger)
	requests := NewServer(admin.NewServer(h.Admin), maxAdminConns, o.Logger)
	probes := NewServer(admin.NewProbeServer(h.Ready), maxAdminConns, o.Logger)
	group, ctx := errgroup.WithContext(ctx)
	start := func(on net.Listener, serve func(net.Listener) error) {
		if on != nil {
			group.Go(func() error { return ServeListener(on, serve) })
		}
	}
	start(l.calls, calls.Serve)
	start(l.callsTLS, func(on net.Listener) error { return calls.ServeTLS(on, o.TLS) })
	start(l.probes, probes.Serve)
	if o.AdminTLS != nil {
		start(l.admin, func(on net.Listener) error { return requests.ServeTLS(on, o.AdminTLS) })
	} else {
		start(l.admin, requests.Serve)
	}
	group.Go(func() error {
		<-ctx.Done()
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), leave())
		defer cancel()
		var drained errgroup.Group
		drained.Go(func() error { return calls.Shutdown(drain) })
		if h.Drain != nil {
			drained.Go(func() error { return h.Drain(drain) })
		}
		if err := drained.Wait(); err != nil {
			// A call without an answer was not acknowledged; its sender will send it again.
			o.Logger.Warn("drain timeout: calls in progress are cancelled", "error", err)
			_ = calls.Close()
		}
		return errors.Join(requests.Close(), probes.Close())
	})
	return group.Wait()
}

// warnOfOpenAccess logs that every client can use the admin API.
func (l *Listeners) warnOfOpenAccess(o Options) {
	if l.admin == nil || o.AdminGuard != nil {
		return
	}
	if a, ok := l.admin.Addr().(*net.TCPAddr); ok && !a.IP.IsLoopback() {
		o.Logger.Warn("the admin address has no authentication and is open to the network: every client can read and purge dead letters; set --admin-listen to a loopback address, or protect it by a firewall or a NetworkPolicy", "admin", a.String())
	}
}

// NewServer returns a server with a limit of connections, whose log has one message for all failures of connections.
func NewServer(s *http.Server, most int, to *slog.Logger) *listen.Server {
	server := listen.New(s, most, to)
	server.ErrorLog = log.New(serverLog{to}, "", 0)
	return server
}

// ServeListener serves a listener until its server is closed.
func ServeListener(on net.Listener, serve func(net.Listener) error) error {
	if err := serve(on); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", on.Addr(), err)
	}
	return nil
}

// serverLog logs messages of net/http about connections, which contain the peer, under one constant
// message, so that the log sampler bounds them.
type serverLog struct{ to *slog.Logger }

func (l serverLog) Write(line []byte) (int, error) {
	l.to.Warn("connection failed", "error", strings.TrimSpace(string(line)))
	return len(line), nil
}
