package standalone

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/objectmeta"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource/tableconvertor"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/config/crd"
	"github.com/posthorn/posthorn/controllers/kinds"
)

// definition is a CRD, prepared for validation and printing.
type definition struct {
	names      apiextensionsv1.CustomResourceDefinitionNames
	structural *structuralschema.Structural
	schema     validation.SchemaValidator
	cel        *cel.Validator
	table      rest.TableConvertor
}

// definitions returns the embedded CRDs by kind. It reads them once, because the
// compilation of the CEL rules is slow.
var definitions = sync.OnceValues(func() (map[string]*definition, error) {
	files, err := fs.Glob(crd.Files, "experimental/*.yaml")
	if err != nil {
		return nil, err
	}
	crds := map[string]*definition{}
	for _, file := range files {
		text, err := crd.Files.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var resource apiextensionsv1.CustomResourceDefinition
		if err := yaml.Unmarshal(text, &resource); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		d, err := newDefinition(resource)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		crds[resource.Spec.Names.Kind] = d
	}
	for _, k := range kinds.All {
		if crds[k.Name()] == nil {
			return nil, fmt.Errorf("no CustomResourceDefinition of kind %s", k.Name())
		}
	}
	return crds, nil
})

func newDefinition(resource apiextensionsv1.CustomResourceDefinition) (*definition, error) {
	for _, version := range resource.Spec.Versions {
		if version.Name != v1beta1.GroupVersion.Version || version.Schema == nil {
			continue
		}
		var internal apiextensions.CustomResourceValidation
		if err := apiextensionsv1.Convert_v1_CustomResourceValidation_To_apiextensions_CustomResourceValidation(version.Schema, &internal,
			nil); err != nil {
			return nil, err
		}
		d := &definition{names: resource.Spec.Names}
		var err error
		if d.structural, err = structuralschema.NewStructural(internal.OpenAPIV3Schema); err != nil {
			return nil, err
		}
		if d.schema, _, err = validation.NewSchemaValidator(internal.OpenAPIV3Schema); err != nil {
			return nil, err
		}
		d.cel = cel.NewValidator(d.structural, true, celconfig.PerCallLimit)
		if d.table, err = tableconvertor.New(version.AdditionalPrinterColumns); err != nil {
			return nil, err
		}
		return d, nil
	}
	return nil, errors.New("the CRD has no version " + v1beta1.GroupVersion.Version)
}

// admit processes an object as an API server does at its creation with strict field
// validation: it sets defaults, removes the status, and returns the errors.
func (d *definition) admit(object map[string]any, metadata *metav1.ObjectMeta) []error {
	unknown := pruning.PruneWithOptions(object, d.structural, true, structuralschema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true})
	delete(object, "status")
	defaulting.PruneNonNullableNullsWithoutDefaults(object, d.structural)
	defaulting.Default(object, d.structural)

	ctx := context.Background()
	errs := apivalidation.ValidateObjectMeta(metadata, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	errs = append(errs, validation.ValidateCustomResource(nil, object, d.schema)...)
	errs = append(errs, objectmeta.Validate(ctx, nil, object, d.structural, false)...)
	errs = append(errs, listtype.ValidateListSetsAndMaps(nil, d.structural, object)...)
	// As in the API server, rules do not run if the structure of the object is invalid.
	if !blocks(errs) && d.cel != nil {
		more, _ := d.cel.Validate(ctx, nil, d.structural, object, nil, celconfig.RuntimeCELCostBudget)
		errs = append(errs, more...)
	}
	var out []error
	for _, path := range unknown {
		out = append(out, unknownField(path, d.fieldsBeside(path)))
	}
	for _, err := range errs {
		out = append(out, withoutValue(err))
	}
	return out
}

