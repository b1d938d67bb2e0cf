package standalone

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/controllers/compile"
)

func TestReadSecretValues(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "value", "canary\r\n\n")
	put(t, dir, "empty", "\n")
	put(t, dir, "large", strings.Repeat("x", 1<<20+1))
	t.Setenv("POSTHORN_TEST_VALUE", "canary-env\n")
	t.Setenv("POSTHORN_TEST_EMPTY", "")
	file := func(name string) string { return "file:" + filepath.Join(dir, name) }
	values, err := ReadSecretValues([]string{"shop/crm/secret=" + file("value"), "shop/crm/token=env:POSTHORN_TEST_VALUE"})
	if err != nil || len(values) != 2 {
		t.Fatalf("got %v, %v, want two values", values, err)
	}
	if got, want := string(values[0].value)+"|"+string(values[1].value), "canary|canary-env\n"; got != want {
		t.Errorf("values: got %q, want %q", got, want)
	}
	if text := fmt.Sprintf("%v %+v %#v %s", values, values, values, values[0]); strings.Contains(text, "canary") {
		t.Errorf("printed values: got %s, want no secret", text)
	}
	for _, c := range []struct{ flag, want string }{
		{"shop/crm/secret=canary", "use NAMESPACE/NAME/KEY=file:PATH"},
		{"shop/crm/secret", "use NAMESPACE/NAME/KEY=file:PATH"},
		{"crm/secret=env:POSTHORN_TEST_VALUE", "use NAMESPACE/NAME/KEY=file:PATH"},
		{"shop/crm/secret=env:", "use NAMESPACE/NAME/KEY=file:PATH"},
		{"shop/crm/secret=vault:canary", "use NAMESPACE/NAME/KEY=file:PATH"},
		{"shop/crm/secret=env:POSTHORN_TEST_UNSET", "shop/crm/secret: the environment variable POSTHORN_TEST_UNSET is not set, or empty"},
		{"shop/crm/secret=env:POSTHORN_TEST_EMPTY", "shop/crm/secret: the environment variable POSTHORN_TEST_EMPTY is not set, or empty"},
		{"shop/crm/secret=" + file("missing"), "no such file"},
		{"shop/crm/secret=" + file("empty"), "is empty"},
		{"shop/crm/secret=" + file("large"), "more than 1048576 bytes"},
		{"shop/CRM/secret=" + file("value"), "metadata.name"},
		{"shop/crm/a key=" + file("value"), "data[a key]"},
	} {
		_, err := ReadSecretValues([]string{c.flag})
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "canary") {
			t.Errorf("--secret %s: got %v, want an error with %q and without the value", c.flag, err, c.want)
		}
	}
	twice := "shop/crm/secret=" + file("value")
	if _, err := ReadSecretValues([]string{twice, twice}); err == nil || !strings.Contains(err.Error(), "twice") {
		t.Errorf("one key twice: got %v, want an error", err)
	}
}

// A value takes effect like one in a manifest, and is read again; it is not written to the state.
func TestSecretValues(t *testing.T) {
	dir, secrets, state := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "manifests.json")
	put(t, dir, "a.yaml", webSource+"---\n"+webDestination)
	put(t, secrets, "key", "canary-first\n")
	path := filepath.Join(secrets, "key")
	values, err := ReadSecretValues([]string{"default/web-key/writeKey=file:" + path})
	if err != nil {
		t.Fatal(err)
	}
	compiled, err := Compile(dir, values, compile.Policy{})
	if err != nil || !compiled.OK() {
		t.Errorf("compile: got %+v, %v, want no problem", compiled, err)
	}
	f := start(t, dir, state, values...)
	f.runs("default/crm Active")
	hasKey := func(key string) {
		t.Helper()
		sum := sha256.Sum256([]byte(key))
		want := hex.EncodeToString(sum[:])
		f.until("the write key "+key, func() bool {
			f.runner.mu.Lock()
			defer f.runner.mu.Unlock()
			sources := f.runner.configs["default"].Config.Sources
			return len(sources) == 1 && len(sources[0].WriteKeySHA256) == 1 && sources[0].WriteKeySHA256[0] == want
		})
	}
	hasKey("canary-first")
	put(t, secrets, "key", "canary-second")
	hasKey("canary-second")

	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	f.problem(path + ": Secret default/web-key: --secret default/web-key/writeKey: ")
	hasKey("canary-second")
	put(t, secrets, "key", "canary-third")
	f.problem("")
	hasKey("canary-third")

	put(t, dir, "b.yaml", secret)
	f.problem("the object is also in --secret, which takes precedence")
	hasKey("canary-third")
	f.stop()
	if text, err := os.ReadFile(state); err != nil || strings.Contains(string(text), `"Secret"`) {
		t.Errorf("state: got %s, %v, want no Secret", text, err)
	}

	// An empty folder keeps the objects of the state, and an unreadable file does.
	for _, file := range []string{"a.yaml", "b.yaml"} {
		if err := os.Remove(filepath.Join(dir, file)); err != nil {
			t.Fatal(err)
		}
	}
	values, err = ReadSecretValues([]string{"default/web-key/writeKey=file:" + path})
	if err != nil {
		t.Fatal(err)
	}
	f = start(t, dir, state, values...)
	f.runs("default/crm Active")
	hasKey("canary-third")
	f.stop()
	put(t, dir, "a.yaml", "a: [\n")
	f = start(t, dir, state, values...)
	f.runs("default/crm Active")
	hasKey("canary-third")
}

// A pipe has no writer at the start, or none later: it is rejected, and nothing waits for it.
func TestSecretFromAPipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skip(err)
	}
	if _, err := ReadSecretValues([]string{"default/crm/secret=file:" + pipe}); err == nil || !strings.Contains(err.Error(), "is a pipe, which cannot be read again; write the value to a file") {
		t.Errorf("got error %v", err)
	}
}
