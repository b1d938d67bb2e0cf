package slots

import (
	"bytes"
	"cmp"
	"slices"
	"sync"
	"time"
)

// Bus carries heartbeats between the processes of an installation. It may lose some, and keeps none.
type Bus interface {
	// Publish sends a heartbeat to all processes, this one included.
	Publish(heartbeat []byte) error
	// Subscribe calls fn for each heartbeat until stop.
	Subscribe(fn func(heartbeat []byte)) (stop func(), err error)
}

// Heartbeat is what a process reports to the others, every HeartbeatInterval and after each change. No
// promise depends on it: it only selects who claims a slot, and where requests are forwarded.
type Heartbeat struct {
	Member string `json:"member"`
	// Milliseconds since the start of the process.
	Milliseconds int64 `json:"age"`
	// Leaving is as in Member.
	Leaving bool `json:"leaving,omitempty"`
	// Starting is as in Member.
	Starting bool `json:"starting,omitempty"`
	// ClockSkew is as in Member, in milliseconds, and Clock its wall clock in milliseconds since 1970.
	ClockSkew int64 `json:"clockSkew,omitempty"`
	Clock     int64 `json:"clock,omitempty"`
	// OldConfig is as in Member.
	OldConfig bool `json:"oldConfig,omitempty"`
	// Configs are the newest live configs that the process has.
	Configs []ConfigNumber `json:"configs,omitempty"`
	// Announcement is how other processes reach this one. It is another one for each start of a process.
	Announcement []byte      `json:"announcement,omitempty"`
	Owned        []OwnedSlot `json:"owned,omitempty"`
	// Silent are the slots that the process has claimed, and whose log has acknowledged no record of it lately.
	Silent []OwnedSlot  `json:"silent,omitempty"`
	Copies []SlotCopied `json:"copies,omitempty"`
}

// ConfigNumber is the number of a namespace's live config, which grows with each change.
type ConfigNumber struct {
	Namespace string `json:"namespace"`
	Number    int64  `json:"number"`
}

// OwnedSlot is a slot whose log has acknowledged a record of the process lately.
type OwnedSlot struct {
	Slot  int    `json:"slot"`
	Epoch uint64 `json:"epoch"`
	// Unlisted is true while the process can know write keys of the slot that no live config has.
	Unlisted bool `json:"unlisted,omitempty"`
	// Directory is the id of the directory in which the namespaces of the store have a slot, and Assignments
	// the number of its records at that time; empty before.
	Directory   string `json:"directory,omitempty"`
	Assignments uint64 `json:"assignments,omitempty"`
}

// SlotCopied is a slot that the process follows. It is compared as a whole, and a change is announced at once: it has no
// counters.
type SlotCopied struct {
	Slot  int  `json:"slot"`
	Ready bool `json:"ready,omitempty"`
	// Failed is as in Follower.
	Failed bool `json:"failed,omitempty"`
}

const (
	// HeartbeatInterval is the longest time between two heartbeats of a process.
	HeartbeatInterval = time.Second
	// lostAfter is the time without a heartbeat after which a process is not a member.
	lostAfter = 3 * time.Second
)

// Members are the processes of an installation, as their heartbeats describe them. All methods may be
// called concurrently.
type Members struct {
	now func() time.Time

	mu    sync.Mutex
	heard map[string]heard
	slots map[int]seen
}

type heard struct {
	Heartbeat
	at time.Time
}

// seen is the state of a slot at the last call of View.
type seen struct {
	owner string
	epoch uint64
	// unowned is when the owner was lost or became silent; zero while there is one that is not.
	unowned time.Time
}

// NewMembers makes Members. now is a clock that is never set back; nil is the clock of leases.
func NewMembers(now func() time.Time) *Members {
	if now == nil {
		now = bootClock
	}
	return &Members{now: now, heard: map[string]heard{}, slots: map[int]seen{}}
}

// Precedes reports whether h is of the first of two processes with one name. Of processes that started
// within a second, it is that with the lower announcement.
func (h Heartbeat) Precedes(other Heartbeat) bool {
	const same = int64(time.Second / time.Millisecond)
	if older := h.Milliseconds - other.Milliseconds; older > same || older < -same {
		return older > 0
	}
	return bytes.Compare(h.Announcement, other.Announcement) < 0
}

// Hear takes a heartbeat. It reports whether the slots or the state of its member have changed. Of two
// processes with one name the first is the member, until it leaves or is silent for lostAfter.
func (m *Members) Hear(h Heartbeat) (changed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	before, known := m.heard[h.Member]
	if age := now.Sub(before.at); known && !before.Leaving && age <= lostAfter && !bytes.Equal(before.Announcement, h.Announcement) {
		first := before.Heartbeat
		if first.Milliseconds += age.Milliseconds(); first.Precedes(h) {
			return false
		}
	}
	m.heard[h.Member] = heard{h, now}
	return !known || before.Leaving != h.Leaving || before.Starting != h.Starting || before.OldConfig != h.OldConfig ||
		!slices.Equal(before.Owned, h.Owned) || !slices.Equal(before.Silent, h.Silent) || !slices.Equal(before.Copies, h.Copies)
}

