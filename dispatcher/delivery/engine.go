// Package delivery sends the queue's messages to their endpoints: lanes, circuit breakers, workers, retries and dead
// letters. It does not know how requests travel (package egress) or how messages are stored (package queue).
//
// A lane holds the undelivered messages of one Source for one destination or endpoint. A lane leases messages from the
// store only while an endpoint can accept more requests, so a backlog costs no memory here. All lanes share the workers
// that send requests. Package delivery/endpoint decides how many requests an endpoint may get.
//
// The main types are Engine, Options and the parts of Engine, which do not know it: registry (lanes, destinations,
// namespaces), scheduler (the next lane, and the shares of namespaces), workers, lifetime (may requests start), recorder
// (attempts and totals), settler (outcomes in the store), healthRecords, orphans and trimmer (dead letters).
//
// Locks, each acquired before those below it:
//
//   - Engine.applying: lanes are opened or dropped. It is held during calls of the store
//   - healthRecords.writing: one record is written at a time. It is held during calls of the store
//   - Engine.mu: all parts. It is held briefly, and never during a call of the store, which calls notify
//   - the locks of egress.Endpoint and changes.Object, which are held briefly
package delivery

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/semaphore"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
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

// Options configure an Engine. Store and Client are required; the zero value of every other field is a working default.
type Options struct {
	// Store is used exclusively by the Engine: no other code may lease from it or set its notify function.
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
	// Now is the wall clock, with which times in the store are compared; replaced by tests. Default time.Now.
	Now func() time.Time
	// Changes is marked when the report of a destination changes; nil marks nothing.
	Changes *changes.Log
}

// Engine delivers messages. Make it with New, set configs with Apply, and call Run once. All
// methods may be called concurrently.
type Engine struct {
	o Options
	// applying is acquired while lanes are opened or dropped, which may wait for the disk. It guards applied, the view in
	// effect, which is nil before the first one.
	applying *semaphore.Weighted
	applied  *liveconfig.View

	// mu guards the parts below, unless their comments say otherwise.
	mu        sync.Mutex
	registry  registry
	orphans   orphans
	records   healthRecords
	recorder  recorder
	scheduler scheduler
	workers   workers
	lifetime  lifetime
	// shares are the dispatcher's shares of the limits; nil for the whole limits.
	shares *liveconfig.PodShares
	// aboveShares are endpoints that had more requests in flight than their share when it took effect.
	aboveShares []*liveEndpoint

	settler settler
	trimmer trimmer
	// early starts the maintenance early.
	early signal
}

// DefaultOrphanGrace is the default of Options.OrphanGrace.
const DefaultOrphanGrace = 10 * time.Minute

// New makes an Engine. It sends nothing until Run is called.
func New(o Options) *Engine {
	o.Logger = cmp.Or(o.Logger, slog.Default())
	o.MaxInFlight, o.Attempts = cmp.Or(o.MaxInFlight, 1024), cmp.Or(o.Attempts, 100)
	o.OrphanGrace, o.DrainTimeout = cmp.Or(o.OrphanGrace, DefaultOrphanGrace), cmp.Or(o.DrainTimeout, 10*time.Second)
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.MayExpire == nil {
		o.MayExpire = func() bool { return true }
	}
	e := &Engine{
		o: o, applying: semaphore.NewWeighted(1), early: make(signal, 1), lifetime: newLifetime(),
		registry:  registry{map[string]*destination{}, map[string]*namespace{}, map[queue.LaneID]*lane{}, map[string][]*lane{}},
		orphans:   orphans{grace: o.OrphanGrace, log: o.Logger, lanes: map[*lane]bool{}},
		recorder:  recorder{perEndpoint: o.Attempts, tails: map[*Tail]struct{}{}},
		scheduler: scheduler{maxInFlight: o.MaxInFlight},
		settler:   settler{o.Store, o.Logger, o.WindowsSince, o.MayExpire},
		trimmer:   trimmer{o.Store, o.Logger, o.DeadLetterBytes, o.Now(), map[string]keptLetters{}},
	}
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
	e.lifetime.running = true
	e.wakeWorker()
	e.mu.Unlock()

	maintained := make(chan struct{})
	go func() {
		defer close(maintained)
		e.maintain(e.lifetime.soft)
	}()
	e.followLease(ctx)
	<-ctx.Done()
	e.lifetime.cancelSoft()
	<-maintained
	e.stop()
	return nil
}

// stop ends the workers and releases all leased messages.
func (e *Engine) stop() {
	e.mu.Lock()
	e.lifetime.stopped = true
	var back []queue.Delivery
	for _, l := range e.registry.lanes {
		back = append(back, e.scheduler.takeBuffer(l)...)
	}
	for _, d := range e.registry.destinations {
		for _, ep := range d.endpoints {
			if ep.timer != nil {
				ep.timer.Stop()
			}
		}
	}
	e.workers.end(len(e.workers.idle))
	e.mu.Unlock()
	e.release(back)

	drained := make(chan struct{})
	go func() {
		e.workers.exits.Wait()
		close(drained)
	}()
	patience := time.NewTimer(e.o.DrainTimeout)
	defer patience.Stop()
	select {
	case <-drained:
	case <-patience.C:
		e.o.Logger.Warn("drain timeout: requests in flight are cancelled and will be sent again", "drainTimeout", e.o.DrainTimeout)
		e.lifetime.cancel()
		<-drained
	}
	e.lifetime.cancel()
	e.storeHistory(0)
}
