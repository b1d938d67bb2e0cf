package standalone

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/kinds"
	"github.com/posthorn/posthorn/controllers/manifest"
)

const (
	kindSecret      = "Secret"
	kindConfigMap   = "ConfigMap"
	kindSource      = "Source"
	kindDestination = "WebhookDestination"
)

// DefaultNamespace is the namespace of objects whose metadata has none.
const DefaultNamespace = "default"

// id identifies an object.
type id struct{ kind, namespace, name string }

func (i id) String() string { return i.kind + " " + i.namespace + "/" + i.name }

func (i id) compare(o id) int {
	return cmp.Or(strings.Compare(i.kind, o.kind), strings.Compare(i.namespace, o.namespace), strings.Compare(i.name, o.name))
}

// object is a valid manifest.
type object struct {
	id
	// of is the kind in the table, and resource the object; nil for a Secret or a ConfigMap, which has values.
	of       *kinds.Kind
	resource client.Object
	values   map[string][]byte
	// content is the hash of the JSON of the spec, or of the values. Its changes count as
	// generations.
	content [sha256.Size]byte
	// manifest is the JSON of the object with its defaults; see state.
	manifest []byte
	// line is where the object's document begins in its file, from 1; document is the number of the document, from 1,
	// and path the object's path in it, empty or with a dot at its end.
	line, document int
	path           string
}

// parsed is the content of a file.
type parsed struct {
	objects []*object
	// broken are the invalid objects in the file.
	broken []id
	// misspelt are the objects whose kind does not exist: probably objects of another kind.
	misspelt []id
	// unreadable is true if a document cannot be read, so that the file may contain unknown
	// objects.
	unreadable bool
	// blank is true if the file contains only white space, comments and separators.
	blank    bool
	problems []manifest.Problem
	// ignored are the objects of other kinds.
	ignored []manifest.Problem
	// warnings are the experimental fields of valid objects.
	warnings []manifest.Problem
}

// parse reads the documents of a file. An invalid document does not affect the others.
func parse(file string, text []byte) parsed {
	p := parsed{blank: true}
	documents, err := documentsOf(file, text)
	for _, d := range documents {
		p.document(d)
	}
	if err != nil {
		p.unreadable = true
		p.problems = append(p.problems, manifest.Problem{File: file, Document: len(documents) + 1, Message: err.Error()})
	}
	p.blank = p.blank && err == nil
	return p
}

