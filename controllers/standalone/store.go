package standalone

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/internal/durable"
	"github.com/posthorn/posthorn/internal/plural"
)

// store is the replacement of an API server: it keeps the last valid form of each
// object, counts generations, and sets creation times. It is not safe for concurrent use.
type store struct {
	files   map[string]*file
	objects map[id]*stored
	// writes counts changes. Resource versions are values of it.
	writes   int64
	problems []manifest.Problem
	ignored  []manifest.Problem
	// parked are problems of the objects that the log has and this process did not load.
	parked       []manifest.Problem
	secretValues []SecretValue
	// records are those of the objects that this process did not load, and written are the values of all, by name.
	records map[string]record
	written map[string][]byte
	// heads are those of the last live configs of the namespaces.
	heads map[string]liveconfig.Head
	// unproved has the namespaces of which another process has applied a newer live config than this one, until
	// the first load: it does not prove that an object was deleted.
	unproved map[string]bool
	// added are the objects of the first load that the log does not have: the last owner deleted them, or never had them.
	added []id
	// unread is true if a file could not be read and must be read again.
	unread bool
}

type file struct {
	text []byte
	// good is the newest text that was neither empty nor cut off nor unreadable; nil if
	// there is none.
	good []byte
	// unread is true if the file, or a value in place of it, could not be read.
	unread bool
	parsed
}

// stored is an object with the fields that a server sets.
type stored struct {
	*object
	file string
	// generation counts the changes of the spec, or of the Secret's data.
	generation int64
	created    metav1.Time
	// changed is when this generation was loaded; zero after an upgrade from a version that did
	// not store it.
	changed metav1.Time
	// previous are the hashes of earlier specs, as a record has them.
	previous []string
}

func newStore() *store {
	return &store{files: map[string]*file{}, objects: map[id]*stored{}}
}

// load replaces the objects by those in the present manifests. It keeps the objects of a
// file that is unreadable now, and the last valid form of an object that is invalid now.
func (s *store) load(marks []mark, now time.Time) {
	s.problems, s.ignored, s.unread = nil, nil, false
	next := map[id]*stored{}
	before := s.byFile()
	present := map[id]bool{}
	if len(s.secretValues) > 0 {
		marks = append([]mark{{path: secretValuesFile}}, marks...)
	}
	files := s.read(marks)
	for _, f := range files {
		s.unread = s.unread || f.unread
		for _, o := range f.objects {
			present[o.id] = true
		}
		for _, id := range f.broken {
			present[id] = true
		}
	}
	for _, mark := range marks {
		f := files[mark.path]
		if problem := incomplete(f, before[mark.path], present); problem != "" {
			f = &file{parsed: parsed{unreadable: true, problems: []manifest.Problem{{File: mark.path, Message: problem}}}}
		} else if !f.unreadable {
			f.good = f.text
		}
		s.problems = append(s.problems, f.problems...)
		s.ignored = append(s.ignored, f.ignored...)
		add := func(o *object) {
			if other := next[o.id]; other != nil {
				s.problems = append(s.problems, manifest.Problem{File: mark.path, Line: o.line, Object: o.String(), Message: "the object is also in " + other.file + ", which takes precedence; remove one of them"})
				return
			}
			if errs := o.admitUpdate(s.objects[o.id]); len(errs) > 0 {
				for _, err := range errs {
					s.problems = append(s.problems, manifest.Problem{File: mark.path, Line: o.line, Object: o.String(), Message: err.Error()})
				}
				o = s.objects[o.id].object
			}
			if !s.isOutdated(o) {
				next[o.id] = &stored{object: o, file: mark.path}
			}
		}
		for _, o := range f.objects {
			add(o)
		}
		for _, old := range before[mark.path] {
			if next[old.id] != nil {
				continue
			}
			misspelt := f.misspells(old.id)
			if f.unreadable || misspelt != "" || slices.Contains(f.broken, old.id) {
				add(old.object)
			}
			for i := range s.problems {
				if p := &s.problems[i]; p.File == mark.path && p.Object == misspelt && misspelt != "" {
					p.Object = old.String()
				}
			}
		}
	}
	for id, o := range next {
		old := s.objects[id]
		kept, recorded := s.takeRecord(id)
		recorded = recorded && kept.isOf(o)
		switch {
		case old == nil && recorded:
			o.generation, o.created, o.changed, o.previous = kept.Generation, kept.Created, kept.Changed, kept.Previous
			if o.resource != nil && kept.Content != o.hashed() {
				o.generation, o.changed, o.previous = kept.Generation+1, seconds(now), kept.replaced(o.hashed())
			}
		case old == nil:
			o.generation, o.created, o.changed = 1, seconds(now), seconds(now)
			if s.unproved != nil && len(s.written) > 0 && o.resource != nil {
				s.added = append(s.added, id)
			}
		case old.content == o.content:
			o.generation, o.created, o.changed, o.previous = old.generation, old.created, old.changed, old.previous
		default:
			o.generation, o.created, o.changed = old.generation+1, old.created, seconds(now)
			o.previous = record{Content: old.hashed(), Previous: old.previous}.replaced(o.hashed())
		}
		if old != nil && old.object == o.object {
			next[id] = old
			old.file = o.file
			continue
		}
		o.setServerFields(old, s.version())
		if recorded {
			kept.restoreStatus(o)
		}
	}
	s.keepRecords(next)
	s.files, s.objects = files, next
	s.parked = s.parkedProblems(now)
}

