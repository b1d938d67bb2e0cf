package standalone

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/kinds"
)

const (
	kindSecret       = "Secret"
	defaultNamespace = "default"
)

// Problem is a problem of a manifest. It contains no values of the manifest.
type Problem struct {
	File string `json:"file"`
	// Document is the position of the document, from 1; 0 means the whole file.
	Document int `json:"document,omitempty"`
	// Object is "Kind namespace/name"; it may be incomplete.
	Object string `json:"object,omitempty"`
	// Message names the field, the rule and the fix.
	Message string `json:"message"`
}

func (p Problem) String() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Document > 0 {
		fmt.Fprintf(&b, ", document %d", p.Document)
	}
	if p.Object != "" {
		b.WriteString(", " + p.Object)
	}
	return b.String() + ": " + p.Message
}

// id identifies an object.
type id struct{ kind, namespace, name string }

func (i id) String() string { return i.kind + " " + i.namespace + "/" + i.name }

// object is a valid manifest.
type object struct {
	id
	// of is the kind in the table, and resource the object; zero for a Secret.
	of       kinds.Kind
	resource client.Object
	secret   map[string][]byte
	// content is the JSON of the spec, or of the Secret's data. Its changes count as
	// generations.
	content []byte
	// manifest is the JSON of the object with its defaults; see state.
	manifest []byte
}

// parsed is the content of a file.
type parsed struct {
	objects []*object
	// broken are the invalid objects in the file.
	broken []id
	// unreadable is true if a document cannot be read, so that the file may contain unknown
	// objects.
	unreadable bool
	// blank is true if the file contains only white space, comments and separators.
	blank    bool
	problems []Problem
	// ignored are the objects of other kinds.
	ignored []Problem
}

// parse reads the documents of a file. An invalid document does not affect the others.
func parse(file string, text []byte) parsed {
	p := parsed{blank: true}
	split := splitYAML
	if filepath.Ext(file) == ".json" {
		split = splitJSON
	}
	documents, err := split(text)
	for i, document := range documents {
		p.document(file, i+1, document)
	}
	if err != nil {
		p.unreadable = true
		p.problems = append(p.problems, Problem{File: file, Document: len(documents) + 1, Message: err.Error()})
	}
	p.blank = p.blank && err == nil
	return p
}

func splitYAML(text []byte) (documents [][]byte, err error) {
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return documents, nil
		}
		if err != nil {
			return documents, fmt.Errorf("not YAML: %w", err)
		}
		documents = append(documents, document)
	}
}

func splitJSON(text []byte) (documents [][]byte, err error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	for {
		var document json.RawMessage
		if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
			return documents, nil
		} else if err != nil {
			return documents, fmt.Errorf("not JSON: %w", err)
		}
		documents = append(documents, document)
	}
}

func (p *parsed) document(file string, number int, text []byte) {
	problem := func(object string, err error) {
		p.problems = append(p.problems, Problem{File: file, Document: number, Object: object, Message: err.Error()})
	}
	plain, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		p.unreadable, p.blank = true, false
		problem("", fmt.Errorf("not YAML: %s", strings.TrimPrefix(err.Error(), "yaml: ")))
		return
	}
	if string(plain) == "null" {
		return // The document has only comments.
	}
	p.blank = false
	var content map[string]any
	if err := utiljson.Unmarshal(plain, &content); err != nil {
		p.unreadable = true
		problem("", errors.New("a manifest must be an object with apiVersion, kind and metadata"))
		return
	}
	p.content(file, number, content, problem)
}

func (p *parsed) content(file string, number int, content map[string]any, problem func(string, error)) {
	apiVersion, _ := content["apiVersion"].(string)
	kind, _ := content["kind"].(string)
	if apiVersion == "v1" && kind == "List" {
		items, _ := content["items"].([]any)
		for _, item := range items {
			if content, ok := item.(map[string]any); ok {
				p.content(file, number, content, problem)
			}
		}
		return
	}
	want := v1alpha1.GroupVersion.String()
	of, known := kinds.All.ByName(kind)
	if kind == kindSecret {
		want, known = "v1", true
	}
	inGroup := strings.HasPrefix(apiVersion, v1alpha1.GroupVersion.Group+"/")
	switch {
	case kind == "" || apiVersion == "":
		p.unreadable = true
		problem("", errors.New("apiVersion and kind must be set"))
		return
	case !known && inGroup:
		problem(kind, fmt.Errorf("kind: %q is unknown in %s; use one of %s", kind, apiVersion, kinds.All))
		return
	case !known || kind != kindSecret && !inGroup:
		p.ignored = append(p.ignored, Problem{File: file, Document: number, Object: apiVersion + " " + kind, Message: "ignored: this is not a kind of posthorn.dev"})
		return
	}
	object := &object{id: id{kind: kind}, of: of}
	var metadata metav1.ObjectMeta
	errs := readMetadata(content, &metadata)
	object.namespace, object.name = metadata.Namespace, metadata.Name
	if apiVersion != want {
		errs = append(errs, fmt.Errorf("apiVersion: %q is unknown for this kind; use %s", apiVersion, want))
	}
	if len(errs) == 0 {
		if kind == kindSecret {
			errs = object.readSecret(content, &metadata)
		} else {
			errs = object.readResource(content, &metadata)
		}
	}
	if len(errs) == 0 {
		var err error
		if object.manifest, err = json.Marshal(content); err == nil {
			p.objects = append(p.objects, object)
			return
		}
		errs = append(errs, err)
	}
	if object.name == "" {
		p.unreadable = true
	} else {
		p.broken = append(p.broken, object.id)
	}
	for _, err := range errs {
		problem(object.String(), err)
	}
}

