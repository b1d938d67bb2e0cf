package slots

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMembers(t *testing.T) {
	now := time.Unix(1000, 0)
	m := NewMembers(func() time.Time { return now })
	m.Hear(Heartbeat{Member: "a", Milliseconds: 20_000, Clock: 4000, Owned: []OwnedSlot{{Slot: 0, Epoch: 3}, {Slot: 1, Epoch: 1}}})
	now = now.Add(time.Second)
	m.Hear(Heartbeat{Member: "b", Milliseconds: 1_500, Leaving: true, ClockSkew: 31_000, Clock: 36_000, Starting: true,
		Copies: []SlotCopied{{Slot: 0, Ready: true}, {Slot: 1, Failed: true}, {Slot: 7, Ready: true}}})
	members, placed := m.View(3)
	if diff := cmp.Diff([]Member{{Name: "a", Age: 20 * time.Second, Clock: time.UnixMilli(5000)}, {Name: "b", Age: 1500 * time.Millisecond, Leaving: true, Starting: true, ClockSkew: 31 * time.Second, Clock: time.UnixMilli(36_000)}}, members); diff != "" {
		t.Errorf("members (-want +got):\n%s", diff)
	}
	want := []Placed{{Owner: "a", Followers: []Follower{{Name: "b", Ready: true}}},
		{Owner: "a", Followers: []Follower{{Name: "b", Failed: true}}}, {}}
	if diff := cmp.Diff(want, placed); diff != "" {
		t.Errorf("slots (-want +got):\n%s", diff)
	}

	// The next owner is the one with the higher epoch, also while the former one still reports the slot.
	m.Hear(Heartbeat{Member: "c", Owned: []OwnedSlot{{Slot: 0, Epoch: 4}}})
	if owner, owned, ok := m.Owner(0); !ok || owner.Member != "c" || owned.Epoch != 4 {
		t.Errorf("owner of a slot with two claims: got %q with epoch %d and %v, want c with 4", owner.Member, owned.Epoch, ok)
	}

	// A member that is silent for lostAfter has no slots.
	now = now.Add(lostAfter)
	m.Hear(Heartbeat{Member: "c", Owned: []OwnedSlot{{Slot: 0, Epoch: 4}}})
	now = now.Add(time.Millisecond)
	members, placed = m.View(3)
	if len(members) != 1 || members[0].Name != "c" {
		t.Errorf("members after a loss: got %v, want c", members)
	}
	want = []Placed{{Owner: "c"}, {Previous: "a"}, {Unowned: lostAfter + time.Millisecond}}
	if diff := cmp.Diff(want, placed); diff != "" {
		t.Errorf("slots after a loss (-want +got):\n%s", diff)
	}
	now = now.Add(time.Second)
	if _, placed = m.View(3); placed[1].Unowned != time.Second || placed[1].Previous != "a" {
		t.Errorf("a lost slot: got %+v, want 1 s without owner", placed[1])
	}
	m.Hear(Heartbeat{Member: "c", Owned: []OwnedSlot{{Slot: 0, Epoch: 4}, {Slot: 1, Epoch: 2}}})
	if _, placed = m.View(3); placed[1].Owner != "c" || placed[1].Unowned != 0 {
		t.Errorf("a slot that was taken: got %+v, want the owner c", placed[1])
	}
}

// The owner of a silent slot counts as its owner until another one has claimed the slot.
func TestSilentOwner(t *testing.T) {
	now := time.Unix(1000, 0)
	m := NewMembers(func() time.Time { return now })
	silent := func(member string, epoch uint64) {
		m.Hear(Heartbeat{Member: member, Silent: []OwnedSlot{{Epoch: epoch}}})
	}
	view := func(what string, want Placed) {
		t.Helper()
		_, placed := m.View(1)
		wantEqual(t, what, placed, []Placed{want})
		if _, _, ok := m.Owner(0); ok != (want.Owner != "" && !want.Silent) {
			t.Errorf("%s: got an owner for requests %v, want %v", what, ok, !ok)
		}
	}
	m.Hear(Heartbeat{Member: "a", Owned: []OwnedSlot{{Epoch: 3}}})
	view("owned", Placed{Owner: "a"})
	silent("a", 3)
	view("silent", Placed{Owner: "a", Silent: true})
	now = now.Add(2 * time.Second)
	silent("a", 3)
	view("silent for 2 s", Placed{Owner: "a", Silent: true, Unowned: 2 * time.Second})
	m.Hear(Heartbeat{Member: "b", Owned: []OwnedSlot{{Epoch: 4}}})
	view("claimed", Placed{Owner: "b"})
	m.Hear(Heartbeat{Member: "b"})
	view("released, while the former owner does not know it", Placed{Previous: "b"})
	silent("b", 4)
	view("silent again", Placed{Owner: "b", Silent: true})
}

