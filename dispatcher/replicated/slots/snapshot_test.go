package slots_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
	"github.com/posthorn/posthorn/test/wait"
)

// snapshotSlot is a slot on a simulated stream and object store.
type snapshotSlot struct {
	stream  *slotstest.Stream
	objects *slotstest.ObjectStore
}

func newSnapshotSlot() *snapshotSlot {
	return &snapshotSlot{slotstest.NewStream(0), slotstest.NewObjectStore(0)}
}

// snapshotOwner is the session of a slot with its store.
type snapshotOwner struct {
	*slots.Snapshotter
	store *pebblestore.Store
	// session is a part of the messageIds.
	session string
	count   int
}

// open takes over the slot with the files of a file system.
func (s *snapshotSlot) open(t *testing.T, fs vfs.FS) *snapshotOwner {
	t.Helper()
	slot := slots.Slot{Log: slotstest.NewLog(s.stream), Objects: s.objects, Dir: "data/queue",
		Store: pebblestore.Options{FS: fs, Logger: slog.New(slog.DiscardHandler), MemTableBytes: 256 << 10}}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	w, err := slot.TakeOver(ctx)
	if err != nil {
		t.Fatal(err)
	}
	slot.Store.Log = w
	store, err := pebblestore.Open(slot.Dir, slot.Store)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.Close()
		_ = store.Close()
	})
	return &snapshotOwner{store: store, session: fmt.Sprintf("%x", w.Session()), Snapshotter: &slots.Snapshotter{
		Log: slot.Log, Objects: s.objects, Writer: w, Store: store, FS: fs, Dir: slot.Dir + ".snapshot", Logger: slot.Store.Logger,
	}}
}

