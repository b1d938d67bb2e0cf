package analytics_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/analytics/analyticstest"
	"github.com/posthorn/posthorn/analytics/internal/check"
)

// A program for the vendor's v2 library works after a change of only the import path.
func TestProgramForV2(t *testing.T) {
	const program = "testdata/v2/main.go"
	source, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	const theirs, ours = `"github.com/segmentio/analytics-go"`, `"github.com/posthorn/posthorn/analytics"`
	if n := strings.Count(string(source), theirs); n != 1 {
		t.Fatalf("imports of the vendor's library: got %d, want 1", n)
	}
	dir := t.TempDir()
	changed := filepath.Join(dir, "main.go")
	if err := os.WriteFile(changed, []byte(strings.Replace(string(source), theirs, ours, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	original, err := filepath.Abs(program)
	if err != nil {
		t.Fatal(err)
	}
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{original: changed}})
	if err != nil {
		t.Fatal(err)
	}
	overlayFile := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(overlayFile, overlay, 0o600); err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(dir, "program")
	build := exec.Command("go", "build", "-trimpath", "-overlay", overlayFile, "-o", binary, "./testdata/v2")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // The flags of the Makefile, so that its builds are reused.
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: got error %v, want none\n%s", err, out)
	}

	server := analyticstest.NewServer()
	defer server.Close()
	run := exec.Command(binary)
	run.Env = append(os.Environ(), "ENDPOINT="+server.URL)
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("run: got error %v, want none\n%s", err, out)
	}
	calls := server.Calls()
	var types []string
	for _, c := range calls {
		types = append(types, c.Type)
		check.Equal(t, "write key", c.WriteKey, "h97jamjwbh")
	}
	if want := []string{"identify", "track", "page", "group", "alias"}; !slices.Equal(types, want) {
		t.Fatalf("types: got %v, want %v", types, want)
	}
	if c := calls[1]; c.Timestamp != "2009-11-10T23:00:00Z" || c.Integrations["All"] != false || c.Properties["plan"] != "Enterprise" {
		t.Errorf("track: got %s, want its timestamp, integrations and properties", c.JSON)
	}
	if c := calls[2]; c.MessageID != "page-1" || c.Properties["path"] != "/go" || c.Traits != nil {
		t.Errorf("page: got %s, want its messageId, and traits as properties", c.JSON)
	}
	if requests := server.Requests(); len(requests) != 1 || requests[0].Context["app"] == nil {
		t.Errorf("requests: got %v, want one with the context app", requests)
	}
}
