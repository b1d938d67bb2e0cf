package witness

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Result is what the journals say about a clause.
type Result string

// The results of a clause. Unclear is the result of each clause whose journals are cut, out of order or by two
// clocks, unless its violation is proved by the lines that exist, and of a clause about which no line says anything.
const (
	Holds    Result = "holds"
	Violated Result = "violated"
	Unclear  Result = "unclear"
)

// Verdict is the result of a clause.
type Verdict struct {
	Clause Clause
	Result Result
	// Judged is the number of facts that were compared, and Reason the first one that is wrong or unclear.
	Judged int
	Reason string
	// Lines prove a violation.
	Lines []string
	// Count is the number of violations.
	Count int
}

// String returns the verdict, with the lines that prove a violation.
func (v Verdict) String() string {
	text := fmt.Sprintf("%s: %s", v.Clause.ID, v.Result)
	if v.Reason != "" {
		text += ": " + v.Reason
	}
	if v.Count > 1 {
		text += fmt.Sprintf(", and %d more", v.Count-1)
	}
	for _, l := range v.Lines {
		text += "\n    " + l[:min(len(l), 600)]
	}
	return text
}

// Clause is a promise, which is a sentence of docs/reliability.md.
type Clause struct {
	ID, Sentence string
	// needs are the journals that must be complete for Holds.
	needs []Role
	// present is true if lines that exist prove a violation, whatever is missing.
	present bool
	// untimed is true if no times of two journals are compared.
	untimed bool
	judge   func(*History, *finding)
}

// Clauses are all clauses, in the order of docs/reliability.md.
var Clauses = []Clause{
	{ID: "outcome", Sentence: "An acknowledged message has exactly one outcome at each destination that is due: it is delivered, a dead letter, or discarded after a deletion.",
		needs: []Role{Sender, Receiver, Objects, Faults, Ledgers}, judge: judgeOutcome},
	{ID: "accepted", Sentence: "Only messages that were accepted are delivered, and only to destinations that are due.",
		needs: []Role{Sender, Receiver, Objects}, untimed: true, judge: judgeAccepted},
	{ID: "refusal", Sentence: "A valid call of a Source in effect is never rejected for good.",
		needs: []Role{Sender}, present: true, untimed: true, judge: judgeRefusal},
	{ID: "repeats", Sentence: "A message is delivered twice only because of a fault: at most the messages in flight, and the messages whose results were not yet recorded.",
		needs: []Role{Sender, Receiver, Objects, Faults}, judge: judgeRepeats},
	{ID: "config", Sentence: "The URL, the static headers and the signatures of a request belong to one config that was in effect when the attempt began, never of one whose successor was confirmed before.",
		needs: []Role{Receiver, Objects, Faults}, judge: judgeConfig},
	{ID: "signed", Sentence: "A destination with a signing scheme gets no request without a signature.",
		needs: []Role{Receiver, Objects}, untimed: true, judge: judgeSigned},
	{ID: "denied", Sentence: "An address that the policy denies gets no request.",
		needs: []Role{Receiver, Objects}, present: true, untimed: true, judge: judgeDenied},
	{ID: "bytes", Sentence: "All requests of a destination for a message have the same bytes, with the fields of the call that it does not drop.",
		needs: []Role{Sender, Receiver, Objects}, untimed: true, judge: judgeBytes},
	{ID: "urls", Sentence: "Each URL of a destination gets each delivered message at least once, unless the destination is removed.",
		needs: []Role{Sender, Receiver, Objects, Faults, Ledgers}, judge: judgeURLs},
	{ID: "window", Sentence: "Retries end with the retry window, and not before; it does not include suspensions.",
		needs: []Role{Sender, Receiver, Objects}, judge: judgeWindow},
	{ID: "wait", Sentence: "A message waits for a working receiver no longer than for a takeover and the next probe.",
		needs: []Role{Sender, Receiver, Objects, Faults}, judge: judgeWait},
	{ID: "isolation", Sentence: "Harm to one namespace does not delay the messages of another.",
		needs: []Role{Sender, Receiver, Objects, Faults}, judge: judgeIsolation},
	{ID: "ids", Sentence: "Two different messages never have the same id or the same Idempotency-Key.",
		needs: []Role{Receiver}, present: true, untimed: true, judge: judgeIDs},
	{ID: "ledger", Sentence: "For each Source and each destination, accepted is the sum of the outcomes.",
		needs: []Role{Sender, Receiver, Objects, Ledgers}, untimed: true, judge: judgeLedger},
	{ID: "fall", Sentence: "The numbers of a ledger fall only after the loss of a process, at most by the messages that were in flight or whose results were not yet recorded; accepted also counts what is redelivered to another destination of the Source, until it is read.",
		needs: []Role{Sender, Receiver, Objects, Faults, Ledgers}, judge: judgeFall},
	{ID: "once", Sentence: "Each change of an audience, each deletion and each redelivery is done once.",
		needs: []Role{Sender, Receiver, Objects, Ledgers}, untimed: true, judge: judgeOnce},
	{ID: "status", Sentence: "The status of a destination reports what its receivers got, within its delay.",
		needs: []Role{Receiver, Objects, Faults, Ledgers}, judge: judgeStatus},
	{ID: "ready", Sentence: "A process that reports that it is ready accepts calls.",
		needs: []Role{Sender, Ledgers}, judge: judgeReady},
}

