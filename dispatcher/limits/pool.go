package limits

import "sync"

// Memory bounds the memory of all requests in progress. Each Source has an account; the requests
// without a known write key share one. An account may grow while it is not larger than the
// remaining free memory: a single Source gets half, two busy Sources get a third each, and a new
// Source always finds free memory.
//
// A reservation never waits for another one: a request that does not fit is refused. So two
// requests that each hold a part of the memory cannot deadlock.
type Memory struct {
	// Max is the bound in bytes. It is set before the first reservation.
	Max int64

	mu   sync.Mutex
	used int64
}

// Account is the memory that one Source uses. The lock of the Memory guards it.
type Account struct{ used int64 }

// Reservation is the memory that one request uses of an account.
type Reservation struct {
	memory  *Memory
	account *Account
	bytes   int64
}

// For returns an empty reservation of an account.
func (m *Memory) For(a *Account) Reservation { return Reservation{memory: m, account: a} }

// Used returns the memory of all requests in bytes.
func (m *Memory) Used() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.used
}

// Move makes a further Grow use another account, if nothing is reserved yet.
func (r *Reservation) Move(to *Account) {
	if r.bytes == 0 {
		r.account = to
	}
}

// Grow reserves n more bytes; if they do not fit, it reserves nothing and reports false.
func (r *Reservation) Grow(n int64) bool {
	r.memory.mu.Lock()
	defer r.memory.mu.Unlock()
	return r.add(n)
}

// Replace releases the reservation and reserves n bytes of another account.
func (r *Reservation) Replace(to *Account, n int64) bool {
	r.memory.mu.Lock()
	defer r.memory.mu.Unlock()
	r.clear()
	r.account = to
	return r.add(n)
}

// Release ends the reservation. It may be called more than once.
func (r *Reservation) Release() {
	r.memory.mu.Lock()
	defer r.memory.mu.Unlock()
	r.clear()
}

// add and clear change the reservation while the lock is held.
func (r *Reservation) add(n int64) bool {
	if r.account.used+n > r.memory.Max-(r.memory.used+n) {
		return false
	}
	r.memory.used += n
	r.account.used += n
	r.bytes += n
	return true
}

func (r *Reservation) clear() {
	r.memory.used -= r.bytes
	r.account.used -= r.bytes
	r.bytes = 0
}
