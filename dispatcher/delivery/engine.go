// Package delivery sends the queue's messages to their endpoints: lanes, circuit breakers, workers,
// retries and dead letters. It does not know how requests travel (package egress) or how messages
// are stored (package queue).
//
// A lane holds the undelivered messages of one Source for one destination or endpoint. A lane
// leases messages from the store only while an endpoint can accept more requests, so a backlog
// costs no memory here. All lanes share the workers that send requests. schedule.go chooses the
// next lane of a worker, send.go sends a message and records its outcome. Package delivery/endpoint
// decides how many requests an endpoint may get. The main types are Engine and Options.
package delivery

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
	"github.com/posthorn/posthorn/dispatcher/delivery/sign"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Poster sends requests; *egress.Client is one. Post must return at its context's Deadline (the
// context may be done later) and soon after the context is done, and must not keep headers or body.
type Poster interface {
	Prepare(e liveconfig.Endpoint) (*egress.Endpoint, error)
	Post(ctx context.Context, e *egress.Endpoint, headers []egress.Header, body []byte) egress.Result
	Forget(e *egress.Endpoint)
}

// Store is the part of queue.Store that an Engine uses.
type Store interface {
	queue.Lanes
	queue.Meta
	queue.Stats
	TrimDeadLetters(ctx context.Context, destination string, before, young time.Time, maxBytes int64) (int, error)
}

// Options configure an Engine. Store and Client are required; the zero value
// of every other field is a working default.
type Options struct {
	// Store is used exclusively by the Engine: no other code may lease from it or set its notify
	// function.
	Store Store
	// Client sends the requests.
	Client Poster
	// Logger; default slog.Default().
	Logger *slog.Logger
	// Registerer registers the totals; nil leaves them unregistered. WriteMetrics writes the series
	// of the destinations.
	Registerer prometheus.Registerer
	// DetailedMetrics adds histograms, failure reasons and lanes to the series of each destination.
	DetailedMetrics bool
	// Tracer makes a span per attempt; nil makes none and sends no traceparent.
	Tracer trace.Tracer
	// MaxInFlight bounds the requests in flight of all lanes. Default 1024.
	MaxInFlight int
	// OrphanGrace is how long the messages of a destination that is missing in the config are kept,
	// in case it is restored. Default DefaultOrphanGrace.
	OrphanGrace time.Duration
	// WindowsSince is the start of the retry windows of all messages that were accepted before it.
	WindowsSince time.Time
	// DeadLetterBytes bounds the dead letters of all destinations together; above it the oldest of
	// the largest destination are removed. nil: only each destination's own limit applies.
	DeadLetterBytes func() int64
	// DrainTimeout bounds how long Run waits for requests in flight when it stops. Default 10 s.
	DrainTimeout time.Duration
	// Attempts is the number of attempts that are kept per endpoint. Default 100.
	Attempts int
	// MaySend reports whether a request may be sent now. It is called before each request; when it is
	// false, requests in flight are cancelled within leaseCheck and sent again later. nil: always.
	MaySend func() bool
	// MayExpire reports whether retry windows and retentions may end now. It is false while the clock of this
	// process may be wrong. nil: always.
	MayExpire func() bool
	// Changes is marked when the report of a destination changes; nil marks nothing.
	Changes *changes.Log
}

