package witness

import (
	"math"
	"slices"
	"time"
)

// absence is the time from the removal of a destination or a Source to its return. Lines that do not exist are nil.
type absence struct {
	// removing is before a process can see the removal.
	removing, removed, applied, confirmed *Line
}

// addChange adds a line to the absences.
func (d *destination) addChange(l *Line) {
	var last *absence
	if n := len(d.absences); n > 0 && (d.absences[n-1].confirmed == nil) {
		last = d.absences[n-1]
	}
	switch o := l.Object; {
	case o.Action == Removing, o.Action == Removed && last == nil:
		last = &absence{removing: l}
		d.absences = append(d.absences, last)
	case last == nil:
		return
	}
	switch l.Object.Action {
	case Removed:
		last.removed = l
	case Applied:
		last.applied = l
	case Confirmed:
		if last.applied != nil && l.Object.Revision >= last.applied.Object.Revision {
			last.confirmed = l
		}
	}
}

// end is the time from which the object is certainly in effect again.
func (a *absence) end() time.Duration {
	if a.confirmed == nil {
		return math.MaxInt64
	}
	return a.confirmed.At
}

// without returns the removal after which an attempt that began at a time had no config, or nil.
func (d *destination) without(at, timeout time.Duration) *Line {
	for _, a := range d.absences {
		if a.removed != nil && a.removed.At < at-timeout && (a.applied == nil || at < a.applied.At) {
			return a.removed
		}
	}
	return nil
}

// discards returns the first absence that may be longer than the grace period and in which, or before which, a
// message was sent: its pending messages may be discarded. It returns nil without one.
func (h *History) discards(d *destination, sent *Line) *absence {
	i := slices.IndexFunc(d.absences, func(a *absence) bool {
		return a.end()-a.removing.At > h.plan.Grace && a.end() > sent.Begin
	})
	if i < 0 {
		return nil
	}
	return d.absences[i]
}

// absent reports whether an object may have been removed at some time of an interval.
func (d *destination) absent(from, to time.Duration) bool {
	return d != nil && slices.ContainsFunc(d.absences, func(a *absence) bool { return a.removing.At <= to && a.end() >= from })
}

// judgeDiscarded compares the acknowledged messages without an outcome that a removal may have discarded with the ledger.
func (h *History) judgeDiscarded(f *finding, d *destination, lost []*Line) {
	switch {
	case d.final == nil:
		f.unclear("%s was removed, and has no ledger at the end that counts its discarded messages", d.name)
	case d.pending() && d.final.Ledger.Discarded < len(lost):
		f.unclear("%s was removed, and may still have messages: no ledger with 0 pending messages at its end", d.name)
	case d.final.Ledger.Discarded < len(lost):
		f.violated([]*Line{d.absences[0].removing, lost[0], d.final}, "%d acknowledged messages have no outcome at %s, and %d are discarded", len(lost), d.name, d.final.Ledger.Discarded)
	}
}
