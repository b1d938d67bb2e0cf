package delivery

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// openAtOnce is the number of lanes that are opened in parallel, so that the store can commit them together.
const openAtOnce = 32

// change is a destination of a new config, before it takes effect.
type change struct {
	namespace string
	config    liveconfig.Destination
	lanes     []queue.LaneID
	set       *destinationConfig
	object    *changes.Object
	// suspensions are those of the destination after the change.
	suspensions suspensions
	// resumed is true if a suspension ends with the change, and oldest is then the acceptance of the oldest pending message.
	resumed bool
	oldest  time.Time
}

func (p *change) key() string { return p.namespace + "/" + p.config.Name }

// Apply updates the lanes to a full config: a destination that is missing in the view, and not parked
// there, counts as deleted by its owner. New lanes are durable when Apply returns, so calls may then be accepted
// with the view. Requests in flight end with their old settings.
//
// An error means that the store failed. Then nothing has changed.
func (e *Engine) Apply(v *liveconfig.View) error {
	_ = e.applying.Acquire(context.Background(), 1)
	defer e.applying.Release(1)
	if e.records.stored == nil {
		e.recover()
	}
	namespaces := e.changedNamespaces(v)
	changed, configs := e.changes(v, namespaces)
	// The store operation can fail, so it runs first; the rest cannot fail.
	err := e.openLanes(namespaces, changed, configs)
	if err == nil {
		err = e.suspend(changed)
	}
	if err != nil {
		e.applied = nil // Some lanes may be open: the next view sorts the lanes of all namespaces.
		return err
	}
	for _, p := range changed {
		e.compile(p)
	}
	var forget []target
	var deleted []*destination
	e.mu.Lock()
	now := e.o.Now()
	for _, p := range changed {
		forget = append(forget, e.activate(p, now)...)
	}
	for d := range e.registry.in(namespaces) {
		if _, kept := configs[d.key]; !kept && d.set != nil {
			forget = append(forget, d.set.targets...)
			d.set = nil
			deleted = append(deleted, d)
		}
	}
	back := e.sortLanes(v, namespaces, configs, now)
	e.registry.limitDeadLetters(v, namespaces)
	e.wakeWorker()
	e.mu.Unlock()
	e.release(back)
	e.storeResumed(changed)
	for _, t := range forget {
		if t.to != nil {
			e.o.Client.Forget(t.to)
		}
	}
	for _, d := range deleted {
		e.storeBounds(d.key, d.trim)
	}
	e.endLanes(namespaces)
	e.deleteRecords(v, namespaces)
	e.storeOrphans(v)

	e.applied = v
	e.early.set()
	return nil
}

// changes returns the destinations of namespaces whose config is not in effect, and the configs of all of them by key.
// The comparison is fast for a decoded config that shares memory with the previous one.
func (e *Engine) changes(v *liveconfig.View, namespaces []string) (changed []*change, configs map[string]*liveconfig.Destination) {
	configs = map[string]*liveconfig.Destination{}
	for _, namespace := range namespaces {
		c, _ := v.Namespace(namespace)
		applied := destinationsOf(e.applied, namespace)
		same := e.applied != nil && e.applied.HasRevision(namespace, c.Revision)
		for i := range c.Destinations {
			d := &c.Destinations[i]
			configs[namespace+"/"+d.Name] = d
			if same {
				continue
			}
			equal := reflect.DeepEqual(applied[d.Name], d)
			e.mu.Lock()
			if !equal || !e.registry.isApplied(namespace, d) {
				changed = append(changed, &change{namespace: namespace, config: *d, lanes: e.registry.lanesOf(namespace, d)})
			}
			e.mu.Unlock()
		}
	}
	return changed, configs
}

// destinationsOf returns the destinations of a namespace in a view, which may be nil, by name.
func destinationsOf(v *liveconfig.View, namespace string) map[string]*liveconfig.Destination {
	if v == nil {
		return nil
	}
	c, _ := v.Namespace(namespace)
	all := make(map[string]*liveconfig.Destination, len(c.Destinations))
	for i := range c.Destinations {
		all[c.Destinations[i].Name] = &c.Destinations[i]
	}
	return all
}