// member returns what Place uses of a heartbeat.
func (h heard) member(now time.Time) Member {
	return Member{
		Name: h.Member, Age: time.Duration(h.Milliseconds) * time.Millisecond, Leaving: h.Leaving, Starting: h.Starting, OldConfig: h.OldConfig,
		ClockSkew: time.Duration(h.ClockSkew) * time.Millisecond, Clock: time.UnixMilli(h.Clock).Add(now.Sub(h.at)),
	}
}

// List returns the members.
func (m *Members) List() (members []Member) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	for _, h := range m.alive(now) {
		members = append(members, h.member(now))
	}
	return members
}

// Configs returns the highest numbers of live configs that members other than the named one have announced.
func (m *Members) Configs(except string) map[string]int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	numbers := map[string]int64{}
	for _, h := range m.alive(m.now()) {
		if h.Member == except {
			continue
		}
		for _, c := range h.Configs {
			numbers[c.Namespace] = max(numbers[c.Namespace], c.Number)
		}
	}
	return numbers
}

// Successors returns the members with a right clock that have a complete copy of a slot.
func (m *Members) Successors(slot int) (list []Member) {
	members := m.List()
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	for _, h := range m.alive(now) {
		if member := h.member(now); !h.Leaving && member.HasRightClock(members) &&
			slices.Contains(h.Copies, SlotCopied{Slot: slot, Ready: true}) {
			list = append(list, member)
		}
	}
	return list
}

// View returns the arguments of Place for a number of slots.
func (m *Members) View(slots int) (members []Member, placed []Placed) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	placed = make([]Placed, slots)
	for _, h := range m.alive(now) {
		members = append(members, h.member(now))
		for _, c := range h.Copies {
			if c.Slot >= 0 && c.Slot < slots {
				placed[c.Slot].Followers = append(placed[c.Slot].Followers, Follower{h.Member, c.Ready, c.Failed})
			}
		}
	}
	for i := range placed {
		before := m.slots[i]
		placed[i].Owner, placed[i].Previous = "", before.owner
		if owner, owned, ok := m.owner(i, now); ok {
			placed[i].Owner, placed[i].Previous = owner.Member, ""
			m.slots[i] = seen{owner: owner.Member, epoch: owned.Epoch}
			continue
		}
		if silent, owned, ok := m.silent(i, now); ok && owned.Epoch >= before.epoch {
			placed[i].Owner, placed[i].Previous, placed[i].Silent = silent.Member, "", true
		}
		if before.unowned.IsZero() {
			before.unowned = now
			m.slots[i] = before
		}
		placed[i].Unowned = now.Sub(before.unowned)
	}
	return members, placed
}

// Owner returns the last heartbeat of the owner of a slot, and its part about the slot.
func (m *Members) Owner(slot int) (owner Heartbeat, owned OwnedSlot, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.owner(slot, m.now())
}

// alive returns the members by name, and forgets the others. The mutex is held.
func (m *Members) alive(now time.Time) (list []heard) {
	for name, h := range m.heard {
		if now.Sub(h.at) > lostAfter {
			delete(m.heard, name)
			continue
		}
		list = append(list, h)
	}
	slices.SortFunc(list, func(a, b heard) int { return cmp.Compare(a.Member, b.Member) })
	return list
}

// owner returns the member that owns a slot, and silent the one whose log is silent. The mutex is held.
func (m *Members) owner(slot int, now time.Time) (owner Heartbeat, owned OwnedSlot, ok bool) {
	return m.newest(slot, now, func(h Heartbeat) []OwnedSlot { return h.Owned })
}

func (m *Members) silent(slot int, now time.Time) (owner Heartbeat, owned OwnedSlot, ok bool) {
	return m.newest(slot, now, func(h Heartbeat) []OwnedSlot { return h.Silent })
}

// newest returns the member with the highest epoch of a slot. The mutex is held.
func (m *Members) newest(slot int, now time.Time, of func(Heartbeat) []OwnedSlot) (owner Heartbeat, owned OwnedSlot, ok bool) {
	for _, h := range m.alive(now) {
		for _, o := range of(h.Heartbeat) {
			if o.Slot == slot && o.Epoch > owned.Epoch {
				owner, owned, ok = h.Heartbeat, o, true
			}
		}
	}
	return owner, owned, ok
}
