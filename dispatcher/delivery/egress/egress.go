// Package egress sends every request to a webhook: its Client is the only code that does. It does
// not know messages, retries or queues.
//
// It uses HTTP/1.1 only, on keep-alive connections that carry one request at a time, so that
// requests cannot affect each other. Endpoints with the same host, port and TLS settings share the
// unused connections. HTTP/2 would send all requests to a host over one connection, where one lost
// packet or one GOAWAY affects all of them, and has no advantage between two servers. Redirects are
// not followed, proxies from the environment are not used, and each address is checked after DNS,
// when it is dialled. Behind the release's proxy, which resolves names itself, only addresses in URLs
// and special names are checked.
//
// A webhook URL is a credential: messages, logs and printed values of this package never contain a
// path, a query or a header's value. The main types are Client, Endpoint, Policy and Result.
package egress

import (
	"bufio"
	"bytes"
	"container/ring"
	"context"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// Reason classifies a failed attempt; "" is success. The condition Delivering has
// the same reasons.
type Reason string

// The reasons.
const (
	// TimedOut: no (complete) response within the deadline.
	TimedOut Reason = "TimedOut"
	// ConnectionRefused: nothing listens at the address.
	ConnectionRefused Reason = "ConnectionRefused"
	// ConnectionFailed: the connection broke, or could not be opened for another reason. Also if
	// the caller's context was cancelled.
	ConnectionFailed Reason = "ConnectionFailed"
	// DNSFailed: the host name does not resolve.
	DNSFailed Reason = "DNSFailed"
	// CertificateRejected: the endpoint's certificate cannot be verified. Nothing was sent.
	CertificateRejected Reason = "CertificateRejected"
	// TLSFailed: the TLS handshake failed for another reason.
	TLSFailed Reason = "TLSFailed"
	// AddressDenied: the Policy denies the address. Nothing was sent.
	AddressDenied Reason = "AddressDenied"
	// TokenFailed: no OAuth 2.0 access token could be obtained. Nothing was sent.
	TokenFailed Reason = "TokenFailed"
	// ProxyFailed: the release's egress proxy failed, or did not open a connection to the endpoint.
	// StatusCode is 0, so that the proxy's status never counts as the endpoint's.
	ProxyFailed Reason = "ProxyFailed"
	// ServerError: 5xx.
	ServerError Reason = "ServerError"
	// Throttled: 429 or 408.
	Throttled Reason = "Throttled"
	// Rejected: any other 4xx.
	Rejected Reason = "Rejected"
	// Redirected: 3xx.
	Redirected Reason = "Redirected"
	// TransformFailed: no request could be made of the message, because an expression of spec.request failed. Nothing was
	// sent.
	TransformFailed Reason = "TransformFailed"
	// InvalidResponse: the answer is not valid HTTP, or has a valid status and a body that does not list the rejected messages
	// of a batch.
	InvalidResponse Reason = "InvalidResponse"
)

// Header is a request header of one attempt. Bytes that are invalid in a header are
// percent-encoded.
type Header struct{ Name, Value string }

// Result is the result of one attempt.
type Result struct {
	// StatusCode of the final response; 0 if there was none. An incomplete 2xx does not count (a
	// proxy may have sent the head before the receiver was done); any other status counts as soon
	// as its head is received.
	StatusCode int
	// Reason is "" for a 2xx within the deadline.
	Reason Reason
	// Message explains Reason in words. It is redacted: it has host and address, but no path, query
	// or header value. "" on success.
	Message string
	// RetryAfter is the wait that the endpoint requested with a failure, at most a day; 0 if none.
	RetryAfter time.Duration
	// Response is the first KiB of the body of an unsuccessful response, without the URL's path and
	// query and header values if they are repeated. It is data of the receiver: quote it before
	// printing.
	Response []byte
	// Accepted is set for a 2xx of an endpoint that keeps them; see Endpoint.KeepAccepted.
	Accepted *Accepted
	// Sent is false if it is certain that no byte of the request was sent.
	Sent bool
	// RemoteAddr is the dialled address, or the name of the proxy; "" if there was none.
	RemoteAddr string
	// CertificateExpires is when the endpoint's certificate expires; zero without TLS, and if the
	// handshake failed.
	CertificateExpires time.Time
	// Timing of the attempt.
	Timing Timing
}

// Accepted is the part of a 2xx response that is kept.
type Accepted struct {
	// Headers are the first values by lower-case names, without those that are longer than 4 KiB.
	Headers map[string]string
	// Body is the body, or the beginning of a longer one, for which Truncated is true. It may contain secrets.
	Body      []byte
	Truncated bool
	redact    func([]byte) []byte
}

// Timing splits the duration of an attempt. DNS, Connect and TLS are zero if an open connection was
// reused.
type Timing struct {
	DNS     time.Duration
	Connect time.Duration
	TLS     time.Duration
	// FirstByte is the time from the request to the first byte of the response.
	FirstByte time.Duration
	// Total is the duration of the whole attempt.
	Total time.Duration
}

// Options of a Client.
type Options struct {
	// Policy lists the addresses that may be dialled. Zero: public ones only.
	Policy Policy
	// Proxy for all requests except its exceptions; nil for none.
	Proxy *Proxy
	// Resolver; default net.DefaultResolver, with queries that end with the request.
	Resolver *net.Resolver
	// IdleTimeout is how long an unused connection is kept open; default 55 s, which is less than
	// the 60 s of common load balancers. A shorter value of the endpoint (Keep-Alive: timeout=5)
	// takes precedence.
	IdleTimeout time.Duration
	// MaxAge is how long a connection is reused; default 5 min. After that the name is resolved
	// again, and the connection is kept if its address is still an answer: traffic follows a moved
	// endpoint even if its old address still answers.
	MaxAge time.Duration
	// MaxOpen bounds the open connections of all endpoints; default 4,096. Above it the one that was
	// unused longest is closed. Those in use may be more, and Endpoint.Room limits endpoints to it.
	MaxOpen int
	// Logger; default slog.Default().
	Logger *slog.Logger
}

// Client posts to endpoints. It is safe for concurrent use.
type Client struct {
	policy      Policy
	proxy       *Proxy
	resolver    *net.Resolver
	idleTimeout time.Duration
	maxAge      time.Duration
	maxOpen     int64
	sessions    *sessions
	log         *slog.Logger

	idle atomic.Int64 // unused open connections
	open atomic.Int64 // all connections
	used atomic.Int64 // pools with connections

	mu      sync.Mutex
	pools   map[poolKey]*pool // pools with endpoints
	unused  ring.Ring         // of *conn, of all pools; the one unused longest is the next one of the root
	sweeper *time.Timer       // runs while there are unused connections
	closed  bool
}

// New makes a Client. Close releases it.
func New(o Options) *Client {
	c := &Client{policy: o.Policy, proxy: o.Proxy, resolver: o.Resolver, idleTimeout: o.IdleTimeout, maxAge: o.MaxAge,
		maxOpen: int64(o.MaxOpen), sessions: newSessions(maxSessionBytes), log: o.Logger, pools: map[poolKey]*pool{}}
	if c.resolver == nil {
		c.resolver = newResolver()
	}
	if c.idleTimeout <= 0 {
		c.idleTimeout = 55 * time.Second
	}
	if c.maxAge <= 0 {
		c.maxAge = 5 * time.Minute
	}
	if c.maxOpen <= 0 {
		c.maxOpen = 4096
	}
	if c.log == nil {
		c.log = slog.Default()
	}
	return c
}

// Prepare makes an Endpoint from its config. Errors name the endpoint and the field, never a value
// that could be a secret. Endpoints with the same host, port and TLS settings share connections.
// Call Forget when the Endpoint is not used any more.
func (c *Client) Prepare(e liveconfig.Endpoint) (*Endpoint, error) {
	p, err := prepare(e, c.proxy)
	if err != nil {
		return nil, err
	}
	if e.OAuth2 != nil {
		if p.tokens, err = c.newTokens(e.Name, e.OAuth2); err != nil {
			return nil, err
		}
	}
	p.pool = c.acquire(p.key(e.TLS), p.tls)
	p.tls = p.pool.tls
	return p, nil
}

// Forget ends the use of an endpoint. The last endpoint of a pool closes the unused connections;
// connections in use are closed after their request. The Endpoint remains usable.
func (c *Client) Forget(e *Endpoint) {
	c.mu.Lock()
	released := e.released
	e.released = true
	c.mu.Unlock()
	if !released {
		c.release(e.pool)
	}
}

// Close closes all unused connections; connections in use are closed after their request.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	pools := slices.Collect(maps.Values(c.pools))
	c.mu.Unlock()
	for _, p := range pools {
		p.close()
	}
}

