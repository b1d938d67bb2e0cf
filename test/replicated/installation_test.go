package replicated

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/dispatcher/backup"
)

// A process of another installation with the same log is not ready, keeps no copy, accepts and forwards no call,
// and does not take over. Processes of one installation with and without --log-installation, as during an update
// and a rollback, take over from each other.
func TestTwoInstallationsWithOneLog(t *testing.T) {
	s, r, foreign := startServers(t), newReceiver(t), newReceiver(t)
	start := func(url string, flags ...string) *pod {
		t.Helper()
		return startPods(t, 1, manifests(url), append([]string{"--log", s.url, "--log-name", "test", "--log-max-bytes", "1Gi"}, flags...)...)[0]
	}
	pods := []*pod{start(r.URL)}
	all := &sender{pods: pods}
	send := func(prefix string) {
		t.Helper()
		defer all.start(t, prefix)()
		acknowledge(t, all, 1)
	}
	owner(t, pods)
	send("before")

	pods = append(pods, start(r.URL, "--log-installation", "shop/posthorn"))
	waitReady(t, pods[1])
	other := start(foreign.URL, "--log-installation", "news/posthorn")
	checkOther := func() {
		t.Helper()
		waitNotReady(t, []*pod{other}, "stream "+stream, `the log of "shop/posthorn"`, `belongs to "news/posthorn"`, "--log-name", "--log-installation")
		checkRefused(t, []*pod{other})
		if _, err := os.Stat(filepath.Join(other.data, backup.QueueFolder)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("files of the slot in the other installation: got error %v, want none that exist", err)
		}
	}
	checkOther()

	pods[0].end(syscall.SIGTERM)
	if now := owner(t, append(pods[1:], other)); now != pods[1] {
		t.Errorf("owner after the update: got %s, want %s", now.name, pods[1].name)
	}
	checkOther()
	all.setPods(pods[1:])
	send("update")

	pods = append(pods[1:], start(r.URL))
	waitReady(t, pods[1])
	pods[0].end(syscall.SIGKILL)
	if now := owner(t, []*pod{pods[1], other}); now != pods[1] {
		t.Errorf("owner after the rollback: got %s, want %s", now.name, pods[1].name)
	}
	checkOther()
	all.setPods(pods[1:])
	send("rollback")
	checkDelivered(t, all.acknowledged, r)
	if n := len(foreign.got); n != 0 {
		t.Errorf("receiver of the other installation: got %d messages, want none", n)
	}
}
