package pebblestore

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/repair"
	"github.com/posthorn/posthorn/test/wait"
)

var (
	web   = "shop/web"
	lane1 = queue.LaneID{Source: web, Destination: "shop/crm"}
)

func message(id string) queue.Message {
	return queue.Message{Source: web, ID: id, Type: "track", Event: "e", AcceptedAt: time.Now(), Body: []byte(`{"messageId":"` + id + `"}`)}
}

func appendAll(t testing.TB, s *Store, n int, change ...func(*queue.Message)) {
	t.Helper()
	var msgs []queue.Message
	for i := range n {
		m := message(fmt.Sprint("m", i))
		for _, c := range change {
			c(&m)
		}
		msgs = append(msgs, m)
	}
	if _, err := s.Append(context.Background(), msgs); err != nil {
		t.Fatal(err)
	}
}

// TestKill kills a process under load repeatedly; POSTHORN_KILL_ROUNDS sets the number of
// rounds. Every acknowledged call must be stored afterwards, and no message that was
// acknowledged well before the kill may be delivered again.
func TestKill(t *testing.T) {
	if dir := os.Getenv("POSTHORN_KILL_DIR"); dir != "" {
		killed(dir)
		return
	}
	dir := t.TempDir()
	var accepted, delivered, again int
	known := map[string]bool{}   // Acknowledged by Append.
	settled := map[string]bool{} // Acknowledged by a worker.
	durable := map[string]bool{} // A worker acknowledged these messages long enough before the kill.
	for round := range trials("POSTHORN_KILL_ROUNDS", 5) {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
		cmd.Env = append(os.Environ(), "POSTHORN_KILL_DIR="+dir, fmt.Sprint("POSTHORN_KILL_ROUND=", round))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var flushed []string // Settled since the last mark.
		lines := bufio.NewScanner(out)
		n, limit := 0, 2000+round*700
		for lines.Scan() {
			verb, id, _ := strings.Cut(lines.Text(), " ")
			switch verb {
			case "accepted":
				known[id] = true
				accepted++
			case "delivered":
				if !known[id] {
					// Its Append had not returned, or the process had not printed the result.
					known[id] = true
				}
				if durable[id] {
					t.Errorf("%s was durably acknowledged and is delivered again", id)
				}
				if settled[id] {
					again++
				}
				settled[id] = true
				delivered++
				flushed = append(flushed, id)
			case "mark": // The lines before the mark are durable.
				for _, id := range flushed {
					durable[id] = true
				}
				flushed = flushed[:0]
			}
			if n++; n == limit {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		_ = cmd.Wait()
		if n < limit {
			t.Fatalf("round %d ended by itself after %d lines", round, n)
		}
	}

	s := open(t, dir, Options{})
	defer func() { _ = s.Close() }()
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	left := map[string]bool{}
	for {
		got, err := s.Lease(lane1, 500, nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) == 0 {
			break
		}
		for _, d := range got {
			left[d.ID] = true
			s.Ack(d)
		}
	}
	for id := range known {
		if !settled[id] && !left[id] {
			t.Errorf("%s was accepted and is lost", id)
		}
	}
	for id := range left {
		if durable[id] {
			t.Errorf("%s was durably acknowledged and is delivered again", id)
		}
	}
	st := s.LaneStats(lane1)
	if st.Pending != 0 || st.Accepted != st.Delivered {
		t.Errorf("the final ledger is %+v", st)
	}
	t.Logf("%d accepted, %d delivered, %d of them again, %d pending at the end", accepted, delivered, again, len(left))
}

// killed is the main function of the process that is killed. Its producers and its worker print
// the completed operations.
func killed(dir string) {
	s, err := Open(dir, Options{})
	if err == nil {
		err = s.OpenLane(lane1)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var mu sync.Mutex
	say := func(verb, id string) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf("%s %s\n", verb, id)
	}
	round := os.Getenv("POSTHORN_KILL_ROUND")
	for p := range 8 {
		go func() {
			for i := 0; ; i++ {
				var msgs []queue.Message
				for j := range 3 {
					msgs = append(msgs, message(fmt.Sprintf("r%s-p%d-%d-%d", round, p, i, j)))
				}
				if _, err := s.Append(context.Background(), msgs); err != nil {
					fmt.Fprintln(os.Stderr, err)
					os.Exit(1)
				}
				for _, m := range msgs {
					say("accepted", m.ID)
				}
			}
		}()
	}
	for n := 0; ; n++ {
		got, err := s.Lease(lane1, 20, nil)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		for _, d := range got {
			say("delivered", d.ID)
			s.Ack(d)
		}
		if n%50 == 0 {
			if err := s.flushLanes(true); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			say("mark", "")
		}
	}
}

// TestAcksBecomeDurable: an acknowledgement becomes durable in time, even if nothing else
// happens.
func TestAcksBecomeDurable(t *testing.T) {
	mem := vfs.NewCrashableMem()
	s := open(t, "data", Options{FS: mem})
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	appendAll(t, s, 100)
	got, err := s.Lease(lane1, 100, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range got[:90] {
		s.Ack(d)
	}
	wait.True(t, "a power cut forgets no acknowledgement", func() bool {
		after := open(t, "data", Options{FS: mem.CrashClone(vfs.CrashCloneCfg{})})
		defer func() { _ = after.Close() }()
		return after.LaneStats(lane1).Delivered == 90
	})
	wait.True(t, "the flusher sleeps", func() bool {
		return !s.flusher.unsynced.Load() && len(s.flusher.wake) == 0
	})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// files returns the store's files that match a pattern.
func files(t *testing.T, dir, pattern string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(names) == 0 {
		t.Fatalf("no %s in %s (%v)", pattern, dir, err)
	}
	return names
}

func edit(t *testing.T, path string, change func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, change(b), 0o600); err != nil {
		t.Fatal(err)
	}
}

func cutOff(b []byte) []byte { return b[:len(b)*2/3] }

// isMarked reports whether a run found a damaged file in the store in dir.
func isMarked(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, integrity.DamagedName))
	return err == nil
}

func flip(b []byte) []byte {
	for i := len(b) / 3; i < len(b)/3+16; i++ {
		b[i] ^= 0x5a
	}
	return b
}

// TestDamage: a damaged file is detected and named, at the start or when it is read, and no
// message is lost silently.
func TestDamage(t *testing.T) {
	const messages = 3000
	for _, test := range []struct {
		name, file string
		unclean    bool
		change     func([]byte) []byte // nil removes the file.
		readable   bool                // Open succeeds; a read detects the damage.
	}{
		{name: "table cut off", file: "*.sst", change: cutOff},
		{name: "table missing", file: "*.sst"},
		{name: "table flipped", file: "*.sst", change: flip, readable: true},
		{name: "manifest missing", file: "MANIFEST-*"},
		{name: "manifest flipped", file: "MANIFEST-*", change: flip},
		{name: "manifest cut off", file: "MANIFEST-*", change: cutOff},
		{name: "manifest flipped after a crash", file: "MANIFEST-*", change: flip, unclean: true},
		{name: "marker missing", file: "marker.manifest.*"},
		{name: "log flipped", file: "*.log", change: flip, unclean: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir, Options{})
			if err := s.OpenLane(lane1); err != nil {
				t.Fatal(err)
			}
			for i := range 30 {
				appendAll(t, s, messages/30, func(m *queue.Message) { m.ID = fmt.Sprint(i, m.ID) })
			}
			if test.unclean { // A killed process leaves these files.
				copied := t.TempDir()
				if err := copyKilled(dir, copied); err != nil && !errors.Is(err, fs.ErrNotExist) {
					t.Fatal(err)
				}
				defer func(s *Store) { _ = s.Close() }(s)
				dir = copied
			} else if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			var largest string
			var size int64
			for _, f := range files(t, dir, test.file) {
				if info, err := os.Stat(f); err == nil && info.Size() >= size {
					largest, size = f, info.Size()
				}
			}
			if test.change != nil {
				edit(t, largest, test.change)
			} else if err := os.Remove(largest); err != nil {
				t.Fatal(err)
			}

			s, err := Open(dir, Options{Logger: discard})
			if test.readable && err == nil {
				if err = s.OpenLane(lane1); err != nil {
					t.Fatal(err)
				}
				// The messages of the damaged block become dead letters, the others are
				// delivered.
				seen := map[uint64]bool{}
				for {
					got, err := s.Lease(lane1, 100, nil)
					if err != nil {
						t.Fatal(err)
					}
					for _, d := range got {
						seen[d.Seq] = true
						s.Ack(d)
					}
					if len(got) == 0 {
						break
					}
				}
				letters := 0
				err = s.DeadLetters(t.Context(), lane1.Destination, "", func(d queue.DeadLetter) bool {
					if seen[d.Seq] || d.Failure.Reason != queue.ReasonDamaged || !strings.Contains(d.Failure.Message, filepath.Base(largest)) ||
						!strings.Contains(d.Failure.Message, "checksum") {
						t.Errorf("dead letter of %d: %+v", d.Seq, d.Failure)
					}
					letters++
					return true
				})
				want := queue.LaneStats{Ledger: queue.Ledger{Accepted: messages, Delivered: int64(len(seen)), DeadLettered: int64(letters)}}
				if got := s.LaneStats(lane1); got != want || letters == 0 || letters+len(seen) != messages || err != nil {
					t.Errorf("ledger %+v, want %+v: %v", got, want, err)
				}
				// The damage mark is kept until a repair, also across a restart.
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				s = open(t, dir, Options{})
				if path := s.corrupt.Load(); path == nil || *path != largest || !isMarked(dir) {
					t.Errorf("after a restart the damaged file is %v, want %s", path, largest)
				}
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				if r, err := repair.Run(dir, true, Verify); err != nil || r.Aside == "" || isMarked(dir) {
					t.Errorf("repair: %+v %v", r, err)
				}
				return
			} else if err == nil {
				t.Errorf("the store opened with %d messages", s.SourceStats(web).Accepted)
				_ = s.Close()
			}
			if err == nil {
				t.Fatal("the damage was not detected")
			}
			var corrupt *CorruptError
			named := errors.As(err, &corrupt) || strings.Contains(err.Error(), filepath.Base(largest))
			if !named || !strings.Contains(err.Error(), dir) && !strings.Contains(err.Error(), filepath.Base(largest)) {
				t.Errorf("the error names no file: %v", err)
			}
			t.Log(err)
		})
	}
}