// accept appends messages.
func (o *snapshotOwner) accept(t *testing.T, n int) {
	t.Helper()
	for range n {
		o.count++
		m := queue.Message{Source: "shop/web", ID: fmt.Sprintf("%s-%d", o.session, o.count), AcceptedAt: time.Now(), Body: []byte(strings.Repeat("x", 1000))}
		if err := wait.Until(func() error {
			_, err := o.store.Append(t.Context(), []queue.Message{m})
			if errors.Is(err, queue.ErrUnavailable) { // A record was not acknowledged in time.
				return err
			}
			if err != nil {
				t.Fatal(err)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}

func (o *snapshotOwner) take(t *testing.T) {
	t.Helper()
	if err := o.Take(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (o *snapshotOwner) wantAccepted(t *testing.T, want uint64) {
	t.Helper()
	if got := o.store.SourceStats("shop/web").Accepted; uint64(got) != want {
		t.Errorf("accepted messages: got %d, want %d", got, want)
	}
}

func (s *snapshotSlot) first(t *testing.T) uint64 {
	t.Helper()
	return s.state(t).First
}

func (s *snapshotSlot) state(t *testing.T) slots.State {
	t.Helper()
	state, err := slotstest.NewLog(s.stream).State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return state
}

// A slot is restored from a snapshot and the records behind it. The stream is trimmed behind the
// snapshot before the last one. A second snapshot has only the tables that are new.
func TestSnapshotAndRestore(t *testing.T) {
	s := newSnapshotSlot()
	owner := s.open(t, vfs.NewMem())
	owner.accept(t, 300)
	owner.take(t)
	if got := s.first(t); got != 1 {
		t.Errorf("first record after one snapshot: got %d, want 1", got)
	}
	atFirst := s.objects.Puts()
	owner.take(t)
	fewest := s.objects.Puts() - atFirst
	for range 9 { // A compaction replaces the tables, but not before each snapshot.
		before := s.objects.Puts()
		owner.take(t)
		fewest = min(fewest, s.objects.Puts()-before)
	}
	if fewest >= atFirst {
		t.Errorf("objects stored by a later snapshot: got %d, want fewer than the %d of the first one", fewest, atFirst)
	}
	trimmed := s.first(t)
	if trimmed < 100 {
		t.Errorf("first record after two snapshots: got %d, want at least 100", trimmed)
	}
	owner.accept(t, 100)
	s.open(t, vfs.NewMem()).wantAccepted(t, 400)
}

// onlyNew is an object store in which no object is replaced.
type onlyNew struct {
	slots.Objects
	t    *testing.T
	puts map[string]bool
}

func (o *onlyNew) Put(ctx context.Context, name string, data io.Reader) error {
	if o.puts[name] {
		o.t.Errorf("object %s is replaced: earlier snapshots may need it", name)
	}
	o.puts[name] = true
	return o.Objects.Put(ctx, name, data)
}

// Snapshots with the same last batch have no object in common that can differ: a compaction changes the
// files, and a snapshot that is stored without its record must not damage the last two.
func TestSnapshotsOfTheSameBatch(t *testing.T) {
	s := newSnapshotSlot()
	owner := s.open(t, vfs.NewMem())
	owner.Objects = &onlyNew{s.objects, t, map[string]bool{}}
	owner.accept(t, 300)
	for range 3 {
		owner.take(t)
	}
}

// Files of a copy that ends before the stream begins are replaced by a snapshot. Without one they
// are kept, and the error names the cause.
func TestTrimmedCopy(t *testing.T) {
	s := newSnapshotSlot()
	old := vfs.NewMem()
	owner := s.open(t, old)
	owner.accept(t, 10)
	owner.Writer.Close()
	_ = owner.store.Close()

	owner = s.open(t, vfs.NewMem())
	for range 2 {
		owner.accept(t, 100)
		owner.take(t)
	}
	objects := s.objects
	s.objects = slotstest.NewObjectStore(0)
	slot := slots.Slot{Log: slotstest.NewLog(s.stream), Objects: s.objects, Dir: "data/queue",
		Store: pebblestore.Options{FS: old, Logger: slog.New(slog.DiscardHandler)}}
	if _, err := slot.TakeOver(t.Context()); !errors.Is(err, slots.ErrForeignCopy) ||
		!strings.Contains(err.Error(), "restore the stream and the objects") {
		t.Errorf("take over without objects: got error %v, want %v with its fix", err, slots.ErrForeignCopy)
	}
	if p, err := pebblestore.ReadPosition(old, "data/queue"); err != nil || p.Batch == 0 {
		t.Errorf("position of the kept files: got %d and error %v, want some batches", p.Batch, err)
	}
	s.objects = objects
	s.open(t, old).wantAccepted(t, 210)
}

// A new copy, as each new process has, is restored without a warning.
func TestRestoreOfANewCopy(t *testing.T) {
	s := newSnapshotSlot()
	owner := s.open(t, vfs.NewMem())
	for range 2 {
		owner.accept(t, 100)
		owner.take(t)
	}
	var log strings.Builder
	slot := slots.Slot{
		Log: slotstest.NewLog(s.stream), Objects: s.objects, Dir: "data/queue",
		Store: pebblestore.Options{FS: vfs.NewMem(), Logger: slog.New(slog.NewTextHandler(&log, nil))},
	}
	w, err := slot.TakeOver(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if got := log.String(); !strings.Contains(got, "level=INFO msg=\"no local files; restoring the newest snapshot\"") ||
		strings.Contains(got, "level=WARN") {
		t.Errorf("log of a restore without local files: got %s, want one line of level INFO about it", got)
	}
}

// An object that another program deleted costs a restore from the snapshot before, and is stored
// again by the next snapshot.
func TestDeletedObject(t *testing.T) {
	s := newSnapshotSlot()
	owner := s.open(t, vfs.NewMem())
	owner.accept(t, 100)
	owner.take(t)
	before, _ := s.objects.List(t.Context())
	owner.accept(t, 100)
	owner.take(t)
	all, _ := s.objects.List(t.Context())
	deleted := 0
	for _, name := range all {
		if strings.HasSuffix(name, ".sst") && !strings.Contains(strings.Join(before, " "), name) {
			_ = s.objects.Delete(t.Context(), name)
			deleted++
		}
	}
	if deleted == 0 {
		t.Fatal("tables of the second snapshot alone: got none, want some")
	}
	clone := &snapshotSlot{s.stream.Clone(), s.objects}
	clone.open(t, vfs.NewMem()).wantAccepted(t, 200)

	owner.take(t)
	owner.take(t)
	s.open(t, vfs.NewMem()).wantAccepted(t, 200)
}

// cutObjects fails all uploads behind a number of them.
type cutObjects struct {
	slots.Objects
	left int
}

func (o *cutObjects) Put(ctx context.Context, name string, data io.Reader) error {
	if o.left == 0 {
		return slotstest.ErrLost
	}
	o.left--
	return o.Objects.Put(ctx, name, data)
}

// A snapshot that is cut off anywhere changes nothing: the slot is restored as before, and the next
// session deletes the rest.
func TestCutSnapshot(t *testing.T) {
	for left := range 12 {
		s := newSnapshotSlot()
		owner := s.open(t, vfs.NewMem())
		owner.accept(t, 50)
		owner.take(t)
		owner.accept(t, 50)
		owner.take(t)
		first := s.first(t)
		owner.accept(t, 50)
		owner.Objects = &cutObjects{s.objects, left}
		if err := owner.Take(t.Context()); err == nil {
			break // All objects of a snapshot.
		} else if !errors.Is(err, slotstest.ErrLost) {
			t.Fatalf("snapshot with %d uploads: got error %v, want %v", left, err, slotstest.ErrLost)
		}
		if got := s.first(t); got != first {
			t.Errorf("first record after %d uploads: got %d, want %d", left, got, first)
		}
		rest, _ := s.objects.List(t.Context())
		next := s.open(t, vfs.NewMem())
		next.wantAccepted(t, 150)
		next.take(t)
		next.take(t)
		kept, _ := s.objects.List(t.Context())
		for _, name := range rest {
			if strings.Contains(strings.Join(kept, " "), name) {
				t.Errorf("object %s of the cut snapshot: got it after two snapshots of the next session, want it deleted", name)
			}
		}
		s.open(t, vfs.NewMem()).wantAccepted(t, 150)
	}
}

// A full object store trims nothing; the next snapshot with room does.
func TestFullObjectStore(t *testing.T) {
	s := newSnapshotSlot()
	owner := s.open(t, vfs.NewMem())
	owner.accept(t, 100)
	s.objects.SetMaxBytes(1)
	if err := owner.Take(t.Context()); !errors.Is(err, slots.ErrNoSpace) {
		t.Errorf("snapshot to a full store: got error %v, want %v", err, slots.ErrNoSpace)
	}
	owner.accept(t, 10)
	if got := s.first(t); got != 1 {
		t.Errorf("first record: got %d, want 1", got)
	}
	s.objects.SetMaxBytes(0)
	owner.take(t)
	owner.take(t)
	s.open(t, vfs.NewMem()).wantAccepted(t, 110)
}

// Snapshots that fail again and again do not fill the object store: an attempt deletes what earlier ones have
// stored and neither it nor the last two snapshots need.
func TestFailedSnapshotsLeaveABoundedRest(t *testing.T) {
	s := newSnapshotSlot()
	owner := s.open(t, vfs.NewMem())
	owner.accept(t, 50)
	owner.take(t)
	owner.accept(t, 50)
	owner.take(t)
	before, _ := s.objects.List(t.Context())
	for range 20 {
		owner.accept(t, 300) // More than a memtable, so that tables are compacted.
		owner.Objects = &cutObjects{s.objects, 3}
		if err := owner.Take(t.Context()); !errors.Is(err, slotstest.ErrLost) {
			t.Fatalf("snapshot with 3 uploads: got error %v, want %v", err, slotstest.ErrLost)
		}
		// The tables of the attempt, some of earlier ones that it needs as well, and the last two snapshots.
		after, _ := s.objects.List(t.Context())
		names, _ := owner.FS.List(owner.Dir)
		if got, most := len(after), len(before)+len(names)+12; got > most {
			t.Fatalf("objects after a failed snapshot: got %d, want at most %d", got, most)
		}
	}
	owner.Objects = s.objects
	owner.take(t)
	owner.take(t)
	s.open(t, vfs.NewMem()).wantAccepted(t, 6100)
}

// A stream in which batches wait for space is freed by a snapshot, also one that has waiting batches. As long as
// the object store is full, none of them is published.
func TestSnapshotFreesAStreamWithWaitingBatches(t *testing.T) {
	const maxBytes = 64 << 20
	s := newSnapshotSlot()
	s.stream = slotstest.NewStream(maxBytes)
	owner := s.open(t, vfs.NewMem())
	owner.accept(t, 100)
	s.objects.SetMaxBytes(1)
	put := func(i int) {
		t.Helper()
		if err := owner.store.PutMeta(fmt.Sprint("value-", i), []byte(rand.Text()+strings.Repeat("x", 100<<10))); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	for ; owner.Writer.Status().Bytes < maxBytes*9/10; n++ {
		put(n % 10)
	}
	for range 5 {
		put(n % 10)
		n++
	}
	for range 2 {
		if err := owner.Take(t.Context()); !errors.Is(err, slots.ErrNoSpace) {
			t.Errorf("snapshot to a full store: got error %v, want %v", err, slots.ErrNoSpace)
		}
	}
	time.Sleep(2100 * time.Millisecond) // refuseAfter
	if owner.Writer.MaySend() {
		t.Error("with batches that wait for space: may send, want that it may not")
	}
	s.objects.SetMaxBytes(0)
	owner.take(t)
	put(n)
	owner.take(t)
	if err := wait.Until(owner.Writer.Ready); err != nil {
		t.Errorf("after two snapshots: got error %v, want that calls are accepted", err)
	}
	owner.accept(t, 10)
	if err := wait.Until(func() error {
		if !owner.Writer.MaySend() {
			return errors.New("may not send")
		}
		return nil
	}); err != nil {
		t.Errorf("after two snapshots: got error %v, want that it may send", err)
	}
	s.open(t, vfs.NewMem()).wantAccepted(t, 110)
}

// staleLog does not return the records from a sequence on.
type staleLog struct {
	slots.Log
	unseen uint64
}

func (l *staleLog) Get(ctx context.Context, from uint64) (slots.Entry, error) {
	e, err := l.Log.Get(ctx, from)
	if err == nil && e.Sequence >= l.unseen {
		return slots.Entry{}, slots.ErrNoRecord
	}
	return e, err
}

// Reads that miss existing records delete no object that a snapshot needs, and do not trim.
func TestStaleReads(t *testing.T) {
	s := newSnapshotSlot()
	owner := s.open(t, vfs.NewMem())
	owner.accept(t, 50)
	owner.take(t)
	owner.take(t)
	before, _ := s.objects.List(t.Context())
	first := s.first(t)

	next := s.open(t, vfs.NewMem())
	next.Log = &staleLog{next.Log, first + 1}
	if err := next.Take(t.Context()); !errors.Is(err, slots.ErrStaleRead) {
		t.Errorf("first snapshot of a session whose reads are stale: got error %v, want %v", err, slots.ErrStaleRead)
	}
	after, _ := s.objects.List(t.Context())
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	if got := s.first(t); got != first {
		t.Errorf("first record: got %d, want %d", got, first)
	}
	s.open(t, vfs.NewMem()).wantAccepted(t, 50)
}

// untrimmedLog fails a number of trims.
type untrimmedLog struct {
	slots.Log
	failures int
}

func (l *untrimmedLog) Trim(ctx context.Context, to uint64) error {
	if l.failures > 0 {
		l.failures--
		return slotstest.ErrLost
	}
	return l.Log.Trim(ctx, to)
}

// A trim that failed is repeated, also without a change that needs another snapshot, and before a next one.
func TestFailedTrimIsRepeated(t *testing.T) {
	s := newSnapshotSlot()
	owner := s.open(t, vfs.NewMem())
	owner.accept(t, 50)
	owner.take(t)
	owner.Log = &untrimmedLog{owner.Log, 2}
	for range 2 {
		owner.accept(t, 50)
		if err := owner.Take(t.Context()); !errors.Is(err, slotstest.ErrLost) {
			t.Errorf("snapshot whose trim fails: got error %v, want %v", err, slotstest.ErrLost)
		}
		if got := s.first(t); got != 1 {
			t.Errorf("first record: got %d, want 1", got)
		}
	}
	before, _ := s.objects.List(t.Context())
	owner.take(t)
	if got := s.first(t); got == 1 {
		t.Error("first record after the repeated trim: got 1, want a later one")
	}
	if after, _ := s.objects.List(t.Context()); len(after) > len(before) {
		t.Errorf("objects after the repeated trim: got %d, want at most %d: no snapshot is due", len(after), len(before))
	}
	s.open(t, vfs.NewMem()).wantAccepted(t, 150)
}
