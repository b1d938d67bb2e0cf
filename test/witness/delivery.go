package witness

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"
)

func judgeOutcome(h *History, f *finding) {
	discarded := map[*destination][]*Line{}
	for _, m := range h.sorted() {
		if m.acknowledged == nil {
			continue
		}
		for _, name := range m.Due {
			d := h.destination(name)
			f.judged++
			done, letter := d.done(m.ID), d.letters[m.ID]
			switch {
			case len(done) > 0 && letter != nil && len(d.redeliver[m.ID]) == 0 && !h.repeated(done[0], h.end):
				f.violated([]*Line{m.acknowledged, done[0].Line, letter}, "message %s is delivered to %s, and a dead letter", m.ID, name)
			case len(done) > 0 || letter != nil:
			case h.discards(d, m.first) != nil:
				if m.acknowledged.At <= h.discards(d, m.first).removing.At+h.plan.Grace { // Later ones are not due.
					discarded[d] = append(discarded[d], m.acknowledged)
				}
			case d.pending():
				f.unclear("%s may still have message %s: no ledger with 0 pending messages at its end, or no list of dead letters", name, m.ID)
			default:
				f.violated(append(lines(d.got[m.ID], m.acknowledged), d.final), "message %s was acknowledged, and is neither delivered to %s nor a dead letter", m.ID, name)
			}
		}
	}
	for d, lost := range discarded {
		h.judgeDiscarded(f, d, lost)
	}
}

// repeated reports whether the result of a request may not have been recorded, because of a fault before a time.
func (h *History) repeated(r *receipt, before time.Duration) bool {
	return slices.ContainsFunc(h.spans, func(s *span) bool { return s.begin <= before && h.unrecorded(s, r) })
}

func judgeAccepted(h *History, f *finding) {
	for _, r := range h.got {
		m := h.sent[r.body.MessageID]
		if m == nil && h.demanded(r) != "" {
			continue // It is of a deletion or an audience, which judgeOnce counts.
		}
		f.judged++
		switch {
		case m == nil:
			f.violated([]*Line{r.Line}, "message %s was not sent", r.id)
		case !m.open:
			f.violated([]*Line{m.first, r.Line}, "message %s was rejected, and delivered", r.id)
		case r.to != nil && !slices.Contains(m.Due, r.to.name) && !slices.Contains(m.May, r.to.name):
			f.violated([]*Line{m.first, r.Line}, "message %s is not due at %s", r.id, r.to.name)
		}
	}
}

func judgeRefusal(h *History, f *finding) {
	for _, l := range h.calls {
		if !l.Call.Valid {
			continue
		}
		if h.destinations[l.Call.Source].absent(l.Begin, l.At) {
			continue
		}
		if f.judged++; !undecided(l.Call.Status) {
			f.violated([]*Line{l}, "a valid call to %s was answered %d", l.Call.Process, l.Call.Status)
		}
	}
}

// unrecorded reports whether the result of a request may be unknown after a fault: the request was in flight at its
// begin or during it, or the result was not yet recorded.
func (h *History) unrecorded(s *span, r *receipt) bool {
	if s.Repeats == "" || s.Namespace != "" && (r.to == nil || s.Namespace != r.to.namespace) {
		return false
	}
	since := s.begin
	if s.Repeats == Unrecorded {
		since = h.lastBefore(s.begin) - h.plan.Unrecorded
	}
	_, timeout, _ := r.to.largest()
	return r.At >= since-timeout && r.Begin <= s.end+timeout
}

// lastBefore is the begin of the last request before a moment: an owner without requests records nothing.
func (h *History) lastBefore(at time.Duration) (last time.Duration) {
	for _, r := range h.got { // They are sorted by their answers.
		if r.Begin <= at {
			last = max(last, r.Begin)
		}
	}
	return last
}

