package docs

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/jobs/audience"
)

func read(t *testing.T, path ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(append([]string{root}, path...)...))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// section returns the text under a heading of the second level. A missing heading ends the
// test.
func section(t *testing.T, page, heading string) string {
	t.Helper()
	_, text, ok := strings.Cut(read(t, "docs", page), "\n## "+heading+"\n")
	if !ok {
		t.Fatalf("docs/%s has no section %q", page, heading)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	return text
}

var (
	quoted = regexp.MustCompile("`([^`]+)`")
	fenced = regexp.MustCompile("(?ms)^```.*?^```$")
)

// words returns the texts between backticks, outside of blocks, that match a pattern.
func words(text, pattern string) map[string]bool {
	list := map[string]bool{}
	for _, m := range quoted.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		if regexp.MustCompile("^(" + pattern + ")$").MatchString(m[1]) {
			list[m[1]] = true
		}
	}
	return list
}

// rows returns the lines of tables by the texts between backticks in their first cells.
func rows(text string) map[string]string {
	list := map[string]string{}
	for line := range strings.Lines(text) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 {
			continue
		}
		parent := ""
		for _, m := range quoted.FindAllStringSubmatch(cells[1], -1) {
			name := strings.ReplaceAll(strings.TrimPrefix(m[1], "spec."), "[]", "")
			if strings.HasPrefix(name, ".") { // It has the parent of the previous name.
				name = parent + name
			}
			parent = name[:max(0, strings.LastIndex(name, "."))]
			list[name] = line
		}
	}
	return list
}

// differ reports the words that only one side has.
func differ(t *testing.T, page string, inPage, inCode map[string]bool) {
	t.Helper()
	for _, w := range slices.Sorted(maps.Keys(inCode)) {
		if !inPage[w] {
			t.Errorf("%s lacks %s", page, w)
		}
	}
	for _, w := range slices.Sorted(maps.Keys(inPage)) {
		if !inCode[w] {
			t.Errorf("%s has %s, which the code does not have", page, w)
		}
	}
	if len(inCode) < 10 {
		t.Errorf("words for %s in the code: got %d, want at least 10: %v", page, len(inCode), inCode)
	}
}

