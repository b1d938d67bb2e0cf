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

	"github.com/posthorn/posthorn/dispatcher/queue"
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

// track sends a call of a user, and returns the answer within 2 s.
func track(t *testing.T, p *pod, user string) (resp *http.Response, body string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.calls+"/v1/track",
		strings.NewReader(`{"event":"E","userId":"`+user+`"}`))
	if err != nil {
		return nil, "", err
	}
	q.SetBasicAuth(key, "")
	if resp, err = http.DefaultClient.Do(q); err != nil {
		return nil, "", err
	}
	return resp, readAll(resp), nil
}

// checkFull checks the answer of a process whose stream is full.
func checkFull(t *testing.T, p *pod) {
	t.Helper()
	if err := wait.Until(func() error {
		resp, body, err := track(t, p, "u") // A call that is stored before the first refusal waits for the log.
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" ||
			!strings.Contains(body, "storage is full") {
			return fmt.Errorf("got status %d, Retry-After %q and %s", resp.StatusCode, resp.Header.Get("Retry-After"), body)
		}
		return nil
	}); err != nil {
		t.Fatalf("call to %s with a full stream, want 503 with Retry-After and the reason: %v", p.name, err)
	}
}

// waitMaxBytes waits until an owner knows the size of its stream.
func waitMaxBytes(t *testing.T, p *pod, want int64) {
	t.Helper()
	if err := wait.Until(func() error {
		state, err := p.state(t.Context())
		if err == nil && state.MaxBytes != want {
			err = fmt.Errorf("the stream has max_bytes %d", state.MaxBytes)
		}
		return err
	}); err != nil {
		t.Fatalf("size of the stream, want %d: %v", want, err)
	}
}

