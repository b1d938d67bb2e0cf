package delivery

import (
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// registry has the lanes of this run and of earlier ones, with their destinations and namespaces. The engine's lock
// guards it, and every lane, destination and endpoint.
type registry struct {
	destinations map[string]*destination
	// perNamespace has an entry for each namespace with a destination.
	perNamespace map[string]*namespace
	lanes        map[queue.LaneID]*lane
	bySource     map[string][]*lane
}

// namespace has what the destinations of a namespace share: the turns of their lanes, and counters
// that include deleted destinations.
type namespace struct {
	// destinations has the engine's destinations in the namespace.
	destinations map[*destination]struct{}
	// inFlight counts requests; load counts these, the lanes in queues and the leases in progress.
	inFlight, load int
	// ready are the lanes in the ready queue; readyIndex is the place of the namespace in it,
	// readyTurn orders namespaces with equally many requests in flight.
	ready      fifo
	readyIndex int
	readyTurn  uint64
	// blocked and blockedFailing are the lanes in the queues of the same names.
	blocked, blockedFailing waitingLanes
	// leases counts the leases in progress; toLease are the lanes that wait for the end of one.
	leases  int
	toLease fifo
	// buffered and leasedBytes are the parts of scheduler.bufferedBytes and scheduler.leasedBytes of the namespace's lanes.
	buffered, leasedBytes int

	attempts attemptCounts
	dead     deadCounts

	// evaluating is held during an evaluation of an expression, without the engine's lock.
	evaluating *sync.Mutex
}

// isApplied reports whether a destination has the state of a config.
func (r *registry) isApplied(namespace string, d *liveconfig.Destination) bool {
	known := r.destinations[namespace+"/"+d.Name]
	return known != nil && known.set != nil && known.set.active == (d.State == liveconfig.Active)
}

// in iterates over the destinations of namespaces.
func (r *registry) in(namespaces []string) iter.Seq[*destination] {
	return func(yield func(*destination) bool) {
		for _, name := range namespaces {
			n := r.perNamespace[name]
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

// retainedAsDefault bounds the dead letters of destinations that were deleted while the dispatcher
// was stopped, so that their own bounds are unknown: the API's defaults.
var retainedAsDefault = liveconfig.DeadLetters{RetentionMS: (7 * 24 * time.Hour).Milliseconds(), MaxBytes: 1 << 30}

// limitDeadLetters bounds the dead letters of namespaces' destinations that are missing in the config, except for
// those that are parked.
func (r *registry) limitDeadLetters(v *liveconfig.View, namespaces []string) {
	for d := range r.in(namespaces) {
		d.parked = parkedDestination(v, d.key)
		if d.trim == nil && !d.parked {
			d.trim = &retainedAsDefault
		}
	}
}

// lanesOf lists the lanes that a destination needs: one per Source and endpoint. A destination with unknown endpoints
// (it is paused) keeps its messages in its existing lanes, or in one lane per Source.
func (r *registry) lanesOf(namespace string, d *liveconfig.Destination) []queue.LaneID {
	var ids []queue.LaneID
	for _, s := range d.Sources {
		source, key := namespace+"/"+s, namespace+"/"+d.Name
		if known := r.destinations[key]; len(d.Endpoints) == 0 && known != nil &&
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

// destination returns a destination and creates it if necessary.
func (r *registry) destination(key string) *destination {
	d := r.destinations[key]
	if d == nil {
		in, name := split(key)
		owner := r.perNamespace[in]
		if owner == nil {
			owner = &namespace{destinations: map[*destination]struct{}{}, evaluating: new(sync.Mutex)}
			r.perNamespace[in] = owner
		}
		d = &destination{key: key, namespace: in, name: name, owner: owner, endpoints: map[string]*liveEndpoint{}}
		owner.destinations[d] = struct{}{}
		r.destinations[key] = d
	}
	return d
}

// deleteDestination removes a destination without lanes.
func (r *registry) deleteDestination(d *destination) {
	delete(r.destinations, d.key)
	if delete(d.owner.destinations, d); len(d.owner.destinations) == 0 {
		delete(r.perNamespace, d.namespace)
	}
}

// lane returns a lane and creates it if necessary.
func (r *registry) lane(id queue.LaneID) *lane {
	l := r.lanes[id]
	if l == nil {
		d := r.destination(id.Destination)
		l = &lane{id: id, destination: d, owner: d.owner, waits: true}
		l.destination.lanes = append(l.destination.lanes, l)
		r.lanes[id] = l
		r.bySource[id.Source] = append(r.bySource[id.Source], l)
	}
	return l
}

// split splits "namespace/name".
func split(key string) (namespace, name string) {
	namespace, name, _ = strings.Cut(key, "/")
	return namespace, name
}

// forget removes a dropped lane.
func (r *registry) forget(l *lane) {
	delete(r.lanes, l.id)
	same := func(other *lane) bool { return other == l }
	for _, t := range l.targets {
		t.liveEndpoint.lanes = slices.DeleteFunc(slices.Clone(t.liveEndpoint.lanes), same)
		t.liveEndpoint.turn = 0
	}
	l.targets = nil
	if rest := slices.DeleteFunc(slices.Clone(r.bySource[l.id.Source]), same); len(rest) > 0 {
		r.bySource[l.id.Source] = rest
	} else {
		delete(r.bySource, l.id.Source)
	}
	d := l.destination
	d.changed.Numbers()
	d.lanes = slices.DeleteFunc(slices.Clone(d.lanes), same)
}

// unopened returns the lanes that changes need and the store has not opened, and the namespaces' lanes of an earlier run
// that the config still contains.
func (r *registry) unopened(namespaces []string, changed []*change, configs map[string]*liveconfig.Destination) map[queue.LaneID]bool {
	wanted := map[queue.LaneID]bool{}
	for _, p := range changed {
		for _, id := range p.lanes {
			if l := r.lanes[id]; l == nil || !l.opened {
				wanted[id] = true
			}
		}
	}
	for d := range r.in(namespaces) {
		config := configs[d.key]
		for _, l := range d.lanes {
			if config != nil && !l.opened && hasPlace(config, l.id) {
				wanted[l.id] = true
			}
		}
	}
	return wanted
}
