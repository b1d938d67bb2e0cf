package delivery

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
	"github.com/posthorn/posthorn/dispatcher/delivery/sign"
	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// openAtOnce is how many lanes are opened in parallel, so that the store can commit them together.
const openAtOnce = 32

// plan is a destination of a new config, on its way into effect.
type plan struct {
	namespace string
	config    liveconfig.Destination
	lanes     []queue.LaneID
	set       *settings
}

func (p *plan) key() string { return p.namespace + "/" + p.config.Name }

// Apply makes the lanes follow a full config: every destination that the view
// lacks counts as deleted by its owner. New lanes are durable when Apply
// returns, so the view may then be used for taking calls. Requests in flight
// end under the settings they began with.
//
// An error means that the store failed. Then nothing has changed.
func (e *Engine) Apply(v *liveconfig.View) error {
	e.applying <- struct{}{}
	defer func() { <-e.applying }()
	if !e.recovered {
		e.recover()
	}
	var plans []*plan
	configs := map[string]liveconfig.Destination{}
	revisions := map[string]string{}
	for _, tenant := range v.Tenants() {
		c, _ := v.Tenant(tenant)
		revisions[tenant] = c.Revision
		old, known := e.revisions[tenant]
		for _, d := range c.Destinations {
			configs[tenant+"/"+d.Name] = d
			if !known || old != c.Revision {
				plans = append(plans, &plan{namespace: tenant, config: d, lanes: e.lanesOf(tenant, d)})
			}
		}
	}
	// First the store, which may fail, then the rest, which cannot.
	if err := e.openLanes(plans, configs); err != nil {
		return err
	}
	for _, p := range plans {
		p.set = e.compile(p)
	}
	var forget []target
	var deleted []*destination
	e.mu.Lock()
	now := time.Now()
	for _, p := range plans {
		forget = append(forget, e.put(p, now)...)
	}
	for key, d := range e.destinations {
		if _, kept := configs[key]; !kept && d.set != nil && !v.Unusable(d.namespace) {
			forget = append(forget, d.set.targets...)
			d.set = nil
			deleted = append(deleted, d)
		}
	}
	back := e.sortLanes(v, configs, now)
	e.limitDeadLetters(v)
	e.index()
	e.kick()
	e.mu.Unlock()
	e.release(back)
	for _, t := range forget {
		if t.to != nil {
			e.o.Client.Forget(t.to)
		}
	}
	for _, d := range deleted {
		e.rememberBounds(d.key, d.trim)
	}
	e.endLanes()
	e.forgetOutages(v)

	for tenant, revision := range e.revisions {
		if v.Unusable(tenant) && revisions[tenant] == "" {
			revisions[tenant] = revision
		}
	}
	e.revisions = revisions
	e.wakeMaintenance()
	return nil
}

