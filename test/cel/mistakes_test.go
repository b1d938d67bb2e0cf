package cel

import (
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/test/wait"
)

var update = flag.Bool("update", false, "write the outputs in docs/mistakes.md")

// transcript is a command with its output.
var transcript = regexp.MustCompile("(?s)```text\n\\$ kubectl (.*?)\n(.*?)```\n")

// The transcripts in docs/mistakes.md are what kubectl prints. They are text, as test/docs runs blocks of consoles.
func TestMistakes(t *testing.T) {
	const page = "../../docs/mistakes.md"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if version, err := server.Kubectl("", "version", "-o", "json"); err != nil || !strings.Contains(version, `"minor": "36"`) {
		t.Skip("the page has the texts of Kubernetes 1.36")
	}
	wait.For(t, "the API server describes new kinds", func() error {
		_, err := server.Kubectl("", "explain", "whd")
		return err
	})
	rejected := 0
	got := transcript.ReplaceAllStringFunc(string(text), func(block string) string {
		parts := transcript.FindStringSubmatch(block)
		command, heredoc := strings.CutSuffix(parts[1], " <<EOF")
		input := ""
		if heredoc {
			input, _, _ = strings.Cut(parts[2], "EOF\n")
		}
		out, err := server.Kubectl(input, strings.Fields(command)...)
		if err != nil {
			rejected++
			_, out, _ = strings.Cut(err.Error(), "exit status 1: ")
		}
		if heredoc {
			input += "EOF\n"
		}
		return "```text\n$ kubectl " + parts[1] + "\n" + input + strings.TrimSpace(out) + "\n```\n"
	})
	if rejected != 10 {
		t.Errorf("rejected manifests: got %d, want 10", rejected)
	}
	if *update {
		if err := os.WriteFile(page, []byte(got), 0o644); err != nil { //nolint:gosec // A page is public.
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(string(text), got); diff != "" {
		t.Errorf("docs/mistakes.md (-page +kubectl); write it with go test ./test/cel -run TestMistakes -update:\n%s", diff)
	}
}
