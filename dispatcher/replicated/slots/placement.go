package slots

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Member is a process that can own and follow slots, as the other processes see it.
type Member struct {
	Name string
	// Age is the time since its first heartbeat.
	Age time.Duration
	// Leaving members take no slots and hand over those that they have: they end, or have no usable
	// live configs.
	Leaving bool
	// Starting members have not been ready for calls yet.
	Starting bool
	// ClockSkew is by how much its wall clock is ahead of the log servers' clocks, and Clock is its
	// present time.
	ClockSkew time.Duration
	Clock     time.Time
	// OldConfig is true while it lacks a live config that another member has had for a while, or an object that
	// the log has.
	OldConfig bool
}

// HasRightClock reports whether the clock of one of the members is right: it agrees with a server of the
// log, or with all members, and the clocks of the servers are wrong. The members may have read those at
// different times.
func (m Member) HasRightClock(members []Member) bool {
	if m.ClockSkew.Abs() <= MaxClockSkew {
		return true
	}
	for _, other := range members {
		if m.Clock.Sub(other.Clock).Abs() > MaxClockSkew {
			return false
		}
	}
	return len(members) > 1
}

// Placed is the state of a slot, as a process sees it.
type Placed struct {
	// Owner is empty for a slot without owner. Previous is then the last owner, and Unowned the time
	// since the slot has none.
	Owner, Previous string
	// Silent is true if the log has acknowledged no record of the owner lately, as in an election of the servers;
	// Unowned is then the time since. Another member may claim the slot, but no slot is moved because of it.
	Silent  bool
	Unowned time.Duration
	// Followers have a copy of the slot.
	Followers []Follower
}

// Follower is a member with a copy of a slot. Until it is Ready, it restores the copy. If it has Failed, it
// owned the slot lately and could not open the store.
type Follower struct {
	Name          string
	Ready, Failed bool
}

// Action is what a member does with a slot.
type Action int

// Values of Action.
const (
	// Take: claim the slot, which has no owner.
	Take Action = iota
	// HandOver: release the slot; a follower is ready to take it.
	HandOver
	// StartFollowing: restore a copy and follow the slot.
	StartFollowing
	// StopFollowing: remove the copy.
	StopFollowing
)

// Move is an action of a member.
type Move struct {
	Member string
	Action Action
	Slot   int
}

// Bounds of Place.
const (
	// countedAge is the age at which a member counts: members that start at the same time then
	// share the slots, and a process that restarts again and again takes none.
	countedAge = 10 * time.Second
	// TakeTurn is the time without owner after which the next member may take a slot, too.
	TakeTurn = 30 * time.Second
)

// Place returns the moves with which the members take and follow the slots. Each member makes its
// own moves only. It is a pure function, so members with the same view expect the same moves; with
// different views two members may claim a slot, and the stream accepts one of them.
//
//   - A member has slots/members slots, rounded up or down, so two members differ by at most one slot. One
//     that has too many, or leaves, hands over one at a time, and only to a member that follows the slot and
//     is ready. As few slots as possible are moved.
//   - A slot without owner is taken by a ready follower, also one with its full share, otherwise by the member with
//     the fewest slots: to restore a copy takes longer than to hand the slot over afterwards.
//   - The owner of a silent slot counts as its owner. Until TakeTurn, only a ready follower takes such a slot.
//   - A member that failed to open the store of a slot takes it after all others, gets no hand-over of it,
//     and is not counted as a standby. It keeps its copy.
//   - Each slot has a number of standbys. Those of one owner are spread so that the members that
//     take its slots after its loss do not exceed their shares.
//   - A member restores one copy at a time for the standbys and hand-overs.
//   - A member with a wrong clock takes no slots, and hands over those that it has. The same applies to a member
//     with an old config, unless there is no other one.
//   - A member that does not count yet takes only a slot of which no other one has a ready copy.
//   - A member that takes no slots keeps its copies.
func Place(members []Member, slots []Placed, standbys int) []Move {
	p := newPlacement(members, slots, standbys)
	if len(p.names) == 0 {
		return nil
	}
	p.take()
	p.handOver()
	p.follow()
	return p.moves
}

