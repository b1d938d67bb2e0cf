package slots_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

func openDirectory(t *testing.T, log slots.Assignments, n int) *slots.Directory {
	t.Helper()
	d, err := slots.OpenDirectory(t.Context(), log, n, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatalf("open a directory: %v", err)
	}
	return d
}

func assign(t *testing.T, d *slots.Directory, namespace string, pin int) int {
	t.Helper()
	slot, err := d.Assign(t.Context(), namespace, pin)
	if err != nil {
		t.Fatalf("assign a slot to namespace %s: %v", namespace, err)
	}
	return slot
}

func TestDirectoryAssigns(t *testing.T) {
	log := slotstest.NewAssignments(slotstest.Faults{}, nil)
	d := openDirectory(t, log, 3)
	if slot, ok := d.Slot("shop"); ok {
		t.Errorf("slot of an unknown namespace: got %d, want none", slot)
	}
	var got []int
	for i := range 6 {
		got = append(got, assign(t, d, fmt.Sprint("n", i), slots.PinNone))
	}
	got = append(got, assign(t, d, "pinned", 2), assign(t, d, "pinned", 1), assign(t, d, "n7", slots.PinNone),
		assign(t, d, "n0", slots.PinNone))
	if diff := cmp.Diff([]int{0, 1, 2, 0, 1, 2, 2, 2, 0, 0}, got); diff != "" {
		t.Errorf("assigned slots (-want +got):\n%s", diff)
	}
	for _, c := range []struct {
		namespace string
		pin       int
		want      string
	}{
		{"x", 3, "slot 3 does not exist; use 0 to 2"},
		{"x", -2, "slot -2 does not exist; use 0 to 2"},
		{"a b", 0, "not a DNS name"},
		{"a_b", 0, "not a DNS name"},
		{"shop.*", 0, "not a DNS name"},
		{"", slots.PinNone, "not a DNS name"},
	} {
		if _, err := d.Assign(t.Context(), c.namespace, c.pin); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("assign slot %d to namespace %q: got error %v, want %q", c.pin, c.namespace, err, c.want)
		}
	}
	if got := log.Records(); got != 8 {
		t.Errorf("records: got %d, want 8", got)
	}
}

// The number of slots can grow. If it shrinks, slots with namespaces remain.
func TestDirectoryChangesSlots(t *testing.T) {
	log := slotstest.NewAssignments(slotstest.Faults{}, nil)
	d := openDirectory(t, log, 2)
	assign(t, d, "a", slots.PinNone)
	assign(t, d, "b", slots.PinNone)
	d = openDirectory(t, log, 4)
	if got := assign(t, d, "c", slots.PinNone); got != 2 {
		t.Errorf("slot of a namespace after growth: got %d, want 2", got)
	}
	d = openDirectory(t, log, 1)
	if got := d.Slots(); got != 3 {
		t.Errorf("slots after the number was lowered: got %d, want 3", got)
	}
	if got := assign(t, d, "e", slots.PinNone); got != 0 {
		t.Errorf("slot of a namespace after the number was lowered: got %d, want 0", got)
	}
	if got, ok := d.Slot("c"); got != 2 || !ok {
		t.Errorf("slot of namespace c: got %d, %t, want 2", got, ok)
	}
	for _, n := range []int{0, -1, 1025} {
		if _, err := slots.OpenDirectory(t.Context(), log, n, slog.Default()); err == nil {
			t.Errorf("open a directory with %d slots: got no error", n)
		}
	}
}

// While the stream has no leader, known namespaces have their slots, and unknown ones are
// unavailable.
func TestDirectoryWithoutLeader(t *testing.T) {
	log := slotstest.NewAssignments(slotstest.Faults{}, nil)
	d := openDirectory(t, log, 2)
	assign(t, d, "a", slots.PinNone)
	log.SetLeader(false)
	if got := assign(t, d, "a", slots.PinNone); got != 0 {
		t.Errorf("slot of a known namespace: got %d, want 0", got)
	}
	if _, err := d.Assign(t.Context(), "b", slots.PinNone); !errors.Is(err, queue.ErrUnavailable) {
		t.Errorf("assign a slot without a leader: got error %v, want %v", err, queue.ErrUnavailable)
	}
	if _, err := slots.OpenDirectory(t.Context(), log, 2, slog.Default()); !errors.Is(err, slotstest.ErrNoLeader) {
		t.Errorf("open a directory without a leader: got error %v, want %v", err, slotstest.ErrNoLeader)
	}
	log.SetLeader(true)
	if got := assign(t, d, "b", slots.PinNone); got != 1 {
		t.Errorf("slot of a namespace after the election: got %d, want 1", got)
	}
}

