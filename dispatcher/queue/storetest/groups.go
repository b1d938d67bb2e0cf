package storetest

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// member returns a lane of the group of the suite's destination.
func member(endpoint string) queue.LaneID {
	return queue.LaneID{Source: source, Destination: crm, Endpoint: endpoint, Any: true}
}

var (
	memberA, memberB = member("a"), member("b")
	groupID          = memberA.Group()
	letterLane       = queue.LaneID{Source: source, Destination: crm}
)

// Each lane of a group leases each message; the group counts it once, by the first Ack.
func (x *suite) groupCountsOnce() {
	x.open(memberA, memberB)
	x.add(3)
	a, b := x.lease(memberA, 10), x.lease(memberB, 10)
	x.equal("messages of a", seqs(a), []uint64{1, 2, 3})
	x.equal("messages of b", seqs(b), []uint64{1, 2, 3})
	x.store.Ack(a[0])
	x.store.Ack(b[0])
	x.store.Ack(b[1])
	x.ledger(groupID, counts{Accepted: 3, Delivered: 2, Pending: 1, InFlight: 1})
	x.ledger(memberA, counts{Accepted: 3, Delivered: 1, Pending: 2, InFlight: 2})
	x.ledger(memberB, counts{Accepted: 3, Delivered: 2, Pending: 1, InFlight: 1})
	x.equal("first attempts of a", x.store.LaneStats(memberA).FirstAttempts, int64(2))
	want := queue.Ledger{Accepted: 3, Delivered: 2, Pending: 1}
	for range 2 {
		x.equal("ledger of the destination", x.store.DestinationStats(crm).Ledger, want)
		x.equal("ledger of the source", x.store.SourceStats(source).Ledger, want)
		x.equal("oldest of the group", x.store.LaneStats(groupID).First, uint64(3))
		x.reopenStore()
		x.open(memberA, memberB)
	}
	x.equal("messages of a after a restart", seqs(x.lease(memberA, 10)), []uint64{2, 3})
	x.equal("messages of b after a restart", seqs(x.lease(memberB, 10)), []uint64{3})
}

// A message that a lane omits has its outcome in the group; the ledger keeps it after the lane is dropped.
func (x *suite) groupOmits() {
	x.open(memberA, memberB)
	x.add(2)
	a := x.lease(memberA, 2)
	x.store.Retry(a[0], x.Clock.Now(), x.failure("TimedOut"))
	b := x.lease(memberB, 2)
	for i := range b {
		b[i].Omitted = true
		x.equal("first", x.store.Ack(b[i]), true)
	}
	x.equal("first", x.store.Ack(a[1]), false)
	x.ledger(memberA, counts{Accepted: 2, Delivered: 1, Discarded: 1})
	x.ledger(memberB, counts{Accepted: 2, Omitted: 2})
	x.ledger(groupID, counts{Accepted: 2, Omitted: 2})
	x.reopenStore()
	x.open(memberA, memberB)
	x.ledger(groupID, counts{Accepted: 2, Omitted: 2})
	x.must(x.store.DropLane(context.Background(), memberA))
	x.must(x.store.DropLane(context.Background(), memberB))
	x.reopenStore()
	want := queue.Ledger{Accepted: 2, Omitted: 2}
	x.equal("ledger of the destination", x.store.DestinationStats(crm).Ledger, want)
	x.equal("ledger of the source", x.store.SourceStats(source).Ledger, want)
}

// A delivery ends the retries of the other lanes, waiting or leased, but not their first
// attempts.
func (x *suite) groupSuccessEndsRetries() {
	x.open(memberA, memberB)
	x.add(3)
	a := x.lease(memberA, 3)
	x.store.Retry(a[0], x.Clock.Now(), x.failure("TimedOut"))
	x.store.Retry(a[1], x.Clock.Now().Add(time.Hour), x.failure("TimedOut"))
	x.Clock.Advance(time.Second)
	again := x.lease(memberA, 3)
	x.equal("due", seqs(again), []uint64{1})
	x.store.Release(again[0])
	for _, d := range x.lease(memberB, 3) {
		x.store.Ack(d)
	}
	x.equal("retries of a", seqs(x.lease(memberA, 9)), []uint64(nil))
	x.store.Retry(a[2], x.Clock.Now(), x.failure("TimedOut"))
	x.Clock.Advance(time.Hour)
	x.equal("retries of a", seqs(x.lease(memberA, 9)), []uint64(nil))
	x.ledger(memberA, counts{Accepted: 3, Discarded: 3})
	x.ledger(groupID, counts{Accepted: 3, Delivered: 3})
	x.add(2)
	for _, d := range x.lease(memberB, 9) {
		x.store.Ack(d)
	}
	x.equal("first attempts of a", seqs(x.lease(memberA, 9)), []uint64{4, 5})
}

