package standalone

import (
	"crypto/sha256"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/api/v1beta1"
)

// test/cel runs the same cases against an API server. This package accepts the same
// manifests, and rejects the others with the same messages.
func TestSameResultsAsAPIServer(t *testing.T) {
	count := 0
	for _, pattern := range []string{"valid/*.yaml", "invalid/*.yaml"} {
		files, err := filepath.Glob("../../test/cel/testdata/" + pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("no files %s (%v)", pattern, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for i, document := range regexp.MustCompile(`(?m)^---$`).Split(string(text), -1) {
				count++
				p := parse(file, []byte(document))
				var problems []string
				for _, problem := range p.problems {
					problems = append(problems, problem.Message)
				}
				got := strings.Join(problems, "\n")
				m := regexp.MustCompile(`(?m)^# want: (.+)$`).FindStringSubmatch(document)
				switch {
				case m == nil && len(p.problems) > 0:
					t.Errorf("%s, document %d: rejected: %s", file, i+1, got)
				case m == nil && len(p.objects)+len(p.ignored) != 1:
					t.Errorf("%s, document %d: %d objects", file, i+1, len(p.objects))
				case m != nil && !strings.Contains(got, strings.Replace(m[1], " in body ", ": ", 1)):
					t.Errorf("%s, document %d: got %q, want %q", file, i+1, got, m[1])
				case m != nil && (len(p.objects) != 0 || len(p.broken) != 1):
					t.Errorf("%s, document %d: the object was accepted", file, i+1)
				}
			}
		}
	}
	if count < 50 {
		t.Fatalf("only %d cases", count)
	}
}

func TestDefaultsAreSet(t *testing.T) {
	p := parse("a.yaml", []byte(`
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: primary, url: "https://hooks.example/in"}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: crm, key: k}}]}
status: {observedGeneration: 99}
`))
	if len(p.problems) > 0 || len(p.objects) != 1 {
		t.Fatalf("%v", p.problems)
	}
	d := p.objects[0].resource.(*v1beta1.WebhookDestination)
	if d.Namespace != "default" || d.Spec.Delivery.Timeout.Duration != 5*time.Second || d.Spec.Delivery.MaxInFlight != 1000 ||
		d.Spec.Delivery.Retry.Window.Duration != 4*time.Hour ||
		d.Spec.SuccessPolicy != v1beta1.AnyEndpoint || d.Spec.Signing.Schemes[0].Type != v1beta1.HMACSHA1 || d.Spec.Suspend == nil ||
		*d.Spec.Suspend ||
		d.Spec.DeadLetters.MaxBytes.Value() != 1<<30 {
		b, _ := json.Marshal(d)
		t.Errorf("defaults are missing: %s", b)
	}
	if d.Status.ObservedGeneration != 0 {
		t.Error("a manifest set the status")
	}
}

func TestBadManifests(t *testing.T) {
	const canary = "canary"
	for _, tc := range []struct {
		name, file, text string
		want             string // the problems, one per line, without the file
		objects          int
		unreadable       bool
	}{
		{"not YAML", "a.yaml", "a: b: canary", "a.yaml:1: not YAML: ", 0, true},
		{"half a document", "a.yaml", secret + "---\nkind: [", "a.yaml:6: not YAML: ", 1, true},
		{"a key twice", "a.yaml", strings.Replace(secret, "stringData:", "stringData: {b: canary}\nstringData:", 1),
			"already set in map", 0, true},
		{"not JSON", "a.json", `{"apiVersion": `, "a.json: not JSON", 0, true},
		{"JSON documents", "a.json", `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"}} {"apiVersion":"v1","kind":"Secret","metadata":{"name":"b"}}`, "", 2, false},
		{"a text", "a.yaml", "canary", "a.yaml:1: a manifest must be an object", 0, true},
		{"comments alone", "a.yaml", "# nothing\n---\n# nothing\n", "", 0, false},
		{"no kind", "a.yaml", "apiVersion: v1\nmetadata: {name: a}", "a.yaml:1: apiVersion and kind must be set", 0, true},
		{"no name", "a.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {}", "metadata.name: must be set", 0, true},
		{"a name that is not a string", "a.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: y}",
			"metadata.name: must be a string; put it in quotes", 0, true},
		{"no metadata", "a.yaml", "apiVersion: v1\nkind: Secret", "metadata: must be set, with a name", 0, true},
		{"bad name", "a.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: Web_Key}", "Secret default/Web_Key: metadata.name: a lowercase RFC 1123 subdomain", 0, false},
		{"bad metadata", "a.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: a, lables: {}}", `unknown field "lables"`, 0, false},
		{"old version", "a.yaml", "apiVersion: posthorn.dev/v1\nkind: Source\nmetadata: {name: a}", `apiVersion: "posthorn.dev/v1" is unknown for this kind; use posthorn.dev/v1beta1`, 0, false},
		{"an unknown kind of posthorn.dev", "a.yaml", "apiVersion: posthorn.dev/v1beta1\nkind: Destination\nmetadata: {name: a}", `kind: "Destination" is unknown in posthorn.dev/v1beta1; use one of WebhookDestination, Source, Audience, DeletionRequest, Redelivery`, 0, false},
		{"another group", "a.yaml", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}", "", 0, false},
		{"a list", "a.yaml", "apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Secret, metadata: {name: a}}]", "", 1, false},
		{"secret: not base64", "a.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\ndata: {k: canary!}", "Secret default/a: data[k]: must be base64; use stringData for plain text", 0, false},
		{"secret: a number", "a.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\nstringData: {k: 12345}", "stringData[k]: must be a string; put it in quotes", 0, false},
		{"secret: a list", "a.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\nstringData: [canary]", "stringData: must be a map of strings", 0, false},
		{"secret: bad key", "a.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\nstringData: {\"a b\": canary}", "stringData[a b]: a valid config key", 0, false},
		{"secret: unknown field", "a.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\nstringdata: {a: canary}", `unknown field "stringdata"`, 0, false},
		{"secret: too large", "a.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\nstringData: {a: " + strings.Repeat("canary", 1<<18) + "}", "data: must have at most 1048576 bytes", 0, false},
		{"secret: TLS without key", "a.yaml", "apiVersion: v1\nkind: Secret\ntype: kubernetes.io/tls\nmetadata: {name: a}\nstringData: {tls.crt: canary}", "data[tls.key]: must be set", 0, false},
		{"a URL with a password", "a.yaml", strings.Replace(webDestination, "https://", "https://user:canary@", 1),
			"must not contain a user name or password", 0, false},
		{"a header twice", "a.yaml", strings.Replace(webDestination, "name: primary,", "name: primary, headers: [{name: A, value: canary}, {name: A, value: canary}],", 1), "spec.endpoints[0].headers[1]: Duplicate value", 0, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := parse(tc.file, []byte(tc.text))
			var all []string
			for _, problem := range p.problems {
				all = append(all, problem.String())
			}
			got := strings.Join(all, "\n")
			if (tc.want == "") != (got == "") || !strings.Contains(got, tc.want) {
				t.Errorf("got  %q\nwant %q", got, tc.want)
			}
			if strings.Contains(got, canary) {
				t.Errorf("a problem contains a value: %s", got)
			}
			if len(p.objects) != tc.objects || p.unreadable != tc.unreadable {
				t.Errorf("%d objects, unreadable %v", len(p.objects), p.unreadable)
			}
		})
	}
	if p := parse("a.yaml", []byte("apiVersion: apps/v1\nkind: Deployment")); len(p.ignored) != 1 ||
		p.ignored[0].Object != "apps/v1 Deployment" {
		t.Errorf("ignored: %v", p.ignored)
	}
}

