package pebblestore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/repair"
)

var (
	fastLane = queue.LaneID{Source: "shop/web", Destination: "shop/crm", Endpoint: "fast", Any: true}
	deadLane = queue.LaneID{Source: "shop/web", Destination: "shop/crm", Endpoint: "dead", Any: true}
)

// appendOne appends a message of 1 KB.
func appendOne(s *Store, n int) error {
	_, err := s.Append(context.Background(), []queue.Message{{
		Source: "shop/web", ID: fmt.Sprint("m", n), Type: "track", AcceptedAt: time.Now(), Body: bytes.Repeat([]byte("x"), 1000),
	}})
	return err
}

// deliver acknowledges all pending messages of a lane.
func deliver(t *testing.T, s *Store, lane queue.LaneID) {
	t.Helper()
	for {
		got, err := s.Lease(lane, 64, nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) == 0 {
			return
		}
		for _, d := range got {
			s.Ack(d)
		}
	}
}

// An unreachable URL must not block new calls of its Source: at the quota, first attempts of
// messages that another URL accepted are skipped and counted.
func TestDeadURLAtTheQuota(t *testing.T) {
	const messages, quota = 3000, 1 << 20
	dir := t.TempDir()
	s := open(t, dir, Options{MaxBytesPerSource: quota})
	for _, lane := range []queue.LaneID{fastLane, deadLane} {
		if err := s.OpenLane(lane); err != nil {
			t.Fatal(err)
		}
	}
	var hanging []queue.Delivery
	for i := range messages {
		if err := appendOne(s, i); err != nil {
			t.Fatalf("message %d was refused: %v", i, err)
		}
		deliver(t, s, fastLane)
		if i == 20 {
			hanging, _ = s.Lease(deadLane, 3, nil)
		}
	}
	st := s.LaneStats(deadLane)
	if st.Skipped < messages-quota/1000 || st.Skipped+st.FirstAttempts != messages {
		t.Errorf("%d first attempts were skipped and %d wait, of %d", st.Skipped, st.FirstAttempts, messages)
	}
	if n := s.SourceStats("shop/web").LogBytes; n > quota {
		t.Errorf("the log has %d bytes of %d", n, quota)
	}
	want := queue.Ledger{Accepted: messages, Delivered: messages}
	if got := s.LaneStats(deadLane.Group()).Ledger; got != want {
		t.Errorf("the ledger is %+v, want %+v", got, want)
	}
	// A revoked attempt that ends is no longer counted as skipped.
	s.Ack(hanging[0])
	s.Retry(hanging[1], time.Now(), queue.Failure{Time: time.Now(), Reason: "TimedOut"})
	s.Release(hanging[2])
	after := s.LaneStats(deadLane)
	if after.Skipped != st.Skipped-2 || after.Delivered != 1 || after.Balance() != nil {
		t.Errorf("after the end of the attempts under way: %+v", after)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, Options{MaxBytesPerSource: quota})
	defer s.Close()
	if again := s.LaneStats(deadLane); again.Skipped != after.Skipped || again.Ledger != after.Ledger {
		t.Errorf("after a restart %+v, want %+v", again, after)
	}
}

