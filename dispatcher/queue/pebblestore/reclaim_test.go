package pebblestore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/wait"
)

// onDisk returns the disk space of a directory, as du prints it, in bytes.
func onDisk(t testing.TB, dir string) (total int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil {
			var info fs.FileInfo
			if info, err = d.Info(); err == nil {
				total += info.Sys().(*syscall.Stat_t).Blocks * 512
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return total
}

func TestEmptyStoreIsSmall(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{MemTableBytes: 64 << 20})
	defer s.Close()
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	if err := s.flushLanes(true); err != nil {
		t.Fatal(err)
	}
	if got := onDisk(t, dir); got > 16<<20 {
		t.Errorf("an empty store uses %d bytes of disk, want at most 16 MiB", got)
	}
}

// appendRandom appends n batches of 50 messages with bodies of 4 KB that do not compress.
func appendRandom(t testing.TB, s *Store, prefix string, n int) {
	t.Helper()
	rnd := rand.NewChaCha8([32]byte([]byte(fmt.Sprintf("%-32s", prefix))))
	for i := range n {
		batch := make([]queue.Message, 50)
		for j := range batch {
			batch[j] = message(fmt.Sprint(prefix, i, "-", j))
			batch[j].Body = make([]byte, 4<<10)
			_, _ = rnd.Read(batch[j].Body)
		}
		if _, err := s.Append(t.Context(), batch); err != nil {
			t.Error(err)
			return
		}
	}
}

// acknowledgeAll acknowledges all pending messages.
func acknowledgeAll(t testing.TB, s *Store, id queue.LaneID) (n int) {
	t.Helper()
	for {
		got, err := s.Lease(id, 100, nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) == 0 {
			return n
		}
		for _, d := range got {
			s.Ack(d)
		}
		n += len(got)
	}
}

// After each delivered burst the store reclaims its disk space once. It continues to work with
// new logs in the place of removed ones.
func TestReclaimAfterABurst(t *testing.T) {
	dir := t.TempDir()
	var quiet, busy atomic.Int64
	// A pause of a second within a burst would count as its end.
	o := Options{MaintainInterval: 100 * time.Millisecond, MemTableBytes: 1 << 20, Quiet: func(is bool) {
		if is {
			quiet.Add(1)
		} else {
			busy.Add(1)
		}
	}}
	s := open(t, dir, o)
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	for burst := range 3 {
		was := quiet.Load()
		appendRandom(t, s, fmt.Sprint("b", burst, "-"), 60) // 12 MB.
		before := onDisk(t, dir)
		if before < 12<<20 {
			t.Fatalf("burst %d: %d bytes on disk while 12 MB wait: the burst is not on disk", burst, before)
		}
		if n := acknowledgeAll(t, s, lane1); n != 3000 {
			t.Fatalf("burst %d: delivered %d messages, want 3000", burst, n)
		}
		wait.True(t, "the store is quiet", func() bool { return quiet.Load() > was })
		wait.True(t, "the disk is free again", func() bool { return onDisk(t, dir) <= 8<<20 })
	}
	// On a busy machine a pause within a burst can count as its end.
	wait.True(t, "the last burst is reclaimed", func() bool {
		return !s.reclaimer.running.Load() && s.disk.activity()-s.reclaimer.done.Load() < reclaimBytes
	})
	// An idle store does not reclaim again.
	q := quiet.Load()
	time.Sleep(2 * quietPasses * o.MaintainInterval)
	if got := quiet.Load(); got != q {
		t.Errorf("an idle store reclaimed %d more times", got-q)
	}
	if b := busy.Load(); b < 2 || b >= q {
		t.Errorf("of 3 bursts quiet was reported %d times and busy %d times", q, b)
	}
	// The pending messages survive a kill after a reclaim: the removed logs were not needed.
	appendRandom(t, s, "kept-", 2)
	if err := s.reclaim(t.Context()); err != nil {
		t.Fatal(err)
	}
	appendRandom(t, s, "more-", 2)
	copied := copyOf(t, dir)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again := open(t, copied, o)
	defer again.Close()
	if err := again.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	if n := acknowledgeAll(t, again, lane1); n != 200 {
		t.Errorf("after a kill %d messages wait, want 200", n)
	}
}

// The bytes that a reclaim frees do not count as activity of the next burst.
func TestReclaimIsNotActivity(t *testing.T) {
	var quiet, busy atomic.Int64
	s := open(t, t.TempDir(), Options{MaintainInterval: time.Hour, Quiet: func(is bool) {
		if is {
			quiet.Add(1)
		} else {
			busy.Add(1)
		}
	}})
	defer s.Close()
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	appendRandom(t, s, "b-", 30)
	acknowledgeAll(t, s, lane1)
	if err := s.flushLanes(true); err != nil {
		t.Fatal(err)
	}
	s.maintain(true)
	appendRandom(t, s, "c-", 5) // Fewer bytes than an early trim requires.
	acknowledgeAll(t, s, lane1)
	if err := s.flushLanes(true); err != nil {
		t.Fatal(err)
	}
	for range quietPasses + 1 {
		s.maintain(false)
	}
	wait.True(t, "the store is quiet", func() bool { return quiet.Load() == 1 && !s.reclaimer.running.Load() })
	s.maintain(false)
	if n := busy.Load(); n != 0 {
		t.Errorf("a quiet store was reported busy %d times", n)
	}
}

// A store without a burst reclaims once if it is requested.
func TestRequestedReclaim(t *testing.T) {
	var quiet atomic.Int64
	s := open(t, t.TempDir(), Options{MaintainInterval: time.Hour, Quiet: func(is bool) {
		if is {
			quiet.Add(1)
		}
	}})
	defer s.Close()
	pass := func(times int) {
		for range times {
			s.maintain(false)
			wait.True(t, "no reclaim runs", func() bool { return !s.reclaimer.running.Load() })
		}
	}
	pass(2 * quietPasses)
	if n := quiet.Load(); n != 0 {
		t.Fatalf("a store without a burst reclaimed %d times", n)
	}
	s.ReclaimWhenQuiet()
	pass(3 * quietPasses)
	if n := quiet.Load(); n != 1 {
		t.Errorf("a store with a request reclaimed %d times, want once", n)
	}
}

// A reclaim does not remove logs in use while logs are recycled.
func TestReclaimDuringABurst(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{MemTableBytes: 1 << 20, Fatal: func(err error) { panic(err) }})
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	var writers sync.WaitGroup
	for n := range 4 {
		writers.Go(func() { appendRandom(t, s, fmt.Sprint("w", n, "-"), 15) })
	}
	ended := make(chan struct{})
	go func() { writers.Wait(); close(ended) }()
	for reclaims := 0; ; reclaims++ {
		if err := s.reclaim(context.Background()); err != nil {
			t.Fatal(err)
		}
		select {
		case <-ended:
		default:
			continue
		}
		break
	}
	copied := copyOf(t, dir)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again := open(t, copied, Options{})
	defer again.Close()
	if err := again.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	if n := acknowledgeAll(t, again, lane1); n != 3000 {
		t.Errorf("after a kill %d messages wait, want 3000", n)
	}
}