// An experimental field is accepted with a warning that has its line.
func TestExperimentalFields(t *testing.T) {
	p := parse("a.yaml", []byte(`apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: a, url: "https://hooks.example/in"}]
  deadLetters:
    retention: 1h
    forwardTo: {destinationRef: {name: ops}}
`))
	var got []string
	for _, w := range p.warnings {
		got = append(got, w.String())
	}
	want := []string{"a.yaml:9: WebhookDestination default/crm: spec.deadLetters.forwardTo: experimental: the field can change or be removed in a minor release"}
	if diff := cmp.Diff(want, got); diff != "" || len(p.objects) != 1 || len(p.problems) != 0 {
		t.Errorf("%d objects, problems %v, warnings (-want +got):\n%s", len(p.objects), p.problems, diff)
	}
}

// A problem has the line of its field, or of the nearest parent that exists.
func TestProblemLines(t *testing.T) {
	const text = `# a comment
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData:
  good: text
  "bad key": canary
---

# the second document
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata:
  name: crm
spec:
  sourceRefs: [{name: web}]
  endpionts:
  - name: primary
    ulr: https://hooks.example/in
--- # the third
apiVersion: v1
kind: List
items:
- apiVersion: posthorn.dev/v1beta1
  kind: Source
  metadata: {name: web}
  spec:
    writeKeys:
    - {name: main, secretKeyRef: {namee: keys, key: good}}
`
	var got []string
	for _, p := range parse("a.yaml", []byte(text)).problems {
		got = append(got, p.String())
	}
	want := []string{
		`a.yaml:7: Secret default/keys: stringData[bad key]: a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')`,
		`a.yaml:17: WebhookDestination default/crm: unknown field "spec.endpionts"; did you mean "endpoints"?`,
		`a.yaml:15: WebhookDestination default/crm: spec.endpoints: Required value`,
		`a.yaml:29: Source default/web: unknown field "spec.writeKeys[0].secretKeyRef.namee"; did you mean "name"?`,
		`a.yaml:29: Source default/web: spec.writeKeys[0].secretKeyRef.name: Required value`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

func TestSyntaxErrorLines(t *testing.T) {
	for _, tc := range []struct{ name, text, want string }{
		{"no last line break", "a: b\n---\na:\n\tb: c", "a.yaml:4: not YAML: the line is indented with a tab; tabs are not allowed there, use spaces"},
		{"line breaks of Windows", "a: b\r\n---\r\na:\r\n\tb: c\r\n", "a.yaml:4: not YAML: the line is indented with a tab; tabs are not allowed there, use spaces"},
		{"tab", "a: b\n---\na:\n\tb: c\n", "a.yaml:4: not YAML: the line is indented with a tab; tabs are not allowed there, use spaces"},
		{"tab in a list", "a:\n  - b\n\t- c\n", "a.yaml:3: not YAML: the line is indented with a tab; tabs are not allowed there, use spaces"},
		{"tab in the first line", "\ta: b\n", "a.yaml:1: not YAML: the line is indented with a tab; tabs are not allowed there, use spaces"},
		{"tab elsewhere", "a: `b`\nc: |\n  \td\n", "a.yaml:1: not YAML: found character that cannot start any token"},
		{"key twice", "a: b\n---\na: b\na: c\n", `a.yaml:4: not YAML: key "a" already set in map`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			problems := parse("a.yaml", []byte(tc.text)).problems
			if got := problems[len(problems)-1].String(); got != tc.want {
				t.Errorf("problem:\ngot  %s\nwant %s", got, tc.want)
			}
		})
	}
}

// A manifest of the version before names the new one and, with its line, each field to change.
func TestReplacedVersion(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"source": {`apiVersion: posthorn.dev/v1alpha1
kind: Source
metadata: {name: web}
spec:
  enabled: false
  writeKeys: [{name: main, secretKeyRef: {name: web-key, key: writeKey}}]
`, `a.yaml:1: Source default/web: apiVersion: posthorn.dev/v1alpha1 was replaced by posthorn.dev/v1beta1; change it, and the fields that posthorn.dev/v1beta1 does not have
a.yaml:5: Source default/web: unknown field "spec.enabled"; it is now spec.suspend, with the opposite value`},
		"destination": {`apiVersion: posthorn.dev/v1alpha1
kind: WebhookDestination
metadata: {name: crm}
spec:
  sourceRefs: [{name: web}]
  endpoints:
  - name: a
    url: https://hooks.example/in
    tls:
      caSecretKeyRef: {name: ca, key: ca.crt}
    authentication:
      oauth2:
        tokenURL: https://login.example
        clientID: a
        clientSecretKeyRef: {name: crm, key: client}
        tls:
          caSecretKeyRef: {name: ca, key: ca.crt}
  signing:
    schemes:
    - type: HMACSHA1
      secretKeyRef: {name: crm, key: sharedSecret}
  delivery: {retry: {minBackoff: 1s}}
`, `a.yaml:1: WebhookDestination default/crm: apiVersion: posthorn.dev/v1alpha1 was replaced by posthorn.dev/v1beta1; change it, and the fields that posthorn.dev/v1beta1 does not have
a.yaml:22: WebhookDestination default/crm: unknown field "spec.delivery.retry.minBackoff"; it is now spec.delivery.retry.initialBackoff
a.yaml:17: WebhookDestination default/crm: unknown field "spec.endpoints[0].authentication.oauth2.tls.caSecretKeyRef"; it is now tls.ca.secretKeyRef
a.yaml:10: WebhookDestination default/crm: unknown field "spec.endpoints[0].tls.caSecretKeyRef"; it is now tls.ca.secretKeyRef
a.yaml:20: WebhookDestination default/crm: spec.signing.schemes[0].name: Required value`},
		"redelivery": {`apiVersion: posthorn.dev/v1alpha1
kind: Redelivery
metadata: {name: again}
spec:
  destinationRef: {name: crm}
  selector: {statusCodes: [0]}
  rate: 5
  requestId: b
`, `a.yaml:1: Redelivery default/again: apiVersion: posthorn.dev/v1alpha1 was replaced by posthorn.dev/v1beta1; change it, and the fields that posthorn.dev/v1beta1 does not have
a.yaml:7: Redelivery default/again: unknown field "spec.rate"; it is now spec.deadLettersPerSecond
a.yaml:8: Redelivery default/again: unknown field "spec.requestId"; it is now spec.requestID
a.yaml:6: Redelivery default/again: unknown field "spec.selector"; it is now spec.match, in which noResponse: true replaces the status code 0`},
		"deletion": {`apiVersion: posthorn.dev/v1alpha1
kind: DeletionRequest
metadata: {name: u1}
spec: {userId: u1}
`, `a.yaml:1: DeletionRequest default/u1: apiVersion: posthorn.dev/v1alpha1 was replaced by posthorn.dev/v1beta1; change it, and the fields that posthorn.dev/v1beta1 does not have
a.yaml:4: DeletionRequest default/u1: unknown field "spec.userId"; it is now spec.userID
a.yaml:4: DeletionRequest default/u1: spec.userID: Required value`},
	} {
		p := parse("a.yaml", []byte(c.text))
		var got []string
		for _, problem := range p.problems {
			got = append(got, problem.String())
		}
		if diff := cmp.Diff(strings.Split(c.want, "\n"), got); diff != "" || len(p.objects) != 0 || len(p.broken) != 1 {
			t.Errorf("%s: %d objects, %d broken, want 0 and 1; problems (-want +got):\n%s", name, len(p.objects), len(p.broken), diff)
		}
	}
}

