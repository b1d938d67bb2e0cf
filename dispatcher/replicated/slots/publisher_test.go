package slots

import (
	"errors"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

var (
	own     = pebblestore.Session{1}
	foreign = pebblestore.Session{2}
	start   = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
)

// owner returns the publisher of a session that has claimed with record 10 behind batch 5.
func owner() *publisher {
	return newPublisher(header{kind: kindClaim, session: own, epoch: 2, number: 1, first: 6, last: 5}, 10, start, State{})
}

// wantStep takes the next step and compares its action.
func wantStep(t *testing.T, p *publisher, now time.Time, want action) step {
	t.Helper()
	s := p.next(now)
	if s.action != want {
		t.Fatalf("next step: got action %d, want %d; ended: %v", s.action, want, p.ended)
	}
	return s
}

// foreignEntry returns a record of another session.
func foreignEntry(sequence uint64, k kind) Entry {
	record := make([]byte, headerBytes)
	header{kind: k, session: foreign, epoch: 3, number: 1, first: 6, last: 5}.seal(record)
	return Entry{sequence, record}
}

func wantEnded(t *testing.T, p *publisher) {
	t.Helper()
	wantStep(t, p, start, actEnd)
	if !errors.Is(p.ended, ErrSessionEnded) {
		t.Errorf("end: got error %v, want %v", p.ended, ErrSessionEnded)
	}
}

func TestPublishesWantedBatches(t *testing.T) {
	p := owner()
	p.append(start, []byte("a"))
	if s := wantStep(t, p, start, actWait); s.until != start.Add(heartbeatInterval) {
		t.Errorf("time of the next step: got %v, want %v", s.until, start.Add(heartbeatInterval))
	}
	p.append(start, []byte("b"))
	p.want(7)
	s := wantStep(t, p, start, actPublish)
	h, _, err := decodeRecord(s.data)
	if err != nil {
		t.Fatal(err)
	}
	if want := (header{kindBatches, own, 2, 2, 6, 7, 0}); h != want {
		t.Errorf("header: got %+v, want %+v", h, want)
	}
	if s.expected != 10 {
		t.Errorf("expected sequence: got %d, want 10", s.expected)
	}
	p.answered(11)
	if p.acknowledged != 7 {
		t.Errorf("acknowledged batch: got %d, want 7", p.acknowledged)
	}
	wantStep(t, p, start, actWait)
}

func TestOneRecordInFlight(t *testing.T) {
	p := owner()
	p.append(start, []byte("a"))
	p.want(6)
	first := wantStep(t, p, start, actPublish)
	p.append(start, []byte("b"))
	p.want(7)
	if s := wantStep(t, p, start, actPublish); s.id != first.id {
		t.Errorf("record in flight: got %s, want %s", s.id, first.id)
	}
	p.answered(11)
	if s := wantStep(t, p, start, actPublish); s.id == first.id || s.expected != 11 {
		t.Errorf("second record: got %s with expected sequence %d, want another id and 11", s.id, s.expected)
	}
}

// Only the records of the stream end a session; after every other answer the same record is sent again.
func TestRepeatsUntilAcknowledged(t *testing.T) {
	for _, err := range []error{ErrInProcess, ErrNoSpace, errors.New("timeout"), errors.New("no responders")} {
		t.Run(err.Error(), func(t *testing.T) {
			p := owner()
			p.append(start, []byte("a"))
			p.want(6)
			first := wantStep(t, p, start, actPublish)
			p.refused(start, err)
			wantStep(t, p, start, actWait)
			again := wantStep(t, p, start.Add(repeatAfter), actPublish)
			if again.id != first.id || again.expected != first.expected {
				t.Errorf("repeated record: got %s with expected sequence %d, want %s and %d", again.id, again.expected, first.id, first.expected)
			}
		})
	}
}

func TestWrongSequence(t *testing.T) {
	// inFlight publishes a batch, and has the stream refuse it.
	inFlight := func(t *testing.T) (*publisher, step) {
		p := owner()
		p.append(start, []byte("a"))
		p.want(6)
		s := wantStep(t, p, start, actPublish)
		p.refused(start, ErrWrongSequence)
		if r := wantStep(t, p, start, actRead); r.expected != 10 {
			t.Errorf("read: got the records behind %d, want 10", r.expected)
		}
		return p, s
	}
	t.Run("own record", func(t *testing.T) {
		p, s := inFlight(t)
		p.read(Entry{11, s.data})
		p.readEnd(start, true)
		if p.acknowledged != 6 || p.expected != 11 {
			t.Errorf("got batch %d acknowledged and expected sequence %d, want 6 and 11", p.acknowledged, p.expected)
		}
		wantStep(t, p, start, actWait)
	})
	t.Run("suspect", func(t *testing.T) {
		p, s := inFlight(t)
		p.read(foreignEntry(11, kindSuspect))
		p.readEnd(start, true)
		if again := wantStep(t, p, start, actPublish); again.id != s.id || again.expected != 11 {
			t.Errorf("repeated record: got %s with expected sequence %d, want %s and 11", again.id, again.expected, s.id)
		}
		if p.acknowledged != 5 {
			t.Errorf("acknowledged batch: got %d, want 5", p.acknowledged)
		}
	})
	t.Run("claim", func(t *testing.T) {
		p, _ := inFlight(t)
		p.read(foreignEntry(11, kindClaim))
		wantEnded(t, p)
		if p.acknowledged != 5 {
			t.Errorf("acknowledged batch: got %d, want 5", p.acknowledged)
		}
	})
	t.Run("own record and a claim behind it", func(t *testing.T) {
		p, s := inFlight(t)
		p.read(Entry{11, s.data})
		p.read(foreignEntry(12, kindClaim))
		wantEnded(t, p)
		if p.acknowledged != 6 {
			t.Errorf("acknowledged batch: got %d, want 6", p.acknowledged)
		}
	})
	t.Run("stale read", func(t *testing.T) {
		p, s := inFlight(t)
		p.readEnd(start, false)
		wantStep(t, p, start, actWait)
		wantStep(t, p, start.Add(repeatAfter), actReadState) // It may be another stream.
		p.stateRead(start, State{Last: 10})
		if again := wantStep(t, p, start.Add(repeatAfter), actPublish); again.id != s.id || again.expected != 10 {
			t.Errorf("repeated record: got %s with expected sequence %d, want %s and 10", again.id, again.expected, s.id)
		}
	})
	t.Run("trimmed by another session", func(t *testing.T) {
		p, _ := inFlight(t)
		p.read(foreignEntry(15, kindBatches))
		wantEnded(t, p)
	})
	t.Run("damaged record", func(t *testing.T) {
		p, s := inFlight(t)
		s.data[headerBytes] ^= 1
		p.read(Entry{11, s.data})
		wantEnded(t, p)
	})
}

// A stream that is another one, or lacks records that it had, ends the session; one that is only not
// seen does not.
func TestStreamIsReplaced(t *testing.T) {
	newOwner := func() *publisher {
		p := newPublisher(header{kind: kindClaim, session: own, epoch: 2, number: 1, first: 6, last: 5}, 10, start, State{ID: "a"})
		p.append(start, []byte("a"))
		p.want(6)
		wantStep(t, p, start, actPublish)
		return p
	}
	silent := start.Add(leaseTime)
	for _, test := range []struct {
		name string
		// read takes the answers of the servers.
		read func(p *publisher)
		want error // nil if the session continues.
	}{
		{"the same", func(p *publisher) { p.stateRead(silent, State{ID: "a", Last: 10}) }, nil},
		{"created again", func(p *publisher) { p.stateRead(start, State{ID: "b"}) }, ErrOtherStream},
		{"one read without the last record", func(p *publisher) { p.stateRead(silent, State{ID: "a", Last: 9}) }, nil},
		{"the last record is seen again", func(p *publisher) {
			p.stateRead(start, State{ID: "a", Last: 9})
			p.stateRead(start, State{ID: "a", Last: 10})
			p.stateRead(silent, State{ID: "a", Last: 9})
		}, nil},
		{"restored", func(p *publisher) {
			p.stateRead(start, State{ID: "a", Last: 9})
			p.stateRead(silent, State{ID: "a", Last: 9})
		}, ErrRecordsLost},
		{"missing for a moment", func(p *publisher) { p.stateFailed(start, ErrNoStream) }, nil},
		{"deleted", func(p *publisher) { p.stateFailed(silent, ErrNoStream) }, ErrNoStream},
		{"no answer", func(p *publisher) { p.stateFailed(silent, errors.New("timeout")) }, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newOwner()
			p.refused(start, errors.New("no responders"))
			wantStep(t, p, silent, actReadState) // The lease has ended.
			test.read(p)
			if !errors.Is(p.ended, test.want) {
				t.Errorf("end of the session: got %v, want %v", p.ended, test.want)
			}
		})
	}
}

