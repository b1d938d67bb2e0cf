package delivery

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
	"github.com/posthorn/posthorn/dispatcher/delivery/sign"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// openAtOnce is the number of lanes that are opened in parallel, so that the store can commit them
// together.
const openAtOnce = 32

// change is a destination of a new config, before it takes effect.
type change struct {
	namespace string
	config    liveconfig.Destination
	lanes     []queue.LaneID
	set       *destinationConfig
	object    *changes.Object
}

func (p *change) key() string { return p.namespace + "/" + p.config.Name }

// Apply updates the lanes to a full config: a destination that is missing in the view, and not parked
// there, counts as deleted by its owner. New lanes are durable when Apply returns, so calls may then be accepted
// with the view. Requests in flight end with their old settings.
//
// An error means that the store failed. Then nothing has changed.
func (e *Engine) Apply(v *liveconfig.View) error {
	e.applying <- struct{}{}
	defer func() { <-e.applying }()
	if !e.recovered {
		e.recover()
	}
	namespaces := e.changedNamespaces(v)
	var changed []*change
	configs := map[string]*liveconfig.Destination{}
	for _, namespace := range namespaces {
		c, _ := v.Namespace(namespace)
		applied := e.appliedIn(namespace)
		same := e.applied != nil && e.applied.HasRevision(namespace, c.Revision)
		for i := range c.Destinations {
			d := &c.Destinations[i]
			configs[namespace+"/"+d.Name] = d
			if !same && !e.isApplied(namespace, applied[d.Name], d) {
				changed = append(changed, &change{namespace: namespace, config: *d, lanes: e.lanesOf(namespace, d)})
			}
		}
	}
	// The store operation can fail, so it runs first; the rest cannot fail.
	if err := e.openLanes(namespaces, changed, configs); err != nil {
		e.applied = nil // Some lanes may be open: the next view sorts the lanes of all namespaces.
		return err
	}
	for _, p := range changed {
		p.set = e.compile(p)
		p.object = e.o.Changes.Object(changes.Destinations, p.namespace, p.config.Name)
	}
	var forget []target
	var deleted []*destination
	e.mu.Lock()
	now := time.Now()
	for _, p := range changed {
		forget = append(forget, e.activate(p, now)...)
	}
	for d := range e.destinationsIn(namespaces) {
		if _, kept := configs[d.key]; !kept && d.set != nil {
			forget = append(forget, d.set.targets...)
			d.set = nil
			deleted = append(deleted, d)
		}
	}
	back := e.sortLanes(v, namespaces, configs, now)
	e.limitDeadLetters(v, namespaces)
	e.wakeWorker()
	e.mu.Unlock()
	e.release(back)
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
	e.wakeMaintenance()
	return nil
}

// appliedIn returns the destinations of a namespace in the view in effect, by name.
func (e *Engine) appliedIn(namespace string) map[string]*liveconfig.Destination {
	if e.applied == nil {
		return nil
	}
	c, _ := e.applied.Namespace(namespace)
	all := make(map[string]*liveconfig.Destination, len(c.Destinations))
	for i := range c.Destinations {
		all[c.Destinations[i].Name] = &c.Destinations[i]
	}
	return all
}

