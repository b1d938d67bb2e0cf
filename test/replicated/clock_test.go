package replicated

import (
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// wantClock waits until a process reports that its clock is wrong, or right.
func wantClock(t *testing.T, p *pod, problem string) {
	t.Helper()
	if err := wait.Until(func() error {
		s, err := p.state(t.Context())
		switch {
		case err != nil:
			return err
		case !strings.HasPrefix(s.Clock, problem) || (s.Clock == "") != (problem == ""):
			return fmt.Errorf("state: %+v", s)
		}
		return nil
	}); err != nil {
		t.Errorf("clock of %s: want the problem %q: %v", p.name, problem, err)
	}
}

// failingReceiver is a receiver that answers 503 while fails is true.
func failingReceiver(t *testing.T) (r *receiver, fails *atomic.Bool) {
	r, fails = newReceiver(t), new(atomic.Bool)
	deliver := r.Config.Handler
	r.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if fails.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		deliver.ServeHTTP(w, q)
	})
	return r, fails
}

// buildWithClock builds the program once for all tests.
var buildWithClock = sync.OnceValues(func() (string, error) { return process.BuildWithClock(filepath.Dir(binary)) })

// startWithClock starts processes whose clocks can be set, with a receiver that answers 503 while fails is true.
func startWithClock(t *testing.T, n int) (pods []*pod, r *receiver, fails *atomic.Bool) {
	t.Helper()
	if testing.Short() {
		t.Skip("builds the binary with another package time")
	}
	withClock, err := buildWithClock()
	if err != nil {
		t.Fatal(err)
	}
	s := startServers(t)
	r, fails = failingReceiver(t)
	return startPodsOf(t, withClock, n, manifests(r.URL), "--replication-url", s.url, "--replication-name", "test", "--replication-max-bytes",
		"1Gi"), r, fails
}

// The clock of the owner is set six hours ahead, longer than the retry window, while messages wait for a
// receiver that fails. The standby takes over and delivers all of them: none has become a dead letter, and
// no retry is planned six hours later. The former owner takes no slot until its clock is right.
func TestClockOfTheOwner(t *testing.T) {
	t.Parallel()
	pods, r, fails := startWithClock(t, 2)
	before := owner(t, pods)
	next := pods[0]
	if next == before {
		next = pods[1]
	}
	waitReady(t, next)
	all := &sender{pods: pods}
	stop := all.start(t, "clock")
	defer stop()
	acknowledge(t, all, 200)
	fails.Store(true)
	acknowledge(t, all, 200)

	before.setClock(6 * time.Hour)
	if err := wait.Until(next.isOwner); err != nil {
		t.Fatalf("hand-over: %v", err)
	}
	wantClock(t, before, "the clock of this process is ")
	wantClock(t, next, "")
	acknowledge(t, all, 200)
	fails.Store(false)
	acknowledge(t, all, 200)

	// The next owner is lost: the process with the wrong clock takes the slot only after it is right.
	next.end(syscall.SIGTERM)
	wantClock(t, before, "the clock of this process is ")
	before.setClock(0)
	if err := wait.Until(before.isOwner); err != nil {
		t.Fatalf("takeover with a right clock: %v", err)
	}
	wantClock(t, before, "")
	acknowledge(t, all, 200)
	next.start()
	stop()
	checkLedger(t, pods, all, r)
	t.Logf("longest time without an acknowledged call: %v", all.gap.Round(10*time.Millisecond))
}

// The clock of the only process is set six hours ahead, longer than the retry window, while messages wait for a
// receiver that fails. It continues to send, and no message becomes a dead letter. After its clock was corrected,
// its next start does not wait six hours for the retries.
func TestClockOfTheOnlyProcess(t *testing.T) {
	t.Parallel()
	pods, r, fails := startWithClock(t, 1)
	only := owner(t, pods)
	all := &sender{pods: pods}
	stop := all.start(t, "clock")
	defer stop()
	fails.Store(true)
	acknowledge(t, all, 200)
	only.setClock(6 * time.Hour)
	wantClock(t, only, "the clock of this process is ")
	acknowledge(t, all, 200)
	if err := wait.Until(func() error {
		for a, err := range (&adminapi.Client{URL: "http://" + only.Admin}).Attempts(t.Context(), "default/crm", "") {
			if err != nil {
				return err
			}
			if time.Until(a.Time) > time.Hour && a.Reason != "" {
				return nil
			}
		}
		return errors.New("no attempt has failed with the wrong clock")
	}); err != nil {
		t.Fatal(err)
	}
	only.end(syscall.SIGTERM)
	only.setClock(0)
	only.start()
	fails.Store(false)
	acknowledge(t, all, 200)
	stop()
	checkLedger(t, pods, all, r)
}
