package witness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/check"
)

const (
	crmA, crmB, newsURL, deniedURL = "http://crm/a", "http://crm/b", "http://news/", "http://denied/"
	crm, news                      = "shop/crm", "news/log"
	shortURL, longURL              = "http://short/", "http://long/"
	short, long                    = "lab/short", "lab/long"
)

// story has the lines of journals by role, with their times in milliseconds.
type story struct {
	roles map[Role][]*Line
	// text replaces a journal, and clock its clock.
	text  map[Role]func(string) string
	clock map[Role]string
}

func ms(n int) time.Duration { return time.Duration(n) * time.Millisecond }

func (s *story) add(role Role, at int, l Line) *Line {
	l.At = ms(at)
	if l.Begin == 0 {
		l.Begin = l.At - ms(5)
	}
	s.roles[role] = append(s.roles[role], &l)
	return &l
}

func (s *story) call(at int, kind, source string, messages ...Message) *Line {
	return s.add(Sender, at, Line{Call: &Call{Kind: kind, Process: "p", Source: source, Status: 200, Valid: kind == Calls,
		Messages: messages}})
}

func (s *story) receipt(at int, url, id, body string) *Line {
	r := &Receipt{URL: url, Key: id, Headers: map[string]string{"X-Env": "1"}, Body: body, Signed: []string{"s1"}, Status: 200}
	if url == newsURL || url == shortURL || url == longURL {
		r.Headers, r.Signed = nil, nil
	}
	return s.add(Receiver, at, Line{Receipt: r})
}

func (s *story) track(at int, url, id string) *Line {
	return s.receipt(at, url, id, fmt.Sprintf(`{"type":"track","event":"E","messageId":%q,"userId":"u"}`, id))
}

func (s *story) ledger(at int, l Ledger) *Line { return s.add(Ledgers, at, Line{Ledger: &l}) }

func track(id string, due ...string) Message {
	return Message{ID: id, Content: json.RawMessage(`{"type":"track","event":"E"}`), Due: due}
}

// find returns a line of a role.
func (s *story) find(role Role, is func(*Line) bool) *Line {
	i := slices.IndexFunc(s.roles[role], is)
	return s.roles[role][i]
}

func (s *story) received(url, id string) *Line {
	return s.find(Receiver, func(l *Line) bool { return l.Receipt.URL == url && l.Receipt.Key == id })
}

func (s *story) remove(role Role, is func(*Line) bool) {
	s.roles[role] = slices.DeleteFunc(s.roles[role], is)
}

