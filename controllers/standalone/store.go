package standalone

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
)

// store does for manifests what an API server does for objects: it keeps the
// last valid form of each, counts generations, and remembers when an object was
// first seen. It is used by one goroutine at a time.
type store struct {
	files   map[string]*file
	objects map[id]*stored
	// writes counts changes; it is where resource versions come from.
	writes   int64
	problems []Problem
	ignored  []Problem
	// unread is true when a file could not be read; it should be tried again.
	unread bool
}

type file struct {
	text []byte
	// good is the newest text that was neither empty, cut off nor unreadable; nil before that.
	good []byte
	parsed
}

// stored is an object with what the server adds.
type stored struct {
	*object
	file string
	// generation counts changes of the spec; of a Secret, of its data.
	generation int64
	created    metav1.Time
}

func newStore() *store {
	return &store{files: map[string]*file{}, objects: map[id]*stored{}}
}

// load takes over the manifests as they are now. What a file had before stays
// when it cannot be read any more, an object stays when it is not valid any more.
func (s *store) load(marks []mark, now time.Time) {
	s.problems, s.ignored, s.unread = nil, nil, false
	files := map[string]*file{}
	next := map[id]*stored{}
	before := s.sorted()
	present := map[id]bool{}
	for _, mark := range marks {
		f := s.read(mark.path)
		files[mark.path] = f
		for _, o := range f.objects {
			present[o.id] = true
		}
		for _, id := range f.broken {
			present[id] = true
		}
	}
	for _, mark := range marks {
		f := files[mark.path]
		if half := s.halfWritten(mark.path, f, present); half != "" {
			f = &file{parsed: parsed{unreadable: true, problems: []Problem{{File: mark.path, Message: half}}}}
		} else if !f.unreadable {
			f.good = f.text
		}
		s.problems = append(s.problems, f.problems...)
		s.ignored = append(s.ignored, f.ignored...)
		take := func(o *object) {
			if other := next[o.id]; other != nil {
				s.problems = append(s.problems, Problem{File: mark.path, Object: o.String(), Message: "the object is in " + other.file + " already, which counts; remove one of them"})
				return
			}
			if errs := o.admitUpdate(s.objects[o.id]); len(errs) > 0 {
				for _, err := range errs {
					s.problems = append(s.problems, Problem{File: mark.path, Object: o.String(), Message: err.Error()})
				}
				o = s.objects[o.id].object
			}
			next[o.id] = &stored{object: o, file: mark.path}
		}
		for _, o := range f.objects {
			take(o)
		}
		for _, old := range before {
			if old.file == mark.path && next[old.id] == nil && (f.unreadable || slices.Contains(f.broken, old.id)) {
				take(old.object)
			}
		}
	}
	for id, o := range next {
		old := s.objects[id]
		switch {
		case old == nil:
			o.generation, o.created = 1, metav1.NewTime(now.UTC().Truncate(time.Second))
		case bytes.Equal(old.content, o.content):
			o.generation, o.created = old.generation, old.created
		default:
			o.generation, o.created = old.generation+1, old.created
		}
		if old != nil && old.object == o.object {
			next[id] = old
			old.file = o.file
			continue
		}
		o.furnish(old, s.version())
	}
	s.files, s.objects = files, next
}

// read parses a file, unless it is as it was.
func (s *store) read(path string) *file {
	text, err := readFile(path)
	old := s.files[path]
	if err != nil {
		if pathErr, ok := errors.AsType[*os.PathError](err); ok {
			err = pathErr.Err
		}
		s.unread = true
		f := &file{parsed: parsed{unreadable: true, problems: []Problem{{File: path, Message: err.Error()}}}}
		if old != nil {
			f.good = old.good
		}
		return f
	}
	if old != nil && old.text != nil && bytes.Equal(old.text, text) {
		return old
	}
	f := &file{text: text, parsed: parse(path, text)}
	if old != nil {
		f.good = old.good
	}
	return f
}

// halfWritten returns why a file is taken for one that was not written to its
// end, or "". Such a file keeps its last good objects. present are the objects of all files.
func (s *store) halfWritten(path string, f *file, present map[id]bool) string {
	missing := 0
	for id, o := range s.objects {
		if o.file == path && !present[id] {
			missing++
		}
	}
	switch {
	case f.unreadable || f.blank && missing == 0:
		return ""
	case cutInLine(f.good, f.text):
		// A value may be cut off, so that no object is missing.
		return "the file ends within a line of its last good form: Posthorn keeps that form; write the file to its end, or end its last line"
	case missing == 0:
		return ""
	case f.blank:
		return fmt.Sprintf("the file is empty, and %d objects were in it: Posthorn keeps their last good form; to delete them, remove the file, or write an empty List to it (apiVersion: v1, kind: List, items: [])", missing)
	case cutInDocument(f.good, f.text):
		return fmt.Sprintf("the file ends within a document of its last good form, and the objects behind that (%d) are missing: Posthorn keeps the last good form of the file; write the file to its end, or end it behind a document", missing)
	}
	return ""
}

