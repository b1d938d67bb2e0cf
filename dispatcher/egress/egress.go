// Package egress is the only way out: every request that Posthorn makes to a
// webhook goes through its Client.
//
// It speaks HTTP/1.1 and nothing else, on keep-alive connections that belong
// to one Endpoint each, so that no endpoint can disturb another one. HTTP/2
// would put all requests of an endpoint on one connection, where one lost
// packet or one GOAWAY meets all of them, and saves nothing between a server
// and a server. Redirects are not followed, proxies from the environment are
// not used, and each address is checked after DNS, when it is dialled.
//
// A webhook URL is a credential: what this package says in messages, logs and
// prints never holds a path, a query or a header's value.
package egress

import (
	"bufio"
	"context"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// Reason classifies a failed attempt; "" is success. The reasons are those of
// the condition Delivering.
type Reason string

// The reasons.
const (
	// TimedOut: no (complete) answer within the deadline.
	TimedOut Reason = "TimedOut"
	// ConnectionRefused: nothing listens at the address.
	ConnectionRefused Reason = "ConnectionRefused"
	// ConnectionFailed: the connection broke, or could not be made for another
	// reason. Also when the caller's context was canceled.
	ConnectionFailed Reason = "ConnectionFailed"
	// DNSFailed: the host name does not resolve.
	DNSFailed Reason = "DNSFailed"
	// CertificateRejected: the endpoint's certificate cannot be verified. Nothing was sent.
	CertificateRejected Reason = "CertificateRejected"
	// TLSFailed: the TLS handshake failed for another reason.
	TLSFailed Reason = "TLSFailed"
	// AddressDenied: the Policy denies the address. Nothing was sent.
	AddressDenied Reason = "AddressDenied"
	// ServerError: 5xx.
	ServerError Reason = "ServerError"
	// Throttled: 429 or 408.
	Throttled Reason = "Throttled"
	// Rejected: any other 4xx.
	Rejected Reason = "Rejected"
	// Redirected: 3xx.
	Redirected Reason = "Redirected"
	// InvalidResponse: the answer is not valid HTTP.
	InvalidResponse Reason = "InvalidResponse"
)

// Header is a request header of one attempt. Bytes that a header cannot hold
// are sent percent-encoded.
type Header struct{ Name, Value string }

// Result is how one attempt went.
type Result struct {
	// StatusCode of the final answer; 0 when none came. A 2xx that broke off
	// before its end is no answer (a proxy may have sent the head before the
	// receiver was done); any other status counts as soon as its head is there.
	StatusCode int
	// Reason is "" for a 2xx within the deadline.
	Reason Reason
	// Message explains Reason to people. It is redacted: host and address, but
	// no path, query or header value. "" on success.
	Message string
	// RetryAfter is what the endpoint asked for along with a failure, at most
	// a day; 0 when it did not.
	RetryAfter time.Duration
	// Response is the first KiB of the body of an answer that is no success,
	// without the URL's path and query and header values, should they be echoed.
	// It is the receiver's data: quote it before printing.
	Response []byte
	// Sent is false when it is certain that no byte of the request left.
	Sent bool
	// RemoteAddr is the address that was dialled; "" when none was.
	RemoteAddr string
	// Timing of the attempt.
	Timing Timing
}

// Timing splits the time of an attempt. DNS, Connect and TLS are zero when an
// open connection was used again.
type Timing struct {
	DNS, Connect, TLS time.Duration
	// FirstByte is the time from the request to the first byte of the answer.
	FirstByte time.Duration
	// Total is the time of the whole attempt.
	Total time.Duration
}

// Options of a Client.
type Options struct {
	// Policy says which addresses may be dialled. Zero: public ones only.
	Policy Policy
	// Resolver; default net.DefaultResolver.
	Resolver *net.Resolver
	// IdleTimeout is how long an unused connection stays open; default 55 s,
	// which is less than the 60 s of common load balancers. What an endpoint
	// says itself (Keep-Alive: timeout=5) wins when it is less.
	IdleTimeout time.Duration
	// MaxAge is how long a connection is used for further requests; default 5 min.
	// Then the name is looked up anew, so that traffic follows an endpoint that
	// moves, also when its old address still answers.
	MaxAge time.Duration
	// MaxIdle bounds the open unused connections of all endpoints together;
	// default 4,096. Endpoint.Share tells how endpoints stay within it.
	MaxIdle int
	// Logger; default slog.Default().
	Logger *slog.Logger
}

// Client posts to endpoints. It is safe for concurrent use.
type Client struct {
	policy      Policy
	resolver    *net.Resolver
	idleTimeout time.Duration
	maxAge      time.Duration
	maxIdle     int64
	log         *slog.Logger

	idle atomic.Int64 // open unused connections
	open atomic.Int64 // all connections
	used atomic.Int64 // pools that have any

	mu     sync.Mutex
	pools  map[*pool]struct{} // those that may hold connections
	closed bool
}

// New makes a Client. Close it in the end.
func New(o Options) *Client {
	c := &Client{policy: o.Policy, resolver: o.Resolver, idleTimeout: o.IdleTimeout, maxAge: o.MaxAge, maxIdle: int64(o.MaxIdle), log: o.Logger, pools: map[*pool]struct{}{}}
	if c.resolver == nil {
		c.resolver = net.DefaultResolver
	}
	if c.idleTimeout <= 0 {
		c.idleTimeout = 55 * time.Second
	}
	if c.maxAge <= 0 {
		c.maxAge = 5 * time.Minute
	}
	if c.maxIdle <= 0 {
		c.maxIdle = 4096
	}
	if c.log == nil {
		c.log = slog.Default()
	}
	return c
}

// Prepare makes a liveconfig.Endpoint ready to post to. Errors name the
// endpoint and the field, never a value that could be a secret. Keep the
// Endpoint as long as its configuration stays: its connections belong to it.
// Forget it then.
func (c *Client) Prepare(e liveconfig.Endpoint) (*Endpoint, error) {
	p, err := prepare(e)
	if err != nil {
		return nil, err
	}
	p.idle = &pool{client: c}
	return p, nil
}

// Forget closes an endpoint's unused connections; those in use are closed
// after their request. The Endpoint can still be posted to.
func (c *Client) Forget(e *Endpoint) { e.idle.close() }

// Close closes all unused connections; those in use are closed after their request.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	pools := c.pools
	c.pools = nil
	c.mu.Unlock()
	for p := range pools {
		p.close()
	}
}

