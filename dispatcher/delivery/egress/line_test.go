package egress

import (
	"strings"
	"testing"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// A line changes the request line and the content type; scheme, host and the URL's own path remain.
func TestWith(t *testing.T) {
	for _, c := range []struct {
		url  string
		line Line
		want string
	}{
		{"http://a.test/in?k=1", Line{}, "POST /in?k=1 HTTP/1.1|application/json"},
		{"http://a.test/in?k=1", Line{Method: "PUT", Path: "/u/1", Query: "e=2"}, "PUT /in/u/1?k=1&e=2 HTTP/1.1|application/json"},
		{"http://a.test/in/", Line{Path: "/u"}, "POST /in/u HTTP/1.1|application/json"},
		{"http://a.test", Line{Path: "/u", Query: "e=2"}, "POST /u?e=2 HTTP/1.1|application/json"},
		{"http://a.test/in?", Line{Query: "e=2"}, "POST /in?e=2 HTTP/1.1|application/json"},
		{"http://a.test/in", Line{ContentType: "text/plain"}, "POST /in HTTP/1.1|text/plain"},
	} {
		e, err := prepare(liveconfig.Endpoint{Name: "a", URL: liveconfig.NewSecret(c.url),
			Headers: []liveconfig.Header{{Name: "X-K", Value: liveconfig.NewSecret("v")}}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		line, contentType, _ := strings.Cut(c.want, "|")
		want := line + "\r\nHost: a.test\r\nUser-Agent: " + userAgent + "\r\nContent-Type: " + contentType + "\r\nX-K: v\r\nContent-Length: 1\r\n\r\nb"
		if got := string(e.With(c.line).appendRequest(nil, "", "", nil, "", []byte("b"))); got != want {
			t.Errorf("%s with %+v: got\n%s\nwant\n%s", c.url, c.line, got, want)
		}
		if e.With(Line{}) != e {
			t.Error("the zero line changes the endpoint")
		}
	}
}
