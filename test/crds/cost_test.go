package crds

import (
	"context"
	"testing"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/environment"
)

const (
	// maxRulePercent bounds each rule, in percent of what the API server permits for a rule.
	maxRulePercent = 30
	// extraEntries is the length of the list that must fit into the most nested one.
	extraEntries = 8
)

// maxPercent bounds the rules of each CRD together, in percent of what the API server permits for a CRD.
var maxPercent = map[string]float64{"Audience": 1, "DeletionRequest": 2, "Redelivery": 1, "Source": 1, "WebhookDestination": 13}

// The API server accepts the CRDs of both channels, and their rules leave room for more. The estimates are its own.
func TestCost(t *testing.T) {
	for _, channel := range []string{"experimental", "standard"} {
		for kind, crd := range crdsOf(t, tree, channel) {
			for _, err := range validation.ValidateCustomResourceDefinition(context.Background(), internal(t, crd)) {
				t.Errorf("%s, channel %s: %v", kind, channel, err)
			}
			rules := costs(t, crd)
			for _, r := range rules {
				if percent := percentOf(r.cost, validation.StaticEstimatedCostLimit); percent > maxRulePercent {
					t.Errorf("%s %s: the rule needs %.1f %% of its budget, want at most %d %%: bound lists and strings, or move the rule to their entries: %s",
						kind, r.path, percent, maxRulePercent, r.rule)
				}
			}
			percent := percentOf(total(rules), validation.StaticEstimatedCRDCostLimit)
			t.Logf("%s, channel %s: %d rules, %.2f %%", kind, channel, len(rules), percent)
			if percent > maxPercent[kind] {
				t.Errorf("%s: the rules need %.1f %% of the budget of a CRD, want at most %v %%", kind, percent, maxPercent[kind])
			}
		}
	}
}

// A list of strings with two rules fits into the most nested list, the headers of an endpoint.
func TestRoomForANestedList(t *testing.T) {
	crd := crdsOf(t, tree, "experimental")["WebhookDestination"]
	spec := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"]
	header := spec.Properties["endpoints"].Items.Schema.Properties["headers"].Items.Schema
	entries, length := int64(extraEntries), int64(256)
	header.Properties["more"] = apiextensionsv1.JSONSchemaProps{
		Type: "array", MaxItems: &entries,
		XValidations: apiextensionsv1.ValidationRules{{Rule: "self.all(a, self.exists_one(b, a == b))"}},
		Items: &apiextensionsv1.JSONSchemaPropsOrArray{Schema: &apiextensionsv1.JSONSchemaProps{
			Type: "string", MaxLength: &length, XValidations: apiextensionsv1.ValidationRules{{Rule: "self.matches('^[ -~]*$')"}},
		}},
	}
	for _, err := range validation.ValidateCustomResourceDefinition(context.Background(), internal(t, crd)) {
		t.Errorf("with a list of %d entries in each header: %v", entries, err)
	}
}

// ruleCost is the estimate for a rule, over all places of an object where it runs.
type ruleCost struct {
	path, rule string
	cost       uint64
}

func total(rules []ruleCost) (sum uint64) {
	for _, r := range rules {
		sum += r.cost
	}
	return sum
}

func percentOf(cost, limit uint64) float64 { return 100 * float64(cost) / float64(limit) }

// internal returns a CRD in the form that the API server validates, with its defaults.
func internal(t *testing.T, crd *apiextensionsv1.CustomResourceDefinition) *apiextensions.CustomResourceDefinition {
	t.Helper()
	crd = crd.DeepCopy()
	apiextensionsv1.SetDefaults_CustomResourceDefinition(crd)
	apiextensionsv1.SetDefaults_CustomResourceDefinitionSpec(&crd.Spec)
	crd.Status.StoredVersions = []string{crd.Spec.Versions[0].Name}
	var out apiextensions.CustomResourceDefinition
	if err := apiextensionsv1.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition(crd, &out, nil); err != nil {
		t.Fatal(err)
	}
	return &out
}

func costs(t *testing.T, crd *apiextensionsv1.CustomResourceDefinition) (found []ruleCost) {
	t.Helper()
	var root apiextensions.JSONSchemaProps
	schema := crd.Spec.Versions[0].Schema.OpenAPIV3Schema
	if err := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(schema, &root, nil); err != nil {
		t.Fatal(err)
	}
	walk(t, "", &root, validation.RootCELContext(&root), &found)
	return found
}

// walk appends the costs of the rules in a schema.
func walk(t *testing.T, path string, s *apiextensions.JSONSchemaProps, at *validation.CELSchemaContext, found *[]ruleCost) {
	t.Helper()
	*found = append(*found, rulesAt(t, path, s, at)...)
	for name, p := range s.Properties {
		walk(t, join(path, name), &p, at.ChildPropertyContext(&p, name), found)
	}
	if s.Items != nil {
		walk(t, path+"[]", s.Items.Schema, at.ChildItemsContext(s.Items.Schema), found)
	}
	if a := s.AdditionalProperties; a != nil && a.Schema != nil {
		walk(t, path+"{}", a.Schema, at.ChildAdditionalPropertiesContext(a.Schema), found)
	}
}

func rulesAt(t *testing.T, path string, s *apiextensions.JSONSchemaProps, at *validation.CELSchemaContext) (found []ruleCost) {
	t.Helper()
	if len(s.XValidations) == 0 {
		return nil
	}
	info, err := at.TypeInfo()
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	results, err := cel.Compile(info.Schema, info.DeclType, celconfig.PerCallLimit,
		environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()), cel.NewExpressionsEnvLoader())
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	for i, r := range results {
		rule := s.XValidations[i].Rule
		if r.Error != nil || at.MaxCardinality == nil {
			t.Errorf("%s: rule %q: error %v, want none and a bound of every list around it", path, rule, r.Error)
			continue
		}
		found = append(found, ruleCost{path, rule, r.MaxCost * *at.MaxCardinality})
	}
	return found
}
