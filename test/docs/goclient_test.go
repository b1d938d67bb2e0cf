package docs

import (
	"errors"
	"fmt"
	"go/ast"
	"go/build"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The examples in docs/go-client.md compile with the library.
func TestGoClientExamplesCompile(t *testing.T) {
	blocks, err := Blocks(root, filepath.Join("docs", "go-client.md"))
	if err != nil {
		t.Fatal(err)
	}
	// A test that is built with -trimpath does not know where Go is.
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	build.Default.GOROOT = strings.TrimSpace(string(goroot))
	files := token.NewFileSet()
	from := importer.ForCompiler(files, "source", nil)
	found := 0
	for _, b := range blocks {
		if b.Language != "go" {
			continue
		}
		found++
		text := strings.ReplaceAll(b.Text, "…", "")
		if strings.HasPrefix(text, "&") {
			text = "_ = " + text
		}
		// The declarations that fragments use. Errors about unused imports and variables are ignored.
		file, err := parser.ParseFile(files, fmt.Sprintf("%s:%d", b.Page, b.Line), `package example
import ("context"; "errors"; "time"; "github.com/posthorn/posthorn/analytics"; "github.com/posthorn/posthorn/analytics/analyticstest")
func example(client *analytics.Client, save func([]byte), codeUnderTest func(*analytics.Client)) {{
`+text+`
}}`, 0)
		if err != nil {
			t.Error(err)
			continue
		}
		config := types.Config{Importer: from, Error: func(err error) {
			if fault, ok := errors.AsType[types.Error](err); !ok || !fault.Soft {
				t.Error(err)
			}
		}}
		_, _ = config.Check("example", files, []*ast.File{file}, nil)
	}
	if found < 4 {
		t.Errorf("examples: got %d, want at least 4", found)
	}
}
