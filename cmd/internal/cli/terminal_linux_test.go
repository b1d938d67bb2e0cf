package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/why"
)

// openTerminal returns both ends of a pseudo terminal.
func openTerminal(t *testing.T) (screen, terminal *os.File) {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no pseudo terminals: %v", err)
	}
	t.Cleanup(func() { _ = screen.Close() })
	if err := unix.IoctlSetPointerInt(int(screen.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(screen.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = terminal.Close() })
	return screen, terminal
}

// Text of a sender or a receiver must not reach a terminal as a control
// character or reverse its text, whatever the command and its output; also when
// the dispatcher is of a release that does not escape.
func TestTerminalGetsNoControlCharacters(t *testing.T) {
	const hostile = "\x1b]0;title\aev\u0085\u009b31m\u202eil\u2066\u200f\u061c\u007f"
	quoted, err := json.Marshal(hostile)
	if err != nil {
		t.Fatal(err)
	}
	inJSON := strings.Trim(string(quoted), `"`)
	letter := `{"key":"k","source":"default/web","destination":"default/crm","messageId":"` + inJSON + `","type":"track","event":"` + inJSON + `","reason":"Rejected","message":"` + inJSON + `","response":"` + inJSON + `"}`
	attempt := `{"source":"default/web","destination":"default/crm","endpoint":"e","messageId":"` + inJSON + `","message":"` + inJSON + `"}`
	server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/deadletters", "/bodies/deadletters/k":
			fmt.Fprintln(w, letter)
		case "/attempts", "/tail", "/bodies/tail":
			fmt.Fprintln(w, attempt)
		case "/debug/pprof/heap":
			fmt.Fprint(w, hostile)
		case "/problems":
			fmt.Fprint(w, `{"problems":[{"file":"a.yaml","object":"`+inJSON+`","message":"`+inJSON+`"}]}`)
		case apiPrefix + "/webhookdestinations":
			w.Header().Set("Warning", "299 - \"il\u2066\u200f\u061c\u202e\"")
			fmt.Fprint(w, `{"kind": "Table", "apiVersion": "meta.k8s.io/v1", "rows": []}`)
		default:
			http.Error(w, hostile, http.StatusNotFound)
		}
	}))
	defer server.Close()
	for _, args := range [][]string{
		{"deadletters", "list", "crm"}, {"deadletters", "list", "crm", "-o", "json"}, {"deadletters", "show", "crm", "k"},
		{"deadletters", "show", "crm", "none"},
		{"attempts", "crm"}, {"attempts", "crm", "-o", "json"}, {"tail", "-o", "json"}, {"tail"}, {"tail", "--bodies"}, {"debug", "pprof/heap"},
		{"get", "sources"}, {"get", "destinations"}, {"problems"},
	} {
		screen, terminal := openTerminal(t)
		shown := make(chan []byte, 1)
		go func() {
			all, _ := io.ReadAll(screen) // Ends with EIO when the terminal is closed.
			shown <- all
		}()
		code := execute(append(args, "--admin", server.URL), strings.NewReader(""), terminal, terminal)
		_ = terminal.Close()
		text := string(<-shown)
		if len(text) == 0 {
			t.Errorf("%v: nothing is shown, exit code %d", args, code)
		}
		if i := strings.IndexAny(text, "\x1b\a\u0085\u009b\u202e\u2066\u200f\u061c\u007f"); i >= 0 {
			t.Errorf("%v: a control character reaches the terminal: %q", args, text)
		}
	}
	// A file gets a profile as it is.
	var out, errs bytes.Buffer
	if code := execute([]string{"debug", "pprof/heap", "--admin", server.URL}, strings.NewReader(""), &out, &errs); code != command.ExitOK ||
		out.String() != hostile {
		t.Errorf("exit code %d, a profile is written as %q; %s", code, &out, &errs)
	}
}

