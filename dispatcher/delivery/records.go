package delivery

import (
	"encoding/json"
	"errors"
	"maps"
	"strings"

	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// circuitPrefix is the prefix of the names under which the store keeps open circuits.
const circuitPrefix = "circuit/"

func (ep *liveEndpoint) recordName() string {
	return circuitPrefix + ep.destination.key + "/" + ep.name
}

// storeCircuit stores the endpoint's circuit while it is open. The lock is not held.
func (e *Engine) storeCircuit(ep *liveEndpoint) {
	e.recordsMu.Lock()
	defer e.recordsMu.Unlock()
	e.mu.Lock()
	name, known := ep.recordName(), ep.destination.set != nil && ep.destination.endpoints[ep.name] == ep
	var value []byte
	if ep.machine.Open() && known {
		r := ep.machine.Record(ep.destination.set.revision)
		value, _ = json.Marshal(r) // No field can fail to marshal.
		e.circuits[name] = r
	} else {
		delete(e.circuits, name)
	}
	e.mu.Unlock()
	e.putCircuit(name, value)
}

func (e *Engine) putCircuit(name string, value []byte) {
	if err := e.o.Store.PutMeta(name, value); err != nil && !errors.Is(err, queue.ErrClosed) {
		e.log.Warn("storing an endpoint's circuit state failed; it resets on restart", "circuit", name, "error", err)
	}
}

// loadRecords reads the records of the earlier run: the open circuits, and the bounds of the dead
// letters of deleted destinations.
func (e *Engine) loadRecords() (map[string]endpoint.Record, map[string]liveconfig.DeadLetters) {
	circuits, bounds := map[string]endpoint.Record{}, map[string]liveconfig.DeadLetters{}
	all, err := e.o.Store.AllMeta()
	if err != nil {
		e.log.Warn("reading the records of the earlier run failed: circuits start closed, dead letters of deleted destinations have the default retention", "error", err)
	}
	for name, value := range all {
		var r endpoint.Record
		var b liveconfig.DeadLetters
		if strings.HasPrefix(name, circuitPrefix) && json.Unmarshal(value, &r) == nil {
			circuits[name] = r
		} else if key, ok := strings.CutPrefix(name, boundsPrefix); ok && json.Unmarshal(value, &b) == nil {
			bounds[key] = b
		}
	}
	return circuits, bounds
}

// boundsPrefix is the prefix of the names under which the store keeps the bounds of the dead
// letters of removed destinations.
const boundsPrefix = "deadletters/"

// storeBounds stores the bounds of a deleted destination's dead letters, or deletes them (nil).
func (e *Engine) storeBounds(key string, bounds *liveconfig.DeadLetters) {
	var value []byte
	if bounds != nil {
		value, _ = json.Marshal(bounds) // No field can fail to marshal.
	}
	if err := e.o.Store.PutMeta(boundsPrefix+key, value); err != nil {
		e.log.With(queue.LaneID{Destination: key}.LogArgs()...).Warn("storing the retention of a deleted destination's dead letters failed; after a restart the default applies", "error", err)
	}
}

// deleteCircuits deletes the stored circuits of endpoints that are missing in the config.
func (e *Engine) deleteCircuits(v *liveconfig.View) {
	e.recordsMu.Lock()
	defer e.recordsMu.Unlock()
	e.mu.Lock()
	missing := maps.Clone(e.circuits)
	for _, d := range e.destinations {
		for _, ep := range d.endpoints {
			if d.set != nil || v.Unusable(d.namespace) {
				delete(missing, ep.recordName())
			}
		}
	}
	for name := range missing {
		if namespace, _ := split(name[len(circuitPrefix):]); v.Unusable(namespace) {
			delete(missing, name)
			continue
		}
		delete(e.circuits, name)
	}
	e.mu.Unlock()
	for name := range missing {
		e.putCircuit(name, nil)
	}
}
