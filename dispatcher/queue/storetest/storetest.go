// Package storetest is the conformance suite of queue.Store, which every engine must pass. It
// uses engines only through queue.Store and the functions of Engine. Run runs the whole suite;
// Model, Groups and GroupsCrash compare an engine with models in memory.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Engine is a store under test.
type Engine struct {
	// Open opens the store; after a Close it opens the same store again.
	Open func(t testing.TB) queue.Store
	// Clock is the store's clock.
	Clock *Clock
	// DuplicateWindow is the store's duplicate window, at least a minute.
	DuplicateWindow time.Duration
	// Trim, when not nil, deletes all messages that no lane needs.
	Trim func(queue.Store)
	// IsPending reports whether a message of a group is pending in a lane: unread, leased,
	// released or in the retry index. Groups requires it, because the contract does not define
	// when a lane whose endpoint was removed drops the messages of other lanes.
	IsPending func(s queue.Store, lane queue.LaneID, seq uint64) bool
	// Crash, when not nil, lets Model simulate power losses.
	Crash Crasher
}

// Clock is the system clock plus the sum of all Advance calls, so that tests need not wait.
type Clock struct{ ahead atomic.Int64 }

// Now returns the time of the clock.
func (c *Clock) Now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) }

// Ahead returns how far the clock was moved ahead.
func (c *Clock) Ahead() time.Duration { return time.Duration(c.ahead.Load()) }

// Advance moves the clock ahead.
func (c *Clock) Advance(d time.Duration) { c.ahead.Add(int64(d)) }

const (
	source = "shop/web"
	crm    = "shop/crm"
	mail   = "shop/mail"
)

var lane = queue.LaneID{Source: source, Destination: crm}

// deadline bounds every wait; it is reached only when a test fails.
const deadline = 5 * time.Minute

// Run runs the suite; start returns an empty store for each test.
func Run(t *testing.T, start func(t *testing.T) Engine) {
	for _, test := range []struct {
		name string
		run  func(*suite)
	}{
		{"AppendLeaseAck", (*suite).appendLeaseAck},
		{"LeaseBytes", (*suite).leaseBytes},
		{"RetriesGetAnEighthOfBytes", (*suite).retriesGetAnEighthOfBytes},
		{"FieldsSurvive", (*suite).fieldsSurvive},
		{"NewLaneStartsBehind", (*suite).newLaneStartsBehind},
		{"LaneBeforeAnyMessage", (*suite).laneBeforeAnyMessage},
		{"LanesAreIndependent", (*suite).lanesAreIndependent},
		{"EndpointsAreLanes", (*suite).endpointsAreLanes},
		{"Reopen", (*suite).reopen},
		{"SkipAndOnly", (*suite).skipAndOnly},
		{"ManySkipped", (*suite).manySkipped},
		{"Duplicates", (*suite).duplicates},
		{"DuplicatesAfterReopen", (*suite).duplicatesAfterReopen},
		{"Redelivery", (*suite).redelivery},
		{"AppendIsAllOrNothing", (*suite).appendIsAllOrNothing},
		{"Release", (*suite).release},
		{"OldestWaiting", (*suite).oldestWaiting},
		{"Retry", (*suite).retry},
		{"EndWaits", (*suite).endWaits},
		{"SettleAll", (*suite).settleAll},
		{"SettleMany", (*suite).settleMany},
		{"LeaseDue", (*suite).leaseDue},
		{"LeaseDueAfterEndWaits", (*suite).leaseDueAfterEndWaits},
		{"RetriesGetAnEighth", (*suite).retriesGetAnEighth},
		{"ReleasedFillTheShareOfRetries", (*suite).releasedFillTheShareOfRetries},
		{"LeaseOldest", (*suite).leaseOldest},
		{"Bury", (*suite).bury},
		{"DeadLetterPaging", (*suite).deadLetterPaging},
		{"DeadLetterMark", (*suite).deadLetterMark},
		{"TrimDeadLetters", (*suite).trimDeadLetters},
		{"BuryExpired", (*suite).buryExpired},
		{"BuryExpiredMany", (*suite).buryExpiredMany},
		{"BuryExpiredReleasedRetry", (*suite).buryExpiredReleasedRetry},
		{"DropLane", (*suite).dropLane},
		{"EndLane", (*suite).endLane},
		{"GroupCountsOnce", (*suite).groupCountsOnce},
		{"GroupOmits", (*suite).groupOmits},
		{"GroupSuccessEndsRetries", (*suite).groupSuccessEndsRetries},
		{"GroupBury", (*suite).groupBury},
		{"GroupExpires", (*suite).groupExpires},
		{"GroupEndpointRemoved", (*suite).groupEndpointRemoved},
		{"GroupEndpointsRemovedInTurn", (*suite).groupEndpointsRemovedInTurn},
		{"GroupEnds", (*suite).groupEnds},
		{"GroupEndsBetweenGaps", (*suite).groupEndsBetweenGaps},
		{"GroupDelete", (*suite).groupDelete},
		{"Destinations", (*suite).destinations},
		{"PutMeta", (*suite).putMeta},
		{"SettledTwice", (*suite).settledTwice},
		{"Trace", (*suite).trace},
		{"NotifyOnAppend", (*suite).notifyOnAppend},
		{"NotifyOnRetry", (*suite).notifyOnRetry},
		{"SequenceSurvivesTrim", (*suite).sequenceSurvivesTrim},
		{"Closed", (*suite).closed},
		{"Concurrent", (*suite).concurrent},
	} {
		t.Run(test.name, func(t *testing.T) {
			x := &suite{T: t, Engine: start(t)}
			x.store = x.Open(t)
			t.Cleanup(func() {
				if err := x.store.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			})
			test.run(x)
		})
	}
	t.Run("Model", func(t *testing.T) { Model(t, 1, 600, start) })
	t.Run("Groups", func(t *testing.T) {
		seeds := uint64(20)
		if testing.Short() {
			seeds = 2
		}
		for seed := range seeds {
			t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { Groups(t, seed, 400, start) })
		}
	})
}

type suite struct {
	*testing.T
	Engine
	store queue.Store
	ids   int
}

func (x *suite) must(err error) {
	x.Helper()
	if err != nil {
		x.Fatal(err)
	}
}

// buried checks the error of Bury; the message may have been settled before.
func (x *suite) buried(_ bool, err error) {
	x.Helper()
	x.must(err)
}

func (x *suite) equal(what string, got, want any) {
	x.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		x.Fatalf("%s (-want +got):\n%s", what, diff)
	}
}

func (x *suite) reopenStore() {
	x.Helper()
	x.must(x.store.Close())
	x.store = x.Open(x)
}

func (x *suite) open(lanes ...queue.LaneID) {
	x.Helper()
	for _, l := range lanes {
		x.must(x.store.OpenLane(l))
	}
}

// message returns a message with a new ID.
func (x *suite) message(change ...func(*queue.Message)) queue.Message {
	x.ids++
	id := fmt.Sprintf("m%d", x.ids)
	m := queue.Message{Source: source, ID: id, Type: "track", Event: "Order Completed", AcceptedAt: x.Clock.Now(),
		Body: []byte(`{"messageId":"` + id + `"}`)}
	for _, c := range change {
		c(&m)
	}
	return m
}

func (x *suite) append(msgs ...queue.Message) []bool {
	x.Helper()
	dups, err := x.store.Append(context.Background(), msgs)
	x.must(err)
	if dups == nil {
		dups = make([]bool, len(msgs))
	}
	return dups
}

// add appends n messages.
func (x *suite) add(n int) {
	x.Helper()
	for range n {
		x.append(x.message())
	}
}

func (x *suite) lease(l queue.LaneID, n int) []queue.Delivery {
	x.Helper()
	got, err := x.store.Lease(l, n, nil)
	x.must(err)
	return got
}

func (x *suite) oldest(l queue.LaneID) (queue.Delivery, bool) {
	x.Helper()
	d, ok, err := x.store.LeaseOldest(l)
	x.must(err)
	return d, ok
}

func seqs(ds []queue.Delivery) []uint64 {
	var s []uint64
	for _, d := range ds {
		s = append(s, d.Seq)
	}
	return s
}

// counts are the compared numbers of LaneStats.
type counts struct {
	Accepted, Delivered, Filtered, Omitted, DeadLettered, Discarded, Pending, Retrying, InFlight int64
}

func (x *suite) ledger(l queue.LaneID, want counts) {
	x.Helper()
	s := x.store.LaneStats(l)
	got := counts{s.Accepted, s.Delivered, s.Filtered, s.Omitted, s.DeadLettered, s.Discarded, s.Pending, s.Retrying, s.InFlight}
	x.equal("ledger", got, want)
}

// stored returns the number of a destination's dead letters and their bytes.
func (x *suite) stored(destination string) (count, bytes int64) {
	s := x.store.DestinationStats(destination)
	return s.DeadLetters, s.DeadLetterBytes
}

