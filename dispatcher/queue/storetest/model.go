package storetest

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Crasher is an Engine's file system that can simulate a power loss.
type Crasher interface {
	// Arm schedules a power loss before one of the next n operations of the file system, chosen
	// at random. A random part of the unsynced changes survives.
	Arm(rng *rand.Rand, n int)
	// Crashed reports whether the power loss happened. The store continues to run, but its file
	// system keeps no further changes.
	Crashed() bool
	// Recover closes the store; the next Open uses the surviving files.
	Recover(t testing.TB, s queue.Store)
}

// Model runs random operations against a store and against a simple model in memory. If the
// engine has a Crasher, the power fails repeatedly. After each power loss
//
//   - no message that Append acknowledged may be missing,
//   - each lane must be in one of its earlier states: with its first n events, without gaps,
//     and with a ledger that agrees with that state exactly,
//   - a dead letter must exist if and only if the lane counts it.
func Model(t *testing.T, seed uint64, operations int, start func(t *testing.T) Engine) {
	m := &model{T: t, Engine: start(t), rng: rand.New(rand.NewPCG(seed, 0)), logs: map[string][]message{},
		lanes: map[queue.LaneID]*modelLane{}, letters: map[letterID]int64{}, dropped: map[string]queue.Ledger{}, meta: map[string]string{}}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d, after operation %d; the last ones:\n%s", seed, m.operation, m.tail())
		}
	})
	m.store = m.Open(t)
	defer func() { _ = m.store.Close() }()
	m.arm()
	for m.operation = range operations {
		m.step()
		if m.Crash != nil && m.Crash.Crashed() {
			m.recoverCrash()
		}
		m.interrupted = interrupted{}
	}
	if m.reopenCleanly(); m.Crash != nil && m.Crash.Crashed() {
		m.recoverCrash()
	}
	m.drainAll()
}

type model struct {
	*testing.T
	Engine
	rng       *rand.Rand
	store     queue.Store
	operation int
	history   []string

	logs    map[string][]message
	lanes   map[queue.LaneID]*modelLane
	letters map[letterID]int64 // The time of the burial in milliseconds.
	// dropped are the ledgers of dropped lanes, by Source and by destination.
	dropped map[string]queue.Ledger
	// meta holds the current values of PutMeta; older are the states that a power loss may
	// restore.
	meta        map[string]string
	older       []map[string]string
	ids         int
	interrupted interrupted
}

// message is an accepted message; the one at index i of its log has position i+1.
type message struct {
	queue.Message
	millis int64
}

type letterID struct {
	lane queue.LaneID
	seq  uint64
}

// interrupted are the effects of the operation during which the power failed: each of them may
// be durable or not.
type interrupted struct {
	appended  []queue.Message
	opened    *queue.LaneID
	dropped   *modelLane
	ledger    queue.Ledger // Of the dropped lane.
	ended     *modelLane
	end       uint64   // The end of the lane before.
	skipped   []uint64 // Messages that the lane does not get because it continues after them.
	forgotten map[string]queue.Ledger
	deleted   map[letterID]int64
	// meta are the earlier states that a successful durable write excludes.
	meta []map[string]string
}

type status int

const (
	unread status = iota
	released
	leasedNow
	retrying
	delivered
	omitted
	buried
	filtered
	passed
)

type fate struct {
	status  status
	attempt int
	due     int64 // The due time of a retry, also while it is leased.
}

// modelLane is a lane. A position without an entry in fates is unread.
type modelLane struct {
	id    queue.LaneID
	start uint64
	end   uint64 // The last position, 0 for none; a lane that ended with an empty log has none.
	fates map[uint64]fate
	// skipped are the messages between the lane's end and its continuation.
	skipped map[uint64]bool
	// base are the fates when the store was opened, events the changes since then.
	base   map[uint64]fate
	events []event
}

type event struct {
	seq  uint64
	fate fate
	// joined: the event is part of the write of the one before.
	joined bool
}

func (m *model) note(format string, args ...any) {
	m.history = append(m.history, fmt.Sprintf("%d: ", m.operation)+fmt.Sprintf(format, args...))
}

func (m *model) tail() string {
	var s string
	for _, line := range m.history[max(0, len(m.history)-60):] {
		s += line + "\n"
	}
	return s
}

func (m *model) check(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
}

func (m *model) arm() {
	if m.Crash != nil {
		m.Crash.Arm(m.rng, 200)
	}
}

func (m *model) oneOf(n int) bool { return m.rng.IntN(n) == 0 }