// The bar is drawn on a terminal, taken away at its end, and never written to a file.
func TestProgressOnATerminal(t *testing.T) {
	screen, terminal := openTerminal(t)
	file, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var drawn atomic.Int64
	line := func() string {
		return queuedLine(&adminapi.SyncProgress{SyncCounts: adminapi.SyncCounts{Added: 10}, Unsent: 10 - drawn.Add(1)})
	}
	stopFile := showProgress(command.SafeOnTerminal(file), func() string { t.Error("it is drawn into a file"); return "" })
	stop := showProgress(command.SafeOnTerminal(terminal), line)
	for drawn.Load() < 3 {
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	stopFile()
	var text string
	const erased = "\r\033[K"
	for chunk := make([]byte, 4096); strings.Count(text, erased) < int(drawn.Load())+1; {
		n, err := screen.Read(chunk)
		if err != nil {
			t.Fatal(err)
		}
		text += string(chunk[:n])
	}
	_ = terminal.Close()
	frames := strings.Split(text, erased)
	if frames[0] != "" || frames[1] != "[###...........................]  10 %  1 of 10 queued" || !strings.Contains(frames[2], "20 %") ||
		frames[len(frames)-1] != "" {
		t.Errorf("drawn %q", frames)
	}
	if info, err := file.Stat(); err != nil || info.Size() != 0 {
		t.Errorf("%d bytes in the file (%v)", info.Size(), err)
	}
}

// On a terminal a purge shows the number of dead letters and asks; only yes removes them.
func TestPurgeAsksOnTerminal(t *testing.T) {
	for answer, want := range map[string]struct {
		code, purged int
	}{"y\n": {command.ExitOK, 1}, "yes\n": {command.ExitOK, 1}, "n\n": {command.ExitFailure, 0}, "\n": {command.ExitFailure, 0}} {
		var purged atomic.Int64
		server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
			var a adminapi.DeadLetterAction
			if err := json.NewDecoder(r.Body).Decode(&a); err != nil {
				t.Errorf("%s: %v", r.URL.Path, err)
			}
			if !a.DryRun {
				purged.Add(1)
			}
			_ = json.NewEncoder(w).Encode(adminapi.DeadLetterProgress{Matched: 3, Redelivered: 3, Done: true})
		}))
		screen, terminal := openTerminal(t)
		if _, err := screen.WriteString(answer); err != nil {
			t.Fatal(err)
		}
		code := execute([]string{"deadletters", "purge", "crm", "--all", "--admin", server.URL}, terminal, io.Discard, terminal)
		server.Close()
		if code != want.code || purged.Load() != int64(want.purged) {
			t.Errorf("answer %q: exit code %d and %d purges, want %+v", answer, code, purged.Load(), want)
		}
		seen := make([]byte, 4096)
		n, err := screen.Read(seen)
		for err == nil && !strings.Contains(string(seen[:n]), "[y/N]") && n < len(seen) {
			var more int
			more, err = screen.Read(seen[n:])
			n += more
		}
		if question := "Remove 3 dead letters of default/crm permanently? [y/N]"; err != nil || !strings.Contains(string(seen[:n]), question) {
			t.Errorf("answer %q: got %q (%v), want %q", answer, seen[:n], err, question)
		}
	}
}

// A purge that finds nothing asks nothing, so it must not remove a dead letter that is stored meanwhile.
func TestPurgeOfNothingRemovesNothing(t *testing.T) {
	var requests, purged atomic.Int64
	server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/report" {
			_ = json.NewEncoder(w).Encode(adminapi.Report{Namespaces: []adminapi.NamespaceReport{{Namespace: "default",
				Destinations: []adminapi.DestinationReport{{Name: "crm"}}}}})
			return
		}
		var a adminapi.DeadLetterAction
		if err := json.NewDecoder(r.Body).Decode(&a); err != nil {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
		progress := adminapi.DeadLetterProgress{Done: true}
		if requests.Add(1) > 1 { // It is stored after the count.
			progress.Matched = 1
			if !a.DryRun {
				progress.Redelivered = 1
				purged.Add(1)
			}
		}
		_ = json.NewEncoder(w).Encode(progress)
	}))
	defer server.Close()
	_, terminal := openTerminal(t)
	var out bytes.Buffer
	code := execute([]string{"deadletters", "purge", "crm", "--all", "--admin", server.URL}, terminal, &out, terminal)
	if code != command.ExitOK || purged.Load() != 0 || out.String() != "0 removed (0 bytes)\n" {
		t.Errorf("got exit code %d, %d purges and %q, want 0, 0 and nothing removed", code, purged.Load(), out.String())
	}
}

