package controllers

import (
	"hash/fnv"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// transitionBurst is the number of transitions that are written immediately, and
	// transitionsPerSecond the rate of further ones.
	transitionBurst      = 500
	transitionsPerSecond = 100
	// numbersPerSecond is the rate of the writes of numbers without a transition.
	numbersPerSecond = 20
)

// writeBudget bounds the status writes of the operator over all namespaces. Transitions
// and numbers have separate token buckets, so numbers never delay a transition. Within a
// bucket, the objects are served in the order in which they asked.
type writeBudget struct{ transitions, numbers *bucket }

func newWriteBudget() writeBudget {
	return writeBudget{
		transitions: &bucket{limiter: rate.NewLimiter(transitionsPerSecond, transitionBurst)},
		numbers:     &bucket{limiter: rate.NewLimiter(numbersPerSecond, 1)},
	}
}

// bucket is a token bucket for passes that run side by side and began at different times. A
// rate.Limiter gives tokens twice if its time goes back.
type bucket struct {
	mu      sync.Mutex
	limiter *rate.Limiter
	latest  time.Time
}

// reserve takes a token and returns the time at which it may be used.
func (b *bucket) reserve(now time.Time) time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	// After the clock was set back, waits must not last until the old time.
	if now.After(b.latest) || b.latest.Sub(now) > maxPass {
		b.latest = now
	}
	return b.latest.Add(b.limiter.ReserveN(b.latest, 1).DelayFrom(b.latest))
}

// maxPass is longer than any status pass.
const maxPass = 5 * time.Minute

// permit is an object's reservation of one write in a bucket. Its zero value is none. It
// remains until the write succeeds, so that a retry needs no further token.
type permit struct {
	reserved time.Time
	delay    time.Duration
}

// wait reserves a write, unless the permit is one already, and returns the wait for it;
// at most zero if the object may be written now.
func (p *permit) wait(b *bucket, now time.Time) time.Duration {
	if p.reserved.IsZero() {
		*p = permit{reserved: now, delay: max(0, b.reserve(now).Sub(now))}
	}
	return remaining(p.delay, p.reserved, now)
}

// jitter returns a constant part of an interval for an object, at most a quarter, so that
// objects that were written at the same time do not remain in phase.
func jitter(uid types.UID, interval time.Duration) time.Duration {
	h := fnv.New64a()
	_, _ = h.Write([]byte(uid))
	return time.Duration(float64(interval/4) * float64(h.Sum64()>>11) / (1 << 53))
}
