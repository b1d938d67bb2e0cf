package audience

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/admission/admissiontest"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// fakeLanes are lanes in virtual time. Each reads at a constant rate.
type fakeLanes struct {
	accepted int64
	read     map[queue.LaneID]float64
	speed    map[queue.LaneID]float64
}

func (f *fakeLanes) stats(id queue.LaneID) queue.LaneStats {
	return queue.LaneStats{Ledger: queue.Ledger{Accepted: f.accepted, Pending: f.accepted - int64(f.read[id])}}
}

func (f *fakeLanes) advance(d time.Duration) {
	for id, speed := range f.speed {
		f.read[id] = min(f.read[id]+speed*d.Seconds(), float64(f.accepted))
	}
}

func lane(name string) queue.LaneID {
	return queue.LaneID{Source: "shop/web", Destination: "shop/" + name}
}

// TestPace runs a sync and live calls against lanes of several speeds. It checks how many
// calls of the sync are appended, and how many calls may be pending in a lane.
func TestPace(t *testing.T) {
	const second = time.Second
	for _, c := range []struct {
		name  string
		speed map[string]float64
		state map[string]liveconfig.State
		live  float64 // calls a second
		calls int64   // all calls of the sync
		skips string  // the destination that filters the calls out
		lasts time.Duration
		// least and most bound the calls of the sync that are appended in that time;
		// wait bounds the pending calls in lanes that make progress.
		least, most int
		wait        float64
	}{
		{name: "fast", speed: map[string]float64{"a": 10_000}, lasts: 10 * second, least: 60_000, most: 100_000, wait: 5000},
		{name: "slow", speed: map[string]float64{"a": 10}, lasts: 100 * second, least: 900, most: 1100, wait: 40},
		{name: "the slowest lane sets the pace", speed: map[string]float64{"a": 10_000, "b": 100}, lasts: 100 * second, least: 9_000,
			most: 10_500, wait: 300},
		{name: "live calls take their share", speed: map[string]float64{"a": 100}, live: 60, lasts: 100 * second, least: 3_000, most: 4_500,
			wait: 300},
		{name: "more live calls than the lane can deliver", speed: map[string]float64{"a": 100}, live: 150, lasts: 20 * second, least: 32,
			most: 2000, wait: 300},
		{name: "one crawls", speed: map[string]float64{"a": 1000, "b": 1}, lasts: 100 * second, least: 9_500, most: 10_500, wait: 3000},
		{name: "one crawls, and the sync is large", speed: map[string]float64{"a": 10_000, "b": 100}, calls: 14_400_000, lasts: 100 * second,
			least: 95_000, most: 101_000, wait: 5000},
		{name: "all crawl", speed: map[string]float64{"a": 20, "b": 2}, lasts: 100 * second, least: 1_900, most: 2_200, wait: 60},
		{name: "one crawls, and filters the calls out", speed: map[string]float64{"a": 1000, "b": 1}, skips: "b", lasts: 10 * second,
			least: 9_000, most: 11_000, wait: 3000},
		{name: "one makes no progress", speed: map[string]float64{"a": 1000, "b": 0}, lasts: 100 * second, least: 60_000, most: 85_000,
			wait: 3000},
		{name: "one is suspended", speed: map[string]float64{"a": 1000, "b": 0}, state: map[string]liveconfig.State{"b": liveconfig.Suspended},
			lasts: 10 * second, least: 9_000, most: 11_000, wait: 3000},
		{name: "none makes progress", speed: map[string]float64{"a": 0}, lasts: 59 * time.Minute, least: 32, most: 32},
		{name: "none makes progress for long", speed: map[string]float64{"a": 0}, lasts: 61 * time.Minute, least: 10_000, most: 1e9},
		{name: "all are off", speed: map[string]float64{"a": 0}, state: map[string]liveconfig.State{"a": liveconfig.Paused}, lasts: second,
			least: 10_000, most: 1e9},
		{name: "no destination", lasts: second, least: 10_000, most: 1e9},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := liveconfig.Config{Namespace: "shop"}
			lanes := &fakeLanes{read: map[queue.LaneID]float64{}, speed: map[queue.LaneID]float64{}}
			ids := []queue.LaneID{{Source: "shop/ios", Destination: "shop/a"}, lane("orphan")}
			for name, speed := range c.speed {
				state := liveconfig.Active
				if s, ok := c.state[name]; ok {
					state = s
				}
				config.Destinations = append(config.Destinations, liveconfig.Destination{Name: name, State: state, Sources: []string{"ios", "web"}})
				lanes.speed[lane(name)] = speed
				ids = append(ids, lane(name))
			}
			begin := time.Unix(1_800_000_000, 0)
			p := newPace("shop/web", c.calls, begin)
			appended, sent, owed := 0, 0, 0.0
			step := 5 * time.Millisecond
			if c.lasts > time.Minute*10 {
				step = time.Second
			}
			for now := begin; now.Sub(begin) < c.lasts; now = now.Add(step) {
				if now.Sub(p.listed) >= time.Second {
					p.list(config, ids, now)
				}
				p.update(lanes.stats, batch{sent, map[string]int{"shop/" + c.skips: sent}}, now)
				sent = min(p.room(now), batchSize)
				for id, l := range p.lanes {
					if fastest := slices.Max(slices.Collect(maps.Values(c.speed))); fastest > 0 && lanes.speed[id] >= min(p.floor, fastest) &&
						float64(l.unread) > c.wait {
						t.Fatalf("pending calls in %s after %s: got %d, want at most %g at %g calls a second", id.Destination, now.Sub(begin), l.unread, c.wait, lanes.speed[id])
					}
				}
				appended += sent
				owed += c.live * step.Seconds()
				lanes.accepted += int64(sent) + int64(owed)
				owed -= float64(int64(owed))
				lanes.advance(step)
			}
			if appended < c.least || appended > c.most {
				t.Errorf("appended calls: got %d, want %d to %d", appended, c.least, c.most)
			}
		})
	}
}

