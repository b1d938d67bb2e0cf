package dispatcher

import (
	"cmp"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/route"
)

// running is what the dispatcher runs at one moment; replaced as a whole.
type running struct {
	view    *liveconfig.View
	routers map[string]*route.Router
}

// configs takes tenants' encoded configs (configsource.Sink), refuses bad ones,
// and swaps what runs. A refused config changes nothing: the tenant's last good one stays.
type configs struct {
	log *slog.Logger
	// apply makes lanes follow a view before ingest uses it.
	apply func(*liveconfig.View) error

	// mu is held while a config is put into effect, which may wait for a disk that is full.
	mu      sync.Mutex
	good    map[string]liveconfig.Revisioned
	routers map[string]*route.Router
	synced  bool

	// telling guards what reports tell; it is held for moments only, and taken after mu.
	telling sync.Mutex
	refused map[string]liveconfig.RefusedConfig
	// applied is when each tenant's good config came.
	applied map[string]time.Time

	current atomic.Pointer[running]
}

func newConfigs(log *slog.Logger, apply func(*liveconfig.View) error) *configs {
	return &configs{
		log: log, apply: apply,
		good: map[string]liveconfig.Revisioned{}, routers: map[string]*route.Router{}, refused: map[string]liveconfig.RefusedConfig{},
		applied: map[string]time.Time{},
	}
}

// Set decodes, checks and takes a tenant's config.
func (c *configs) Set(tenant string, data []byte) {
	config, revision, err := liveconfig.Decode(data)
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
	next := &running{
		view:    liveconfig.NewView(slices.Collect(maps.Values(c.good)), unusable...),
		routers: maps.Clone(c.routers),
	}
	if err := c.apply(next.view); err != nil {
		// Only storage can fail here; the old config stays, and the next change or restart tries again.
		c.log.Error("live config could not be put into effect", "namespace", tenant, "error", err)
		return
	}
	if c.current.Swap(next) == nil {
		c.log.Info("first full config in effect; calls are taken", "tenants", len(c.good))
		return
	}
	if good, ok := c.good[tenant]; ok {
		c.log.Info("live config in effect", "namespace", tenant, "revision", good.Revision)
	} else {
		c.log.Info("live config removed", "namespace", tenant)
	}
}

// view returns what runs; nil before the first full config.
func (c *configs) view() *liveconfig.View {
	if r := c.current.Load(); r != nil {
		return r.view
	}
	return nil
}

// router returns a tenant's router, or nil.
func (c *configs) router(tenant string) *route.Router {
	if r := c.current.Load(); r != nil {
		return r.routers[tenant]
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
