package system

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// drain runs `posthorn drain` with the manifests and the data directory of a stopped Posthorn.
func (p *posthorn) drain(flags ...string) (stdout, stderr string, code int) {
	p.T.Helper()
	args := []string{"drain", "--data", p.Data, "-f", p.Manifests, "--egress-allow", "127.0.0.0/8"}
	return cli(p.T, "", append(args, flags...)...)
}

// expectDrain checks the result of a drain that has delivered everything.
func (p *posthorn) expectDrain(delivered, deadLetters int) {
	p.T.Helper()
	stdout, stderr, code := p.drain()
	want := fmt.Sprintf("drained: nothing is pending; delivered %d, filtered 0, dead letters %d, discarded 0\n", delivered, deadLetters)
	if code != 0 || !strings.Contains(stdout, want) {
		p.T.Fatalf("drain: got exit code %d, output %s%s, want 0 and %q", code, stdout, stderr, want)
	}
}

// expectTimeout checks the result of a drain that could not deliver. It repeats a drain whose time ended before it
// began to deliver.
func (p *posthorn) expectTimeout(pending int, reason string) {
	p.T.Helper()
	var stderr string
	wait.For(p.T, "a drain that names the reason", func() (err error) {
		var stdout string
		var code int
		stdout, stderr, code = p.drain("--timeout", "4s")
		check.Equal(p.T, "exit code of a drain that times out", code, 1)
		if want := fmt.Sprintf("  default/crm: %d pending: ", pending); !strings.Contains(stdout, want) || !strings.Contains(stdout, reason) {
			err = fmt.Errorf("output: got %s, want %q with %q", stdout, want, reason)
		}
		return err
	})
	if want := fmt.Sprintf("drain not complete after --timeout 4s: %d pending messages of 1 destination", pending); !strings.Contains(stderr, want) {
		p.T.Errorf("error: got %s, want %q", stderr, want)
	}
}

// backlog starts Posthorn with a receiver that rejects everything for now, sends calls, and kills the
// process.
func backlog(t *testing.T, r *receiver, calls int) *posthorn {
	t.Helper()
	r.set(func(int) int { return http.StatusServiceUnavailable })
	p := start(t, map[string]string{"source.yaml": source(),
		"crm.yaml": destination("crm", r.URL, "  delivery: {retry: {initialBackoff: 10ms, maxBackoff: 50ms}}\n")})
	p.sendCalls("m", calls)
	p.condition("crm", "Delivering", "False", "CircuitOpen")
	p.End(syscall.SIGKILL)
	return p
}

// sendCalls sends calls with the messageIds prefix-0, prefix-1 and so on.
func (p *posthorn) sendCalls(prefix string, n int) {
	p.T.Helper()
	for chunk := range slices.Chunk(slices.Repeat([]int{0}, n), 100) {
		var calls []string
		for range chunk {
			calls = append(calls, fmt.Sprintf(`{"type":"track","userId":"u","event":"E","messageId":"%s-%d"}`, prefix, n-1))
			n--
		}
		p.mustPost("/v1/batch", `{"batch":[`+strings.Join(calls, ",")+`]}`)
	}
}

// expectOnce checks that each message was accepted exactly once by the receiver.
func expectOnce(t *testing.T, r *receiver, n int) {
	t.Helper()
	count := r.count()
	check.Equal(t, "distinct messages", len(count), n)
	for id, times := range count {
		if times != 1 {
			t.Errorf("deliveries of %s: got %d, want 1", id, times)
		}
	}
	check.Equal(t, "requests with a wrong signature", r.unsigned, 0)
}

func TestDrain(t *testing.T) {
	r := newReceiver(t)
	p := backlog(t, r, 250)

	p.expectTimeout(250, "endpoint primary is CircuitOpen, last failure ")
	check.Equal(t, "messages that the failing receiver accepted", len(r.got()), 0)

	r.set(nil)
	p.expectDrain(250, 0)
	expectOnce(t, r, 250)
	p.expectDrain(0, 0)
	expectOnce(t, r, 250)

	// The folder has the ledger of an ordinary data directory: checkLedgers reads it at the end.
	p.Launch()
	delivered, filtered, dead, discarded := p.ledger("crm")
	check.Equal(t, "ledger: delivered, filtered, dead-lettered, discarded", [4]int64{delivered, filtered, dead, discarded},
		[4]int64{250, 0, 0, 0})
	p.sendCalls("later", 1)
	p.arrive(r, 251)
}

