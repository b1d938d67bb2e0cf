package slots_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// newerStore is a store in the formats of a newer release.
type newerStore struct {
	slots.Checkpointer
	formats pebblestore.Formats
}

func (s newerStore) Formats() (pebblestore.Formats, error) { return s.formats, nil }

// countedGets counts the objects that are read.
type countedGets struct {
	slots.Objects
	names []string
}

func (o *countedGets) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	o.names = append(o.names, name)
	return o.Objects.Get(ctx, name)
}

// A process does not claim a slot that a newer release wrote, and keeps its files: with each kind of format
// that is one higher, in the log, in the snapshot and in its own files.
func TestNewerFormats(t *testing.T) {
	readable := pebblestore.ReadableFormats()
	publish := func(s *snapshotSlot, change func(record []byte) []byte) error {
		log := slotstest.NewLog(s.stream)
		state, err := log.State(t.Context())
		if err != nil {
			return err
		}
		e, err := log.Get(t.Context(), state.Last)
		if err != nil {
			return err
		}
		_, err = log.Publish(t.Context(), state.Last, "newer", change(e.Record))
		return err
	}
	snapshot := func(formats pebblestore.Formats) func(*snapshotSlot, vfs.FS) error {
		return func(s *snapshotSlot, _ vfs.FS) error {
			owner := s.open(t, vfs.NewMem())
			owner.Store = newerStore{owner.Store, formats}
			for range 2 { // Then the stream begins behind the files of the other process.
				owner.accept(t, 100)
				owner.take(t)
			}
			return owner.Writer.Release(t.Context())
		}
	}
	for name, test := range map[string]struct {
		want string
		// raise does what a newer release does after the process with files has ended.
		raise func(s *snapshotSlot, files vfs.FS) error
		// unreadable is true if raise changed the files, so that their position cannot be read.
		unreadable bool
	}{
		"record": {"(record format 2, this release reads 1)", func(s *snapshotSlot, _ vfs.FS) error {
			return publish(s, slotstest.Newer)
		}, false},
		"batch": {"(store format 2, this release reads 1)", func(s *snapshotSlot, _ vfs.FS) error {
			owner := s.open(t, vfs.NewMem())
			last := owner.store.LogPosition().Batch
			db, err := pebble.Open("newer", &pebble.Options{FS: vfs.NewMem(), Logger: silent{}})
			if err != nil {
				return err
			}
			b := db.NewBatch()
			_ = b.Set([]byte("mf"), []byte{byte(readable.Store) + 1}, nil)
			err = owner.Writer.Append(last+1, b.Repr())
			return errors.Join(err, owner.Writer.Release(t.Context()), b.Close(), db.Close())
		}, false},
		"snapshot of the store": {"(store format 2, this release reads 1)", snapshot(pebblestore.Formats{Store: readable.Store + 1}), false},
		"snapshot of the engine": {"(Pebble format 25, this release reads 24)",
			snapshot(pebblestore.Formats{Store: 1, Pebble: readable.Pebble + 1}), false},
		"files of the store": {"(store format 2, this release reads 1)", func(_ *snapshotSlot, files vfs.FS) error {
			db, err := pebble.Open("data/queue", &pebble.Options{FS: files, Logger: silent{}})
			if err != nil {
				return err
			}
			// The mark has the checksum of a file that the engine has changed.
			return errors.Join(db.Set([]byte("mf"), []byte{byte(readable.Store) + 1}, pebble.Sync), db.Close(), files.Remove("data/queue/clean-shutdown"))
		}, false},
		"files of the engine": {"(Pebble format 25, this release reads 24)", func(_ *snapshotSlot, files vfs.FS) error {
			m, _, err := atomicfs.LocateMarker(files, "data/queue", "format-version")
			if err != nil {
				return err
			}
			return errors.Join(m.Move("025"), m.Close())
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSnapshotSlot()
			files := vfs.NewMem()
			owner := s.open(t, files)
			owner.accept(t, 10)
			last := owner.store.LogPosition()
			if err := errors.Join(owner.Writer.Release(t.Context()), owner.store.Close()); err != nil {
				t.Log(err) // Positions in memory are dropped.
			}
			if err := test.raise(s, files); err != nil {
				t.Fatal(err)
			}
			before, _ := slotstest.NewLog(s.stream).State(t.Context())
			objects := &countedGets{Objects: s.objects}
			slot := slots.Slot{Log: slotstest.NewLog(s.stream), Objects: objects, Dir: "data/queue",
				Store: pebblestore.Options{FS: files, Logger: slog.New(slog.DiscardHandler)}}
			for range 2 { // A process tries again and again.
				w, err := slot.Follow(t.Context())
				var damage *slots.DamageError
				if !errors.Is(err, pebblestore.ErrNewerFormat) || errors.As(err, &damage) ||
					!strings.Contains(err.Error(), "a newer release wrote the log "+test.want+": use that release or a newer one") {
					t.Errorf("follow: got error %v, want %v with the formats", err, pebblestore.ErrNewerFormat)
				}
				if w != nil {
					w.Close()
				}
			}
			if after, _ := slotstest.NewLog(s.stream).State(t.Context()); after.Last != before.Last {
				t.Errorf("last record: got %d, want %d: nothing is claimed", after.Last, before.Last)
			}
			for _, object := range objects.names {
				if !strings.HasSuffix(object, "/snapshot.json") {
					t.Errorf("object %s of the snapshot was read, want the manifest alone", object)
				}
			}
			if names, err := files.List("data/queue"); err != nil || len(names) == 0 {
				t.Errorf("files: got %d and error %v, want those of the process", len(names), err)
			}
			if test.unreadable {
				return
			}
			if p, err := pebblestore.ReadPosition(files, "data/queue"); err != nil || p.Batch < last.Batch {
				t.Errorf("position of the files: got %+v and error %v, want at least %d", p, err, last.Batch)
			}
		})
	}
}

type silent struct{}

func (silent) Infof(string, ...any)  {}
func (silent) Errorf(string, ...any) {}
func (silent) Fatalf(string, ...any) {}