// Calls are refused with the answer of the log.
func TestRefusalHasTheAnswerOfTheLog(t *testing.T) {
	for _, test := range []struct {
		answer, want error
	}{
		{ErrNoSpace, queue.ErrFull},
		{ErrNoStream, ErrNoStream},
		{errors.New("timeout"), queue.ErrUnavailable},
	} {
		p := owner()
		p.append(start, []byte("a"))
		p.want(6)
		wantStep(t, p, start, actPublish)
		p.refused(start, test.answer)
		if err := p.ready(start.Add(refuseAfter)); !errors.Is(err, test.want) || !errors.Is(err, test.answer) {
			t.Errorf("after the answer %q: got error %v, want %v", test.answer, err, test.want)
		}
		p.answered(11)
		if err := p.ready(start.Add(refuseAfter)); err != nil {
			t.Errorf("after an acknowledgement: got error %v, want none", err)
		}
	}
}

// A duplicate is durable; the next record shows whether the session still has the slot.
func TestDuplicateWithForeignClaimBehind(t *testing.T) {
	p := owner()
	p.append(start, []byte("a"))
	p.want(6)
	wantStep(t, p, start, actPublish)
	p.refused(start, errors.New("timeout"))
	wantStep(t, p, start.Add(repeatAfter), actPublish)
	p.answered(11)
	if p.acknowledged != 6 {
		t.Errorf("acknowledged batch: got %d, want 6", p.acknowledged)
	}
	p.append(start, []byte("b"))
	p.want(7)
	wantStep(t, p, start.Add(repeatAfter), actPublish)
	p.refused(start, ErrWrongSequence)
	p.read(foreignEntry(12, kindClaim))
	wantEnded(t, p)
}

