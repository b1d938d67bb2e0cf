package pebblestore

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/storetest"
)

func open(t testing.TB, dir string, o Options) *Store {
	t.Helper()
	if o.Logger == nil {
		o.Logger = discard
	}
	s, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func trimNow(s queue.Store) {
	s.(*Store).maintain(true)
	_ = s.(*Store).reclaim(context.Background()) // The error of a failed file system is expected.
}

// laneHasPending reports whether a message is pending in a lane.
func laneHasPending(s queue.Store, id queue.LaneID, seq uint64) bool {
	p := s.(*Store)
	l := p.lane(id)
	l.mu.Lock()
	defer l.mu.Unlock()
	ok, err := p.isPendingIn(l, seq)
	if err != nil {
		panic(err)
	}
	return ok
}

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Engine {
		// The results must not depend on the free space of this machine.
		dir, clock, disk := t.TempDir(), &storetest.Clock{}, &usageFS{FS: vfs.Default}
		return storetest.Engine{
			Open: func(t testing.TB) queue.Store {
				return open(t, dir, Options{FS: disk, DuplicateWindow: 10 * time.Minute, Now: clock.Now})
			},
			Clock: clock, DuplicateWindow: 10 * time.Minute, Trim: trimNow, IsPending: laneHasPending,
		}
	})
}

// Stored messages contain user data, so only their owner may read the files.
func TestFilesAreReadableByOwnerOnly(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data")
	s := open(t, filepath.Join(data, "queue"), Options{})
	defer s.Close()
	for _, dir := range []string{data, filepath.Join(data, "queue")} {
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v; want a directory of mode 0700", dir, info.Mode(), err)
		}
	}
}

// Lanes that are opened at the same time share disk syncs.
func TestLanesOpenTogether(t *testing.T) {
	var syncs atomic.Int64
	s := open(t, "queue", Options{FS: storetest.Watch(vfs.NewMem(), func() {}, func() {
		syncs.Add(1)
		time.Sleep(20 * time.Millisecond) // Lanes that wait for CPU time meanwhile share the next one.
	})})
	defer s.Close()
	syncs.Store(0)
	const lanes = 320
	var group errgroup.Group
	group.SetLimit(32)
	for i := range lanes {
		group.Go(func() error {
			return s.OpenLane(queue.LaneID{Source: "shop/web", Destination: fmt.Sprint("shop/d", i)})
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := syncs.Load(); n > lanes/4 || len(s.Lanes()) != lanes {
		t.Errorf("%d syncs for %d lanes", n, lanes)
	}
}

func env(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}

// trials is env for a number of random trials, of which -short runs a tenth.
func trials(name string, otherwise int) int {
	if testing.Short() {
		otherwise = (otherwise + 9) / 10
	}
	return env(name, otherwise)
}

// TestCrashes simulates power losses at random moments of random operations.
// POSTHORN_CRASH_SEEDS sets the number of seeds, POSTHORN_CRASH_SEED the first one.
func TestCrashes(t *testing.T) {
	first := env("POSTHORN_CRASH_SEED", 1)
	for seed := first; seed < first+trials("POSTHORN_CRASH_SEEDS", 20); seed++ {
		t.Run(strconv.Itoa(seed), func(t *testing.T) {
			storetest.Model(t, uint64(seed), 400, crashing)
		})
	}
}

// TestGroupCrashes simulates one power loss per seed, at a random moment of random operations
// on a group. The variables of TestCrashes set the seeds.
func TestGroupCrashes(t *testing.T) {
	first := env("POSTHORN_CRASH_SEED", 1)
	for seed := first; seed < first+trials("POSTHORN_CRASH_SEEDS", 20); seed++ {
		t.Run(strconv.Itoa(seed), func(t *testing.T) {
			storetest.GroupsCrash(t, uint64(seed), 400, crashing)
		})
	}
}

// TestBatchCrashes simulates one power loss per seed while large batches are settled.
func TestBatchCrashes(t *testing.T) {
	first := env("POSTHORN_CRASH_SEED", 1)
	for seed := first; seed < first+trials("POSTHORN_CRASH_SEEDS", 20); seed++ {
		storetest.BatchCrash(t, uint64(seed), crashing)
	}
}

// A crash between the writes of two lanes of a group must not make the group count a
// message of the type "delete" twice.
func TestGroupCountsDeleteOnceAfterCrash(t *testing.T) {
	for _, test := range []struct {
		name string
		ack  bool
	}{{"read", false}, {"delivered", true}} {
		t.Run(test.name, func(t *testing.T) {
			mem := vfs.NewCrashableMem()
			s := open(t, "data", Options{FS: mem, FlushInterval: time.Hour})
			defer s.Close()
			a := queue.LaneID{Source: "shop/web", Destination: "shop/crm", Endpoint: "a", Any: true}
			b := a
			b.Endpoint = "b"
			lease := func(s *Store, lane queue.LaneID) queue.Delivery {
				t.Helper()
				if err := s.OpenLane(lane); err != nil {
					t.Fatal(err)
				}
				got, err := s.Lease(lane, 1, nil)
				if err != nil {
					t.Fatal(err)
				}
				if len(got) == 0 {
					return queue.Delivery{}
				}
				return got[0]
			}
			lease(s, a)
			lease(s, b)
			if _,
				err := s.Append(t.Context(), []queue.Message{{Source: a.Source, ID: "m", Type: "delete", AcceptedAt: time.Now(),
				Body: []byte("{}")}}); err != nil {
				t.Fatal(err)
			}
			// The change of lane a is in memory only; the retry writes lane b and the group.
			if d := lease(s, a); test.ack {
				s.Ack(d)
			}
			s.Retry(lease(s, b), time.Now(), queue.Failure{Time: time.Now(), Reason: "TimedOut"})
			if err := s.db.LogData(nil, pebble.Sync); err != nil {
				t.Fatal(err)
			}

			after := open(t, "data", Options{FS: mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(1, 1))}),
				Now: func() time.Time { return time.Now().Add(time.Hour) }})
			defer after.Close()
			for _, lane := range []queue.LaneID{a, b} {
				if d := lease(after, lane); d.Seq != 0 {
					after.Ack(d)
				}
			}
			if got, want := after.LaneStats(a.Group()).Ledger, (queue.Ledger{Accepted: 2, Delivered: 2}); got != want {
				t.Errorf("ledger of the group: %+v, want %+v", got, want)
			}
		})
	}
}

