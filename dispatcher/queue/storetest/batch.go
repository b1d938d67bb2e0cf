package storetest

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// none is an empty list of positions.
var none []uint64

// settleOne settles a message by the method of its outcome.
func settleOne(s queue.Store, m *queue.Settlement) (err error) {
	switch m.Outcome {
	case queue.Released:
		s.Release(m.Delivery)
	case queue.Acked:
		m.Done = s.Ack(m.Delivery)
	case queue.Retried:
		s.Retry(m.Delivery, m.At, m.Failure)
	case queue.Buried:
		m.Done, err = s.Bury(m.Delivery, m.Failure)
	}
	return err
}

// retryAll retries messages together.
func (x *suite) retryAll(l queue.LaneID, got []queue.Delivery, at time.Time, f queue.Failure) {
	x.Helper()
	var all []queue.Settlement
	for _, d := range got {
		all = append(all, queue.Settlement{Delivery: d, Outcome: queue.Retried, At: at, Failure: f})
	}
	x.must(x.store.SettleAll(l, all))
}

// settleAll settles messages by all outcomes together; a message that is not leased, or was settled before, is ignored.
func (x *suite) settleAll() {
	x.open(lane)
	x.add(7)
	got := x.lease(lane, 6)
	omitted := got[1]
	omitted.Omitted = true
	failure := x.failure("Rejected")
	all := []queue.Settlement{
		{Delivery: got[0], Outcome: queue.Acked},
		{Delivery: omitted, Outcome: queue.Acked},
		{Delivery: got[2], Outcome: queue.Retried, At: x.Clock.Now().Add(time.Minute), Failure: failure},
		{Delivery: got[3], Outcome: queue.Buried, Failure: failure},
		{Delivery: got[4], Outcome: queue.Released},
		{Delivery: got[0], Outcome: queue.Buried, Failure: failure, Done: true},
		{Delivery: got[2], Outcome: queue.Acked, Done: true},
		{Delivery: got[4], Outcome: queue.Acked, Done: true},
		{Delivery: queue.Delivery{Lane: lane, Seq: 7}, Outcome: queue.Acked, Done: true},
	}
	for _, done := range [][]int{{0, 1, 3}, nil} { // The second time no message is leased.
		x.must(x.store.SettleAll(lane, all))
		var got []int
		for i := range all {
			if all[i].Done {
				got = append(got, i)
			}
		}
		x.equal("done", got, done)
		x.ledger(lane, counts{Accepted: 7, Delivered: 1, Omitted: 1, DeadLettered: 1, Pending: 4, Retrying: 1, InFlight: 1})
	}
	x.must(x.store.SettleAll(lane, nil))
	x.reopenStore()
	x.open(lane)
	x.ledger(lane, counts{Accepted: 7, Delivered: 1, Omitted: 1, DeadLettered: 1, Pending: 4, Retrying: 1})
	letters := x.letters(crm, "")
	x.equal("dead letters", letters, []queue.DeadLetter{{Key: letters[0].Key, Lane: lane, Seq: 4, ID: "m4", Type: "track",
		Event: "Order Completed", Body: got[3].Body, AcceptedAt: got[3].AcceptedAt, Attempts: 1, Failure: failure}})
	x.equal("the rest", seqs(x.lease(lane, 10)), []uint64{5, 6, 7})
	x.Clock.Advance(time.Hour)
	x.equal("the retry", seqs(x.lease(lane, 10)), []uint64{3})
	if err := x.store.SettleAll(queue.LaneID{Source: source, Destination: mail}, all); !errors.Is(err, queue.ErrNoLane) {
		x.Errorf("settle messages of a lane that is not open: got error %v, want %v", err, queue.ErrNoLane)
	}
}

