package ingest

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"

	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

type document struct {
	Paths map[string]map[string]struct {
		RequestBody struct {
			Content map[string]struct{ Example json.RawMessage }
		}
		Responses map[string]struct {
			Ref string `json:"$ref"`
		}
	}
	Components struct {
		Responses map[string]struct{ Description string }
	}
}

// The served document describes the server: its examples are accepted, and
// every code that it names is answered with the status it is listed under.
func TestOpenAPIIsTrue(t *testing.T) {
	f := newFixture(t)
	w := f.do(httptest.NewRequest(http.MethodGet, "/openapi.yaml", nil))
	var d document
	if err := yaml.Unmarshal(w.Body.Bytes(), &d); w.Code != 200 || err != nil {
		t.Fatalf("%d %v", w.Code, err)
	}
	const settings = "/v1/projects/{writeKey}/settings"
	if len(d.Paths) != len(paths)+1 || d.Paths[settings] == nil {
		t.Errorf("%d paths are documented, %d and the settings are served", len(d.Paths), len(paths))
	}
	statuses := map[string]string{} // component -> status
	for status, r := range d.Paths[settings]["get"].Responses {
		statuses[r.Ref[strings.LastIndex(r.Ref, "/")+1:]] = status
	}
	delete(d.Paths, settings)
	for path, methods := range d.Paths {
		op, ok := methods["post"]
		if _, served := paths[path]; !ok || !served {
			t.Errorf("%s is documented and not served", path)
		}
		example := op.RequestBody.Content["application/json"].Example
		if w := f.do(post(path, "web-key", string(example))); w.Code != 200 || strings.Contains(w.Body.String(), "rejected") {
			t.Errorf("the example of %s is answered %d %s", path, w.Code, w.Body)
		}
		for status, r := range op.Responses {
			statuses[r.Ref[strings.LastIndex(r.Ref, "/")+1:]] = status
		}
	}

	deep := strings.Repeat(`{"a":`, event.MaxDepth+1) + "1" + strings.Repeat("}", event.MaxDepth+1)
	produce := map[string]func(*fixture) *http.Request{
		"invalid_json":  func(*fixture) *http.Request { return post("/v1/track", "web-key", "{") },
		"not_an_object": func(*fixture) *http.Request { return post("/v1/track", "web-key", "1") },
		"too_deep": func(*fixture) *http.Request {
			return post("/v1/track", "web-key", `{"userId":"u","event":"E","x":`+deep+`}`)
		},
		"empty_batch":     func(*fixture) *http.Request { return post("/v1/batch", "web-key", `{"batch":[]}`) },
		"no_user_anon_id": func(*fixture) *http.Request { return post("/v1/track", "web-key", `{"event":"E"}`) },
		"no_event":        func(*fixture) *http.Request { return post("/v1/track", "web-key", `{"userId":"u"}`) },
		"no_group_id":     func(*fixture) *http.Request { return post("/v1/group", "web-key", `{"userId":"u"}`) },
		"no_previous_id":  func(*fixture) *http.Request { return post("/v1/alias", "web-key", `{"userId":"u"}`) },
		"no_user_id":      func(*fixture) *http.Request { return post("/v1/alias", "web-key", `{"previousId":"u"}`) },
		"message_id_too_long": func(*fixture) *http.Request {
			return post("/v1/track", "web-key", `{"userId":"u","event":"E","messageId":"`+strings.Repeat("x", 101)+`"}`)
		},
		"invalid_field": func(*fixture) *http.Request {
			return post("/v1/track", "web-key", `{"userId":"u","event":"E","context":1}`)
		},
		"unreadable_body": func(*fixture) *http.Request {
			return post("/v1/track", "web-key", zip(track)[:20], "Content-Encoding", "gzip")
		},
		"no_write_key":      func(*fixture) *http.Request { return post("/v1/track", "", track) },
		"unknown_write_key": func(*fixture) *http.Request { return post("/v1/track", "no-such-key", track) },
		"source_suspended":  func(*fixture) *http.Request { return post("/v1/track", "off-key", track) },
		"origin_not_allowed": func(*fixture) *http.Request {
			return post("/v1/track", "web-key", track, "Origin", "https://x.example")
		},
		"user_suppressed": func(f *fixture) *http.Request {
			f.suppress("u")
			return post("/v1/track", "web-key", `{"userId":"u","event":"E"}`)
		},
		"call_too_large": func(*fixture) *http.Request {
			return post("/v1/track", "web-key", `{"userId":"u","event":"E","x":"`+strings.Repeat("x", 33<<10)+`"}`)
		},
		"batch_too_large":        func(*fixture) *http.Request { return post("/v1/batch", "web-key", batchOf(269, 31_000, 0)) },
		"body_too_large":         func(*fixture) *http.Request { return post("/v1/batch", "web-key", strings.Repeat(" ", 501<<10)) },
		"unsupported_encoding":   func(*fixture) *http.Request { return post("/v1/track", "web-key", track, "Content-Encoding", "br") },
		"unsupported_media_type": func(*fixture) *http.Request { return post("/v1/track", "web-key", track, "Content-Type", "a/b") },
		"headers_too_large":      func(*fixture) *http.Request { return post("/v1/track", "web-key", track, cutHeader, "1") },
		"rate_limited": func(f *fixture) *http.Request {
			for range 20 {
				f.do(post("/v1/track", "slow-key", track))
			}
			return post("/v1/track", "slow-key", track)
		},
		"not_ready":    func(f *fixture) *http.Request { f.set(nil); return post("/v1/track", "web-key", track) },
		"busy":         func(f *fixture) *http.Request { f.memory.Max = 1; return post("/v1/track", "web-key", track) },
		"storage_full": func(f *fixture) *http.Request { f.err = queue.ErrFull; return post("/v1/track", "web-key", track) },
		"write_key_removed": func(f *fixture) *http.Request {
			f.remove("old-key", "web")
			return post("/v1/track", "old-key", track)
		},
		"storage_failed": func(f *fixture) *http.Request {
			f.err = errTest
			return post("/v1/track", "web-key", track)
		},
		"internal": func(f *fixture) *http.Request {
			f.Skip = func(string, *event.Call) []string { panic("test") }
			return post("/v1/track", "web-key", track)
		},
		"invalid_host": func(*fixture) *http.Request {
			r := httptest.NewRequest(http.MethodGet, "/v1/projects/web-key/settings", nil)
			r.Host = "a/b"
			return r
		},
		"body_too_slow": func(*fixture) *http.Request {
			r := post("/v1/track", "web-key", "")
			r.Body, r.ContentLength = io.NopCloser(iotest.ErrReader(os.ErrDeadlineExceeded)), -1
			return r
		},
	}
	var named []string
	for component, r := range d.Components.Responses {
		status := statuses[component]
		if status == "" {
			t.Errorf("response %s is used nowhere", component)
		}
		for _, code := range codes(r.Description) {
			named = append(named, code)
			make, ok := produce[code]
			if !ok {
				t.Errorf("code %s is documented; this test does not know how to get it", code)
				continue
			}
			f := newFixture(t)
			w := f.do(make(f))
			if strconv.Itoa(w.Code) != status || !strings.Contains(w.Body.String(), `"`+code+`"`) {
				t.Errorf("%s is documented for %s; the answer is %d %s", code, status, w.Code, w.Body)
			}
		}
	}
	page, err := os.ReadFile("../../../docs/tracking-api.md")
	if err != nil {
		t.Fatal(err)
	}
	for code := range produce {
		if !slices.Contains(named, code) {
			t.Errorf("code %s is not documented", code)
		}
		if !strings.Contains(string(page), "`"+code+"`") {
			t.Errorf("docs/tracking-api.md does not explain code %s", code)
		}
	}
}

var errTest = errors.New("disk on fire")

// codes are the words of a description that are spelled as codes.
func codes(description string) []string {
	return regexp.MustCompile(`[a-z]+(_[a-z]+)+|\bbusy\b|\binternal\b`).FindAllString(description, -1)
}
