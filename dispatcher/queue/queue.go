// Package queue defines the durable queue between ingest and delivery: an append-only log per
// Source, a cursor per lane, and a retry index.
//
// A lane is the undelivered messages of one Source for one destination or endpoint. A message
// is stored once for all lanes; a lane keeps only its in-flight window in memory, so a backlog
// of any size uses disk, not memory.
//
// Store is the contract of every engine, and storetest is its conformance suite. A consumer
// declares the part that it uses: Appender, Lanes, DeadLetters, Meta and Stats, or single methods
// of them. The main types are LaneID, Message, Delivery, DeadLetter and Ledger. Circuits, workers,
// retry policy and dead-letter policy belong to the layers above; the queue does not know HTTP.
package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// LaneID identifies a lane. Source and Destination are "namespace/name" with the same
// namespace. Endpoint is empty for a lane of a whole destination.
type LaneID struct {
	Source      string
	Destination string
	Endpoint    string
	// Any makes the lane a member of a group: the lanes with Any of one Source and destination.
	// Each lane makes its own first attempt of each message, but the message is delivered once:
	// the first Ack of the group also ends its retries in the other lanes. The message becomes
	// a dead letter when no lane of the group delivered it and no lane has it pending.
	//
	// A message of the type "delete" is exempt: each lane delivers or buries it by itself, as
	// if the lane were not in a group, and the ledger counts it once per lane.
	Any bool
}

// Group returns the ID of the lane's group, for LaneStats, or the lane itself when it is not in
// a group.
func (l LaneID) Group() LaneID {
	if l.Any {
		l.Endpoint = ""
	}
	return l
}

// LogArgs returns the log attributes that identify the lane, without empty ones.
func (l LaneID) LogArgs() (args []any) {
	namespace, source, ok := strings.Cut(l.Source, "/")
	destination := l.Destination
	if n, name, isFull := strings.Cut(l.Destination, "/"); isFull {
		namespace, destination, ok = n, name, true
	}
	if ok {
		args = append(args, "namespace", namespace)
	}
	for _, a := range [...][2]string{{"source", source}, {"destination", destination}, {"endpoint", l.Endpoint}} {
		if a[1] != "" {
			args = append(args, a[0], a[1])
		}
	}
	return args
}

// Message is an accepted call, ready to be stored.
type Message struct {
	// Source is "namespace/name"; it selects the log.
	Source string
	// ID is the messageId, at most 100 bytes; it identifies duplicates.
	ID string
	// Type and Event are kept for filters of dead letters; Event is empty unless Type is
	// "track".
	Type  string
	Event string
	// AcceptedAt starts the retry window; millisecond precision.
	AcceptedAt time.Time
	// Skip names the destinations ("namespace/name") that filtered this message out, usually
	// none. An entry of FilterFailed does not filter it out: Delivery.FilterError.
	Skip []string
	// Only, when not empty, names the only destination ("namespace/name") or endpoint
	// ("namespace/name/endpoint") of this message (a redelivery). Other lanes ignore the
	// message and do not count it, and its ID is not compared with earlier ones.
	Only string
	// TraceParent is the span that accepted the message, in the format of W3C's header
	// traceparent; empty without tracing.
	TraceParent string
	// LongNumbers marks a body with numbers that JavaScript cannot represent exactly; see
	// event.Call.
	LongNumbers bool
	// Body is the canonical JSON.
	Body []byte
}

// Delivery is a message leased to a lane. The lease ends when exactly one of Ack, Release,
// Retry, Bury and SettleAll is called for it.
type Delivery struct {
	Lane LaneID
	// Seq is the message's position in its Source's log, from 1.
	Seq uint64
	// The fields of the appended Message. Body must not be changed.
	ID, Type, Event, TraceParent string
	LongNumbers                  bool
	Body                         []byte
	AcceptedAt                   time.Time
	// FilterError is the reason why the destination's filter could not decide about the message; empty if it did. The
	// message must not be sent: it becomes a dead letter with ReasonFilterFailed.
	FilterError string
	// Attempt is the number of failed attempts before this lease; 0 for the first attempt.
	Attempt int
	// Due is when the retry was due, with millisecond precision; zero for a first attempt.
	Due time.Time
	// Omitted is set for Ack if the destination omitted the message: the ledger counts it so, and not as delivered.
	Omitted bool
}

