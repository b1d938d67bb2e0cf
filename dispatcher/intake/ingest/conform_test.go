package ingest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/legacy"
)

// contract is the served document, validated, with a router from a request to its operation.
var contract = sync.OnceValue(func() (c struct {
	document *openapi3.T
	router   routers.Router
}) {
	var err error
	if c.document, err = openapi3.NewLoader().LoadFromData(openAPI); err == nil {
		c.router, err = legacy.NewRouter(c.document, openapi3.EnableExamplesValidation(), openapi3.EnableSchemaFormatValidation(),
			openapi3.EnableMultiError())
	}
	if err != nil {
		panic("openapi.yaml: " + err.Error())
	}
	return c
})

// conforms returns the deviations of an exchange from the document: of the response, and of the
// request if the server accepted it.
func conforms(r *http.Request, sent []byte, w *httptest.ResponseRecorder) error {
	route, params, err := contract().router.FindRoute(r)
	if err != nil {
		return nil // Paths and methods that are not documented.
	}
	r = r.Clone(r.Context())
	r.Body = io.NopCloser(bytes.NewReader(sent))
	input := &openapi3filter.RequestValidationInput{
		Request: r, Route: route, PathParams: params,
		Options: &openapi3filter.Options{AuthenticationFunc: openapi3filter.NoopAuthenticationFunc, IncludeResponseStatus: true},
	}
	answer := &openapi3filter.ResponseValidationInput{RequestValidationInput: input, Status: w.Code, Header: w.Header(),
		Options: input.Options}
	if err := openapi3filter.ValidateResponse(r.Context(), answer.SetBodyBytes(w.Body.Bytes())); err != nil {
		return fmt.Errorf("the answer %d %s: %w", w.Code, w.Body, err)
	}
	media, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if route.Operation.RequestBody == nil {
		return nil
	}
	_, documented := route.Operation.RequestBody.Value.Content[media]
	if w.Code != http.StatusOK || strings.Contains(w.Body.String(), "rejected") || !documented || r.Header.Get("Content-Encoding") != "" {
		return nil
	}
	if err := openapi3filter.ValidateRequest(r.Context(), input); err != nil {
		return fmt.Errorf("the request %.200s was taken: %w", sent, err)
	}
	return nil
}

// Tools that read the document have requirements beyond its validity.
func TestOpenAPILint(t *testing.T) {
	d := contract().document
	if d.Info.Description == "" || d.Info.License == nil || len(d.Servers) == 0 {
		t.Error("info and servers are not complete")
	}
	for path, item := range d.Paths.Map() {
		if strings.HasSuffix(path, "/") || strings.Contains(path, "?") {
			t.Errorf("%s: a path has no slash at its end and no query", path)
		}
		for method, op := range item.Operations() {
			name := method + " " + path
			if op.OperationID == "" || op.Summary == "" {
				t.Errorf("%s: operationId or summary is missing", name)
			}
			if len(op.Tags) == 0 || slices.ContainsFunc(op.Tags, func(tag string) bool { return d.Tags.Get(tag) == nil }) {
				t.Errorf("%s: no tags, or one that is not declared: %v", name, op.Tags)
			}
			if op.Responses.Status(http.StatusOK) == nil || op.Responses.Status(http.StatusBadRequest) == nil || op.Responses.Default() != nil {
				t.Errorf("%s: the document must list responses by status", name)
			}
			for status, r := range op.Responses.Map() {
				if r.Value.Description == nil || len(r.Value.Content) == 0 {
					t.Errorf("%s: %s has no description or no content", name, status)
				}
			}
		}
	}
	for name, schema := range d.Components.Schemas {
		if !bytes.Contains(openAPI, []byte(`"#/components/schemas/`+name+`"`)) {
			t.Errorf("schema %s is used nowhere", name)
		}
		for property, s := range schema.Value.Properties {
			if s.Ref == "" && s.Value.Type == nil && s.Value.AllOf == nil {
				t.Errorf("schema %s: %s has no type", name, property)
			}
		}
	}
}

// Accepted forms other than the plain one are part of the document: do checks it.
func TestDocumentedForms(t *testing.T) {
	for name, r := range map[string]*http.Request{
		"numbers":                                post("/v1/track", "web-key", `{"userId":1,"anonymousId":2.5,"event":3,"timestamp":1700000000,"sentAt":1700000000000}`),
		"null":                                   post("/v1/track", "web-key", `{"userId":"u","anonymousId":null,"event":"E","properties":null,"context":null,"integrations":null,"timestamp":null}`),
		"a beacon":                               post("/v1/batch", "", `{"writeKey":"web-key","batch":[{"type":"group","userId":1,"groupId":2}]}`, "Content-Type", "text/plain;charset=UTF-8"),
		"old times":                              post("/v1/import", "web-key", `{"batch":[{"type":"page","userId":"u","timestamp":"2012-12-12T19:11:01+0000"}]}`),
		"other types of values in what is yours": post("/v1/identify", "web-key", `{"userId":"u","traits":{"a":[1,null,{"b":true}]},"more":[]}`),
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			if w := f.do(r); w.Code != http.StatusOK || len(f.stored) != 1 {
				t.Errorf("%d %s", w.Code, w.Body)
			}
		})
	}
}

// The document allows the requests of third-party clients.
func TestClientsConformToOpenAPI(t *testing.T) {
	files, err := filepath.Glob("../../../test/compat/testdata/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal("no recordings", err)
	}
	checked := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var recording struct {
			Requests []struct {
				Method, Path, Body string
				Headers            map[string]string
			}
		}
		if err := json.Unmarshal(text, &recording); err != nil {
			t.Fatal(err)
		}
		for _, q := range recording.Requests {
			if _, documented := paths[q.Path]; q.Method != http.MethodPost || !documented {
				continue
			}
			r := post(q.Path, "", q.Body, "Content-Type", q.Headers["Content-Type"])
			w := httptest.NewRecorder()
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.WriteString(`{"success":true}`)
			if err := conforms(r, []byte(q.Body), w); err != nil {
				t.Errorf("%s: %v", file, err)
			}
			checked++
		}
	}
	if checked == 0 {
		t.Error("nothing was checked")
	}
}