func (x *suite) letters(destination, after string) []queue.DeadLetter {
	x.Helper()
	var all []queue.DeadLetter
	x.must(x.store.DeadLetters(context.Background(), destination, after, func(l queue.DeadLetter) bool {
		l.Body = bytes.Clone(l.Body)
		all = append(all, l)
		return true
	}))
	return all
}

func (x *suite) failure(reason string) queue.Failure {
	return queue.Failure{Time: x.Clock.Now().Truncate(time.Millisecond).UTC(), Reason: reason, StatusCode: 503, Message: "rejected",
		Response: []byte("no")}
}

func (x *suite) appendLeaseAck() {
	x.open(lane)
	x.add(10)
	x.ledger(lane, counts{Accepted: 10, Pending: 10})
	got := x.lease(lane, 4)
	x.equal("positions", seqs(got), []uint64{1, 2, 3, 4})
	for i, d := range got {
		x.equal("id", d.ID, fmt.Sprintf("m%d", i+1))
		x.equal("body", string(d.Body), `{"messageId":"`+d.ID+`"}`)
		x.equal("lane", d.Lane, lane)
		x.equal("attempt", d.Attempt, 0)
	}
	x.ledger(lane, counts{Accepted: 10, Pending: 10, InFlight: 4})
	for _, d := range slices.Backward(got) {
		x.store.Ack(d)
	}
	x.ledger(lane, counts{Accepted: 10, Delivered: 4, Pending: 6})
	prefix := []queue.Delivery{got[0]}
	rest, err := x.store.Lease(lane, 100, prefix)
	x.must(err)
	x.equal("positions", seqs(rest), []uint64{1, 5, 6, 7, 8, 9, 10})
	for _, d := range rest[1:] {
		x.store.Ack(d)
	}
	x.ledger(lane, counts{Accepted: 10, Delivered: 10})
	x.equal("leased", len(x.lease(lane, 10)), 0)
	if s := x.store.LaneStats(lane); !s.OldestPending.IsZero() {
		x.Errorf("oldest pending is %v with none pending", s.OldestPending)
	}
	x.equal("accepted", x.store.SourceStats(source).Accepted, int64(10))
}

func (x *suite) fieldsSurvive() {
	x.open(lane)
	at := time.UnixMilli(1_700_000_000_123).UTC()
	var want []queue.Delivery
	for i, m := range []queue.Message{
		{Source: source, ID: "", Type: "", Event: "", AcceptedAt: at, Body: nil},
		{Source: source, ID: strings.Repeat("i", 100), Type: "track", Event: strings.Repeat("é", 500), AcceptedAt: at, Body: bytes.Repeat([]byte{0, 1, 255}, 30_000), Skip: []string{mail, "x"}},
		{Source: source, ID: "b", Type: "a new type", Event: "e", AcceptedAt: at, Body: []byte("{}"), Only: crm},
		{Source: source, ID: "c", Type: "delete", AcceptedAt: at, Body: []byte("{}")},
		{Source: source, ID: "d", Type: "track", Event: "e", TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
			AcceptedAt: at, Body: []byte("{}")},
		{Source: source, ID: "e", Type: "a new type", TraceParent: "t", AcceptedAt: at},
		{Source: source, ID: "f", Type: "track", Event: "e", LongNumbers: true, AcceptedAt: at, Body: []byte("[1e400]")},
		{Source: source, ID: "g", Type: "track", LongNumbers: true, Skip: []string{mail, "x"}, Only: crm, TraceParent: "t", AcceptedAt: at,
			Body: []byte("[1e400]")},
	} {
		x.append(m)
		want = append(want, queue.Delivery{Lane: lane, Seq: uint64(i + 1), ID: m.ID, Type: m.Type, Event: m.Event, TraceParent: m.TraceParent,
			LongNumbers: m.LongNumbers, Body: m.Body, AcceptedAt: at})
	}
	x.equal("deliveries", x.lease(lane, 10), want)
	x.reopenStore()
	x.open(lane)
	x.equal("deliveries after a restart", x.lease(lane, 10), want)
	x.equal("oldest", x.store.LaneStats(lane).OldestPending, at)
}

func (x *suite) newLaneStartsBehind() {
	x.add(3)
	x.open(lane)
	x.ledger(lane, counts{})
	x.add(2)
	x.ledger(lane, counts{Accepted: 2, Pending: 2})
	x.position(lane, 3, 5)
	x.equal("positions", seqs(x.lease(lane, 1)), []uint64{4})
	x.position(lane, 4, 5)
	x.equal("positions", seqs(x.lease(lane, 10)), []uint64{5})
	x.position(lane, 5, 5)
	x.position(queue.LaneID{Source: source, Destination: mail}, 0, 0)
}

// A message waits until it is leased, and again when it is released before an attempt.
func (x *suite) oldestWaiting() {
	waiting := func(what string, want time.Time) {
		x.Helper()
		x.equal(what, x.store.OldestWaiting(lane).UTC(), want.UTC())
	}
	waiting("unknown lane", time.Time{})
	x.open(lane)
	waiting("lane without messages", time.Time{})
	var at []time.Time
	for n := range 3 {
		m := x.message()
		m.AcceptedAt = time.UnixMilli(int64(1_000_000 + n))
		at = append(at, m.AcceptedAt)
		x.append(m)
	}
	waiting("unread", at[0])
	got := x.lease(lane, 2)
	waiting("after a lease", at[2])
	x.store.Release(got[1])
	waiting("after a release", at[1])
	got = append(got, x.lease(lane, 10)...)
	waiting("after a lease of all", time.Time{})
	x.store.Retry(got[0], x.Clock.Now().Add(time.Hour), queue.Failure{})
	waiting("with a retry", time.Time{})
}

func (x *suite) position(id queue.LaneID, read, end uint64) {
	x.Helper()
	if r, e := x.store.Position(id); r != read || e != end {
		x.Errorf("lane %v has read %d of %d, want %d of %d", id, r, e, read, end)
	}
}

func (x *suite) laneBeforeAnyMessage() {
	x.equal("stats of a source without messages", x.store.SourceStats(source), queue.SourceStats{})
	x.equal("stats of an unknown lane", x.store.LaneStats(lane), queue.LaneStats{})
	if _, err := x.store.Lease(lane, 1, nil); !errors.Is(err, queue.ErrNoLane) {
		x.Errorf("lease of an unknown lane: %v", err)
	}
	if _, _, err := x.store.LeaseOldest(lane); !errors.Is(err, queue.ErrNoLane) {
		x.Errorf("lease of an unknown lane: %v", err)
	}
	x.open(lane, lane)
	x.equal("lanes", x.store.Lanes(), []queue.LaneID{lane})
	x.equal("leased", len(x.lease(lane, 5)), 0)
	x.reopenStore()
	x.open(lane)
	x.add(1)
	x.equal("positions", seqs(x.lease(lane, 5)), []uint64{1})
}

func (x *suite) lanesAreIndependent() {
	second := queue.LaneID{Source: source, Destination: mail}
	other := queue.LaneID{Source: "shop/ios", Destination: crm}
	x.open(lane, second, other)
	x.append(x.message(), x.message(func(m *queue.Message) { m.Source = "shop/ios" }), x.message())
	got := x.lease(lane, 10)
	x.equal("positions", seqs(got), []uint64{1, 2})
	for _, d := range got {
		x.store.Ack(d)
	}
	x.equal("positions", seqs(x.lease(second, 1)), []uint64{1})
	x.equal("positions", seqs(x.lease(other, 10)), []uint64{1})
	x.ledger(lane, counts{Accepted: 2, Delivered: 2})
	x.ledger(second, counts{Accepted: 2, Pending: 2, InFlight: 1})
	x.ledger(other, counts{Accepted: 1, Pending: 1, InFlight: 1})
	x.equal("accepted", x.store.SourceStats(source).Accepted, int64(2))
	x.equal("accepted", x.store.SourceStats("shop/ios").Accepted, int64(1))
}

func (x *suite) endpointsAreLanes() {
	a, b := lane, lane
	a.Endpoint, b.Endpoint = "primary", "backup"
	x.open(a, b)
	x.append(x.message(func(m *queue.Message) { m.Only = crm }), x.message(func(m *queue.Message) { m.Skip = []string{crm} }))
	for _, l := range []queue.LaneID{a, b} {
		got := x.lease(l, 10)
		x.equal("positions", seqs(got), []uint64{1})
		x.buried(x.store.Bury(got[0], x.failure("Rejected")))
		x.ledger(l, counts{Accepted: 2, Filtered: 1, DeadLettered: 1})
	}
	x.equal("dead letters", len(x.letters(crm, "")), 2)
}

