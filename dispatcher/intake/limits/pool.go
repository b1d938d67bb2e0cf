package limits

import (
	"errors"
	"io"
	"sync"
)

// Pool divides a resource among namespaces: the memory of all requests in progress, or the places of
// requests to another process. The account "" has the requests without a known write key. An account may
// grow while it is not larger than the free rest: one namespace gets half, two busy ones get a third each,
// and a new one always finds a free part.
//
// A reservation never waits for another one: a request that does not fit is refused. So two
// requests that each hold a part cannot deadlock.
type Pool struct {
	// Max is the bound. It is set before the first reservation.
	Max int64

	mu       sync.Mutex
	used     int64
	accounts map[string]int64 // without accounts of 0
}

// Reservation is the part of a pool that one request uses.
type Reservation struct {
	pool    *Pool
	account string
	amount  int64
}

// For returns an empty reservation of a namespace.
func (p *Pool) For(namespace string) Reservation { return Reservation{pool: p, account: namespace} }

// Used returns the sum of all reservations.
func (p *Pool) Used() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}

// Move makes a further Grow use another account, if nothing is reserved yet.
func (r *Reservation) Move(to string) {
	if r.amount == 0 {
		r.account = to
	}
}

// Grow reserves n more; if it does not fit, it reserves nothing and reports false.
func (r *Reservation) Grow(n int64) bool {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	return r.add(n)
}

// Replace releases the reservation and reserves n of another account.
func (r *Reservation) Replace(to string, n int64) bool {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	r.clear()
	r.account = to
	return r.add(n)
}

// Release ends the reservation. It may be called more than once.
func (r *Reservation) Release() {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	r.clear()
}

// add and clear change the reservation while the lock is held.
func (r *Reservation) add(n int64) bool {
	used := r.pool.accounts[r.account]
	if used+n > r.pool.Max-(r.pool.used+n) {
		return false
	}
	if r.pool.accounts == nil {
		r.pool.accounts = map[string]int64{}
	}
	r.pool.used += n
	r.pool.accounts[r.account] = used + n
	r.amount += n
	return true
}

func (r *Reservation) clear() {
	r.pool.used -= r.amount
	if rest := r.pool.accounts[r.account] - r.amount; rest > 0 {
		r.pool.accounts[r.account] = rest
	} else {
		delete(r.pool.accounts, r.account)
	}
	r.amount = 0
}

// firstRead is the size of the first buffer of a body, whatever length the request announces: a sender that
// stops occupies little memory.
const firstRead = 4 << 10

// ErrNoMemory reports that a body does not fit into the free memory.
var ErrNoMemory = errors.New("the memory for requests is used up")

// ReadBody reads a body of the announced length, -1 if it is unknown, and at most most bytes. It reserves the
// memory for the bytes that arrive.
func ReadBody(r io.Reader, memory *Reservation, length, most int64) ([]byte, error) {
	if length < 0 || length > most {
		length = most
	}
	var body []byte
	for int64(len(body)) < length {
		if len(body) == cap(body) {
			size := min(max(2*int64(cap(body)), firstRead), length)
			if !memory.Grow(size - int64(cap(body))) {
				return nil, ErrNoMemory
			}
			grown := make([]byte, len(body), size)
			copy(grown, body)
			body = grown
		}
		n, err := r.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case errors.Is(err, io.EOF):
			return body, nil
		case err != nil:
			return nil, err
		}
	}
	return body, nil
}
