package slots

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"
)

func old(names ...string) (members []Member) {
	for _, name := range names {
		members = append(members, Member{Name: name, Age: time.Hour})
	}
	return members
}

func TestPlace(t *testing.T) {
	ready := func(names ...string) (all []Follower) {
		for _, name := range names {
			all = append(all, Follower{Name: name, Ready: true})
		}
		return all
	}
	failedCopy := func(name string) []Follower { return []Follower{{Name: name, Failed: true}} }
	leaving := Member{Name: "a", Age: time.Hour, Leaving: true}
	outdated := Member{Name: "a", Age: time.Hour, OldConfig: true}
	skewed := func(name string, skew time.Duration) Member {
		return Member{Name: name, Age: time.Hour, ClockSkew: skew, Clock: time.Time{}.Add(skew)}
	}
	for _, c := range []struct {
		name     string
		members  []Member
		slots    []Placed
		standbys int
		want     []Move
	}{
		{"no member", nil, []Placed{{}}, 1, nil},
		{"the members share the slots of a new release", old("b", "a"), []Placed{{}, {}, {}}, 0,
			[]Move{{"a", Take, 0}, {"b", Take, 1}, {"a", Take, 2}}},
		{"young members take slots when there is no other", []Member{{Name: "a", Age: time.Second}}, []Placed{{}}, 0,
			[]Move{{"a", Take, 0}}},
		{"young members do not count", append(old("a"), Member{Name: "b", Age: countedAge - 1}), []Placed{{}, {}}, 1,
			[]Move{{"a", Take, 0}, {"a", Take, 1}}},
		{"but they take a slot of which they have the only copy", append(old("a"), Member{Name: "b", Age: time.Second}),
			[]Placed{{Followers: ready("b")}, {}}, 0,
			[]Move{{"b", Take, 0}, {"a", Take, 1}}},
		{"and none that another one can take", append(old("a"), Member{Name: "b", Age: time.Second}),
			[]Placed{{Owner: "a"}, {Followers: ready("a", "b")}}, 0,
			[]Move{{"a", Take, 1}}},
		{"a member that leaves takes no slot", append(old("b"), leaving), []Placed{{}}, 0,
			[]Move{{"b", Take, 0}}},
		{"the standby is first", old("a", "b", "c"), []Placed{{Followers: ready("c")}}, 0,
			[]Move{{"c", Take, 0}}},
		{"with its full share also", old("a", "b"), []Placed{{Owner: "b"}, {Followers: ready("b")}}, 0,
			[]Move{{"b", Take, 1}}},
		{"then the others, when the slot has no owner for long", old("a", "b"),
			[]Placed{{Owner: "b"}, {Followers: ready("b"), Unowned: TakeTurn}}, 0,
			[]Move{{"b", Take, 1}, {"a", Take, 1}}},
		{"a standby with fewer slots is before one with its full share", old("a", "b"), []Placed{{Owner: "b"}, {Followers: ready("a", "b")}}, 0,
			[]Move{{"a", Take, 1}}},
		{"a silent slot is for its ready follower, with a full share also", old("a", "b", "c"), []Placed{{Owner: "a"}, {Owner: "b", Silent: true, Followers: ready("a")}}, 1,
			[]Move{{"a", Take, 1}, {"c", StartFollowing, 0}}},
		{"and for the others after its turn", old("a", "b", "c"),
			[]Placed{{Owner: "b", Silent: true, Unowned: TakeTurn, Followers: ready("a", "c")}, {Owner: "a", Followers: ready("b")}}, 1,
			[]Move{{"c", Take, 0}, {"a", Take, 0}, {"a", StopFollowing, 0}, {"c", StartFollowing, 1}}},
		{"for any member when it has no copy", old("a", "b"), []Placed{{Owner: "b", Silent: true, Unowned: TakeTurn}}, 0,
			[]Move{{"a", Take, 0}}},
		{"a silent slot counts for its owner, which hands over no other one", old("a", "b", "c"), []Placed{{Owner: "a", Followers: ready("b")}, {Owner: "a", Followers: ready("b")}, {Owner: "a", Silent: true, Followers: ready("b")}}, 1,
			[]Move{{"b", Take, 2}, {"c", StartFollowing, 1}}},
		{"a young member keeps its copy", append(old("a", "b"), Member{Name: "c", Age: time.Second}),
			[]Placed{{Owner: "a", Followers: ready("b", "c")}}, 1, nil},
		{"a hand-over begins with a copy", old("a", "b"), []Placed{{Owner: "a"}, {Owner: "a"}}, 0,
			[]Move{{"b", StartFollowing, 0}}},
		{"and waits until it is ready", old("a", "b"), []Placed{{Owner: "a"}, {Owner: "a", Followers: []Follower{{Name: "b"}}}}, 0, nil},
		{"a slot is handed over to a ready member", old("a", "b"), []Placed{{Owner: "a"}, {Owner: "a", Followers: ready("b")}}, 0,
			[]Move{{"a", HandOver, 1}}},
		{"one after the other", old("a", "b", "c"), []Placed{{Owner: "a"}, {Owner: "a", Followers: ready("c")},
			{Previous: "a", Followers: ready("b")}}, 0,
			[]Move{{"b", Take, 2}}},
		{"a member without slots gets one of a full share", old("a", "b", "c"),
			[]Placed{{Owner: "a"}, {Owner: "a", Followers: ready("c")}, {Owner: "b"}, {Owner: "b"}}, 0,
			[]Move{{"a", HandOver, 1}}},
		{"a full share is kept while others hand over enough", append(old("a", "b"), Member{Name: "c", Age: time.Hour, Leaving: true}),
			[]Placed{{Owner: "a", Followers: ready("b")}, {Owner: "a"}, {Owner: "c", Followers: ready("b")}}, 0,
			[]Move{{"c", HandOver, 2}, {"b", StopFollowing, 0}}},
		{"and while a slot of a lost member waits for its next owner", old("a", "b"),
			[]Placed{{Owner: "a", Followers: ready("b")}, {Owner: "a"}, {Owner: "lost", Followers: ready("b")}}, 0,
			[]Move{{"b", StopFollowing, 0}, {"b", StopFollowing, 2}}},
		{"one slot of difference is no reason to move one", old("a", "b"),
			[]Placed{{Owner: "a", Followers: ready("b")}, {Owner: "a", Followers: ready("b")}, {Owner: "b"}}, 0,
			[]Move{{"b", StopFollowing, 0}, {"b", StopFollowing, 1}}},
		{"a member that leaves hands over all", append(old("b"), leaving), []Placed{{Owner: "b"}, {Owner: "a", Followers: ready("b")}}, 0,
			[]Move{{"a", HandOver, 1}}},
		{"a member with a wrong clock takes no slot", append(old("b"), skewed("a", 31*time.Second)), []Placed{{}, {}}, 0,
			[]Move{{"b", Take, 0}, {"b", Take, 1}}},
		{"a member with a nearly right clock takes slots", append(old("b"), skewed("a", -30*time.Second)), []Placed{{}, {}}, 0,
			[]Move{{"a", Take, 0}, {"b", Take, 1}}},
		{"a member alone with a wrong clock takes no slot", []Member{skewed("a", time.Hour)}, []Placed{{}}, 0, nil},
		{"it keeps its slot", []Member{skewed("a", time.Hour)}, []Placed{{Owner: "a"}}, 1, nil},
		{"also beside another wrong clock", []Member{skewed("a", time.Hour), skewed("b", -time.Hour)},
			[]Placed{{Owner: "a", Followers: ready("b")}}, 1, nil},
		{"a wrong clock hands over to a right one", append(old("b"), skewed("a", time.Hour)), []Placed{{Owner: "a", Followers: ready("b")}}, 1,
			[]Move{{"a", HandOver, 0}}},
		{"not before it is ready", append(old("b"), skewed("a", time.Hour)), []Placed{{Owner: "a"}}, 1,
			[]Move{{"b", StartFollowing, 0}}},
		{"it keeps its copy", append(old("b", "c"), skewed("a", time.Hour)), []Placed{{Owner: "b", Followers: ready("a", "c")}}, 1, nil},
		{"an old config hands over to a newer one", append(old("b"), outdated),
			[]Placed{{Owner: "a", Followers: ready("b")}, {Owner: "b", Followers: ready("a")}}, 1,
			[]Move{{"a", HandOver, 0}}},
		{"it takes no slot", append(old("b"), outdated), []Placed{{}, {}}, 0,
			[]Move{{"b", Take, 0}, {"b", Take, 1}}},
		{"it keeps its slot beside one that leaves", []Member{outdated, {Name: "b", Age: time.Hour, Leaving: true}},
			[]Placed{{Owner: "a", Followers: ready("b")}}, 0, nil},
		{"and takes that of the latter", []Member{outdated, {Name: "b", Age: time.Hour, Leaving: true}},
			[]Placed{{Owner: "b", Followers: ready("a")}}, 0,
			[]Move{{"b", HandOver, 0}}},
		{"members that agree with each other are right", []Member{skewed("a", time.Hour), skewed("b", time.Hour+30*time.Second)},
			[]Placed{{}, {}}, 0,
			[]Move{{"a", Take, 0}, {"b", Take, 1}}},
		{"also if they have read the servers at different times",
			[]Member{{Name: "a", Age: time.Hour, ClockSkew: time.Hour}, {Name: "b", Age: time.Hour}},
			[]Placed{{Owner: "a", Followers: ready("b")}}, 1, nil},
		{"a standby follows", old("a", "b"), []Placed{{Owner: "a"}, {Owner: "b", Followers: ready("a")}}, 1,
			[]Move{{"b", StartFollowing, 0}}},
		{"a copy that is not wanted ends", old("a", "b", "c"), []Placed{{Owner: "a", Followers: ready("b", "c")}}, 1,
			[]Move{{"c", StopFollowing, 0}}},
		{"a member that failed to open the store takes the slot last", old("a", "b"), []Placed{{Followers: failedCopy("a")}}, 0,
			[]Move{{"b", Take, 0}}},
		{"but it does after a turn of each other one", old("a", "b"), []Placed{{Followers: failedCopy("a"), Unowned: TakeTurn}}, 0,
			[]Move{{"b", Take, 0}, {"a", Take, 0}}},
		{"and alone", old("a"), []Placed{{Followers: failedCopy("a")}}, 0,
			[]Move{{"a", Take, 0}}},
		{"it gets another slot than that", old("a", "b"), []Placed{{Owner: "a", Followers: failedCopy("b")}, {Owner: "a"}}, 0,
			[]Move{{"b", StartFollowing, 1}}},
		{"it is no standby", old("a", "b", "c"), []Placed{{Owner: "a", Followers: failedCopy("b")}}, 1,
			[]Move{{"c", StartFollowing, 0}}},
		{"it keeps its copy", old("a", "b", "c"), []Placed{{Owner: "a", Followers: append(failedCopy("b"), ready("c")...)}}, 1, nil},
	} {
		wantEqual(t, c.name, Place(c.members, c.slots, c.standbys), c.want)
	}
}