func TestNearest(t *testing.T) {
	known := []string{"endpoints", "sourceRefs", "signing", "suspend"}
	for _, tc := range []struct{ typed, want string }{
		{"endpionts", "endpoints"},
		{"endpoint", "endpoints"},
		{"sourcerefs", "sourceRefs"},
		{"suspended", "suspend"},
		{"filter", ""},
		{"x", ""},
	} {
		if got := nearest(tc.typed, known); got != tc.want {
			t.Errorf("nearest to %q: got %q, want %q", tc.typed, got, tc.want)
		}
	}
}

func TestSecretData(t *testing.T) {
	p := parse("a.yaml", []byte("apiVersion: v1\nkind: Secret\nmetadata: {name: a}\ndata: {a: AQI=, b: AQI=}\nstringData: {b: text}"))
	if diff := cmp.Diff(map[string][]byte{"a": {1, 2}, "b": []byte("text")}, p.objects[0].values); diff != "" {
		t.Error(diff)
	}
}

// A ConfigMap has plain text in data, and base64 in binaryData; it has no type.
func TestConfigMapData(t *testing.T) {
	const head = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n"
	p := parse("a.yaml", []byte(head+"data: {a: text}\nbinaryData: {b: AQI=}"))
	if diff := cmp.Diff(map[string][]byte{"a": []byte("text"), "b": {1, 2}}, p.objects[0].values); diff != "" {
		t.Error(diff)
	}
	for text, want := range map[string]string{
		"type: Opaque":           `unknown field "type"`,
		"stringData: {a: b}":     `unknown field "stringData"`,
		"data: {a: 5}":           "data[a]: must be a string; put it in quotes",
		"binaryData: {a: \"!\"}": "binaryData[a]: must be base64; use data for plain text",
	} {
		p := parse("a.yaml", []byte(head+text))
		if len(p.problems) != 1 || !strings.HasPrefix(p.problems[0].Message, want) {
			t.Errorf("%s: got problems %v, want one: %s", text, p.problems, want)
		}
	}
}