// DiskBytes includes every file below the data directory: preallocated or recycled logs,
// tables, and files of other packages.
func TestDiskBytesIncludeTheDirectory(t *testing.T) {
	data := t.TempDir()
	s := open(t, filepath.Join(data, "queue"), Options{DataDir: data, MemTableBytes: 1 << 20})
	defer s.Close()
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	if err := writeFile(filepath.Join(data, "others", "members"), strings.Repeat("x", 3<<20)); err != nil {
		t.Fatal(err)
	}
	for i := range 30 {
		appendRandom(t, s, fmt.Sprint("n", i, "-"), 5)
		if i%3 == 0 {
			acknowledgeAll(t, s, lane1)
			s.maintain(true)
		}
		before, got, after := onDisk(t, data), s.DiskBytes(), onDisk(t, data)
		if low, high := min(before, after), max(before, after); float64(got) < 0.9*float64(low) || float64(got) > 1.1*float64(high) {
			t.Errorf("step %d: DiskBytes is %d, the directory uses %d to %d", i, got, low, high)
		}
	}
	if got := s.DiskBytes(); got < 3<<20 {
		t.Errorf("DiskBytes is %d, without the other files of the data directory", got)
	}
}

func writeFile(path, text string) error {
	return errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600))
}

// copyOf copies the files that a kill at this moment would leave.
func copyOf(t *testing.T, dir string) string {
	t.Helper()
	copied := filepath.Join(t.TempDir(), "killed")
	for range 100 {
		_ = os.RemoveAll(copied)
		before := state(t, dir)
		err := os.CopyFS(copied, os.DirFS(dir))
		// No flush, compaction or other write ended during the copy.
		if err == nil && slices.Equal(before, state(t, dir)) {
			return copied
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatal("the store's files change all the time")
	return ""
}

// state lists the files of a directory with their sizes and modification times.
func state(t *testing.T, dir string) (all []string) {
	t.Helper()
	for _, path := range files(t, dir, "*") {
		info, err := os.Stat(path)
		if err != nil {
			return []string{err.Error(), time.Now().String()} // The file was removed; the time makes the state unique.
		}
		all = append(all, fmt.Sprint(path, " ", info.Size(), " ", info.ModTime().UnixNano()))
	}
	return all
}
