package delivery

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// testStore is the real store on a file system in memory. It counts leases, can fail, and records
// misuse, such as a message that is settled twice or without a lease.
type testStore struct {
	*pebblestore.Store
	files vfs.FS
	slow  time.Duration // The time of PutMetaDurable.
	onDue func()        // Called in LeaseDue; nil for none.

	mu     sync.Mutex
	leased map[lease]int // The attempt of each leased message.
	misuse []string
	leases int // Calls of Lease and LeaseOldest.
	ends   int // Calls of EndWaits.
	fail   error
}

// lease identifies a message in a lane.
type lease struct {
	lane queue.LaneID
	seq  uint64
}

// newTestStore opens a store; the cleanup closes it.
func newTestStore(t testing.TB) *testStore {
	s := &testStore{files: vfs.NewMem(), leased: map[lease]int{}}
	s.open(t)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close the store: %v", err)
		}
	})
	return s
}

func (s *testStore) open(t testing.TB) {
	t.Helper()
	var err error
	s.Store, err = pebblestore.Open("data", pebblestore.Options{
		FS: s.files, Logger: slog.New(slog.DiscardHandler), MemTableBytes: 256 << 10, CacheBytes: 1 << 20, Now: time.Now,
		MaintainInterval: 10 * time.Minute, // The tests pass days of virtual time.
	})
	if err != nil {
		t.Fatalf("open the store: %v", err)
	}
}

// reopen closes the store and opens it again after a time, as a restart does.
func (s *testStore) reopen(t testing.TB, after time.Duration) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatalf("close the store: %v", err)
	}
	clear(s.leased)
	time.Sleep(after)
	s.open(t)
}

// meta returns the stored values.
func (s *testStore) meta(t testing.TB) map[string][]byte {
	t.Helper()
	all, err := s.AllMeta()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func (s *testStore) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fail
}

func (s *testStore) PutMetaDurable(name string, value []byte) error {
	time.Sleep(s.slow)
	return s.Store.PutMetaDurable(name, value)
}

func (s *testStore) OpenLane(id queue.LaneID) error {
	if err := s.failure(); err != nil {
		return err
	}
	return s.Store.OpenLane(id)
}

func (s *testStore) EndLane(id queue.LaneID, end queue.End) error {
	if err := s.failure(); err != nil {
		return err
	}
	return s.Store.EndLane(id, end)
}

func (s *testStore) DropLane(ctx context.Context, id queue.LaneID) error {
	err := s.Store.DropLane(ctx, id)
	s.mu.Lock()
	defer s.mu.Unlock()
	for l := range s.leased {
		if err == nil && l.lane == id {
			delete(s.leased, l)
		}
	}
	return err
}

func (s *testStore) Lease(id queue.LaneID, n int, buf []queue.Delivery) ([]queue.Delivery, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases++
	if s.fail != nil {
		return buf, s.fail
	}
	from := len(buf)
	buf, err := s.Store.Lease(id, n, buf)
	s.lease(buf[from:]...)
	return buf, err
}

func (s *testStore) LeaseOldest(id queue.LaneID) (d queue.Delivery, ok bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases++
	if d, ok, err = s.Store.LeaseOldest(id); ok {
		s.lease(d)
	}
	return d, ok, err
}

func (s *testStore) LeaseDue(id queue.LaneID, due time.Time, n, maxBytes int, buf []queue.Delivery) ([]queue.Delivery, error) {
	s.mu.Lock()
	onDue := s.onDue
	s.mu.Unlock()
	if onDue != nil {
		onDue()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases++
	from := len(buf)
	buf, err := s.Store.LeaseDue(id, due, n, maxBytes, buf)
	s.lease(buf[from:]...)
	return buf, err
}

func (s *testStore) lease(got ...queue.Delivery) {
	for _, d := range got {
		l := lease{d.Lane, d.Seq}
		if _, twice := s.leased[l]; twice {
			s.misuse = append(s.misuse, fmt.Sprintf("%v %d leased twice", d.Lane, d.Seq))
		}
		s.leased[l] = d.Attempt
	}
}

// settle ends a lease. The store ignores a message of a lane that was dropped. A message that is buried
// without an attempt has one less than its lease.
func (s *testStore) settle(d queue.Delivery, how string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := lease{d.Lane, d.Seq}
	attempt, ok := s.leased[l]
	if ok = ok && (attempt == d.Attempt || how == "bury" && attempt == d.Attempt+1); !ok && slices.Contains(s.Lanes(), d.Lane) {
		s.misuse = append(s.misuse, fmt.Sprintf("%s of %v %d, which is not leased", how, d.Lane, d.Seq))
	}
	delete(s.leased, l)
}

func (s *testStore) Ack(d queue.Delivery) (first bool) {
	s.settle(d, "ack")
	return s.Store.Ack(d)
}

func (s *testStore) Release(d queue.Delivery) {
	s.settle(d, "release")
	s.Store.Release(d)
}

func (s *testStore) Retry(d queue.Delivery, at time.Time, f queue.Failure) {
	s.settle(d, "retry")
	s.Store.Retry(d, at, f)
}

func (s *testStore) EndWaits(id queue.LaneID, until time.Time) (ended int, left bool, err error) {
	s.mu.Lock()
	s.ends++
	s.mu.Unlock()
	return s.Store.EndWaits(id, until)
}

func (s *testStore) Bury(d queue.Delivery, f queue.Failure) (buried bool, err error) {
	s.settle(d, "bury")
	return s.Store.Bury(d, f)
}

func (s *testStore) SettleAll(lane queue.LaneID, all []queue.Settlement) error {
	for _, m := range all {
		s.settle(m.Delivery, [...]string{"release", "ack", "retry", "bury"}[m.Outcome])
	}
	return s.Store.SettleAll(lane, all)
}

// problems lists the recorded misuse and the messages that are still leased.
func (s *testStore) problems() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := slices.Clone(s.misuse)
	for l := range s.leased {
		out = append(out, fmt.Sprintf("%v %d is still leased", l.lane, l.seq))
	}
	slices.SortFunc(out, cmp.Compare[string])
	return out
}