// settleMany retries, leases and buries a batch of the largest size.
func (x *suite) settleMany() {
	const n, size = 4000, 1 << 10
	x.open(lane)
	for i := range n / 500 {
		var msgs []queue.Message
		for range 500 {
			msgs = append(msgs, x.message(func(m *queue.Message) { m.Body = bytes.Repeat([]byte{byte('a' + i)}, size) }))
		}
		x.append(msgs...)
	}
	var got []queue.Delivery
	for len(got) < n {
		got = append(got, x.lease(lane, n)...)
	}
	at := x.Clock.Now().Add(time.Minute)
	x.retryAll(lane, got, at, x.failure("TimedOut"))
	x.ledger(lane, counts{Accepted: n, Pending: n, Retrying: n})
	x.reopenStore()
	x.open(lane)
	got, err := x.store.LeaseDue(lane, at, n, n*size, nil)
	x.must(err)
	var all []queue.Settlement
	for i, d := range got {
		if d.Seq != uint64(i+1) || d.Attempt != 1 || len(d.Body) != size || d.Body[0] != byte('a'+i/500) {
			x.Fatalf("message %d of %d: got position %d, attempt %d, %d bytes", i, len(got), d.Seq, d.Attempt, len(d.Body))
		}
		all = append(all, queue.Settlement{Delivery: d, Outcome: queue.Buried, Failure: x.failure("Rejected")})
	}
	x.equal("leased messages", len(all), n)
	x.must(x.store.SettleAll(lane, all))
	for range 2 {
		x.ledger(lane, counts{Accepted: n, DeadLettered: n})
		x.equal("dead letters", len(x.letters(crm, "")), n)
		x.reopenStore()
	}
}

// leaseDue leases the retries of one due time, waiting or released.
func (x *suite) leaseDue() {
	x.open(lane)
	x.add(8)
	x.addLarge(4)
	got := x.lease(lane, 12)
	x.equal("due time of a first attempt", got[0].Due, time.Time{})
	now := x.Clock.Now()
	early, late := now.Add(time.Minute).Truncate(time.Millisecond), now.Add(time.Hour)
	x.retryAll(lane, append(got[8:12:12], got[1], got[3]), early, x.failure("TimedOut"))
	x.retryAll(lane, []queue.Delivery{got[6], got[2], got[4]}, late, x.failure("TimedOut"))
	due := func(at time.Time, n, maxBytes int) []queue.Delivery {
		x.Helper()
		got, err := x.store.LeaseDue(lane, at, n, maxBytes, nil)
		x.must(err)
		return got
	}
	x.equal("another time", seqs(due(early.Add(time.Millisecond), 10, math.MaxInt)), none)
	x.equal("no messages", seqs(due(early, 0, math.MaxInt)), none)
	x.equal("no bytes", seqs(due(early, 10, 1)), none)
	x.reopenStore()
	x.open(lane)
	x.equal("next retry", x.store.LaneStats(lane).NextRetry.Equal(early), true)
	first := due(early, 3, math.MaxInt)
	x.equal("before the time", seqs(first), []uint64{2, 4, 9})
	x.equal("due time", first[0].Due.Equal(early), true)
	x.equal("rest", seqs(due(early, 10, 2*largeBody+largeBody/2)), []uint64{10, 11})
	x.equal("next retry", x.store.LaneStats(lane).NextRetry.Equal(early), true)
	x.equal("the last one", seqs(due(early, 10, math.MaxInt)), []uint64{12})
	x.equal("next retry", x.store.LaneStats(lane).NextRetry.UnixMilli(), late.UnixMilli())
	for _, d := range first {
		x.store.Release(d)
	}
	x.equal("released", seqs(due(early, 2, math.MaxInt)), []uint64{2, 4})
	x.equal("released and too large", seqs(due(early, 1, largeBody-1)), none)
	d, ok := x.oldest(lane)
	x.equal("oldest", []any{d.Seq, ok}, []any{uint64(1), true})
	x.ledger(lane, counts{Accepted: 12, Pending: 12, Retrying: 4, InFlight: 6})
	x.equal("the released one remains the next one", seqs(x.lease(lane, 3)), []uint64{6, 8, 9})
	x.equal("later", seqs(due(late, 10, math.MaxInt)), []uint64{3, 5, 7})
	x.ledger(lane, counts{Accepted: 12, Pending: 12, InFlight: 12})
	x.equal("leased", seqs(due(late, 10, math.MaxInt)), none)
	x.equal("next retry", x.store.LaneStats(lane).NextRetry, time.Time{})
}

