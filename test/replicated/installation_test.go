package replicated

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/replicated/host"
)

// A process of another installation with the same log is not ready, keeps no copy, accepts and forwards no call, and
// does not take over while the owner is lost. So is a process whose identity is not set.
func TestTwoInstallationsWithOneLog(t *testing.T) {
	t.Parallel()
	s, r, foreign := startServers(t), newReceiver(t), newReceiver(t)
	flags := []string{"--replication-url", s.url, "--replication-name", "test", "--replication-max-bytes", "1Gi"}
	pods := startPods(t, 1, manifests(r.URL), flags...)
	before := owner(t, pods)
	others := map[string]*pod{}
	for _, identity := range []string{"news/posthorn", "unnamed"} {
		others[identity] = startPods(t, 1, manifests(foreign.URL), append(flags, "--replication-installation", identity)...)[0]
	}
	checkOther := func() {
		t.Helper()
		for identity, other := range others {
			waitNotReady(t, []*pod{other}, "stream "+stream, fmt.Sprintf("the log of %q", installation), fmt.Sprintf("belongs to %q", identity),
				"--replication-name", "--replication-installation")
			checkRefused(t, []*pod{other})
			if _, err := os.Stat(host.QueueFolder(other.data, 0)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("files of the slot in the installation %s: got error %v, want none that exist", identity, err)
			}
		}
	}
	checkOther()
	all := &sender{pods: pods}
	r.answer.Store(http.StatusServiceUnavailable)
	stop := all.start(t, "before")
	acknowledge(t, all, 200)
	stop()
	before.lose()
	time.Sleep(takeover) // A standby would have taken over.
	checkOther()

	r.answer.Store(0)
	before.start()
	owner(t, pods)
	checkLedger(t, pods, all, r)
	if n := len(foreign.got); n != 0 {
		t.Errorf("receiver of the other installation: got %d messages, want none", n)
	}
}
