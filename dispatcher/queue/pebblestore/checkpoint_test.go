package pebblestore

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// A checkpoint that is made while messages are appended, delivered and made dead letters opens like
// a store after a crash: it has every message that was acknowledged before, and its ledger balances.
func TestCheckpointUnderLoad(t *testing.T) {
	dir := t.TempDir()
	s := open(t, filepath.Join(dir, "store"), Options{MemTableBytes: 256 << 10})
	id := queue.LaneID{Source: "ns/s", Destination: "ns/d", Endpoint: "e"}
	if err := s.OpenLane(id); err != nil {
		t.Fatal(err)
	}
	var acknowledged atomic.Int64
	stop := make(chan struct{})
	var load errgroup.Group
	for writer := range 4 {
		load.Go(func() error {
			body := []byte(`{"x":"` + strings.Repeat("0123456789", 200) + `"}`)
			for i := 0; ; i++ {
				select {
				case <-stop:
					return nil
				default:
				}
				m := queue.Message{Source: id.Source, ID: fmt.Sprint(writer, "-", i), AcceptedAt: time.Now(), Body: body}
				if _, err := s.Append(t.Context(), []queue.Message{m}); err != nil {
					return err
				}
				acknowledged.Add(1)
			}
		})
	}
	load.Go(func() error {
		for {
			select {
			case <-stop:
				return nil
			case <-time.After(time.Millisecond):
			}
			acknowledgeAll(t, s, id)
		}
	})
	const checkpoints = 12
	before := make([]int64, checkpoints)
	for i := range before {
		time.Sleep(20 * time.Millisecond)
		before[i] = acknowledged.Load()
		if _, err := s.Checkpoint(filepath.Join(dir, fmt.Sprint("copy", i))); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	if err := load.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for i, want := range before {
		copied := filepath.Join(dir, fmt.Sprint("copy", i))
		if _, _, err := Verify(copied); err != nil {
			t.Errorf("checkpoint %d: verify: got %v, want no error", i, err)
			continue
		}
		c := open(t, copied, Options{})
		if got := c.SourceStats(id.Source).Accepted; got < want || got > acknowledged.Load() {
			t.Errorf("checkpoint %d: accepted: got %d, want %d to %d", i, got, want, acknowledged.Load())
		}
		if err := c.LaneStats(id).Balance(); err != nil {
			t.Errorf("checkpoint %d: %v", i, err)
		}
		if err := c.Close(); err != nil {
			t.Errorf("checkpoint %d: close: %v", i, err)
		}
	}
}

// A checkpoint needs free space, so that its copies do not make the store's own writes wait.
func TestCheckpointNeedsSpace(t *testing.T) {
	usage := &usageFS{FS: vfs.NewMem()}
	s := open(t, "data", Options{FS: usage, MinFreeBytes: 64 << 20, HighWater: 1})
	defer s.Close()
	if _, err := s.Checkpoint("enough"); err != nil {
		t.Errorf("with 1 GiB of free space: got %v, want no error", err)
	}
	usage.used.Store(1<<30 - 64<<20)
	if _, err := s.Checkpoint("little"); !errors.Is(err, queue.ErrFull) {
		t.Errorf("with 64 MiB of free space: got %v, want %v", err, queue.ErrFull)
	}
	if existing(usage, "little") == "little" {
		t.Error("a checkpoint without space left a folder")
	}
}

// logOpenFS calls opened before a log is opened for reading.
type logOpenFS struct {
	vfs.FS
	opened atomic.Pointer[func()]
}

func (f *logOpenFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	if opened := f.opened.Load(); opened != nil && strings.HasSuffix(name, ".log") {
		(*opened)()
	}
	return f.FS.Open(name, opts...)
}

// A log that grows while it is copied is cut at its synced length before the copy: the rest of the
// copy may have gaps.
func TestCheckpointCutsTheLog(t *testing.T) {
	fs := &logOpenFS{FS: vfs.NewMem()}
	s := open(t, "data", Options{FS: fs})
	defer s.Close()
	source := message("").Source
	appendAll(t, s, 3)
	meanwhile := func() { appendAll(t, s, 1, func(m *queue.Message) { m.ID = "meanwhile" }) }
	fs.opened.Store(&meanwhile)
	_, err := s.Checkpoint("copy")
	fs.opened.Store(nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.SourceStats(source).Accepted; got <= 3 {
		t.Fatalf("accepted by the store: got %d, want more than 3: the copy of the log opened no log", got)
	}
	c := open(t, "copy", Options{FS: fs})
	defer c.Close()
	if got := c.SourceStats(source).Accepted; got != 3 {
		t.Errorf("accepted in the copy: got %d, want 3", got)
	}
}