// A message that all lanes bury is one dead letter, with the attempts of all lanes.
func (x *suite) groupBury() {
	x.open(memberA, memberB)
	x.add(2)
	a := x.lease(memberA, 2)
	if buried, err := x.store.Bury(a[0], x.failure("Rejected")); buried || err != nil {
		x.Fatalf("buried %t (%v) while another lane has the message", buried, err)
	}
	x.ledger(groupID, counts{Accepted: 2, Pending: 2, InFlight: 1})
	x.reopenStore()
	x.open(memberA, memberB)
	b := x.lease(memberB, 2)
	x.store.Retry(b[0], x.Clock.Now(), x.failure("TimedOut"))
	x.store.Ack(b[1])
	x.Clock.Advance(time.Second)
	b = x.lease(memberB, 2)
	if buried, err := x.store.Bury(b[0], x.failure("Expired")); !buried || err != nil {
		x.Fatalf("buried %t (%v) by the last lane", buried, err)
	}
	if buried, err := x.store.Bury(x.lease(memberA, 1)[0], x.failure("Rejected")); buried || err != nil {
		x.Fatalf("buried %t (%v) after another lane delivered the message", buried, err)
	}
	letters := x.letters(crm, "")
	if len(letters) != 1 || letters[0].Lane != letterLane || letters[0].Seq != 1 || letters[0].Attempts != 3 ||
		letters[0].Failure.Reason != "Expired" {
		x.Fatalf("dead letters: %+v", letters)
	}
	x.ledger(groupID, counts{Accepted: 2, Delivered: 1, DeadLettered: 1})
}

// An expired first attempt is skipped and counted. It is a dead letter only when no lane
// delivered the message.
func (x *suite) groupExpires() {
	x.open(memberA, memberB)
	x.add(5)
	for _, d := range x.lease(memberB, 3) {
		x.store.Ack(d)
	}
	x.Clock.Advance(time.Hour)
	for _, test := range []struct {
		lane   queue.LaneID
		buried int
	}{{memberA, 0}, {memberB, 2}} {
		n, err := x.store.BuryExpired(context.Background(), test.lane, x.Clock.Now(), x.failure("Expired"))
		x.must(err)
		x.equal("buried", n, test.buried)
	}
	for range 2 {
		x.equal("skipped", []int64{x.store.LaneStats(memberA).Skipped, x.store.LaneStats(memberB).Skipped}, []int64{5, 2})
		x.equal("dead letters", len(x.letters(crm, "")), 2)
		x.ledger(groupID, counts{Accepted: 5, Delivered: 3, DeadLettered: 2})
		x.reopenStore()
		x.open(memberA, memberB)
	}
}

// A lane whose endpoint was removed delivers only messages that no other lane delivered or has
// pending.
func (x *suite) groupEndpointRemoved() {
	x.open(memberA)
	x.add(3) // Before b is opened.
	x.open(memberB)
	x.add(3)
	a := x.lease(memberA, 2)
	x.store.Ack(a[0])
	x.store.Retry(a[1], x.Clock.Now(), x.failure("TimedOut"))
	x.store.Ack(x.lease(memberB, 1)[0])
	x.must(x.store.EndLane(memberA, queue.EndpointRemoved))
	x.add(1)
	x.Clock.Advance(time.Second)
	x.reopenStore()
	x.open(memberA, memberB)
	got := x.lease(memberA, 10)
	x.equal("of a, which has left", seqs(got), []uint64{3, 2})
	for _, d := range got {
		x.store.Ack(d)
	}
	x.ledger(memberA, counts{Accepted: 6, Delivered: 3, Discarded: 3})
	x.equal("of b", seqs(x.lease(memberB, 10)), []uint64{5, 6, 7})
	x.ledger(groupID, counts{Accepted: 7, Delivered: 4, Pending: 3, InFlight: 3})
	x.must(x.store.DropLane(context.Background(), memberA))
	x.ledger(groupID, counts{Accepted: 7, Delivered: 4, Pending: 3, InFlight: 3})
	x.equal("ledger of the destination", x.store.DestinationStats(crm).Ledger, queue.Ledger{Accepted: 7, Delivered: 4, Pending: 3})
}