// Messages that no URL accepted are kept, and new calls are refused at the quota.
func TestQuotaKeepsUndeliveredMessages(t *testing.T) {
	s := open(t, t.TempDir(), Options{MaxBytesPerSource: 100 << 10})
	defer s.Close()
	for _, lane := range []queue.LaneID{fastLane, deadLane} {
		if err := s.OpenLane(lane); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	for ; n < 1000; n++ {
		if err := appendOne(s, n); errors.Is(err, queue.ErrFull) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if st := s.LaneStats(deadLane.Group()); n == 1000 || st.Pending != int64(n) || s.LaneStats(deadLane).Skipped != 0 {
		t.Errorf("%d messages were accepted; the ledger is %+v, %d skipped", n, st.Ledger, s.LaneStats(deadLane).Skipped)
	}
}

// usageFS is a file system with a configurable usage.
type usageFS struct {
	vfs.FS
	used atomic.Uint64
}

func (f *usageFS) GetDiskUsage(string) (vfs.DiskUsage, error) {
	const total = 1 << 30
	used := f.used.Load()
	return vfs.DiskUsage{TotalBytes: total, UsedBytes: used, AvailBytes: total - used}, nil
}

// Near the high-water mark first attempts are skipped before calls are refused.
func TestDeadURLAtTheHighWaterMark(t *testing.T) {
	fs := &usageFS{FS: vfs.NewMem()}
	s := open(t, "data", Options{FS: fs, HighWater: 0.85, MinFreeBytes: 1 << 20, MemTableBytes: 1 << 20, MaintainInterval: time.Hour})
	defer s.Close()
	for _, lane := range []queue.LaneID{fastLane, deadLane} {
		if err := s.OpenLane(lane); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 2000 {
		if err := appendOne(s, i); err != nil {
			t.Fatal(err)
		}
	}
	deliver(t, s, fastLane)
	s.maintain(false)
	if n := s.LaneStats(deadLane).Skipped; n != 0 {
		t.Errorf("%d skipped while there is space", n)
	}
	fs.used.Store(820 << 20) // The mark is at 870 MiB.
	s.maintain(false)
	if st := s.LaneStats(deadLane); st.Skipped == 0 || s.Full() {
		t.Errorf("%d skipped; full: %t", st.Skipped, s.Full())
	}
	if err := appendOne(s, 2000); err != nil {
		t.Errorf("a call is refused: %v", err)
	}
}

// A repair keeps the ledger of a group and the pending messages of its lanes.
func TestRepairKeepsGroups(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	for _, lane := range []queue.LaneID{fastLane, deadLane} {
		if err := s.OpenLane(lane); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 300 {
		if err := appendOne(s, i); err != nil {
			t.Fatal(err)
		}
	}
	got, err := s.Lease(fastLane, 200, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, d := range got {
		switch failure := (queue.Failure{Time: time.Now(), Reason: "Rejected"}); i % 10 {
		case 0:
			s.Retry(d, time.Now().Add(time.Hour), failure)
		case 1:
			if _, err := s.Bury(d, failure); err != nil {
				t.Fatal(err)
			}
		default:
			s.Ack(d)
		}
	}
	want := []queue.LaneStats{s.LaneStats(fastLane), s.LaneStats(deadLane), s.LaneStats(fastLane.Group())}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	fresh := t.TempDir()
	r, err := repair.Rebuild(dir, fresh, Verify)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Lost) > 0 {
		t.Errorf("lost: %q", r.Lost)
	}
	s = open(t, fresh, Options{})
	for i, id := range []queue.LaneID{fastLane, deadLane, fastLane.Group()} {
		if got := s.LaneStats(id); got.Ledger != want[i].Ledger || got.FirstAttempts != want[i].FirstAttempts {
			t.Errorf("%v has %+v, want %+v", id, got, want[i])
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// The names of excluded destinations count as read, so that the time of a lease is bounded.
func TestALeaseReadsABoundedNumberOfNames(t *testing.T) {
	const messages, names = 200, 1600
	s := open(t, "data", Options{FS: vfs.NewMem()})
	defer s.Close()
	if err := s.OpenLane(fastLane); err != nil {
		t.Fatal(err)
	}
	skip := []string{fastLane.Destination}
	for i := 1; i < names; i++ {
		skip = append(skip, fmt.Sprint("shop/other-", i))
	}
	var list []queue.Message
	for i := range messages {
		list = append(list, queue.Message{Source: fastLane.Source, ID: fmt.Sprint("m", i), Type: "track", AcceptedAt: time.Now(), Skip: skip,
			Body: []byte("{}")})
	}
	if _, err := s.Append(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	filtered := func() int64 {
		if got, err := s.Lease(fastLane, 16, nil); err != nil || len(got) > 0 {
			t.Fatalf("lease: got %d messages, error %v; want none", len(got), err)
		}
		return s.DestinationStats(fastLane.Destination).Ledger.Filtered
	}
	if got, most := filtered(), int64(maxScan/(names/skipsPerScan)+1); got == 0 || got > most {
		t.Errorf("messages with %d names that a lease reads: got %d, want 1 to %d", names, got, most)
	}
	for n := 0; n < messages && filtered() < messages; n++ {
	}
	if got := filtered(); got != messages {
		t.Errorf("messages that all leases read: got %d, want %d", got, messages)
	}
}

// With several stores the quota is divided among them: a Source above its part stores no more, and loses nothing.
func TestQuotaOfSeveralStores(t *testing.T) {
	s := open(t, t.TempDir(), Options{MaxBytesPerSource: 20_000})
	if err := s.OpenLane(fastLane); err != nil {
		t.Fatal(err)
	}
	stored := 0
	fill := func() {
		for range 1000 {
			if err := appendOne(s, stored); err != nil {
				return
			}
			stored++
		}
	}
	s.SetStores(2)
	fill()
	half := stored
	s.SetStores(4)
	if err := appendOne(s, stored); !errors.Is(err, queue.ErrOverQuota) {
		t.Errorf("append above a quarter of the quota: got %v, want %v", err, queue.ErrOverQuota)
	}
	if used, most := s.Share(fastLane.Source); used < 8_000 || most != 5_000 {
		t.Errorf("use and part of the quota: got %d and %d, want more than 8000, which is kept, and 5000", used, most)
	}
	s.SetStores(1)
	fill()
	if stored < 2*half || stored > 2*half+1 {
		t.Errorf("messages with the whole quota: got %d, want twice %d", stored, half)
	}
}
