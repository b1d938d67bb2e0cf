package page

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"html/template"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/observed"
	"github.com/posthorn/posthorn/controllers/why"
)

const (
	maxProblems = 20
	// longList is a number of problems that are shown with a line each.
	longList = 6
	maxRows  = 200
)

// row is a destination in the overview.
type row struct {
	key
	numbers
	Link  string
	Cause *why.Finding
	// State is "problem", "notice" or "ok"; Words is the state in words.
	State, Words string
	Rate         string
	Spark        template.HTML
}

// problem is what an operator should look at.
type problem struct {
	// Object is the name of the object, and Link its page, if it has one.
	Object, Link string
	Text, Fix    string
	// Brief is the reason of failed deliveries and how long they fail. A long list shows it in place of Text, which the
	// page of the destination has.
	Brief string
}

type overview struct {
	Problems     []problem
	MoreProblems int
	Notices      []problem

	Pods, Silent                   int
	Accepting                      bool
	Used, Total                    int64
	Sources, Destinations          int
	Calls                          adminapi.SourceReport
	All                            numbers
	CallRate, SentRate, FailedRate string
	CallSpark, PendingSpark        template.HTML
	SentSpark, FailedSpark         template.HTML
	History                        bool

	Query    string
	Rows     []row
	MoreRows int

	SourceRows  []sourceRow
	MoreSources int
	Audiences   []audience
	Deletions   []deletion
}

// sourceRow is a Source in the overview, with the sums of its reports.
type sourceRow struct {
	key
	Calls        adminapi.SourceReport
	State, Words string
}

type audience struct {
	key
	Members, Unsent int64
	LastSync        time.Time
	Refusal         string
}

type deletion struct {
	key
	State, Words              string
	Total, Delivered, Pending int32
	Deadline                  time.Time
}

