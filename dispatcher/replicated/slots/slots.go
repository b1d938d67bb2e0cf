// Package slots keeps stores whose write-ahead log is a replicated stream outside of the process.
//
// A slot is a complete store of package pebblestore with one stream. Every batch of the store is
// appended to the stream; a copy that applies the records in order is the same store. The stream is
// lease and fence: each record names the sequence that it expects to follow, so that only the
// session of the newest claim can append.
//
// An installation can have several slots: Directory has the slot of each namespace, Members the
// processes, by their heartbeats, and Place selects the owners and the standbys. WallClock finds a process
// with a wrong wall clock, which must not own a slot.
//
// The package does not know which system keeps the stream; Log is all that it needs. The main
// types are Slot (takes over or follows a slot), Writer (appends the batches of a session), publisher
// (its state machine, without I/O), follower (applies records to a copy) and Snapshotter (stores
// snapshots as objects, and trims the stream). Package slotstest simulates a Log with its faults.
package slots

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// Log is the stream of one slot. All methods may be called concurrently. An error that is none of
// the errors below says nothing about the effect of the call.
type Log interface {
	// Publish appends a record if expected is the sequence of the last one, and returns the
	// sequence of the record. A record with an id that the stream has already is not appended
	// again; Publish then returns the sequence of the first one, whatever follows it, or
	// ErrWrongSequence. After ErrWrongSequence, ErrInProcess and ErrNoSpace this call does not
	// append the record.
	Publish(ctx context.Context, expected uint64, id string, record []byte) (sequence uint64, err error)
	// Get returns the first record from a sequence on, or ErrNoRecord. It may not see the newest
	// records.
	Get(ctx context.Context, from uint64) (Entry, error)
	// Tail calls fn for the records from a sequence on, in order, also for those appended later. It
	// ends with the error of fn or of ctx, or when the stream cannot be read.
	Tail(ctx context.Context, from uint64, fn func(Entry) error) error
	// State describes the stream. It may not see the newest records.
	State(ctx context.Context) (State, error)
	// Trim removes the records before a sequence.
	Trim(ctx context.Context, before uint64) error
}

// Entry is a record of a stream. Its sequence is one more than the previous record's. The
// record belongs to the receiver.
type Entry struct {
	Sequence uint64
	Record   []byte
}

// State describes a stream.
type State struct {
	// First and Last are the sequences of the first and the last record. Without records First is
	// Last + 1; Last is 0 for a stream that never had one.
	First, Last uint64
	// Missing is the number of records between First and Last that the server that answered has lost.
	Missing uint64
	// Bytes is the size of the records, MaxBytes the size at which the stream accepts no more; 0
	// for no bound.
	Bytes, MaxBytes int64
	// ID is another one for each stream that is created, and after an adoption; empty if the Log has
	// none. Replaced are the IDs before the adoptions.
	ID       string
	Replaced []string
}

// Errors of a Log.
var (
	// ErrWrongSequence: the last record is not the expected one.
	ErrWrongSequence = errors.New("another record was appended")
	// ErrInProcess: an earlier Publish with this id has no result yet.
	ErrInProcess = errors.New("the record is being appended")
	// ErrNoSpace: the stream is full.
	ErrNoSpace = errors.New("the stream is full")
	// ErrNoRecord: there is no record from this sequence on.
	ErrNoRecord = errors.New("no record")
	// ErrNoStream: the stream was deleted.
	ErrNoStream = errors.New("the stream does not exist")
)

// Remote is what a slot has outside of the processes.
type Remote struct {
	Log Log
	// Snapshots has the files of snapshots, and Members the files of audiences.
	Snapshots, Members Objects
	// Durability reads how safely the servers store the records now. It compares what it reads with the read
	// before, and is called by one goroutine at a time. May be nil.
	Durability func(context.Context) (Durability, error)
	// Clocks are the servers' clocks, for WallClock.Read. Several of them can be of one server.
	Clocks []ServerTime
	// Rename gives the stream a new ID. Its present one, and the given ones, are then replaced ones. Only
	// Slot.Adopt uses it.
	Rename func(ctx context.Context, replaced ...string) error
}