// Serves reports whether a member other than the named one is ready for calls.
func Serves(members []Member, except string) bool {
	return slices.ContainsFunc(members, func(m Member) bool {
		return m.Name != except && !m.Leaving && !m.Starting && !m.OldConfig && m.HasRightClock(members)
	})
}

// Progress is how much a member has of the slots and the copies that Place gives it.
type Progress struct {
	// Has is the number of its slots and of its ready copies.
	Has int
	// Complete is true when the member counts and has all that it should have, and no slot is handed over.
	Complete bool
}

// ProgressOf returns the progress of a member. Slots that no member took for TakeTurn, and copies with which
// the store could not be opened, do not delay it.
func ProgressOf(member string, members []Member, slots []Placed, standbys int) (p Progress) {
	p.Complete = newPlacement(members, slots, standbys).counts(member)
	for _, m := range Place(members, slots, standbys) {
		if m.Action == HandOver || m.Member == member && m.Action == StartFollowing {
			p.Complete = false
		}
	}
	for _, s := range slots {
		switch ready := s.ready(member); {
		case s.Owner == member, ready == 0:
			p.Has++
		case ready == 1:
			p.Complete = false
		}
		if s.isFree() && s.Unowned < TakeTurn {
			p.Complete = false
		}
	}
	return p
}

// placement is the state of Place.
type placement struct {
	slots    []Placed
	standbys int
	// names are the members that take slots, in order, share the most that each may have, and least the
	// fewest that each should have.
	names        []string
	share, least int
	// young are the members that do not count yet, if others do.
	young []string
	// owned, follows and restoring are the numbers of slots of each member, with the moves.
	owned, follows, restoring map[string]int
	moves                     []Move
	// targets are the members to which slots are to be handed over.
	targets map[int]string
	// leaving are the members that hand over their slots: they end, or have a wrong clock or an old config.
	leaving map[string]bool
}

func newPlacement(members []Member, slots []Placed, standbys int) *placement {
	p := &placement{
		slots: slots, standbys: standbys,
		owned: map[string]int{}, follows: map[string]int{}, restoring: map[string]int{},
		targets: map[int]string{}, leaving: map[string]bool{},
	}
	var outdated []string
	for _, m := range members {
		switch {
		case m.Leaving, !m.HasRightClock(members):
			p.leaving[m.Name] = true
		case m.OldConfig:
			outdated = append(outdated, m.Name)
		case m.Age < countedAge:
			p.young = append(p.young, m.Name)
		default:
			p.names = append(p.names, m.Name)
		}
	}
	if len(p.names) == 0 {
		p.names, p.young = p.young, nil // There is no other member.
	}
	if len(p.names) == 0 {
		p.names, outdated = outdated, nil
	}
	for _, name := range outdated {
		p.leaving[name] = true
	}
	slices.Sort(p.names)
	p.share, p.least = ceilDiv(len(slots), max(len(p.names), 1)), len(slots)/max(len(p.names), 1)
	for _, s := range slots {
		p.owned[s.Owner]++
		for _, f := range s.Followers {
			p.follows[f.Name]++
			if !f.Ready && !f.Failed {
				p.restoring[f.Name]++
			}
		}
	}
	return p
}