// The table of a kind's page has every field of its spec, with its default, in a
// separate row or by name in the row of the parent field, and no other field. The fields of
// references and label selectors are optional.
func TestFieldsAreDocumented(t *testing.T) {
	for resource, page := range map[string]string{
		"sources": "source.md", "webhookdestinations": "webhookdestination.md", "audiences": "audience.md",
		"redeliveries": "redelivery.md", "deletionrequests": "deletionrequest.md",
	} {
		var crd apiextensions.CustomResourceDefinition
		if err := yaml.Unmarshal([]byte(read(t, "config", "crd", "experimental", "posthorn.dev_"+resource+".yaml")), &crd); err != nil {
			t.Fatal(err)
		}
		documented, seen := rows(section(t, page, "Spec")), map[string]bool{}
		// walk checks the fields of s, whose parent has the row above, and reports whether one
		// of them has a separate row.
		var walk func(path, above string, s apiextensions.JSONSchemaProps) bool
		walk = func(path, above string, s apiextensions.JSONSchemaProps) (rowsBelow bool) {
			if s.Items != nil {
				s = *s.Items.Schema
			}
			for name, field := range s.Properties {
				path := strings.TrimPrefix(path+"."+name, ".")
				seen[path] = true
				row, own := documented[path]
				if own && field.Default != nil && field.Type != "object" && !strings.Contains(row, strings.Trim(string(field.Default.Raw), `"`)) {
					t.Errorf("docs/%s: default of %s: got row %s, want one with %s", page, path, row, field.Default.Raw)
				}
				if !own {
					row = above
				}
				below := false
				if !regexp.MustCompile("(Refs?|[sS]elector)$").MatchString(name) || resource == "redeliveries" {
					below = walk(path, row, field)
				}
				if !own && !below && !regexp.MustCompile("`[\\w.]*\\b"+name+"\\b").MatchString(row) {
					t.Errorf("docs/%s lacks the field %s", page, path)
				}
				rowsBelow = rowsBelow || own || below
			}
			return rowsBelow
		}
		walk("", "", crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"])
		for path := range documented {
			if !seen[path] {
				t.Errorf("docs/%s has the field %s, which the CRD does not have", page, path)
			}
		}
	}
}

// The documentation has every reason of a condition, docs/troubleshooting.md every reason of
// failures, and the tables of conditions have no other reasons.
func TestReasonsAreDocumented(t *testing.T) {
	reasons, failures, inFailures := map[string]bool{}, map[string]bool{}, false
	for _, m := range regexp.MustCompile(`(?m)^// (Reasons of \w+)|^\tReason\w+ = "(\w+)"`).FindAllStringSubmatch(read(t, "api", "v1beta1",
		"conditions.go"), -1) {
		if m[1] != "" {
			inFailures = m[1] == "Reasons of Delivering"
			continue
		}
		reasons[m[2]] = true
		if inFailures && m[2] != "Delivering" && m[2] != "NoTrafficYet" {
			failures[m[2]] = true
		}
	}
	inTable := map[string]bool{}
	for reason := range rows(section(t, "troubleshooting.md", "Nothing arrives")) {
		inTable[reason] = true
	}
	differ(t, "docs/troubleshooting.md", inTable, failures)
	named := map[string]bool{}
	for _, page := range pages(t) {
		maps.Copy(named, words(read(t, page), "[A-Z][A-Za-z]+"))
	}
	maps.DeleteFunc(named, func(w string, _ bool) bool { return !reasons[w] })
	for _, page := range []string{"source.md", "webhookdestination.md", "audience.md"} {
		for condition, row := range rows(section(t, page, "Status")) {
			if regexp.MustCompile(`^[A-Z][a-z]+$`).MatchString(condition) {
				_, row, _ = strings.Cut(row[1:], "|")
				maps.Copy(named, words(row, "[A-Z][A-Za-z]+"))
			}
		}
	}
	delete(named, "True")
	differ(t, "the documentation", named, reasons)
}

// audienceCodes returns the error codes of syncs: those that the package writes itself, and the codes of
// package admission that it, or the authentication, uses by name.
func audienceCodes(t *testing.T) map[string]bool {
	t.Helper()
	values := map[string]string{}
	for _, m := range regexp.MustCompile(`(Code\w+)\s*= "(\w+)"`).FindAllStringSubmatch(read(t, "dispatcher", "intake", "admission",
		"refusal.go"), -1) {
		values[m[1]] = m[2]
	}
	codes := map[string]bool{}
	files, err := filepath.Glob(filepath.Join(root, "dispatcher", "jobs", "audience", "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(files, filepath.Join(root, "dispatcher", "intake", "admission", "authenticate.go")) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`"([a-z]+(?:_[a-z]+)+|busy)", (?:"|`+"`"+`)`).FindAllStringSubmatch(string(text), -1) {
			codes[m[1]] = true
		}
		for _, m := range regexp.MustCompile(`\bCode[A-Z]\w+`).FindAllString(string(text), -1) {
			codes[values[m]] = true
		}
	}
	return codes
}

// docs/audience.md has exactly the error codes of syncs.
func TestAudienceCodesAreDocumented(t *testing.T) {
	differ(t, "docs/audience.md", words(section(t, "audience.md", "When it does not work"), `[a-z]+(_[a-z]+)+|busy`), audienceCodes(t))
}

// runbooks is the address of the page with a section for each alert.
const runbooks = "https://github.com/posthorn/posthorn/blob/main/docs/runbooks.md"

// Every alert that the chart installs has a section in docs/runbooks.md with the same parts, and its
// annotation runbook_url links to that section.
func TestAlertsHaveRunbooks(t *testing.T) {
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, "charts", "posthorn", "files", "alerts.yaml")), &file); err != nil {
		t.Fatal(err)
	}
	page := read(t, "docs", "runbooks.md")
	alerts, sections := map[string]bool{}, map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^## (\w+)$`).FindAllStringSubmatch(page, -1) {
		sections[m[1]] = true
	}
	for _, group := range file.Groups {
		for _, rule := range group.Rules {
			alerts[rule.Alert] = true
			anchor := "#" + strings.ToLower(rule.Alert)
			if got, want := rule.Annotations["runbook_url"], runbooks+anchor; got != want {
				t.Errorf("%s: runbook_url is %q, want %q", rule.Alert, got, want)
			}
			if !sections[rule.Alert] {
				continue // reported below
			}
			text := section(t, "runbooks.md", rule.Alert)
			for _, part := range []string{"**Meaning.**", "**Confirm.**", "**Act.**", "**Resolves**"} {
				if !strings.Contains(text, "\n"+part) {
					t.Errorf("docs/runbooks.md, %s: the part %s is missing", rule.Alert, part)
				}
			}
			if !strings.Contains(page[:strings.Index(page, "\n## ")], "("+anchor+")") {
				t.Errorf("docs/runbooks.md: the table at the top does not name %s", rule.Alert)
			}
		}
	}
	differ(t, "docs/runbooks.md", sections, alerts)
}

