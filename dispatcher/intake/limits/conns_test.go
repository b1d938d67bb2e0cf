package limits

import (
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Which connections are closed when the heads of all requests exceed their bound.
func TestHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewConns(100)
		var mu sync.Mutex
		var closed []string
		open := func(name string) *Conn {
			c := NewConn(func() error {
				mu.Lock()
				defer mu.Unlock()
				closed = append(closed, name)
				return nil
			})
			l.Follow(c, http.StateNew)
			l.Follow(c, http.StateActive)
			return c
		}
		hold := func(c *Conn, n int, want bool, wantClosed ...string) {
			t.Helper()
			got := l.Hold(c, n)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if slices.Sort(closed); got != want || !slices.Equal(closed, wantClosed) {
				t.Errorf("hold %d: got %v, closed %v; want %v, closed %v", n, got, closed, want, wantClosed)
			}
			closed = nil
		}
		idle, stalled := open("idle"), open("stalled")
		hold(stalled, maxHeads/2, true)
		time.Sleep(time.Second)
		small, large := open("small"), open("large")
		hold(small, maxHeads/8, true)
		hold(large, maxHeads/4, true)
		hold(large, maxHeads/8+1, true, "stalled") // It is behind; the idle one has no head.
		hold(stalled, 1, false)
		hold(small, maxHeads/2, false, "small") // Of two that are not behind, the one with the most bytes.
		l.Follow(small, http.StateClosed)
		complete := open("complete")
		hold(complete, maxHeads/2, true)
		complete.RequestEnded()
		hold(large, -maxHeads/4, true)
		large.RequestEnded()
		hold(large, maxHeads, false) // Both wait for their responses.
		hold(large, maxHeads/4, true)
		l.Follow(large, http.StateClosed)
		l.Follow(complete, http.StateClosed)
		hold(idle, maxHeads, true)
	})
}
