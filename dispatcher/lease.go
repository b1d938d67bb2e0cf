package dispatcher

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/jobs/audience"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// ProcessOptions are set by a process that shares the work with other processes.
type ProcessOptions struct {
	// Lease is the right to use the store. Default: no other process can take it over.
	Lease Lease
	// Share is what the Dispatchers of the process share; nil for the only one.
	Share *Share
	// Entrance is another way for requests; nil for none.
	Entrance Entrance
	// HandOver, when set, bounds the wait for calls and deliveries in flight together, at most to DrainTimeout: the next
	// user of the store waits for them. Receivers that answer later may get a message twice.
	HandOver time.Duration
}

// Lease is the right of this process to use a store that another process can take over.
type Lease interface {
	// Log gets the batches of the store; nil: they are in the store's own log.
	Log() pebblestore.Log
	// MaySend is the condition for each request to a receiver.
	MaySend() bool
	// MayExpire is the condition for the end of retry windows and retentions.
	MayExpire() bool
	// Ended reports whether another process has the store.
	Ended() bool
	// Abandon ends the lease in disorder if Log does not answer: writes that wait for it fail.
	Abandon()
	// Members are copies of the audiences' files outside of the data directory; nil for none.
	Members() audience.Copies
	// Report is the part of the lease in reports; nil for none.
	Report() *adminapi.ReplicationReport
	// State describes the lease for the admin API, with why this process is not ready; nil for none.
	State(ready error) *adminapi.ReplicationState
}

// permanent is the Lease of a store that no other process can take over.
type permanent struct{}

func (permanent) Log() pebblestore.Log                   { return nil }
func (permanent) MaySend() bool                          { return true }
func (permanent) MayExpire() bool                        { return true }
func (permanent) Ended() bool                            { return false }
func (permanent) Abandon()                               {}
func (permanent) Members() audience.Copies               { return nil }
func (permanent) Report() *adminapi.ReplicationReport    { return nil }
func (permanent) State(error) *adminapi.ReplicationState { return nil }

// Share is what the Dispatchers of one process share.
type Share struct {
	// Stores is the number of stores for which the memory of the process is planned, which the process bounds.
	Stores int
	// Labels are the labels of this Dispatcher's metrics.
	Labels prometheus.Labels
	// Listed reports whether a Source in a live config of the process has a write key: its calls are not refused as
	// unknown before the config is in effect in this Dispatcher.
	Listed func(key string) bool
	// Decoder decodes live configs.
	Decoder *liveconfig.Decoder
}

// Entrance brings requests to a Dispatcher by another way than its listeners.
type Entrance interface {
	// Open admits requests until Close, and returns.
	Open(*Dispatcher, Handlers)
	// Close admits no more requests, and waits for those in progress until ctx is done.
	Close(ctx context.Context) error
}
