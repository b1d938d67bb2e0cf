package main

import (
	"context"
	"crypto/rand"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/admin"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/configsource"
)

// fleet is many simulated dispatcher pods. They load the live configs and report with the
// dispatchers' own code, but have no store and invent their traffic. The configs are read, and the
// changes are numbered, once for all of them, so that the machine has time for the operator.
type fleet struct {
	port    string
	pods    []*simulated
	changes *changes.Log

	mu      sync.Mutex
	configs map[string]liveconfig.Revisioned
	synced  bool
	view    atomic.Pointer[liveconfig.View]
}

// simulated is one pod of a fleet.
type simulated struct {
	fleet    *fleet
	name, ip string
	server   *http.Server
	// run is another one after each start. Cursors begin with it.
	run atomic.Pointer[string]
	// delivered is the number of messages that each destination has got.
	delivered atomic.Int64
	last      atomic.Pointer[time.Time]
	silent    atomic.Bool
}

func newFleet(n int, port string) *fleet {
	f := &fleet{port: port, configs: map[string]liveconfig.Revisioned{}, changes: changes.New(func() changes.Lanes { return nil })}
	for i := range n {
		f.pods = append(f.pods, &simulated{fleet: f, name: dispatcherName(i), ip: loopback(i)})
	}
	return f
}

// watch follows the live configs until ctx is done.
func (f *fleet) watch(ctx context.Context, client kubernetes.Interface) error {
	return configsource.Watch(ctx, client, release, f, slog.New(slog.DiscardHandler))
}

// Set implements liveconfig.Sink.
func (f *fleet) Set(namespace string, stored liveconfig.Stored) {
	live, err := stored.Decode()
	if err != nil {
		return
	}
	f.change(func() { f.configs[namespace] = live })
}

// Delete implements liveconfig.Sink.
func (f *fleet) Delete(namespace string) { f.change(func() { delete(f.configs, namespace) }) }

// Synced implements liveconfig.Sink.
func (f *fleet) Synced(...string) { f.change(func() { f.synced = true }) }

func (f *fleet) change(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
	if !f.synced {
		return
	}
	f.view.Store(liveconfig.NewView(slices.Collect(maps.Values(f.configs))))
	f.changes.Update(f.view.Load(), nil)
}

// start serves the pod's reports, as a process that has just started.
func (p *simulated) start() error {
	p.run.Store(new(rand.Text() + " "))
	listener, err := net.Listen("tcp", net.JoinHostPort(p.ip, p.fleet.port))
	if err != nil {
		return err
	}
	p.server = admin.NewServer(admin.NewHandler(admin.Options{Changes: p.since, Metrics: http.NotFoundHandler(), Ready: func() error {
		return nil
	}}))
	answer := p.server.Handler
	p.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p.silent.Load() {
			<-r.Context().Done()
			return
		}
		answer.ServeHTTP(w, r)
	})
	go func() { _ = p.server.Serve(listener) }()
	return nil
}

func (p *simulated) stop() { _ = p.server.Close() }

// deliver invents a delivery of each destination by each pod.
func (f *fleet) deliver() {
	now := time.Now()
	for _, p := range f.pods {
		p.last.Store(&now)
		p.delivered.Add(1)
	}
	view, log := f.view.Load(), f.changes
	for _, namespace := range view.Namespaces() {
		config, _ := view.Namespace(namespace)
		for i := range config.Destinations {
			log.Object(changes.Destinations, namespace, config.Destinations[i].Name).Numbers()
		}
		for i := range config.Sources {
			log.Object(changes.Sources, namespace, config.Sources[i].Name).Numbers()
		}
	}
}

func (p *simulated) header() (r adminapi.Report) {
	r.Pod, r.Ready = p.name, p.fleet.view.Load() != nil
	p.fleet.mu.Lock()
	defer p.fleet.mu.Unlock()
	for namespace, config := range p.fleet.configs {
		r.Configs = append(r.Configs, adminapi.ConfigReport{Namespace: namespace, Number: config.Head.Number})
	}
	slices.SortFunc(r.Configs, func(a, b adminapi.ConfigReport) int { return strings.Compare(a.Namespace, b.Namespace) })
	return r
}

// numbers changes with the numbers of the configs in effect.
func numbers(r adminapi.Report) (sum uint64) {
	for _, c := range r.Configs {
		sum += uint64(c.Number)
	}
	return sum
}

func (p *simulated) report() adminapi.Report {
	r := p.header()
	r.Cursor = *p.run.Load() + p.fleet.changes.Cursor()
	if view := p.fleet.view.Load(); view != nil {
		for _, name := range view.Namespaces() {
			config, _ := view.Namespace(name)
			r.Namespaces = append(r.Namespaces, p.namespace(config))
		}
	}
	return r
}

func (p *simulated) since(cursor string) *adminapi.Report {
	run := *p.run.Load()
	if p.fleet.view.Load() == nil {
		return nil
	}
	r := p.header()
	cursor, _ = strings.CutPrefix(cursor, run) // The log does not know the cursors of other runs.
	changed, ok := p.fleet.changes.Since(cursor, changes.Pod{Ready: r.Ready, Configs: numbers(r)})
	switch {
	case !ok:
		return nil
	case changed.Full:
		full := p.report()
		return &full
	}
	r.Cursor, r.Delta, r.RemovedNamespaces = run+changed.Cursor, true, changed.Removed
	view := p.fleet.view.Load() // After Since: it has all changes up to the cursor.
	for name, n := range changed.Namespaces {
		config, _ := view.Namespace(name)
		config.Namespace, config.Config = name, n.Select(config.Config)
		report := p.namespace(config)
		report.Complete, report.Removed = n.Complete, n.Removed
		r.Namespaces = append(r.Namespaces, report)
	}
	return &r
}

func (p *simulated) namespace(config liveconfig.Revisioned) adminapi.NamespaceReport {
	n := adminapi.NamespaceReport{Namespace: config.Namespace, Revision: config.Revision}
	delivered := p.delivered.Load()
	ledger := adminapi.Ledger{Accepted: delivered, Delivered: delivered}
	var last time.Time
	state := adminapi.EndpointIdle
	if at := p.last.Load(); at != nil {
		last, state = *at, adminapi.EndpointHealthy
	}
	for _, d := range config.Destinations {
		r := adminapi.DestinationReport{Name: d.Name, Generation: d.Generation, Revision: d.Revision, Ledger: ledger}
		for _, e := range d.Endpoints {
			r.Endpoints = append(r.Endpoints, adminapi.EndpointReport{Name: e.Name, State: state, LastSuccess: last})
		}
		n.Destinations = append(n.Destinations, r)
	}
	for _, s := range config.Sources {
		n.Sources = append(n.Sources, adminapi.SourceReport{Name: s.Name, Generation: s.Generation, Revision: s.Revision, Accepted: delivered,
			LastAccepted: last, Messages: ledger})
	}
	return n
}
