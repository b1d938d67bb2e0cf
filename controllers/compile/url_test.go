package compile

import (
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/check"
)

// An invalid percent-encoding is named as such, in the path and in the query alike.
func TestPercentEncodingOfURLs(t *testing.T) {
	for _, part := range []string{"/a%zz", "/%", "/%4", "/%4/b", "/%%20", "/?q=%zz", "/?q=%", "/?q=a%2", "/?a=%20&b=%2g", "/é%2é", "/a%\n0"} {
		_, broken := checkURL("https://hooks.example" + part)
		if !strings.Contains(broken, "has a % that no two hexadecimal digits follow; write %25 for a percent sign") {
			t.Errorf("%q: got %q", part, broken)
		}
	}
	for _, text := range []string{"https://hooks.example/a%2Fb/%20?x=%2B&y=a+b&z=é%C3%a9", "https://hooks.example/100%25"} {
		_, broken := checkURL(text)
		check.Equal(t, text, broken, "")
	}
	for _, text := range []string{"hooks.example/%20", "ftp://hooks.example/"} {
		if _, broken := checkURL(text); !strings.Contains(broken, "starts with http://") {
			t.Errorf("%q: got %q", text, broken)
		}
	}
}
