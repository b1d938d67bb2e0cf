package audience

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/posthorn/posthorn/test/check"
)

// limitFiles limits the size of files, so that writes fail as on a full disk.
func limitFiles(t *testing.T, bytes uint64) (lift func()) {
	t.Helper()
	signal.Ignore(unix.SIGXFSZ)
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &before); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: bytes, Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	lift = func() { _ = unix.Setrlimit(unix.RLIMIT_FSIZE, &before) }
	t.Cleanup(lift)
	return lift
}

// TestFullDisk runs its parts in a separate process, because the limit applies to the process.
func TestFullDisk(t *testing.T) {
	const parts = "POSTHORN_TEST_FULL_DISK"
	if os.Getenv(parts) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFullDisk$")
		cmd.Env = append(os.Environ(), parts+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("process with the limit: got error %v and output:\n%s", err, out)
		}
		return
	}
	t.Run("before a sync is accepted", fullBeforeAcceptance)
	t.Run("after a sync is accepted", fullAfterAcceptance)
}

// A sync whose files cannot be written changes nothing and leaves no files.
func fullBeforeAcceptance(t *testing.T) {
	dir := t.TempDir()
	r := newRig(t, dir, newLog(), nil)
	before := many("u", 10_000)
	r.sync(shoppers, before...)
	r.sync("/v1/audiences/young/members", "a")
	r.log.drain(t)
	one := func() answer {
		return r.do(http.MethodPost, shoppers, "web-key", strings.NewReader(`{"userId":"u000000","member":false}`))
	}
	for _, c := range []struct {
		file  string
		bytes uint64
		sync  func() answer
	}{
		{"the lines", 50_000, func() answer { return r.do(http.MethodPut, shoppers, "web-key", ids(before[1:]...)) }},
		{"the members", 50_000, one},
		{"any file", 0, func() answer {
			return r.do(http.MethodPut, "/v1/audiences/young/members?resend=true", "web-key", strings.NewReader(`{"userId":"b"}`+"\n"+`{"userId":"a"}`))
		}},
		{"the pending state", 100, func() answer {
			return r.do(http.MethodPost, "/v1/audiences/young/members", "web-key", strings.NewReader(`{"userId":"b"}`))
		}},
	} {
		lift := limitFiles(t, c.bytes)
		a := c.sync()
		lift()
		a.want(t, "no space for "+c.file, http.StatusServiceUnavailable, "storage_failed")
		check.Equal(t, "the answer contains a path", strings.Contains(a.body, dir), false)
		work, _ := filepath.Glob(filepath.Join(dir, "*", syncPrefix+"*"))
		if left := append(work, glob(t, dir, pendingFile)...); len(left) > 0 {
			t.Errorf("remaining files without space for %s: got %v, want none", c.file, left)
		}
	}
	r.wantCalls()
	a := one()
	a.want(t, "sync with enough space", http.StatusOK, "")
	check.Equal(t, "Before", a.Before, 10_000)
	r.wantCalls("u000000 shoppers=false")
}

// An accepted sync completes when the disk has space again.
func fullAfterAcceptance(t *testing.T) {
	r := newRig(t, t.TempDir(), newLog(), nil)
	r.sync(shoppers, "a", "b")
	r.log.drain(t)
	lift := func() {}
	r.log.onAppend(func(int) error { lift = limitFiles(t, 16); return nil })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	result, err := r.Sync(ctx, Request{Namespace: "shop", Audience: config().Audiences[0], Full: true, AllowRemoval: 50}, ids("b", "c"))
	check.NoError(t, "sync", err)
	check.Equal(t, "Sent", result.Sent, false)
	polls := 0
	r.eventually(func() bool {
		polls++
		return r.Report(config())[0].Unsent == 0 && polls > 300 // The polls take more than a second, so that a retry has failed.
	})
	check.Equal(t, "Sent without space", r.Progress("shop", config().Audiences[0]).Sent, false)
	lift()
	r.eventually(func() bool { return r.busy() == "" })
	r.wantCalls("a shoppers=false", "c shoppers=true")
	r.sync(shoppers, "b", "c")
	r.wantCalls()
}
