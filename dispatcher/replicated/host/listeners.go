package host

import (
	"context"
	"errors"
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
	peers net.Listener
}

// Listen opens the listeners that the options name.
func Listen(o Options) (*Listeners, error) {
	if o.PeerListen == "" {
		return nil, errors.New("a replicated log needs an address for the other processes; set --peer-listen")
	}
	l := &Listeners{}
	var err error
	if l.Listeners, err = dispatcher.Listen(o.Options); err != nil {
		return nil, err
	}
	if l.peers, err = net.Listen("tcp", o.PeerListen); err != nil {
		l.Listeners.Close()
		return nil, fmt.Errorf("listen for other processes: %w", err)
	}
	return l, nil
}

// NewListeners returns listeners that are open.
func NewListeners(own *dispatcher.Listeners, peers net.Listener) *Listeners {
	return &Listeners{own, peers}
}

// Close closes the listeners.
func (l *Listeners) Close() {
	l.Listeners.Close()
	_ = l.peers.Close()
}

// serve serves the listeners as dispatcher.Listeners does, and that for the other processes until the calls have ended.
func (l *Listeners) serve(ctx context.Context, o Options, h dispatcher.Handlers, peers peer.Handlers) error {
	group, ctx := errgroup.WithContext(ctx)
	server := newPeerServer(o.identity, peers, o.Logger)
	group.Go(func() error {
		return dispatcher.ServeListener(l.peers, func(on net.Listener) error { return server.ServeTLS(on, o.identity.Config()) })
	})
	group.Go(func() error {
		defer server.Close()
		return l.Listeners.Serve(ctx, o.Options, h, func() time.Duration { return handOverTimeout })
	})
	return group.Wait()
}

// newPeerServer makes the server for the requests that other processes forward.
func newPeerServer(identity *peer.Identity, to peer.Handlers, log *slog.Logger) *listen.Server {
	h := identity.Handler(to, log)
	s := ingest.NewServer(h)
	s.RegisterOnShutdown(h.Stop)
	s.MaxHeaderBytes += peer.HeaderBytes
	return dispatcher.NewServer(s, dispatcher.MaxConns, log)
}
