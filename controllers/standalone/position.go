package standalone

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	yamlv3 "go.yaml.in/yaml/v3"

	"github.com/posthorn/posthorn/controllers/manifest"
)

// document is one document of a file.
type document struct {
	file string
	// number is the position of the document, from 1.
	number int
	text   []byte
	// before is the number of lines before the document.
	before int
	// root is parsed when the first line is needed.
	root *yamlv3.Node
}

// place returns the documents of a file. texts are their parts of the file's text, in order.
func place(file string, text []byte, texts [][]byte) []*document {
	var documents []*document
	before := 0
	for i, part := range texts {
		separator, rest, _ := bytes.Cut(text, part)
		before += bytes.Count(separator, newline)
		documents = append(documents, &document{file: file, number: i + 1, text: part, before: before})
		before += bytes.Count(part, newline)
		text = rest
	}
	return documents
}

var newline = []byte("\n")

// begin returns the line in the file of the first line that is neither blank nor a comment.
func (d *document) begin() int {
	line := d.before + 1
	for text := range bytes.Lines(d.text) {
		if text = bytes.TrimSpace(text); len(text) > 0 && text[0] != '#' {
			break
		}
		line++
	}
	return line
}

// problem returns a problem of an object at a path of the document; path is empty, or ends with a
// dot.
func (d *document) problem(path, object string, err error) manifest.Problem {
	if inField, ok := errors.AsType[fieldError](err); ok {
		path += inField.path
	}
	return manifest.Problem{File: d.file, Line: d.line(path), Document: d.number, Object: object, Message: err.Error()}
}

// syntaxErrorLine matches the position that the YAML parser puts before its message.
var syntaxErrorLine = regexp.MustCompile(`(?s)^(?:error converting YAML to JSON: )?(?:yaml: )?(?:unmarshal errors:\s*)?(?:line (\d+): )?(.*)$`)

// syntaxProblem returns the problem of a document that is neither YAML nor JSON.
func (d *document) syntaxProblem(err error) manifest.Problem {
	m := syntaxErrorLine.FindStringSubmatch(err.Error())
	line, _ := strconv.Atoi(m[1]) // 0 if the parser gives no line.
	line = max(1, line)
	message := m[2]
	if d.indentedWithTab(line) {
		message = "the line is indented with a tab; tabs are not allowed there, use spaces"
	}
	format := "YAML"
	if filepath.Ext(d.file) == ".json" {
		format = "JSON"
	}
	return manifest.Problem{File: d.file, Line: d.before + line, Document: d.number, Message: "not " + format + ": " + message}
}

// indentedWithTab reports whether a line of the document, from 1, has a tab in its indentation.
func (d *document) indentedWithTab(line int) bool {
	lines := bytes.SplitN(d.text, newline, line+1)
	return line <= len(lines) && bytes.HasPrefix(bytes.TrimLeft(lines[line-1], " "), []byte("\t"))
}

// line returns the line in the file of the field at a path, or of its nearest parent that exists.
func (d *document) line(path string) int {
	if d.root == nil {
		d.root = &yamlv3.Node{}
		// The strict parser has accepted the text, perhaps as JSON; without a node, begin is used.
		text := strings.NewReplacer("\t", " ", `\/`, "/").Replace(surrogate.ReplaceAllString(string(d.text), " "))
		_ = yamlv3.Unmarshal([]byte(text), d.root)
	}
	if len(d.root.Content) == 0 {
		return d.begin()
	}
	node := d.root.Content[0]
	line := node.Line
	for _, step := range pathSteps(path) {
		key, value := child(node, step)
		if value == nil {
			break
		}
		line, node = key.Line, value
	}
	return d.before + line
}

// child returns the value of a key, or an item of a list, and the node that has its position.
func child(node *yamlv3.Node, step string) (position, value *yamlv3.Node) {
	if node.Kind == yamlv3.AliasNode {
		node = node.Alias
	}
	switch node.Kind {
	case yamlv3.MappingNode:
		for i := 0; i+1 < len(node.Content); i += 2 {
			if node.Content[i].Value == step {
				return node.Content[i], node.Content[i+1]
			}
		}
	case yamlv3.SequenceNode:
		if i, err := strconv.Atoi(step); err == nil && i >= 0 && i < len(node.Content) {
			return node.Content[i], node.Content[i]
		}
		for _, item := range node.Content { // A list by name; the only item may have the default name.
			if _, name := child(item, "name"); name != nil && name.Value == step || len(node.Content) == 1 {
				return item, item
			}
		}
	}
	return nil, nil
}

var pathStep = regexp.MustCompile(`\[([^\]]*)\]|([^.\[\]]+)`)

// pathSteps splits a path like spec.endpoints[0].url or data[key].
func pathSteps(path string) (steps []string) {
	for _, m := range pathStep.FindAllStringSubmatch(path, -1) {
		steps = append(steps, m[1]+m[2])
	}
	return steps
}

// fieldError is an error of the field at a path.
type fieldError struct {
	path string
	err  error
}

func (e fieldError) Error() string { return e.err.Error() }

func (e fieldError) Unwrap() error { return e.err }

// fieldErrorf makes a fieldError whose text begins with the path.
func fieldErrorf(path, format string, args ...any) error {
	return fieldError{path, fmt.Errorf("%s: "+format, append([]any{path}, args...)...)}
}

var withoutIndices = regexp.MustCompile(`\[[^\]]*\]`)

// unknownField returns the error of a field that the schema does not have. known are the names of
// the fields beside it.
func unknownField(path string, known []string) error {
	steps := pathSteps(path)
	advice := "; remove it or correct its name"
	if now := replacedFields[withoutIndices.ReplaceAllString(path, "")]; now != "" {
		advice = "; it is now " + now
	} else if len(steps) > 0 {
		advice = cmp.Or(didYouMean(steps[len(steps)-1], known), advice)
	}
	return fieldError{path, fmt.Errorf("unknown field %q%s", path, advice)}
}

// nearest returns the known name that differs least from the typed one, and at most in a third of
// its letters; "" if there is none.
func nearest(typed string, known []string) (found string) {
	best := len(typed)/3 + 1
	for _, name := range known {
		if d := editDistance(strings.ToLower(typed), strings.ToLower(name)); d < best {
			found, best = name, d
		}
	}
	return found
}

// editDistance is the number of inserted, removed, replaced and exchanged neighboring letters
// between two words (optimal string alignment).
func editDistance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range b {
		rows[0][j+1] = j + 1
	}
	for i := range len(a) {
		for j := range len(b) {
			replace := rows[i][j]
			if a[i] != b[j] {
				replace++
			}
			rows[i+1][j+1] = min(rows[i][j+1]+1, rows[i+1][j]+1, replace)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				rows[i+1][j+1] = min(rows[i+1][j+1], rows[i-1][j-1]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