func (x *suite) reopen() {
	second := queue.LaneID{Source: source, Destination: mail, Endpoint: "primary"}
	x.open(lane, second)
	x.add(6)
	got := x.lease(lane, 5)
	x.store.Ack(got[0])
	x.store.Ack(got[3])
	x.store.Retry(got[1], x.Clock.Now().Add(time.Hour), x.failure("TimedOut"))
	x.buried(x.store.Bury(got[2], x.failure("Rejected")))
	x.reopenStore()

	ids := x.store.Lanes()
	slices.SortFunc(ids, func(a, b queue.LaneID) int { return strings.Compare(a.Destination, b.Destination) })
	x.equal("lanes of the earlier run", ids, []queue.LaneID{lane, second})
	x.ledger(lane, counts{Accepted: 6, Delivered: 2, DeadLettered: 1, Pending: 3, Retrying: 1})
	if _, err := x.store.Lease(lane, 1, nil); !errors.Is(err, queue.ErrNoLane) {
		x.Errorf("lease of a lane that was not opened yet: %v", err)
	}
	x.open(lane)
	x.equal("messages leased at the end of the earlier run", seqs(x.lease(lane, 10)), []uint64{5, 6})
	x.Clock.Advance(time.Hour)
	d := x.lease(lane, 10)
	x.equal("retry", seqs(d), []uint64{2})
	x.equal("attempt", d[0].Attempt, 1)
	x.equal("dead letters", len(x.letters(crm, "")), 1)
	x.ledger(second, counts{Accepted: 6, Pending: 6})
}

func (x *suite) skipAndOnly() {
	second := queue.LaneID{Source: source, Destination: mail}
	x.open(lane, second)
	x.append(
		x.message(func(m *queue.Message) { m.Skip = []string{"shop/other", crm} }),
		x.message(func(m *queue.Message) { m.Only = mail }),
		x.message(func(m *queue.Message) { m.Only = crm }),
		x.message(func(m *queue.Message) { m.Skip = []string{mail} }),
		x.message(func(m *queue.Message) {
			m.Skip, m.LongNumbers = []string{queue.FilterFailed("shop/other", "b"), queue.FilterFailed(crm, "why")}, true
		}),
	)
	failed := func(all []queue.Delivery) (why []string) {
		for _, d := range all {
			why = append(why, d.FilterError)
		}
		return why
	}
	got := x.lease(lane, 10)
	x.equal("positions", seqs(got), []uint64{3, 4, 5})
	x.equal("errors of the filter", failed(got), []string{"", "", "why"})
	got = x.lease(second, 10)
	x.equal("positions", seqs(got), []uint64{1, 2, 5})
	x.equal("errors of the filter", failed(got), []string{"", "", ""})
	x.ledger(lane, counts{Accepted: 4, Filtered: 1, Pending: 3, InFlight: 3})
	x.ledger(second, counts{Accepted: 4, Filtered: 1, Pending: 3, InFlight: 3})
	x.reopenStore()
	x.ledger(lane, counts{Accepted: 4, Filtered: 1, Pending: 3})
	x.open(lane)
	x.equal("errors of the filter after a restart", failed(x.lease(lane, 10)), []string{"", "", "why"})
}

func (x *suite) manySkipped() {
	const n = 10_000
	wake := x.watch()
	x.open(lane)
	for range n / 1000 {
		var msgs []queue.Message
		for range 1000 {
			msgs = append(msgs, x.message(func(m *queue.Message) { m.Skip = []string{crm} }))
		}
		x.append(msgs...)
	}
	x.add(1)
	// A lease may return early, but then the lane is notified.
	var got []queue.Delivery
	for len(got) == 0 {
		if got = x.lease(lane, 1); len(got) == 0 {
			wake.wait(x, lane)
		}
	}
	x.equal("positions", seqs(got), []uint64{n + 1})
	x.ledger(lane, counts{Accepted: n + 1, Filtered: n, Pending: 1, InFlight: 1})
	x.store.Release(got[0])
	d, ok := x.oldest(lane)
	x.equal("oldest", []any{d.Seq, ok}, []any{uint64(n + 1), true})
}

func (x *suite) duplicates() {
	x.open(lane)
	same := func(m *queue.Message) { m.ID = "same" }
	x.equal("in one request", x.append(x.message(same), x.message(), x.message(same)), []bool{false, false, true})
	x.equal("in the next", x.append(x.message(same), x.message()), []bool{true, false})
	x.equal("all of it", x.append(x.message(same)), []bool{true})
	x.equal("of another source", x.append(x.message(same, func(m *queue.Message) { m.Source = "shop/ios" })), []bool{false})
	got := x.store.SourceStats(source)
	x.equal("counted", []int64{got.Accepted, got.Duplicates}, []int64{3, 3})
	x.equal("positions", seqs(x.lease(lane, 10)), []uint64{1, 2, 3})

	x.Clock.Advance(x.DuplicateWindow - 30*time.Second)
	x.equal("late in the window", x.append(x.message(same)), []bool{true})
	x.Clock.Advance(time.Minute)
	x.equal("after the window", x.append(x.message(same)), []bool{false})
	x.equal("and again", x.append(x.message(same)), []bool{true})

	var wait sync.WaitGroup
	var accepted atomic.Int64
	for range 16 {
		m := x.message(func(m *queue.Message) { m.ID = "at once" })
		wait.Go(func() {
			dups, err := x.store.Append(context.Background(), []queue.Message{m})
			if err != nil {
				x.Error(err)
			} else if len(dups) == 0 || !dups[0] {
				accepted.Add(1)
			}
		})
	}
	wait.Wait()
	x.equal("accepted of 16 at once", accepted.Load(), int64(1))
}

func (x *suite) duplicatesAfterReopen() {
	for i := range 500 {
		x.append(x.message(func(m *queue.Message) { m.ID = fmt.Sprint("id", i) }))
	}
	x.Clock.Advance(x.DuplicateWindow / 2)
	x.add(1)
	x.reopenStore()
	for i := range 500 {
		if dups := x.append(x.message(func(m *queue.Message) { m.ID = fmt.Sprint("id", i) })); !dups[0] {
			x.Fatalf("id%d is not a duplicate after a restart", i)
		}
		if dups := x.append(x.message(func(m *queue.Message) { m.ID = fmt.Sprint("new", i) })); dups[0] {
			x.Fatalf("new%d was dropped", i)
		}
	}
	x.Clock.Advance(x.DuplicateWindow/2 + time.Minute)
	x.equal("after the window", x.append(x.message(func(m *queue.Message) { m.ID = "id7" }),
		x.message(func(m *queue.Message) { m.ID = "new7" })), []bool{false, true})
}

func (x *suite) redelivery() {
	x.open(lane)
	m := x.message()
	again := m
	again.Only = crm
	x.equal("a redelivery is no duplicate", x.append(m, again, again), []bool{false, false, false})
	x.equal("but the call is", x.append(m), []bool{true})
	x.equal("positions", seqs(x.lease(lane, 10)), []uint64{1, 2, 3})
}