// Processes that assign the same namespaces at once, through a stream that loses requests and
// answers, agree, and follow each other.
func TestDirectoriesAgree(t *testing.T) {
	const processes, namespaces, n = 5, 40, 8
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			log := slotstest.NewAssignments(slotstest.Faults{LostRequest: 0.2, LostAnswer: 0.2, StaleRead: 0.2}, rand.New(rand.NewPCG(seed, 0)))
			ctx, cancel := context.WithCancel(t.Context())
			var running, assigning sync.WaitGroup
			directories := make([]*slots.Directory, processes)
			results := make([]map[string]int, processes)
			for i := range processes {
				d := openDirectory(t, log, n)
				directories[i], results[i] = d, map[string]int{}
				running.Go(func() {
					if err := d.Run(ctx); !errors.Is(err, context.Canceled) {
						t.Errorf("seed %d: follow the directory: got error %v, want %v", seed, err, context.Canceled)
					}
				})
				assigning.Go(func() {
					for k := range namespaces {
						name := fmt.Sprint("n", (k+i*7)%namespaces)
						for {
							slot, err := d.Assign(ctx, name, slots.PinNone)
							if err == nil {
								results[i][name] = slot
								break
							}
							if !errors.Is(err, queue.ErrUnavailable) {
								t.Errorf("seed %d: assign a slot: got error %v, want %v", seed, err, queue.ErrUnavailable)
								return
							}
							time.Sleep(time.Second)
						}
					}
				})
			}
			assigning.Wait()
			synctest.Wait()
			for i, d := range directories {
				if diff := cmp.Diff(results[0], results[i]); diff != "" {
					t.Errorf("seed %d: results of process %d (-process 0 +got):\n%s", seed, i, diff)
				}
				for name, want := range results[0] {
					if got, ok := d.Slot(name); got != want || !ok {
						t.Errorf("seed %d: process %d has slot %d, %t of namespace %s; want %d", seed, i, got, ok, name, want)
					}
				}
			}
			if got := log.Records(); got != namespaces {
				t.Errorf("seed %d: records: got %d, want %d", seed, got, namespaces)
			}
			cancel()
			running.Wait()
		})
	}
}

// A directory whose stream was deleted and created again is detected, so that no namespace has
// two slots.
func TestDirectoryReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := slotstest.NewAssignments(slotstest.Faults{}, nil)
		d := openDirectory(t, log, 2)
		assign(t, d, "a", slots.PinNone)
		assign(t, d, "b", slots.PinNone)
		followed := make(chan error)
		go func() { followed <- d.Run(t.Context()) }()
		synctest.Wait()
		log.Replace()
		if _, err := d.Assign(t.Context(), "c", slots.PinNone); !errors.Is(err, slots.ErrReplaced) {
			t.Errorf("assign a slot in a replaced directory: got error %v, want %v", err, slots.ErrReplaced)
		}
		other := openDirectory(t, log, 2)
		assign(t, other, "d", slots.PinNone)
		assign(t, other, "b", 0) // It was 1.
		if err := <-followed; !errors.Is(err, slots.ErrReplaced) {
			t.Errorf("follow a replaced directory: got error %v, want %v", err, slots.ErrReplaced)
		}
	})
}

// A directory that lacks records after a restore, or was created again, is detected without an assignment.
// A deleted one is reported until it is restored.
func TestDirectoryIsChecked(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*slotstest.Assignments)
		want   error
	}{
		"created again":        {(*slotstest.Assignments).Replace, slots.ErrReplaced},
		"restored with less":   {func(s *slotstest.Assignments) { s.Restore(1) }, slots.ErrReplaced},
		"restored with all":    {func(s *slotstest.Assignments) { s.Restore(2) }, nil},
		"deleted and restored": {func(s *slotstest.Assignments) { s.SetDeleted(true) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				log := slotstest.NewAssignments(slotstest.Faults{}, nil)
				d := openDirectory(t, log, 2)
				assign(t, d, "a", slots.PinNone)
				assign(t, d, "b", slots.PinNone)
				ctx, cancel := context.WithCancel(t.Context())
				followed := make(chan error, 1)
				go func() { followed <- d.Run(ctx) }()
				synctest.Wait()
				c.change(log)
				time.Sleep(time.Minute)
				if c.want == nil {
					if isDeleted := name == "deleted and restored"; errors.Is(d.Err(), slots.ErrNoStream) != isDeleted {
						t.Errorf("error of the directory: got %v, want %v: %t", d.Err(), slots.ErrNoStream, isDeleted)
					}
					log.SetDeleted(false)
					time.Sleep(time.Minute)
					if err := d.Err(); err != nil {
						t.Errorf("error of the restored directory: got %v, want none", err)
					}
					c.want = context.Canceled
				}
				cancel()
				if err := <-followed; !errors.Is(err, c.want) {
					t.Errorf("follow the directory: got error %v, want %v", err, c.want)
				}
			})
		})
	}
}
