package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestJSONOfFiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "call.json")
	if err := os.WriteFile(file, []byte(`{"a":1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for value, want := range map[string]string{`{"b":2}`: `{"b":2}`, "@" + file: `{"a":1}`, "@-": `{"c":3}`} {
		if got, err := ReadJSON("json", value, strings.NewReader(`{"c":3}`), ""); err != nil || string(got) != want {
			t.Errorf("--json %s: got %s, %v, want %s", value, got, err, want)
		}
	}
	if _, err := ReadJSON("json", "@/does/not/exist", nil, ""); err == nil {
		t.Error("a missing file: got no error")
	}
	if _, err := ReadJSON("json", "@-", strings.NewReader(strings.Repeat(" ", MaxJSON+1)), ""); err == nil {
		t.Error("a large file: got no error")
	}
}
