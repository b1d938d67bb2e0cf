package slots_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// The folder of a process that was killed proves that its session has ended: the next process with
// the folder claims the slot without the time after which another pod may claim it.
func TestRestartedOwnerClaimsImmediately(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSnapshotSlot()
		fs := vfs.NewMem()
		owner := s.open(t, fs)
		owner.accept(t, 10)
		owner.Writer.Close() // No record ends the session.
		if err := owner.store.Close(); err == nil {
			t.Log("the store had no unwritten positions")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		started := time.Now()
		w, err := slots.Slot{Log: slotstest.NewLog(s.stream), Objects: s.objects, Dir: "data/queue",
			Store: pebblestore.Options{FS: fs, Logger: slog.New(slog.DiscardHandler)}}.Follow(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		// A claim after a suspect record takes 11 s.
		if took := time.Since(started); took > time.Second {
			t.Errorf("claim by the restarted owner: got it after %v, want it immediately", took)
		}
		if w.Epoch() != 2 {
			t.Errorf("epoch: got %d, want 2", w.Epoch())
		}
	})
}

// A stream that was created again does not replace the only copy of what the old one had.
func TestOtherStreamIsRefused(t *testing.T) {
	s := newSnapshotSlot()
	fs := vfs.NewMem()
	owner := s.open(t, fs)
	owner.accept(t, 10)
	owner.Writer.Close()
	_ = owner.store.Close()
	again := newSnapshotSlot()
	again.open(t, vfs.NewMem()).accept(t, 20) // Another process uses the new stream.
	slot := slots.Slot{Log: slotstest.NewLog(again.stream), Objects: again.objects, Dir: "data/queue",
		Store: pebblestore.Options{FS: fs, Logger: slog.New(slog.DiscardHandler)}}
	_, err := slot.Follow(t.Context())
	if !errors.Is(err, slots.ErrOtherStream) || !strings.Contains(err.Error(), "data/queue") {
		t.Errorf("follow a stream that was created again: got error %v, want %v with the folder", err, slots.ErrOtherStream)
	}
	position, err := pebblestore.ReadPosition(fs, "data/queue")
	if err != nil || position.Batch == 0 {
		t.Errorf("position of the local files: got %+v and error %v, want those of the old stream", position, err)
	}
}
