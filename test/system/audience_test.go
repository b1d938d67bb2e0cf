package system

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

func audience(name, more string) string {
	return `
apiVersion: posthorn.dev/v1beta1
kind: Audience
metadata: {name: ` + name + `}
spec: {sourceRef: {name: web}, ` + more + `}
`
}

// members writes a file of members, "id" or "id=value" each.
func members(t *testing.T, list ...string) string {
	t.Helper()
	var b strings.Builder
	for _, m := range list {
		id, value, ok := strings.Cut(m, "=")
		if ok {
			value = `,"value":` + value
		}
		fmt.Fprintf(&b, "{\"userId\":%q%s}\n", id, value)
	}
	path := filepath.Join(t.TempDir(), "members.ndjson")
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (p *posthorn) syncMembers(key string, list []string, flags ...string) (stdout, stderr string, code int) {
	p.T.Helper()
	return cli(p.T, "", append([]string{"audience", "sync", key, members(p.T, list...), "--address", "http://" + p.Addr, "--write-key",
		"system-write-key"}, flags...)...)
}

// traits returns the identify messages, as "user key=value", sorted.
func traits(t *testing.T, requests []request) (out []string) {
	t.Helper()
	for _, q := range requests {
		var m struct {
			Type, UserID, Timestamp string
			Version                 float64
			Traits                  map[string]any
		}
		if err := json.Unmarshal([]byte(q.body), &m); err != nil || m.Type != "identify" || m.Version != 1 || m.Timestamp == "" {
			t.Errorf("message: got %s and error %v, want an identify call of version 1 with a timestamp", q.body, err)
		}
		for k, v := range m.Traits {
			out = append(out, fmt.Sprintf("%s %s=%v", m.UserID, k, v))
		}
	}
	slices.Sort(out)
	return out
}

func (p *posthorn) audience(name string) v1beta1.Audience {
	p.T.Helper()
	out, errs, code := cli(p.T, "", "get", "audiences", name, "-o", "json", "--admin", p.Admin)
	if code != 0 {
		p.T.Fatalf("get audiences: got exit code %d, want 0: %s", code, errs)
	}
	var a v1beta1.Audience
	if err := json.Unmarshal([]byte(out), &a); err != nil {
		p.T.Fatal(err)
	}
	return a
}

// syncable waits until the dispatcher accepts syncs of audiences.
func (p *posthorn) syncable(names ...string) {
	p.T.Helper()
	for _, name := range names {
		wait.For(p.T, "the audience "+name, func() error {
			if a := p.audience(name); !meta.IsStatusConditionTrue(a.Status.Conditions, v1beta1.ConditionReady) {
				return fmt.Errorf("reason %q", a.Status.Reason)
			}
			return nil
		})
	}
}

// The first sync of an audience sends all members, later syncs only the changes, each as a
// signed identify call that verifies in JavaScript.
func TestAudience(t *testing.T) {
	r := newReceiver(t)
	p := start(t, map[string]string{
		"source.yaml": source(), "crm.yaml": destination("crm", r.URL, ""),
		"audiences.yaml": audience("shoppers", `key: first_time_shoppers`) + "---" + audience("spent",
			`key: total_spent_180_days, type: ComputedTrait`),
	})
	// A message that is sent again after a kill counts once: delivery is at least once.
	seen := map[string]bool{}
	wantCalls := func(want ...string) {
		t.Helper()
		var got []request
		wait.For(p.T, fmt.Sprintf("%d new messages", len(want)), func() error {
			got = nil
			fresh := map[string]bool{}
			for _, q := range r.got() {
				if id := messageID(t, q.body); !seen[id] && !fresh[id] {
					fresh[id] = true
					got = append(got, q)
				}
			}
			if len(got) < len(want) {
				return fmt.Errorf("got %d", len(got))
			}
			return nil
		})
		for _, q := range got {
			seen[messageID(t, q.body)] = true
		}
		slices.Sort(want)
		if d := cmp.Diff(want, traits(t, got)); d != "" {
			t.Errorf("identify calls (-want +got):\n%s", d)
		}
	}
	ok := func(out, errs string, code int) {
		t.Helper()
		if code != 0 {
			t.Fatalf("sync: got exit code %d, want 0: %s %s", code, out, errs)
		}
	}
	p.syncable("shoppers", "spent")
	ok(p.syncMembers("first_time_shoppers", []string{"ü1", "u2", "u3", "u2"}))
	wantCalls("ü1 first_time_shoppers=true", "u2 first_time_shoppers=true", "u3 first_time_shoppers=true")
	ok(p.syncMembers("first_time_shoppers", []string{"u3", "u4", "ü1"}))
	wantCalls("u2 first_time_shoppers=false", "u4 first_time_shoppers=true")
	ok(p.syncMembers("total_spent_180_days", []string{"u1=450", "u2=1e21", `u3="none"`}))
	wantCalls("u1 total_spent_180_days=450", "u2 total_spent_180_days=1e+21", "u3 total_spent_180_days=none")
	ok(p.syncMembers("total_spent_180_days", []string{"u1=450", "u2=7", `u3="none"`}))
	wantCalls("u2 total_spent_180_days=7")
	verifyInNode(t, r.got())

	// A rejected sync changes nothing, and its error gives the reason.
	for _, c := range []struct {
		key  string
		list []string
		want string
	}{
		{"first_time_shoppers", []string{"u3"}, "allowRemoval"},
		{"first_time_shoppers", nil, "allowEmpty"},
		{"first_time_shoppers", []string{"u3", "u4=5"}, "line 2"},
		{"unknown", []string{"u3"}, "no audience with this key"},
	} {
		if out, errs, code := p.syncMembers(c.key, c.list); code != 1 || !strings.Contains(errs, c.want) || out != "" {
			t.Errorf("sync of %s with %v: got exit code %d: %s %s, want 1 and %q", c.key, c.list, code, out, errs, c.want)
		}
	}
	if status, answer, err := p.Post("/v1/audiences/first_time_shoppers/members", "wrong", `{"userId":"x"}`); err != nil ||
		status != http.StatusUnauthorized {
		t.Errorf("wrong write key: got status %d, body %s and error %v, want 401", status, answer, err)
	}
	wait.For(p.T, "the rejected sync in the status", func() error {
		for _, c := range p.audience("shoppers").Status.Conditions {
			if c.Type == v1beta1.ConditionSynced && c.Reason == v1beta1.ReasonSyncRefused && strings.Contains(c.Message, "line 2") {
				return nil
			}
		}
		return fmt.Errorf("conditions: got %+v, want Synced %s for line 2", p.audience("shoppers").Status.Conditions, v1beta1.ReasonSyncRefused)
	})

	// The members survive a kill of the process.
	p.End(syscall.SIGKILL)
	p.Launch()
	ok(p.syncMembers("first_time_shoppers", []string{"u4"}, "--allow-removal", "70"))
	wantCalls("u3 first_time_shoppers=false", "ü1 first_time_shoppers=false")
	if out, errs, code := cli(t, `{"userId":"u9"}`+"\n"+`{"userId":"u4","member":false}`, "audience", "sync", "first_time_shoppers", "-",
		"--increment", "--address", "http://"+p.Addr, "--write-key", key); code != 0 ||
		!strings.Contains(out, "members 1, added 1, removed 1, changed 0") {
		t.Errorf("increment: got exit code %d: %s %s, want 0 and one added and removed", code, out, errs)
	}
	wantCalls("u4 first_time_shoppers=false", "u9 first_time_shoppers=true")
	wait.For(p.T, "the sync in the status", func() error {
		s := p.audience("shoppers").Status
		if s.Members == nil || *s.Members != 1 || s.LastSync == nil || s.LastSync.Added != 1 || s.LastSync.Removed != 1 {
			return fmt.Errorf("status: got %+v, want 1 member, 1 added and 1 removed", s)
		}
		return nil
	})
	if out, _, code := cli(t, "", "get", "audiences", "--admin", p.Admin); code != 0 || !strings.Contains(out, "MEMBERS") ||
		!strings.Contains(out, "shoppers") {
		t.Errorf("get audiences: got exit code %d: %s, want 0 and a table with shoppers", code, out)
	}
	_, _, dead, _ := p.ledger("crm")
	check.Equal(t, "dead letters", dead, 0)
}

// After kill -9 during syncs the receiver has the current value of every user, and no
// remaining member was reported as removed.
func TestAudienceSurvivesKillNine(t *testing.T) {
	const users = 20_000
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "\n  delivery: {maxInFlight: 256}\n"),
		"a.yaml": audience("vip", `key: vip`)})
	p.syncable("vip")
	all := make([]string, users)
	for i := range all {
		all[i] = fmt.Sprintf("user-%05d", i)
	}
	remaining := all[users/4:]
	for round, list := range [][]string{all, remaining} {
		for kills := range 3 {
			done := make(chan struct{})
			go func() {
				defer close(done)
				_, _, _ = p.syncMembers("vip", list) // The kill may prevent the answer.
			}()
			time.Sleep(time.Duration(50+150*kills) * time.Millisecond) // Any point during the sync is valid.
			p.End(syscall.SIGKILL)
			<-done
			p.Launch()
		}
		wait.For(p.T, fmt.Sprintf("an accepted sync %d", round), func() error {
			if out, errs, code := p.syncMembers("vip", list); code != 0 || strings.Contains(out, "still") {
				return fmt.Errorf("exit %d: %s %s", code, out, errs)
			}
			return nil
		})
		p.ledger("crm")
	}
	received := map[string]bool{}
	isMember := map[string]bool{}
	for _, id := range remaining {
		isMember[id] = true
	}
	for _, q := range r.got() {
		var m struct {
			UserID string
			Traits map[string]bool
		}
		if err := json.Unmarshal([]byte(q.body), &m); err != nil {
			t.Fatal(err)
		}
		if !m.Traits["vip"] && isMember[m.UserID] {
			t.Fatalf("call for the member %s: got %s, want vip true", m.UserID, q.body)
		}
		received[m.UserID] = m.Traits["vip"]
	}
	for _, id := range all {
		if value, ok := received[id]; !ok || value != isMember[id] && !isMember[id] && !removalSent(r, id) {
			t.Fatalf("last value of %s: got %v (a call exists: %v), want %v", id, value, ok, isMember[id])
		}
	}
}

// removalSent reports whether a call with false was delivered. Deliveries of one user may
// be reordered, so it need not be the last one.
func removalSent(r *receiver, id string) bool {
	return slices.ContainsFunc(r.got(), func(q request) bool {
		return strings.Contains(q.body, `"userId":"`+id+`"`) && strings.Contains(q.body, `"vip":false`)
	})
}

// messageID returns the messageId of a delivered body.
func messageID(t *testing.T, body string) string {
	t.Helper()
	var m struct{ MessageID string }
	if err := json.Unmarshal([]byte(body), &m); err != nil || m.MessageID == "" {
		t.Fatalf("message: got %s and error %v, want a messageId", body, err)
	}
	return m.MessageID
}
