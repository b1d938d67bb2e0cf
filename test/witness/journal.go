// Package witness judges journals of a test against the promises of docs/reliability.md. Senders, receivers and
// the driver of a test write what they saw, as lines of JSON; Check gives a verdict for each clause, with the lines that
// prove a violation. The package must not know the product: the plan names the destinations that are due for each
// message, and a receiver names the secrets whose signatures hold. Its main types are Line,
// History and Verdict; package record writes journals.
package witness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Role is what a journal has.
type Role string

// The roles of journals.
const (
	Sender   Role = "sender"   // the plan, and the calls
	Receiver Role = "receiver" // what receivers got
	Objects  Role = "objects"  // what was applied, confirmed and removed
	Faults   Role = "faults"   // what was injected
	Ledgers  Role = "ledgers"  // ledgers, statuses, dead letters and readiness
)

// Line is a line of a journal. It has one of the pointers, or End.
type Line struct {
	// Number counts the lines of the journal from 0, the one with Head.
	Number int `json:"n"`
	// At is the time at which the line was written, by the journal's clock: for a call or a receipt its answer.
	At time.Duration `json:"at"`
	// Begin is the time at which a call or a receipt began, and a fault that was found later.
	Begin time.Duration `json:"begin,omitempty"`

	Head    *Head    `json:"head,omitempty"`
	Plan    *Plan    `json:"plan,omitempty"`
	Call    *Call    `json:"call,omitempty"`
	Receipt *Receipt `json:"receipt,omitempty"`
	Object  *Object  `json:"object,omitempty"`
	Fault   *Fault   `json:"fault,omitempty"`
	Ledger  *Ledger  `json:"ledger,omitempty"`
	Letters *Letters `json:"letters,omitempty"`
	Probe   *Probe   `json:"probe,omitempty"`
	End     bool     `json:"end,omitempty"`

	text string
}

// Head is the first line of a journal. Times of journals with the same clock can be compared.
type Head struct {
	Role  Role   `json:"role"`
	Clock string `json:"clock"`
}

// Plan has the bounds that do not follow from the objects.
type Plan struct {
	// Unrecorded is the time after which a lost process sends nothing without having recorded earlier results.
	Unrecorded time.Duration `json:"unrecorded"`
	// Wait is the longest time for which a message waits for a working receiver.
	Wait time.Duration `json:"wait"`
	// Status is the delay of a status, and Ready the time within which a process that is ready accepts a call.
	Status time.Duration `json:"status"`
	// Grace is the time for which the messages of a removed destination are kept.
	Grace time.Duration `json:"grace"`
	Ready time.Duration `json:"ready"`
}

// Call is a request of a sender.
type Call struct {
	// Kind is calls, sync (of an audience), deletion or redelivery.
	Kind string `json:"kind"`
	// Process is the process to which it was sent.
	Process string `json:"process,omitempty"`
	// Source is the namespace and the name of the Source.
	Source   string    `json:"source,omitempty"`
	Messages []Message `json:"messages"`
	// Status is the status of the answer, 200 only if it acknowledges all messages, and 0 without an answer.
	Status int `json:"status"`
	// Valid is true if the messages and the write key are valid, so that 4xx is wrong while the Source is in effect.
	Valid bool `json:"valid,omitempty"`
}

// Kinds of requests of a sender.
const (
	Calls      = "calls"
	Sync       = "sync"
	Deletion   = "deletion"
	Redelivery = "redelivery"
)

// Message is a message of a request, and what the plan demands of it.
type Message struct {
	// ID is its messageId. Members and deletions have none: they are known by their user and Content.
	ID string `json:"id,omitempty"`
	// Content has fields of the message with their values.
	Content json.RawMessage `json:"content,omitempty"`
	// Due are the destinations that must get it, and May those that may get it because they change at this time.
	Due []string `json:"due,omitempty"`
	May []string `json:"may,omitempty"`
}

// Receipt is a request that a receiver got.
type Receipt struct {
	URL     string            `json:"url"`
	Key     string            `json:"key"`
	Headers map[string]string `json:"headers,omitempty"`
	Body    string            `json:"body"`
	// Signed are the names of the secrets whose signatures hold.
	Signed []string `json:"signed,omitempty"`
	Status int      `json:"status"`
}

// Object is a change of a destination or a Source: applied is written before a process can see a revision, confirmed
// after the owner reported that it uses the revision, removing before a process can see the removal, and removed after
// the owner reported that it uses no revision any more.
type Object struct {
	Name     string `json:"name"`
	Process  string `json:"process,omitempty"`
	Action   string `json:"action"`
	Revision int    `json:"revision"`
	// Destination is the content of an applied revision.
	Destination *Destination `json:"destination,omitempty"`
}

// Actions of objects.
const (
	Removing  = "removing"
	Applied   = "applied"
	Confirmed = "confirmed"
	Removed   = "removed"
)

// Destination is a revision of a destination.
type Destination struct {
	URLs []string `json:"urls"`
	// Denied are URLs with addresses that the policy denies.
	Denied []string `json:"denied,omitempty"`
	// Headers are the static headers, and Keys the names of the secrets that sign.
	Headers  map[string]string `json:"headers,omitempty"`
	Keys     []string          `json:"keys,omitempty"`
	InFlight int               `json:"inFlight"`
	Timeout  time.Duration     `json:"timeout"`
	Window   time.Duration     `json:"window"`
	// Dropped are the fields of a message that it must not get.
	Dropped []string `json:"dropped,omitempty"`
	// Suspended: it gets nothing, and windows do not end.
	Suspended bool `json:"suspended,omitempty"`
}