// Settlement is the outcome of a leased message.
type Settlement struct {
	Delivery
	Outcome Outcome
	// At is the time of the next attempt, for Retried.
	At time.Time
	// Failure describes the failed attempt, for Retried and Buried.
	Failure Failure
	// Done is set by SettleAll: the first of Ack, or the buried of Bury.
	Done bool
}

// Outcome is how the lease of a message ends.
type Outcome int

// Values of Outcome, each of which does what its method of Lanes does.
const (
	Released Outcome = iota
	Acked
	Retried
	Buried
)

// Failure describes a failed attempt, for retries and dead letters. It must not contain
// secrets.
type Failure struct {
	Time       time.Time
	Reason     string
	StatusCode int
	Message    string
	// Response holds the first bytes of the response body, at most 1 KiB.
	Response []byte
	// Redact has the rules of redaction (redact.Text) of the request, or of the destination when there was none. It is
	// stored with a dead letter only, without which no older Response is stored with it.
	Redact []byte
	// Wait is the part of the time until a retry that the receiver requested. It is not stored with
	// the failure; see Lanes.EndWaits.
	Wait time.Duration
}

// ReasonDamaged is the reason of a dead letter whose message cannot be read because its file is
// damaged. Such a dead letter has only a Lane, a Seq and a Failure.
const ReasonDamaged = "Damaged"

// ReasonFilterFailed is the reason of a dead letter about which its destination's filter could not decide.
const ReasonFilterFailed = "FilterFailed"

// filterFailed is not part of a name.
const filterFailed = "!"

// FilterFailed returns the entry of Message.Skip for a destination ("namespace/name") whose filter failed.
func FilterFailed(destination, why string) string {
	return filterFailed + destination + filterFailed + why
}

// DeadLetter is a copy of a message that was not delivered and will not be retried.
type DeadLetter struct {
	// Key identifies the dead letter within its destination; keys are ordered by Failure.Time,
	// except as DeadLetterMark requires.
	Key  string
	Lane LaneID
	Seq  uint64

	ID, Type, Event string
	Body            []byte
	AcceptedAt      time.Time
	// Attempts is the number of all attempts, including the last one.
	Attempts int
	Failure  Failure
}

// Ledger counts messages by their outcome. Accepted = Delivered + Filtered + Omitted + DeadLettered +
// Discarded + Pending, exactly, also after a crash.
type Ledger struct {
	Accepted, Delivered, Filtered, Omitted, DeadLettered, Discarded, Pending int64
}

// Plus returns the sum of two ledgers.
func (l Ledger) Plus(o Ledger) Ledger {
	return Ledger{
		l.Accepted + o.Accepted, l.Delivered + o.Delivered, l.Filtered + o.Filtered, l.Omitted + o.Omitted,
		l.DeadLettered + o.DeadLettered, l.Discarded + o.Discarded, l.Pending + o.Pending,
	}
}

// Minus returns the difference of two ledgers.
func (l Ledger) Minus(o Ledger) Ledger {
	return Ledger{
		l.Accepted - o.Accepted, l.Delivered - o.Delivered, l.Filtered - o.Filtered, l.Omitted - o.Omitted,
		l.DeadLettered - o.DeadLettered, l.Discarded - o.Discarded, l.Pending - o.Pending,
	}
}

// Balance returns an error when the counters of a ledger do not add up.
func (l Ledger) Balance() error {
	if sum := l.Delivered + l.Filtered + l.Omitted + l.DeadLettered + l.Discarded + l.Pending; sum != l.Accepted ||
		min(l.Delivered, l.Filtered, l.Omitted, l.DeadLettered, l.Discarded, l.Pending) < 0 {
		return fmt.Errorf("the ledger does not add up: %+v", l)
	}
	return nil
}

// LaneStats is the ledger of a lane or group, and its pending messages by state. Discarded is 0
// for a lane without a group: the messages of a dropped lane are counted by its Source and
// destination.
//
// The ledger of a group counts each message once. The ledger of a lane in a group counts the
// messages by their outcome in that lane. Its Discarded counts the messages that ended in this
// lane without a delivery or a dead letter, because other lanes settle them or because they
// were skipped.
type LaneStats struct {
	Ledger
	// FirstAttempts is the number of pending messages without a completed attempt of the lane;
	// 0 for a group.
	FirstAttempts int64
	// Skipped is the number of messages that a lane in a group of several lanes never
	// attempted, because they expired (BuryExpired) or their space was needed.
	Skipped int64
	// Retrying is the number of pending messages that failed before and are not leased; for a
	// group, the maximum of its lanes.
	Retrying int64
	// InFlight is the number of pending messages that are leased.
	InFlight int64
	// OldestPending is the acceptance time of the oldest pending message, and First its
	// position in the Source's log; zero when none is pending.
	OldestPending time.Time
	First         uint64
	// NextRetry is the due time of the next retry; zero without retries.
	NextRetry time.Time
	// Ended is true for a lane that gets no further messages, EndpointRemoved when its endpoint
	// was also removed; see EndLane.
	Ended, EndpointRemoved bool
	// Stale is true when a write that waits for disk space or for a replicated log locks the lane; the stats are
	// then the last known ones.
	Stale bool
}