func (m *model) step() {
	switch n := m.rng.IntN(100); {
	case n < 20:
		m.append()
	case n < 45:
		m.lease()
	case n < 75:
		m.settle()
	case n < 78:
		m.leaseOldest()
	case n < 80:
		m.leaseDue()
	case n < 83:
		m.buryExpired()
	case n < 88:
		m.advance()
	case n < 90:
		m.openOrDrop()
	case n < 91:
		m.endOrContinue()
	case n < 92:
		m.putMeta()
	case n < 94:
		m.deleteLetters()
	case n < 95:
		if m.Trim != nil {
			m.note("trim")
			m.Trim(m.store)
		}
	case n < 99:
		m.compare()
	default:
		m.reopenCleanly()
	}
}

func (m *model) someSource() string { return []string{"shop/web", "shop/ios"}[m.rng.IntN(2)] }

func (m *model) someLane() *modelLane {
	ids := m.sortedLanes()
	if len(ids) == 0 {
		return nil
	}
	return m.lanes[ids[m.rng.IntN(len(ids))]]
}

func (m *model) sortedLanes() []queue.LaneID {
	return slices.SortedFunc(maps.Keys(m.lanes), func(a, b queue.LaneID) int {
		return slices.Compare([]string{a.Source, a.Destination, a.Endpoint}, []string{b.Source, b.Destination, b.Endpoint})
	})
}

func (m *model) append() {
	var msgs []queue.Message
	want := []bool{}
	for range 1 + m.rng.IntN(6) {
		m.ids++
		msg := queue.Message{Source: m.someSource(), ID: fmt.Sprint("m", m.ids), Type: "track", Event: "e", AcceptedAt: m.Clock.Now(),
			Body: fmt.Appendf(nil, "{%d:%0*d}", m.ids, m.rng.IntN(200), 7)}
		switch m.rng.IntN(6) {
		case 0:
			msg.Skip = []string{crm}
		case 1:
			msg.Only = []string{mail, crm, crm + "/a"}[m.rng.IntN(3)]
		}
		dup := false
		if msg.Only == "" && m.oneOf(8) {
			// The ID of the last message of the log or of this request.
			if log := m.logs[msg.Source]; len(log) > 0 {
				old := log[len(log)-1]
				if old.Only == "" && time.Since(m.ahead(old)) < m.DuplicateWindow/2 {
					msg.ID, dup = old.ID, true
				}
			}
		}
		msgs, want = append(msgs, msg), append(want, dup)
	}
	m.note("append %d", len(msgs))
	dups, err := m.store.Append(context.Background(), msgs)
	m.check(err)
	for i, msg := range msgs {
		if got := dups != nil && dups[i]; got != want[i] {
			m.Fatalf("message %s of %s: duplicate is %t, want %t", msg.ID, msg.Source, got, want[i])
		}
		if !want[i] {
			m.accept(msg)
			m.interrupted.appended = append(m.interrupted.appended, msg)
		}
	}
}

// ahead converts a message's time to the clock of now.
func (m *model) ahead(msg message) time.Time {
	return msg.AcceptedAt.Add(-time.Duration(m.Clock.ahead.Load()))
}

func (m *model) accept(msg queue.Message) {
	m.logs[msg.Source] = append(m.logs[msg.Source], message{msg, msg.AcceptedAt.UnixMilli()})
}

// verdict is passed or filtered for a message that is not for the lane, otherwise unread.
func (l *modelLane) verdict(msg message) status {
	if msg.Only != "" && msg.Only != l.id.Destination && msg.Only != l.id.Destination+"/"+l.id.Endpoint {
		return passed
	}
	if slices.Contains(msg.Skip, l.id.Destination) {
		return filtered
	}
	return unread
}

// fate returns the state of a position.
func (m *model) fate(l *modelLane, seq uint64) fate {
	if f, ok := l.fates[seq]; ok {
		return f
	}
	return m.fresh(l, seq)
}

// fresh returns the state of an unread position.
func (m *model) fresh(l *modelLane, seq uint64) fate {
	if l.skipped[seq] {
		return fate{status: passed}
	}
	return fate{status: l.verdict(m.logs[l.id.Source][seq-1])}
}

// each calls fn for all positions of the lane, ascending.
func (m *model) each(l *modelLane, fn func(seq uint64, f fate)) {
	for seq := l.start + 1; seq <= m.limit(l); seq++ {
		fn(seq, m.fate(l, seq))
	}
}

// limit is the last position of the lane.
func (m *model) limit(l *modelLane) uint64 {
	limit := uint64(len(m.logs[l.id.Source]))
	if l.end != 0 {
		limit = min(limit, l.end)
	}
	return limit
}

func (l *modelLane) become(seq uint64, f fate) {
	l.fates[seq] = f
	l.events = append(l.events, event{seq: seq, fate: f})
}

// available reports whether Lease may return a message now.
func (f fate) available(now int64) bool {
	return f.status == unread || f.status == released || f.status == retrying && f.due <= now
}

