// Package page serves the status page: read-only HTML about the objects of posthorn.dev and the
// messages in the dispatchers. It reads the objects by the paths of a Kubernetes API server, which
// posthorn run serves, too, and everything else by contract/adminapi. It contains no message body
// and no secret. The main type is Page.
package page

import (
	"cmp"
	"context"
	"crypto/rand"
	"embed"
	"fmt"
	"html/template"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/why"
)

// Options are the sources of the data.
type Options struct {
	// Objects serves the objects: posthorn run, or an API server.
	Objects *adminapi.Client
	// Namespace limits the page to one namespace; "" shows all.
	Namespace string
	// ObjectsAge is how old the objects on a page may be; 0 is one second.
	ObjectsAge time.Duration
	// Dispatchers returns the admin APIs of all reachable dispatchers, by pod name, and the reason
	// why others are missing.
	Dispatchers func() (map[string]*adminapi.Client, error)
	// Key, if not "", is required from each browser: a link with the parameter "key" admits the
	// first browser that opens it, which gets a cookie.
	Key string
	// Standalone is true for posthorn run, which also serves the problems of its manifests.
	Standalone bool
	// Command is the prefix of the commands that the page shows, for example "posthorn".
	Command string
	// Version of the program.
	Version string
}

// Page is the handler of "/" and of the paths below Prefix.
type Page struct {
	options Options
	mux     *http.ServeMux
	started time.Time
	access  *access // nil without a key

	// owned has the pods of a replicated log that do not have one store of their own, with the slots
	// that they own; nil before the first reports.
	owned atomic.Pointer[map[string][]int]

	mu   sync.Mutex // guards what is below
	live state
	past history

	// letterReader admits one reader of dead letters at a time, because a read can return 10,000 of
	// each of 200 destinations. Its holder guards the last groups.
	letterReader chan struct{}
	lastGroups   groups
}

// Prefix of all paths of the page but "/".
const Prefix = "/page/"

//go:embed assets
var assets embed.FS

var templates = template.Must(template.New("").Funcs(functions).ParseFS(assets, "assets/*.html"))

// New makes a page. Without Run it has no past.
func New(o Options) *Page {
	p := &Page{options: o, mux: http.NewServeMux(), started: time.Now(), past: newHistory(), letterReader: make(chan struct{}, 1)}
	if o.Key != "" {
		p.access = &access{key: o.Key, session: rand.Text()}
	}
	p.options.ObjectsAge = cmp.Or(o.ObjectsAge, freshness)
	p.mux.HandleFunc("GET /{$}", p.overview)
	p.mux.HandleFunc("GET "+Prefix+"destination/{namespace}/{name}", p.destination)
	p.mux.HandleFunc("GET "+Prefix+"deadletters", p.deadLetters)
	p.mux.HandleFunc("GET "+Prefix+"search", p.search)
	p.mux.HandleFunc("GET "+Prefix+"tail", p.tail)
	for _, name := range []string{"style.css", "refresh.js"} {
		p.mux.HandleFunc("GET "+Prefix+name, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Cache-Control", "no-cache")
			http.ServeFileFS(w, r, assets, "assets/"+name)
		})
	}
	return p
}

// policy admits the page's own files only: no inline script, no inline style, no frame, no other
// host.
const policy = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"

// ServeHTTP answers callers of this machine only, because the page needs no token. With a key it
// answers one browser.
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	if reason := denied(r); reason != "" {
		http.Error(w, reason, http.StatusForbidden)
		return
	}
	if p.access != nil && !p.access.admit(w, r) {
		return
	}
	p.mux.ServeHTTP(w, r)
}

// denied returns why a request is rejected, or "". The Host header must name this machine, so that
// no name that an attacker's DNS resolves to it reaches the page.
func denied(r *http.Request) string {
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	if !strings.EqualFold(host, "localhost") && !loopback(strings.Trim(host, "[]")) {
		return fmt.Sprintf("the Host header is %q; open the status page as localhost or 127.0.0.1", r.Host)
	}
	remote, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil || !loopback(remote) {
		return "the status page is served to this machine only; forward a port, for example with ssh -L 8081:127.0.0.1:8081"
	}
	if site := r.Header.Get("Sec-Fetch-Site"); site == "cross-site" && r.Header.Get("Sec-Fetch-Mode") != "navigate" {
		return "requests of other sites are rejected"
	}
	return ""
}

func loopback(address string) bool {
	a, err := netip.ParseAddr(address)
	return err == nil && a.Unmap().IsLoopback()
}