// storeRig is a Service on a real queue. The test delivers its messages with take.
type storeRig struct {
	*rig
	store *pebblestore.Store
	lane  queue.LaneID
}

func withStore(t *testing.T, d *disk, room func(source string) bool, change func(*Options)) *storeRig {
	t.Helper()
	store := d.open(t)
	s := &storeRig{store: store, lane: queue.LaneID{Source: "shop/web", Destination: "shop/crm"}}
	if err := store.OpenLane(s.lane); err != nil {
		t.Fatal(err)
	}
	s.rig = newRig(t, d, newLog(), func(o *Options) {
		o.Store = store
		o.Gate = admission.New(admission.Options{Store: &admissiontest.Store{OnAppend: store.Append, OnRoom: room}, Logger: o.Logger})
		o.Lanes = store
		if change != nil {
			change(o)
		}
	})
	s.router = admissiontest.Router{OnSkip: func(source string, _ *event.Call) []string {
		if source != "web" {
			t.Errorf("Skip: got Source %s, want web", source)
		}
		return []string{"shop/track-only"}
	}}
	c := config()
	c.Destinations = []liveconfig.Destination{{Name: "crm", State: liveconfig.Active, Sources: []string{"web"}}}
	s.set(c)
	t.Cleanup(func() { s.end(); _ = store.Close() })
	return s
}

