// Package queue is the durable queue between ingest and delivery: an
// append-only log per Source, a cursor per lane, and a retry index.
//
// A lane is what one destination still has to deliver of one Source's calls.
// A message is stored once, however many lanes read it; a lane keeps only its
// in-flight window in memory, so a backlog of any size costs disk, not memory.
//
// Store is the contract that every engine keeps; storetest is its conformance
// suite. Breakers, workers, retry policy and dead-letter policy sit above it.
package queue

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// LaneID names a lane. Source and Destination are "namespace/name" and always
// of the same namespace. Endpoint is empty for a lane of a whole destination.
type LaneID struct {
	Source      string
	Destination string
	Endpoint    string
	// Any makes the lane a member of a group: the lanes with Any of one Source and
	// destination. Each of them makes its own first attempt of each message, but
	// the message is delivered once, by the first Ack of the group, which also ends
	// its retries in the other lanes. It becomes a dead letter when no lane of the
	// group took it and none has it any more.
	//
	// A message of the type "delete" is exempt: each lane delivers or buries it by
	// itself, as if it were not in a group, and the ledger counts it once per lane.
	Any bool
}

// Group names the group of a lane with Any, for LaneStats. It returns the lane
// itself for other lanes.
func (l LaneID) Group() LaneID {
	if l.Any {
		l.Endpoint = ""
	}
	return l
}

// LogArgs names the lane, or what is set of it, as every line of the log does.
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
	// Source is "namespace/name"; it chooses the log.
	Source string
	// ID is the messageId, at most 100 bytes; duplicates are found by it.
	ID string
	// Type and Event are kept for filters of dead letters; Event is empty unless Type is "track".
	Type  string
	Event string
	// AcceptedAt starts the retry window; millisecond precision.
	AcceptedAt time.Time
	// Skip names the destinations ("namespace/name") that filtered this message out, usually none.
	Skip []string
	// Only, when not empty, names the one destination ("namespace/name") or
	// endpoint ("namespace/name/endpoint") that this message is for (a
	// redelivery); other lanes pass over it without counting it, and its ID is not
	// looked for among duplicates.
	Only string
	// TraceParent names the span that took the message, as W3C's header
	// traceparent does; empty while there is no tracing.
	TraceParent string
	// LongNumbers marks a body with numbers that JavaScript would change; see event.Call.
	LongNumbers bool
	// Body is the canonical JSON.
	Body []byte
}

// Delivery is a message leased to a lane. It stays leased until exactly one of
// Ack, Release, Retry and Bury is called for it.
type Delivery struct {
	Lane LaneID
	// Seq is the message's position in its Source's log, counted from 1.
	Seq uint64
	// ID, Type, Event, TraceParent and LongNumbers as appended. Body must not be changed.
	ID, Type, Event, TraceParent string
	LongNumbers                  bool
	Body                         []byte
	AcceptedAt                   time.Time
	// Attempt counts the attempts that failed before this lease; 0 on the first try.
	Attempt int
}

// Failure says why a message failed, for retries and dead letters. It must be free of secrets.
type Failure struct {
	Time       time.Time
	Reason     string
	StatusCode int
	Message    string
	// Response holds the first bytes of the answer's body, at most 1 KiB.
	Response []byte
}

// ReasonDamaged is the reason of a dead letter whose message cannot be read any
// more, because the file that it is in is damaged. It has a Lane, a Seq and a Failure, and nothing else.
const ReasonDamaged = "Damaged"

// DeadLetter is a copy of a message that could not be delivered.
type DeadLetter struct {
	// Key identifies the dead letter within its destination; it sorts by Failure.Time.
	Key  string
	Lane LaneID
	Seq  uint64

	ID, Type, Event string
	Body            []byte
	AcceptedAt      time.Time
	// Attempts that were made in all: Delivery.Attempt and the one that was buried.
	Attempts int
	Failure  Failure
}

// Ledger says what became of messages. Accepted = Delivered + Filtered +
// DeadLettered + Discarded + Pending, exactly, also after a crash.
type Ledger struct {
	Accepted, Delivered, Filtered, DeadLettered, Discarded, Pending int64
}

// Plus returns the sum of two ledgers.
func (l Ledger) Plus(o Ledger) Ledger {
	return Ledger{
		l.Accepted + o.Accepted, l.Delivered + o.Delivered, l.Filtered + o.Filtered,
		l.DeadLettered + o.DeadLettered, l.Discarded + o.Discarded, l.Pending + o.Pending,
	}
}

