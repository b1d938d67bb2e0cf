package compat

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/test/signature"
)

var update = flag.Bool("update", false, "update the recordings of requests and deliveries")

// recording has the requests of a client's showcase and their deliveries.
// Constants replace generated ids and current times.
type recording struct {
	Requests   []recorded `json:"requests"`
	Deliveries []string   `json:"deliveries"`
}

func recordingOf(name string) string { return filepath.Join("testdata", name+".json") }

func read(t *testing.T, path string) (r recording) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// compare compares the requests and deliveries of a client with its recording.
func compare(t *testing.T, name string, seen []exchange, arrived []arrival) {
	t.Helper()
	var got recording
	scrub := newScrubber()
	for _, e := range seen {
		r := e.recorded
		delete(r.Headers, "Content-Length")
		r.Body = scrub(r.Body)
		got.Requests = append(got.Requests, r)
	}
	for _, a := range arrived {
		checkTimes(t, a.Body)
		got.Deliveries = append(got.Deliveries, scrub(computed.ReplaceAllString(a.Body, someTimestamp)))
	}
	slices.Sort(got.Deliveries)
	if *update {
		var text bytes.Buffer
		encoder := json.NewEncoder(&text)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(got); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(recordingOf(name), text.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := read(t, recordingOf(name))
	for _, r := range append(slices.Clone(got.Requests), want.Requests...) {
		for _, header := range volatile {
			delete(r.Headers, header)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("requests and deliveries (-recorded +got); if the change is intended, run go test ./test/compat -update:\n%s", diff)
	}
}

// volatile headers depend on the version of Node or Go.
var volatile = []string{"Accept", "Accept-Encoding", "Accept-Language", "Connection", "Sec-Fetch-Mode"}

var (
	uuids   = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)
	stamps  = regexp.MustCompile(`"(node|ajs)-next-\d+-`)
	present = regexp.MustCompile(`"20(?:2[6-9]|[3-9]\d)-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?`)
	// computed matches the timestamp that the server computes: for a call with a past
	// timestamp it depends on the duration of the request. checkTimes checks its rule.
	computed = regexp.MustCompile(`"timestamp":"[^"]*"`)
	runtimes = regexp.MustCompile(`"nodeVersion":"[^"]*"`)
)

const someTimestamp = `"timestamp":"2026-01-02T03:04:05.678Z"`

// newScrubber returns a function that replaces ids and times. It replaces the same id by the
// same constant in all texts.
func newScrubber() func(string) string {
	constants := map[string]string{}
	return func(text string) string {
		text = uuids.ReplaceAllStringFunc(text, func(id string) string {
			if constants[id] == "" {
				constants[id] = fmt.Sprintf("00000000-0000-4000-8000-%012d", len(constants))
			}
			return constants[id]
		})
		text = runtimes.ReplaceAllString(text, `"nodeVersion":"v20.0.0"`)
		text = stamps.ReplaceAllString(text, `"$1-next-1000000000000-`)
		return present.ReplaceAllStringFunc(text, func(stamp string) string {
			switch fraction := len(stamp) - len(`"2026-01-02T03:04:05`); {
			case fraction == 0:
				return `"2026-01-02T03:04:05`
			case fraction == len(".678"):
				return `"2026-01-02T03:04:05.678`
			default: // Nanoseconds, of which Go omits trailing zeros.
				return `"2026-01-02T03:04:05.678901234`
			}
		})
	}
}

// checkTimes checks the rule for incorrect clocks:
// timestamp = receivedAt - (sentAt - originalTimestamp), or originalTimestamp.
func checkTimes(t *testing.T, body string) {
	t.Helper()
	var m struct{ Timestamp, ReceivedAt, SentAt, OriginalTimestamp time.Time }
	if err := json.Unmarshal([]byte(body), &m); err != nil {
		t.Errorf("times of %s: got error %v, want none", body, err)
		return
	}
	want := m.OriginalTimestamp
	if wrong := m.ReceivedAt.Sub(m.SentAt); wrong.Abs() >= 5*time.Second && wrong.Abs() <= 24*time.Hour {
		want = want.Add(wrong)
	}
	if off := m.Timestamp.Sub(want).Abs(); off > time.Millisecond {
		t.Errorf("timestamp of %s: got %v, want %v", body, m.Timestamp, want)
	}
}

// The recorded requests result in the recorded deliveries, without the clients.
func TestReplay(t *testing.T) {
	files, err := filepath.Glob(recordingOf("*"))
	if err != nil || len(files) != len(clients) {
		t.Fatalf("recordings: got %d and error %v, want %d", len(files), err, len(clients))
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".json"), func(t *testing.T) {
			want := read(t, file)
			var mu sync.Mutex
			var bodies []string
			receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				body, err := io.ReadAll(r.Body)
				if err != nil || r.Header.Get("X-Signature") != signature.SHA1(secret, body) {
					w.WriteHeader(http.StatusUnauthorized)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				bodies = append(bodies, string(body))
			}))
			t.Cleanup(receiver.Close)
			p := start(t, receiver.URL, false, "")
			for _, r := range want.Requests {
				resp, err := send(p.Addr, r)
				if err != nil {
					t.Fatal(err)
				}
				answer, _ := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if resp.StatusCode/100 != 2 || strings.Contains(string(answer), "rejected") {
					t.Errorf("%s %s: got %s %s, want success without rejected calls", r.Method, r.Path, resp.Status, answer)
				}
			}
			if l := p.settled(len(want.Deliveries)); l.Delivered != int64(len(want.Deliveries)) || l.Pending+l.DeadLettered+l.Discarded != 0 {
				t.Errorf("ledger: got %+v, want %d delivered and no others", l, len(want.Deliveries))
			}
			mu.Lock()
			defer mu.Unlock()
			scrub := newScrubber()
			for _, r := range want.Requests {
				scrub(r.Body) // It assigns the constants in the order of the requests.
			}
			var got []string
			for _, body := range bodies {
				checkTimes(t, body)
				got = append(got, scrub(computed.ReplaceAllString(body, someTimestamp)))
			}
			slices.Sort(got)
			if diff := cmp.Diff(want.Deliveries, got); diff != "" {
				t.Errorf("deliveries (-recorded +got):\n%s", diff)
			}
		})
	}
}