// isApplied reports whether a destination's config is in effect. applied is the destination in the view in
// effect, or nil. The comparison is fast for a decoded config that shares memory with the previous one.
func (e *Engine) isApplied(namespace string, applied, d *liveconfig.Destination) bool {
	if applied == nil || !reflect.DeepEqual(applied, d) {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	known := e.destinations[namespace+"/"+d.Name]
	return known != nil && known.set != nil && known.set.active == (d.State == liveconfig.Active)
}

// changedNamespaces returns the namespaces to which the view in effect and the next one do not give the
// same lanes. After a start it returns all, also namespaces of the earlier run.
func (e *Engine) changedNamespaces(next *liveconfig.View) []string {
	if e.applied != nil {
		return next.Differing(e.applied)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	all := map[string]bool{}
	for _, namespace := range next.Namespaces() {
		all[namespace] = true
	}
	for namespace := range e.perNamespace {
		all[namespace] = true
	}
	for namespace := range e.records {
		all[namespace] = true
	}
	return slices.Collect(maps.Keys(all))
}

// destinationsIn iterates over the destinations of namespaces. The lock is held.
func (e *Engine) destinationsIn(namespaces []string) iter.Seq[*destination] {
	return func(yield func(*destination) bool) {
		for _, name := range namespaces {
			n := e.perNamespace[name]
			if n == nil {
				continue
			}
			for d := range n.destinations {
				if !yield(d) {
					return
				}
			}
		}
	}
}

// recover restores the lanes and the destinations of an earlier run. Lanes are parked until the
// config contains them.
func (e *Engine) recover() {
	endpoints, bounds, orphans := e.loadRecords()
	e.orphanRecords = orphans
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
		e.lane(id).end = ends[id]
	}
	for _, key := range destinations {
		d := e.destination(key)
		d.atStart = ledgers[key]
		if b, ok := bounds[key]; ok {
			d.trim = &b
		}
	}
	e.records = map[string]map[string]health{}
	for name, r := range endpoints {
		e.setRecord(name, r)
	}
	e.recovered = true
}

// retainedAsDefault bounds the dead letters of destinations that were deleted while the dispatcher
// was stopped, so that their own bounds are unknown: the API's defaults.
var retainedAsDefault = liveconfig.DeadLetters{RetentionMS: (7 * 24 * time.Hour).Milliseconds(), MaxBytes: 1 << 30}

// limitDeadLetters bounds the dead letters of namespaces' destinations that are missing in the config, except for
// those that are parked. The lock is held.
func (e *Engine) limitDeadLetters(v *liveconfig.View, namespaces []string) {
	for d := range e.destinationsIn(namespaces) {
		d.parked = parkedDestination(v, d.key)
		if d.trim == nil && !d.parked {
			d.trim = &retainedAsDefault
		}
	}
}

// lanesOf lists the lanes that a destination needs: one per Source and endpoint. A destination with
// unknown endpoints (it is paused) keeps its messages in its existing lanes, or in one lane per
// Source.
func (e *Engine) lanesOf(namespace string, d *liveconfig.Destination) []queue.LaneID {
	e.mu.Lock()
	defer e.mu.Unlock()
	var ids []queue.LaneID
	for _, s := range d.Sources {
		source, key := namespace+"/"+s, namespace+"/"+d.Name
		if known := e.destinations[key]; len(d.Endpoints) == 0 && known != nil &&
			slices.ContainsFunc(known.lanes, func(l *lane) bool { return l.id.Source == source }) {
			continue
		}
		for _, ep := range d.Endpoints {
			ids = append(ids, queue.LaneID{Source: source, Destination: key, Endpoint: ep.Name, Any: anyEndpoint(d)})
		}
		if len(d.Endpoints) == 0 {
			ids = append(ids, queue.LaneID{Source: source, Destination: key})
		}
	}
	return ids
}

// anyEndpoint reports whether the lanes of a destination form groups.
func anyEndpoint(d *liveconfig.Destination) bool { return d.Success != liveconfig.EveryEndpoint }

// openLanes opens the missing lanes of the changes, and the namespaces' lanes of an earlier run that
// the config still contains.
func (e *Engine) openLanes(namespaces []string, changed []*change, configs map[string]*liveconfig.Destination) error {
	wanted := map[queue.LaneID]bool{}
	e.mu.Lock()
	for _, p := range changed {
		for _, id := range p.lanes {
			if l := e.lanes[id]; l == nil || !l.opened {
				wanted[id] = true
			}
		}
	}
	for d := range e.destinationsIn(namespaces) {
		config := configs[d.key]
		for _, l := range d.lanes {
			if config != nil && !l.opened && hasPlace(config, l.id) {
				wanted[l.id] = true
			}
		}
	}
	e.mu.Unlock()
	var group errgroup.Group
	group.SetLimit(openAtOnce)
	for id := range wanted {
		group.Go(func() error {
			if err := e.o.Store.OpenLane(id); err != nil {
				return fmt.Errorf("open the lane from source %s to destination %s: %w", id.Source, id.Destination, err)
			}
			e.mu.Lock()
			e.lane(id).opened = true
			e.mu.Unlock()
			return nil
		})
	}
	return group.Wait()
}

// compile makes a change's settings. If the engine cannot send to the destination for a reason that
// the config's validation did not find, it parks the destination and logs the reason; other
// destinations are not affected.
func (e *Engine) compile(p *change) *destinationConfig {
	c := p.config
	s := &destinationConfig{
		generation: c.Generation, revision: c.Revision, configs: c.Endpoints,
		active:      c.State == liveconfig.Active,
		policy:      retry.Policy{Window: c.Delivery.RetryWindow(), MinBackoff: c.Delivery.MinBackoff(), MaxBackoff: c.Delivery.MaxBackoff(), Timeout: c.Delivery.Timeout(), StatusCodes: c.Delivery.RetryStatusCodes},
		maxInFlight: max(1, c.Delivery.MaxInFlight), perSecond: c.Delivery.RequestsPerSecond,
		deadLetters: c.DeadLetters, exactNumbers: c.ExactNumbers,
	}
	e.mu.Lock()
	var old *destinationConfig
	if d := e.destinations[p.key()]; d != nil {
		old = d.set
	}
	e.mu.Unlock()
	var errs []error
	if s.active {
		var err error
		s.signer, err = sign.New(c.Signing)
		errs = append(errs, err)
	}
	for _, config := range c.Endpoints {
		t := target{to: old.prepared(config)}
		if t.to == nil && s.active {
			var err error
			if t.to, err = e.o.Client.Prepare(config); err != nil {
				errs = append(errs, fmt.Errorf("endpoint %q: %w", config.Name, err))
			}
		}
		s.targets = append(s.targets, t)
	}
	if err := errors.Join(errs...); err != nil {
		e.log.Error("destination has invalid settings; its messages are kept", "namespace", p.namespace, "destination", c.Name, "error", err)
		s.active = false
	}
	return s
}

// prepared returns the prepared request of an endpoint with unchanged config, or nil.
func (s *destinationConfig) prepared(config liveconfig.Endpoint) *egress.Endpoint {
	if s == nil {
		return nil
	}
	for i, old := range s.configs {
		if reflect.DeepEqual(old, config) {
			return s.targets[i].to
		}
	}
	return nil
}

// activate puts a change into effect. It returns the prepared requests that are no longer used. The
// lock is held.
func (e *Engine) activate(p *change, now time.Time) (forget []target) {
	d := e.destination(p.key())
	old := d.set
	d.set, d.changed = p.set, p.object
	d.trim = &p.set.deadLetters
	if old != nil && old.revision != p.set.revision {
		d.filterFailure, d.changedAt = nil, now
	}
	endpoints, edited := map[string]*liveEndpoint{}, false
	for i := range p.set.targets {
		name := p.set.configs[i].Name
		ep := d.endpoints[name]
		if ep == nil {
			ep = &liveEndpoint{destination: d, name: name, machine: endpoint.New(p.set.maxInFlight, now)}
			edited = e.restoreHealth(ep, p.set.revision, now) || edited
			ep.loggedState = ep.machine.Status().State
		} else if old == nil || old.revision != p.set.revision {
			ep.machine.Reconfigure(p.set.maxInFlight, now)
			edited = true
		}
		endpoints[name] = ep
		p.set.targets[i].liveEndpoint = ep
		ep.to = p.set.targets[i].to
		ep.setRate(p.set.perSecond)
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

// destination returns a destination and creates it if necessary. The lock is held.
func (e *Engine) destination(key string) *destination {
	d := e.destinations[key]
	if d == nil {
		in, name := split(key)
		owner := e.perNamespace[in]
		if owner == nil {
			owner = &namespace{destinations: map[*destination]struct{}{}}
			e.perNamespace[in] = owner
		}
		d = &destination{key: key, namespace: in, name: name, owner: owner, endpoints: map[string]*liveEndpoint{}}
		owner.destinations[d] = struct{}{}
		e.destinations[key] = d
	}
	return d
}

// deleteDestination removes a destination without lanes. The lock is held.
func (e *Engine) deleteDestination(d *destination) {
	delete(e.destinations, d.key)
	if delete(d.owner.destinations, d); len(d.owner.destinations) == 0 {
		delete(e.perNamespace, d.namespace)
	}
}

// lane returns a lane and creates it if necessary. The lock is held.
func (e *Engine) lane(id queue.LaneID) *lane {
	l := e.lanes[id]
	if l == nil {
		d := e.destination(id.Destination)
		l = &lane{id: id, destination: d, owner: d.owner, waits: true}
		l.destination.lanes = append(l.destination.lanes, l)
		e.lanes[id] = l
		e.bySource[id.Source] = append(e.bySource[id.Source], l)
	}
	return l
}

// sortLanes assigns the roles of the lanes of namespaces. It returns messages to release. The lock is
// held.
func (e *Engine) sortLanes(v *liveconfig.View, namespaces []string, configs map[string]*liveconfig.Destination, now time.Time) (back []queue.Delivery) {
	for d := range e.destinationsIn(namespaces) {
		for _, ep := range d.endpoints {
			ep.lanes, ep.turn = nil, 0
		}
		for _, l := range d.lanes {
			before := l.set
			delete(e.orphans, l)
			e.sortLane(v, l, configs[d.key], now)
			for _, t := range l.targets {
				t.liveEndpoint.lanes = append(t.liveEndpoint.lanes, l)
			}
			if l.parked() || !l.anyClosed() {
				back = append(back, e.takeBuffer(l)...)
			}
			if l.set != before {
				l.broken, l.more = false, true
				e.enqueue(l)
			}
		}
	}
	return back
}

// sortLane assigns the role of a lane under the config of its destination, which is nil if there is none: a
// lane of the config; a draining lane, because it belongs to the destination's former success policy or its
// endpoint was removed from a group; or an orphan. The lock is held.
func (e *Engine) sortLane(v *liveconfig.View, l *lane, config *liveconfig.Destination, now time.Time) {
	id, set := l.id, l.destination.set
	// A lane of the former success policy drains: other lanes have taken over.
	known := config != nil && len(config.Endpoints) > 0
	former := known && (id.Endpoint == "" || id.Any != anyEndpoint(config))
	switch {
	case parkedLane(v, id):
		l.park(nil)
		l.draining, l.endpointRemoved = l.end != queue.Active, l.end == queue.EndpointRemoved
		l.dropAt = time.Time{} // Its config is unknown and may contain the lane.
	case config == nil || !hasPlace(config, id):
		// Unless others have taken over, the lane still receives its Source's messages: the
		// destination may be restored.
		l.park(set)
		l.draining = l.end != queue.Active || former
		e.orphan(l, v, now)
	default:
		l.dropAt = time.Time{}
		if l.draining, l.endpointRemoved = l.end != queue.Active, l.end == queue.EndpointRemoved; known {
			l.endpointRemoved = id.Any && !hasEndpoint(config, id.Endpoint)
			l.draining = former || l.endpointRemoved
		}
		l.follow(set)
	}
}

// orphan sets the time at which a lane without a place in the config is dropped. The lock is held.
func (e *Engine) orphan(l *lane, v *liveconfig.View, now time.Time) {
	e.orphans[l] = true
	_, source := split(l.id.Source)
	lostAt := v.LostSince(l.id.Destination, source, l.id.Endpoint)
	if lost := !lostAt.IsZero(); l.dropAt.IsZero() || l.lost && !lost {
		l.lost, l.removedAt = lost, now
		if r, stored := e.orphanRecords[orphanName(l.id)]; stored && !lost && l.dropAt.IsZero() {
			l.removedAt, l.pendingAtRemoval = r.RemovedAt, r.Pending
		}
		l.dropAt = l.removedAt.Add(e.o.OrphanGrace)
		if lost {
			l.dropAt = now.Add(e.o.OrphanGrace)
			l.removedAt = lostAt
			if parked := lostAt.Add(liveconfig.ParkingTime); parked.After(l.dropAt) {
				l.dropAt = parked
			}
		}
		e.log.With(l.id.LogArgs()...).Warn("destination, endpoint or Source removed; its pending messages are discarded after the grace period", "dropAt", l.dropAt, "certain", !lost)
	}
}

// parkedLane reports whether a lane's destination or Source is parked.
func parkedLane(v *liveconfig.View, id queue.LaneID) bool {
	namespace, source := split(id.Source)
	return parkedDestination(v, id.Destination) || v.Parked(namespace, liveconfig.Ref{Section: liveconfig.SectionSources, Name: source})
}

func parkedDestination(v *liveconfig.View, key string) bool {
	namespace, name := split(key)
	return v.Parked(namespace, liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: name})
}

// hasPlace reports whether a destination's config has a place for a lane: its Source is connected,
// and its endpoint, if it has one, exists, or no endpoint is known. In a group, the other endpoints
// get the messages of a removed endpoint.
func hasPlace(d *liveconfig.Destination, id queue.LaneID) bool {
	_, source := split(id.Source)
	return (d.SourcesUnknown || slices.Contains(d.Sources, source)) && (id.Endpoint == "" || id.Any || len(d.Endpoints) == 0 || hasEndpoint(d, id.Endpoint))
}

func hasEndpoint(d *liveconfig.Destination, name string) bool {
	return slices.ContainsFunc(d.Endpoints, func(ep liveconfig.Endpoint) bool { return ep.Name == name })
}

// park removes a lane's endpoints, so that nothing is sent.
func (l *lane) park(set *destinationConfig) { l.set, l.targets = set, nil }

// follow applies the destination's settings to a lane. A lane whose endpoint was removed is parked
// until the store has ended it: before that, the store would lease messages to it that other lanes
// of the group have, too.
func (l *lane) follow(set *destinationConfig) {
	l.park(set)
	if !set.active || l.endpointRemoved && l.end != queue.EndpointRemoved {
		return
	}
	for _, t := range set.targets {
		if l.id.Endpoint == "" || l.endpointRemoved || l.id.Endpoint == t.name {
			l.targets = append(l.targets, t)
		}
	}
}

// endLanes makes the store end the draining lanes of namespaces, after all messages that were accepted before the
// replacing lanes were open, and continue the lanes that are in use again. A message in both lanes
// is delivered twice rather than not at all.
func (e *Engine) endLanes(namespaces []string) {
	var goOn, end []*lane
	e.mu.Lock()
	for d := range e.destinationsIn(namespaces) {
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
			e.log.With(l.id.LogArgs()...).Error("ending a lane failed; retrying", "error", err)
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
		e.enqueue(l)
		e.wakeWorker()
		e.mu.Unlock()
	}
}

// wantedEnd is the end of the lane that the store should have.
func (l *lane) wantedEnd() queue.End {
	switch {
	case l.endpointRemoved:
		return queue.EndpointRemoved
	case l.draining:
		return queue.Ended
	}
	return queue.Active
}

// split splits "namespace/name".
func split(key string) (namespace, name string) {
	namespace, name, _ = strings.Cut(key, "/")
	return namespace, name
}
