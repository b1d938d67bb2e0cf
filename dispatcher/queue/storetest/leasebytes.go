package storetest

import (
	"strings"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// largeBody is the size of a body of which eight reach queue.MaxLeaseBytes.
const largeBody = queue.MaxLeaseBytes / 8

func (x *suite) addLarge(n int) {
	for range n {
		x.append(x.message(func(m *queue.Message) { m.Body = []byte(`{"x":"` + strings.Repeat("x", largeBody-8) + `"}`) }))
	}
}

// leaseBytes checks that a lease ends at queue.MaxLeaseBytes, whether its messages are first attempts, released, or
// retries, and that none is lost.
func (x *suite) leaseBytes() {
	x.open(lane)
	x.addLarge(20)
	x.equal("a large message", seqs(x.lease(lane, 1)), []uint64{1})
	first := x.lease(lane, 64)
	x.equal("first attempts", seqs(first), []uint64{2, 3, 4, 5, 6, 7, 8, 9})
	second := x.lease(lane, 64)
	for _, d := range append(first, second...) {
		x.store.Release(d)
	}
	first = x.lease(lane, 64)
	x.equal("released messages", seqs(first), []uint64{2, 3, 4, 5, 6, 7, 8, 9})
	second = x.lease(lane, 64)
	x.equal("released messages of the next lease", seqs(second), []uint64{10, 11, 12, 13, 14, 15, 16, 17})
	for _, d := range append(first, second...) {
		x.store.Retry(d, x.Clock.Now(), x.failure("TimedOut"))
	}
	x.Clock.Advance(time.Second)
	rest := 3 + len(first) + len(second)
	x.addLarge(20)
	for retries, leases := 0, 0; rest+20 > 0; leases++ {
		got := x.lease(lane, 64)
		if len(got) == 0 || len(got) > 8 || leases == 10 {
			x.Fatalf("lease %d has %d messages, with %d left", leases, len(got), rest+20)
		}
		for _, d := range got {
			retries += d.Attempt
			rest--
			x.store.Ack(d)
		}
		if leases == 1 && retries < 2 {
			x.Errorf("the first two leases have %d retries, want one in eight", retries)
		}
	}
	x.ledger(lane, counts{Accepted: 40, Delivered: 39, Pending: 1, InFlight: 1})
}

// retriesGetAnEighthOfBytes checks that leases that end at queue.MaxLeaseBytes have an eighth of retries, not more, and
// that released messages remain the next ones.
func (x *suite) retriesGetAnEighthOfBytes() {
	x.open(lane)
	x.addLarge(40)
	for range 5 {
		for _, d := range x.lease(lane, 64) {
			x.store.Retry(d, x.Clock.Now().Add(time.Minute), x.failure("TimedOut"))
		}
	}
	x.Clock.Advance(2 * time.Minute)
	x.addLarge(90)
	var retries []queue.Delivery
	next, due := uint64(41), uint64(1)
	for ; due <= 10; next, due = next+7, due+1 {
		got := x.lease(lane, 64)
		x.equal("first attempts and a retry", seqs(got), []uint64{next, next + 1, next + 2, next + 3, next + 4, next + 5, next + 6, due})
		retries = append(retries, got[7])
	}
	for _, d := range retries {
		x.store.Release(d)
	}
	x.equal("released retries and a due one", seqs(x.lease(lane, 64)), []uint64{1, 2, 3, 4, 5, 6, 7, due})
	x.equal("released retries, first attempts and a due one", seqs(x.lease(lane, 64)),
		[]uint64{8, 9, 10, next, next + 1, next + 2, next + 3, due + 1})
	x.ledger(lane, counts{Accepted: 130, Pending: 130, Retrying: 28, InFlight: 86})
}
