package pebblestore

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// memoryLog is a Log that keeps the batches. Wait returns immediately, or with an error after
// fail.
type memoryLog struct {
	session Session
	mu      sync.Mutex
	batches [][]byte
	err     error
	// full blocks Append while it is locked.
	full sync.Mutex
	// total and inLog are the space for calls and its use.
	total, inLog atomic.Int64
}

func (l *memoryLog) Session() Session  { return l.session }
func (l *memoryLog) Ready() error      { return nil } // The session can end after it.
func (l *memoryLog) Wait(uint64) error { return l.failure() }

func (l *memoryLog) Space() (total, free int64) {
	return l.total.Load(), l.total.Load() - l.inLog.Load()
}

func (l *memoryLog) Append(number uint64, batch []byte) error {
	l.full.Lock()
	defer l.full.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if number != uint64(len(l.batches))+1 {
		panic("numbers are not consecutive")
	}
	l.batches = append(l.batches, append([]byte(nil), batch...))
	return nil
}

func (l *memoryLog) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

func (l *memoryLog) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = err
}

var replicatedLane = queue.LaneID{Source: "shop/web", Destination: "shop/crm"}

// settleSome opens a lane, appends messages, delivers the first and buries the second one.
func settleSome(t *testing.T, s *Store, bodies ...[]byte) {
	t.Helper()
	if err := s.OpenLane(replicatedLane); err != nil {
		t.Fatal(err)
	}
	for _, body := range bodies {
		if _,
			err := s.Append(t.Context(), []queue.Message{{Source: replicatedLane.Source, ID: string(body[:1]), Type: "track", AcceptedAt: time.Now(),
			Body: body}}); err != nil {
			t.Fatal(err)
		}
	}
	got, err := s.Lease(replicatedLane, 2, nil)
	if err != nil || len(got) != 2 {
		t.Fatalf("lease: got %d messages and error %v, want 2 and none", len(got), err)
	}
	s.Ack(got[0])
	if _, err := s.Bury(got[1], queue.Failure{Time: time.Now(), Reason: "Rejected"}); err != nil {
		t.Fatal(err)
	}
}

// A replica that applies all batches of the log is the same store, also for batches that are
// larger than a write buffer.
func TestReplicaAppliesBatches(t *testing.T) {
	log := &memoryLog{session: Session{1}}
	s := open(t, "data", Options{FS: vfs.NewMem(), Log: log, MemTableBytes: 256 << 10})
	settleSome(t, s, []byte("a"), []byte("b"), append([]byte("c"), make([]byte, 1<<20)...), []byte("d"))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	fs := vfs.NewMem()
	r, err := OpenReplica("data", Options{FS: fs, Logger: discard, MemTableBytes: 256 << 10})
	if err != nil {
		t.Fatal(err)
	}
	for i, batch := range log.batches {
		if err := r.Apply(Position{uint64(i + 1), log.session}, batch); err != nil {
			t.Fatal(err)
		}
	}
	want := Position{uint64(len(log.batches)), log.session}
	if got := r.Position(); got != want {
		t.Errorf("position: got %v, want %v", got, want)
	}
	if err := r.Apply(Position{want.Batch + 2, log.session}, log.batches[0]); err == nil {
		t.Error("apply of a batch behind a gap: got no error, want one")
	}
	if err := r.Apply(Position{want.Batch + 1, log.session}, log.batches[0]); err == nil {
		t.Error("apply of a batch with another number: got no error, want one")
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}

	log.session = Session{2}
	copied := open(t, "data", Options{FS: fs, Log: log})
	defer copied.Close()
	ledger := copied.LaneStats(replicatedLane).Ledger
	if want := (queue.Ledger{Accepted: 4, Delivered: 1, DeadLettered: 1, Pending: 2}); ledger != want {
		t.Errorf("ledger of the copy: got %+v, want %+v", ledger, want)
	}
	if got := copied.LogPosition(); got.Batch < want.Batch {
		t.Errorf("position of the copy: got %v, want at least batch %d", got, want.Batch)
	}
}

// While the log is full, writes wait and hold locks of lanes; reports have the last known numbers.
func TestReportsWhileTheLogIsFull(t *testing.T) {
	log := &memoryLog{session: Session{1}}
	s := open(t, "data", Options{FS: vfs.NewMem(), Log: log})
	settleSome(t, s, []byte("a"), []byte("b"), []byte("c"))
	before := s.LaneStats(replicatedLane)
	log.full.Lock()
	unlock := sync.OnceFunc(log.full.Unlock)
	defer func() { unlock(); _ = s.Close() }()
	got, err := s.Lease(replicatedLane, 1, nil)
	if err != nil || len(got) != 1 {
		t.Fatalf("lease: got %d messages and error %v, want 1 and none", len(got), err)
	}
	s.Ack(got[0])
	read := make(chan queue.LaneStats)
	go func() {
		stats := s.LaneStats(replicatedLane)
		for !stats.Stale { // The flusher waits soon.
			time.Sleep(time.Millisecond)
			stats = s.LaneStats(replicatedLane)
		}
		_, _ = s.Position(replicatedLane)
		_ = s.DestinationStats(replicatedLane.Destination)
		read <- stats
	}()
	select {
	case stats := <-read:
		if before.Ledger.Delivered+1 < stats.Ledger.Delivered || stats.Ledger.Accepted != before.Ledger.Accepted {
			t.Errorf("ledger while the log is full: got %+v, want that of before, %+v, or of after the delivery", stats.Ledger, before.Ledger)
		}
	case <-time.After(20 * time.Second):
		t.Error("the numbers of a lane could not be read while the log was full")
	}
	unlock()
	if err := s.flushLanes(true); err != nil {
		t.Fatal(err)
	}
	if stats := s.LaneStats(replicatedLane); stats.Stale || stats.Ledger.Delivered != 2 {
		t.Errorf("after the log has space: got %+v, want 2 delivered", stats)
	}
}

