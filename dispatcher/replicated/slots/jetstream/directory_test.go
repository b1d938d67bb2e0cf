package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// openTestAssignments opens the stream of a directory, as soon as the servers have a leader.
func openTestAssignments(t *testing.T, s *server.Server, replicas int, maxBytes int64) *Assignments {
	t.Helper()
	nc, err := Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	for deadline := time.Now().Add(startTimeout); ; {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		a, err := OpenAssignments(ctx, nc, DirectoryConfig{Name: "PH_test_DIR", Subject: "ph.test.dir", Replicas: replicas, MaxBytes: maxBytes})
		cancel()
		if err == nil {
			return a
		}
		if time.Now().After(deadline) {
			t.Fatalf("open the stream: got error %v after %v, want none", err, startTimeout)
		}
	}
}

// TestAssignments compares a stream with the contract of slots.Assignments.
func TestAssignments(t *testing.T) {
	single := startServer(t, server.Options{Port: server.RANDOM_PORT})
	s := openTestAssignments(t, single, 1, 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	if state, err := s.State(ctx); state.Last != 0 || err != nil {
		t.Errorf("last record of an empty stream: got %d and error %v, want 0 and none", state.Last, err)
	}
	_, _, err := s.Get(ctx, "shop")
	wantError(t, "get of an empty stream", err, slots.ErrNoRecord)

	all := []slots.Assignment{{Namespace: "shop", Slot: 3}, {Namespace: "shop.eu", Slot: 0}, {Namespace: "shop-eu", Slot: 1}}
	for i, a := range all {
		if sequence, err := s.Create(ctx, a); sequence != uint64(i+1) || err != nil {
			t.Errorf("create %v: got sequence %d and error %v, want %d and none", a, sequence, err, i+1)
		}
	}
	_, err = s.Create(ctx, slots.Assignment{Namespace: "shop.eu", Slot: 2})
	wantError(t, "create a second record of a namespace", err, slots.ErrWrongSequence)
	if a, sequence, err := s.Get(ctx, "shop.eu"); a != all[1] || sequence != 2 || err != nil {
		t.Errorf("get: got %v, sequence %d and error %v, want %v, 2 and none", a, sequence, err, all[1])
	}
	if _, err := s.Create(ctx, slots.Assignment{Namespace: "shop.>"}); err == nil {
		t.Error("create a record of a name that is no DNS name: got no error")
	}
	if state, err := s.State(ctx); state.Last != 3 || err != nil {
		t.Errorf("last record: got %d and error %v, want 3 and none", state.Last, err)
	}
	var got []slots.Assignment
	err = s.Tail(ctx, 2, func(_ uint64, a slots.Assignment) error {
		if got = append(got, a); len(got) == 2 {
			return errEnough
		}
		return nil
	})
	wantError(t, "tail", err, errEnough)
	if diff := cmp.Diff(all[1:], got); diff != "" {
		t.Errorf("tail from record 2 (-want +got):\n%s", diff)
	}

	// The records cannot be removed.
	if err := s.stream.Purge(ctx); err == nil {
		t.Error("purge of the stream: got no error")
	}
	if err := s.stream.DeleteMsg(ctx, 1); err == nil {
		t.Error("removal of a record: got no error")
	}
}

var errEnough = errors.New("enough")

// A full directory makes no second assignment, and reports that it is full.
func TestAssignmentsFull(t *testing.T) {
	s := openTestAssignments(t, startServer(t, server.Options{Port: server.RANDOM_PORT}), 1, 1024)
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	for i := range 100 {
		_, err := s.Create(ctx, slots.Assignment{Namespace: fmt.Sprint("n", i)})
		if errors.Is(err, slots.ErrNoSpace) && i > 0 {
			return
		}
		if err != nil {
			t.Fatalf("create record %d: got error %v, want none or %v", i, err, slots.ErrNoSpace)
		}
	}
	t.Errorf("100 records in a stream of 1024 bytes: got no error, want %v", slots.ErrNoSpace)
}

// Processes that assign the same namespaces at once in a cluster of three servers agree.
func TestDirectoriesAgree(t *testing.T) {
	const processes, namespaces = 4, 30
	cluster := startCluster(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*startTimeout)
	defer cancel()
	var assigning sync.WaitGroup
	results := make([]map[string]int, processes)
	for i := range processes {
		d, err := slots.OpenDirectory(ctx, openTestAssignments(t, cluster, 3, 1<<20), 8, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		results[i] = map[string]int{}
		assigning.Go(func() {
			for k := range namespaces {
				name := fmt.Sprint("n", k)
				slot, err := d.Assign(ctx, name, slots.PinNone)
				for errors.Is(err, queue.ErrUnavailable) && ctx.Err() == nil { // An election, or a busy machine.
					slot, err = d.Assign(ctx, name, slots.PinNone)
				}
				if err != nil {
					t.Errorf("assign a slot to namespace %s: %v", name, err)
					return
				}
				results[i][name] = slot
			}
		})
	}
	assigning.Wait()
	s := openTestAssignments(t, cluster, 3, 1<<20)
	d, err := slots.OpenDirectory(ctx, s, 8, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for i := range processes {
		for name, slot := range results[i] {
			if want, ok := d.Slot(name); slot != want || !ok {
				t.Errorf("process %d: slot of namespace %s: got %d, want %d", i, name, slot, want)
			}
		}
		if len(results[i]) != namespaces {
			t.Errorf("process %d: got %d namespaces, want %d", i, len(results[i]), namespaces)
		}
	}
	if state, err := s.State(ctx); state.Last != namespaces || err != nil {
		t.Errorf("records: got %d and error %v, want %d and none", state.Last, err, namespaces)
	}
}
