package replicated

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/test/metrics"
	"github.com/posthorn/posthorn/test/wait"
)

// faults end the ownership of a process; each returns a function that undoes the fault.
var faults = []struct {
	name string
	run  func(t *testing.T, s *servers, p *pod) (undo func())
}{
	{"kill -9 of the owner, and loss of its disk", func(t *testing.T, _ *servers, p *pod) func() {
		p.end(syscall.SIGKILL)
		if err := os.RemoveAll(p.data); err != nil {
			t.Fatal(err)
		}
		return p.start
	}},
	{"orderly end", func(_ *testing.T, _ *servers, p *pod) func() {
		p.end(syscall.SIGTERM)
		return p.start
	}},
	{"SIGSTOP of the owner", func(_ *testing.T, _ *servers, p *pod) func() {
		_ = syscall.Kill(p.Pid(), syscall.SIGSTOP)
		return func() { _ = syscall.Kill(p.Pid(), syscall.SIGCONT) }
	}},
	{"kill -9 of the owner and of the server that leads the stream", func(_ *testing.T, s *servers, p *pod) func() {
		leader := s.leader()
		s.stop(leader)
		p.end(syscall.SIGKILL)
		return func() {
			s.start(leader)
			p.start()
		}
	}},
	{"slow server", func(_ *testing.T, s *servers, _ *pod) func() {
		pid := s.nodes[s.leader()].Pid()
		return slow(pid)
	}},
	{"slow process", func(_ *testing.T, _ *servers, p *pod) func() { return slow(p.Pid()) }},
	{"SIGSTOP of a server", func(_ *testing.T, s *servers, _ *pod) func() {
		s.signal(1, syscall.SIGSTOP)
		time.Sleep(5 * time.Second)
		return func() { s.signal(1, syscall.SIGCONT) }
	}},
	{"kill -9 of all servers", func(_ *testing.T, s *servers, _ *pod) func() {
		for i := range s.nodes {
			s.stop(i)
		}
		return func() {
			for i := range s.nodes {
				s.start(i)
			}
		}
	}},
}

// slow stops a process for 45 of 50 ms, as a slow disk does, until undo.
func slow(pid int) (undo func()) {
	ended, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			_ = syscall.Kill(pid, syscall.SIGSTOP)
			time.Sleep(45 * time.Millisecond)
			_ = syscall.Kill(pid, syscall.SIGCONT)
			select {
			case <-time.After(5 * time.Millisecond):
			case <-ended:
				return
			}
		}
	}()
	return func() {
		close(ended)
		<-stopped
	}
}

// takeover is the promised time from the loss of the owner to the next acknowledged call.
const takeover = 15 * time.Second

// After each loss, every acknowledged call is delivered, the other process takes over, and few
// calls are delivered twice. POSTHORN_FAULT_ROUNDS repeats all faults,
// POSTHORN_FAULT selects those with a text in their name.
func TestNothingAcknowledgedIsLost(t *testing.T) {
	rounds := 1
	if n, err := strconv.Atoi(os.Getenv("POSTHORN_FAULT_ROUNDS")); err == nil {
		rounds = n
	}
	s, r := startServers(t), newReceiver(t)
	pods := startPods(t, 2, manifests(r.URL), "--log", s.url, "--log-name", "test", "--log-max-bytes", "1Gi")
	syncMembers(t, owner(t, pods), "u1", "u2")
	all := &sender{pods: pods}
	var longest, quick, losses = time.Duration(0), 0, 0
	for round := range rounds {
		for i, f := range faults {
			if !strings.Contains(f.name, os.Getenv("POSTHORN_FAULT")) {
				continue
			}
			before := owner(t, pods)
			ctx, cancel := context.WithCancel(t.Context())
			sent := make(chan struct{})
			go func() {
				defer close(sent)
				all.run(ctx, fmt.Sprintf("r%d-f%d", round, i))
			}()
			acknowledge(t, all, 200)
			undo := f.run(t, s, before)
			if f.name != "kill -9 of all servers" {
				acknowledge(t, all, 200)
			}
			after := "the same process"
			undo()
			acknowledge(t, all, 200)
			if now := owner(t, pods); now != before {
				after = now.name
			}
			cancel()
			<-sent
			t.Logf("%s: %s continues; longest time without an acknowledged call %v", f.name, after, all.gap.Round(10*time.Millisecond))
			if strings.Contains(f.name, "of the owner") && !strings.Contains(f.name, "server") {
				if losses++; all.gap <= takeover {
					quick++
				}
			}
			longest, all.gap = max(longest, all.gap), 0
		}
	}
	repeated := checkDelivered(t, all.acknowledged, r)
	checkMetrics(t, pods)
	checkCopies(t, s, pods)
	t.Logf("%d acknowledged calls, %d repeated deliveries; %d of %d takeovers after the loss of the owner within %v; longest time without an acknowledged call %v",
		len(all.acknowledged), repeated, quick, losses, takeover, longest.Round(10*time.Millisecond))
	ledger := report(t, pods)
	if ledger.Pending != 0 || ledger.DeadLettered != 0 || ledger.Discarded != 0 {
		t.Errorf("ledger: got %+v, want everything delivered", ledger)
	}
	// The members of the first sync were stored with another owner. The standby forwards the sync.
	standby := pods[0]
	if owner(t, pods) == standby {
		standby = pods[1]
	}
	if out := syncMembers(t, standby, "u2", "u3"); !strings.Contains(out, "added 1, removed 1") {
		t.Errorf("second sync of an audience: got %q, want 1 added and 1 removed member", out)
	}
}

