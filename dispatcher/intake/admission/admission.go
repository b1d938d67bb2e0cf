// Package admission is the only way into the queue, for tracking calls, audience syncs, deletion
// notifications and redeliveries alike. It decides which requests may append, for which destinations, and
// whether there is space:
//
//   - [Gate.Authenticate] finds the Source of a write key, and [Gate.Reject] counts refusals for it;
//     [UnknownKeys] has the senders of unknown keys;
//   - [Gate.Begin] starts the [Routing] of one request: which destinations a call is not for, which
//     users are suppressed, and the append itself. A config takes effect after the messages that
//     were routed by the previous one are stored, so no lane gets a call that its filter excludes;
//   - [Gate.DiskForSync], [Gate.RoomForSync] and [Gate.RoomForDeadLetters] divide the disk between
//     live calls, audience syncs and dead letters;
//   - [Refusal] is the answer to every request that is not accepted, in one JSON form;
//   - [Configs] receives the live configs, rejects invalid ones and puts the others into effect.
//
// The package does not know the formats of requests, and not how messages are delivered. The limits
// of requests in progress are in package limits.
package admission

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Store is the part of the queue that a Gate needs.
type Store interface {
	// Append makes messages durable; see queue.Store.
	Append(ctx context.Context, msgs []queue.Message) (duplicates []bool, err error)
	// Share returns the undelivered bytes of a Source, or of its namespace, whichever is bounded, and the
	// bound; 0 for no limit.
	Share(source string) (used, most int64)
	// Full reports whether the disk is above the high-water mark.
	Full() bool
	// DiskBytes is the disk space of the queue.
	DiskBytes() int64
}

// Options configure a Gate. Store is required.
type Options struct {
	Store Store
	// DataDir is a folder on the disk of the store.
	DataDir string
	// HighWater is the share of the disk above which the store accepts no calls.
	HighWater float64
	// Now is the clock; default time.Now.
	Now        func() time.Time
	Logger     *slog.Logger
	Registerer prometheus.Registerer
	// Listed reports whether a live config that the process has, but that is not in effect in this Gate yet,
	// has a write key; nil for none.
	Listed func(key string) bool
	// Decoder decodes the live configs; nil for one of its own.
	Decoder *liveconfig.Decoder
	// Changes is marked when the report of a Source changes; nil marks nothing.
	Changes *changes.Log
}

// Gate is the way into one queue. Make it with New. It is safe for concurrent use.
type Gate struct {
	Options
	// Unidentified counts and limits the requests without a known write key.
	Unidentified *Source
	// UnknownKeys counts the requests that were refused with CodeUnknownKey; the caller of
	// Authenticate adds them, because it knows the sender's address.
	UnknownKeys UnknownKeys

	metrics metrics
	sources sync.Map // key -> *Source
	shares  sync.Map // namespace -> *limits.Share
	// counters has the last counters of Sources that were recovered or forgotten.
	counters sync.Map // key -> storedCounters
	current  atomic.Pointer[running]
	limits   atomic.Pointer[liveconfig.PodShares]
}

// New makes a Gate without a config: until Replace it has no view.
func New(o Options) *Gate {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Decoder == nil {
		o.Decoder = new(liveconfig.Decoder)
	}
	g := &Gate{Options: o, Unidentified: &Source{Limits: limits.NewSource(new(limits.Share))}, metrics: newMetrics(o.Registerer)}
	g.current.Store(&running{routing: new(atomic.Int64)})
	return g
}

// View returns the view in effect; nil before the first full config.
func (g *Gate) View() *liveconfig.View { return g.current.Load().view }