// recover takes up the lanes and the destinations of an earlier run. Until the
// config names them, lanes are parked.
func (e *Engine) recover() {
	outages, bounds := e.recoverMemory()
	lanes, destinations := e.o.Store.Lanes(), e.o.Store.Destinations()
	ends := map[queue.LaneID]queue.End{}
	for _, id := range lanes {
		switch s := e.o.Store.LaneStats(id); {
		case s.Left:
			ends[id] = queue.Left
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
		if b, ok := bounds[key]; ok {
			e.destination(key).trim = &b
		} else {
			e.destination(key)
		}
	}
	e.outages = outages
	e.recovered = true
}

// retainedAsDefault bounds the dead letters of destinations that were deleted
// while nothing ran, whose own bounds nobody knows any more: the API's defaults.
var retainedAsDefault = liveconfig.DeadLetters{RetentionMS: (7 * 24 * time.Hour).Milliseconds(), MaxBytes: 1 << 30}

// limitDeadLetters bounds the dead letters of destinations that the config does not name. The lock is held.
func (e *Engine) limitDeadLetters(v *liveconfig.View) {
	for _, d := range e.destinations {
		if d.trim == nil && !v.Unusable(d.namespace) {
			d.trim = &retainedAsDefault
		}
	}
}

// lanesOf lists the lanes that a destination needs: one per Source and endpoint.
// A destination whose endpoints are not known (it is held) keeps its messages in
// the lanes that it has, or in one per Source.
func (e *Engine) lanesOf(tenant string, d liveconfig.Destination) []queue.LaneID {
	e.mu.Lock()
	defer e.mu.Unlock()
	var ids []queue.LaneID
	for _, s := range d.Sources {
		source, key := tenant+"/"+s, tenant+"/"+d.Name
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
func anyEndpoint(d liveconfig.Destination) bool { return d.Success != liveconfig.EveryEndpoint }

// openLanes opens what is not open yet: the lanes of the plans, and those of
// an earlier run that still have a place in the config.
func (e *Engine) openLanes(plans []*plan, configs map[string]liveconfig.Destination) error {
	wanted := map[queue.LaneID]bool{}
	e.mu.Lock()
	for _, p := range plans {
		for _, id := range p.lanes {
			if l := e.lanes[id]; l == nil || !l.opened {
				wanted[id] = true
			}
		}
	}
	for id, l := range e.lanes {
		if d, ok := configs[id.Destination]; ok && !l.opened && hasPlace(d, id) {
			wanted[id] = true
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

// compile makes a plan's settings. A destination that cannot be sent to for a
// reason that the config's own checks did not see is parked and logged; it
// harms nobody else.
func (e *Engine) compile(p *plan) *settings {
	c := p.config
	s := &settings{
		generation: c.Generation, revision: c.Revision, configs: c.Endpoints,
		active:      c.State == liveconfig.Active,
		policy:      retry.Policy{Window: c.Delivery.RetryWindow(), MinBackoff: c.Delivery.MinBackoff(), MaxBackoff: c.Delivery.MaxBackoff(), Timeout: c.Delivery.Timeout()},
		maxInFlight: max(1, c.Delivery.MaxInFlight), perSecond: c.Delivery.RequestsPerSecond,
		deadLetters: c.DeadLetters, exactNumbers: c.ExactNumbers,
	}
	e.mu.Lock()
	var old *settings
	if d := e.destinations[p.key()]; d != nil {
		old = d.set
	}
	e.mu.Unlock()
	var errs []error
	if c.Signing != nil && s.active {
		var err error
		s.signer, err = sign.New(*c.Signing)
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
		e.log.Error("destination cannot be sent to; its messages are kept", "namespace", p.namespace, "destination", c.Name, "error", err)
		s.active = false
	}
	return s
}

// prepared returns the prepared request of an endpoint whose config is unchanged, or nil.
// It keeps the connections that are open.
func (s *settings) prepared(config liveconfig.Endpoint) *egress.Endpoint {
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

// put makes a plan's settings those of its destination. It returns the
// prepared requests that nobody needs any more. The lock is held.
func (e *Engine) put(p *plan, now time.Time) (forget []target) {
	d := e.destination(p.key())
	old := d.set
	d.set = p.set
	d.trim = &p.set.deadLetters
	endpoints := map[string]*endpoint{}
	for i := range p.set.targets {
		name := p.set.configs[i].Name
		ep := d.endpoints[name]
		if ep == nil {
			ep = &endpoint{destination: d, name: name, circuit: newCircuit(p.set.maxInFlight)}
			ep.health.state = liveconfig.EndpointIdle
			ep.health.since = now
			if o, ok := e.outages[ep.outageName()]; ok {
				ep.resume(o, p.set.revision, now)
			}
			ep.told = ep.health.state
		} else if old == nil || old.revision != p.set.revision {
			ep.circuit.setLimit(p.set.maxInFlight)
			ep.circuit.probeNow(now) // The owner may just have mended it.
			ep.health.changed(now, &ep.circuit)
		}
		endpoints[name] = ep
		p.set.targets[i].endpoint = ep
		ep.to = p.set.targets[i].to
		ep.bucket.setRate(p.set.perSecond)
	}
	if len(endpoints) > 0 { // Or they are not known now, and are the same when they are again.
		d.endpoints = endpoints
	}
	if old == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(old.targets), func(t target) bool {
		return slices.ContainsFunc(p.set.targets, func(u target) bool { return u.to == t.to })
	})
}

// destination returns a destination, made when new. The lock is held.
func (e *Engine) destination(key string) *destination {
	d := e.destinations[key]
	if d == nil {
		namespace, name := split(key)
		d = &destination{key: key, namespace: namespace, name: name, endpoints: map[string]*endpoint{}}
		e.destinations[key] = d
	}
	return d
}

// lane returns a lane, made when new. The lock is held.
func (e *Engine) lane(id queue.LaneID) *lane {
	l := e.lanes[id]
	if l == nil {
		l = &lane{id: id, destination: e.destination(id.Destination)}
		l.destination.lanes = append(l.destination.lanes, l)
		e.lanes[id] = l
	}
	return l
}

// sortLanes decides for each lane what it is under the present settings: one
// that the config names; one that drains, because it is of the destination's
// former success policy or its endpoint was removed from a group; or an orphan.
// It returns messages to release. The lock is held.
func (e *Engine) sortLanes(v *liveconfig.View, configs map[string]liveconfig.Destination, now time.Time) (back []queue.Delivery) {
	for _, d := range e.destinations {
		for _, ep := range d.endpoints {
			ep.lanes, ep.turn = nil, 0
		}
	}
	for id, l := range e.lanes {
		d, before := l.destination, l.set
		config, ok := configs[id.Destination]
		// A lane of the former success policy drains: others have taken over.
		known := ok && len(config.Endpoints) > 0
		former := known && (id.Endpoint == "" || id.Any != anyEndpoint(config))
		switch {
		case v.Unusable(d.namespace):
			l.draining, l.left = l.end != queue.GoOn, l.end == queue.Left
			l.dropAt = time.Time{} // Its config may well name the lane; nobody can tell.
		case !ok || !hasPlace(config, id):
			// Unless others have taken over it keeps what its Source gets: it may come back.
			l.park(d.set)
			l.draining = l.end != queue.GoOn || former
			if l.dropAt.IsZero() {
				l.dropAt = now.Add(e.o.OrphanGrace)
				e.log.With(id.LogArgs()...).Info("the config does not name this lane any more; it is dropped after the grace period", "dropAt", l.dropAt)
			}
		default:
			l.dropAt = time.Time{}
			if l.draining, l.left = l.end != queue.GoOn, l.end == queue.Left; known {
				l.left = id.Any && !hasEndpoint(config, id.Endpoint)
				l.draining = former || l.left
			}
			l.follow(d.set)
		}
		for _, t := range l.targets {
			t.endpoint.lanes = append(t.endpoint.lanes, l)
		}
		if l.parked() || !l.anyClosed() {
			back = append(back, e.takeBuffer(l)...)
		}
		if l.set != before {
			l.broken, l.more = false, true
			e.enqueue(l)
		}
	}
	return back
}

// hasPlace reports whether a lane has any place in its destination's config: its
// Source is connected, and its endpoint, if it has one, exists or may exist, as
// none is known. In a group the other endpoints get what only it had.
func hasPlace(d liveconfig.Destination, id queue.LaneID) bool {
	_, source := split(id.Source)
	return slices.Contains(d.Sources, source) && (id.Endpoint == "" || id.Any || len(d.Endpoints) == 0 || hasEndpoint(d, id.Endpoint))
}

func hasEndpoint(d liveconfig.Destination, name string) bool {
	return slices.ContainsFunc(d.Endpoints, func(ep liveconfig.Endpoint) bool { return ep.Name == name })
}

// park takes a lane's endpoints away.
func (l *lane) park(set *settings) { l.set, l.targets = set, nil }

// follow gives a lane its destination's settings.
func (l *lane) follow(set *settings) {
	l.park(set)
	if !set.active {
		return
	}
	for _, t := range set.targets {
		if l.id.Endpoint == "" || l.left || l.id.Endpoint == t.name {
			l.targets = append(l.targets, t)
		}
	}
}

// endLanes makes the store end the lanes that drain, behind all that was
// accepted before the lanes that take over were open, and continue those that
// are in use again. What both see is delivered twice rather than not at all.
func (e *Engine) endLanes() {
	var goOn, end []*lane
	e.mu.Lock()
	for _, l := range e.lanes {
		switch wanted := l.wantedEnd(); wanted {
		case l.end:
		case queue.GoOn:
			goOn = append(goOn, l)
		default:
			end = append(end, l)
		}
	}
	e.mu.Unlock()
	// First those that go on, or what comes in between would be nobody's.
	for _, l := range append(goOn, end...) {
		wanted := l.wantedEnd() // It changes only under applying, which is held.
		if err := e.o.Store.EndLane(l.id, wanted); err != nil {
			e.log.With(l.id.LogArgs()...).Error("ending a lane failed; trying again", "error", err)
			if !l.draining {
				return
			}
			continue
		}
		e.mu.Lock()
		l.end, l.more = wanted, true
		e.enqueue(l)
		e.kick()
		e.mu.Unlock()
	}
}

// wantedEnd is what the store should know of the lane's end.
func (l *lane) wantedEnd() queue.End {
	switch {
	case l.left:
		return queue.Left
	case l.draining:
		return queue.Ended
	}
	return queue.GoOn
}

// index lists the destinations of each tenant by name, for reports. The lock is held.
func (e *Engine) index() {
	e.tenants = map[string][]*destination{}
	for _, key := range slices.Sorted(maps.Keys(e.destinations)) {
		if d := e.destinations[key]; d.set != nil {
			e.tenants[d.namespace] = append(e.tenants[d.namespace], d)
		}
	}
}

// split splits "namespace/name".
func split(key string) (namespace, name string) {
	namespace, name, _ = strings.Cut(key, "/")
	return namespace, name
}