// When the endpoints of two lanes are removed in turn, each message is delivered by exactly one
// of them: by the second lane if the first one dropped it before, else by the older lane.
func (x *suite) groupEndpointsRemovedInTurn() {
	x.open(memberA, memberB)
	x.add(4)
	x.must(x.store.EndLane(memberA, queue.EndpointRemoved))
	x.equal("of a, while b has all", seqs(x.lease(memberA, 9)), []uint64(nil))
	x.must(x.store.EndLane(memberA, queue.Active))
	x.add(2)
	x.must(x.store.EndLane(memberA, queue.EndpointRemoved))
	x.must(x.store.EndLane(memberB, queue.EndpointRemoved))
	x.reopenStore()
	x.open(memberA, memberB)

	oldest, ok := x.oldest(memberB)
	x.equal("oldest of b", []any{oldest.Seq, ok}, []any{uint64(1), true})
	x.store.Ack(oldest)
	b := x.lease(memberB, 9)
	x.equal("of b", seqs(b), []uint64{2, 3, 4})
	if buried, err := x.store.Bury(b[0], x.failure("Rejected")); !buried || err != nil {
		x.Fatalf("buried %t (%v) by the only lane that has the message", buried, err)
	}
	x.store.Release(b[1])
	x.Clock.Advance(time.Hour)
	n, err := x.store.BuryExpired(context.Background(), memberB, x.Clock.Now(), x.failure("Expired"))
	x.must(err)
	x.equal("expired", n, 1)
	x.store.Release(b[2])
	x.must(x.store.DropLane(context.Background(), memberB))
	x.ledger(groupID, counts{Accepted: 6, Delivered: 1, DeadLettered: 2, Discarded: 1, Pending: 2})

	a := x.lease(memberA, 9)
	x.equal("of a", seqs(a), []uint64{5, 6})
	for _, d := range a {
		x.store.Ack(d)
	}
	x.ledger(groupID, counts{Accepted: 6, Delivered: 3, DeadLettered: 2, Discarded: 1})
}

// Messages appended while all lanes have ended are not for the group.
func (x *suite) groupEnds() {
	x.open(memberA, memberB)
	x.add(2)
	x.must(x.store.EndLane(memberA, queue.Ended))
	x.must(x.store.EndLane(memberB, queue.Ended))
	x.add(5)
	x.ledger(groupID, counts{Accepted: 2, Pending: 2})
	for _, d := range x.lease(memberA, 10) {
		x.store.Ack(d)
	}
	x.must(x.store.EndLane(memberA, queue.Active))
	x.must(x.store.EndLane(memberB, queue.Active))
	x.add(1)
	x.reopenStore()
	x.open(memberA, memberB)
	for _, l := range []queue.LaneID{memberA, memberB} {
		for _, d := range x.lease(l, 10) {
			x.store.Ack(d)
		}
	}
	x.ledger(memberA, counts{Accepted: 3, Delivered: 3})
	x.ledger(memberB, counts{Accepted: 3, Delivered: 3})
	x.ledger(groupID, counts{Accepted: 3, Delivered: 3})
}

// The end of a lane can be between two gaps: the lane does not count the messages of the second one.
func (x *suite) groupEndsBetweenGaps() {
	a, b := memberA, memberB
	x.open(a)
	x.add(1)
	x.must(x.store.EndLane(a, queue.Ended))
	x.add(1)
	x.must(x.store.EndLane(a, queue.Active))
	x.must(x.store.EndLane(a, queue.Ended))
	x.add(2)
	x.open(b)
	x.add(1)
	for range 2 {
		x.equal("messages of a", seqs(x.lease(a, 5)), []uint64{1})
		x.ledger(a, counts{Accepted: 1, Pending: 1, InFlight: 1})
		x.ledger(groupID, counts{Accepted: 2, Pending: 2, InFlight: 1})
		x.reopenStore()
		x.open(a, b)
	}
}

// Each lane of a group delivers or buries a "delete" message by itself.
func (x *suite) groupDelete() {
	x.open(memberA, memberB)
	x.append(x.message(func(m *queue.Message) { m.Type, m.Event = "delete", "" }))
	a, b := x.lease(memberA, 1), x.lease(memberB, 1)
	x.store.Ack(a[0])
	x.store.Retry(b[0], x.Clock.Now(), x.failure("TimedOut"))
	x.Clock.Advance(time.Second)
	x.ledger(groupID, counts{Accepted: 2, Delivered: 1, Pending: 1, Retrying: 1})
	b = x.lease(memberB, 1)
	x.equal("retry of b", seqs(b), []uint64{1})
	if buried, err := x.store.Bury(b[0], x.failure("Rejected")); !buried || err != nil {
		x.Fatalf("buried %t (%v)", buried, err)
	}
	letters := x.letters(crm, "")
	if len(letters) != 1 || letters[0].Lane != (queue.LaneID{Source: source, Destination: crm, Endpoint: "b"}) {
		x.Fatalf("dead letters: %+v", letters)
	}
	x.ledger(groupID, counts{Accepted: 2, Delivered: 1, DeadLettered: 1})
}

// Groups runs random operations on the lanes of a group and compares the results with a model
// in memory.
func Groups(t *testing.T, seed uint64, operations int, start func(t *testing.T) Engine) {
	m := &groupModel{suite: suite{T: t, Engine: start(t)}, rng: rand.New(rand.NewPCG(seed, 1))}
	m.store = m.Open(t)
	defer func() { _ = m.store.Close() }()
	m.reset()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d; the last operations:\n%s", seed, m.tail())
		}
	})
	for range operations {
		m.step()
	}
	m.drain()
}

