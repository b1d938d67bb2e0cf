package standalone

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/manifest"
)

// Records is the part of queue.Store that keeps records of the objects. All processes with the same replicated log
// have them.
type Records interface {
	PutMeta(name string, value []byte) error
	AllMeta() (map[string][]byte, error)
}

const recordPrefix = "manifest/"

// record is the state of an object that a restart or another process must not make again: the UID of the object, and
// the revisions of what uses a Secret, follow from it. Otherwise each takeover would create all objects again: failed
// runs would be repeated, and open circuits would be probed at once. It contains no manifest and no Secret.
type record struct {
	version
	// Content is the hash of the spec. It is empty for a Secret: a new owner takes the Secret for unchanged.
	Content string `json:"content,omitempty"`
	// Status is the status of a run that has started.
	Status json.RawMessage `json:"status,omitempty"`
}

// record returns the record of an object.
func (o *stored) record() (r record, err error) {
	r = record{version: o.version, Content: o.hashed()}
	if o.resource == nil {
		return r, nil
	}
	if job := o.of.Health.Job(o.resource); job != nil && job.StartTime != nil {
		status, _ := o.of.Health.Status(o.resource)
		r.Status, err = json.Marshal(status)
	}
	return r, err
}

func (i id) recordName() string {
	return recordPrefix + strings.Join([]string{i.kind, i.namespace, i.name}, "/")
}

// maxPrevious bounds the hashes of earlier specs.
const maxPrevious = 16

// replaced returns Previous of the record after its spec was replaced by one with another hash.
func (r record) replaced(by string) []string {
	list := slices.DeleteFunc(append([]string{r.Content}, r.Previous...), func(hash string) bool { return hash == by || hash == "" })
	return list[:min(len(list), maxPrevious)]
}

// hashed returns the hash of the spec, as a record has it; empty for a Secret or a ConfigMap.
func (o *object) hashed() string {
	if o.resource == nil {
		return ""
	}
	return hex.EncodeToString(o.content[:])
}

// readRecords reads the records of the last owner, which are newer than the restored state. Restored objects that were
// deleted or created again since are dropped.
func (s *store) readRecords(from Records) error {
	all, err := from.AllMeta()
	if err != nil {
		return fmt.Errorf("read the records of the manifests: %w", err)
	}
	s.setRecords(all)
	return nil
}