// defaultTimeout bounds an attempt whose context has no deadline.
const defaultTimeout = 5 * time.Second

// scratch is the buffer memory of one attempt.
type scratch struct {
	request []byte
	// compressed is the body in the gzip format.
	compressed []byte
	reader     *bufio.Reader
	body       sink
}

var scratches = sync.Pool{New: func() any {
	return &scratch{reader: bufio.NewReaderSize(nil, 4<<10)}
}}

// Post sends body to the endpoint, with the endpoint's headers and the given ones, and waits for
// the response until ctx is done (5 s if ctx has no deadline). It makes one attempt. Only if a kept
// connection was closed by the endpoint without a byte of response, the request is sent again,
// once, on a new connection.
//
// While it waits, Post notices a cancellation of ctx within a quarter of a second. A cancellation
// is no evidence about the endpoint: check ctx.Err() before the Result is counted.
func (c *Client) Post(ctx context.Context, e *Endpoint, headers []Header, body []byte) (r Result) {
	start := time.Now()
	defer func() { r.Timing.Total = time.Since(start) }()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = start.Add(defaultTimeout)
	}

	if e.tokens != nil {
		return c.postWithToken(ctx, e, deadline, headers, body)
	}
	return c.post(ctx, e, deadline, "", headers, body)
}