// A drain that is killed, or interrupted, has lost nothing: another one continues.
func TestDrainEndsEarly(t *testing.T) {
	for name, signal := range map[string]os.Signal{"kill -9": syscall.SIGKILL, "SIGTERM": syscall.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			r := newReceiver(t)
			p := backlog(t, r, 200)
			// The drain has delivered half when the receiver fails again.
			var mu sync.Mutex
			accepted := 0
			r.set(func(int) int {
				mu.Lock()
				defer mu.Unlock()
				if accepted == 100 {
					return http.StatusServiceUnavailable
				}
				accepted++
				return http.StatusOK
			})
			var output bytes.Buffer
			cmd := exec.CommandContext(t.Context(), binary, "drain", "--data", p.Data, "-f", p.Manifests, "--egress-allow", "127.0.0.0/8")
			cmd.Stdout, cmd.Stderr = &output, &output
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if err := wait.Until(func() error {
				if n := len(r.got()); n < 100 {
					return fmt.Errorf("got %d messages", n)
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			if signal == syscall.SIGTERM {
				check.Equal(t, "exit code after SIGTERM", cmd.ProcessState.ExitCode(), 130)
				if want := "drain interrupted: what is still pending is kept in " + p.Data; !strings.Contains(output.String(), want) {
					t.Errorf("output: got %s, want %q", output.String(), want)
				}
			}
			r.set(nil)
			stdout, stderr, code := p.drain()
			if code != 0 {
				t.Fatalf("second drain: got exit code %d, output %s%s, want 0", code, stdout, stderr)
			}
			count, repeated := r.count(), 0
			for _, n := range count {
				repeated += n - 1
			}
			check.Equal(t, "distinct messages", len(count), 200)
			// Acknowledgements are not synced one by one, so a kill may repeat the last deliveries.
			if limit := map[os.Signal]int{syscall.SIGKILL: 100}[signal]; repeated > limit {
				t.Errorf("repeated deliveries: got %d, want at most %d", repeated, limit)
			}
			p.Launch()
		})
	}
}

// A destination that is not in the config, or that cannot work, keeps its messages, and the drain
// gives the reason.
func TestDrainKeepsWhatItCannotDeliver(t *testing.T) {
	r := newReceiver(t)
	p := backlog(t, r, 20)
	r.set(nil)
	manifest := filepath.Join(p.Manifests, "crm.yaml")
	crm, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	p.remove("crm.yaml")
	p.expectTimeout(20, "the WebhookDestination is not in the config")
	p.Write("crm.yaml", string(crm)+"  suspend: true\n")
	p.expectTimeout(20, "the WebhookDestination is suspended; set spec.suspend to false")
	p.Write("crm.yaml", strings.Replace(string(crm), "key: sharedSecret", "key: missing", 1))
	p.expectTimeout(20, "the WebhookDestination is paused: ")
	p.Write("other.yaml", strings.Replace(source()[strings.Index(source(), "---"):], "name: web", "name: other", 1))
	p.Write("crm.yaml", strings.Replace(string(crm), "sourceRefs: [{name: web}]", "sourceRefs: [{name: other}]", 1))
	p.expectTimeout(20, "20 messages of Source web: the destination does not receive calls of this Source")
	check.Equal(t, "delivered messages", len(r.got()), 0)
	p.Write("crm.yaml", string(crm))
	p.expectDrain(20, 0)
	expectOnce(t, r, 20)
}

// Dead letters remain in the folder until --redeliver, or a Redelivery in the manifests, sends them again.
func TestDrainOfDeadLetters(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusBadRequest })
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	p.sendCalls("rejected", 1)
	p.ledger("crm")
	p.End(syscall.SIGTERM)
	stdout, stderr, code := p.drain()
	if code != 0 || !strings.Contains(stdout, "delivered 0, filtered 0, dead letters 0, discarded 0\n1 dead letter in "+p.Data) {
		t.Fatalf("drain: got exit code %d, output %s%s, want 1 dead letter", code, stdout, stderr)
	}
	stdout, stderr, code = p.drain("--redeliver")
	if code != 0 || !strings.Contains(stdout, "redelivering 1 dead letter\n") || !strings.Contains(stdout, "delivered 0, filtered 0, dead letters 1, discarded 0\n1 dead letter in ") {
		t.Fatalf("drain --redeliver of a message that is rejected again: got exit code %d, output %s%s, want 1 dead letter", code, stdout, stderr)
	}
	r.set(nil)
	stdout, stderr, code = p.drain("--redeliver")
	if code != 0 || !strings.Contains(stdout, "delivered 1, ") || strings.Contains(stdout, "dead letter in ") {
		t.Fatalf("drain --redeliver: got exit code %d, output %s%s, want no dead letters", code, stdout, stderr)
	}
	expectOnce(t, r, 1)

	p.Launch()
	r.set(func(int) int { return http.StatusBadRequest })
	p.sendCalls("again", 1)
	p.ledger("crm")
	p.End(syscall.SIGTERM)
	r.set(nil)
	p.Write("again.yaml", `
apiVersion: posthorn.dev/v1beta1
kind: Redelivery
metadata: {name: again}
spec: {destinationRef: {name: crm}}
`)
	stdout, stderr, code = p.drain()
	if code != 0 || !strings.Contains(stdout, "drained: ") || strings.Contains(stdout, "dead letter in ") {
		t.Fatalf("drain with a Redelivery: got exit code %d, output %s%s, want no dead letters", code, stdout, stderr)
	}
	expectOnce(t, r, 2)
	p.Launch()
}

