package slots

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMembers(t *testing.T) {
	now := time.Unix(1000, 0)
	m := NewMembers(func() time.Time { return now })
	m.Hear(Heartbeat{Member: "a", Milliseconds: 20_000, Owned: []OwnedSlot{{0, 3}, {1, 1}}})
	m.Hear(Heartbeat{Member: "b", Milliseconds: 1_500, Leaving: true, ClockSkew: 31_000, Copies: []SlotCopied{{0, true}, {7, true}}})
	members, placed := m.View(3)
	if diff := cmp.Diff([]Member{{"a", 20 * time.Second, false, 0}, {"b", 1500 * time.Millisecond, true, 31 * time.Second}}, members); diff != "" {
		t.Errorf("members (-want +got):\n%s", diff)
	}
	want := []Placed{{Owner: "a", Followers: []Follower{{"b", true}}}, {Owner: "a"}, {}}
	if diff := cmp.Diff(want, placed); diff != "" {
		t.Errorf("slots (-want +got):\n%s", diff)
	}

	// The next owner is the one with the higher epoch, also while the former one still reports the slot.
	m.Hear(Heartbeat{Member: "c", Owned: []OwnedSlot{{0, 4}}})
	if owner, ok := m.Owner(0); !ok || owner.Member != "c" {
		t.Errorf("owner of a slot with two claims: got %q and %v, want c", owner.Member, ok)
	}

	// A member that is silent for lostAfter has no slots.
	now = now.Add(lostAfter)
	m.Hear(Heartbeat{Member: "c", Owned: []OwnedSlot{{0, 4}}})
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
	m.Hear(Heartbeat{Member: "c", Owned: []OwnedSlot{{0, 4}, {1, 2}}})
	if _, placed = m.View(3); placed[1].Owner != "c" || placed[1].Unowned != 0 {
		t.Errorf("a slot that was taken: got %+v, want the owner c", placed[1])
	}
}

// A pod that may not claim follows the slot, also when the session has released it.
func TestCandidateThatMayNotClaim(t *testing.T) {
	may := false
	now := time.Unix(1000, 0)
	c := newCandidate(&follower{next: 1}, 0, now)
	c.mayClaim = func() bool { return may }
	if s := c.next(now); s.action == actPublish || !s.until.Equal(now.Add(repeatAfter)) {
		t.Errorf("got %+v, want a wait of %v", s, repeatAfter)
	}
	may = true
	if s := c.next(now); s.action != actPublish {
		t.Errorf("got %+v, want a claim of the empty stream", s)
	}
}
