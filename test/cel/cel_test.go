// Package cel tests the kinds' validation rules with a real API server.
//
// The API server must accept testdata/valid. In testdata/invalid every document has a
// comment "# want: TEXT" with a part of the error. The tests also read the CRDs
// and fail if a rule, pattern, enum or required field has no case, so that every new rule
// needs one. The cases for numeric and length bounds are derived from the CRDs.
package cel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/need"
)

var (
	server  *env.Env
	cluster client.Client
)

func TestMain(m *testing.M) {
	if err := env.Missing(); err != nil {
		os.Exit(need.SkipAll(err))
	}
	os.Exit(func() int {
		var err error
		if server, err = env.Start(); err == nil {
			defer func() { _ = server.Stop() }()
			cluster, err = client.New(server.Config, client.Options{})
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

// document is one object of a test file.
type document struct {
	name   string
	object *unstructured.Unstructured
	want   string
}

// documents reads the test files of directories.
func documents(t *testing.T, dirs ...string) (docs []document) {
	t.Helper()
	for _, dir := range dirs {
		files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
		if err != nil || len(files) == 0 {
			t.Fatalf("test files in %s: got %d and error %v, want some", dir, len(files), err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for i, part := range regexp.MustCompile(`(?m)^---$`).Split(string(text), -1) {
				d := document{name: fmt.Sprintf("%s#%d", filepath.Base(file), i+1), object: &unstructured.Unstructured{}}
				if err := yaml.Unmarshal([]byte(part), &d.object.Object); err != nil {
					t.Fatalf("parsing %s: got error %v, want none", d.name, err)
				}
				if m := regexp.MustCompile(`(?m)^# want: (.+)$`).FindStringSubmatch(part); m != nil {
					d.want = m[1]
				}
				d.object.SetNamespace("default")
				docs = append(docs, d)
			}
		}
	}
	return docs
}

// create sends an object to the API server in a dry run. Unknown fields are errors, as with
// kubectl.
func create(object *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	made := object.DeepCopy()
	err := cluster.Create(context.Background(), made, client.DryRunAll, client.FieldValidation("Strict"))
	return made, err
}

func TestValid(t *testing.T) {
	for _, d := range documents(t, "testdata/valid", "../../config/samples", "../../config/samples/reference") {
		t.Run(d.name, func(t *testing.T) {
			if d.object.GetKind() == "Kustomization" {
				t.Skip("not an object")
			}
			if _, err := create(d.object); err != nil {
				t.Errorf("create: got error %v, want none", err)
			}
		})
	}
}

func TestInvalid(t *testing.T) {
	for _, d := range documents(t, "testdata/invalid") {
		t.Run(d.name, func(t *testing.T) {
			_, err := create(d.object)
			switch {
			case d.want == "":
				t.Error(`the document has no comment "# want: TEXT"`)
			case err == nil:
				t.Errorf("create: got no error, want one with %q", d.want)
			case !strings.Contains(err.Error(), d.want):
				t.Errorf("create: got error\n%v\nwant one with\n%s", err, d.want)
			}
		})
	}
}

// TestEveryRuleHasACase fails for every constraint in the CRDs that no invalid
// document breaks.
func TestEveryRuleHasACase(t *testing.T) {
	messages, broken := "", map[string]bool{}
	for _, d := range documents(t, "testdata/invalid") {
		_, err := create(d.object)
		if err == nil {
			continue // TestInvalid reports it.
		}
		messages += err.Error() + "\n"
		for key := range violations(d.object.GetKind(), err) {
			broken[key] = true
		}
	}
	for kind, root := range specs(t) {
		walk(root, kind+" spec", func(path string, s apiextensionsv1.JSONSchemaProps) {
			for _, rule := range s.XValidations {
				if strings.Contains(rule.Rule, "oldSelf") {
					continue // TestImmutable covers rules for updates.
				}
				if rule.Message == "" {
					t.Errorf("%s: the rule %q has no message", path, rule.Rule)
				} else if !strings.Contains(messages, rule.Message) {
					t.Errorf("%s: no invalid document breaks the rule %q", path, rule.Message)
				}
			}
			if s.Pattern != "" && !s.XIntOrString {
				t.Errorf("%s has a pattern, whose error does not give the fix; replace it by a rule with a message", path)
			}
			if len(s.Enum) > 0 && !broken[path+" enum"] {
				t.Errorf("%s: no invalid document has a value outside of the enum", path)
			}
			for _, required := range s.Required {
				if !broken[path+"."+required+" required"] && !strings.Contains(path, "matchExpressions") {
					t.Errorf("%s.%s: no invalid document omits the required field", path, required)
				}
			}
			if s.XListType != nil && (*s.XListType == "set" || *s.XListType == "map") && !broken[path+" duplicate"] {
				t.Errorf("%s: no invalid document has a duplicate entry", path)
			}
		})
	}
}

// TestEverythingIsBounded fails for a string, list or number of the spec without bounds.
func TestEverythingIsBounded(t *testing.T) {
	for kind, root := range specs(t) {
		walk(root, kind+" spec", func(path string, s apiextensionsv1.JSONSchemaProps) {
			switch {
			case strings.Contains(path, ".sourceSelector."): // Rules on the whole selector bound it.
			case s.XIntOrString:
				if len(s.XValidations) == 0 {
					t.Errorf("%s: the quantity has no rule that bounds it", path)
				}
			case s.Type == "string" && s.MaxLength == nil && len(s.Enum) == 0:
				t.Errorf("%s: the string has no maxLength", path)
			case s.Type == "array" && s.MaxItems == nil:
				t.Errorf("%s: the list has no maxItems", path)
			case s.Type == "integer" && (s.Minimum == nil || s.Maximum == nil):
				t.Errorf("%s: the number has no minimum or no maximum", path)
			}
		})
	}
}

// TestDurations fails for a duration that is a number, except for the two fields of
// batch/v1.
func TestDurations(t *testing.T) {
	unit := regexp.MustCompile(`(?i)(millis|seconds?|minutes?|hours?|MS)(after\w*)?$`)
	for kind, root := range specs(t) {
		walk(root, kind+" spec", func(path string, s apiextensionsv1.JSONSchemaProps) {
			field := path[strings.LastIndex(path, ".")+1:]
			switch field {
			case "ttlSecondsAfterFinished", "activeDeadlineSeconds", "callsPerSecond", "requestsPerSecond", "deadLettersPerSecond":
				return
			}
			if s.Type == "integer" && unit.MatchString(field) {
				t.Errorf("%s: the duration is a number; use Duration", path)
			}
		})
	}
}

// TestBounds creates objects at each bound of the CRDs, and one above or below it.
func TestBounds(t *testing.T) {
	full := map[string][]*unstructured.Unstructured{}
	for _, d := range documents(t, "testdata/valid") {
		if strings.HasPrefix(d.name, "full-") {
			full[d.object.GetKind()] = append(full[d.object.GetKind()], d.object)
		}
	}
	for kind, root := range specs(t) {
		if full[kind] == nil {
			t.Fatalf("testdata/valid has no full-*.yaml of kind %s", kind)
		}
		walk(root, kind+" spec", func(path string, s apiextensionsv1.JSONSchemaProps) {
			try := func(violation string, breaks, meets any) {
				t.Run(path+" "+violation, func(t *testing.T) {
					for value, want := range map[*any]bool{&breaks: true, &meets: false} {
						i := slices.IndexFunc(full[kind], func(o *unstructured.Unstructured) bool {
							return set(o.DeepCopy().Object, strings.TrimPrefix(path, kind+" "), *value)
						})
						if i < 0 {
							t.Fatalf("full-*.yaml does not set %s", path)
						}
						object := full[kind][i].DeepCopy()
						set(object.Object, strings.TrimPrefix(path, kind+" "), *value)
						_, err := create(object)
						if got := violations(kind, err)[path+" "+violation]; got != want {
							t.Errorf("violation of %s: got %v, want %v; error: %.300v", violation, got, want, err)
						}
					}
				})
			}
			if s.MaxLength != nil {
				try("maxLength", strings.Repeat("a", int(*s.MaxLength)+1), strings.Repeat("a", int(*s.MaxLength)))
			}
			if s.MinLength != nil {
				try("minLength", strings.Repeat("a", int(*s.MinLength)-1), strings.Repeat("a", int(*s.MinLength)))
			}
			if s.Maximum != nil {
				try("maximum", int64(*s.Maximum)+1, int64(*s.Maximum))
			}
			if s.Minimum != nil {
				try("minimum", int64(*s.Minimum)-1, int64(*s.Minimum))
			}
			if s.MaxItems != nil {
				try("maxItems", items(s, int(*s.MaxItems)+1), items(s, int(*s.MaxItems)))
			}
			if s.MinItems != nil {
				try("minItems", items(s, int(*s.MinItems)-1), items(s, int(*s.MinItems)))
			}
		})
	}
}

// TestImmutable removes and adds each field of an immutable spec.
func TestImmutable(t *testing.T) {
	ctx := context.Background()
	const message, mutable = "spec is immutable except for ttlSecondsAfterFinished", "ttlSecondsAfterFinished"
	kinds := 0
	for kind, root := range specs(t) {
		if !slices.ContainsFunc(root.XValidations, func(r apiextensionsv1.ValidationRule) bool { return strings.HasPrefix(r.Message, message) }) {
			continue
		}
		kinds++
		t.Run(kind, func(t *testing.T) {
			var full, minimal *unstructured.Unstructured
			for _, d := range documents(t, "testdata/valid") {
				switch {
				case d.object.GetKind() != kind:
				case strings.HasPrefix(d.name, "full-"):
					full = d.object
				case strings.HasPrefix(d.name, "minimal-"), strings.HasPrefix(d.name, "simple-"):
					minimal = d.object
				}
			}
			for name, object := range map[string]*unstructured.Unstructured{"full": full, "minimal": minimal} {
				object.SetName("immutable-" + name)
				if err := cluster.Create(ctx, object); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = cluster.Delete(ctx, object) })
			}
			full.SetLabels(map[string]string{"may": "change"})
			if err := cluster.Update(ctx, full); err != nil {
				t.Errorf("change of a label: got error %v, want none", err)
			}
			try := func(change string, object *unstructured.Unstructured, field string) {
				err := cluster.Update(ctx, object, client.DryRunAll)
				if field == mutable {
					if err != nil {
						t.Errorf("spec.%s %s: got error %v, want none", field, change, err)
					}
				} else if err == nil || !strings.Contains(err.Error(), message) && !strings.Contains(err.Error(), "Required value") {
					t.Errorf("spec.%s %s: got error %v, want one with %q", field, change, err, message)
				}
			}
			for field := range root.Properties {
				value, ok, _ := unstructured.NestedFieldCopy(full.Object, "spec", field)
				if !ok {
					t.Errorf("the full document does not set spec.%s", field)
					continue
				}
				changed := full.DeepCopy()
				unstructured.RemoveNestedField(changed.Object, "spec", field)
				if value == false { // The default, so that removing it changes nothing.
					value = true
					_ = unstructured.SetNestedField(changed.Object, value, "spec", field)
				}
				try("removed or changed", changed, field)
				if before, ok, _ := unstructured.NestedFieldNoCopy(minimal.Object, "spec", field); !ok || !cmp.Equal(before, value) {
					added := minimal.DeepCopy()
					if err := unstructured.SetNestedField(added.Object, value, "spec", field); err != nil {
						t.Fatal(err)
					}
					try("added", added, field)
				}
			}
			if err := cluster.Update(ctx, full, client.DryRunAll); err != nil {
				t.Errorf("update without a change: got error %v, want none", err)
			}
		})
	}
	if kinds != 2 {
		t.Errorf("kinds with an immutable spec: got %d, want 2", kinds)
	}
}

// TestJobStatusDefaults creates an object of each kind that runs once. Its first conditions
// are Unknown.
func TestJobStatusDefaults(t *testing.T) {
	for _, d := range documents(t, "testdata/valid") {
		kind := d.object.GetKind()
		if kind != "Redelivery" && kind != "DeletionRequest" || strings.HasPrefix(d.name, "full-") {
			continue
		}
		made, err := create(d.object)
		if err != nil {
			t.Fatal(err)
		}
		conditions, _, _ := unstructured.NestedSlice(made.Object, "status", "conditions")
		var got []string
		for _, c := range conditions {
			c := c.(map[string]any)
			got = append(got, fmt.Sprint(c["type"], " ", c["status"], " ", c["reason"]))
		}
		if diff := cmp.Diff([]string{"Accepted Unknown Pending", "ResolvedRefs Unknown Pending", "Complete Unknown Pending",
			"Failed Unknown Pending", "Ready Unknown Pending"}, got); diff != "" {
			t.Errorf("conditions of %s (-want +got):\n%s", kind, diff)
		}
	}
}

// TestAudienceIdentity tests the immutable fields of an Audience.
func TestAudienceIdentity(t *testing.T) {
	ctx := context.Background()
	var object *unstructured.Unstructured
	for _, d := range documents(t, "testdata/valid") {
		if d.name == "full-audience.yaml" || strings.HasPrefix(d.name, "full-audience") {
			object = d.object
		}
	}
	object.SetName("identity")
	if err := cluster.Create(ctx, object); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cluster.Delete(ctx, object) })
	try := func(value any, field ...string) error {
		changed := object.DeepCopy()
		if err := unstructured.SetNestedField(changed.Object, value, append([]string{"spec"}, field...)...); err != nil {
			t.Fatal(err)
		}
		return cluster.Update(ctx, changed, client.DryRunAll)
	}
	for _, c := range []struct {
		value any
		field []string
		want  string
	}{
		{"other", []string{"sourceRef", "name"}, "sourceRef cannot be changed"},
		{"Audience", []string{"type"}, "type cannot be changed"},
		{"other", []string{"key"}, "key cannot be changed"},
		{"Another Name", []string{"displayName"}, ""},
		{int64(7), []string{"maxRemovalPercent"}, ""},
	} {
		if err := try(c.value, c.field...); c.want == "" != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("change of spec.%s to %v: got error %v, want %q", strings.Join(c.field, "."), c.value, err, c.want)
		}
	}
}