// The admin API of a drain has the dispatcher's report; calls have no address.
func TestDrainAdminAPI(t *testing.T) {
	r := newReceiver(t)
	p := backlog(t, r, 5)
	drain := *p.Posthorn
	drain.Addr, drain.Args = "", []string{"drain", "--data", p.Data, "-f", p.Manifests, "--egress-allow", "127.0.0.0/8",
		"--admin-listen", p.Admin}
	if err := drain.Start(); err != nil {
		t.Fatal(err)
	}
	wait.For(p.T, "a report with the pending messages", func() error {
		report, err := drain.AdminAPI().Report(t.Context(), "")
		if err != nil {
			return err
		}
		for _, n := range report.Namespaces {
			for _, d := range n.Destinations {
				if d.Name == "crm" && d.Pending == 5 {
					return nil
				}
			}
		}
		text, _ := json.Marshal(report)
		return fmt.Errorf("got %s", text)
	})
	if _, _, err := p.Post("/v1/batch", key, `{"batch":[]}`); err == nil {
		t.Error("request to the address for calls: got an answer, want none")
	}
	r.set(nil)
	select {
	case <-drain.Exited():
	case <-t.Context().Done():
	}
	expectOnce(t, r, 5)
}

func TestDrainRefuses(t *testing.T) {
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	stdout, stderr, code := p.drain()
	check.Equal(t, "exit code with a running dispatcher", code, 1)
	if want := "another process has it open; stop that process"; !strings.Contains(stderr, want) {
		t.Errorf("folder in use: got %s%s, want %q", stdout, stderr, want)
	}
	p.End(syscall.SIGTERM)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	empty, emptyQueue := t.TempDir(), t.TempDir()
	if err := os.Mkdir(filepath.Join(emptyQueue, "queue"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"no folder":        {nil, "the data directory is missing; set --data"},
		"missing folder":   {[]string{"--data", empty + "/missing"}, "is not a folder"},
		"a file":           {[]string{"--data", file}, "is not a folder"},
		"empty folder":     {[]string{"--data", empty}, "has no folder queue, so no dispatcher has stored messages there"},
		"empty queue":      {[]string{"--data", emptyQueue}, "is empty, so it has no messages"},
		"the queue itself": {[]string{"--data", p.Data + "/queue"}, "use the folder above it, " + p.Data},
		"two configs":      {[]string{"--data", p.Data, "--system-namespace", "posthorn-system"}, "set either -f or --system-namespace"},
		"a replicated log": {[]string{"--data", p.Data, "--replication-url", "nats://127.0.0.1:4222"},
			"--replication-url: a replicated log is not drained"},
		"open admin API": {[]string{"--data", p.Data, "--admin-listen", ":8081"},
			"the address has no authentication; use a loopback address"},
		"kubeconfig":          {[]string{"--data", p.Data, "--kubeconfig", "config"}, "--kubeconfig needs --system-namespace"},
		"a negative timeout":  {[]string{"--data", p.Data, "--timeout", "-1s"}, "--timeout -1s: use a positive duration"},
		"manifests not found": {[]string{"--data", p.Data, "-f", empty + "/missing"}, "is not a folder"},
	} {
		args := append([]string{"drain", "-f", p.Manifests}, c.args...)
		if _, stderr, code := cli(t, "", args...); code != 2 || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: got exit code %d, error %s, want 2 and %q", name, code, stderr, c.want)
		}
	}
	if entries, err := os.ReadDir(empty); err != nil || len(entries) > 0 {
		t.Errorf("files that a refused drain made: got %v and error %v, want none", entries, err)
	}
	p.Launch()
}

// A sync of an audience that the process has decided before its end continues: the drain adds the rest
// of its calls and delivers them.
func TestDrainContinuesASync(t *testing.T) {
	const users = 20_000
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "  delivery: {maxInFlight: 256}\n"),
		"a.yaml": audience("vip", `key: vip`)})
	p.syncable("vip")
	list := make([]string, users)
	for i := range list {
		list[i] = fmt.Sprintf("user-%05d", i)
	}
	synced := make(chan struct{})
	go func() {
		defer close(synced)
		_, _, _ = p.syncMembers("vip", list) // The kill may prevent the answer.
	}()
	p.arrive(r, 1)
	p.End(syscall.SIGKILL)
	<-synced
	t.Logf("%d of %d calls were delivered before the kill", len(r.got()), users)
	stdout, stderr, code := p.drain()
	if code != 0 || !strings.Contains(stdout, "drained: nothing is pending") {
		t.Fatalf("drain: got exit code %d, output %s%s, want 0", code, stdout, stderr)
	}
	t.Log(stdout)
	received := map[string]bool{}
	for _, q := range r.got() {
		var m struct{ UserID string }
		if err := json.Unmarshal([]byte(q.body), &m); err != nil {
			t.Fatal(err)
		}
		received[m.UserID] = true
	}
	check.Equal(t, "users with a call", len(received), users)
	p.Launch()
	check.Equal(t, "members after the drain", *p.audience("vip").Status.Members, users)
}
