package adminapi

import (
	"context"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// serve returns a client of a server with one handler.
func serve(t *testing.T, handler http.HandlerFunc) *Client {
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return &Client{URL: server.URL + "/", HTTP: server.Client()}
}

// answer returns a handler that writes a text and, after it, breaks the connection if cut is true.
func answer(text string, cut bool) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, text)
		if cut {
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
	}
}

// collect returns the values of a stream, and the error at its end.
func collect[T any](values iter.Seq2[T, error]) (all []T, err error) {
	for v, err := range values {
		if err != nil {
			return all, err
		}
		all = append(all, v)
	}
	return all, nil
}

func TestReportSinceCursor(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.FormValue(ReportCursor) {
		case "":
			_, _ = io.WriteString(w, `{"cursor":"e.1","pod":"p0"}`)
		case "e.1":
			_, _ = io.WriteString(w, `{"cursor":"e.2","delta":true,"pod":"p0"}`)
		default:
			w.WriteHeader(http.StatusNotModified)
		}
	})
	for _, step := range []struct {
		cursor string
		want   *Report
		err    error
	}{
		{"", &Report{Cursor: "e.1", Pod: "p0"}, nil},
		{"e.1", &Report{Cursor: "e.2", Delta: true, Pod: "p0"}, nil},
		{"e.2", nil, ErrNotModified},
	} {
		report, err := c.Report(t.Context(), step.cursor)
		if !errors.Is(err, step.err) {
			t.Errorf("error with the cursor %q: got %v, want %v", step.cursor, err, step.err)
		}
		if diff := cmp.Diff(step.want, report); diff != "" {
			t.Errorf("report with the cursor %q (-want +got):\n%s", step.cursor, diff)
		}
	}
}

// A report is not read while all slots are taken.
func TestReportSlots(t *testing.T) {
	c := serve(t, answer(`{}`, false))
	c.ReportSlots = make(chan struct{}, 1)
	c.ReportSlots <- struct{}{}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Report(ctx, ""); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without a slot: got error %v, want DeadlineExceeded", err)
	}
	<-c.ReportSlots
	if _, err := c.Report(t.Context(), ""); err != nil {
		t.Errorf("with a slot: got error %v, want none", err)
	}
}

// The timeout bounds the wait for the answer and the transfer of a report, not the wait for a slot.
func TestReportTimeout(t *testing.T) {
	stuck := func(beforeHeader bool) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if !beforeHeader {
				_, _ = io.WriteString(w, "{")
				_ = http.NewResponseController(w).Flush()
			}
			<-r.Context().Done()
		}
	}
	for name, handler := range map[string]http.HandlerFunc{"no answer": stuck(true), "no end of the report": stuck(false)} {
		c := serve(t, handler)
		c.ReportTimeout = 50 * time.Millisecond
		if _, err := c.Report(t.Context(), ""); !errors.Is(err, ErrReportTimeout) {
			t.Errorf("%s: got error %v, want %v", name, err, ErrReportTimeout)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		transport := transportFunc(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader("{}"))}, nil
		})
		c := &Client{URL: "http://dispatcher/", HTTP: &http.Client{Transport: transport}, ReportTimeout: time.Second,
			ReportSlots: make(chan struct{}, 1)}
		c.ReportSlots <- struct{}{}
		time.AfterFunc(2*c.ReportTimeout, func() { <-c.ReportSlots })
		if _, err := c.Report(t.Context(), ""); err != nil {
			t.Errorf("a long wait for a slot: got error %v, want none", err)
		}
	})
}

// transportFunc answers requests without a network.
type transportFunc func(*http.Request) (*http.Response, error)

