package admission

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/writekey"
	"github.com/posthorn/posthorn/dispatcher/intake/route"
)

// Configs receives the encoded configs of namespaces (liveconfig.Sink), rejects invalid ones, and
// puts the others into effect at its Gate. A rejected config changes nothing: the namespace's previous config
// remains in effect. A namespace whose config is missing although it was not deleted is parked: its
// messages are kept, and its calls are answered 503.
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
	// histories has all namespaces that have or had a config with a number.
	histories map[string]history
	// lost are the lost connections of the destinations in histories.
	lost map[string]map[string]liveconfig.Lost
	// broken are the namespaces of which a config before the present one may have been lost, until the present one is
	// in effect.
	broken map[string]bool
	// unstored are the namespaces whose history changed since it was stored.
	unstored map[string]bool
	// failed are the namespaces that the operator could not compile when it wrote the marker.
	failed []string
	// missing is when the config of each parked namespace was lost.
	missing map[string]time.Time

	// reportMu guards the data of reports; it is held briefly, and acquired after mu.
	reportMu sync.Mutex
	refused  map[string]adminapi.RefusedConfig
	// invalid are the refused namespaces whose config cannot be decoded or used, for example because
	// another release wrote it; the others are refused for their number, or because a part is missing.
	invalid map[string]bool
	// applied is the time of each namespace's valid config.
	applied map[string]time.Time
	// states is replaced as a whole, and statesVersion incremented.
	states        map[string]ConfigState
	statesVersion uint64
	// hasLostKeys is true while write keys are lost.
	hasLostKeys bool
}

// NewConfigs makes the Configs of a Gate. grace is how long lanes are kept, and removed write keys
// are answered 503; meta keeps the write keys and the histories of the configs. apply updates the lanes to
// a view; only storage may make it fail. An error means that meta has no valid histories.
func NewConfigs(gate *Gate, grace time.Duration, meta MetaStore, apply func(*liveconfig.View) error) (*Configs, error) {
	histories, err := recoverHistories(meta)
	if err != nil {
		return nil, err
	}
	c := &Configs{
		gate: gate, log: gate.Logger, apply: apply, grace: grace, meta: meta,
		good: map[string]liveconfig.Revisioned{}, routers: map[string]*route.Router{}, refused: map[string]adminapi.RefusedConfig{},
		invalid: map[string]bool{},
		applied: map[string]time.Time{}, missing: map[string]time.Time{}, unstored: map[string]bool{}, histories: histories,
		lost: map[string]map[string]liveconfig.Lost{}, broken: map[string]bool{},
	}
	for namespace, h := range histories {
		if lost := h.lostConnections(); lost != nil {
			c.lost[namespace] = lost
		}
	}
	c.keys = recoverKeys(c.log, grace, meta)
	c.updateStates(c.keys, func(writekey.Owner) bool { return false }) // A report has the numbers before the first config.
	return c, nil
}

