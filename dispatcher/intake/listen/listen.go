// Package listen serves HTTP on connections that are bounded in number and strict in their syntax.
// It does not know what the requests mean.
//
// net/http accepts forms that proxies and servers interpret differently, and does not report them
// to handlers: Content-Length beside Transfer-Encoding, folded header lines, lines that end with a
// bare line feed. Therefore each connection parses the framing of its requests ([framing]) and ends
// before net/http reads such a form; net/http then answers 400 and closes the connection. The same
// code counts the reset streams of HTTP/2, its frames without progress, and a request's progress, by which [limits.Conns] chooses
// the connection to close when there are too many. The main type is Server.
package listen

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/dispatcher/intake/limits"
)

// Server is an http.Server with bounded, strict connections.
type Server struct {
	*http.Server
	conns *limits.Conns
	log   *slog.Logger
}

// readFactor is how much larger than the limit of a Server are the heads that net/http reads. It ends the whole
// connection of a larger one with HTTP/2, which counts 32 bytes more for each header.
const readFactor = 4

// New makes a Server of s with at most maxConns open connections. It replaces ConnContext and ConnState,
// and answers 431 to requests whose head is larger than MaxHeaderBytes. All heads share a bound; see
// limits.Conns.
func New(s *http.Server, maxConns int, log *slog.Logger) *Server {
	limited := &Server{Server: s, conns: limits.NewConns(maxConns), log: log}
	s.ConnState = func(c net.Conn, state http.ConnState) { limited.conns.Follow(c.(*conn).limit, state) }
	s.ConnContext = func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) }
	most, next := s.MaxHeaderBytes, s.Handler
	if most == 0 {
		return limited
	}
	s.MaxHeaderBytes *= readFactor
	s.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := HeadBytes(r)
		if n > most {
			http.Error(w, "the request's headers are larger than "+strconv.Itoa(most)+" bytes", http.StatusRequestHeaderFieldsTooLarge)
			return
		}
		// A request of another server, whose connection counts there, can be served here.
		if c, ok := r.Context().Value(connKey{}).(*conn); ok && c.server == limited {
			if !limited.conns.Hold(c.limit, n) {
				w.Header().Set("Retry-After", "1")
				http.Error(w, "too many requests with large headers are in progress; send the request again", http.StatusServiceUnavailable)
				return
			}
			defer limited.conns.Hold(c.limit, -n)
		}
		next.ServeHTTP(w, r)
	})
	return limited
}

type connKey struct{}

// HeadBytes is the size of a request's head in HTTP/1.1.
func HeadBytes(r *http.Request) int {
	n := len(r.Method) + len(r.RequestURI) + len(" HTTP/1.1\r\n ") + len("Host: \r\n") + len(r.Host) + len("\r\n")
	for name, values := range r.Header {
		for _, v := range values {
			n += len(name) + len(v) + len(": \r\n")
		}
	}
	return n
}

// Serve serves HTTP in clear text.
func (s *Server) Serve(l net.Listener) error {
	return s.Server.Serve(&listener{Listener: l, server: s})
}

// ServeTLS serves HTTP over TLS. The TLS layer is hidden from net/http, so a Request's TLS is nil,
// and HTTP/2 needs UnencryptedHTTP2 in Protocols.
func (s *Server) ServeTLS(l net.Listener, config *tls.Config) error {
	config = config.Clone()
	config.NextProtos = []string{"http/1.1"}
	if s.http2() {
		config.NextProtos = []string{"h2", "http/1.1"}
	}
	return s.Server.Serve(&listener{Listener: l, server: s, tls: config})
}

func (s *Server) http2() bool { return s.Protocols != nil && s.Protocols.UnencryptedHTTP2() }

type listener struct {
	net.Listener
	server *Server
	tls    *tls.Config // nil: clear text
}

func (l *listener) Accept() (net.Conn, error) {
	raw, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw, server: l.server}
	c.limit = limits.NewConn(c.Close)
	c.framing.http2 = l.server.http2()
	if l.tls != nil {
		c.tls = tls.Server(raw, l.tls)
		c.Conn = c.tls
	}
	return c, nil
}

// conn is one connection of a Server. One goroutine at a time reads from it.
type conn struct {
	net.Conn
	server  *Server
	tls     *tls.Conn // nil: clear text, or after the handshake
	framing framing
	// held is the part of the head that is being read for which memory is held.
	held  int
	fault error // ends all further reads
	// frames is true after the preface of HTTP/2.
	frames atomic.Bool
	// limit is the progress by which the limiter selects the connection to close.
	limit *limits.Conn
}

// Read reads and checks data. A fault ends the connection after the last valid line.
func (c *conn) Read(p []byte) (int, error) {
	if c.fault == nil && c.tls != nil {
		c.fault = c.handshake()
	}
	if c.fault != nil {
		return 0, c.fault
	}
	n, err := c.Conn.Read(p)
	if n == 0 {
		return n, err
	}
	c.limit.Received(n)
	if c.framing.state == inFrames {
		c.framing.countFrom(time.Now())
	}
	sound, events, fault := c.framing.scan(p[:n])
	if more := c.framing.head - c.held; more != 0 && c.server.conns.Hold(c.limit, more) {
		c.held += more
	}
	if c.framing.state == inFrames && !c.frames.Load() {
		c.frames.Store(true)
	}
	if events&requestEnded != 0 {
		c.limit.RequestEnded()
	}
	if events&streamEnded != 0 {
		c.limit.StreamEnded()
	}
	if fault == nil {
		return n, err
	}
	c.server.log.Warn("malformed request; closing the connection", "peer", c.RemoteAddr().String(), "error", fault)
	c.fault = fault
	if errors.Is(fault, errManyResets) || errors.Is(fault, errManyControl) {
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = c.Conn.Write(c.framing.goAway())
	}
	if sound == 0 {
		return 0, fault
	}
	return sound, nil
}

// Write writes data. The frames of HTTP/2 are parsed: net/http writes the first one after it has read the preface.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if c.frames.Load() {
		c.framing.sent.scan(p[:n])
	}
	return n, err
}

// handshake does the TLS handshake. Its deadline is that for the request's head.
func (c *conn) handshake() error {
	err := c.tls.Handshake()
	if err == nil {
		c.tls = nil
		return nil
	}
	c.server.log.Warn("connection failed", "peer", c.RemoteAddr().String(), "error", fmt.Errorf("TLS handshake: %w", err))
	if record, ok := errors.AsType[tls.RecordHeaderError](err); ok && record.Conn != nil {
		switch string(record.RecordHeader[:]) {
		case "GET /", "HEAD ", "POST ", "PUT /", "OPTIO":
			_, _ = io.WriteString(record.Conn, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n\r\nThis port speaks TLS; use https.\n")
		}
	}
	return io.EOF // net/http must not send a response.
}

// CloseWrite lets net/http end a response before the client has sent its whole request.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}