// TestTruncatedLog: a truncated newest write-ahead log of a killed process is detected and
// named.
func TestTruncatedLog(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	defer func() { _ = s.Close() }()
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	appendAll(t, s, 10)
	for range 5 {
		got, err := s.Lease(lane1, 2, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range got {
			s.Ack(d)
		}
	}
	if err := s.flushLanes(true); err != nil {
		t.Fatal(err)
	}
	copied := t.TempDir()
	if err := copyKilled(dir, copied); err != nil {
		t.Fatal(err)
	}
	name := files(t, copied, "*.log")[0]
	edit(t, name, cutOff)
	var corrupt *CorruptError
	if after, err := Open(copied, Options{Logger: discard}); !errors.As(err, &corrupt) || corrupt.Path != name {
		t.Errorf("error %v, want a CorruptError that names %s", err, name)
		if err == nil {
			_ = after.Close()
		}
	}
}

func TestLockAndFormat(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	if _, err := Open(dir, Options{Logger: discard}); !errors.Is(err, syscall.EAGAIN) ||
		!strings.Contains(err.Error(), "another process has it open") {
		t.Errorf("opened twice: %v", err)
	}
	if err := s.db.Set(codec.KeyFormat, []byte{codec.Format + 1}, pebble.Sync); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, Options{Logger: discard}); err == nil || !strings.Contains(err.Error(), "newer release") {
		t.Errorf("a newer format: %v", err)
	}
	for _, o := range []Options{{DuplicateWindow: 25 * time.Hour}, {DuplicateWindow: -1}, {HighWater: 1.1}, {MaxBytesPerSource: -2}} {
		if _, err := Open(t.TempDir(), o); err == nil {
			t.Errorf("options %+v were accepted", o)
		}
	}
}

