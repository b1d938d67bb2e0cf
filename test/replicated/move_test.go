package replicated

import (
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/jetstream"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// startVolume starts a process without a replicated log.
func startVolume(t *testing.T, manifests map[string]string, data string) *pod {
	t.Helper()
	dir := t.TempDir()
	for name, text := range manifests {
		if err := process.Replace(filepath.Join(dir, name), text); err != nil {
			t.Fatal(err)
		}
	}
	p := &pod{t: t, name: "volume", data: data, volume: true, Posthorn: process.Run(binary, dir, data)}
	p.calls, p.Log = p.Addr, &p.log
	p.start()
	t.Cleanup(func() {
		p.end(syscall.SIGTERM)
		if t.Failed() {
			t.Logf("log of %s:\n%s", p.name, p.log.Tail())
		}
	})
	return p
}

// adopt runs posthorn replication adopt, and returns its output.
func (s *servers) adopt(flags ...string) (string, error) {
	s.t.Helper()
	out, err := exec.Command(binary, append([]string{"replication", "adopt", "--replication-url", s.url, "--replication-name", "test", "--replication-installation", installation, "--replication-max-bytes", "1Gi", "--yes"}, flags...)...).CombinedOutput()
	return string(out), err
}

// move makes the store of a data directory the content of a slot, and checks the output.
func (s *servers) move(data string, flags ...string) {
	s.t.Helper()
	if out, err := s.adopt(append(flags, "--data", data)...); err != nil || !strings.Contains(out, "dead letters, ledgers and audiences of "+data) {
		s.t.Fatalf("posthorn replication adopt: got error %v and\n%s\nwant all of %s", err, out, data)
	}
}

// wantLedger waits until the ledger of the owner is another one.
func wantLedger(t *testing.T, what string, pods []*pod, want func(queue.Ledger) bool) (got queue.Ledger) {
	t.Helper()
	if err := wait.Until(func() error {
		if got = report(t, pods); !want(got) {
			return fmt.Errorf("got %+v", got)
		}
		return nil
	}); err != nil {
		t.Fatalf("ledger %s: %v", what, err)
	}
	return got
}

// wantDuplicates sends the acknowledged calls again, which must not be accepted twice.
func wantDuplicates(t *testing.T, pods []*pod, all *sender, before queue.Ledger) {
	t.Helper()
	for ids := range slices.Chunk(all.acknowledged, 100) {
		all.mustSend(t, batchOf(ids))
	}
	if got := report(t, pods); got != before {
		t.Errorf("ledger after repeated calls: got %+v, want %+v as before", got, before)
	}
}

// A store with a log of its own moves to a replicated log, after kill -9: waiting messages, dead letters, the ledger,
// and the members of an audience. Nothing is lost, and nothing is delivered twice. Another store is refused.
func TestMoveToALog(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	data := filepath.Join(t.TempDir(), "data")
	volume := []*pod{startVolume(t, manifests(r.URL), data)}
	syncMembers(t, volume[0], "u1", "u2")
	all := &sender{pods: volume}
	send := func(prefix string) {
		t.Helper()
		stop := all.start(t, prefix)
		acknowledge(t, all, 100)
		stop()
	}
	send("delivered")
	checkDelivered(t, all.acknowledged, r)
	wantLedger(t, "without pending messages", volume, func(l queue.Ledger) bool { return l.Pending == 0 })
	delivered := len(all.acknowledged)
	r.answer.Store(http.StatusConflict)
	send("rejected")
	rejected := len(all.acknowledged) - delivered
	wantLedger(t, "with dead letters", volume, func(l queue.Ledger) bool { return int(l.DeadLettered) == rejected })
	r.answer.Store(http.StatusServiceUnavailable)
	send("waiting")
	waiting := slices.Clone(all.acknowledged[delivered+rejected:])
	before := wantLedger(t, "with waiting messages", volume, func(l queue.Ledger) bool { return int(l.Pending) == len(waiting) })
	volume[0].end(syscall.SIGKILL)

	s.move(data)
	second := filepath.Join(t.TempDir(), "data")
	startVolume(t, manifests(r.URL), second).end(syscall.SIGTERM)
	if out, err := s.adopt("--data", second); err == nil || !strings.Contains(out, "posthorn drain") {
		t.Errorf("posthorn replication adopt of a second store: got error %v and\n%s\nwant an error with posthorn drain", err, out)
	}
	pods := startPods(t, 2, manifests(r.URL), "--replication-url", s.url, "--replication-name", "test", "--replication-max-bytes", "1Gi")
	wantLedger(t, "in the log, as before", pods, func(l queue.Ledger) bool { return l == before })
	r.answer.Store(0)
	checkDelivered(t, waiting, r)
	if out := syncMembers(t, owner(t, pods), "u2", "u3"); !strings.Contains(out, "added 1, removed 1") {
		t.Errorf("sync of an audience after the move: got %q, want 1 added and 1 removed member", out)
	}
	all.setPods(pods)
	send("log")
	logged := wantLedger(t, "without pending messages in the log", pods, func(l queue.Ledger) bool { return l.Pending == 0 })
	wantDuplicates(t, pods, all, logged)
	checkDelivered(t, slices.Concat(all.acknowledged[:delivered], all.acknowledged[delivered+rejected:]), r)
	if repeated := r.repeated(); repeated != 0 || int(logged.DeadLettered) != rejected {
		t.Errorf("at the end: got %d repeated deliveries and the ledger %+v, want none and %d dead letters", repeated, logged, rejected)
	}
}

// A store moves to one of several slots. Its namespace remains in that slot, with the messages that wait.
func TestMoveToOneOfSeveralSlots(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	data := filepath.Join(t.TempDir(), "data")
	volume := startVolume(t, manifests(r.URL), data)
	r.answer.Store(http.StatusServiceUnavailable)
	all := &sender{pods: []*pod{volume}}
	stop := all.start(t, "waiting")
	acknowledge(t, all, 100)
	stop()
	volume.end(syscall.SIGTERM)
	const slot = severalSlots - 1
	s.move(data, "--replication-name", "several", "--replication-slots", strconv.Itoa(severalSlots), "--slot", strconv.Itoa(slot), "--replication-max-bytes", strconv.Itoa(jetstream.MinBytes))

	r.answer.Store(0)
	configs := map[string]liveconfig.Stored{"default": severalConfig(t, r.URL, "default", key), "other": severalConfig(t, r.URL, "other", "other")}
	h := startHost(t, s, "process-0", configs)
	checkDelivered(t, all.acknowledged, r)
	if err := wait.Until(func() error {
		var found []string
		for n := range severalSlots {
			report, err := h.api().Slot(n).Report(t.Context(), "")
			if err != nil {
				return err
			}
			for _, of := range report.Namespaces {
				if (n == slot) == (of.Namespace == "default") {
					found = append(found, of.Namespace)
				}
			}
		}
		if slices.Sort(found); !slices.Equal(found, []string{"default", "other"}) {
			return fmt.Errorf("got %q", found)
		}
		return nil
	}); err != nil {
		t.Errorf("namespaces, want default in slot %d and the other one in another slot: %v", slot, err)
	}
	if repeated := r.repeated(); repeated != 0 {
		t.Errorf("repeated deliveries: got %d, want none", repeated)
	}
}