// Engine delivers messages. Make it with New, set configs with Apply, and call Run once. All
// methods may be called concurrently.
type Engine struct {
	o   Options
	log *slog.Logger

	// applying is full while lanes are opened or dropped, which may wait for the disk. It is
	// acquired before mu.
	applying chan struct{}
	// applied is the view in effect; nil before the first one. recovered is true after the lanes of an
	// earlier run are listed. Guarded by applying.
	applied   *liveconfig.View
	recovered bool
	// orphanRecords are the records that the store has, by name. Guarded by applying.
	orphanRecords map[string]orphanRecord
	// recordsMu serializes the writes of the endpoints' health to the store. It is acquired before mu.
	recordsMu sync.Mutex

	// mu guards all following fields, and every lane, destination and endpoint. It is held briefly,
	// and never during a call of the store, because the store calls back.
	mu           sync.Mutex
	destinations map[string]*destination
	// perNamespace has an entry for each namespace with a destination.
	perNamespace map[string]*namespace
	// duration of all requests, latency of all deliveries.
	duration, latency histogram
	lanes             map[queue.LaneID]*lane
	bySource          map[string][]*lane
	// records are the endpoints' health that the store has, by namespace and name.
	records map[string]map[string]health
	// orphans are the lanes with a dropAt.
	orphans map[*lane]bool

	// ready lanes have messages and an endpoint that can accept them; blocked lanes wait for their
	// share of MaxInFlight.
	ready                    readyQueue
	blocked, blockedUnproven blockedQueue
	// active counts the namespaces with waiting lanes, leases in progress or requests in flight; sharedAt is when it
	// was last more than one.
	active   int
	sharedAt time.Time
	// inFlight counts requests, unproven the requests of lanes that were not proven at their start,
	// granted the lanes with a grant, leased the messages that are leased and not settled.
	inFlight, unproven, granted, leased int
	running, stopped                    bool
	// workers counts goroutines, idle holds the waiting ones, and spare is the smallest number of
	// idle workers since tidyWorkers ran. waking counts workers that were woken and have not looked
	// for work yet.
	workers, spare, waking int
	idle                   []*worker
	exits                  sync.WaitGroup

	tails map[*Tail]struct{}

	// hard ends requests in flight; soft ends everything else.
	hard, soft         context.Context
	cancel, cancelSoft context.CancelFunc
	// paused is true while MaySend is false. flight is the parent of new requests, cancelled by a
	// pause.
	paused       bool
	flight       context.Context
	cancelFlight context.CancelFunc
	// createdAt is the time of New.
	createdAt time.Time
	// tidy starts the maintenance early.
	tidy chan struct{}
}

// namespace has what the destinations of a namespace share: the turns of their lanes, and counters
// that include deleted destinations.
type namespace struct {
	// destinations has the engine's destinations in the namespace.
	destinations map[*destination]struct{}
	// inFlight counts requests; load counts these, the lanes in queues and the leases in progress.
	inFlight, load int
	// ready are the lanes in the ready queue; readyIndex is the place of the namespace in it,
	// readyTurn orders namespaces with equally many requests in flight.
	ready      fifo
	readyIndex int
	readyTurn  uint64
	// blocked and blockedUnproven are the lanes in the queues of the same names.
	blocked, blockedUnproven waitingLanes
	// leases counts the leases in progress; toLease are the lanes that wait for the end of one.
	leases  int
	toLease fifo

	attempts attemptCounts
	dead     deadCounts
}

// destination is a destination of the config, or a removed one whose lanes are kept during the
// grace period.
type destination struct {
	key, namespace, name string
	// set is nil after the destination is removed from the config.
	set       *destinationConfig
	endpoints map[string]*liveEndpoint
	lanes     []*lane
	// parked is true while the destination is missing in the config although it was not deleted. Its
	// dead letters and its ledger are kept.
	parked bool
	// trim limits the dead letters, also after the removal; nil if the removal was before this run.
	trim    *liveconfig.DeadLetters
	metrics destinationMetrics
	// owner is shared by the destinations of the namespace.
	owner *namespace
	// atStart is the ledger at the start of the process. Counters begin at 0: after a crash the
	// ledger may be a few messages lower than the last scrape, which Prometheus would read as a
	// reset.
	atStart queue.Ledger
	// changed is marked when the report changes; nil before the destination was in a config.
	changed *changes.Object
	// filterFailure is the last failure of the filter for a message that was accepted after changedAt, the time of the
	// last edit; nil if there was none.
	filterFailure *adminapi.Failure
	changedAt     time.Time
}

// destinationConfig is the compiled config of a destination. It is replaced, never changed, so requests in
// flight end with the settings of their start.
type destinationConfig struct {
	generation int64
	revision   string
	// active is false if the destination is disabled or paused.
	active bool
	policy retry.Policy
	signer sign.Signer
	// targets are the endpoints in the order of the config; configs has the same order, for
	// comparison.
	targets      []target
	configs      []liveconfig.Endpoint
	maxInFlight  int
	perSecond    int
	deadLetters  liveconfig.DeadLetters
	exactNumbers bool
}

// target is an endpoint with its prepared request.
type target struct {
	*liveEndpoint
	to *egress.Endpoint
}

