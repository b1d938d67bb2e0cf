package slots

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// publisher is the state machine that appends the batches of a session to a stream. It does no I/O:
// next returns what to do, and answered, refused, lost and read take the result.
//
// Invariants:
//
//   - One record is in flight. It is published until it is known to be in the stream, always with
//     the same id.
//   - Every record expects the sequence of the last record that the session has read or written.
//     All of those are records of this session, or suspects. So a record can only land while no
//     other session has claimed the slot.
//   - A batch counts as durable when its record is known to be at its place in the stream. Whether
//     the session still has the slot is another question, which only the next record answers.
type publisher struct {
	session pebblestore.Session
	epoch   uint64
	// number counts the records, the claim included.
	number uint64
	// expected is the sequence of the last known record.
	expected uint64
	// appended is the last batch; acknowledged the last durable one; wanted the last one that a
	// caller waits for.
	appended, acknowledged, wanted uint64
	// snapshotEnd is the last batch of a stored snapshot. Batches up to it are published also while the others
	// wait for space: the record of the snapshot follows them, and frees space.
	snapshotEnd uint64
	// claimed is the last batch before the session.
	claimed uint64

	// waiting are the records that were never published; batches are added to the last one.
	waiting      []*outgoing
	waitingBytes int
	inFlight     *outgoing
	// reference is the payload of the snapshot record that is due, or nil. snapshot is the sequence
	// of the last snapshot record; 0 for none.
	reference []byte
	snapshot  uint64

	// pauseUntil is the earliest time of the next request.
	pauseUntil time.Time
	// mustRead: the records behind expected must be read before the next request.
	mustRead bool
	// stream is the ID of the stream; empty if it has none. mustCheck: the state of the stream must be
	// read before the next request, because the stream may be another one. lacksSince is the time from
	// which on the stream lacks known records; zero while it has them.
	stream     string
	mustCheck  bool
	lacksSince time.Time
	// refusal is the last answer that was no acknowledgement; nil after one.
	refusal error
	// lastSent is the time of the last record that was sent first; leaseStart the time of the first
	// sending of the last acknowledged record.
	lastSent, leaseStart time.Time
	// releasing: no batch follows, and a released record ends the session.
	releasing bool

	usage usage
	// ended is set when the session must not publish any more.
	ended error
}

// outgoing is a record that is not known to be in the stream.
type outgoing struct {
	header
	data      []byte
	firstSent time.Time
	// since is the time of its first batch; for records without one, of the first sending.
	since time.Time
}

// newPublisher returns the publisher of a session whose claim is the last record of the stream, at
// a sequence, and was sent at a time.
func newPublisher(claim header, sequence uint64, sent time.Time, s State) *publisher {
	p := &publisher{session: claim.session, epoch: claim.epoch, number: claim.number, expected: sequence,
		appended: claim.last, acknowledged: claim.last, claimed: claim.last, snapshot: claim.snapshot, lastSent: sent, leaseStart: sent,
		stream: s.ID}
	p.usage.bytes, p.usage.max = s.Bytes, s.MaxBytes // It may be hours old; next reads it again.
	return p
}

// hasRoom reports whether a batch may be appended. The batches of two snapshots fit into the reserve of the
// stream: the first one may free no space, and the second one does.
func (p *publisher) hasRoom() bool {
	bound := int64(maxUnpublished)
	if p.usage.max > 0 {
		bound = min(bound, max(minUnpublished, p.usage.max/maxUnpublishedPart))
	}
	return int64(p.waitingBytes) < bound
}

// append adds the next batch. It copies the batch.
func (p *publisher) append(now time.Time, batch []byte) {
	p.appended++
	if headerBytes+binary.MaxVarintLen32+len(batch) > maxRecord {
		p.appendParts(now, batch)
		return
	}
	r := p.open()
	if r == nil || len(r.data)+binary.MaxVarintLen32+len(batch) > maxRecord {
		r = p.add(now, kindBatches)
	}
	r.last = p.appended
	p.waitingBytes -= len(r.data)
	r.data = appendBatch(r.data, batch)
	p.waitingBytes += len(r.data)
}