// Check judges all clauses.
func Check(h *History) (all []Verdict) {
	for _, c := range Clauses {
		f := &finding{}
		c.judge(h, f)
		v := Verdict{Clause: c, Judged: f.judged}
		flaw := h.flaw(c)
		clocks := ""
		if len(h.clocks) > 1 && !c.untimed {
			clocks = fmt.Sprintf("the journals have %d clocks", len(h.clocks))
		}
		switch {
		case f.violations > 0 && clocks == "" && (flaw == "" || c.present):
			v.Result, v.Reason, v.Lines, v.Count = Violated, f.violation, f.proof, f.violations
		case flaw+clocks != "":
			v.Result, v.Reason = Unclear, cmp.Or(flaw, clocks)
		case f.doubt != "":
			v.Result, v.Reason = Unclear, f.doubt
		case f.judged == 0:
			v.Result, v.Reason = Unclear, "no line is about it"
		default:
			v.Result = Holds
		}
		all = append(all, v)
	}
	return all
}

func (h *History) flaw(c Clause) string {
	for _, r := range c.needs {
		if h.flaws[r] != "" {
			return h.flaws[r]
		}
	}
	return ""
}

// finding collects the facts of a clause.
type finding struct {
	judged, violations int
	violation, doubt   string
	proof              []string
}

// violated notes a violation, with the lines that prove it.
func (f *finding) violated(lines []*Line, format string, args ...any) {
	if f.violations++; f.violations > 1 {
		return
	}
	f.violation = fmt.Sprintf(format, args...)
	for _, l := range lines {
		if l != nil && len(f.proof) < 6 {
			f.proof = append(f.proof, l.text)
		}
	}
}

// unclear notes that the journals do not decide a fact.
func (f *finding) unclear(format string, args ...any) {
	if f.doubt == "" {
		f.doubt = fmt.Sprintf(format, args...)
	}
}

// index has what clauses look up.
type index struct {
	destinations map[string]*destination // by name
	byURL        map[string]*destination
	sent         map[string]*message // by messageId
	spans        []*span
	got          []*receipt
}

// destination is a destination with all its revisions.
type destination struct {
	name, namespace string
	revisions       []*revision
	absences        []*absence
	denied          map[string]bool
	// got are its receipts, by identity, and then by URL.
	got map[string][]*receipt
	// letters are its dead letters; nil if they are not known. final is its last ledger.
	letters map[string]*Line
	final   *Line
	// expired are Letters.Expired.
	expired map[string]time.Duration
	// redeliver are the redeliveries of its dead letters, by identity.
	redeliver map[string][]*Line
}

type revision struct {
	number             int
	applied, confirmed *Line
	*Destination
}

// receipt is a request with what its body says.
type receipt struct {
	*Line
	to   *destination
	body body
	// id is the messageId, or the key of a message without one.
	id string
}

type body struct {
	Type      string `json:"type"`
	MessageID string `json:"messageId"`
	UserID    string `json:"userId"`
}

// message is a message that was sent, maybe more than once.
type message struct {
	Message
	// first is the first request, and acknowledged the first that was acknowledged.
	first, acknowledged *Line
	// open is true if a request may have been accepted.
	open bool
}

// span is a fault from its begin to its end.
type span struct {
	*Fault
	begin time.Duration
	end   time.Duration
	lines []*Line
}

func (s *span) overlaps(from, to time.Duration) bool { return s.begin <= to && s.end >= from }

func (h *History) build() {
	h.index = index{destinations: map[string]*destination{}, byURL: map[string]*destination{}, sent: map[string]*message{}}
	for _, l := range h.objects {
		h.addObject(l)
	}
	for _, l := range h.letters {
		d := h.destination(l.Letters.Name)
		d.letters, d.expired = map[string]*Line{}, l.Letters.Expired
		for _, id := range l.Letters.IDs {
			d.letters[id] = l
		}
	}
	for _, l := range h.ledgers {
		if d := h.destinations[l.Ledger.Name]; d != nil && l.Ledger.Final && !l.Ledger.Status {
			d.final = l
		}
	}
	open := map[int]*span{}
	for _, l := range h.faults {
		if s := open[l.Fault.ID]; s != nil && l.Fault.End {
			s.end, s.lines = l.At, append(s.lines, l)
		} else if !l.Fault.End {
			s = &span{Fault: l.Fault, begin: cmp.Or(l.Begin, l.At), end: h.end, lines: []*Line{l}}
			open[l.Fault.ID], h.spans = s, append(h.spans, s)
		}
	}
	for _, l := range h.receipts {
		h.addReceipt(l)
	}
	for _, l := range h.calls {
		h.addCall(l)
	}
}

