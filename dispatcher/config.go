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

	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/route"
	"github.com/posthorn/posthorn/dispatcher/writekey"
	"github.com/posthorn/posthorn/event"
)

// running is what the dispatcher runs at one moment; replaced as a whole.
type running struct {
	view    *liveconfig.View
	routers map[string]*route.Router
	// routing counts the requests whose calls may be routed by it and are not stored yet.
	routing *atomic.Int64
}

func (r *running) skip(ref liveconfig.SourceRef, call *event.Call) []string {
	if router := r.routers[ref.Tenant]; router != nil {
		return router.Skip(ref.Source.Name, call)
	}
	return nil
}

// configs takes tenants' encoded configs (configsource.Sink), refuses bad ones,
// and swaps what runs. A refused config changes nothing: the tenant's last good one stays.
type configs struct {
	log *slog.Logger
	// apply makes lanes follow a view before ingest uses it.
	apply func(*liveconfig.View) error
	// grace is how long lanes are kept that a view does not name any more.
	grace time.Duration
	// memory keeps keys over a restart.
	memory memory

	// mu is held while a config is put into effect, which may wait for a disk that is full.
	mu      sync.Mutex
	good    map[string]liveconfig.Revisioned
	routers map[string]*route.Router
	synced  bool
	keys    writekey.Book

	// telling guards what reports tell; it is held for moments only, and taken after mu.
	telling sync.Mutex
	refused map[string]liveconfig.RefusedConfig
	// applied is when each tenant's good config came.
	applied map[string]time.Time

	current atomic.Pointer[running]
}

func newConfigs(log *slog.Logger, grace time.Duration, memory memory, apply func(*liveconfig.View) error) *configs {
	c := &configs{
		log: log, apply: apply, grace: cmp.Or(grace, delivery.DefaultOrphanGrace), memory: memory,
		good: map[string]liveconfig.Revisioned{}, routers: map[string]*route.Router{}, refused: map[string]liveconfig.RefusedConfig{},
		applied: map[string]time.Time{},
	}
	c.keys = recoverKeys(log, c.grace, memory)
	return c
}

// Set decodes, checks and takes a tenant's config.
func (c *configs) Set(tenant string, data []byte) {
	config, revision, err := liveconfig.Decode(data)
	if err == nil && config.Tenant != tenant {
		err = fmt.Errorf("live config is that of namespace %q", config.Tenant)
	}
	var router *route.Router
	if err == nil {
		router, err = route.New(config)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.log.Error("live config refused; the last good one stays in effect", "namespace", tenant, "revision", revision, "error", err)
		c.tell(func() { c.refused[tenant] = liveconfig.RefusedConfig{Revision: revision, Error: err.Error()} })
	} else {
		c.tell(func() { delete(c.refused, tenant) })
		if c.good[tenant].Revision == revision {
			return
		}
		c.good[tenant] = liveconfig.Revisioned{Config: config, Revision: revision}
		if before := c.routers[tenant]; before != nil {
			router.Keep(before, time.Now(), c.grace)
		}
		c.routers[tenant] = router
		c.tell(func() { c.applied[tenant] = time.Now() })
	}
	c.swap(tenant)
}

// Delete forgets a tenant.
func (c *configs) Delete(tenant string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.good, tenant)
	delete(c.routers, tenant)
	c.tell(func() {
		delete(c.refused, tenant)
		delete(c.applied, tenant)
	})
	c.swap(tenant)
}

// tell changes what reports tell.
func (c *configs) tell(change func()) {
	c.telling.Lock()
	defer c.telling.Unlock()
	change()
}

// Synced ends the start: all tenants have been set.
func (c *configs) Synced() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.synced = true
	c.swap("")
}

// swap makes the view that the good configs add up to the running one. Before
// Synced it does nothing: a view that lacks tenants would look like deletions.
func (c *configs) swap(tenant string) {
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
		// Only storage can fail here; the old config stays, and the next change or restart tries again.
		c.log.Error("live config could not be put into effect", "namespace", tenant, "error", err)
		return
	}
	c.keys = keys
	first := c.current.Swap(next) == nil
	c.followKeys(changes)
	if first {
		c.log.Info("first full config in effect; calls are taken", "namespaces", len(c.good))
		return
	}
	if good, ok := c.good[tenant]; ok {
		c.log.Info("live config in effect", "namespace", tenant, "revision", good.Revision)
	} else {
		c.log.Info("live config removed", "namespace", tenant)
	}
}

// route has calls routed as they will be, before there are lanes: else a new lane
// would get those that its destination's filter keeps out. A tenant that is
// going keeps its router until its Sources are gone.
func (c *configs) route(next *running) {
	before := c.current.Load()
	if before == nil {
		return
	}
	routers := maps.Clone(before.routers)
	maps.Copy(routers, next.routers)
	c.current.Store(&running{before.view, routers, next.routing})
	// Those that were routed before are waited for, but not on a full disk.
	for deadline := time.Now().Add(maxRouting); before.routing.Load() > 0 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
}

// maxRouting bounds how long a config waits for calls that were routed by the one before.
const maxRouting = 2 * time.Second

// beginRouting is called before calls are routed, and what it returns once they
// are stored, or will not be.
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

// view returns what runs; nil before the first full config.
func (c *configs) view() *liveconfig.View {
	if r := c.current.Load(); r != nil {
		return r.view
	}
	return nil
}

// skip returns the destinations that do not get a call.
func (c *configs) skip(ref liveconfig.SourceRef, call *event.Call) []string {
	if r := c.current.Load(); r != nil {
		return r.skip(ref, call)
	}
	return nil
}

// appliedTimes returns when each tenant's config came into effect.
func (c *configs) appliedTimes() map[string]time.Time {
	c.telling.Lock()
	defer c.telling.Unlock()
	return maps.Clone(c.applied)
}

// refusals returns the configs that were refused, by tenant.
func (c *configs) refusals() map[string]liveconfig.RefusedConfig {
	c.telling.Lock()
	defer c.telling.Unlock()
	return maps.Clone(c.refused)
}

func sortTenants(t []liveconfig.TenantReport) {
	slices.SortFunc(t, func(a, b liveconfig.TenantReport) int { return cmp.Compare(a.Tenant, b.Tenant) })
}
