// Package delivery sends what the queue holds to its endpoints: lanes, circuit
// breakers, workers, retries and dead letters.
//
// A lane is what one destination still has to deliver of one Source's calls. A
// lane asks the store for messages only while an endpoint has room for them, so
// a backlog costs nothing here. Requests are sent by workers that are shared by
// all lanes; which lane a worker serves next is decided in schedule.go, what
// becomes of a message in send.go, when an endpoint is left alone in circuit.go.
package delivery

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
	"github.com/posthorn/posthorn/dispatcher/delivery/sign"
	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Poster sends requests; *egress.Client is one. Post must return at its
// context's Deadline (the context need not become done by then) and soon after
// the context is done, and must not keep headers or body.
type Poster interface {
	Prepare(e liveconfig.Endpoint) (*egress.Endpoint, error)
	Post(ctx context.Context, e *egress.Endpoint, headers []egress.Header, body []byte) egress.Result
	Forget(e *egress.Endpoint)
}

// Options configure an Engine. Store and Client are required; the zero value
// of every other field is a working default.
type Options struct {
	// Store is driven by the Engine alone: nobody else may lease from it or set its notify function.
	Store queue.Store
	// Client sends the requests.
	Client Poster
	// Logger; default slog.Default().
	Logger *slog.Logger
	// Registerer takes the metrics; nil keeps them unregistered.
	Registerer prometheus.Registerer
	// Tracer makes a span of each attempt; nil makes none, and sends no traceparent.
	Tracer trace.Tracer
	// MaxInFlight bounds the requests in flight of all lanes together. Default 1024.
	MaxInFlight int
	// OrphanGrace is how long the messages of a destination that is gone from
	// the config are kept, in case it comes back. Default DefaultOrphanGrace.
	OrphanGrace time.Duration
	// DeadLetterBytes bounds the dead letters of all destinations together; the
	// oldest of the largest go first. nil: only each destination's own limit holds.
	DeadLetterBytes func() int64
	// DrainTimeout bounds how long Run waits for requests in flight when it
	// stops. Default 10 s.
	DrainTimeout time.Duration
	// Attempts is how many attempts are remembered per endpoint. Default 100.
	Attempts int
}

// Engine delivers. Make it with New, give it configs with Apply, and run it
// once with Run. All methods may be called concurrently.
type Engine struct {
	o   Options
	log *slog.Logger

	// applying is full while lanes are opened or dropped, which may wait for the
	// disk. It is filled before mu is taken.
	applying chan struct{}
	// revisions of the tenants' configs that are in effect; recovered is true
	// once the lanes of an earlier run have been listed. Guarded by applying.
	revisions map[string]string
	recovered bool
	// remembering serialises what the store is told of open circuits. It is taken before mu.
	remembering sync.Mutex

	// mu guards all that follows, and every lane, destination and endpoint.
	// It is held for moments only, and never while the store is called: the
	// store calls back.
	mu           sync.Mutex
	destinations map[string]*destination
	tenants      map[string][]*destination // sorted by name
	lanes        map[queue.LaneID]*lane
	// outages is what the store remembers of circuits, by name.
	outages map[string]outage

	// ready lanes have work and an endpoint with room for it; blocked ones wait for their share of MaxInFlight.
	ready, blocked, blockedUnproven fifo
	// inFlight counts requests, unproven those of lanes that were not proven then,
	// leased the messages that lanes have leased and not settled.
	inFlight, unproven, leased int
	running, stopped           bool
	// workers counts goroutines, idle holds those that wait, and spare is the
	// smallest number of those since the last tidying. waking counts workers
	// that were woken and have not looked for work yet.
	workers, spare, waking int
	idle                   []*worker
	exits                  sync.WaitGroup

	tails map[*tail]struct{}

	// hard ends requests in flight; soft ends all else.
	hard, soft         context.Context
	cancel, cancelSoft context.CancelFunc
	// begun is when the engine was made.
	begun time.Time
	// tidy wakes the maintenance before its time.
	tidy chan struct{}
}

// destination is a destination of the config, or one that is gone and whose lanes are kept for a while.
type destination struct {
	key, namespace, name string
	// set is nil once the destination is gone from the config.
	set       *settings
	endpoints map[string]*endpoint
	lanes     []*lane
	// trim limits its dead letters, also once it is gone; nil when that was before this run.
	trim    *liveconfig.DeadLetters
	metrics destinationMetrics
}

// settings are a destination's compiled config. They are replaced, never
// changed, so requests in flight end under the settings they began with.
type settings struct {
	generation int64
	revision   string
	// active is false for a destination that is disabled or held.
	active bool
	policy retry.Policy
	signer sign.Signer
	// targets are the endpoints in the order of the config; configs the same, for comparison.
	targets      []target
	configs      []liveconfig.Endpoint
	maxInFlight  int
	perSecond    int
	deadLetters  liveconfig.DeadLetters
	exactNumbers bool
}

