package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

const (
	oldSource = "# The shop.\napiVersion: posthorn.dev/v1alpha1\nkind: Source\nmetadata: {name: web}\nspec: {writeKeySecretRef: {name: web-key, key: writeKey}}\n"
	newSource = "# The shop.\napiVersion: posthorn.dev/v1alpha1\nkind: Source\nmetadata: {name: web}\nspec: {writeKeys: [{secretKeyRef: {name: web-key, key: writeKey}}]}\n"
	configMap = "kind:   ConfigMap\napiVersion: v1\nmetadata: {name: a}\n"
	oldAgain  = "{\"apiVersion\": \"posthorn.dev/v1alpha1\", \"kind\": \"Redelivery\", \"metadata\": {\"name\": \"r\"}, \"spec\": {\"destination\": \"crm\"}}\n"
	newAgain  = "{\"apiVersion\": \"posthorn.dev/v1alpha1\", \"kind\": \"Redelivery\", \"metadata\": {\"name\": \"r\"}, \"spec\": {\"destinationRef\": {\"name\": \"crm\"}}}\n"
	pruned    = "apiVersion: posthorn.dev/v1alpha1\nkind: Source\nmetadata: {name: gone}\nspec: {}\n"
)

func TestMigrate(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("folder/a.yaml", oldSource, 0o640)
	write("folder/b.yml", configMap, 0o600)
	write("folder/c.json", oldAgain, 0o600)
	write("folder/.hidden.yaml", oldSource, 0o600)
	write("folder/notes.txt", "spec: {", 0o600)
	one, gone, broken := write("one.yaml", oldSource, 0o600), write("pruned.yaml", pruned, 0o600), write("broken.yaml", "a: [", 0o600)
	write("empty/notes.txt", "", 0o600)
	folder := filepath.Join(dir, "folder")
	for _, c := range []struct {
		name, stdin string
		args        []string
		code        int
		stdout      string
		stderr      []string
	}{
		{name: "a file", args: []string{"-f", one}, stdout: newSource},
		{name: "standard input", args: []string{"-f", "-"}, stdin: oldSource, stdout: newSource},
		{name: "the present form", args: []string{"-f", "-"}, stdin: newSource, stdout: newSource},
		{name: "without a line break at its end", args: []string{"-f", "-", "-f", one}, stdin: "kind: X", stdout: "kind: X\n---\n" + newSource},
		{name: "a folder", args: []string{"-f", folder}, stdout: newSource + "---\n" + configMap + "---\n" + newAgain, stderr: []string{"warning: ", "c.json, document 1, Redelivery r: its spec cannot be changed"}},
		{name: "a problem", args: []string{"-f", gone}, code: command.ExitFailure, stdout: pruned, stderr: []string{"problem: ", "Source gone: spec has neither"}},
		{name: "not YAML", args: []string{"-f", one, "-f", broken}, code: command.ExitFailure, stderr: []string{"broken.yaml, document 1: not YAML"}},
		{name: "no such file", args: []string{"-f", filepath.Join(dir, "missing")}, code: command.ExitFailure, stderr: []string{"missing: no such file"}},
		{name: "a folder without manifests", args: []string{"-f", filepath.Join(dir, "empty")}, code: command.ExitFailure, stderr: []string{"the folder has no .yaml"}},
		{name: "no file", code: command.ExitUsage, stderr: []string{"the manifests are missing"}},
		{name: "standard input in place", args: []string{"-f", "-", "--write"}, code: command.ExitUsage, stderr: []string{"--write cannot change standard input"}},
		{name: "in place, one broken", args: []string{"-f", one, "-f", broken, "--write"}, code: command.ExitFailure, stderr: []string{"not YAML"}},
	} {
		// The plugin has the same command; it needs no cluster.
		for _, called := range [][]string{{"migrate"}, {"kubectl", "migrate"}} {
			t.Run(strings.Join(called, " ")+", "+c.name, func(t *testing.T) {
				var stdout, stderr bytes.Buffer
				if code := execute(append(called, c.args...), strings.NewReader(c.stdin), &stdout, &stderr); code != c.code {
					t.Errorf("exit code %d, want %d:\n%s", code, c.code, stderr.String())
				}
				if diff := cmp.Diff(c.stdout, stdout.String()); diff != "" {
					t.Errorf("standard output (-want +got):\n%s", diff)
				}
				for _, want := range c.stderr {
					if !strings.Contains(stderr.String(), want) {
						t.Errorf("standard error lacks %q:\n%s", want, stderr.String())
					}
				}
				if c.stderr == nil && stderr.Len() > 0 {
					t.Errorf("standard error is not empty:\n%s", stderr.String())
				}
				if text, err := os.ReadFile(one); err != nil || string(text) != oldSource {
					t.Errorf("the file changed: %v\n%s", err, text)
				}
			})
		}
	}

	var stdout, stderr bytes.Buffer
	if code := execute([]string{"migrate", "-f", folder, "-f", one, "--write"}, nil, &stdout, &stderr); code != command.ExitOK {
		t.Fatalf("exit code %d:\n%s", code, stderr.String())
	}
	changed := filepath.Join(folder, "a.yaml") + "\n" + filepath.Join(folder, "c.json") + "\n" + one + "\n"
	if diff := cmp.Diff(changed, stdout.String()); diff != "" {
		t.Errorf("--write prints (-want +got):\n%s", diff)
	}
	for name, want := range map[string]string{"folder/a.yaml": newSource, "folder/b.yml": configMap, "folder/c.json": newAgain, "one.yaml": newSource} {
		if text, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(text) != want {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, cmp.Diff(want, string(text)))
		}
	}
	if info, err := os.Stat(filepath.Join(folder, "a.yaml")); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("the mode of a.yaml is %v (%v), want -rw-r-----", info.Mode(), err)
	}
	if left, _ := filepath.Glob(filepath.Join(folder, ".posthorn-migrate-*")); len(left) > 0 {
		t.Errorf("temporary files are left: %v", left)
	}
}
