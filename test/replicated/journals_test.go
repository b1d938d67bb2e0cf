package replicated

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/record"
	"github.com/posthorn/posthorn/test/signature"
	"github.com/posthorn/posthorn/test/wait"
	"github.com/posthorn/posthorn/test/witness"
)

// journals are the journals of a test.
type journals struct {
	*record.Journals
	// before has the ledgers at the start of the journals, and last those that were read last, by destination.
	before, last map[string]adminapi.Ledger
}

func newJournals(t *testing.T) *journals {
	t.Helper()
	return &journals{Journals: record.Begin(t), last: map[string]adminapi.Ledger{}}
}

// judge ends the journals, and reports violated clauses, and those that must hold and do not.
func (j *journals) judge(t *testing.T, hold ...string) {
	t.Helper()
	var text strings.Builder
	for _, v := range j.Judge(t) {
		if v.Result == witness.Violated || v.Result != witness.Holds && slices.Contains(hold, v.Clause.ID) {
			t.Errorf("%v", v)
		}
		fmt.Fprintf(&text, "%s %s (%d); ", v.Clause.ID, v.Result, v.Judged)
	}
	t.Log(text.String())
}

// receiptOf returns the receipt of a request, with those of the secrets whose signatures hold.
func receiptOf(q *http.Request, body []byte, status int, secrets ...string) *witness.Receipt {
	r := &witness.Receipt{URL: "http://" + q.Host + q.URL.Path, Key: q.Header.Get("Idempotency-Key"), Body: string(body), Status: status, Headers: map[string]string{"X-Revision": q.Header.Get("X-Revision")}}
	if len(body) > longBody {
		var head struct {
			Type      string `json:"type"`
			MessageID string `json:"messageId"`
			UserID    string `json:"userId"`
			Hash      string `json:"sha256"`
		}
		_ = json.Unmarshal(body, &head)
		head.Hash = fmt.Sprintf("%x", sha256.Sum256(body))
		short, _ := json.Marshal(head) // Strings always marshal.
		r.Body = string(short)
	}
	for _, secret := range secrets {
		if q.Header.Get("X-Signature") == signature.SHA1(secret, body) {
			r.Signed = append(r.Signed, secret)
		}
	}
	return r
}

// only is the destination of manifests.
const only = "default/crm"

// recordFaults begins journals of what a sender sends to the destination of manifests, and of what its receiver gets.
// earlier are the journals of the round before, or nil.
func recordFaults(t *testing.T, all *sender, r *receiver, earlier *journals) *journals {
	t.Helper()
	j := newJournals(t)
	if earlier != nil {
		j.before = earlier.last
	}
	j.Sender.Write(witness.Line{Plan: &planBounds})
	j.Objects.Write(witness.Line{Object: &witness.Object{Name: only, Action: witness.Applied, Revision: 1, Destination: &witness.Destination{
		URLs: []string{r.URL + "/"}, Keys: []string{sharedSecret}, InFlight: inFlight, Timeout: 5 * time.Second, Window: 4 * time.Hour,
	}}})
	all.journals.Store(j)
	r.journals.Store(j)
	return j
}

// now is the time of the journals; 0 without any.
func (j *journals) now() time.Duration {
	if j == nil {
		return 0
	}
	return j.Clock.Now()
}

// receipt notes a request.
func (j *journals) receipt(begin time.Duration, r *witness.Receipt) {
	if j != nil {
		j.Received.Write(witness.Line{Begin: begin, Receipt: r})
	}
}

// call notes a batch and its answer.
func (j *journals) call(begin time.Duration, to *pod, body string, status int, text string) {
	if status == http.StatusOK && !acknowledges(status, text) {
		status = 0
	}
	call := &witness.Call{Kind: witness.Calls, Process: to.name, Source: "default/web", Status: status, Valid: true}
	var calls struct{ Batch []json.RawMessage }
	_ = json.Unmarshal([]byte(body), &calls) // A test writes it.
	for _, content := range calls.Batch {
		var id struct{ MessageID string }
		_ = json.Unmarshal(content, &id)
		if len(content) > longBody {
			content = nil
		}
		call.Messages = append(call.Messages, witness.Message{ID: id.MessageID, Content: content, Due: []string{only}})
	}
	j.Sender.Write(witness.Line{Begin: begin, Call: call})
}

