package system

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// stalledProxy passes the first MiB of a backup, and the rest after release.
func stalledProxy(t *testing.T, p *posthorn) (address string, reached <-chan struct{}, release func()) {
	t.Helper()
	at, released := make(chan struct{}), make(chan struct{})
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		backup, err := p.AdminAPI().Backup(r.Context(), strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "))
		if err != nil {
			t.Errorf("backup: got %v, want no error", err)
			return
		}
		defer backup.Close()
		if _, err := io.CopyN(w, backup, 1<<20); err != nil {
			t.Errorf("first MiB of the backup: got %v, want no error", err)
		}
		_ = http.NewResponseController(w).Flush()
		close(at)
		<-released
		if _, err := io.Copy(w, backup); err != nil {
			panic(http.ErrAbortHandler)
		}
	}))
	release = sync.OnceFunc(func() { close(released) })
	t.Cleanup(func() { release(); proxy.Close() })
	return strings.TrimPrefix(proxy.URL, "http://"), at, release
}

// A backup under load has every call that was answered before it began. Neither a kill -9 of the
// command nor one of Posthorn leaves a target, and the restored ledgers balance.
func TestBackupAndRestore(t *testing.T) {
	r := newReceiver(t)
	var up atomic.Bool
	r.set(func(n int) int {
		if n%2 == 0 || up.Load() {
			return http.StatusOK
		}
		return http.StatusServiceUnavailable
	})
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	var mu sync.Mutex
	acknowledged := map[string]bool{}
	// Not compressible, so that the archive has several MiB.
	send := func(i, size int) error {
		bytes := make([]byte, size/2)
		_, _ = rand.NewChaCha8([32]byte{byte(i), byte(i >> 8)}).Read(bytes)
		text := hex.EncodeToString(bytes)
		id := fmt.Sprint("m", i)
		status, answer, err := p.Post("/v1/track", key, fmt.Sprintf(`{"event":"E","userId":"u","messageId":%q,"properties":{"text":%q}}`, id, text))
		if err != nil || status != http.StatusOK {
			return fmt.Errorf("status %d, body %s, error %w", status, answer, err)
		}
		mu.Lock()
		defer mu.Unlock()
		acknowledged[id] = true
		return nil
	}
	var next atomic.Int64
	sendMany := func(n, size int) {
		var senders sync.WaitGroup
		for range 8 {
			senders.Go(func() {
				for range n / 8 {
					if err := send(int(next.Add(1)), size); err != nil {
						t.Error(err)
					}
				}
			})
		}
		senders.Wait()
	}
	sendMany(3200, 8000)
	ids := func() map[string]bool {
		mu.Lock()
		defer mu.Unlock()
		all := map[string]bool{}
		for id := range acknowledged {
			all[id] = true
		}
		return all
	}

	dir := t.TempDir()
	target := filepath.Join(dir, "b.tar")
	token := filepath.Join(p.Data, "backup.token")
	before := ids()
	loaded := make(chan struct{})
	go func() { defer close(loaded); sendMany(800, 200) }()
	if out, errs, code := cli(t, "", "backup", target, "--admin", p.Admin, "--token-file", token); code != 0 ||
		!strings.Contains(out, "bytes of files") {
		t.Fatalf("backup: exit %d: %s%s", code, out, errs)
	}
	<-loaded
	wrong := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(wrong, []byte("WRONG\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(token); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("token file: got %v, %v, want mode 0600", info, err)
	}
	for name, args := range map[string][]string{"without a token": nil, "with another token": {"--token-file", wrong}} {
		_, errs, code := cli(t, "", append([]string{"backup", filepath.Join(dir, "refused"), "--admin", p.Admin}, args...)...)
		if code != 1 || !strings.Contains(errs, "401") || !strings.Contains(errs, "--token-file "+token) {
			t.Errorf("backup %s: got exit %d: %s, want exit 1, the status 401, and the name of the file", name, code, errs)
		}
	}
	if _, errs, code := cli(t, "", "backup", target, "--admin", p.Admin, "--token-file", token); code != 1 ||
		!strings.Contains(errs, "exists") {
		t.Errorf("backup to an existing target: got exit %d: %s, want exit 1", code, errs)
	}
	if _, errs, code := cli(t, "", "backup", filepath.Join(dir, "other"), "--data", p.Data); code != 1 ||
		!strings.Contains(errs, "another process has it open") {
		t.Errorf("backup of the data of a running Posthorn: got exit %d: %s, want exit 1", code, errs)
	}

	// The command is killed.
	proxy, reached, release := stalledProxy(t, p)
	killed := filepath.Join(dir, "killed.tar")
	cmd := exec.CommandContext(t.Context(), binary, "backup", killed, "--admin", proxy, "--token-file", token)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-reached
	if _, errs, code := cli(t, "", "backup", filepath.Join(dir, "second"), "--admin", p.Admin, "--token-file", token); code != 1 ||
		!strings.Contains(errs, "another backup") {
		t.Errorf("second backup at once: got exit %d: %s, want exit 1", code, errs)
	}
	_ = cmd.Process.Signal(syscall.SIGKILL)
	_ = cmd.Wait()
	release()
	wait.For(p.T, "the work folder is removed", func() error { return noWorkFolder(p.Data) })

	// Posthorn is killed.
	proxy, reached, release = stalledProxy(t, p)
	cmd = exec.CommandContext(t.Context(), binary, "backup", filepath.Join(dir, "killed"), "--admin", proxy, "--token-file", token)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-reached
	p.End(syscall.SIGKILL)
	release()
	if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("backup of a Posthorn that is killed: got %v, want exit 1", err)
	}
	t.Logf("the command reports: %s", errs.String())
	if noWorkFolder(p.Data) == nil {
		t.Error("the work folder of the killed Posthorn: got none, want one")
	}
	p.Launch()
	if err := noWorkFolder(p.Data); err != nil {
		t.Errorf("after the restart: %v", err)
	}
	found, err := filepath.Glob(filepath.Join(dir, "[^.]*")) // Without the partial files, whose names begin with a dot.
	if err != nil {
		t.Fatal(err)
	}
	check.Equal(t, "targets", strings.Join(found, " "), target)

	// A stopped Posthorn.
	p.End(syscall.SIGTERM)
	stopped := filepath.Join(dir, "stopped")
	if out, errs, code := cli(t, "", "backup", stopped, "--data", p.Data); code != 0 {
		t.Fatalf("backup of a stopped Posthorn: exit %d: %s%s", code, out, errs)
	}
	if _, errs, code := cli(t, "", "restore", target, "--data", p.Data); code != 1 || !strings.Contains(errs, "exists") {
		t.Errorf("restore over a store: got exit %d: %s, want exit 1", code, errs)
	}

	all := ids()
	up.Store(true)
	for _, restored := range []struct {
		from string
		ids  map[string]bool
	}{{target, before}, {stopped, all}} {
		data := filepath.Join(t.TempDir(), "data")
		out, errs, code := cli(t, "", "restore", restored.from, "--data", data)
		if code != 0 || !strings.Contains(out, "Restored the backup") {
			t.Fatalf("restore of %s: exit %d: %s%s", restored.from, code, out, errs)
		}
		again := &posthorn{Instance: process.NewInstance(t, binary, data, nil, "-f", p.Manifests)}
		again.Launch()
		// Waits until nothing is pending; the report has balanced ledgers.
		if got, _, dead, discarded := again.ledger("crm"); got < int64(len(restored.ids)) || got > int64(len(all)) || dead+discarded > 0 {
			t.Errorf("restored from %s: got %d delivered, %d dead letters, %d discarded, want %d to %d delivered", restored.from, got, dead, discarded, len(restored.ids), len(all))
		}
		count := r.count()
		for id := range restored.ids {
			if count[id] == 0 {
				t.Errorf("restored from %s: %s was not delivered", restored.from, id)
				break
			}
		}
		again.checkLedgers()
		again.End(syscall.SIGTERM)
	}
	p.Launch() // For the checks at the end.
}

func noWorkFolder(data string) error {
	if _, err := os.Stat(filepath.Join(data, "backup.tmp")); err == nil {
		return fmt.Errorf("the work folder exists at %v", time.Now())
	}
	return nil
}
