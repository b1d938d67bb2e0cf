// Package docs runs what the documentation shows: every manifest is compiled,
// every link leads somewhere, and the commands of the README are run.
package docs

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

const root = "../.."

// block is a fenced block of a page.
type block struct {
	page, language, text string
	line                 int
}

func blocks(t *testing.T, language string) (list []block) {
	t.Helper()
	for _, page := range pages(t) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		var current *block
		for i, line := range strings.Split(string(text), "\n") {
			fence, ok := strings.CutPrefix(line, "```")
			switch {
			case ok && current == nil:
				current = &block{page: page, language: strings.TrimSpace(fence), line: i + 1}
			case ok:
				if current.language == language {
					list = append(list, *current)
				}
				current = nil
			case current != nil:
				current.text += line + "\n"
			}
		}
		if current != nil {
			t.Errorf("%s:%d: the block does not end", page, current.line)
		}
	}
	if len(list) == 0 {
		t.Fatalf("no %s block found", language)
	}
	return list
}

func pages(t *testing.T) (list []string) {
	t.Helper()
	list = append(list, filepath.Join(root, "README.md"))
	err := filepath.WalkDir(filepath.Join(root, "docs"), func(path string, _ os.DirEntry, err error) error {
		if strings.HasSuffix(path, ".md") {
			list = append(list, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "posthorn-docs-")
	if err != nil {
		panic(err)
	}
	binary = filepath.Join(dir, "bin", "posthorn")
	if out, err := exec.Command("go", "build", "-o", binary, "../../cmd/posthorn").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build posthorn: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// Every manifest of ours in the pages is valid by the CRDs' schemas and rules.
// What it refers to need not stand in the same block.
func TestManifestsAreValid(t *testing.T) {
	checked := 0
	for _, b := range blocks(t, "yaml") {
		if !strings.Contains(b.text, "apiVersion: posthorn.dev/v1alpha1") {
			continue
		}
		checked++
		t.Run(fmt.Sprintf("%s:%d", filepath.Base(b.page), b.line), func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "block.yaml"), []byte(b.text), 0o600); err != nil {
				t.Fatal(err)
			}
			out, err := exec.Command(binary, "compile", "-f", dir, "-o", "json").CombinedOutput()
			if strings.Contains(string(out), `"problems"`) || err != nil && !strings.Contains(string(out), `"verdicts"`) {
				t.Errorf("%v\n%s", err, out)
			}
			// Only what lives in another block may be missing.
			for _, reason := range []string{"InvalidSpec", "InvalidURL", "InvalidFilter", "InvalidSecret", "EgressDenied"} {
				if strings.Contains(string(out), `"`+reason+`"`) {
					t.Errorf("%s\n%s", reason, out)
				}
			}
		})
	}
	if checked < 3 {
		t.Errorf("only %d manifests were found", checked)
	}
}

var link = regexp.MustCompile(`\]\(([^)#]+?)(#[^)]*)?\)`)

func TestLinksLeadSomewhere(t *testing.T) {
	for _, page := range pages(t) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s: the link to %s leads nowhere", page, m[1])
			}
		}
	}
}

// The README's way without a cluster, as it stands there but for the ports.
func TestReadmeWithoutACluster(t *testing.T) {
	var script string
	for _, b := range blocks(t, "sh") {
		if strings.HasSuffix(b.page, "README.md") && strings.Contains(b.text, "posthorn run") {
			script = b.text
		}
	}
	if script == "" {
		t.Fatal("the README shows no posthorn run")
	}
	dir := t.TempDir()
	manifests, err := filepath.Abs(filepath.Join(root, "hack/demo/manifests"))
	if err != nil {
		t.Fatal(err)
	}
	calls, admin, sink := free(t), free(t), free(t)
	if err := os.CopyFS(filepath.Join(dir, "manifests"), os.DirFS(manifests)); err != nil {
		t.Fatal(err)
	}
	crm := filepath.Join(dir, "manifests", "crm.yaml")
	text, err := os.ReadFile(crm)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(crm, []byte(strings.ReplaceAll(string(text), "127.0.0.1:9000", sink)), 0o600); err != nil {
		t.Fatal(err)
	}
	script = strings.NewReplacer(
		"make build\n", "",
		"bin/posthorn sink", binary+" sink --listen "+sink,
		"bin/posthorn run --manifests hack/demo/manifests", binary+" run --manifests "+dir+"/manifests --data "+dir+"/data --listen "+calls+" --admin-listen "+admin,
		"bin/posthorn send", wait(binary+" send --endpoint http://"+calls),
		"bin/posthorn get", wait(binary+" get --admin "+admin),
	).Replace(script)
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", untilOK+script+"\nfor i in $(seq 600); do "+binary+" get destinations --admin "+admin+" | grep -q 'crm *True *True' && break; sleep 0.1; done\n"+
		binary+" get destinations --admin "+admin+"\nkill $(jobs -p); wait\n")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	for _, want := range []string{`{"success":true}`, `"Order Completed"`, "signature ok", "crm         True    True"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in what the README's commands print (%v):\n%s\n%s", want, err, script, out)
		}
	}
}

// wait tries a command until it works: a user types slower than a server starts.
func wait(command string) string { return "until_ok " + command }

const untilOK = "until_ok() { for i in $(seq 600); do \"$@\" 2>/dev/null && return 0; sleep 0.1; done; return 1; }\n"

func free(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

var metric = regexp.MustCompile(`posthorn_[a-z]+_?[a-z_]*[a-z]`)

// docs/metrics.md names every metric that the code makes, and no other.
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
			t.Errorf("docs/metrics.md does not name %s", m)
		}
	}
	for m := range inDocs {
		if !inCode[m] {
			t.Errorf("docs/metrics.md names %s, which the code does not make", m)
		}
	}
	if len(inCode) < 20 {
		t.Errorf("only %d metrics were found in the code", len(inCode))
	}
}
