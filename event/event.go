// Package event is Posthorn's wire contract: what a tracking call is, which
// calls are accepted, and the exact bytes of the message that is delivered for
// each of them.
//
// A body is decoded, validated, normalised and made canonical in one pass over
// its bytes. The result is a fixed point of JavaScript:
//
//	JSON.stringify(JSON.parse(body)) === body
//
// so that a receiver which verifies a signature over the re-stringified body,
// as the webhook's documentation tells it to, computes the digest that was
// sent. [Canonical] has the rules. A message with long numbers, which JavaScript
// would change, keeps their digits and is marked ([Call.LongNumbers]);
// [FixedPoint] makes strings of them for the destinations that want it.
//
// The package imports the standard library only, does no I/O, and is safe for
// concurrent use.
package event

import (
	"crypto/rand"
	"encoding/hex"
	"time"
)

// Limits of what is accepted. Sizes are those of the JSON text as it was sent,
// after any content encoding was undone.
const (
	// MaxCallBytes is the size of one call. A call in a batch counts with the
	// batch's context and integrations, because they are merged into it.
	MaxCallBytes = 32 << 10
	// MaxBodyBytes is the size of one request body.
	MaxBodyBytes = 500 << 10
	// MaxBatchCalls is the number of calls in a batch; those beyond it are
	// rejected.
	MaxBatchCalls = 2500
	// MinMergedBytes and MergedRatio bound the messages of one batch: see
	// [MaxMergedBytes].
	MinMergedBytes = 1 << 20
	MergedRatio    = 16
	// MessageOverhead is about what is added to each call, besides the context
	// and integrations of its batch: times, ids and version.
	MessageOverhead = 256
	// MaxMessageIDBytes is the length of a messageId in UTF-8.
	MaxMessageIDBytes = 100
	// MaxDepth is how deep arrays and objects may nest in one call, the call's
	// own object included.
	MaxDepth = 256
)

// MaxMergedBytes is the size of all messages that a batch may make, for the size
// of its body: [MergedRatio] times the body, and at least [MinMergedBytes]. It
// bounds how much a body grows when the batch has a large context, which is
// merged into each call.
func MaxMergedBytes(body int) int { return max(MinMergedBytes, MergedRatio*body) }

// Type says what a call is about.
type Type string

// The types of calls. Delete never comes from a client: see [DeleteMessage].
const (
	Identify Type = "identify"
	Track    Type = "track"
	Page     Type = "page"
	Screen   Type = "screen"
	Group    Type = "group"
	Alias    Type = "alias"
	Delete   Type = "delete"
)

// callable reports whether clients may send calls of this type.
func (t Type) callable() bool {
	switch t {
	case Identify, Track, Page, Screen, Group, Alias:
		return true
	}
	return false
}

// Codes of [Error].
const (
	CodeInvalidJSON      = "invalid_json"        // not JSON; the message gives the byte offset
	CodeNotAnObject      = "not_an_object"       // JSON, but the body or the call is no object
	CodeTooDeep          = "too_deep"            // nests deeper than MaxDepth
	CodeBodyTooLarge     = "body_too_large"      // body over MaxBodyBytes
	CodeCallTooLarge     = "call_too_large"      // call over MaxCallBytes
	CodeBatchTooLarge    = "batch_too_large"     // messages of a batch over MaxMergedBytes
	CodeTooManyCalls     = "too_many_calls"      // call beyond MaxBatchCalls
	CodeEmptyBatch       = "empty_batch"         // no "batch", or none with calls in it
	CodeNoType           = "no_type"             // call in a batch without a type
	CodeUnknownType      = "unknown_type"        // type that no client may send
	CodeNoUserAnonID     = "no_user_anon_id"     // neither userId nor anonymousId
	CodeNoEvent          = "no_event"            // track without event
	CodeNoGroupID        = "no_group_id"         // group without groupId
	CodeNoPreviousID     = "no_previous_id"      // alias without previousId
	CodeNoUserID         = "no_user_id"          // alias without userId
	CodeMessageIDTooLong = "message_id_too_long" // messageId over MaxMessageIDBytes
	CodeInvalidField     = "invalid_field"       // field of the wrong JSON type; the message names it
)

// Error is a fault in a request that its sender can mend. Message names the
// field, the rule and the fix; it never repeats values that were sent.
type Error struct{ Code, Message string }

func (e *Error) Error() string { return e.Code + ": " + e.Message }

// Request is one HTTP body with what is known of it besides its bytes.
type Request struct {
	// Type is the type that the path names. It wins over a type in the body.
	// Empty for /v1/batch and /v1/import.
	Type Type
	// ReceivedAt is when the request arrived; zero means now.
	ReceivedAt time.Time
	// ClientIP, when not empty, becomes context.ip of calls that carry none.
	ClientIP string
	// NewID makes the messageId of a call without one; nil makes random UUIDs.
	NewID func() string
}

// Call is one accepted call.
type Call struct {
	Type Type
	// MessageID is the sender's messageId, or the one assigned.
	MessageID string
	// Event, UserID and AnonymousID are empty when the call has none. A lone
	// surrogate, which UTF-8 cannot express, reads as U+FFFD here; Body keeps it.
	Event, UserID, AnonymousID string
	// Timestamp is when the call happened, by the server's clock, in UTC and to
	// the millisecond.
	Timestamp time.Time
	// Integrations is what the sender said about destinations.
	Integrations Integrations
	// LongNumbers is true when Body has numbers that JavaScript would change. Then
	// FixedPoint(Body) is delivered, except where the digits are asked for.
	LongNumbers bool
	// Body is the message. It must not be changed.
	// The bodies and strings of one Parse share memory; whoever keeps a few of
	// many for long should clone them.
	Body []byte
}

// Rejection is one call of a batch that was not accepted.
type Rejection struct {
	Index int // in the request's batch, from 0
	Err   *Error
}

// Batch is a parsed request.
type Batch struct {
	// WriteKey is the body's writeKey; it is part of no message.
	WriteKey string
	Calls    []Call
	// Indexes[i] is the position of Calls[i] in the request's batch.
	Indexes  []int
	Rejected []Rejection
}

// DeleteMessage is the message that tells of a deletion request for a user.
func DeleteMessage(userID string, at time.Time) []byte {
	b := append(make([]byte, 0, 80+len(userID)), `{"type":"delete","userId":`...)
	b = appendString(b, userID)
	b = append(b, `,"timestamp":"`...)
	b = appendMillis(b, at.UnixMilli())
	return append(b, `"}`...)
}

func randomUUID() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails: it ends the program where the system has no randomness
	id[6] = id[6]&0x0f | 0x40
	id[8] = id[8]&0x3f | 0x80
	var text [36]byte
	hex.Encode(text[:], id[:4])
	hex.Encode(text[9:], id[4:6])
	hex.Encode(text[14:], id[6:8])
	hex.Encode(text[19:], id[8:10])
	hex.Encode(text[24:], id[10:])
	text[8], text[13], text[18], text[23] = '-', '-', '-', '-'
	return string(text[:])
}