func (f transportFunc) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestStatusErrors(t *testing.T) {
	for _, c := range []struct{ name, body, want string }{
		{"text", "try again\n", "503 Service Unavailable: try again"},
		{"no text", "", "503 Service Unavailable"},
		{"Kubernetes Status", `{"kind":"Status","message":"not found"}`, "not found"},
		{"other JSON", `{"message":"x"}`, `503 Service Unavailable: {"message":"x"}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(http.StatusServiceUnavailable)
				_, _ = io.WriteString(w, c.body)
			})
			_, err := client.Report(t.Context(), "")
			status, ok := errors.AsType[*StatusError](err)
			if !ok {
				t.Fatalf("got error %v, want a StatusError", err)
			}
			if diff := cmp.Diff(&StatusError{http.StatusServiceUnavailable, c.want}, status); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}

// A stream ends with its last line, with the error in that line, or with the connection.
func TestStreams(t *testing.T) {
	for _, c := range []struct {
		name, text string
		cut        bool
		want       []string
		err        string
	}{
		{name: "empty"},
		{name: "two", text: "{\"key\":\"a\"}\n{\"key\":\"b\"}\n", want: []string{"a", "b"}},
		{name: "error line", text: "{\"key\":\"a\"}\n{\"error\":\"store closed\"}\n", want: []string{"a"}, err: "store closed"},
		{name: "cut", text: "{\"key\":\"a\"}\n{\"key", cut: true, want: []string{"a"}, err: io.ErrUnexpectedEOF.Error()},
	} {
		t.Run(c.name, func(t *testing.T) {
			letters, err := collect(serve(t, answer(c.text, c.cut)).DeadLetters(t.Context(), "shop/crm", 10))
			var keys []string
			for _, l := range letters {
				keys = append(keys, l.Key)
			}
			if diff := cmp.Diff(c.want, keys); diff != "" {
				t.Errorf("keys (-want +got):\n%s", diff)
			}
			if (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
				t.Errorf("error: got %v, want %q", err, c.err)
			}
		})
	}
}

// The last progress decides about the result of an action.
func TestActions(t *testing.T) {
	for _, c := range []struct {
		name, text string
		matched    int64
		err        string
	}{
		{"done", "{\"matched\":1}\n{\"matched\":3,\"done\":true}\n", 3, ""},
		{"failed", "{\"matched\":1}\n{\"matched\":2,\"error\":\"store closed\"}\n", 2, "store closed"},
		{"no end", "{\"matched\":1}\n", 1, io.ErrUnexpectedEOF.Error()},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := serve(t, answer(c.text, false))
			for name, act := range map[string]func(context.Context, DeadLetterAction, func(DeadLetterProgress)) (DeadLetterProgress, error){
				"redeliver": client.Redeliver, "purge": client.Purge,
			} {
				progressed := false
				p, err := act(t.Context(), DeadLetterAction{Destination: "shop/crm"}, func(DeadLetterProgress) { progressed = true })
				if p.Matched != c.matched {
					t.Errorf("%s: matched: got %d, want %d", name, p.Matched, c.matched)
				}
				if (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
					t.Errorf("%s: error: got %v, want %q", name, err, c.err)
				}
				if !progressed {
					t.Errorf("%s: got no progress, want at least one", name)
				}
			}
		})
	}
}

// Each method requests its path, with what the caller selects.
func TestPaths(t *testing.T) {
	var got []string
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		got = append(got, r.Method+" "+r.URL.String())
		_, _ = io.WriteString(w, "{}\n")
	})
	ctx := t.Context()
	_, _ = collect(c.DeadLetters(ctx, "shop/crm", 10))
	_, _ = c.DeadLetter(ctx, "shop/crm", "a/b")
	_, _ = c.DeadLetterWithBody(ctx, "shop/crm", "a/b")
	_, _ = collect(c.Attempts(ctx, "shop/crm", "primary"))
	_, _ = collect(c.Tail(ctx, "", ""))
	_, _ = c.Metrics(ctx)
	if data, err := c.Debug(ctx, "pprof/profile?seconds=1"); err == nil {
		data.Close()
	}
	_, _ = c.Purge(ctx, DeadLetterAction{}, nil)
	_, _ = c.Redeliver(ctx, DeadLetterAction{}, nil)
	want := []string{
		"GET /deadletters?destination=shop%2Fcrm&limit=10",
		"GET /deadletters/a%2Fb?destination=shop%2Fcrm",
		"GET /bodies/deadletters/a%2Fb?destination=shop%2Fcrm",
		"GET /attempts?destination=shop%2Fcrm&endpoint=primary",
		"GET /tail?destination=&endpoint=",
		"GET /metrics",
		"GET /debug/pprof/profile?seconds=1",
		"POST /deadletters/purge",
		"POST /deadletters/redeliver",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}
