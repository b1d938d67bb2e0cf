package analytics

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"log"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/event"
)

// Version of the client. It is part of the User-Agent and of [DefaultContext].
const Version = "0.2.0"

// Endpoint is the default server: the dispatcher of a Posthorn that was
// installed in the same cluster with the default names.
const Endpoint = "http://posthorn-dispatcher.posthorn-system"

// DefaultContext is sent with each batch; the server merges it into the context
// of each call. Set it before a client's first call.
var DefaultContext = map[string]interface{}{
	"library": map[string]interface{}{
		"name":    "posthorn-go",
		"version": Version,
	},
}

// Client queues calls and delivers them in batches. Make one with [New], share
// it, and close it before the program ends.
//
// The exported fields are settings, read at the first call; they must not be
// changed after it. Options of New set the same and more.
type Client struct {
	// Endpoint is the server's address; see [WithEndpoint].
	Endpoint string
	// Interval is how long a call waits for others; see [FlushAfter].
	Interval time.Duration
	// Size is how many waiting calls start a flush; see [FlushAt].
	Size int
	// Logger takes the client's log; see [WithLogger] for log/slog.
	Logger *log.Logger
	// Verbose logs everything that the client does.
	Verbose bool
	// Client makes the requests. Unless it has a Transport, the client uses a
	// pool of connections of its own, which Close closes. Redirects are not
	// followed, unless it has a CheckRedirect.
	Client http.Client

	slog           *slog.Logger
	onResult       func(Result)
	maxCalls       int
	maxBytes       int
	blocking       bool
	maxInFlight    int
	retryFor       time.Duration
	requestTimeout time.Duration
	gzip           bool

	// What prepare makes of the settings.
	prepared      sync.Once
	misconfigured error
	log           *slog.Logger
	chatter       slog.Level // of what is only of interest when one looks for a fault
	writeKey      string
	url           string
	authorization string
	context       []byte // DefaultContext
	maxCall       int    // bytes of a call, the context left out
	ownTransport  *http.Transport
	life          context.Context // of requests; ended by Close when its time is up
	endLife       context.CancelFunc

	health health
	queue  queue
}

// New makes a client that sends calls with a Source's write key.
func New(writeKey string, opts ...Option) *Client {
	c := &Client{
		Endpoint:       Endpoint,
		Interval:       5 * time.Second,
		Size:           20,
		Logger:         log.New(os.Stderr, "analytics ", log.LstdFlags),
		maxCalls:       10_000,
		maxBytes:       64 << 20,
		maxInFlight:    8,
		retryFor:       10 * time.Minute,
		requestTimeout: 10 * time.Second,
		writeKey:       writeKey,
	}
	for _, opt := range opts {
		opt(c)
	}
	return c
}

// Identify queues an identify call.
//
// This and the other calls return a [*FieldError] such as [ErrNoEvent] for a
// call that no server would take, a [*SizeError], an [*EncodeError],
// [ErrQueueFull], [ErrClosed], or a [*ConfigError].
func (c *Client) Identify(m *Identify) error {
	call, err := m.call()
	return c.enqueue(context.Background(), &call, err)
}

// Track queues a track call. Errors: see [Client.Identify].
func (c *Client) Track(m *Track) error {
	call, err := m.call()
	return c.enqueue(context.Background(), &call, err)
}

// Page queues a page call. Errors: see [Client.Identify].
func (c *Client) Page(m *Page) error {
	call, err := m.call()
	return c.enqueue(context.Background(), &call, err)
}

// Screen queues a screen call. Errors: see [Client.Identify].
func (c *Client) Screen(m *Screen) error {
	call, err := m.call()
	return c.enqueue(context.Background(), &call, err)
}

// Group queues a group call. Errors: see [Client.Identify].
func (c *Client) Group(m *Group) error {
	call, err := m.call()
	return c.enqueue(context.Background(), &call, err)
}

// Alias queues an alias call. Errors: see [Client.Identify].
func (c *Client) Alias(m *Alias) error {
	call, err := m.call()
	return c.enqueue(context.Background(), &call, err)
}

// Enqueue queues a call of any kind. The context bounds the wait for room of a
// [Blocking] client and nothing else: what is queued is delivered although the
// context ends. Errors: see [Client.Identify], and the context's.
func (c *Client) Enqueue(ctx context.Context, m Call) error {
	if m == nil {
		return ErrNilCall
	}
	call, err := m.call()
	return c.enqueue(ctx, &call, err)
}

// scratch holds buffers in which calls are serialised before they join their
// batch, so that the lock is held for a copy only.
var scratch = sync.Pool{New: func() any { b := make([]byte, 0, 2<<10); return &b }}

