// Package docs tests the documentation. Its tests compile all manifests and all examples of
// the Go client, check all links, and compare the tables of fields, reasons, codes, alerts
// and limits with the code. All command blocks are run: by this package against
// `posthorn run`, or by test/e2e on a cluster.
//
// A command block has the language sh, or console, in which a command begins with "$ " and
// its output follows. The blocks of the pages about clusters are run on a cluster, all others
// by this package. A mark after the language overrides this: "cluster", "local", or
// "skip: REASON".
package docs

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
)

// Block is a fenced block of a page.
type Block struct {
	// Page is the path of the page from the root, Line the first line of the block, and
	// Heading the preceding heading of the second level.
	Page    string
	Line    int
	Heading string
	// Language is the first word after the fence, Mark the rest of the line.
	Language, Mark string
	Text           string
}

// onCluster has the pages whose commands need a cluster.
var onCluster = []string{"charts/posthorn/README.md", "docs/install.md", "docs/kubectl.md", "docs/operations.md", "docs/quickstart.md",
	"docs/redelivery.md", "docs/runbooks.md", "docs/troubleshooting.md"}

// Where returns where the commands of a block are run: "local", "cluster", "skip", or
// "" without commands. An unknown mark is an error.
func (b Block) Where() (string, error) {
	reason, skip := strings.CutPrefix(b.Mark, "skip: ")
	switch {
	case b.Commands() == "":
		return "", nil
	case skip && reason != "":
		return "skip", nil
	case b.Mark == "cluster" || b.Mark == "local":
		return b.Mark, nil
	case b.Mark != "":
		return "", fmt.Errorf("%s:%d: unknown mark %q; use cluster, local or skip: REASON", b.Page, b.Line, b.Mark)
	case slices.Contains(onCluster, filepath.ToSlash(b.Page)):
		return "cluster", nil
	}
	return "local", nil
}

// Pages returns the paths of the documentation's pages, the README first.
func Pages(root string) ([]string, error) {
	list := []string{"README.md", filepath.Join("charts", "posthorn", "README.md")}
	err := filepath.WalkDir(filepath.Join(root, "docs"), func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".md") {
			path, err = filepath.Rel(root, path)
			list = append(list, path)
		}
		return err
	})
	return list, err
}

// Blocks returns the fenced blocks of a page.
func Blocks(root, page string) (list []Block, err error) {
	text, err := os.ReadFile(filepath.Join(root, page))
	if err != nil {
		return nil, err
	}
	heading := ""
	var current *Block
	for i, line := range strings.Split(string(text), "\n") {
		fence, ok := strings.CutPrefix(line, "```")
		switch {
		case ok && current == nil:
			language, mark, _ := strings.Cut(strings.TrimSpace(fence), " ")
			current = &Block{Page: page, Line: i + 1, Heading: heading, Language: language, Mark: mark}
		case ok:
			list = append(list, *current)
			current = nil
		case current != nil:
			current.Text += line + "\n"
		case strings.HasPrefix(line, "## "):
			heading = line[3:]
		}
	}
	if current != nil {
		return nil, fmt.Errorf("%s:%d: the block has no end; add a closing fence", page, current.Line)
	}
	return list, nil
}

// Commands returns the commands of the block, or "" if it has none.
func (b Block) Commands() string {
	switch b.Language {
	case "sh":
		return b.Text
	case "console":
		var commands strings.Builder
		more := false
		for line := range strings.Lines(b.Text) {
			command, ok := strings.CutPrefix(line, "$ ")
			if ok || more {
				commands.WriteString(command)
				more = strings.HasSuffix(line, "\\\n")
			}
		}
		return commands.String()
	}
	return ""
}

// Missing returns the lines of output on the page that out does not contain.
// Lines with digits or an ellipsis are examples and are not compared.
func (b Block) Missing(out string) (lines []string) {
	if b.Language != "console" {
		return nil
	}
	have := map[string]bool{}
	for line := range strings.Lines(out) {
		have[strings.Join(strings.Fields(line), " ")] = true
	}
	more := false
	for line := range strings.Lines(b.Text) {
		command := more || strings.HasPrefix(line, "$ ")
		more = command && strings.HasSuffix(line, "\\\n")
		line = strings.Join(strings.Fields(line), " ")
		if !command && line != "" && !strings.Contains(line, "…") && !strings.ContainsFunc(line, unicode.IsDigit) && !have[line] {
			lines = append(lines, line)
		}
	}
	return lines
}