// posthorn has every flag that the pages use.
func TestFlagsExist(t *testing.T) {
	flags := map[string]bool{}
	var collect func(args ...string)
	collect = func(args ...string) {
		help, err := exec.Command(binary, append(args, "--help")...).CombinedOutput()
		if err != nil {
			t.Fatalf("posthorn %v --help: got error %v, want none\n%s", args, err, help)
		}
		for _, m := range regexp.MustCompile(`(?m)^ +(?:-\w, )?(--[a-z-]+)`).FindAllStringSubmatch(string(help), -1) {
			flags[m[1]] = true
		}
		_, list, _ := strings.Cut(string(help), "\nUsage:\n") // Then the groups of commands.
		for _, m := range regexp.MustCompile(`(?m)^  ([a-z-]+) +[A-Z]`).FindAllStringSubmatch(list, -1) {
			if m[1] != "help" {
				collect(append(args, m[1])...)
			}
		}
	}
	collect()
	// Flags of helm, kubectl and others. Other tests run the commands of blocks.
	others := []string{"--validate", "--context", "--values", "--from-literal", "--from-file", "--cascade", "--reset-then-reuse-values",
		"--reuse-values"}
	used := 0
	for _, page := range pages(t) {
		for word := range words(read(t, page), `--[a-z-]+|posthorn [^|]*--[a-z].*`) {
			for _, flag := range regexp.MustCompile(`--[a-z][a-z-]*`).FindAllString(word, -1) {
				used++
				if !flags[flag] && !slices.Contains(others, flag) {
					t.Errorf("%s: posthorn has no flag %s", page, flag)
				}
			}
		}
	}
	if used < 20 || len(flags) < 50 {
		t.Errorf("flags: got %d in the pages and %d in the program, want at least 20 and 50", used, len(flags))
	}
}

// The pages have the limits of the tracking API and of syncs.
func TestLimitsAreDocumented(t *testing.T) {
	requests := strings.ReplaceAll(section(t, "tracking-api.md", "Requests"), ",", "")
	syncs := section(t, "audience.md", "When it does not work")
	for _, l := range []struct {
		text, format string
		limit        int
	}{
		{requests, "| body | at most 500 KB (%d bytes)", event.MaxBodyBytes},
		{requests, "| call | at most 32 KB (%d bytes)", event.MaxCallBytes},
		{requests, "| batch | at most %d calls", event.MaxBatchCalls},
		{requests, "| `messageId` | at most %d code points", event.MaxMessageIDRunes},
		{requests, "| nesting | at most %d levels", event.MaxDepth},
		{syncs, "A line may have %d KiB", audience.MaxLineBytes >> 10},
		{syncs, "a userId %d KiB", audience.MaxUserIDBytes >> 10},
		{syncs, "more than %d GiB", audience.DefaultMaxBytes >> 30},
	} {
		if want := fmt.Sprintf(l.format, l.limit); !strings.Contains(l.text, want) {
			t.Errorf("the documentation lacks %q", want)
		}
	}
}

// The chart has every value that the pages use.
func TestValuesExist(t *testing.T) {
	var values map[string]any
	if err := yaml.Unmarshal([]byte(read(t, "charts", "posthorn", "values.yaml")), &values); err != nil {
		t.Fatal(err)
	}
	named := 0
	for _, page := range pages(t) {
		for word := range words(read(t, page), `[a-z][A-Za-z]+(\.[a-zA-Z]+)+(: .*)?`) {
			path := strings.Split(strings.SplitN(word, ":", 2)[0], ".")
			if _, ok := values[path[0]]; !ok || word == "tls.crt" || word == "tls.key" {
				continue // It is a field, a file, a host, or a key of a Secret.
			}
			named++
			at := any(values)
			for _, name := range path {
				below, _ := at.(map[string]any)
				var ok bool
				if at, ok = below[name]; !ok {
					t.Errorf("%s has the value %s, which the chart does not have", page, word)
					break
				}
			}
		}
	}
	if named < 20 {
		t.Errorf("values in the pages: got %d, want at least 20", named)
	}
}

// docs/go-client.md has every option and every error of the client library.
func TestClientIsDocumented(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, "analytics", "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	inCode := map[string]bool{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^func ([A-Z]\w*)\(.*\) Option\b|^(?:var |\t)(Err[A-Z]\w*) +(?:error )?=|^type ([A-Z]\w*Error) `).FindAllStringSubmatch(string(text), -1) {
			inCode[m[1]+m[2]+m[3]] = true
		}
	}
	page := read(t, "docs", "go-client.md")
	for name := range inCode {
		if !regexp.MustCompile("`[^`]*\\b" + name + "\\b").MatchString(page) {
			t.Errorf("docs/go-client.md lacks %s", name)
		}
	}
	if len(inCode) < 20 {
		t.Errorf("options and errors in the code: got %d, want at least 20: %v", len(inCode), inCode)
	}
}

// A table of conditions, symptoms or the like has one row for each: two would differ.
func TestTablesHaveNoDoubleRows(t *testing.T) {
	checked := 0
	for _, page := range pages(t) {
		var rows map[string]bool // nil outside of a checked table
		for n, line := range strings.Split(read(t, page), "\n") {
			cells := strings.Split(line, " | ")
			first := strings.TrimPrefix(cells[0], "| ")
			switch {
			case !strings.HasPrefix(line, "|"):
				rows = nil
			case slices.Contains([]string{"condition", "symptom", "reason", "field", "metric", "flag", "value", "alert"}, strings.ToLower(first)):
				rows = map[string]bool{}
			case rows != nil && rows[first]:
				t.Errorf("%s:%d: a second row for %s", page, n+1, first)
			case rows != nil:
				rows[first] = true
				checked++
			}
		}
	}
	if checked < 100 {
		t.Errorf("rows of tables: got %d, want at least 100", checked)
	}
}
