package slots_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/slots/slotstest"
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
