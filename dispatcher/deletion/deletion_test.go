package deletion

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/jobs"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/event"
)

type rig struct {
	*Service
	t     *testing.T
	dir   string
	store *pebblestore.Store
	// through is the store as the engine has it.
	through *Settled
	now     time.Time
	view    *liveconfig.View
	// refuse, when set, is what Append answers.
	refuse error
}

func (r *rig) Append(ctx context.Context, m []queue.Message) ([]bool, error) {
	if r.refuse != nil {
		return nil, r.refuse
	}
	return r.store.Append(ctx, m)
}

// appender is the store with the rig's Append.
type appender struct {
	queue.Store
	rig *rig
}

func (a appender) Append(ctx context.Context, m []queue.Message) ([]bool, error) {
	return a.rig.Append(ctx, m)
}

// settled is what deliveries go through; a restart knows nothing of those before.
func (r *rig) settled() *Settled {
	r.through = NewSettled(appender{r.store, r})
	return r.through
}

func config() liveconfig.Config {
	to := func(name string, state liveconfig.State, sources ...string) liveconfig.Destination {
		return liveconfig.Destination{Name: name, State: state, Sources: sources}
	}
	return liveconfig.Config{
		Namespace: "shop",
		Sources:   []liveconfig.Source{{Name: "ios"}, {Name: "off"}, {Name: "tv"}, {Name: "web"}},
		Destinations: []liveconfig.Destination{
			to("crm", liveconfig.Active, "ios", "web"), to("paused", liveconfig.Paused, "web"),
			to("off", liveconfig.Disabled, "web", "off"), to("picky", liveconfig.Active, "web"),
		},
		Deletions: []liveconfig.Deletion{{Name: "u1", Generation: 2, Revision: "r", ID: "ab", UID: "1", UserID: "ü1"}},
	}
}

