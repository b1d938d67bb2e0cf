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

	"github.com/posthorn/posthorn/contract/adminapi"
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

// move runs posthorn log import or export, and returns its output.
func (s *servers) move(verb, data string, flags ...string) (string, error) {
	s.t.Helper()
	out, err := exec.Command(binary, append([]string{"log", verb, "--log", s.url, "--log-name", "test", "--log-installation", installation, "--log-max-bytes", "1Gi", "--data", data}, flags...)...).CombinedOutput()
	return string(out), err
}

// moved moves a store, and checks the output.
func (s *servers) moved(want, verb, data string, flags ...string) {
	s.t.Helper()
	if out, err := s.move(verb, data, flags...); err != nil || !strings.Contains(out, want) {
		s.t.Fatalf("posthorn log %s: got error %v and\n%s\nwant %q", verb, err, out, want)
	}
}

// notMoved checks the error of a store that cannot be moved.
func (s *servers) notMoved(want, verb, data string, flags ...string) {
	s.t.Helper()
	if out, err := s.move(verb, data, flags...); err == nil || !strings.Contains(out, want) {
		s.t.Errorf("posthorn log %s: got error %v and\n%s\nwant an error with %q", verb, err, out, want)
	}
}

// allMoved is in the output of an import or export.
const allMoved = "dead letters, ledgers and audiences"

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

// A store with a log of its own moves to a replicated log and back, after kill -9: waiting messages, dead letters,
// the ledger, and the members of an audience. Nothing is lost, and nothing is delivered twice.
func TestMoveToALogAndBack(t *testing.T) {
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

	s.moved(allMoved, "import", data)
	pods := startPods(t, 2, manifests(r.URL), "--log", s.url, "--log-name", "test", "--log-max-bytes", "1Gi")
	wantLedger(t, "in the log, as before", pods, func(l queue.Ledger) bool { return l == before })
	r.answer.Store(0)
	checkDelivered(t, waiting, r)
	if out := syncMembers(t, owner(t, pods), "u2", "u3"); !strings.Contains(out, "added 1, removed 1") {
		t.Errorf("sync of an audience after the import: got %q, want 1 added and 1 removed member", out)
	}
	all.setPods(pods)
	send("log")
	logged := wantLedger(t, "without pending messages in the log", pods, func(l queue.Ledger) bool { return l.Pending == 0 })
	wantDuplicates(t, pods, all, logged)
	for _, p := range pods {
		p.end(syscall.SIGTERM)
	}

	data = filepath.Join(t.TempDir(), "exported")
	s.moved(allMoved, "export", data)
	volume = []*pod{startVolume(t, manifests(r.URL), data)}
	wantLedger(t, "of the exported store, as before", volume, func(l queue.Ledger) bool { return l == logged })
	if out := syncMembers(t, volume[0], "u3", "u4"); !strings.Contains(out, "added 1, removed 1") {
		t.Errorf("sync of an audience after the export: got %q, want 1 added and 1 removed member", out)
	}
	all.setPods(volume)
	send("exported")
	end := wantLedger(t, "without pending messages at the end", volume, func(l queue.Ledger) bool { return l.Pending == 0 })
	wantDuplicates(t, volume, all, end)
	checkDelivered(t, slices.Concat(all.acknowledged[:delivered], all.acknowledged[delivered+rejected:]), r)
	if repeated := r.repeated(); repeated != 0 || int(end.DeadLettered) != rejected {
		t.Errorf("at the end: got %d repeated deliveries and the ledger %+v, want none and %d dead letters", repeated, end, rejected)
	}
}

// The waiting messages and dead letters of a second data directory, of a process that was killed, are added to the
// log: each is delivered once.
func TestAddASecondDirectory(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	r.answer.Store(http.StatusConflict)
	var data []string
	var waiting, rejected []string
	for i := range 2 {
		data = append(data, filepath.Join(t.TempDir(), "data"))
		volume := []*pod{startVolume(t, manifests(r.URL), data[i])}
		all := &sender{pods: volume}
		send := func(prefix string) {
			stop := all.start(t, fmt.Sprint(prefix, i, "-"))
			acknowledge(t, all, 400)
			stop()
		}
		send("rejected")
		n := len(all.acknowledged)
		wantLedger(t, "with dead letters", volume, func(l queue.Ledger) bool { return int(l.DeadLettered) == n })
		r.answer.Store(http.StatusServiceUnavailable)
		send("waiting")
		wantLedger(t, "with waiting messages", volume, func(l queue.Ledger) bool { return int(l.Pending) == len(all.acknowledged)-n })
		rejected, waiting = append(rejected, all.acknowledged[:n]...), append(waiting, all.acknowledged[n:]...)
		volume[0].end(syscall.SIGKILL)
		r.answer.Store(http.StatusConflict)
	}
	s.notMoved("first import the data directory of pod 0", "import", data[1], "--add")
	s.moved(allMoved, "import", data[0])
	s.notMoved("use --add", "import", data[1])
	s.moved("remove it", "import", data[1], "--add")
	s.moved("has 0 messages and 0 dead letters more", "import", data[1], "--add")

	r.answer.Store(http.StatusServiceUnavailable)
	pods := startPods(t, 2, manifests(r.URL), "--log", s.url, "--log-name", "test", "--log-max-bytes", "1Gi")
	wantLedger(t, "in the log, with all waiting messages", pods, func(l queue.Ledger) bool { return int(l.Pending) == len(waiting) })
	s.notMoved("a process uses the slot", "import", data[1], "--add")
	r.answer.Store(0)
	checkDelivered(t, waiting, r)
	api := owner(t, pods).AdminAPI()
	if stored, err := api.DeadLettersStored(t.Context(), "default/crm"); err != nil || int(stored) != len(rejected) {
		t.Errorf("stored dead letters: got %d and %v, want %d", stored, err, len(rejected))
	}
	if _, err := api.Redeliver(t.Context(), adminapi.DeadLetterAction{Destination: "default/crm", Rate: 1000}, nil); err != nil {
		t.Fatal(err)
	}
	checkDelivered(t, rejected, r)
	if repeated := r.repeated(); repeated != 0 {
		t.Errorf("repeated deliveries: got %d, want none", repeated)
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
	s.moved(allMoved, "import", data, "--log-name", "several", "--log-slots", strconv.Itoa(severalSlots), "--slot", strconv.Itoa(slot), "--log-max-bytes", strconv.Itoa(jetstream.MinBytes))

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
	// The messages of a second data directory go to the slot of their namespace.
	h.stop()
	r.answer.Store(http.StatusServiceUnavailable)
	second := filepath.Join(t.TempDir(), "data")
	volume = startVolume(t, manifests(r.URL), second)
	added := &sender{pods: []*pod{volume}}
	stop = added.start(t, "added")
	acknowledge(t, added, 100)
	stop()
	volume.end(syscall.SIGTERM)
	s.moved(fmt.Sprintf("slot %d has %d messages", slot, len(added.acknowledged)), "import", second, "--add", "--log-name", "several", "--log-slots", strconv.Itoa(severalSlots))
	r.answer.Store(0)
	startHost(t, s, "process-1", configs)
	checkDelivered(t, added.acknowledged, r)
	if repeated := r.repeated(); repeated != 0 {
		t.Errorf("repeated deliveries: got %d, want none", repeated)
	}
}