// A member that starts has all that it should have when it counts, its copies are ready, and no slot waits for
// another owner.
func TestProgress(t *testing.T) {
	copies := func(ready bool, names ...string) (all []Follower) {
		for _, name := range names {
			all = append(all, Follower{Name: name, Ready: ready})
		}
		return all
	}
	young := append(old("a"), Member{Name: "b", Age: countedAge - 1, Starting: true})
	for _, c := range []struct {
		name     string
		members  []Member
		slots    []Placed
		standbys int
		want     Progress
	}{
		{"a young member does not count", young, []Placed{{Owner: "a"}}, 1, Progress{}},
		{"alone it does", young[1:], []Placed{{Owner: "b"}}, 1, Progress{1, true}},
		{"alone, before it has its slots", young[1:], []Placed{{}, {Owner: "b"}}, 1, Progress{1, false}},
		{"a copy is wanted", old("a", "b"), []Placed{{Owner: "a"}}, 1, Progress{}},
		{"it is restored", old("a", "b"), []Placed{{Owner: "a", Followers: copies(false, "b")}}, 1, Progress{}},
		{"it is ready", old("a", "b"), []Placed{{Owner: "a", Followers: copies(true, "b")}}, 1, Progress{1, true}},
		{"another copy is wanted", old("a", "b"), []Placed{{Owner: "a", Followers: copies(true, "b")}, {Owner: "b", Followers: copies(true, "a")},
			{Owner: "a"}}, 1, Progress{2, false}},
		{"no copies are wanted", old("a", "b"), []Placed{{Owner: "a"}, {Owner: "b"}}, 0, Progress{1, true}},
		{"a slot should be handed over", old("a", "b"), []Placed{{Owner: "a"}, {Owner: "a"}}, 0, Progress{}},
		{"it can be handed over", old("a", "b"), []Placed{{Owner: "a"}, {Owner: "a", Followers: copies(true, "b")}}, 0, Progress{1, false}},
		{"it is handed over", old("a", "b"), []Placed{{Owner: "a"}, {Previous: "a", Followers: copies(true, "b")}}, 0, Progress{1, false}},
		{"it was handed over", old("a", "b"), []Placed{{Owner: "a"}, {Owner: "b"}}, 0, Progress{1, true}},
		{"it is silent", old("a", "b"), []Placed{{Owner: "a", Silent: true}, {Owner: "b"}}, 0, Progress{1, false}},
		{"a slot that no member can take does not count for long", old("a", "b"), []Placed{{Owner: "a"}, {Owner: "b"}, {Unowned: TakeTurn}}, 0,
			Progress{1, true}},
		{"a copy that failed does not count", old("a", "b", "c"),
			[]Placed{{Owner: "a", Followers: append(copies(true, "c"), Follower{Name: "b", Failed: true})}}, 1, Progress{0, true}},
	} {
		wantEqual(t, c.name, ProgressOf("b", c.members, c.slots, c.standbys), c.want)
	}
}

