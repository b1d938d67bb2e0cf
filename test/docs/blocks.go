// Package docs runs what the documentation shows: every manifest and every use
// of the Go client is compiled, every link leads somewhere, every table of fields, reasons, codes, alerts and
// limits is compared with the code, and every block of commands is run, by the
// tests of this package against `posthorn run` or by test/e2e on a cluster.
//
// A block of commands is one in the language sh, or console where a command
// begins with "$ " and its output follows. Those of the pages on clusters are run
// on one, all others here. What stands behind the language makes an exception:
// "cluster", "local", or "skip: REASON".
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
	// Page is its path from the root, Line where the block begins, Heading the
	// latest one of the second level.
	Page    string
	Line    int
	Heading string
	// Language and Mark are the first word after the fence and the rest.
	Language, Mark string
	Text           string
}

// onCluster are the pages whose commands need a cluster.
var onCluster = []string{"charts/posthorn/README.md", "docs/install.md", "docs/kubectl.md", "docs/operations.md", "docs/redelivery.md", "docs/troubleshooting.md"}

// Where is where the commands of a block are run: "local", "cluster", "skip", or
// "" when it has no commands; an error when its mark is none.
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
		return "", fmt.Errorf("%s:%d: %q says not where the block is run: use cluster, local or skip: REASON", b.Page, b.Line, b.Mark)
	case slices.Contains(onCluster, filepath.ToSlash(b.Page)):
		return "cluster", nil
	}
	return "local", nil
}

// Pages are the pages of the documentation, from the root: the README first.
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

// Blocks are the fenced blocks of a page.
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
		return nil, fmt.Errorf("%s:%d: the block does not end", page, current.Line)
	}
	return list, nil
}

// Commands is what a reader types, or "" when the block has no commands.
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

// Missing are the lines that the page shows as output and out does not have.
// Lines with figures or an ellipsis are examples and not compared.
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