// defaultTimeout bounds an attempt whose context has no deadline.
const defaultTimeout = 5 * time.Second

// scratch is the memory of one attempt.
type scratch struct {
	request []byte
	reader  *bufio.Reader
	body    sink
}

var scratches = sync.Pool{New: func() any {
	return &scratch{reader: bufio.NewReaderSize(nil, 4<<10)}
}}

// Post sends body to the endpoint, with the endpoint's headers and those
// given, and waits for the answer until ctx is done (5 s when ctx has no
// deadline). It makes one attempt: only a request that met a kept connection
// which the endpoint had closed without a byte of answer is sent again, once,
// on a new connection.
//
// A cancellation of ctx is noticed within a quarter of a second while the
// answer is awaited. It says nothing about the endpoint: look at ctx.Err()
// before the Result counts against it.
func (c *Client) Post(ctx context.Context, e *Endpoint, headers []Header, body []byte) (r Result) {
	start := time.Now()
	defer func() { r.Timing.Total = time.Since(start) }()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = start.Add(defaultTimeout)
	}

	s := scratches.Get().(*scratch)
	s.request = e.appendRequest(s.request[:0], headers, body)
	defer func() {
		s.reader.Reset(nil)
		if cap(s.request) <= 64<<10 {
			scratches.Put(s)
		}
	}()

	cn := e.idle.get(ctx, start, deadline)
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

// largeRequest is what may not fit into the buffers between us and an endpoint
// that answers before it has read all.
const largeRequest = 32 << 10

// exchange sends the request on the connection, which begin has prepared, and
// reads the answer. It closes the connection or puts it back. retry is true when the connection was
// used before and the endpoint closed it without answering.
func (c *Client) exchange(ctx context.Context, e *Endpoint, cn *conn, s *scratch, r *Result) (retry bool) {
	keep := false
	defer func() {
		if keep {
			e.idle.put(cn)
		} else {
			cn.close()
		}
	}()
	r.RemoteAddr = cn.remote
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
			select {
			case writeErr := <-writing:
				keep = keep && writeErr == nil
			default: // answered before it has read all
				keep = false
				cn.close()
				<-writing //nolint:errcheck // the connection is closed anyway
			}
		}()
	}

	// Also after a failed write: an endpoint that refuses a request early
	// answers, then closes.
	s.reader.Reset(cn)
	if _, err := s.reader.Peek(1); err != nil {
		if writeErr != nil && !isTimeout(err) {
			err = writeErr
		}
		r.fail(ctx, e, stageAnswer, err)
		return cn.used && isDisconnect(err) && ctx.Err() == nil
	}
	r.Timing.FirstByte = time.Since(start)
	a, err := readAnswer(s.reader, &s.body)
	if err != nil {
		r.fail(ctx, e, stageBody, err)
		return false
	}
	r.answered(e, a, s.body.kept, time.Now())
	keep = a.keep && writeErr == nil
	cn.used = true
	cn.maxIdle = c.idleTimeout
	if a.maxIdle > 0 && a.maxIdle < cn.maxIdle {
		cn.maxIdle = a.maxIdle
	}
	return false
}

// WithDeadline is context.WithDeadline for Post alone, without the cost: there
// is no timer, and nothing to cancel. The context's Done is that of its parent;
// Post ends at the deadline all the same.
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
