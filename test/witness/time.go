package witness

import (
	"maps"
	"slices"
	"time"
)

func judgeWindow(h *History, f *finding) {
	for _, r := range h.got {
		m := h.sent[r.body.MessageID]
		if m == nil || m.acknowledged == nil || r.to == nil || len(r.to.redeliver[m.ID]) > 0 {
			continue
		}
		f.judged++
		_, timeout, window := r.to.largest()
		_, suspended := r.to.suspended(m.acknowledged.At, r.Begin)
		late := r.Begin - m.acknowledged.At - window - timeout - suspended
		if window > 0 && late > 0 {
			f.violated([]*Line{m.acknowledged, r.Line}, "message %s is sent %v after the end of its retry window", r.id,
				late.Round(time.Millisecond))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(h.destinations)) {
		h.destinations[name].judgeExpired(h, f)
	}
}

// judgeExpired finds messages whose window ended early, by more than two timeouts: one for the last attempt before its end, and
// one for an attempt that began before a suspension.
func (d *destination) judgeExpired(h *History, f *finding) {
	_, timeout, _ := d.largest()
	for _, id := range slices.Sorted(maps.Keys(d.expired)) {
		m := h.sent[id]
		if m == nil || m.acknowledged == nil || len(d.redeliver[id]) > 0 {
			continue
		}
		age := min(d.expired[id], h.end-m.first.Begin) // The clock of the process can be wrong.
		f.judged++
		window := slices.MinFunc(d.revisions, func(a, b *revision) int { return int(a.Window - b.Window) }).Window
		suspended, _ := d.suspended(m.acknowledged.At, m.first.Begin+age)
		if early := window + suspended - 2*timeout - age; early > 0 {
			f.violated([]*Line{m.acknowledged, d.letters[id]}, "message %s became a dead letter %v before the end of its retry window", id,
				early.Round(time.Millisecond))
		}
	}
}

// judgeWait compares the time from the acceptance of each message to its first request, or to the end, with the bound. A
// fault of all namespaces, or of its own, ends before the time begins.
func judgeWait(h *History, f *finding) { h.judgeDelay(f, false) }

// judgeIsolation is judgeWait of the messages during the fault of another namespace.
func judgeIsolation(h *History, f *finding) { h.judgeDelay(f, true) }

func (h *History) judgeDelay(f *finding, foreign bool) {
	for _, m := range h.sorted() {
		if m.acknowledged == nil {
			continue
		}
		for _, name := range m.Due {
			d := h.destination(name)
			since, until := m.acknowledged.At, h.end
			if a := h.discards(d, m.first); a != nil {
				until = max(since, a.removing.At)
			}
			proof := []*Line{m.acknowledged}
			if got := d.got[m.ID]; len(got) > 0 {
				first := slices.MinFunc(got, func(a, b *receipt) int { return int(a.Begin - b.Begin) })
				until, proof = first.Begin, append(proof, first.Line)
			}
			since, others := h.undisturbed(d, m.first.Begin, since, until, false)
			if foreign && others == nil {
				continue
			}
			f.judged++
			if wait := until - since; wait > h.plan.Wait {
				f.violated(append(proof, others...), "message %s waited %v for a request to %s, at most %v are stated", m.ID, wait.Round(time.Millisecond), name, h.plan.Wait)
			}
		}
	}
}

// undisturbed returns the later one of a time and the end of what can delay requests to a destination in an interval: its
// absences, and faults of all namespaces, of its own or, with url, of one of its URLs. others are the lines of the faults
// of other namespaces.
func (h *History) undisturbed(d *destination, from, since, until time.Duration, url bool) (_ time.Duration, others []*Line) {
	for _, s := range h.spans {
		switch {
		case !s.overlaps(from, until), s.Destination != "" && (!url || s.Destination != d.name): // Another URL works.
		case s.Namespace != "" && s.Namespace != d.namespace:
			others = append(others, s.lines...)
		default:
			since = max(since, min(s.end, until))
		}
	}
	for _, a := range d.absences {
		if a.removing.At < until && a.end() >= from {
			since = max(since, min(a.end(), until))
		}
	}
	return since, others
}

func judgeLedger(h *History, f *finding) {
	for _, l := range h.ledgers {
		g := l.Ledger
		f.judged++
		if g.Accepted != g.Delivered+g.Filtered+g.Omitted+g.DeadLettered+g.Discarded+g.Pending {
			f.violated([]*Line{l}, "%s: accepted is not the sum of the outcomes", g.Name)
		}
	}
	for _, d := range h.sortedDestinations() {
		if d.final == nil {
			continue
		}
		due, done := 0, 0
		var last *Line
		for _, m := range h.sent {
			if m.acknowledged != nil && slices.Contains(m.Due, d.name) && !d.absent(m.first.Begin, m.acknowledged.At) {
				due, last = due+1, m.acknowledged
			}
		}
		for id := range d.got {
			done += len(d.done(id))
		}
		f.judged++
		if g := d.final.Ledger; g.Accepted < due {
			f.violated([]*Line{d.final, last}, "%s: %d messages were acknowledged, and %d accepted", d.name, due, g.Accepted)
		} else if g.Delivered > done {
			f.violated([]*Line{d.final}, "%s: its receivers acknowledged %d requests, and %d messages count as delivered", d.name, done, g.Delivered)
		}
	}
}

func judgeFall(h *History, f *finding) {
	before := map[string]*Line{}
	for _, l := range h.ledgers {
		g := l.Ledger
		key := g.Name
		if g.Status {
			continue // A status has its delay.
		}
		last := before[key]
		if before[key] = l; last == nil {
			continue
		}
		f.judged++
		was := last.Ledger
		d := h.destination(g.Name)
		fell := max(was.Delivered-g.Delivered, was.Filtered-g.Filtered, was.Omitted-g.Omitted, was.DeadLettered-g.DeadLettered,
			was.Accepted-g.Accepted-h.redeliveredElsewhere(d, last.At))
		if fell <= 0 {
			continue
		}
		most := 0
		for _, s := range h.spans {
			if s.Repeats != Unrecorded || !s.overlaps(last.At, l.At) {
				continue
			}
			since := h.lastBefore(s.begin) - h.plan.Unrecorded
			inFlight, _, _ := d.largest()
			most += inFlight
			for _, r := range h.got {
				if r.At >= since && r.Begin <= s.end && r.to == d {
					most++
				}
			}
		}
		if fell > most {
			f.violated([]*Line{last, l}, "%s: a number of the ledger fell by %d, at most %d were in flight or not recorded", g.Name, fell, most)
		}
	}
}

// redeliveredElsewhere is the number of messages that were redelivered to the other destinations of a namespace until a
// time. A destination counts them as accepted until it has read past them.
func (h *History) redeliveredElsewhere(d *destination, until time.Duration) (n int) {
	for _, other := range h.destinations {
		for _, calls := range other.redeliver {
			for _, l := range calls {
				if other != d && other.namespace == d.namespace && l.Begin <= until {
					n++
				}
			}
		}
	}
	return n
}

func judgeStatus(h *History, f *finding) {
	for _, l := range h.ledgers {
		d := h.destinations[l.Ledger.Name]
		if !l.Ledger.Status || d == nil {
			continue
		}
		since := l.At - h.plan.Status
		if slices.ContainsFunc(h.spans, func(s *span) bool { return s.overlaps(since, l.At) }) {
			continue // The delay begins again after a fault.
		}
		most := 0
		var seen []*receipt
		for _, id := range slices.Sorted(maps.Keys(d.got)) {
			done := d.done(id)
			most += len(done)
			if len(done) > 0 && done[0].At <= since && d.letters[id] == nil { // The result may be lost before it is one.
				seen = append(seen, done[0])
			}
		}
		if f.judged++; l.Ledger.Delivered < len(seen) {
			seen = slices.DeleteFunc(seen, func(r *receipt) bool { return h.repeated(r, l.At) }) // Repeats may wait for long.
		}
		if l.Ledger.Delivered < len(seen) || l.Ledger.Delivered > most {
			f.violated(lines(seen, l), "%s: the status has %d delivered messages, its receivers got %d before its delay and %d in all", d.name, l.Ledger.Delivered, len(seen), most)
		}
	}
}

// judgeReady judges each time for which all probes of a process report that it is ready.
func judgeReady(h *History, f *finding) {
	ready := map[string]*Line{}
	for _, l := range h.probes {
		p := l.Probe
		begin := ready[p.Process]
		switch {
		case !p.Ready:
			delete(ready, p.Process)
			continue
		case begin == nil:
			ready[p.Process] = l
			continue
		case l.At-begin.At < h.plan.Ready:
			continue
		}
		delete(ready, p.Process)
		var refused *Line
		worked := false
		for _, c := range h.calls {
			if c.Call.Process == p.Process && c.Call.Valid && c.At >= begin.At && c.Begin <= l.At {
				if accepted(c.Call.Status) {
					worked = true
					break
				}
				refused = c
			}
		}
		switch {
		case worked:
			f.judged++
		case refused != nil:
			f.judged++
			f.violated([]*Line{begin, refused, l}, "%s reported for %v that it is ready, and accepted no call", p.Process,
				(l.At - begin.At).Round(time.Millisecond))
		}
	}
}
