package admission

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/route"
	"github.com/posthorn/posthorn/dispatcher/writekey"
)

// Configs receives the encoded configs of namespaces (configsource.Sink), rejects invalid ones, and
// puts the others into effect at its Gate. A rejected config changes nothing: the namespace's previous config
// remains in effect.
type Configs struct {
	gate *Gate
	log  *slog.Logger
	// apply updates the lanes to a view before calls are routed by it.
	apply func(*liveconfig.View) error
	// grace is how long lanes are kept that are missing in a view.
	grace time.Duration
	// meta stores write keys across restarts.
	meta MetaStore

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
}

// NewConfigs makes the Configs of a Gate. grace is how long lanes are kept, and removed write keys
// are answered 503; meta keeps the write keys. apply updates the lanes to a view; only storage may
// make it fail.
func NewConfigs(gate *Gate, grace time.Duration, meta MetaStore, apply func(*liveconfig.View) error) *Configs {
	c := &Configs{
		gate: gate, log: gate.Logger, apply: apply, grace: grace, meta: meta,
		good: map[string]liveconfig.Revisioned{}, routers: map[string]*route.Router{}, refused: map[string]adminapi.RefusedConfig{},
		applied: map[string]time.Time{},
	}
	c.keys = recoverKeys(c.log, grace, meta)
	return c
}

// Set decodes, validates and applies a namespace's config.
func (c *Configs) Set(namespace string, data []byte) {
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
func (c *Configs) Delete(namespace string) {
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
func (c *Configs) updateReport(change func()) {
	c.reportMu.Lock()
	defer c.reportMu.Unlock()
	change()
}

// Synced ends the start: the configs of all namespaces are set.
func (c *Configs) Synced() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.synced = true
	c.swap("")
}

// swap puts the view of all valid configs into effect. Before Synced it does nothing: a view that
// lacks namespaces would look like deletions.
func (c *Configs) swap(namespace string) {
	if !c.synced {
		return
	}
	var unusable []string
	for t := range c.Rejected() {
		if _, ok := c.good[t]; !ok {
			unusable = append(unusable, t)
		}
	}
	view := liveconfig.NewView(slices.Collect(maps.Values(c.good)), unusable...)
	keys, changes := c.keys.Next(time.Now(), view.KeyOwners(), view.Unusable)
	routers := make(map[string]Router, len(c.routers))
	for name, router := range c.routers {
		routers[name] = router
	}
	first := c.gate.View() == nil
	if err := c.gate.Replace(view.WithKeys(keys), routers, c.apply); err != nil {
		// Only storage can fail here; the old config remains in effect, and the next change or
		// restart retries.
		c.log.Error("applying the live config failed", "namespace", namespace, "error", err)
		return
	}
	c.keys = keys
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

// AppliedTimes returns when each namespace's config took effect.
func (c *Configs) AppliedTimes() map[string]time.Time {
	c.reportMu.Lock()
	defer c.reportMu.Unlock()
	return maps.Clone(c.applied)
}

// Rejected returns the rejected configs by namespace.
func (c *Configs) Rejected() map[string]adminapi.RefusedConfig {
	c.reportMu.Lock()
	defer c.reportMu.Unlock()
	return maps.Clone(c.refused)
}