// documentsOf divides a file into its documents; after an error, those before it.
func documentsOf(file string, text []byte) ([]*document, error) {
	// The YAML reader ends each line so; place finds the documents then.
	text = bytes.ReplaceAll(bytes.TrimPrefix(text, []byte("\uFEFF")), []byte("\r\n"), newline)
	if !bytes.HasSuffix(text, newline) {
		text = append(text, '\n')
	}
	split := splitYAML
	if filepath.Ext(file) == ".json" {
		split = splitJSON
	}
	texts, err := split(text)
	return place(file, text, texts), err
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

// surrogate matches the escape of a half of a character above U+FFFF, which JSON writes as two of them. The YAML
// parser does not know it, and the JSON parser replaces a half that stands alone.
var surrogate = regexp.MustCompile(`\\u([dD][89a-fA-F][0-9a-fA-F]{2})`)

// surrogatePair matches two halves that form a character, marked as json does.
var surrogatePair = regexp.MustCompile(`\x{FDD0}([dD][89aAbB][0-9a-fA-F]{2})\x{FDD0}([dD][c-fC-F][0-9a-fA-F]{2})`)

// json returns the document as JSON. As for kubectl, a document that is JSON is read as JSON also in a YAML file.
//
// Escapes of surrogates are marked with U+FDD0, which is no character: as \uFDD0d83d. Where a quoted text has the
// mark they are escapes, and where \uFDD0 remains the text is not quoted, and has a backslash.
func (d *document) json() (plain []byte, err error) {
	text := surrogate.ReplaceAll(d.text, []byte(`\uFDD0$1`))
	if json.Valid(text) && utf8.Valid(text) && bytes.HasPrefix(bytes.TrimSpace(text), []byte("{")) {
		var content any
		strict, err := kjson.UnmarshalStrict(text, &content)
		if err = errors.Join(append(strict, err)...); err != nil {
			return nil, err
		}
		plain, err = json.Marshal(content)
		if err != nil {
			return nil, err
		}
	} else if plain, err = yaml.YAMLToJSONStrict(text); err != nil {
		return nil, err
	}
	if !surrogate.Match(d.text) {
		return plain, nil
	}
	plain = surrogatePair.ReplaceAllFunc(plain, func(pair []byte) []byte {
		m := surrogatePair.FindSubmatch(pair)
		high, _ := strconv.ParseUint(string(m[1]), 16, 16)
		low, _ := strconv.ParseUint(string(m[2]), 16, 16)
		return utf8.AppendRune(nil, utf16.DecodeRune(rune(high), rune(low)))
	})
	if _, rest, alone := bytes.Cut(plain, []byte("\uFDD0")); alone {
		half := []byte(`\u` + string(rest[:4]))
		before, _, _ := bytes.Cut(d.text, half)
		return nil, fmt.Errorf("line %d: %s is a half of a character: write both halves, or the character itself", 1+bytes.Count(before, newline), half)
	}
	return bytes.ReplaceAll(plain, []byte(`\uFDD0`), []byte(`\u`)), nil
}

func (p *parsed) document(d *document) {
	plain, err := d.json()
	if err != nil {
		p.unreadable, p.blank = true, false
		p.problems = append(p.problems, d.syntaxProblem(err))
		return
	}
	if string(plain) == "null" {
		return // The document has only comments.
	}
	p.blank = false
	var content map[string]any
	if err := utiljson.Unmarshal(plain, &content); err != nil {
		p.unreadable = true
		p.problems = append(p.problems, d.problem("", "", errors.New("a manifest must be an object with apiVersion, kind and metadata")))
		return
	}
	p.content(d, "", content)
}

// content reads the object at a path of a document, or the items of a List.
func (p *parsed) content(d *document, path string, content map[string]any) {
	apiVersion, _ := content["apiVersion"].(string)
	kind, _ := content["kind"].(string)
	if apiVersion == "v1" && kind == "List" {
		items, _ := content["items"].([]any)
		for i, item := range items {
			if content, ok := item.(map[string]any); ok {
				p.content(d, fmt.Sprintf("items[%d].", i), content)
			}
		}
		return
	}
	problem := func(object string, err error) {
		p.problems = append(p.problems, d.problem(path, object, err))
	}
	want := v1beta1.GroupVersion.String()
	of := kinds.All.ByName(kind)
	known := of != nil
	if hasValues(kind) {
		want, known = "v1", true
	}
	inGroup := strings.HasPrefix(apiVersion, v1beta1.GroupVersion.Group+"/")
	switch {
	case kind == "" || apiVersion == "":
		p.unreadable = true
		problem("", errors.New("apiVersion and kind must be set"))
		return
	case !known && inGroup:
		var metadata metav1.ObjectMeta
		object := kind
		if errs := readMetadata(content, &metadata); len(errs) > 0 {
			p.unreadable = true
		} else {
			named := id{kind, metadata.Namespace, metadata.Name}
			object, p.misspelt = named.String(), append(p.misspelt, named)
		}
		problem(object, fieldErrorf("kind", "%q is unknown in %s; use one of %s%s", kind, apiVersion, kinds.All, didYouMean(kind, strings.Split(kinds.All.String(), ", "))))
		return
	case !known || !hasValues(kind) && !inGroup:
		p.ignored = append(p.ignored, d.problem(path, apiVersion+" "+kind, errors.New("ignored: this is not a kind of posthorn.dev")))
		return
	}
	object := &object{id: id{kind: kind}, of: of}
	var metadata metav1.ObjectMeta
	errs, unpromised := readMetadata(content, &metadata), []string(nil)
	object.namespace, object.name = metadata.Namespace, metadata.Name
	switch {
	case len(errs) > 0:
	case apiVersion == replacedVersion:
		content["apiVersion"] = want
		errs, _ = object.readResource(content, &metadata)
		errs = append([]error{fieldErrorf("apiVersion", "%s was replaced by %s; change it, and the fields that %s does not have", apiVersion, want, want)}, errs...)
	case apiVersion != want:
		errs = append(errs, fieldErrorf("apiVersion", "%q is unknown for this kind; use %s", apiVersion, want))
	case hasValues(kind):
		errs = object.readValues(content, &metadata)
	default:
		errs, unpromised = object.readResource(content, &metadata)
	}
	if len(errs) == 0 {
		var err error
		if object.manifest, err = json.Marshal(content); err == nil {
			object.line, object.document, object.path = d.begin(), d.number, path
			p.objects = append(p.objects, object)
			for _, field := range unpromised {
				p.warnings = append(p.warnings, d.problem(path, object.String(), fieldErrorf(field, "experimental: the field can change or be removed in a minor release")))
			}
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
		return []error{fieldErrorf("metadata", "must be set, with a name")}
	}
	if raw["namespace"] == nil || raw["namespace"] == "" {
		raw["namespace"] = DefaultNamespace
	}
	for _, name := range []string{"name", "namespace"} {
		if _, ok := raw[name].(string); !ok && raw[name] != nil { // YAML parses y, no and 5 as other types.
			return []error{fieldErrorf("metadata."+name, "must be a string; put it in quotes")}
		}
	}
	// Remove the fields that the API server sets and `kubectl get -o yaml` prints.
	for _, field := range []string{"creationTimestamp", "deletionTimestamp", "generation", "managedFields", "resourceVersion",
		"selfLink", "uid"} {
		delete(raw, field)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(raw, metadata, true); err != nil {
		metadata.Name, _ = raw["name"].(string)
		metadata.Namespace, _ = raw["namespace"].(string)
		return []error{fieldErrorf("metadata", "%w", err)}
	}
	if metadata.Name == "" {
		return []error{fieldErrorf("metadata.name", "must be set")}
	}
	return nil
}

// readResource reads an object of a kind of posthorn.dev. unpromised are its experimental fields.
func (o *object) readResource(content map[string]any, metadata *metav1.ObjectMeta) (errs []error, unpromised []string) {
	crds, err := definitions()
	if err != nil {
		return []error{err}, nil
	}
	unpromised = experimental("", content, crds[o.kind].structural)
	if errs := crds[o.kind].admit(content, metadata); len(errs) > 0 {
		return errs, nil
	}
	o.resource = o.of.New()
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(content, o.resource); err != nil {
		return []error{err}, nil
	}
	if err := o.hash(content["spec"]); err != nil {
		return []error{err}, nil
	}
	return nil, unpromised
}

// hash sets the hash of the object's content.
func (o *object) hash(content any) error {
	text, err := json.Marshal(content)
	o.content = sha256.Sum256(text)
	return err
}

// hasValues reports whether a kind has values that objects refer to: Secret and ConfigMap.
func hasValues(kind string) bool { return kind == kindSecret || kind == kindConfigMap }

// valueFields are the fields of a Secret and of a ConfigMap with values in base64 and in plain text.
var valueFields = map[string]struct{ base64, plain string }{kindSecret: {"data", "stringData"}, kindConfigMap: {"binaryData", "data"}}

// readValues reads a Secret or a ConfigMap. It does not use the generic decoder, whose errors can contain
// values.
func (o *object) readValues(content map[string]any, metadata *metav1.ObjectMeta) (errs []error) {
	for _, err := range apivalidation.ValidateObjectMeta(metadata, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata")) {
		errs = append(errs, withoutValue(err))
	}
	own := valueFields[o.kind]
	fields := []string{"apiVersion", "kind", "metadata", own.base64, own.plain, "immutable"}
	if o.kind == kindSecret {
		fields = append(fields, "type")
	}
	for name := range content {
		if !slices.Contains(fields, name) {
			errs = append(errs, unknownField(name, fields))
		}
	}
	o.values = map[string][]byte{}
	size := 0
	read := func(name string, decode func(string) ([]byte, error)) {
		values, ok := content[name].(map[string]any)
		if !ok && content[name] != nil {
			errs = append(errs, fieldErrorf(name, "must be a map of strings"))
		}
		for key, value := range values {
			text, ok := value.(string)
			if !ok && value != nil {
				errs = append(errs, fieldErrorf(fmt.Sprintf("%s[%s]", name, key), "must be a string; put it in quotes"))
				continue
			}
			decoded, err := decode(text)
			if err != nil {
				errs = append(errs, fieldErrorf(fmt.Sprintf("%s[%s]", name, key), "must be base64; use %s for plain text", own.plain))
			}
			for _, message := range utilvalidation.IsConfigMapKey(key) {
				errs = append(errs, fieldErrorf(fmt.Sprintf("%s[%s]", name, key), "%s", message))
			}
			size += len(decoded)
			o.values[key] = decoded
		}
	}
	read(own.base64, base64.StdEncoding.DecodeString)
	read(own.plain, func(text string) ([]byte, error) { return []byte(text), nil })
	if size > corev1.MaxSecretSize {
		errs = append(errs, fieldErrorf("data", "must have at most %d bytes in total", corev1.MaxSecretSize))
	}
	if content["type"] == string(corev1.SecretTypeTLS) {
		for _, key := range []string{corev1.TLSCertKey, corev1.TLSPrivateKeyKey} {
			if _, ok := o.values[key]; !ok {
				errs = append(errs, fieldErrorf(fmt.Sprintf("data[%s]", key), "must be set in a Secret of type %s", corev1.SecretTypeTLS))
			}
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	if err := o.hash(o.values); err != nil {
		errs = append(errs, err)
	}
	return errs
}