// A stream that cannot be trimmed becomes full: calls are answered 503, deliveries continue up to 90 %, and
// both are resumed as soon as snapshots free space. A stream that refuses every record stops the owner
// until it is larger. Nothing is lost.
func TestFullStream(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	pods := startPods(t, 2, manifests(r.URL), "--replication-url", s.url, "--replication-name", "test", "--replication-max-bytes", "256Mi")
	before := ownerOfCopied(t, pods)
	const size = 16 << 20
	objects := s.settings(s.administrator(), "OBJ_"+stream).MaxBytes
	s.setMaxBytes("OBJ_"+stream, 1) // No snapshot can be stored.
	s.setMaxBytes(stream, size)
	r.answer.Store(http.StatusServiceUnavailable)
	all := &sender{pods: []*pod{before}}
	for n := 0; ; n++ {
		if n == 3<<20/200_000 { // The owner reads the size again after 1 % of the former one, at most once a second.
			waitMaxBytes(t, before, size)
		}
		body, ids := large("full", n)
		full := false
		if err := wait.Until(func() error {
			status, text := all.post(0, body)
			if full = status == http.StatusServiceUnavailable && strings.Contains(text, "storage is full"); !full && status != http.StatusOK {
				return fmt.Errorf("status %d: %s", status, text)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if full {
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
	r.answer.Store(0)
	checkDelivered(t, all.acknowledged, r)
	checkFull(t, before) // There is no snapshot yet.

	s.setMaxBytes("OBJ_"+stream, objects)
	stop := all.start(t, "after")
	acknowledge(t, all, 100)
	stop()

	// Above 90 %, the results of attempts wait for space, and deliveries with them, until a snapshot can be stored.
	s.setMaxBytes("OBJ_"+stream, 1)
	r.answer.Store(http.StatusServiceUnavailable)
	for n := range 40 {
		body, ids := large("pending", n)
		all.mustSend(t, body)
		all.acknowledged = append(all.acknowledged, ids...)
	}
	state, err := before.state(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s.setMaxBytes(stream, state.Bytes*100/93)
	checkFull(t, before)
	if err := wait.Until(func() error { return hasMetric(t, before, maySendNot) }); err != nil {
		t.Errorf("lease of the owner with a stream that is full by 93 %%: %v", err)
	}
	r.answer.Store(0)
	s.setMaxBytes("OBJ_"+stream, objects)
	stop = all.start(t, "freed")
	acknowledge(t, all, 100)
	stop()

	// The stream refuses all records, also those of an idle owner.
	s.setMaxBytes(stream, 1)
	checkFull(t, before)
	if err := wait.Until(func() error { return hasMetric(t, before, maySendNot) }); err != nil {
		t.Errorf("lease of the owner: %v", err)
	}
	s.setMaxBytes(stream, 256<<20)
	stop = all.start(t, "larger")
	acknowledge(t, all, 100)
	stop()
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

// away is the time for which no process runs: longer than the retry window of awayManifests.
// POSTHORN_FAULT_AWAY is another one.
func away(t *testing.T) time.Duration {
	t.Helper()
	d := 2 * awayWindow
	if text := os.Getenv("POSTHORN_FAULT_AWAY"); text != "" {
		var err error
		if d, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// awayWindow is the retry window of awayManifests.
const awayWindow = time.Second

// awayManifests are manifests with a short retry window.
func awayManifests(url string) map[string]string {
	all := manifests(url)
	for name, text := range all {
		all[name] = strings.Replace(text, "  signing:\n", fmt.Sprintf("  delivery: {retry: {window: %v}}\n  signing:\n", awayWindow), 1)
	}
	return all
}

// All processes are killed and lose their disks while messages are pending, and do not run for longer than the retry
// window. Later they are restarted one after the other, under load. Each message is delivered, or is a dead letter.
func TestAllProcessesAreAway(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	pods := startPods(t, 2, awayManifests(r.URL), "--replication-url", s.url, "--replication-name", "test", "--replication-max-bytes", "1Gi")
	ownerOfCopied(t, pods)
	all := &sender{pods: pods}
	r.answer.Store(http.StatusServiceUnavailable)
	stop := all.start(t, "before")
	acknowledge(t, all, 400)
	stop()
	for _, p := range pods {
		p.lose()
	}
	time.Sleep(away(t))
	r.answer.Store(0)
	for _, p := range pods {
		p.start()
	}
	ownerOfCopied(t, pods)

	stop = all.start(t, "after")
	acknowledge(t, all, 100)
	for _, p := range pods {
		p.end(syscall.SIGTERM)
		p.start()
		ownerOfCopied(t, pods)
		acknowledge(t, all, 100)
	}
	stop()
	checkSettled(t, pods, all, r)
}

// checkSettled waits until no message is pending, and compares the receiver and the dead letters with the
// acknowledged calls and the ledger.
func checkSettled(t *testing.T, pods []*pod, all *sender, r *receiver) {
	t.Helper()
	var l queue.Ledger
	if err := wait.Until(func() error {
		if l = report(t, pods); l.Pending != 0 {
			return fmt.Errorf("got %+v", l)
		}
		return nil
	}); err != nil {
		t.Fatalf("ledger, want nothing pending: %v", err)
	}
	dead := map[string]bool{}
	for d, err := range owner(t, pods).AdminAPI().DeadLetters(t.Context(), "default/crm", 10_000) {
		if err != nil {
			t.Fatal(err)
		}
		dead[string(d.MessageID)] = true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range all.acknowledged {
		if r.got[id] == 0 && !dead[id] {
			t.Errorf("message %s was acknowledged, and is neither delivered nor a dead letter", id)
		}
	}
	if int(l.Accepted) < len(all.acknowledged) || int(l.DeadLettered) != len(dead) || l.Discarded != 0 {
		t.Errorf("ledger: got %+v, want %d accepted or more, %d dead letters and none discarded", l, len(all.acknowledged), len(dead))
	}
	t.Logf("%d acknowledged calls, %d dead letters, %d repeated deliveries", len(all.acknowledged), len(dead), len(r.at)-len(r.got))
}
