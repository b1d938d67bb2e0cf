// Package codec is the data layout of a store: the keys, and the encoding of each value.
//
// Format is the version of the layout. The package does not know files, locks or the engine. The main types are Record (a message),
// LaneState, GroupState and Decoder.
package codec

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// ErrMalformed reports a value with a valid checksum that does not have this format.
var ErrMalformed = errors.New("malformed value")

// Types are the types of messages that take one byte in a record, and no memory when it is read.
var Types = [...]string{1: "identify", 2: "track", 3: "page", 4: "screen", 5: "group", 6: "alias", CodeDelete: "delete"}

// CodeDelete is the code of deletion notifications in Types.
const CodeDelete = 7

func typeCode(t string) byte {
	for i := 1; i < len(Types); i++ {
		if Types[i] == t {
			return byte(i)
		}
	}
	return 0
}

// Decoder reads a value field by field. After the first malformed field, bad is set and all
// further fields are zero.
type Decoder struct {
	Rest []byte
	Bad  bool
}

// Uvarint reads an unsigned integer of variable length.
func (d *Decoder) Uvarint() uint64 {
	v, n := binary.Uvarint(d.Rest)
	if n <= 0 {
		d.Rest, d.Bad = nil, true
		return 0
	}
	d.Rest = d.Rest[n:]
	return v
}

// Bytes reads a length and as many bytes, which remain part of the value.
func (d *Decoder) Bytes() []byte {
	n := d.Uvarint()
	if n > uint64(len(d.Rest)) {
		d.Rest, d.Bad = nil, true
		return nil
	}
	v := d.Rest[:n:n]
	d.Rest = d.Rest[n:]
	return v
}

func (d *Decoder) string() string { return string(d.Bytes()) }

// Fixed64 reads an unsigned integer of eight bytes.
func (d *Decoder) Fixed64() uint64 {
	if len(d.Rest) < 8 {
		d.Rest, d.Bad = nil, true
		return 0
	}
	v := binary.BigEndian.Uint64(d.Rest)
	d.Rest = d.Rest[8:]
	return v
}

func (d *Decoder) byte() byte {
	if len(d.Rest) == 0 {
		d.Bad = true
		return 0
	}
	v := d.Rest[0]
	d.Rest = d.Rest[1:]
	return v
}

// Err returns ErrMalformed after a malformed field.
func (d *Decoder) Err() error {
	if d.Bad {
		return ErrMalformed
	}
	return nil
}

// AppendString appends a length and the bytes of s.
func AppendString[T string | []byte](dst []byte, s T) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(s))), s...)
}

// A message in a log:
//
//	acceptedAt(8) bytesBefore(8) type(1) [traceparent] id [type] event skip... only body
//
// The highest bit of the type marks a traceparent. The entry longNumbers in skip marks a body with
// long numbers; an entry of queue.FilterFailed has the error of a filter. bytesBefore is the number of bytes of all
// previous messages of the log, so that two records give the size of the part between them.
const (
	recordHead = 17
	traced     = 0x80

	longNumbers = "#"
)

// RecordSize returns the number of bytes that AppendRecord appends.
func RecordSize(m *queue.Message) int {
	n := recordHead + uvarintLen(len(m.ID)) + len(m.ID) + uvarintLen(len(m.Event)) + len(m.Event) +
		uvarintLen(skips(m)) + uvarintLen(len(m.Only)) + len(m.Only) + len(m.Body)
	if typeCode(m.Type) == 0 {
		n += uvarintLen(len(m.Type)) + len(m.Type)
	}
	if m.TraceParent != "" {
		n += uvarintLen(len(m.TraceParent)) + len(m.TraceParent)
	}
	for _, s := range m.Skip {
		n += uvarintLen(len(s)) + len(s)
	}
	if m.LongNumbers {
		n += 1 + len(longNumbers)
	}
	return n
}

