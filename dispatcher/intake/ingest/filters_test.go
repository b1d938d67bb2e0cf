package ingest

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// costly is a Router that records the order of the calls, and whose filters have a cost for one namespace.
type costly struct {
	mu    *sync.Mutex
	order *[]string
	name  string
	units int
}

func (c costly) Skip(string, *event.Call) ([]string, int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	*c.order = append(*c.order, c.name)
	return nil, c.units
}

func (costly) Destinations(string) []string { return nil }

// tracks is a batch of equal calls.
func tracks(n int) string {
	return `{"batch":[` + strings.TrimSuffix(strings.Repeat(`{"type":"track","userId":"u","event":"E"},`, n), ",") + `]}`
}

// Filters are charged by their units, however fast they are: while a namespace with many filters and another one wait
// for the CPU, the turns of both cost the same.
func TestFiltersAreChargedByTheirUnits(t *testing.T) {
	const requests, calls = 8, 10
	for name, c := range map[string]struct {
		units, most int // most are the calls of the namespace with filters before the last one of the other namespace.
	}{
		"many cheap filters":   {100, 2 * calls},
		"a turn for a call":    {maxTurn + 1, 2},
		"four calls in a turn": {maxTurn/4 + 1, 2 * 4},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t)
				f.scheduler = limits.NewScheduler(2)
				var mu sync.Mutex
				var order []string
				config := func(namespace string) liveconfig.Revisioned {
					return liveconfig.Revisioned{Config: liveconfig.Config{Namespace: namespace,
						Sources: []liveconfig.Source{source_("web", namespace, nil)}}}
				}
				routers := map[string]admission.Router{"costly": costly{&mu, &order, "costly", c.units}, "other": costly{&mu, &order, "other", 0}}
				if err := f.Gate.Replace(liveconfig.NewView([]liveconfig.Revisioned{config("costly"), config("other")}), routers,
					func(*liveconfig.View) error { return nil }); err != nil {
					t.Fatal(err)
				}
				var blockers [2]limits.Turn
				for i := range blockers {
					blockers[i].Enter(f.scheduler, &limits.NewSource(new(limits.Share)).Queue)
				}
				var all sync.WaitGroup
				for i := range 2 * requests {
					namespace := []string{"costly", "other"}[i%2]
					all.Go(func() {
						if got := f.serve(post("/v1/batch", namespace, tracks(calls))).Code; got != http.StatusOK {
							t.Errorf("status of a request of %s: got %d, want 200", namespace, got)
						}
					})
					synctest.Wait()
				}
				blockers[0].Leave(0) // One slot, so that the turns determine the order.
				all.Wait()
				blockers[1].Leave(0)
				if len(order) != 2*requests*calls {
					t.Fatalf("routed calls: got %d, want %d", len(order), 2*requests*calls)
				}
				last := len(order) - 1
				for order[last] != "other" {
					last--
				}
				before := 0
				for _, namespace := range order[:last] {
					if namespace == "costly" {
						before++
					}
				}
				if before > c.most {
					t.Errorf("calls of the namespace with filters before the last one of the other: got %d, want at most %d", before, c.most)
				}
			})
		})
	}
}

// The names of the destinations that do not get a call are stored with each message. They count as memory and in the
// size of a commit.
func TestNamesOfExcludedDestinationsAreBounded(t *testing.T) {
	const calls = 50
	names := make([]string, 2_000)
	for i := range names {
		names[i] = fmt.Sprintf("shop/destination-%05d", i)
	}
	each := len(names) * (nameBytes + len(names[0]))
	f := newFixture(t)
	f.Skip = func(string, *event.Call) []string { return slices.Clone(names) }
	stored, largest := 0, 0
	f.Append = func(_ context.Context, part []queue.Message) ([]bool, error) {
		stored += len(part)
		largest = max(largest, len(part))
		if used, want := f.memory.Used(), int64(storeCopies*each*len(part)); used < want {
			t.Errorf("memory for requests during a commit: got %d, want at least %d", used, want)
		}
		return make([]bool, len(part)), nil
	}
	if got := f.serve(post("/v1/batch", "web-key", tracks(calls))).Code; got != http.StatusOK {
		t.Errorf("status: got %d, want 200", got)
	}
	if most := maxCommitPart/each + 1; stored != calls || largest > most {
		t.Errorf("got %d messages in commits of at most %d; want %d in commits of at most %d", stored, largest, calls, most)
	}
	stored, f.memory.Max = 0, int64(storeCopies*each)
	if got := f.serve(post("/v1/batch", "web-key", tracks(calls))); got.Code != http.StatusServiceUnavailable || stored != 0 {
		t.Errorf("without memory for the names: got status %d and %d stored messages; want 503 and none", got.Code, stored)
	}
	if got := f.memory.Used(); got != 0 {
		t.Errorf("memory for requests at the end: got %d, want 0", got)
	}
}

// The deadline of the store begins with each commit: the turns of a request before it can take longer.
func TestEachCommitHasADeadlineOfItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		name := strings.Repeat("d", maxCommitPart)
		f.Skip = func(string, *event.Call) []string { return []string{name} }
		commits := 0
		f.Append = func(ctx context.Context, part []queue.Message) ([]bool, error) {
			commits++
			if deadline, _ := ctx.Deadline(); time.Until(deadline) < limits.StoreTimeout {
				t.Errorf("commit %d: got %v until the deadline, want at least %v", commits, time.Until(deadline), limits.StoreTimeout)
			}
			time.Sleep(limits.StoreTimeout / 2)
			return make([]bool, len(part)), nil
		}
		if got := f.serve(post("/v1/batch", "web-key", tracks(4))).Code; got != http.StatusOK || commits != 4 {
			t.Errorf("got status %d and %d commits; want 200 and 4", got, commits)
		}
	})
}