// liveEndpoint is one URL of one destination with its traffic, shared by its lanes.
type liveEndpoint struct {
	destination *destination
	name        string
	// to is the endpoint's present config; nil while the endpoint is not usable.
	to      *egress.Endpoint
	machine endpoint.Machine
	// stored is the health that the store has, since storedAt.
	stored   endpoint.Status
	storedAt time.Time
	// rate is nil without a rate limit.
	rate     *rate.Limiter
	inFlight int
	attempts attempts
	metrics  endpointMetrics
	// loggedState is the last logged state, loggedAt the time of that log line, suppressed the number of changes
	// since.
	loggedState endpoint.State
	loggedAt    time.Time
	suppressed  int
	// lanes that send to the endpoint, in turns; turn is the index of the next.
	lanes []*lane
	turn  int
	// waitsRequested counts the responses that requested a wait. The first waitsEnded of these waits have ended,
	// because a later request succeeded.
	waitsRequested, waitsEnded int
	// timer fires at timerAt, when a probe is due or the rate limit permits a request.
	timer   *time.Timer
	timerAt time.Time
}

// lane is the engine's side of a queue lane.
type lane struct {
	id          queue.LaneID
	destination *destination
	owner       *namespace
	// set and targets are the lane's current settings. A lane without targets is parked: it leases
	// and sends nothing.
	set     *destinationConfig
	targets []target
	// opened is true after the store has opened the lane in this run.
	opened bool
	// broken is true while the store fails for the lane.
	broken bool
	// dropAt is set for an orphan: a lane that is missing in the config and not parked there.
	dropAt time.Time
	// removedAt is when an orphan was removed from the config; lost is true if this may not be its
	// owner's decision (liveconfig.Lost).
	removedAt time.Time
	lost      bool
	// pendingAtRemoval are the messages that were pending at removedAt, as the ledger counts them.
	pendingAtRemoval int64
	// A lane of the success policy that the destination had before is draining: it delivers the
	// messages accepted before the replacing lanes were open. A lane of a group whose endpoint is
	// removed (endpointRemoved) drains, too: it sends to the remaining endpoints the messages that no other
	// lane has. end is the state in the store.
	draining, endpointRemoved bool
	end                       queue.End

	// next links the lane into its queue, if queued.
	next   *lane
	queued bool
	// waited is true from the time when the lane was blocked until its next request.
	waited bool
	// granted is true if a request of the unproven half is reserved for the lane (see Engine.grant).
	// Such a lane is in the ready queue, or a worker has it.
	granted bool
	// probes counts the requested probes of the lane.
	probes int
	// buffer[head:] holds leased messages that are not started. Another lease may be in progress.
	buffer  []queue.Delivery
	scratch []queue.Delivery
	head    int
	leasing bool
	// waits is true if the store may have messages that wait as their receiver requested. waitsEnded is
	// the time of an edit that ends the waits of earlier responses; zero if the store has ended them.
	waits      bool
	waitsEnded time.Time
	// more is true unless the last lease emptied the lane; notified is true if the store reported
	// new messages during a lease.
	more, notified bool
	// inFlight counts requests, leased counts messages.
	inFlight, leased int
}

// DefaultOrphanGrace is the default of Options.OrphanGrace.
const DefaultOrphanGrace = 10 * time.Minute

// New makes an Engine. It sends nothing until Run is called.
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
		destinations: map[string]*destination{}, perNamespace: map[string]*namespace{}, lanes: map[queue.LaneID]*lane{}, bySource: map[string][]*lane{}, orphans: map[*lane]bool{},
		tails: map[*Tail]struct{}{}, tidy: make(chan struct{}, 1), applying: make(chan struct{}, 1), createdAt: time.Now(),
	}
	e.hard, e.cancel = context.WithCancel(context.Background())
	e.soft, e.cancelSoft = context.WithCancel(e.hard)
	e.flight, e.cancelFlight = context.WithCancel(e.hard)
	o.Store.SetNotify(e.notify)
	if o.Registerer != nil {
		o.Registerer.MustRegister(collector{e})
	}
	return e
}

// Run delivers until ctx is done. It then stops leasing, waits for the requests in flight (at most
// DrainTimeout), releases the unsent messages, and returns. An Engine runs once.
func (e *Engine) Run(ctx context.Context) error {
	e.mu.Lock()
	e.running = true
	e.wakeWorker()
	e.mu.Unlock()

	maintained := make(chan struct{})
	go func() {
		defer close(maintained)
		e.maintain(e.soft)
	}()
	e.followLease(ctx)
	<-ctx.Done()
	e.cancelSoft()
	<-maintained
	e.stop()
	return nil
}

// stop ends the workers and releases all leased messages.
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
		e.log.Warn("drain timeout: requests in flight are cancelled and will be sent again", "drainTimeout", e.o.DrainTimeout)
		e.cancel()
		<-drained
	}
	e.cancel()
	e.storeHistory(0)
}