// skips is the number of entries of skip in a message's record.
func skips(m *queue.Message) int {
	if m.LongNumbers {
		return len(m.Skip) + 1
	}
	return len(m.Skip)
}

func uvarintLen(n int) int {
	l := 1
	for ; n >= 0x80; n >>= 7 {
		l++
	}
	return l
}

// AppendRecord appends the record of a message.
func AppendRecord(dst []byte, m *queue.Message, bytesBefore uint64) []byte {
	dst = binary.BigEndian.AppendUint64(dst, uint64(m.AcceptedAt.UnixMilli()))
	dst = binary.BigEndian.AppendUint64(dst, bytesBefore)
	code := typeCode(m.Type)
	if m.TraceParent == "" {
		dst = append(dst, code)
	} else {
		dst = AppendString(append(dst, code|traced), m.TraceParent)
	}
	dst = AppendString(dst, m.ID)
	if code == 0 {
		dst = AppendString(dst, m.Type)
	}
	dst = AppendString(dst, m.Event)
	dst = binary.AppendUvarint(dst, uint64(skips(m)))
	if m.LongNumbers {
		dst = AppendString(dst, longNumbers)
	}
	for _, s := range m.Skip {
		dst = AppendString(dst, s)
	}
	dst = AppendString(dst, m.Only)
	return append(dst, m.Body...)
}

// Record is a decoded message; its slices refer to the encoded value.
type Record struct {
	AcceptedAt  int64
	BytesBefore uint64
	Code        byte
	Trace       []byte
	ID, Type    []byte
	Event       []byte
	Skips       uint64
	Skip        []byte // The encoded names.
	Long        bool   // The body has long numbers.
	Only        []byte
	Body        []byte
	// Lost: the message was damaged. body gives the reason, acceptedAt is an estimate, and the
	// other fields are empty.
	Lost bool
}

// codeLost is the type of a record that a repair wrote in the place of a missing message.
const codeLost = 0xff

// AppendLost appends the record of a message that a repair could not read. why is the reason.
func AppendLost(dst []byte, acceptedAt int64, bytesBefore uint64, why string) []byte {
	dst = binary.BigEndian.AppendUint64(dst, uint64(acceptedAt))
	dst = binary.BigEndian.AppendUint64(dst, bytesBefore)
	return append(append(dst, codeLost), why...)
}

// DecodeHead decodes only acceptedAt and bytesBefore.
func (r *Record) DecodeHead(v []byte) error {
	d := Decoder{Rest: v}
	r.AcceptedAt, r.BytesBefore = int64(d.Fixed64()), d.Fixed64()
	return d.Err()
}

// Decode decodes the whole record. The Record refers to v.
func (r *Record) Decode(v []byte) error {
	d := Decoder{Rest: v}
	r.AcceptedAt = int64(d.Fixed64())
	r.BytesBefore = d.Fixed64()
	r.Code, r.Trace, r.Long = d.byte(), nil, false
	if r.Lost = r.Code == codeLost; r.Lost {
		r.Code, r.Body = 0, d.Rest
		return d.Err()
	}
	if r.Code&traced != 0 {
		r.Code &^= traced
		r.Trace = d.Bytes()
	}
	r.ID = d.Bytes()
	r.Type = nil
	if r.Code == 0 {
		r.Type = d.Bytes()
	} else if int(r.Code) >= len(Types) {
		d.Bad = true
	}
	r.Event = d.Bytes()
	r.Skips = d.Uvarint()
	r.Skip = d.Rest
	for i := range r.Skips {
		name := d.Bytes()
		if d.Bad {
			break
		}
		r.Long = r.Long || i == 0 && string(name) == longNumbers
	}
	r.Only = d.Bytes()
	r.Body = d.Rest
	return d.Err()
}

// Verdict is what a lane does with a message.
type Verdict int

