package pebblestore

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Every write goes through the commit log, also the first ones of a new store: a write past it
// is missing in every log outside the database.
func TestWritesGoThroughTheCommitLog(t *testing.T) {
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	writes := []string{"Apply", "ApplyNoSyncWait", "Set", "Merge", "Delete", "SingleDelete", "DeleteSized", "DeleteRange", "LogData", "Ingest",
		"Excise", "SyncWait", "Commit"}
	// The two commit logs, and the replica, which applies the batches of another store's log.
	logs := []string{"commitlog.go", "replicated.go", "replica.go"}
	inLog := 0
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.SelectorExpr)
			if !ok || !slices.Contains(writes, call.Sel.Name) {
				return true
			}
			receiver, isField := call.X.(*ast.SelectorExpr)
			ofDB := isField && receiver.Sel.Name == "db"
			switch {
			case !ofDB && call.Sel.Name != "SyncWait" && call.Sel.Name != "Commit":
			case slices.Contains(logs, name):
				inLog++
			default:
				t.Errorf("%s calls %s of the database or a batch; use Store.commitLog", name, call.Sel.Name)
			}
			return true
		})
	}
	if inLog == 0 {
		t.Error("no write in the commit logs: the test does not find the calls")
	}
}
