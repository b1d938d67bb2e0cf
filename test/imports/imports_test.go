// Package imports tests the import rules of docs/architecture.md and the modules of the
// repository.
package imports

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/check"
)

// root is the prefix of the import paths of the repository.
const root = "github.com/posthorn/posthorn/"

// external has packages with all that they may import of other modules; other packages may import any.
var external = map[string][]string{
	"api/v1beta1":              {"k8s.io/apimachinery"},
	"analytics":                nil,
	"analytics/analyticstest":  nil,
	"analytics/event":          nil,
	"contract/adminapi":        nil,
	"controllers/page":         {"k8s.io/apimachinery", "sigs.k8s.io/yaml"},
	"dispatcher/backup":        nil,
	"dispatcher/changes":       {"golang.org/x/time"},
	"dispatcher/queue":         nil,
	"dispatcher/intake/limits": {"golang.org/x/sync", "golang.org/x/time"},
	"internal/durable":         nil,
	"test/witness":             nil,
}

// pure has the packages without I/O, goroutines, locks and clocks, and all that they import.
var pure = map[string][]string{"dispatcher/delivery/endpoint": {"math", "math/bits", "time"}}

// forbidden has the packages of other modules that packages below a folder must not import.
var forbidden = map[string][]string{"dispatcher": {"sigs.k8s.io/controller-runtime"}}

// only has the packages of other modules that one package alone may import.
var only = map[string]string{"github.com/nats-io/": "dispatcher/replicated/slots/jetstream"}

// users has the packages that may import the packages of a folder, beside the folder's own.
var users = map[string][]string{"dispatcher/replicated": {"cmd/posthorn", "hack/bench", "test/"}}

// linked has packages with the packages of this module that they may link, directly or not, and
// with packages of other modules that they must not link.
var linked = []struct {
	pkg      string
	own      []string
	external []string
}{
	// The client commands are small, and build for every platform of kubectl.
	{"cmd/kubectl-posthorn", []string{"analytics/event", "api/", "cmd/internal/cli", "cmd/internal/command", "controllers/manifest",
		"controllers/observed", "controllers/page", "controllers/why", "contract/adminapi", "contract/podreport", "internal/durable",
		"internal/plural", "internal/termsafe"},
		[]string{"k8s.io/apiextensions-apiserver", "k8s.io/apiserver", "sigs.k8s.io/controller-runtime", "github.com/cockroachdb/pebble"}},
}

type pkg struct {
	ImportPath, Dir        string
	GoFiles, Imports, Deps []string
}

// TestFolders compares the table of docs/architecture.md with the packages and what they import.
func TestFolders(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "architecture.md"))
	check.NoError(t, "read the page", err)
	rows := map[string][]string{} // The permitted imports of each folder.
	for _, row := range regexp.MustCompile("(?m)^\\| (`.*) \\| .* \\|(.*)\\|$").FindAllStringSubmatch(string(text), -1) {
		for _, folder := range quoted(row[1]) {
			rows[folder] = append(quoted(row[2]), folder)
			if strings.TrimSpace(row[2]) == "all" {
				rows[folder] = []string{""}
			}
			if _, err := os.Stat(filepath.Join("..", "..", folder)); err != nil {
				t.Errorf("folder %s of the table: got %v, want a folder", folder, err)
			}
		}
	}
	pkgs := list(t)
	isPackage := map[string]bool{}
	for _, p := range pkgs {
		isPackage[strings.TrimPrefix(p.ImportPath, root)] = true
	}
	// part is a package that belongs to another one: internal/NAME inside of it, or a helper of its tests.
	part := regexp.MustCompile(`^(.+)/(internal/\w+|\w+test)$`)
	for _, p := range pkgs {
		path := strings.TrimPrefix(p.ImportPath, root)
		may, ok := rows[path]
		if m := part.FindStringSubmatch(path); !ok && m != nil && isPackage[m[1]] {
			may, ok = rows[m[1]]
		}
		if top, _, _ := strings.Cut(path, "/"); !ok {
			may, ok = rows[top]
		}
		if !ok {
			t.Errorf("row of %s in docs/architecture.md: got none, want one", path)
		}
		for _, imported := range p.Imports {
			own, ok := strings.CutPrefix(imported, root)
			if !ok || strings.HasPrefix(own, path+"/") {
				continue
			}
			if m := part.FindStringSubmatch(own); m != nil && isPackage[m[1]] && strings.HasPrefix(m[2], "internal/") {
				continue // Go permits it to the package and its folders only.
			}
			if !slices.ContainsFunc(may, func(name string) bool {
				return name == "" || own == name || strings.HasSuffix(own, "/"+name) || !isPackage[name] && strings.HasPrefix(own, name+"/")
			}) {
				t.Errorf("import of %s in %s: not in its row of docs/architecture.md", own, path)
			}
		}
	}
}