func TestServes(t *testing.T) {
	for _, c := range []struct {
		name  string
		other Member
		want  bool
	}{
		{"ready", Member{Name: "a"}, true},
		{"starting", Member{Name: "a", Starting: true}, false},
		{"leaving", Member{Name: "a", Leaving: true}, false},
		{"with a wrong clock", Member{Name: "a", ClockSkew: time.Hour, Clock: time.Time{}.Add(time.Hour)}, false},
		{"with a clock like that of the other one", Member{Name: "a", ClockSkew: time.Hour}, true},
		{"with an old config", Member{Name: "a", OldConfig: true}, false},
		{"the same", Member{Name: "b"}, false},
	} {
		wantEqual(t, "a member that is "+c.name, Serves([]Member{c.other, {Name: "b", Starting: true}}, "b"), c.want)
	}
}

// placementSim is a release. A tick is a second.
type placementSim struct {
	// exact members are never slow and have no old views.
	exact bool
	t     *testing.T
	rng   *rand.Rand
	slots []Placed
	// before is the state of the last tick.
	before []Placed
	// left are the seconds until a copy is ready.
	left    map[string]map[int]int
	members map[string]*Member
	names   int
	moved   int
	// steps is the number of steps, and excess the most slots that one has moved above the least number.
	steps, excess int
	// fresh are the moves by the present state; nil after a change.
	fresh []Move
}