// Fault is the begin or the end of a fault. A failing receiver answers with errors, so that it gets all requests.
type Fault struct {
	ID   int    `json:"id"`
	Name string `json:"name,omitempty"`
	End  bool   `json:"end,omitempty"`
	// Process is the process that it affects, "" if none or all, and Namespace the only namespace, "" for all.
	Process   string `json:"process,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	// Destination is the only destination with a URL that answers with errors while another one works, "" if none.
	Destination string `json:"destination,omitempty"`
	// Repeats names the messages that are delivered again.
	Repeats string `json:"repeats,omitempty"`
}

// The repeats that a fault causes. The ledger can only fall after one with Unrecorded.
const (
	InFlight   = "in flight"
	Unrecorded = "unrecorded"
)

// Ledger has the numbers of a destination in the report, or in the status, of a process.
type Ledger struct {
	Name         string `json:"name"`
	Process      string `json:"process,omitempty"`
	Status       bool   `json:"status,omitempty"`
	Accepted     int    `json:"accepted"`
	Delivered    int    `json:"delivered"`
	Filtered     int    `json:"filtered"`
	Omitted      int    `json:"omitted,omitempty"`
	DeadLettered int    `json:"deadLettered"`
	Discarded    int    `json:"discarded"`
	Pending      int    `json:"pending"`
	// Unsent is the number of messages that a URL of several has not got yet, or will never get.
	Unsent int `json:"unsent,omitempty"`
	// Final is true at the end of the test.
	Final bool `json:"final,omitempty"`
}

// Letters are all dead letters of a destination at the end.
type Letters struct {
	Name string   `json:"name"`
	IDs  []string `json:"ids"`
	// Expired are the ages at which messages became dead letters because their retry window ended, by identity.
	Expired map[string]time.Duration `json:"expired,omitempty"`
}

// Probe is an answer of /readyz.
type Probe struct {
	Process string `json:"process"`
	Ready   bool   `json:"ready"`
}

// History has the journals of a test.
type History struct {
	plan                                                       Plan
	calls, receipts, objects, faults, ledgers, letters, probes []*Line
	// flaws are why the journals of a role prove nothing that is missing, and clocks the flaws of all journals.
	flaws  map[Role]string
	clocks map[string]bool
	// end is the time of the last end of a journal.
	end time.Duration
	index
}

// Read reads all journals of a folder. Flaws of a journal are no error: they limit the verdicts.
func Read(dir string) (*History, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		return nil, err
	}
	h := &History{flaws: map[Role]string{}, clocks: map[string]bool{}}
	found := map[Role]bool{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		role, flaw := h.add(filepath.Base(path), string(text))
		roles := []Role{role}
		if role == "" { // It can be of any.
			roles = []Role{Sender, Receiver, Objects, Faults, Ledgers}
		}
		for _, r := range roles {
			if found[r] = true; flaw != "" {
				h.flaws[r] = filepath.Base(path) + ": " + flaw
			}
		}
	}
	for _, r := range []Role{Sender, Receiver, Objects, Faults, Ledgers} {
		if !found[r] {
			h.flaws[r] = "no journal has the role " + string(r)
		}
	}
	for _, lines := range [][]*Line{h.calls, h.receipts, h.objects, h.faults, h.ledgers, h.letters, h.probes} {
		slices.SortStableFunc(lines, func(a, b *Line) int { return int(a.At - b.At) })
	}
	h.build()
	return h, nil
}

// add adds the lines of a journal, and returns its role and its first flaw.
func (h *History) add(name, text string) (role Role, flaw string) {
	note := func(format string, args ...any) {
		if flaw == "" {
			flaw = fmt.Sprintf(format, args...)
		}
	}
	n, ended := 0, false
	var last time.Duration
	for row := range strings.Lines(text) {
		l := &Line{text: name + ": " + strings.TrimSuffix(row, "\n")}
		if err := json.Unmarshal([]byte(row), l); err != nil {
			note("the journal is cut in line %d", n)
			continue
		}
		switch {
		case ended || l.Number < n || l.At < last:
			note("line %d is out of order", l.Number)
		case l.Number > n:
			note("the journal is cut before line %d", l.Number)
		}
		n, last = l.Number+1, max(last, l.At)
		ended = l.End
		h.keep(l)
		if l.Head != nil {
			role = l.Head.Role
		}
	}
	switch {
	case role == "":
		note("the journal is cut: it has no head")
	case !ended:
		note("the journal is cut: it has no end")
	}
	return role, flaw
}

func (h *History) keep(l *Line) {
	switch {
	case l.End:
		h.end = max(h.end, l.At)
	case l.Head != nil:
		h.clocks[l.Head.Clock] = true
	case l.Plan != nil:
		h.plan = *l.Plan
	case l.Call != nil:
		h.calls = append(h.calls, l)
	case l.Receipt != nil:
		h.receipts = append(h.receipts, l)
	case l.Object != nil:
		h.objects = append(h.objects, l)
	case l.Fault != nil:
		h.faults = append(h.faults, l)
	case l.Ledger != nil:
		h.ledgers = append(h.ledgers, l)
	case l.Letters != nil:
		h.letters = append(h.letters, l)
	case l.Probe != nil:
		h.probes = append(h.probes, l)
	}
}
