package slots_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// slot returns the access of a process to the slot.
func (s *snapshotSlot) slot(fs vfs.FS) slots.Slot {
	return slots.Slot{Log: slotstest.NewLog(s.stream), Objects: s.objects, Dir: "data/queue",
		Store: pebblestore.Options{FS: fs, Logger: slog.New(slog.DiscardHandler), MemTableBytes: 256 << 10}}
}

// refused returns the error of a process that follows the slot with the files of a file system.
func (s *snapshotSlot) refused(t *testing.T, fs vfs.FS) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	w, err := s.slot(fs).Follow(ctx)
	if err == nil {
		w.Close()
	}
	return err
}

func wantRefused(t *testing.T, what string, got, want error, texts ...string) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: got error %v, want %v", what, got, want)
	}
	for _, text := range texts {
		if got == nil || !strings.Contains(got.Error(), text) {
			t.Errorf("%s: got error %v, want one with %q", what, got, text)
		}
	}
}

// unprepared is for files of a process.
func unprepared(*pebblestore.Store) error { return errors.New("the files have a log of their own") }

func (s *snapshotSlot) adopt(t *testing.T, fs vfs.FS, useFiles bool, want slots.Content) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a, err := s.slot(fs).Adopt(ctx, s.stream.Rename, useFiles, unprepared)
	if err != nil {
		t.Fatalf("adopt the slot: %v", err)
	}
	if a.Content != want || a.Batch == 0 {
		t.Errorf("adoption: got %+v, want the content %s and its last batch", a, want)
	}
}

// close ends a process that owns the slot, in order or not.
func (o *snapshotOwner) close(t *testing.T, release bool) {
	t.Helper()
	if release {
		if err := o.Writer.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	o.Writer.Close()
	_ = o.store.Close()
}

// restoredSlot is a slot whose stream and objects were restored from a backup with 100 messages, and
// the files of the process that had accepted 300.
func restoredSlot(t *testing.T, release bool) (*snapshotSlot, vfs.FS) {
	t.Helper()
	s, fs := newSnapshotSlot(), vfs.NewMem()
	owner := s.open(t, fs)
	owner.accept(t, 100)
	owner.take(t)
	backup := &snapshotSlot{s.stream.Clone(), s.objects.Clone()}
	owner.accept(t, 200)
	owner.close(t, release)
	return backup, fs
}

// A process whose files have acknowledged messages that a restored stream lacks does not remove them. An
// adoption continues with the stream, or with the files.
func TestRestoredBackup(t *testing.T) {
	for name, release := range map[string]bool{"orderly end": true, "kill": false} {
		t.Run(name, func(t *testing.T) {
			for _, useFiles := range []bool{false, true} {
				s, fs := restoredSlot(t, release)
				wantRefused(t, "files of a later time", s.refused(t, fs), slots.ErrRecordsLost, "data/queue", "posthorn replication adopt", "--data")
				wantRefused(t, "a second try", s.refused(t, fs), slots.ErrRecordsLost)
				accepted := uint64(100)
				if useFiles {
					accepted = 300
					s.adopt(t, fs, true, slots.ContentFiles)
				} else {
					s.adopt(t, vfs.NewMem(), false, slots.ContentStream)
				}
				for _, process := range []vfs.FS{fs, vfs.NewMem(), fs} { // With files, without, and again.
					owner := s.open(t, process)
					owner.wantAccepted(t, accepted)
					owner.accept(t, 1)
					accepted++
					owner.wantAccepted(t, accepted)
					owner.close(t, true)
				}
			}
		})
	}
}

// A standby whose files have records that a restored stream lacks keeps them, too.
func TestRestoredBackupOfStandby(t *testing.T) {
	s, fs := newSnapshotSlot(), vfs.NewMem()
	owner := s.open(t, vfs.NewMem())
	owner.accept(t, 100)
	backup := &snapshotSlot{s.stream.Clone(), s.objects.Clone()}
	owner.accept(t, 1)
	ctx, cancel := context.WithCancel(t.Context())
	standby := s.slot(fs)
	standby.CaughtUp = cancel
	_, _ = standby.Follow(ctx)
	owner.close(t, true)
	wantRefused(t, "a standby", backup.refused(t, fs), slots.ErrRecordsLost)
}

// A stream that was deleted and created again is used only after an adoption: of the newest snapshot, or
// of the files of a process.
func TestStreamWasCreatedAgain(t *testing.T) {
	for _, useFiles := range []bool{false, true} {
		s, fs := restoredSlot(t, true)
		s.stream = slotstest.NewStream(0)
		wantRefused(t, "files of the former stream", s.refused(t, fs), slots.ErrOtherStream, "posthorn replication adopt --data")
		wantRefused(t, "no files", s.refused(t, vfs.NewMem()), slots.ErrEmptied, "posthorn replication adopt")
		accepted := uint64(100)
		if useFiles {
			accepted = 300
			s.adopt(t, fs, true, slots.ContentFiles)
			s.adopt(t, fs, true, slots.ContentFiles) // Again, as after an error.
		} else {
			s.adopt(t, vfs.NewMem(), false, slots.ContentSnapshot)
			wantRefused(t, "files that were not used", s.refused(t, fs), slots.ErrOtherStream)
		}
		owner := s.open(t, vfs.NewMem())
		owner.wantAccepted(t, accepted)
		owner.accept(t, 1)
		owner.close(t, true)
		if useFiles {
			owner = s.open(t, fs)
			owner.wantAccepted(t, accepted+1)
		}
	}
}

// The files of an owner before the last one do not replace what the last one accepted.
func TestOlderFilesAreNotAdopted(t *testing.T) {
	s, older, newer := newSnapshotSlot(), vfs.NewMem(), vfs.NewMem()
	owner := s.open(t, older)
	owner.accept(t, 100)
	owner.close(t, false)
	owner = s.open(t, newer)
	owner.accept(t, 200)
	for range 3 { // The stream begins behind the files of the first owner.
		owner.take(t)
		owner.accept(t, 1)
	}
	owner.close(t, false)
	_, err := s.slot(older).Adopt(t.Context(), s.stream.Rename, true, unprepared)
	wantRefused(t, "the files of the first owner", err, slots.ErrOlderFiles, "epoch 1", "highest epoch")
	s.adopt(t, newer, true, slots.ContentFiles)
	s.open(t, vfs.NewMem()).wantAccepted(t, 303)
}

// Files without messages are not adopted.
func TestAdoptIsRefused(t *testing.T) {
	s := newSnapshotSlot()
	owner := s.open(t, vfs.NewMem())
	owner.accept(t, 10)
	owner.close(t, true)
	fs := vfs.NewMem()
	files, err := pebblestore.OpenReplica("data/queue", s.slot(fs).Store)
	if err == nil {
		err = files.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	process, err := fs.Create("data/queue.slot", vfs.WriteCategoryUnspecified)
	if err == nil {
		_, err = process.Write([]byte(`{"stream": "` + s.state(t).ID + `"}`))
		err = errors.Join(err, process.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	for want, fs := range map[string]vfs.FS{"have no messages": fs, "does not exist": vfs.NewMem()} {
		_, err := s.slot(fs).Adopt(t.Context(), s.stream.Rename, true, unprepared)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("files without messages: got error %v, want %q", err, want)
		}
	}
	s.open(t, vfs.NewMem()).wantAccepted(t, 10)
}