// appendParts adds a batch that is larger than a record.
func (p *publisher) appendParts(now time.Time, batch []byte) {
	for len(batch) > 0 {
		n := min(len(batch), maxRecord-headerBytes)
		r := p.add(now, kindPart)
		r.last = p.appended - 1
		r.data = append(r.data, batch[:n]...)
		p.waitingBytes += n
		if batch = batch[n:]; len(batch) == 0 {
			r.kind, r.last = kindLastPart, p.appended
		}
	}
}

// open returns the record to which batches can be added, or nil.
func (p *publisher) open() *outgoing {
	if n := len(p.waiting); n > 0 && p.waiting[n-1].kind == kindBatches {
		return p.waiting[n-1]
	}
	return nil
}

// add adds a record, whose first batch is the last appended one, to the waiting ones.
func (p *publisher) add(now time.Time, k kind) *outgoing {
	r := &outgoing{header: header{kind: k, first: p.appended}, since: now, data: make([]byte, headerBytes)}
	p.waiting = append(p.waiting, r)
	p.waitingBytes += headerBytes
	return r
}

// want makes the batches up to a number leave with the next records. The others wait for
// heartbeatInterval, or until their record is full.
func (p *publisher) want(number uint64) { p.wanted = max(p.wanted, min(number, p.appended)) }

// step is what the publisher's caller must do next.
type step struct {
	action action
	// id, expected and data are the record to publish. Behind expected are the records to read.
	id       string
	expected uint64
	data     []byte
	// until is the time of the next step, unless something happens before; zero for none.
	until time.Time
}

type action int

const (
	actWait action = iota
	actPublish
	actRead
	actReadState
	actOwn
	actEnd
)

// next returns the next step. A step to publish starts a record, or repeats it.
func (p *publisher) next(now time.Time) step {
	switch {
	case p.ended != nil:
		return step{action: actEnd}
	case now.Before(p.pauseUntil):
		return step{until: p.pauseUntil}
	case p.mustRead:
		return step{action: actRead, expected: p.expected}
	case p.usage.due(now) || p.mustCheck || p.isSilent(now) && now.Sub(p.usage.readAt) >= usageInterval:
		return step{action: actReadState}
	case p.inFlight == nil && !p.start(now):
		return step{until: p.lastSent.Add(heartbeatInterval)}
	}
	r := p.inFlight
	return step{action: actPublish, id: r.id(), expected: p.expected, data: r.data}
}

// start puts the next record in flight, if one is due.
func (p *publisher) start(now time.Time) bool {
	idle := now.Sub(p.lastSent) >= heartbeatInterval
	switch {
	case p.reference != nil:
		p.inFlight = p.withoutBatches(kindSnapshot, now)
		p.inFlight.data = append(p.inFlight.data, p.reference...)
		p.reference = nil
	case len(p.waiting) > 0 && (!p.usage.batchesWait() || p.waiting[0].first <= p.snapshotEnd) &&
		(idle || p.releasing || p.wanted > p.acknowledged || len(p.waiting) > 1):
		p.inFlight = p.waiting[0]
		p.waiting[0] = nil
		p.waiting = p.waiting[1:]
		p.waitingBytes -= len(p.inFlight.data)
	case p.releasing && len(p.waiting) == 0:
		p.inFlight = p.withoutBatches(kindReleased, now)
	case idle:
		p.inFlight = p.withoutBatches(kindHeartbeat, now)
	default:
		return false
	}
	r := p.inFlight
	p.number++
	r.session, r.epoch, r.number, r.snapshot, r.firstSent = p.session, p.epoch, p.number, p.snapshot, now
	r.seal(r.data)
	p.lastSent = now
	return true
}