// admitUpdate applies the rules that compare an object with its previous version, as an
// API server does at an update. Both versions have been admitted before.
func (d *definition) admitUpdate(object, old map[string]any) []error {
	if d.cel == nil {
		return nil
	}
	errs, _ := d.cel.Validate(context.Background(), nil, d.structural, object, old, celconfig.RuntimeCELCostBudget)
	var out []error
	for _, err := range errs {
		out = append(out, withoutValue(err))
	}
	return out
}

func blocks(errs field.ErrorList) bool {
	for _, err := range errs {
		switch err.Type {
		case field.ErrorTypeNotSupported, field.ErrorTypeRequired, field.ErrorTypeTooLong, field.ErrorTypeTooMany, field.ErrorTypeTypeInvalid:
			return true
		}
	}
	return false
}

// withoutValue returns an error of the API server without the invalid value, which may be
// a credential, for example a URL or a header.
func withoutValue(err *field.Error) error {
	detail := strings.TrimPrefix(err.Detail, err.Field+" in body ")
	switch err.Type {
	case field.ErrorTypeNotSupported:
		return fieldError{err.Field, fmt.Errorf("%w%s", err, nearestValue(err))}
	case field.ErrorTypeTooMany, field.ErrorTypeTooLong, field.ErrorTypeRequired:
		return fieldError{err.Field, err}
	case field.ErrorTypeInvalid, field.ErrorTypeTypeInvalid:
		return fieldErrorf(err.Field, "%s", typeAdvice(detail))
	}
	if detail == "" {
		return fieldErrorf(err.Field, "%s", err.Type)
	}
	return fieldErrorf(err.Field, "%s: %s", err.Type, detail)
}

// typeAdvice replaces the text about a wrong type, which names the types of JSON, by how to write the value.
func typeAdvice(detail string) string {
	switch {
	case strings.HasPrefix(detail, `must be of type string: "integer"`), strings.HasPrefix(detail, `must be of type string: "number"`):
		return "must be a string; write a duration with its unit, such as 5s, and other numbers in quotes"
	case strings.HasPrefix(detail, `must be of type object: "string"`):
		return "must be an object, such as {name: web}"
	}
	return detail
}

var quotedValue = regexp.MustCompile(`"([^"]*)"`)

// nearestValue suggests one of the supported values, which the detail of an error lists.
func nearestValue(err *field.Error) string {
	var known []string
	for _, m := range quotedValue.FindAllStringSubmatch(err.Detail, -1) {
		known = append(known, m[1])
	}
	if now := replacedValues[fmt.Sprintf("%s: %v", withoutIndices.ReplaceAllString(err.Field, ""), err.BadValue)]; now != "" {
		return "; write " + now
	}
	return didYouMean(fmt.Sprint(err.BadValue), known)
}

// fieldsBeside returns the names of the fields that the schema has beside a field.
func (d *definition) fieldsBeside(path string) []string {
	steps := pathSteps(path)
	schema := d.structural
	for _, step := range steps[:max(0, len(steps)-1)] {
		next, known := schema.Properties[step]
		switch {
		case known:
			schema = &next
		case schema.Items != nil:
			schema = schema.Items
		case schema.AdditionalProperties != nil && schema.AdditionalProperties.Structural != nil:
			schema = schema.AdditionalProperties.Structural
		default:
			return nil
		}
	}
	return slices.Sorted(maps.Keys(schema.Properties))
}

// experimental returns the paths of the fields of a value that only the experimental CRDs have.
func experimental(path string, value any, schema *structuralschema.Structural) (fields []string) {
	if schema == nil { // The object is invalid.
		return nil
	}
	if strings.HasPrefix(schema.Description, crd.Experimental) {
		return []string{path}
	}
	switch value := value.(type) {
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(value)) {
			if property, ok := schema.Properties[name]; ok {
				fields = append(fields, experimental(strings.TrimPrefix(path+"."+name, "."), value[name], &property)...)
			}
		}
	case []any:
		for i := range value {
			fields = append(fields, experimental(fmt.Sprintf("%s[%d]", path, i), value[i], schema.Items)...)
		}
	}
	return fields
}