// sync notes changes of the audience of manifests: the users that were added, and those that were removed.
func (j *journals) sync(added, removed []string) {
	call := &witness.Call{Kind: witness.Sync, Source: "default/web", Status: http.StatusOK}
	for member, users := range map[bool][]string{true: added, false: removed} {
		for _, u := range users {
			call.Messages = append(call.Messages, witness.Message{Due: []string{only},
				Content: json.RawMessage(fmt.Sprintf(`{"type":"identify","userId":%q,"traits":{"buyers":%v}}`, u, member))})
		}
	}
	j.Sender.Write(witness.Line{Call: call})
}

// settle waits until the owner has no pending message of the destination of manifests.
func (j *journals) settle(t *testing.T, pods []*pod) {
	t.Helper()
	if err := wait.Until(func() error {
		if n := j.writeLedgers(t, owner(t, pods), false, only); n != 0 {
			return fmt.Errorf("%d messages are pending", n)
		}
		return nil
	}); err != nil {
		t.Errorf("ledger of %s, want nothing pending: %v", only, err)
	}
}

// judgeFaults ends the journals of a round, and judges them.
func (j *journals) judgeFaults(t *testing.T, pods []*pod) {
	t.Helper()
	j.settle(t, pods)
	j.writeLetters(t, owner(t, pods), only)
	j.writeLedgers(t, owner(t, pods), true, only)
	j.judge(t, "outcome", "accepted", "refusal", "repeats", "config", "signed", "bytes", "urls", "window", "wait", "ids", "ledger", "fall")
}

// longBody is the length of a body from which the journals have its hash alone.
const longBody = 4 << 10

// writeLedgers writes the ledgers of destinations at an owner, and returns the number of pending messages, -1 if a
// destination has none.
func (j *journals) writeLedgers(t *testing.T, owner *pod, final bool, names ...string) (pending int) {
	t.Helper()
	reports, err := owner.namespaces(t.Context())
	if err != nil {
		return -1
	}
	seen := 0
	for _, n := range reports {
		for _, d := range n.Destinations {
			name, l := n.Namespace+"/"+d.Name, d.Ledger
			if !slices.Contains(names, name) {
				continue
			}
			seen++
			j.last[name] = l
			l = adminapi.Ledger(queue.Ledger(l).Minus(queue.Ledger(j.before[name])))
			unsent := 0
			for _, e := range d.Endpoints {
				pending += int(e.FirstAttemptsPending)
				unsent += int(e.FirstAttemptsPending + e.FirstAttemptsSkipped)
			}
			pending += int(l.Pending)
			j.Ledgers.Write(witness.Line{Ledger: &witness.Ledger{
				Name: name, Process: owner.name, Final: final,
				Accepted: int(l.Accepted), Delivered: int(l.Delivered), Filtered: int(l.Filtered), Omitted: int(l.Omitted),
				DeadLettered: int(l.DeadLettered),
				Discarded:    int(l.Discarded), Pending: int(l.Pending), Unsent: unsent,
			}})
		}
	}
	if seen < len(names) {
		return -1
	}
	return pending
}

// writeLetters writes the dead letters of a destination, if the owner lists all.
func (j *journals) writeLetters(t *testing.T, owner *pod, name string) {
	t.Helper()
	if ids, err := lettersOf(t, owner, name); err == nil {
		j.Ledgers.Write(witness.Line{Letters: &witness.Letters{Name: name, IDs: ids}})
	}
}

// maxLetters is the most dead letters of a list.
const maxLetters = 10_000

// lettersOf returns the ids of all dead letters of a destination.
func lettersOf(t *testing.T, owner *pod, name string) (ids []string, err error) {
	t.Helper()
	for slot := range max(1, owner.slots) {
		for letter, err := range owner.AdminAPI().Slot(slot).DeadLetters(t.Context(), name, maxLetters) {
			if err != nil {
				return nil, err
			}
			ids = append(ids, string(letter.MessageID))
		}
	}
	if len(ids) >= maxLetters {
		return nil, fmt.Errorf("%s has %d dead letters or more", name, maxLetters)
	}
	return ids, nil
}
