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
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// pods are dispatcher processes, as in a StatefulSet: each has its own data directory, and
// number 0 stores the audiences.
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
		one := &pod{name: fmt.Sprintf("posthorn-dispatcher-%d", i),
			Posthorn: &process.Posthorn{Binary: binary, Addr: process.FreeAddr(), Admin: process.FreeAddr(), Log: log}}
		one.Args = []string{"dispatcher", "--kubeconfig", server.Kubeconfig(), "--system-namespace", release, "--pod-name", one.name, "--data",
			t.TempDir(),
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

// Ready returns the running pods, for the operator.
func (p *pods) List(context.Context) (list []controllers.Pod, err error) {
	for _, one := range p.list {
		if one.up.Load() {
			list = append(list, controllers.Pod{Name: one.name, URL: "http://" + one.Admin})
		}
	}
	return list, nil
}

// do sends a request to a pod.
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

// With several dispatcher pods, every pod forwards a sync to the owner and applies
// suppressions. Without the owner calls are accepted, and its crash during a sync loses no
// change.
func TestAudiencesWithSeveralPods(t *testing.T) {
	server, kubectl, logs := cluster(t)
	kubectl("", "create", "namespace", release)
	p := newPods(t, server, logs, 3)

	// The values of the trait for each user, in the order of arrival.
	var mu sync.Mutex
	received := map[string][]bool{}
	var deleted []string
	hook := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) {
		body, _ := io.ReadAll(q.Body)
		var m struct {
			Type, UserID string
			Traits       map[string]bool
		}
		if err := json.Unmarshal(body, &m); err != nil {
			t.Errorf("body of a request: got error %v for %s, want JSON", err, body)
		}
		mu.Lock()
		defer mu.Unlock()
		switch value, ok := m.Traits["vip"]; {
		case ok:
			received[m.UserID] = append(received[m.UserID], value)
		case m.Type == "delete":
			deleted = append(deleted, string(body))
		}
	}))
	t.Cleanup(hook.Close)
	count := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(received)
	}

	kubectl(webToCRM(hook.URL)+`
---
apiVersion: posthorn.dev/v1beta1
kind: Audience
metadata: {name: vip}
spec: {sourceRef: {name: web}, key: vip}
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

	// A sync through another pod, whose owner is killed after the first calls.
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _, _, _ = p.do(2, http.MethodPut, path, list(0, users)) // The kill may prevent the answer.
	}()
	wait.True(t, "the first identify calls", func() bool { return count() > 0 })
	p.stop(0, syscall.SIGKILL)
	<-done
	if n := count(); n == users {
		t.Log("the owner was killed after the last identify call")
	}

	// Without the owner syncs are answered 503, and calls are accepted.
	status, answer, header, err := p.do(1, http.MethodPut, path, list(0, users))
	if err != nil || status != http.StatusServiceUnavailable || header.Get("Retry-After") == "" ||
		!strings.Contains(answer, "owner_unreachable") {
		t.Errorf("sync without the owner: got status %d, header %v, body %s and error %v, want 503 owner_unreachable with Retry-After", status, header, answer, err)
	}
	for number := range 2 {
		if status, answer, _, err := p.do(number+1, http.MethodPost, "/v1/track", `{"userId":"u1","event":"E"}`); err != nil ||
			status != http.StatusOK {
			t.Errorf("call without the owner: got status %d, body %s and error %v, want 200", status, answer, err)
		}
	}
	// A deletion request waits for the owner; every pod applies the suppression at once.
	kubectl("apiVersion: posthorn.dev/v1beta1\nkind: DeletionRequest\nmetadata: {name: forget}\nspec: {userID: user-00007, suppress: true}\n", "apply", "-f", "-")
	suppressed := func(number int) {
		t.Helper()
		wait.True(t, p.list[number].name+" to reject a suppressed user", func() bool {
			status, answer, _, err := p.do(number, http.MethodPost, "/v1/page", `{"userId":"user-00007"}`)
			return err == nil && status == http.StatusForbidden && strings.Contains(answer, "user_suppressed")
		})
	}
	suppressed(1)
	suppressed(2)
	if got := kubectl("", "get", "pdel", "forget", "-o", `jsonpath={.status.conditions[?(@.type=="Complete")].status}`); got == "True" {
		t.Error("the deletion request completed without the owner, which sends the notifications")
	}

	// The owner starts again with its volume.
	p.start(0)
	suppressed(0)
	var result struct {
		Sent                    bool
		Members, Added, Removed int64
	}
	wait.True(t, "an accepted sync", func() bool {
		status, answer, _, err := p.do(1, http.MethodPut, path, list(0, users))
		return err == nil && status == http.StatusOK && json.Unmarshal([]byte(answer), &result) == nil
	})
	// The first sync was accepted before the crash, because calls of it had been sent.
	check.Equal(t, "Members of the repeated sync", result.Members, users)
	check.Equal(t, "Added of the repeated sync", result.Added, 0)
	check.Equal(t, "Removed of the repeated sync", result.Removed, 0)
	// The call of the suppressed user may have been sent before the suppression.
	wait.True(t, "an identify call for every member", func() bool { return count() >= users-1 })
	kubectl("", "wait", "pdel/forget", "--for=condition=Complete")
	mu.Lock()
	if len(deleted) != 1 || !strings.HasPrefix(deleted[0], `{"type":"delete","userId":"user-00007","timestamp":"`) ||
		strings.Contains(deleted[0], "version") {
		t.Errorf("delete messages: got %q, want one for user-00007 without a version", deleted)
	}
	for user, states := range received {
		if slices.Contains(states, false) {
			t.Errorf("values of %s: got %v, want no false", user, states)
		}
	}
	mu.Unlock()

	// Scaled down to one pod, the owner has all members.
	p.stop(2, syscall.SIGTERM)
	p.stop(1, syscall.SIGTERM)
	status, answer, _, err = p.do(0, http.MethodPut, path, list(100, users))
	if err != nil || status != http.StatusOK || !strings.Contains(answer, `"added":0,"removed":100`) {
		t.Errorf("sync with the owner alone: got status %d, body %s and error %v, want 200 with 0 added and 100 removed", status, answer, err)
	}
	wait.True(t, "an identify call for every removed member", func() bool {
		mu.Lock()
		defer mu.Unlock()
		removed := 0
		for _, states := range received {
			if slices.Contains(states, false) {
				removed++
			}
		}
		return removed >= 99
	})
	mu.Lock()
	for user, states := range received {
		if slices.Contains(states, false) && user >= "user-00100" {
			t.Errorf("values of %s: got %v, want no false", user, states)
		}
	}
	mu.Unlock()
	// After scaling up, the new pod forwards requests too.
	p.start(1)
	if status, answer, _, err := p.do(1, http.MethodGet, path, ""); err != nil || status != http.StatusOK || !strings.Contains(answer, `"members":19900`) {
		t.Errorf("GET through a restarted pod: got status %d, body %s and error %v, want 200 with 19900 members", status, answer, err)
	}
	wait.True(t, "the members in the status", func() bool {
		return strings.Contains(strings.Join(strings.Fields(kubectl("", "get", "paud", "vip")), " "), "vip True Ready True 19900 0")
	})
	if strings.Contains(logs.String(), "panic") {
		t.Error("a pod panicked")
	}
}
