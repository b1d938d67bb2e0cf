package admission

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/writekey"
	"github.com/posthorn/posthorn/dispatcher/intake/route"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// history is what a dispatcher remembers of the live configs of one namespace, also after a restart
// without an operator.
type history struct {
	// Number is the highest one of the applied configs; 0 if no config had a number.
	Number int64 `json:"number"`
	// AppliedAt is when the config with this number took effect.
	AppliedAt time.Time `json:"appliedAt"`
	// Missing is when the namespace's config was lost; zero while there is one.
	Missing time.Time `json:"missing,omitzero"`
	// Objects of that config, sorted.
	Objects []liveconfig.Ref `json:"objects,omitempty"`
	// Parked are the objects that were in an earlier config, are missing in that one, and have no
	// tombstone.
	Parked map[liveconfig.Ref]parking `json:"parked,omitempty"`
	// Reserved are the write keys that the config reserved. The operator asks for them when the live
	// config is lost.
	Reserved []liveconfig.ReservedKey `json:"reserved,omitempty"`
	// Destinations has the destinations of the config, and missing ones whose lanes may exist, by name.
	Destinations map[string]destination `json:"destinations,omitempty"`
}

// destination is what the history keeps of a destination. While its config is missing, its lanes
// still receive calls, and only those that its filter permits.
type destination struct {
	route.Route
	Endpoints []string `json:"endpoints,omitempty"`
	// Lost are the connections that an earlier config had; Before is the routing by that config.
	Lost   liveconfig.Lost `json:"lost,omitzero"`
	Before route.Route     `json:"before,omitzero"`
}

// parking is the state of a parked object.
type parking struct {
	// Number of the last config that contained the object.
	Number int64     `json:"number"`
	Since  time.Time `json:"since"`
}

// exists reports whether the namespace has objects. Without a config it is then parked.
func (h history) exists() bool { return len(h.Objects) > 0 }

// next returns the history after a config took effect. In a config without a number a missing
// object is a deleted one. After a config with a number it may be from a backup, so the missing objects
// are parked.
func (h history) next(live liveconfig.Revisioned, now time.Time) history {
	next := history{Number: max(h.Number, live.Head.Number), AppliedAt: now}
	if next.Number == 0 {
		return next
	}
	next.Objects, next.Reserved = live.Objects(), live.Head.Reserved
	park := func(r liveconfig.Ref, p parking) {
		if _, present := slices.BinarySearchFunc(next.Objects, r, liveconfig.Ref.Compare); present || live.Head.Buried(r) {
			return
		}
		if next.Parked == nil {
			next.Parked = map[liveconfig.Ref]parking{}
		}
		next.Parked[r] = p
	}
	for _, r := range h.Objects {
		park(r, parking{Number: h.Number, Since: now})
	}
	for r, p := range h.Parked {
		park(r, p)
	}
	next.Destinations = h.destinations(live, next.Parked, now)
	return next
}

// destinations returns the destinations after a config took effect.
func (h history) destinations(live liveconfig.Revisioned, parked map[liveconfig.Ref]parking, now time.Time) map[string]destination {
	all := map[string]destination{}
	for name, d := range h.Destinations {
		r := liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: name}
		if _, ok := parked[r]; ok || live.Head.Buried(r) {
			all[name] = d
		}
	}
	for _, d := range live.Destinations {
		before := h.Destinations[d.Name]
		record := destination{Route: route.RouteOf(d)}
		for _, endpoint := range d.Endpoints {
			record.Endpoints = append(record.Endpoints, endpoint.Name)
		}
		if d.SourcesUnknown {
			record.Sources = before.Sources
		}
		if len(d.Endpoints) == 0 {
			record.Endpoints = before.Endpoints
		}
		record.Lost, record.Before = before.Lost, before.Before
		if live.Head.Number == 0 || live.Head.Since > h.Number {
			record.lose(before, now)
		}
		record.find(live.Head, d, now)
		all[d.Name] = record
	}
	return all
}

