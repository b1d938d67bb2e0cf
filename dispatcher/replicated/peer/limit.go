package peer

import (
	"sync"
	"time"
)

const (
	// CallLimit is the time within which an owner must answer a call. It is longer than the election of a server
	// of the log, during which calls wait for their acknowledgement.
	CallLimit = 15 * time.Second
	// AdminLimit is the time within which an owner must begin its answer to a request to the admin API. A search
	// for a message can take a while.
	AdminLimit = time.Minute
	// leastRate is the rate, in bytes per second, at which an owner must read a long body.
	leastRate = 64 << 10
)

// timeLimit bounds the time for which a request waits for the owner, as opposed to the client. A body
// that is read extends the time at leastRate, up to the limit. So an owner that stops is detected within
// the limit, whatever it has read before.
type timeLimit struct {
	limit time.Duration

	mu    sync.Mutex
	timer *time.Timer
	// left is the time that the owner has at since, which is zero while the client is waited for.
	left  time.Duration
	since time.Time
}

// newTimeLimit calls exceeded when the owner has taken too long, unless stop is called before.
func newTimeLimit(limit time.Duration, exceeded func()) *timeLimit {
	return &timeLimit{limit: limit, left: limit, since: time.Now(), timer: time.AfterFunc(limit, exceeded)}
}

// pause begins a wait for the client.
func (l *timeLimit) pause() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer.Stop() {
		l.left -= time.Since(l.since)
		l.since = time.Time{}
	}
}

// resume ends a wait for the client, which has sent n bytes.
func (l *timeLimit) resume(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.since.IsZero() {
		return // The limit was exceeded, or stop was called.
	}
	l.left = min(l.left+time.Duration(n)*time.Second/leastRate, l.limit)
	l.since = time.Now()
	l.timer.Reset(l.left)
}

// stop ends the limit.
func (l *timeLimit) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer.Stop()
	l.since = time.Now()
}
