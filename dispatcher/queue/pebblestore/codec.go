package pebblestore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// errMalformed reports a value with a valid checksum that does not have this format.
var errMalformed = errors.New("malformed value")

// A type in this table takes one byte in a record, and no memory when it is read.
var types = [...]string{1: "identify", 2: "track", 3: "page", 4: "screen", 5: "group", 6: "alias", codeDelete: "delete"}

const codeDelete = 7

func typeCode(t string) byte {
	for i := 1; i < len(types); i++ {
		if types[i] == t {
			return byte(i)
		}
	}
	return 0
}

// decoder reads a value field by field. After the first malformed field, bad is set and all
// further fields are zero.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.b, d.bad = nil, true
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) bytes() []byte {
	n := d.uvarint()
	if n > uint64(len(d.b)) {
		d.b, d.bad = nil, true
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) string() string { return string(d.bytes()) }

func (d *decoder) fixed64() uint64 {
	if len(d.b) < 8 {
		d.b, d.bad = nil, true
		return 0
	}
	v := binary.BigEndian.Uint64(d.b)
	d.b = d.b[8:]
	return v
}

func (d *decoder) byte() byte {
	if len(d.b) == 0 {
		d.bad = true
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *decoder) err() error {
	if d.bad {
		return errMalformed
	}
	return nil
}

func appendString[T string | []byte](dst []byte, s T) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(s))), s...)
}

// A message in a log:
//
//	acceptedAt(8) bytesBefore(8) type(1) [traceparent] id [type] event skip... only body
//
// The highest bit of the type marks a traceparent. Releases without tracing cannot read such a
// message, so a message without traceparent does not have the bit. The entry longNumbers in
// skip marks a body with long numbers; it is not the name of a destination, so older releases
// ignore it. bytesBefore is the number of bytes of all previous messages of the log, so that
// two records give the size of the part between them.
const (
	recordHead = 17
	traced     = 0x80

	longNumbers = "#"
)

