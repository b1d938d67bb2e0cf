package cli

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

// history is a tracking API that records the messageIds of the calls that it accepts, in their order.
type history struct {
	accepted []string
	requests int
	// answer is called before a request is accepted; a status other than 0 is the answer.
	answer func(request int, batch []map[string]any) int
}

func (h *history) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body struct{ Batch []map[string]any }
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil || r.URL.Path != "/v1/import" {
		w.WriteHeader(http.StatusTeapot)
		return
	}
	h.requests++
	if h.answer != nil {
		if status := h.answer(h.requests, body.Batch); status != 0 {
			w.WriteHeader(status)
			fmt.Fprintf(w, `{"success": false, "error": {"code": "c%d", "message": "answer %[1]d"}}`, status)
			return
		}
	}
	var rejected []map[string]any
	for n, call := range body.Batch {
		if call["event"] == "Bad" {
			rejected = append(rejected, map[string]any{"index": n, "code": "no_event", "message": "the event is bad"})
			continue
		}
		h.accepted = append(h.accepted, call["messageId"].(string))
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"success": true, "rejected": rejected})
}

func calls(from, to int) string {
	var text strings.Builder
	for n := from; n <= to; n++ {
		fmt.Fprintf(&text, `{"type":"track","userId":"u","event":"E","messageId":"m%d","timestamp":"2020-01-02T03:04:05Z"}`+"\n", n)
	}
	return text.String()
}

func ids(from, to int) (list []string) {
	for n := from; n <= to; n++ {
		list = append(list, fmt.Sprintf("m%d", n))
	}
	return list
}

// runImport imports a text, as a file or from standard input if the name is "-".
func runImport(t *testing.T, h *history, name, text string, flags ...string) (code int, out string) {
	t.Helper()
	server := httptest.NewServer(h)
	defer server.Close()
	stdin := io.Reader(strings.NewReader(text))
	if name != "-" {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		stdin = nil
	}
	var output bytes.Buffer
	code = execute(append([]string{"import", name, "--write-key", "k", "--address", server.URL}, flags...), stdin, &output, &output)
	return code, output.String()
}

func TestImport(t *testing.T) {
	dir := t.TempDir()
	file, rejected := filepath.Join(dir, "history.ndjson"), filepath.Join(dir, "rejected.ndjson")
	text := calls(1, 600) + "\n" + `{"type":"track","userId":"u","event":"Bad","messageId":"b"}` + "\nno JSON\n[]\n" +
		`{"type":"batch"}` + "\n" + strings.Repeat("x", maxImportLine+1) + "\n\xef\xbb\xbf" + calls(601, 601) + `{"userId":"u","messageId":null,"type":"page"}` + "\r\n" + `{"type":"page","userId":"u"}`
	h := &history{}
	code, out := runImport(t, h, file, text, "--rejected", rejected)
	if code != command.ExitFailure {
		t.Errorf("exit %d, want %d:\n%s", code, command.ExitFailure, out)
	}
	if n := len(h.accepted); n != 603 || !slices.Equal(h.accepted[:601], ids(1, 601)) {
		t.Errorf("accepted: got %d calls, want m1 to m601 in their order and 2 without an id", n)
	}
	own := h.accepted[601:]
	if len(own) == 2 && (!strings.HasPrefix(own[0], "import-") || !strings.HasPrefix(own[1], "import-") || own[0] == own[1]) {
		t.Errorf("messageIds of lines without one: got %q, want two different ones", own)
	}
	for _, want := range []string{"line 602 rejected: the event is bad (no_event)", "line 603 rejected: the line is not a JSON object",
		"line 604 rejected", `line 605 rejected: "type" is not one of`, "line 606 rejected: the line is longer than 1048576 bytes",
		"603 calls accepted, 5 lines rejected", "2 calls without a time"} {
		if !strings.Contains(out, want) {
			t.Errorf("output: got\n%s\nwant %q in it", out, want)
		}
	}
	records, err := os.ReadFile(rejected)
	if err != nil || strings.Count(string(records), "\n") != 5 || !strings.Contains(string(records), `{"line":603,"code":"invalid_line","message":"the line is not a JSON object","text":"no JSON"}`) {
		t.Errorf("rejected lines: got %v,\n%.400s", err, records)
	}
	if _, err := os.Stat(file + ".posthorn-import"); !os.IsNotExist(err) {
		t.Errorf("position after the end: got %v, want no file", err)
	}
	// The same file again has the same messageIds.
	again := &history{}
	_, _ = runImport(t, again, file, text)
	if !slices.Equal(again.accepted, h.accepted) {
		t.Error("messageIds of a second import differ")
	}
}