// SourceStats describes a Source's log.
type SourceStats struct {
	// Accepted is the number of messages ever appended, Duplicates the number of duplicates
	// dropped since the store was opened.
	Accepted, Duplicates int64
	// LogBytes is an estimate of the disk space of the log.
	LogBytes int64
	// Ledger counts each message once per lane, dropped lanes included.
	Ledger Ledger
}

// DestinationStats describes the lanes and dead letters of a destination.
type DestinationStats struct {
	// Ledger is the sum over the destination's lanes, dropped lanes included.
	Ledger Ledger
	// DeadLetters is the number of stored dead letters, DeadLetterBytes their size.
	DeadLetters, DeadLetterBytes int64
}

// TraceResult is the result of a search for a message.
type TraceResult struct {
	// Traces has an entry for each Source with the message.
	Traces []Trace
	// Scanned is the number of messages that were read in the logs, and Until the time when the last of
	// them was accepted. Complete is false if a bound ended the search.
	Scanned  int
	Until    time.Time
	Complete bool
	// Storing is true if the message is not durable yet. It is in no Trace, because it may be lost.
	Storing bool
}

// Trace is what the store has of a message.
type Trace struct {
	Source     string
	AcceptedAt time.Time
	// Seq is the message's position in the log; 0 if the message was removed, because all of its
	// lanes have ended it. ID, Type, Event and Lanes are then empty.
	Seq             uint64
	ID, Type, Event string
	Lanes           []LaneTrace
}

// Pending reports whether a lane still has to deliver the message.
func (t *Trace) Pending() bool {
	return slices.ContainsFunc(t.Lanes, func(l LaneTrace) bool {
		return l.State == TraceWaiting || l.State == TraceInFlight || l.State == TraceRetrying
	})
}

// LaneTrace is the state of a message in a lane.
type LaneTrace struct {
	Lane  LaneID
	State TraceState
	// Due is the time of the next attempt of a message in retry, and Attempts the number of its
	// failed ones.
	Due      time.Time
	Attempts int
}

// TraceState is the state of a message in a lane.
type TraceState string

// Values of TraceState. An ended message was delivered, is a dead letter, or was discarded.
const (
	TraceWaiting  TraceState = "Waiting"
	TraceInFlight TraceState = "InFlight"
	TraceRetrying TraceState = "Retrying"
	TraceFiltered TraceState = "Filtered"
	TraceEnded    TraceState = "Ended"
)

// End selects whether a lane gets the messages that are appended from now on.
type End int

// Values of End.
const (
	// Active: the lane gets them.
	Active End = iota
	// Ended: the lane does not get them, and delivers its pending messages.
	Ended
	// EndpointRemoved: the lane does not get them, and its endpoint was removed. It delivers
	// only pending messages that no other lane of its group delivered or has pending.
	EndpointRemoved
)

// Errors of a Store.
var (
	// ErrFull: the storage, the share of the namespace, or the quota of the Source is full. The caller should
	// retry later.
	ErrFull = errors.New("storage is full")
	// ErrOverQuota is the ErrFull of one Source whose undelivered messages reach its quota.
	ErrOverQuota = fmt.Errorf("the Source's quota is used up: %w", ErrFull)
	// ErrOverShare is the ErrFull of one of several namespaces whose messages reach its share.
	ErrOverShare = fmt.Errorf("the namespace's share of the storage is used up: %w", ErrFull)
	// ErrUnavailable: the log that makes messages durable does not answer. The caller should retry
	// in a few seconds.
	ErrUnavailable = errors.New("the log of the queue is unavailable")
	// ErrClosed: the store is closed.
	ErrClosed = errors.New("queue is closed")
	// ErrNoLane: the lane was not opened, or was dropped.
	ErrNoLane = errors.New("no such lane")
)

// Store is a durable queue. All methods may be called concurrently.
type Store interface {
	Appender
	Lanes
	DeadLetters
	Meta
	Stats
	// Close persists every cursor and closes the store. Leased messages are released.
	Close() error
}