func TestQuota(t *testing.T) {
	s := open(t, t.TempDir(), Options{MaxBytesPerSource: 10_000})
	defer func() { _ = s.Close() }()
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	large := func(m *queue.Message) { m.Body = make([]byte, 900) }
	appendAll(t, s, 10, large)
	ctx := context.Background()
	m := message("x")
	large(&m)
	if _, err := s.Append(ctx, []queue.Message{m}); !errors.Is(err, queue.ErrFull) {
		t.Fatalf("over the quota: %v", err)
	}
	other := m
	other.Source = "shop/ios"
	if _, err := s.Append(ctx, []queue.Message{other}); err != nil {
		t.Fatalf("another source: %v", err)
	}
	if _, err := s.Append(ctx, []queue.Message{other, m}); !errors.Is(err, queue.ErrFull) {
		t.Fatalf("partly over the quota: %v", err)
	}
	if n := s.SourceStats("shop/ios").Accepted; n != 1 {
		t.Errorf("a refused request left %d messages", n-1)
	}
	got, err := s.Lease(lane1, 3, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range got {
		s.Ack(d)
	}
	s.maintain(true)
	if _, err := s.Append(ctx, []queue.Message{m}); err != nil {
		t.Errorf("after some were delivered: %v", err)
	}
}

func TestHighWater(t *testing.T) {
	mem := vfs.NewMem()
	usage := func(percent uint64) {
		mem.TestingSetDiskUsage(vfs.DiskUsage{TotalBytes: 100 << 30, UsedBytes: percent << 30, AvailBytes: (100 - percent) << 30})
	}
	usage(50)
	s := open(t, "data", Options{FS: mem, MaintainInterval: 5 * time.Millisecond})
	defer func() { _ = s.Close() }()
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	appendAll(t, s, 10)
	usage(86)
	wait.True(t, "full", s.Full)
	if _, err := s.Append(context.Background(), []queue.Message{message("x")}); !errors.Is(err, queue.ErrFull) {
		t.Fatalf("above the mark: %v", err)
	}
	got, err := s.Lease(lane1, 10, nil)
	if err != nil || len(got) != 10 {
		t.Fatalf("leased %d: %v", len(got), err)
	}
	for _, d := range got {
		s.Ack(d)
	}
	wait.True(t, "delivered messages are freed at once", func() bool { return s.SourceStats(web).LogBytes == 0 })
	usage(84)
	wait.True(t, "room again", func() bool { return !s.Full() })
	appendAll(t, s, 1)
}

// fullFS is a file system without space while full is set, or without space for tables while
// tables is set.
type fullFS struct {
	vfs.FS
	full, tables atomic.Bool
	met          atomic.Int64
}

func (f *fullFS) check() error {
	if f.full.Load() {
		f.met.Add(1)
		return &fs.PathError{Op: "write", Path: "data", Err: syscall.ENOSPC}
	}
	return nil
}

func (f *fullFS) wrap(file vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return &fullFile{File: file, fs: f}, nil
}

func (f *fullFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	if strings.HasSuffix(name, ".sst") && f.tables.Load() {
		f.met.Add(1)
		return nil, &fs.PathError{Op: "create", Path: name, Err: syscall.ENOSPC}
	}
	return f.wrap(f.FS.Create(name, c))
}

type fullFile struct {
	vfs.File
	fs *fullFS
}

// Write writes half of the data when the disk is full, as a file system may.
func (f *fullFile) Write(b []byte) (int, error) {
	if err := f.fs.check(); err != nil {
		n, _ := f.File.Write(b[:len(b)/2])
		return n, err
	}
	return f.File.Write(b)
}

// TestDiskFull: writes wait while the disk is full, and continue when there is space. No
// message is lost.
func TestDiskFull(t *testing.T) {
	mem := vfs.NewCrashableMem()
	disk := &fullFS{FS: mem}
	s := open(t, "data", Options{FS: disk, MemTableBytes: 256 << 10, MaintainInterval: 5 * time.Millisecond, Fatal: func(err error) { t.Errorf("fatal: %v", err) }})
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	var accepted atomic.Int64
	ctx, stop := context.WithCancel(context.Background())
	var producers sync.WaitGroup
	for p := range 4 {
		producers.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				m := message(fmt.Sprintf("%d-%d", p, i))
				m.Body = make([]byte, 2000)
				switch _, err := s.Append(context.Background(), []queue.Message{m}); {
				case err == nil:
					accepted.Add(1)
				case errors.Is(err, queue.ErrFull):
					time.Sleep(time.Millisecond)
				default:
					t.Error(err)
				}
			}
		})
	}
	for range 3 {
		before := accepted.Load()
		wait.True(t, "messages are accepted", func() bool { return accepted.Load() > before+200 })
		met := disk.met.Load()
		disk.full.Store(true)
		wait.True(t, "a write meets the full disk", func() bool { return disk.met.Load() > met })
		// All calls of the producers may wait for space.
		wait.True(t, "the store is full", s.Full)
		if _, err := s.Append(t.Context(), []queue.Message{message(fmt.Sprint("turned away ", met))}); !errors.Is(err, queue.ErrFull) {
			t.Errorf("a new call on a full disk: %v", err)
		}
		disk.full.Store(false)
		wait.True(t, "room again", func() bool { return !s.Full() })
	}
	stop()
	producers.Wait()
	if got := s.SourceStats(web).Accepted; got != accepted.Load() {
		t.Errorf("%d messages are stored, %d were accepted", got, accepted.Load())
	}
	survived := mem.CrashClone(vfs.CrashCloneCfg{})
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	after := open(t, "data", Options{FS: survived})
	defer func() { _ = after.Close() }()
	if got := after.SourceStats(web).Accepted; got != accepted.Load() {
		t.Errorf("after a power cut %d messages are stored, %d were accepted", got, accepted.Load())
	}
}