// A document that is JSON is read as kubectl reads it, with all escapes of JSON. YAML also gets characters that are
// escaped as two halves. Nothing replaces a half that stands alone.
func TestEscapes(t *testing.T) {
	const head = `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"},"stringData":`
	const yamlHead = "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\nstringData: "
	const half = " is a half of a character: write both halves, or the character itself"
	for _, c := range []struct{ name, file, text, value, problem string }{
		{"JSON", "a.json", head + `{"k":"\ud83d\uDE42 \u00e9"}}`, "🙂 é", ""},
		{"JSON in a YAML file", "a.yaml", head + `{"k":"\ud83d\ude42"}}`, "🙂", ""},
		{"JSON between YAML documents", "a.yaml", "# first\n---\n" + head + `{"k":"\ud83d\ude42"}}` + "\n---\n# last\n", "🙂", ""},
		{"a list", "a.json", `{"apiVersion":"v1","kind":"List","items":[` + head + `{"k":"\ud83d\ude42"}}]}`, "🙂", ""},
		{"a slash", "a.json", head + `{"k":"a\/b"}}`, "a/b", ""},
		{"tabs", "a.json", "{\n\t" + head[1:] + "\n\t{\"k\":\t\"v\"}}", "v", ""},
		{"line separators", "a.json", head + "{\"k\":\"a\u2028b\u0085c\"}}", "a\u2028b\u0085c", ""},
		{"a byte order mark", "a.json", "\ufeff" + head + `{"k":"v"}}`, "v", ""},
		{"an escaped backslash", "a.json", head + `{"k":"\\ud83d\\ude42"}}`, `\ud83d\ude42`, ""},
		{"an escaped backslash before a character", "a.json", head + `{"k":"\\\ud83d\ude42"}}`, `\🙂`, ""},
		{"quoted in YAML", "a.yaml", yamlHead + `{k: "\ud83d\ude42"}`, "🙂", ""},
		{"not quoted in YAML", "a.yaml", yamlHead + `{k: \ud83d\ude42, j: "\ud83d\ude42"}`, `\ud83d\ude42`, ""},
		{"quoted once in YAML", "a.yaml", yamlHead + `{k: '\ud83d\ude42', j: "\ud83d\ude42"}`, `\ud83d\ude42`, ""},
		{"a block of YAML", "a.yaml", yamlHead + "\n  j: \"\\ud83d\\ude42\"\n  k: |-\n    {\"a\":\"\\ud83d\\ude42\"}\n",
			`{"a":"\ud83d\ude42"}`, ""},
		{"a half in JSON", "a.json", "\n{\n" + head[1:] + `{"k":"\ud83d"}}`, "", `a.json:3: not JSON: \ud83d` + half},
		{"a second half in JSON", "a.json", head + `{"k":"\ude42\ud83d"}}`, "", `a.json:1: not JSON: \ude42` + half},
		{"a half in a key", "a.json", head + `{"k\ud83d":"v"}}`, "", `a.json:1: not JSON: \ud83d` + half},
		{"a half in YAML", "a.yaml", yamlHead + `{k: "a\uD83Db"}`, "", `a.yaml:4: not YAML: \uD83D` + half},
		{"a key twice", "a.json", head + `{"k":"v","k":"w"}}`, "", `a.json:1: not JSON: duplicate field "stringData.k"`},
		{"a wrong field", "a.json", "{\n\t" + head[1:] + "\n\t{\"k\": \"\\ud83d\\ude42\"},\n\t\"typ\\/e\": \"\"}", "", `a.json:4: Secret default/a: unknown field "typ/e"; did you mean "type"?`},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := parse(c.file, []byte(c.text))
			var value, problem string
			if len(p.objects) > 0 {
				value = string(p.objects[0].values["k"])
			}
			if len(p.problems) > 0 {
				problem = p.problems[0].String()
			}
			if value != c.value || problem != c.problem {
				t.Errorf("got  %q, problem %q\nwant %q, problem %q", value, problem, c.value, c.problem)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add(webSource + "---\n" + webDestination + "---\n" + secret)
	f.Fuzz(func(t *testing.T, text string) {
		p := parse("a.yaml", []byte(text))
		for _, o := range p.objects {
			if o.name == "" || o.namespace == "" || o.content == [sha256.Size]byte{} {
				t.Errorf("%+v", o)
			}
		}
	})
}
