package delivery

import (
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// recordPrefix is the prefix of the names under which the store keeps the health of endpoints.
const recordPrefix = "endpoint/"

// historyInterval is the shortest time between two writes of an endpoint's health without a change
// of its state. It bounds the age of the last success and failure after a crash.
const historyInterval = time.Minute

// health is the stored health of an endpoint.
type health struct {
	endpoint.Record
	// FailedAttempt is the attempt of LastFailure with the receiver's answer, at most maxKeptResponse bytes of
	// it. It is nil if the endpoint's attempts did not have it any more when the record was written.
	FailedAttempt *adminapi.Attempt `json:"failedAttempt,omitempty"`
}

// recordName returns the name of the endpoint's record.
func (ep *liveEndpoint) recordName() string {
	return recordPrefix + ep.destination.key + "/" + ep.name
}

// storeHealth stores the endpoint's health. The lock is not held.
func (e *Engine) storeHealth(ep *liveEndpoint) {
	e.recordsMu.Lock()
	defer e.recordsMu.Unlock()
	e.mu.Lock()
	name := ep.recordName()
	known := ep.destination.set != nil && ep.destination.endpoints[ep.name] == ep
	var value []byte
	if known {
		r := health{ep.machine.Record(ep.destination.set.revision), ep.attempts.lastFailed()}
		value, _ = json.Marshal(r) // No field can fail to marshal.
		e.setRecord(name, r)
		ep.stored, ep.storedAt = ep.machine.Status(), time.Now()
	} else {
		e.deleteRecord(name)
	}
	e.mu.Unlock()
	e.putRecord(name, value)
}

// storeHistory stores the health of the endpoints that has changed and was not stored for a time.
func (e *Engine) storeHistory(age time.Duration) {
	var changed []*liveEndpoint
	now := time.Now()
	e.mu.Lock()
	for _, d := range e.destinations {
		for _, ep := range d.endpoints {
			if ep.machine.Status() != ep.stored && now.Sub(ep.storedAt) >= age {
				changed = append(changed, ep)
			}
		}
	}
	e.mu.Unlock()
	for _, ep := range changed {
		e.storeHealth(ep)
	}
}

func (e *Engine) putRecord(name string, value []byte) {
	if err := e.o.Store.PutMeta(name, value); err != nil && !errors.Is(err, queue.ErrClosed) {
		e.log.Warn("storing an endpoint's health failed; it is lost on restart", "record", name, "error", err)
	}
}

// restoreHealth gives a new endpoint its health and its last failed attempt of the earlier run. It reports
// whether the destination was edited since. The lock is held.
func (e *Engine) restoreHealth(ep *liveEndpoint, revision string, now time.Time) (edited bool) {
	r, ok := e.records[ep.destination.namespace][ep.recordName()]
	if ok {
		ep.machine.Restore(r.Record, revision, now)
		if r.FailedAttempt != nil {
			ep.attempts.add(e.o.Attempts, r.FailedAttempt)
		}
	}
	ep.stored, ep.storedAt = ep.machine.Status(), now
	return ok && r.Revision != revision
}

// loadRecords reads the records of the earlier run: the health of the endpoints, the bounds of
// the dead letters of deleted destinations, and the orphans.
func (e *Engine) loadRecords() (map[string]health, map[string]liveconfig.DeadLetters, map[string]orphanRecord) {
	endpoints, bounds, orphans := map[string]health{}, map[string]liveconfig.DeadLetters{}, map[string]orphanRecord{}
	all, err := e.o.Store.AllMeta()
	if err != nil {
		e.log.Warn("reading the records of the earlier run failed: circuits start closed, endpoints without history, dead letters of deleted destinations have the default retention, and grace periods begin again", "error", err)
	}
	for name, value := range all {
		var r health
		var b liveconfig.DeadLetters
		var o orphanRecord
		if strings.HasPrefix(name, orphanPrefix) && json.Unmarshal(value, &o) == nil {
			orphans[name] = o
		} else if strings.HasPrefix(name, recordPrefix) && json.Unmarshal(value, &r) == nil {
			endpoints[name] = r
		} else if key, ok := strings.CutPrefix(name, boundsPrefix); ok && json.Unmarshal(value, &b) == nil {
			bounds[key] = b
		}
	}
	return endpoints, bounds, orphans
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

// deleteRecords deletes the stored health of endpoints that are missing in the config of their
// namespace, which is one of namespaces.
func (e *Engine) deleteRecords(v *liveconfig.View, namespaces []string) {
	e.recordsMu.Lock()
	defer e.recordsMu.Unlock()
	var missing []string
	e.mu.Lock()
	for _, namespace := range namespaces {
		for name := range e.records[namespace] {
			if !e.usesRecord(v, name) {
				missing = append(missing, name)
				e.deleteRecord(name)
			}
		}
	}
	e.mu.Unlock()
	for _, name := range missing {
		e.putRecord(name, nil)
	}
}

// usesRecord reports whether an endpoint with this record exists or is parked. The lock is held.
func (e *Engine) usesRecord(v *liveconfig.View, name string) bool {
	_, rest, _ := strings.Cut(name, "/")
	end := strings.LastIndexByte(rest, '/')
	key, endpoint := rest[:end], rest[end+1:]
	if parkedDestination(v, key) {
		return true
	}
	d := e.destinations[key]
	return d != nil && d.set != nil && d.endpoints[endpoint] != nil
}

// setRecord notes a stored record. The lock is held.
func (e *Engine) setRecord(name string, r health) {
	namespace := namespaceOfRecord(name)
	if e.records[namespace] == nil {
		e.records[namespace] = map[string]health{}
	}
	e.records[namespace][name] = r
}

// deleteRecord notes the deletion of a record. The lock is held.
func (e *Engine) deleteRecord(name string) {
	namespace := namespaceOfRecord(name)
	if delete(e.records[namespace], name); len(e.records[namespace]) == 0 {
		delete(e.records, namespace)
	}
}

// namespaceOfRecord returns the namespace of the endpoint to which a record belongs.
func namespaceOfRecord(name string) string {
	_, rest, _ := strings.Cut(name, "/")
	namespace, _ := split(rest)
	return namespace
}
