package ingest

import (
	"net/http"
	"path"
	"regexp"
	"strings"

	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/listen"
)

const (
	// maxHead bounds the request line and the headers. The cookies of a site arrive with the calls of its pages.
	maxHead = 64 << 10
	// maxReadHead bounds the heads that are rejected with headTooLarge. The server closes the connection of a
	// larger one.
	maxReadHead = 256 << 10
	// maxKeptHeader bounds the headers that remain of a head that is too large.
	maxKeptHeader = 4 << 10
	// cutHeader marks a request whose head was too large, also for the owner of the slot. A client that sends it
	// has its own request rejected.
	cutHeader = "Posthorn-Head-Too-Large"
)

var (
	unknownPath  = admission.Refuse(http.StatusNotFound, admission.CodeNotFound, "unknown path; send calls to /v1/identify, /v1/track, /v1/page, /v1/screen, /v1/group, /v1/alias, /v1/batch or /v1/import, and load settings from /v1/projects/WRITE_KEY/settings")
	headTooLarge = admission.Refuse(http.StatusRequestHeaderFieldsTooLarge, codeHeadTooLarge, "the request line and the headers have more than 65536 bytes; send shorter headers, and fewer cookies to this host")

	emptySegments = regexp.MustCompile("//+")
)

// Normalize returns the handler of clients' requests.
//
// It removes the empty segments of paths, which a host setting that ends with a slash causes, and rejects dot
// segments: a ServeMux would redirect both, and browsers reject a preflight that is redirected. It removes cookies,
// which nothing reads, and all of a head that is too large but what identifies the Source, which counts the calls.
func Normalize(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p := r.URL.Path; !strings.HasPrefix(p, "/") || strings.Contains(p, "//") {
			r.URL.Path, r.URL.RawPath = emptySegments.ReplaceAllString("/"+p, "/"), ""
		}
		if p := r.URL.Path; strings.Contains(p, "/.") && path.Clean(p) != strings.TrimSuffix(p, "/") {
			unknownPath.Write(w)
			return
		}
		if listen.HeadBytes(r) > maxHead {
			p := strings.TrimSuffix(r.URL.Path, "/")
			_, isCall := typeOf(p)
			if _, ok := settingsKey(p); !ok && !isCall || len(p) > maxKeptHeader {
				headTooLarge.Write(w)
				return
			}
			kept := http.Header{cutHeader: {"1"}}
			for _, name := range []string{"Authorization", "Content-Encoding", headerContentType, "Origin"} {
				if value := r.Header.Get(name); value != "" && len(value) <= maxKeptHeader {
					kept.Set(name, value)
				}
			}
			r.Header, r.URL.RawQuery = kept, ""
		}
		delete(r.Header, "Cookie")
		next.ServeHTTP(w, r)
	})
}

// isCut reports whether the head of a request was too large.
func isCut(r *http.Request) bool { return r.Header[cutHeader] != nil }
