package slots_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// An owner finds within 30 s that the slot could not be restored, and stores a snapshot: a process without files
// then has all messages. A log that is whole has no gap, with and without load.
func TestLostRecordsAndObjectsAreReplaced(t *testing.T) {
	for name, c := range map[string]struct {
		lose func(*testing.T, *snapshotSlot)
		want string
	}{
		"a purge":                    {func(t *testing.T, s *snapshotSlot) { s.trimTo(t, s.state(t).Last+1) }, "another program purged it"},
		"a purge that keeps records": {func(t *testing.T, s *snapshotSlot) { s.trimTo(t, s.state(t).Last-3) }, "another program purged it"},
		"lost records": {func(t *testing.T, s *snapshotSlot) {
			state := s.state(t)
			s.stream.Lose(state.Last-20, state.Last-15)
		}, "the stream lacks 6 records at the server that leads it"},
		"a purged object store": {func(t *testing.T, s *snapshotSlot) { s.deleteObjects(t, func(string) bool { return true }) }, "the object store of the snapshots lacks"},
		"a deleted object": {func(t *testing.T, s *snapshotSlot) {
			one := ""
			s.deleteObjects(t, func(name string) bool {
				if one == "" && strings.HasSuffix(name, ".sst") {
					one = name
				}
				return name == one
			})
		}, "the object store of the snapshots lacks 1 of "},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSnapshotSlot()
				owner := s.open(t, vfs.NewMem())
				go owner.Run(t.Context())
				for range 40 { // 20 minutes, so that the stream is trimmed.
					owner.accept(t, 10)
					time.Sleep(30 * time.Second)
				}
				if got := owner.Repairs(); got != 0 || s.first(t) == 1 {
					t.Fatalf("a whole log after 20 minutes: got %d checks with gaps and the first record %d, want 0 and a trimmed stream", got, s.first(t))
				}
				c.lose(t, s)
				found := false
				for range 30 {
					time.Sleep(time.Second)
					found = found || slices.ContainsFunc(owner.Gaps(), func(gap string) bool { return strings.Contains(gap, c.want) })
				}
				if gaps := owner.Gaps(); !found || len(gaps) > 0 || owner.Repairs() != 1 {
					t.Errorf("within 30 s: got %q found %v, the gaps %q and %d checks with gaps, want it found once and repaired", c.want, found, gaps, owner.Repairs())
				}
				owner.accept(t, 10)
				owner.close(t, false)
				s.open(t, vfs.NewMem()).wantAccepted(t, 410)
			})
		})
	}
}

// A server that lacks records makes the owner store a snapshot and trim the stream behind it: the gap then lies
// before the stream.
func TestRepairTrimsTheStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSnapshotSlot()
		owner := s.open(t, vfs.NewMem())
		owner.accept(t, 100)
		go owner.Run(t.Context())
		time.Sleep(time.Minute)
		last := s.state(t).Last
		owner.accept(t, 1)
		if got := s.first(t); got != 1 {
			t.Fatalf("first record after one snapshot: got %d, want 1", got)
		}
		owner.Repair()
		time.Sleep(30 * time.Second)
		if got := s.first(t); got <= last {
			t.Errorf("first record after a repair: got %d, want one behind %d", got, last)
		}
		owner.close(t, false)
		s.open(t, vfs.NewMem()).wantAccepted(t, 101)
	})
}

func (s *snapshotSlot) trimTo(t *testing.T, before uint64) {
	t.Helper()
	if err := slotstest.NewLog(s.stream).Trim(t.Context(), before); err != nil {
		t.Fatal(err)
	}
}

func (s *snapshotSlot) deleteObjects(t *testing.T, selects func(name string) bool) {
	t.Helper()
	names, err := s.objects.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if selects(name) {
			_ = s.objects.Delete(t.Context(), name)
		}
	}
}

