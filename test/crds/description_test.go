package crds

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/api/v1beta1"
)

// Every field has a description, which kubectl explain prints.
func TestEveryFieldHasADescription(t *testing.T) {
	fields := 0
	for _, crd := range crdsOf(t, tree, "experimental") {
		each("", asJSON(crd.Spec.Versions[0].Schema.OpenAPIV3Schema), func(path string, s schema) {
			for name, field := range asSchema(s["properties"]) {
				fields++
				if asSchema(field)["description"] == nil && join(path, name) != "metadata" {
					t.Errorf("%s %s: the field has no description", crd.Spec.Names.Kind, join(path, name))
				}
			}
		})
	}
	if fields < 200 {
		t.Errorf("fields of the CRDs: got %d, want more", fields)
	}
}

// No field of a list's entry has a default: Argo CD compares lists as a whole, so it would report each object
// whose manifest omits the field as out of sync. The operator applies such defaults.
func TestEntriesOfListsHaveNoDefaults(t *testing.T) {
	for _, crd := range crdsOf(t, tree, "experimental") {
		each("", asJSON(crd.Spec.Versions[0].Schema.OpenAPIV3Schema), func(path string, s schema) {
			if strings.HasPrefix(path, "spec.") && strings.Contains(path, "[]") && s["default"] != nil {
				t.Errorf("%s %s: got the default %v, want none", crd.Spec.Names.Kind, path, s["default"])
			}
		})
	}
}

// A Redelivery can select each reason of a dead letter, and no other.
func TestReasonsOfRedeliveries(t *testing.T) {
	got := crdsOf(t, tree, "standard")["Redelivery"].Spec.Versions[0].Schema.OpenAPIV3Schema.
		Properties["spec"].Properties["match"].Properties["reasons"].Items.Schema.Enum
	want, err := json.Marshal(v1beta1.DeadLetterReasons)
	if err != nil {
		t.Fatal(err)
	}
	if text, err := json.Marshal(got); err != nil || string(text) != string(want) {
		t.Errorf("enum of spec.match.reasons: got %s and error %v, want v1beta1.DeadLetterReasons %s", text, err, want)
	}
}