func (m *model) recordLease(l *modelLane, d queue.Delivery) {
	m.Helper()
	log := m.logs[l.id.Source]
	if d.Seq <= l.start || d.Seq > m.limit(l) {
		m.Fatalf("lane %v got position %d of a log of %d; it starts behind %d and ends at %d", l.id, d.Seq, len(log), l.start, l.end)
	}
	want, f := log[d.Seq-1], m.fate(l, d.Seq)
	if d.ID != want.ID || string(d.Body) != string(want.Body) || d.AcceptedAt.UnixMilli() != want.millis || d.Lane != l.id {
		m.Fatalf("lane %v got position %d as %s %q; want %s %q", l.id, d.Seq, d.ID, d.Body, want.ID, want.Body)
	}
	if d.Attempt != f.attempt {
		m.Fatalf("lane %v got position %d with attempt %d; want %d", l.id, d.Seq, d.Attempt, f.attempt)
	}
	if d.Due.IsZero() != (f.due == 0) || f.due != 0 && d.Due.UnixMilli() != f.due {
		m.Fatalf("lane %v got position %d, due at %v; want %d", l.id, d.Seq, d.Due, f.due)
	}
	l.fates[d.Seq] = fate{leasedNow, f.attempt, f.due}
}

func (m *model) lease() {
	l := m.someLane()
	if l == nil {
		return
	}
	n := 1 + m.rng.IntN(12)
	before := m.Clock.Now().UnixMilli()
	got, err := m.store.Lease(l.id, n, nil)
	m.check(err)
	after := m.Clock.Now().UnixMilli()
	m.note("lease %d of %v: %v", n, l.id, seqs(got))
	if len(got) > n {
		m.Fatalf("leased %d, asked for %d", len(got), n)
	}
	for _, d := range got {
		if f := m.fate(l, d.Seq); !f.available(after) {
			m.Fatalf("lane %v got position %d, which is %+v at %d", l.id, d.Seq, f, after)
		}
		m.recordLease(l, d)
	}
	if len(got) < n {
		m.each(l, func(seq uint64, f fate) {
			if f.available(before) {
				m.Fatalf("lane %v got %d of %d, but position %d waits: %+v", l.id, len(got), n, seq, f)
			}
		})
	}
}

func (m *model) leaseOldest() {
	l := m.someLane()
	if l == nil {
		return
	}
	d, ok, err := m.store.LeaseOldest(l.id)
	m.check(err)
	m.note("oldest of %v: %d", l.id, d.Seq)
	var want uint64
	m.each(l, func(seq uint64, f fate) {
		if want == 0 && f.available(never) {
			want = seq
		}
	})
	if d.Seq != want || ok != (want != 0) {
		m.Fatalf("the oldest of lane %v is %d (%t), want %d", l.id, d.Seq, ok, want)
	}
	if ok {
		m.recordLease(l, d)
	}
}

// leaseDue leases the retries that are due when some retry is.
func (m *model) leaseDue() {
	l := m.someLane()
	if l == nil {
		return
	}
	var due []int64
	m.each(l, func(_ uint64, f fate) {
		if f.due != 0 {
			due = append(due, f.due)
		}
	})
	if len(due) == 0 {
		return
	}
	at, n, left := due[m.rng.IntN(len(due))], 1+m.rng.IntN(6), m.rng.IntN(1000)
	got, err := m.store.LeaseDue(l.id, time.UnixMilli(at), n, left, nil)
	m.check(err)
	m.note("lease %d of %v due at %d, with %d bytes: %v", n, l.id, at, left, seqs(got))
	var want []uint64
	m.each(l, func(seq uint64, f fate) {
		if f.due != at || !f.available(never) || len(want) == n {
			return
		}
		if left -= len(m.logs[l.id.Source][seq-1].Body); left >= 0 {
			want = append(want, seq)
		}
	})
	if !slices.Equal(seqs(got), want) {
		m.Fatalf("lane %v leased %v due at %d, want %v", l.id, seqs(got), at, want)
	}
	for _, d := range got {
		m.recordLease(l, d)
	}
}

const never = 1 << 62

