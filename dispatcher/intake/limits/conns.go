package limits

import (
	"cmp"
	"container/heap"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// byteTime is the credit per received byte: a client that sends 17 KB/s, so that a body of 500
	// KB takes 30 s, does not fall behind.
	byteTime = 60 * time.Microsecond
	// answerTime is the credit of a request that waits for its response, because storage may take
	// that long.
	answerTime = 30 * time.Second
	// maxHeads bounds the heads of all requests that are read or in progress.
	maxHeads = 16 << 20
)

// Conns bounds the open connections of a server. When there is one too many, it closes the
// connection that is furthest behind: its client has kept Posthorn waiting longest for a request or
// for the rest of one, less the credit for every byte received meanwhile. A connection with a
// complete request is closed only after it has waited for its response for answerTime; if all
// others are busy, the new connection is closed instead. In the same order, Hold bounds the heads of
// requests.
type Conns struct {
	most int

	mu    sync.Mutex
	conns connHeap
	heads int // sum of the heads of conns
}

// NewConns returns a limiter of at most that many open connections.
func NewConns(most int) *Conns { return &Conns{most: most} }

// Conn is the progress of one connection. One goroutine at a time reports what was received.
type Conn struct {
	// close ends the connection. It may block.
	close func() error

	// since is the start of the present wait for the client, in nanoseconds: for a request, or for
	// the rest of one. received counts the bytes since then.
	since, received atomic.Int64
	// complete is true while a completely read request is not answered.
	complete atomic.Bool

	// State of Conns, guarded by its lock.
	rank  int64
	index int // in the heap; -1 when the connection is not counted
	heads int // bytes of the head that is read, and of the heads of requests in progress
}

// NewConn returns the progress of a connection that closeConn closes. It is counted from its state
// http.StateNew on.
func NewConn(closeConn func() error) *Conn { return &Conn{close: closeConn, index: -1} }

// Received adds bytes that were received.
func (c *Conn) Received(bytes int) { c.received.Add(int64(bytes)) }

// RequestEnded marks the end of a request that was read completely.
func (c *Conn) RequestEnded() {
	c.StreamEnded()
	c.complete.Store(true)
}

// StreamEnded marks the end of one of several concurrent requests: a new wait for the client starts.
func (c *Conn) StreamEnded() { c.begin(time.Now().UnixNano()) }

// begin starts a wait for the client.
func (c *Conn) begin(now int64) {
	c.since.Store(now)
	c.received.Store(0)
}

// Len returns the number of counted connections.
func (l *Conns) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.conns)
}

// Follow handles a server's ConnState events.
func (l *Conns) Follow(c *Conn, state http.ConnState) {
	now := time.Now().UnixNano()
	l.mu.Lock()
	defer l.mu.Unlock()
	switch state {
	case http.StateNew:
		c.begin(now)
		c.rank = now
		heap.Push(&l.conns, c)
		if len(l.conns) > l.most {
			l.closeOne(now)
		}
	case http.StateActive:
		if !c.complete.Load() {
			c.begin(now)
		}
	case http.StateIdle:
		c.complete.Store(false)
		c.begin(now)
		if c.index >= 0 && c.rank > now {
			c.rank = now
			heap.Fix(&l.conns, c.index)
		}
	default:
		if c.index >= 0 {
			l.remove(c)
		}
	}
}

// Hold adds n, which may be negative, to the bytes of heads that a connection holds. While all heads exceed
// maxHeads, it closes the connection with heads that is furthest behind, of several the one with the most bytes.
// It holds nothing and returns false if all of them have complete requests, or if this connection is closed.
func (l *Conns) Hold(c *Conn, n int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.index < 0 {
		return false
	}
	c.heads += n
	l.heads += n
	for n > 0 && c.index >= 0 && l.heads > maxHeads {
		now := time.Now().UnixNano()
		behind := c
		for _, other := range l.conns {
			if other.heads > 0 && cmp.Or(cmp.Compare(other.rankAt(now), behind.rankAt(now)), behind.heads-other.heads) < 0 {
				behind = other
			}
		}
		if behind.rankAt(now) > now {
			c.heads -= n
			l.heads -= n
			return false
		}
		l.close(behind)
	}
	return c.index >= 0
}

// remove ends the count of a connection, and close closes it. The lock is held.
func (l *Conns) remove(c *Conn) {
	heap.Remove(&l.conns, c.index)
	l.heads -= c.heads
}

func (l *Conns) close(c *Conn) {
	l.remove(c)
	go func() { _ = c.close() }() // Closing TLS sends an alert, which may block.
}

// closeOne closes the connection with the lowest rank. The lock is held.
func (l *Conns) closeOne(now int64) {
	for {
		c := l.conns[0]
		if rank := c.rankAt(now); rank > c.rank {
			c.rank = rank
			heap.Fix(&l.conns, 0)
			continue
		}
		l.close(c)
		return
	}
}

// rankAt is the time up to which the connection's client has not kept Posthorn waiting. The lowest
// rank is furthest behind.
func (c *Conn) rankAt(now int64) int64 {
	since := c.since.Load()
	if c.complete.Load() {
		return since + int64(answerTime)
	}
	return min(since+c.received.Load()*int64(byteTime), now)
}

// connHeap orders connections by their known rank, the lowest first. A known rank is a lower bound
// of rankAt and is updated only when the connection is first, so a read costs one addition.
type connHeap []*Conn

func (h connHeap) Len() int           { return len(h) }
func (h connHeap) Less(i, j int) bool { return h[i].rank < h[j].rank }
func (h connHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *connHeap) Push(x any) {
	c := x.(*Conn)
	c.index = len(*h)
	*h = append(*h, c)
}

// Pop implements heap.Interface.
func (h *connHeap) Pop() any {
	last := len(*h) - 1
	c := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	c.index = -1
	return c
}
