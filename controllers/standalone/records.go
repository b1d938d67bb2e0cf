package standalone

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1alpha1"
)

// Records is the part of queue.Store that keeps records of the objects. All processes with the same replicated log
// have them.
type Records interface {
	PutMeta(name string, value []byte) error
	AllMeta() (map[string][]byte, error)
}

const recordPrefix = "manifest/"

// record is the state of an object that another process must not make again: the UID of the object, and the
// revisions of what uses a Secret, follow from it. Otherwise each takeover would create all objects again: failed
// runs would be repeated, and open circuits would be probed at once. It contains no manifest and no Secret.
type record struct {
	Generation int64       `json:"generation"`
	Created    metav1.Time `json:"created"`
	Changed    metav1.Time `json:"changed,omitzero"`
	// Content is the hash of the spec. It is empty for a Secret: a new owner takes the Secret for unchanged.
	Content string `json:"content,omitempty"`
	// AudienceKey and Status have the meaning of stateObject.
	AudienceKey string          `json:"audienceKey,omitempty"`
	Status      json.RawMessage `json:"status,omitempty"`
}

func (i id) recordName() string {
	return recordPrefix + strings.Join([]string{i.kind, i.namespace, i.name}, "/")
}

// recordsWait is the time after the first load without problems for which a record is kept for an object that the
// folder lacks: the folders of two processes can differ for a moment.
const recordsWait = time.Minute

// readRecords reads the records of the last owner, which are newer than the restored state. Restored objects that were
// deleted or created again since are dropped.
func (s *store) readRecords(from Records) error {
	all, err := from.AllMeta()
	if err != nil {
		return fmt.Errorf("read the records of the manifests: %w", err)
	}
	s.written, s.records = map[string][]byte{}, map[string]record{}
	for name, value := range all {
		if !strings.HasPrefix(name, recordPrefix) {
			continue
		}
		s.written[name] = value
		var r record
		if json.Unmarshal(value, &r) == nil {
			s.records[name] = r
		}
	}
	for id, o := range s.objects {
		r, ok := s.records[o.recordName()]
		switch {
		case len(s.written) == 0: // A log of an earlier release.
		case !ok, !r.Created.Equal(&o.created), !r.isOf(o):
			delete(s.objects, id)
		default:
			delete(s.records, o.recordName())
			o.generation, o.changed = r.Generation, r.Changed
			o.setServerFields(nil, s.version())
			r.restoreStatus(o)
		}
	}
	return nil
}

// ForgetRecords removes the records of a store that has no replicated log any more: they would be outdated if it moved
// to one again.
func ForgetRecords(in Records) error {
	all, err := in.AllMeta()
	if err != nil {
		return fmt.Errorf("read the records of the manifests: %w", err)
	}
	for name := range all {
		if !strings.HasPrefix(name, recordPrefix) {
			continue
		}
		if err := in.PutMeta(name, nil); err != nil {
			return fmt.Errorf("remove the records of the manifests: %w", err)
		}
	}
	return nil
}

// takeRecord returns the record of an object that is loaded now. It has one until its first load: an object that is
// deleted and created again later is a new one.
func (s *store) takeRecord(of id) (record, bool) {
	if len(s.records) == 0 {
		return record{}, false
	}
	r, ok := s.records[of.recordName()]
	delete(s.records, of.recordName())
	return r, ok
}

// isOf reports whether an object is that of the record. The spec of a run cannot be changed, so an object with
// another one was created again.
func (r record) isOf(o *stored) bool {
	return o.resource == nil || o.of.Health.Job(o.resource) == nil || r.Content == hex.EncodeToString(o.content[:])
}

// restoreStatus sets the status of an object.
func (r record) restoreStatus(o *stored) {
	if o.resource == nil {
		return
	}
	if a, ok := o.resource.(*v1alpha1.Audience); ok {
		a.Status.Key = r.AudienceKey
	}
	if len(r.Status) > 0 {
		status, _ := o.of.Health.Status(o.resource)
		reflect.ValueOf(status).Elem().SetZero()
		_ = json.Unmarshal(r.Status, status) // The report restores what cannot be decoded.
	}
}

// writeRecords writes the records that have changed. It keeps those of objects whose manifests cannot be read.
func (s *store) writeRecords(to Records) error {
	next := map[string][]byte{}
	if s.unread || len(s.problems) > 0 || len(s.objects) == 0 {
		for name := range s.records {
			next[name] = s.written[name]
		}
	}
	for _, o := range s.objects {
		r := record{Generation: o.generation, Created: o.created, Changed: o.changed}
		if o.resource != nil {
			r.Content = hex.EncodeToString(o.content[:])
		}
		var err error
		if r.AudienceKey, r.Status, err = o.savedStatus(); err != nil {
			return err
		}
		if next[o.recordName()], err = json.Marshal(r); err != nil {
			return err
		}
	}
	for name := range maps.Clone(s.written) {
		if next[name] == nil {
			next[name] = nil
		}
	}
	for name, value := range next {
		if bytes.Equal(s.written[name], value) {
			continue
		}
		if err := to.PutMeta(name, value); err != nil {
			return err
		}
		if s.written[name] = value; value == nil {
			delete(s.written, name)
		}
	}
	return nil
}