// cutInLine reports whether a text is the beginning of a whole one and ends within a line of it.
func cutInLine(whole, text []byte) bool {
	rest, ok := bytes.CutPrefix(whole, text)
	return ok && len(rest) > 0 && len(text) > 0 && !bytes.HasSuffix(text, []byte("\n")) && rest[0] != '\n' && rest[0] != '\r'
}

// cutInDocument reports whether a text is the beginning of a whole one and ends
// within a YAML document of it. A text that ends behind a document may be an edit.
func cutInDocument(whole, text []byte) bool {
	rest, ok := bytes.CutPrefix(whole, text)
	if !ok {
		return false
	}
	endsLine := bytes.HasSuffix(text, []byte("\n")) || bytes.HasPrefix(rest, []byte("\n")) || bytes.HasPrefix(rest, []byte("\r\n"))
	document := bytes.TrimLeft(rest, " \t\r\n")
	behind := endsLine && (len(document) == 0 || bytes.HasPrefix(document, []byte("---")))
	return !behind && !bytes.HasSuffix(bytes.TrimRight(text, " \t\r\n"), []byte("\n---"))
}

// admitUpdate checks a changed object against its former state.
func (o *object) admitUpdate(old *stored) []error {
	if old == nil || o.resource == nil || bytes.Equal(old.content, o.content) {
		return nil
	}
	kinds, err := definitions()
	if err != nil {
		return []error{err}
	}
	var now map[string]any
	if err := json.Unmarshal(o.manifest, &now); err != nil {
		return []error{err}
	}
	before, err := runtime.DefaultUnstructuredConverter.ToUnstructured(old.resource)
	if err != nil {
		return []error{err}
	}
	if status, ok := before["status"]; ok { // An update of the spec keeps the status.
		now["status"] = status
	}
	return kinds[o.kind].admitUpdate(now, before)
}

// keepAudienceKeys sets the keys in effect, which stay over changes of the
// display name and, by the state file, over restarts.
func (s *store) keepAudienceKeys(namespace string, verdicts map[string]compile.Verdict) {
	for name, v := range verdicts {
		if o := s.objects[id{"Audience", namespace, name}]; o != nil && v.Key != "" {
			a := o.resource.DeepCopyObject().(*v1alpha1.Audience) // Readers may have the present one.
			a.Status.Key = v.Key
			o.resource = a
		}
	}
}

func (s *store) version() string {
	s.writes++
	return strconv.FormatInt(s.writes, 10)
}

// furnish sets what a server sets, and keeps the status from before.
func (o *stored) furnish(old *stored, version string) {
	if o.kind == kindSecret {
		return
	}
	o.resource.SetGeneration(o.generation)
	o.resource.SetCreationTimestamp(o.created)
	o.resource.SetResourceVersion(version)
	o.resource.SetUID(types.UID(uuid.NewSHA1(uuid.NameSpaceURL, []byte(o.id.String()+o.created.String())).String()))
	if old == nil {
		return
	}
	switch r := o.resource.(type) {
	case *v1alpha1.Source:
		r.Status = old.resource.(*v1alpha1.Source).Status
	case *v1alpha1.WebhookDestination:
		r.Status = old.resource.(*v1alpha1.WebhookDestination).Status
	case *v1alpha1.Audience:
		r.Status = old.resource.(*v1alpha1.Audience).Status
	case *v1alpha1.DeletionRequest:
		r.Status = old.resource.(*v1alpha1.DeletionRequest).Status
	}
}

// sorted returns the objects by kind, namespace and name.
func (s *store) sorted() []*stored {
	return slices.SortedFunc(maps.Values(s.objects), func(a, b *stored) int {
		return cmp.Or(strings.Compare(a.kind, b.kind), strings.Compare(a.namespace, b.namespace), strings.Compare(a.name, b.name))
	})
}