func (x *suite) appendIsAllOrNothing() {
	x.open(lane)
	if _, err := x.store.Append(context.Background(), []queue.Message{x.message(), {ID: "no source", AcceptedAt: x.Clock.Now()}}); err == nil {
		x.Error("a message without a source was accepted")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	// The message may become durable before the cancellation is noticed.
	m := x.message()
	accepted := int64(0)
	if _, err := x.store.Append(ctx, []queue.Message{m}); err == nil {
		accepted = 1
	}
	if _, err := x.store.Append(context.Background(), nil); err != nil {
		x.Errorf("nothing at all: %v", err)
	}
	x.add(1)
	x.equal("accepted", x.store.SourceStats(source).Accepted, accepted+1)
	x.equal("leased", len(x.lease(lane, 10)), int(accepted+1))
}

func (x *suite) release() {
	x.open(lane)
	x.add(5)
	got := x.lease(lane, 3)
	x.store.Release(got[2])
	x.store.Release(got[0])
	x.ledger(lane, counts{Accepted: 5, Pending: 5, InFlight: 1})
	again := x.lease(lane, 3)
	x.equal("positions", seqs(again), []uint64{1, 3, 4})
	x.equal("attempt", again[0].Attempt, 0)
	x.store.Release(got[1])
	x.store.Release(got[1]) // A second call has no effect.
	x.equal("positions", seqs(x.lease(lane, 1)), []uint64{2})

	x.store.Retry(again[0], x.Clock.Now(), x.failure("TimedOut"))
	d := x.lease(lane, 9)
	x.equal("positions", seqs(d), []uint64{5, 1})
	x.store.Release(d[1])
	d = x.lease(lane, 9)
	x.equal("positions", seqs(d), []uint64{1})
	x.equal("no attempt was counted", d[0].Attempt, 1)
	x.store.Ack(d[0])
	x.ledger(lane, counts{Accepted: 5, Delivered: 1, Pending: 4, InFlight: 4})
}

func (x *suite) retry() {
	x.open(lane)
	x.add(4)
	got := x.lease(lane, 3)
	now := x.Clock.Now()
	x.store.Retry(got[0], now.Add(2*time.Minute), x.failure("TimedOut"))
	x.store.Retry(got[1], now.Add(time.Minute), x.failure("TimedOut"))
	x.store.Retry(got[2], now.Add(time.Hour), x.failure("TimedOut"))
	x.ledger(lane, counts{Accepted: 4, Pending: 4, Retrying: 3})
	s := x.store.LaneStats(lane)
	x.equal("next retry", s.NextRetry.UnixMilli(), now.Add(time.Minute).UnixMilli())
	x.equal("oldest pending", s.OldestPending, got[0].AcceptedAt)
	x.equal("its position", s.First, got[0].Seq)
	x.equal("not yet due", seqs(x.lease(lane, 10)), []uint64{4})

	x.Clock.Advance(time.Minute)
	d := x.lease(lane, 10)
	x.equal("due", seqs(d), []uint64{2})
	x.equal("attempt", d[0].Attempt, 1)
	x.ledger(lane, counts{Accepted: 4, Pending: 4, Retrying: 2, InFlight: 2})
	x.store.Retry(d[0], x.Clock.Now().Add(10*time.Minute), x.failure("TimedOut"))

	x.Clock.Advance(time.Hour)
	d = x.lease(lane, 10)
	x.equal("by due time", seqs(d), []uint64{1, 2, 3})
	x.equal("attempts", []int{d[0].Attempt, d[1].Attempt, d[2].Attempt}, []int{1, 2, 1})
	x.equal("next retry", x.store.LaneStats(lane).NextRetry, time.Time{})
	x.store.Ack(d[1])
	x.buried(x.store.Bury(d[2], x.failure("Expired")))
	x.store.Release(d[0])
	x.ledger(lane, counts{Accepted: 4, Delivered: 1, DeadLettered: 1, Pending: 2, Retrying: 1, InFlight: 1})
	x.reopenStore()
	x.ledger(lane, counts{Accepted: 4, Delivered: 1, DeadLettered: 1, Pending: 2, Retrying: 1})
	x.open(lane)
	d = x.lease(lane, 10)
	x.equal("after a restart", seqs(d), []uint64{4, 1})
	x.equal("attempts", []int{d[0].Attempt, d[1].Attempt}, []int{0, 1})
}

// endWaits: waits of failures until a time end, oldest message first, and keep their backoff.
func (x *suite) endWaits() {
	const n = 1500
	x.open(lane)
	x.add(n + 4)
	got := x.lease(lane, n+4)
	failed := x.Clock.Now()
	retry := func(d queue.Delivery, at time.Time, backoff, wait time.Duration) {
		f := x.failure("ServerError")
		f.Time, f.Wait = at, wait
		x.store.Retry(d, at.Add(backoff+wait), f)
	}
	for i := range n {
		retry(got[n-1-i], failed, 0, time.Hour)
	}
	retry(got[n], failed, 10*time.Minute, time.Hour)       // The backoff remains.
	retry(got[n+1], failed.Add(time.Minute), 0, time.Hour) // A later failure.
	retry(got[n+2], failed, 20*time.Minute, 0)             // Not a requested wait.
	retry(got[n+3], failed, 0, time.Hour)                  // It is settled before.
	d, ok := x.oldest(lane)
	x.equal("oldest", []any{d.Seq, ok}, []any{got[0].Seq, true})
	x.store.Ack(d)
	x.Clock.Advance(2 * time.Minute)
	x.reopenStore()
	x.open(lane)
	all := 0
	for {
		ended, left, err := x.store.EndWaits(lane, failed.Add(time.Second))
		if err != nil || !left {
			x.Fatalf("EndWaits: %d, %v, %v", ended, left, err)
		}
		if all += ended; ended == 0 {
			break
		}
	}
	if all != n+2 {
		x.Errorf("%d ended waits, want %d", all, n+2)
	}
	again := x.lease(lane, n+4)
	if len(again) != n {
		x.Fatalf("%d messages are due, want %d", len(again), n)
	}
	for i, d := range again {
		want := got[i+1].Seq
		if i == n-1 {
			want = got[n+3].Seq
		}
		if d.Seq != want || d.Attempt != 1 {
			x.Fatalf("message %d: %d with attempt %d, want %d with 1", i, d.Seq, d.Attempt, want)
		}
		x.store.Ack(d)
	}
	next := x.store.LaneStats(lane).NextRetry
	if wait := next.Sub(failed); wait < 10*time.Minute-time.Second || wait > 10*time.Minute+time.Second {
		x.Errorf("the next retry is due %v after the failure, want 10m", wait)
	}
	if ended, left, err := x.store.EndWaits(lane, failed.Add(time.Hour)); ended != 1 || left || err != nil {
		x.Errorf("EndWaits of the later failure: %d, %v, %v", ended, left, err)
	}
	if rest := x.lease(lane, 4); len(rest) != 1 || rest[0].Seq != got[n+1].Seq {
		x.Errorf("after it: %+v", rest)
	}
}

func (x *suite) retriesGetAnEighth() {
	x.open(lane)
	x.add(200)
	for _, d := range x.lease(lane, 40) {
		x.store.Retry(d, x.Clock.Now(), x.failure("TimedOut"))
	}
	x.Clock.Advance(time.Second)
	for _, size := range []int{1, 3, 8, 12} {
		retries, total := 0, 0
		for total < 24 {
			got := x.lease(lane, size)
			x.equal("full", len(got), size)
			for i, d := range got {
				if d.Attempt > 0 {
					retries++
				} else if i > 0 && got[i-1].Attempt > 0 {
					x.Errorf("a first try behind a retry")
				}
				x.store.Ack(d)
			}
			total += size
		}
		if retries < total/8 || retries > total/8+1 {
			x.Errorf("leases of %d: %d retries of %d; want an eighth", size, retries, total)
		}
	}
}

func (x *suite) leaseOldest() {
	x.open(lane)
	if _, ok := x.oldest(lane); ok {
		x.Fatal("leased from an empty lane")
	}
	x.append(x.message(func(m *queue.Message) { m.Skip = []string{crm} }))
	x.add(4) // 2 to 5
	got := x.lease(lane, 3)
	x.store.Retry(got[0], x.Clock.Now().Add(time.Hour), x.failure("TimedOut"))
	x.store.Release(got[1])

	d, ok := x.oldest(lane)
	x.equal("a retry that is not due", []any{d.Seq, d.Attempt, ok}, []any{uint64(2), 1, true})
	x.equal("next retry", x.store.LaneStats(lane).NextRetry, time.Time{})
	x.store.Retry(d, x.Clock.Now().Add(2*time.Hour), x.failure("TimedOut"))
	d, _ = x.oldest(lane)
	x.equal("again", []any{d.Seq, d.Attempt}, []any{uint64(2), 2})
	d3, _ := x.oldest(lane)
	x.equal("released", d3.Seq, uint64(3))
	d5, _ := x.oldest(lane)
	x.equal("a first try", d5.Seq, uint64(5))
	if _, ok := x.oldest(lane); ok {
		x.Fatal("leased twice")
	}
	x.store.Release(d)
	d, _ = x.oldest(lane)
	x.equal("released", []any{d.Seq, d.Attempt}, []any{uint64(2), 2})
	x.store.Ack(d)
	x.ledger(lane, counts{Accepted: 5, Filtered: 1, Delivered: 1, Pending: 3, InFlight: 3})
}

func (x *suite) bury() {
	x.open(lane)
	x.append(x.message(), x.message(func(m *queue.Message) { m.Type, m.Event = "group", "" }))
	got := x.lease(lane, 2)
	x.store.Retry(got[1], x.Clock.Now(), x.failure("TimedOut"))
	x.Clock.Advance(time.Second)
	got[1] = x.lease(lane, 1)[0]
	f0 := x.failure("Rejected")
	x.buried(x.store.Bury(got[0], f0))
	x.Clock.Advance(time.Second)
	f1 := x.failure("TimedOut")
	f1.Response, f1.Redact = nil, []byte(`{"drop":["a"]}`)
	x.buried(x.store.Bury(got[1], f1))
	x.buried(x.store.Bury(got[1], f1)) // A second call has no effect.
	want := []queue.DeadLetter{
		{Lane: lane, Seq: 1, ID: "m1", Type: "track", Event: "Order Completed", Body: got[0].Body, AcceptedAt: got[0].AcceptedAt, Attempts: 1,
			Failure: f0},
		{Lane: lane, Seq: 2, ID: "m2", Type: "group", Body: got[1].Body, AcceptedAt: got[1].AcceptedAt, Attempts: 2, Failure: f1},
	}
	for range 2 {
		letters := x.letters(crm, "")
		for i := range letters {
			if letters[i].Key == "" {
				x.Error("a dead letter has no key")
			}
			want[i].Key = letters[i].Key
		}
		x.equal("dead letters", letters, want)
		x.ledger(lane, counts{Accepted: 2, DeadLettered: 2})
		count, size := x.stored(crm)
		if count != 2 || size <= int64(len(want[0].Body)) {
			x.Errorf("stats are %d, %d bytes", count, size)
		}
		x.reopenStore()
	}
	x.must(x.store.DeleteDeadLetters(context.Background(), crm, want[0].Key, want[0].Key, "no such key"))
	x.equal("dead letters", x.letters(crm, ""), want[1:])
	x.must(x.store.DeleteDeadLetters(context.Background(), crm, want[0].Key, want[1].Key))
	x.equal("dead letters", x.letters(crm, ""), want[:0])
	count, size := x.stored(crm)
	x.equal("stats", []int64{count, size}, []int64{0, 0})
	x.ledger(lane, counts{Accepted: 2, DeadLettered: 2})
}

func (x *suite) deadLetterPaging() {
	x.open(lane)
	const n = 450
	for range n / 50 {
		x.add(50)
		for _, d := range x.lease(lane, 50) {
			x.buried(x.store.Bury(d, x.failure("Rejected")))
		}
		x.Clock.Advance(time.Second)
	}
	all := x.letters(crm, "")
	x.equal("dead letters", len(all), n)
	if !slices.IsSortedFunc(all, func(a, b queue.DeadLetter) int { return strings.Compare(a.Key, b.Key) }) {
		x.Error("keys do not ascend")
	}
	x.equal("from a key on", x.letters(crm, all[99].Key), all[100:])
	var some int
	x.must(x.store.DeadLetters(context.Background(), crm, "", func(l queue.DeadLetter) bool {
		if some++; some%7 == 0 { // Deletion during the listing.
			x.must(x.store.DeleteDeadLetters(context.Background(), crm, l.Key))
		}
		return some < 300
	}))
	x.equal("seen", some, 300)
	count, _ := x.stored(crm)
	x.equal("left", count, int64(n-42))
	x.equal("of another destination", len(x.letters("shop/cr", "")), 0)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := x.store.DeadLetters(ctx, crm, "", func(queue.DeadLetter) bool { return true }); !errors.Is(err, context.Canceled) {
		x.Errorf("cancelled listing: %v", err)
	}
}

// Every dead letter has a key behind the marks that were taken before it, also if its failure has the
// same time or an earlier one.
func (x *suite) deadLetterMark() {
	x.open(lane)
	mark := func() string {
		key, err := x.store.DeadLetterMark(crm)
		x.must(err)
		return key
	}
	empty := mark()
	x.equal("second mark without a dead letter", mark(), empty)
	first := x.failure("Rejected")
	earlier := first
	earlier.Time = first.Time.Add(-time.Hour)
	marks := []string{empty}
	for _, f := range []queue.Failure{first, first, earlier, first} {
		x.add(1)
		x.buried(x.store.Bury(x.lease(lane, 1)[0], f))
		marks = append(marks, mark())
		x.equal("second mark after a dead letter", mark(), marks[len(marks)-1])
		if len(marks) == 4 {
			x.reopenStore()
			x.equal("mark after a restart", mark(), marks[3])
			x.open(lane)
		}
	}
	for i, letter := range x.letters(crm, "") {
		x.equal("position", letter.Seq, uint64(i+1))
		if letter.Key <= marks[i] || letter.Key >= marks[i+1] {
			x.Errorf("dead letter %d has the key %s; want one between the marks %s and %s", i+1, letter.Key, marks[i], marks[i+1])
		}
		x.equal("dead letters behind a mark", len(x.letters(crm, marks[i])), 4-i)
	}
	letters := x.letters(crm, "")
	x.equal("time of a failure", letters[2].Failure.Time, earlier.Time)
	x.must(x.store.DeleteDeadLetters(context.Background(), crm, letters[3].Key))
	x.equal("mark after a deletion", mark(), marks[4])
}

func (x *suite) trimDeadLetters() {
	x.open(lane)
	for range 10 {
		x.add(1)
		x.buried(x.store.Bury(x.lease(lane, 1)[0], x.failure("Rejected")))
		x.Clock.Advance(time.Hour)
	}
	_, size := x.stored(crm)
	young := x.Clock.Now()
	trim := func(before time.Time, maxBytes int64) int {
		n, err := x.store.TrimDeadLetters(context.Background(), crm, before, young, maxBytes)
		x.must(err)
		return n
	}
	x.equal("nothing to do", trim(x.Clock.Now().Add(-11*time.Hour), size), 0)
	x.equal("by age", trim(x.Clock.Now().Add(-7*time.Hour-time.Minute), size), 3)
	half := size/2 + size/20
	young = x.Clock.Now().Add(-8 * time.Hour)
	x.equal("by size, but none that is young", trim(x.Clock.Now().Add(-11*time.Hour), 0), 0)
	young = x.Clock.Now()
	x.equal("by size", trim(x.Clock.Now().Add(-11*time.Hour), half), 2)
	letters := x.letters(crm, "")
	x.equal("left", len(letters), 5)
	x.equal("oldest left", letters[0].Seq, uint64(6))
	x.reopenStore()
	count, left := x.stored(crm)
	if count != 5 || left <= 0 || left > half {
		x.Errorf("stats are %d, %d bytes; want 5 and up to %d bytes", count, left, half)
	}
	x.equal("all", trim(x.Clock.Now(), 0), 5)
	count, left = x.stored(crm)
	x.equal("stats", []int64{count, left}, []int64{0, 0})

	// The clock was a year ahead for a while.
	x.open(lane)
	bury := func(ahead time.Duration) {
		x.add(1)
		f := x.failure("Rejected")
		f.Time = f.Time.Add(ahead)
		x.buried(x.store.Bury(x.lease(lane, 1)[0], f))
	}
	bury(365 * 24 * time.Hour)
	_, err := x.store.DeadLetterMark(crm)
	x.must(err)
	bury(0) // Its key is behind the mark.
	x.Clock.Advance(time.Hour)
	young = x.Clock.Now().Add(-2 * time.Hour)
	x.equal("young ones after a wrong clock", trim(young.Add(-time.Minute), 0), 0)
	young = x.Clock.Now()
	x.equal("by age after a wrong clock", trim(x.Clock.Now().Add(-time.Minute), 1<<30), 2)

	// Behind the mark, the age of a message that waited for long counts from its failure.
	x.add(1)
	accepted := x.Clock.Now()
	x.Clock.Advance(3 * time.Hour)
	x.buried(x.store.Bury(x.lease(lane, 1)[0], x.failure("Expired")))
	young = x.Clock.Now()
	x.equal("accepted long ago, failed now", trim(accepted.Add(time.Hour), 1<<30), 0)
	x.equal("accepted and failed long ago", trim(x.Clock.Now().Add(time.Minute), 1<<30), 1)
}

func (x *suite) buryExpired() {
	x.open(lane)
	x.add(3) // 1 leased, 2 retried, 3 released
	got := x.lease(lane, 3)
	x.store.Retry(got[1], x.Clock.Now().Add(24*time.Hour), x.failure("TimedOut"))
	x.store.Release(got[2])
	x.append(x.message(func(m *queue.Message) { m.Skip = []string{crm} })) // 4 is filtered
	x.add(1)                                                               // 5 is unread
	x.Clock.Advance(time.Hour)
	cut := x.Clock.Now().Add(-time.Minute)
	x.add(2) // 6 and 7 are not expired
	f := queue.Failure{Time: cut.Truncate(time.Millisecond).UTC(), Reason: "Expired", Message: "too old", Redact: []byte(`{"drop":["a"]}`)}
	n, err := x.store.BuryExpired(context.Background(), lane, cut, f)
	x.must(err)
	x.equal("buried", n, 3)
	x.ledger(lane, counts{Accepted: 7, Filtered: 1, DeadLettered: 3, Pending: 3, InFlight: 1})
	x.equal("next retry", x.store.LaneStats(lane).NextRetry, time.Time{})
	attempts := map[uint64]int{}
	for _, l := range x.letters(crm, "") {
		attempts[l.Seq] = l.Attempts
		x.equal("reason", l.Failure.Reason, "Expired")
		x.equal("rules of redaction", string(l.Failure.Redact), `{"drop":["a"]}`)
		x.equal("response, which other rules may have redacted", string(l.Failure.Response), "")
		x.equal("body", string(l.Body), `{"messageId":"`+l.ID+`"}`)
	}
	x.equal("attempts", attempts, map[uint64]int{2: 1, 3: 0, 5: 0})
	n, err = x.store.BuryExpired(context.Background(), lane, cut, f)
	x.must(err)
	x.equal("buried again", n, 0)
	x.store.Ack(got[0])
	x.equal("left", seqs(x.lease(lane, 10)), []uint64{6, 7})
	if _, err := x.store.BuryExpired(context.Background(), queue.LaneID{Source: source, Destination: "shop/none"}, cut, f); !errors.Is(err,
		queue.ErrNoLane) {
		x.Errorf("unknown lane: %v", err)
	}
}

func (x *suite) buryExpiredMany() {
	x.open(lane)
	const n = 3000
	for range n / 500 {
		var msgs []queue.Message
		for range 500 {
			msgs = append(msgs, x.message())
		}
		x.append(msgs...)
	}
	for i, d := range x.lease(lane, 1000) {
		if i%2 == 0 {
			x.store.Retry(d, x.Clock.Now().Add(time.Hour), x.failure("TimedOut"))
		} else {
			x.store.Release(d)
		}
	}
	x.Clock.Advance(time.Minute)
	buried, err := x.store.BuryExpired(context.Background(), lane, x.Clock.Now(), x.failure("Expired"))
	x.must(err)
	x.equal("buried", buried, n)
	x.ledger(lane, counts{Accepted: n, DeadLettered: n})
	seen := map[uint64]bool{}
	for _, l := range x.letters(crm, "") {
		seen[l.Seq] = true
	}
	x.equal("dead letters", len(seen), n)
	x.equal("left", len(x.lease(lane, 10)), 0)
	x.reopenStore()
	x.ledger(lane, counts{Accepted: n, DeadLettered: n})
}

// Released messages use the part of the retries' share for which no retry is due.
func (x *suite) releasedFillTheShareOfRetries() {
	x.open(lane)
	x.add(20)
	got := x.lease(lane, 20)
	x.store.Retry(got[0], x.Clock.Now(), x.failure("TimedOut"))
	for _, d := range got[1:] {
		x.store.Release(d)
	}
	x.Clock.Advance(time.Second)
	x.equal("messages before the retry's share", len(x.lease(lane, 5)), 5)
	x.equal("messages", len(x.lease(lane, 11)), 11)
	x.equal("the rest", len(x.lease(lane, 11)), 4)
}

func (x *suite) buryExpiredReleasedRetry() {
	x.open(lane)
	x.add(1)
	x.Clock.Advance(time.Hour)
	second := x.Clock.Now()
	x.add(1)
	got := x.lease(lane, 2)
	x.store.Retry(got[0], x.Clock.Now(), x.failure("TimedOut"))
	x.store.Retry(got[1], x.Clock.Now().Add(24*time.Hour), x.failure("TimedOut"))
	x.store.Release(x.lease(lane, 2)[0])
	n, err := x.store.BuryExpired(context.Background(), lane, second, x.failure("Expired"))
	x.must(err)
	x.equal("buried", n, 1)
	x.equal("oldest", x.store.LaneStats(lane).OldestPending.UnixMilli(), got[1].AcceptedAt.UnixMilli())
	d, ok := x.oldest(lane)
	x.equal("oldest leased", []any{d.Seq, ok}, []any{uint64(2), true})
}

func (x *suite) dropLane() {
	second := queue.LaneID{Source: source, Destination: mail}
	x.open(lane, second)
	x.add(4)
	got := x.lease(lane, 3)
	x.buried(x.store.Bury(got[0], x.failure("Rejected")))
	x.store.Retry(got[1], x.Clock.Now(), x.failure("TimedOut"))
	x.must(x.store.DropLane(context.Background(), lane))
	if err := x.store.DropLane(context.Background(), lane); !errors.Is(err, queue.ErrNoLane) {
		x.Errorf("dropped twice: %v", err)
	}
	x.equal("lanes", x.store.Lanes(), []queue.LaneID{second})
	x.ledger(lane, counts{})
	if _, err := x.store.Lease(lane, 1, nil); !errors.Is(err, queue.ErrNoLane) {
		x.Errorf("lease of a dropped lane: %v", err)
	}
	x.store.Ack(got[2])
	x.equal("dead letters", len(x.letters(crm, "")), 1)
	dropped := queue.Ledger{Accepted: 4, DeadLettered: 1, Discarded: 3}
	waits := queue.Ledger{Accepted: 4, Pending: 4}
	for range 2 {
		x.equal("ledger of the destination", x.store.DestinationStats(crm).Ledger, dropped)
		x.equal("ledger of the source", x.store.SourceStats(source).Ledger, dropped.Plus(waits))
		x.reopenStore()
	}
	x.open(lane, second)
	x.ledger(lane, counts{})
	x.add(1)
	x.equal("ledger of the destination", x.store.DestinationStats(crm).Ledger, dropped.Plus(queue.Ledger{Accepted: 1, Pending: 1}))
	x.equal("after it was opened again", seqs(x.lease(lane, 10)), []uint64{5})
	x.equal("the other lane", seqs(x.lease(second, 10)), []uint64{1, 2, 3, 4, 5})

	// A lane of an earlier run can be dropped without being opened.
	x.reopenStore()
	x.must(x.store.DropLane(context.Background(), second))
	x.reopenStore()
	x.equal("lanes", x.store.Lanes(), []queue.LaneID{lane})
}

func (x *suite) endLane() {
	other := queue.LaneID{Source: source, Destination: mail}
	if err := x.store.EndLane(lane, queue.Ended); !errors.Is(err, queue.ErrNoLane) {
		x.Errorf("end of an unknown lane: %v", err)
	}
	x.open(lane, other)
	x.add(4)
	got := x.lease(lane, 3)
	x.store.Ack(got[0])
	x.store.Retry(got[1], x.Clock.Now(), x.failure("TimedOut"))
	x.must(x.store.EndLane(lane, queue.Ended))
	x.add(3)
	x.must(x.store.EndLane(lane, queue.Ended)) // The lane keeps its end.
	for range 2 {
		s := x.store.LaneStats(lane)
		x.equal("ledger", s.Ledger, queue.Ledger{Accepted: 4, Delivered: 1, Pending: 3})
		x.equal("ended", s.Ended, true)
		x.reopenStore()
		x.open(lane, other)
	}
	x.Clock.Advance(time.Second)
	got = x.lease(lane, 10)
	slices.SortFunc(got, func(a, b queue.Delivery) int { return int(a.Seq) - int(b.Seq) })
	x.equal("positions", seqs(got), []uint64{2, 3, 4})
	for _, d := range got {
		x.store.Ack(d)
	}
	x.equal("leased behind the end", len(x.lease(lane, 10)), 0)
	if _, ok := x.oldest(lane); ok {
		x.Error("there is an oldest message behind the end")
	}
	n, err := x.store.BuryExpired(context.Background(), lane, x.Clock.Now().Add(time.Hour), x.failure("Expired"))
	x.must(err)
	x.equal("buried behind the end", n, 0)
	x.equal("ledger", x.store.LaneStats(lane), queue.LaneStats{Ended: true, Ledger: queue.Ledger{Accepted: 4, Delivered: 4}})
	x.equal("the other lane", seqs(x.lease(other, 10)), []uint64{1, 2, 3, 4, 5, 6, 7})

	// The ended lane does not prevent a trim of later messages.
	x.reopenStore()
	x.open(lane, other)
	for _, d := range x.lease(other, 6) {
		x.store.Ack(d)
	}
	if x.Trim != nil {
		x.Trim(x.store)
		x.reopenStore()
		x.open(lane, other)
	}
	x.must(x.store.EndLane(lane, queue.Active))
	x.add(1)
	got = x.lease(lane, 10)
	x.equal("positions after the lane continues", seqs(got), []uint64{8})
	x.store.Ack(got[0])
	x.equal("ledger", x.store.LaneStats(lane), queue.LaneStats{Ledger: queue.Ledger{Accepted: 5, Delivered: 5}})

	// A lane that has not read all messages before its end continues with all messages.
	x.add(1)
	x.must(x.store.EndLane(lane, queue.Ended))
	x.add(1)
	x.must(x.store.EndLane(lane, queue.Active))
	x.equal("positions after the lane continues", seqs(x.lease(lane, 10)), []uint64{9, 10})
}

func (x *suite) destinations() {
	list := func() []string {
		names := x.store.Destinations()
		slices.Sort(names)
		return names
	}
	second := queue.LaneID{Source: source, Destination: mail}
	x.equal("at first", list(), []string(nil))
	x.open(lane, second)
	x.add(2)
	x.buried(x.store.Bury(x.lease(lane, 1)[0], x.failure("Rejected")))
	x.must(x.store.DropLane(context.Background(), lane))
	x.must(x.store.DropLane(context.Background(), second))
	for range 2 {
		x.equal("with dead letters, and with the ledger of a dropped lane", list(), []string{crm, mail})
		x.reopenStore()
	}
	for _, name := range []string{crm, mail, "shop/unknown"} {
		x.must(x.store.ForgetDestination(name))
		x.equal("ledger", x.store.DestinationStats(name).Ledger, queue.Ledger{})
	}
	x.equal("with dead letters", list(), []string{crm})
	x.equal("sources without lanes", x.store.Sources(), []string{source})
	x.equal("ledger of the source", x.store.SourceStats(source).Ledger, queue.Ledger{Accepted: 4, DeadLettered: 1, Discarded: 3})
	n, err := x.store.TrimDeadLetters(context.Background(), crm, x.Clock.Now().Add(time.Hour), x.Clock.Now(), 0)
	x.must(err)
	x.equal("trimmed", n, 1)
	x.reopenStore()
	x.equal("in the end", list(), []string(nil))
}

func (x *suite) putMeta() {
	x.must(x.store.PutMeta("a", []byte("1")))
	x.must(x.store.PutMeta("b", []byte("2")))
	x.must(x.store.PutMeta("c", []byte{}))
	x.must(x.store.PutMeta("a", []byte("3")))
	x.must(x.store.PutMeta("b", nil))
	x.must(x.store.PutMeta("never", nil))
	if x.store.PutMeta("", nil) == nil || x.store.PutMeta(strings.Repeat("x", 1<<20), nil) == nil {
		x.Error("an invalid name was accepted")
	}
	for range 2 {
		got, err := x.store.AllMeta()
		x.must(err)
		x.equal("values", got, map[string][]byte{"a": []byte("3"), "c": {}})
		x.reopenStore()
	}
}

func (x *suite) settledTwice() {
	x.open(lane)
	x.add(2)
	got := x.lease(lane, 2)
	x.store.Ack(got[0])
	x.store.Ack(got[0])
	x.store.Retry(got[0], x.Clock.Now(), x.failure("TimedOut"))
	x.buried(x.store.Bury(got[0], x.failure("Rejected")))
	x.store.Release(got[0])
	x.ledger(lane, counts{Accepted: 2, Delivered: 1, Pending: 1, InFlight: 1})
	x.store.Release(got[1])
	x.store.Ack(got[1]) // It is not leased.
	x.ledger(lane, counts{Accepted: 2, Delivered: 1, Pending: 1})
	x.equal("left", seqs(x.lease(lane, 10)), []uint64{2})
	x.equal("dead letters", len(x.letters(crm, "")), 0)
}

// watcher counts the notifications of lanes.
type watcher struct {
	mu       sync.Mutex
	seen     map[queue.LaneID]int
	notified chan struct{}
	taken    map[queue.LaneID]int
}

func (x *suite) watch() *watcher {
	w := &watcher{seen: map[queue.LaneID]int{}, taken: map[queue.LaneID]int{}, notified: make(chan struct{}, 1)}
	x.store.SetNotify(func(l queue.LaneID) {
		w.mu.Lock()
		w.seen[l]++
		w.mu.Unlock()
		select {
		case w.notified <- struct{}{}:
		default:
		}
	})
	return w
}

func (w *watcher) count(l queue.LaneID) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen[l]
}