// good is a story in which all clauses hold: two namespaces, an edit of a destination, the loss of a process, a failing
// receiver of one namespace, an audience, a deletion, a redelivery, and removals within and after the grace period.
func good() *story {
	s := &story{roles: map[Role][]*Line{}, text: map[Role]func(string) string{}, clock: map[Role]string{}}
	s.add(Sender, 0, Line{Plan: &Plan{Unrecorded: ms(2000), Wait: ms(1000), Status: ms(500), Ready: ms(1000), Grace: ms(1000)}})
	first := Destination{URLs: []string{crmA, crmB}, Denied: []string{deniedURL}, Headers: map[string]string{"X-Env": "1"},
		Keys: []string{"s1"}, InFlight: 1, Timeout: ms(100), Window: ms(10_000)}
	second := first
	second.Keys = []string{"s2"}
	object := func(at int, name, action string, revision int, d *Destination) {
		s.add(Objects, at, Line{Object: &Object{Name: name, Process: "p", Action: action, Revision: revision, Destination: d}})
	}
	object(1, crm, Applied, 1, &first)
	object(2, crm, Confirmed, 1, nil)
	object(1, news, Applied, 1, &Destination{URLs: []string{newsURL}, InFlight: 1, Timeout: ms(100), Window: ms(10_000)})
	object(2, news, Confirmed, 1, nil)
	s.add(Ledgers, 5, Line{Probe: &Probe{"p", true}})
	s.call(10, Calls, "shop/web", track("m1", crm))
	s.track(20, crmA, "m1")
	s.track(21, crmB, "m1")
	s.ledger(900, Ledger{Name: crm, Status: true, Accepted: 1, Delivered: 1})
	s.ledger(1000, Ledger{Name: crm, Accepted: 1, Delivered: 1})
	s.add(Ledgers, 1100, Line{Probe: &Probe{"p", true}})
	// The loss of a process repeats m2.
	s.call(2000, Calls, "shop/web", track("m2", crm))
	s.track(2010, crmA, "m2")
	s.track(2011, crmB, "m2")
	s.add(Faults, 2050, Line{Fault: &Fault{ID: 1, Name: "kill -9", Process: "p", Repeats: Unrecorded}})
	s.add(Faults, 2500, Line{Fault: &Fault{ID: 1, End: true}})
	s.track(2400, crmA, "m2")
	// The receiver of shop fails, and its message waits. The messages of news do not.
	s.add(Faults, 4000, Line{Fault: &Fault{ID: 2, Name: "failing receiver", Namespace: "shop"}})
	s.call(4010, Calls, "shop/web", track("m3", crm))
	s.call(4010, Calls, "news/web", track("n1", news))
	s.track(4020, newsURL, "n1")
	s.track(4030, crmA, "m3").Receipt.Status = 503
	s.add(Faults, 6000, Line{Fault: &Fault{ID: 2, End: true}})
	s.track(6100, crmA, "m3")
	s.track(6100, crmB, "m3")
	// The destination gets another secret.
	object(7000, crm, Applied, 2, &second)
	object(7010, crm, Confirmed, 2, nil)
	s.call(7500, Sync, "shop/web", Message{Content: json.RawMessage(`{"type":"identify","userId":"u1","traits":{"buyers":true}}`),
		Due: []string{crm}})
	s.call(7500, Deletion, "shop/web", Message{Content: json.RawMessage(`{"type":"delete","userId":"u9"}`), Due: []string{crm}})
	for _, url := range []string{crmA, crmB} {
		s.receipt(7600, url, "generated-1", `{"type":"identify","messageId":"generated-1","userId":"u1","traits":{"buyers":true}}`).Receipt.Signed = []string{"s2"}
		s.receipt(7600, url, "delete-1", `{"type":"delete","userId":"u9"}`).Receipt.Signed = []string{"s2"}
	}
	s.call(8000, Calls, "shop/web", track("m4", crm))
	for _, url := range []string{crmA, crmB} {
		l := s.track(8010, url, "m4")
		l.Receipt.Signed, l.Receipt.Status = []string{"s2"}, 409
	}
	s.call(8500, Redelivery, "", Message{ID: "m4", Due: []string{crm}})
	for _, url := range []string{crmA, crmB} {
		s.track(8510, url, "m4").Receipt.Signed = []string{"s2"}
	}
	s.ledger(9000, Ledger{Name: crm, Accepted: 7, Delivered: 6, DeadLettered: 1, Final: true})
	s.ledger(9000, Ledger{Name: news, Accepted: 1, Delivered: 1, Final: true})
	s.add(Ledgers, 9001, Line{Letters: &Letters{Name: crm}})
	// One destination is removed within the grace period, another one with its Source for longer.
	object(10_000, "lab/web", Applied, 1, nil)
	for _, name := range []string{short, long} {
		url := "http://" + name[len("lab/"):] + "/"
		back := map[string]int{short: 12_500, long: 15_000}[name]
		for i, at := range []int{10_000, back} {
			object(at, name, Applied, i, &Destination{URLs: []string{url}, InFlight: 1, Timeout: ms(100), Window: ms(10_000)})
			object(at+10, name, Confirmed, i, nil)
		}
		object(12_000, name, Removing, 0, nil)
		object(12_100, name, Removed, 0, nil)
		s.call(11_900, Calls, "lab/web", track(name, name))
	}
	s.track(12_600, shortURL, short)
	object(12_000, "lab/web", Removing, 0, nil)
	s.call(14_000, Calls, "lab/web", track("rejected", long)).Call.Status = 401
	object(15_000, "lab/web", Applied, 2, nil)
	object(15_010, "lab/web", Confirmed, 2, nil)
	s.call(15_100, Calls, "lab/web", track("again", long))
	s.track(15_110, longURL, "again")
	s.call(15_200, Redelivery, "", Message{ID: long, May: []string{long}})
	s.ledger(15_300, Ledger{Name: short, Accepted: 2, Delivered: 1, Pending: 1})
	s.ledger(16_000, Ledger{Name: short, Accepted: 1, Delivered: 1, Final: true})
	s.ledger(16_000, Ledger{Name: long, Accepted: 2, Delivered: 1, Discarded: 1, Final: true})
	return s
}