// checkMetrics compares the metrics of a process with docs/metrics.md.
func checkMetrics(t *testing.T, pods []*pod) {
	t.Helper()
	now := owner(t, pods)
	for _, p := range pods {
		text, err := (&adminapi.Client{URL: "http://" + p.Admin}).Metrics(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var log strings.Builder
		for line := range strings.Lines(text) {
			if strings.Contains(line, "posthorn_log_") {
				log.WriteString(line)
			}
		}
		if p != now {
			for _, want := range []string{"posthorn_log_owner 0\n", "posthorn_log_forwarded_requests_total{result=\"answered\"}"} {
				if !strings.Contains(log.String(), want) {
					t.Errorf("metrics of a standby: got\n%s\nwant %s", log.String(), want)
				}
			}
			continue
		}
		differences, err := metrics.Differences("Replicated log", strings.NewReader(log.String()))
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range differences {
			t.Error(d)
		}
		for _, want := range []string{"posthorn_log_owner 1\n", "posthorn_log_may_send 1\n"} {
			if !strings.Contains(log.String(), want) {
				t.Errorf("metrics of the owner: got\n%s\nwant %s", log.String(), want)
			}
		}
	}
}

// checkCopies stops a server: posthorn slots reports the missing copy until the server has all records
// again.
func checkCopies(t *testing.T, s *servers, pods []*pod) {
	t.Helper()
	slots := func(what string, want string, fails bool) {
		t.Helper()
		err := wait.Until(func() error {
			out, err := exec.Command(binary, "slots", "--admin", owner(t, pods).Admin).CombinedOutput()
			if got := string(out); !strings.Contains(got, want) || strings.Contains(got, "servers of the log have all records") != fails || (err != nil) != fails {
				return fmt.Errorf("posthorn slots: got error %w and\n%s\nwant %q, failed %v", err, got, want, fails)
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	slots("all servers", "It is not known whether the servers sync each record", false)
	s.stop(2)
	slots("without a server", "2 of 3 servers of the log have all records", true)
	s.start(2)
	slots("with the server again", "owner", false)
}

// acknowledge waits for a number of further acknowledged calls.
func acknowledge(t *testing.T, s *sender, n int) {
	t.Helper()
	count := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.acknowledged)
	}
	start := count()
	if err := wait.Until(func() error {
		if got := count() - start; got < n {
			return fmt.Errorf("got %d acknowledged calls, want %d", got, n)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// checkDelivered waits until the receiver has every acknowledged call, and returns the number of
// repeated deliveries.
func checkDelivered(t *testing.T, acknowledged []string, r *receiver) (repeated int) {
	t.Helper()
	err := wait.Until(func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		var missing []string
		for _, id := range acknowledged {
			if r.got[id] == 0 {
				missing = append(missing, id)
			}
		}
		if len(missing) > 0 {
			return fmt.Errorf("%d of %d acknowledged calls were not delivered, for example %s", len(missing), len(acknowledged), missing[0])
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.got {
		repeated += n - 1
	}
	return repeated
}

// syncMembers sends the full list of an audience's members, and returns the output.
func syncMembers(t *testing.T, p *pod, members ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "members.ndjson")
	var text bytes.Buffer
	for _, m := range members {
		fmt.Fprintf(&text, "{\"userId\":%q}\n", m)
	}
	if err := os.WriteFile(path, text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	var out []byte
	if err := wait.Until(func() (err error) { // Servers that start again have no leader for a moment.
		out, err = exec.Command(binary, "audience", "sync", "buyers", path, "--endpoint", "http://"+p.calls, "--write-key", key).CombinedOutput()
		return err
	}); err != nil {
		t.Fatalf("audience sync: %v\n%s", err, out)
	}
	return string(out)
}
