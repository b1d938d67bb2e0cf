package audience

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// limitFiles makes the kernel refuse what would make a file larger, as a full disk does.
func limitFiles(t *testing.T, bytes uint64) (lift func()) {
	t.Helper()
	signal.Ignore(unix.SIGXFSZ)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: bytes, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	lift = func() { _ = unix.Setrlimit(unix.RLIMIT_FSIZE, &was) }
	t.Cleanup(lift)
	return lift
}

// TestFullDisk runs its parts in a process of their own, for the limit is the process's.
func TestFullDisk(t *testing.T) {
	const parts = "POSTHORN_TEST_FULL_DISK"
	if os.Getenv(parts) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFullDisk$")
		cmd.Env = append(os.Environ(), parts+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	t.Run("before the decision", fullBeforeTheDecision)
	t.Run("after the decision", fullAfterTheDecision)
}

// Whatever of a sync cannot be written: nothing has changed, and nothing is left over.
func fullBeforeTheDecision(t *testing.T) {
	dir := t.TempDir()
	r := newRig(t, dir, newLog(), nil)
	before := many("u", 10_000)
	r.sync(shoppers, before...)
	r.sync("/v1/audiences/young/members", "a")
	r.log.take(t)
	one := func() answer {
		return r.do(http.MethodPost, shoppers, "web-key", strings.NewReader(`{"userId":"u000000","member":false}`))
	}
	for _, c := range []struct {
		what  string
		bytes uint64
		sync  func() answer
	}{
		{"the lines", 50_000, func() answer { return r.do(http.MethodPut, shoppers, "web-key", ids(before[1:]...)) }},
		{"the members", 50_000, one},
		{"anything", 0, func() answer {
			return r.do(http.MethodPut, "/v1/audiences/young/members?resend=true", "web-key", strings.NewReader(`{"userId":"b"}`+"\n"+`{"userId":"a"}`))
		}},
		{"the decision", 100, func() answer {
			return r.do(http.MethodPost, "/v1/audiences/young/members", "web-key", strings.NewReader(`{"userId":"b"}`))
		}},
	} {
		lift := limitFiles(t, c.bytes)
		a := c.sync()
		lift()
		if a.status != http.StatusServiceUnavailable || a.Error.Code != "storage_failed" || strings.Contains(a.body, dir) {
			t.Errorf("%s: %+v", c.what, a)
		}
		work, _ := filepath.Glob(filepath.Join(dir, "*", syncPrefix+"*"))
		if left := append(work, glob(t, dir, pendingFile)...); len(left) > 0 {
			t.Errorf("%s: left over: %v", c.what, left)
		}
	}
	r.told()
	if a := one(); a.status != http.StatusOK || a.Before != 10_000 {
		t.Errorf("%+v", a)
	}
	r.told("u000000 shoppers=false")
}

// What was decided is carried through when there is room again.
func fullAfterTheDecision(t *testing.T) {
	r := newRig(t, t.TempDir(), newLog(), nil)
	r.sync(shoppers, "a", "b")
	r.log.take(t)
	lift := func() {}
	r.log.refuse(func(int) error { lift = limitFiles(t, 16); return nil })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	result, err := r.Sync(ctx, Request{Namespace: "shop", Audience: config().Audiences[0], Full: true, AllowRemoval: 50}, ids("b", "c"))
	if err != nil || result.Sent {
		t.Fatalf("%+v %v", result, err)
	}
	failures := 0
	r.eventually(func() bool {
		failures++
		return r.Report(config())[0].Unsent == 0 && failures > 300 // more than a second: it was tried again
	})
	if p := r.Progress("shop", config().Audiences[0]); p.Sent {
		t.Error(fmt.Sprint("done without a place for it: ", p))
	}
	lift()
	r.eventually(func() bool { return r.busy() == "" })
	r.told("a shoppers=false", "c shoppers=true")
	r.sync(shoppers, "b", "c")
	r.told()
}