// wait waits for a notification that no earlier wait returned for.
func (w *watcher) wait(x *suite, l queue.LaneID) {
	x.Helper()
	timeout := time.After(deadline)
	for {
		if w.count(l) > w.taken[l] {
			w.taken[l]++
			return
		}
		select {
		case <-w.notified:
		case <-timeout:
			x.Fatalf("lane %v was not notified", l)
		}
	}
}

func (x *suite) notifyOnAppend() {
	second := queue.LaneID{Source: source, Destination: mail}
	w := x.watch()
	x.open(lane, second)
	x.lease(lane, 1)
	x.lease(second, 1)
	x.add(1)
	w.wait(x, lane)
	w.wait(x, second)
	x.add(3)
	x.equal("notifications before the next lease", w.count(lane), 1)
	x.equal("leased", len(x.lease(lane, 4)), 4)
	x.add(1)
	x.equal("notifications after a full lease", w.count(lane), 1)
	x.equal("leased", len(x.lease(lane, 4)), 1)
	x.add(1)
	w.wait(x, lane)
	x.append(x.message(func(m *queue.Message) { m.Source = "shop/ios" }))
	x.equal("notifications for other logs", w.count(second), 1)
}

func (x *suite) notifyOnRetry() {
	w := x.watch()
	x.open(lane)
	x.add(2)
	w.wait(x, lane)
	got := x.lease(lane, 10)
	x.store.Retry(got[0], x.Clock.Now().Add(time.Hour), x.failure("TimedOut"))
	x.store.Retry(got[1], x.Clock.Now().Add(30*time.Millisecond), x.failure("TimedOut"))
	w.wait(x, lane)
	due := x.lease(lane, 10)
	for len(due) == 0 { // The notification of an append can be later than the first lease.
		w.wait(x, lane)
		due = x.lease(lane, 10)
	}
	x.equal("due", seqs(due), []uint64{2})
	if n := w.count(lane); n > 3 {
		x.Errorf("notifications: got %d, want one of the retry and at most one of each append", n)
	}

	// The lane is also notified of retries of an earlier run.
	x.store.Retry(got[1], x.Clock.Now(), x.failure("TimedOut"))
	x.reopenStore()
	w = x.watch()
	x.open(lane)
	if got := x.lease(lane, 10); len(got) == 0 {
		w.wait(x, lane)
		x.equal("due", len(x.lease(lane, 10)), 1)
	}
}