// The verdicts. Wanted: the lane delivers the message.
const (
	Wanted   Verdict = iota
	Filtered         // The lane counts the message and does not deliver it.
	Passed           // The message is for another destination; the lane does not count it.
	Damaged          // The destinations are unknown.
)

// Verdict returns what a lane does with the message.
func (r *Record) Verdict(lane queue.LaneID) Verdict {
	if r.Lost {
		return Damaged
	}
	if len(r.Only) != 0 && !isFor(r.Only, lane) {
		return Passed
	}
	d := Decoder{Rest: r.Skip}
	for range r.Skips {
		if string(d.Bytes()) == lane.Destination {
			return Filtered
		}
	}
	return Wanted
}

// FilterError returns why the filter of a destination could not decide about the message.
func (r *Record) FilterError(destination string) string {
	d, prefix := Decoder{Rest: r.Skip}, []byte(queue.FilterFailed(destination, ""))
	for range r.Skips {
		if reason, ok := bytes.CutPrefix(d.Bytes(), prefix); ok {
			return string(reason)
		}
	}
	return ""
}

// ForSibling reports whether a message is only for another endpoint of the lane's destination.
func (r *Record) ForSibling(lane queue.LaneID) bool {
	endpoint, ok := bytes.CutPrefix(r.Only, []byte(lane.Destination+"/"))
	return ok && string(endpoint) != lane.Endpoint
}

// isFor reports whether a lane is of the destination ("namespace/name") or the endpoint
// ("namespace/name/endpoint") that only names.
func isFor(only []byte, lane queue.LaneID) bool {
	endpoint, ok := bytes.CutPrefix(only, []byte(lane.Destination))
	return ok && (len(endpoint) == 0 || string(endpoint) == "/"+lane.Endpoint)
}

// LaneState is the durable state of a lane without its retries: one value, so that ledger and
// position agree after a crash.
type LaneState struct {
	Start     uint64 // The lane has the messages after this one.
	Next      uint64 // The first message that was not read.
	Delivered uint64
	Filtered  uint64
	Omitted   uint64
	Buried    uint64
	Passed    uint64 // Messages for other destinations only.
	Retries   uint64 // Number of entries of the retry index.
	End       uint64 // The first message that is not the lane's; 0 for a lane without an end.

	// For lanes in a group. handedOver is the number of messages that ended in this lane
	// without a delivery or a dead letter of this lane, because the group settles them; skipped
	// counts the ones without an attempt. endpointRemoved: the endpoint was removed from the
	// destination.
	HandedOver      uint64
	Skipped         uint64
	EndpointRemoved bool
}

// Encode appends the state, and the positions before next that are neither settled nor in the
// retry index. It sorts open.
func (s *LaneState) Encode(dst []byte, open []uint64) []byte {
	for _, n := range [...]uint64{s.Start, s.Next, s.Delivered, s.Filtered, s.Buried, s.Passed, s.Retries, uint64(len(open))} {
		dst = binary.AppendUvarint(dst, n)
	}
	slices.Sort(open)
	last := s.Start
	for _, seq := range open {
		dst = binary.AppendUvarint(dst, seq-last)
		last = seq
	}
	inGroup := s.HandedOver != 0 || s.Skipped != 0 || s.EndpointRemoved || s.Omitted != 0
	if s.End != 0 || inGroup {
		dst = binary.AppendUvarint(dst, s.End)
	}
	if inGroup {
		dst = binary.AppendUvarint(binary.AppendUvarint(dst, s.HandedOver), s.Skipped)
		removed := byte(0)
		if s.EndpointRemoved {
			removed = 1
		}
		dst = append(dst, removed)
	}
	if s.Omitted != 0 {
		dst = binary.AppendUvarint(dst, s.Omitted)
	}
	return dst
}