func cloneSlots(all []Placed) []Placed {
	all = slices.Clone(all)
	for i := range all {
		all[i].Followers = slices.Clone(all[i].Followers)
	}
	return all
}

// plan returns the moves by what a member sees: its own slots as they are, the others as they are or
// were.
func (s *placementSim) plan(name string) []Move {
	if s.exact || s.rng.IntN(3) > 0 {
		if s.fresh == nil {
			s.fresh = append([]Move{}, Place(s.list(), s.slots, 1)...)
		}
		return s.fresh
	}
	view := cloneSlots(s.slots)
	for i := range view {
		own := func(p Placed) bool { return p.Owner == name || p.Previous == name || p.ready(name) < 2 }
		if len(s.before) > 0 && !own(s.slots[i]) && !own(s.before[i]) {
			view[i] = s.before[i]
		}
	}
	return Place(s.list(), view, 1)
}

func (s *placementSim) tick() {
	now := cloneSlots(s.slots)
	s.fresh = nil
	for _, name := range slices.Sorted(maps.Keys(s.members)) {
		if !s.exact && s.rng.IntN(10) < 3 {
			continue // It is slow.
		}
		started := 0
		for _, m := range s.plan(name) {
			if m.Member != name {
				continue
			}
			s.fresh = nil
			p := &s.slots[m.Slot]
			switch m.Action {
			case Take:
				switch {
				case p.Owner != "": // Another member was faster.
				case p.ready(name) == 0:
					if p.Previous != name {
						s.moved++
					}
					p.Owner, p.Unowned = name, 0
					s.stop(name, m.Slot)
				default:
					s.start(name, m.Slot)
				}
			case HandOver:
				if !hasReasonToHandOver(name, s.list(), s.slots) && !hasReasonToHandOver(name, s.list(), s.before) {
					s.t.Errorf("member %s hands over slot %d without a reason: the members have %v", name, m.Slot, s.owned())
				}
				if p.Owner != name || !slices.ContainsFunc(p.Followers, func(f Follower) bool { return f.Ready }) {
					s.t.Errorf("member %s hands over slot %d: got %+v, want an own slot with a ready follower", name, m.Slot, *p)
				}
				for i, other := range s.slots {
					if other.Owner == "" && other.Previous == name {
						s.t.Errorf("member %s hands over slot %d before slot %d has an owner", name, m.Slot, i)
					}
				}
				p.Owner, p.Previous, p.Unowned = "", name, 0
			case StartFollowing:
				if started++; started > 1 {
					s.t.Errorf("member %s: got %d restores at once, want 1", name, started)
				}
				s.start(name, m.Slot)
			case StopFollowing:
				s.stop(name, m.Slot)
			}
		}
		if m := s.members[name]; m.Leaving && !slices.ContainsFunc(s.slots, func(p Placed) bool { return p.Owner == name }) {
			s.remove(name)
		}
	}
	for i := range s.slots {
		p := &s.slots[i]
		if p.Owner == "" {
			p.Unowned += time.Second
		}
		for k := range p.Followers {
			f := &p.Followers[k]
			if !f.Ready {
				s.left[f.Name][i]--
				f.Ready = s.left[f.Name][i] <= 0
			}
		}
	}
	for _, m := range s.members {
		m.Age += time.Second
	}
	s.before = now
}

