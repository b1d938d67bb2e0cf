package host

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// The directory of the slots can lack namespaces whose messages are in a store: it was restored from an
// older backup, or created again. A namespace must not get another slot then, because its pending messages,
// duplicate messageIds and audiences would remain unused. So the owner of each slot first assigns to its
// slot the namespaces of its store that have none, and other namespaces get a slot when all owners have
// done so.

// compared is the directory in which the namespaces of a store have a slot.
type compared struct {
	directory   string
	assignments uint64
}

// assignStored assigns to the slot the namespaces of its store that have none, and repeats it until the
// directory answers or ctx is done.
func (s *replica) assignStored(ctx context.Context, stored []string) {
	directory := s.host.namespaces.directory.Load()
	for _, namespace := range stored {
		if _, known := directory.Slot(namespace); known {
			continue
		}
		if err := (slots.Assignment{Namespace: namespace, Slot: s.slot}).Validate(); err != nil {
			s.log.Error("a namespace of this slot cannot be assigned", "error", err)
			continue
		}
		for {
			slot, err := directory.Assign(ctx, namespace, s.slot)
			if err == nil {
				s.host.namespaces.assigned(namespace)
				if slot == s.slot && s.host.s.Control == nil { // Otherwise, it is how each namespace gets its slot.
					s.log.Warn("a namespace of this slot had none in the directory, which was restored or created again; assigned it again", "namespace", namespace)
				}
				break
			}
			s.log.Warn("a namespace of this slot has none in the directory, and cannot be assigned; trying again", "namespace", namespace, "error", err)
			select {
			case <-time.After(assignRetry):
			case <-ctx.Done():
				return
			}
		}
	}
	id, read := directory.Read()
	s.compared.Store(&compared{id, read})
	s.host.signal()
}

// misplaced returns the namespaces with messages in the store of this slot that the directory assigns to
// another one, each with the fix.
func (s *replica) misplaced(d *dispatcher.Dispatcher) (problems []string) {
	directory := s.host.namespaces.directory.Load()
	type count struct{ pending, letters int64 }
	counts := map[string]count{}
	for _, name := range d.Store().Destinations() {
		namespace, _, _ := strings.Cut(name, "/")
		if slot, known := directory.Slot(namespace); known && slot != s.slot {
			stats, n := d.Store().DestinationStats(name), counts[namespace]
			counts[namespace] = count{n.pending + stats.Ledger.Pending, n.letters + stats.DeadLetters}
		}
	}
	for _, namespace := range slices.Sorted(maps.Keys(counts)) {
		n := counts[namespace]
		if slot, _ := directory.Slot(namespace); n.pending+n.letters > 0 {
			problems = append(problems, fmt.Sprintf("slot %d has %d pending messages and %d dead letters of namespace %s, which the directory assigns to slot %d, so they are not delivered; restore the stream of the directory from a backup that assigns it to slot %d", s.slot, n.pending, n.letters, namespace, slot, s.slot))
		}
	}
	return problems
}

// readDurability adds the misplaced namespaces and the gaps of the members' copies to what the log returns; nil if it
// returns nothing.
func (t *ownership) readDurability(d *dispatcher.Dispatcher) func(context.Context) (slots.Durability, error) {
	if t.remote.Durability == nil {
		return nil
	}
	return func(ctx context.Context) (slots.Durability, error) {
		result, err := t.remote.Durability(ctx)
		result.Gaps = append(result.Gaps, d.LostMembers()...)
		if err == nil {
			result.Weak = append(result.Weak, t.replica.misplaced(d)...)
		}
		return result, err
	}
}

// uncompared returns why namespaces without a slot may have messages in one; empty if they cannot.
func (h *host) uncompared() string {
	directory := h.namespaces.directory.Load()
	id, read := directory.Read()
	for slot := range directory.Slots() {
		_, owned, ok := h.members.Owner(slot)
		switch {
		case !ok:
			return fmt.Sprintf("slot %d has no owner", slot)
		case owned.Directory != id || owned.Assignments > read:
			return fmt.Sprintf("the owner of slot %d has not yet compared its namespaces with the directory", slot)
		}
	}
	return ""
}