func newRig(t *testing.T) *rig {
	t.Helper()
	store, err := pebblestore.Open(t.TempDir(), pebblestore.Options{Logger: slog.New(slog.DiscardHandler), DuplicateWindow: 10 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	r := &rig{t: t, dir: t.TempDir(), store: store, now: time.Unix(1_800_000_000, 0)}
	r.set(config())
	for _, lane := range []queue.LaneID{{Source: "shop/ios", Destination: "shop/crm"}, {Source: "shop/web", Destination: "shop/crm"}, {Source: "shop/web", Destination: "shop/paused"}, {Source: "shop/web", Destination: "shop/off"}, {Source: "shop/web", Destination: "shop/picky"}} {
		if err := store.OpenLane(lane); err != nil {
			t.Fatal(err)
		}
	}
	r.start()
	return r
}

func (r *rig) set(c liveconfig.Config) {
	r.view = liveconfig.NewView([]liveconfig.Revisioned{{Config: c}})
}

// start is a restart.
func (r *rig) start() {
	r.t.Helper()
	records, err := jobs.Open(r.store, func() time.Time { return r.now })
	if err != nil {
		r.t.Fatal(err)
	}
	r.Service, err = New(Options{
		Dir: r.dir, Store: r.settled(), Records: records, View: func() *liveconfig.View { return r.view },
		Skip: func(ref liveconfig.SourceRef, call *event.Call) []string {
			if call.Type != event.Delete || call.UserID == "" || len(call.Body) == 0 {
				r.t.Errorf("call %+v", call)
			}
			if ref.Source.Name == "web" {
				return []string{"shop/picky"}
			}
			return nil
		},
		Now: func() time.Time { return r.now }, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) step() { r.work(r.t.Context(), r.view); r.now = r.now.Add(time.Second) }

func (r *rig) states() (out []string) {
	r.t.Helper()
	c, _ := r.view.Namespace("shop")
	for _, n := range r.Report(c.Config)[0].Notifications {
		out = append(out, n.Source+" "+n.Destination+" "+n.State+n.Reason)
	}
	slices.Sort(out)
	return out
}

func (r *rig) want(want ...string) {
	r.t.Helper()
	if d := cmp.Diff(want, r.states()); d != "" {
		r.t.Errorf("(-want +got):\n%s", d)
	}
}

// lease takes what waits in a lane.
func (r *rig) lease(source, destination string) []queue.Delivery {
	r.t.Helper()
	got, err := r.store.Lease(queue.LaneID{Source: "shop/" + source, Destination: "shop/" + destination}, 10, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return got
}

func TestNotificationsAreFollowedToTheirEnd(t *testing.T) {
	r := newRig(t)
	r.want()
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending", "web picky Filtered")
	if c, _ := r.view.Namespace("shop"); !r.Report(c.Config)[0].Owner || r.Report(c.Config)[0].Started.IsZero() {
		t.Error("the report lacks its start")
	}

	ios, web := r.lease("ios", "crm"), r.lease("web", "crm")
	if len(ios) != 1 || len(web) != 1 {
		t.Fatalf("%d and %d messages", len(ios), len(web))
	}
	// Exactly what is specified: type, userId, timestamp; no version.
	if got, want := string(ios[0].Body), `{"type":"delete","userId":"ü1","timestamp":"2027-01-15T08:00:00.000Z"}`; got != want || string(web[0].Body) != want || ios[0].Type != "delete" {
		t.Errorf("body %s, want %s", got, want)
	}
	if ios[0].ID == web[0].ID {
		t.Errorf("the messages of two Sources share the id %s", web[0].ID)
	}
	if n := len(r.lease("web", "off")) + len(r.lease("web", "picky")); n != 0 {
		t.Errorf("%d messages for who is not to be told", n)
	}
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending", "web picky Filtered")
	r.store.Ack(ios[0])
	r.step()
	r.want("ios crm Delivered", "web crm Pending", "web paused Pending", "web picky Filtered")
	// A retry is pending, and a restart changes nothing of it.
	r.store.Retry(web[0], r.now.Add(time.Hour), queue.Failure{Time: r.now, Reason: "TimedOut"})
	r.start()
	r.step()
	r.want("ios crm Delivered", "web crm Pending", "web paused Pending", "web picky Filtered")
	web[0], _, _ = must(r.store.LeaseOldest(web[0].Lane))
	if _, err := r.store.Bury(web[0], queue.Failure{Time: r.now, Reason: "Expired"}); err != nil {
		t.Fatal(err)
	}
	r.step()
	r.want("ios crm Delivered", "web crm DeadLetteredExpired", "web paused Pending", "web picky Filtered")
	if err := r.store.DropLane(t.Context(), queue.LaneID{Source: "shop/web", Destination: "shop/paused"}); err != nil {
		t.Fatal(err)
	}
	r.step()
	final := []string{"ios crm Delivered", "web crm DeadLetteredExpired", "web paused Discarded", "web picky Filtered"}
	r.want(final...)
	// Final is final: nothing is sent or looked up again.
	c := config()
	c.Destinations[2].State = liveconfig.Active
	r.set(c)
	r.start()
	r.step()
	r.want(final...)
	if n := r.store.SourceStats("shop/ios").Accepted + r.store.SourceStats("shop/web").Accepted; n != 2 {
		t.Errorf("%d messages, want one for each Source", n)
	}
}

// What was settled shows at once, whatever older messages of the lane wait for.
func TestOutcomeBehindOlderMessages(t *testing.T) {
	r := newRig(t)
	old := queue.Message{Source: "shop/web", ID: "old", Type: "track", AcceptedAt: r.now, Body: []byte("{}")}
	if _, err := r.store.Append(t.Context(), []queue.Message{old}); err != nil {
		t.Fatal(err)
	}
	r.step()
	crm, paused := r.lease("web", "crm"), r.lease("web", "paused")
	if len(crm) != 2 || len(paused) != 2 {
		t.Fatalf("%d and %d messages", len(crm), len(paused))
	}
	r.through.Retry(crm[0], r.now.Add(time.Hour), queue.Failure{Time: r.now, Reason: "TimedOut"})
	r.through.Ack(crm[1])
	r.through.Retry(paused[0], r.now.Add(time.Hour), queue.Failure{Time: r.now, Reason: "TimedOut"})
	if _, err := r.through.Bury(paused[1], queue.Failure{Time: r.now, Reason: "Rejected"}); err != nil {
		t.Fatal(err)
	}
	r.step()
	r.want("ios crm Pending", "web crm Delivered", "web paused DeadLetteredRejected", "web picky Filtered")
	r.through.Ack(r.lease("ios", "crm")[0])
	r.step()
	r.want("ios crm Delivered", "web crm Delivered", "web paused DeadLetteredRejected", "web picky Filtered")
	if n := len(r.through.done); n != 0 {
		t.Errorf("%d outcomes that nobody wants are remembered", n)
	}
}

// Messages from before the clock was set back look younger than the delete message
// behind them; it is pending all the same.
func TestOutcomeAfterTheClockWasSetBack(t *testing.T) {
	r := newRig(t)
	ahead := queue.Message{Source: "shop/web", ID: "ahead", Type: "track", AcceptedAt: r.now.Add(time.Hour), Body: []byte("{}")}
	if _, err := r.store.Append(t.Context(), []queue.Message{ahead}); err != nil {
		t.Fatal(err)
	}
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending", "web picky Filtered")
	crm := r.lease("web", "crm")
	r.through.Retry(crm[0], r.now.Add(time.Hour), queue.Failure{Time: r.now, Reason: "TimedOut"})
	r.through.Retry(crm[1], r.now.Add(time.Hour), queue.Failure{Time: r.now, Reason: "TimedOut"})
	r.start()
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending", "web picky Filtered")
}

func must(d queue.Delivery, ok bool, err error) (queue.Delivery, bool, error) {
	if err != nil || !ok {
		panic(err)
	}
	return d, ok, err
}

func TestOnlySomeSources(t *testing.T) {
	r := newRig(t)
	c := config()
	c.Deletions[0].Sources = []string{"ios", "tv", "unknown"}
	r.set(c)
	r.step()
	r.want("ios crm Pending")
	c.Deletions[0].ID, c.Deletions[0].Sources = "cd", []string{"tv"}
	r.set(c)
	r.step()
	r.want()
}

// What the queue does not take now is sent later, and once.
func TestRefusedAppend(t *testing.T) {
	r := newRig(t)
	r.refuse = queue.ErrFull
	r.step()
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending", "web picky Filtered")
	r.start()
	r.refuse = nil
	r.step()
	r.step()
	if n := r.store.SourceStats("shop/web").Accepted; n != 1 {
		t.Errorf("%d messages", n)
	}
}

// Who is told was decided before the queue took it: not a destination that came,
// or was switched on, while it waited.
func TestDestinationsThatComeWhileItWaits(t *testing.T) {
	r := newRig(t)
	r.refuse = queue.ErrFull
	r.step()
	c := config()
	c.Destinations = append(c.Destinations, liveconfig.Destination{Name: "late", State: liveconfig.Active, Sources: []string{"web"}})
	c.Destinations[2].State = liveconfig.Active
	r.set(c)
	if err := r.store.OpenLane(queue.LaneID{Source: "shop/web", Destination: "shop/late"}); err != nil {
		t.Fatal(err)
	}
	r.start()
	r.refuse = nil
	r.step()
	if crm, late, off := len(r.lease("web", "crm")), len(r.lease("web", "late")), len(r.lease("web", "off")); crm != 1 || late != 0 || off != 0 {
		t.Errorf("%d messages for crm, %d for late, %d for off", crm, late, off)
	}
}

// kill -9 between the append and its record: the repetition is a duplicate.
func TestKilledAfterTheAppend(t *testing.T) {
	r := newRig(t)
	r.now = time.Now() // the store finds duplicates by its own clock
	r.refuse = errors.New("not now")
	r.step()
	planned, err := os.ReadFile(filepath.Join(r.dir, "ab.json"))
	if err != nil {
		t.Fatal(err)
	}
	r.refuse = nil
	r.step()
	if err := os.WriteFile(filepath.Join(r.dir, "ab.json"), planned, 0o600); err != nil {
		t.Fatal(err)
	}
	r.start()
	r.step()
	if n := len(r.lease("ios", "crm")); n != 1 {
		t.Errorf("%d messages", n)
	}
}

func TestDeletedRequestIsForgotten(t *testing.T) {
	r := newRig(t)
	r.step()
	c := config()
	c.Deletions = nil
	r.set(c)
	r.step()
	if files, _ := filepath.Glob(filepath.Join(r.dir, "*")); len(files) != 1 {
		t.Errorf("forgotten before the grace was over")
	}
	r.now = r.now.Add(time.Hour)
	r.step()
	if files, _ := filepath.Glob(filepath.Join(r.dir, "*")); len(files) != 0 {
		t.Errorf("left over: %v", files)
	}
}

func TestPassivePodSendsNothing(t *testing.T) {
	r := newRig(t)
	r.Passive = true
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Run(ctx); err != nil {
		t.Fatal(err)
	}
	r.want()
	if n := r.store.SourceStats("shop/web").Accepted; n != 0 {
		t.Errorf("%d messages", n)
	}
}

// A notification has to reach every URL, also where one is enough for other messages.
func TestEveryURLMustTakeADeletion(t *testing.T) {
	r := newRig(t)
	c := config()
	c.Destinations = []liveconfig.Destination{{Name: "any", State: liveconfig.Active, Sources: []string{"web"}, Success: liveconfig.AnyEndpoint}}
	r.set(c)
	lanes := []queue.LaneID{{Source: "shop/web", Destination: "shop/any", Endpoint: "a", Any: true}, {Source: "shop/web", Destination: "shop/any", Endpoint: "b", Any: true}}
	var got []queue.Delivery
	for _, lane := range lanes {
		if err := r.store.OpenLane(lane); err != nil {
			t.Fatal(err)
		}
	}
	r.step()
	for _, lane := range lanes {
		leased, err := r.store.Lease(lane, 10, nil)
		if err != nil || len(leased) != 1 {
			t.Fatalf("%d messages in %v: %v", len(leased), lane, err)
		}
		got = append(got, leased[0])
	}
	r.through.Ack(got[0])
	r.step()
	r.want("web any Pending")
	r.store.Retry(got[1], r.now, queue.Failure{Time: r.now, Reason: "TimedOut"})
	again, ok, err := r.store.LeaseOldest(lanes[1])
	if err != nil || !ok {
		t.Fatalf("the retry at the second URL is gone: %v", err)
	}
	if _, err := r.through.Bury(again, queue.Failure{Time: r.now, Reason: "Rejected"}); err != nil {
		t.Fatal(err)
	}
	r.step()
	r.want("web any DeadLetteredRejected")
}