// misspells returns the text of the object with a kind that does not exist and the name of another one;
// "" for none.
func (p *parsed) misspells(other id) string {
	for _, m := range p.misspelt {
		if m.namespace == other.namespace && m.name == other.name {
			return m.String()
		}
	}
	return ""
}

// seconds returns a time as an API server stores it.
func seconds(t time.Time) metav1.Time { return metav1.NewTime(t.UTC().Truncate(time.Second)) }

// explainProblems sets, in the problems of the last load, the time since when each exists and its
// effect. before are the problems of the load before.
func (s *store) explainProblems(before []manifest.Problem, now time.Time) {
	since := map[string]time.Time{}
	for _, p := range before {
		since[p.String()] = p.Since
	}
	files, objects := s.byFile(), map[string]*stored{}
	for id, o := range s.objects {
		objects[id.String()] = o
	}
	for i := range s.problems {
		p := &s.problems[i]
		p.Since = seconds(now).Time
		if found, ok := since[p.String()]; ok {
			p.Since = found
		}
		var kept []*stored
		if p.Object == "" {
			kept = files[p.File]
		} else if o := objects[p.Object]; o != nil {
			kept = []*stored{o}
		}
		p.Outdated, p.Effect = effect(*p, kept)
	}
}

// effect returns the names of the objects that remain in effect in an earlier version because of a
// problem, and describes them.
func effect(p manifest.Problem, kept []*stored) (outdated []string, text string) {
	for _, o := range kept {
		outdated = append(outdated, o.String())
	}
	switch {
	case len(kept) == 0 && p.Object == "":
		return nil, "no object of this file exists"
	case len(kept) == 0:
		return nil, "there is no earlier valid version, so the object does not exist"
	case len(kept) > 1:
		return outdated, fmt.Sprintf("the last valid versions of its %d objects remain in effect", len(kept))
	case kept[0].changed.IsZero():
		return outdated, "the last valid version remains in effect"
	}
	return outdated, "the version of " + kept[0].changed.UTC().Format(time.RFC3339) + " remains in effect"
}

// rejected returns the first problem of each object of which an earlier version remains in effect,
// by "Kind namespace/name".
func (s *store) rejected() map[string]manifest.Problem {
	first := map[string]manifest.Problem{}
	for _, p := range s.problems {
		for _, object := range p.Outdated {
			if _, ok := first[object]; !ok {
				first[object] = p
			}
		}
	}
	return first
}

// read reads the files and parses those that have changed, in parallel. The result has them by path.
func (s *store) read(marks []mark) map[string]*file {
	list := make([]*file, len(marks))
	inParallel(len(marks), func(i int) { list[i] = s.readFile(marks[i].path) })
	files := make(map[string]*file, len(marks))
	for i, mark := range marks {
		files[mark.path] = list[i]
	}
	return files
}

// inParallel calls do with each number below n, on all processors.
func inParallel(n int, do func(int)) {
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i := range n {
		group.Go(func() error {
			do(i)
			return nil
		})
	}
	_ = group.Wait() // It has no errors.
}