func (m *model) settle() {
	l := m.someLane()
	if l == nil {
		return
	}
	var open []uint64
	m.each(l, func(seq uint64, f fate) {
		if f.status == leasedNow {
			open = append(open, seq)
		}
	})
	m.rng.Shuffle(len(open), func(i, j int) { open[i], open[j] = open[j], open[i] })
	now := m.Clock.Now()
	failure := queue.Failure{Time: now, Reason: "TimedOut", Message: "late"}
	at := now.Add(time.Duration(m.rng.IntN(120)-5) * time.Second)
	var all []queue.Settlement
	for _, seq := range open[:min(len(open), 1+m.rng.IntN(8))] {
		d := queue.Settlement{Delivery: m.delivery(l, seq), At: at, Failure: failure}
		switch n := m.rng.IntN(10); {
		case n < 5:
			d.Outcome, d.Omitted = queue.Acked, n == 0
		case n < 7:
			d.Outcome = queue.Retried
		case n >= 9:
			d.Outcome = queue.Buried
		}
		all = append(all, d)
		if m.oneOf(8) { // A second settlement has no effect.
			d.Outcome = queue.Acked
			all = append(all, d)
		}
	}
	together, joined := m.oneOf(2), false
	if together {
		m.note("settle %d of %v together", len(all), l.id)
		m.check(m.store.SettleAll(l.id, all))
	}
	for i := range all {
		d := &all[i]
		if !together {
			m.check(settleOne(m.store, d))
		}
		f := l.fates[d.Seq]
		if f.status != leasedNow {
			continue
		}
		m.note("settle %d of %v: %d at %d, omitted %t", d.Seq, l.id, d.Outcome, at.UnixMilli(), d.Omitted)
		var next fate
		switch d.Outcome {
		case queue.Released:
			l.fates[d.Seq] = fate{released, f.attempt, f.due}
			continue
		case queue.Acked:
			if next.status = delivered; d.Omitted {
				next.status = omitted
			}
		case queue.Retried:
			next = fate{retrying, f.attempt + 1, at.UnixMilli()}
		case queue.Buried:
			next.status = buried
			m.letters[letterID{l.id, d.Seq}] = now.UnixMilli()
		}
		l.become(d.Seq, next)
		l.events[len(l.events)-1].joined = joined
		joined = together
	}
}

func (m *model) delivery(l *modelLane, seq uint64) queue.Delivery {
	msg, f := m.logs[l.id.Source][seq-1], l.fates[seq]
	return queue.Delivery{Lane: l.id, Seq: seq, ID: msg.ID, Type: msg.Type, Event: msg.Event, Body: msg.Body, AcceptedAt: msg.AcceptedAt,
		Attempt: f.attempt}
}

func (m *model) buryExpired() {
	l := m.someLane()
	if l == nil {
		return
	}
	cut := m.Clock.Now().Add(-time.Duration(m.rng.IntN(300)) * time.Second)
	now := m.Clock.Now()
	n, err := m.store.BuryExpired(context.Background(), l.id, cut, queue.Failure{Time: now, Reason: "Expired"})
	m.check(err)
	m.note("bury expired of %v: %d", l.id, n)
	want := 0
	m.each(l, func(seq uint64, f fate) {
		if f.available(never) && m.logs[l.id.Source][seq-1].millis < cut.UnixMilli() {
			want++
			l.become(seq, fate{status: buried})
			m.letters[letterID{l.id, seq}] = now.UnixMilli()
		}
	})
	if n != want {
		m.Fatalf("buried %d expired messages of lane %v, want %d", n, l.id, want)
	}
}

func (m *model) advance() {
	d := time.Duration(m.rng.IntN(60)) * time.Second
	m.note("advance %v", d)
	m.Clock.Advance(d)
}

func (m *model) openOrDrop() {
	id := queue.LaneID{Source: m.someSource(), Destination: []string{crm, mail}[m.rng.IntN(2)]}
	if id.Destination == crm && m.oneOf(2) {
		id.Endpoint = "a"
	}
	l := m.lanes[id]
	if l != nil && m.oneOf(4) {
		m.note("drop %v", id)
		ledger := m.store.LaneStats(id).Ledger
		ledger.Discarded, ledger.Pending = ledger.Pending, 0
		m.check(m.store.DropLane(context.Background(), id))
		m.interrupted.dropped, m.interrupted.ledger = l, ledger
		m.drop(id, ledger)
		delete(m.lanes, id)
		return
	}
	if m.oneOf(8) {
		m.note("forget the dropped lanes of %s", id.Destination)
		m.check(m.store.ForgetDestination(id.Destination))
		m.interrupted.forgotten = map[string]queue.Ledger{id.Destination: m.dropped[id.Destination]}
		delete(m.dropped, id.Destination)
		return
	}
	m.note("open %v", id)
	m.check(m.store.OpenLane(id))
	if l == nil {
		m.interrupted.opened = &id
		m.lanes[id] = &modelLane{id: id, start: uint64(len(m.logs[id.Source])), fates: map[uint64]fate{}, skipped: map[uint64]bool{},
			base: map[uint64]fate{}}
	}
}

// drop adds the ledger of a dropped lane to the ledgers of its Source and destination.
func (m *model) drop(id queue.LaneID, ledger queue.Ledger) {
	m.dropped[id.Source] = m.dropped[id.Source].Plus(ledger)
	m.dropped[id.Destination] = m.dropped[id.Destination].Plus(ledger)
}

