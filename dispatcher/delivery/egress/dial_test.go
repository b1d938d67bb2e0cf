package egress

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// countedReads counts the reads of a connection.
type countedReads struct {
	net.Conn
	n atomic.Int32
}

func (c *countedReads) Read(b []byte) (int, error) {
	c.n.Add(1)
	return c.Conn.Read(b)
}

// A request that waits for its response is woken once, not periodically, and ends when its context is cancelled.
func TestWaitingReadIsWokenOnce(t *testing.T) {
	for name, test := range map[string]struct {
		respond, cancel, ends time.Duration
		err                   bool
		reads                 int32
	}{
		"a fast response":   {respond: cancelCheck / 2, cancel: time.Hour, ends: cancelCheck / 2, reads: 1},
		"a slow response":   {respond: 4 * time.Second, cancel: time.Hour, ends: 4 * time.Second, reads: 2},
		"no response":       {respond: time.Hour, cancel: time.Hour, ends: 5 * time.Second, err: true, reads: 2},
		"cancelled":         {respond: time.Hour, cancel: 2 * time.Second, ends: 2 * time.Second, err: true, reads: 2},
		"cancelled at once": {respond: time.Hour, cancel: 0, ends: cancelCheck, err: true, reads: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				here, there := net.Pipe()
				defer there.Close()
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(test.cancel, cancel)
				time.AfterFunc(test.respond, func() { _, _ = there.Write([]byte("x")) })
				counted := &countedReads{Conn: here}
				cn := &conn{Conn: counted}
				start := time.Now()
				cn.begin(ctx, start, start.Add(5*time.Second))
				_, err := cn.Read(make([]byte, 1))
				if took := time.Since(start); took != test.ends || (err != nil) != test.err {
					t.Errorf("the read ended after %v with the error %v, want %v and %v", took, err, test.ends, test.err)
				}
				if got := counted.n.Load(); got != test.reads {
					t.Errorf("reads: got %d, want %d", got, test.reads)
				}
				_ = here.Close()
			})
		})
	}
}
