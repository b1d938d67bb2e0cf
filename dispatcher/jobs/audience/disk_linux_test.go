package audience

import (
	"net/http"
	"os"
	"os/exec"
	"os/signal"
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

// TestFullDisk runs in a separate process, because the limit applies to the process.
func TestFullDisk(t *testing.T) {
	const inChild = "POSTHORN_TEST_FULL_DISK"
	if os.Getenv(inChild) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFullDisk$")
		cmd.Env = append(os.Environ(), inChild+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("process with the limit: got error %v and output:\n%s", err, out)
		}
		return
	}
	fullBeforeAcceptance(t)
}

// A sync whose files cannot be written changes nothing and leaves no files.
func fullBeforeAcceptance(t *testing.T) {
	d := realDisk(t)
	r := newRig(t, d, newLog(), nil)
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
			return r.do(http.MethodPut, "/v1/audiences/young/members?resend=true", "web-key",
				strings.NewReader(`{"userId":"b"}`+"\n"+`{"userId":"a"}`))
		}},
	} {
		lift := limitFiles(t, c.bytes)
		a := c.sync()
		lift()
		a.want(t, "no space for "+c.file, http.StatusServiceUnavailable, "storage_failed")
		check.Equal(t, "the answer contains a path", strings.Contains(a.body, d.dir), false)
		if left := d.count(workPrefix) + d.count(changesPrefix); left > 0 {
			t.Errorf("remaining files without space for %s: got %d, want none", c.file, left)
		}
	}
	r.wantCalls()
	a := one()
	a.want(t, "sync with enough space", http.StatusOK, "")
	check.Equal(t, "Before", a.Before, 10_000)
	r.wantCalls("u000000 shoppers=false")
}