// setRecords is readRecords with all values of a store.
func (s *store) setRecords(all map[string][]byte) {
	s.written, s.records = map[string][]byte{}, map[id]record{}
	for name, value := range all {
		if strings.HasPrefix(name, recordPrefix) {
			s.written[name] = value
			s.keepRecord(idOf(name))
		}
	}
	for id, o := range s.objects {
		r, ok := s.records[id]
		switch {
		case len(s.written) == 0: // The store had no log before.
		case !ok, !r.Created.Equal(&o.Created), !r.isOf(o), r.Content != o.hashed(): // Another process has a newer one.
			delete(s.objects, id)
		default:
			delete(s.records, id)
			o.version = r.version
			o.setServerFields(nil, s.nextVersion())
			_ = r.restoreStatus(o) // The report restores what cannot be decoded.
		}
	}
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
func (s *store) takeRecord(of *stored) (r record, ok bool) {
	r, ok = s.records[of.id]
	delete(s.records, of.id)
	return r, ok && r.isOf(of)
}

// isOf reports whether an object belongs to the record. The spec of a run cannot be changed, so an object with
// another one was created again.
func (r record) isOf(o *stored) bool {
	return o.resource == nil || o.of.Health.Job(o.resource) == nil || r.Content == o.hashed()
}

// restoreStatus sets the status of an object.
func (r record) restoreStatus(o *stored) error {
	if o.resource == nil || len(r.Status) == 0 {
		return nil
	}
	status, _ := o.of.Health.Status(o.resource)
	reflect.ValueOf(status).Elem().SetZero()
	return json.Unmarshal(r.Status, status)
}

// keepRecord adds the record of an object that this process did not load.
func (s *store) keepRecord(of id) {
	var r record
	if json.Unmarshal(s.written[of.recordName()], &r) == nil {
		s.records[of] = r
	}
}

// idOf returns the object of a record.
func idOf(recordName string) id {
	parts := strings.SplitN(recordName, "/", 4)
	if len(parts) < 4 {
		return id{}
	}
	return id{parts[1], parts[2], parts[3]}
}

// isOutdated reports whether another process has replaced the version that a manifest has.
func (s *store) isOutdated(o *object) bool {
	return s.objects[o.id] == nil && slices.Contains(s.records[o.id].Previous, o.hashed())
}

// keepRecords keeps the records of the restored objects that the next ones lack, if their deletion is not proved.
func (s *store) keepRecords(next map[id]*stored) {
	for id := range s.objects {
		if next[id] == nil && s.unproved[id.namespace] {
			s.keepRecord(id)
		}
	}
	s.unproved = nil
}

// NewLacks returns a function that names the objects with records in the values of a store that a process would park
// if it became the owner now, without runs that have ended: it loads the folder as a new owner does, after each change
// of it or of a record.
func NewLacks(o Options) func(values map[string][]byte) []string {
	var files map[string]*file
	var loaded []mark
	var compared map[string][]byte
	var found []string
	return func(values map[string][]byte) []string {
		records := maps.Clone(values)
		maps.DeleteFunc(records, func(name string, _ []byte) bool { return !strings.HasPrefix(name, recordPrefix) })
		manifests, err := manifests(o.Dir)
		marks := append(slices.Clone(manifests), append(marksOfSecretValues(o.SecretValues), markOf(o.StateFile))...)
		s := newStore()
		s.secretValues, s.files = slices.Clone(o.SecretValues), files
		switch {
		case len(records) == 0:
			return nil
		case err == nil && compared != nil && slices.Equal(marks, loaded) && maps.EqualFunc(records, compared, bytes.Equal):
			return found
		case err == nil:
			err = s.restore(o.StateFile, manifests)
		}
		if err != nil {
			return []string{fmt.Sprintf("all objects (%v)", err)}
		}
		s.restoreSecretValues(time.Now())
		s.setRecords(records)
		s.unproved = map[string]bool{}
		for name := range records {
			s.unproved[idOf(name).namespace] = true
		}
		if len(manifests) > 0 || len(s.objects) == 0 { // As Control.load.
			s.load(manifests, time.Now())
		}
		files, loaded, compared, found = s.files, marks, records, nil
		if s.unread {
			compared = nil
		}
		for id, r := range s.records {
			if status := r.jobStatus(); status == nil || !v1beta1.JobEnded(*status) {
				found = append(found, id.String())
			}
		}
		return found
	}
}

// parkedProblems returns a problem for each object that the log has and this process did not load.
func (s *store) parkedProblems(now time.Time) (list []manifest.Problem) {
	since := sinceIn(s.parked, now)
	found := map[id]mark{}
	for path, f := range s.files {
		for _, o := range f.objects {
			found[o.id] = mark{path: path}
		}
		for _, id := range f.broken {
			found[id] = mark{}
		}
	}
	for _, object := range slices.SortedFunc(maps.Keys(s.records), id.compare) {
		message := fmt.Sprintf("the log has this object, and the manifests of this process lack it; copy the manifest of the last owner, or run posthorn discard %s -n %s to delete the object", object.name, object.namespace)
		at, isFound := found[object]
		switch {
		case isFound && at.path == "": // Its manifest has a problem of its own.
			continue
		case isFound:
			message = "the log has a newer version of this object; copy the manifest of the last owner, or, to return to this version, change the spec and change it back"
		}
		p := manifest.Problem{File: at.path, Object: object.String(), Message: message, Parked: true}
		p.Since = since(p)
		switch {
		case s.records[object].isUnfinished():
			p.Effect = "its run has begun, so its namespace is parked: the messages are kept and not sent, and calls are answered 503"
		case hasValues(object.kind):
			p.Effect = "what uses it does not work"
		default:
			p.Effect = "it is parked: " + manifest.EffectOfParked(object.kind)
		}
		list = append(list, p)
	}
	return list
}

// jobStatus returns the status of a record of a run that has begun, and otherwise nil.
func (r record) jobStatus() *v1beta1.JobStatus {
	var status v1beta1.JobStatus
	if json.Unmarshal(r.Status, &status) != nil {
		return nil
	}
	return &status
}

// isUnfinished reports whether a record belongs to a run that has begun and not ended.
func (r record) isUnfinished() bool {
	status := r.jobStatus()
	return status != nil && !v1beta1.JobEnded(*status)
}

// lacksRun reports whether this process did not load a run of a namespace that has begun and not ended. The dispatcher
// would forget it.
func (s *store) lacksRun(namespace string) bool {
	for id, r := range s.records {
		if id.namespace == namespace && r.isUnfinished() {
			return true
		}
	}
	return false
}

// writeRecords writes the records that have changed. It keeps the records of objects that this process did not load.
func (s *store) writeRecords(to Records) error {
	next := map[string][]byte{}
	for id := range s.records {
		next[id.recordName()] = s.written[id.recordName()]
	}
	for _, o := range s.objects {
		r, err := o.record()
		if err == nil {
			next[o.recordName()], err = json.Marshal(r)
		}
		if err != nil {
			return err
		}
	}
	for name := range s.written {
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
