// Package admin serves the admin API of a running dispatcher: health, metrics, the report for the
// controllers, dead letters and attempts.
package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/internal/termsafe"
)

// Options are the parts of the dispatcher that the admin server shows.
type Options struct {
	// Changes returns what changed since the cursor of a report, or nil.
	Changes func(cursor string) *adminapi.Report
	// Metrics serves /metrics.
	Metrics http.Handler
	Engine  *delivery.Engine
	// Gate is the way into the queue of Store.
	Gate  *admission.Gate
	Store redelivery.Store
	// Trace finds messages.
	Trace TraceStore
	// Ready returns why the dispatcher is not ready, or nil.
	Ready func() error
	// View, when not nil, enables /debug; it returns the view in effect, or nil before the first
	// config.
	View func() *liveconfig.View
	// Replication returns the part in a replicated log; nil if there is none.
	Replication func() *adminapi.ReplicationState
	// Backup writes a backup of the data directory until ctx is done.
	Backup func(ctx context.Context, w io.Writer) error
	// BackupToken authorizes the requests for backups if there is no Guard.
	BackupToken BackupToken
	// Extra serves every other path; may be nil.
	Extra http.Handler
	// Guard admits only authorized callers; it protects all paths but /healthz and /readyz. Without
	// a guard every caller is admitted: bind the server to an address that only trusted clients can
	// reach.
	Guard func(http.Handler) http.Handler
	// Audit gets the audit log; nil is slog.Default.
	Audit *slog.Logger
}

// NewHandler makes the handler of the admin API.
func NewHandler(o Options) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", o.Metrics)
	mux.HandleFunc("GET /report", func(w http.ResponseWriter, r *http.Request) {
		writeChanges(w, o.Changes(r.URL.Query().Get(adminapi.ReportCursor)))
	})
	mux.HandleFunc("GET /unknownkeys", func(w http.ResponseWriter, _ *http.Request) {
		writeLines(w, o.Gate.UnknownKeys.List(o.Gate.Now()))
	})
	letters{o, audit{cmp.Or(o.Audit, slog.Default())}, make(chan struct{}, maxBodyTails)}.mount(mux)
	mountSlots(mux, o.Replication)
	mountTrace(mux, o.Trace, o.Engine)
	mountBackup(mux, o)
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
	root.HandleFunc("/v1/", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "this is the admin address; send calls to the address of the tracking API (--listen)", http.StatusNotFound)
	})
	root.Handle("/", NotFromPages(guarded, o.Guard != nil))
	return root
}

// mountSlots adds GET /slots.
func mountSlots(mux *http.ServeMux, state func() *adminapi.ReplicationState) {
	mux.HandleFunc("GET /slots", func(w http.ResponseWriter, _ *http.Request) {
		s := (*adminapi.ReplicationState)(nil)
		if state != nil {
			s = state()
		}
		if s == nil {
			http.Error(w, "the log of this process is in its data directory", http.StatusNotFound)
			return
		}
		writeJSON(w, []*adminapi.ReplicationState{s})
	})
}

// NewProbeServer makes a server of only the answers of MountHealth.
func NewProbeServer(ready func() error) *http.Server {
	mux := http.NewServeMux()
	MountHealth(mux, ready)
	return NewServer(mux)
}

// NewServer makes a server of h with the limits of the admin listener.
func NewServer(h http.Handler) *http.Server {
	return &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: 16 << 10}
}

// NotFromPages rejects the requests of web pages. A page could otherwise make a browser act, start
// expensive reads whose response it does not see (cross-site requests), or read (a name that an
// attacker's DNS resolves to the admin address). Reads are possible only without a guard: with
// one, a request needs a token, which a browser does not add. A link of another site may open the
// status page, which has its own checks.
func NotFromPages(next http.Handler, guarded bool) http.Handler {
	sameSite := http.NewCrossOriginProtection().Handler(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !guarded && !namesAddress(r.Host) {
			http.Error(w, fmt.Sprintf("the Host header is %q; use localhost or an IP address in the URL", r.Host), http.StatusForbidden)
			return
		}
		if !guarded && r.Header.Get("Sec-Fetch-Site") == "cross-site" && !isStatusPage(r.URL.Path) {
			http.Error(w, "requests of other sites are rejected", http.StatusForbidden)
			return
		}
		sameSite.ServeHTTP(w, r)
	})
}

func isStatusPage(path string) bool { return path == "/" || strings.HasPrefix(path, "/page/") }

// namesAddress reports whether a Host header holds an IP address or localhost.
func namesAddress(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.EqualFold(strings.TrimSuffix(host, "."), "localhost") || net.ParseIP(strings.Trim(host, "[]")) != nil
}

// writeChanges answers 304 if there are none, which is the usual case of an idle pod.
func writeChanges(w http.ResponseWriter, report *adminapi.Report) {
	if report == nil {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	body, err := json.Marshal(report)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set(contentType, "application/json")
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

const contentType = "Content-Type"

// newEncoder makes an encoder for output that may be shown in a terminal: event names, messageIds
// and receivers' responses are external text.
func newEncoder(w io.Writer) *json.Encoder { return json.NewEncoder(termsafe.NewWriter(w)) }

// writeJSON answers with a value.
func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set(contentType, "application/json")
	_ = newEncoder(w).Encode(v)
}

// newLines makes the encoder of an answer of lines of JSON.
func newLines(w http.ResponseWriter) *json.Encoder {
	w.Header().Set(contentType, "application/x-ndjson")
	return newEncoder(w)
}

// writeLines answers with a line of JSON for each value.
func writeLines[T any](w http.ResponseWriter, values []T) {
	out := newLines(w)
	for _, v := range values {
		_ = out.Encode(v)
	}
}

// stream begins an answer of lines of JSON that may last longer than the server's timeouts. send adds a line.
func stream(w http.ResponseWriter) (send func(v any) error) {
	out, control := newLines(w), http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{})
	_ = control.Flush()
	return func(v any) error {
		err := out.Encode(v)
		_ = control.Flush()
		return err
	}
}