// Appender accepts messages.
type Appender interface {
	// Append stores messages and returns when they are durable. duplicates[i] is true when a
	// message with the same Source and ID was appended within the duplicate window; that
	// message is dropped. duplicates may be nil when there are none. When err is not nil, no
	// message was accepted. ctx bounds the wait until the messages are written; then Append
	// waits for the disk. It returns ErrFull above the storage's high-water mark, the
	// namespace's share or the Source's quota, and ErrUnavailable while the messages would not
	// become durable soon. If their space is needed for new messages, first attempts of messages
	// that another lane of the group delivered are skipped, oldest first.
	Append(ctx context.Context, msgs []Message) (duplicates []bool, err error)
}

// MaxLeaseBytes bounds the bodies of a lease: no message follows the one with which they reach it.
const MaxLeaseBytes = 256 << 10

// Lanes delivers messages: it opens and ends lanes, leases their messages and settles them.
type Lanes interface {
	// OpenLane opens a lane and returns when it is durable. A new lane starts after the last
	// appended message; an existing one continues at its position.
	OpenLane(lane LaneID) error
	// DropLane deletes a lane. Its pending messages count as discarded in the ledgers of its
	// Source and its destination, which keep the lane's other counts, too. Its dead letters are
	// kept until their retention ends.
	DropLane(ctx context.Context, lane LaneID) error
	// EndLane ends a lane after the last appended message, durably: the lane neither delivers nor
	// counts later messages. An ended lane keeps its end. With Active it continues: after the
	// last appended message when it has read all messages before its end, because the messages
	// appended meanwhile were for other lanes; otherwise as if it had never ended. A group
	// whose lanes have all ended gets no messages until a lane continues or another one is
	// opened.
	EndLane(lane LaneID, end End) error
	// ForgetDestination deletes the ledger of a destination's dropped lanes.
	ForgetDestination(destination string) error
	// Lanes lists all lanes of the store, also lanes of an earlier run that are not open.
	Lanes() []LaneID

	// Lease leases up to max messages of a lane, none after their bodies have reached MaxLeaseBytes, and
	// never blocks. It appends them to buf and returns it. First attempts are leased before due retries, but when both wait, retries are
	// at least one in eight. Messages whose Skip or Only exclude the lane are counted and not
	// returned. Damaged messages become dead letters with ReasonDamaged while their number is
	// small; otherwise an error names the damage. A lane whose endpoint was removed leases only
	// messages that no other lane of its group delivered or has pending.
	Lease(lane LaneID, max int, buf []Delivery) ([]Delivery, error)
	// LeaseOldest leases the oldest waiting message of the lane, which may be a retry that is
	// not due. A circuit uses it for its probe. ok is false when no message waits.
	LeaseOldest(lane LaneID) (d Delivery, ok bool, err error)
	// LeaseDue leases up to max waiting retries of the lane whose due time is exactly due, in the order of the log, and
	// appends them to buf, even before that time. Their bodies have at most maxBytes together: the first message that
	// does not fit and those after it are not leased. SettleAll gives consecutive messages with the same Settlement.At
	// the same due time, so that LeaseDue finds the rest of a batch.
	LeaseDue(lane LaneID, due time.Time, max, maxBytes int, buf []Delivery) ([]Delivery, error)
	// SetNotify sets a function that is called when a lane whose last Lease returned fewer
	// messages than requested, of fewer bytes than MaxLeaseBytes, may have more: a message was appended or a retry became due. It
	// is called without locks held, at most once per change, and must not block. SetNotify must
	// be called once, before the first OpenLane.
	SetNotify(func(LaneID))

	// Ack settles a message as delivered, or as omitted. A crash may lose it; the message is then delivered
	// again. first is false when another lane of the group delivered the message before, or
	// when the message was not leased.
	Ack(d Delivery) (first bool)
	// Release ends a lease without counting an attempt; the message is the next one of its
	// lane.
	Release(d Delivery)
	// Retry schedules a message for another attempt at a time; Attempt becomes d.Attempt+1.
	// When another lane of the group delivered the message, it ends in this lane instead.
	Retry(d Delivery, at time.Time, f Failure)
	// EndWaits ends the waits that the receiver requested (Failure.Wait) in failures until a time:
	// the messages are due when they would be without the wait, those that are due now in the order
	// of the log. One call ends a bounded number, the oldest failures first. ended is 0 if none was left;
	// left is true if there may be further waits, also of later failures.
	EndWaits(lane LaneID, until time.Time) (ended int, left bool, err error)
	// Bury turns a message into a dead letter with d.Attempt+1 attempts. When another lane of
	// the group delivered the message or has it pending, the message ends in this lane instead,
	// and buried is false; the last lane of the group makes the dead letter, with the attempts
	// of all lanes.
	Bury(d Delivery, f Failure) (buried bool, err error)
	// SettleAll settles leased messages of one lane by one write, whatever their number and bytes: a crash keeps the
	// outcomes of all of them or of none. It may lose them, as those of Ack. A message that is not leased is ignored, and
	// so is its second outcome. After an error no message is leased, and the outcomes may be in memory only: after a
	// restart the messages are delivered again.
	SettleAll(lane LaneID, all []Settlement) error
	// BuryExpired buries every message of the lane that is not leased and was accepted before
	// cut. It returns the number of dead letters; its memory is bounded. It reads the log in
	// order and stops at the first unread message that is not expired, so an expired message
	// after that one is left to the next call.
	BuryExpired(ctx context.Context, lane LaneID, cut time.Time, f Failure) (int, error)
}

