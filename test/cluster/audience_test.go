package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/controllers"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/process"
)

// pods are dispatcher processes, as a StatefulSet runs them: each with a folder
// of its own; number 0 keeps the audiences.
type pods struct {
	t    *testing.T
	list []*pod
}

type pod struct {
	*process.Posthorn
	name string
	up   atomic.Bool
}

func newPods(t *testing.T, server *env.Env, log io.Writer, n int) *pods {
	t.Helper()
	binary, err := process.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	p := &pods{t: t}
	for i := range n {
		one := &pod{name: fmt.Sprintf("posthorn-dispatcher-%d", i), Posthorn: &process.Posthorn{Binary: binary, Addr: process.FreeAddr(), Admin: process.FreeAddr(), Log: log}}
		one.Args = []string{"dispatcher", "--kubeconfig", server.Kubeconfig(), "--namespace", release, "--pod-name", one.name, "--data", t.TempDir(),
			"--listen", one.Addr, "--admin-listen", one.Admin, "--admin-auth", "none", "--egress-allow", "127.0.0.0/8"}
		if i > 0 {
			one.Args = append(one.Args, "--audience-owner", "http://"+p.list[0].Addr)
		}
		p.list = append(p.list, one)
		t.Cleanup(func() { p.stop(i, os.Kill) })
	}
	return p
}

func (p *pods) start(number int) {
	p.t.Helper()
	if err := p.list[number].Start(); err != nil {
		p.t.Fatal(err)
	}
	p.list[number].up.Store(true)
}

func (p *pods) stop(number int, signal os.Signal) {
	p.list[number].up.Store(false)
	if err := p.list[number].Stop(signal); err != nil {
		p.t.Error(err)
	}
}

// Ready is what the operator asks: the pods that are there.
func (p *pods) Ready(context.Context) (list []controllers.Pod, err error) {
	for _, one := range p.list {
		if one.up.Load() {
			list = append(list, controllers.Pod{Name: one.name, URL: "http://" + one.Admin})
		}
	}
	return list, nil
}

// do sends a request to a pod, as a Service that chose it does.
func (p *pods) do(number int, method, path, body string) (status int, answer string, header http.Header, err error) {
	req, err := http.NewRequest(method, "http://"+p.list[number].Addr+path, strings.NewReader(body))
	if err != nil {
		return 0, "", nil, err
	}
	req.SetBasicAuth("hush-web-key", "")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), resp.Header, err
}

