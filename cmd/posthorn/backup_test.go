package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// closedData makes the data directory of a stopped Posthorn.
func closedData(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	store, err := pebblestore.Open(filepath.Join(dir, backup.QueueFolder), pebblestore.Options{Logger: slog.New(slog.DiscardHandler)})
	if err == nil {
		err = errors.Join(store.OpenLane(queue.LaneID{Source: "shop/web", Destination: "shop/crm"}), store.Close(),
			os.WriteFile(filepath.Join(dir, "manifests.json"), []byte("{}"), 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func runMain(args ...string) (output string, code int) {
	var out bytes.Buffer
	code = Main(args, strings.NewReader(""), &out, &out)
	return out.String(), code
}

// names lists the entries of a folder; empty for a missing one.
func names(dir string) string {
	entries, _ := os.ReadDir(dir)
	var all []string
	for _, entry := range entries {
		all = append(all, entry.Name())
	}
	return strings.Join(all, " ")
}

func TestRefusedBackupTargets(t *testing.T) {
	data := closedData(t)
	for target, want := range map[string]string{
		"-":                             "use the name of a file or folder",
		"b.tar.gz":                      "ends in .tar",
		"b.TGZ":                         "ends in .tar",
		filepath.Join(data, "b.tar"):    "inside the data directory",
		filepath.Join(data, "queue/b"):  "inside the data directory",
		filepath.Join(data, "/../x/b"):  "no such file",
		filepath.Join(data, "manifest"): "inside the data directory",
	} {
		out, code := runMain("backup", "--data", data, target)
		if code == command.ExitOK || !strings.Contains(out, want) {
			t.Errorf("backup %s: got exit code %d: %s, want an error with %q", target, code, out, want)
		}
	}
	if got, want := names(data), "manifests.json queue"; got != want {
		t.Errorf("data directory: got %s, want %s", got, want)
	}
}

// The owner of the store could not open the files that root writes.
func TestWriteAsAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change the owner of a folder")
	}
	data := closedData(t)
	if err := os.Chown(filepath.Join(data, "queue"), 12345, -1); err != nil {
		t.Fatal(err)
	}
	before := names(filepath.Join(data, "queue"))
	for _, args := range [][]string{{"backup", filepath.Join(t.TempDir(), "b.tar")}, {"repair", "--apply"}} {
		out, code := runMain(append(args, "--data", data)...)
		if code != command.ExitUsage || !strings.Contains(out, "belongs to user 12345") || !strings.Contains(out, "sudo --user='#12345'") {
			t.Errorf("%s: got exit code %d: %s, want %d and the user", args[0], code, out, command.ExitUsage)
		}
	}
	if after := names(filepath.Join(data, "queue")); after != before {
		t.Errorf("store: got %s, want %s", after, before)
	}
}

// A failed restore leaves no folder, and no file in a folder that existed.
func TestFailedRestore(t *testing.T) {
	text := filepath.Join(t.TempDir(), "passwd")
	if err := os.WriteFile(text, []byte("root:x:0:0:root:/root:/bin/bash\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	whole := filepath.Join(t.TempDir(), "b.tar")
	if out, code := runMain("backup", "--data", closedData(t), whole); code != command.ExitOK {
		t.Fatalf("backup: exit code %d: %s", code, out)
	}
	interrupted := errors.New("interrupted")
	canceled, cancel := context.WithCancelCause(t.Context())
	cancel(interrupted)
	for _, c := range []struct {
		from, want string
		ctx        context.Context
	}{
		{text, "not a backup of Posthorn", t.Context()},
		{text + ".missing", "no such file", t.Context()},
		{t.TempDir(), "not a backup", t.Context()},
		{whole, interrupted.Error(), canceled},
	} {
		data := filepath.Join(t.TempDir(), "data")
		for _, present := range []bool{false, true} {
			if present {
				if err := os.Mkdir(data, 0o700); err != nil {
					t.Fatal(err)
				}
			}
			err := restore(c.ctx, &bytes.Buffer{}, c.from, data)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("restore %s: got %v, want an error with %q", c.from, err, c.want)
			}
			if _, err := os.Stat(data); present != (err == nil) || names(data) != "" {
				t.Errorf("restore %s: data directory: got %v with %q, want it empty: %v", c.from, err, names(data), present)
			}
		}
	}
}

// A restore removes the rest of one that was killed, and the state of the manifests of an earlier
// store.
func TestRestoreAfterKill(t *testing.T) {
	whole := filepath.Join(t.TempDir(), "b.tar")
	from := closedData(t)
	if err := os.Remove(filepath.Join(from, "manifests.json")); err != nil {
		t.Fatal(err)
	}
	if out, code := runMain("backup", "--data", from, whole); code != command.ExitOK {
		t.Fatalf("backup: exit code %d: %s", code, out)
	}
	data := t.TempDir()
	for _, file := range []string{".restore/queue/000001.log", ".restore.lock", "manifests.json"} {
		path := filepath.Join(data, file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	out, code := runMain("restore", whole, "--data", data)
	if code != command.ExitOK || !strings.Contains(out, "1 lane") {
		t.Errorf("restore: got exit code %d: %s, want %d and one lane", code, out, command.ExitOK)
	}
	if got, want := names(data), "queue"; got != want {
		t.Errorf("data directory: got %s, want %s", got, want)
	}
}
