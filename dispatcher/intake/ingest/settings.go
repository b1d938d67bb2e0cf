package ingest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"regexp"
	"strings"

	"github.com/posthorn/posthorn/dispatcher/intake/admission"
)

// The vendor's browser and mobile libraries load a settings document from their CDN before they
// send: it has the host of the tracking API. A library that does not get the document sends to the
// vendor's host instead.

const (
	settingsMethods = "GET, HEAD, OPTIONS"
	// settingsMaxAge lets browsers and caches keep the document for five minutes.
	settingsMaxAge = "max-age=300"
	noStore        = "no-store"
)

// settingsKey returns the write key in the path of a settings document. The mobile libraries add
// /projects/… to a configured address, the browser library /v1/projects/….
func settingsKey(path string) (key string, ok bool) {
	rest, ok := strings.CutPrefix(strings.TrimPrefix(path, "/v1"), "/projects/")
	if !ok {
		return "", false
	}
	key, ok = strings.CutSuffix(rest, "/settings")
	return key, ok && key != "" && !strings.Contains(key, "/")
}

// settings answers a request for the settings document of a write key. It stores nothing, and never
// reads a body.
func (h *Handler) settings(w http.ResponseWriter, r *http.Request, key string) {
	header := w.Header()
	header.Set("Cache-Control", noStore)
	header.Add("Vary", "Origin") // Always: a cache may keep the answer to a request without Origin.
	if r.ContentLength != 0 {
		header.Set("Connection", "close") // Closing is cheaper than reading the body.
	}
	q := request{Request: r, view: h.Gate.View(), source: h.Gate.Unidentified, origin: r.Header.Get("Origin")}
	h.exposeToKnownOrigin(header, &q)
	if isCut(r) {
		h.refuseHead(w, &q, h.Gate.Now())
		return
	}
	switch r.Method {
	case http.MethodOptions:
		h.preflight(w, &q, settingsMethods)
	case http.MethodGet, http.MethodHead:
		body, bad := h.settingsDocument(w, &q, key)
		if bad != nil {
			h.answer(w, bad)
			return
		}
		if h.PublicHost != "" {
			header.Set("Cache-Control", settingsMaxAge)
		}
		header[headerContentType] = jsonHeader
		_, _ = w.Write(body)
	default:
		header.Set("Allow", settingsMethods)
		h.answer(w, admission.Refuse(http.StatusMethodNotAllowed, admission.CodeMethod, "use GET to load the settings"))
	}
}

// settingsDocument returns the document, or the refusal of a write key that is certainly unknown.
// It needs nothing of the Source: a client whose Source is suspended, not loaded yet or just removed
// gets the document, too, because it would send its calls to the vendor otherwise.
func (h *Handler) settingsDocument(w http.ResponseWriter, q *request, key string) ([]byte, *admission.Refusal) {
	if q.view != nil {
		ref, source, bad := h.Gate.Authenticate(q.view, key)
		switch {
		case bad == nil:
			q.source, q.ref = source, ref
			if bad := allowPage(w, q); bad != nil {
				return nil, bad
			}
		case bad.Code == admission.CodeUnknownKey:
			h.Gate.UnknownKeys.Add(key, clientText(h.clientIP(q.Request)), h.Gate.Now())
			return nil, bad
		}
	}
	host, protocol := h.PublicHost, ""
	if host == "" {
		if host = q.Host; CheckPublicHost(host) != nil {
			return nil, admission.Refuse(http.StatusBadRequest, codeInvalidHost, "the Host header is missing or not a host name with an optional port")
		}
		if q.TLS == nil && isLoopback(host) {
			protocol = "http"
		}
	}
	type integration struct {
		APIKey   string `json:"apiKey"`
		APIHost  string `json:"apiHost"`
		Protocol string `json:"protocol,omitempty"` // The browser library uses https without it.
	}
	var document struct {
		Integrations map[string]integration `json:"integrations"`
		Plan         struct{}               `json:"plan"`
		// The libraries report their own metrics to the vendor unless the rate is 0.
		Metrics struct {
			SampleRate float64 `json:"sampleRate"`
		} `json:"metrics"`
	}
	document.Integrations = map[string]integration{"Segment.io": {APIKey: key, APIHost: host + "/v1", Protocol: protocol}}
	body, _ := json.Marshal(document) // Texts and numbers always marshal.
	return append(body, '\n'), nil
}

// publicHost is the form of a host that every library accepts in apiHost.
var publicHost = regexp.MustCompile(`^([a-zA-Z0-9][a-zA-Z0-9._-]{0,252}|\[[0-9a-fA-F:.]{2,45}\])(:[0-9]{1,5})?$`)

// CheckPublicHost reports whether a text is a host with an optional port.
func CheckPublicHost(host string) error {
	if !publicHost.MatchString(host) {
		return fmt.Errorf("%q is not a host name with an optional port (track.example, track.example:8443)", host)
	}
	return nil
}

// isLoopback reports whether a host, with or without a port, is this machine.
func isLoopback(host string) bool {
	if i := strings.LastIndexByte(host, ':'); i > strings.LastIndexByte(host, ']') {
		host = host[:i]
	}
	addr, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return strings.EqualFold(host, "localhost") || err == nil && addr.IsLoopback()
}

// exposeToKnownOrigin lets a page read the answer if some Source allows its origin, until the Source
// of the request is known.
func (h *Handler) exposeToKnownOrigin(header http.Header, q *request) {
	if q.origin != "" && q.view != nil && h.originsOf(q.view).allow(q.origin) {
		exposeTo(header, q.origin)
	}
}

// allowPage checks that the Source of a request accepts calls from the request's origin.
func allowPage(w http.ResponseWriter, q *request) *admission.Refusal {
	if q.origin == "" {
		return nil
	}
	if !allowsOrigin(q.ref.Source, q.origin) && !sameOrigin(q.Request, q.origin) {
		w.Header().Del(headerAllowedOrigin)
		return admission.Refuse(http.StatusForbidden, codeOriginDenied, "the Source does not accept calls from this page's origin; add the origin to spec.allowedOrigins")
	}
	exposeTo(w.Header(), q.origin)
	return nil
}