func (p *Page) newOverview(v view, query string) overview {
	o := overview{Query: query, Pods: v.pods, Silent: len(v.silent), Accepting: len(v.indices) > 0, Calls: v.calls(),
		Destinations: len(v.destinations)}
	for _, list := range v.sources {
		o.Sources += len(list)
	}
	for _, m := range v.problems {
		o.Problems = append(o.Problems, problem{Object: cmp.Or(m.Object, m.Position()), Text: "manifest rejected: " + m.Detail(),
			Fix: "correct the manifest"})
	}
	if v.missing != nil {
		o.Problems = append(o.Problems, problem{Object: "dispatchers", Text: "some are not connected: " + v.missing.Error(),
			Fix: "check their logs; their numbers are missing here"})
	}
	for _, pod := range slices.Sorted(maps.Keys(v.silent)) {
		o.Problems = append(o.Problems, problem{Object: "dispatcher " + pod, Text: "does not answer: " + v.silent[pod].Error(),
			Fix: "check its log; its last numbers are shown"})
	}
	for _, slot := range v.unowned {
		o.Accepting = false
		o.Problems = append(o.Problems, problem{Object: slotName(slot) + " of the log", Text: "has no owner: calls of its namespaces are answered 503", Fix: "a dispatcher takes it over within about 15 s; if none does, check their logs"})
	}
	full := false
	disks := map[string]int64{} // Several slots of a pod are on one disk.
	for _, pod := range slices.Sorted(maps.Keys(v.indices)) {
		x := v.indices[pod]
		object := "dispatcher " + pod
		if x.Pod != pod && x.Replication != nil { // A slot.
			object = pod + " of dispatcher " + x.Pod
		}
		o.Used, o.Total = o.Used+x.Storage.UsedBytes, o.Total+x.Storage.TotalBytes-disks[x.Pod]
		disks[x.Pod] = x.Storage.TotalBytes
		if !x.Ready {
			o.Accepting = false
			o.Problems = append(o.Problems, problem{Object: object, Text: "is not ready: it has not loaded a config yet", Fix: "check its log"})
		}
		if x.Storage.Pressure {
			o.Accepting = false
			full = true
			f := why.DiskFull(x, p.options.Namespace)
			o.Problems = append(o.Problems, problem{Object: object, Text: f.Text, Fix: f.Fix})
		}
		for _, c := range x.Configs {
			for _, d := range c.Discards {
				if d.Messages > 0 && p.shows(c.Namespace) {
					o.Notices = append(o.Notices, problem{Object: c.Namespace + "/" + d.Destination, Text: fmt.Sprintf("%s of Source %q will be discarded at %s", count(d.Messages, "pending message"), d.Source, clock(d.At)), Fix: "to keep them, create what was deleted again before that time"})
				}
			}
		}
	}
	p.mu.Lock()
	total, series := p.past.total.list(), map[key][]point{}
	for k, s := range p.past.series {
		series[k] = s.list()
	}
	p.mu.Unlock()
	o.History = len(total) > 1
	o.CallRate, o.SentRate, o.FailedRate = rate(total, accepted), rate(total, delivered), rate(total, failed)
	o.CallSpark, o.PendingSpark = spark("calls accepted", total, accepted), spark("messages pending", total, pending)
	o.SentSpark, o.FailedSpark = spark("messages delivered", total, delivered), spark("dead letters", total, failed)

	bySource := map[string]bool{}
	for _, k := range slices.SortedFunc(maps.Keys(v.destinations), compareKeys) {
		r := p.newRow(v, k)
		o.All.Ledger, o.All.Stored, o.All.Retrying = plus(o.All.Ledger, r.Ledger), o.All.Stored+r.Stored, o.All.Retrying+r.Retrying
		o.All.Oldest = observed.Earlier(o.All.Oldest, r.Oldest)
		r.Rate, r.Spark = rate(series[k], delivered), spark("messages delivered to "+k.Name, series[k], delivered)
		if query == "" || strings.Contains(k.String(), query) {
			o.Rows = append(o.Rows, r)
		}
		if r.Cause != nil && r.Cause.About != "Manifest" {
			// One cause of several destinations, such as a Source without calls, is one problem.
			if r.Cause.About == "Disk" && full {
				continue
			}
			if r.Cause.About == "Source" || r.Cause.About == "Disk" {
				if bySource[k.Namespace+r.Cause.Text] {
					continue
				}
				bySource[k.Namespace+r.Cause.Text] = true
			}
			found := problem{Object: k.String(), Link: r.Link, Text: r.Cause.Text, Fix: r.Cause.Fix}
			if r.Cause.About == "Endpoint" {
				found.Brief = brief(*r.Cause, v.now)
			}
			if r.Cause.Idle {
				o.Notices = append(o.Notices, found)
				continue
			}
			o.Problems = append(o.Problems, found)
		}
	}
	if text := why.UnknownKeys(v.unknownKeys, v.now); text != "" {
		o.Notices = append(o.Notices, problem{Object: "write keys", Text: text, Fix: "if the sender is yours, compare its write key with the Secret of the Source"})
	}
	if more := len(o.Notices) - maxProblems; more > 0 {
		o.Notices = append(o.Notices[:maxProblems], problem{Object: "more", Text: count(int64(more), "more notice")})
	}
	explainFew(o.Problems)
	slices.SortStableFunc(o.Problems, func(a, b problem) int { return cmp.Compare(a.Link, b.Link) })
	slices.SortFunc(o.Rows, worseFirst)
	if o.MoreProblems = max(0, len(o.Problems)-maxProblems); o.MoreProblems > 0 {
		o.Problems = o.Problems[:maxProblems]
	}
	if o.MoreRows = max(0, len(o.Rows)-maxRows); o.MoreRows > 0 {
		o.Rows = o.Rows[:maxRows]
	}
	o.SourceRows, o.Audiences, o.Deletions = newSources(v), newAudiences(v), newDeletions(v)
	if o.MoreSources = max(0, len(o.SourceRows)-maxRows); o.MoreSources > 0 {
		o.SourceRows = o.SourceRows[:maxRows]
	}
	return o
}