// TestCloseOnFullDisk: Close ends in bounded time while the disk has no space for a table. When
// writes wait for a flush, it reports a fatal error, and the next start finds all messages.
func TestCloseOnFullDisk(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 10 s")
	}
	for _, stalled := range []bool{false, true} {
		t.Run(fmt.Sprintf("stalled=%t", stalled), func(t *testing.T) {
			t.Parallel()
			mem := vfs.NewCrashableMem()
			disk := &fullFS{FS: mem}
			fatal := make(chan error, 1)
			s := open(t, "data", Options{FS: disk, MemTableBytes: 256 << 10, MaintainInterval: time.Hour, Fatal: func(err error) {
				fatal <- err
				select {} // The process would end.
			}})
			appendAll(t, s, 10)
			disk.tables.Store(true)
			if stalled {
				go func() {
					for s.PutMetaDurable("filler", make([]byte, 8<<10)) == nil {
					}
				}()
				wait.True(t, "writes wait for a flush", s.stalled.Load)
			}
			closed := make(chan error, 1)
			go func() { closed <- s.Close() }()
			select {
			case err := <-closed:
				if err != nil || stalled {
					t.Errorf("Close: %v, stalled %t", err, stalled)
				}
			case err := <-fatal:
				if !stalled || !errors.Is(err, syscall.ENOSPC) {
					t.Errorf("fatal error: %v, stalled %t", err, stalled)
				}
			case <-time.After(time.Minute):
				t.Fatal("Close did not end")
			}
			after := open(t, "data", Options{FS: mem.CrashClone(vfs.CrashCloneCfg{})})
			if got := after.SourceStats(web).Accepted; got != 10 {
				t.Errorf("after a restart: got %d messages, want 10", got)
			}
			if err := after.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestCheckpointOnFullDisk: a checkpoint whose flush finds no space ends with queue.ErrFull, so
// that it does not hold up Close.
func TestCheckpointOnFullDisk(t *testing.T) {
	disk := &fullFS{FS: vfs.NewMem()}
	s := open(t, "data", Options{FS: disk, MaintainInterval: 10 * time.Millisecond})
	appendAll(t, s, 10)
	disk.tables.Store(true)
	copied := make(chan error, 1)
	go func() {
		_, err := s.Checkpoint("copy")
		copied <- err
	}()
	select {
	case err := <-copied:
		if !errors.Is(err, queue.ErrFull) {
			t.Errorf("Checkpoint: got %v, want queue.ErrFull", err)
		}
	case <-time.After(time.Minute):
		t.Error("Checkpoint did not end")
	}
	disk.tables.Store(false)
	wait.True(t, "a checkpoint with free space", func() bool {
		_, err := s.Checkpoint("copy")
		return err == nil
	})
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestSmallDisk fills a real file system: POSTHORN_SMALL_DISK names an empty directory on a
// file system of about 200 MB, such as a tmpfs.
func TestSmallDisk(t *testing.T) {
	root := os.Getenv("POSTHORN_SMALL_DISK")
	if root == "" {
		t.Skip("POSTHORN_SMALL_DISK is not set")
	}
	dir, err := os.MkdirTemp(root, "queue")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	s := open(t, dir, Options{MaintainInterval: 50 * time.Millisecond})
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, 16<<10)
	_, _ = io.ReadFull(rndReader{}, body)
	accepted := 0
	fill := func() {
		for i := 0; ; i++ {
			m := message(fmt.Sprint(i))
			m.Body = body
			_, err := s.Append(context.Background(), []queue.Message{m})
			if errors.Is(err, queue.ErrFull) {
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			accepted++
		}
	}
	fill()
	first := accepted
	t.Logf("refused after %d messages, %d MB", accepted, accepted*16>>10)

	// Another file uses the rest of the space.
	other, err := os.Create(filepath.Join(root, "other"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.Remove(other.Name()) }()
	for err == nil {
		_, err = other.Write(body)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	settled := make(chan int)
	go func() {
		n := 0
		for {
			got, err := s.Lease(lane1, 50, nil)
			if err != nil {
				t.Error(err)
			}
			if len(got) == 0 {
				settled <- n
				return
			}
			for _, d := range got {
				s.Ack(d)
				n++
			}
		}
	}()
	time.Sleep(300 * time.Millisecond) // The store reaches the full disk; the result does not depend on it.
	if err := errors.Join(other.Truncate(0), other.Close()); err != nil {
		t.Fatal(err)
	}
	if n := <-settled; n != accepted {
		t.Errorf("%d messages were delivered, %d accepted", n, accepted)
	}
	wait.True(t, "room again, with no hand", func() bool { return !s.Full() })
	fill()
	if accepted < first+first/2 {
		t.Errorf("the second time %d messages fit, the first time %d", accepted-first, first)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, Options{})
	defer func() { _ = s.Close() }()
	if st := s.LaneStats(lane1); st.Accepted != int64(accepted) || st.Delivered+st.Pending != st.Accepted {
		t.Errorf("the ledger is %+v, %d were accepted", st, accepted)
	}
}