// leaseDueAfterEndWaits leases retries whose waits have ended: their due time is another one.
func (x *suite) leaseDueAfterEndWaits() {
	x.open(lane)
	x.add(4)
	f := x.failure("TooManyRequests")
	f.Wait = time.Hour
	at := f.Time.Add(time.Hour)
	x.retryAll(lane, x.lease(lane, 3), at, f)
	if ended, left, err := x.store.EndWaits(lane, f.Time); ended != 3 || left || err != nil {
		x.Fatalf("EndWaits: got %d, %v, %v; want 3 ended waits", ended, left, err)
	}
	got, err := x.store.LeaseDue(lane, at, 10, math.MaxInt, nil)
	x.must(err)
	x.equal("at the former time", seqs(got), none)
	d, ok := x.oldest(lane)
	x.equal("oldest", []any{d.Seq, d.Attempt, ok}, []any{uint64(1), 1, true})
	got, err = x.store.LeaseDue(lane, d.Due, 10, math.MaxInt, []queue.Delivery{d})
	x.must(err)
	x.equal("with the rest", seqs(got), []uint64{1, 2, 3})
}

// BatchCrash settles large batches until the power fails. Of each batch all outcomes must survive or none, and none of a
// batch after one that was lost; the ledger must agree with them.
func BatchCrash(t *testing.T, seed uint64, start func(t *testing.T) Engine) {
	const batches, size, maxBody = 6, 40, 50 << 10
	x := &suite{T: t, Engine: start(t)}
	x.store = x.Open(t)
	defer func() { _ = x.store.Close() }()
	rng := rand.New(rand.NewPCG(seed, 3))
	x.open(lane)
	for range batches * size {
		x.append(x.message(func(m *queue.Message) { m.Body = bytes.Repeat([]byte("x"), rng.IntN(maxBody)) }))
	}
	all := make([][]queue.Settlement, batches)
	for i := range all {
		for len(all[i]) < size {
			for _, d := range x.lease(lane, size-len(all[i])) {
				all[i] = append(all[i], queue.Settlement{Delivery: d, At: x.Clock.Now().Add(time.Minute), Failure: x.failure("Rejected"),
					Outcome: queue.Acked + queue.Outcome(rng.IntN(3))})
			}
		}
	}
	settled := 0
	x.Crash.Arm(rng, 60)
	for ; settled < batches && !x.Crash.Crashed(); settled++ {
		x.must(x.store.SettleAll(lane, all[settled]))
		if rng.IntN(3) == 0 {
			x.add(1) // A sync.
		}
	}
	for !x.Crash.Crashed() {
		x.add(1)
	}
	x.Crash.Recover(t, x.store)
	x.store = x.Open(t)
	x.open(lane)

	ledger := x.store.LaneStats(lane).Ledger
	x.must(ledger.Balance())
	survived := map[uint64]queue.Outcome{}
	for _, l := range x.letters(crm, "") {
		survived[l.Seq] = queue.Buried
	}
	waiting := map[uint64]bool{}
	for d, ok := x.oldest(lane); ok; d, ok = x.oldest(lane) {
		if waiting[d.Seq] = true; d.Attempt > 0 {
			survived[d.Seq] = queue.Retried
		}
	}
	want := queue.Ledger{Accepted: ledger.Accepted, Pending: int64(len(waiting))}
	lost := false
	for i, batch := range all {
		kept := 0
		for _, m := range batch {
			got := survived[m.Seq]
			if got == queue.Released && !waiting[m.Seq] {
				got = queue.Acked
			}
			switch got {
			case queue.Released:
				continue
			case queue.Acked:
				want.Delivered++
			case queue.Buried:
				want.DeadLettered++
			}
			if kept++; got != m.Outcome {
				t.Errorf("seed %d: outcome of message %d: got %d, want %d", seed, m.Seq, got, m.Outcome)
			}
		}
		if kept != 0 && (kept != size || lost || i > settled) {
			t.Errorf("seed %d: batch %d of %d has %d of %d outcomes; an earlier one is lost: %t", seed, i, settled, kept, size, lost)
		}
		lost = lost || kept == 0
	}
	x.equal("ledger", ledger, want)
}