// write writes the journals to a folder.
func (s *story) write(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for _, role := range []Role{Sender, Receiver, Objects, Faults, Ledgers} {
		rows := s.roles[role]
		slices.SortStableFunc(rows, func(a, b *Line) int { return int(a.At - b.At) })
		clock := "c"
		if s.clock[role] != "" {
			clock = s.clock[role]
		}
		all := append([]*Line{{Head: &Head{role, clock}}}, rows...)
		all = append(all, &Line{End: true, At: ms(20_000)})
		var text strings.Builder
		for n, l := range all {
			l.Number = n
			row, err := json.Marshal(l)
			check.NoError(t, "encode a line", err)
			fmt.Fprintln(&text, string(row))
		}
		result := text.String()
		if change := s.text[role]; change != nil {
			result = change(result)
		}
		check.NoError(t, "write a journal", os.WriteFile(filepath.Join(dir, string(role)+".jsonl"), []byte(result), 0o600))
	}
	return dir
}

// check returns the verdicts by clause.
func (s *story) check(t *testing.T) map[string]Verdict {
	t.Helper()
	h, err := Read(s.write(t))
	check.NoError(t, "read the journals", err)
	verdicts := map[string]Verdict{}
	for _, v := range Check(h) {
		verdicts[v.Clause.ID] = v
	}
	return verdicts
}

