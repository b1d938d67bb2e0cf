package ingest

import "sync"

// memoryLimiter bounds the memory of all requests in progress. Each Source has an account; the
// requests without a known write key share one. An account may grow while it is not larger than the
// remaining free memory: a single Source gets half, two busy Sources get a third each, and a new
// Source always finds free memory.
//
// A reservation never waits for another one: a request that does not fit is refused. So two
// requests that each hold a part of the memory cannot deadlock.
type memoryLimiter struct {
	mu   sync.Mutex
	used int64
}

// account is the memory that one Source uses; the limiter's lock guards it.
type account struct{ used int64 }

// reservation is the memory that one request uses of an account.
type reservation struct {
	limiter *memoryLimiter
	account *account
	bytes   int64
}

// grow reserves n more bytes; if they do not fit, it reserves nothing and reports false.
func (r *reservation) grow(n, limit int64) bool {
	r.limiter.mu.Lock()
	defer r.limiter.mu.Unlock()
	return r.take(n, limit)
}

func (r *reservation) take(n, limit int64) bool {
	if r.account.used+n > limit-(r.limiter.used+n) {
		return false
	}
	r.limiter.used += n
	r.account.used += n
	r.bytes += n
	return true
}

// replace releases the reservation and reserves n bytes of another account.
func (r *reservation) replace(to *account, n, limit int64) bool {
	r.limiter.mu.Lock()
	defer r.limiter.mu.Unlock()
	r.give()
	r.account = to
	return r.take(n, limit)
}

// release may be called more than once.
func (r *reservation) release() {
	r.limiter.mu.Lock()
	defer r.limiter.mu.Unlock()
	r.give()
}

func (r *reservation) give() {
	r.limiter.used -= r.bytes
	r.account.used -= r.bytes
	r.bytes = 0
}

// held returns the memory of all requests.
func (m *memoryLimiter) held() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.used
}
