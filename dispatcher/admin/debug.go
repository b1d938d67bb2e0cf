package admin

import (
	"net/http"
	"net/http/pprof"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery"
)

// mountDebug adds data for the diagnosis of the dispatcher itself:
//
//	GET /debug/config   a line of JSON for each namespace: the live config in effect, redacted
//	GET /debug/lanes    a line of JSON for each lane
//	GET /debug/pprof/   the Go runtime's profiles
func mountDebug(mux *http.ServeMux, engine *delivery.Engine, view func() *liveconfig.View) {
	mux.HandleFunc("GET /debug/config", func(w http.ResponseWriter, _ *http.Request) {
		out := newLines(w)
		current := view()
		if current == nil {
			return
		}
		for _, namespace := range current.Namespaces() {
			config, _ := current.Namespace(namespace)
			_ = out.Encode(struct {
				Revision string `json:"revision"`
				liveconfig.Config
			}{config.Revision, redacted(config.Config)})
		}
	})
	mux.HandleFunc("GET /debug/lanes", func(w http.ResponseWriter, _ *http.Request) {
		writeLines(w, engine.Lanes())
	})
	profile := http.NewServeMux()
	profile.HandleFunc("/debug/pprof/", pprof.Index)
	profile.HandleFunc("/debug/pprof/profile", pprof.Profile)
	profile.HandleFunc("/debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/", func(w http.ResponseWriter, r *http.Request) {
		// The server's read timeout would end a profile of 30 s.
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
		profile.ServeHTTP(w, r)
	})
}

// redacted returns a copy that is safe to show. Secrets redact themselves; the hash of a write key
// is shortened but comparable, and users are removed.
func redacted(c liveconfig.Config) liveconfig.Config {
	c.Sources, c.Deletions = slices.Clone(c.Sources), slices.Clone(c.Deletions)
	for i := range c.Sources {
		keys := slices.Clone(c.Sources[i].WriteKeySHA256)
		for j, key := range keys {
			keys[j] = strings.Clone(key[:min(8, len(key))]) + "..."
		}
		c.Sources[i].WriteKeySHA256 = keys
	}
	for i := range c.Deletions {
		c.Deletions[i].UserID = "[redacted]"
	}
	return c
}