// violations are changes of the good story, each with the clauses that it violates: "clause: change".
var violations = map[string]func(*story){
	"outcome: no outcome": func(s *story) {
		s.remove(Receiver, func(l *Line) bool { return l.Receipt.URL == newsURL })
		l := s.find(Ledgers, func(l *Line) bool { return l.Ledger != nil && l.Ledger.Name == news })
		l.Ledger.Accepted, l.Ledger.Delivered = 0, 0
	},
	"outcome: delivered, and a dead letter": func(s *story) {
		s.find(Ledgers, func(l *Line) bool { return l.Letters != nil }).Letters.IDs = []string{"m3"}
	},
	"outcome: lost behind a failing receiver": func(s *story) {
		s.remove(Receiver, func(l *Line) bool { return l.Receipt.Key == "m3" && l.Receipt.Status == 200 })
	},
	"outcome: lost within the grace period": func(s *story) { s.remove(Receiver, func(l *Line) bool { return l.Receipt.URL == shortURL }) },
	"outcome: more than are discarded": func(s *story) {
		s.find(Ledgers, func(l *Line) bool { return l.Ledger != nil && l.Ledger.Name == long }).Ledger.Discarded = 0
	},
	"accepted: not sent": func(s *story) { s.track(9500, newsURL, "stranger") },
	"accepted: it was rejected": func(s *story) {
		s.call(9400, Calls, "news/web", track("n2", news)).Call.Status = 400
		s.track(9500, newsURL, "n2")
	},
	"accepted: the destination is not due": func(s *story) { s.track(9500, newsURL, "m1") },
	"accepted: no id":                      func(s *story) { s.receipt(9500, newsURL, "n9", "null") },
	"refusal: unknown_write_key":           func(s *story) { s.call(9400, Calls, "news/web", track("n2", news)).Call.Status = 401 },
	"refusal: the Source has returned":     func(s *story) { s.call(15_200, Calls, "lab/web", track("k", long)).Call.Status = 401 },
	"repeats: without a fault":             func(s *story) { s.track(4800, newsURL, "n1") },
	"repeats: recorded long before": func(s *story) {
		s.track(6500, newsURL, "n1")
		s.add(Faults, 6490, Line{Fault: &Fault{ID: 3, Name: "hand-over", Repeats: InFlight}})
	},
	"repeats: more than were in flight": func(s *story) {
		s.add(Faults, 9100, Line{Fault: &Fault{ID: 3, Name: "hand-over", Repeats: InFlight}})
		for _, id := range []string{"n2", "n3"} {
			s.call(9090, Calls, "news/web", track(id, news))
			s.track(9099, newsURL, id)
			s.track(9150, newsURL, id)
		}
	},
	"repeats: a redelivery twice": func(s *story) { s.track(8520, crmA, "m4").Receipt.Signed = []string{"s2"} },
	"repeats: a redelivery to another destination": func(s *story) {
		s.call(8550, Redelivery, "", Message{ID: "n1", Due: []string{crm}})
		s.track(8600, newsURL, "n1")
	},
	"config: the secret before":               func(s *story) { s.received(crmA, "delete-1").Receipt.Signed = []string{"s1"} },
	"config: the secret before it is applied": func(s *story) { s.received(crmA, "m1").Receipt.Signed = []string{"s2"} },
	"config: another header":                  func(s *story) { s.received(crmA, "m1").Receipt.Headers["X-Env"] = "2" },
	"config: another URL":                     func(s *story) { s.received(crmA, "m1").Receipt.URL = "http://elsewhere/" },
	"config: removed":                         func(s *story) { s.add(Objects, 3000, Line{Object: &Object{Name: news, Action: Removed}}) },
	"config: before it returns":               func(s *story) { s.track(14_000, longURL, long) },
	"signed: unsigned":                        func(s *story) { s.received(crmA, "m1").Receipt.Signed = nil },
	"denied: a private address":               func(s *story) { s.track(30, deniedURL, "m1") },
	"bytes: the body changes": func(s *story) {
		s.received(crmB, "m1").Receipt.Body = `{"type":"track","event":"E","messageId":"m1"}`
	},
	"bytes: a field is missing": func(s *story) { s.received(newsURL, "n1").Receipt.Body = `{"type":"track","messageId":"n1"}` },
	"bytes: a dropped field": func(s *story) {
		s.find(Objects, func(l *Line) bool { return l.Object != nil && l.Object.Name == news }).Object.Destination.Dropped = []string{"event"}
	},
	"urls: one URL got nothing": func(s *story) {
		s.remove(Receiver, func(l *Line) bool { return l.Receipt.URL == crmB && l.Receipt.Key == "m1" })
		s.remove(Faults, func(l *Line) bool { return l.Fault.ID == 2 })
	},
	"urls: never sent long before a removal": func(s *story) {
		s.remove(Receiver, func(l *Line) bool { return l.Receipt.URL == crmB && l.Receipt.Key == "m1" })
		s.remove(Faults, func(l *Line) bool { return l.Fault.ID == 2 })
		for at, action := range map[int]string{9100: Removing, 9110: Removed} {
			s.add(Objects, at, Line{Object: &Object{Name: crm, Process: "p", Action: action}})
		}
	},
	"window: an early end": func(s *story) {
		s.add(Ledgers, 9002, Line{Letters: &Letters{Name: news, IDs: []string{"n1"}, Expired: map[string]time.Duration{"n1": ms(1000)}}})
	},
	"window: a late retry": func(s *story) { s.track(14_200, newsURL, "n1") },
	"wait: a late first attempt": func(s *story) {
		s.received(crmA, "m1").At, s.received(crmB, "m1").At = ms(1500), ms(1500)
		s.received(crmA, "m1").Begin, s.received(crmB, "m1").Begin = ms(1490), ms(1490)
	},
	"wait: long before a removal": func(s *story) {
		s.find(Sender, func(l *Line) bool { return l.Call != nil && l.Call.Messages[0].ID == long }).At = ms(10_900)
	},
	"wait: no attempt at all":              func(s *story) { s.remove(Receiver, func(l *Line) bool { return l.Receipt.Key == "m4" }) },
	"isolation: the other namespace waits": func(s *story) { l := s.received(newsURL, "n1"); l.At, l.Begin = ms(5900), ms(5890) },
	"ids: one key of two messages":         func(s *story) { s.received(newsURL, "n1").Receipt.Key = "m1" },
	"ids: two keys of one message":         func(s *story) { s.received(crmB, "m1").Receipt.Key = "m1-again" },
	"ledger: the sum differs":              func(s *story) { s.ledger(9100, Ledger{Name: crm, Accepted: 8, Delivered: 7}) },
	"ledger: accepted calls are missing": func(s *story) {
		l := s.find(Ledgers, func(l *Line) bool { return l.Ledger != nil && l.Ledger.Name == news })
		l.Ledger.Accepted, l.Ledger.Delivered = 0, 0
	},
	"ledger: more than the receiver got": func(s *story) {
		l := s.find(Ledgers, func(l *Line) bool { return l.Ledger != nil && l.Ledger.Name == news })
		l.Ledger.Accepted, l.Ledger.Delivered = 2, 2
	},
	"fall: without a loss": func(s *story) { s.ledger(1200, Ledger{Name: crm}) },
	"fall: more than was in flight": func(s *story) {
		s.ledger(2040, Ledger{Name: crm, Accepted: 50, Delivered: 50})
		s.ledger(2700, Ledger{Name: crm, Accepted: 2, Delivered: 2})
	},
	"fall: more than was redelivered elsewhere": func(s *story) {
		s.ledger(15_400, Ledger{Name: short, Accepted: 3, Delivered: 1, Pending: 2})
	},
	"once: a deletion twice": func(s *story) {
		l := s.receipt(7650, crmA, "delete-2", `{"type":"delete","userId":"u9"}`)
		l.Receipt.Signed = []string{"s2"}
	},
	"once: a member is not reported": func(s *story) { s.remove(Receiver, func(l *Line) bool { return l.Receipt.Key == "generated-1" }) },
	"once: a filtered deletion":      func(s *story) { s.remove(Receiver, func(l *Line) bool { return l.Receipt.Key == "delete-1" }) },
	"once: a deletion that fails": func(s *story) {
		for _, url := range []string{crmA, crmB} {
			s.received(url, "delete-1").Receipt.Status = 503
		}
	},
	"once: a redelivery without outcome": func(s *story) {
		s.remove(Receiver, func(l *Line) bool { return l.Receipt.Key == "m4" && l.Receipt.Status == 200 })
	},
	"status: too few": func(s *story) {
		s.find(Ledgers, func(l *Line) bool { return l.Ledger != nil && l.Ledger.Status }).Ledger.Delivered = 0
	},
	"ready: no call is accepted": func(s *story) { s.find(Sender, func(l *Line) bool { return l.Call != nil }).Call.Status = 503 },
}