// Temporary errors are repeated, and a batch that is rejected as a whole is divided.
func TestImportRepeats(t *testing.T) {
	h := &history{answer: func(request int, batch []map[string]any) int {
		bad := slices.ContainsFunc(batch, func(c map[string]any) bool { return c["messageId"] == "m5" })
		switch {
		case request == 1:
			return http.StatusServiceUnavailable
		case bad && len(batch) > 1:
			return http.StatusRequestEntityTooLarge
		case bad:
			return http.StatusBadRequest
		}
		return 0
	}}
	code, out := runImport(t, h, "-", calls(1, 9))
	if want := slices.Concat(ids(1, 4), ids(6, 9)); code != command.ExitFailure || !slices.Equal(h.accepted, want) {
		t.Errorf("exit %d, accepted %v, want %d and %v", code, h.accepted, command.ExitFailure, want)
	}
	for _, want := range []string{"the server returned 503 c503: answer 503; try 1, next in 500ms", "line 5 rejected: answer 400 (c400)", "8 calls accepted, 1 line rejected"} {
		if !strings.Contains(out, want) {
			t.Errorf("output: got\n%s\nwant %q in it", out, want)
		}
	}
}

// An interrupted import continues behind the last answered line.
func TestImportContinues(t *testing.T) {
	file := filepath.Join(t.TempDir(), "history.ndjson")
	h := &history{answer: func(request int, _ []map[string]any) int {
		if request == 3 {
			return http.StatusUnauthorized
		}
		return 0
	}}
	text := calls(1, 1800)
	code, out := runImport(t, h, file, text)
	if want := "line 1000 of " + file + " is the last one that was answered; the same command continues"; code != command.ExitFailure || !strings.Contains(out, want) || !strings.Contains(out, "the server returned 401 c401: answer 401") {
		t.Errorf("exit %d:\n%s\nwant 1 and %q", code, out, want)
	}
	if _, out := runImport(t, h, file, strings.Replace(text, "m1000", "n1000", 1)); !strings.Contains(out,
		"line 1000 is not the one that the interrupted import sent") {
		t.Errorf("changed file: got\n%s\nwant an error", out)
	}
	code, out = runImport(t, h, file, text)
	if !slices.Equal(h.accepted, ids(1, 1800)) || code != command.ExitOK || !strings.Contains(out, "continuing after line 1000") ||
		!strings.Contains(out, "1800 calls accepted, 0 lines rejected") {
		t.Errorf("exit %d, %d calls accepted, want 0 and each of 1,800 once:\n%s", code, len(h.accepted), out)
	}
	h = &history{}
	if _, _ = runImport(t, h, "-", text, "--from-line", "1799"); !slices.Equal(h.accepted, ids(1799, 1800)) {
		t.Errorf("--from-line 1799: got %v", h.accepted)
	}
	for _, flags := range [][]string{{"--from-line", "0"}, {"--rate", "-1"}} {
		if code, out := runImport(t, h, "-", text, flags...); code != command.ExitUsage || !strings.Contains(out, flags[0]) {
			t.Errorf("%v: got exit %d:\n%s", flags, code, out)
		}
	}
}