// Decode decodes a state, and the positions that Encode appended.
func (s *LaneState) Decode(v []byte) (open []uint64, err error) {
	d := Decoder{Rest: v}
	for _, n := range [...]*uint64{&s.Start, &s.Next, &s.Delivered, &s.Filtered, &s.Buried, &s.Passed, &s.Retries} {
		*n = d.Uvarint()
	}
	n := d.Uvarint()
	last := s.Start
	for i := uint64(0); i < n && !d.Bad; i++ {
		last += d.Uvarint()
		open = append(open, last)
	}
	if s.End = 0; len(d.Rest) > 0 {
		s.End = d.Uvarint()
	}
	if s.HandedOver, s.Skipped, s.EndpointRemoved = 0, 0, false; len(d.Rest) > 0 {
		s.HandedOver, s.Skipped, s.EndpointRemoved = d.Uvarint(), d.Uvarint(), d.byte() != 0
	}
	if s.Omitted = 0; len(d.Rest) > 0 {
		s.Omitted = d.Uvarint()
	}
	return open, d.Err()
}

// ReadAll reports whether the lane has an end and has read all messages before it.
func (s *LaneState) ReadAll() bool { return s.End != 0 && s.Next >= s.End }

// Settled is the number of messages that the lane has ended.
func (s *LaneState) Settled() uint64 {
	return s.Delivered + s.Filtered + s.Omitted + s.Buried + s.HandedOver
}

// AppendLogPosition encodes the last batch of the replicated log: its number and its session.
func AppendLogPosition(dst []byte, batch uint64, session [16]byte) []byte {
	return append(binary.BigEndian.AppendUint64(dst, batch), session[:]...)
}

// DecodeLogPosition decodes what AppendLogPosition appended.
func DecodeLogPosition(v []byte) (batch uint64, session [16]byte, err error) {
	if len(v) != 8+len(session) {
		return 0, session, ErrMalformed
	}
	return binary.BigEndian.Uint64(v), [16]byte(v[8:]), nil
}

// AppendDropped encodes the ledger of dropped lanes, in which nothing is pending.
func AppendDropped(dst []byte, l queue.Ledger) []byte {
	for _, n := range [...]int64{l.Delivered, l.Filtered, l.DeadLettered, l.Discarded} {
		dst = binary.AppendUvarint(dst, uint64(n))
	}
	if l.Omitted != 0 {
		dst = binary.AppendUvarint(dst, uint64(l.Omitted))
	}
	return dst
}

// AppendDestination encodes the number of a destination's dead letters, their bytes, and the
// ledger of its dropped lanes.
func AppendDestination(dst []byte, letters, bytes int64, dropped queue.Ledger) []byte {
	dst = binary.AppendUvarint(binary.AppendUvarint(dst, uint64(letters)), uint64(max(bytes, 0)))
	return AppendDropped(dst, dropped)
}

// Destination reads what AppendDestination appended.
func (d *Decoder) Destination() (letters, bytes int64, dropped queue.Ledger) {
	letters, bytes = int64(d.Uvarint()), int64(d.Uvarint())
	if len(d.Rest) > 0 {
		dropped = d.Dropped()
	}
	return letters, bytes, dropped
}

// Dropped reads what AppendDropped appended.
func (d *Decoder) Dropped() (l queue.Ledger) {
	for _, n := range [...]*int64{&l.Delivered, &l.Filtered, &l.DeadLettered, &l.Discarded} {
		*n = int64(d.Uvarint())
		l.Accepted += *n
	}
	if len(d.Rest) > 0 {
		l.Omitted = int64(d.Uvarint())
		l.Accepted += l.Omitted
	}
	return l
}

// AppendFailure appends a failure, with at most 1 KiB of the response.
func AppendFailure(dst []byte, f *queue.Failure) []byte {
	dst = binary.AppendUvarint(dst, uint64(max(Millis(f.Time), 0)))
	dst = AppendString(dst, f.Reason)
	dst = binary.AppendUvarint(dst, uint64(max(f.StatusCode, 0)))
	dst = AppendString(dst, f.Message)
	return AppendString(dst, f.Response[:min(len(f.Response), maxResponse)])
}

