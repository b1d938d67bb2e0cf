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
	// configBurst is the number of changes of one namespace's live config that are written
	// immediately, and configsPerSecond the rate of further ones.
	configBurst      = 20
	configsPerSecond = 2
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

// configBudget bounds the writes of each namespace's live config, so that many edits in one namespace
// do not use up the capacity of the API server. While a namespace has no token, it is not compiled,
// so its edits need one write together.
type configBudget struct {
	rate  rate.Limit
	burst int

	mu          sync.Mutex
	byNamespace map[string]*rate.Limiter
}

func newConfigBudget(limit rate.Limit, burst int) *configBudget {
	return &configBudget{rate: limit, burst: burst, byNamespace: map[string]*rate.Limiter{}}
}

// wait returns the time until a namespace has a token; 0 if it has one.
func (b *configBudget) wait(namespace string) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.byNamespace[namespace]
	if l == nil {
		return 0
	}
	missing := 1 - l.Tokens()
	if missing <= 0 {
		return 0
	}
	return max(time.Duration(missing/float64(b.rate)*float64(time.Second)), time.Millisecond)
}

// take takes a token of a namespace. It must have one.
func (b *configBudget) take(namespace string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.byNamespace[namespace]
	if l == nil {
		l = rate.NewLimiter(b.rate, b.burst)
		b.byNamespace[namespace] = l
	}
	l.Allow()
}

// forget removes the data about a namespace without a live config.
func (b *configBudget) forget(namespace string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.byNamespace, namespace)
}