// An answer of another server ends the import, unless it is a proxy's answer without its server.
func TestImportEndsAtAnotherServer(t *testing.T) {
	for _, c := range []struct {
		status int
		body   string
		want   string
	}{
		{404, "404 page not found\n", "/v1/import returned 404 Not Found, and the response is not Posthorn's; set --address to the address of the tracking API"},
		{405, "Method Not Allowed\n", "/v1/import returned 405 Method Not Allowed"},
		{403, "<html>", "/v1/import returned 403 Forbidden"},
		{200, "<html>", "/v1/import returned 200 OK"},
		{404, `{"success":false,"error":{"code":"not_found","message":"unknown path"}}`, "the server returned 404 not_found: unknown path"},
	} {
		t.Run(fmt.Sprint(c.status, c.body), func(t *testing.T) {
			requests := 0
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				requests++
				w.WriteHeader(c.status)
				_, _ = io.WriteString(w, c.body)
			}))
			defer server.Close()
			var out bytes.Buffer
			code := execute([]string{"import", "-", "--write-key", "k", "--address", server.URL}, strings.NewReader(calls(1, 1)), &out, &out)
			if code != command.ExitFailure || requests != 1 || !strings.Contains(out.String(), c.want) {
				t.Errorf("exit %d after %d requests, want 1 after 1:\n%s\nwant %q in it", code, requests, out.String(), c.want)
			}
		})
	}
}

// Each reason to wait is printed once, with its code.
func TestImportNamesWhyItWaits(t *testing.T) {
	responses := []struct {
		status     int
		body, want string
	}{
		{503, `{"success":false,"error":{"code":"storage_full","message":"storage is full"}}`, "the server returned 503 storage_full: storage is full; try 1, next in 1ms"},
		{503, `{"success":false,"error":{"code":"storage_full","message":"storage is full"}}`, ""},
		{429, `{"success":false,"error":{"code":"rate_limited","message":"slow down"}}`, "the server returned 429 rate_limited: slow down; try 3, next in 4ms"},
		{502, "<html>", "/v1/import returned 502 Bad Gateway, and the response is not Posthorn's; try 4, next in 8ms"},
	}
	requests, want := 0, []string{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if requests++; requests > len(responses) {
			_, _ = io.WriteString(w, `{"success":true}`)
			return
		}
		w.WriteHeader(responses[requests-1].status)
		_, _ = io.WriteString(w, responses[requests-1].body)
	}))
	defer server.Close()
	var out bytes.Buffer
	i := importer{pause: time.Millisecond, out: &out, client: server.Client(), to: trackingAPI{url: server.URL},
		in: strings.NewReader(calls(1, 1)), from: 1}
	if err := i.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, r := range responses {
		if r.want != "" {
			want = append(want, r.want)
		}
	}
	got := strings.Split(strings.TrimSpace(strings.ReplaceAll(out.String(), server.URL, "")), "\n")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestImportOfGzip(t *testing.T) {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = io.WriteString(z, calls(1, 3))
	_ = z.Close()
	h := &history{}
	if code, out := runImport(t, h, filepath.Join(t.TempDir(), "history.gz"), packed.String()); code != command.ExitOK ||
		!slices.Equal(h.accepted, ids(1, 3)) {
		t.Errorf("exit %d, accepted %v:\n%s", code, h.accepted, out)
	}
}

func TestImportReportsUnreadTimes(t *testing.T) {
	text := `{"type":"page","userId":"u","messageId":"m1","timestamp":"Mon May 01 2023"}` + "\n" +
		`{"type":"page","userId":"u","messageId":"m2","timestamp":"yesterday"}` + "\n" +
		`{"type":"page","userId":"u","messageId":"m3","timestamp":"yesterday","originalTimestamp":1682935200}` + "\n"
	code, out := runImport(t, &history{}, filepath.Join(t.TempDir(), "history.ndjson"), text)
	if code != command.ExitOK {
		t.Errorf("exit %d, want %d", code, command.ExitOK)
	}
	for _, want := range []string{"line 2: timestamp is not a time; the time of the import is used", "line 3: timestamp is not a time; originalTimestamp is used", "2 calls with a timestamp that is not a time", "1 call without a time"} {
		if !strings.Contains(out, want) || strings.Contains(out, "line 1:") {
			t.Errorf("output: got\n%s\nwant %q in it, and nothing of line 1", out, want)
		}
	}
}

func TestOtherFormatsAreNamed(t *testing.T) {
	for text, want := range map[string]string{"userId,event": "CSV", `[{"type":"track"}]`: "jq"} {
		if _, problem := new(importer).parse(1, []byte(text), true); !strings.Contains(problem, want) {
			t.Errorf("%s: got the problem %q, want one with %s", text, problem, want)
		}
	}
}