// DeadLetters reads and removes dead letters.
type DeadLetters interface {
	// DeadLetters calls fn for each dead letter of a destination ("namespace/name"), oldest
	// first, from the key after `after` ("" for all), until fn returns false. The DeadLetter is
	// valid only during the call.
	DeadLetters(ctx context.Context, destination, after string, fn func(DeadLetter) bool) error
	// DeadLetterMark returns a key that is greater than the keys of all stored dead letters of a
	// destination, and smaller than the keys of all later ones, whatever their Failure.Time. It is
	// equal to the previous mark if there was no dead letter in between; after a restart it may
	// be smaller.
	DeadLetterMark(destination string) (key string, err error)
	// DeleteDeadLetters removes dead letters by key. It returns when these removals, and all earlier ones,
	// are durable; without keys it only waits.
	DeleteDeadLetters(ctx context.Context, destination string, keys ...string) error
	// TrimDeadLetters removes the oldest dead letters of a destination until none is older than
	// before, and until their bytes are at most maxBytes or none is older than young, which
	// must not be before before. The time of a dead letter is when it failed, or its
	// acceptance when the former is ahead of the clock; when both are, only the size counts. It
	// returns the number of removed dead letters.
	TrimDeadLetters(ctx context.Context, destination string, before, young time.Time, maxBytes int64) (int, error)
}

// Meta stores small values of the layers above, by name. Names begin with their owner's prefix.
type Meta interface {
	// PutMeta stores a few bytes under a name; nil deletes them. The value survives the end of
	// the process at once, and a power loss a moment later.
	PutMeta(name string, value []byte) error
	// PutMetaDurable does the same and returns when the value survives a power loss.
	PutMetaDurable(name string, value []byte) error
	// AllMeta returns all values stored by PutMeta.
	AllMeta() (map[string][]byte, error)
}

// Stats describes Sources, lanes and destinations.
type Stats interface {
	// LaneStats returns the stats of a lane or a group; zero for an unknown one.
	LaneStats(lane LaneID) LaneStats
	// OldestWaiting returns the acceptance time of a lane's oldest message that was neither leased nor
	// attempted; zero if there is none.
	OldestWaiting(lane LaneID) time.Time
	// Position returns the last message of its Source's log that a lane has read, and the last
	// one of the log; zero for an unknown lane.
	Position(lane LaneID) (read, end uint64)
	// SourceStats returns the stats of a Source; zero for one that never had a message.
	SourceStats(source string) SourceStats
	// Trace finds a message of any Source by its ID, with its state in each lane: by the index of
	// the duplicate window, and of the messages accepted since a time also by reading the logs;
	// a zero time reads none. The end of ctx ends the search, and the result is then incomplete.
	Trace(ctx context.Context, id string, since time.Time) (TraceResult, error)
	// Search finds up to max pending messages by their bodies, which match must not keep: of each
	// Source, oldest first, those accepted since a time, or all. It is bounded as Trace.
	Search(ctx context.Context, match func(body []byte) bool, since time.Time, max int) (TraceResult, error)
	// Sources lists the Sources with a log, also those without lanes.
	Sources() []string
	// DestinationStats returns the stats of a destination; zero for an unknown one.
	DestinationStats(destination string) DestinationStats
	// Destinations lists the destinations with lanes, dead letters or the ledger of dropped
	// lanes.
	Destinations() []string
}
