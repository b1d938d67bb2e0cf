// Package imports holds the direction of imports between Posthorn's packages,
// as docs/architecture.md states it.
package imports

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/posthorn/posthorn/"

// rules: a package whose path (below the module) starts with the first word
// may import, of this module, only what starts with one of the others, and of
// other modules only what the second list allows (nil: anything).
var rules = []struct {
	pkg      string
	own      []string
	external []string
}{
	{"api/v1alpha1", nil, []string{"k8s.io/apimachinery"}},
	{"api/migrate", nil, []string{"go.yaml.in/yaml/v3"}},
	{"event", nil, []string{}},
	{"analytics", []string{"analytics", "event"}, []string{}},
	{"controllers", []string{"api/", "config/crd", "controllers", "dispatcher/liveconfig"}, nil},
	{"dispatcher", []string{"dispatcher", "event"}, nil},
}

// forbidden names what must not be imported although it is of another module.
var forbidden = map[string][]string{"dispatcher": {"sigs.k8s.io/controller-runtime"}}

type pkg struct {
	ImportPath string
	Imports    []string
}

func TestImportDirection(t *testing.T) {
	checked := 0
	for _, p := range list(t) {
		path := strings.TrimPrefix(p.ImportPath, module)
		for _, rule := range rules {
			if !strings.HasPrefix(path+"/", rule.pkg) {
				continue
			}
			checked++
			for _, imported := range p.Imports {
				if own, ok := strings.CutPrefix(imported, module); ok {
					if !hasPrefix(own, rule.own) {
						t.Errorf("%s must not import %s", path, own)
					}
					continue
				}
				if rule.external != nil && strings.Contains(strings.Split(imported, "/")[0], ".") && !hasPrefix(imported, rule.external) {
					t.Errorf("%s must not import %s", path, imported)
				}
				if hasPrefix(imported, forbidden[rule.pkg]) {
					t.Errorf("%s must not import %s", path, imported)
				}
			}
		}
	}
	if checked < len(rules) {
		t.Fatalf("only %d packages were checked", checked)
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
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports", module+"...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}
