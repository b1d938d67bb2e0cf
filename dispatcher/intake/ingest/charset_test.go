package ingest

import (
	"strings"
	"testing"
)

// A body that is declared as Latin-1 is converted, unless it is UTF-8. Without the declaration its bytes are replaced.
func TestCharset(t *testing.T) {
	const utf8Body = "{\"userId\":\"Zo\u00eb\",\"event\":\"caf\u00e9 5 \u20ac\"}"
	const latin1Body = "{\"userId\":\"Zo\xeb\",\"event\":\"caf\xe9 5 \x80\"}"
	const noID = "{\"userId\":\"u\",\"event\":\"caf\xe9\"}"
	for _, c := range []struct {
		name, contentType, body string
		status                  int
		want                    string // in the stored message
	}{
		{"Latin-1", "application/json; charset=iso-8859-1", latin1Body, 200, "\"userId\":\"Zo\u00eb\",\"event\":\"caf\u00e9 5 \u20ac\""},
		{"Latin-1, quoted", "Application/JSON; Charset=\"ISO-8859-1\"; x=y", latin1Body, 200, "caf\u00e9 5 \u20ac"},
		{"Windows-1252, compressed", "text/plain;charset=Windows-1252", zip(latin1Body), 200, "caf\u00e9 5 \u20ac"},
		{"UTF-8 that is declared as Latin-1", "application/json; charset=ISO-8859-1", utf8Body, 200, "caf\u00e9 5 \u20ac"},
		{"Latin-1 that is declared as UTF-8", "application/json; charset=utf-8", noID, 200, "caf\ufffd"},
		{"Latin-1 without a declaration", "application/json", noID, 200, "caf\ufffd"},
		{"an id in Latin-1 without a declaration", "application/json", latin1Body, 400, ""},
		{"too large after the conversion", "application/json; charset=iso-8859-1",
			strings.Replace(latin1Body, "caf", strings.Repeat("\xe9", 300_000), 1), 413, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t)
			w := f.serve(post("/v1/track", "web-key", c.body, "Content-Type", c.contentType))
			stored := ""
			if len(f.stored) > 0 {
				stored = string(f.stored[0].Body)
			}
			if w.Code != c.status || !strings.Contains(stored, c.want) || (stored == "") != (c.want == "") {
				t.Errorf("got %d, stored %q\nwant %d, %q in it", w.Code, stored, c.status, c.want)
			}
		})
	}
}
