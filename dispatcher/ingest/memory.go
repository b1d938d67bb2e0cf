package ingest

import "sync"

// memoryLimiter bounds the memory that all requests in progress hold together.
// Each Source, and all requests without a known write key together, has an
// account. An account may grow as long as it is not larger than what remains for
// the others: one Source alone gets half, two that flood get a third each, and a
// new Source always finds room.
//
// A reservation never waits for another one: what does not fit is refused. So two
// requests that each hold a part of the memory cannot wait for each other.
type memoryLimiter struct {
	mu   sync.Mutex
	used int64
}

// account is what one Source holds; the limiter's lock guards it.
type account struct{ used int64 }

// reservation is what one request holds of an account.
type reservation struct {
	limiter *memoryLimiter
	account *account
	bytes   int64
}

// grow reserves n bytes more, or none and reports false.
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

// held is how much all requests hold.
func (m *memoryLimiter) held() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.used
}
