package analytics

import (
	"log/slog"
	"net/http"
	"time"
)

// Option sets up a client in [New].
type Option func(*Client)

// FlushAt sets how many waiting calls start a flush: 20 by default, at most
// 2500. 1 sends each call in a request of its own, at once. The same as
// [Client.Size].
//
// It is when a flush starts, not the size of a batch: while all requests that
// may be under way are (see [MaxInFlight]), the calls that come in meanwhile
// travel together, up to ten times as many, and to the server's limits of 2500
// calls and 500 KB.
func FlushAt(calls int) Option { return func(c *Client) { c.Size = calls } }

// FlushAfter sets how long a call waits for others to travel with: 5 seconds
// by default. The same as [Client.Interval].
func FlushAfter(d time.Duration) Option { return func(c *Client) { c.Interval = d } }

// WithEndpoint sets the server's address, scheme://host[:port][/path]; the
// client adds /v1/batch. The same as [Client.Endpoint].
func WithEndpoint(url string) Option { return func(c *Client) { c.Endpoint = url } }

// WithHTTPClient sets the HTTP client that requests are made with. The same as
// [Client.Client]. The client takes a copy.
func WithHTTPClient(hc *http.Client) Option { return func(c *Client) { c.Client = *hc } }

// WithLogger sets where the client logs, in place of [Client.Logger]. It logs
// how many calls were not delivered as an error, at most every 10 seconds, the
// begin and end of an outage as warnings, and all else at debug level; with DEBUG=analytics in the
// environment, or [Client.Verbose], at info level. Properties, traits and the
// write key are never logged.
func WithLogger(l *slog.Logger) Option { return func(c *Client) { c.slog = l } }

// OnResult sets a function that learns the fate of each queued call, once:
// accepted by the server, or given up. Several goroutines call it, at the same
// time; while it runs, a request less can be under way. It may make calls, but
// must not call Flush or Close, which wait for it.
func OnResult(f func(Result)) Option { return func(c *Client) { c.onResult = f } }

// QueueLimit sets how many calls may wait for delivery, those under way and
// those to be retried among them: 10,000 by default.
func QueueLimit(calls int) Option { return func(c *Client) { c.maxCalls = calls } }

// QueueBytes sets how many bytes of JSON may wait for delivery: 64 MB by
// default.
func QueueBytes(bytes int) Option { return func(c *Client) { c.maxBytes = bytes } }

// Blocking makes calls wait for room while the queue is full, in place of
// failing with [ErrQueueFull]. [Client.Enqueue] bounds the wait by its context;
// closing the client ends it with [ErrClosed].
func Blocking() Option { return func(c *Client) { c.blocking = true } }

// MaxInFlight sets how many requests may be under way at the same time: 8 by
// default. A batch that waits for its next attempt is not under way.
func MaxInFlight(requests int) Option { return func(c *Client) { c.maxInFlight = requests } }

// RetryFor sets how long a batch is retried, from its first attempt: 10 minutes
// by default. 0 means one attempt only.
func RetryFor(d time.Duration) Option { return func(c *Client) { c.retryFor = d } }

// RequestTimeout sets how long one request may take, its answer included: 10
// seconds by default.
func RequestTimeout(d time.Duration) Option { return func(c *Client) { c.requestTimeout = d } }

// Gzip makes the client compress requests of 1 KB and more. It saves nine
// tenths of the bytes and costs the time of compressing them: worth it over the
// internet, not inside a cluster, so it is off by default.
func Gzip() Option { return func(c *Client) { c.gzip = true } }

// Result is the fate of one call.
type Result struct {
	// Type is the kind of call: "track", ...
	Type string
	// MessageID is the call's id.
	MessageID string
	// Message is the call, in JSON, as it was sent. It is valid until the
	// function returns; whoever keeps it must copy it.
	Message []byte
	// Attempts is how many requests carried the call.
	Attempts int
	// Err is nil when the server accepted the call, else why it was given up;
	// see [Failure.Err].
	Err error
}

// Backoff says how long to wait before a batch is sent again.
type Backoff interface {
	// Duration is the longest wait after the given attempt, from 0. The client
	// waits a random part of it, so that many clients do not come back at once.
	Duration(attempt int) time.Duration
}

// Backo is the backoff of all clients: 100 ms after the first attempt, twice
// as long after each further one, up to 10 s. Set it before the first call.
// Its name and type fit the vendor's library.
var Backo Backoff = exponential{}

type exponential struct{}

func (exponential) Duration(attempt int) time.Duration {
	return min(100*time.Millisecond<<min(max(attempt, 0), 10), 10*time.Second)
}
