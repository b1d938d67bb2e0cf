package system

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// During a large sync with a slow receiver, live calls of the same Source are accepted, and
// delivered before most of the sync. The status shows the progress. A kill -9 neither loses
// nor repeats a call.
func TestLiveCallsPassALargeSync(t *testing.T) {
	const users = 1500
	r := newReceiver(t)
	// The receiver answers one request at a time, slowly enough that a delay of the test changes little.
	r.set(func(int) int { time.Sleep(10 * time.Millisecond); return http.StatusOK })
	// The quota is less than the whole sync.
	value := strings.Repeat("x", 7000)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "  delivery: {timeout: 60s}\n"),
		"a.yaml": audience("vip", `key: vip, type: ComputedTrait`)}, "--source-quota", "9000000", "--max-delivery-timeout", "60s")
	p.syncable("vip")
	p.condition("crm", "Ready", "True", "")
	list := make([]string, users)
	for i := range list {
		list[i] = fmt.Sprintf("user-%05d=%q", i, value)
	}
	synced := make(chan struct{})
	go func() {
		defer close(synced)
		_, _, _ = p.syncMembers("vip", list) // The kill prevents the answer.
	}()
	p.arrive(r, 1)
	sentAt := map[string]int{} // the number of received messages when a live call was accepted
	live := func() {
		t.Helper()
		id := fmt.Sprintf("live-%d", len(sentAt))
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":%q}`, id))
		sentAt[id] = len(r.got())
		time.Sleep(50 * time.Millisecond)
	}
	for len(r.got()) < users/3 {
		live()
	}
	r.open.Lock() // The sync does not end meanwhile.
	release := sync.OnceFunc(r.open.Unlock)
	t.Cleanup(release)
	wait.For(p.T, "progress in the status", func() error {
		s := p.audience("vip").Status
		if s.LastSync == nil || s.LastSync.Pending == 0 || s.LastSync.Pending >= users || s.LastSync.Added != users {
			return fmt.Errorf("status: got %+v, want %d added members, some of them pending", s, users)
		}
		return nil
	})
	if out, errs, code := p.syncMembers("vip", list[1:]); code != 1 || !strings.Contains(errs, "of 1500 identify calls are in the queue") {
		t.Errorf("another sync: got exit code %d: %s %s, want 1 and the progress", code, out, errs)
	}
	release()
	p.End(syscall.SIGKILL)
	<-synced
	p.Launch()
	before := len(r.got())
	for len(r.got()) < before+users/3 {
		live()
	}
	wait.For(p.T, "the end of the sync", func() error {
		if s := p.audience("vip").Status; s.LastSync == nil || s.LastSync.Pending > 0 {
			return fmt.Errorf("last sync: %+v", s.LastSync)
		}
		return nil
	})
	if out, errs, code := p.syncMembers("vip", list, "--wait"); code != 0 || out != "members 1500, added 0, removed 0, changed 0\n" {
		t.Errorf("sync of the same members: got exit code %d: %s %s, want 0 without changes", code, out, errs)
	}
	delivered, _, dead, _ := p.ledger("crm")
	check.Equal(t, "delivered, one for each member and live call", delivered, int64(users+len(sentAt)))
	check.Equal(t, "dead letters", dead, 0)
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
			t.Errorf("messages before %s: got %d, want at most %d", m.MessageID, i-at, users/3)
		case isLive:
			delete(sentAt, m.MessageID) // A repeated delivery after the crash is late.
		case m.Traits != nil && m.Traits["vip"] != value:
			t.Fatalf("identify call: got %s, want the trait vip", q.body)
		default:
			members[m.UserID] = true
		}
	}
	for _, member := range list {
		if id, _, _ := strings.Cut(member, "="); !members[id] {
			t.Errorf("identify calls for %s: got 0, want 1", id)
		}
	}
	if len(sentAt) > 0 {
		t.Errorf("live calls that were not delivered: got %v, want none", sentAt)
	}
	check.Equal(t, "messages without a valid signature", r.unsigned, 0)
}