// endOrContinue ends a lane, or continues an ended one: after the last message if it has read
// all messages before its end.
func (m *model) endOrContinue() {
	l := m.someLane()
	if l == nil || len(m.logs[l.id.Source]) == 0 {
		return
	}
	read, head := m.store.Position(l.id)
	if head != uint64(len(m.logs[l.id.Source])) {
		m.Fatalf("the log of %v ends at %d, want %d", l.id, head, len(m.logs[l.id.Source]))
	}
	m.note("end %v: %t", l.id, l.end == 0)
	m.check(m.store.EndLane(l.id, map[bool]queue.End{true: queue.Ended, false: queue.Active}[l.end == 0]))
	m.interrupted.ended, m.interrupted.end = l, l.end
	if l.end = 0; m.interrupted.end == 0 {
		l.end = head
	} else if read >= m.interrupted.end {
		for seq := m.interrupted.end + 1; seq <= head; seq++ {
			l.skipped[seq] = true
			m.interrupted.skipped = append(m.interrupted.skipped, seq)
		}
	}
}

// putMeta stores or deletes a random value.
func (m *model) putMeta() {
	name := fmt.Sprint("n", m.rng.IntN(3))
	value := []byte(fmt.Sprint(m.operation))
	if m.oneOf(3) {
		value = nil
	}
	durable := m.oneOf(4)
	m.note("put meta %s: %s, durably: %t", name, value, durable)
	before := maps.Clone(m.meta)
	if durable {
		m.interrupted.meta = append(m.older, before)
		m.check(m.store.PutMetaDurable(name, value))
		m.older = nil
	} else {
		m.check(m.store.PutMeta(name, value))
		m.older = append(m.older, before)
	}
	if m.meta[name] = string(value); value == nil {
		delete(m.meta, name)
	}
}

// readMeta returns all stored values.
func (m *model) readMeta() map[string]string {
	all, err := m.store.AllMeta()
	m.check(err)
	got := map[string]string{}
	for name, value := range all {
		got[name] = string(value)
	}
	return got
}

func (m *model) storedLetters(destination string) map[letterID]string {
	keys := map[letterID]string{}
	m.check(m.store.DeadLetters(context.Background(), destination, "", func(d queue.DeadLetter) bool {
		id := letterID{d.Lane, d.Seq}
		if keys[id] != "" {
			m.Fatalf("two dead letters of %v", id)
		}
		if want := m.logs[d.Lane.Source][d.Seq-1]; want.ID != d.ID || string(want.Body) != string(d.Body) {
			m.Fatalf("dead letter %v is %s %q, want %s %q", id, d.ID, d.Body, want.ID, want.Body)
		}
		keys[id] = d.Key
		return true
	}))
	return keys
}

func (m *model) deleteLetters() {
	destination := []string{crm, mail}[m.rng.IntN(2)]
	m.interrupted.deleted = map[letterID]int64{}
	forget := func(id letterID) {
		m.interrupted.deleted[id] = m.letters[id]
		delete(m.letters, id)
	}
	if m.oneOf(3) {
		m.trimBySize(destination, forget)
		return
	}
	if m.oneOf(2) {
		before := m.Clock.Now().Add(-time.Duration(m.rng.IntN(600)) * time.Second)
		n, err := m.store.TrimDeadLetters(context.Background(), destination, before, m.Clock.Now(), 1<<40)
		m.check(err)
		m.note("trim dead letters of %s: %d", destination, n)
		for id, at := range m.letters {
			if id.lane.Destination == destination && at < before.UnixMilli() {
				forget(id)
			}
		}
		if n != len(m.interrupted.deleted) {
			m.Fatalf("trimmed %d dead letters of %s, want %d", n, destination, len(m.interrupted.deleted))
		}
		return
	}
	var keys []string
	for id, k := range m.storedLetters(destination) {
		if _, known := m.letters[id]; known && m.oneOf(2) {
			keys = append(keys, k)
			forget(id)
		}
	}
	m.note("delete %d dead letters of %s", len(keys), destination)
	m.check(m.store.DeleteDeadLetters(context.Background(), destination, keys...))
}