func (s *placementSim) start(name string, slot int) {
	if s.slots[slot].ready(name) == 2 {
		s.slots[slot].Followers = append(s.slots[slot].Followers, Follower{Name: name})
		s.left[name][slot] = 1 + s.rng.IntN(15)
	}
}

func (s *placementSim) stop(name string, slot int) {
	s.slots[slot].Followers = slices.DeleteFunc(s.slots[slot].Followers, func(f Follower) bool { return f.Name == name })
}

func (s *placementSim) join(n int) {
	for range n {
		s.names++
		name := fmt.Sprintf("pod-%03d", s.names)
		s.members[name], s.left[name] = &Member{Name: name}, map[int]int{}
	}
}

// remove removes a member, and returns the number of its slots.
func (s *placementSim) remove(name string) (n int) {
	s.fresh = nil
	delete(s.members, name)
	for i := range s.slots {
		s.stop(name, i)
		if p := &s.slots[i]; p.Owner == name {
			p.Owner, p.Previous, p.Unowned = "", name, 0
			n++
		}
	}
	return n
}

func (s *placementSim) owned() map[string]int {
	owned := map[string]int{}
	for _, p := range s.slots {
		owned[p.Owner]++
	}
	return owned
}

// list returns the members in order.
func (s *placementSim) list() (all []Member) {
	for _, name := range slices.Sorted(maps.Keys(s.members)) {
		all = append(all, *s.members[name])
	}
	return all
}

// hasReasonToHandOver reports whether a member leaves, or has two slots more than another one that counts.
func hasReasonToHandOver(name string, members []Member, slots []Placed) bool {
	owned := map[string]int{}
	for _, p := range slots {
		owned[p.Owner]++
	}
	return slices.ContainsFunc(members, func(m Member) bool {
		return m.Name == name && m.Leaving || !m.Leaving && m.Age >= countedAge-time.Second && owned[m.Name]+2 <= owned[name]
	})
}