func TestLeaseStartsAtTheFirstSending(t *testing.T) {
	p := owner()
	p.append(start, []byte("a"))
	p.want(6)
	wantStep(t, p, start, actPublish)
	p.refused(start, errors.New("timeout"))
	wantStep(t, p, start.Add(time.Second), actPublish)
	p.answered(11)
	if p.leaseStart != start {
		t.Errorf("start of the lease: got %v, want %v", p.leaseStart, start)
	}
}

func TestIdleOwnerWritesHeartbeats(t *testing.T) {
	p := owner()
	s := wantStep(t, p, start.Add(heartbeatInterval), actPublish)
	h, _, err := decodeRecord(s.data)
	if err != nil {
		t.Fatal(err)
	}
	if want := (header{kindHeartbeat, own, 2, 2, 6, 5, 0}); h != want {
		t.Errorf("header: got %+v, want %+v", h, want)
	}
	// Batches without a waiting caller leave in place of the next heartbeat.
	p.answered(11)
	p.append(start, []byte("a"))
	s = wantStep(t, p, start.Add(2*heartbeatInterval), actPublish)
	if h, _, _ := decodeRecord(s.data); h.kind != kindBatches {
		t.Errorf("record: got %v, want %v", h.kind, kindBatches)
	}
}

func TestRefusesCalls(t *testing.T) {
	p := owner()
	if err := p.ready(start); err != nil {
		t.Errorf("ready at the start: got error %v, want none", err)
	}
	p.append(start, []byte("a"))
	p.want(6)
	wantStep(t, p, start, actPublish)
	if err := p.ready(start.Add(refuseAfter - 1)); err != nil {
		t.Errorf("ready before %v: got error %v, want none", refuseAfter, err)
	}
	if err := p.ready(start.Add(refuseAfter)); !errors.Is(err, queue.ErrUnavailable) {
		t.Errorf("ready after %v: got error %v, want %v", refuseAfter, err, queue.ErrUnavailable)
	}
	p.answered(11)
	if err := p.ready(start.Add(refuseAfter)); err != nil {
		t.Errorf("ready after the acknowledgement: got error %v, want none", err)
	}
}

// A nearly full stream refuses calls first, then batches, and never heartbeats.
func TestReserve(t *testing.T) {
	for _, test := range []struct {
		bytes   int64
		refuses bool
		kind    kind
	}{{69, false, kindBatches}, {70, true, kindBatches}, {89, true, kindBatches}, {90, true, kindHeartbeat}} {
		p := owner()
		p.usage.set(State{Bytes: test.bytes << 20, MaxBytes: 100 << 20}, start.Add(heartbeatInterval))
		p.append(start, []byte("a"))
		p.want(6)
		if got := errors.Is(p.ready(start), queue.ErrFull); got != test.refuses {
			t.Errorf("refusal at %d %%: got %t, want %t", test.bytes, got, test.refuses)
		}
		s := wantStep(t, p, start.Add(heartbeatInterval), actPublish)
		if h, _, _ := decodeRecord(s.data); h.kind != test.kind {
			t.Errorf("record at %d %%: got %v, want %v", test.bytes, h.kind, test.kind)
		}
	}
}