// Durability is how safely the servers store the records of a slot.
type Durability struct {
	// Sync is whether a server syncs each record to its disk.
	Sync Sync
	// Replicas is the number of servers that should have a copy, and Current the number of those
	// that have all records; the smallest of the stream and the object stores.
	Replicas, Current int
	// Weak are the settings with which a loss of servers can lose calls, and the namespaces that the
	// directory assigns to another slot than their messages', each with its fix.
	Weak []string
	// Disabled are the servers that have disabled JetStream, with the fix. They do not count in Current.
	Disabled []string
	// Gaps are the object stores that were deleted, and the servers that lack records or objects, with the fix.
	Gaps []string
	// LacksRecords is true if a server lacks records of the stream: a snapshot makes them unnecessary.
	LacksRecords bool
}

// Sync is whether a server syncs each record to its disk before it acknowledges it.
type Sync string

// The values of Sync.
const (
	SyncAlways   Sync = "Always"
	SyncPeriodic Sync = "Periodic"
	SyncUnknown  Sync = "Unknown"
)

// ErrSessionEnded reports that another session has claimed the slot, or that the stream is
// damaged. The store of the session must be closed; its files may have batches that the stream
// does not have. It is a queue.ErrUnavailable, too: another session accepts the calls.
var ErrSessionEnded error = sessionEnded{}

type sessionEnded struct{}

func (sessionEnded) Error() string        { return "the session has ended" }
func (sessionEnded) Is(target error) bool { return target == queue.ErrUnavailable }

// errReleased reports that a session has ended in order.
var errReleased = errors.New("the session has released the slot")

// Options configure the access of a pod to a slot. The zero value works.
type Options struct {
	// Logger is the destination of log messages; slog.Default when nil.
	Logger *slog.Logger
	// Now is the clock of leases, replaced by tests. When nil, it is a clock that also advances
	// while the machine is suspended.
	Now func() time.Time
	// Exited is a session whose process has ended, as the caller knows: the slot of that session is
	// claimed immediately.
	Exited pebblestore.Session
	// Applied, when set, is called with the sequence of each record that the copy has.
	Applied func(sequence uint64)
	// CaughtUp, when set, is called when the copy has all records that the stream had at the start.
	CaughtUp func()
	// Values, when set, is called with the values of queue.Store.PutMeta when the copy has all records that the
	// stream had at the start, and every valuesInterval from then on.
	Values func(values map[string][]byte)
	// MayClaim, when set, is asked before this pod questions the owner or claims the slot. While it
	// returns false, the pod only follows the slot.
	MayClaim func() bool

	// claimAfter replaces the constant in the tests of the model.
	claimAfter time.Duration
}

func (o *Options) setDefaults() {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Now == nil {
		o.Now = bootClock
	}
	if o.claimAfter == 0 {
		o.claimAfter = claimAfter
	}
}

// Bounds of a Writer.
const (
	// maxRecord is the size of a record; NATS accepts 1 MiB with headers.
	maxRecord = 900 << 10
	// The batches that wait for the stream are at most a maxUnpublishedPart-th of it, between minUnpublished,
	// which is the smallest stream's, and maxUnpublished; then writers wait.
	maxUnpublished     = 64 << 20
	minUnpublished     = 8 << 20
	maxUnpublishedPart = 32
	// publishTimeout ends the wait for an answer; the record is then published again.
	publishTimeout = time.Second
	// repeatAfter is the time between an answer that is no acknowledgement and the next request.
	repeatAfter = 100 * time.Millisecond
	// heartbeatInterval is the longest time between two records of a session.
	heartbeatInterval = time.Second
	// behindPause is the time after which a candidate whose copy is behind tries again.
	behindPause = time.Second
	// refuseAfter is the time without an acknowledgement after which new calls are refused.
	refuseAfter = 2 * time.Second
	// valuesInterval is the time between two calls of Options.Values.
	valuesInterval = 5 * time.Second
	// usageInterval is the time between two reads of the size of a stream that is nearly full.
	usageInterval = time.Second
)

// The times of ownership. The clocks of two pods may differ by 10 % in their rate: claimAfter is
// longer than leaseTime by more than that.
const (
	// leaseTime is the time after the first sending of the last acknowledged record for which a
	// session may send requests.
	leaseTime = 7 * time.Second
	// suspectAfter is the time without a record after which another pod questions the owner.
	suspectAfter = 3 * time.Second
	// claimAfter is the time for which a suspect must be the last record before a claim.
	claimAfter = 8 * time.Second
)

// The shares of a stream's MaxBytes at which new calls are refused, and at which batches wait. The
// rest is for the records with which an owner keeps its slot and frees space.
const (
	refuseShare = 0.70
	waitShare   = 0.90
	// Above hurryShare, snapshots follow each other without a bound of their rate.
	hurryShare = 0.50
)
