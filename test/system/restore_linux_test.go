package system

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// halfRestore starts a restore from a FIFO, and gives it the first half of an archive.
func halfRestore(t *testing.T, archive []byte, data string) (cmd *exec.Cmd, output *bytes.Buffer) {
	t.Helper()
	fifo := filepath.Join(t.TempDir(), "b.tar")
	check.NoError(t, "make a FIFO", syscall.Mkfifo(fifo, 0o600))
	cmd, output = exec.CommandContext(t.Context(), binary, "restore", fifo, "--data", data), &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = output, output
	check.NoError(t, "start the restore", cmd.Start())
	w, err := os.OpenFile(fifo, os.O_WRONLY, 0)
	check.NoError(t, "open the FIFO", err)
	t.Cleanup(func() { _ = w.Close() })
	_, err = w.Write(archive[:len(archive)/2])
	check.NoError(t, "write the FIFO", err)
	check.NoError(t, "the restore is in progress", wait.Until(func() error {
		_, err := os.Stat(filepath.Join(data, ".restore"))
		return err
	}))
	return cmd, output
}

// A restore excludes others, ends on SIGTERM without files, and leaves files on kill -9 that the next
// one removes.
func TestInterruptedRestore(t *testing.T) {
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	wait.For(p.T, "a call is accepted", func() error {
		_, _, err := p.Post("/v1/track", key, `{"event":"E","userId":"u","messageId":"m1"}`)
		return err
	})
	p.ledger("crm") // Waits until nothing is pending.
	target := filepath.Join(t.TempDir(), "b.tar")
	if out, errs, code := cli(t, "", "backup", target, "--admin", p.Admin, "--token-file", filepath.Join(p.Data, "backup.token")); code != 0 {
		t.Fatalf("backup: exit %d: %s%s", code, out, errs)
	}
	archive, err := os.ReadFile(target)
	check.NoError(t, "read the backup", err)

	data := filepath.Join(t.TempDir(), "data")
	cmd, output := halfRestore(t, archive, data)
	if _, errs, code := cli(t, "", "restore", target, "--data", data); code != 1 || !strings.Contains(errs, "another restore") {
		t.Errorf("second restore at once: got exit %d: %s, want exit 1", code, errs)
	}
	check.NoError(t, "terminate the restore", cmd.Process.Signal(syscall.SIGTERM))
	_ = cmd.Wait()
	check.Equal(t, "exit code after SIGTERM", cmd.ProcessState.ExitCode(), 1)
	if !strings.Contains(output.String(), "terminated") {
		t.Errorf("output after SIGTERM: got %q, want the signal", output)
	}
	if _, err := os.Stat(data); err == nil {
		t.Error("the data directory after SIGTERM: got one, want none")
	}

	cmd, _ = halfRestore(t, archive, data)
	check.NoError(t, "kill the restore", cmd.Process.Kill())
	_ = cmd.Wait()
	if _, err := os.Stat(filepath.Join(data, ".restore")); err != nil {
		t.Errorf("the rest of the killed restore: %v", err)
	}
	if out, errs, code := cli(t, "", "restore", target, "--data", data); code != 0 {
		t.Errorf("restore after the kill: got exit %d: %s%s, want exit 0", code, out, errs)
	}
	rest, err := filepath.Glob(filepath.Join(data, ".restore*"))
	check.NoError(t, "list the rest", err)
	check.Equal(t, "rest", strings.Join(rest, " "), "")
}