// GroupsCrash runs random operations on the lanes of a group until the power fails. Afterwards
// all ledgers must balance, each pending message must be delivered again, and then no message
// may be pending.
func GroupsCrash(t *testing.T, seed uint64, operations int, start func(t *testing.T) Engine) {
	m := &groupModel{suite: suite{T: t, Engine: start(t)}, rng: rand.New(rand.NewPCG(seed, 2))}
	m.store = m.Open(t)
	defer func() { _ = m.store.Close() }()
	m.reset()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d; the last operations:\n%s", seed, m.tail())
		}
	})
	for range m.rng.IntN(operations) {
		m.step()
	}
	m.Crash.Arm(m.rng, 200)
	for range operations {
		acknowledged := m.head()
		if m.step(); m.Crash.Crashed() {
			m.recover(acknowledged)
			return
		}
	}
	t.Fatalf("the power did not fail in %d operations", operations)
}

// recover opens the store after a power loss, checks it and delivers all pending messages. The
// messages after acknowledged may be lost.
func (m *groupModel) recover(acknowledged uint64) {
	m.note("power loss")
	m.Crash.Recover(m.T, m.store)
	m.store = m.Open(m.T)
	if n := m.store.SourceStats(source).Accepted; n < int64(acknowledged) {
		m.Fatalf("the Source has %d messages, but %d were acknowledged", n, acknowledged)
	}
	lanes := m.store.Lanes()
	for _, id := range lanes {
		m.open(id)
		m.must(m.store.LaneStats(id).Balance())
	}
	m.must(m.store.LaneStats(groupID).Balance())
	m.must(m.store.DestinationStats(crm).Ledger.Balance())
	m.Clock.Advance(time.Hour)
	got, byLane := map[uint64]bool{}, map[string]map[uint64]bool{}
	for range 3 { // A message that one lane drops may be for another one.
		for _, id := range lanes {
			if byLane[id.Endpoint] == nil {
				byLane[id.Endpoint] = map[uint64]bool{}
			}
			for more := true; more; {
				more = false
				for _, d := range m.suite.lease(id, 7) {
					got[d.Seq], byLane[id.Endpoint][d.Seq], more = true, true, true
					m.store.Ack(d)
				}
			}
		}
	}
	for name, l := range m.lanes {
		for seq := l.start + 1; seq <= min(m.limit(l), acknowledged); seq++ {
			switch {
			case !m.isPendingIn(l, seq), seq > l.read && m.verdict(l, seq) != unread:
			case m.exempt(seq) && !byLane[name][seq]:
				m.Fatalf("lane %v lost message %d of the type delete", l.id, seq)
			case !m.exempt(seq) && !m.final[seq] && !got[seq]:
				m.Fatalf("message %d, pending in lane %v, is lost: %+v", seq, l.id, m.log[seq-1])
			}
		}
	}
	for _, id := range append(lanes, groupID) {
		if s := m.store.LaneStats(id); s.Pending != 0 || s.Balance() != nil {
			m.Fatalf("after all lanes are drained %v has %+v", id, s)
		}
	}
	if len(m.lanes) > 0 {
		buried := int64(0)
		for _, d := range m.suite.letters(crm, "") {
			if d.Seq > m.base {
				buried++
			}
		}
		m.equal("dead letters of the ledger", m.store.LaneStats(groupID).DeadLettered, buried)
	}
}

type groupModel struct {
	suite
	rng       *rand.Rand
	log       []queue.Message
	lanes     map[string]*groupLane
	final     map[uint64]bool
	handovers map[uint64]int // Attempts of messages that lanes handed over.
	letters   map[letterID]int
	counts    queue.Ledger // Of the present group, without accepted and pending.
	gaps      []uint64     // Messages that were appended while all lanes had ended.
	history   []string
	number    int
	base      uint64 // The last message before the present group.
}

type groupLane struct {
	id              queue.LaneID
	start, end      uint64
	endpointRemoved bool
	number          int
	read            uint64 // The result of Position.
	fates           map[uint64]fate
	skipped         int64
}

func (m *groupModel) reset() {
	m.lanes, m.final, m.handovers, m.counts, m.gaps = map[string]*groupLane{}, map[uint64]bool{}, map[uint64]int{}, queue.Ledger{}, nil
	if m.base = m.head(); m.letters == nil {
		m.letters = map[letterID]int{}
	}
}

func (m *groupModel) note(format string, args ...any) {
	m.history = append(m.history, fmt.Sprintf(format, args...))
}

func (m *groupModel) tail() (s string) {
	for _, line := range m.history[max(0, len(m.history)-60):] {
		s += line + "\n"
	}
	return s
}

func (m *groupModel) head() uint64 { return uint64(len(m.log)) }