// target is an endpoint with its prepared request.
type target struct {
	*endpoint
	to *egress.Endpoint
}

// endpoint is what is known of one URL of one destination, shared by its lanes.
type endpoint struct {
	destination *destination
	name        string
	// to is what the config now says of it; nil while it cannot be sent to.
	to       *egress.Endpoint
	circuit  circuit
	bucket   bucket
	health   health
	inFlight int
	attempts attempts
	metrics  endpointMetrics
	// told is the state that the log says, toldAt since when, untold how often it changed since.
	told   liveconfig.EndpointState
	toldAt time.Time
	untold int
	// lanes that send here, in turns: turn is whose it is.
	lanes []*lane
	turn  int
	// timer fires at timerAt, when a probe is due or the rate limit allows a request.
	timer   *time.Timer
	timerAt time.Time
}

// lane is the engine's side of a queue lane.
type lane struct {
	id          queue.LaneID
	destination *destination
	// set and targets are what the lane delivers with. A lane without targets
	// is parked: nothing is leased and nothing sent.
	set     *settings
	targets []target
	// opened is true once the store has the lane open in this run.
	opened bool
	// broken is true while the store failed for the lane.
	broken bool
	// dropAt is set for a lane that the config does not name any more.
	dropAt time.Time
	// A lane of the other success policy than the destination's present one is
	// draining: it delivers what was accepted before the lanes that took over
	// were open. So is a lane of a group whose endpoint is gone (left). It sends to
	// the endpoints that there are, what no other lane has. end is what the store knows.
	draining, left bool
	end            queue.End

	// next links the lane into the queue that it stands in, if queued.
	next   *lane
	queued bool
	// waited is true from when the lane was blocked until its next request.
	waited bool
	// probes counts the probes that the lane was asked for.
	probes int
	// buffer[head:] is leased and not started. Another lease may be under way.
	buffer  []queue.Delivery
	scratch []queue.Delivery
	head    int
	leasing bool
	// more is true unless the store had nothing more to lease; notified is true
	// when it said otherwise during a lease.
	more, notified bool
	// inFlight counts requests, leased messages.
	inFlight, leased int
}

// DefaultOrphanGrace is the default of Options.OrphanGrace.
const DefaultOrphanGrace = 10 * time.Minute

// New makes an Engine. It sends nothing before Run.
func New(o Options) *Engine {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.MaxInFlight <= 0 {
		o.MaxInFlight = 1024
	}
	if o.OrphanGrace <= 0 {
		o.OrphanGrace = DefaultOrphanGrace
	}
	if o.DrainTimeout <= 0 {
		o.DrainTimeout = 10 * time.Second
	}
	if o.Attempts <= 0 {
		o.Attempts = 100
	}
	e := &Engine{
		o: o, log: o.Logger,
		revisions:    map[string]string{},
		destinations: map[string]*destination{}, tenants: map[string][]*destination{}, lanes: map[queue.LaneID]*lane{},
		tails: map[*tail]struct{}{}, tidy: make(chan struct{}, 1), applying: make(chan struct{}, 1), begun: time.Now(),
	}
	e.hard, e.cancel = context.WithCancel(context.Background())
	e.soft, e.cancelSoft = context.WithCancel(e.hard)
	o.Store.SetNotify(e.notify)
	if o.Registerer != nil {
		o.Registerer.MustRegister(collector{e})
	}
	return e
}

// Run delivers until ctx is done. Then it leases nothing more, waits for the
// requests in flight (at most DrainTimeout), gives back what was not sent, and
// returns. An Engine runs once.
func (e *Engine) Run(ctx context.Context) error {
	e.mu.Lock()
	e.running = true
	e.kick()
	e.mu.Unlock()

	maintained := make(chan struct{})
	go func() {
		defer close(maintained)
		e.maintain(e.soft)
	}()
	<-ctx.Done()
	e.cancelSoft()
	<-maintained
	e.stop()
	return nil
}

// stop ends the workers and gives back all that is leased.
func (e *Engine) stop() {
	e.mu.Lock()
	e.stopped = true
	var back []queue.Delivery
	for _, l := range e.lanes {
		back = append(back, e.takeBuffer(l)...)
	}
	for _, d := range e.destinations {
		for _, ep := range d.endpoints {
			if ep.timer != nil {
				ep.timer.Stop()
			}
		}
	}
	for _, w := range e.idle {
		w.wake <- false
	}
	e.idle = nil
	e.mu.Unlock()
	e.release(back)

	drained := make(chan struct{})
	go func() {
		e.exits.Wait()
		close(drained)
	}()
	patience := time.NewTimer(e.o.DrainTimeout)
	defer patience.Stop()
	select {
	case <-drained:
	case <-patience.C:
		e.log.Warn("requests were still in flight at the end of the drain timeout; they are given up and will be sent again", "drainTimeout", e.o.DrainTimeout)
		e.cancel()
		<-drained
	}
	e.cancel()
}