func (x *suite) sequenceSurvivesTrim() {
	x.open(lane)
	for round := range 3 {
		x.add(20)
		got := x.lease(lane, 100)
		x.equal("first of the round", got[0].Seq, uint64(20*round+1))
		for _, d := range got {
			x.store.Ack(d)
		}
		if x.Trim != nil {
			x.Trim(x.store)
			x.equal("bytes of a trimmed log", x.store.SourceStats(source).LogBytes, int64(0))
		}
		x.reopenStore()
		x.open(lane)
		n := int64(20 * (round + 1))
		x.ledger(lane, counts{Accepted: n, Delivered: n})
		x.equal("accepted", x.store.SourceStats(source).Accepted, n)
	}
	x.must(x.store.DropLane(context.Background(), lane))
	x.add(5)
	if x.Trim != nil {
		x.Trim(x.store) // The log has no lane.
		x.equal("bytes of a log without lanes", x.store.SourceStats(source).LogBytes, int64(0))
	}
	x.reopenStore()
	x.open(lane)
	x.add(1)
	x.equal("positions", seqs(x.lease(lane, 10)), []uint64{66})
}

func (x *suite) closed() {
	x.open(lane)
	x.add(2)
	got := x.lease(lane, 1)
	x.must(x.store.Close())
	x.must(x.store.Close())
	ctx := context.Background()
	_, appendErr := x.store.Append(ctx, []queue.Message{x.message()})
	_, leaseErr := x.store.Lease(lane, 1, nil)
	_, _, oldestErr := x.store.LeaseOldest(lane)
	_, expireErr := x.store.BuryExpired(ctx, lane, x.Clock.Now(), queue.Failure{})
	_, trimErr := x.store.TrimDeadLetters(ctx, crm, x.Clock.Now(), x.Clock.Now(), 0)
	_, buryErr := x.store.Bury(got[0], queue.Failure{})
	_, dueErr := x.store.LeaseDue(lane, x.Clock.Now(), 1, 1, nil)
	for name, err := range map[string]error{
		"Append": appendErr, "Lease": leaseErr, "LeaseOldest": oldestErr, "BuryExpired": expireErr, "TrimDeadLetters": trimErr,
		"OpenLane":          x.store.OpenLane(lane),
		"DropLane":          x.store.DropLane(ctx, lane),
		"Bury":              buryErr,
		"LeaseDue":          dueErr,
		"SettleAll":         x.store.SettleAll(lane, []queue.Settlement{{Delivery: got[0], Outcome: queue.Acked}}),
		"DeadLetters":       x.store.DeadLetters(ctx, crm, "", func(queue.DeadLetter) bool { return true }),
		"DeleteDeadLetters": x.store.DeleteDeadLetters(ctx, crm, "x"),
	} {
		if !errors.Is(err, queue.ErrClosed) {
			x.Errorf("%s after Close: %v", name, err)
		}
	}
	x.store.Ack(got[0])
	x.store.Release(got[0])
	x.store.Retry(got[0], x.Clock.Now(), queue.Failure{})
	x.store.LaneStats(lane)
	x.store = x.Open(x)
	x.open(lane)
	x.equal("nothing is settled after Close", seqs(x.lease(lane, 10)), []uint64{1, 2})
}

