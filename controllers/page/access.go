package page

import (
	"crypto/subtle"
	"net"
	"net/http"
	"sync/atomic"
)

// access admits one browser: it exchanges the key of a link for a cookie. The key is valid once,
// because it is visible in a terminal, in the history of the browser, and in the list of processes.
type access struct {
	key, session string
	used         atomic.Bool
}

// admit reports whether a request has the cookie. Otherwise it answers the request.
func (a *access) admit(w http.ResponseWriter, r *http.Request) bool {
	// All ports of a host share their cookies.
	_, port, _ := net.SplitHostPort(r.Host)
	name := "posthorn-page-" + port
	c, err := r.Cookie(name)
	known := err == nil && equal(c.Value, a.session)
	key := ""
	if r.Method == http.MethodGet && r.URL.Path == "/" {
		key = r.URL.Query().Get("key")
	}
	switch {
	case key == "" && known:
		return true
	case key != "" && (known || equal(key, a.key) && a.used.CompareAndSwap(false, true)):
		//nolint:gosec // plain HTTP on the loopback interface
		http.SetCookie(w, &http.Cookie{Name: name, Value: a.session, Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode})
		http.Redirect(w, r, "/", http.StatusSeeOther)
	case key != "":
		http.Error(w, "this link is not valid, or another browser has opened it; end the command and run it again", http.StatusForbidden)
	default:
		http.Error(w, "open the link that the command printed", http.StatusForbidden)
	}
	return false
}

func equal(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
