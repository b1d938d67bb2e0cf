package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// dialTimeout bounds the connection to the owner.
	dialTimeout = 2 * time.Second
	// maxForwards bounds the requests in progress, each with a connection and about 100 KB. It is that of
	// the connections of a server, so only the streams of HTTP/2 can exceed it.
	maxForwards = 4096
	// maxIdle bounds the connections to the owner that are kept, and idleTimeout how long.
	maxIdle     = 256
	bufferBytes = 4 << 10 // An answer to calls has less than 1 KB.
	idleTimeout = time.Minute
)

// ErrNoOwner reports that no owner is known, or that the process no longer owns the slot.
var ErrNoOwner = errors.New("no owner of the slot is known")

// ErrBusy reports that too many requests wait for the owner.
var ErrBusy = errors.New("too many requests wait for the owner of the slot")

// BodyError is an error of the connection to the client, as opposed to that to the owner.
type BodyError struct{ Err error }

func (e *BodyError) Error() string { return "read the request: " + e.Err.Error() }

func (e *BodyError) Unwrap() error { return e.Err }

// body marks the errors of a request's body.
type body struct{ io.ReadCloser }

func (b body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = &BodyError{err}
	}
	return n, err
}

// Forwarder sends requests to the owner.
type Forwarder struct {
	// Refuse answers a request that the owner did not answer. The error wraps a *BodyError if the
	// client caused it. With any other the client should send the request again: the owner may have
	// handled it.
	Refuse func(w http.ResponseWriter, err error)
	Logger *slog.Logger
	// Slot is the slot of the requests, for processes with several slots; see TakeSlot.
	Slot string

	buffers          buffers
	forwards         atomic.Int64
	owner            atomic.Pointer[owner]
	answered, failed atomic.Int64
}

// buffers are for the bodies of answers. Without them, each answer allocates 32 KB.
type buffers struct{ sync.Pool }

// Get implements httputil.BufferPool.
func (b *buffers) Get() []byte {
	if p, ok := b.Pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, bufferBytes)
}

// Put implements httputil.BufferPool.
func (b *buffers) Put(p []byte) { b.Pool.Put(&p) }

// owner is the present owner as it announced itself.
type owner struct {
	text []byte
	Announcement
	proxy     http.Handler
	transport *http.Transport
	// replaced ends the requests to this owner.
	replaced context.Context
	stop     context.CancelFunc
}

// SetOwner sets the owner from its announcement in the log; nil if the slot has none. Requests to the
// previous one are cancelled.
func (f *Forwarder) SetOwner(announcement []byte) {
	before := f.owner.Load()
	if before != nil && bytes.Equal(before.text, announcement) {
		return
	}
	var next *owner
	if len(announcement) > 0 {
		a, pool, err := decode(announcement)
		if err != nil {
			f.Logger.Warn("requests cannot be forwarded to the owner", "error", err)
		} else {
			next = f.newOwner(announcement, a, pool)
		}
	}
	f.owner.Store(next)
	if before != nil {
		before.stop()
		before.transport.CloseIdleConnections()
	}
}

// Owner describes the owner for messages; "" if none is known.
func (f *Forwarder) Owner() string {
	if o := f.owner.Load(); o != nil {
		return o.String()
	}
	return ""
}

// Answered returns the number of requests that owners have answered; 0 for a nil Forwarder.
func (f *Forwarder) Answered() int64 {
	if f == nil {
		return 0
	}
	return f.answered.Load()
}

// Failed returns the number of requests that were refused because no owner answered; 0 for a nil
// Forwarder.
func (f *Forwarder) Failed() int64 {
	if f == nil {
		return 0
	}
	return f.failed.Load()
}

func (f *Forwarder) newOwner(text []byte, a Announcement, pool *x509.CertPool) *owner {
	o := &owner{text: text, Announcement: a}
	o.replaced, o.stop = context.WithCancel(context.Background())
	o.transport = &http.Transport{
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSHandshakeTimeout: dialTimeout,
		TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, ServerName: serverName},
		MaxIdleConnsPerHost: maxIdle,
		IdleConnTimeout:     idleTimeout,
		DisableCompression:  true,
	}
	target := &url.URL{Scheme: "https", Host: a.Address}
	o.proxy = &httputil.ReverseProxy{
		Transport:  o.transport,
		BufferPool: &f.buffers,
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(target)
			p.Out.Host = p.In.Host
			for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
				if values := p.In.Header.Values(name); values != nil {
					p.Out.Header[name] = values
				}
			}
			p.Out.Header.Set(tokenHeader, a.Token)
			p.Out.Header.Set(clientHeader, p.In.RemoteAddr)
			if f.Slot != "" {
				p.Out.Header.Set(slotHeader, f.Slot)
			}
		},
		ModifyResponse: func(r *http.Response) error {
			if r.StatusCode == http.StatusMisdirectedRequest {
				return ErrNoOwner
			}
			f.answered.Add(1)
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			f.failed.Add(1)
			f.Logger.Debug("forwarding a request to the owner failed", "owner", a, "error", err)
			f.Refuse(w, err)
		},
		ErrorLog: log.New(proxyLog{f.Logger}, "", 0),
	}
	return o
}

// proxyLog logs the messages of the proxy: responses that ended early.
type proxyLog struct{ to *slog.Logger }

func (l proxyLog) Write(line []byte) (int, error) {
	l.to.Debug("forwarding a request to the owner failed", "error", string(bytes.TrimSpace(line)))
	return len(line), nil
}

// ServeHTTP sends a request to the owner, and its answer to the client.
func (f *Forwarder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer f.forwards.Add(-1)
	busy := f.forwards.Add(1) > maxForwards
	o := f.owner.Load()
	if o == nil || busy {
		f.failed.Add(1)
		err := ErrNoOwner
		if busy {
			err = ErrBusy
		}
		f.Refuse(w, err)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(o.replaced, cancel)()
	// On a copy, because the server checks on its own Request whether the body was read.
	r = r.WithContext(ctx)
	if r.Body != http.NoBody {
		r.Body = body{r.Body}
	}
	o.proxy.ServeHTTP(w, r)
}