// follow follows the slot with the files of a file system until the copy has all records, and returns what was logged.
func (s *snapshotSlot) follow(t *testing.T, fs vfs.FS) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	slot, logged := s.slot(fs), &strings.Builder{}
	slot.Store.Logger = slog.New(slog.NewTextHandler(logged, nil))
	slot.CaughtUp = cancel
	if _, err := slot.Follow(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("follow the slot: got error %v, want that the copy has all records", err)
	}
	return logged.String()
}

// A standby whose server has lost records reads them from the one that leads the stream: its copy is not replaced.
func TestStandbyPassesAGapOfItsServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, fs := newSnapshotSlot(), vfs.NewMem()
		owner := s.open(t, vfs.NewMem())
		owner.accept(t, 20)
		first := s.state(t).Last
		s.follow(t, fs)
		for range 50 {
			owner.accept(t, 1)
		}
		s.stream.LoseAtReaders(first+5, first+30)
		logged := s.follow(t, fs)
		if !strings.Contains(logged, "a server of the log lacks records") || strings.Contains(logged, "restoring") {
			t.Errorf("log of the standby: got %s, want that it reads the lost records, and restores nothing", logged)
		}
		owner.close(t, true)
		s.open(t, fs).wantAccepted(t, 70)
	})
}

// A standby behind which the leader of the stream has lost records keeps its copy, until the owner has stored a
// snapshot behind the gap.
func TestStandbyAtAGapOfTheLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, fs := newSnapshotSlot(), vfs.NewMem()
		owner := s.open(t, vfs.NewMem())
		owner.accept(t, 20)
		owner.take(t)
		owner.accept(t, 20)
		s.follow(t, fs)
		position, err := pebblestore.ReadPosition(fs, "data/queue")
		if err != nil {
			t.Fatal(err)
		}
		first := s.state(t).Last
		for range 50 {
			owner.accept(t, 1)
		}
		s.stream.Lose(first+5, first+30)
		for range 2 {
			var gap *slots.GapError
			if err := s.refused(t, fs); !errors.As(err, &gap) || gap.From != first+5 || gap.To != first+30 ||
				strings.Contains(err.Error(), "trimmed") {
				t.Fatalf("standby at a gap: got error %v, want the records %d to %d", err, first+5, first+30)
			}
		}
		if now, err := pebblestore.ReadPosition(fs, "data/queue"); err != nil || now.Batch < position.Batch {
			t.Errorf("copy of the standby: got batch %d and error %v, want %d or later", now.Batch, err, position.Batch)
		}
		go owner.Run(t.Context())
		time.Sleep(30 * time.Second)
		s.follow(t, fs)
		owner.close(t, true)
		s.open(t, fs).wantAccepted(t, 90)
	})
}

// A copy that ends in a gap of the leader is kept, too.
func TestCopyThatEndsInAGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, fs := newSnapshotSlot(), vfs.NewMem()
		owner := s.open(t, vfs.NewMem())
		owner.accept(t, 20)
		owner.take(t)
		for range 20 {
			owner.accept(t, 1)
		}
		s.follow(t, fs)
		last := s.state(t).Last
		position, _ := pebblestore.ReadPosition(fs, "data/queue")
		owner.accept(t, 1)
		s.stream.Lose(last-10, last)
		var gap *slots.GapError
		if err := s.refused(t, fs); !errors.As(err, &gap) || gap.Copied != position.Batch || gap.From != last-10 || gap.To != last {
			t.Fatalf("copy that ends in a gap: got error %v, want a gap behind batch %d", err, position.Batch)
		}
		if now, err := pebblestore.ReadPosition(fs, "data/queue"); err != nil || now != position {
			t.Errorf("copy: got batch %d and error %v, want %d", now.Batch, err, position.Batch)
		}
		owner.take(t) // It has more than the copy.
		s.follow(t, fs)
		owner.close(t, true)
		s.open(t, fs).wantAccepted(t, 41)
	})
}
