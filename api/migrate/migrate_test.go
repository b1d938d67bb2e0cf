package migrate

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// The golden files are the samples, the manifests in the docs and the valid test documents
// of release 0.2.0, and further cases. test/cel applies the results. The last lines have the
// notes, as comments.
func TestFile(t *testing.T) {
	files, err := filepath.Glob("testdata/*.in.*")
	if err != nil || len(files) < 30 {
		t.Fatalf("%d files (%v)", len(files), err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			out, notes, err := File(text)
			if err != nil {
				t.Fatal(err)
			}
			got := string(out)
			for _, n := range notes {
				got += "# Note: " + n.String() + "\n"
			}
			golden := strings.Replace(file, ".in.", ".out.", 1)
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if filepath.Ext(file) == ".json" && !json.Valid(out) {
				t.Errorf("the result is not JSON:\n%s", out)
			}
			// The result has the current API, so it is returned byte for byte.
			again, _, err := File(out)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(out), string(again)); diff != "" {
				t.Errorf("the second run changes it (-first +second):\n%s", diff)
			}
		})
	}
}

// Manifests of the current API are returned byte for byte, without a note.
func TestCurrentManifests(t *testing.T) {
	var files []string
	for _, pattern := range []string{"../../config/samples/*.yaml", "../../test/cel/testdata/valid/*.yaml", "../../hack/demo/manifests/*.yaml"} {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %d files (%v)", pattern, len(found), err)
		}
		files = append(files, found...)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		out, notes, err := File(text)
		if err != nil || len(notes) > 0 {
			t.Errorf("%s: error %v, notes %v", file, err, notes)
		}
		if diff := cmp.Diff(string(text), string(out)); diff != "" {
			t.Errorf("%s changed:\n%s", file, diff)
		}
	}
}

func TestErrors(t *testing.T) {
	const head = "apiVersion: posthorn.dev/v1alpha1\nmetadata: {name: x}\n"
	for _, c := range []struct{ name, text, want string }{
		{"not YAML", "a: b\n---\n{{ template }}: [\n", "document 2: not YAML"},
		{"both write keys", head + "kind: Source\nspec: {writeKeySecretRef: {name: a, key: b}, writeKeys: []}\n", "Source x: it has both writeKeySecretRef and writeKeys"},
		{"both of a reference", head + "kind: Redelivery\nspec: {destination: a, destinationRef: {name: a}}\n", "both destination and destinationRef"},
		{"names and selector", head + "kind: WebhookDestination\nspec: {sources: {names: [a], selector: {}}}\n", "either names or selector"},
		{"neither", head + "kind: WebhookDestination\nspec: {sources: {}}\n", "either names or selector"},
		{"names of another type", head + "kind: WebhookDestination\nspec: {sources: {names: web}}\n", "sources: must be a list of names"},
		{"a name of another type", head + "kind: DeletionRequest\nspec: {sources: [[web]]}\n", "sources: must be a list of names"},
		{"a reference of another type", head + "kind: Audience\nspec: {source: [web]}\n", "source: must be a name"},
		{"both signings", head + "kind: WebhookDestination\nspec: {signing: {secretRef: {name: a, key: b}, schemes: []}}\n", "spec.signing has both"},
		{"both deliveries", head + "kind: WebhookDestination\nspec: {delivery: {retryWindow: 1h, retry: {}}}\n", "spec.delivery has both"},
		{"an alias of a changed value", "kind: List\nitems:\n- apiVersion: posthorn.dev/v1alpha1\n  kind: DeletionRequest\n  spec: {sources: &s [web]}\n- {other: *s}\n", "replace each alias"},
		{"a merge key", "base: &b {source: web}\n" + head + "kind: Audience\nspec: {<<: *b, name: A}\n", "Audience x: the manifest has a merge key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, _, err := File([]byte(c.text))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			if out != nil {
				t.Errorf("File returns an error and a result:\n%s", out)
			}
		})
	}
}

// File must not panic, and must accept its own result.
func FuzzFile(f *testing.F) {
	files, err := filepath.Glob("testdata/*.in.*")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		out, _, err := File(text)
		if err != nil {
			return
		}
		if _, _, err := File(out); err != nil {
			t.Errorf("the result is not accepted: %v\n%s", err, out)
		}
	})
}
