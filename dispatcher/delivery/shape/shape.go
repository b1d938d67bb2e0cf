// Package shape makes the request for a message from a destination's config (spec.request). It is pure: a request depends on
// the message and the config only, so it is made again for every attempt and never stored. The main type is Shape.
package shape

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/expression"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
)

// Request is the request for a message, without the URL, the constant headers and those of an attempt.
type Request struct {
	egress.Line
	Headers []egress.Header
	Body    []byte
	// Omitted is true if the body is null: nothing is to be sent.
	Omitted bool
}

// Shape makes the requests of a destination. It is safe for concurrent use.
type Shape struct {
	line              egress.Line
	contentType       string
	body, path, query *expression.Transform
	headers           []header
}

type header struct {
	name  string
	value *expression.Transform
}

// New compiles a config; nil for nil. The error names the field.
func New(r *liveconfig.Request) (*Shape, error) {
	if r == nil {
		return nil, nil
	}
	s := &Shape{contentType: r.ContentType, line: egress.Line{Method: r.Method}}
	switch r.ContentType {
	case "":
	case liveconfig.ContentForm:
		s.line.ContentType = "application/x-www-form-urlencoded"
	case liveconfig.ContentText:
		s.line.ContentType = "text/plain; charset=utf-8"
	case liveconfig.ContentCloudEvents:
		s.line.ContentType = "application/cloudevents+json; charset=utf-8"
	default:
		return nil, fmt.Errorf("request.contentType: %q is unknown", r.ContentType)
	}
	for _, e := range []struct {
		field, text string
		into        **expression.Transform
	}{{"body", r.Body, &s.body}, {"path", r.Path, &s.path}, {"query", r.Query, &s.query}} {
		if e.text != "" {
			var err error
			if *e.into, err = expression.CompileTransform(e.text); err != nil {
				return nil, fmt.Errorf("request.%s: %w", e.field, err)
			}
		}
	}
	for _, h := range r.Headers {
		value, err := expression.CompileTransform(h.Expression)
		if err != nil {
			return nil, fmt.Errorf("request.headers[%s]: %w", h.Name, err)
		}
		s.headers = append(s.headers, header{h.Name, value})
	}
	return s, nil
}

// Message is what a request is made from.
type Message struct {
	// Source and Destination are "namespace/name".
	Source, Destination string
	Type                string
	// Body is the JSON object. LongNumbers marks one with numbers that event.FixedPoint would change.
	Body        []byte
	LongNumbers bool
}

// Request makes the request for a message. It neither changes nor keeps the body; without an expression for it, the body of the
// request is the same slice. The error has the field, the kind of failure, the position and the path there, and no data of the message.
func (s *Shape) Request(m Message) (r Request, err error) {
	if s == nil {
		return Request{Body: m.Body}, nil
	}
	body := m.Body
	if m.LongNumbers { // Expressions see them as texts, with all digits.
		if body, err = event.FixedPoint(m.Body); err != nil {
			return r, fmt.Errorf("the message is not JSON: %w", err) // cannot happen: accepted messages are JSON
		}
	}
	in := expression.NewInput(body, names(m.Source), names(m.Destination))
	r = Request{Line: s.line, Body: m.Body}
	if err := s.makeBody(&r, in); err != nil {
		return Request{}, fmt.Errorf("spec.request.body: %w", err)
	}
	if r.Omitted {
		if m.Type == string(event.Delete) {
			return Request{}, fmt.Errorf("spec.request.body: %w", &expression.Failure{Kind: expression.InvalidValue,
				Text: "the result is null for a notification of a deletion, which cannot be omitted; return a body for call.type == 'delete', or set spec.deletions to Ignore"})
		}
		return Request{Omitted: true}, nil
	}
	if err := s.makePath(&r, in); err != nil {
		return Request{}, fmt.Errorf("spec.request.path: %w", err)
	}
	if err := s.makeQuery(&r, in); err != nil {
		return Request{}, fmt.Errorf("spec.request.query: %w", err)
	}
	for _, h := range s.headers {
		if err := h.add(&r, in); err != nil {
			return Request{}, fmt.Errorf("spec.request.headers[%s]: %w", h.name, err)
		}
	}
	return r, nil
}