func (h *History) destination(name string) *destination {
	d := h.destinations[name]
	if d == nil {
		namespace, _, _ := strings.Cut(name, "/")
		d = &destination{name: name, namespace: namespace, denied: map[string]bool{}, got: map[string][]*receipt{},
			redeliver: map[string][]*Line{}}
		h.destinations[name] = d
	}
	return d
}

func (h *History) addObject(l *Line) {
	o, d := l.Object, h.destination(l.Object.Name)
	i := slices.IndexFunc(d.revisions, func(r *revision) bool { return r.number == o.Revision })
	d.addChange(l)
	switch {
	case o.Action == Applied && i < 0 && o.Destination != nil:
		d.revisions = append(d.revisions, &revision{number: o.Revision, applied: l, Destination: o.Destination})
		for _, url := range o.Destination.URLs {
			h.byURL[url] = d
		}
		for _, url := range o.Destination.Denied {
			h.byURL[url], d.denied[url] = d, true
		}
	case o.Action == Confirmed && i >= 0 && d.revisions[i].confirmed == nil:
		d.revisions[i].confirmed = l
	}
}

func (h *History) addReceipt(l *Line) {
	r := &receipt{Line: l, to: h.byURL[l.Receipt.URL]}
	_ = json.Unmarshal([]byte(l.Receipt.Body), &r.body) // An invalid body has no fields of the call.
	r.id = cmp.Or(r.body.MessageID, l.Receipt.Key)
	h.got = append(h.got, r)
	if r.to != nil {
		r.to.got[r.id] = append(r.to.got[r.id], r)
	}
}

func (h *History) addCall(l *Line) {
	for i := range l.Call.Messages {
		m := l.Call.Messages[i]
		if l.Call.Kind == Redelivery {
			for _, to := range slices.Concat(m.Due, m.May) {
				d := h.destination(to)
				d.redeliver[m.ID] = append(d.redeliver[m.ID], l)
			}
		}
		if m.ID == "" || l.Call.Kind == Redelivery {
			continue
		}
		s := h.sent[m.ID]
		if s == nil {
			s = &message{Message: m, first: l}
			h.sent[m.ID] = s
		}
		s.May = append(s.May, m.May...)
		if s.open = s.open || undecided(l.Call.Status); s.acknowledged == nil && accepted(l.Call.Status) {
			s.acknowledged = l
		}
	}
}

func accepted(status int) bool { return status >= 200 && status < 300 }

// undecided reports whether a call with an answer may have been stored, now or later: it was not rejected for good.
func undecided(status int) bool {
	return status == 0 || accepted(status) || status >= 500 || status == 408 || status == 429
}

// largest returns the largest in flight, timeout and window of the revisions.
func (d *destination) largest() (inFlight int, timeout, window time.Duration) {
	for _, r := range d.revisions {
		inFlight, timeout, window = max(inFlight, r.InFlight), max(timeout, r.Timeout), max(window, r.Window)
	}
	return inFlight, timeout, window
}

// suspended returns how long the destination was suspended in an interval, at least and at most.
func (d *destination) suspended(since, until time.Duration) (least, most time.Duration) {
	for i, r := range d.revisions {
		if !r.Suspended {
			continue
		}
		end, resumed := until, until
		for _, next := range d.revisions[i+1:] {
			if end = min(end, next.applied.At); !next.Suspended && next.confirmed != nil {
				resumed = min(resumed, next.confirmed.At)
				break
			}
		}
		if r.confirmed != nil {
			least += max(0, end-max(since, r.confirmed.At))
		}
		most += max(0, resumed-max(since, r.applied.At))
	}
	return least, most
}

// done returns the receipts of a message that were answered 2xx in time.
func (d *destination) done(id string) (all []*receipt) {
	_, timeout, _ := d.largest()
	for _, r := range d.got[id] {
		if accepted(r.Receipt.Status) && (timeout == 0 || r.At-r.Begin <= timeout) {
			all = append(all, r)
		}
	}
	return all
}

// pending reports whether the destination may have messages at the end that are pending, or dead letters that are not listed.
func (d *destination) pending() bool {
	return d.final == nil || d.final.Ledger.Pending > 0 || d.letters == nil && d.final.Ledger.DeadLettered > 0
}

// sorted returns the messages in the order of their first requests.
func (h *History) sorted() []*message {
	return slices.SortedFunc(maps.Values(h.sent), func(a, b *message) int {
		return cmp.Or(cmp.Compare(a.first.At, b.first.At), cmp.Compare(a.ID, b.ID))
	})
}

// lines returns the lines of receipts behind others.
func lines(of []*receipt, more ...*Line) []*Line {
	for _, r := range of {
		more = append(more, r.Line)
	}
	return more
}

// sortedDestinations returns the destinations by name.
func (h *History) sortedDestinations() []*destination {
	return slices.SortedFunc(maps.Values(h.destinations), func(a, b *destination) int { return strings.Compare(a.name, b.name) })
}