// counts reports whether a member takes slots.
func (p *placement) counts(member string) bool {
	_, ok := slices.BinarySearch(p.names, member)
	return ok
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

func (p *placement) add(member string, a Action, slot int) {
	p.moves = append(p.moves, Move{member, a, slot})
}

// isFree reports whether members may take the slot.
func (s *Placed) isFree() bool { return s.Owner == "" || s.Silent }

// mayTake reports whether a member may take the slot, which is free.
func (s *Placed) mayTake(member string) bool {
	return !s.Silent || member != s.Owner && (s.ready(member) == 0 || s.Unowned >= TakeTurn)
}

// ready returns 0 for a ready follower, 1 for one that restores its copy, 2 for other members, and failed for
// a follower that could not open the store.
func (s *Placed) ready(member string) int {
	for _, f := range s.Followers {
		switch {
		case f.Name != member:
		case f.Failed:
			return failed
		case f.Ready:
			return 0
		default:
			return 1
		}
	}
	return 2
}

const failed = 3

// byOwned orders members by the number of their slots.
func (p *placement) byOwned(a, b string) int {
	return cmp.Or(cmp.Compare(p.owned[a], p.owned[b]), cmp.Compare(p.follows[a], p.follows[b]), cmp.Compare(a, b))
}

// take selects the members that take the free slots.
func (p *placement) take() {
	for i := range p.slots {
		s := &p.slots[i]
		if !s.isFree() {
			continue
		}
		ranked := p.candidates(s)
		slices.SortFunc(ranked, func(a, b string) int {
			return cmp.Or(
				cmp.Compare(min(s.ready(a), 1), min(s.ready(b), 1)),
				cmp.Compare(p.fullShare(a), p.fullShare(b)),
				cmp.Compare(s.ready(a), s.ready(b)),
				p.byOwned(a, b),
			)
		})
		turns := min(1+int(s.Unowned/TakeTurn), len(ranked))
		for _, name := range ranked[:turns] {
			p.add(name, Take, i)
		}
		if !s.Silent {
			p.owned[ranked[0]]++
		}
	}
}

// candidates returns the members that may take a free slot.
func (p *placement) candidates(s *Placed) []string {
	list := slices.DeleteFunc(slices.Clone(p.names), func(name string) bool { return !s.mayTake(name) })
	isReady := func(name string) bool { return name != s.Owner && s.ready(name) == 0 }
	if slices.ContainsFunc(list, isReady) {
		return list
	}
	for _, name := range p.young {
		if isReady(name) {
			list = append(list, name)
		}
	}
	return list
}

// fullShare returns 1 for a member that has its share of slots, otherwise 0.
func (p *placement) fullShare(member string) int {
	if p.owned[member] >= p.share {
		return 1
	}
	return 0
}

// handOver selects for each member with too many slots the next one, and its target.
func (p *placement) handOver() {
	busy := map[string]bool{"": true} // Members whose last hand-over is not complete.
	slotsOf := map[string][]int{}
	for i, s := range p.slots {
		if s.isFree() {
			busy[cmp.Or(s.Owner, s.Previous)] = true
		}
		slotsOf[s.Owner] = append(slotsOf[s.Owner], i)
	}
	level := p.levelling()
	for _, owner := range slices.Sorted(maps.Keys(slotsOf)) {
		allowed, ok := p.allowed(owner)
		below := p.share
		if level > 0 && allowed == p.share && len(slotsOf[owner]) == p.share {
			allowed, below = p.least, p.least
		}
		if !ok || len(slotsOf[owner]) <= allowed {
			continue
		}
		slot, target := p.nextHandOver(owner, slotsOf[owner], below)
		if target == "" {
			continue
		}
		if below == p.least {
			level--
		}
		p.owned[target]++
		p.targets[slot] = target
		switch ready := p.slots[slot].ready(target); {
		case ready == 0 && !busy[owner]:
			p.add(owner, HandOver, slot)
		case ready == 2 && !busy[owner]:
			p.restore(target, slot)
		}
	}
}

// levelling returns how many members with their full share hand over a slot, because the slots that others
// hand over do not give each member the fewest that it should have. Slots of lost and young members are
// among the latter.
func (p *placement) levelling() int {
	missing, kept := 0, 0
	for _, name := range p.names {
		missing += max(0, p.least-p.owned[name])
		kept += min(p.owned[name], p.share)
	}
	return missing - (len(p.slots) - kept)
}

// allowed returns the slots that an owner may keep; ok is false for one that is lost or does not
// count yet, which hands over none.
func (p *placement) allowed(owner string) (n int, ok bool) {
	if p.leaving[owner] {
		return 0, true
	}
	return p.share, p.counts(owner)
}

// nextHandOver returns the slot of an owner that can be handed over first, and the member that gets
// it: one with fewer slots than below, at first one with too few slots. It returns none when there is none.
func (p *placement) nextHandOver(owner string, owned []int, below int) (slot int, target string) {
	best := 0
	missing := func(name string) int { return min(max(0, p.least-p.owned[name]), 1) }
	for _, i := range owned {
		for _, name := range p.names {
			ready := p.slots[i].ready(name)
			if name == owner || p.owned[name] >= below || ready == failed {
				continue
			}
			if target == "" || cmp.Or(cmp.Compare(missing(target), missing(name)), cmp.Compare(ready, best), p.byOwned(name, target)) < 0 {
				slot, target, best = i, name, ready
			}
		}
	}
	return slot, target
}

// restore makes a member follow a slot, unless it restores another one.
func (p *placement) restore(member string, slot int) {
	if p.restoring[member] == 0 {
		p.restoring[member]++
		p.add(member, StartFollowing, slot)
	}
}

// follow selects the standbys. It keeps those that follow already.
func (p *placement) follow() {
	members := len(p.names)
	follows, common := map[string]int{}, map[[2]string]int{}
	most := ceilDiv(len(p.slots)*p.standbys, members) + 1
	others := func(owner string) int {
		if p.counts(owner) && members > 1 {
			return members - 1
		}
		return members
	}
	// above is the number of slots, for each owner, by which members exceed the rounded-down share after its loss.
	above := map[string]int{}
	for _, s := range p.slots {
		if _, known := above[s.Owner]; known || s.Owner == "" {
			continue
		}
		above[s.Owner] = 0
		for _, name := range p.names {
			if name != s.Owner {
				above[s.Owner] += max(0, p.owned[name]-len(p.slots)/others(s.Owner))
			}
		}
	}
	// room is 1 if a member can take one more slot when an owner is lost, so that two members then differ by at
	// most one, and 0 otherwise.
	room := func(owner, name string) int {
		n := others(owner)
		takes := p.owned[name] + common[[2]string{owner, name}]
		if takes < len(p.slots)/n || takes == len(p.slots)/n && above[owner] < len(p.slots)%n {
			return 1
		}
		return 0
	}
	wanted := make([][]string, len(p.slots))
	want := func(i int, name string) {
		owner := p.slots[i].Owner
		wanted[i] = append(wanted[i], name)
		follows[name]++
		common[[2]string{owner, name}]++
		if p.owned[name]+common[[2]string{owner, name}] > len(p.slots)/others(owner) {
			above[owner]++
		}
	}
	for i, s := range p.slots {
		if s.Owner == "" {
			continue
		}
		kept := slices.Clone(s.Followers)
		slices.SortFunc(kept, func(a, b Follower) int {
			return cmp.Or(cmp.Compare(s.ready(a.Name), s.ready(b.Name)), cmp.Compare(a.Name, b.Name))
		})
		for _, f := range kept {
			if p.counts(f.Name) && f.Name != s.Owner && !f.Failed && len(wanted[i]) < p.standbys && follows[f.Name] < most &&
				room(s.Owner, f.Name) > 0 {
				want(i, f.Name)
			}
		}
	}
	for i := range p.slots {
		s := &p.slots[i]
		if s.Owner == "" {
			continue
		}
		for len(wanted[i]) < p.standbys {
			best := ""
			for _, name := range p.names {
				if name == s.Owner || slices.Contains(wanted[i], name) || s.ready(name) == failed {
					continue
				}
				if best == "" || cmp.Or(
					cmp.Compare(room(s.Owner, best), room(s.Owner, name)),
					cmp.Compare(follows[name], follows[best]),
					cmp.Compare(p.owned[name], p.owned[best]),
				) < 0 {
					best = name
				}
			}
			if best == "" {
				break
			}
			want(i, best)
			if s.ready(best) == 2 {
				p.restore(best, i)
			}
		}
		p.stopFollowing(i, wanted[i])
	}
}

// stopFollowing removes the copies that are not wanted, as soon as those that are wanted are ready.
func (p *placement) stopFollowing(slot int, wanted []string) {
	s := &p.slots[slot]
	if slices.ContainsFunc(wanted, func(name string) bool { return s.ready(name) > 0 }) {
		return
	}
	for _, f := range s.Followers {
		if f.Name != p.targets[slot] && !f.Failed && !slices.Contains(wanted, f.Name) && p.counts(f.Name) {
			p.add(f.Name, StopFollowing, slot)
		}
	}
}