func TestDefaults(t *testing.T) {
	want := map[string]string{
		"Source": `
suspend: false
writeKeys: [{name: main, secretKeyRef: {name: web-key, key: writeKey}}]`,
		"Redelivery": `
destinationRef: {name: crm}
dryRun: false
deadLettersPerSecond: 100`,
		"DeletionRequest": `
userID: u1
suppress: false`,
		"WebhookDestination": `
suspend: false
body: {numbers: String}
successPolicy: AnyEndpoint
deletions: Deliver
sourceRefs: [{name: web}]
endpoints: [{name: primary, url: "https://hooks.example/in"}]
signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: crm, key: sharedSecret}}]}
delivery: {timeout: 5s, retry: {window: 4h, initialBackoff: 1s, maxBackoff: 5m}, maxInFlight: 1000, compression: None}
deadLetters: {retention: 168h, maxBytes: 1Gi}`,
	}
	checked := 0
	for _, d := range documents(t, "testdata/valid") {
		if !strings.HasPrefix(d.name, "minimal-") {
			continue
		}
		checked++
		made, err := create(d.object)
		if err != nil {
			t.Fatal(err)
		}
		var spec map[string]any
		if err := yaml.Unmarshal([]byte(want[d.object.GetKind()]), &spec); err != nil {
			t.Fatal(err)
		}
		text := func(v any) string { b, _ := yaml.Marshal(v); return string(b) }
		if diff := cmp.Diff(text(spec), text(made.Object["spec"])); diff != "" {
			t.Errorf("%s: defaults (-want +got):\n%s", d.name, diff)
		}
	}
	if checked != len(want) {
		t.Errorf("minimal documents: got %d, want %d", checked, len(want))
	}
}