func TestEachClauseCanHoldAndBeViolated(t *testing.T) {
	t.Parallel()
	for id, v := range good().check(t) {
		if v.Result != Holds {
			t.Errorf("%s in the good story: got %v, want holds", id, v)
		}
	}
	found := map[string]bool{}
	for name, change := range violations {
		t.Run(name, func(t *testing.T) {
			id, _, _ := strings.Cut(name, ":")
			s := good()
			change(s)
			v := s.check(t)[id]
			if found[id] = true; v.Result != Violated || len(v.Lines) == 0 {
				t.Errorf("got %v, want a violation with the lines that prove it", v)
			}
		})
	}
	for _, c := range Clauses {
		check.Equal(t, "a test violates "+c.ID, found[c.ID], true)
	}
}

// A retry is later than its window permits by the time of a suspension at most, and the window ends later.
func TestSuspensionsExtendTheWindow(t *testing.T) {
	t.Parallel()
	for suspended, want := range map[bool]Result{true: Holds, false: Violated} {
		s, early := good(), good()
		for i, at := range []int{6000, 9000} {
			revision := Destination{URLs: []string{newsURL}, InFlight: 1, Timeout: ms(100), Window: ms(10_000), Suspended: suspended && i == 0}
			for _, s := range []*story{s, early} {
				s.add(Objects, at, Line{Object: &Object{Name: news, Action: Applied, Revision: 2 + i, Destination: &revision}})
				s.add(Objects, at+10, Line{Object: &Object{Name: news, Action: Confirmed, Revision: 2 + i}})
			}
		}
		early.add(Ledgers, 9002, Line{Letters: &Letters{Name: news, IDs: []string{"n1"}, Expired: map[string]time.Duration{"n1": ms(11_000)}}})
		check.Equal(t, fmt.Sprint("end after 11 s, suspended: ", suspended), early.check(t)["window"].Result == Holds, !suspended)
		s.track(14_200, newsURL, "n1")
		check.Equal(t, fmt.Sprint("window, suspended: ", suspended), s.check(t)["window"].Result, want)
	}
}