// Colors reach a terminal only, and only the command's own: an escape sequence in external text
// is escaped.
func TestColors(t *testing.T) {
	findings := []why.Finding{{Level: why.Problem, About: "Endpoint", Text: "down\x1b[32m", Fix: "start it"},
		{Level: why.Notice, About: "Backlog", Text: "3 pending", Fix: "wait"}, {Level: why.Fine, About: "Config", Text: "current"}}
	shown := func(args ...string) string {
		screen, terminal := openTerminal(t)
		all := make(chan []byte, 1)
		go func() { text, _ := io.ReadAll(screen); all <- text }()
		cmd := &cobra.Command{RunE: func(cmd *cobra.Command, _ []string) error {
			return printFindings(cmd.OutOrStdout(), &command.Objects{},
				trouble{Kind: "WebhookDestination", Namespace: "shop", Name: "crm"}, findings)
		}}
		command.ColorFlag(cmd)
		if code := command.Run(cmd, args, nil, terminal, io.Discard); code != command.ExitFailure {
			t.Errorf("%v: got exit code %d, want %d", args, code, command.ExitFailure)
		}
		_ = terminal.Close()
		return strings.ReplaceAll(string(<-all), "\r\n", "\n")
	}
	t.Setenv("NO_COLOR", "")
	plain := `shop/crm: down\u001b[32m.
To do: start it.

PROBLEM   Endpoint   down\u001b[32m
NOTICE    Backlog    3 pending
                     -> wait
OK        Config     current
`
	colored := shown()
	for _, want := range []string{"\x1b[31mPROBLEM\x1b[0m", "\x1b[33mNOTICE\x1b[0m", "\x1b[32mOK\x1b[0m"} {
		if !strings.Contains(colored, want) {
			t.Errorf("colors: got %q, want %q in it", colored, want)
		}
	}
	if diff := cmp.Diff(plain, regexp.MustCompile(`\x1b\[\d+m`).ReplaceAllString(colored, "")); diff != "" {
		t.Errorf("text without its colors (-want +got):\n%s", diff)
	}
	t.Setenv("NO_COLOR", "1")
	if diff := cmp.Diff(plain, shown()); diff != "" {
		t.Errorf("text with NO_COLOR (-want +got):\n%s", diff)
	}
	var pipe bytes.Buffer
	t.Setenv("NO_COLOR", "")
	if diff := cmp.Diff(plain, shown("--no-color")); diff != "" {
		t.Errorf("text with --no-color (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(colored, shown("--no-color=false")); diff != "" {
		t.Errorf("text with --no-color=false (-want +got):\n%s", diff)
	}
	_ = printFindings(command.SafeOnTerminal(&pipe), &command.Objects{},
		trouble{Kind: "WebhookDestination", Namespace: "shop", Name: "crm"}, findings)
	if strings.Contains(pipe.String(), "\x1b[31m") {
		t.Errorf("pipe: got a color in %q", pipe.String())
	}
}

// A confirmed purge removes only dead letters up to the count that was confirmed.
func TestPurgeIsBoundToTheCount(t *testing.T) {
	counted := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	var got adminapi.DeadLetterAction
	server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
		var a adminapi.DeadLetterAction
		if err := json.NewDecoder(r.Body).Decode(&a); err != nil {
			t.Error(err)
		}
		if !a.DryRun {
			got = a
		}
		_ = json.NewEncoder(w).Encode(adminapi.DeadLetterProgress{Matched: 1, Redelivered: 1, AsOf: counted, Done: true})
	}))
	t.Cleanup(server.Close)
	screen, terminal := openTerminal(t)
	go func() { _, _ = io.Copy(io.Discard, screen) }()
	if _, err := screen.WriteString("y\n"); err != nil {
		t.Fatal(err)
	}
	code := execute([]string{"deadletters", "purge", "crm", "--all", "--admin", server.URL}, terminal, terminal, terminal)
	if code != command.ExitOK || !got.Selector.Until.Equal(counted) {
		t.Errorf("confirmed purge: got exit code %d and the selector %+v, want 0 and until %v", code, got.Selector, counted)
	}
}