func judgeRepeats(h *History, f *finding) {
	type place struct {
		span *span
		url  string
	}
	count := map[place][]*receipt{}
	for _, d := range h.sortedDestinations() {
		for _, id := range slices.Sorted(maps.Keys(d.got)) {
			first := map[string]*receipt{}
			for _, r := range d.done(id) {
				f.judged++
				before := first[r.Receipt.URL]
				if first[r.Receipt.URL] = r; before == nil {
					continue
				}
				between := func(l *Line) bool { return l.Begin > before.Begin && l.Begin <= r.Begin }
				if slices.ContainsFunc(d.redeliver[id], between) {
					continue
				}
				i := len(h.spans) - 1 // The last fault that can be the reason.
				for ; i >= 0 && (h.spans[i].begin > r.At || !h.unrecorded(h.spans[i], before)); i-- {
				}
				if i < 0 {
					f.violated([]*Line{before.Line, r.Line}, "message %s is delivered twice to %s without a fault that repeats it", id, r.Receipt.URL)
					continue
				}
				at := place{h.spans[i], r.Receipt.URL}
				count[at] = append(count[at], before, r)
			}
		}
	}
	for at, pairs := range count {
		most, _, _ := h.byURL[at.url].largest()
		if at.span.Repeats == Unrecorded {
			for _, r := range h.got {
				if r.Receipt.URL == at.url && r.Begin <= at.span.begin && h.unrecorded(at.span, r) {
					most++
				}
			}
		}
		if got := len(pairs) / 2; got > most {
			f.violated(lines(pairs[:4], at.span.lines...), "the fault %q repeats %d messages at %s, at most %d were in flight or not recorded", at.span.Name, got, at.url, most)
		}
	}
}

// inEffect returns why a revision was not in effect when an attempt began, and the line that proves it.
func (d *destination) inEffect(r *revision, at *receipt) (string, *Line) {
	_, timeout, _ := d.largest()
	if r.applied.At > at.At {
		return "before it was applied", r.applied
	}
	for _, next := range d.revisions {
		if next.number > r.number && next.confirmed != nil && next.confirmed.At < at.Begin-timeout {
			return "after its successor was confirmed", next.confirmed
		}
	}
	if removed := d.without(at.Begin, timeout); removed != nil {
		return "after it was removed", removed
	}
	return "", nil
}

func judgeConfig(h *History, f *finding) {
	for _, r := range h.got {
		if f.judged++; r.to == nil {
			f.violated([]*Line{r.Line}, "no destination has the URL %s", r.Receipt.URL)
			continue
		}
		why, proof, matches := "", []*Line{r.Line}, false
		for _, revision := range r.to.revisions {
			bad := revision.differs(r.Receipt)
			line := revision.applied
			if bad == "" {
				bad, line = r.to.inEffect(revision, r)
			}
			if bad == "" {
				matches = true
				break
			}
			if why == "" || slices.Contains(revision.URLs, r.Receipt.URL) {
				why, proof = fmt.Sprintf("revision %d: %s", revision.number, bad), []*Line{r.Line, line}
			}
		}
		if matches || r.to.denied[r.Receipt.URL] {
			continue
		}
		if i := slices.IndexFunc(h.spans, func(s *span) bool {
			return s.Repeats == Unrecorded && s.overlaps(r.Begin-time.Minute, r.Begin)
		}); i >= 0 && strings.Contains(why, "successor") && h.frozen(h.spans[i], r) {
			f.unclear("a request to %s may have begun before the fault %q", r.Receipt.URL, h.spans[i].Name)
			continue
		}
		f.violated(proof, "a request to %s matches no config in effect (%s)", r.Receipt.URL, why)
	}
}

// frozen reports whether a request may have begun before a fault that stopped its process, and arrived at its end.
func (h *History) frozen(s *span, r *receipt) bool {
	_, timeout, _ := r.to.largest()
	return strings.Contains(s.Name, "SIGSTOP") && r.Begin >= s.end && r.Begin <= s.end+timeout
}

// differs returns what a request has that a revision has not.
func (r *revision) differs(got *Receipt) string {
	if !slices.Contains(r.URLs, got.URL) {
		return "it has another URL"
	}
	for name, value := range r.Headers {
		if got.Headers[name] != value {
			return fmt.Sprintf("the header %s is %q", name, got.Headers[name])
		}
	}
	if a, b := slices.Sorted(slices.Values(r.Keys)), slices.Sorted(slices.Values(got.Signed)); !slices.Equal(a, b) {
		return fmt.Sprintf("the signatures hold with %q, not with %q", b, a)
	}
	return ""
}