// violations returns the violated constraints of an error, as "Kind path constraint".
func violations(kind string, err error) map[string]bool {
	found := map[string]bool{}
	var status *apierrors.StatusError
	if !errors.As(err, &status) || status.ErrStatus.Details == nil {
		return found
	}
	constraints := []struct{ text, name string }{
		{"Too long", "maxLength"}, {"Too many", "maxItems"}, {"must have at most", "maxItems"},
		{"should be at least", "minLength"}, {"should have at least", "minItems"},
		{"should be greater than or equal", "minimum"}, {"should be less than or equal", "maximum"},
	}
	for _, cause := range status.ErrStatus.Details.Causes {
		path := kind + " " + regexp.MustCompile(`\[[^\]]*\]`).ReplaceAllString(cause.Field, "")
		switch cause.Type {
		case metav1.CauseTypeFieldValueRequired:
			found[path+" required"] = true
		case metav1.CauseTypeFieldValueNotSupported:
			found[path+" enum"] = true
		case metav1.CauseTypeFieldValueDuplicate:
			found[path+" duplicate"] = true
		}
		for _, c := range constraints {
			if strings.Contains(cause.Message, c.text) || strings.Contains(string(cause.Type), strings.ReplaceAll(c.text, " ", "")) {
				found[path+" "+c.name] = true
			}
		}
	}
	return found
}