// lose adds the connections of the last config to the lost ones: the history is broken, so it is not
// known whether the owner has removed those that the new config lacks.
func (d *destination) lose(before destination, now time.Time) {
	union := func(a, b []string) []string {
		return slices.Compact(slices.Sorted(slices.Values(slices.Concat(a, b))))
	}
	d.Lost = liveconfig.Lost{Sources: union(d.Lost.Sources, before.Sources), Endpoints: union(d.Lost.Endpoints, before.Endpoints), Since: now}
	d.Before = before.Route
}

// find removes the lost connections that the config has, those to deleted Sources, and expired ones.
func (d *destination) find(head liveconfig.Head, config liveconfig.Destination, now time.Time) {
	d.Lost.Sources = slices.DeleteFunc(slices.Clone(d.Lost.Sources), func(s string) bool {
		return slices.Contains(config.Sources, s) || head.Buried(liveconfig.Ref{Section: liveconfig.SectionSources, Name: s})
	})
	d.Lost.Endpoints = slices.DeleteFunc(slices.Clone(d.Lost.Endpoints), func(e string) bool {
		return slices.ContainsFunc(config.Endpoints, func(own liveconfig.Endpoint) bool { return own.Name == e })
	})
	if len(d.Lost.Sources)+len(d.Lost.Endpoints) == 0 || now.Sub(d.Lost.Since) >= liveconfig.ParkingTime {
		d.Lost, d.Before = liveconfig.Lost{}, route.Route{}
	}
}

// kept returns the routing that a config lacks although lanes need it, by destination.
func (h history) kept(config liveconfig.Config) map[string]route.Route {
	routes := map[string]route.Route{}
	for name, d := range h.Destinations {
		routes[name] = d.Route
	}
	for _, d := range config.Destinations {
		if record := h.Destinations[d.Name]; len(record.Lost.Sources) > 0 {
			routes[d.Name] = route.Route{Sources: record.Lost.Sources, Filter: record.Before.Filter, ExactNumbers: record.Before.ExactNumbers}
		} else if !d.SourcesUnknown {
			delete(routes, d.Name)
		}
	}
	return routes
}

// parked returns the parked objects for a report. missing is when the config of the whole namespace
// was lost; zero if there is one.
func (h history) parked(missing time.Time) (list []adminapi.ParkedObject) {
	add := func(r liveconfig.Ref, p parking) {
		list = append(list, adminapi.ParkedObject{Object: r.String(), Number: p.Number, Since: p.Since})
	}
	if !missing.IsZero() {
		for _, r := range h.Objects {
			add(r, parking{Number: h.Number, Since: missing})
		}
	}
	for r, p := range h.Parked {
		add(r, p)
	}
	slices.SortFunc(list, func(a, b adminapi.ParkedObject) int { return strings.Compare(a.Object, b.Object) })
	return list
}

// reserved returns the write keys of a report: the reserved ones, and the keys of the parked Sources,
// which parked lists by Source.
func (h history) reserved(parked map[string][]writekey.Hash, missing time.Time) (list []adminapi.ReservedKey) {
	for _, k := range h.Reserved {
		list = append(list, adminapi.ReservedKey(k))
	}
	for source, hashes := range parked {
		since := missing
		if p, ok := h.Parked[liveconfig.Ref{Section: liveconfig.SectionSources, Name: source}]; ok {
			since = p.Since
		}
		for _, hash := range hashes {
			list = append(list, adminapi.ReservedKey{SHA256: hex.EncodeToString(hash[:]), RemovedAt: since})
		}
	}
	slices.SortFunc(list, func(a, b adminapi.ReservedKey) int { return strings.Compare(a.SHA256, b.SHA256) })
	return list
}

// historyPrefix is the prefix of the names under which the store keeps the histories.
const historyPrefix = "liveconfig/"

// historyRetention is how long the history of a namespace without objects is kept, so that a Secret
// from a backup does not restore the namespace.
const historyRetention = 30 * 24 * time.Hour