// readMetadata decodes metadata strictly and sets the default namespace.
func readMetadata(content map[string]any, metadata *metav1.ObjectMeta) []error {
	raw, ok := content["metadata"].(map[string]any)
	if !ok {
		return []error{errors.New("metadata: must be set, with a name")}
	}
	if raw["namespace"] == nil || raw["namespace"] == "" {
		raw["namespace"] = defaultNamespace
	}
	for _, name := range []string{"name", "namespace"} {
		if _, ok := raw[name].(string); !ok && raw[name] != nil { // YAML parses y, no and 5 as other types.
			return []error{fmt.Errorf("metadata.%s: must be a string; put it in quotes", name)}
		}
	}
	// Remove the fields that the API server sets and `kubectl get -o yaml` prints.
	for _, field := range []string{"creationTimestamp", "deletionTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid"} {
		delete(raw, field)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(raw, metadata, true); err != nil {
		metadata.Name, _ = raw["name"].(string)
		metadata.Namespace, _ = raw["namespace"].(string)
		return []error{fmt.Errorf("metadata: %w", err)}
	}
	if metadata.Name == "" {
		return []error{errors.New("metadata.name: must be set")}
	}
	return nil
}

// readResource reads an object of a kind of posthorn.dev.
func (o *object) readResource(content map[string]any, metadata *metav1.ObjectMeta) []error {
	crds, err := definitions()
	if err != nil {
		return []error{err}
	}
	if errs := crds[o.kind].admit(content, metadata); len(errs) > 0 {
		return errs
	}
	o.resource = o.of.New()
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(content, o.resource); err != nil {
		return []error{err}
	}
	if o.content, err = json.Marshal(content["spec"]); err != nil {
		return []error{err}
	}
	return nil
}

// readSecret reads a Secret. It does not use the generic decoder, whose errors can contain
// values.
func (o *object) readSecret(content map[string]any, metadata *metav1.ObjectMeta) (errs []error) {
	for _, err := range apivalidation.ValidateObjectMeta(metadata, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata")) {
		errs = append(errs, withoutValue(err))
	}
	for name := range content {
		if !slices.Contains([]string{"apiVersion", "kind", "metadata", "data", "stringData", "type", "immutable"}, name) {
			errs = append(errs, fmt.Errorf("unknown field %q; remove it or correct its name", name))
		}
	}
	o.secret = map[string][]byte{}
	size := 0
	read := func(name string, decode func(string) ([]byte, error)) {
		values, ok := content[name].(map[string]any)
		if !ok && content[name] != nil {
			errs = append(errs, fmt.Errorf("%s: must be a map of strings", name))
		}
		for key, value := range values {
			text, ok := value.(string)
			if !ok && value != nil {
				errs = append(errs, fmt.Errorf("%s[%s]: must be a string; put it in quotes", name, key))
				continue
			}
			decoded, err := decode(text)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s[%s]: must be base64; use stringData for plain text", name, key))
			}
			for _, message := range utilvalidation.IsConfigMapKey(key) {
				errs = append(errs, fmt.Errorf("%s[%s]: %s", name, key, message))
			}
			size += len(decoded)
			o.secret[key] = decoded
		}
	}
	read("data", base64.StdEncoding.DecodeString)
	read("stringData", func(text string) ([]byte, error) { return []byte(text), nil })
	if size > corev1.MaxSecretSize {
		errs = append(errs, fmt.Errorf("data: must have at most %d bytes in total", corev1.MaxSecretSize))
	}
	if content["type"] == string(corev1.SecretTypeTLS) {
		for _, key := range []string{corev1.TLSCertKey, corev1.TLSPrivateKeyKey} {
			if _, ok := o.secret[key]; !ok {
				errs = append(errs, fmt.Errorf("data[%s]: must be set in a Secret of type %s", key, corev1.SecretTypeTLS))
			}
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	var err error
	if o.content, err = json.Marshal(o.secret); err != nil {
		errs = append(errs, err)
	}
	return errs
}