func judgeSigned(h *History, f *finding) {
	for _, r := range h.got {
		if r.to == nil || len(r.to.revisions) == 0 || slices.ContainsFunc(r.to.revisions, func(v *revision) bool { return len(v.Keys) == 0 }) {
			continue
		}
		if f.judged++; len(r.Receipt.Signed) == 0 {
			f.violated([]*Line{r.Line, r.to.revisions[0].applied}, "no signature of a request to %s holds", r.Receipt.URL)
		}
	}
}

func judgeDenied(h *History, f *finding) {
	for _, d := range h.destinations {
		f.judged += len(d.denied)
	}
	for _, r := range h.got {
		if r.to != nil && r.to.denied[r.Receipt.URL] {
			f.violated([]*Line{r.Line}, "the denied address %s got a request", r.Receipt.URL)
		}
	}
}

func judgeBytes(h *History, f *finding) {
	first := map[string]*receipt{}
	for _, r := range h.got {
		f.judged++
		m := h.sent[r.body.MessageID]
		if before := first[r.id]; before != nil && before.Receipt.Body != r.Receipt.Body && before.to == r.to {
			f.violated([]*Line{before.Line, r.Line}, "two requests for message %s have different bodies", r.id)
		} else if before == nil {
			first[r.id] = r
		}
		if m == nil {
			continue
		}
		if field := differing(m.Content, []byte(r.Receipt.Body), r.to); field != "" {
			f.violated([]*Line{m.first, r.Line}, "the request for message %s lacks the field %s of the call, or has it in spite of its redaction", r.id, field)
		}
	}
}

// differing returns a field of want that got has not, or has although the destination drops it.
func differing(want, got []byte, to *destination) string {
	var wanted, found map[string]any
	if json.Unmarshal(want, &wanted) != nil {
		return ""
	}
	if json.Unmarshal(got, &found) != nil {
		return "(no JSON object)"
	}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		if to != nil && len(to.revisions) > 0 && slices.Contains(to.revisions[0].Dropped, name) {
			wanted[name] = nil
		}
		if !reflect.DeepEqual(wanted[name], found[name]) {
			return name
		}
	}
	return ""
}

func judgeURLs(h *History, f *finding) {
	for _, d := range h.sortedDestinations() {
		endpoints := d.endpoints()
		for _, id := range slices.Sorted(maps.Keys(d.got)) {
			done := d.done(id)
			if len(done) == 0 {
				continue
			}
			sent := done[0].Line
			if m := h.sent[id]; m != nil {
				sent = m.first
			}
			if a := h.discards(d, sent); a != nil {
				if since, _ := h.undisturbed(d, sent.Begin, done[0].At, a.removing.At, true); a.removing.At-since <= h.plan.Wait {
					continue
				}
			}
			for _, urls := range endpoints {
				f.judged++
				if slices.ContainsFunc(d.got[id], func(r *receipt) bool { return slices.Contains(urls, r.Receipt.URL) }) {
					continue
				}
				if d.pending() || d.final.Ledger.Unsent > 0 || d.letters[id] != nil {
					f.unclear("%s may still get message %s, or it is a dead letter", urls, id)
					continue
				}
				f.violated(append(lines(done[:1]), d.final), "message %s is delivered, and %s never got it", id, urls)
			}
		}
	}
}

// endpoints are the URLs of all revisions, for each position that all revisions have.
func (d *destination) endpoints() (all [][]string) {
	for i := 0; len(d.revisions) > 0; i++ {
		var urls []string
		for _, r := range d.revisions {
			if i >= len(r.URLs) {
				return all
			}
			urls = append(urls, r.URLs[i])
		}
		all = append(all, urls)
	}
	return all
}