func (c *Client) enqueue(ctx context.Context, m *call, invalid error) error {
	if invalid != nil {
		return invalid
	}
	c.prepared.Do(c.prepare)
	if c.misconfigured != nil {
		return c.misconfigured
	}
	if err := c.queue.refuses(); err != nil {
		return err
	}
	buffer := scratch.Get().(*[]byte)
	b, it, err := m.append((*buffer)[:0], time.Now())
	switch {
	case err != nil:
	case len(b) > c.maxCall:
		err = &SizeError{Type: m.kind.String(), Size: len(b) + event.MaxCallBytes - c.maxCall, Limit: event.MaxCallBytes}
	default:
		err = c.queue.add(ctx, b, it)
	}
	if cap(b) <= 2*event.MaxCallBytes {
		*buffer = b
		scratch.Put(buffer)
	}
	return err
}

// Flush sends what is queued, at once, and returns when all of it has been
// accepted or given up, or when the context ends. What waits for its next
// attempt is tried again at once, unless the server named a time.
//
// It returns nil when all was delivered, else a [*DeliveryError] that says what
// was not. It does not speak of calls that were given up before Flush was
// called, nor of those made after: see [OnResult].
func (c *Client) Flush(ctx context.Context) error {
	c.prepared.Do(c.prepare)
	w := c.queue.flush(false)
	select {
	case <-w.done:
		return w.result(nil)
	case <-ctx.Done():
		return c.queue.leave(w, ctx.Err())
	}
}

// closeTimeout bounds Close. Kubernetes gives a pod 30 s to end.
const closeTimeout = 10 * time.Second

// Close delivers what is queued and ends the client, within 10 seconds; see
// [Client.CloseContext] for another time.
func (c *Client) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	return c.CloseContext(ctx)
}

// CloseContext ends the client: calls fail with [ErrClosed], what is queued is
// delivered, as by [Client.Flush]. When the context ends before, what is left is
// given up, requests under way are broken off, and CloseContext returns a
// [*DeliveryError] that holds each call that was not delivered. Nothing of the
// client runs after that. Closing again is harmless.
func (c *Client) CloseContext(ctx context.Context) error {
	c.prepared.Do(c.prepare)
	w := c.queue.flush(true)
	var err error
	select {
	case <-w.done:
		err = w.result(nil)
	case <-ctx.Done():
		c.queue.giveUp(ctx.Err())
		err = c.awaitEnd(w, ctx.Err())
	}
	c.endLife()
	if c.ownTransport != nil {
		c.ownTransport.CloseIdleConnections()
	}
	c.health.logLosses(c.log, 0)
	return err
}

// awaitEnd waits for the requests that were broken off. They end at once,
// unless a foreign Transport does not listen to its context: it must not keep
// Close from returning.
func (c *Client) awaitEnd(w *waiter, cause error) error {
	patience := time.NewTimer(time.Second)
	defer patience.Stop()
	select {
	case <-w.done:
		return w.result(cause)
	case <-patience.C:
		return c.queue.abandon(w, cause)
	}
}

// prepare turns the settings into what the client works with. It runs once.
func (c *Client) prepare() {
	c.life, c.endLife = context.WithCancel(context.Background())
	c.prepareLog()
	c.misconfigured = c.prepareRequests()
	if c.Size <= 0 {
		c.Size = 20
	}
	if c.Interval <= 0 {
		c.Interval = 5 * time.Second
	}
	c.maxInFlight = max(c.maxInFlight, 1)
	c.maxCalls = max(c.maxCalls, 1)
	c.maxBytes = max(c.maxBytes, event.MaxCallBytes)
	if c.requestTimeout <= 0 {
		c.requestTimeout = 10 * time.Second
	}
	c.queue.init(c)
}

func (c *Client) prepareRequests() error {
	if c.writeKey == "" {
		return &ConfigError{"writeKey", "is empty; give New the write key of a Source"}
	}
	u, err := url.Parse(c.Endpoint)
	// The address is not repeated: it may hold a password.
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return &ConfigError{"Endpoint", "is no server's address; set it to scheme://host[:port][/path] with http or https"}
	}
	u.User = nil // the write key takes its place
	c.url = strings.TrimRight(u.String(), "/") + "/v1/batch"
	c.authorization = "Basic " + base64.StdEncoding.EncodeToString([]byte(c.writeKey+":"))
	c.maxCall = event.MaxCallBytes
	if len(DefaultContext) > 0 {
		if c.context, err = json.Marshal(DefaultContext); err != nil {
			return &ConfigError{"DefaultContext", "cannot be sent as JSON: " + err.Error()}
		}
		if len(c.context) > event.MaxCallBytes/2 {
			return &ConfigError{"DefaultContext", "is larger than 16 KB, half of what a call may have; make it smaller"}
		}
		c.maxCall -= len(c.context) // the server merges it into each call, and counts it
	}
	if c.Client.CheckRedirect == nil {
		// A POST that follows a 301 or 302 becomes a GET without a body, and
		// its 200 would look like success.
		c.Client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	}
	if c.Client.Transport == nil {
		if t, ok := http.DefaultTransport.(*http.Transport); ok {
			c.ownTransport = t.Clone()
			c.ownTransport.MaxIdleConnsPerHost = c.maxInFlight
			c.Client.Transport = c.ownTransport
		}
	}
	return nil
}