// trimBySize trims dead letters to a size. The oldest must be removed first, and no more than
// needed.
func (m *model) trimBySize(destination string, forget func(letterID)) {
	type letter struct {
		id letterID
		at int64
	}
	list := func() (all []letter) {
		m.check(m.store.DeadLetters(context.Background(), destination, "", func(d queue.DeadLetter) bool {
			all = append(all, letter{letterID{d.Lane, d.Seq}, d.Failure.Time.UnixMilli()})
			return true
		}))
		return all
	}
	was := list()
	size := m.store.DestinationStats(destination).DeadLetterBytes
	most := m.rng.Int64N(size + 1)
	young := m.Clock.Now().Add(-time.Duration(m.rng.IntN(120)) * time.Second)
	n, err := m.store.TrimDeadLetters(context.Background(), destination, time.UnixMilli(0), young, most)
	m.check(err)
	left := list()
	m.note("trim dead letters of %s to %d bytes: %d", destination, most, n)
	for _, l := range was[:len(was)-len(left)] {
		forget(l.id)
		if l.at >= young.UnixMilli() {
			m.Fatalf("dead letter %v is young and was removed", l.id)
		}
	}
	if n != len(was)-len(left) || !slices.Equal(was[n:], left) {
		m.Fatalf("removed %d of %v; the rest is %v", n, was, left)
	}
	size = m.store.DestinationStats(destination).DeadLetterBytes
	if size > most && left[0].at < young.UnixMilli() {
		m.Fatalf("%s has %d bytes of dead letters, not all of them young; want %d", destination, size, most)
	}
}

// compare compares all visible states of the store with the model.
func (m *model) compare() {
	m.note("compare")
	if got := m.readMeta(); !maps.Equal(got, m.meta) {
		m.Fatalf("the stored values are %v, want %v", got, m.meta)
	}
	for source, log := range m.logs {
		if got := m.store.SourceStats(source).Accepted; got != int64(len(log)) {
			m.Fatalf("source %s has %d messages, want %d", source, got, len(log))
		}
	}
	for _, l := range m.lanes {
		m.compareLane(l)
	}
	m.compareTotals()
	for _, destination := range []string{crm, mail} {
		stored := m.storedLetters(destination)
		want := 0
		for id := range m.letters {
			if id.lane.Destination == destination {
				want++
				if stored[id] == "" {
					m.Fatalf("dead letter %v is missing", id)
				}
			}
		}
		count := m.store.DestinationStats(destination).DeadLetters
		if len(stored) != want || count != int64(want) {
			m.Fatalf("%s has %d dead letters and counts %d, want %d", destination, len(stored), count, want)
		}
	}
}

// compareTotals compares the ledgers of Sources and destinations with the ledgers of their lanes.
func (m *model) compareTotals() {
	want := maps.Clone(m.dropped)
	for id := range m.lanes {
		ledger := m.store.LaneStats(id).Ledger
		want[id.Source], want[id.Destination] = want[id.Source].Plus(ledger), want[id.Destination].Plus(ledger)
	}
	for _, name := range []string{"shop/web", "shop/ios", crm, mail} {
		got := m.store.DestinationStats(name).Ledger.Plus(m.store.SourceStats(name).Ledger) // One of the two is zero.
		if got != want[name] {
			m.Fatalf("the ledger of %s is %+v, want %+v", name, got, want[name])
		}
		m.check(got.Balance())
	}
}

func (m *model) compareLane(l *modelLane) {
	s := m.store.LaneStats(l.id)
	var n [passed + 1]int64
	var oldestWaits, total int64
	var firstWaits uint64
	retries := int64(0)
	m.each(l, func(seq uint64, f fate) {
		n[f.status]++
		total++
		if f.status == retrying || f.status == released && f.due != 0 {
			retries++
		}
		if oldestWaits == 0 && (f.available(never) || f.status == leasedNow) {
			oldestWaits, firstWaits = m.logs[l.id.Source][seq-1].millis, seq
		}
	})
	if err := s.Balance(); err != nil || s.Ended != (l.end != 0) {
		m.Fatalf("lane %v: %v; ended %t, want end %d", l.id, err, s.Ended, l.end)
	}
	// A lane counts excluded messages when it reads them.
	ahead := total - s.Accepted
	if s.Delivered != n[delivered] || s.Omitted != n[omitted] || s.DeadLettered != n[buried] || s.InFlight != n[leasedNow] ||
		s.Retrying != retries || s.Filtered > n[filtered] || ahead < 0 || ahead > n[passed] ||
		s.Pending < n[unread]+n[released]+n[retrying]+n[leasedNow] {
		m.Fatalf("lane %v: ledger %+v, want delivered %d, omitted %d, buried %d, in flight %d, retrying %d, filtered up to %d, %d messages in all with up to %d passed over", l.id, s, n[delivered], n[omitted], n[buried], n[leasedNow], retries, n[filtered], total, n[passed])
	}
	// A filtered, unread message may be the oldest.
	if firstWaits != 0 && (s.First == 0 || s.First > firstWaits || s.OldestPending.IsZero() || s.OldestPending.UnixMilli() > oldestWaits) {
		m.Fatalf("lane %v: the oldest pending message is %d of %v, want %d of %v", l.id, s.First, s.OldestPending, firstWaits, time.UnixMilli(oldestWaits).UTC())
	}
}