// post makes one attempt; authorization is the value of the header Authorization, or empty. An endpoint that refuses a compressed
// body gets it uncompressed at once.
func (c *Client) post(ctx context.Context, e *Endpoint, deadline time.Time, authorization string, headers []Header,
	body []byte) (r Result) {
	s := scratches.Get().(*scratch)
	defer func() {
		s.reader.Reset(nil)
		if cap(s.request)+cap(s.compressed) <= 64<<10 {
			scratches.Put(s)
		}
	}()
	if compressed := e.compress(s, body); compressed != nil {
		s.request = e.appendRequest(s.request[:0], authorization, c.proxyAuthorization(e), headers, "gzip", compressed)
		if r = c.attempt(ctx, e, deadline, s); !e.refusesCompression(r.StatusCode) {
			return r
		}
	}
	s.request = e.appendRequest(s.request[:0], authorization, c.proxyAuthorization(e), headers, "", body)
	return c.attempt(ctx, e, deadline, s)
}

// attempt sends the request in s.
func (c *Client) attempt(ctx context.Context, e *Endpoint, deadline time.Time, s *scratch) (r Result) {
	cn := e.pool.get(ctx, time.Now(), deadline)
	if cn != nil {
		if retry := c.exchange(ctx, e, cn, s, &r); !retry {
			return r
		}
		r = Result{Sent: r.Sent}
	}
	cn, err := c.dial(ctx, e, deadline, &r.Timing)
	if err != nil {
		r.fail(ctx, e, stageConnect, err)
		return r
	}
	c.exchange(ctx, e, cn, s, &r)
	return r
}

// largeRequest is a size that may not fit into the socket buffers when the endpoint answers before
// it has read the request.
const largeRequest = 32 << 10

// writeGrace is how long a complete response waits for the end of the write of a large
// request. The writer runs in another goroutine, which may be scheduled later.
const writeGrace = 250 * time.Millisecond

// exchange sends the request on the connection, which begin has prepared, and reads the response.
// It closes the connection or returns it to the pool. retry is true if the connection was reused
// and the endpoint closed it without a response.
func (c *Client) exchange(ctx context.Context, e *Endpoint, cn *conn, s *scratch, r *Result) (retry bool) {
	keep := false
	defer func() {
		if keep {
			e.pool.put(cn)
		} else {
			cn.close()
		}
	}()
	r.RemoteAddr, r.CertificateExpires = cn.remote, cn.expires
	start := time.Now()

	var writing chan error
	var writeErr error
	if len(s.request) <= largeRequest {
		var n int
		n, writeErr = cn.Write(s.request)
		r.Sent = r.Sent || n > 0 || cn.tls != nil
	} else {
		r.Sent = true
		writing = make(chan error, 1)
		go func() {
			_, err := cn.Write(s.request)
			writing <- err
		}()
		defer func() {
			grace := time.Duration(0)
			if keep {
				grace = writeGrace
			}
			select {
			case writeErr := <-writing:
				keep = keep && writeErr == nil
			case <-time.After(grace): // The endpoint answered before it had read the request.
				keep = false
				cn.close()
				<-writing //nolint:errcheck // the connection is closed anyway
			}
		}()
	}

	// Read after a failed write, too: an endpoint that rejects a request early sends a response and
	// closes.
	s.reader.Reset(cn)
	if _, err := s.reader.Peek(1); err != nil {
		if writeErr != nil && !isTimeout(err) {
			err = writeErr
		}
		r.fail(ctx, e, stageAnswer, err)
		return cn.used && isDisconnect(err) && ctx.Err() == nil
	}
	r.Timing.FirstByte = time.Since(start)
	a, err := readAnswer(s.reader, &s.body, e.keptAccepted)
	if err != nil {
		r.fail(ctx, e, stageBody, err)
		return false
	}
	r.answered(e, a, s.body.kept, time.Now())
	if e.keptAccepted > 0 && r.Reason == "" {
		r.Accepted = &Accepted{a.headers, bytes.Clone(s.body.kept), !s.body.whole(), e.redactAccepted(c)}
	}
	if e.proxied() {
		r.Response = e.proxy.redact(c.log, r.Response)
	}
	keep = a.keep && writeErr == nil
	cn.used = true
	cn.maxIdle = c.idleTimeout
	if a.maxIdle > 0 && a.maxIdle < cn.maxIdle {
		cn.maxIdle = a.maxIdle
	}
	return false
}

// WithDeadline is a cheap context.WithDeadline for Post only: it has no timer and needs no cancel.
// Done is the parent's channel; Post ends at the deadline nevertheless.
func WithDeadline(parent context.Context, deadline time.Time) context.Context {
	return deadlineContext{parent, deadline}
}

type deadlineContext struct {
	context.Context
	deadline time.Time
}

// Deadline implements context.Context.
func (c deadlineContext) Deadline() (time.Time, bool) {
	if at, ok := c.Context.Deadline(); ok && at.Before(c.deadline) {
		return at, true
	}
	return c.deadline, true
}