// withoutBatches returns a record without batches. Records may wait behind it, so its last batch is
// the last published one.
func (p *publisher) withoutBatches(k kind, now time.Time) *outgoing {
	return &outgoing{header: header{kind: k, first: p.acknowledged + 1, last: p.acknowledged}, data: make([]byte, headerBytes), since: now}
}

// release makes the publisher end the session with a released record, behind all waiting ones. No
// batch may be appended any more.
func (p *publisher) release() { p.releasing = true }

// answered takes the sequence of the published record, also of a duplicate. A duplicate is in
// the stream, but says nothing about the records behind it.
func (p *publisher) answered(sequence uint64) {
	if sequence != p.expected+1 {
		p.mustRead = true // The answer belongs to another stream or record.
		return
	}
	p.landed(sequence)
}

// landed takes note that the record in flight is in the stream.
func (p *publisher) landed(sequence uint64) {
	r := p.inFlight
	p.inFlight = nil
	p.expected, p.acknowledged, p.leaseStart = sequence, r.last, r.firstSent
	p.refusal, p.lacksSince = nil, time.Time{}
	p.snapshot = r.snapshotAt(sequence)
	p.usage.add(len(r.data))
	if r.kind == kindReleased {
		p.end(errReleased)
	}
}

// maySend reports whether the session may send requests of the slot: no other session can have
// claimed the slot, and the outcomes of recent requests are durable. It is false from the call of
// release on, whatever the answer to the released record is.
func (p *publisher) maySend(now time.Time) bool {
	return p.hasLease(now) && now.Sub(p.oldest(now)) < refuseAfter
}

// hasLease reports whether the lease of the session has not ended. A process that is stopped
// with all records acknowledged has only this bound when it continues.
func (p *publisher) hasLease(now time.Time) bool {
	return p.ended == nil && !p.releasing && now.Sub(p.leaseStart) < leaseTime
}

// isSilent reports whether the stream has acknowledged nothing for so long that it may be another one.
func (p *publisher) isSilent(now time.Time) bool { return now.Sub(p.leaseStart) >= leaseTime }

// oldest returns the time of the oldest batch or record that is not acknowledged; now for none.
func (p *publisher) oldest(now time.Time) time.Time {
	oldest := now
	if p.inFlight != nil {
		oldest = p.inFlight.since
	}
	// A heartbeat can be in flight while older batches wait for space.
	if len(p.waiting) > 0 && p.waiting[0].since.Before(oldest) {
		oldest = p.waiting[0].since
	}
	return oldest
}

// refused takes an answer other than an acknowledgement, or the loss of the answer. Only
// ErrWrongSequence can mean that the session has ended, and only the records prove it.
func (p *publisher) refused(now time.Time, err error) {
	p.refusal = err
	if errors.Is(err, ErrWrongSequence) {
		p.mustRead = true
		return
	}
	p.pauseUntil = now.Add(repeatAfter)
}

// read takes a record behind expected.
func (p *publisher) read(e Entry) {
	h, _, err := decodeRecord(e.Record)
	switch {
	case p.ended != nil || e.Sequence <= p.expected:
	case err != nil:
		p.end(fmt.Errorf("record %d: %w", e.Sequence, err))
	case e.Sequence != p.expected+1:
		p.end(fmt.Errorf("another session has trimmed the stream up to record %d", e.Sequence))
	case h.kind == kindSuspect:
		p.expected = e.Sequence
	case h.session == p.session && p.inFlight != nil && h.number == p.inFlight.number:
		p.landed(e.Sequence)
	default:
		p.end(fmt.Errorf("record %d is a %v of session %x, epoch %d", e.Sequence, h.kind, h.session, h.epoch))
	}
}

// readEnd takes note that there are no more records behind expected. When the read saw nothing
// new, it was stale, the record in flight has landed meanwhile, or the stream is another one; the next
// request waits.
func (p *publisher) readEnd(now time.Time, sawRecords bool) {
	p.mustRead = false
	if !sawRecords {
		p.mustCheck = true
		p.pauseUntil = now.Add(repeatAfter)
	}
}

