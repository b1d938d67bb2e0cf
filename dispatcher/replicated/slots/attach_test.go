package slots_test

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// openVolume opens a store with a log of its own.
func openVolume(t *testing.T, fs vfs.FS) *snapshotOwner {
	t.Helper()
	store, err := pebblestore.Open("data/queue", pebblestore.Options{FS: fs, Logger: slog.New(slog.DiscardHandler), MemTableBytes: 256 << 10})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	return &snapshotOwner{store: store, session: rand.Text()}
}

// volume returns the files of a store with a log of its own after a power loss, with a number of messages.
func volume(t *testing.T, messages int) vfs.FS {
	t.Helper()
	fs := vfs.NewCrashableMem()
	openVolume(t, fs).accept(t, messages)
	return fs.CrashClone(vfs.CrashCloneCfg{})
}

// move makes a store with a log of its own the content of the slot, and returns how often it was prepared.
func (s *snapshotSlot) move(t *testing.T, slot slots.Slot, failure error) (prepared int, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a, err := slot.Adopt(ctx, s.stream.Rename, true, func(store *pebblestore.Store) error {
		prepared++
		return failure
	})
	if err == nil && a.Content != slots.ContentStore {
		t.Errorf("adoption: got %+v, want the content %s", a, slots.ContentStore)
	}
	return prepared, err
}

// A store moves to a slot with all its messages.
func TestMoveToALog(t *testing.T) {
	s, fs := newSnapshotSlot(), volume(t, 300)
	if prepared, err := s.move(t, s.slot(fs), nil); err != nil || prepared != 1 {
		t.Fatalf("adoption: got %d preparations and error %v, want 1", prepared, err)
	}
	if _, err := pebblestore.Open("data/queue", pebblestore.Options{FS: fs, Logger: slog.New(slog.DiscardHandler)}); err == nil {
		t.Error("open of the adopted store without the log: got no error, want one")
	}
	owner := s.open(t, vfs.NewMem())
	owner.wantAccepted(t, 300)
	owner.accept(t, 100)
	owner.take(t) // The stream is trimmed.
	owner.accept(t, 100)
	owner.close(t, false)
	s.open(t, vfs.NewMem()).wantAccepted(t, 500)
}

// A slot that a process has used, or that has another store, takes none.
func TestMoveToAUsedSlot(t *testing.T) {
	s := newSnapshotSlot()
	owner := s.open(t, vfs.NewMem())
	owner.close(t, true)
	refused := func(what string, fs vfs.FS) {
		t.Helper()
		prepared, err := s.move(t, s.slot(fs), nil)
		wantRefused(t, what, err, slots.ErrUsed, "--replication-name", "posthorn drain")
		if prepared != 0 {
			t.Errorf("%s: got %d preparations, want none", what, prepared)
		}
	}
	refused("a used slot", volume(t, 10))
	s = newSnapshotSlot()
	first := volume(t, 10)
	if _, err := s.move(t, s.slot(first), nil); err != nil {
		t.Fatal(err)
	}
	other := volume(t, 20)
	refused("a second store", other)
	openVolume(t, other).wantAccepted(t, 20) // It is not changed.
	s.open(t, vfs.NewMem()).wantAccepted(t, 10)

	s, first = newSnapshotSlot(), volume(t, 10)
	failing := s.slot(first)
	failing.Log = failingLog{failing.Log}
	if _, err := s.move(t, failing, nil); err == nil {
		t.Fatal("move to a log that accepts no record: got no error, want one")
	}
	owner = s.open(t, vfs.NewMem())
	owner.accept(t, 20)
	owner.close(t, true)
	refused("a slot that was used before the second try", first)
	s.open(t, vfs.NewMem()).wantAccepted(t, 20)
}

// failingLog accepts no record.
type failingLog struct{ slots.Log }

func (failingLog) Publish(context.Context, uint64, string, []byte) (uint64, error) {
	return 0, errors.New("the stream is full")
}

// failingObjects stores nothing.
type failingObjects struct{ slots.Objects }

func (failingObjects) Put(context.Context, string, io.Reader) error {
	return errors.New("the object store is full")
}

// A move that fails can be repeated. A store is unchanged until it is prepared.
func TestMoveIsRepeated(t *testing.T) {
	s, fs := newSnapshotSlot(), volume(t, 50)
	unprepared := errors.New("not prepared")
	if _, err := s.move(t, s.slot(fs), unprepared); !errors.Is(err, unprepared) {
		t.Fatalf("move of a store that cannot be prepared: got error %v, want %v", err, unprepared)
	}
	before := openVolume(t, fs)
	before.wantAccepted(t, 50)
	if err := before.store.Close(); err != nil {
		t.Fatal(err)
	}
	failing := s.slot(fs)
	failing.Objects = failingObjects{s.objects}
	if _, err := s.move(t, failing, nil); err == nil {
		t.Fatal("move without an object store: got no error, want one")
	}
	for range 2 {
		if prepared, err := s.move(t, s.slot(fs), nil); err != nil || prepared != 0 {
			t.Fatalf("repeated move: got %d preparations and error %v, want none", prepared, err)
		}
	}
	s.open(t, vfs.NewMem()).wantAccepted(t, 50)
}

// An empty store, without a message, moves too.
func TestMoveOfAnEmptyStore(t *testing.T) {
	s := newSnapshotSlot()
	if _, err := s.move(t, s.slot(volume(t, 0)), nil); err != nil {
		t.Fatal(err)
	}
	owner := s.open(t, vfs.NewMem())
	owner.accept(t, 1)
	owner.wantAccepted(t, 1)
}
