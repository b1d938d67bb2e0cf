package delivery

import (
	"encoding/json"
	"errors"
	"maps"
	"strings"
	"time"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// outage is the stored form of an open circuit, so that a restart does not start with a burst of
// requests to an endpoint that is known to be down.
type outage struct {
	// Revision of the destination's config: another one triggers a probe immediately.
	Revision            string            `json:"revision"`
	Since               time.Time         `json:"since"`
	ProbeAt             time.Time         `json:"probeAt"`
	IntervalMS          int64             `json:"intervalMs"`
	LastSuccess         time.Time         `json:"lastSuccess,omitzero"`
	LastFailure         *adminapi.Failure `json:"lastFailure,omitempty"`
	ConsecutiveFailures int               `json:"consecutiveFailures"`
}

// outagePrefix is the prefix of the names under which the store keeps outages.
const outagePrefix = "circuit/"

func (ep *endpoint) outageName() string { return outagePrefix + ep.destination.key + "/" + ep.name }

// storeCircuit stores the endpoint's circuit while it is open. The lock is not held.
func (e *Engine) storeCircuit(ep *endpoint) {
	e.recordsMu.Lock()
	defer e.recordsMu.Unlock()
	e.mu.Lock()
	name, known := ep.outageName(), ep.destination.set != nil && ep.destination.endpoints[ep.name] == ep
	var value []byte
	if c := &ep.circuit; c.open && known {
		o := outage{
			Revision: ep.destination.set.revision, Since: ep.health.since, ProbeAt: c.probeAt, IntervalMS: c.interval.Milliseconds(),
			LastSuccess: ep.health.lastSuccess, LastFailure: ep.health.lastFailure, ConsecutiveFailures: ep.health.consecutive,
		}
		value, _ = json.Marshal(o) // No field can fail to marshal.
		e.outages[name] = o
	} else {
		delete(e.outages, name)
	}
	e.mu.Unlock()
	e.storeOutage(name, value)
}

func (e *Engine) storeOutage(name string, value []byte) {
	if err := e.o.Store.PutMeta(name, value); err != nil && !errors.Is(err, queue.ErrClosed) {
		e.log.Warn("storing an endpoint's circuit state failed; it resets on restart", "circuit", name, "error", err)
	}
}

// loadRecords reads the records of the earlier run: the open circuits, and the bounds of the dead
// letters of deleted destinations.
func (e *Engine) loadRecords() (map[string]outage, map[string]liveconfig.DeadLetters) {
	outages, bounds := map[string]outage{}, map[string]liveconfig.DeadLetters{}
	all, err := e.o.Store.AllMeta()
	if err != nil {
		e.log.Warn("reading the records of the earlier run failed: circuits start closed, dead letters of deleted destinations have the default retention", "error", err)
	}
	for name, value := range all {
		var o outage
		var b liveconfig.DeadLetters
		if strings.HasPrefix(name, outagePrefix) && json.Unmarshal(value, &o) == nil {
			outages[name] = o
		} else if key, ok := strings.CutPrefix(name, boundsPrefix); ok && json.Unmarshal(value, &b) == nil {
			bounds[key] = b
		}
	}
	return outages, bounds
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

// deleteOutages deletes the stored circuits of endpoints that are missing in the config.
func (e *Engine) deleteOutages(v *liveconfig.View) {
	e.recordsMu.Lock()
	defer e.recordsMu.Unlock()
	e.mu.Lock()
	missing := maps.Clone(e.outages)
	for _, d := range e.destinations {
		for _, ep := range d.endpoints {
			if d.set != nil || v.Unusable(d.namespace) {
				delete(missing, ep.outageName())
			}
		}
	}
	for name := range missing {
		if namespace, _ := split(name[len(outagePrefix):]); v.Unusable(namespace) {
			delete(missing, name)
			continue
		}
		delete(e.outages, name)
	}
	e.mu.Unlock()
	for name := range missing {
		e.storeOutage(name, nil)
	}
}

// resume restores a new endpoint's open circuit from the earlier run. The lock is held.
func (ep *endpoint) resume(o outage, revision string, now time.Time) {
	ep.circuit.open = true
	ep.circuit.interval = time.Duration(o.IntervalMS) * time.Millisecond
	// After the clock was set back, the probe must not be postponed without a bound.
	ep.circuit.probeAt = o.ProbeAt
	if latest := now.Add(maxProbePostponed); latest.Before(o.ProbeAt) {
		ep.circuit.probeAt = latest
	}
	if o.Revision != revision {
		ep.circuit.probeNow(now)
	}
	ep.health.state, ep.health.since = adminapi.EndpointCircuitOpen, o.Since
	ep.health.lastSuccess, ep.health.lastFailure, ep.health.consecutive = o.LastSuccess, o.LastFailure, o.ConsecutiveFailures
	ep.health.recent = 1<<recentAttempts - 1
}