// readFile parses a file, unless it has not changed.
func (s *store) readFile(path string) *file {
	if path == secretValuesFile {
		return s.readSecretValues()
	}
	text, err := readFile(path)
	old := s.files[path]
	if err != nil {
		if pathErr, ok := errors.AsType[*os.PathError](err); ok {
			err = pathErr.Err
		}
		f := &file{unread: true, parsed: parsed{unreadable: true, problems: []manifest.Problem{{File: path, Message: err.Error()}}}}
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

// incomplete returns a problem if a file is probably not completely written, and otherwise
// "". The objects of an incomplete file are kept. before are the objects that the file had, and present
// those of all files.
func incomplete(f *file, before []*stored, present map[id]bool) string {
	missing := 0
	for _, o := range before {
		if !present[o.id] {
			missing++
		}
	}
	switch {
	case f.unreadable || f.blank && missing == 0:
		return ""
	case cutInLine(f.good, f.text):
		// The value in this line may be cut off, even if no object is missing.
		return "the file ends within a line of its last valid form, which is kept; write the complete file, or add a line break at its end"
	case missing == 0:
		return ""
	case f.blank:
		return fmt.Sprintf("the file is empty, and the last valid version of %s is kept; to delete, remove the file, or write an empty List to it (apiVersion: v1, kind: List, items: [])", plural.Count(missing, "object"))
	case cutInDocument(f.good, f.text):
		return fmt.Sprintf("the file ends within a document of its last valid form, which is kept; missing after that: %s; write the complete file, or end it after a document", plural.Count(missing, "object"))
	}
	return ""
}

// cutInLine reports whether text is a prefix of whole that ends within a line.
func cutInLine(whole, text []byte) bool {
	rest, ok := bytes.CutPrefix(whole, text)
	return ok && len(rest) > 0 && len(text) > 0 && !bytes.HasSuffix(text, []byte("\n")) && rest[0] != '\n' && rest[0] != '\r'
}

// cutInDocument reports whether text is a prefix of whole that ends within a YAML document.
// A text that ends after a document may be an intended edit.
func cutInDocument(whole, text []byte) bool {
	rest, ok := bytes.CutPrefix(whole, text)
	if !ok {
		return false
	}
	endsLine := bytes.HasSuffix(text, []byte("\n")) || bytes.HasPrefix(rest, []byte("\n")) || bytes.HasPrefix(rest, []byte("\r\n"))
	document := bytes.TrimLeft(rest, " \t\r\n")
	complete := endsLine && (len(document) == 0 || bytes.HasPrefix(document, []byte("---")))
	return !complete && !bytes.HasSuffix(bytes.TrimRight(text, " \t\r\n"), []byte("\n---"))
}

// admitUpdate applies the rules for updates to a changed object.
func (o *object) admitUpdate(old *stored) []error {
	if old == nil || o.resource == nil || old.content == o.content {
		return nil
	}
	crds, err := definitions()
	if err != nil {
		return []error{err}
	}
	var now map[string]any
	if err := json.Unmarshal(o.manifest, &now); err != nil {
		return []error{err}
	}
	before, err := apiruntime.DefaultUnstructuredConverter.ToUnstructured(old.resource)
	if err != nil {
		return []error{err}
	}
	if status, ok := before["status"]; ok { // As in the API server, an update of the spec does not change the status.
		now["status"] = status
	}
	return crds[o.kind].admitUpdate(now, before)
}

// keepAudienceKeys sets status.key of the Audiences. The key in effect does not change when
// the display name changes and, because it is in the state file, after a restart.
func (s *store) keepAudienceKeys(namespace string, verdicts map[string]compile.Verdict) {
	for name, v := range verdicts {
		if o := s.objects[id{"Audience", namespace, name}]; o != nil && v.Key != "" && o.resource.(*v1alpha1.Audience).Status.Key != v.Key {
			a := o.resource.DeepCopyObject().(*v1alpha1.Audience) // Other goroutines may read the present object.
			a.Status.Key = v.Key
			o.resource = a
		}
	}
}

func (s *store) version() string {
	s.writes++
	return strconv.FormatInt(s.writes, 10)
}

// setServerFields sets the metadata that a server sets, and copies the status of the old
// object.
func (o *stored) setServerFields(old *stored, version string) {
	if o.kind == kindSecret {
		return
	}
	o.resource.SetGeneration(o.generation)
	o.resource.SetCreationTimestamp(o.created)
	o.resource.SetResourceVersion(version)
	o.resource.SetUID(types.UID(uuid.NewSHA1(uuid.NameSpaceURL, []byte(o.id.String()+o.created.UTC().String())).String()))
	if old == nil {
		return
	}
	o.of.Health.CopyStatus(o.resource, old.resource)
}

// sorted returns the objects by kind, namespace and name.
func (s *store) sorted() []*stored { return s.sortedIf(func(*stored) bool { return true }) }

// sortedIf returns the selected objects, sorted.
func (s *store) sortedIf(selected func(*stored) bool) []*stored {
	var list []*stored
	for _, o := range s.objects {
		if selected(o) {
			list = append(list, o)
		}
	}
	slices.SortFunc(list, func(a, b *stored) int {
		return cmp.Or(strings.Compare(a.kind, b.kind), strings.Compare(a.namespace, b.namespace), strings.Compare(a.name, b.name))
	})
	return list
}

// byFile returns the objects of each file, sorted.
func (s *store) byFile() map[string][]*stored {
	files := map[string][]*stored{}
	for _, o := range s.sorted() {
		files[o.file] = append(files[o.file], o)
	}
	return files
}

// snapshots returns the snapshots to compile, by namespace. A namespace that has only
// Secrets has no snapshot.
func (s *store) snapshots(policy compile.Policy) map[string]*snapshot {
	out := map[string]*snapshot{}
	objects := s.sorted()
	for _, o := range objects {
		if o.resource == nil {
			continue
		}
		of := out[o.namespace]
		if of == nil {
			of = &snapshot{Snapshot: compile.Snapshot{Namespace: o.namespace, Policy: policy, Secrets: map[string]compile.Secret{}, ForeignWriteKeys: map[string]compile.KeyUse{}}}
			of.inputs.foreignWriteKeys = of.ForeignWriteKeys
			out[o.namespace] = of
		}
		of.Objects, of.inputs.objects = append(of.Objects, o.resource), append(of.inputs.objects, inputOf(o))
	}
	for _, o := range objects {
		if of := out[o.namespace]; o.kind == kindSecret && of != nil {
			of.Secrets[o.name] = compile.Secret{Version: fmt.Sprintf("%d-%d", o.created.Unix(), o.generation), Data: o.secret}
			of.inputs.objects = append(of.inputs.objects, inputOf(o))
		}
	}
	// A write key belongs to the oldest Source that has it.
	users := map[string][]*v1alpha1.Source{}
	for _, of := range out {
		for _, o := range of.Objects {
			if source, ok := o.(*v1alpha1.Source); ok {
				for _, hash := range compile.WriteKeySHA256(source, of.Secrets) {
					users[hash] = append(users[hash], source)
				}
			}
		}
	}
	for hash, sources := range users {
		owner := slices.MinFunc(sources, byAge)
		for _, source := range sources {
			if source.Namespace != owner.Namespace {
				out[source.Namespace].ForeignWriteKeys[hash] = compile.KeyInUse
			}
		}
	}
	return out
}

// snapshot is the input of a namespace's compilation. Its ForeignWriteKeys are those that a Source of the
// namespace has.
type snapshot struct {
	compile.Snapshot
	inputs inputs
}

// inputs identify a snapshot without keeping its objects: a compilation of equal inputs has the same result.
type inputs struct {
	objects          []input
	foreignWriteKeys map[string]compile.KeyUse
}

func (i inputs) equal(other inputs) bool {
	return slices.EqualFunc(i.objects, other.objects, input.equal) && maps.Equal(i.foreignWriteKeys, other.foreignWriteKeys)
}

// input is the version of an object that the compiler reads.
type input struct {
	id
	manifest   []byte
	generation int64
	created    metav1.Time
	// status is the part of the status that the compiler reads, or a resource that contains it; nil for none.
	status any
}

func inputOf(o *stored) input {
	in := input{id: o.id, manifest: o.manifest, generation: o.generation, created: o.created}
	if a, ok := o.resource.(*v1alpha1.Audience); ok {
		in.status = a.Status.Key
	} else if o.resource != nil && o.of.Input != nil {
		in.status = o.resource // It is replaced with each change of the status.
	}
	return in
}

func (i input) equal(other input) bool {
	return i.id == other.id && bytes.Equal(i.manifest, other.manifest) && i.generation == other.generation && i.created.Equal(&other.created) && i.status == other.status
}

func byAge(a, b *v1alpha1.Source) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

// state is the content of the state file. After a restart it restores objects whose
// manifests are invalid. Otherwise these objects would count as deleted, and their pending
// messages would be discarded.
type state struct {
	Version int           `json:"version"`
	Objects []stateObject `json:"objects"`
	// Heads are those of the last live configs, by namespace.
	Heads map[string]liveconfig.Head `json:"heads,omitempty"`
}

type stateObject struct {
	File       string      `json:"file"`
	Generation int64       `json:"generation"`
	Created    metav1.Time `json:"created"`
	// Changed is when this generation was loaded.
	Changed metav1.Time `json:"changed,omitzero"`
	// AudienceKey is the key in effect of an Audience.
	AudienceKey string `json:"audienceKey,omitempty"`
	// Status is the status of an object whose run has started or ended.
	Status   json.RawMessage `json:"status,omitempty"`
	Manifest json.RawMessage `json:"manifest"`
}

const stateVersion = 1

// save writes the state. Only the owner of the file can read it, because it contains
// Secrets.
func (s *store) save(path string) error {
	out := state{Version: stateVersion, Heads: s.heads}
	for _, o := range s.sorted() {
		if o.file == secretValuesFile { // The value should have no other copy on the disk.
			continue
		}
		saved := stateObject{File: o.file, Generation: o.generation, Created: o.created, Changed: o.changed, Manifest: o.manifest}
		var err error
		if saved.AudienceKey, saved.Status, err = o.savedStatus(); err != nil {
			return fmt.Errorf("save manifests: %w", err)
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
	if err := durable.Replace(path, text, 0o600); err != nil {
		return fmt.Errorf("save manifests: %w", err)
	}
	return nil
}

// savedStatus returns the part of the status that a restart must not lose: the key of an Audience, and the status of a
// run that has started.
func (o *stored) savedStatus() (audienceKey string, status json.RawMessage, err error) {
	if o.resource == nil {
		return "", nil, nil
	}
	if a, ok := o.resource.(*v1alpha1.Audience); ok {
		audienceKey = a.Status.Key
	}
	if job := o.of.Health.Job(o.resource); job != nil && job.StartTime != nil {
		value, _ := o.of.Health.Status(o.resource)
		status, err = json.Marshal(value)
	}
	return audienceKey, status, err
}

// restore loads the file that save writes. A missing file means an empty store. It reads the files of
// manifests first: their parser validates an object that has not changed in the meantime.
func (s *store) restore(path string, marks []mark) error {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("restore manifests: %w", err)
	}
	var in state
	if err := json.Unmarshal(text, &in); err != nil || in.Version != stateVersion {
		return fmt.Errorf("restore manifests: %s is not a valid state file of this version; correct or remove it", path)
	}
	s.files, s.heads = s.read(marks), in.Heads
	valid := map[[sha256.Size]byte]*object{}
	for _, f := range s.files {
		for _, o := range f.objects {
			valid[sha256.Sum256(o.manifest)] = o
		}
	}
	objects := make([]*object, len(in.Objects))
	inParallel(len(objects), func(i int) {
		o := in.Objects[i]
		if objects[i] = valid[sha256.Sum256(o.Manifest)]; objects[i] != nil {
			return
		}
		if p := parse(o.File+".json", o.Manifest); len(p.objects) == 1 {
			objects[i] = p.objects[0]
		}
	})
	for i, o := range in.Objects {
		if objects[i] == nil {
			continue // It is not valid in this version; the manifest has the same problem.
		}
		object := &stored{object: objects[i], file: o.File, generation: o.Generation, created: o.Created, changed: o.Changed}
		object.setServerFields(nil, s.version())
		if a, ok := object.resource.(*v1alpha1.Audience); ok {
			a.Status.Key = o.AudienceKey
		}
		if object.resource != nil && len(o.Status) > 0 {
			status, _ := object.of.Health.Status(object.resource)
			if err := json.Unmarshal(o.Status, status); err != nil {
				return fmt.Errorf("restore manifests: the status of %s in %s is not valid; correct or remove it: %w", object.id, path, err)
			}
		}
		s.objects[object.id] = object
	}
	return nil
}