func (m *groupModel) verdict(l *groupLane, seq uint64) status {
	msg := m.log[seq-1]
	switch {
	case slices.Contains(m.gaps, seq), msg.Only != "" && msg.Only != crm && msg.Only != crm+"/"+l.id.Endpoint:
		return passed
	case slices.Contains(msg.Skip, crm):
		return filtered
	}
	return unread
}

// forSibling reports whether a message is only for another endpoint of the destination.
func (m *groupModel) forSibling(l *groupLane, seq uint64) bool {
	only := m.log[seq-1].Only
	return strings.HasPrefix(only, crm+"/") && only != crm+"/"+l.id.Endpoint
}

// unreadElsewhere reports whether a lane without an end has not read a message: that lane
// counts the message, even if it is not for the lane.
func (m *groupModel) unreadElsewhere(l *groupLane, seq uint64) bool {
	for _, o := range m.lanes {
		if o != l && o.end == 0 && seq > o.read && seq > o.start {
			return true
		}
	}
	return false
}

func (m *groupModel) limit(l *groupLane) uint64 {
	if l.end != 0 {
		return min(m.head(), l.end)
	}
	return m.head()
}

func (m *groupModel) exempt(seq uint64) bool { return m.log[seq-1].Type == "delete" }

// isPendingIn reports whether a message is pending in a lane.
func (m *groupModel) isPendingIn(l *groupLane, seq uint64) bool {
	if seq <= l.start || seq > m.limit(l) {
		return false
	}
	if seq > l.read {
		return true
	}
	f, ok := l.fates[seq]
	return ok && (f.status == released || f.status == leasedNow || f.status == retrying)
}

// isAddressedTo reports whether a message is pending in a lane and for it.
func (m *groupModel) isAddressedTo(o *groupLane, seq uint64) bool {
	return m.isPendingIn(o, seq) && (seq <= o.read || m.verdict(o, seq) != passed)
}

func (m *groupModel) pendingElsewhere(l *groupLane, seq uint64) bool {
	for _, o := range m.lanes {
		if o != l && (!o.endpointRemoved || l.endpointRemoved && o.number < l.number) && m.isAddressedTo(o, seq) {
			return true
		}
	}
	return false
}

// finalOrElsewhere reports whether a message is final, or pending in another lane and for it.
func (m *groupModel) finalOrElsewhere(l *groupLane, seq uint64) bool {
	for _, o := range m.lanes {
		if o != l && m.isAddressedTo(o, seq) {
			return true
		}
	}
	return m.final[seq]
}

func (m *groupModel) isUnneeded(l *groupLane, seq uint64) bool {
	return m.final[seq] || m.pendingElsewhere(l, seq)
}

// available reports whether a lease may return a message at a time.
func (m *groupModel) available(l *groupLane, seq uint64, now int64) bool {
	f, ok := l.fates[seq]
	if seq > l.read {
		if f, ok = (fate{}), m.verdict(l, seq) == unread; !ok {
			return false
		}
	}
	if !ok || l.endpointRemoved && !m.exempt(seq) && m.isUnneeded(l, seq) {
		return false
	}
	return f.available(now)
}

// sync updates the model with the messages that the lane has read or dropped, except leased
// ones.
func (m *groupModel) sync(l *groupLane) {
	for _, seq := range slices.Sorted(maps.Keys(l.fates)) {
		f := l.fates[seq]
		if f.status != released && f.status != retrying || m.IsPending(m.store, l.id, seq) {
			continue
		}
		if !l.endpointRemoved || m.exempt(seq) || !m.isUnneeded(l, seq) {
			m.Fatalf("lane %v lost message %d, which is %+v", l.id, seq, f)
		}
		l.fates[seq] = fate{status: delivered} // Settled.
	}
	read, _ := m.store.Position(l.id)
	from := l.read
	unneeded := map[uint64]bool{}
	for seq := from + 1; seq <= read; seq++ {
		unneeded[seq] = l.endpointRemoved && m.isUnneeded(l, seq)
	}
	l.read = read
	for seq := from + 1; seq <= read; seq++ {
		if seq > m.limit(l) || slices.Contains(m.gaps, seq) {
			continue
		}
		if _, leased := l.fates[seq]; leased {
			continue
		}
		switch m.verdict(l, seq) {
		case filtered:
			if !m.final[seq] {
				m.final[seq] = true
				m.counts.Filtered++
			}
		case passed:
			if !m.finalOrElsewhere(l, seq) {
				m.final[seq] = true
				if n, ok := m.handovers[seq]; ok {
					m.bury(letterLane, seq, n)
				} else if m.forSibling(l, seq) {
					m.counts.Discarded++
				}
			}
		default:
			if !unneeded[seq] {
				m.Fatalf("lane %v read message %d and did not lease it", l.id, seq)
			}
		}
	}
}