// A journal that is cut, out of order or by another clock leaves no clause that needs it as one that holds, and proves
// no violation by what it lacks.
func TestFlawedJournals(t *testing.T) {
	t.Parallel()
	flaws := map[string]func(string) string{
		"cut at the end": func(text string) string { return strings.Join(strings.SplitAfter(text, "\n")[:3], "") },
		"cut in a line":  func(text string) string { return text[:len(text)-20] },
		"cut in the middle": func(text string) string {
			rows := strings.SplitAfter(text, "\n")
			return strings.Join(slices.Delete(rows, 2, 3), "")
		},
		"cut at the begin": func(text string) string { return strings.Join(strings.SplitAfter(text, "\n")[1:], "") },
		"out of order": func(text string) string {
			rows := strings.SplitAfter(text, "\n")
			rows[1], rows[2] = rows[2], rows[1]
			return strings.Join(rows, "")
		},
	}
	for name, flaw := range flaws {
		for _, role := range []Role{Sender, Receiver, Objects, Faults, Ledgers} {
			s := good()
			s.text[role] = flaw
			for id, v := range s.check(t) {
				needs := slices.Contains(v.Clause.needs, role) || name == "cut at the begin"
				if v.Result == Holds && needs || v.Result == Violated && !v.Clause.present {
					t.Errorf("%s with the journal of role %s %s: got %v, want unclear", id, role, name, v)
				}
			}
		}
	}
	s := good()
	s.clock[Receiver] = "another"
	for id, v := range s.check(t) {
		if v.Result == Holds && !v.Clause.untimed {
			t.Errorf("%s with two clocks: got %v, want unclear", id, v)
		}
	}
}

// Each clause that the lines that exist can violate is violated in spite of a cut journal; no other one is.
func TestProofsOfFlawedJournals(t *testing.T) {
	t.Parallel()
	for name, change := range violations {
		id, _, _ := strings.Cut(name, ":")
		s := good()
		change(s)
		for _, role := range []Role{Sender, Receiver, Objects, Faults, Ledgers} {
			s.text[role] = func(text string) string {
				return strings.TrimSuffix(text, "\n")[:strings.LastIndex(strings.TrimSuffix(text, "\n"), "\n")+1]
			}
		}
		v := s.check(t)[id]
		want := Unclear
		if v.Clause.present {
			want = Violated
		}
		check.Equal(t, name+", with journals without an end", v.Result, want)
	}
}

// A clause about which no line says anything does not hold.
func TestNothingToJudge(t *testing.T) {
	t.Parallel()
	s := &story{roles: map[Role][]*Line{}}
	for id, v := range s.check(t) {
		check.Equal(t, id+" in an empty story", v.Result, Unclear)
	}
}

// An outcome that may still come is no violation.
func TestDoubts(t *testing.T) {
	t.Parallel()
	s := good()
	s.remove(Receiver, func(l *Line) bool { return l.Receipt.Key == "m1" || l.Receipt.Key == "delete-1" })
	l := s.find(Ledgers, func(l *Line) bool { return l.Ledger != nil && l.Ledger.Name == crm && l.Ledger.Final })
	l.Ledger.Delivered, l.Ledger.Pending = 4, 2
	got := s.check(t)
	for _, id := range []string{"outcome", "once"} {
		check.Equal(t, id+" with pending messages", got[id].Result, Unclear)
	}
}

// The verdicts about the journals of a run that was kept, in the folder POSTHORN_JOURNALS, or about the good story.
func TestJournals(t *testing.T) {
	t.Parallel()
	dir := os.Getenv("POSTHORN_JOURNALS")
	if dir == "" {
		dir = good().write(t)
	}
	h, err := Read(dir)
	check.NoError(t, "read the journals", err)
	for _, v := range Check(h) {
		t.Logf("%v (%d facts)", v, v.Judged)
		if v.Result == Violated {
			t.Errorf("%s: %s", v.Clause.ID, v.Clause.Sentence)
		}
	}
}

// docs/reliability.md lists the clauses, in the same words.
func TestClausesAreTheDocumentation(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "reliability.md"))
	check.NoError(t, "read the page", err)
	_, text, _ := strings.Cut(string(page), "\n## The clauses of the promise\n")
	text, _, _ = strings.Cut(text, "\n## ")
	var documented, checked []string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "| `") {
			documented = append(documented, strings.TrimSpace(line))
		}
	}
	for _, c := range Clauses {
		checked = append(checked, fmt.Sprintf("| `%s` | %s |", c.ID, c.Sentence))
	}
	check.Same(t, "clauses of the page", documented, checked)
}
