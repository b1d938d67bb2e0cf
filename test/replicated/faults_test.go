package replicated

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/wait"
)

// leader returns the server that leads the stream of the only slot.
func (s *servers) leader() (found int) {
	s.t.Helper()
	js := s.administrator()
	if err := wait.Until(func() error {
		info, err := js.Stream(s.t.Context(), stream)
		if err != nil {
			return err
		}
		if cluster := info.CachedInfo().Cluster; cluster != nil {
			if _, err := fmt.Sscanf(cluster.Leader, "n%d", &found); err == nil {
				return nil
			}
		}
		return fmt.Errorf("stream %s has no leader", stream)
	}); err != nil {
		s.t.Fatal(err)
	}
	return found
}

// setMaxBytes changes the size of a stream.
func (s *servers) setMaxBytes(name string, bytes int64) {
	s.t.Helper()
	js := s.administrator()
	c := s.settings(js, name)
	c.MaxBytes = bytes
	if err := wait.Until(func() error {
		_, err := js.UpdateStream(s.t.Context(), c)
		return err
	}); err != nil {
		s.t.Fatalf("set max_bytes of %s to %d: %v", name, bytes, err)
	}
}

// large returns a batch of 200 KB.
func large(prefix string, n int) (body string, ids []string) {
	var calls []string
	for i := range batch {
		ids = append(ids, fmt.Sprintf("%s-%d-%d", prefix, n, i))
		calls = append(calls, fmt.Sprintf(`{"type":"track","event":"E","userId":"u","messageId":%q,"properties":{"text":%q}}`, ids[i], strings.Repeat("x", 20_000)))
	}
	return `{"batch":[` + strings.Join(calls, ",") + `]}`, ids
}

// checkFull checks the answer of a process whose stream is full.
func checkFull(t *testing.T, p *pod) {
	t.Helper()
	if err := wait.Until(func() error {
		// A call that is stored before the first refusal waits for the log.
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.calls+"/v1/track", strings.NewReader(`{"event":"E","userId":"u"}`))
		if err != nil {
			return err
		}
		q.SetBasicAuth(key, "")
		resp, err := http.DefaultClient.Do(q)
		if err != nil {
			return err
		}
		body := readAll(resp)
		if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, "storage is full") {
			return fmt.Errorf("got status %d, Retry-After %q and %s", resp.StatusCode, resp.Header.Get("Retry-After"), body)
		}
		return nil
	}); err != nil {
		t.Fatalf("call to %s with a full stream, want 503 with Retry-After and the reason: %v", p.name, err)
	}
}

// A stream that cannot be trimmed becomes full: calls are answered 503, deliveries continue, and calls
// are accepted again as soon as snapshots free space. A stream that refuses every record stops the owner
// until it is larger. Nothing is lost.
func TestFullStream(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	pods := startPods(t, 2, manifests(r.URL), "--log", s.url, "--log-name", "test", "--log-max-bytes", "256Mi")
	before := ownerOfCopied(t, pods)
	const size = 16 << 20
	objects := s.settings(s.administrator(), "OBJ_"+stream).MaxBytes
	s.setMaxBytes("OBJ_"+stream, 1) // No snapshot can be stored.
	s.setMaxBytes(stream, size)
	r.refuse.Store(true)
	all := &sender{pods: []*pod{before}}
	for n := 0; ; n++ {
		body, ids := large("full", n)
		if !all.send(0, body) {
			break
		}
		if all.acknowledged = append(all.acknowledged, ids...); n > size/200_000 {
			t.Fatalf("%d batches of 200 KB were accepted by a stream of %d bytes", n, size)
		}
	}
	checkFull(t, before)
	if len(all.acknowledged) == 0 {
		t.Fatal("no call was accepted")
	}
	r.refuse.Store(false)
	checkDelivered(t, all.acknowledged, r)
	checkFull(t, before) // There is no snapshot yet.

	s.setMaxBytes("OBJ_"+stream, objects)
	ctx, cancel := context.WithCancel(t.Context())
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		all.run(ctx, "after")
	}()
	acknowledge(t, all, 100)
	cancel()
	<-sent

	// The stream refuses all records, also those of an idle owner.
	s.setMaxBytes(stream, 1)
	checkFull(t, before)
	if err := wait.Until(func() error { return hasMetric(t, before, "posthorn_log_may_send 0\n") }); err != nil {
		t.Errorf("lease of the owner: %v", err)
	}
	s.setMaxBytes(stream, 256<<20)
	ctx, cancel = context.WithCancel(t.Context())
	sent = make(chan struct{})
	go func() {
		defer close(sent)
		all.run(ctx, "larger")
	}()
	acknowledge(t, all, 100)
	cancel()
	<-sent
	if now := owner(t, pods); now != before {
		t.Errorf("owner: got %s, want %s as before", now.name, before.name)
	}
	checkLedger(t, pods, all, r)
}

// checkLedger waits until all acknowledged calls are delivered, and compares the ledger with them.
func checkLedger(t *testing.T, pods []*pod, all *sender, r *receiver) {
	t.Helper()
	repeated := checkDelivered(t, all.acknowledged, r)
	if err := wait.Until(func() error {
		l := report(t, pods)
		if l.Pending != 0 || l.DeadLettered != 0 || l.Discarded != 0 || int(l.Accepted) < len(all.acknowledged) {
			return fmt.Errorf("got %+v", l)
		}
		return nil
	}); err != nil {
		t.Errorf("ledger, want all %d acknowledged calls delivered: %v", len(all.acknowledged), err)
	}
	t.Logf("%d acknowledged calls, %d repeated deliveries", len(all.acknowledged), repeated)
}

// away is the time for which no process runs. POSTHORN_FAULT_AWAY is another one.
func away(t *testing.T) time.Duration {
	t.Helper()
	d := time.Second
	if text := os.Getenv("POSTHORN_FAULT_AWAY"); text != "" {
		var err error
		if d, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// All processes are killed and lose their disks while messages are pending; later they are restarted one
// after the other, under load. Nothing is lost.
func TestAllProcessesAreAway(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	pods := startPods(t, 2, manifests(r.URL), "--log", s.url, "--log-name", "test", "--log-max-bytes", "1Gi")
	ownerOfCopied(t, pods)
	all := &sender{pods: pods}
	r.refuse.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		all.run(ctx, "before")
	}()
	acknowledge(t, all, 400)
	cancel()
	<-sent
	for _, p := range pods {
		p.end(syscall.SIGKILL)
		if err := os.RemoveAll(p.data); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(away(t))
	r.refuse.Store(false)
	for _, p := range pods {
		p.start()
	}
	ownerOfCopied(t, pods)

	ctx, cancel = context.WithCancel(t.Context())
	sent = make(chan struct{})
	go func() {
		defer close(sent)
		all.run(ctx, "after")
	}()
	acknowledge(t, all, 100)
	all.mu.Lock()
	all.gap = 0
	all.mu.Unlock()
	for _, p := range pods {
		p.end(syscall.SIGTERM)
		p.start()
		ownerOfCopied(t, pods)
		acknowledge(t, all, 100)
	}
	cancel()
	<-sent
	t.Logf("rolling restart: longest time without an acknowledged call %v", all.gap.Round(10*time.Millisecond))
	checkLedger(t, pods, all, r)
}