// newSources returns the Sources, the worst first.
func newSources(v view) (list []sourceRow) {
	for namespace, sources := range v.sources {
		for _, s := range sources {
			r := sourceRow{key: key{namespace, s.Name}, State: "ok"}
			for _, x := range v.indices {
				if n := x.Namespace(namespace); n != nil && n.Sources[s.Name] != nil {
					r.add(n.Sources[s.Name])
				}
			}
			ready := meta.FindStatusCondition(s.Status.Conditions, v1beta1.ConditionReady)
			switch {
			case ready != nil && ready.Status == metav1.ConditionFalse:
				r.State, r.Words = "problem", ready.Message
			case r.Calls.StoragePressure:
				r.State, r.Words = "problem", "rejects calls: the storage, the namespace's share or the Source's quota is full"
			case r.Calls.LastRejected.After(r.Calls.LastAccepted):
				r.State, r.Words = "notice", "rejected the last call"
			case r.Calls.LastAccepted.IsZero():
				r.Words = "no call since the start"
			default:
				r.Words = "accepting calls"
			}
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(a, b sourceRow) int {
		return cmp.Or(cmp.Compare(severity[a.State], severity[b.State]), cmp.Compare(b.Calls.Rejected, a.Calls.Rejected),
			cmp.Compare(b.Calls.Accepted, a.Calls.Accepted), compareKeys(a.key, b.key))
	})
	return list
}

// add adds the report of one dispatcher.
func (r *sourceRow) add(s *adminapi.SourceReport) {
	c := &r.Calls
	c.Accepted, c.Rejected, c.Duplicates = c.Accepted+s.Accepted, c.Rejected+s.Rejected, c.Duplicates+s.Duplicates
	c.StoragePressure = c.StoragePressure || s.StoragePressure
	if s.LastAccepted.After(c.LastAccepted) {
		c.LastAccepted = s.LastAccepted
	}
	if s.LastRejected.After(c.LastRejected) {
		c.LastRejected, c.LastRejection = s.LastRejected, s.LastRejection
	}
}

func (p *Page) shows(namespace string) bool {
	return p.options.Namespace == "" || p.options.Namespace == namespace
}

func link(k key) string {
	return Prefix + "destination/" + url.PathEscape(k.Namespace) + "/" + url.PathEscape(k.Name)
}

func (p *Page) newRow(v view, k key) row {
	r := row{key: k, numbers: v.numbers(k), Link: link(k), State: "ok"}
	r.Cause = why.Cause(v.explain(k, nil))
	switch {
	case r.Cause != nil && r.Cause.Idle:
		r.State, r.Words = "notice", r.Cause.Text
	case r.Cause != nil:
		r.State, r.Words = "problem", shortly(*r.Cause, v.now)
	case r.Retrying > 0:
		r.State, r.Words = "notice", count(r.Retrying, "message")+" in retry"
	case r.Stored > 0:
		r.State, r.Words = "notice", count(r.Stored, "dead letter")+" stored"
	case r.Pending > 0:
		r.Words = "delivering"
	case r.LastSuccess.IsZero():
		r.Words = "no delivery yet"
	default:
		r.Words = "no backlog"
	}
	return r
}

// explainFew lets a short list show the whole text of each problem.
func explainFew(list []problem) {
	if len(list) >= longList {
		return
	}
	for i := range list {
		list[i].Brief = ""
	}
}

// shortly begins the text of a finding with its reason, code and time, because a table shows only the first lines.
func shortly(f why.Finding, now time.Time) string {
	if text := brief(f, now); text != "" {
		return text + ": " + f.Text
	}
	return f.Text
}

// brief is the reason of a finding with its code and how long it lasts, or "".
func brief(f why.Finding, now time.Time) string {
	if f.Reason == "" {
		return ""
	}
	text := f.Reason
	if f.StatusCode != 0 {
		text += fmt.Sprintf(" %d", f.StatusCode)
	}
	if !f.Since.IsZero() {
		text += " for " + length(now.Sub(f.Since))
	}
	return text
}

// severity is the order of the states.
var severity = map[string]int{"problem": 0, "notice": 1, "ok": 2}

func worseFirst(a, b row) int {
	return cmp.Or(
		cmp.Compare(severity[a.State], severity[b.State]), compareBools(b.Open, a.Open),
		cmp.Compare(b.Retrying, a.Retrying), cmp.Compare(b.Pending, a.Pending), cmp.Compare(b.Stored, a.Stored), compareKeys(a.key, b.key))
}

func newAudiences(v view) (list []audience) {
	for _, o := range v.audiences {
		a := audience{key: key{o.Namespace, o.Name}}
		for _, x := range v.indices {
			n := x.Namespace(o.Namespace)
			if n == nil || n.Audiences[o.Name] == nil || !n.Audiences[o.Name].Owner {
				continue
			}
			r := n.Audiences[o.Name]
			a.Members, a.Unsent, a.LastSync = r.Members, r.Unsent, r.LastSync
			if r.LastRefused.After(r.LastSync) {
				a.Refusal = r.Refusal
			}
		}
		list = append(list, a)
	}
	slices.SortFunc(list, func(a, b audience) int {
		return cmp.Or(compareBools(b.Refusal != "", a.Refusal != ""), cmp.Compare(b.Unsent, a.Unsent), compareKeys(a.key, b.key))
	})
	return list[:min(len(list), maxRows)]
}

func newDeletions(v view) (list []deletion) {
	for _, o := range v.deletions {
		d := deletion{key: key{o.Namespace, o.Name}, State: "notice", Words: "in progress"}
		d.Total, d.Delivered, d.Pending = number(o.Status.Total), number(o.Status.Delivered), number(o.Status.Pending)
		switch {
		case meta.IsStatusConditionTrue(o.Status.Conditions, v1beta1.ConditionComplete):
			d.State, d.Words = "ok", "complete"
		case meta.IsStatusConditionTrue(o.Status.Conditions, v1beta1.ConditionFailed):
			d.State, d.Words = "problem", message(o.Status.Conditions)
		default:
			d.Words = cmp.Or(message(o.Status.Conditions), d.Words)
			if o.Spec.ActiveDeadlineSeconds != nil && o.Status.StartTime != nil {
				d.Deadline = o.Status.StartTime.Add(time.Duration(*o.Spec.ActiveDeadlineSeconds) * time.Second)
			}
		}
		list = append(list, d)
	}
	slices.SortFunc(list, func(a, b deletion) int {
		return cmp.Or(cmp.Compare(severity[a.State], severity[b.State]), compareBools(a.Deadline.IsZero(), b.Deadline.IsZero()),
			a.Deadline.Compare(b.Deadline), compareKeys(a.key, b.key))
	})
	return list[:min(len(list), maxRows)]
}

func message(conditions []metav1.Condition) string {
	if c := meta.FindStatusCondition(conditions, v1beta1.ConditionReady); c != nil {
		return c.Message
	}
	return ""
}

func number(n *int32) int32 {
	if n == nil {
		return 0
	}
	return *n
}

const (
	// maxGrouped bounds the destinations whose dead letters are grouped, and maxLetters the dead letters
	// that are read of each.
	maxGrouped, maxLetters = 200, 10_000
	// maxGroups bounds the groups that are kept; the newest ones are.
	maxGroups = 5_000
)

// ranked returns the destinations, the worst first.
func (p *Page) ranked(v view) (rows []row) {
	for k := range v.destinations {
		rows = append(rows, row{key: k, numbers: v.numbers(k), Link: link(k)})
	}
	slices.SortFunc(rows, worseFirst)
	return rows
}

// letters returns the dead letters of a destination, of all dispatchers, and whether all were read.
// The error names the dispatchers whose dead letters are missing.
func (p *Page) letters(ctx context.Context, k key) (list []adminapi.DeadLetter, complete bool, err error) {
	complete = true
	dispatchers, _ := p.dispatchers()
	for _, pod := range slices.Sorted(maps.Keys(dispatchers)) {
		n := 0
		for d, e := range dispatchers[pod].DeadLetters(ctx, k.String(), maxLetters) {
			if e != nil {
				err = errors.Join(err, fmt.Errorf("dead letters of dispatcher %s: %w", pod, e))
				break
			}
			list = append(list, d)
			n++
		}
		complete = complete && n < maxLetters
	}
	return list, complete && err == nil, err
}

// group are the dead letters of one destination with the same reason, status code and hour.
type group struct {
	key
	Link            string
	Reason          string
	StatusCode      int
	Hour            time.Time
	N               int
	Message, Answer string
	// Redeliver is the command that redelivers them.
	Redeliver string
}

type groups struct {
	Groups []group
	Total  int64
	// Result selects groups, "" selects all; Codes are the results of all groups, and More is the number of
	// selected groups that are not shown.
	Result string
	Codes  []code
	More   int
	// Incomplete names the destinations of which not all dead letters were read.
	Incomplete []string
	Errors     []string
	at         time.Time
}

// groupsAge is how old the groups of dead letters may be. It is less than the time after which the
// page reloads, so that a person sees what changed, but tabs and reloads in between read nothing.
const groupsAge = 20 * time.Second

// readLetters waits until no other view reads dead letters. The caller runs done.
func (p *Page) readLetters(ctx context.Context) (done func(), err error) {
	select {
	case p.letterReader <- struct{}{}:
		return func() { <-p.letterReader }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("another view still reads the dead letters; try again: %w", ctx.Err())
	}
}

// groups returns the groups of dead letters, at most groupsAge old.
func (p *Page) groups(ctx context.Context, v view) (groups, error) {
	done, err := p.readLetters(ctx)
	if err != nil {
		return groups{}, err
	}
	defer done()
	if p.lastGroups.at.IsZero() || time.Since(p.lastGroups.at) >= groupsAge {
		g := p.readGroups(ctx, v)
		if ctx.Err() != nil { // The viewer left or the time ended, so the groups are not complete.
			return g, nil
		}
		g.at = time.Now()
		p.lastGroups = g
	}
	return p.lastGroups, nil
}

func (p *Page) readGroups(ctx context.Context, v view) (g groups) {
	type id struct {
		key
		reason string
		code   int
		hour   time.Time
	}
	found := map[id]*group{}
	read := 0
	for _, r := range p.ranked(v) {
		if r.Stored == 0 {
			continue
		}
		g.Total += r.Stored
		if read++; read > maxGrouped {
			g.Incomplete = append(g.Incomplete, r.key.String())
			continue
		}
		list, complete, err := p.letters(ctx, r.key)
		if err != nil {
			g.Errors = append(g.Errors, r.key.String()+": "+err.Error())
		}
		if !complete && err == nil {
			g.Incomplete = append(g.Incomplete, r.key.String())
		}
		for _, d := range list {
			i := id{r.key, d.Reason, d.StatusCode, d.FailedAt.UTC().Truncate(time.Hour)}
			one := found[i]
			if one == nil {
				one = &group{key: r.key, Link: r.Link, Reason: d.Reason, StatusCode: d.StatusCode, Hour: i.hour,
					Redeliver: p.redeliver(r.key, d.Reason, d.StatusCode, i.hour)}
				found[i] = one
			}
			one.N++
			one.Message, one.Answer = d.Message, cmp.Or(d.Response, one.Answer)
		}
	}
	for _, one := range found {
		g.Groups = append(g.Groups, *one)
	}
	slices.SortFunc(g.Groups, func(a, b group) int {
		return cmp.Or(b.Hour.Compare(a.Hour), cmp.Compare(b.N, a.N), compareKeys(a.key, b.key), cmp.Compare(a.Reason, b.Reason),
			cmp.Compare(a.StatusCode, b.StatusCode))
	})
	g.Groups = slices.Clip(g.Groups[:min(len(g.Groups), maxGroups)])
	counts := map[string]*code{}
	add := func(text string, n int) {
		if counts[text] == nil {
			counts[text] = &code{Text: text}
		}
		counts[text].N += n
	}
	for _, one := range g.Groups {
		add(one.Reason, one.N)
		if one.StatusCode != 0 {
			add(strconv.Itoa(one.StatusCode), one.N)
		}
	}
	g.Codes = mostFrequent(counts)
	return g
}

// selected returns the groups with a result, as many as are shown.
func (g groups) selected(result string) groups {
	var groups []group
	for _, one := range g.Groups {
		if hasResult(result, one.StatusCode, one.Reason) {
			groups = append(groups, one)
		}
	}
	shown := min(len(groups), maxRows)
	g.Result, g.More, g.Groups = result, len(groups)-shown, groups[:shown]
	return g
}

// redeliver is the command that redelivers the dead letters of one reason, status code and hour. All
// its words are names of the API, so that a shell needs no quotes.
func (p *Page) redeliver(k key, reason string, code int, hour time.Time) string {
	verb := "deadletters redeliver"
	if !p.options.Standalone {
		verb = "redeliver"
	}
	response := fmt.Sprintf("--status-code %d", code)
	if code == 0 {
		response = "--no-response"
	}
	return fmt.Sprintf("%s %s %s -n %s --reason %s %s --since %s --until %s", p.options.Command, verb, k.Name, k.Namespace, reason,
		response, hour.Format(time.RFC3339), hour.Add(time.Hour).Format(time.RFC3339))
}

// hit is an attempt or a dead letter of a message.
type hit struct {
	key
	Link    string
	Attempt *adminapi.Attempt
	Letter  *adminapi.DeadLetter
	Show    string
}

type found struct {
	ID       string
	Accepted []adminapi.AcceptedMessage
	Hits     []hit
	// Errors name the dispatchers that did not answer, and what was not searched.
	Errors []string
}

// find asks all dispatchers for a message.
func (p *Page) find(ctx context.Context, id string) (f found) {
	if f.ID = id; id == "" {
		return f
	}
	dispatchers, missing := p.dispatchers()
	if missing != nil {
		f.Errors = append(f.Errors, missing.Error())
	}
	of := func(object string) hit {
		namespace, name, _ := strings.Cut(object, "/")
		k := key{namespace, name}
		return hit{key: k, Link: link(k)}
	}
	for _, pod := range slices.Sorted(maps.Keys(dispatchers)) {
		t, err := dispatchers[pod].Trace(ctx, id, time.Time{})
		if err != nil {
			f.Errors = append(f.Errors, fmt.Sprintf("dispatcher %s: %v", pod, err))
			continue
		}
		if t.Incomplete != "" {
			f.Errors = append(f.Errors, fmt.Sprintf("dispatcher %s: %s", pod, t.Incomplete))
		}
		for _, m := range t.Accepted {
			if p.shows(of(m.Source).Namespace) {
				f.Accepted = append(f.Accepted, m)
			}
		}
		for _, a := range t.Attempts {
			if h := of(a.Destination); p.shows(h.Namespace) {
				h.Attempt = &a
				f.Hits = append(f.Hits, h)
			}
		}
		for _, d := range t.DeadLetters {
			if h := of(d.Destination); p.shows(h.Namespace) {
				h.Letter, h.Show = &d, fmt.Sprintf("%s deadletters show %s %s -n %s", p.options.Command, h.Name, d.Key, h.Namespace)
				f.Hits = append(f.Hits, h)
			}
		}
	}
	return f
}