// In a full stream, the batches of a stored snapshot are published before its record, and later ones wait.
func TestBatchesOfASnapshotUseTheReserve(t *testing.T) {
	p := owner()
	p.usage.set(State{Bytes: 95 << 20, MaxBytes: 100 << 20}, start.Add(heartbeatInterval))
	p.append(start, make([]byte, maxRecord/2))
	p.snapshotEnd = p.appended
	p.append(start, make([]byte, maxRecord))
	p.want(7)
	for i, want := range []kind{kindBatches, kindHeartbeat} {
		s := wantStep(t, p, start.Add(time.Duration(i+1)*heartbeatInterval), actPublish)
		h, _, _ := decodeRecord(s.data)
		if h.kind != want {
			t.Errorf("record %d: got %v, want %v", i+1, h.kind, want)
		}
		p.answered(uint64(11 + i))
		p.usage.readAt = start.Add(time.Duration(i+2) * heartbeatInterval)
	}
}

func TestLargeBatchGoesInParts(t *testing.T) {
	p := owner()
	p.append(start, []byte("a"))
	p.append(start, make([]byte, 2*maxRecord))
	p.append(start, []byte("c"))
	p.want(8)
	var kinds []kind
	var last []uint64
	for sequence := uint64(11); p.acknowledged < 8; sequence++ {
		s := wantStep(t, p, start, actPublish)
		if len(s.data) > maxRecord {
			t.Errorf("size of record %d: got %d, want at most %d", sequence, len(s.data), maxRecord)
		}
		p.answered(sequence)
		h, _, _ := decodeRecord(s.data)
		kinds, last = append(kinds, h.kind), append(last, h.last)
	}
	wantEqual(t, "kinds", kinds, []kind{kindBatches, kindPart, kindPart, kindLastPart, kindBatches})
	wantEqual(t, "last batches", last, []uint64{6, 6, 6, 7, 8})
	if p.waitingBytes != 0 {
		t.Errorf("unpublished bytes: got %d, want 0", p.waitingBytes)
	}
}

func TestUnpublishedBatchesAreBounded(t *testing.T) {
	p := owner()
	n := 0
	for ; p.hasRoom(); n++ {
		p.append(start, make([]byte, 100<<10))
	}
	if size := n * 100 << 10; size < maxUnpublished-maxRecord || size > maxUnpublished+maxRecord {
		t.Errorf("unpublished bytes: got %d, want about %d", size, maxUnpublished)
	}
}

// A session may send for leaseTime after the first sending of its last acknowledged record.
func TestLease(t *testing.T) {
	p := owner()
	if !p.maySend(start.Add(leaseTime - 1)) {
		t.Error("before the end of the lease: may not send, want that it may")
	}
	if p.maySend(start.Add(leaseTime)) {
		t.Error("at the end of the lease: may send, want that it may not")
	}
	// A record extends the lease, and an older claim does not.
	wantStep(t, p, start.Add(time.Second), actPublish)
	p.answered(11)
	if !p.maySend(start.Add(leaseTime)) {
		t.Error("after a heartbeat: may not send, want that it may")
	}
	p.end(errors.New("claimed"))
	if p.maySend(start.Add(time.Second)) {
		t.Error("after the session: may send, want that it may not")
	}
}

// Requests wait while the outcomes of earlier ones are not durable.
func TestSendingWaitsForTheLog(t *testing.T) {
	p := owner()
	p.append(start, []byte("a"))
	p.append(start.Add(time.Second), []byte("b"))
	if !p.maySend(start.Add(refuseAfter - 1)) {
		t.Errorf("before %v: may not send, want that it may", refuseAfter)
	}
	if p.maySend(start.Add(refuseAfter)) {
		t.Errorf("after %v without an acknowledgement: may send, want that it may not", refuseAfter)
	}
	wantStep(t, p, start.Add(refuseAfter), actPublish)
	if p.maySend(start.Add(refuseAfter)) {
		t.Error("while the batch is in flight: may send, want that it may not")
	}
	p.answered(11)
	if !p.maySend(start.Add(refuseAfter)) {
		t.Error("after the acknowledgement: may not send, want that it may")
	}
}

// release publishes all batches and a last record. It ends sending at once.
func TestRelease(t *testing.T) {
	p := owner()
	p.append(start, []byte("a"))
	p.release()
	if p.maySend(start) {
		t.Error("after release: may send, want that it may not")
	}
	if err := p.ready(start); !errors.Is(err, queue.ErrUnavailable) {
		t.Errorf("ready after release: got error %v, want %v", err, queue.ErrUnavailable)
	}
	for i, want := range []kind{kindBatches, kindReleased} {
		s := wantStep(t, p, start, actPublish)
		if h, _, _ := decodeRecord(s.data); h.kind != want || h.last != 6 {
			t.Errorf("record %d: got %v up to batch %d, want %v up to batch 6", i, h.kind, h.last, want)
		}
		p.answered(uint64(11 + i))
	}
	wantEnded(t, p)
	if !errors.Is(p.ended, errReleased) {
		t.Errorf("end: got error %v, want %v", p.ended, errReleased)
	}
}