// Failure reads what AppendFailure appended.
func (d *Decoder) Failure() queue.Failure {
	var f queue.Failure
	if ms := d.Uvarint(); ms != 0 {
		f.Time = FromMillis(int64(ms))
	}
	f.Reason = d.string()
	f.StatusCode = int(d.Uvarint())
	f.Message = d.string()
	if b := d.Bytes(); len(b) > 0 {
		f.Response = append([]byte(nil), b...)
	}
	return f
}

const maxResponse = 1 << 10

// AppendRetry appends a retry: when it is due in Unix milliseconds, how many attempts there were, and
// the last failure.
func AppendRetry(dst []byte, due int64, attempt int, f *queue.Failure) []byte {
	dst = binary.AppendUvarint(dst, uint64(due))
	dst = binary.AppendUvarint(dst, uint64(attempt))
	return AppendFailure(dst, f)
}

// Retry reads what AppendRetry appended, without the failure, which follows.
func (d *Decoder) Retry() (due int64, attempt int) {
	return int64(d.Uvarint()), int(d.Uvarint())
}

func appendLaneID(dst []byte, id queue.LaneID) []byte {
	return AppendString(AppendString(AppendString(dst, id.Source), id.Destination), id.Endpoint)
}

// AppendLaneName appends a lane's ID with Any.
func AppendLaneName(dst []byte, id queue.LaneID) []byte {
	if dst = appendLaneID(dst, id); id.Any {
		dst = append(dst, 1)
	}
	return dst
}

// LaneName reads what AppendLaneName appended.
func (d *Decoder) LaneName() queue.LaneID {
	id := d.laneID()
	id.Any = len(d.Rest) > 0 && d.byte() != 0
	return id
}

func (d *Decoder) laneID() queue.LaneID {
	return queue.LaneID{Source: d.string(), Destination: d.string(), Endpoint: d.string()}
}

// AppendDeadLetter appends the value of a dead letter.
func AppendDeadLetter(dst []byte, l *queue.DeadLetter) []byte {
	dst = appendLaneID(dst, l.Lane)
	dst = binary.AppendUvarint(dst, l.Seq)
	dst = binary.AppendUvarint(dst, uint64(max(Millis(l.AcceptedAt), 0)))
	dst = binary.AppendUvarint(dst, uint64(l.Attempts))
	dst = AppendFailure(dst, &l.Failure)
	dst = AppendString(dst, l.ID)
	dst = AppendString(dst, l.Type)
	dst = AppendString(dst, l.Event)
	if len(l.Failure.Redact) > 0 {
		dst = AppendString(append(dst, hasRules), string(l.Failure.Redact))
	}
	return append(dst, l.Body...)
}

// hasRules is before the rules of redaction of a dead letter. No body begins with it.
const hasRules = 0

// DecodeDeadLetter decodes a dead letter. Its body refers to v.
func DecodeDeadLetter(key, v []byte) (queue.DeadLetter, error) {
	d := Decoder{Rest: v}
	l := queue.DeadLetter{Key: DeadLetterID(key), Lane: d.laneID(), Seq: d.Uvarint(), AcceptedAt: FromMillis(int64(d.Uvarint())),
		Attempts: int(d.Uvarint()), Failure: d.Failure()}
	l.ID, l.Type, l.Event = d.string(), d.string(), d.string()
	if len(d.Rest) > 0 && d.Rest[0] == hasRules {
		d.byte()
		l.Failure.Redact = d.Bytes()
	}
	l.Body = d.Rest
	return l, d.Err()
}

// Millis returns Unix milliseconds, and 0 for the zero time.
func Millis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

// FromMillis returns the time of Unix milliseconds.
func FromMillis(ms int64) time.Time { return time.UnixMilli(ms).UTC() }
