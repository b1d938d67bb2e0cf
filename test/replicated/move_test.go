package replicated

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/replicated/host"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/jetstream"
	"github.com/posthorn/posthorn/test/check"
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
	out,
		err := exec.Command(binary, append([]string{"replication", "adopt", "--replication-url", s.url, "--replication-name", "test",
		"--replication-installation", installation, "--replication-max-bytes", "1Gi", "--yes"}, flags...)...).CombinedOutput()
	return string(out), err
}

// move makes the store of a data directory the content of a slot, and checks the output.
func (s *servers) move(data string, flags ...string) {
	s.t.Helper()
	if out, err := s.adopt(append(flags, "--data", data)...); err != nil ||
		!strings.Contains(out, "dead letters, ledgers and audiences of "+data) {
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

// A log that an earlier release made with one slot has no directory, and its process had its files in another folder.
// The process names the command that continues with the streams or with the files, and all messages are delivered.
func TestLogOfAnEarlierRelease(t *testing.T) {
	t.Parallel()
	for name, withFiles := range map[string]bool{"streams": false, "files": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, r := startServers(t), newReceiver(t)
			r.answer.Store(http.StatusServiceUnavailable)
			p := startPods(t, 1, manifests(r.URL), "--replication-url", s.url, "--replication-name", "test", "--replication-max-bytes", "1Gi")[0]
			owner(t, []*pod{p})
			all := &sender{pods: []*pod{p}}
			stop := all.start(t, "pending")
			acknowledge(t, all, 100)
			stop()
			p.end(syscall.SIGTERM)
			check.NoError(t, "delete the directory", s.administrator().DeleteStream(t.Context(), "PH_test_DIR"))
			former := filepath.Join(p.data, backup.QueueFolder)
			check.NoError(t, "move the files", os.Rename(host.QueueFolder(p.data, 0), former))
			p.start()
			wantLogged(t, p, "posthorn replication adopt --data "+p.data)
			p.end(syscall.SIGTERM) // It has ended with the error.

			flags := []string{}
			if withFiles {
				flags = append(flags, "--data", p.data)
			} else {
				check.NoError(t, "remove the files", os.RemoveAll(former))
				p.start()
				waitNotReady(t, []*pod{p}, "an earlier release made this log with one slot", "posthorn replication adopt")
			}
			out, err := s.adopt(flags...) // The process that is not ready owns the slot as soon as the directory exists.
			if err != nil || !strings.Contains(out, "slot 0 continues with ") && !strings.Contains(out, "slot 0 has an owner") {
				t.Fatalf("posthorn replication adopt: got error %v and\n%s", err, out)
			}
			if withFiles {
				check.NoError(t, "remove the files", os.RemoveAll(former))
				p.start()
			}
			r.answer.Store(0)
			owner(t, []*pod{p})
			checkDelivered(t, all.acknowledged, r)
			if n := int(report(t, []*pod{p}).Accepted); n != len(all.acknowledged) {
				t.Errorf("accepted calls: got %d, want the %d acknowledged ones", n, len(all.acknowledged))
			}
		})
	}
}

// wantLogged waits until the log of a process has a text.
func wantLogged(t *testing.T, p *pod, text string) {
	t.Helper()
	if err := wait.Until(func() error {
		if !strings.Contains(p.log.Tail(), text) {
			return fmt.Errorf("the log lacks %q", text)
		}
		return nil
	}); err != nil {
		t.Error(err)
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
	s.move(data, "--replication-name", "several", "--replication-slots", strconv.Itoa(severalSlots), "--slot", strconv.Itoa(slot),
		"--replication-max-bytes", strconv.Itoa(jetstream.MinBytes))

	r.answer.Store(0)
	configs := map[string]liveconfig.Stored{"default": severalConfig(t, r.URL, "default", key),
		"other": severalConfig(t, r.URL, "other", "other")}
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
