package standalone

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/controllers/why"
)

// semantic has a mistake of each sort in a valid manifest, each in another object.
const semantic = `apiVersion: v1
kind: List
items:
- apiVersion: posthorn.dev/v1beta1
  kind: Source
  metadata: {name: web}
  spec:
    writeKeys:
    - {name: main, secretKeyRef: {name: web-key, key: writeKey}}
- apiVersion: v1
  kind: Secret
  metadata: {name: web-key}
  stringData: {writeKey: demo-write-key}
---
apiVersion: v1
kind: Secret
metadata: {name: crm}
stringData: {shared: "canary-secret\n", standard: plain}
---
apiVersion: v1
kind: Secret
metadata: {name: warehouse, namespace: shop}
stringData: {shared: canary-other}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: key}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: main, url: https://hooks.example/in}]
  signing:
    schemes:
    - name: first
      type: HMACSHA1
      secretKeyRef: {name: crm, key: shaerd}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: many}
spec:
  sourceRefs:
  - name: webb
  endpoints:
  - name: eu
    url: https://hooks.example/in
  - name: us
    url: http://10.0.0.7/in
  filter:
    expression: event >> 1
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: notes}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: main, url: https://hooks.example/in}]
  signing:
    schemes:
    - {name: old, type: HMACSHA1, secretKeyRef: {name: crm, key: shared}}
    - name: new
      type: StandardWebhooks
      secretKeyRef:
        name: crm
        key: standard
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: elsewhere}
spec:
  sourceRefs: [{name: web}]
  endpoints:
  - name: main
    urlFrom:
      secretKeyRef: {name: warehouse, key: shared}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: held}
spec:
  suspend: true
  sourceRefs: [{name: web}]
  endpoints: [{name: main, url: https://hooks.example/in}]
  deadLetters:
    forwardTo: {destinationRef: {name: note}}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: typo}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: main, url: https://hooks.example/in}]
  successPolicy: AnyEndpiont
`

// The problems and warnings of a valid manifest have the line of their field, and suggest similar names.
func TestSemanticProblems(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "all.yaml", semantic)
	policy := compile.Policy{CheckHost: func(host string) error {
		if host == "10.0.0.7" {
			return errors.New("it is denied")
		}
		return nil
	}}
	compiled, err := Compile(dir, nil, policy)
	if err != nil {
		t.Fatal(err)
	}
	all := slices.Concat(compiled.Problems, compiled.NotAccepted, compiled.Warnings)
	if len(all) != 11 {
		t.Errorf("problems and warnings: got %v, want 10 and an experimental field", all)
	}
	for _, c := range []struct{ line, object, want string }{
		{"successPolicy: AnyEndpiont", "typo", `spec.successPolicy: Unsupported value: "AnyEndpiont": supported values: "AnyEndpoint", "EveryEndpoint"; did you mean "AnyEndpoint"?`},
		{"secretKeyRef: {name: crm, key: shaerd}", "key", `spec.signing.schemes[first].secretKeyRef: Secret "crm" has no key "shaerd"; add the key or change the reference; did you mean "shared"? (SecretKeyMissing)`},
		{"sourceRefs:\n  - name: webb", "many", `spec.sourceRefs: no Source in this namespace is named "webb"; create it or change the reference; did you mean "web"? (NoSource)`},
		{"url: http://10.0.0.7/in", "many", "spec.endpoints[us].url: it is denied (EgressDenied)"},
		{"expression: event >> 1", "many", "spec.filter.expression: line 1, column 8: extraneous input '>'"},
		{"- {name: old,", "notes", `spec.signing.schemes[old].secretKeyRef: key "shared" of Secret "crm" ends with a line break`},
		{"secretKeyRef:\n        name: crm", "notes", `spec.signing.schemes[new].secretKeyRef: key "standard" of Secret "crm" does not begin with whsec_`},
		{"secretKeyRef: {name: warehouse", "elsewhere", `spec.endpoints[main].urlFrom.secretKeyRef: Secret "warehouse" does not exist in this namespace; create it or change the reference; it exists in namespace shop (SecretNotFound)`},
		{"suspend: true", "held", "spec.suspend is true: messages wait"},
		{"forwardTo:", "held", `spec.deadLetters.forwardTo.destinationRef.name: WebhookDestination "note" does not exist`},
	} {
		before, _, _ := strings.Cut(semantic, c.line)
		want := fmt.Sprintf("%s/all.yaml:%d: WebhookDestination default/%s: %s", dir, 1+strings.Count(before, "\n"), c.object, c.want)
		if !slices.ContainsFunc(all, func(p manifest.Problem) bool { return strings.HasPrefix(p.String(), want) }) {
			t.Errorf("problems and warnings: got\n%v\nwant one that begins with\n%s", all, want)
		}
	}
}