// Without a write-ahead log the files contain a prefix of the log, and the position is its end.
func TestCrashLeavesAPrefix(t *testing.T) {
	mem := vfs.NewCrashableMem()
	log := &memoryLog{session: Session{1}}
	s := open(t, "data", Options{FS: mem, Log: log})
	settleSome(t, s, []byte("a"), []byte("b"))
	if err := s.db.Flush(); err != nil {
		t.Fatal(err)
	}
	flushed := s.LogPosition()
	if _,
		err := s.Append(t.Context(), []queue.Message{{Source: replicatedLane.Source, ID: "c", AcceptedAt: time.Now(),
		Body: []byte("{}")}}); err != nil {
		t.Fatal(err)
	}
	survived := mem.CrashClone(vfs.CrashCloneCfg{})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := OpenReplica("data", Options{FS: survived, Logger: discard})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if got := r.Position(); got != flushed {
		t.Errorf("position after the crash: got %v, want %v", got, flushed)
	}
	for i := flushed.Batch; i < uint64(len(log.batches)); i++ {
		if err := r.Apply(Position{i + 1, log.session}, log.batches[i]); err != nil {
			t.Errorf("batch %d: got error %v, want none", i+1, err)
		}
	}
}

func TestCheckpointHasItsPosition(t *testing.T) {
	fs := vfs.NewMem()
	s := open(t, "data", Options{FS: fs, Log: &memoryLog{session: Session{1}}})
	defer s.Close()
	settleSome(t, s, []byte("a"), []byte("b"))
	before := s.LogPosition()
	p, err := s.Checkpoint("copy")
	if err != nil {
		t.Fatal(err)
	}
	if p.Batch < before.Batch || p.Session != before.Session {
		t.Errorf("position of the checkpoint: got %v, want at least %v", p, before)
	}
	if got, err := ReadPosition(fs, "copy"); err != nil || got != p {
		t.Errorf("position read again: got %v and error %v, want %v", got, err, p)
	}
}

// A store keeps the kind of its log, because each kind has another part of its data.
func TestKindOfLogIsKept(t *testing.T) {
	for _, test := range []struct {
		name        string
		first, then Log
	}{
		{"volume opened with a log", nil, &memoryLog{}},
		{"replicated opened without its log", &memoryLog{}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			fs := vfs.NewMem()
			if err := open(t, "data", Options{FS: fs, Log: test.first}).Close(); err != nil {
				t.Fatal(err)
			}
			if s, err := Open("data", Options{FS: fs, Log: test.then, Logger: discard}); err == nil {
				_ = s.Close()
				t.Error("open: got no error, want one")
			}
		})
	}
	fs := vfs.NewMem()
	if err := open(t, "data", Options{FS: fs}).Close(); err != nil {
		t.Fatal(err)
	}
	if r, err := OpenReplica("data", Options{FS: fs, Logger: discard}); err == nil {
		_ = r.Close()
		t.Error("replica of a store without a replicated log: got no error, want one")
	}
}

// A commit that does not become durable is neither acknowledged nor visible.
func TestLogFails(t *testing.T) {
	log := &memoryLog{}
	s := open(t, "data", Options{FS: vfs.NewMem(), Log: log, DuplicateWindow: time.Hour})
	settleSome(t, s, []byte("a"), []byte("b"))
	var letter string
	if err := s.DeadLetters(t.Context(), replicatedLane.Destination, "", func(d queue.DeadLetter) bool {
		letter = d.Key
		return true
	}); err != nil || letter == "" {
		t.Fatalf("dead letter: got key %q and error %v", letter, err)
	}
	ended := errors.New("session ended")
	log.fail(ended)
	message := []queue.Message{{Source: replicatedLane.Source, ID: "c", AcceptedAt: time.Now(), Body: []byte("{}")}}
	if _, err := s.Append(context.Background(), message); !errors.Is(err, ended) {
		t.Errorf("append: got error %v, want %v", err, ended)
	}
	// The messageId is in the files, and the message is not in the log.
	if _, err := s.Append(context.Background(), message); !errors.Is(err, ended) {
		t.Errorf("append of the same message again: got error %v, want %v", err, ended)
	}
	if got := s.SourceStats(replicatedLane.Source).Accepted; got != 2 {
		t.Errorf("accepted messages: got %d, want 2", got)
	}
	if got, err := s.Trace(t.Context(), "c", time.Time{}); err != nil || len(got.Traces) > 0 || !got.Storing {
		t.Errorf("trace of the message: got %+v and error %v, want none, and that it is being stored", got, err)
	}
	// After the first removal the dead letter is not in the files.
	for _, keys := range [][]string{{letter}, {letter}, nil} {
		if err := s.DeleteDeadLetters(t.Context(), replicatedLane.Destination, keys...); !errors.Is(err, ended) {
			t.Errorf("removal of dead letters %q: got error %v, want %v", keys, err, ended)
		}
	}
	if err := s.OpenLane(queue.LaneID{Source: "shop/web", Destination: "shop/mail"}); !errors.Is(err, ended) {
		t.Errorf("open a lane: got error %v, want %v", err, ended)
	}
	if err := s.PutMetaDurable("name", []byte("value")); !errors.Is(err, ended) {
		t.Errorf("durable value: got error %v, want %v", err, ended)
	}
	if err := s.Close(); !errors.Is(err, ended) {
		t.Errorf("close: got error %v, want %v", err, ended)
	}
}