func (m *groupModel) bury(lane queue.LaneID, seq uint64, attempts int) {
	delete(m.handovers, seq)
	m.counts.DeadLettered++
	m.letters[letterID{lane, seq}] = attempts
}

func (m *groupModel) buryOrHandOver(l *groupLane, seq uint64, attempts int) (buried bool) {
	l.fates[seq] = fate{status: delivered} // Settled.
	if m.exempt(seq) {
		m.final[seq] = true
		m.bury(queue.LaneID{Source: source, Destination: crm, Endpoint: l.id.Endpoint}, seq, attempts)
		return true
	}
	if attempts == 0 && len(m.lanes) > 1 && !l.endpointRemoved {
		l.skipped++
	}
	switch {
	case m.final[seq], l.endpointRemoved && m.pendingElsewhere(l, seq):
	case m.pendingElsewhere(l, seq):
		m.handovers[seq] += attempts
		m.note("%s hands over %d after %d attempts", l.id.Endpoint, seq, attempts)
	default:
		m.final[seq] = true
		m.bury(letterLane, seq, m.handovers[seq]+attempts)
		return true
	}
	return false
}

func (m *groupModel) recordDelivered(l *groupLane, seq uint64) {
	l.fates[seq] = fate{status: delivered}
	if m.exempt(seq) {
		m.counts.Delivered++
		return
	}
	if m.final[seq] {
		return
	}
	m.final[seq] = true
	m.counts.Delivered++
	delete(m.handovers, seq)
	for _, o := range m.lanes {
		if f, ok := o.fates[seq]; ok && (f.status == retrying || f.status == released && f.due != 0) {
			o.fates[seq] = fate{status: delivered}
		}
	}
}

func (m *groupModel) someLane() *groupLane {
	if len(m.lanes) == 0 {
		return nil
	}
	names := slices.Sorted(maps.Keys(m.lanes))
	return m.lanes[names[m.rng.IntN(len(names))]]
}

func (m *groupModel) step() {
	l := m.someLane()
	switch n := m.rng.IntN(100); {
	case n < 15 || l == nil && n < 50:
		for range 1 + m.rng.IntN(6) {
			msg := m.message()
			switch m.rng.IntN(12) {
			case 0:
				msg.Skip = []string{crm}
			case 1:
				msg.Only = []string{mail, crm, crm + "/a", crm + "/c"}[m.rng.IntN(4)]
			case 2:
				msg.Type, msg.Event = "delete", ""
			}
			m.append(msg)
			m.log = append(m.log, msg)
		}
		m.note("append up to %d", m.head())
	case n < 60 && n >= 50 || l == nil:
		m.change()
	case n < 35:
		m.lease(l, 1+m.rng.IntN(9))
	case n < 40:
		m.oldest(l)
	case n < 75:
		m.settle(l)
	case n < 80:
		m.expire(l)
	case n < 88:
		m.Clock.Advance(time.Duration(m.rng.IntN(60)) * time.Second)
	case n < 92:
		if m.Trim != nil {
			m.note("trim")
			m.Trim(m.store)
		}
	case n < 97:
		m.compare()
	default:
		m.reopen()
	}
}

// change opens, ends, continues or drops a lane.
func (m *groupModel) change() {
	name := []string{"a", "b", "c"}[m.rng.IntN(3)]
	l := m.lanes[name]
	ended := uint64(0)
	for _, o := range m.lanes {
		if o.end == 0 {
			ended = 0
			break
		}
		ended = max(ended, o.end)
	}
	resume := func() {
		for seq := ended + 1; ended != 0 && seq <= m.head(); seq++ {
			m.gaps = append(m.gaps, seq)
		}
	}
	switch n := m.rng.IntN(8); {
	case l == nil:
		m.note("open %s", name)
		m.open(member(name))
		resume()
		m.lanes[name] = &groupLane{id: member(name), start: m.head(), read: m.head(), number: m.number, fates: map[uint64]fate{}}
		m.number++
	case n < 3 && m.head() > 0:
		end := []queue.End{queue.Ended, queue.EndpointRemoved}[m.rng.IntN(2)]
		m.note("end %s: %d", name, end)
		m.must(m.store.EndLane(l.id, end))
		if l.endpointRemoved = end == queue.EndpointRemoved; l.end == 0 {
			l.end = m.head()
		}
	case n < 6 && l.end != 0:
		m.note("continue %s", name)
		m.must(m.store.EndLane(l.id, queue.Active))
		resume()
		if l.read >= l.end {
			for seq := l.end + 1; seq <= m.head(); seq++ {
				l.fates[seq] = fate{status: passed}
			}
			l.read = m.head()
		}
		l.end, l.endpointRemoved = 0, false
	case n == 6:
		m.note("drop %s", name)
		m.drop(l)
	}
}

