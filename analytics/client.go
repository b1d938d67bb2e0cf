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

	"github.com/posthorn/posthorn/analytics/event"
)

// Version of the client. It is part of the User-Agent and of [DefaultContext].
const Version = "0.3.0-dev"

// Endpoint is the default server: the dispatcher of a Posthorn in the same cluster, installed with
// the default names.
const Endpoint = "http://posthorn-dispatcher.posthorn-system"

// DefaultContext is sent with each batch; the server merges it into the context
// of each call. Set it before a client's first call.
var DefaultContext = map[string]interface{}{
	"library": map[string]interface{}{
		"name":    "posthorn-go",
		"version": Version,
	},
}

// Client queues calls and sends them in batches. Create one with [New], share it, and close it before
// the program ends.
//
// The exported fields are settings. They are read at the first call and must not be changed after
// it. The options of New include them all.
type Client struct {
	// Endpoint is the server's base address or its URL for batches; see [WithEndpoint].
	Endpoint string
	// Interval is the time since the last flush that starts a flush; see [FlushAfter].
	Interval time.Duration
	// Size is the number of queued calls that starts a flush; see [FlushAt].
	Size int
	// Logger receives the client's log; see [WithLogger] for log/slog.
	Logger *log.Logger
	// Verbose logs everything that the client does.
	Verbose bool
	// Client sends the requests. Unless it has a Transport, the analytics client uses a connection
	// pool that Close closes. Redirects are not followed, unless it has a
	// CheckRedirect.
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

	// Set by prepare.
	prepared      sync.Once
	misconfigured error
	log           *slog.Logger
	diagnosis     slog.Level // level of messages for diagnosis
	writeKey      string
	url           string
	authorization string
	context       []byte // DefaultContext
	maxCall       int    // bytes of a call without the context
	ownTransport  *http.Transport
	life          context.Context // context of requests; Close cancels it at its deadline
	endLife       context.CancelFunc

	health health
	queue  queue
}

// New returns a client that sends calls with a Source's write key.
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
// This and the other calls return a [*FieldError] such as [ErrNoEvent] for an invalid call, a
// [*SizeError], an [*EncodeError], [ErrQueueFull], [ErrClosed], or a [*ConfigError].
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

// Enqueue queues a call of any kind. The context only bounds the wait for space of a [Blocking]
// client: a queued call is sent although the context ends. Errors: see [Client.Identify], and the
// context's.
func (c *Client) Enqueue(ctx context.Context, m Call) error {
	if m == nil {
		return ErrNilCall
	}
	call, err := m.call()
	return c.enqueue(ctx, &call, err)
}

// scratch holds buffers in which calls are serialized before they are added to a batch, so that the
// lock is held only for a copy.
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

// Flush sends all queued calls immediately, and returns when each is accepted or has failed, or
// when the context ends. A batch that waits for a retry is sent immediately, unless the server has
// set the time with Retry-After.
//
// It returns nil if all calls were delivered, else a [*DeliveryError] with the others. Calls that
// failed before Flush was called, and calls made later, are not included: see [OnResult].
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

// closeTimeout bounds Close. Kubernetes gives a pod 30 s to stop.
const closeTimeout = 10 * time.Second

// Close delivers the queued calls and ends the client, within 10 seconds; see [Client.CloseContext]
// for another time limit.
func (c *Client) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	return c.CloseContext(ctx)
}

// CloseContext ends the client: new calls fail with [ErrClosed], queued calls are sent as by
// [Client.Flush]. If the context ends first, CloseContext cancels the requests in flight and
// returns a [*DeliveryError] with each call that was not delivered. After that no goroutine of the
// client runs. Closing again has no effect.
func (c *Client) CloseContext(ctx context.Context) error {
	c.prepared.Do(c.prepare)
	w := c.queue.flush(true)
	var err error
	select {
	case <-w.done:
		err = w.result(nil)
	case <-ctx.Done():
		c.queue.cancel(ctx.Err())
		err = c.awaitEnd(w, ctx.Err())
	}
	c.endLife()
	if c.ownTransport != nil {
		c.ownTransport.CloseIdleConnections()
	}
	c.health.logLosses(c.log, 0)
	return err
}

// awaitEnd waits for the cancelled requests. They end immediately, unless a custom Transport
// ignores its context, which must not block Close.
func (c *Client) awaitEnd(w *waiter, cause error) error {
	timeout := time.NewTimer(time.Second)
	defer timeout.Stop()
	select {
	case <-w.done:
		return w.result(cause)
	case <-timeout.C:
		return c.queue.abandon(w, cause)
	}
}

// prepare computes the client's state from its settings. It runs once.
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

// batchPath is the server's path for batches.
const batchPath = "/v1/batch"

// batchURL returns the URL for batches at an endpoint, which is a base address or that URL itself.
// The error is a [*ConfigError].
func batchURL(endpoint string) (string, error) {
	u, err := url.Parse(endpoint)
	// The error does not repeat the address, which may contain a password.
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return "", &ConfigError{"Endpoint", "is not a server address; set it to scheme://host[:port][/path] with http or https"}
	}
	u.User = nil // the write key replaces it
	return strings.TrimSuffix(strings.TrimRight(u.String(), "/"), batchPath) + batchPath, nil
}

func (c *Client) prepareRequests() error {
	if c.writeKey == "" {
		return &ConfigError{"writeKey", "is empty; pass the write key of a Source to New"}
	}
	var err error
	if c.url, err = batchURL(c.Endpoint); err != nil {
		return err
	}
	c.authorization = "Basic " + base64.StdEncoding.EncodeToString([]byte(c.writeKey+":"))
	c.maxCall = event.MaxCallBytes
	if len(DefaultContext) > 0 {
		if c.context, err = json.Marshal(DefaultContext); err != nil {
			return &ConfigError{"DefaultContext", "cannot be sent as JSON: " + err.Error()}
		}
		if len(c.context) > event.MaxCallBytes/2 {
			return &ConfigError{"DefaultContext", "is larger than 16 KB, half of the limit of a call; make it smaller"}
		}
		c.maxCall -= len(c.context) // the server merges it into each call and counts it
	}
	if c.Client.CheckRedirect == nil {
		// After a 301 or 302 a POST becomes a GET without a body, and its 200 would look like
		// success.
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