// crashing returns an engine on a file system that can lose power.
func crashing(*testing.T) storetest.Engine {
	clock := &storetest.Clock{}
	power := newPower()
	return storetest.Engine{
		Open: func(t testing.TB) queue.Store {
			return open(t, "data/queue", Options{
				FS: power.fs(), DuplicateWindow: 10 * time.Minute, Now: clock.Now, MemTableBytes: 256 << 10, CacheBytes: 1 << 20,
				FlushInterval: time.Millisecond, SyncInterval: 5 * time.Millisecond,
				Fatal: func(err error) { t.Errorf("fatal: %v", err) },
			})
		},
		Clock: clock, DuplicateWindow: 10 * time.Minute, Trim: trimNow, IsPending: laneHasPending, Crash: power,
	}
}

// power is a file system in memory that can simulate a power loss: some or all unsynced changes
// are lost.
type power struct {
	mu       sync.Mutex
	mem      *vfs.MemFS
	left     int
	rng      *rand.Rand
	survived *vfs.MemFS
}

func newPower() *power { return &power{mem: vfs.NewCrashableMem()} }

func (p *power) fs() vfs.FS {
	p.mu.Lock()
	defer p.mu.Unlock()
	return storetest.Watch(p.mem, p.operation, nil)
}

func (p *power) Arm(rng *rand.Rand, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left, p.survived = 1+rng.IntN(n), nil
	p.rng = rand.New(rand.NewPCG(rng.Uint64(), 0))
}

func (p *power) Crashed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.survived != nil
}

func (p *power) Recover(t testing.TB, s queue.Store) {
	if err := s.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mem = p.survived
}

// operation is called before every change of the file system.
func (p *power) operation() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left == 0 {
		return
	}
	if p.left--; p.left == 0 {
		p.survived = p.mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: []int{0, 0, 30, 60, 90, 100}[p.rng.IntN(6)], RNG: p.rng})
	}
}

var discard = slog.New(slog.DiscardHandler)

// rndReader returns bytes that cannot be compressed.
type rndReader struct{}

func (rndReader) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	return len(b), nil
}
