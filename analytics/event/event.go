// Package event is Posthorn's wire contract: the format of a tracking call, the
// rules for its acceptance, and the exact bytes of its delivered message.
//
// A body is decoded, validated, normalized and made canonical in one pass over
// its bytes. The result is a fixed point of JavaScript:
//
//	JSON.stringify(JSON.parse(body)) === body
//
// A receiver that verifies a signature over the re-stringified body, as the webhook's
// documentation requires, therefore computes the same digest.
// [Canonical] has the rules. A message with long numbers, which JavaScript would
// change, keeps their digits and is marked ([Call.LongNumbers]); [FixedPoint]
// converts them to strings for destinations without exact numbers.
//
// The package imports the standard library only, does no I/O, and is safe for
// concurrent use. The main types are Request, Call and Batch.
package event

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"net/netip"
	"net/url"
	"strings"
	"time"
)

// Limits of calls. Sizes are of the sent JSON text, without any content encoding.
const (
	// MaxCallBytes is the size of one call. The size of a call in a batch includes the
	// batch's context and integrations, because they are merged into it.
	MaxCallBytes = 32 << 10
	// MaxBodyBytes is the size of one request body.
	MaxBodyBytes = 500 << 10
	// MaxBatchCalls is the number of calls in a batch; further calls are rejected.
	MaxBatchCalls = 2500
	// MinMergedBytes and MergedRatio bound the messages of one batch: see
	// [MaxMergedBytes].
	MinMergedBytes = 1 << 20
	MergedRatio    = 16
	// MessageOverhead is the approximate size of the data that is added to each call, except the
	// context and integrations of its batch: times, ids and version.
	MessageOverhead = 256
	// MaxMessageIDRunes is the length of a messageId in code points, which have at most four bytes each.
	MaxMessageIDRunes = 100
	MaxMessageIDBytes = 4 * MaxMessageIDRunes
	// MaxDepth is the nesting limit of arrays and objects in one call, including the call's own
	// object.
	MaxDepth = 256
)

// MaxMergedBytes is the size limit of all messages of a batch, for the size of its body:
// [MergedRatio] times the body, and at least [MinMergedBytes]. It bounds the growth of a batch with
// a large context, which is merged into each call.
func MaxMergedBytes(body int) int { return max(MinMergedBytes, MergedRatio*body) }

// Type is the type of a call.
type Type string

// The types of calls. Clients cannot send Delete: see [DeleteMessage].
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
	CodeNotAnObject      = "not_an_object"       // JSON, but the body or the call is not an object
	CodeTooDeep          = "too_deep"            // nested deeper than MaxDepth
	CodeBodyTooLarge     = "body_too_large"      // body over MaxBodyBytes
	CodeCallTooLarge     = "call_too_large"      // call over MaxCallBytes
	CodeBatchTooLarge    = "batch_too_large"     // messages of a batch over MaxMergedBytes
	CodeTooManyCalls     = "too_many_calls"      // call beyond MaxBatchCalls
	CodeEmptyBatch       = "empty_batch"         // no "batch", or an empty one
	CodeNoType           = "no_type"             // call in a batch without a type
	CodeUnknownType      = "unknown_type"        // type that clients must not send
	CodeNoUserAnonID     = "no_user_anon_id"     // neither userId nor anonymousId
	CodeNoEvent          = "no_event"            // track without event
	CodeNoGroupID        = "no_group_id"         // group without groupId
	CodeNoPreviousID     = "no_previous_id"      // alias without previousId
	CodeNoUserID         = "no_user_id"          // alias without userId
	CodeMessageIDTooLong = "message_id_too_long" // messageId over MaxMessageIDRunes
	CodeInvalidField     = "invalid_field"       // field of the wrong JSON type, or id that is not UTF-8; the message names it
)

// Error is an error of a request that its sender can fix. Message has the field, the rule and the
// fix; it never repeats sent values.
type Error struct{ Code, Message string }

func (e *Error) Error() string { return e.Code + ": " + e.Message }

