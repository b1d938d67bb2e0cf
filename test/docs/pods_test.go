package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// podWord finds a pod in a sentence; a literal without a space is a name of a field or a label.
var podWord = regexp.MustCompile(`(?i)\bpods?\b.* | .*\bpods?\b`)

// posthorn run has no pods, and it shows the texts of these packages, so the texts name dispatchers.
func TestSharedTextsNameNoPod(t *testing.T) {
	texts := 0
	for _, folder := range []string{"health", "why", "page", "compile", "manifest", "standalone"} {
		err := filepath.WalkDir(filepath.Join("../../controllers", folder), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if text, ok := n.(*ast.BasicLit); ok && text.Kind == token.STRING {
					texts++
					if !strings.HasPrefix(text.Value, "`") && podWord.MatchString(text.Value) {
						t.Errorf("%s: %s: name the dispatcher or its log, not a pod", set.Position(text.Pos()), text.Value)
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if texts < 500 {
		t.Errorf("texts that were checked: got %d, want more than 500", texts)
	}
}