func (m *groupModel) drop(l *groupLane) {
	m.sync(l)
	m.must(m.store.DropLane(context.Background(), l.id))
	last := len(m.lanes) == 1
	for seq := l.start + 1; seq <= m.limit(l) && !last; seq++ {
		if !m.isPendingIn(l, seq) || slices.Contains(m.gaps, seq) || seq > l.read && m.unreadElsewhere(l, seq) {
			continue
		}
		if seq <= l.read && m.exempt(seq) {
			m.counts.Discarded++
		} else if !m.finalOrElsewhere(l, seq) {
			m.final[seq] = true
			delete(m.handovers, seq)
			if m.verdict(l, seq) != passed || m.forSibling(l, seq) {
				m.counts.Discarded++
			}
		}
	}
	delete(m.lanes, l.id.Endpoint)
	if last {
		m.reset()
		m.must(m.store.ForgetDestination(crm))
	}
}

func (m *groupModel) recordLease(l *groupLane, got []queue.Delivery, now int64) {
	for _, d := range got {
		if !m.available(l, d.Seq, now) {
			m.Fatalf("lane %v leased message %d, which is %+v", l.id, d.Seq, l.fates[d.Seq])
		}
		f := l.fates[d.Seq]
		if want := m.log[d.Seq-1]; d.ID != want.ID || d.Attempt != f.attempt {
			m.Fatalf("lane %v leased message %d as %s, attempt %d; want %s, %d", l.id, d.Seq, d.ID, d.Attempt, want.ID, f.attempt)
		}
	}
	for _, d := range got {
		f := l.fates[d.Seq]
		l.fates[d.Seq] = fate{leasedNow, f.attempt, f.due}
		if m.exempt(d.Seq) {
			m.final[d.Seq] = true
		}
	}
	m.sync(l)
}

func (m *groupModel) lease(l *groupLane, n int) {
	before := m.Clock.Now().UnixMilli()
	got := m.suite.lease(l.id, n)
	m.note("lease %d of %s: %v", n, l.id.Endpoint, seqs(got))
	m.recordLease(l, got, m.Clock.Now().UnixMilli())
	for seq := l.start + 1; len(got) < n && seq <= m.limit(l); seq++ {
		if m.available(l, seq, before) {
			m.Fatalf("lane %v leased %d of %d, but message %d (%+v) waits: %+v; %+v", l.id, len(got), n, seq, m.log[seq-1], l.fates[seq], m.store.LaneStats(l.id))
		}
	}
}

func (m *groupModel) oldest(l *groupLane) {
	var want uint64
	for seq := l.start + 1; want == 0 && seq <= m.limit(l); seq++ {
		if m.available(l, seq, never) {
			want = seq
		}
	}
	d, ok := m.suite.oldest(l.id)
	m.note("oldest of %s: %d", l.id.Endpoint, d.Seq)
	if d.Seq != want || ok != (want != 0) {
		m.Fatalf("the oldest of lane %v is %d, want %d", l.id, d.Seq, want)
	}
	if ok {
		m.recordLease(l, []queue.Delivery{d}, never)
	} else {
		m.sync(l)
	}
}

func (m *groupModel) settle(l *groupLane) {
	var open []uint64
	for seq, f := range l.fates {
		if f.status == leasedNow {
			open = append(open, seq)
		}
	}
	slices.Sort(open)
	m.rng.Shuffle(len(open), func(i, j int) { open[i], open[j] = open[j], open[i] })
	at := m.Clock.Now().Add(time.Duration(m.rng.IntN(60)) * time.Second)
	outcomes := [...]queue.Outcome{queue.Acked, queue.Acked, queue.Acked, queue.Acked, queue.Retried, queue.Retried, queue.Retried,
		queue.Released, queue.Buried, queue.Buried}
	var all []queue.Settlement
	for _, seq := range open[:min(len(open), 1+m.rng.IntN(6))] {
		msg := m.log[seq-1]
		all = append(all, queue.Settlement{At: at, Failure: m.failure("Rejected"), Outcome: outcomes[m.rng.IntN(len(outcomes))],
			Delivery: queue.Delivery{Lane: l.id, Seq: seq, ID: msg.ID, Type: msg.Type, Event: msg.Event, Body: msg.Body, AcceptedAt: msg.AcceptedAt,
				Attempt: l.fates[seq].attempt}})
	}
	if m.rng.IntN(2) == 0 {
		m.note("settle %d of %s together", len(all), l.id.Endpoint)
		m.must(m.store.SettleAll(l.id, all))
	} else {
		for i := range all {
			m.must(settleOne(m.store, &all[i]))
		}
	}
	for _, d := range all {
		m.note("settle %d of %s: %d", d.Seq, l.id.Endpoint, d.Outcome)
		f := l.fates[d.Seq]
		switch d.Outcome {
		case queue.Released:
			l.fates[d.Seq] = fate{released, f.attempt, f.due}
		case queue.Acked:
			m.equal("first", d.Done, m.exempt(d.Seq) || !m.final[d.Seq])
			m.recordDelivered(l, d.Seq)
		case queue.Retried:
			if l.fates[d.Seq] = (fate{retrying, f.attempt + 1, at.UnixMilli()}); m.final[d.Seq] && !m.exempt(d.Seq) {
				l.fates[d.Seq] = fate{status: delivered}
			}
		case queue.Buried:
			m.equal("buried", d.Done, m.buryOrHandOver(l, d.Seq, f.attempt+1))
		}
	}
}