// specs returns the schema of each kind's spec.
func specs(t *testing.T) map[string]apiextensionsv1.JSONSchemaProps {
	t.Helper()
	found := map[string]apiextensionsv1.JSONSchemaProps{}
	files, err := filepath.Glob("../../config/crd/experimental/posthorn.dev_*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var crd apiextensionsv1.CustomResourceDefinition
		if err := yaml.Unmarshal(text, &crd); err != nil {
			t.Fatal(err)
		}
		found[crd.Spec.Names.Kind] = crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"]
	}
	if len(found) < 2 {
		t.Fatalf("CRDs: got %d, want at least 2", len(found))
	}
	return found
}

// walk visits a schema and all schemas in it. The items of a list have its path.
func walk(s apiextensionsv1.JSONSchemaProps, path string, visit func(string, apiextensionsv1.JSONSchemaProps)) {
	visit(path, s)
	names := make([]string, 0, len(s.Properties))
	for name := range s.Properties {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		walk(s.Properties[name], path+"."+name, visit)
	}
	if s.Items != nil && s.Items.Schema != nil {
		walk(*s.Items.Schema, path, visit)
	}
}

// set sets the value at a path. In a list it sets the first entry, unless the value is a
// list. It returns false if the path does not exist.
func set(object map[string]any, path string, value any) bool {
	name, rest, more := strings.Cut(path, ".")
	current, ok := object[name]
	if !ok {
		return false
	}
	list, isList := current.([]any)
	_, toList := value.([]any)
	switch {
	case !more && isList && !toList:
		list[0] = value
	case !more:
		object[name] = value
	case isList:
		return slices.ContainsFunc(list, func(entry any) bool {
			m, ok := entry.(map[string]any)
			return ok && set(m, rest, value)
		})
	default:
		m, ok := current.(map[string]any)
		return ok && set(m, rest, value)
	}
	return true
}

// items returns a list of n different entries.
func items(s apiextensionsv1.JSONSchemaProps, n int) []any {
	list := []any{}
	for i := range n {
		if s.Items.Schema.Type == "object" {
			entry, name := map[string]any{}, fmt.Sprintf("n%d", i)
			for field, value := range map[string]any{"name": name, "url": "https://hooks.example/", "value": "v",
				"secretKeyRef": map[string]any{"name": name, "key": "k"}} {
				if _, ok := s.Items.Schema.Properties[field]; ok {
					entry[field] = value
				}
			}
			list = append(list, entry)
		} else {
			list = append(list, fmt.Sprintf("v%d", i))
		}
	}
	return list
}
