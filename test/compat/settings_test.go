package compat

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/need"
	"github.com/posthorn/posthorn/test/wait"
)

// The vendor's browser client in Chromium loads its settings from Posthorn (cdnURL), sends every
// type of call to the host that they name, and asks no other host for anything. Pages send calls to hosts that end
// with a slash, with large heads, with the cookies of their own site, and without an origin.
func TestChromium(t *testing.T) {
	needNode(t)
	chromium := need.Program(t, "chromium")
	url := javascriptReceiver(t)
	p := start(t, url, false, "")
	w := newWire(t, p, true, nil)
	sent := calls(t, w, []string{"node", "node/chromium.js", chromium, w.URL, key, origin})
	if len(sent) != 6+4 {
		t.Errorf("calls: got %d, want 10", len(sent))
	}
	arrived := p.exactlyOnce(url, sent)
	paths := map[string]int{}
	for _, e := range w.seen() {
		paths[e.Method+" "+e.Path]++
		want := origin
		if e.Path == "/v1/screen" {
			want = "null"
		}
		if e.Headers["Origin"] != want {
			t.Errorf("Origin of %s %s: got %q, want %q", e.Method, e.Path, e.Headers["Origin"], want)
		}
	}
	for _, path := range []string{"GET /v1/projects/" + key + "/settings", "POST /v1/p", "POST /v1/t", "POST /v1/i", "POST /v1/s",
		"POST /v1/g", "POST /v1/a", "POST //v1//track/", "POST /v1/screen"} {
		if paths[path] != 1 {
			t.Errorf("requests %s: got %d, want 1", path, paths[path])
		}
	}
	checkIP(t, arrived, "127.0.0.1")
}

// checkIP checks context.ip of all messages.
func checkIP(t *testing.T, arrived []arrival, want string) {
	t.Helper()
	for _, a := range arrived {
		var m struct{ Context struct{ IP string } }
		if err := json.Unmarshal([]byte(a.Body), &m); err != nil || m.Context.IP != want {
			t.Errorf("context.ip of %s: got %q and error %v, want %q", a.ID, m.Context.IP, err, want)
		}
	}
}

// Apps in Kotlin and Swift are not run here. These requests are written from the public source of
// segmentio/analytics-kotlin (core/…/HTTPClient.kt, Settings.kt) and segmentio/analytics-swift
// (Sources/Segment/Utilities/Networking/HTTPClient.swift, Settings.swift).
func TestRequestsOfApps(t *testing.T) {
	call := func(name string) string {
		return `{"batch":[{"type":"track","event":"Opened","properties":{},"messageId":"` + name + `-1","anonymousId":"a1","userId":"","integrations":{},` +
			`"timestamp":"2026-01-02T03:04:05.678Z","context":{"library":{"name":"` + name + `"},"device":{"id":"d1","type":"phone"}},"_metadata":{"bundled":[],"unbundled":[],"bundledIds":[]}}],` +
			`"sentAt":"2026-01-02T03:04:05.678Z","writeKey":"` + key + `"}`
	}
	for _, tc := range []struct {
		name     string
		settings map[string]string // headers
		upload   map[string]string
		body     string
	}{
		{
			name: "kotlin", // HttpURLConnection: cdnHost "track.example/v1"
			settings: map[string]string{"Content-Type": "application/json; charset=utf-8", "User-Agent": "analytics-kotlin/1.19.1",
				"Accept-Encoding": "gzip"},
			upload: map[string]string{"Content-Type": "text/plain", "User-Agent": "analytics-kotlin/1.19.1", "Content-Encoding": "gzip"},
			body:   zipped(t, call("kotlin")),
		},
		{
			name: "swift", // URLSession: cdnHost "track.example/v1"
			settings: map[string]string{"Content-Type": "application/json; charset=utf-8", "User-Agent": "analytics-ios/1.7.3",
				"Accept-Encoding": "gzip"},
			upload: map[string]string{"Content-Type": "application/json; charset=utf-8", "User-Agent": "analytics-ios/1.7.3",
				"Accept-Encoding": "gzip"},
			body: call("swift"),
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			needNode(t)
			url := javascriptReceiver(t)
			p := start(t, url, false, "")
			get := func(writeKey string) (status int, apiHost string) {
				resp, err := sendTo(p.Addr, "track.example", recorded{Method: http.MethodGet, Path: "/v1/projects/" + writeKey + "/settings",
					Headers: tc.settings})
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				var settings struct {
					Integrations map[string]struct{ APIHost string }
				}
				if err := json.NewDecoder(resp.Body).Decode(&settings); err != nil {
					t.Fatal(err)
				}
				return resp.StatusCode, settings.Integrations["Segment.io"].APIHost
			}
			if status, _ := get("unknown"); status != http.StatusUnauthorized {
				t.Errorf("settings of an unknown key: got %d, want 401", status)
			}
			status, apiHost := get(key)
			if status != http.StatusOK || apiHost != "track.example/v1" {
				t.Fatalf("settings: got %d with apiHost %q, want 200 with track.example/v1", status, apiHost)
			}
			host, base, _ := strings.Cut(apiHost, "/")
			resp, err := sendTo(p.Addr, host, recorded{Method: http.MethodPost, Path: "/" + base + "/b", Headers: tc.upload, Body: tc.body})
			if err != nil {
				t.Fatal(err)
			}
			answer, _ := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Fatalf("upload: got %s %s, want 200", resp.Status, answer)
			}
			checkIP(t, p.exactlyOnce(url, []string{tc.name + "-1"}), "127.0.0.1")
		})
	}
}

func zipped(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// RudderStack's Node client rejects the promise of its own timer after a 401, which ends its process
// unless the program sets errorHandler. docs/compatibility.md documents it.
func TestUnhandled401EndsRudder(t *testing.T) {
	needNode(t)
	p := start(t, "http://127.0.0.1:1", false, "")
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	program := []string{"node/rudder.js", "http://" + p.Addr, "unknown-key", "showcase"}
	output, err := exec.CommandContext(ctx, "node", program...).CombinedOutput()
	if failure, ok := errors.AsType[*exec.ExitError](err); !ok || failure.ExitCode() != 1 ||
		!strings.Contains(string(output), "Unauthorized") {
		t.Errorf("end of the client: got error %v, want exit code 1 and Unauthorized\n%s", err, output)
	}
}
