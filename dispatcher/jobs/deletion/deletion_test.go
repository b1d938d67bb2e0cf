package deletion

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/admission/admissiontest"
	"github.com/posthorn/posthorn/dispatcher/jobs/records"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/check"
)

type rig struct {
	*Service
	t     *testing.T
	store *pebblestore.Store
	// tracked is the store as the delivery engine uses it.
	tracked *OutcomeTracker
	now     time.Time
	gate    *admission.Gate
	// appendError, when set, is the result of Append.
	appendError error
}

func (r *rig) Append(ctx context.Context, m []queue.Message) ([]bool, error) {
	if r.appendError != nil {
		return nil, r.appendError
	}
	return r.store.Append(ctx, m)
}

// newTracker replaces the tracker: after a restart it has no outcomes.
func (r *rig) newTracker() *OutcomeTracker {
	r.tracked = NewOutcomeTracker(r.store)
	return r.tracked
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
	r := &rig{t: t, store: store, now: time.Unix(1_800_000_000, 0)}
	r.gate = admission.New(admission.Options{Store: &admissiontest.Store{OnAppend: r.Append}, Logger: slog.New(slog.DiscardHandler)})
	r.set(config())
	for _, lane := range []queue.LaneID{{Source: "shop/ios", Destination: "shop/crm"}, {Source: "shop/web", Destination: "shop/crm"},
		{Source: "shop/web", Destination: "shop/paused"}, {Source: "shop/web", Destination: "shop/off"}} {
		if err := store.OpenLane(lane); err != nil {
			t.Fatal(err)
		}
	}
	r.start()
	return r
}

func (r *rig) set(c liveconfig.Config) {
	router := admissiontest.Router{All: map[string][]string{}, OnSkip: func(string, *event.Call) []string {
		r.t.Error("filters were applied to a delete message")
		return nil
	}}
	for _, d := range c.Destinations {
		for _, source := range d.Sources {
			router.All[source] = append(router.All[source], c.Namespace+"/"+d.Name)
		}
	}
	admissiontest.Set(r.gate, liveconfig.NewView([]liveconfig.Revisioned{{Config: c}}), router)
}

