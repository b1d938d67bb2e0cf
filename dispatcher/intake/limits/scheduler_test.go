package limits

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/test/check"
)

func queueIn(share *Share) *WaitQueue { return &WaitQueue{share: share} }

// schedule queues requests of some Sources ("namespace" or "namespace/source") while all slots are taken, frees the slots one by one,
// and returns the order in which the requests ran. Each request makes the given number of bytes.
func schedule(s *Scheduler, bytes map[string]int, requests ...string) (order []string) {
	queues, shares := map[string]*WaitQueue{}, map[string]*Share{}
	var blockers [2]Turn
	for i := range blockers {
		blockers[i].Enter(s, queueIn(new(Share)))
	}
	ran := make(chan string)
	waits := 0
	for _, name := range requests {
		q := queues[name]
		if q == nil {
			namespace, _, _ := strings.Cut(name, "/")
			if shares[namespace] == nil {
				shares[namespace] = new(Share)
			}
			q = queueIn(shares[namespace])
			queues[name] = q
		}
		go func() {
			var t Turn
			t.Enter(s, q)
			ran <- name
			t.Leave(bytes[name])
		}()
		waits++
		for waiting := 0; waiting < waits; time.Sleep(100 * time.Microsecond) {
			s.mu.Lock()
			waiting = 0
			for _, q := range s.queues {
				waiting += len(q.waiting)
			}
			s.mu.Unlock()
		}
	}
	blockers[0].Leave(0) // One slot, so that the turns determine the order.
	for range requests {
		order = append(order, <-ran)
	}
	blockers[1].Leave(0)
	return order
}

// Sources that wait for the CPU alternate by the bytes of their requests, however many requests one
// of them has.
func TestTurnsAreFairByBytes(t *testing.T) {
	t.Run("a flood and one call", func(t *testing.T) {
		order := schedule(&Scheduler{slots: 2}, map[string]int{"flood": 1, "call": 1}, "flood", "flood", "flood", "flood", "call")
		if i := slices.Index(order, "call"); i > 1 {
			t.Errorf("the other Source's call was stored as number %d: %v", i+1, order)
		}
	})
	t.Run("a namespace with many Sources and one call", func(t *testing.T) {
		bytes, requests := map[string]int{"other": 1}, []string{}
		for i := range 8 {
			name := fmt.Sprint("flood/", i)
			bytes[name] = 1
			requests = append(requests, name)
		}
		order := schedule(&Scheduler{slots: 2}, bytes, append(requests, "other")...)
		if i := slices.Index(order, "other"); i > 1 {
			t.Errorf("the other namespace's call ran as number %d: %v", i+1, order)
		}
	})
	t.Run("Sources of one namespace take turns", func(t *testing.T) {
		order := schedule(&Scheduler{slots: 2}, map[string]int{"shop/flood": 1, "shop/call": 1}, "shop/flood", "shop/flood", "shop/flood",
			"shop/flood", "shop/call")
		if i := slices.Index(order, "shop/call"); i > 1 {
			t.Errorf("the other Source's call ran as number %d: %v", i+1, order)
		}
	})
	t.Run("small requests beside large ones", func(t *testing.T) {
		bytes := map[string]int{"large": 1 << 20, "small": 64 << 10}
		order := schedule(&Scheduler{slots: 2}, bytes, "large", "large", "large", "small", "small", "small", "small", "small", "small",
			"small", "small")
		// 1 MiB is worth 16 of them: all eight run behind at most one large request.
		large := 0
		for i, name := range order {
			if name == "large" {
				large++
			}
			if i < 9 && large > 1 {
				t.Fatalf("a second large request runs before all small ones: %v", order)
			}
		}
	})
	t.Run("one namespace does not take all slots", func(t *testing.T) {
		s := &Scheduler{slots: 4}
		flood := new(Share)
		var a, b Turn
		a.Enter(s, queueIn(flood))
		b.Enter(s, queueIn(flood)) // Another Source of the same namespace.
		entered, left := make(chan struct{}), make(chan struct{})
		go func() {
			var third Turn
			third.Enter(s, queueIn(flood))
			close(entered)
			third.Leave(0)
			close(left)
		}()
		for waiting := 0; waiting == 0; time.Sleep(100 * time.Microsecond) {
			s.mu.Lock()
			waiting = len(s.queues)
			s.mu.Unlock()
		}
		var other Turn
		other.Enter(s, queueIn(new(Share))) // does not wait
		other.Leave(0)
		select {
		case <-entered:
			t.Error("three of four slots belong to one namespace")
		default:
		}
		a.Leave(0)
		<-left
		b.Leave(0)
		if s.busy != 0 || len(s.queues) != 0 {
			t.Errorf("%d slots are taken and %d queues wait at the end", s.busy, len(s.queues))
		}
	})
}

// While another namespace is active, a Source with long turns gets a quarter of the slots: a long turn keeps its CPU.
func TestLongTurnsLeaveACPU(t *testing.T) {
	for name, c := range map[string]struct {
		charge      int
		otherWas    time.Duration // the time since a turn of the other namespace
		runTogether int
	}{
		"long, beside another namespace":  {longTurn, 0, 1},
		"short, beside another namespace": {longTurn - 1, 0, 2},
		"long, alone for a second":        {longTurn, sharedFor, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, source := NewScheduler(4), queueIn(new(Share))
				var turns [3]Turn
				turns[0].Enter(s, source)
				turns[0].Leave(c.charge)
				var other Turn
				other.Enter(s, queueIn(new(Share)))
				other.Leave(0)
				turns[0].Enter(s, source) // The switch back counts as activity of both.
				time.Sleep(c.otherWas)
				turns[0].Leave(c.charge)
				running := 0
				for i := range turns {
					go func() {
						turns[i].Enter(s, source)
						running++
					}()
					synctest.Wait()
				}
				check.Equal(t, "turns at the same time", running, c.runTogether)
				for i := range turns {
					synctest.Wait()
					turns[i].Leave(0)
				}
				synctest.Wait()
				check.Equal(t, "turns in all", running, len(turns))
			})
		})
	}
}