// Several dispatcher pods: a sync and a deletion request reach the one that keeps
// them from any; what is known of a user is known on all; without the owner calls
// go on, and its crash in the middle of a sync loses nothing.
func TestAudiencesWithSeveralPods(t *testing.T) {
	server, kubectl, logs := cluster(t)
	kubectl("", "create", "namespace", release)
	p := newPods(t, server, logs, 3)

	// Who was told what, in the order in which it arrived.
	var mu sync.Mutex
	told := map[string][]bool{}
	var deleted []string
	hook := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) {
		body, _ := io.ReadAll(q.Body)
		var m struct {
			Type, UserID string
			Traits       map[string]bool
		}
		if err := json.Unmarshal(body, &m); err != nil {
			t.Errorf("%v: %s", err, body)
		}
		mu.Lock()
		defer mu.Unlock()
		switch is, ok := m.Traits["vip"]; {
		case ok:
			told[m.UserID] = append(told[m.UserID], is)
		case m.Type == "delete":
			deleted = append(deleted, string(body))
		}
	}))
	t.Cleanup(hook.Close)
	count := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(told)
	}

	kubectl(webToCRM(hook.URL)+`
---
apiVersion: posthorn.dev/v1alpha1
kind: Audience
metadata: {name: vip}
spec: {sourceRef: {name: web}, displayName: VIP}
`, "apply", "-f", "-")
	operator(t, server.Config, controllers.Options{Pods: p})
	for i := range p.list {
		p.start(i)
	}
	kubectl("", "wait", "whd/crm", "psrc/web", "paud/vip", "--for=condition=Ready")

	const path = "/v1/audiences/vip/members"
	const users = 20_000
	list := func(from, to int) string {
		var b bytes.Buffer
		for i := from; i < to; i++ {
			fmt.Fprintf(&b, "{\"userId\":\"user-%05d\"}\n", i)
		}
		return b.String()
	}

	// A sync through another pod; its owner is killed when some were told.
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _, _, _ = p.do(2, http.MethodPut, path, list(0, users)) // its answer may be lost with the owner
	}()
	eventually(t, "the first members are told", func() bool { return count() > 0 })
	p.stop(0, syscall.SIGKILL)
	<-done
	if n := count(); n == users {
		t.Log("the owner was killed after all members were told")
	}

	// Without the owner: a clear answer to syncs, and calls go on.
	status, answer, header, err := p.do(1, http.MethodPut, path, list(0, users))
	if err != nil || status != http.StatusServiceUnavailable || header.Get("Retry-After") == "" || !strings.Contains(answer, "owner_unreachable") {
		t.Errorf("without the owner a sync is answered %d %v %s (%v)", status, header, answer, err)
	}
	for number := range 2 {
		if status, answer, _, err := p.do(number+1, http.MethodPost, "/v1/track", `{"userId":"u1","event":"E"}`); err != nil || status != http.StatusOK {
			t.Errorf("without the owner a call is answered %d %s (%v)", status, answer, err)
		}
	}
	// A deletion request waits for it; who is suppressed is so on every pod at once.
	kubectl("apiVersion: posthorn.dev/v1alpha1\nkind: DeletionRequest\nmetadata: {name: forget}\nspec: {userId: user-00007, suppress: true}\n", "apply", "-f", "-")
	suppressed := func(number int) {
		t.Helper()
		eventually(t, p.list[number].name+" refuses who is suppressed", func() bool {
			status, answer, _, err := p.do(number, http.MethodPost, "/v1/page", `{"userId":"user-00007"}`)
			return err == nil && status == http.StatusForbidden && strings.Contains(answer, "user_suppressed")
		})
	}
	suppressed(1)
	suppressed(2)
	if got := kubectl("", "get", "pdel", "forget", "-o", `jsonpath={.status.conditions[?(@.type=="Complete")].status}`); got == "True" {
		t.Error("a deletion request completed without the dispatcher that sends the notifications")
	}

	// The owner comes back with its volume.
	p.start(0)
	suppressed(0)
	var result struct {
		Sent                    bool
		Members, Added, Removed int64
	}
	eventually(t, "a sync is taken again", func() bool {
		status, answer, _, err := p.do(1, http.MethodPut, path, list(0, users))
		return err == nil && status == http.StatusOK && json.Unmarshal([]byte(answer), &result) == nil
	})
	// It was decided before the crash, as some had been told.
	if result.Members != users || result.Added != 0 || result.Removed != 0 {
		t.Errorf("the same members again: %+v", result)
	}
	// All but the suppressed one, who may have been told before.
	eventually(t, "every member is told", func() bool { return count() >= users-1 })
	kubectl("", "wait", "pdel/forget", "--for=condition=Complete")
	mu.Lock()
	if len(deleted) != 1 || !strings.HasPrefix(deleted[0], `{"type":"delete","userId":"user-00007","timestamp":"`) || strings.Contains(deleted[0], "version") {
		t.Errorf("delete messages: %q", deleted)
	}
	for user, states := range told {
		if slices.Contains(states, false) {
			t.Errorf("%s was told to have left", user)
		}
	}
	mu.Unlock()

	// Scaled down to one: what the owner knows stays.
	p.stop(2, syscall.SIGTERM)
	p.stop(1, syscall.SIGTERM)
	status, answer, _, err = p.do(0, http.MethodPut, path, list(100, users))
	if err != nil || status != http.StatusOK || !strings.Contains(answer, `"added":0,"removed":100`) {
		t.Errorf("on the owner alone: %d %s (%v)", status, answer, err)
	}
	eventually(t, "who left is told", func() bool {
		mu.Lock()
		defer mu.Unlock()
		left := 0
		for _, states := range told {
			if slices.Contains(states, false) {
				left++
			}
		}
		return left >= 99
	})
	mu.Lock()
	for user, states := range told {
		if slices.Contains(states, false) && user >= "user-00100" {
			t.Errorf("%s was told to have left", user)
		}
	}
	mu.Unlock()
	// And up again: the new pod hands on, too.
	p.start(1)
	if status, answer, _, err := p.do(1, http.MethodGet, path, ""); err != nil || status != http.StatusOK || !strings.Contains(answer, `"members":19900`) {
		t.Errorf("asked through a pod that came back: %d %s (%v)", status, answer, err)
	}
	eventually(t, "status shows the members", func() bool {
		return strings.Contains(strings.Join(strings.Fields(kubectl("", "get", "paud", "vip")), " "), "vip True Ready True 19900 0 100 0")
	})
	if strings.Contains(logs.String(), "panic") {
		t.Error("a pod panicked")
	}
}