// start simulates a restart.
func (r *rig) start() {
	r.t.Helper()
	stored, err := records.Open(r.store, func() time.Time { return r.now })
	if err != nil {
		r.t.Fatal(err)
	}
	r.Service, err = New(Options{
		Store: r.newTracker(), Records: stored, Gate: r.gate,
		Now: func() time.Time { return r.now }, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) step() { r.work(r.t.Context(), r.gate.View()); r.now = r.now.Add(time.Second) }

func (r *rig) states() (out []string) {
	r.t.Helper()
	c, _ := r.gate.View().Namespace("shop")
	for _, n := range r.Report(c.Config)[0].Notifications {
		out = append(out, n.Source+" "+n.Destination+" "+n.State+n.Reason)
	}
	slices.Sort(out)
	return out
}

// stored returns the IDs of the records in the store.
func (r *rig) stored() (ids []string) {
	r.t.Helper()
	values, err := r.store.AllMeta()
	check.NoError(r.t, "read the records", err)
	for key := range values {
		if id, ok := strings.CutPrefix(key, keyPrefix); ok {
			ids = append(ids, id)
		}
	}
	return ids
}

func (r *rig) want(want ...string) {
	r.t.Helper()
	if d := cmp.Diff(want, r.states()); d != "" {
		r.t.Errorf("notifications (-want +got):\n%s", d)
	}
}

// lease leases the pending messages of a lane.
func (r *rig) lease(source, destination string) []queue.Delivery {
	r.t.Helper()
	got, err := r.store.Lease(queue.LaneID{Source: "shop/" + source, Destination: "shop/" + destination}, 10, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return got
}

func TestNotificationOutcomes(t *testing.T) {
	r := newRig(t)
	r.want()
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending")
	check.Equal(t, "report has Owner", r.report().Owner, true)
	check.Equal(t, "report lacks its start", r.report().Started.IsZero(), false)

	ios, web := r.lease("ios", "crm"), r.lease("web", "crm")
	if len(ios) != 1 || len(web) != 1 {
		t.Fatalf("messages for crm: got %d of ios and %d of web, want 1 of each", len(ios), len(web))
	}
	// The specification gives exactly these fields: type, userId, timestamp; no version.
	body := `{"type":"delete","userId":"ü1","timestamp":"2027-01-15T08:00:00.000Z"}`
	check.Equal(t, "body of ios", string(ios[0].Body), body)
	check.Equal(t, "body of web", string(web[0].Body), body)
	check.Equal(t, "type", ios[0].Type, "delete")
	if ios[0].ID == web[0].ID {
		t.Errorf("the messages of two Sources have the same id %s", web[0].ID)
	}
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending")
	r.store.Ack(ios[0])
	r.step()
	r.want("ios crm Delivered", "web crm Pending", "web paused Pending")
	// A message with a planned retry is pending, also after a restart.
	r.store.Retry(web[0], r.now.Add(time.Hour), queue.Failure{Time: r.now, Reason: "TimedOut"})
	r.start()
	r.step()
	r.want("ios crm Delivered", "web crm Pending", "web paused Pending")
	web[0], _, _ = must(r.store.LeaseOldest(web[0].Lane))
	if _, err := r.store.Bury(web[0], queue.Failure{Time: r.now, Reason: "Expired"}); err != nil {
		t.Fatal(err)
	}
	r.step()
	r.want("ios crm Delivered", "web crm DeadLetteredExpired", "web paused Pending")
	if err := r.store.DropLane(t.Context(), queue.LaneID{Source: "shop/web", Destination: "shop/paused"}); err != nil {
		t.Fatal(err)
	}
	r.step()
	final := []string{"ios crm Delivered", "web crm DeadLetteredExpired", "web paused Discarded"}
	r.want(final...)
	// Final states do not change: nothing is sent again.
	c := config()
	c.Destinations[1].State = liveconfig.Active
	r.set(c)
	r.start()
	r.step()
	r.want(final...)
	check.Equal(t, "messages, one for each Source", r.messages(), 2)
}

// An outcome is reported at once, even if older messages of the lane are pending.
func TestOutcomeBehindOlderMessages(t *testing.T) {
	r := newRig(t)
	old := queue.Message{Source: "shop/web", ID: "old", Type: "track", AcceptedAt: r.now, Body: []byte("{}")}
	if _, err := r.store.Append(t.Context(), []queue.Message{old}); err != nil {
		t.Fatal(err)
	}
	r.step()
	crm, paused := r.lease("web", "crm"), r.lease("web", "paused")
	if len(crm) != 2 || len(paused) != 2 {
		t.Fatalf("messages of web: got %d for crm and %d for paused, want 2 for each", len(crm), len(paused))
	}
	if err := r.tracked.SettleAll(crm[0].Lane, []queue.Settlement{
		{Delivery: crm[0], Outcome: queue.Retried, At: r.now.Add(time.Hour), Failure: queue.Failure{Time: r.now, Reason: "TimedOut"}},
		{Delivery: crm[1], Outcome: queue.Acked},
	}); err != nil {
		t.Fatal(err)
	}
	r.tracked.Retry(paused[0], r.now.Add(time.Hour), queue.Failure{Time: r.now, Reason: "TimedOut"})
	if _, err := r.tracked.Bury(paused[1], queue.Failure{Time: r.now, Reason: "Rejected"}); err != nil {
		t.Fatal(err)
	}
	r.step()
	r.want("ios crm Pending", "web crm Delivered", "web paused DeadLetteredRejected")
	r.tracked.Ack(r.lease("ios", "crm")[0])
	r.step()
	r.want("ios crm Delivered", "web crm Delivered", "web paused DeadLetteredRejected")
	check.Equal(t, "outcomes that are still tracked", len(r.tracked.done), 0)
}

// Messages from before the clock was set back have a later time than the delete message
// behind them; it is still pending.
func TestOutcomeAfterTheClockWasSetBack(t *testing.T) {
	r := newRig(t)
	ahead := queue.Message{Source: "shop/web", ID: "ahead", Type: "track", AcceptedAt: r.now.Add(time.Hour), Body: []byte("{}")}
	if _, err := r.store.Append(t.Context(), []queue.Message{ahead}); err != nil {
		t.Fatal(err)
	}
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending")
	crm := r.lease("web", "crm")
	r.tracked.Retry(crm[0], r.now.Add(time.Hour), queue.Failure{Time: r.now, Reason: "TimedOut"})
	r.tracked.Retry(crm[1], r.now.Add(time.Hour), queue.Failure{Time: r.now, Reason: "TimedOut"})
	r.start()
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending")
}

func must(d queue.Delivery, ok bool, err error) (queue.Delivery, bool, error) {
	if err != nil || !ok {
		panic(err)
	}
	return d, ok, err
}

func TestSelectedSources(t *testing.T) {
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

// The notification of a suspended destination is pending, and delivered after its resumption.
func TestSuspendedDestination(t *testing.T) {
	r := newRig(t)
	if err := r.store.OpenLane(queue.LaneID{Source: "shop/off", Destination: "shop/off"}); err != nil {
		t.Fatal(err)
	}
	c := config()
	c.Deletions[0].Sources = []string{"off"}
	c.Destinations = append(c.Destinations, liveconfig.Destination{Name: "off", State: liveconfig.Suspended, Sources: []string{"off"}})
	r.set(c)
	r.step()
	r.want("off off Pending")
	c.Destinations[2].State = liveconfig.Active
	r.set(c)
	r.tracked.Ack(r.lease("off", "off")[0])
	r.step()
	r.want("off off Delivered")
}

// A destination that ignores deletions is not notified, also by the message that others of the Source get.
func TestIgnoredDeletions(t *testing.T) {
	r := newRig(t)
	c := config()
	c.Destinations[0].IgnoreDeletions = true
	r.set(c)
	r.step()
	r.want("web paused Pending")
	check.Equal(t, "messages of web", r.store.SourceStats("shop/web").Accepted, 1)
	check.Equal(t, "messages of web for crm", len(r.lease("web", "crm")), 0)
	check.Equal(t, "messages of ios", r.store.SourceStats("shop/ios").Accepted, 0)
}

// A message that the queue rejects is sent later, and once.
func TestRejectedAppend(t *testing.T) {
	r := newRig(t)
	r.appendError = queue.ErrFull
	r.step()
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending")
	r.start()
	r.appendError = nil
	r.step()
	r.step()
	check.Equal(t, "messages of web", r.store.SourceStats("shop/web").Accepted, 1)
}

// The plan selects the destinations before the append. Destinations that are added
// between the plan and the append are not notified.
func TestDestinationsAddedBeforeTheAppend(t *testing.T) {
	r := newRig(t)
	r.appendError = queue.ErrFull
	r.step()
	c := config()
	c.Destinations = append(c.Destinations, liveconfig.Destination{Name: "late", State: liveconfig.Active, Sources: []string{"web"}})
	r.set(c)
	if err := r.store.OpenLane(queue.LaneID{Source: "shop/web", Destination: "shop/late"}); err != nil {
		t.Fatal(err)
	}
	r.start()
	r.appendError = nil
	r.step()
	check.Equal(t, "messages for the planned destination", len(r.lease("web", "crm")), 1)
	check.Equal(t, "messages for the added destination", len(r.lease("web", "late")), 0)
}

// kill -9 between the append and its record: the repetition is a duplicate.
func TestKilledAfterTheAppend(t *testing.T) {
	r := newRig(t)
	r.now = time.Now() // The store detects duplicates by its own clock.
	r.appendError = errors.New("not now")
	r.step()
	all, err := r.store.AllMeta()
	check.NoError(t, "read the records", err)
	r.appendError = nil
	r.step()
	check.NoError(t, "restore the planned record", r.store.PutMeta(keyPrefix+"ab", all[keyPrefix+"ab"]))
	r.start()
	r.step()
	check.Equal(t, "messages of ios", len(r.lease("ios", "crm")), 1)
}

func TestRecordOfADeletedRequestIsRemoved(t *testing.T) {
	r := newRig(t)
	r.step()
	c := config()
	c.Deletions = nil
	r.set(c)
	r.step()
	check.Equal(t, "records within the grace period", len(r.stored()), 1)
	r.now = r.now.Add(time.Hour)
	r.step()
	check.Same(t, "records after the grace period", r.stored(), nil)
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
	check.Equal(t, "messages", r.messages(), 0)
}

// With BegunOnly, a request without a record does not begin, and one with a record continues.
func TestBegunOnly(t *testing.T) {
	r := newRig(t)
	r.BegunOnly = true
	r.step()
	check.Same(t, "records of a request that had not begun", r.stored(), nil)
	check.Equal(t, "messages of a request that had not begun", r.messages(), 0)
	r.BegunOnly = false
	r.step()
	sent := r.messages()
	check.Equal(t, "records of a begun request", len(r.stored()), 1)
	r.start()
	r.BegunOnly = true
	for _, d := range r.lease("web", "crm") {
		r.Store.Ack(d)
	}
	before := r.states()
	r.step()
	if cmp.Equal(r.states(), before) {
		t.Errorf("states of a begun request: got %v as before, want the outcome of a notification", before)
	}
	check.Equal(t, "messages of a begun request", r.messages(), sent)
}

// Every URL must accept a notification, even if one URL is enough for other messages.
func TestEveryURLMustAcceptADeletion(t *testing.T) {
	r := newRig(t)
	c := config()
	c.Destinations = []liveconfig.Destination{{Name: "any", State: liveconfig.Active, Sources: []string{"web"},
		Success: liveconfig.AnyEndpoint}}
	r.set(c)
	lanes := []queue.LaneID{{Source: "shop/web", Destination: "shop/any", Endpoint: "a", Any: true},
		{Source: "shop/web", Destination: "shop/any", Endpoint: "b", Any: true}}
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
			t.Fatalf("lane %v: got %d messages and error %v, want 1 message", lane, len(leased), err)
		}
		got = append(got, leased[0])
	}
	r.tracked.Ack(got[0])
	r.step()
	r.want("web any Pending")
	r.store.Retry(got[1], r.now, queue.Failure{Time: r.now, Reason: "TimedOut"})
	again, ok, err := r.store.LeaseOldest(lanes[1])
	if err != nil || !ok {
		t.Fatalf("retry at the second URL: got %v and error %v, want a message", ok, err)
	}
	if _, err := r.tracked.Bury(again, queue.Failure{Time: r.now, Reason: "Rejected"}); err != nil {
		t.Fatal(err)
	}
	r.step()
	r.want("web any DeadLetteredRejected")
}