// concurrent runs many producers, and workers that settle messages in all possible ways. Both
// lanes must deliver or bury each message exactly once.
func (x *suite) concurrent() {
	const producers, each = 8, 150
	lanes := []queue.LaneID{lane, {Source: source, Destination: mail}}
	w := x.watch()
	x.open(lanes...)
	var producing sync.WaitGroup
	for p := range producers {
		producing.Go(func() {
			for i := 0; i < each; i += 3 {
				var msgs []queue.Message
				for j := range 3 {
					id := fmt.Sprintf("%d-%d", p, i+j)
					msgs = append(msgs, queue.Message{Source: source, ID: id, Type: "track", AcceptedAt: x.Clock.Now(), Body: []byte(id)})
				}
				if _, err := x.store.Append(context.Background(), msgs); err != nil {
					x.Error(err)
				}
			}
		})
	}
	var working sync.WaitGroup
	for _, l := range lanes {
		var mu sync.Mutex
		done := map[string]int{}
		for worker := range 3 {
			working.Go(func() {
				limit := time.Now().Add(deadline)
				for n := worker; ; n++ {
					mu.Lock()
					finished := len(done) == producers*each
					mu.Unlock()
					if finished || time.Now().After(limit) {
						return
					}
					got, err := x.store.Lease(l, 1+n%20, nil)
					if err != nil {
						x.Error(err)
						return
					}
					if len(got) == 0 {
						if n%5 == 0 {
							if d, ok, _ := x.store.LeaseOldest(l); ok {
								got = append(got, d)
							}
						}
						if len(got) == 0 {
							select {
							case <-w.notified:
							case <-time.After(5 * time.Millisecond):
							}
						}
					}
					for i, d := range got {
						if string(d.Body) != d.ID {
							x.Errorf("message %q has the body of %q", d.ID, d.Body)
						}
						switch (i + n) % 11 {
						case 0:
							x.store.Release(d)
						case 1:
							x.store.Retry(d, x.Clock.Now().Add(time.Duration(n%3)*time.Millisecond), x.failure("TimedOut"))
						case 2:
							if _, err := x.store.Bury(d, x.failure("Rejected")); err != nil {
								x.Error(err)
							}
							mu.Lock()
							done[d.ID]++
							mu.Unlock()
						default:
							x.store.Ack(d)
							mu.Lock()
							done[d.ID]++
							mu.Unlock()
						}
					}
				}
			})
		}
		x.Cleanup(func() {
			if len(done) != producers*each {
				x.Errorf("lane %v: %d of %d messages were settled", l, len(done), producers*each)
			}
			for id, n := range done {
				if n != 1 {
					x.Errorf("lane %v: message %s was settled %d times", l, id, n)
				}
			}
		})
	}
	producing.Wait()
	working.Wait()
	for _, l := range lanes {
		s := x.store.LaneStats(l)
		count, _ := x.stored(l.Destination)
		if s.Accepted != producers*each || s.Delivered+s.DeadLettered != s.Accepted || s.Pending != 0 || s.DeadLettered != count {
			x.Errorf("lane %v: ledger %+v with %d dead letters", l, s, count)
		}
	}
}

