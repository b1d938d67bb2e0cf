package analytics

import (
	"log/slog"
	"net/http"
	"time"
)

// Option configures a client in [New].
type Option func(*Client)

// FlushAt sets the number of queued calls that starts a flush: 20 by default, at most 2500. 1 sends
// each call immediately in a separate request. The same as [Client.Size].
//
// It does not set the size of a batch: while the maximum of requests is in flight (see
// [MaxInFlight]), further calls join one batch, up to ten times as many, and up to the server's
// limits of 2500 calls and 500 KB.
func FlushAt(calls int) Option { return func(c *Client) { c.Size = calls } }

// FlushAfter sets the time since the last flush, or the first call, that starts a flush of the queued calls: 5 seconds
// by default. A call after a longer pause does not wait. The same as [Client.Interval].
func FlushAfter(d time.Duration) Option { return func(c *Client) { c.Interval = d } }

// WithEndpoint sets the server: its base address, scheme://host[:port][/path], to which the client
// adds /v1/batch, or the full URL, which ends with /v1/batch. The same as [Client.Endpoint].
func WithEndpoint(url string) Option { return func(c *Client) { c.Endpoint = url } }

// WithHTTPClient sets the HTTP client for the requests. The same as [Client.Client]. The client
// uses a copy.
func WithHTTPClient(hc *http.Client) Option { return func(c *Client) { c.Client = *hc } }

// WithLogger sets the logger, instead of [Client.Logger]. The client logs the number of undelivered
// calls as an error, at most every 10 seconds, the start and end of an outage as warnings, and
// everything else at debug level; with DEBUG=analytics in the environment, or [Client.Verbose], at
// info level. It never logs properties, traits or the write key.
func WithLogger(l *slog.Logger) Option { return func(c *Client) { c.slog = l } }

// OnResult sets a function that gets the result of each queued call once: accepted by the server,
// or failed. Several goroutines call it concurrently; while it runs, it occupies one of the
// requests in flight. It may make calls, but must not call Flush or Close, which wait for it.
func OnResult(f func(Result)) Option { return func(c *Client) { c.onResult = f } }

// QueueLimit sets the maximum number of undelivered calls, including those in flight and those to
// be retried: 10,000 by default.
func QueueLimit(calls int) Option { return func(c *Client) { c.maxCalls = calls } }

// QueueBytes sets the maximum size of the undelivered calls in bytes of JSON: 64 MB by default.
func QueueBytes(bytes int) Option { return func(c *Client) { c.maxBytes = bytes } }

// Blocking makes calls wait for space while the queue is full, instead of failing with
// [ErrQueueFull]. [Client.Enqueue] bounds the wait by its context; closing the client ends it with
// [ErrClosed].
func Blocking() Option { return func(c *Client) { c.blocking = true } }

// MaxInFlight sets the maximum number of concurrent requests: 8 by default. A batch that waits for
// a retry does not count.
func MaxInFlight(requests int) Option { return func(c *Client) { c.maxInFlight = requests } }

// RetryFor sets how long a batch is retried, from its first attempt: 10 minutes
// by default. 0 means one attempt only.
func RetryFor(d time.Duration) Option { return func(c *Client) { c.retryFor = d } }

// RequestTimeout sets the timeout of a request, including its response: 10 seconds by default.
func RequestTimeout(d time.Duration) Option { return func(c *Client) { c.requestTimeout = d } }

// Gzip makes the client compress requests of 1 KB and more. It saves nine tenths of the bytes and
// costs CPU time: use it over the internet, not inside a cluster. It is off by default.
func Gzip() Option { return func(c *Client) { c.gzip = true } }

// Result is the result of one call.
type Result struct {
	// Type is the kind of call: "track", ...
	Type string
	// MessageID is the call's id.
	MessageID string
	// Message is the call in JSON, as it was sent. It is valid until the function returns; copy it
	// to keep it.
	Message []byte
	// Attempts is the number of requests with the call.
	Attempts int
	// Err is nil if the server accepted the call, else the reason of the failure; see
	// [Failure.Err].
	Err error
}

// Backoff determines the wait before a batch is sent again.
type Backoff interface {
	// Duration is the longest wait after the given attempt, from 0. The client waits a random part
	// of it, so that many clients do not retry at the same time.
	Duration(attempt int) time.Duration
}

// Backo is the backoff of all clients: 100 ms after the first attempt, doubled after each further
// one, up to 10 s. Set it before the first call. The vendor's library has the same name and
// type.
var Backo Backoff = exponential{}

type exponential struct{}

func (exponential) Duration(attempt int) time.Duration {
	return min(100*time.Millisecond<<min(max(attempt, 0), 10), 10*time.Second)
}
