package delivery

import (
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/test/check"
)

// hour and minute are short, because each second costs ten timers of Pebble.
const hour, minute = 2 * time.Minute, 2 * time.Second

// suspendedWorld is a world with a destination that refuses connections, on a disk that loses what is not synced.
func suspendedWorld(t *testing.T) *world {
	s := &testStore{files: vfs.NewCrashableMem(), leased: map[lease]int{}}
	s.open(t)
	t.Cleanup(func() { check.NoError(t, "close the store", s.Close()) })
	w := &world{T: t, store: s, client: newFakeClient(always(answer{reason: egress.ConnectionRefused}))}
	w.start()
	w.suspend(false)
	return w
}

// suspend applies the destination crm, and others.
func (w *world) suspend(suspended bool, others ...liveconfig.Destination) {
	w.Helper()
	d := dest("crm", urlA)
	d.Delivery.RetryWindowMS, d.DeadLetters.RetentionMS = (4 * hour).Milliseconds(), hour.Milliseconds()
	if suspended {
		d.State = liveconfig.Suspended
	}
	w.apply(append(others, d)...)
}

// crash ends the process and the machine, and starts both after a time.
func (w *world) crash(after time.Duration) {
	w.Helper()
	disk := w.store.files.(*vfs.MemFS).CrashClone(vfs.CrashCloneCfg{})
	w.stop()
	check.NoError(w, "close the store", w.store.Close())
	w.store.files = disk
	clear(w.store.leased)
	time.Sleep(after)
	w.store.open(w)
	w.start()
}

// expect compares the numbers of dead and pending messages.
func (w *world) expect(when string, dead, pending int64) {
	w.Helper()
	r := w.report("crm")
	check.Equal(w, "dead letters "+when, r.DeadLettered, dead)
	check.Equal(w, "pending messages "+when, r.Pending, pending)
}

// Messages expire after as much time without suspension as their window has, whenever they were accepted.
func TestSuspensionExtendsWindows(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := suspendedWorld(t)
		w.send("web", 10)
		w.sleep(3 * hour)
		w.suspend(true)
		requests := len(w.client.requests(""))
		w.sleep(hour)
		w.send("web", 5)
		w.sleep(9 * hour)
		w.expect("in the suspension", 0, 15)
		check.Equal(t, "requests in the suspension", len(w.client.requests(""))-requests, 0)
		check.Equal(t, "expiry in the suspension is known", !w.report("crm").OldestExpires.IsZero(), false)
		w.suspend(false)
		check.Equal(t, "time until the first expiry", time.Until(w.report("crm").OldestExpires).Round(time.Second), hour)
		w.sleep(56 * minute) // The last attempt, which can decide, is 5 s before the end.
		w.expect("before the rest of the window ended", 0, 15)
		w.sleep(5 * minute)
		w.expect("after the rest of the window", 10, 5)
		w.sleep(2*hour + 55*minute)
		w.expect("before the whole window ended", 10, 5)
		w.sleep(5 * minute)
		w.expect("after the whole window", 15, 0)
		w.end()
	})
}

// A suspension survives a power loss at any time, and one that the process did not see the end of lasts until the next config.
func TestSuspensionSurvivesPowerLoss(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := suspendedWorld(t)
		w.send("web", 10)
		w.sleep(3 * hour)
		w.suspend(true)
		w.crash(5 * hour) // At once.
		w.suspend(true)
		w.expect("after the first start", 0, 10)
		w.sleep(hour)
		w.crash(24 * hour)
		w.suspend(false) // It was resumed while no process ran.
		w.crash(0)
		w.suspend(false)
		w.sleep(56 * minute)
		w.expect("before the rest of the window ended", 0, 10)
		w.sleep(5 * minute)
		w.expect("after the rest of the window", 10, 0)
		w.end()
	})
}

// The time in which a resumption waits for the store counts as suspended, because nothing is sent in it.
func TestASlowStoreShortensNoWindow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := suspendedWorld(t)
		w.send("web", 10)
		w.sleep(3 * hour)
		w.suspend(true)
		w.store.slow = 2 * hour
		other := dest("other", urlB)
		other.State = liveconfig.Suspended
		w.suspend(false, other)
		w.crash(0)
		w.suspend(false)
		w.sleep(56 * minute)
		w.expect("before the rest of the window ended", 0, 10)
		w.sleep(5 * minute)
		w.expect("after the rest of the window", 10, 0)
		w.end()
	})
}