func (m *model) reopenCleanly() {
	m.note("close and open")
	m.check(m.store.Close())
	if m.Crash != nil && m.Crash.Crashed() {
		return // recoverCrash opens the store.
	}
	m.store, m.older = m.Open(m), nil
	for id, l := range m.lanes {
		m.check(m.store.OpenLane(id))
		for seq, f := range l.fates {
			switch {
			case f.due != 0 && (f.status == leasedNow || f.status == released):
				l.fates[seq] = fate{retrying, f.attempt, f.due}
			case f.status == leasedNow:
				l.fates[seq] = fate{status: released}
			}
		}
		l.base, l.events = maps.Clone(l.fates), nil
	}
	m.compare()
}

// recoverCrash opens the surviving store and compares it with the model.
func (m *model) recoverCrash() {
	m.note("crash")
	m.Crash.Recover(m, m.store)
	m.store = m.Open(m)

	// Append is all or nothing, for all logs of a request.
	if lost := m.interrupted.appended; len(lost) > 0 {
		last := lost[len(lost)-1].Source
		if got := m.store.SourceStats(last).Accepted; got < int64(len(m.logs[last])) {
			for _, msg := range lost {
				log := m.logs[msg.Source]
				m.logs[msg.Source] = log[:len(log)-1]
			}
			m.note("the last append is lost")
		}
	}
	for source, log := range m.logs {
		if got := m.store.SourceStats(source).Accepted; got != int64(len(log)) {
			m.Fatalf("after a crash source %s has %d messages, want %d", source, got, len(log))
		}
	}

	known := m.store.Lanes()
	if d := m.interrupted.opened; d != nil && !slices.Contains(known, *d) {
		delete(m.lanes, *d)
	}
	if d := m.interrupted.dropped; d != nil && slices.Contains(known, d.id) {
		m.lanes[d.id] = d
		for _, name := range []string{d.id.Source, d.id.Destination} {
			m.dropped[name] = minus(m.dropped[name], m.interrupted.ledger)
		}
	}
	if l := m.interrupted.ended; l != nil && m.store.LaneStats(l.id).Ended != (l.end != 0) {
		l.end = m.interrupted.end
		for _, seq := range m.interrupted.skipped {
			delete(l.skipped, seq)
		}
	}
	got := m.readMeta()
	if !slices.ContainsFunc(append(append(m.older, m.interrupted.meta...), m.meta), func(was map[string]string) bool {
		return maps.Equal(got, was)
	}) {
		m.Fatalf("after a crash the stored values are %v; they were %v, and %v before", got, m.meta, m.older)
	}
	m.meta, m.older = got, nil
	for name, ledger := range m.interrupted.forgotten {
		if got := m.store.DestinationStats(name).Ledger; got != m.lanesOf(name) {
			m.dropped[name] = ledger
		}
	}
	if len(known) != len(m.lanes) {
		m.Fatalf("after a crash the lanes are %v, want %v", known, m.sortedLanes())
	}
	stored := map[letterID]string{}
	for _, destination := range []string{crm, mail} {
		maps.Copy(stored, m.storedLetters(destination))
	}
	for id, at := range m.interrupted.deleted {
		if stored[id] != "" {
			m.letters[id] = at
		}
	}
	for _, id := range m.sortedLanes() {
		m.recoverLane(m.lanes[id], stored)
	}
	for id := range stored {
		if _, ok := m.letters[id]; !ok {
			m.Fatalf("after a crash there is a dead letter of %v", id)
		}
	}
	// A dead letter of a dropped lane is older than the lane's last changes, so a crash cannot
	// lose it.
	for id := range m.letters {
		if stored[id] == "" && (m.lanes[id.lane] == nil || id.seq <= m.lanes[id.lane].start) {
			if m.interrupted.dropped != nil && m.interrupted.dropped.id == id.lane {
				delete(m.letters, id)
				continue
			}
			m.Fatalf("after a crash dead letter %v is missing", id)
		}
	}
	for _, l := range m.lanes {
		l.base, l.events = maps.Clone(l.fates), nil
	}
	m.compare()
	m.arm()
}

func minus(a, b queue.Ledger) queue.Ledger {
	return a.Plus(queue.Ledger{Accepted: -b.Accepted, Delivered: -b.Delivered, Filtered: -b.Filtered, Omitted: -b.Omitted,
		DeadLettered: -b.DeadLettered,
		Discarded:    -b.Discarded, Pending: -b.Pending})
}

