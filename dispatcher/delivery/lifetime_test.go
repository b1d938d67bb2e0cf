package delivery

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// A process that may not send cancels its requests and sends none. Later it continues, and no message
// was counted as failed.
func TestMaySend(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var may atomic.Bool
		may.Store(true)
		var isSlow atomic.Bool
		w := newWorld(t, func(request) answer {
			if isSlow.Load() {
				return answer{status: 200, after: 2 * time.Second}
			}
			return answer{status: 200, after: time.Millisecond}
		}, func(o *Options) { o.MaySend = may.Load })
		w.apply(dest("crm", "http://a.test"))
		w.send("web", 1000) // The window grows to 64.
		w.sleep(time.Second)
		isSlow.Store(true)
		w.send("web", 100)
		w.sleep(time.Second)
		if n := w.client.inFlight[""]; n != 64 {
			t.Fatalf("%d requests in flight before the pause, want the window of 64", n)
		}
		may.Store(false)
		w.sleep(leaseCheck)
		if n := w.client.inFlight[""]; n != 0 {
			t.Errorf("%d requests in flight %v after the lease ended, want 0", n, leaseCheck)
		}
		w.sleep(time.Minute)
		if n := len(w.client.requests("")); n != 1064 {
			t.Errorf("%d requests during the pause, want none after the first 1064", n)
		}
		may.Store(true)
		w.sleep(10 * time.Second)
		r := w.report("crm")
		if r.Delivered != 1100 || r.Pending != 0 || r.Endpoints[0].State != adminapi.EndpointHealthy {
			t.Errorf("report %+v, want 1100 delivered by a healthy endpoint", r)
		}
		if n := len(w.client.requests("")); n != 1164 {
			t.Errorf("%d requests, want 64 cancelled ones and 1100", n)
		}
		w.end()
	})
}

// Between the end of the lease and the next check, no request is sent.
func TestMaySendIsCheckedBeforeEachRequest(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var sent atomic.Int64
		w := newWorld(t, always(answer{status: 200}), func(o *Options) { o.MaySend = func() bool { return sent.Load() < 10 } })
		w.client.answer = func(request) answer {
			sent.Add(1)
			return answer{status: 200}
		}
		w.apply(dest("crm", "http://a.test"))
		w.send("web", 200)
		w.sleep(time.Second)
		// Requests may have passed the check at the same time.
		if n := len(w.client.requests("")); n > 10+64 {
			t.Errorf("%d requests, want none after the permission ended", n)
		}
		if r := w.report("crm"); r.Delivered+r.Pending != 200 || r.Pending == 0 {
			t.Errorf("report %+v, want the other messages pending", r)
		}
	})
}

// While a process may not send, possibly because its clock is wrong, no retry window ends.
func TestNothingExpiresWhileSendingIsNotPermitted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var may atomic.Bool
		may.Store(true)
		w := newWorld(t, always(answer{status: 500}), func(o *Options) { o.MaySend = may.Load })
		c := dest("crm", "http://a.test")
		c.Delivery.RetryWindowMS = 60_000
		w.apply(c)
		w.send("web", 10)
		w.sleep(10 * time.Second)
		may.Store(false)
		w.sleep(time.Hour)
		if r := w.report("crm"); r.Pending != 10 || r.DeadLettered != 0 {
			t.Errorf("without the permission to send: got %d pending and %d dead-lettered, want 10 and 0", r.Pending, r.DeadLettered)
		}
		may.Store(true)
		w.sleep(time.Minute)
		if r := w.report("crm"); r.Pending != 0 || r.DeadLettered != 10 {
			t.Errorf("with the permission to send: got %d pending and %d dead-lettered, want 0 and 10", r.Pending, r.DeadLettered)
		}
		w.end()
	})
}

// While the clock of the process may be wrong, requests are sent, and neither a retry window nor a retention
// ends.
func TestNothingExpiresWithAnUncertainClock(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var may atomic.Bool
		w := newWorld(t, always(answer{status: 500}), func(o *Options) { o.MayExpire = may.Load })
		c := dest("crm", "http://a.test")
		c.Delivery.RetryWindowMS = 60_000
		c.DeadLetters.RetentionMS = 3_600_000
		w.apply(c)
		w.send("web", 10)
		w.sleep(time.Hour)
		before := len(w.client.requests(""))
		w.sleep(time.Hour)
		if r := w.report("crm"); r.Pending != 10 || r.DeadLettered != 0 {
			t.Errorf("with an uncertain clock: got %d pending and %d dead-lettered, want 10 and 0", r.Pending, r.DeadLettered)
		}
		if n := len(w.client.requests("")) - before; n < 10 {
			t.Errorf("%d requests in an hour with an uncertain clock, want retries", n)
		}
		may.Store(true)
		w.sleep(2 * time.Minute)
		if r := w.report("crm"); r.Pending != 0 || r.DeadLettered != 10 {
			t.Errorf("with a right clock: got %d pending and %d dead-lettered, want 0 and 10", r.Pending, r.DeadLettered)
		}
		may.Store(false)
		w.sleep(2 * time.Hour)
		if r := w.report("crm"); r.DeadLettersStored != 10 {
			t.Errorf("%d dead letters after their retention with an uncertain clock, want 10", r.DeadLettersStored)
		}
		c.DeadLetters.MaxBytes = 1
		w.apply(c)
		w.sleep(2 * time.Minute)
		if r := w.report("crm"); r.DeadLettersStored != 0 {
			t.Errorf("%d dead letters with a bound of 1 byte, want 0", r.DeadLettersStored)
		}
		w.end()
	})
}