var (
	aField     = regexp.MustCompile(`spec(?:\.\w+|\[[^\]]*\])*`)
	aPosition  = regexp.MustCompile(`all\.yaml:\d+`)
	sourceName = regexp.MustCompile(`^Source "([^"]*)"`)
)

// ofTraffic are the findings about dispatchers and deliveries.
var ofTraffic = []string{"Config", "Endpoint", "Backlog", "Disk", "Operator"}

// foundByWhy returns what why finds about the objects of a control without traffic, as "object field", and as positions
// of rejected manifests.
func foundByWhy(c *Control) (found []string) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	facts := map[string]*why.Facts{}
	var names []id
	for _, o := range c.store.sorted() {
		f := facts[o.namespace]
		if f == nil {
			f = &why.Facts{Namespace: o.namespace, Manifests: c.store.problems, Now: time.Now()}
			facts[o.namespace] = f
		}
		switch resource := o.resource.(type) {
		case *v1beta1.Source:
			f.Sources = append(f.Sources, *resource)
		case *v1beta1.WebhookDestination:
			f.Destinations, names = append(f.Destinations, *resource), append(names, o.id)
		}
	}
	names = append(names, id{"WebhookDestination", "default", "typo"}) // It was rejected.
	for _, name := range names {
		f := facts[name.namespace]
		f.Name = name.name
		for _, finding := range why.Explain(*f) {
			if finding.Level == why.Fine || finding.Idle || slices.Contains(ofTraffic, finding.About) {
				continue
			}
			if m := aPosition.FindString(finding.Text); finding.About == "Manifest" {
				found = append(found, m)
				continue
			}
			object := name.String()
			if m := sourceName.FindStringSubmatch(finding.Text); m != nil {
				object = "Source default/" + m[1]
			}
			if strings.Contains(finding.Text, "suspended") {
				found = append(found, object+" spec.suspend")
			}
			for _, field := range aField.FindAllString(finding.Text, -1) {
				if strings.Contains(finding.Text, field+": ") {
					found = append(found, object+" "+field)
				}
			}
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// compile finds all that why finds without traffic, and nothing else.
func TestCompileFindsWhatWhyFinds(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "all.yaml", semantic+`---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: app}
spec: {suspend: true, writeKeys: [{name: main, secretKeyRef: {name: web-key, key: writeKey}}]}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: ios}
spec: {writeKeys: [{name: main, secretKeyRef: {name: ios-key, key: writeKey}}]}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: others}
spec:
  sourceRefs: [{name: app}, {name: ios}]
  endpoints: [{name: main, url: https://hooks.example/in}]
`)
	compiled, err := Compile(dir, nil, compile.Policy{})
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, p := range compiled.Problems {
		want = append(want, filepath.Base(p.Position()))
	}
	for _, p := range slices.Concat(compiled.NotAccepted, compiled.Warnings) {
		if !strings.Contains(p.Message, ": experimental: ") { // Only the manifest shows it.
			want = append(want, p.Object+" "+aField.FindString(p.Message))
		}
	}
	slices.Sort(want)
	f := start(t, dir, "")
	f.until("status", func() bool { return len(f.control.notAccepted()) == len(compiled.NotAccepted) })
	got := foundByWhy(f.control)
	if diff := cmp.Diff(slices.Compact(want), got); diff != "" {
		t.Errorf("found by compile, and by why (-compile +why):\n%s", diff)
	}
	if len(got) < 10 {
		t.Errorf("found: got %d, want at least 10 for a meaningful comparison", len(got))
	}
	for i, p := range f.control.notAccepted() {
		if p.Line != compiled.NotAccepted[i].Line {
			t.Errorf("position at run: got %s, want line %d as in compile", p, compiled.NotAccepted[i].Line)
		}
	}
}