// snapshots returns what to compile, by namespace; only namespaces that have a
// Source or a WebhookDestination.
func (s *store) snapshots(checkHost func(string) error) map[string]*compile.Snapshot {
	out := map[string]*compile.Snapshot{}
	of := func(namespace string) *compile.Snapshot {
		if out[namespace] == nil {
			out[namespace] = &compile.Snapshot{Namespace: namespace, CheckHost: checkHost, Secrets: map[string]compile.Secret{}, ForeignWriteKeys: map[string]string{}}
		}
		return out[namespace]
	}
	objects := s.sorted()
	for _, o := range objects {
		switch r := o.resource.(type) {
		case *v1alpha1.Source:
			of(o.namespace).Sources = append(of(o.namespace).Sources, *r)
		case *v1alpha1.WebhookDestination:
			of(o.namespace).Destinations = append(of(o.namespace).Destinations, *r)
		case *v1alpha1.Audience:
			of(o.namespace).Audiences = append(of(o.namespace).Audiences, *r)
		case *v1alpha1.DeletionRequest:
			of(o.namespace).Deletions = append(of(o.namespace).Deletions, *r)
		}
	}
	for _, o := range objects {
		if snapshot := out[o.namespace]; o.kind == kindSecret && snapshot != nil {
			snapshot.Secrets[o.name] = compile.Secret{Version: fmt.Sprintf("%d-%d", o.created.Unix(), o.generation), Data: o.secret}
		}
	}
	// A write key belongs to the oldest of all Sources that have it.
	owners := map[string]*v1alpha1.Source{}
	for _, snapshot := range out {
		for i := range snapshot.Sources {
			source := &snapshot.Sources[i]
			for _, hash := range compile.WriteKeySHA256(source, snapshot.Secrets) {
				if owners[hash] == nil || older(source, owners[hash]) {
					owners[hash] = source
				}
			}
		}
	}
	for namespace, snapshot := range out {
		for hash, owner := range owners {
			if owner.Namespace != namespace {
				snapshot.ForeignWriteKeys[hash] = owner.Namespace + "/" + owner.Name
			}
		}
	}
	return out
}

func older(a, b *v1alpha1.Source) bool {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name)) < 0
}

// state is the store on disk: it lets a restart find the objects of a manifest
// that was broken meanwhile. Without it they would look deleted, and what waits
// for them would be given up.
type state struct {
	Version int           `json:"version"`
	Objects []stateObject `json:"objects"`
}

type stateObject struct {
	File       string      `json:"file"`
	Generation int64       `json:"generation"`
	Created    metav1.Time `json:"created"`
	// AudienceKey is the key in effect, of an Audience.
	AudienceKey string `json:"audienceKey,omitempty"`
	// Ended is the status of a DeletionRequest whose run has ended.
	Ended    *v1alpha1.DeletionRequestStatus `json:"ended,omitempty"`
	Manifest json.RawMessage                 `json:"manifest"`
}

const stateVersion = 1

// save writes the state, readable for its owner alone: it holds Secrets, as the
// manifests do.
func (s *store) save(path string) error {
	out := state{Version: stateVersion}
	for _, o := range s.sorted() {
		saved := stateObject{File: o.file, Generation: o.generation, Created: o.created, Manifest: o.manifest}
		if a, ok := o.resource.(*v1alpha1.Audience); ok {
			saved.AudienceKey = a.Status.Key
		}
		if d, ok := o.resource.(*v1alpha1.DeletionRequest); ok && v1alpha1.JobEnded(d.Status.JobStatus) {
			saved.Ended = &d.Status
		}
		out.Objects = append(out.Objects, saved)
	}
	text, err := json.Marshal(out)
	if err != nil {
		return fmt.Errorf("save manifests: %w", err)
	}
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, text) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("save manifests: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*") // mode 0600
	if err != nil {
		return fmt.Errorf("save manifests: %w", err)
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("save manifests: %w", err)
	}
	return nil
}

// restore reads what save wrote. A missing file is an empty store.
func (s *store) restore(path string) error {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("restore manifests: %w", err)
	}
	var in state
	if err := json.Unmarshal(text, &in); err != nil || in.Version != stateVersion {
		return fmt.Errorf("restore manifests: %s is not a state of this version; correct or remove it", path)
	}
	for _, o := range in.Objects {
		p := parse(o.File+".json", o.Manifest)
		if len(p.objects) != 1 {
			continue // not valid for this version any more; its manifest will say so
		}
		object := &stored{object: p.objects[0], file: o.File, generation: o.Generation, created: o.Created}
		object.furnish(nil, s.version())
		if a, ok := object.resource.(*v1alpha1.Audience); ok {
			a.Status.Key = o.AudienceKey
		}
		if d, ok := object.resource.(*v1alpha1.DeletionRequest); ok && o.Ended != nil {
			d.Status = *o.Ended
		}
		s.objects[object.id] = object
	}
	return nil
}