// isStable reports whether all slots have an owner and a standby, two members differ by at most one slot,
// and no member has a move.
func (s *placementSim) isStable() bool {
	owned := s.owned()
	for name, m := range s.members {
		if m.Leaving || m.Age < countedAge || owned[name] > ceilDiv(len(s.slots), len(s.members)) || owned[name] < len(s.slots)/len(s.members) {
			return false
		}
	}
	want := min(1, len(s.members)-1)
	for _, p := range s.slots {
		if p.Owner == "" || len(p.Followers) != want || slices.ContainsFunc(p.Followers, func(f Follower) bool {
			return !f.Ready || f.Name == p.Owner
		}) {
			return false
		}
	}
	return len(Place(s.list(), s.slots, 1)) == 0
}

// settle runs until the release is stable, and compares the moved slots with the least number.
func (s *placementSim) settle(step string, least, more int) {
	const most = 2000
	s.moved = 0
	for ticks := 0; !s.isStable(); ticks++ {
		if ticks == most {
			s.t.Fatalf("%s: not stable after %d s: %+v", step, most, s.slots)
		}
		s.tick()
	}
	if s.moved > least+more {
		s.t.Errorf("%s: got %d moved slots, want at most %d", step, s.moved, least+more)
	}
	moved := s.moved
	s.steps, s.excess = s.steps+1, max(s.excess, moved-least)
	for range 5 {
		s.tick()
	}
	if !s.isStable() || s.moved > moved {
		s.t.Errorf("%s: the release is not stable any more", step)
	}
}

// leastMoves returns the least number of moved slots after which the members, with some new ones, differ by at
// most one slot.
func (s *placementSim) leastMoves(added int) int {
	members := len(s.members) + added
	owned := s.owned()
	least := len(s.slots) / members
	excess, missing := 0, added*least
	for name := range s.members {
		excess += max(0, owned[name]-ceilDiv(len(s.slots), members))
		missing += max(0, least-owned[name])
	}
	return max(excess, missing)
}

// tolerance is how many slots more than the least number a step may move: one, unless several members
// change at the same time and some of them have old views.
func (s *placementSim) tolerance(changes int) int {
	if s.exact {
		return 1
	}
	return changes
}

// TestPlacementSimulation scales a release of 64 slots up to 50 members and down, and loses
// members. POSTHORN_MODEL_SEEDS sets the number of seeds.
func TestPlacementSimulation(t *testing.T) {
	seeds, steps, excess := 4, 0, 0
	if testing.Short() {
		seeds = 1
	}
	if n, err := strconv.Atoi(os.Getenv("POSTHORN_MODEL_SEEDS")); err == nil {
		seeds = n
	}
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(uint64(seed), 0))
			s := &placementSim{t: t, rng: rng, slots: make([]Placed, 64), left: map[string]map[int]int{}, members: map[string]*Member{},
				exact: seed%2 == 0}
			s.join(1 + rng.IntN(50))
			s.settle("start", 64, 0)
			for range 6 {
				count := len(s.members)
				some := func(n int) []string {
					names := slices.Sorted(maps.Keys(s.members))
					rng.Shuffle(len(names), func(i, k int) { names[i], names[k] = names[k], names[i] })
					return names[:n]
				}
				switch kind := rng.IntN(3); {
				case kind == 0 && count < 50 || count == 1:
					n := 1 + rng.IntN(50-count)
					least := s.leastMoves(n)
					s.join(n)
					s.settle(fmt.Sprintf("scale out from %d to %d members", count, count+n), least, s.tolerance(n))
				case kind == 1:
					n, least := 1+rng.IntN(count-1), 0
					for _, name := range some(n) {
						least += s.owned()[name]
						s.members[name].Leaving = true
					}
					s.settle(fmt.Sprintf("scale in from %d to %d members", count, count-n), least, s.tolerance(n))
				default:
					n, least := 1+rng.IntN(min(3, count-1)), 0
					for _, name := range some(n) {
						least += s.remove(name)
					}
					// The standbys of several lost members can be the same one.
					s.settle(fmt.Sprintf("lose %d of %d members", n, count), least, max(s.tolerance(n), 2*n-1))
				}
			}
			steps, excess = steps+s.steps, max(excess, s.excess)
		})
	}
	t.Logf("%d seeds: %d steps, each moved at most %d slots more than the least number", seeds, steps, excess)
}
