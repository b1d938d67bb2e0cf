package dispatcher

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/route"
	"github.com/posthorn/posthorn/dispatcher/writekey"
)

// running is the config in effect; it is replaced as a whole.
type running struct {
	view    *liveconfig.View
	routers map[string]*route.Router
	// routing counts the requests whose calls are routed by this config and are not stored yet.
	routing *atomic.Int64
}

func (r *running) skip(ref liveconfig.SourceRef, call *event.Call) []string {
	if router := r.routers[ref.Namespace]; router != nil {
		return router.Skip(ref.Source.Name, call)
	}
	return nil
}

// configs receives the encoded configs of namespaces (configsource.Sink), rejects invalid ones, and
// replaces the running config. A rejected config changes nothing: the namespace's previous config
// remains in effect.
type configs struct {
	log *slog.Logger
	// apply updates the lanes to a view before ingest uses it.
	apply func(*liveconfig.View) error
	// grace is how long lanes are kept that are missing in a view.
	grace time.Duration
	// meta stores write keys across restarts.
	meta metaStore

	// mu is held while a config takes effect, which may wait for a full disk.
	mu      sync.Mutex
	good    map[string]liveconfig.Revisioned
	routers map[string]*route.Router
	synced  bool
	keys    writekey.Book

	// reportMu guards the data of reports; it is held briefly, and acquired after mu.
	reportMu sync.Mutex
	refused  map[string]adminapi.RefusedConfig
	// applied is the time of each namespace's valid config.
	applied map[string]time.Time

	current atomic.Pointer[running]
}

func newConfigs(log *slog.Logger, grace time.Duration, meta metaStore, apply func(*liveconfig.View) error) *configs {
	c := &configs{
		log: log, apply: apply, grace: cmp.Or(grace, delivery.DefaultOrphanGrace), meta: meta,
		good: map[string]liveconfig.Revisioned{}, routers: map[string]*route.Router{}, refused: map[string]adminapi.RefusedConfig{},
		applied: map[string]time.Time{},
	}
	c.keys = recoverKeys(log, c.grace, meta)
	return c
}

// Set decodes, validates and applies a namespace's config.
func (c *configs) Set(namespace string, data []byte) {
	config, revision, err := liveconfig.Decode(data)
	if err == nil && config.Namespace != namespace {
		err = fmt.Errorf("live config belongs to namespace %q", config.Namespace)
	}
	var router *route.Router
	if err == nil {
		router, err = route.New(config)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.log.Error("live config rejected; the previous one remains in effect", "namespace", namespace, "revision", revision, "error", err)
		c.updateReport(func() { c.refused[namespace] = adminapi.RefusedConfig{Revision: revision, Error: err.Error()} })
	} else {
		c.updateReport(func() { delete(c.refused, namespace) })
		if c.good[namespace].Revision == revision {
			return
		}
		c.good[namespace] = liveconfig.Revisioned{Config: config, Revision: revision}
		if before := c.routers[namespace]; before != nil {
			router.Keep(before, time.Now(), c.grace)
		}
		c.routers[namespace] = router
		c.updateReport(func() { c.applied[namespace] = time.Now() })
	}
	c.swap(namespace)
}

// Delete removes a namespace.
func (c *configs) Delete(namespace string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.good, namespace)
	delete(c.routers, namespace)
	c.updateReport(func() {
		delete(c.refused, namespace)
		delete(c.applied, namespace)
	})
	c.swap(namespace)
}

// updateReport changes the data of reports.
func (c *configs) updateReport(change func()) {
	c.reportMu.Lock()
	defer c.reportMu.Unlock()
	change()
}

// Synced ends the start: the configs of all namespaces are set.
func (c *configs) Synced() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.synced = true
	c.swap("")
}

// swap puts the view of all valid configs into effect. Before Synced it does nothing: a view that
// lacks namespaces would look like deletions.
func (c *configs) swap(namespace string) {
	if !c.synced {
		return
	}
	var unusable []string
	for t := range c.refusals() {
		if _, ok := c.good[t]; !ok {
			unusable = append(unusable, t)
		}
	}
	view := liveconfig.NewView(slices.Collect(maps.Values(c.good)), unusable...)
	keys, changes := c.keys.Next(time.Now(), view.KeyOwners(), view.Unusable)
	next := &running{
		view:    view.WithKeys(keys),
		routers: maps.Clone(c.routers), routing: new(atomic.Int64),
	}
	c.route(next)
	if err := c.apply(next.view); err != nil {
		// Only storage can fail here; the old config remains in effect, and the next change or
		// restart retries.
		c.log.Error("applying the live config failed", "namespace", namespace, "error", err)
		return
	}
	c.keys = keys
	first := c.current.Swap(next) == nil
	c.followKeys(changes)
	if first {
		c.log.Info("configuration loaded; accepting calls", "namespaces", len(c.good))
		return
	}
	if good, ok := c.good[namespace]; ok {
		c.log.Info("live config in effect", "namespace", namespace, "revision", good.Revision)
	} else {
		c.log.Info("live config removed", "namespace", namespace)
	}
}

// route applies the new filters before the lanes exist: otherwise a new lane would get calls that
// its destination's filter excludes. A removed namespace keeps its router until its Sources are
// removed.
func (c *configs) route(next *running) {
	before := c.current.Load()
	if before == nil {
		return
	}
	routers := maps.Clone(before.routers)
	maps.Copy(routers, next.routers)
	c.current.Store(&running{before.view, routers, next.routing})
	// Waits for the requests that were routed before, but not on a full disk.
	for deadline := time.Now().Add(maxRouting); before.routing.Load() > 0 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
}

// maxRouting bounds how long a config waits for calls that were routed by the previous config.
const maxRouting = 2 * time.Second

// beginRouting is called before calls are routed. The function that it returns is called after they
// are stored or have failed.
func (c *configs) beginRouting() (end func()) {
	for {
		r := c.current.Load()
		r.routing.Add(1)
		if c.current.Load() == r {
			return func() { r.routing.Add(-1) }
		}
		r.routing.Add(-1)
	}
}

// view returns the view in effect; nil before the first full config.
func (c *configs) view() *liveconfig.View {
	if r := c.current.Load(); r != nil {
		return r.view
	}
	return nil
}

// skip returns the destinations that must not get a call.
func (c *configs) skip(ref liveconfig.SourceRef, call *event.Call) []string {
	if r := c.current.Load(); r != nil {
		return r.skip(ref, call)
	}
	return nil
}

// appliedTimes returns when each namespace's config took effect.
func (c *configs) appliedTimes() map[string]time.Time {
	c.reportMu.Lock()
	defer c.reportMu.Unlock()
	return maps.Clone(c.applied)
}

// refusals returns the rejected configs by namespace.
func (c *configs) refusals() map[string]adminapi.RefusedConfig {
	c.reportMu.Lock()
	defer c.reportMu.Unlock()
	return maps.Clone(c.refused)
}

func sortNamespaces(t []adminapi.NamespaceReport) {
	slices.SortFunc(t, func(a, b adminapi.NamespaceReport) int { return cmp.Compare(a.Namespace, b.Namespace) })
}