// names are the variables of a Source or destination.
func names(key string) map[string]string {
	namespace, name, _ := strings.Cut(key, "/")
	return map[string]string{"namespace": namespace, "name": name}
}

func (s *Shape) makeBody(r *Request, in *expression.Input) error {
	if s.body == nil {
		return nil
	}
	v, err := s.body.Eval(in)
	if err != nil {
		return err
	}
	switch r.Omitted = v.Null(); {
	case r.Omitted:
	case s.contentType == liveconfig.ContentForm:
		r.Body, err = v.Form()
	case s.contentType == liveconfig.ContentText:
		var text string
		if text, err = v.Text(); len(text) > expression.MaxResult {
			return &expression.Failure{Kind: expression.TooLarge, Text: fmt.Sprintf("the text is longer than %d bytes; shorten it", expression.MaxResult)}
		}
		r.Body = []byte(text)
	default:
		r.Body, err = v.JSON()
	}
	return err
}

// maxTarget bounds what is appended to a URL, in bytes.
const maxTarget = 8 << 10

// hidden are percent-encoded characters that a receiver could decode to a part of a path.
var hidden = regexp.MustCompile(`(?i)%(2e|2f|5c)`)

func (s *Shape) makePath(r *Request, in *expression.Input) error {
	if s.path == nil {
		return nil
	}
	v, err := s.path.Eval(in)
	if err != nil {
		return err
	}
	segments, err := v.Texts()
	if err != nil {
		return err
	}
	var path strings.Builder
	for i, segment := range segments {
		if rule := checkSegment(segment); rule != "" {
			return &expression.Failure{Kind: expression.InvalidValue, Place: fmt.Sprintf("result[%d]", i), Text: rule}
		}
		path.WriteString("/" + expression.PathSegment(segment))
		if path.Len() > maxTarget {
			return &expression.Failure{Kind: expression.TooLarge, Text: fmt.Sprintf("the path is longer than %d bytes; shorten it", maxTarget)}
		}
	}
	r.Path = path.String()
	return nil
}

// checkSegment returns the rule that a segment of a path violates, or "". Receivers and proxies could resolve such a segment to
// another path.
func checkSegment(text string) string {
	switch {
	case text == "":
		return "a segment of the path is empty, which makes //; leave it out"
	case text == "." || text == "..":
		return "a segment of the path is . or .., which leaves the path of the URL"
	case strings.ContainsAny(text, `/\`):
		return `a segment of the path contains / or \; write a segment for each part, or url.encode() it in the query`
	case hidden.MatchString(text):
		return "a segment of the path contains %2e, %2f or %5c, an encoded part of a path; give segments without encoding"
	}
	return ""
}

func (s *Shape) makeQuery(r *Request, in *expression.Input) error {
	if s.query == nil {
		return nil
	}
	v, err := s.query.Eval(in)
	if err != nil {
		return err
	}
	query, err := v.Form()
	if len(query) > maxTarget {
		return &expression.Failure{Kind: expression.TooLarge, Text: fmt.Sprintf("the query is longer than %d bytes; shorten it", maxTarget)}
	}
	r.Query = string(query)
	return err
}

// maxHeader bounds the value of a header, in bytes; headerValue is what a header can carry without a change.
const maxHeader = 4096

var headerValue = regexp.MustCompile(`^[ -~\t]*$`)

// add adds the header to a request; null leaves it out.
func (h *header) add(r *Request, in *expression.Input) error {
	v, err := h.value.Eval(in)
	if err != nil || v.Null() {
		return err
	}
	text, err := v.Text()
	switch {
	case err != nil:
		return err
	case len(text) > maxHeader || !headerValue.MatchString(text):
		return &expression.Failure{Kind: expression.InvalidValue, Text: "the value has a line break, a character outside of ASCII, or more than 4,096 characters; use url.encode() or base64.encode()"}
	}
	r.Headers = append(r.Headers, egress.Header{Name: h.name, Value: text})
	return nil
}