func recordSize(m *queue.Message) int {
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

func appendRecord(dst []byte, m *queue.Message, bytesBefore uint64) []byte {
	dst = binary.BigEndian.AppendUint64(dst, uint64(m.AcceptedAt.UnixMilli()))
	dst = binary.BigEndian.AppendUint64(dst, bytesBefore)
	code := typeCode(m.Type)
	if m.TraceParent == "" {
		dst = append(dst, code)
	} else {
		dst = appendString(append(dst, code|traced), m.TraceParent)
	}
	dst = appendString(dst, m.ID)
	if code == 0 {
		dst = appendString(dst, m.Type)
	}
	dst = appendString(dst, m.Event)
	dst = binary.AppendUvarint(dst, uint64(skips(m)))
	if m.LongNumbers {
		dst = appendString(dst, longNumbers)
	}
	for _, s := range m.Skip {
		dst = appendString(dst, s)
	}
	dst = appendString(dst, m.Only)
	return append(dst, m.Body...)
}

// record is a decoded message; its slices refer to the encoded value.
type record struct {
	acceptedAt  int64
	bytesBefore uint64
	code        byte
	trace       []byte
	id, typ     []byte
	event       []byte
	skips       uint64
	skip        []byte // The encoded names.
	long        bool   // The body has long numbers.
	only        []byte
	body        []byte
	// lost: the message was damaged. body gives the reason, acceptedAt is an estimate, and the
	// other fields are empty.
	lost bool
}

// codeLost is the type of a record that a repair wrote in the place of a missing message.
const codeLost = 0xff

func appendLost(dst []byte, acceptedAt int64, bytesBefore uint64, why string) []byte {
	dst = binary.BigEndian.AppendUint64(dst, uint64(acceptedAt))
	dst = binary.BigEndian.AppendUint64(dst, bytesBefore)
	return append(append(dst, codeLost), why...)
}

// decodeHead decodes only acceptedAt and bytesBefore.
func (r *record) decodeHead(v []byte) error {
	d := decoder{b: v}
	r.acceptedAt, r.bytesBefore = int64(d.fixed64()), d.fixed64()
	return d.err()
}

func (r *record) decode(v []byte) error {
	d := decoder{b: v}
	r.acceptedAt = int64(d.fixed64())
	r.bytesBefore = d.fixed64()
	r.code, r.trace, r.long = d.byte(), nil, false
	if r.lost = r.code == codeLost; r.lost {
		r.code, r.body = 0, d.b
		return d.err()
	}
	if r.code&traced != 0 {
		r.code &^= traced
		r.trace = d.bytes()
	}
	r.id = d.bytes()
	r.typ = nil
	if r.code == 0 {
		r.typ = d.bytes()
	} else if int(r.code) >= len(types) {
		d.bad = true
	}
	r.event = d.bytes()
	r.skips = d.uvarint()
	r.skip = d.b
	for i := range r.skips {
		name := d.bytes()
		if d.bad {
			break
		}
		r.long = r.long || i == 0 && string(name) == longNumbers
	}
	r.only = d.bytes()
	r.body = d.b
	return d.err()
}

// verdict is what a lane does with a message.
type verdict int

const (
	wanted   verdict = iota
	filtered         // The lane counts the message and does not deliver it.
	passed           // The message is for another destination; the lane does not count it.
	damaged          // The destinations are unknown.
)

func (r *record) verdict(lane queue.LaneID) verdict {
	if r.lost {
		return damaged
	}
	if len(r.only) != 0 && !isFor(r.only, lane) {
		return passed
	}
	d := decoder{b: r.skip}
	for range r.skips {
		if string(d.bytes()) == lane.Destination {
			return filtered
		}
	}
	return wanted
}

// forSibling reports whether a message is only for another endpoint of the lane's destination.
func (r *record) forSibling(lane queue.LaneID) bool {
	endpoint, ok := bytes.CutPrefix(r.only, []byte(lane.Destination+"/"))
	return ok && string(endpoint) != lane.Endpoint
}

// isFor reports whether a lane is of the destination ("namespace/name") or the endpoint
// ("namespace/name/endpoint") that only names.
func isFor(only []byte, lane queue.LaneID) bool {
	endpoint, ok := bytes.CutPrefix(only, []byte(lane.Destination))
	return ok && (len(endpoint) == 0 || string(endpoint) == "/"+lane.Endpoint)
}

// laneState is the durable state of a lane without its retries: one value, so that ledger and
// position agree after a crash.
type laneState struct {
	start     uint64 // The lane has the messages after this one.
	next      uint64 // The first message that was not read.
	delivered uint64
	filtered  uint64
	buried    uint64
	passed    uint64 // Messages for other destinations only.
	retries   uint64 // Number of entries of the retry index.
	end       uint64 // The first message that is not the lane's; 0 for a lane without an end.

	// For lanes in a group. handedOver is the number of messages that ended in this lane
	// without a delivery or a dead letter of this lane, because the group settles them; skipped
	// are those of them without an attempt. endpointRemoved: the endpoint was removed from the
	// destination.
	handedOver      uint64
	skipped         uint64
	endpointRemoved bool
}

// encode appends the state, and the positions before next that are neither settled nor in the
// retry index. It sorts open.
func (s *laneState) encode(dst []byte, open []uint64) []byte {
	for _, n := range [...]uint64{s.start, s.next, s.delivered, s.filtered, s.buried, s.passed, s.retries, uint64(len(open))} {
		dst = binary.AppendUvarint(dst, n)
	}
	slices.Sort(open)
	last := s.start
	for _, seq := range open {
		dst = binary.AppendUvarint(dst, seq-last)
		last = seq
	}
	inGroup := s.handedOver != 0 || s.skipped != 0 || s.endpointRemoved
	if s.end != 0 || inGroup {
		dst = binary.AppendUvarint(dst, s.end)
	}
	if inGroup {
		dst = binary.AppendUvarint(binary.AppendUvarint(dst, s.handedOver), s.skipped)
		removed := byte(0)
		if s.endpointRemoved {
			removed = 1
		}
		dst = append(dst, removed)
	}
	return dst
}

func (s *laneState) decode(v []byte) (open []uint64, err error) {
	d := decoder{b: v}
	for _, n := range [...]*uint64{&s.start, &s.next, &s.delivered, &s.filtered, &s.buried, &s.passed, &s.retries} {
		*n = d.uvarint()
	}
	n := d.uvarint()
	last := s.start
	for i := uint64(0); i < n && !d.bad; i++ {
		last += d.uvarint()
		open = append(open, last)
	}
	if s.end = 0; len(d.b) > 0 {
		s.end = d.uvarint()
	}
	if s.handedOver, s.skipped, s.endpointRemoved = 0, 0, false; len(d.b) > 0 {
		s.handedOver, s.skipped, s.endpointRemoved = d.uvarint(), d.uvarint(), d.byte() != 0
	}
	return open, d.err()
}

// settled is the number of messages that the lane has ended.
func (s *laneState) settled() uint64 { return s.delivered + s.filtered + s.buried + s.handedOver }

// appendDropped encodes the ledger of dropped lanes, in which nothing is pending.
func appendDropped(dst []byte, l queue.Ledger) []byte {
	for _, n := range [...]int64{l.Delivered, l.Filtered, l.DeadLettered, l.Discarded} {
		dst = binary.AppendUvarint(dst, uint64(n))
	}
	return dst
}

func (d *decoder) dropped() (l queue.Ledger) {
	for _, n := range [...]*int64{&l.Delivered, &l.Filtered, &l.DeadLettered, &l.Discarded} {
		*n = int64(d.uvarint())
		l.Accepted += *n
	}
	return l
}

func appendFailure(dst []byte, f *queue.Failure) []byte {
	dst = binary.AppendUvarint(dst, uint64(max(millis(f.Time), 0)))
	dst = appendString(dst, f.Reason)
	dst = binary.AppendUvarint(dst, uint64(max(f.StatusCode, 0)))
	dst = appendString(dst, f.Message)
	return appendString(dst, f.Response[:min(len(f.Response), maxResponse)])
}

func (d *decoder) failure() queue.Failure {
	var f queue.Failure
	if ms := d.uvarint(); ms != 0 {
		f.Time = fromMillis(int64(ms))
	}
	f.Reason = d.string()
	f.StatusCode = int(d.uvarint())
	f.Message = d.string()
	if b := d.bytes(); len(b) > 0 {
		f.Response = append([]byte(nil), b...)
	}
	return f
}

const maxResponse = 1 << 10

func appendRetry(dst []byte, due int64, attempt int, f *queue.Failure) []byte {
	dst = binary.AppendUvarint(dst, uint64(due))
	dst = binary.AppendUvarint(dst, uint64(attempt))
	return appendFailure(dst, f)
}

func (d *decoder) retry() (due int64, attempt int) {
	return int64(d.uvarint()), int(d.uvarint())
}

func appendLaneID(dst []byte, id queue.LaneID) []byte {
	return appendString(appendString(appendString(dst, id.Source), id.Destination), id.Endpoint)
}

// appendLaneName appends a lane's ID with Any.
func appendLaneName(dst []byte, id queue.LaneID) []byte {
	if dst = appendLaneID(dst, id); id.Any {
		dst = append(dst, 1)
	}
	return dst
}

func (d *decoder) laneName() queue.LaneID {
	id := d.laneID()
	id.Any = len(d.b) > 0 && d.byte() != 0
	return id
}

func (d *decoder) laneID() queue.LaneID {
	return queue.LaneID{Source: d.string(), Destination: d.string(), Endpoint: d.string()}
}

func appendDeadLetter(dst []byte, l *queue.DeadLetter) []byte {
	dst = appendLaneID(dst, l.Lane)
	dst = binary.AppendUvarint(dst, l.Seq)
	dst = binary.AppendUvarint(dst, uint64(max(millis(l.AcceptedAt), 0)))
	dst = binary.AppendUvarint(dst, uint64(l.Attempts))
	dst = appendFailure(dst, &l.Failure)
	dst = appendString(dst, l.ID)
	dst = appendString(dst, l.Type)
	dst = appendString(dst, l.Event)
	return append(dst, l.Body...)
}

func decodeDeadLetter(key, v []byte) (queue.DeadLetter, error) {
	d := decoder{b: v}
	l := queue.DeadLetter{Key: deadLetterID(key), Lane: d.laneID(), Seq: d.uvarint(), AcceptedAt: fromMillis(int64(d.uvarint())), Attempts: int(d.uvarint()), Failure: d.failure()}
	l.ID, l.Type, l.Event, l.Body = d.string(), d.string(), d.string(), d.b
	return l, d.err()
}

// millis returns Unix milliseconds, and 0 for the zero time.
func millis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func fromMillis(ms int64) time.Time { return time.UnixMilli(ms).UTC() }
