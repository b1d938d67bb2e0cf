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
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
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

func (s *snapshotSlot) importFrom(t *testing.T, fs vfs.FS) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	return s.slot(fs).Import(ctx, s.stream.Rename, func() error { return nil })
}

// A store moves to a slot with all its messages.
func TestMoveToALog(t *testing.T) {
	s, fs := newSnapshotSlot(), volume(t, 300)
	if err := s.importFrom(t, fs); err != nil {
		t.Fatalf("import: %v", err)
	}
	if _, err := pebblestore.Open("data/queue", pebblestore.Options{FS: fs, Logger: slog.New(slog.DiscardHandler)}); err == nil {
		t.Error("open of the imported store without the log: got no error, want one")
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
func TestImportIntoAUsedSlot(t *testing.T) {
	s := newSnapshotSlot()
	owner := s.open(t, vfs.NewMem())
	owner.close(t, true)
	if err := s.importFrom(t, volume(t, 10)); !errors.Is(err, slots.ErrUsed) {
		t.Errorf("import into a used slot: got error %v, want %v", err, slots.ErrUsed)
	}
	s = newSnapshotSlot()
	if err := s.importFrom(t, volume(t, 10)); err != nil {
		t.Fatal(err)
	}
	other := volume(t, 20)
	if err := s.importFrom(t, other); !errors.Is(err, slots.ErrUsed) {
		t.Errorf("import of a second store: got error %v, want %v", err, slots.ErrUsed)
	}
	openVolume(t, other).wantAccepted(t, 20) // It is not changed.
	s.open(t, vfs.NewMem()).wantAccepted(t, 10)
}

// failingObjects stores nothing.
type failingObjects struct{ slots.Objects }

func (failingObjects) Put(context.Context, string, io.Reader) error {
	return errors.New("the object store is full")
}

// An import that fails can be repeated.
func TestImportIsRepeated(t *testing.T) {
	s, fs := newSnapshotSlot(), volume(t, 50)
	failing := s.slot(fs)
	failing.Objects = failingObjects{s.objects}
	if err := failing.Import(t.Context(), s.stream.Rename, func() error { return nil }); err == nil {
		t.Fatal("import without an object store: got no error, want one")
	}
	var ids []string
	for range 2 {
		if err := s.importFrom(t, fs); err != nil {
			t.Fatalf("repeated import: %v", err)
		}
		state, err := slotstest.NewLog(s.stream).State(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, state.ID)
	}
	if ids[0] != ids[1] {
		t.Errorf("ids of the stream after each import: got %q, want the same", ids)
	}
	s.open(t, vfs.NewMem()).wantAccepted(t, 50)
}

// An empty store, without a message, moves too.
func TestImportOfAnEmptyStore(t *testing.T) {
	s := newSnapshotSlot()
	if err := s.importFrom(t, volume(t, 0)); err != nil {
		t.Fatal(err)
	}
	owner := s.open(t, vfs.NewMem())
	owner.accept(t, 1)
	owner.wantAccepted(t, 1)
}
