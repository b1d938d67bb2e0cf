package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

const renderManifest = `
apiVersion: v1
kind: Secret
metadata: {name: crm}
stringData: {sharedSecret: demo}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  suspend: true
  sourceRefs: [{name: web}]
  endpoints:
  - name: primary
    url: https://hooks.example/in
    tls: {ca: {secretKeyRef: {name: ca, key: ca.crt}}}
    headers: [{name: X-Token, valueFrom: {secretKeyRef: {name: crm, key: token}}}]
  - {name: second, urlFrom: {secretKeyRef: {name: other, key: url}}}
  signing: {schemes: [{name: a, type: HMACSHA1, secretKeyRef: {name: crm, key: sharedSecret}}]}
  filter: {expression: "call.event != 'none' && 1 / size(call.userId) > 0"}
`

// rendering runs "posthorn render" on files in a directory.
func rendering(t *testing.T, files map[string]string, args ...string) (out string, code int) {
	t.Helper()
	t.Chdir(t.TempDir())
	for name, text := range files {
		if err := os.WriteFile(filepath.Clean(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var stdout bytes.Buffer
	code = command.Run(newRoot(), append([]string{"render"}, args...), strings.NewReader(""), &stdout, &stdout)
	return stdout.String(), code
}

func TestRender(t *testing.T) {
	const call = `{"type":"track","event":"E","userId":"u","messageId":"m1"}`
	at := []string{"-f", "d.yaml", "--time", "2026-01-01T00:00:00Z"}
	for name, test := range map[string]struct {
		args []string
		code int
		want []string
	}{
		"a request": {append(at, "--call", call), 0, []string{
			"# crm, endpoint primary, Source web\nPOST https://hooks.example/in\nHost: hooks.example\nUser-Agent: Posthorn/1.0\nContent-Type: application/json\nX-Token: posthorn-placeholder\nIdempotency-Key: m1\nX-Signature: ",
			"\n# crm, endpoint second, Source web\nPOST https://placeholder.invalid/\n",
			`{"type":"track","event":"E","userId":"u","messageId":"m1","context":{},"receivedAt":"2026-01-01T00:00:00.000Z"`,
			"NOTICE: no manifest has default/crm/token, default/other/url",
		}},
		"a dead letter": {append(at, "--call", `{"key":"01","destination":"shop/crm","messageId":"m1","type":"track","failedAt":"2026-01-01T00:00:00Z","body":`+call+`}`),
			0, []string{"Idempotency-Key: m1\n"}},
		"a file":          {append(at, "--call", "@call.json", "-o", "json"), 0, []string{`"endpoint":"second"`, `"method":"POST"`}},
		"filtered":        {append(at, "--call", `{"type":"track","event":"none","userId":"u"}`), 0, []string{"# crm: Filtered\n"}},
		"a failed filter": {append(at, "--call", `{"type":"track","event":"E","anonymousId":"u","userId":""}`), 1, []string{"# crm: Failed: FilterFailed: character 27 (call.userId): division by zero"}},
		"a deletion":      {append(at, "--call", `{"type":"delete","userId":"u"}`), 0, []string{`{"type":"delete","userId":"u",`}},
		"no type":         {append(at, "--call", `{"event":"E"}`), 1, []string{`the call has no type; add one, such as "type": "track"`}},
		"an invalid call": {append(at, "--call", `{"type":"track"}`), 1, []string{"the call would be rejected: "}},
		"no call":         {at, 2, []string{"set exactly one of --call and --cases"}},
		"no manifests":    {[]string{"--call", call}, 2, []string{"the manifests are missing"}},
		"another Source":  {append(at, "--call", call, "--source", "ios"), 1, []string{`destination crm does not get the calls of Source "ios"; use one of web`}},
		"no destination":  {append(at, "--call", call, "--destination", "x"), 1, []string{`namespace "default" has no such destination; the manifests have crm`}},
		"not accepted":    {[]string{"-f", "bad.yaml", "--call", call}, 1, []string{"spec.filter.expression: line 1, column 1: a is not known"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, code := rendering(t, map[string]string{"d.yaml": renderManifest, "call.json": call,
				"bad.yaml": strings.Replace(renderManifest, "call.event != 'none'", "a == 1", 1)}, test.args...)
			if code != test.code {
				t.Errorf("exit code: got %d, want %d\n%s", code, test.code, out)
			}
			for _, want := range test.want {
				if !strings.Contains(out, want) {
					t.Errorf("output: got\n%s\nwant %q", out, want)
				}
			}
		})
	}
}

func TestRenderCases(t *testing.T) {
	for name, test := range map[string]struct {
		cases string
		code  int
		want  []string
	}{
		"as expected": {`
- call: {type: track, event: E, userId: u, messageId: m1}
  request:
    method: POST
    url: https://hooks.example/in
    headers: {idempotency-key: m1, X-Token: posthorn-placeholder}
    body: {type: track, event: E, userId: u, messageId: m1, context: {}, receivedAt: "2026-01-01T00:00:00.000Z",
      timestamp: "2026-01-01T00:00:00.000Z", version: 1}
- {endpoint: second, call: {type: track, event: E, userId: u}, request: {url: "https://placeholder.invalid/"}}
- {call: {type: track, event: none, userId: u}, outcome: Filtered}
- {call: {type: track, event: E, userId: "", anonymousId: a}, outcome: Failed, error: division by zero}
`, 0, []string{"4 cases as expected\n"}},
		"differences": {`
- name: all parts
  call: {type: track, event: E, userId: u, messageId: m1, properties: {list: [1, {a: 1}]}}
  request: {method: PUT, url: "https://x", headers: {X-None: a, X-Token: b}, body: {properties: {list: [1, {a: 2}]}, more: true}}
- {call: {type: track, event: none, userId: u}, request: {method: POST}}
- {call: {type: track, event: E, userId: u}, request: {body: text}}
- {call: {type: track, event: E, userId: u}, request: {method: POST}}
`, 1, []string{
			"all parts: method:\n  got  POST\n  want PUT\n", "all parts: url:\n  got  https://hooks.example/in\n  want https://x\n",
			"all parts: header X-None:\n  got  no such header\n  want a\n", "all parts: header X-Token:\n  got  posthorn-placeholder\n  want b\n",
			"all parts: body.properties.list[1].a:\n  got  1\n  want 2\n", "all parts: body.more:\n  got  nothing\n  want true\n",
			"all parts: body.userId:\n  got  \"u\"\n  want nothing\n",
			"case 2: outcome:\n  got  Filtered\n  want a request\n", "case 3: body:\n  got  {\"event\"", "  want text\n", "3 of 4 cases differ\n",
		}},
		"no list":      {"call: {}", 1, []string{"it must be a list of cases with call and request"}},
		"unknown name": {"- {call: {type: track}, requests: []}", 1, []string{`unknown field "requests"`}},
		"neither":      {"- {call: {type: track, event: E, userId: u}}", 1, []string{"case 1: set exactly one of request and outcome"}},
		"no endpoint":  {"- {call: {type: track, event: E, userId: u}, endpoint: x, request: {}}", 1, []string{`the destination has no endpoint "x"`}},
		"outcome":      {"- {call: {type: track, event: E, userId: u}, outcome: Lost}", 1, []string{`outcome "Lost" is unknown; use Filtered, Omitted or Failed`}},
	} {
		t.Run(name, func(t *testing.T) {
			out, code := rendering(t, map[string]string{"d.yaml": renderManifest, "cases.yaml": test.cases}, "-f", "d.yaml", "--cases", "cases.yaml")
			if code != test.code {
				t.Errorf("exit code: got %d, want %d\n%s", code, test.code, out)
			}
			for _, want := range test.want {
				if !strings.Contains(out, want) {
					t.Errorf("output: got\n%s\nwant %q", out, want)
				}
			}
		})
	}
}
