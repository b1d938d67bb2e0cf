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

// serve serves the listeners as dispatcher.Listeners does, and that for the other processes until the calls have ended.
func (l *Listeners) serve(ctx context.Context, o Options, h dispatcher.Handlers, peers peer.Handlers, leave func() time.Duration) error {
	group, ctx := errgroup.WithContext(ctx)
	server := newPeerServer(o.identity, peers, o.Logger)
	if o.identity != nil {
		group.Go(func() error {
			return dispatcher.ServeListener(l.peers, func(on net.Listener) error { return server.ServeTLS(on, o.identity.Config()) })
		})
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
