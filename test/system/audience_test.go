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

	"github.com/posthorn/posthorn/api/v1alpha1"
)

func audience(name, more string) string {
	return `
apiVersion: posthorn.dev/v1alpha1
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
	p.t.Helper()
	return cli(p.t, "", append([]string{"audience", "sync", key, members(p.t, list...), "--endpoint", "http://" + p.Addr, "--write-key", "system-write-key"}, flags...)...)
}

// traits are the identify messages that arrived, as "user key=value", sorted.
func traits(t *testing.T, requests []request) (out []string) {
	t.Helper()
	for _, q := range requests {
		var m struct {
			Type, UserID, Timestamp string
			Version                 float64
			Traits                  map[string]any
		}
		if err := json.Unmarshal([]byte(q.body), &m); err != nil || m.Type != "identify" || m.Version != 1 || m.Timestamp == "" {
			t.Errorf("message %s (%v)", q.body, err)
		}
		for k, v := range m.Traits {
			out = append(out, fmt.Sprintf("%s %s=%v", m.UserID, k, v))
		}
	}
	slices.Sort(out)
	return out
}

func (p *posthorn) audience(name string) v1alpha1.Audience {
	p.t.Helper()
	out, errs, code := cli(p.t, "", "get", "audiences", name, "-o", "json", "--admin", p.Admin)
	if code != 0 {
		p.t.Fatalf("get audiences: exit %d: %s", code, errs)
	}
	var a v1alpha1.Audience
	if err := json.Unmarshal([]byte(out), &a); err != nil {
		p.t.Fatal(err)
	}
	return a
}

// An audience as its owner sees it: the first sync tells all members, later
// ones the changes, each as a signed identify call that verifies in JavaScript.
func TestAudience(t *testing.T) {
	r := newReceiver(t)
	p := start(t, map[string]string{
		"source.yaml": source(), "crm.yaml": destination("crm", r.URL, ""),
		"audiences.yaml": audience("shoppers", `displayName: "First Time Shoppers"`) + "---" + audience("spent", `displayName: "Total Spent (180 Days)", type: ComputedTrait`),
	})
	seen := 0
	told := func(want ...string) {
		t.Helper()
		got := p.arrive(r, seen+len(want))[seen:]
		seen += len(got)
		slices.Sort(want)
		if d := cmp.Diff(want, traits(t, got)); d != "" {
			t.Errorf("told (-want +got):\n%s", d)
		}
	}
	ok := func(out, errs string, code int) {
		t.Helper()
		if code != 0 {
			t.Fatalf("exit %d: %s %s", code, out, errs)
		}
	}
	p.eventually("the audiences are ready", func() error {
		for name, key := range map[string]string{"shoppers": "first_time_shoppers", "spent": "total_spent_180_days"} {
			if a := p.audience(name); a.Status.Key != key {
				return fmt.Errorf("%s has key %q", name, a.Status.Key)
			}
		}
		return nil
	})
	ok(p.syncMembers("first_time_shoppers", []string{"ü1", "u2", "u3", "u2"}))
	told("ü1 first_time_shoppers=true", "u2 first_time_shoppers=true", "u3 first_time_shoppers=true")
	ok(p.syncMembers("first_time_shoppers", []string{"u3", "u4", "ü1"}))
	told("u2 first_time_shoppers=false", "u4 first_time_shoppers=true")
	ok(p.syncMembers("total_spent_180_days", []string{"u1=450", "u2=1e21", `u3="none"`}))
	told("u1 total_spent_180_days=450", "u2 total_spent_180_days=1e+21", "u3 total_spent_180_days=none")
	ok(p.syncMembers("total_spent_180_days", []string{"u1=450", "u2=7", `u3="none"`}))
	told("u2 total_spent_180_days=7")
	verifyInNode(t, r.got())

	// What is refused changes nothing and says why.
	for _, c := range []struct {
		key  string
		list []string
		want string
	}{
		{"first_time_shoppers", []string{"u3"}, "allowRemoval"},
		{"first_time_shoppers", nil, "allowEmpty"},
		{"first_time_shoppers", []string{"u3", "u4=5"}, "line 2"},
		{"nobody", []string{"u3"}, "no audience with this key"},
	} {
		if out, errs, code := p.syncMembers(c.key, c.list); code != 1 || !strings.Contains(errs, c.want) || out != "" {
			t.Errorf("%+v: exit %d: %s %s", c, code, out, errs)
		}
	}
	if status, answer, err := p.post("/v1/audiences/first_time_shoppers/members", "wrong", `{"userId":"x"}`); err != nil || status != http.StatusUnauthorized {
		t.Errorf("wrong write key: %d %s %v", status, answer, err)
	}
	p.eventually("the refusal shows", func() error {
		for _, c := range p.audience("shoppers").Status.Conditions {
			if c.Type == v1alpha1.ConditionSynced && c.Reason == v1alpha1.ReasonSyncRefused && strings.Contains(c.Message, "line 2") {
				return nil
			}
		}
		return fmt.Errorf("%+v", p.audience("shoppers").Status.Conditions)
	})

	// The members outlive the process, and the queue takes part in everything.
	p.kill(syscall.SIGKILL)
	p.run()
	ok(p.syncMembers("first_time_shoppers", []string{"u4"}, "--allow-removal", "70"))
	told("u3 first_time_shoppers=false", "ü1 first_time_shoppers=false")
	if out, errs, code := cli(t, `{"userId":"u9"}`+"\n"+`{"userId":"u4","member":false}`, "audience", "sync", "first_time_shoppers", "-", "--increment", "--endpoint", "http://"+p.Addr, "--write-key", key); code != 0 || !strings.Contains(out, "members 1, added 1, removed 1, changed 0") {
		t.Errorf("increment: exit %d: %s %s", code, out, errs)
	}
	told("u4 first_time_shoppers=false", "u9 first_time_shoppers=true")
	p.eventually("the status shows the sync", func() error {
		s := p.audience("shoppers").Status
		if s.Members == nil || *s.Members != 1 || s.LastSync == nil || s.LastSync.Added != 1 || s.LastSync.Removed != 1 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	if out, _, code := cli(t, "", "get", "audiences", "--admin", p.Admin); code != 0 || !strings.Contains(out, "MEMBERS") || !strings.Contains(out, "shoppers") {
		t.Errorf("get audiences: exit %d: %s", code, out)
	}
	if _, _, dead, _ := p.ledger("crm"); dead != 0 {
		t.Errorf("%d dead letters", dead)
	}
}

// kill -9 in the middle of syncs: in the end every user is told what is so, and
// nobody is ever told to have left who had not.
func TestAudienceSurvivesKillNine(t *testing.T) {
	const users = 20_000
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "\n  delivery: {maxInFlight: 256}\n"), "a.yaml": audience("vip", `displayName: VIP`)})
	p.eventually("the audience is known", func() error {
		if p.audience("vip").Status.Key != "vip" {
			return fmt.Errorf("not yet")
		}
		return nil
	})
	all := make([]string, users)
	for i := range all {
		all[i] = fmt.Sprintf("user-%05d", i)
	}
	staying := all[users/4:]
	for round, list := range [][]string{all, staying} {
		for kills := range 3 {
			done := make(chan struct{})
			go func() {
				defer close(done)
				_, _, _ = p.syncMembers("vip", list) // its answer may be lost with the process
			}()
			time.Sleep(time.Duration(50+150*kills) * time.Millisecond) // somewhere in it; any point must do
			p.kill(syscall.SIGKILL)
			<-done
			p.run()
		}
		p.eventually(fmt.Sprintf("sync %d is taken", round), func() error {
			if out, errs, code := p.syncMembers("vip", list); code != 0 || strings.Contains(out, "still") {
				return fmt.Errorf("exit %d: %s %s", code, out, errs)
			}
			return nil
		})
		p.ledger("crm")
	}
	is := map[string]bool{}
	stays := map[string]bool{}
	for _, id := range staying {
		stays[id] = true
	}
	for _, q := range r.got() {
		var m struct {
			UserID string
			Traits map[string]bool
		}
		if err := json.Unmarshal([]byte(q.body), &m); err != nil {
			t.Fatal(err)
		}
		if !m.Traits["vip"] && stays[m.UserID] {
			t.Fatalf("%s was told to have left: %s", m.UserID, q.body)
		}
		is[m.UserID] = m.Traits["vip"]
	}
	for _, id := range all {
		if member, told := is[id]; !told || member != stays[id] && !stays[id] && !leftTold(r, id) {
			t.Fatalf("%s: told %v, is %v, stays %v", id, told, member, stays[id])
		}
	}
}

// leftTold: deliveries of one user may overtake one another, so that false need not be the last.
func leftTold(r *receiver, id string) bool {
	return slices.ContainsFunc(r.got(), func(q request) bool {
		return strings.Contains(q.body, `"userId":"`+id+`"`) && strings.Contains(q.body, `"vip":false`)
	})
}