// A request that fails after its window, and after the destination was suspended, does not expire its message.
func TestARequestDuringASuspensionExpiresNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		begin := time.Now()
		var last atomic.Int64 // The begin of the last attempt.
		w := newWorld(t, func(request) answer {
			last.Store(int64(time.Since(begin)))
			return answer{status: 500, after: 4 * time.Second}
		})
		apply := func(state liveconfig.State) {
			d := dest("crm", urlA)
			d.State, d.Delivery.RetryWindowMS = state, time.Minute.Milliseconds()
			w.apply(d)
		}
		apply(liveconfig.Active)
		w.send("web", 1)
		for time.Duration(last.Load()) < 51*time.Second && time.Since(begin) < time.Minute {
			w.sleep(100 * time.Millisecond)
		}
		apply(liveconfig.Suspended)
		w.sleep(time.Hour)
		w.expect("in the suspension", 0, 1)
		apply(liveconfig.Active)
		w.sleep(time.Minute)
		w.expect("after the suspension", 1, 0)
		w.end()
	})
}

// Several suspensions add up, and the record has only those that matter to pending messages.
func TestSuspensionsAddUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := suspendedWorld(t)
		w.send("web", 10)
		for range 3 {
			w.sleep(hour)
			w.suspend(true)
			w.sleep(2 * hour)
			w.suspend(false)
		}
		w.sleep(56 * minute)
		w.expect("before the window ended", 0, 10)
		w.sleep(5 * minute)
		w.expect("after the window", 10, 0)
		w.suspend(true)
		check.Equal(t, "suspensions in the record", look(w, func(e *Engine) int { return len(e.registry.destinations["ns/crm"].suspensions) }), 1)
		w.sleep(2 * minute)
		w.suspend(false)
		w.sleep(2 * minute)
		w.suspend(true)
		w.suspend(false)
		w.apply()
		w.sleep(2 * time.Hour)
		for name := range w.store.meta(t) {
			t.Errorf("record of a deleted destination: %s", name)
		}
		w.stop()
	})
}

// For random suspensions, a window ends after exactly the time without a suspension, and a bound of the acceptances selects
// the same messages. Too many suspensions only lengthen windows, and a clock that is set back shortens
// none by more than it was set back, even without the monotonic clock.
func TestSuspensionModel(t *testing.T) {
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 7))
		changes, setBack := 2+random.IntN(100), seed%3 == 0
		var s suspensions
		now := time.Unix(1_800_000_000, 0)
		type message struct {
			accepted time.Time
			active   time.Duration // Since the acceptance, without suspensions.
		}
		var messages []message
		var back time.Duration
		for range changes {
			for range random.IntN(4) {
				messages = append(messages, message{accepted: now})
			}
			passed := time.Duration(random.IntN(3600)) * time.Second
			if !s.active() {
				for i := range messages {
					messages[i].active += passed
				}
			}
			now = now.Add(passed)
			if setBack && random.IntN(8) == 0 {
				by := time.Duration(random.IntN(3600)) * time.Second
				now, back = now.Add(-by), back+by
			}
			var oldest time.Time
			if len(messages) > 0 {
				oldest = slices.MinFunc(messages, func(a, b message) int { return a.accepted.Compare(b.accepted) }).accepted
			}
			s = s.change(!s.active(), oldest, now)
			window := time.Duration(random.IntN(20_000)) * time.Second
			by := s.acceptedBy(now.Add(-window), now)
			for _, m := range messages {
				used := now.Sub(s.windowStart(m.accepted, now))
				if used > m.active+back || !setBack && changes <= maxSuspensions && used != m.active {
					t.Fatalf("seed %d: used part of the window of a message that was accepted at %v: got %v, want %v", seed, m.accepted, used, m.active)
				}
				if expired := used >= window; expired != !m.accepted.After(by) {
					t.Fatalf("seed %d: message that was accepted at %v has used %v of its window of %v, and the bound is %v", seed, m.accepted, used, window, by)
				}
			}
		}
		check.Equal(t, "the record is bounded", len(s) <= maxSuspensions, true)
	}
}