// lanesOf returns the sum of the ledgers of a destination's lanes in the store.
func (m *model) lanesOf(destination string) (sum queue.Ledger) {
	for _, id := range m.store.Lanes() {
		if id.Destination == destination {
			sum = sum.Plus(m.store.LaneStats(id).Ledger)
		}
	}
	return sum
}

// recoverLane finds the state of the lane that survived.
func (m *model) recoverLane(l *modelLane, stored map[letterID]string) {
	m.check(m.store.OpenLane(l.id))
	s := m.store.LaneStats(l.id)
	waiting := map[uint64]int{}
	take := func(d queue.Delivery) {
		if _, twice := waiting[d.Seq]; twice {
			m.Fatalf("after a crash lane %v leases position %d twice", l.id, d.Seq)
		}
		waiting[d.Seq] = d.Attempt
	}
	var got []queue.Delivery
	for {
		d, ok, err := m.store.LeaseOldest(l.id)
		m.check(err)
		if !ok {
			break
		}
		take(d)
		got = append(got, d)
	}
	fates := maps.Clone(l.base)
	n := 0
	for ; !m.matches(l, fates, waiting, s, stored); n++ {
		if n == len(l.events) {
			m.Fatalf("after a crash lane %v is in no state that it was in before:\n ledger %+v\n waiting %v\n base %v\n events %+v", l.id, s, waiting, l.base, l.events)
		}
		fates[l.events[n].seq] = l.events[n].fate
		for ; n+1 < len(l.events) && l.events[n+1].joined; n++ {
			fates[l.events[n+1].seq] = l.events[n+1].fate
		}
	}
	m.note("lane %v has %d of its last %d events", l.id, n, len(l.events))
	for id := range m.letters {
		if id.lane == l.id && id.seq > l.start && fates[id.seq].status != buried {
			delete(m.letters, id)
		}
	}
	for seq, f := range fates {
		if seq > uint64(len(m.logs[l.id.Source])) {
			delete(fates, seq)
		} else if f.status == leasedNow {
			fates[seq] = fate{status: released}
		}
	}
	l.fates = fates
	for _, d := range got {
		f := m.fate(l, d.Seq)
		l.fates[d.Seq] = fate{leasedNow, d.Attempt, f.due}
	}
	for _, d := range got {
		m.store.Release(d)
		f := l.fates[d.Seq]
		l.fates[d.Seq] = fate{released, f.attempt, f.due}
	}
}

// matches reports whether an earlier state of a lane is the present state in the store.
func (m *model) matches(l *modelLane, fates map[uint64]fate, waiting map[uint64]int, s queue.LaneStats, stored map[letterID]string) bool {
	var deliveredCount, omittedCount, buriedCount, waits, retries int64
	same := true
	for seq := l.start + 1; seq <= m.limit(l); seq++ {
		f, ok := fates[seq]
		if !ok {
			f = m.fresh(l, seq)
		}
		attempt, isWaiting := waiting[seq]
		switch f.status {
		case delivered:
			deliveredCount++
			same = same && !isWaiting
		case omitted:
			omittedCount++
			same = same && !isWaiting
		case buried:
			buriedCount++
			_, kept := m.letters[letterID{l.id, seq}]
			same = same && !isWaiting && kept == (stored[letterID{l.id, seq}] != "")
		case filtered, passed:
			same = same && !isWaiting
		default:
			waits++
			if f.due != 0 {
				retries++
			}
			same = same && isWaiting && attempt == f.attempt && stored[letterID{l.id, seq}] == ""
		}
	}
	return same && s.Delivered == deliveredCount && s.Omitted == omittedCount && s.DeadLettered == buriedCount &&
		int64(len(waiting)) == waits && s.Retrying == retries &&
		s.Balance() == nil
}

// drainAll delivers all pending messages and compares the final ledgers exactly.
func (m *model) drainAll() {
	m.note("drain")
	m.Clock.Advance(time.Hour)
	for _, l := range m.lanes {
		for {
			got, err := m.store.Lease(l.id, 7, nil)
			m.check(err)
			for _, d := range got {
				m.recordLease(l, d)
				m.store.Ack(d)
				l.become(d.Seq, fate{status: delivered})
			}
			if len(got) == 0 {
				break
			}
		}
		var n [passed + 1]int64
		total := int64(0)
		m.each(l, func(_ uint64, f fate) { n[f.status]++; total++ })
		want := queue.LaneStats{Ended: l.end != 0, Ledger: queue.Ledger{Accepted: total - n[passed], Delivered: n[delivered],
			Filtered: n[filtered], Omitted: n[omitted], DeadLettered: n[buried]}}
		if got := m.store.LaneStats(l.id); got != want {
			m.Fatalf("lane %v ends with ledger %+v, want %+v", l.id, got, want)
		}
	}
	m.compare()
}
