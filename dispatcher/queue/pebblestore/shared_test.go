package pebblestore

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// busyDB is an engine in which compactions always wait.
type busyDB struct {
	schedule func(pebble.CompactionGrantHandle) bool
	allowed  int
}

func (d *busyDB) GetAllowedWithoutPermission() int { return d.allowed }
func (d *busyDB) GetWaitingCompaction() (bool, pebble.WaitingCompaction) {
	return true, pebble.WaitingCompaction{}
}
func (d *busyDB) Schedule(h pebble.CompactionGrantHandle) bool { return d.schedule(h) }

// Stores with a Shared compact at most maxCompactions at the same time, each store gets its turn, and none is
// called after it was unregistered.
func TestSharedCompactions(t *testing.T) {
	budget := &compactionBudget{}
	const stores, each = 5, 20
	var running, most atomic.Int64
	var all []*sharedScheduler
	var finished sync.WaitGroup
	unregistered := make([]atomic.Bool, stores)
	done := make([]atomic.Int64, stores)
	for i := range stores {
		s := &sharedScheduler{budget: budget}
		all = append(all, s)
		finished.Add(1)
		once := sync.OnceFunc(finished.Done)
		s.Register(2, &busyDB{allowed: 2, schedule: func(h pebble.CompactionGrantHandle) bool {
			if unregistered[i].Load() {
				t.Errorf("store %d: got a compaction after it was unregistered", i)
			}
			n := running.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			go func() {
				if done[i].Add(1) == each {
					once()
				}
				running.Add(-1)
				h.Done()
			}()
			return true
		}})
	}
	finished.Wait()
	for i, s := range all {
		s.Unregister()
		unregistered[i].Store(true)
		if granted, _ := s.TrySchedule(); granted {
			t.Errorf("store %d: TrySchedule after Unregister: got a compaction, want none", i)
		}
	}
	if got := most.Load(); got != maxCompactions {
		t.Errorf("compactions at the same time: got %d at most, want %d", got, maxCompactions)
	}
}

// A store may not exceed the compactions that the engine allows for it.
func TestSharedCompactionsOfOneStore(t *testing.T) {
	s := &sharedScheduler{budget: &compactionBudget{}}
	s.Register(2, &busyDB{allowed: 1, schedule: func(pebble.CompactionGrantHandle) bool { return false }})
	defer s.Unregister()
	// The goroutine of the scheduler holds the compaction for a moment.
	for range 1000 {
		granted, handle := s.TrySchedule()
		if !granted {
			continue
		}
		if again, _ := s.TrySchedule(); again {
			t.Error("second compaction of a store with one: got it granted, want not")
		}
		handle.Done()
		return
	}
	t.Error("got no compaction in 1,000 attempts, want one")
}

// Two engines with a Shared flush, compact and read their own data, and one block cache serves both.
func TestSharedEngines(t *testing.T) {
	shared := NewShared(8 << 20)
	var all []*pebble.DB
	for i := range 2 {
		o := &pebble.Options{FS: vfs.NewMem(), Logger: silentLogger{}, MemTableSize: 64 << 10, L0CompactionThreshold: 2}
		shared.use(o)
		db, err := pebble.Open(fmt.Sprint("db-", i), o)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, db)
	}
	const keys = 5000
	random := rand.New(rand.NewPCG(1, 1))
	key := func(n int) []byte { return binary.BigEndian.AppendUint64(nil, uint64(n)) }
	for range 4 * keys {
		n := random.IntN(keys)
		for i, db := range all {
			if err := db.Set(key(n), fmt.Appendf(nil, "value %d of %d", n, i), pebble.NoSync); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, db := range all {
		if err := db.Compact(t.Context(), key(0), key(keys), false); err != nil {
			t.Fatal(err)
		}
		iter, err := db.NewIter(nil)
		if err != nil {
			t.Fatal(err)
		}
		for iter.First(); iter.Valid(); iter.Next() {
			if got, want := string(iter.Value()), fmt.Sprintf("value %d of %d", binary.BigEndian.Uint64(iter.Key()), i); got != want {
				t.Fatalf("engine %d: got %q, want %q", i, got, want)
			}
		}
		if err := iter.Close(); err != nil {
			t.Fatal(err)
		}
		if n := db.Metrics().Compact.Count; n == 0 {
			t.Errorf("engine %d: got no compaction, want some", i)
		}
	}
	if a, b := all[0].Metrics().BlockCache.Size, all[1].Metrics().BlockCache.Size; a == 0 || a != b {
		t.Errorf("block cache: got %d and %d bytes, want one cache", a, b)
	}
	shared.Release()
	if got := all[0].Metrics().BlockCache.Size; got != 0 {
		t.Errorf("block cache after Release: got %d bytes, want 0", got)
	}
	for _, db := range all {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}
	shared.Close()
}
