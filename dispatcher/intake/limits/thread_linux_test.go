package limits

import (
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/test/check"
)

// A turn of a Source with long turns keeps its thread, however many other goroutines are ready.
func TestLongTurnsKeepTheirThread(t *testing.T) {
	s, source := NewScheduler(4), queueIn(new(Share))
	var turn Turn
	turn.Enter(s, source)
	turn.Leave(longTurn)
	turn.Enter(s, source)
	done := make(chan struct{})
	var others sync.WaitGroup
	for range 2 * runtime.GOMAXPROCS(0) {
		others.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					runtime.Gosched()
				}
			}
		})
	}
	threads := map[int]bool{}
	for range 1000 {
		threads[syscall.Gettid()] = true
		runtime.Gosched()
	}
	turn.Leave(0)
	close(done)
	others.Wait()
	check.Equal(t, "threads of a long turn", len(threads), 1)
}
