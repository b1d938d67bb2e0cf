// Package records stores records of the runs of Redeliveries and DeletionRequests, so that a run
// continues after a restart and a completed run is not repeated.
//
// A record belongs to an identity, a hash of the namespace, the name and the spec of an object.
// Each dispatcher keeps its own records in its store, for Retention after their last change.
// Their number is bounded, for each namespace and in total; the oldest records are removed
// first. The package does not know the purpose of a run. The main types are Records and Record.
package records

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"
)

const (
	// Retention is how long the record of a completed run is kept after its last change.
	Retention = 30 * 24 * time.Hour
	// unfinishedRetention is the retention of a run that did not complete. A record outlives the messages of
	// its run, which are pending up to the longest retry window; without its record the run would
	// start again.
	unfinishedRetention = 2 * Retention

	prefix        = "job/"
	maxNamespace  = 10_000
	maxTotal      = 50_000
	sweepInterval = time.Hour
)

// Store is the part of queue.Store that keeps records.
type Store interface {
	PutMeta(name string, value []byte) error
	PutMetaDurable(name string, value []byte) error
	AllMeta() (map[string][]byte, error)
}

// Record is the state of one run.
type Record struct {
	Namespace string `json:"namespace"`
	// UID is the UID of the object that the run belongs to.
	UID string `json:"uid"`
	// Updated is when the record was changed last.
	Updated time.Time `json:"updated"`
	// Completed is when the run completed; zero before, and for a run that failed.
	Completed time.Time `json:"completed,omitzero"`
	// Progress is defined by the kind of job.
	Progress json.RawMessage `json:"progress,omitempty"`
}

// Records are the records of one dispatcher. Its methods may be called concurrently.
type Records struct {
	store        Store
	now          func() time.Time
	namespaceMax int
	totalMax     int

	mu         sync.Mutex
	byID       map[string]Record
	namespaces map[string]int
	swept      time.Time
}

// Open reads the records of earlier runs. Records that cannot be decoded are ignored.
func Open(store Store, now func() time.Time) (*Records, error) {
	r := &Records{store: store, now: now, namespaceMax: maxNamespace, totalMax: maxTotal, byID: map[string]Record{},
		namespaces: map[string]int{}}
	all, err := store.AllMeta()
	if err != nil {
		return nil, fmt.Errorf("read the records of jobs: %w", err)
	}
	for name, value := range all {
		id, ok := strings.CutPrefix(name, prefix)
		var record Record
		if ok && json.Unmarshal(value, &record) == nil {
			r.byID[id] = record
			r.namespaces[record.Namespace]++
		}
	}
	return r, nil
}

// Get returns the record of an identity; ok is false when there is none.
func (r *Records) Get(id string) (record Record, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	record, ok = r.byID[id]
	if ok && r.expired(record) {
		return Record{}, false
	}
	return record, ok
}

// Completed reports whether a run of this identity completed, for an object with another UID.
func (r *Records) Completed(id, uid string) bool {
	record, ok := r.Get(id)
	return ok && !record.Completed.IsZero() && record.UID != uid
}

// Put stores a record and returns after it is durable. It sets Updated.
func (r *Records) Put(id string, record Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	record.Updated = r.now().UTC()
	value, err := json.Marshal(record)
	if err != nil {
		return fmt.Errorf("store the record of a job: %w", err)
	}
	if _, known := r.byID[id]; !known {
		if err := r.removeOldest(record.Namespace); err != nil {
			return err
		}
	}
	if err := r.store.PutMetaDurable(prefix+id, value); err != nil {
		return fmt.Errorf("store the record of a job: %w", err)
	}
	if old, known := r.byID[id]; known {
		r.namespaces[old.Namespace]--
	}
	r.byID[id] = record
	r.namespaces[record.Namespace]++
	return nil
}

// removeOldest removes expired records once per sweepInterval, and the oldest record of the
// namespace, or of the namespace with the most records, at a bound.
func (r *Records) removeOldest(namespace string) error {
	if now := r.now(); now.Sub(r.swept) >= sweepInterval || now.Before(r.swept) {
		r.swept = now
		for id, record := range maps.Clone(r.byID) {
			if r.expired(record) {
				if err := r.remove(id); err != nil {
					return err
				}
			}
		}
	}
	switch {
	case r.namespaces[namespace] >= r.namespaceMax:
	case len(r.byID) >= r.totalMax:
		for other, n := range r.namespaces {
			if n > r.namespaces[namespace] {
				namespace = other
			}
		}
	default:
		return nil
	}
	oldest := ""
	for id, record := range r.byID {
		if record.Namespace == namespace && (oldest == "" || record.Updated.Before(r.byID[oldest].Updated)) {
			oldest = id
		}
	}
	if oldest == "" {
		return nil
	}
	return r.remove(oldest)
}

func (r *Records) remove(id string) error {
	if err := r.store.PutMeta(prefix+id, nil); err != nil {
		return fmt.Errorf("remove the record of a job: %w", err)
	}
	namespace := r.byID[id].Namespace
	if r.namespaces[namespace]--; r.namespaces[namespace] == 0 {
		delete(r.namespaces, namespace)
	}
	delete(r.byID, id)
	return nil
}

func (r *Records) expired(record Record) bool {
	retention := Retention
	if record.Completed.IsZero() {
		retention = unfinishedRetention
	}
	return r.now().Sub(record.Updated) >= retention
}