func (m *groupModel) expire(l *groupLane) {
	cut := m.Clock.Now().Add(-time.Duration(m.rng.IntN(200)) * time.Second)
	n, err := m.store.BuryExpired(context.Background(), l.id, cut, m.failure("Expired"))
	m.must(err)
	m.note("bury expired of %s: %d", l.id.Endpoint, n)
	buried := 0
	read, _ := m.store.Position(l.id)
	for seq := l.start + 1; seq <= m.limit(l); seq++ {
		f, ok := l.fates[seq]
		if seq > l.read {
			f, ok = fate{}, m.verdict(l, seq) == unread && seq <= read
		}
		if !ok || f.status == leasedNow || !f.available(never) || m.log[seq-1].AcceptedAt.UnixMilli() >= cut.UnixMilli() {
			continue
		}
		if seq > l.read && m.exempt(seq) {
			m.final[seq] = true
		}
		if m.buryOrHandOver(l, seq, f.attempt) {
			buried++
		}
	}
	m.sync(l)
	if n != buried {
		m.Fatalf("%d expired messages of lane %v are dead letters, want %d", n, l.id, buried)
	}
}

func (m *groupModel) compare() {
	if len(m.lanes) == 0 {
		return
	}
	m.note("compare")
	s := m.store.LaneStats(groupID)
	m.must(s.Balance())
	m.equal("ledger of the destination", m.store.DestinationStats(crm).Ledger, s.Ledger)
	m.equal("outcomes of the group", []int64{s.Delivered, s.Filtered, s.DeadLettered, s.Discarded},
		[]int64{m.counts.Delivered, m.counts.Filtered, m.counts.DeadLettered, m.counts.Discarded})
	for _, l := range m.lanes {
		stats := m.store.LaneStats(l.id)
		m.must(stats.Balance())
		m.equal("skipped", stats.Skipped, l.skipped)
		for seq := l.start + 1; seq <= m.limit(l); seq++ {
			if has := m.IsPending(m.store, l.id, seq); has != m.isPendingIn(l, seq) {
				m.Fatalf("lane %v has message %d: %t; want the opposite: %+v", l.id, seq, has, l.fates[seq])
			}
		}
	}
	stored := map[letterID]int{}
	for _, d := range m.suite.letters(crm, "") {
		stored[letterID{d.Lane, d.Seq}] = d.Attempts
	}
	m.equal("dead letters", stored, m.letters)
}

func (m *groupModel) reopen() {
	m.note("close and open")
	m.reopenStore()
	for _, l := range m.lanes {
		m.open(l.id)
		for seq, f := range l.fates {
			switch {
			case f.due != 0 && (f.status == leasedNow || f.status == released):
				l.fates[seq] = fate{retrying, f.attempt, f.due}
			case f.status == leasedNow:
				l.fates[seq] = fate{status: released}
			}
		}
		// A retry whose message another lane delivered is in the index only if it was leased.
	}
	m.compare()
}

// drain delivers all pending messages; then no message may be pending.
func (m *groupModel) drain() {
	m.note("drain")
	for _, l := range m.lanes {
		for seq, f := range l.fates {
			if f.status == leasedNow {
				msg := m.log[seq-1]
				m.store.Release(queue.Delivery{Lane: l.id, Seq: seq, ID: msg.ID, Type: msg.Type, AcceptedAt: msg.AcceptedAt, Attempt: f.attempt})
				l.fates[seq] = fate{released, f.attempt, f.due}
			}
		}
	}
	m.Clock.Advance(time.Hour)
	for range 3 { // A message that one lane drops may be for another one.
		for _, l := range m.lanes {
			for {
				got := m.suite.lease(l.id, 7)
				for _, d := range got {
					m.store.Ack(d)
				}
				if len(got) == 0 {
					break
				}
			}
		}
	}
	if s := m.store.LaneStats(groupID); s.Pending != 0 {
		m.Fatalf("after all lanes are drained the group has %+v", s)
	}
	if m.Trim != nil {
		m.Trim(m.store)
	}
	for _, l := range m.lanes {
		if s := m.store.LaneStats(l.id); s.Pending != 0 {
			m.Fatalf("after all lanes are drained %v has %+v", l.id, s)
		}
	}
}
