package delivery

import (
	"encoding/json"
	"errors"
	"strings"
	"sync"
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

// healthRecords are the records of the endpoints' health.
type healthRecords struct {
	// writing serializes the writes to the store. It is acquired before the engine's lock.
	writing sync.Mutex
	// stored are the records that the store has, by namespace and name; nil until they are read. The engine's lock
	// guards it.
	stored map[string]map[string]health
}

// set notes that a record is stored.
func (h *healthRecords) set(name string, r health) {
	namespace := namespaceOfRecord(name)
	if h.stored[namespace] == nil {
		h.stored[namespace] = map[string]health{}
	}
	h.stored[namespace][name] = r
}

// delete notes that a record is deleted.
func (h *healthRecords) delete(name string) {
	namespace := namespaceOfRecord(name)
	if delete(h.stored[namespace], name); len(h.stored[namespace]) == 0 {
		delete(h.stored, namespace)
	}
}

// restore gives a new endpoint its health and its last failed attempt of the earlier run. It reports
// whether the destination was edited since. attempts is Options.Attempts.
func (h *healthRecords) restore(ep *liveEndpoint, revision string, attempts int, now time.Time) (edited bool) {
	r, ok := h.stored[ep.destination.namespace][ep.recordName()]
	if ok {
		ep.machine.Restore(r.Record, revision, now)
		if r.FailedAttempt != nil {
			ep.attempts.add(attempts, r.FailedAttempt, nil)
		}
	}
	ep.stored, ep.storedAt = ep.machine.Status(), now
	return ok && r.Revision != revision
}

// storeHealth stores the endpoint's health. The lock is not held.
func (e *Engine) storeHealth(ep *liveEndpoint) {
	e.records.writing.Lock()
	defer e.records.writing.Unlock()
	e.mu.Lock()
	name := ep.recordName()
	known := ep.destination.set != nil && ep.destination.endpoints[ep.name] == ep
	var value []byte
	if known {
		r := health{ep.machine.Record(ep.destination.set.revision), ep.attempts.lastFailed()}
		value, _ = json.Marshal(r) // No field can fail to marshal.
		e.records.set(name, r)
		ep.stored, ep.storedAt = ep.machine.Status(), e.o.Now()
	} else {
		e.records.delete(name)
	}
	e.mu.Unlock()
	e.putMeta(name, value, healthLost)
}

// healthLost is the consequence when a record of an endpoint's health is not stored.
const healthLost = "the health of the endpoint is lost on restart"

// storeHistory stores the health of the endpoints that has changed and was not stored for a time.
func (e *Engine) storeHistory(age time.Duration) {
	var changed []*liveEndpoint
	now := e.o.Now()
	e.mu.Lock()
	for _, d := range e.registry.destinations {
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

// putMeta stores a record, or deletes it (nil). It logs a failure with its consequence, and returns false then.
func (e *Engine) putMeta(name string, value []byte, consequence string) bool {
	err := e.o.Store.PutMeta(name, value)
	if err != nil && !errors.Is(err, queue.ErrClosed) {
		e.o.Logger.Warn("storing a record failed", "record", name, "consequence", consequence, "error", err)
	}
	return err == nil
}

// restoreRecord restores a record of the earlier run: the health of an endpoint, the bounds of the dead letters of a
// deleted destination, an orphan, or the suspensions of a destination. The lock is held.
func (e *Engine) restoreRecord(name string, value []byte) {
	var r health
	var b liveconfig.DeadLetters
	var o orphanRecord
	var s suspensions
	if strings.HasPrefix(name, orphanPrefix) && json.Unmarshal(value, &o) == nil {
		e.orphans.stored[name] = o
	} else if strings.HasPrefix(name, recordPrefix) && json.Unmarshal(value, &r) == nil {
		e.records.set(name, r)
	} else if key, ok := strings.CutPrefix(name, suspensionPrefix); ok && json.Unmarshal(value, &s) == nil {
		e.registry.destination(key).suspensions = s
	} else if key, ok := strings.CutPrefix(name, boundsPrefix); ok && json.Unmarshal(value, &b) == nil && e.registry.destinations[key] != nil {
		e.registry.destinations[key].trim = &b
	}
}

// deleteRecords deletes the stored health of endpoints that are missing in the config of their
// namespace, which is one of namespaces.
func (e *Engine) deleteRecords(v *liveconfig.View, namespaces []string) {
	e.records.writing.Lock()
	defer e.records.writing.Unlock()
	var missing []string
	e.mu.Lock()
	for _, namespace := range namespaces {
		for name := range e.records.stored[namespace] {
			if !e.registry.usesRecord(v, name) {
				missing = append(missing, name)
				e.records.delete(name)
			}
		}
	}
	e.mu.Unlock()
	for _, name := range missing {
		e.putMeta(name, nil, healthLost)
	}
}

// usesRecord reports whether an endpoint with this record exists or is parked.
func (r *registry) usesRecord(v *liveconfig.View, name string) bool {
	_, rest, _ := strings.Cut(name, "/")
	end := strings.LastIndexByte(rest, '/')
	key, endpoint := rest[:end], rest[end+1:]
	if parkedDestination(v, key) {
		return true
	}
	d := r.destinations[key]
	return d != nil && d.set != nil && d.endpoints[endpoint] != nil
}

// namespaceOfRecord returns the namespace of the endpoint to which a record belongs.
func namespaceOfRecord(name string) string {
	_, rest, _ := strings.Cut(name, "/")
	namespace, _ := split(rest)
	return namespace
}