func judgeIDs(h *History, f *finding) {
	byKey, byID := map[string]*receipt{}, map[string]*receipt{}
	for _, r := range h.got {
		f.judged++
		name := r.body.MessageID
		if name == "" {
			name = r.body.Type + " of " + r.body.UserID
		}
		if before := byKey[r.Receipt.Key]; before != nil &&
			(before.body.MessageID != r.body.MessageID || before.body.UserID != r.body.UserID || before.body.Type != r.body.Type) {
			f.violated([]*Line{before.Line, r.Line}, "the messages %q and %q have the Idempotency-Key %q", before.id, name, r.Receipt.Key)
		}
		byKey[r.Receipt.Key] = r
		if r.body.MessageID == "" {
			continue
		}
		if before := byID[name]; before != nil && (before.Receipt.Key != r.Receipt.Key || before.body.UserID != r.body.UserID ||
			before.body.Type != r.body.Type) {
			f.violated([]*Line{before.Line, r.Line}, "two messages have the messageId %q", name)
		}
		byID[name] = r
	}
}

// demanded returns the content of a request of a deletion or an audience that demands a message without an id.
func (h *History) demanded(r *receipt) string {
	for _, l := range h.calls {
		for i := range l.Call.Messages {
			if m := &l.Call.Messages[i]; m.ID == "" && differing(m.Content, []byte(r.Receipt.Body), r.to) == "" {
				return string(m.Content)
			}
		}
	}
	return ""
}

func judgeOnce(h *History, f *finding) {
	for _, d := range h.sortedDestinations() {
		h.judgeRedelivered(f, d)
	}
	type demand struct {
		to, content string
	}
	want, most, line := map[demand]int{}, map[demand]int{}, map[demand]*Line{}
	for _, l := range h.calls {
		for i := range l.Call.Messages {
			m := &l.Call.Messages[i]
			for _, to := range m.Due {
				if m.ID != "" {
					continue
				}
				at := demand{to, string(m.Content)}
				most[at]++
				if line[at] = l; accepted(l.Call.Status) && h.discards(h.destination(to), l) == nil {
					want[at]++
				}
			}
		}
	}
	got := map[demand]map[string]*receipt{}
	for _, r := range h.got {
		if h.sent[r.body.MessageID] != nil || r.to == nil {
			continue
		}
		at := demand{r.to.name, h.demanded(r)}
		if got[at] == nil {
			got[at] = map[string]*receipt{}
		}
		if got[at][r.id] = r; most[at] == 0 && (at.content != "" || r.body.Type == "delete") {
			f.judged++
			f.violated([]*Line{r.Line}, "%s got a message that no call demanded there", at.to)
		}
	}
	for at, n := range most {
		f.judged++
		d, ended := h.destination(at.to), 0
		proof := []*Line{line[at]}
		for _, id := range slices.Sorted(maps.Keys(got[at])) {
			proof = append(proof, got[at][id].Line)
			if len(d.done(id)) > 0 || d.letters[id] != nil {
				ended++
			}
		}
		switch {
		case len(got[at]) > n:
			f.violated(proof, "%s got %d messages with %s, %d were demanded", at.to, len(got[at]), at.content, n)
		case ended < want[at] && d.pending():
			f.unclear("%s may still have a message with %s", at.to, at.content)
		case ended < want[at]:
			f.violated(append([]*Line{d.final}, proof...), "%d messages with %s ended at %s, %d were demanded", ended, at.content, at.to, want[at])
		}
	}
}

// judgeRedelivered judges that each message that was redelivered is delivered after it, or a dead letter again.
func (h *History) judgeRedelivered(f *finding, d *destination) {
	for _, id := range slices.Sorted(maps.Keys(d.redeliver)) {
		for _, l := range d.redeliver[id] {
			due := slices.ContainsFunc(l.Call.Messages, func(m Message) bool { return m.ID == id && slices.Contains(m.Due, d.name) })
			if !due || !accepted(l.Call.Status) || h.discards(d, l) != nil {
				continue
			}
			f.judged++
			switch {
			case slices.ContainsFunc(d.done(id), func(r *receipt) bool { return r.Begin >= l.Begin }) || d.letters[id] != nil:
			case d.pending():
				f.unclear("%s may still have the redelivered message %s, or it is a dead letter", d.name, id)
			default:
				f.violated(append(lines(d.got[id], l), d.final), "message %s was redelivered to %s, and has no outcome after it", id, d.name)
			}
		}
	}
}