// changedNamespaces returns the namespaces to which the view in effect and the next one do not give the
// same lanes. After a start it returns all, also namespaces of the earlier run.
func (e *Engine) changedNamespaces(next *liveconfig.View) []string {
	if e.applied != nil {
		return next.Differing(e.applied)
	}
	all := map[string]bool{}
	for _, namespace := range next.Namespaces() {
		all[namespace] = true
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for namespace := range e.registry.perNamespace {
		all[namespace] = true
	}
	for namespace := range e.records.stored {
		all[namespace] = true
	}
	return slices.Collect(maps.Keys(all))
}

// recover restores the lanes and the destinations of an earlier run. Lanes are parked until the config contains them.
func (e *Engine) recover() {
	records, err := e.o.Store.AllMeta()
	if err != nil {
		e.o.Logger.Warn("reading the records of the earlier run failed: circuits start closed, endpoints without history, dead letters of deleted destinations have the default retention, and grace periods begin again", "error", err)
	}
	lanes, destinations := e.o.Store.Lanes(), e.o.Store.Destinations()
	ends, ledgers := map[queue.LaneID]queue.End{}, map[string]queue.Ledger{}
	for _, key := range destinations {
		ledgers[key] = e.o.Store.DestinationStats(key).Ledger
	}
	for _, id := range lanes {
		switch s := e.o.Store.LaneStats(id); {
		case s.EndpointRemoved:
			ends[id] = queue.EndpointRemoved
		case s.Ended:
			ends[id] = queue.Ended
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, id := range lanes {
		e.registry.lane(id).end = ends[id]
	}
	for _, key := range destinations {
		e.registry.destination(key).atStart = ledgers[key]
	}
	e.records.stored, e.orphans.stored = map[string]map[string]health{}, map[string]orphanRecord{}
	for name, value := range records {
		e.restoreRecord(name, value)
	}
}

// openLanes opens the missing lanes of the changes, and the namespaces' lanes of an earlier run that
// the config still contains.
func (e *Engine) openLanes(namespaces []string, changed []*change, configs map[string]*liveconfig.Destination) error {
	e.mu.Lock()
	wanted := e.registry.unopened(namespaces, changed, configs)
	e.mu.Unlock()
	var group errgroup.Group
	group.SetLimit(openAtOnce)
	for id := range wanted {
		group.Go(func() error {
			if err := e.o.Store.OpenLane(id); err != nil {
				return fmt.Errorf("open the lane from source %s to destination %s: %w", id.Source, id.Destination, err)
			}
			e.mu.Lock()
			e.registry.lane(id).opened = true
			e.mu.Unlock()
			return nil
		})
	}
	return group.Wait()
}

// compile makes a change's settings, with the prepared requests of the present ones. If the engine cannot send to the
// destination for a reason that the config's validation did not find, it parks the destination and logs the reason;
// other destinations are not affected.
func (e *Engine) compile(p *change) {
	var old *destinationConfig
	e.mu.Lock()
	if d := e.registry.destinations[p.key()]; d != nil {
		old = d.set
	}
	e.mu.Unlock()
	var err error
	if p.set, err = newDestinationConfig(&p.config, old, e.o.Client); err != nil {
		e.o.Logger.Error("destination has invalid settings; its messages are kept", "namespace", p.namespace, "destination", p.config.Name,
			"error", err)
		p.set.active = false
	}
	p.object = e.o.Changes.Object(changes.Destinations, p.namespace, p.config.Name)
}

// activate puts a change into effect. It returns the prepared requests that are no longer used. The lock is held.
func (e *Engine) activate(p *change, now time.Time) (forget []target) {
	d := e.registry.destination(p.key())
	old := d.set
	if p.resumed {
		p.suspensions = p.suspensions.change(false, p.oldest, now)
	}
	d.set, d.changed, d.suspensions = p.set, p.object, p.suspensions
	d.set.suspensions, d.redaction = p.suspensions, p.set.redaction
	d.trim = &p.set.deadLetters
	if old != nil && old.revision != p.set.revision {
		d.filterFailure, d.changedAt, d.matches = nil, now, matches{}
	}
	endpoints, edited, most := map[string]*liveEndpoint{}, false, e.mostInFlight(d, p.set)
	for i := range p.set.targets {
		name := p.set.configs[i].Name
		ep := d.endpoints[name]
		if ep == nil {
			ep = &liveEndpoint{destination: d, name: name, machine: endpoint.New(most, now)}
			edited = e.records.restore(ep, p.set.revision, e.o.Attempts, now) || edited
			ep.loggedState = ep.machine.Status().State
			if p.set.redaction.rules != nil { // The response may be from before the rules.
				ep.attempts.forgetResponse()
			}
		} else if old == nil || old.revision != p.set.revision {
			ep.machine.Reconfigure(most, now)
			edited = true
		}
		if old != nil && !old.redaction.same(&p.set.redaction) {
			ep.attempts.forgetResponse()
		}
		endpoints[name] = ep
		p.set.targets[i].liveEndpoint = ep
		ep.to = p.set.targets[i].to
		ep.most = most
		ep.setRate(p.set.perSecond, e.shareOf(d), now)
	}
	for _, l := range d.lanes {
		if edited && l.waits {
			l.waitsEnded = now
		}
	}
	if len(endpoints) > 0 { // Unknown endpoints may be the same ones when they are known again.
		d.endpoints = endpoints
	}
	if old == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(old.targets), func(t target) bool {
		return slices.ContainsFunc(p.set.targets, func(u target) bool { return u.to == t.to })
	})
}

// sortLanes assigns the roles of the lanes of namespaces. It returns messages to release. The lock is held.
func (e *Engine) sortLanes(v *liveconfig.View, namespaces []string, configs map[string]*liveconfig.Destination,
	now time.Time) (back []queue.Delivery) {
	for d := range e.registry.in(namespaces) {
		for _, ep := range d.endpoints {
			ep.lanes, ep.turn = nil, 0
		}
		for _, l := range d.lanes {
			before := l.set
			delete(e.orphans.lanes, l)
			if l.place(v, configs[d.key]) {
				e.orphans.add(l, v, now)
			}
			for _, t := range l.targets {
				t.liveEndpoint.lanes = append(t.liveEndpoint.lanes, l)
			}
			if l.parked() || !l.anyClosed() {
				back = append(back, e.scheduler.takeBuffer(l)...)
			}
			if l.set != before {
				l.broken, l.more = false, true
				e.scheduler.enqueue(l)
			}
		}
	}
	return back
}

// endLanes makes the store end the draining lanes of namespaces, after all messages that were accepted before the
// replacing lanes were open, and continue the lanes that are in use again. A message in both lanes
// is delivered twice rather than not at all.
func (e *Engine) endLanes(namespaces []string) {
	var goOn, end []*lane
	e.mu.Lock()
	for d := range e.registry.in(namespaces) {
		for _, l := range d.lanes {
			switch wanted := l.wantedEnd(); wanted {
			case l.end:
			case queue.Active:
				goOn = append(goOn, l)
			default:
				end = append(end, l)
			}
		}
	}
	e.mu.Unlock()
	// Continued lanes first, so that messages accepted in between have a lane.
	for _, l := range append(goOn, end...) {
		wanted := l.wantedEnd() // It changes only under applying, which this function holds.
		if err := e.o.Store.EndLane(l.id, wanted); err != nil {
			e.o.Logger.With(l.id.LogArgs()...).Error("ending a lane failed; retrying", "error", err)
			if !l.draining {
				return
			}
			continue
		}
		e.mu.Lock()
		l.end, l.more = wanted, true
		l.destination.changed.Numbers()
		if set := l.destination.set; l.endpointRemoved && set != nil && l.dropAt.IsZero() {
			l.follow(set)
			for _, t := range l.targets {
				t.liveEndpoint.lanes = append(t.liveEndpoint.lanes, l)
			}
		}
		e.scheduler.enqueue(l)
		e.wakeWorker()
		e.mu.Unlock()
	}
}

// anyEndpoint reports whether the lanes of a destination form groups.
func anyEndpoint(d *liveconfig.Destination) bool { return d.Success != liveconfig.EveryEndpoint }

func parkedDestination(v *liveconfig.View, key string) bool {
	namespace, name := split(key)
	return v.Parked(namespace, liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: name})
}

// hasPlace reports whether a destination's config has a place for a lane: its Source is connected, and its endpoint, if
// it has one, exists, or no endpoint is known. In a group, the other endpoints get the messages of a removed endpoint.
func hasPlace(d *liveconfig.Destination, id queue.LaneID) bool {
	_, source := split(id.Source)
	return (d.SourcesUnknown || slices.Contains(d.Sources, source)) &&
		(id.Endpoint == "" || id.Any || len(d.Endpoints) == 0 || hasEndpoint(d, id.Endpoint))
}

func hasEndpoint(d *liveconfig.Destination, name string) bool {
	return slices.ContainsFunc(d.Endpoints, func(ep liveconfig.Endpoint) bool { return ep.Name == name })
}
