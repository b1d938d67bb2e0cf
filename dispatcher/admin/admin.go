// Package admin serves the admin API of a running dispatcher: health, metrics, the report for the
// controllers, dead letters and attempts.
package admin

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/redelivery"
)

// Options are the parts of the dispatcher that the admin server shows.
type Options struct {
	Report   func() adminapi.Report
	Gatherer prometheus.Gatherer
	Engine   *delivery.Engine
	Store    redelivery.Store
	// Ready returns why the dispatcher is not ready, or nil.
	Ready func() error
	// View, when not nil, enables /debug; it returns the view in effect, or nil before the first
	// config.
	View func() *liveconfig.View
	// Extra serves every other path; may be nil.
	Extra http.Handler
	// Guard admits only authorized callers; it protects all paths but /healthz and /readyz. Without
	// a guard every caller is admitted: bind the server to an address that only trusted clients can
	// reach.
	Guard func(http.Handler) http.Handler
}

// NewServer makes the admin server.
func NewServer(o Options) *http.Server {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.Gatherer, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /report", func(w http.ResponseWriter, r *http.Request) { writeReport(w, r, o.Report()) })
	mountDeadLetters(mux, o.Store, o.Engine)
	if o.View != nil {
		mountDebug(mux, o.Engine, o.View)
	} else {
		mux.HandleFunc("/debug/", func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "disabled; start Posthorn with --debug", http.StatusNotFound)
		})
	}
	if o.Extra != nil {
		mux.Handle("/", o.Extra)
	}
	guarded := http.Handler(mux)
	if o.Guard != nil {
		guarded = o.Guard(mux)
	}
	root := http.NewServeMux()
	MountHealth(root, o.Ready)
	root.Handle("/", notFromPages(guarded, o.Guard != nil))
	return &http.Server{Handler: root, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10}
}

// notFromPages refuses the requests of web pages. A page could otherwise make a browser act
// (cross-site requests) or read (a name that an attacker's DNS resolves to the admin address).
// Reads are possible only without a guard: with one, a request needs a token, which a browser does
// not add.
func notFromPages(next http.Handler, guarded bool) http.Handler {
	sameSite := http.NewCrossOriginProtection().Handler(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !guarded && !namesAddress(r.Host) {
			http.Error(w, fmt.Sprintf("the Host header is %q; use localhost or an IP address in the URL", r.Host), http.StatusForbidden)
			return
		}
		sameSite.ServeHTTP(w, r)
	})
}

// namesAddress reports whether a Host header holds an IP address or localhost.
func namesAddress(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.EqualFold(strings.TrimSuffix(host, "."), "localhost") || net.ParseIP(strings.Trim(host, "[]")) != nil
}

// writeReport answers 304 if the client already has this report, which is the usual case of an idle
// pod.
func writeReport(w http.ResponseWriter, r *http.Request, report adminapi.Report) {
	// The free space of a shared disk changes all the time; it must not change the report of an
	// idle pod.
	const grain = 64 << 20
	report.Storage.FreeBytes -= report.Storage.FreeBytes % grain
	report.Storage.UsedBytes -= report.Storage.UsedBytes % (1 << 20)
	body, err := json.Marshal(report)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	sum := sha256.Sum256(body)
	etag := `"` + hex.EncodeToString(sum[:16]) + `"`
	w.Header().Set("ETag", etag)
	if r.Header.Get("If-None-Match") == etag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body)
}

// MountHealth adds GET /healthz (the process runs) and GET /readyz (calls are accepted); a pod that
// is not ready answers 503 with the reason.
func MountHealth(mux *http.ServeMux, ready func() error) {
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	})
}
