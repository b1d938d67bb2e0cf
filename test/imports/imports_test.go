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
)

// root is the prefix of the import paths of the repository.
const root = "github.com/posthorn/posthorn/"

// rules has the allowed imports of packages whose path starts with pkg: packages of this
// module that start with one of own, and packages of other modules that start with one of
// external (nil allows all).
var rules = []struct {
	pkg      string
	own      []string
	external []string
}{
	{"api/v1alpha1", nil, []string{"k8s.io/apimachinery"}},
	{"analytics/event", nil, []string{}},
	{"analytics", []string{"analytics"}, []string{}},
	{"controllers", []string{"api/", "config/crd", "contract", "controllers", "internal"}, nil},
	{"controllers/page", []string{"api/v1alpha1", "controllers/manifest", "controllers/why", "contract/adminapi", "internal/plural"}, []string{"k8s.io/apimachinery", "sigs.k8s.io/yaml"}},
	{"contract/adminapi", []string{"analytics/event"}, []string{}},
	{"contract", []string{"analytics/event", "contract"}, nil},
	{"internal", []string{}, nil},
	{"internal/durable", []string{}, []string{}},
	{"dispatcher/backup", []string{"internal/durable"}, []string{}},
	{"dispatcher", []string{"analytics/event", "contract", "dispatcher", "internal"}, nil},
	{"dispatcher/delivery/endpoint", []string{}, []string{}},
	{"dispatcher/intake/admission", []string{"analytics/event", "contract", "dispatcher/changes", "dispatcher/intake/admission", "dispatcher/intake/limits", "dispatcher/intake/route", "dispatcher/queue"}, nil},
	{"dispatcher/changes", []string{"contract/adminapi", "contract/liveconfig"}, []string{"golang.org/x/time"}},
	{"dispatcher/intake/limits", []string{}, []string{"golang.org/x/sync", "golang.org/x/time"}},
	{"test/witness", []string{}, []string{}},
}

// pure has the packages without I/O, goroutines, locks and clocks, and all that they import.
var pure = map[string][]string{"dispatcher/delivery/endpoint": {"math/bits", "time"}}

// forbidden has the packages of other modules that must not be imported.
var forbidden = map[string][]string{"dispatcher": {"sigs.k8s.io/controller-runtime"}}

// only has the packages of other modules that one package alone may import.
var only = map[string]string{"github.com/nats-io/": "dispatcher/replicated/slots/jetstream"}

// linked has packages with the packages of this module that they may link, directly or not, and
// with those of other modules that they must not link.
var linked = []struct {
	pkg      string
	own      []string
	external []string
}{
	// The client commands are small, and build for every platform of kubectl.
	{"cmd/kubectl-posthorn", []string{"analytics/event", "api/", "cmd/internal/cli", "cmd/internal/command", "controllers/manifest", "controllers/observed", "controllers/page", "controllers/why", "contract/adminapi", "internal/durable", "internal/plural", "internal/termsafe"},
		[]string{"k8s.io/apiextensions-apiserver", "k8s.io/apiserver", "sigs.k8s.io/controller-runtime", "github.com/cockroachdb/pebble"}},
}

type pkg struct {
	ImportPath, Dir        string
	GoFiles, Imports, Deps []string
}

func TestImportDirection(t *testing.T) {
	checked := 0
	for _, p := range list(t) {
		path := strings.TrimPrefix(p.ImportPath, root)
		for _, rule := range rules {
			if !strings.HasPrefix(path+"/", rule.pkg) {
				continue
			}
			checked++
			for _, imported := range p.Imports {
				if own, ok := strings.CutPrefix(imported, root); ok {
					if !hasPrefix(own, rule.own) {
						t.Errorf("import of %s in %s: not allowed by the rule for %s", own, path, rule.pkg)
					}
					continue
				}
				if rule.external != nil && strings.Contains(strings.Split(imported, "/")[0], ".") && !hasPrefix(imported, rule.external) {
					t.Errorf("import of %s in %s: not allowed by the rule for %s", imported, path, rule.pkg)
				}
				if hasPrefix(imported, forbidden[rule.pkg]) {
					t.Errorf("import of %s in %s: not allowed by the rule for %s", imported, path, rule.pkg)
				}
			}
		}
	}
	if checked < len(rules) {
		t.Fatalf("checked packages: got %d, want at least %d", checked, len(rules))
	}
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