// frame is what each template gets.
type frame struct {
	Title, Version, Command, Active string
	// Refresh is the number of seconds after which the page is loaded again; 0 is never.
	Refresh int
	Now     time.Time
	Problem int
	Data    any
}

func (p *Page) render(w http.ResponseWriter, name string, f frame) {
	f.Version, f.Command = p.options.Version, p.options.Command
	f.Now = cmp.Or(f.Now, time.Now())
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	var text strings.Builder
	if err := templates.ExecuteTemplate(&text, name, f); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write([]byte(text.String()))
}

// fail answers with the reason why the data are missing.
func (p *Page) fail(w http.ResponseWriter, err error) {
	w.WriteHeader(http.StatusBadGateway)
	p.render(w, "error.html", frame{Title: "No data", Data: err.Error(), Refresh: 5})
}

// viewTimeout bounds the time to collect the data of one view.
const viewTimeout = 15 * time.Second

func (p *Page) view(r *http.Request) (view, context.Context, context.CancelFunc, error) {
	// All viewers share what is collected, so it does not end with the request of one of them.
	shared, done := context.WithTimeout(context.WithoutCancel(r.Context()), viewTimeout)
	defer done()
	v, err := p.collect(shared)
	ctx, cancel := context.WithTimeout(r.Context(), viewTimeout)
	return v, ctx, cancel, err
}

func (p *Page) overview(w http.ResponseWriter, r *http.Request) {
	v, _, cancel, err := p.view(r)
	defer cancel()
	if err != nil {
		p.fail(w, err)
		return
	}
	o := p.newOverview(v, r.FormValue("q"))
	title := "Posthorn: no problem found"
	if n := len(o.Problems) + o.MoreProblems; n > 0 {
		title = "Posthorn: " + count(int64(n), "problem")
	}
	p.render(w, "overview.html", frame{Title: title, Active: "overview", Refresh: 5, Now: v.now, Problem: len(o.Problems), Data: o})
}

func (p *Page) destination(w http.ResponseWriter, r *http.Request) {
	v, ctx, cancel, err := p.view(r)
	defer cancel()
	if err != nil {
		p.fail(w, err)
		return
	}
	if !p.shows(r.PathValue("namespace")) {
		http.Error(w, fmt.Sprintf("this page shows namespace %s only", p.options.Namespace), http.StatusNotFound)
		return
	}
	d, err := p.newDetail(ctx, v, r.PathValue("namespace"), r.PathValue("name"), result(r))
	if err != nil {
		p.fail(w, err)
		return
	}
	if !d.Exists {
		w.WriteHeader(http.StatusNotFound)
	}
	p.render(w, "destination.html", frame{Title: d.Namespace + "/" + d.Name + " - Posthorn", Active: "overview", Refresh: 5,
		Now: v.now, Data: d})
}

func (p *Page) deadLetters(w http.ResponseWriter, r *http.Request) {
	v, ctx, cancel, err := p.view(r)
	defer cancel()
	if err != nil {
		p.fail(w, err)
		return
	}
	g, err := p.groups(ctx, v)
	if err != nil {
		p.fail(w, err)
		return
	}
	p.render(w, "deadletters.html", frame{Title: "Dead letters - Posthorn", Active: "deadletters", Refresh: 30, Now: v.now,
		Data: g.selected(result(r))})
}

// result is the result that the viewer selects.
func result(r *http.Request) string { return strings.TrimSpace(r.FormValue("result")) }

func (p *Page) search(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), viewTimeout)
	defer cancel()
	p.render(w, "search.html", frame{Title: "Message - Posthorn", Active: "search", Data: p.find(ctx, strings.TrimSpace(r.FormValue("id")))})
}

// explain is why.Explain for one destination, with as little input as it needs.
func (v *view) explain(k key, attempts []adminapi.Attempt) []why.Finding {
	f := why.Facts{Namespace: k.Namespace, Name: k.Name, Sources: v.sources[k.Namespace], Manifests: v.problems, UnknownKeys: v.unknownKeys,
		Attempts: attempts, Now: v.now}
	if d := v.destinations[k]; d != nil {
		f.Destinations = append(f.Destinations, *d)
	} else { // for the suggestions
		for other, d := range v.destinations {
			if other.Namespace == k.Namespace {
				f.Destinations = append(f.Destinations, *d)
			}
		}
	}
	for _, pod := range slices.Sorted(maps.Keys(v.indices)) {
		f.Reports = append(f.Reports, v.indices[pod])
	}
	return why.Explain(f)
}
