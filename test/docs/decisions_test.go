package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/check"
)

var (
	decision = regexp.MustCompile(`(?s)^# (\d{4}): (.*?)\n\n(Status: .*?)\n\n`)
	status   = regexp.MustCompile(`^Status: (accepted|superseded|withdrawn)\b`)
	// replaced is in the status of an earlier page, replaces in the status of the later one.
	replaced = regexp.MustCompile(`(?i)superseded( in part)? by \[(\d{4})\]\([^)]*\)`)
	replaces = regexp.MustCompile(`Supersedes( a part of)? ((?:(?:, | and )?\[\d{4}\]\([^)]*\))+)`)
	page     = regexp.MustCompile(`\[(\d{4})\]`)
)

// The table of decisions equals their titles and statuses, and two pages agree on which replaces the other.
func TestDecisions(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, "docs", "adr", "0*.md"))
	check.NoError(t, "list the decisions", err)
	var table strings.Builder
	table.WriteString("| decision | | superseded |\n| --- | --- | --- |\n")
	said, saidByLater := map[string]bool{}, map[string]bool{}
	for _, file := range files {
		name := filepath.Base(file)
		m := decision.FindStringSubmatch(read(t, "docs", "adr", name))
		if m == nil || !strings.HasPrefix(name, m[1]+"-") || !status.MatchString(m[3]) {
			t.Errorf("%s: got no number, title and status in the first lines, want them", name)
			continue
		}
		text := strings.Join(strings.Fields(m[3]), " ")
		var by []string
		for _, r := range replaced.FindAllStringSubmatch(text, -1) {
			by = append(by, strings.TrimSpace(r[1]+" "+r[0][strings.Index(r[0], "by ["):]))
			said[r[2]+" replaces"+partOf(r[1])+" "+m[1]] = true
		}
		for _, r := range replaces.FindAllStringSubmatch(text, -1) {
			for _, earlier := range page.FindAllStringSubmatch(r[2], -1) {
				saidByLater[m[1]+" replaces"+partOf(r[1])+" "+earlier[1]] = true
			}
		}
		if strings.HasPrefix(text, "Status: withdrawn") {
			by = append(by, "withdrawn")
		}
		fmt.Fprintf(&table, "| [%s](%s) | %s | %s |\n", m[1], name, m[2], strings.Join(by, ", "))
	}
	check.Same(t, "relations in the statuses of the later pages", saidByLater, said)

	text := read(t, "docs", "adr", "README.md")
	head, _, _ := strings.Cut(text, "| decision |")
	if want := head + table.String(); *update {
		check.NoError(t, "write the table", os.WriteFile(filepath.Join(root, "docs", "adr", "README.md"), []byte(want), 0o644))
	} else {
		check.Same(t, "docs/adr/README.md (run with -update)", text, want)
	}
}

func partOf(text string) string {
	if text != "" {
		return " a part of"
	}
	return ""
}
