package slots

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// simProcess is a process as its heartbeats describe it.
type simProcess struct {
	*Members
	name string
	// owned are its slots with the time from which the log acknowledges records again; copies has its ready copies.
	owned  map[int]time.Time
	copies []int
	// started is when its age begins, and frozen is true while it sends and receives nothing.
	started time.Time
	frozen  bool
}

// heartbeat describes the process.
func (p *simProcess) heartbeat(now time.Time) Heartbeat {
	h := Heartbeat{Member: p.name, Milliseconds: now.Sub(p.started).Milliseconds()}
	for slot := range 4 {
		switch continues, ok := p.owned[slot]; {
		case ok && now.Before(continues):
			h.Silent = append(h.Silent, OwnedSlot{Slot: slot, Epoch: 1})
		case ok:
			h.Owned = append(h.Owned, OwnedSlot{Slot: slot, Epoch: 1})
		case slices.Contains(p.copies, slot):
			h.Copies = append(h.Copies, SlotCopied{Slot: slot, Ready: true})
		}
	}
	return h
}

// threeProcesses returns processes that own two, one and one of four slots, and have one copy of each.
func threeProcesses(now *time.Time) []*simProcess {
	var all []*simProcess
	for i, name := range []string{"a", "b", "c"} {
		p := &simProcess{Members: NewMembers(func() time.Time { return *now }), name: name, owned: map[int]time.Time{},
			started: now.Add(-time.Hour)}
		p.copies = [][]int{{}, {0, 3}, {1, 2}}[i]
		for _, slot := range [][]int{{0, 1}, {2}, {3}}[i] {
			p.owned[slot] = time.Time{}
		}
		all = append(all, p)
	}
	return all
}

// exchange sends the heartbeats of a list of processes to all.
func exchange(all []*simProcess, now time.Time, senders ...*simProcess) {
	for _, from := range senders {
		for _, to := range all {
			if from == to || !from.frozen && !to.frozen {
				to.Hear(from.heartbeat(now))
			}
		}
	}
}

// In an election of the servers the log acknowledges nothing for 3 to 9 s, for each slot for another time. No
// process hands over a slot, or begins or removes a copy. Only the ready follower of a slot may take it.
func TestPlacementInAnElection(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 0))
		now := time.Unix(1000, 0)
		all := threeProcesses(&now)
		exchange(all, now, all...)
		begin, last := now.Add(2*time.Second), now
		for _, p := range all {
			for slot := range p.owned {
				if rng.IntN(4) > 0 { // The lost server led the streams of some slots.
					p.owned[slot] = begin.Add(3*time.Second + time.Duration(rng.Int64N(int64(6*time.Second))))
				}
			}
		}
		takes := 0
		for now = begin; now.Before(begin.Add(12 * time.Second)); now = now.Add(50 * time.Millisecond) {
			if now.Sub(last) >= time.Second {
				exchange(all, now, all...)
				last = now
			}
			exchange(all, now, all[rng.IntN(len(all))]) // A change makes a heartbeat due.
			for _, observer := range all {
				members, placed := observer.View(4)
				for _, m := range Place(members, placed, 1) {
					if m.Action != Take || placed[m.Slot].ready(m.Member) > 0 {
						t.Fatalf("seed %d, %v after the loss: %s sees the move %+v of %+v, want none", seed, now.Sub(begin), observer.name, m, placed)
					}
					takes++
				}
			}
		}
		if takes == 0 && seed < 10 {
			t.Errorf("seed %d: no follower might take a silent slot, want its ready one", seed)
		}
	}
}

// A process that was frozen for longer than lostAfter, and reports the age of a new one, gets no slot before it has
// been there for countedAge, and keeps its copies during this time.
func TestThawedProcessMovesNoSlot(t *testing.T) {
	now := time.Unix(1000, 0)
	all := threeProcesses(&now)
	exchange(all, now, all...)
	frozen := all[0]
	frozen.frozen = true
	for range 5 {
		now = now.Add(time.Second)
		exchange(all, now, all...)
	}
	// The followers have taken its slots, which it follows.
	all[1].owned[0], all[2].owned[1] = time.Time{}, time.Time{}
	all[1].copies, all[2].copies = []int{3, 1}, []int{2, 0}
	frozen.owned, frozen.copies, frozen.frozen, frozen.started = nil, []int{0, 1}, false, now
	for ; now.Sub(frozen.started) < 11*time.Second; now = now.Add(time.Second) {
		exchange(all, now, all...)
		var want []string
		if now.Sub(frozen.started) >= countedAge {
			want = []string{"b hands over 0"}
		}
		for _, observer := range all {
			var got []string
			members, placed := observer.View(4)
			for _, m := range Place(members, placed, 1) {
				switch {
				case m.Action == HandOver:
					got = append(got, fmt.Sprintf("%s hands over %d", m.Member, m.Slot))
				case m.Member == frozen.name && now.Sub(frozen.started) < countedAge:
					got = append(got, fmt.Sprintf("%+v", m))
				}
			}
			wantEqual(t, fmt.Sprintf("%v after the end, %s", now.Sub(frozen.started), observer.name), got, want)
		}
	}
}