// Balance returns an error when a ledger does not add up.
func (l Ledger) Balance() error {
	if sum := l.Delivered + l.Filtered + l.DeadLettered + l.Discarded + l.Pending; sum != l.Accepted || min(l.Delivered, l.Filtered, l.DeadLettered, l.Discarded, l.Pending) < 0 {
		return fmt.Errorf("the ledger does not add up: %+v", l)
	}
	return nil
}

// LaneStats is a lane's ledger and what is due. Its Discarded is 0: only a lane
// that is dropped discards, and that is counted by its Source and destination.
//
// The ledger of a group counts each message once. The ledger of a lane in a
// group says what became of the messages in that lane alone; there Discarded
// counts the messages that its endpoint did not take and that need no further
// attempt at it, because of what the other lanes did or because they were skipped.
type LaneStats struct {
	Ledger
	// FirstAttempts is the part of Pending that the lane has not attempted yet, or
	// attempts for the first time now. Of a group it is 0.
	FirstAttempts int64
	// Skipped counts the messages that a lane in a group of several lanes never
	// attempted: BuryExpired ended their wait, or the room was needed.
	Skipped int64
	// Retrying is the part of Pending that failed before and is not leased. Of a
	// group it is that of the lane with the most.
	Retrying int64
	// InFlight is the part of Pending that is leased.
	InFlight int64
	// OldestPending is the acceptance time of the oldest pending message, and First
	// its position in the Source's log; zero when none.
	OldestPending time.Time
	First         uint64
	// NextRetry is when the next retry is due; zero when none waits.
	NextRetry time.Time
	// Ended is true for a lane that gets no further messages, Left also for one whose
	// endpoint is gone; see EndLane.
	Ended, Left bool
	// Stale is true when a write that waits on a full disk holds the lane: all is as it was before.
	Stale bool
}

// SourceStats is a Source's log.
type SourceStats struct {
	// Accepted counts the messages ever appended. Duplicates counts those dropped since the store was opened.
	Accepted, Duplicates int64
	// LogBytes is an estimate of the disk that the log takes.
	LogBytes int64
	// Ledger counts each message once per lane that it is for, lanes that were dropped included.
	Ledger Ledger
}

// DestinationStats is what is known of a destination.
type DestinationStats struct {
	// Ledger sums up the destination's lanes and those that were dropped.
	Ledger Ledger
	// DeadLetters is how many dead letters are stored, and DeadLetterBytes their size.
	DeadLetters, DeadLetterBytes int64
}

// End says whether a lane gets what is appended from now on.
type End int

// The values of End.
const (
	// GoOn: it does.
	GoOn End = iota
	// Ended: it does not, and delivers what it has.
	Ended
	// Left: it does not, and its endpoint is gone. It delivers only what no other
	// lane of its group took or has.
	Left
)

// Errors of a Store.
var (
	// ErrFull: storage, or the Source's quota, is full. Try again later.
	ErrFull = errors.New("storage is full")
	// ErrOverQuota is the ErrFull of one Source: its undelivered messages fill its quota.
	ErrOverQuota = fmt.Errorf("the Source's quota is used up: %w", ErrFull)
	// ErrClosed: the store has been closed.
	ErrClosed = errors.New("queue is closed")
	// ErrNoLane: the lane has not been opened, or was dropped.
	ErrNoLane = errors.New("no such lane")
)

