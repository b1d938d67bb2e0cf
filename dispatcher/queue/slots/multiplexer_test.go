package slots_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/slots"
)

func openVolume(t testing.TB, fs vfs.FS, dir string, now func() time.Time) *pebblestore.Store {
	t.Helper()
	s, err := pebblestore.Open(dir, pebblestore.Options{FS: fs, Now: now, DuplicateWindow: 10 * time.Minute, Logger: slog.New(slog.DiscardHandler), MemTableBytes: 1 << 20, CacheBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// release is a Multiplexer with namespaces n0 to n7 in four slots, of which it has three.
type release struct {
	*slots.Multiplexer
	t      *testing.T
	fs     vfs.FS
	stores map[int]*pebblestore.Store
	mu     sync.Mutex
	seen   []queue.LaneID
}

func slotOfTest(namespace string) (int, bool) {
	var i int
	if _, err := fmt.Sscanf(namespace, "n%d", &i); err != nil {
		return 0, false
	}
	return i % 4, true
}

func newRelease(t *testing.T) *release {
	r := &release{t: t, fs: vfs.NewMem(), stores: map[int]*pebblestore.Store{}}
	r.Multiplexer = slots.NewMultiplexer(slots.MultiplexerOptions{
		SlotOf: slotOfTest, Owner: func(slot int) string { return fmt.Sprintf("pod-%d:8443", slot) },
	})
	r.SetNotify(func(l queue.LaneID) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.seen = append(r.seen, l)
	})
	for slot := range 3 {
		r.add(slot)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return r
}

func (r *release) add(slot int) {
	r.t.Helper()
	r.stores[slot] = openVolume(r.t, r.fs, fmt.Sprint("slot", slot), nil)
	r.must("add a slot", r.Add(slot, r.stores[slot]))
}

func (r *release) must(what string, err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatalf("%s: %v", what, err)
	}
}

func laneOf(namespace string) queue.LaneID {
	return queue.LaneID{Source: namespace + "/web", Destination: namespace + "/crm"}
}

func (r *release) open(namespaces ...string) {
	r.t.Helper()
	for _, n := range namespaces {
		r.must("open a lane", r.OpenLane(laneOf(n)))
	}
}

func (r *release) append(namespace, id string) {
	r.t.Helper()
	_, err := r.Append(r.t.Context(), []queue.Message{{Source: namespace + "/web", ID: id, Type: "track", AcceptedAt: time.Now(), Body: []byte(`{}`)}})
	r.must("append to namespace "+namespace, err)
}

func (r *release) lease(namespace string) queue.Delivery {
	r.t.Helper()
	got, err := r.Lease(laneOf(namespace), 1, nil)
	if err != nil || len(got) != 1 {
		r.t.Fatalf("lease a message of namespace %s: got %d messages and error %v, want 1 and none", namespace, len(got), err)
	}
	return got[0]
}

func equal[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// Calls go to the slot of their namespace, and the numbers of the process are sums.
func TestMultiplexerRoutes(t *testing.T) {
	r := newRelease(t)
	names := []string{"n0", "n1", "n2", "n4", "n5"}
	r.open(names...)
	for i, n := range names {
		for k := range i + 1 {
			r.append(n, fmt.Sprint(k))
		}
		r.must("put meta", r.PutMeta("circuit/"+n+"/crm", []byte(n)))
	}
	for i, n := range names {
		slot, _ := slotOfTest(n)
		for other, s := range r.stores {
			want := int64(0)
			if other == slot {
				want = int64(i + 1)
			}
			equal(t, fmt.Sprintf("messages of %s in slot %d", n, other), s.SourceStats(n+"/web").Accepted, want)
		}
		equal(t, "pending messages of "+n, r.LaneStats(laneOf(n)).Pending, int64(i+1))
		equal(t, "accepted messages of the destination of "+n, r.DestinationStats(n+"/crm").Ledger.Accepted, int64(i+1))
	}
	sources := r.Sources()
	slices.Sort(sources)
	equal(t, "Sources", sources, []string{"n0/web", "n1/web", "n2/web", "n4/web", "n5/web"})
	equal(t, "number of lanes", len(r.Lanes()), 5)
	equal(t, "number of destinations", len(r.Destinations()), 5)
	meta, err := r.AllMeta()
	r.must("read meta", err)
	equal(t, "number of values", len(meta), 5)
	equal(t, "bytes on disk", r.DiskBytes(), r.stores[0].DiskBytes()+r.stores[1].DiskBytes()+r.stores[2].DiskBytes())
	found, err := r.Trace(t.Context(), "0", time.Time{})
	r.must("trace", err)
	equal(t, "traces of an ID of five namespaces", len(found.Traces), 5)
	equal(t, "the search is complete", found.Complete, true)

	_, err = r.Append(t.Context(), []queue.Message{{Source: "n0/web", ID: "x"}, {Source: "n1/web", ID: "x"}})
	if err == nil {
		t.Error("append messages of two slots: got no error")
	}
	equal(t, "messages after that", r.SourceStats("n0/web").Accepted, int64(1))
	_, err = r.Append(t.Context(), []queue.Message{{Source: "n0/web", ID: "y"}, {Source: "n4/web", ID: "y"}})
	r.must("append messages of two namespaces of a slot", err)
}

// wantNotHeld compares the error of a call for a slot of another process.
func wantNotHeld(t *testing.T, what string, err error, want slots.NotHeldError) {
	t.Helper()
	var got *slots.NotHeldError
	if !errors.As(err, &got) || *got != want {
		t.Errorf("%s: got error %v, want %+v", what, err, want)
	}
	if !errors.Is(err, queue.ErrUnavailable) || !errors.Is(err, queue.ErrNoLane) || errors.Is(err, queue.ErrClosed) {
		t.Errorf("%s: got error %v, want one that wraps ErrUnavailable and ErrNoLane, and not ErrClosed", what, err)
	}
}

// calls are all calls with an error.
func (r *release) calls(n string) map[string]error {
	ctx, l, d := context.Background(), laneOf(n), n+"/crm"
	_, appendErr := r.Append(ctx, []queue.Message{{Source: n + "/web", ID: "z"}})
	_, leaseErr := r.Lease(l, 1, nil)
	_, _, oldestErr := r.LeaseOldest(l)
	_, expireErr := r.BuryExpired(ctx, l, time.Now(), queue.Failure{})
	_, trimErr := r.TrimDeadLetters(ctx, d, time.Now(), time.Now(), 0)
	_, markErr := r.DeadLetterMark(d)
	return map[string]error{
		"Append": appendErr, "Lease": leaseErr, "LeaseOldest": oldestErr, "BuryExpired": expireErr, "TrimDeadLetters": trimErr,
		"DeadLetterMark": markErr, "OpenLane": r.OpenLane(l), "DropLane": r.DropLane(ctx, l), "EndLane": r.EndLane(l, queue.Ended),
		"ForgetDestination": r.ForgetDestination(d), "DeleteDeadLetters": r.DeleteDeadLetters(ctx, d, "x"),
		"DeadLetters": r.DeadLetters(ctx, d, "", func(queue.DeadLetter) bool { return true }),
		"PutMeta":     r.PutMeta("circuit/"+n, nil), "PutMetaDurable": r.PutMetaDurable("circuit/"+n, nil),
	}
}

func TestMultiplexerNotHeld(t *testing.T) {
	r := newRelease(t)
	for what, err := range r.calls("n3") {
		wantNotHeld(t, what+" of another process's slot", err, slots.NotHeldError{Namespace: "n3", Slot: 3, Owner: "pod-3:8443"})
	}
	for what, err := range r.calls("shop") {
		wantNotHeld(t, what+" of a namespace without a slot", err, slots.NotHeldError{Namespace: "shop", Slot: -1})
	}
	equal(t, "stats of another process's lane", r.LaneStats(laneOf("n3")), queue.LaneStats{})
}

// A slot that is handed over settles what is in flight, and nothing else. When it is here again,
// settlements of the earlier opening have no effect.
func TestMultiplexerHandsOver(t *testing.T) {
	r := newRelease(t)
	r.open("n0", "n1")
	for i := range 3 {
		r.append("n0", fmt.Sprint(i))
		r.append("n1", fmt.Sprint(i))
	}
	acked, late := r.lease("n0"), r.lease("n0")

	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Drain(cancelled, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("drain with messages in flight: got error %v, want %v", err, context.Canceled)
	}
	equal(t, "held slots", r.Held(), []int{1, 2})
	for what, err := range r.calls("n0") {
		wantNotHeld(t, what+" of a draining slot", err, slots.NotHeldError{Namespace: "n0", Slot: 0, Owner: "pod-0:8443"})
	}
	equal(t, "settlement in a draining slot", r.Ack(acked), true)
	equal(t, "lanes", r.Lanes(), []queue.LaneID{laneOf("n1")})
	r.lease("n1")
	r.must("remove the slot", r.Remove(0))
	r.must("remove it again", r.Remove(0))
	r.must("drain it", r.Drain(t.Context(), 0))
	_, err := r.Bury(late, queue.Failure{})
	wantNotHeld(t, "bury a message of a removed slot", err, slots.NotHeldError{Namespace: "n0", Slot: 0, Owner: "pod-0:8443"})

	r.add(0)
	r.open("n0")
	again := r.lease("n0")
	equal(t, "first message after the reopening", again.ID, late.ID)
	equal(t, "settlement of the earlier opening", r.Ack(late), false)
	r.Release(late)
	r.Retry(late, time.Now(), queue.Failure{})
	equal(t, "messages in flight", r.LaneStats(laneOf("n0")).InFlight, int64(1))
	r.Release(again)
	done := make(chan error)
	last := r.lease("n0")
	go func() { done <- r.Drain(t.Context(), 0) }()
	equal(t, "settlement while Drain waits", r.Ack(last), true)
	r.must("drain", <-done)
	l := r.stores[0].LaneStats(laneOf("n0"))
	equal(t, "ledger", l.Ledger, queue.Ledger{Accepted: 3, Delivered: 2, Pending: 1})
}

// A store that is closed under its calls is a slot that was lost.
func TestMultiplexerClosedStore(t *testing.T) {
	r := newRelease(t)
	r.open("n0")
	r.must("close the store of a slot", r.stores[0].Close())
	wantNotHeld(t, "open a lane", r.OpenLane(laneOf("n0")), slots.NotHeldError{Namespace: "n0", Slot: 0, Owner: "pod-0:8443"})
	_, err := r.Lease(laneOf("n0"), 1, nil)
	wantNotHeld(t, "lease", err, slots.NotHeldError{Namespace: "n0", Slot: 0, Owner: "pod-0:8443"})
	if _, err := r.AllMeta(); err != nil {
		t.Errorf("read meta: got error %v, want none", err)
	}
	found, err := r.Trace(t.Context(), "x", time.Time{})
	r.must("trace", err)
	equal(t, "the search is complete", found.Complete, false)
}

// A store with messages of a namespace that the directory assigns to another slot is not used.
func TestMultiplexerForeignStore(t *testing.T) {
	r := newRelease(t)
	s := openVolume(t, vfs.NewMem(), "other", nil)
	defer func() { r.must("close", s.Close()) }()
	if _, err := s.Append(t.Context(), []queue.Message{{Source: "n1/web", ID: "1"}}); err != nil {
		t.Fatal(err)
	}
	if err := r.Add(3, s); err == nil {
		t.Error("add a store with messages of another slot: got no error")
	}
	equal(t, "held slots", r.Held(), []int{0, 1, 2})
	if err := r.Add(1, s); err == nil {
		t.Error("add a slot twice: got no error")
	}
}

// Slots are added and removed under load: every call succeeds or reports that the slot is not held,
// nothing acknowledged is lost, and every lane is notified.
func TestMultiplexerChangesUnderLoad(t *testing.T) {
	r := newRelease(t)
	r.add(3)
	var working sync.WaitGroup
	var appended, delivered [8]int
	stop := make(chan struct{})
	for i := range 8 {
		n := fmt.Sprint("n", i)
		working.Go(func() {
			for k := 0; ; k++ {
				select {
				case <-stop:
					return
				default:
				}
				var held *slots.NotHeldError
				for _, err := range []error{
					r.OpenLane(laneOf(n)),
					func() error {
						_, err := r.Append(context.Background(), []queue.Message{{Source: n + "/web", ID: fmt.Sprint(k), AcceptedAt: time.Now()}})
						if err == nil {
							appended[i]++
						}
						return err
					}(),
					func() error {
						got, err := r.Lease(laneOf(n), 4, nil)
						for _, d := range got {
							if r.Ack(d) {
								delivered[i]++
							}
						}
						return err
					}(),
				} {
					if err != nil && !errors.As(err, &held) && !errors.Is(err, queue.ErrNoLane) {
						t.Errorf("namespace %s: got error %v, want none or NotHeldError", n, err)
					}
				}
			}
		})
	}
	for range 6 {
		for slot := range 4 {
			if err := r.Drain(t.Context(), slot); err != nil {
				t.Errorf("drain slot %d: %v", slot, err)
			}
			if err := r.Remove(slot); err != nil {
				t.Errorf("remove slot %d: %v", slot, err)
			}
			r.add(slot)
		}
	}
	close(stop)
	working.Wait()
	for i := range 8 {
		stats := r.SourceStats(fmt.Sprint("n", i, "/web"))
		if err := stats.Ledger.Balance(); err != nil {
			t.Errorf("namespace n%d: %v", i, err)
		}
		// The ledger lacks the messages that were appended before the lane was opened.
		if stats.Accepted < int64(appended[i]) || stats.Ledger.Delivered != int64(delivered[i]) {
			t.Errorf("namespace n%d: got %+v, want %d or more accepted and %d delivered", i, stats, appended[i], delivered[i])
		}
	}
}

func TestMultiplexerClose(t *testing.T) {
	r := newRelease(t)
	r.must("close", r.Close())
	for what, err := range r.calls("n0") {
		if !errors.Is(err, queue.ErrClosed) {
			t.Errorf("%s after Close: got error %v, want %v", what, err, queue.ErrClosed)
		}
	}
	if _, err := r.AllMeta(); !errors.Is(err, queue.ErrClosed) {
		t.Errorf("AllMeta after Close: got error %v, want %v", err, queue.ErrClosed)
	}
	if _, err := r.Trace(t.Context(), "x", time.Time{}); !errors.Is(err, queue.ErrClosed) {
		t.Errorf("Trace after Close: got error %v, want %v", err, queue.ErrClosed)
	}
	s := openVolume(t, vfs.NewMem(), "other", nil)
	defer func() { r.must("close", s.Close()) }()
	if err := r.Add(3, s); !errors.Is(err, queue.ErrClosed) {
		t.Errorf("Add after Close: got error %v, want %v", err, queue.ErrClosed)
	}
}