// stateRead takes the state of the stream. A stream with another ID, or without records that this
// session knows, ends the session: no record of it can land any more.
func (p *publisher) stateRead(now time.Time, s State) {
	p.mustCheck = false
	p.usage.set(s, now)
	switch {
	case isOther(s.ID, p.stream):
		p.end(fmt.Errorf("%w: its id was %s, and is %s", ErrOtherStream, p.stream, s.ID))
	case s.Last >= p.expected:
		p.lacksSince = time.Time{}
	case p.lacksSince.IsZero():
		p.lacksSince = now
	case p.isSilent(now) && now.Sub(p.lacksSince) >= suspectAfter: // Not a stale read.
		p.end(fmt.Errorf("%w: it had record %d, and ends with record %d", ErrRecordsLost, p.expected, s.Last))
	}
}

// stateFailed takes an error of a read of the stream's state. The estimate of its size is unchanged.
func (p *publisher) stateFailed(now time.Time, err error) {
	p.mustCheck = false
	p.usage.readAt = now
	if errors.Is(err, ErrNoStream) {
		p.refusal = err
		if p.isSilent(now) {
			p.end(err)
		}
	}
}

// end ends the session.
func (p *publisher) end(cause error) {
	if p.ended == nil {
		p.ended = fmt.Errorf("%w: %w", ErrSessionEnded, cause)
		p.waiting, p.waitingBytes, p.inFlight = nil, 0, nil
	}
}

// ready returns why a new call would not become durable soon; nil if it would.
func (p *publisher) ready(now time.Time) error {
	switch {
	case p.ended != nil:
		return fmt.Errorf("%w: %w", queue.ErrUnavailable, p.ended)
	case p.releasing:
		return fmt.Errorf("%w: %w", queue.ErrUnavailable, errReleased)
	case p.inFlight != nil && now.Sub(p.inFlight.firstSent) >= refuseAfter:
		return p.unacknowledged()
	case p.usage.refuses():
		return fmt.Errorf("%w: %w", queue.ErrFull, ErrNoSpace)
	}
	return nil
}

// unacknowledged is the error of a log that does not answer, with its last answer.
func (p *publisher) unacknowledged() error {
	if errors.Is(p.refusal, ErrNoSpace) {
		return fmt.Errorf("%w: %w", queue.ErrFull, errNoReserve)
	}
	err := fmt.Errorf("%w: no acknowledgement for %v", queue.ErrUnavailable, refuseAfter)
	if p.refusal != nil {
		err = fmt.Errorf("%w: %w", err, p.refusal)
	}
	return err
}

// errNoReserve is the problem of a stream that refuses all records.
var errNoReserve = fmt.Errorf("%w, also for the records that free space; raise its max_bytes", ErrNoSpace)

// usage estimates how full the stream is: its size at the last read, and what was published since.
type usage struct {
	bytes, since, max int64
	// published counts the bytes of all records of the session.
	published int64
	readAt    time.Time
}

func (u *usage) set(s State, now time.Time) {
	*u = usage{bytes: s.Bytes, max: s.MaxBytes, readAt: now, published: u.published}
}

func (u *usage) add(bytes int) {
	u.since += int64(bytes)
	u.published += int64(bytes)
}

// due reports whether the size should be read again: at most every usageInterval, at the start,
// after 1 % of the stream or while calls are refused.
func (u *usage) due(now time.Time) bool {
	return u.max > 0 && now.Sub(u.readAt) >= usageInterval && (u.readAt.IsZero() || u.since > u.max/100 || u.refuses())
}

func (u *usage) above(share float64) bool {
	return u.max > 0 && float64(u.bytes+u.since) >= share*float64(u.max)
}

// space returns the bytes for calls, and how many of them are free.
func (u *usage) space() (total, free int64) {
	total = int64(refuseShare * float64(u.max))
	return total, total - u.bytes - u.since
}

func (u *usage) refuses() bool     { return u.above(refuseShare) }
func (u *usage) batchesWait() bool { return u.above(waitShare) }
