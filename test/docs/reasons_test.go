package docs

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/api/v1beta1"
)

var update = flag.Bool("update", false, "write the generated parts of pages")

// reason is a constant of the API with its comment.
type reason struct{ where, name, meaning, action string }

var groupOf = regexp.MustCompile(`^Reasons of ([\w ,]+?)(?:,|\.|$)`)

// reasons returns the documented reasons of the API, in their order in the code.
func reasons(t *testing.T) (list []reason) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, "api", "v1beta1", "conditions.go"), nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range file.Decls {
		group, ok := d.(*ast.GenDecl)
		if !ok || group.Tok != token.CONST {
			continue
		}
		where := ""
		if m := groupOf.FindStringSubmatch(group.Doc.Text()); m != nil {
			where = m[1]
		}
		for _, s := range group.Specs {
			v := s.(*ast.ValueSpec)
			constant, ok := strings.CutPrefix(v.Names[0].Name, "Reason")
			if !ok {
				continue
			}
			name, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
			if err != nil || name != constant {
				t.Errorf("value of the constant Reason%s: got %q and error %v, want the same word", constant, name, err)
			}
			text := strings.Join(strings.Fields(v.Doc.Text()), " ")
			meaning, ok := strings.CutPrefix(text, "Reason"+name+": ")
			if !ok {
				t.Errorf("Reason%s: the comment must begin with \"Reason%s: \" and the meaning", name, name)
			}
			meaning, action, _ := strings.Cut(meaning, " Action: ")
			if action == "" {
				action = "Nothing."
			}
			list = append(list, reason{where, name, meaning, action})
		}
	}
	return list
}

// The index of reasons equals the comments of the constants.
func TestReasonsIndex(t *testing.T) {
	var b strings.Builder
	b.WriteString("\n| reason | shown in | meaning | what to do |\n| --- | --- | --- | --- |\n")
	for _, r := range reasons(t) {
		capital := func(s string) string {
			if strings.HasPrefix(s, "spec.") {
				return s
			}
			return strings.ToUpper(s[:1]) + s[1:]
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", r.name, r.where, capital(r.meaning), capital(r.action))
		if r.where == "" {
			t.Errorf("comment of the group of Reason%s: it must begin with \"Reasons of \"", r.name)
		}
	}
	b.WriteString("\n")
	page := filepath.Join(root, "docs", "reasons.md")
	text := read(t, "docs", "reasons.md")
	head, rest, _ := strings.Cut(text, "-update -->\n")
	_, tail, ok := strings.Cut(rest, "<!-- end -->")
	if !ok {
		t.Fatal("docs/reasons.md lacks the marks of its generated part")
	}
	want := head + "-update -->\n" + b.String() + "<!-- end -->" + tail
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
	} else if diff := cmp.Diff(want, text); diff != "" {
		t.Errorf("docs/reasons.md differs from api/v1beta1/conditions.go (-want +got); run with -update:\n%s", diff)
	}
}

// The API has every reason of an attempt or a dead letter.
func TestReasonsOfDispatchersAreInTheAPI(t *testing.T) {
	inAPI := map[string]bool{}
	for _, r := range reasons(t) {
		inAPI[r.name] = true
	}
	found := 0
	constant := regexp.MustCompile(`(?m)^(?:const |\t)(?:Reason\w+ |\w+ (?:egress\.)?Reason )= "([A-Z]\w+)"$`)
	check := func(file string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(file) != ".go" {
			return err
		}
		for _, m := range constant.FindAllStringSubmatch(read(t, filepath.FromSlash(file)), -1) {
			found++
			if !inAPI[m[1]] {
				t.Errorf("%s has the reason %s, which api/v1beta1/conditions.go does not have", file, m[1])
			}
			if !slices.Contains(v1beta1.DeadLetterReasons, m[1]) {
				t.Errorf("%s has the reason %s, which v1beta1.DeadLetterReasons does not have, so --reason rejects it", file, m[1])
			}
		}
		return nil
	}
	for _, folder := range []string{"contract", "dispatcher"} {
		if err := fs.WalkDir(os.DirFS(root), folder, check); err != nil {
			t.Error(err)
		}
	}
	if found < 19 {
		t.Errorf("reasons in contract and dispatcher: got %d, want at least 19", found)
	}
	for _, reason := range []string{"Rejected", "Redirected", "Expired", "EndpointRemoved", "DeadlineExceeded", "FilterFailed",
		"RejectedByExpression"} {
		if row := regexp.MustCompile("(?m)^.*`posthorn_messages_dead_lettered_total`.*$").FindString(read(t, "docs", "metrics.md")); !strings.Contains(row, "`"+reason+"`") {
			t.Errorf("docs/metrics.md: the reason %s of dead letters is missing: %s", reason, row)
		}
	}
}

// docs/reasons.md has exactly the error codes of the code.
func TestErrorCodesIndex(t *testing.T) {
	page := read(t, "docs", "reasons.md")
	tracking, syncs, ok := strings.Cut(page, "\n## Error codes of audience syncs\n")
	_, tracking, found := strings.Cut(tracking, "\n## Error codes of the tracking API\n")
	if !ok || !found {
		t.Fatal("docs/reasons.md lacks a section of error codes")
	}
	indexed := func(section string) map[string]bool {
		codes := map[string]bool{}
		for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| [^|]+ \\| [^|]+ \\| [^|]+ \\|$").FindAllStringSubmatch(section, -1) {
			codes[m[1]] = true
		}
		return codes
	}
	codes := map[string]bool{}
	for _, text := range []string{read(t, "dispatcher", "intake", "ingest", "ingest.go"),
		read(t, "dispatcher", "intake", "admission", "refusal.go"), read(t, "analytics", "event", "event.go")} {
		for _, m := range regexp.MustCompile(`(?m)^\t(?:code|Code)\w+ += "([a-z_]+)"`).FindAllStringSubmatch(text, -1) {
			codes[m[1]] = true
		}
	}
	differ(t, "docs/reasons.md, tracking API,", indexed(tracking), codes)
	differ(t, "docs/reasons.md, audience syncs,", indexed(syncs), audienceCodes(t))
}
