package system

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A first sync that a slow receiver needs long for: live calls of the same Source
// are all taken, and arrive before most of the sync does; progress shows; kill -9
// in the middle loses nobody and puts nobody into the queue twice.
func TestLiveCallsPassALargeSync(t *testing.T) {
	const users = 1500
	r := newReceiver(t)
	r.set(func(int) int { time.Sleep(5 * time.Millisecond); return http.StatusOK }) // one after another
	// All of the sync at once would be more than the quota.
	value := strings.Repeat("x", 7000)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, ""), "a.yaml": audience("vip", `displayName: VIP, type: ComputedTrait`)}, "--source-quota", "9000000")
	p.eventually("the audience is known", func() error {
		if p.audience("vip").Status.Key != "vip" {
			return fmt.Errorf("not yet")
		}
		return nil
	})
	p.condition("crm", "Ready", "True", "")
	list := make([]string, users)
	for i := range list {
		list[i] = fmt.Sprintf("user-%05d=%q", i, value)
	}
	synced := make(chan struct{})
	go func() {
		defer close(synced)
		_, _, _ = p.syncMembers("vip", list) // its answer is lost with the process
	}()
	p.arrive(r, 1)
	sentAt := map[string]int{} // how many messages had arrived when a live call was sent
	live := func() {
		t.Helper()
		id := fmt.Sprintf("live-%d", len(sentAt))
		sentAt[id] = len(r.got())
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":%q}`, id))
		time.Sleep(50 * time.Millisecond)
	}
	for len(r.got()) < users/3 {
		live()
	}
	p.eventually("progress shows", func() error {
		s := p.audience("vip").Status
		if s.LastSync == nil || s.LastSync.Pending == 0 || s.LastSync.Pending >= users || s.LastSync.Added != users {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	if out, errs, code := p.syncMembers("vip", list[1:]); code != 1 || !strings.Contains(errs, "of 1500 identify calls are in the queue") {
		t.Errorf("another sync: exit %d: %s %s", code, out, errs)
	}
	p.kill(syscall.SIGKILL)
	<-synced
	p.run()
	before := len(r.got())
	for len(r.got()) < before+users/3 {
		live()
	}
	p.eventually("the sync ends", func() error {
		if s := p.audience("vip").Status; s.LastSync == nil || s.LastSync.Pending > 0 {
			return fmt.Errorf("the last sync is %+v", s.LastSync)
		}
		return nil
	})
	if out, errs, code := p.syncMembers("vip", list, "--wait"); code != 0 || out != "members 1500, added 0, removed 0, changed 0\n" {
		t.Errorf("the same members again: exit %d: %s %s", code, out, errs)
	}
	delivered, _, dead, _ := p.ledger("crm")
	if want := int64(users + len(sentAt)); delivered != want || dead != 0 {
		t.Errorf("%d delivered, %d dead letters, want %d: one for each member and live call", delivered, dead, want)
	}
	members := map[string]bool{}
	for i, q := range r.got() {
		var m struct {
			UserID, MessageID string
			Traits            map[string]any
		}
		if err := json.Unmarshal([]byte(q.body), &m); err != nil {
			t.Fatal(err)
		}
		at, isLive := sentAt[m.MessageID]
		switch {
		case isLive && i-at > users/3:
			t.Errorf("%s stood behind %d messages", m.MessageID, i-at)
		case isLive:
			delete(sentAt, m.MessageID) // what comes again after the crash came late
		case m.Traits != nil && m.Traits["vip"] != value:
			t.Fatalf("told %s", q.body)
		default:
			members[m.UserID] = true
		}
	}
	for _, member := range list {
		if id, _, _ := strings.Cut(member, "="); !members[id] {
			t.Errorf("%s was not told", id)
		}
	}
	if len(sentAt) > 0 {
		t.Errorf("live calls did not arrive: %v", sentAt)
	}
	if r.unsigned > 0 {
		t.Errorf("%d messages were not signed", r.unsigned)
	}
}
