package pebblestore_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/storetest"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// slotStore is a store whose log is a simulated stream.
type slotStore struct {
	*pebblestore.Store
	writer *slots.Writer
}

func (s *slotStore) Close() error {
	defer s.writer.Close()
	return s.Store.Close()
}

// openSlot takes over a slot and opens its store.
func openSlot(t testing.TB, log slots.Log, o pebblestore.Options) *slotStore {
	t.Helper()
	o.Logger = slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	w, err := slots.Slot{Log: log, Dir: "data/queue", Store: o}.TakeOver(ctx)
	if err != nil {
		t.Fatal(err)
	}
	o.Log = w
	s, err := pebblestore.Open("data/queue", o)
	if err != nil {
		t.Fatal(err)
	}
	return &slotStore{s, w}
}

// slotEngine returns the engine of a slot. Each Open opens the local files of the last one, or none
// when forget is set.
func slotEngine(forget bool) storetest.Engine {
	clock := &storetest.Clock{}
	power := &slotPower{stream: slotstest.NewStream(0), fs: vfs.NewCrashableMem(), forget: forget}
	return storetest.Engine{
		Open: func(t testing.TB) queue.Store {
			log, fs := power.boot()
			return openSlot(t, log, pebblestore.Options{
				FS: fs, DuplicateWindow: 10 * time.Minute, Now: clock.Now, MemTableBytes: 256 << 10, CacheBytes: 1 << 20,
				FlushInterval: time.Millisecond, SyncInterval: 5 * time.Millisecond,
				Fatal: func(err error) { t.Errorf("fatal: %v", err) },
			})
		},
		Clock: clock, DuplicateWindow: 10 * time.Minute,
		Trim: func(s queue.Store) { pebblestore.TrimNow(s.(*slotStore).Store) },
		IsPending: func(s queue.Store, lane queue.LaneID, seq uint64) bool {
			return pebblestore.LaneHasPending(s.(*slotStore).Store, lane, seq)
		},
		Crash: power,
	}
}

// slotPower simulates power losses: the stream survives up to a record, and of the local files
// nothing or what was synced.
type slotPower struct {
	mu     sync.Mutex
	stream *slotstest.Stream
	fs     *vfs.MemFS
	forget bool

	left     int
	rng      *rand.Rand
	survived *slotstest.Stream
	files    *vfs.MemFS
}

// boot returns the log and the file system of the next run.
func (p *slotPower) boot() (slots.Log, vfs.FS) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.forget {
		p.fs = vfs.NewCrashableMem()
	}
	log := slotstest.NewLog(p.stream)
	log.OnPublish = p.publishing
	return log, p.fs
}

// publishing is called before each record is published.
func (p *slotPower) publishing() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left == 0 {
		return
	}
	if p.left--; p.left == 0 {
		p.survived = p.stream.Clone()
		p.files = p.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: p.rng})
	}
}

// Arm implements storetest.Crasher. A record has the changes of several operations of a store.
func (p *slotPower) Arm(rng *rand.Rand, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left, p.survived = 1+rng.IntN(n/4), nil
	p.rng = rand.New(rand.NewPCG(rng.Uint64(), 0))
}

// Crashed implements storetest.Crasher.
func (p *slotPower) Crashed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.survived != nil
}

// Recover implements storetest.Crasher.
func (p *slotPower) Recover(t testing.TB, s queue.Store) {
	if err := s.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stream, p.fs = p.survived, p.files
}

// The store passes the conformance suite on a replicated log, also if each start has to restore
// the whole store from the log.
func TestSlotConformance(t *testing.T) {
	for _, test := range []struct {
		name   string
		forget bool
	}{{"local files", false}, {"restored", true}} {
		t.Run(test.name, func(t *testing.T) {
			if test.forget && testing.Short() {
				t.Skip("the long form restores the store at each start")
			}
			storetest.Run(t, func(*testing.T) storetest.Engine {
				e := slotEngine(test.forget)
				e.Crash = nil
				return e
			})
		})
	}
}

// TestSlotCrashes is TestCrashes, TestGroupCrashes and TestBatchCrashes with a replicated log.
func TestSlotCrashes(t *testing.T) {
	first := pebblestore.Env("POSTHORN_CRASH_SEED", 1)
	for seed := first; seed < first+pebblestore.Trials("POSTHORN_CRASH_SEEDS", 20); seed++ {
		t.Run(strconv.Itoa(seed), func(t *testing.T) {
			start := func(*testing.T) storetest.Engine { return slotEngine(seed%2 == 0) }
			storetest.Model(t, uint64(seed), 400, start)
			storetest.GroupsCrash(t, uint64(seed), 400, start)
			storetest.BatchCrash(t, uint64(seed), start)
		})
	}
}

// Local files with a record that the log lacks are kept, and the slot is not opened.
func TestForeignFilesAreKept(t *testing.T) {
	stream := slotstest.NewStream(0)
	message := []queue.Message{{Source: "shop/web", ID: "a", AcceptedAt: time.Now(), Body: []byte("{}")}}
	first := openSlot(t, slotstest.NewLog(stream), pebblestore.Options{FS: vfs.NewMem()})
	if _, err := first.Append(t.Context(), message); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}

	// The files of another run have a message that only a fork of the stream has.
	fs := vfs.NewMem()
	forked := openSlot(t, slotstest.NewLog(stream.Clone()), pebblestore.Options{FS: fs})
	message[0].ID = "b"
	if _, err := forked.Append(t.Context(), message); err != nil {
		t.Fatal(err)
	}
	if err := forked.Close(); err != nil {
		t.Fatal(err)
	}
	o := pebblestore.Options{FS: fs, Logger: slog.New(slog.DiscardHandler)}
	for range 2 {
		if _, err := (slots.Slot{Log: slotstest.NewLog(stream), Dir: "data/queue", Store: o}).TakeOver(t.Context()); !errors.Is(err,
			slots.ErrRecordsLost) {
			t.Fatalf("open the slot: got error %v, want %v", err, slots.ErrRecordsLost)
		}
	}
	r, err := pebblestore.OpenReplica("data/queue", o)
	if err != nil {
		t.Fatalf("open the files: %v", err)
	}
	defer r.Close()
	if r.Position().Batch == 0 {
		t.Error("the files have no messages after the slot was not opened")
	}
}

// The claim of another pod ends a session: its store acknowledges nothing any more.
func TestClaimEndsTheSession(t *testing.T) {
	stream := slotstest.NewStream(0)
	old := openSlot(t, slotstest.NewLog(stream), pebblestore.Options{FS: vfs.NewMem()})
	defer func() { _ = old.Close() }()
	message := []queue.Message{{Source: "shop/web", ID: "a", AcceptedAt: time.Now(), Body: []byte("{}")}}
	if _, err := old.Append(t.Context(), message); err != nil {
		t.Fatal(err)
	}
	s := openSlot(t, slotstest.NewLog(stream), pebblestore.Options{FS: vfs.NewMem()})
	defer s.Close()
	message[0].ID = "b"
	if _, err := old.Append(t.Context(), message); err == nil {
		t.Error("append to the old store: got no error, want one")
	}
	<-old.writer.Done()
	if got := s.SourceStats("shop/web").Accepted; got != 1 {
		t.Errorf("accepted messages of the new store: got %d, want 1", got)
	}
}