// trace finds messages in each state: by the index, and after the duplicate window by reading the log.
func (x *suite) trace() {
	other := queue.LaneID{Source: source, Destination: mail}
	x.open(lane, other)
	from := x.Clock.Now()
	filtered := func(m *queue.Message) { m.Skip = []string{crm} }
	only := func(m *queue.Message) { m.Only = mail }
	x.append(x.message(), x.message(filtered), x.message(), x.message(), x.message(), x.message(only), x.message())
	ds := x.lease(lane, 4)
	x.equal("leased", seqs(ds), []uint64{1, 3, 4, 5})
	x.store.Ack(ds[0])
	due := x.Clock.Now().Add(time.Hour).Truncate(time.Millisecond).UTC()
	x.store.Retry(ds[1], due, x.failure("Timeout"))
	x.buried(x.store.Bury(ds[2], x.failure("Rejected")))
	want := map[string][]queue.LaneTrace{
		"m1": {{Lane: lane, State: queue.TraceEnded}, {Lane: other, State: queue.TraceWaiting}},
		"m2": {{Lane: lane, State: queue.TraceFiltered}, {Lane: other, State: queue.TraceWaiting}},
		"m3": {{Lane: lane, State: queue.TraceRetrying, Due: due, Attempts: 1}, {Lane: other, State: queue.TraceWaiting}},
		"m4": {{Lane: lane, State: queue.TraceEnded}, {Lane: other, State: queue.TraceWaiting}},
		"m5": {{Lane: lane, State: queue.TraceInFlight}, {Lane: other, State: queue.TraceWaiting}},
		"m7": {{Lane: lane, State: queue.TraceWaiting}, {Lane: other, State: queue.TraceWaiting}},
	}
	trace := func(id string, since time.Time) queue.TraceResult {
		x.Helper()
		r, err := x.store.Trace(context.Background(), id, since)
		x.must(err)
		for i := range r.Traces {
			slices.SortFunc(r.Traces[i].Lanes, func(a, b queue.LaneTrace) int { return strings.Compare(a.Lane.Destination, b.Lane.Destination) })
		}
		return r
	}
	check := func(what string, since time.Time) {
		x.Helper()
		for id, lanes := range want {
			r := trace(id, since)
			if len(r.Traces) != 1 || !r.Complete {
				x.Fatalf("%s: trace of %s: got %+v, want one", what, id, r)
			}
			t := r.Traces[0]
			x.equal(what+": lanes of "+id, t.Lanes, lanes)
			x.equal(what+": message "+id, []any{t.Source, fmt.Sprint("m", t.Seq), t.Type, t.Event}, []any{source, id, "track", "Order Completed"})
		}
		x.equal(what+": unknown", len(trace("m99", since).Traces), 0)
	}
	check("by the index", time.Time{})
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if r, err := x.store.Trace(ended, "m3", time.Time{}); err != nil || r.Complete || len(r.Traces) > 0 {
		x.Errorf("by the index, after the end of the context: got %+v, %v, want an incomplete result", r, err)
	}
	for range 2 { // The index loses the messages that are older than the window with a later one.
		x.Clock.Advance(2 * x.DuplicateWindow)
		x.add(1)
	}
	x.equal("old, without a time", len(trace("m3", time.Time{}).Traces), 0)
	check("by reading", from)
	x.equal("a redelivery", trace("m6", from).Traces[0].Lanes, []queue.LaneTrace{{Lane: other, State: queue.TraceWaiting}})
	x.equal("accepted before", len(trace("m3", from.Add(x.DuplicateWindow)).Traces), 0)
	if r, err := x.store.Trace(ended, "m99", from); err != nil || r.Complete {
		x.Errorf("after the end of the context: got %+v, %v, want an incomplete result", r, err)
	}

	// A search finds pending messages alone, and reports when a bound ended it.
	search := func(ctx context.Context, since time.Time, max int) (ids []string, complete bool) {
		x.Helper()
		r, err := x.store.Search(ctx, func(body []byte) bool { return len(body) > 0 }, since, max)
		x.must(err)
		for _, t := range r.Traces {
			ids = append(ids, t.ID)
		}
		return ids, r.Complete
	}
	ids, complete := search(context.Background(), time.Time{}, 100)
	x.equal("search", ids, []string{"m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "m9"})
	x.equal("search: complete", complete, true)
	ids, complete = search(context.Background(), time.Time{}, 2)
	x.equal("search for 2", ids, []string{"m1", "m2"})
	x.equal("search for 2: complete", complete, false)
	ids, complete = search(context.Background(), from.Add(x.DuplicateWindow), 2)
	x.equal("search since", ids, []string{"m8", "m9"})
	x.equal("search since: complete", complete, true)
	_, complete = search(ended, time.Time{}, 100)
	x.equal("search after the end of the context: complete", complete, false)
	none, err := x.store.Search(context.Background(), func([]byte) bool { return false }, time.Time{}, 100)
	x.must(err)
	x.equal("search without a match", []any{len(none.Traces), none.Scanned, none.Complete}, []any{0, 9, true})

	// A removed message is known by the index only.
	x.add(1)
	for _, l := range []queue.LaneID{lane, other} {
		for ds := x.lease(l, 100); len(ds) > 0; ds = x.lease(l, 100) {
			for _, d := range ds {
				x.store.Ack(d)
			}
		}
	}
	x.store.Ack(ds[3])
	x.Clock.Advance(time.Hour) // The retry is due.
	for _, d := range x.lease(lane, 1) {
		x.store.Ack(d)
	}
	ids, _ = search(context.Background(), time.Time{}, 100)
	x.equal("search after all messages ended", len(ids), 0)
	x.Trim(x.store)
	removed := trace("m10", time.Time{})
	if len(removed.Traces) != 1 || removed.Traces[0].Seq != 0 || len(removed.Traces[0].Lanes) != 0 ||
		removed.Traces[0].AcceptedAt.Before(from) {
		x.Errorf("a removed message: got %+v, want its Source and time alone", removed)
	}

	// The bound is reached at the end of one Source's log, and another one was not read.
	second := queue.LaneID{Source: source + "2", Destination: mail}
	x.open(second)
	x.append(x.message(), x.message(func(m *queue.Message) { m.Source = second.Source }))
	for max, whole := range map[int]bool{1: false, 2: true, 3: true} {
		ids, complete := search(context.Background(), time.Time{}, max)
		x.equal(fmt.Sprintf("messages of two Sources, search for %d", max), len(ids), min(max, 2))
		x.equal(fmt.Sprintf("messages of two Sources, search for %d: complete", max), complete, whole)
	}
}
