package host

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/intake/ingest"
	"github.com/posthorn/posthorn/dispatcher/intake/listen"
	"github.com/posthorn/posthorn/dispatcher/replicated/peer"
)

// Listeners are the open listeners of a process.
type Listeners struct {
	*dispatcher.Listeners
	peers net.Listener // nil: standbys do not forward
}

// Listen opens the listeners that the options name.
func Listen(o Options) (*Listeners, error) {
	l := &Listeners{}
	var err error
	if l.Listeners, err = dispatcher.Listen(o.Options); err != nil || o.PeerListen == "" {
		return l, err
	}
	if l.peers, err = net.Listen("tcp", o.PeerListen); err != nil {
		l.Close()
		return nil, fmt.Errorf("listen for other processes: %w", err)
	}
	return l, nil
}

// Close closes the listeners.
func (l *Listeners) Close() {
	l.Listeners.Close()
	if l.peers != nil {
		_ = l.peers.Close()
	}
}

// share returns other listeners of the same sockets.
func (l *Listeners) share() (*Listeners, error) {
	shared := &Listeners{}
	var err error
	if shared.Listeners, err = l.Listeners.Share(); err != nil || l.peers == nil {
		return shared, err
	}
	if shared.peers, err = dispatcher.ShareListener(l.peers); err != nil {
		shared.Listeners.Close()
	}
	return shared, err
}

// serve serves the listeners as dispatcher.Listeners does, and that for the other processes until the calls have ended.
func (l *Listeners) serve(ctx context.Context, o Options, h dispatcher.Handlers, peers peer.Handlers, leave func() time.Duration) error {
	group, ctx := errgroup.WithContext(ctx)
	server := newPeerServer(o.identity, peers, o.Logger)
	if o.identity != nil {
		group.Go(func() error { return servePeers(l.peers, o.identity, server) })
	}
	group.Go(func() error {
		defer server.Close()
		return l.Listeners.Serve(ctx, o.Options, h, leave)
	})
	return group.Wait()
}

// newPeerServer makes the server for the requests that standbys forward. identity may be nil if it does
// not serve.
func newPeerServer(identity *peer.Identity, to peer.Handlers, log *slog.Logger) *listen.Server {
	h := identity.Handler(to, log)
	s := ingest.NewServer(h)
	s.RegisterOnShutdown(h.Stop)
	s.MaxHeaderBytes += peer.HeaderBytes
	return dispatcher.NewServer(s, dispatcher.MaxConns, log)
}

func servePeers(on net.Listener, identity *peer.Identity, server *listen.Server) error {
	return dispatcher.ServeListener(on, func(on net.Listener) error { return server.ServeTLS(on, identity.Config()) })
}

// peerEntrance brings the requests that standbys forward to the Dispatcher of a process with one slot.
type peerEntrance struct {
	on       net.Listener
	identity *peer.Identity
	log      *slog.Logger
	server   *listen.Server
}

// Open implements dispatcher.Entrance.
func (e *peerEntrance) Open(d *dispatcher.Dispatcher, h dispatcher.Handlers, fail func(error)) {
	e.server = newPeerServer(e.identity, peer.Handlers{Calls: h.Calls, Admin: h.Admin, Namespace: d.NamespaceOf}, e.log)
	on, err := dispatcher.ShareListener(e.on)
	if err != nil {
		fail(err)
		return
	}
	go func() {
		if err := servePeers(on, e.identity, e.server); err != nil {
			fail(err)
		}
	}()
}

// Close implements dispatcher.Entrance.
func (e *peerEntrance) Close(ctx context.Context) error {
	err := e.server.Shutdown(ctx)
	if err != nil {
		_ = e.server.Close()
	}
	return err
}