// take delivers up to n messages and returns their types and users.
func (s *storeRig) take(n int) (out []string) {
	s.t.Helper()
	got, err := s.store.Lease(s.lane, n, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, d := range got {
		user, _, _ := strings.Cut(strings.SplitN(string(d.Body), `"userId":"`, 2)[1], `"`)
		out = append(out, d.Type+" "+user)
		s.store.Ack(d)
	}
	return out
}

func many(prefix string, n int) []string {
	list := make([]string, n)
	for i := range list {
		list[i] = fmt.Sprintf("%s%06d", prefix, i)
	}
	return list
}

// A first sync of many members with a slow receiver: live calls are delivered between the
// calls of the sync, its progress is reported, and a restart neither repeats nor loses a
// call.
func TestSlowReceiver(t *testing.T) {
	const users = 2000
	d := memory()
	s := withStore(t, d, nil, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // Sync returns as soon as the sync is accepted.
	result, err := s.Sync(ctx, Request{Namespace: "shop", Audience: config().Audiences[0], Full: true}, ids(many("u", users)...))
	check.NoError(t, "sync", err)
	check.Equal(t, "Sent", result.Sent, false)
	check.Equal(t, "Added", result.Added, users)
	live := func(n int) {
		t.Helper()
		m := queue.Message{Source: "shop/web", ID: fmt.Sprintf("live-%d", n), Type: "track", AcceptedAt: time.Now(),
			Body: fmt.Appendf(nil, `{"userId":"live-%d"}`, n)}
		if _, err := s.store.Append(t.Context(), []queue.Message{m}); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	receive := func(until int) {
		t.Helper()
		for n := 0; len(got) < until; n++ {
			live(len(got))
			before := len(got)
			wait.True(s.t, "the audience is up to date", func() bool { got = append(got, s.take(20)...); return len(got) > before })
			// The live call waits for a part of the sync, not for all of it.
			if waiting := s.store.LaneStats(s.lane).Pending; waiting > 2*maxWindow/3 {
				t.Fatalf("pending calls in the lane: got %d, want at most %d", waiting, 2*maxWindow/3)
			}
		}
	}
	wait.True(s.t, "the audience is up to date", func() bool { return s.store.LaneStats(s.lane).Pending > 0 })
	receive(300)
	p := s.Progress("shop", config().Audiences[0])
	check.Equal(t, "Added of the progress", p.Added, users)
	if p.Unsent == 0 || p.Unsent == users {
		t.Errorf("Unsent of the progress: got %d, want more than 0 and less than %d", p.Unsent, users)
	}
	a := s.do(http.MethodGet, shoppers, "web-key", nil)
	a.want(t, "GET of the progress", http.StatusOK, "")
	check.Equal(t, "Added in the answer to GET", a.Added, users)
	a = s.do(http.MethodPut, shoppers, "web-key", ids("x"))
	a.want(t, "another sync", http.StatusConflict, "sync_in_progress")
	if want := "of 2000 identify calls are in the queue"; !strings.Contains(a.Error.Message, want) {
		t.Errorf("message for another sync: got %q, want one with %q", a.Error.Message, want)
	}

	s.end()
	check.NoError(t, "close the store", s.store.Close())
	s = withStore(t, d, nil, nil)
	receive(900)
	wait.True(s.t, "the audience is up to date", func() bool { got = append(got, s.take(50)...); return s.busy() == "" })
	for more := s.take(1000); len(more) > 0; more = s.take(1000) {
		got = append(got, more...)
	}
	times := map[string]int{}
	for _, m := range got {
		times[m]++
	}
	for _, u := range many("u", users) {
		if times["identify "+u] != 1 {
			t.Fatalf("identify calls for %s: got %d, want 1", u, times["identify "+u])
		}
	}
}

// While the queue has no space for a sync, the sync waits; then it continues.
func TestSyncWaitsForSpaceInTheQueue(t *testing.T) {
	var room atomic.Bool
	s := withStore(t, memory(), func(source string) bool {
		if source != "shop/web" {
			t.Errorf("Room: got Source %q, want shop/web", source)
		}
		return room.Load()
	}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Sync(ctx, Request{Namespace: "shop", Audience: config().Audiences[0], Full: true}, ids("a", "b")); err != nil {
		t.Fatal(err)
	}
	wait.True(s.t, "the audience is up to date", func() bool {
		p := s.Progress("shop", config().Audiences[0])
		return p.Unsent == 2 && p.Waits != "" && !p.Sent
	})
	report := s.Report(config())[0]
	check.Equal(t, "Unsent of the report", report.Unsent, 2)
	check.Equal(t, "Waits of the report is empty", report.Waits == "", false)
	room.Store(true)
	wait.True(s.t, "the audience is up to date", func() bool { return s.busy() == "" })
	check.Same(t, "messages", s.take(10), []string{"identify a", "identify b"})
	p := s.Progress("shop", config().Audiences[0])
	check.Equal(t, "Waits of the progress", p.Waits, "")
	check.Equal(t, "Unsent of the progress", p.Unsent, 0)
	check.Equal(t, "Sent of the progress", p.Sent, true)
}

// A sync does not wait for a destination that filters identify calls out.
func TestFilteringDestinationDoesNotDelaySyncs(t *testing.T) {
	s := withStore(t, memory(), nil, nil)
	c := config()
	c.Destinations = []liveconfig.Destination{{Name: "track-only", State: liveconfig.Active, Sources: []string{"web"}}}
	s.set(c)
	if err := s.store.OpenLane(lane("track-only")); err != nil {
		t.Fatal(err)
	}
	s.sync(shoppers, many("u", 2000)...)
}

// A destination that is suspended, paused or deleted during a sync does not delay it. The
// messages of a suspended or paused destination are kept.
func TestDestinationsChangeDuringASync(t *testing.T) {
	const users = 500
	for _, to := range []liveconfig.State{liveconfig.Suspended, liveconfig.Paused, "deleted"} {
		t.Run(string(to), func(t *testing.T) {
			s := withStore(t, memory(), nil, nil)
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := s.Sync(ctx, Request{Namespace: "shop", Audience: config().Audiences[0], Full: true}, ids(many("u", users)...)); err != nil {
				t.Fatal(err)
			}
			wait.True(s.t, "the audience is up to date", func() bool { return s.Progress("shop", config().Audiences[0]).Waits != "" })
			got := s.take(10)
			c := config()
			if to == "deleted" {
				if err := s.store.DropLane(t.Context(), s.lane); err != nil {
					t.Fatal(err)
				}
			} else {
				c.Destinations = []liveconfig.Destination{{Name: "crm", State: to, Sources: []string{"web"}}}
			}
			s.set(c)
			wait.True(s.t, "the audience is up to date", func() bool { return s.Progress("shop", config().Audiences[0]).Sent })
			if to == "deleted" {
				return
			}
			if got = append(got, s.take(users)...); len(got) != users || !slices.IsSorted(got) {
				t.Errorf("messages after the change: got %d (sorted: %t), want %d, sorted", len(got), slices.IsSorted(got), users)
			}
		})
	}
}

// The sync of an audience that is deleted while it waits is removed, and its sender learns of it.
func TestAudienceDeletedDuringItsSync(t *testing.T) {
	s := withStore(t, memory(), func(string) bool { return false }, func(o *Options) { o.OrphanGrace = time.Millisecond })
	answer := make(chan error, 1)
	go func() {
		_, err := s.Sync(t.Context(), Request{Namespace: "shop", Audience: config().Audiences[0], Full: true}, ids("a"))
		answer <- err
	}()
	wait.True(s.t, "the audience is up to date", func() bool { return s.Progress("shop", config().Audiences[0]).Unsent > 0 })
	c := config()
	c.Audiences = c.Audiences[1:]
	s.set(c)
	if err := <-answer; !errors.Is(err, errRemoved) {
		t.Errorf("sync: got error %v, want %v", err, errRemoved)
	}
	wait.True(s.t, "the audience is up to date", func() bool { return s.Progress("shop", config().Audiences[0]) == adminapi.SyncProgress{} })
	check.Same(t, "messages", s.take(10), nil)
}

// With resend all members are sent again, for example for a new destination.
func TestResend(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	r.sync(shoppers, "a", "b", "c")
	r.sync(spent, "a=1", "b=2")
	r.log.drain(t)
	a := r.sync(shoppers+"?resend=true", "b", "c", "d")
	check.Equal(t, "counts of the audience", a.SyncCounts, adminapi.SyncCounts{Before: 3, Members: 3, Added: 1, Removed: 1, Resent: 2})
	r.wantCalls("a shoppers=false", "b shoppers=true", "c shoppers=true", "d shoppers=true")
	a = r.sync(spent+"?resend=true", "a=1", "b=3")
	check.Equal(t, "counts of the computed trait", a.SyncCounts, adminapi.SyncCounts{Before: 2, Members: 2, Changed: 1, Resent: 1})
	r.wantCalls("a spent=1", "b spent=3")
	r.sync(shoppers, "b", "c", "d")
	r.wantCalls()
}
