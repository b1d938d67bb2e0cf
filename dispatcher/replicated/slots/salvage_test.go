package slots_test

import (
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// A slot whose stream lacks records continues without their batches, which are named. Each message was accepted alone.
func TestSalvage(t *testing.T) {
	for name, c := range map[string]struct {
		lose func(s *snapshotSlot, last uint64)
		// lost is the number of records behind the snapshot that are lost.
		lost uint64
	}{
		"a gap":    {func(s *snapshotSlot, last uint64) { s.stream.Lose(last-20, last-11) }, 10},
		"two gaps": {func(s *snapshotSlot, last uint64) { s.stream.Lose(last-20, last-16); s.stream.Lose(last-10, last-6) }, 10},
		"a purge":  {func(s *snapshotSlot, last uint64) { s.trimTo(t, last-9) }, 41},
		"a gap at readers": {func(s *snapshotSlot, last uint64) {
			s.stream.Lose(last-20, last-11)
			s.stream.LoseAtReaders(last-30, last-1)
		}, 10},
		"a purge and no snapshot": {func(s *snapshotSlot, last uint64) { s.objects = slotstest.NewObjectStore(0); s.trimTo(t, last-9) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSnapshotSlot()
			owner := s.open(t, vfs.NewMem())
			if err := owner.store.OpenLane(queue.LaneID{Source: "shop/web", Destination: "shop/crm"}); err != nil {
				t.Fatal(err)
			}
			owner.accept(t, 50)
			owner.take(t)
			first := s.state(t).Last
			for range 50 {
				owner.accept(t, 1)
			}
			last := s.state(t).Last
			owner.close(t, false)
			c.lose(s, last)
			slot := slots.Slot{Log: slotstest.NewLog(s.stream), Objects: s.objects, Dir: filepath.Join(t.TempDir(), "queue"),
				Store: pebblestore.Options{Logger: slog.New(slog.DiscardHandler)}}
			a, err := slot.Adopt(t.Context(), s.stream.Rename, false, unprepared)
			if c.lost == 0 {
				wantRefused(t, "adoption without a snapshot", err, slots.ErrNoSnapshot, "the stream begins with batch")
				return
			}
			if err != nil || a.Content != slots.ContentRest {
				t.Fatalf("adoption: got %+v and error %v, want the rest", a, err)
			}
			n := uint64(0)
			for _, b := range a.Missing {
				n += b.Last + 1 - b.First
			}
			if most := c.lost + last - first - 50; n == 0 || n > most {
				t.Errorf("missing batches: got %v, want 1 to %d", a.Missing, most)
			}
			t.Logf("%d batches are missing: %v", n, a.Lost)
			next := s.open(t, vfs.NewMem())
			next.accept(t, 1)
			ledger := next.store.SourceStats("shop/web").Ledger
			if err := ledger.Balance(); err != nil || uint64(ledger.Accepted) < 101-n || ledger.Accepted > 101 {
				t.Errorf("ledger: got %+v and error %v, want it balanced, with %d to 101 accepted messages", ledger, err, 101-n)
			}
			next.close(t, true)
		})
	}
}

// An adoption while a process owns the slot changes nothing: the owner has all messages, and repairs the log.
func TestAdoptWithAnOwner(t *testing.T) {
	s, fs := newSnapshotSlot(), vfs.NewMem()
	owner := s.open(t, fs)
	owner.accept(t, 10)
	s.trimTo(t, s.state(t).Last+1)
	id := s.state(t).ID
	s.adopt(t, vfs.NewMem(), false, slots.ContentOwner)
	s.adopt(t, fs, true, slots.ContentOwner)
	if got := s.state(t).ID; got != id {
		t.Errorf("id of the stream: got %s, want %s as before", got, id)
	}
	_, err := s.slot(vfs.NewMem()).Adopt(t.Context(), s.stream.Rename, true, unprepared)
	wantRefused(t, "other files than those of the owner", err, slots.ErrInUse, "stop all processes")
	owner.accept(t, 1)
}
