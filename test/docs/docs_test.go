package docs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/process"
)

const root = "../.."

func pages(t *testing.T) []string {
	t.Helper()
	list, err := Pages(root)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// blocks returns the blocks of all pages with one of the languages.
func blocks(t *testing.T, languages ...string) (list []Block) {
	t.Helper()
	for _, page := range pages(t) {
		all, err := Blocks(root, page)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range all {
			if slices.Contains(languages, b.Language) {
				list = append(list, b)
			}
		}
	}
	if len(list) == 0 {
		t.Fatalf("blocks in %v: got 0, want some", languages)
	}
	return list
}

var binary string

func TestMain(m *testing.M) {
	if script := os.Getenv(alone); script != "" {
		fmt.Fprintln(os.Stderr, runAlone(script))
		os.Exit(1)
	}
	process.Main(m, &binary)
}

// Every manifest of Posthorn's kinds in the pages is valid by the CRDs' schemas and rules.
// Its references may be to objects of other blocks.
func TestManifestsAreValid(t *testing.T) {
	checked := 0
	for _, b := range blocks(t, "yaml") {
		if !strings.Contains(b.Text, "apiVersion: posthorn.dev/v1beta1") {
			continue
		}
		checked++
		t.Run(fmt.Sprintf("%s:%d", b.Page, b.Line), func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "block.yaml"), []byte(b.Text), 0o600); err != nil {
				t.Fatal(err)
			}
			out, err := exec.Command(binary, "compile", "-f", dir, "-o", "json").CombinedOutput()
			if strings.Contains(string(out), `"problems"`) || err != nil && !strings.Contains(string(out), `"verdicts"`) {
				t.Errorf("compile: got error %v and output\n%s\nwant no problems", err, out)
			}
			// Only objects of other blocks may be missing.
			for _, reason := range []string{"InvalidSpec", "InvalidURL", "InvalidFilter", "InvalidSecret", "EgressDenied"} {
				if strings.Contains(string(out), `"`+reason+`"`) {
					t.Errorf("reason of an object: got %s, want none of an invalid spec\n%s", reason, out)
				}
			}
		})
	}
	if checked < 3 {
		t.Errorf("manifests: got %d, want at least 3", checked)
	}
}

// The requests of samples are the ones in config/samples/cases.
func TestCasesOfSamples(t *testing.T) {
	cases, err := filepath.Glob(filepath.Join(root, "config", "samples", "cases", "*.yaml"))
	if err != nil || len(cases) == 0 {
		t.Fatalf("cases: got %d and error %v, want some", len(cases), err)
	}
	for _, file := range cases {
		sample := filepath.Join(root, "config", "samples", filepath.Base(file))
		if out, err := exec.Command(binary, "render", "-f", sample, "--cases", file).CombinedOutput(); err != nil {
			t.Errorf("%s: got error %v and\n%s\nwant no difference", filepath.Base(file), err, out)
		}
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)#]*?)(#[^)]*)?\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
)

func TestLinks(t *testing.T) {
	for _, page := range append(pages(t), "CONTRIBUTING.md", filepath.Join("test", "README.md")) {
		text, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			target := text
			if m[1] != "" {
				path := filepath.Join(root, filepath.Dir(page), m[1])
				if _, err := os.Stat(path); err != nil {
					t.Errorf("%s: the target %s of a link does not exist", page, m[1])
					continue
				}
				target, _ = os.ReadFile(path) // A directory has no headings.
			}
			if m[2] != "" && !slices.Contains(anchors(string(target)), m[2]) {
				t.Errorf("%s: the heading %s%s of a link does not exist", page, m[1], m[2])
			}
		}
	}
}

// anchors returns the anchors of a page's headings.
func anchors(page string) (list []string) {
	for _, m := range heading.FindAllStringSubmatch(page, -1) {
		slug := strings.ReplaceAll(strings.ToLower(m[1]), " ", "-")
		list = append(list, "#"+regexp.MustCompile(`[^-_\p{L}\p{N}]`).ReplaceAllString(slug, ""))
	}
	return list
}

var metric = regexp.MustCompile(`posthorn_[a-z]+_?[a-z_]*[a-z]`)

// docs/metrics.md has exactly the metrics of the code.
func TestMetricsAreDocumented(t *testing.T) {
	inCode, inDocs := map[string]bool{}, map[string]bool{}
	for _, dir := range []string{"dispatcher", "controllers"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, _ os.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, m := range regexp.MustCompile(`"(posthorn_[a-z_]+[a-z])"`).FindAllStringSubmatch(string(text), -1) {
				inCode[m[1]] = true
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(filepath.Join(root, "docs", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range metric.FindAllString(string(text), -1) {
		inDocs[m] = true
	}
	for m := range inCode {
		if !inDocs[m] {
			t.Errorf("docs/metrics.md lacks the metric %s", m)
		}
	}
	for m := range inDocs {
		if !inCode[m] {
			t.Errorf("docs/metrics.md has the metric %s, which does not exist", m)
		}
	}
	if len(inCode) < 20 {
		t.Errorf("metrics in the code: got %d, want at least 20", len(inCode))
	}
}
