package delivery

import (
	"fmt"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// slowStats is a store whose stats of one destination's lanes can be delayed.
type slowStats struct {
	*testStore
	of   string // The destination.
	look func()
}

func (s *slowStats) LaneStats(id queue.LaneID) queue.LaneStats {
	if id.Destination == s.of {
		s.look()
	}
	return s.testStore.LaneStats(id)
}

// A destination is deleted while the maintenance reads the stats of its lanes with expired
// messages; no message is buried.
func TestDeletedWhileItsMessagesExpire(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 503}))
		s := &slowStats{testStore: w.store, of: "ns/crm"}
		deleted := false
		s.look = func() {
			if oldest := w.store.LaneStats(queue.LaneID{Source: "ns/web", Destination: "ns/crm", Any: true}).OldestPending; !deleted &&
				!oldest.IsZero() && time.Since(oldest) >= time.Hour {
				deleted = true
				w.apply()
			}
		}
		w.stop()
		w.restart(func(o *Options) { o.Store = s })
		d := dest("crm", "http://a.test")
		d.Delivery.RetryWindowMS = time.Hour.Milliseconds()
		d.State = liveconfig.Paused
		w.apply(d)
		w.send("web", 3)
		w.sleep(2 * time.Hour)
		if !deleted {
			t.Fatal("deleted is false, want true")
		}
		if n := len(w.dead("crm")); n != 0 {
			t.Errorf("%d dead letters of a destination that was deleted", n)
		}
		w.end()
	})
}

// A destination without a first attempt gets its turn although other destinations could use all
// slots.
func TestNewcomerAmongBusyOnes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200, after: 600 * time.Millisecond}), func(o *Options) { o.MaxInFlight = 128 })
		var all []liveconfig.Destination
		for i := range 20 {
			all = append(all, dest(fmt.Sprintf("d%02d", i), fmt.Sprintf("http://%d.test", i)))
		}
		w.apply(all...)
		w.send("web", 20000)
		w.sleep(time.Minute)
		late := dest("late", "http://late.test")
		late.Sources = []string{"ios"}
		w.apply(append(all, late)...)
		w.send("ios", 100)
		w.sleep(time.Minute)
		if r := w.report("d00"); r.Pending == 0 {
			t.Fatal("the other destinations have no pending messages")
		}
		if r := w.report("late"); r.Delivered != 100 {
			t.Errorf("%d of 100 were delivered within a minute", r.Delivered)
		}
		w.end()
	})
}

// When the circuit of the URL that worked opens, the other one is tried at once, even if its
// Retry-After has not passed.
func TestOtherURLTakesOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		first := answer{status: 200, after: 900 * time.Millisecond} // Guarded by the client.
		w := newWorld(t, func(r request) answer {
			if r.url == urlB {
				return answer{status: 200, after: 2 * time.Second} // Too slow for an immediate switch.
			}
			return first
		})
		d := dest("crm", urlA, urlB)
		d.Delivery.RequestsPerSecond = 20
		w.apply(d)
		w.send("web", 4000)
		w.sleep(time.Minute)
		w.client.mu.Lock()
		first = answer{status: 429, after: 4 * time.Second, retryAfter: time.Hour}
		w.client.mu.Unlock()
		w.sleep(time.Minute)
		w.client.forget()
		w.sleep(10 * time.Second)
		if n := len(w.client.requests(urlB)); n < 170 || // A round at half the window may be among them.
			w.report("crm").Pending == 0 {
			t.Errorf("in ten seconds %d requests went to the URL that works, of 20 a second: %+v", n, w.report("crm"))
		}
		w.end()
	})
}

// fullStore blocks OpenLane until room is closed, as on a full disk.
type fullStore struct {
	*testStore
	room chan struct{}
}

func (s *fullStore) OpenLane(id queue.LaneID) error {
	<-s.room
	return s.testStore.OpenLane(id)
}

// A config that waits for the disk does not delay a shutdown.
func TestStopsWhileAConfigWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.stop()
		s := &fullStore{w.store, make(chan struct{})}
		w.restart(func(o *Options) { o.Store = s })
		go func() {
			if err := w.engine.Apply(w.view(dest("crm", "http://a.test"))); err != nil {
				t.Errorf("Apply: %v", err)
			}
		}()
		w.sleep(5 * time.Minute)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			w.stop()
		}()
		w.sleep(time.Minute)
		select {
		case <-ended:
		default:
			t.Error("Run has not returned a minute later")
		}
		close(s.room)
		w.end()
	})
}

// A destination that is paused because of its size, so that its endpoints are unknown for a
// while, has the circuits afterwards that it had.
func TestCircuitSurvivesHold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 500, after: 4 * time.Second}))
		d := dest("crm", "http://a.test")
		w.apply(d)
		w.send("web", 100)
		for w.report("crm").Endpoints[0].State != adminapi.EndpointCircuitOpen {
			w.sleep(time.Second)
		}
		for range 100 {
			w.sleep(time.Second)
			paused := d
			paused.State, paused.Endpoints = liveconfig.Paused, nil
			w.apply(paused)
			w.apply(d)
			if state := w.report("crm").Endpoints[0].State; state != adminapi.EndpointCircuitOpen {
				t.Fatalf("the circuit is %s", state)
			}
		}
		if most := w.most("http://a.test"); most != 1 {
			t.Errorf("%d requests at once", most)
		}
		w.end()
	})
}