// Set decodes, validates and applies a namespace's config.
func (c *Configs) Set(namespace string, stored liveconfig.Stored) {
	live, err := c.gate.Decoder.Decode(namespace, stored)
	var router *route.Router
	if err == nil {
		router, err = c.router(namespace).Next(live.Config)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.publish()
	before := c.histories[namespace]
	invalid := err != nil && !stored.Incomplete()
	if number := live.Head.Number; err == nil && number > 0 && number < before.Number {
		err = fmt.Errorf("live config has number %d, and number %d was in effect before; a running operator replaces a live config from a backup by a newer one", number, before.Number)
	}
	if err != nil {
		c.log.Error("live config rejected; the previous one remains in effect", "namespace", namespace, "revision", live.Revision, "error", err)
		c.updateReport(func() {
			c.refused[namespace] = adminapi.RefusedConfig{Revision: live.Revision, Error: err.Error()}
			delete(c.invalid, namespace)
			if invalid {
				c.invalid[namespace] = true
			}
		})
	} else {
		c.updateReport(func() {
			delete(c.refused, namespace)
			delete(c.invalid, namespace)
		})
		if old, ok := c.good[namespace]; ok && old.Revision == live.Revision && old.Head.Number == live.Head.Number {
			return
		}
		c.good[namespace] = live
		now := time.Now()
		if old := c.routers[namespace]; old != nil {
			router.Keep(old, now, c.grace)
		}
		router.KeepDeleted(live.Namespace, live.Head.Tombstones)
		next := before.next(live, now)
		c.broken[namespace] = c.broken[namespace] || live.Head.Since > before.Number
		router.KeepRoutes(live.Namespace, next.kept(live.Config))
		c.routers[namespace] = router
		c.setHistory(namespace, next)
		c.updateReport(func() { c.applied[namespace] = now })
	}
	c.swap(namespace)
}

// router returns the present router of a namespace; nil if it has none.
func (c *Configs) router(namespace string) *route.Router {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.routers[namespace]
}

// Delete reports that a namespace has no config. The namespace is removed if its last config had no
// objects, and parked otherwise.
func (c *Configs) Delete(namespace string) {
	c.gate.Decoder.Forget(namespace)
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.publish()
	delete(c.good, namespace)
	if h, ok := c.histories[namespace]; !h.exists() {
		delete(c.routers, namespace)
		if ok && len(h.Parked) == 0 {
			h.Destinations = nil
			c.setHistory(namespace, h)
		}
	}
	c.updateReport(func() {
		delete(c.refused, namespace)
		delete(c.invalid, namespace)
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

// Synced ends the start: the configs of all namespaces are set, except for the failed
// namespaces, which exist but could not be compiled. A later call replaces the failed namespaces.
func (c *Configs) Synced(failed ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.synced && slices.Equal(c.failed, failed) {
		return
	}
	defer c.publish()
	c.synced, c.failed = true, failed
	c.swap("")
}

// unusable returns the namespaces that exist and have no config, sorted: the rejected and the failed
// ones, and those whose config is missing.
func (c *Configs) unusable() []string {
	namespaces := map[string]bool{}
	for namespace := range c.Rejected() {
		namespaces[namespace] = true
	}
	for _, namespace := range c.failed {
		namespaces[namespace] = true
	}
	for namespace, h := range c.histories {
		if h.exists() {
			namespaces[namespace] = true
		}
	}
	for namespace := range c.good {
		delete(namespaces, namespace)
	}
	return slices.Sorted(maps.Keys(namespaces))
}

// followMissing records since when configs are missing, also before a restart, and logs it.
func (c *Configs) followMissing(unusable []string) {
	now := time.Now()
	for namespace := range c.missing {
		if !slices.Contains(unusable, namespace) {
			delete(c.missing, namespace)
		}
	}
	for _, namespace := range unusable {
		if _, known := c.missing[namespace]; known {
			continue
		}
		c.missing[namespace] = now
		if before := c.histories[namespace].Missing; !before.IsZero() {
			c.missing[namespace] = before
		}
		if _, rejected := c.Rejected()[namespace]; !rejected {
			c.log.Error("live config missing; the namespace is parked: its messages are kept and not sent, its calls are answered 503", "namespace", namespace)
		}
	}
	for namespace, h := range c.histories {
		if since := c.missing[namespace]; !h.Missing.Equal(since) {
			h.Missing = since
			c.setHistory(namespace, h)
		}
	}
}

// updateStates updates the states for reports.
func (c *Configs) updateStates(keys writekey.Book, parked func(writekey.Owner) bool) {
	parkedKeys := map[string]map[string][]writekey.Hash{} // namespace -> Source
	for hash, owner := range keys.OwnedBy(parked) {
		if parkedKeys[owner.Namespace] == nil {
			parkedKeys[owner.Namespace] = map[string][]writekey.Hash{}
		}
		parkedKeys[owner.Namespace][owner.Source] = append(parkedKeys[owner.Namespace][owner.Source], hash)
	}
	states := map[string]ConfigState{}
	for namespace, h := range c.histories {
		missing := c.missing[namespace]
		states[namespace] = ConfigState{
			Removed: c.removed(namespace), Number: h.Number, Missing: missing,
			Parked: h.parked(missing), Reserved: h.reserved(parkedKeys[namespace], missing),
		}
	}
	for namespace, since := range c.missing {
		if _, known := states[namespace]; !known {
			states[namespace] = ConfigState{Missing: since}
		}
	}
	c.updateReport(func() {
		c.states, c.hasLostKeys = states, keys.HasLost()
		c.statesVersion++
	})
}

// publish marks the reports of what differs in the view in effect and the rejected configs. The
// mutex is held.
func (c *Configs) publish() { c.gate.Changes.Update(c.gate.View(), c.Rejected()) }

// swap puts the view of all valid configs into effect. Before Synced it does nothing: a view that
// lacks namespaces would look like deletions.
func (c *Configs) swap(namespace string) {
	if !c.synced {
		return
	}
	unusable := c.unusable()
	c.followMissing(unusable)
	c.pruneHistories(time.Now())
	view := liveconfig.NewView(slices.Collect(maps.Values(c.good)),
		unusable...).WithParked(parkedObjects(c.histories)).WithLost(maps.Clone(c.lost))
	parked := func(o writekey.Owner) bool {
		return view.Parked(o.Namespace, liveconfig.Ref{Section: liveconfig.SectionSources, Name: o.Source})
	}
	keys, changes := c.keys.Next(time.Now(), view.KeyOwners(), func(o writekey.Owner) writekey.Presence {
		switch {
		case parked(o):
			return writekey.Parked
		case !view.HasSource(o):
			return writekey.Deleted
		case c.broken[o.Namespace]:
			return writekey.Doubtful
		}
		return writekey.Present
	})
	c.updateStates(keys, parked)
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
	clear(c.broken)
	c.followKeys(changes)
	c.storeHistories()
	if first && !c.Usable() {
		c.log.Error("no live config is usable; this dispatcher is not ready", "rejected", len(c.Rejected()))
		return
	}
	if first {
		c.log.Info("configuration loaded; accepting calls", "namespaces", len(c.good))
		return
	}
	if good, ok := c.good[namespace]; ok {
		c.log.Info("live config in effect", "namespace", namespace, "revision", good.Revision, "number", good.Head.Number)
	} else if namespace != "" && !view.Unusable(namespace) {
		c.log.Info("live config removed", "namespace", namespace)
	}
}

// AppliedTimes returns when each namespace's config took effect.
func (c *Configs) AppliedTimes() map[string]time.Time {
	c.reportMu.Lock()
	defer c.reportMu.Unlock()
	return maps.Clone(c.applied)
}

// Usable reports whether this dispatcher can use live configs. It is false if configs are invalid and
// none is in effect: a dispatcher of another release may be able to use them. A missing config, one
// with a missing part, and one that is refused for its number change nothing: another dispatcher would not use it either.
func (c *Configs) Usable() bool {
	c.reportMu.Lock()
	defer c.reportMu.Unlock()
	return len(c.invalid) == 0 || len(c.applied) > 0
}

// HasUnlistedKeys reports whether write keys can be known that no provided config has: the keys of a config that
// is in effect although a later one was rejected, of missing configs and Sources, and lost keys.
func (c *Configs) HasUnlistedKeys() bool {
	if view := c.gate.View(); view == nil || !view.Complete() {
		return true
	}
	c.reportMu.Lock()
	defer c.reportMu.Unlock()
	if len(c.refused) > 0 || c.hasLostKeys {
		return true
	}
	for _, s := range c.states {
		if !s.Missing.IsZero() || len(s.Parked) > 0 {
			return true
		}
	}
	return false
}

// Rejected returns the rejected configs by namespace.
func (c *Configs) Rejected() map[string]adminapi.RefusedConfig {
	c.reportMu.Lock()
	defer c.reportMu.Unlock()
	return maps.Clone(c.refused)
}