// TestSuites compares the table of test/README.md with the folders of tests.
func TestSuites(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "README.md"))
	check.NoError(t, "read the page", err)
	var rows, want []string
	for _, row := range regexp.MustCompile(`(?m)^\| \[([\w/]+)\]`).FindAllStringSubmatch(string(text), -1) {
		rows = append(rows, row[1])
	}
	folders, err := filepath.Glob(filepath.Join("..", "*", "*.go"))
	check.NoError(t, "list the folders", err)
	for _, file := range folders {
		want = append(want, filepath.Base(filepath.Dir(file)))
	}
	for _, p := range list(t) {
		if path := strings.TrimPrefix(p.ImportPath, root); strings.HasSuffix(path, "test") && strings.HasPrefix(path, "dispatcher/") {
			want = append(want, path)
		}
	}
	slices.Sort(rows)
	slices.Sort(want)
	check.Same(t, "rows of test/README.md", rows, slices.Compact(want))
}

// quoted returns the names in backquotes.
func quoted(cell string) (names []string) {
	for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
		names = append(names, m[1])
	}
	return names
}

func TestExternalImports(t *testing.T) {
	checked := 0
	for _, p := range list(t) {
		path := strings.TrimPrefix(p.ImportPath, root)
		allowed, limited := external[path]
		if limited {
			checked++
		}
		for _, imported := range p.Imports {
			if strings.HasPrefix(imported, root) || !strings.Contains(strings.Split(imported, "/")[0], ".") {
				continue
			}
			if limited && !hasPrefix(imported, allowed) {
				t.Errorf("import of %s in %s: not allowed", imported, path)
			}
			for folder, prefixes := range forbidden {
				if strings.HasPrefix(path+"/", folder+"/") && hasPrefix(imported, prefixes) {
					t.Errorf("import of %s in %s: not allowed below %s", imported, path, folder)
				}
			}
		}
	}
	check.Equal(t, "checked packages", checked, len(external))
}

func TestOnlyImporter(t *testing.T) {
	importers := map[string][]string{}
	for _, p := range list(t) {
		for _, imported := range p.Imports {
			for prefix := range only {
				if strings.HasPrefix(imported, prefix) {
					importers[prefix] = append(importers[prefix], strings.TrimPrefix(p.ImportPath, root))
				}
			}
		}
	}
	for prefix, allowed := range only {
		if got := slices.Compact(importers[prefix]); !slices.Equal(got, []string{allowed}) {
			t.Errorf("importers of %s: got %v, want %s alone", prefix, got, allowed)
		}
	}
}

func TestUsers(t *testing.T) {
	for folder, allowed := range users {
		found := 0
		for _, p := range list(t) {
			path := strings.TrimPrefix(p.ImportPath, root)
			if !slices.ContainsFunc(p.Imports, func(i string) bool { return strings.HasPrefix(i, root+folder+"/") }) ||
				strings.HasPrefix(path, folder+"/") {
				continue
			}
			if found++; !hasPrefix(path, allowed) {
				t.Errorf("import of a package in %s in %s: not allowed", folder, path)
			}
		}
		if found == 0 {
			t.Errorf("importers of %s: got none, want %q", folder, allowed)
		}
	}
}

// clock matches what reads a clock or waits, and goroutines.
var clock = regexp.MustCompile(`\btime\.(Now|Since|Until|Sleep|After|AfterFunc|Tick|NewTimer|NewTicker)\b|\bgo func\b|\bchan\b`)

func TestPure(t *testing.T) {
	checked := 0
	for _, p := range list(t) {
		path := strings.TrimPrefix(p.ImportPath, root)
		allowed, ok := pure[path]
		if !ok {
			continue
		}
		checked++
		for _, imported := range p.Imports {
			if !slices.Contains(allowed, imported) {
				t.Errorf("import of %s in %s: not allowed in a pure package", imported, path)
			}
		}
		for _, name := range p.GoFiles {
			source, err := os.ReadFile(filepath.Join(p.Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			if found := clock.Find(source); found != nil {
				t.Errorf("%s in %s/%s: not allowed in a pure package", found, path, name)
			}
		}
	}
	if checked != len(pure) {
		t.Fatalf("checked packages: got %d, want %d", checked, len(pure))
	}
}

func TestLinkedPackages(t *testing.T) {
	pkgs := map[string]pkg{}
	for _, p := range list(t) {
		pkgs[strings.TrimPrefix(p.ImportPath, root)] = p
	}
	for _, rule := range linked {
		p, ok := pkgs[rule.pkg]
		if !ok {
			t.Errorf("package %s: got none, want one", rule.pkg)
		}
		for _, dep := range p.Deps {
			if own, ok := strings.CutPrefix(dep, root); ok && !hasPrefix(own, rule.own) || hasPrefix(dep, rule.external) {
				t.Errorf("%s links %s: not allowed", rule.pkg, dep)
			}
		}
	}
}

func hasPrefix(s string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}

func list(t *testing.T) (pkgs []pkg) {
	out := run(t, ".", nil, "list", "-json=ImportPath,Dir,GoFiles,Imports,Deps", root+"...")
	for dec := json.NewDecoder(strings.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}