// recoverHistories reads the histories of an earlier run. Without them an older config could take
// effect and discard messages, so an error must prevent the start.
func recoverHistories(meta MetaStore) (map[string]history, error) {
	found := map[string]history{}
	all, err := meta.AllMeta()
	if err != nil {
		return nil, fmt.Errorf("read the history of the live configs: %w", err)
	}
	for name, value := range all {
		namespace, ok := strings.CutPrefix(name, historyPrefix)
		if !ok {
			continue
		}
		var h history
		if err := json.Unmarshal(value, &h); err != nil {
			return nil, fmt.Errorf("read the history of the live config of namespace %q: %w", namespace, err)
		}
		found[namespace] = h
	}
	return found, nil
}

// setHistory replaces the history of a namespace; storeHistories stores it if it has a number.
func (c *Configs) setHistory(namespace string, h history) {
	c.histories[namespace] = h
	if lost := h.lostConnections(); lost != nil {
		c.lost[namespace] = lost
	} else {
		delete(c.lost, namespace)
	}
	if h.Number > 0 {
		c.unstored[namespace] = true
	}
}

// pruneHistories removes the histories of namespaces that were removed long ago.
func (c *Configs) pruneHistories(now time.Time) {
	for namespace, h := range c.histories {
		if c.removed(namespace) && now.Sub(h.AppliedAt) > historyRetention {
			delete(c.histories, namespace)
			delete(c.lost, namespace)
			c.unstored[namespace] = true
		}
	}
}

// removed reports whether a namespace with a history has neither a config nor parked objects.
func (c *Configs) removed(namespace string) bool {
	h := c.histories[namespace]
	_, used := c.good[namespace]
	_, missing := c.missing[namespace]
	return !used && !missing && !h.exists() && len(h.Parked) == 0
}

// storeHistories stores the histories that changed since they were stored. It retries the failed ones
// at the next call.
func (c *Configs) storeHistories() {
	for namespace := range c.unstored {
		var value []byte // nil removes the history.
		if h, ok := c.histories[namespace]; ok {
			value, _ = json.Marshal(h) // No field can fail to marshal.
		}
		if err := c.meta.PutMeta(historyPrefix+namespace, value); err != nil {
			if !errors.Is(err, queue.ErrClosed) {
				c.log.Warn("storing the number of a live config failed; the next config retries; after a restart an older live config may take effect", "namespace", namespace, "error", err)
			}
			continue
		}
		delete(c.unstored, namespace)
	}
}

// parkedObjects returns the parked objects of all namespaces, for a view.
func parkedObjects(histories map[string]history) map[string]map[liveconfig.Ref]bool {
	all := map[string]map[liveconfig.Ref]bool{}
	for namespace, h := range histories {
		for r := range h.Parked {
			if all[namespace] == nil {
				all[namespace] = map[liveconfig.Ref]bool{}
			}
			all[namespace][r] = true
		}
	}
	return all
}

// lostConnections returns the lost connections of the namespace's destinations, for a view; nil if
// there are none.
func (h history) lostConnections() (lost map[string]liveconfig.Lost) {
	for name, d := range h.Destinations {
		if !d.Lost.Since.IsZero() {
			if lost == nil {
				lost = map[string]liveconfig.Lost{}
			}
			lost[name] = d.Lost
		}
	}
	return lost
}

// ConfigState is what a report states about a namespace's live config.
type ConfigState struct {
	// Removed is true if the namespace has neither a config nor parked objects.
	Removed bool
	// Number is the highest one that was applied.
	Number int64
	// Missing is when the live config of a namespace that has objects was lost; zero if there is
	// one.
	Missing time.Time
	Parked  []adminapi.ParkedObject
	// Reserved has the reserved write keys, and the keys of parked Sources.
	Reserved []adminapi.ReservedKey
}

// Namespaces returns the namespaces of which the store has the history of a live config.
func (c *Configs) Namespaces() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.histories))
}

// States returns the state of the live config of each namespace that has a number, or whose config
// is missing. The caller must not change them. The version is another one after each change.
func (c *Configs) States() (states map[string]ConfigState, version uint64) {
	c.reportMu.Lock()
	defer c.reportMu.Unlock()
	return c.states, c.statesVersion
}