// Store is a durable queue. All methods may be called concurrently.
type Store interface {
	// Append stores messages and returns after they are durable. duplicates[i]
	// is true when a message with the same Source and ID was appended within the
	// duplicate window; it is dropped. When err is not nil nothing was accepted.
	// duplicates may be nil when there are none. ctx ends the wait until the
	// messages are taken to be written; from then on Append waits for the disk.
	// It returns ErrFull above the storage's high-water mark or the Source's quota.
	// First attempts of messages that another lane of the group delivered give way
	// to new messages: they are skipped, oldest first, when the room is needed.
	Append(ctx context.Context, msgs []Message) (duplicates []bool, err error)

	// OpenLane makes a lane known and returns once it is durable. A new lane
	// starts behind the last appended message; a known one goes on where it was.
	OpenLane(lane LaneID) error
	// DropLane forgets a lane. What it still had pending counts as discarded in
	// the ledgers of its Source and its destination, which keep what the lane
	// counted. Its dead letters stay until their retention ends.
	DropLane(ctx context.Context, lane LaneID) error
	// EndLane makes a lane end behind the last appended message, durably: what
	// follows is not its own and not counted. A lane that has ended keeps its end.
	// With GoOn it continues: behind the last appended message when it has read
	// all up to its end, for what was appended in between was for others; else as if
	// it had never ended. A group whose lanes have all ended gets nothing of what is
	// appended until one of them continues or another one is opened.
	EndLane(lane LaneID, end End) error
	// Lanes lists the lanes that the store knows, open ones and those of an earlier run.
	Lanes() []LaneID

	// Lease hands out up to max messages of a lane and never blocks. First tries
	// come before due retries, but when both wait, retries get at least one in eight.
	// It appends to buf and returns it. Messages whose Skip or Only exclude the
	// lane are settled on the way. So are messages that are damaged: they become
	// dead letters with ReasonDamaged, as long as they are few; an error names the damage otherwise.
	// A lane that has Left leases only what no other lane of its group took or has.
	Lease(lane LaneID, max int, buf []Delivery) ([]Delivery, error)
	// LeaseOldest leases the oldest message of the lane that waits, be it a due or a
	// not yet due retry or a first try: the probe of a circuit breaker. ok is false when nothing waits.
	LeaseOldest(lane LaneID) (d Delivery, ok bool, err error)
	// SetNotify sets the function that is called, without locks held and at most
	// once per change, when a lane that could not fill its last Lease may have
	// something to lease again: a message was appended or a retry became due.
	// It must not block. Call it once, before the first OpenLane.
	SetNotify(func(LaneID))

	// Ack settles a message as delivered. It may be forgotten in a crash; the message
	// is then delivered again. first is false when the message was delivered before, by
	// another lane of the group, or was not leased.
	Ack(d Delivery) (first bool)
	// Release gives a message back to the head of its lane; no attempt is counted.
	Release(d Delivery)
	// Retry puts a message aside until at; Attempt becomes d.Attempt+1. When another
	// lane of the group delivered the message, the lane is done with it instead.
	Retry(d Delivery, at time.Time, f Failure)
	// Bury turns a message into a dead letter with d.Attempt+1 attempts. When another
	// lane of the group delivered the message or still has it, the lane is done with it
	// instead; the last lane of the group makes the dead letter, with the attempts of
	// all lanes. buried tells which of the two it was.
	Bury(d Delivery, f Failure) (buried bool, err error)
	// BuryExpired does the same to every waiting, not leased message of the lane that
	// was accepted before cut, in bounded memory, and returns how many became dead letters.
	// It goes through the log in order and stops at the first unread message that is
	// younger, so one with an older time behind that stays for the next call.
	BuryExpired(ctx context.Context, lane LaneID, cut time.Time, f Failure) (int, error)

	// DeadLetters calls fn for each dead letter of a destination
	// ("namespace/name"), oldest first, from the key after `after` on ("" for
	// all), until fn returns false. The DeadLetter is valid only during the call.
	DeadLetters(ctx context.Context, destination, after string, fn func(DeadLetter) bool) error
	// DeleteDeadLetters removes dead letters by key.
	DeleteDeadLetters(ctx context.Context, destination string, keys ...string) error
	// TrimDeadLetters removes the oldest dead letters of a destination until none is older
	// than before, and until their bytes are at most maxBytes or none is older than
	// young (not before before). It returns how many went.
	TrimDeadLetters(ctx context.Context, destination string, before, young time.Time, maxBytes int64) (int, error)
	// Remember keeps a few bytes under a name; nil forgets them. It survives the
	// end of the process at once, and a loss of power a moment later.
	Remember(name string, value []byte) error
	// RememberDurably does the same and returns after it survives a loss of power.
	RememberDurably(name string, value []byte) error
	// Remembered returns all that is kept.
	Remembered() (map[string][]byte, error)

	// LaneStats returns the ledger of a lane, or of a group; zero for one that is not known.
	LaneStats(lane LaneID) LaneStats
	// Position returns the last message that a lane has read of its Source's log,
	// and the log's last one; zero for a lane that is not known.
	Position(lane LaneID) (read, end uint64)
	// SourceStats returns a Source's log; zero for one that never had a message.
	SourceStats(source string) SourceStats
	// DestinationStats returns a destination's ledger and dead letters; zero for one that is not known.
	DestinationStats(destination string) DestinationStats
	// Destinations lists those that have lanes, dead letters or the ledger of dropped lanes.
	Destinations() []string
	// ForgetDestination forgets the ledger of a destination's dropped lanes.
	ForgetDestination(destination string) error

	// Close persists every cursor and closes the store. Leased messages go back to their lanes.
	Close() error
}