// The successor of an owner has a complete copy and a right clock, and does not leave.
func TestSuccessor(t *testing.T) {
	m := NewMembers(func() time.Time { return time.Unix(1000, 0) })
	for _, h := range []Heartbeat{
		{Member: "owner", Owned: []OwnedSlot{{Slot: 0, Epoch: 1}, {Slot: 1, Epoch: 1}, {Slot: 2, Epoch: 1}, {Slot: 3, Epoch: 1},
			{Slot: 4, Epoch: 1}}, ClockSkew: 3_600_000, Clock: 3_600_000},
		{Member: "right", Copies: []SlotCopied{{Slot: 0, Ready: true}, {Slot: 1}}},
		{Member: "leaving", Copies: []SlotCopied{{Slot: 2, Ready: true}}, Leaving: true},
		{Member: "wrong", Copies: []SlotCopied{{Slot: 3, Ready: true}}, ClockSkew: -3_600_000, Clock: -3_600_000},
	} {
		m.Hear(h)
	}
	for slot, want := range []bool{true, false, false, false, false} {
		if got := len(m.Successors(slot)) > 0; got != want {
			t.Errorf("slot %d: got a successor %v, want %v", slot, got, want)
		}
	}
}

// The first of two processes with one name is the member until it leaves or is lost.
func TestMembersWithOneName(t *testing.T) {
	now := time.Unix(1000, 0)
	beat := func(announcement string, age time.Duration) Heartbeat {
		return Heartbeat{Member: "twin", Announcement: []byte(announcement), Milliseconds: age.Milliseconds(),
			Owned: []OwnedSlot{{Slot: 0, Epoch: 3}}}
	}
	leaving := func(h Heartbeat) Heartbeat {
		h.Leaving = true
		return h
	}
	for _, c := range []struct {
		name          string
		first, second Heartbeat
		// silence is the time between both.
		silence time.Duration
		want    string
	}{
		{"older process first", beat("z", time.Hour), beat("a", 0), time.Second, "z"},
		{"younger process first", beat("z", 0), beat("a", time.Hour), time.Second, "a"},
		{"the younger one continues", beat("z", time.Hour), beat("a", 59*time.Minute), time.Second, "z"},
		{"both start together", beat("z", 10*time.Second), beat("a", 10*time.Second), time.Second, "a"},
		{"both start together, other order", beat("a", 10*time.Second), beat("z", 12*time.Second), time.Second, "a"},
		{"the older one leaves", leaving(beat("z", time.Hour)), beat("a", 0), time.Second, "a"},
		{"the older one is lost", beat("z", time.Hour), beat("a", 0), lostAfter + time.Millisecond, "a"},
		{"the same process", beat("z", time.Hour), beat("z", time.Hour), time.Second, "z"},
	} {
		now := now
		m := NewMembers(func() time.Time { return now })
		m.Hear(c.first)
		now = now.Add(c.silence)
		m.Hear(c.second)
		if owner, _, ok := m.Owner(0); !ok || string(owner.Announcement) != c.want {
			t.Errorf("%s: got the member %q, want %q", c.name, owner.Announcement, c.want)
		}
	}
}

// A pod that may not claim follows the slot, also when the session has released it.
func TestCandidateThatMayNotClaim(t *testing.T) {
	may := false
	now := time.Unix(1000, 0)
	c := newCandidate(&follower{next: 1}, State{}, now)
	c.mayClaim = func() bool { return may }
	if s := c.next(now); s.action == actPublish || !s.until.Equal(now.Add(repeatAfter)) {
		t.Errorf("got %+v, want a wait of %v", s, repeatAfter)
	}
	may = true
	if s := c.next(now); s.action != actPublish {
		t.Errorf("got %+v, want a claim of the empty stream", s)
	}
}