// Request is one HTTP body with its metadata.
type Request struct {
	// Type is the type in the path. It takes precedence over a type in the body. Empty for
	// /v1/batch and /v1/import.
	Type Type
	// Import is true for past calls: their times are not corrected.
	Import bool
	// ReceivedAt is the time of receipt; zero means now.
	ReceivedAt time.Time
	// ClientIP, when valid, is the sender's address. It becomes context.ip of a call without one that
	// an end user's device sent: FromBrowser is true, or the call's context has direct: true, or it
	// has a device and not direct: false.
	ClientIP    netip.Addr
	FromBrowser bool
	// NewID returns the messageId of a call without one; nil generates random UUIDs.
	NewID func() string
}

// Call is one accepted call.
type Call struct {
	Type Type
	// MessageID is the sender's messageId, or the assigned one. UserID and AnonymousID are empty if the call has
	// none. All are as in [ID].
	MessageID, UserID, AnonymousID string
	// Event is empty if the call has none. A lone surrogate, which UTF-8 cannot represent, becomes U+FFFD here;
	// Body keeps it.
	Event string
	// Timestamp is the time of the event by the server's clock, in UTC and in milliseconds.
	Timestamp time.Time
	// Integrations is the sender's selection of destinations.
	Integrations Integrations
	// Defects are what could not be read or kept of the call.
	Defects Defects
	// LongNumbers is true if Body has numbers that JavaScript would change. Then FixedPoint(Body)
	// is delivered, except to destinations with exact numbers.
	LongNumbers bool
	// Body is the message. It must not be changed. The bodies and strings of one Parse share
	// memory; clone them to keep only some of them.
	Body []byte
}

// Defects is a set of faults of an accepted call.
type Defects uint8

// The defects. Of the times, only those that are needed are read.
const (
	DefectTimestamp         Defects = 1 << iota // timestamp is not a time
	DefectOriginalTimestamp                     // originalTimestamp is not a time
	DefectSentAt                                // sentAt is not a time
	DefectClock                                 // sentAt is too far from the time of receipt to correct the timestamp
	DefectEncoding                              // bytes that are not UTF-8 were replaced
)

// DefectNames are the names of the defects, in the order of their bits.
var DefectNames = [...]string{"timestamp", "originalTimestamp", "sentAt", "clock", "encoding"}

// Rejection is a rejected call of a batch.
type Rejection struct {
	Index int // in the request's batch, from 0
	Err   *Error
}

// Batch is a parsed request.
type Batch struct {
	// WriteKey is the body's writeKey; no message contains it.
	WriteKey string
	Calls    []Call
	// Indexes[i] is the position of Calls[i] in the request's batch.
	Indexes  []int
	Rejected []Rejection
}

// DeleteMessage returns the message of a deletion request for a user.
func DeleteMessage(userID string, at time.Time) []byte {
	b := append(make([]byte, 0, 80+len(userID)), `{"type":"delete","userId":`...)
	b = appendString(b, userID)
	b = append(b, `,"timestamp":"`...)
	b = appendMillis(b, at.UnixMilli())
	return append(b, `"}`...)
}

// ID is an id of a call. A lone surrogate in it, which UTF-8 does not have, is the three bytes that UTF-8 would use
// (WTF-8), and its escape in JSON, so that different ids remain different.
type ID string

// MarshalJSON implements json.Marshaler.
func (id ID) MarshalJSON() ([]byte, error) { return appendString(nil, string(id)), nil }

// UnmarshalJSON implements json.Unmarshaler.
func (id *ID) UnmarshalJSON(text []byte) error {
	canonical, err := Canonical(text)
	if err != nil || canonical[0] != '"' {
		return errors.Join(errors.New("an id must be a JSON string"), err)
	}
	*id = ID(appendDecoded(nil, canonical))
	return nil
}

// Key returns the id percent-encoded by RFC 3986: the value of the headers Idempotency-Key and webhook-id.
func (id ID) Key() string { return strings.ReplaceAll(url.QueryEscape(string(id)), "+", "%20") }

func randomUUID() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // Read never fails: it ends the program if the system has no randomness.
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
