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

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/internal/durable"
	"github.com/posthorn/posthorn/internal/plural"
)

// store is the replacement of an API server: it keeps the last valid form of each
// object, counts generations, and sets creation times. It is not safe for concurrent use.
type store struct {
	files map[string]*file
	objects
	// writes counts changes. Resource versions are values of it.
	writes   int64
	problems []manifest.Problem
	// warnings are ignored objects of other kinds, and experimental fields.
	warnings []manifest.Problem
	// parked are problems of the objects that the log has and this process did not load.
	parked       []manifest.Problem
	secretValues []SecretValue
	// records has the objects that this process did not load, and written the values of all, by name.
	records map[id]record
	written map[string][]byte
	// heads has the heads of the last live configs, by namespace.
	heads map[string]liveconfig.Head
	// unproved has the namespaces of which another process has applied a newer live config than this one, until
	// the first load: it does not prove that an object was deleted.
	unproved map[string]bool
	// added are the objects of the first load that the log does not have: the last owner deleted them, or never had them.
	added []id
	// unread is true if a file could not be read and must be read again.
	unread bool
}

// objects are the objects of a store.
type objects map[id]*stored

type file struct {
	path string
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
	version
	file string
}

// version is what the store counts of an object.
type version struct {
	// Generation counts the changes of the spec, or of the Secret's data.
	Generation int64       `json:"generation"`
	Created    metav1.Time `json:"created"`
	// Changed is when this generation was loaded.
	Changed metav1.Time `json:"changed,omitzero"`
	// Previous are the hashes of the specs before this one, the newest first: a folder with one of them is older than
	// a replicated log with this one.
	Previous []string `json:"previous,omitempty"`
}

func newStore() *store {
	return &store{files: map[string]*file{}, objects: objects{}}
}

// load replaces the objects by those in the present manifests, as merge does.
func (s *store) load(marks []mark, now time.Time) {
	if len(s.secretValues) > 0 {
		marks = append([]mark{{path: secretValuesFile}}, marks...)
	}
	next, files, problems := merge(s.objects, s.read(marks), s.isOutdated)
	s.warnings, s.unread = nil, false
	for _, f := range files {
		s.warnings, s.unread = slices.Concat(s.warnings, f.ignored, f.warnings), s.unread || f.unread
		if !f.unreadable {
			f.good = f.text
		}
	}
	for id, o := range next {
		s.setVersion(o, s.objects[id], now)
	}
	s.keepRecords(next)
	s.objects, s.problems = next, problems
	s.parked = s.parkedProblems(now)
}

// merge returns the objects after a load, without their versions, and the problems of the files. It keeps the old objects
// of a file that is unreadable or incomplete now, and the last valid form of an object that is invalid now. Of the files
// with an object the first one takes precedence. In effective, an incomplete file is an unreadable one.
func merge(old objects, files []*file, isOutdated func(*object) bool) (next objects, effective []*file, problems []manifest.Problem) {
	before := old.byFile()
	next, effective = objects{}, complete(before, files)
	for _, f := range effective {
		own := slices.Clone(f.problems)
		for _, o := range f.objects {
			errs := o.admitUpdate(old[o.id])
			switch other := next[o.id]; {
			case other != nil:
				errs = []error{fmt.Errorf("the object is also in %s, which takes precedence; remove one of them", other.file)}
			case len(errs) > 0:
				next[o.id] = &stored{object: old[o.id].object, file: f.path}
			case !isOutdated(o):
				next[o.id] = &stored{object: o, file: f.path}
			}
			for _, err := range errs {
				own = append(own, manifest.Problem{File: f.path, Line: o.line, Object: o.String(), Message: err.Error()})
			}
		}
		for _, o := range before[f.path] {
			misspelt := f.misspells(o.id)
			if next[o.id] != nil || !f.unreadable && misspelt == "" && !slices.Contains(f.broken, o.id) {
				continue
			}
			next[o.id] = &stored{object: o.object, file: f.path}
			for i := range own {
				if own[i].Object == misspelt && misspelt != "" {
					own[i].Object = o.String()
				}
			}
		}
		problems = append(problems, own...)
	}
	return next, effective, problems
}

// complete returns the files, with an unreadable one in place of each that is probably not completely written.
func complete(before map[string][]*stored, files []*file) []*file {
	present := map[id]bool{}
	for _, f := range files {
		for _, o := range f.objects {
			present[o.id] = true
		}
		for _, id := range f.broken {
			present[id] = true
		}
	}
	list := slices.Clone(files)
	for i, f := range files {
		if problem := incomplete(f, before[f.path], present); problem != "" {
			list[i] = &file{path: f.path, unread: f.unread,
				parsed: parsed{unreadable: true, problems: []manifest.Problem{{File: f.path, Message: problem}}}}
		}
	}
	return list
}

// setVersion sets the version of a loaded object, and the fields that a server sets. They continue the
// versions and fields of the old object, or else of its record.
func (s *store) setVersion(o, old *stored, now time.Time) {
	last, recorded := s.takeRecord(o)
	isChanged := true
	switch {
	case old != nil && old.object == o.object:
		o.version = old.version
		return
	case old != nil:
		last, isChanged = record{version: old.version, Content: old.hashed()}, old.content != o.content
	case recorded:
		isChanged = o.resource != nil && last.Content != o.hashed()
	default:
		last = record{version: version{Created: seconds(now)}}
		if s.unproved != nil && len(s.written) > 0 && o.resource != nil {
			s.added = append(s.added, o.id)
		}
	}
	if o.version = last.version; isChanged {
		o.Generation, o.Changed, o.Previous = last.Generation+1, seconds(now), last.replaced(o.hashed())
	}
	o.setServerFields(old, s.nextVersion())
	if old == nil {
		_ = last.restoreStatus(o) // The report restores what cannot be decoded.
	}
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
	since := sinceIn(before, now)
	files, objects := s.byFile(), map[string]*stored{}
	for id, o := range s.objects {
		objects[id.String()] = o
	}
	for i := range s.problems {
		p := &s.problems[i]
		p.Since = since(*p)
		var kept []*stored
		if p.Object == "" {
			kept = files[p.File]
		} else if o := objects[p.Object]; o != nil {
			kept = []*stored{o}
		}
		p.Outdated, p.Effect = effect(*p, kept)
	}
}

// sinceIn returns a function that returns since when a problem exists: since before, or now.
func sinceIn(before []manifest.Problem, now time.Time) func(manifest.Problem) time.Time {
	since := map[string]time.Time{}
	for _, p := range before {
		since[p.String()] = p.Since
	}
	return func(p manifest.Problem) time.Time {
		if found, ok := since[p.String()]; ok {
			return found
		}
		return seconds(now).Time
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
	case kept[0].Changed.IsZero():
		return outdated, "the last valid version remains in effect"
	}
	return outdated, "the version of " + kept[0].Changed.UTC().Format(time.RFC3339) + " remains in effect"
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

// read replaces the files. It reads them and parses those that have changed, in parallel.
func (s *store) read(marks []mark) []*file {
	list := make([]*file, len(marks))
	inParallel(len(marks), func(i int) { list[i] = s.readFile(marks[i].path) })
	s.files = make(map[string]*file, len(marks))
	for _, f := range list {
		s.files[f.path] = f
	}
	return list
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
	if err == nil && old != nil && old.text != nil && bytes.Equal(old.text, text) {
		return old
	}
	f := &file{path: path, text: text, unread: err != nil}
	if old != nil {
		f.good = old.good
	}
	if pathErr, ok := errors.AsType[*os.PathError](err); ok {
		err = pathErr.Err
	}
	if err != nil {
		f.parsed = parsed{unreadable: true, problems: []manifest.Problem{{File: path, Message: err.Error()}}}
	} else {
		f.parsed = parse(path, text)
	}
	return f
}

// incomplete returns a problem if a file is probably not completely written, and otherwise
// "". The objects of an incomplete file are kept. before are the objects that the file had, and present
// the objects of all files.
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

func (s *store) nextVersion() string {
	s.writes++
	return strconv.FormatInt(s.writes, 10)
}

// setServerFields sets the metadata that a server sets, and copies the status of the old
// object.
func (o *stored) setServerFields(old *stored, resourceVersion string) {
	if o.resource == nil {
		return
	}
	o.resource.SetGeneration(o.Generation)
	o.resource.SetCreationTimestamp(o.Created)
	o.resource.SetResourceVersion(resourceVersion)
	o.resource.SetUID(types.UID(uuid.NewSHA1(uuid.NameSpaceURL, []byte(o.id.String()+o.Created.UTC().String())).String()))
	if old == nil {
		return
	}
	o.of.Health.CopyStatus(o.resource, old.resource)
}

// sorted returns the objects by kind, namespace and name.
func (all objects) sorted() []*stored { return all.sortedIf(func(*stored) bool { return true }) }

// sortedIf returns the selected objects, sorted.
func (all objects) sortedIf(selected func(*stored) bool) []*stored {
	var list []*stored
	for _, o := range all {
		if selected(o) {
			list = append(list, o)
		}
	}
	slices.SortFunc(list, func(a, b *stored) int { return a.compare(b.id) })
	return list
}

// byFile returns the objects of each file, sorted.
func (all objects) byFile() map[string][]*stored {
	files := map[string][]*stored{}
	for _, o := range all.sorted() {
		files[o.file] = append(files[o.file], o)
	}
	return files
}

// snapshots returns the snapshots to compile, by namespace. A namespace that has only
// Secrets and ConfigMaps has no snapshot.
func (s *store) snapshots(policy compile.Policy) map[string]*snapshot {
	out := map[string]*snapshot{}
	objects := s.sorted()
	for _, o := range objects {
		if o.resource == nil {
			continue
		}
		of := out[o.namespace]
		if of == nil {
			of = &snapshot{Snapshot: compile.Snapshot{Namespace: o.namespace, Policy: policy, Secrets: map[string]compile.Secret{},
				ForeignWriteKeys: map[string]compile.KeyUse{}}}
			of.inputs.foreignWriteKeys = of.ForeignWriteKeys
			out[o.namespace] = of
		}
		of.Objects, of.inputs.objects = append(of.Objects, o.resource), append(of.inputs.objects, inputOf(o))
	}
	for _, o := range objects {
		if of := out[o.namespace]; o.resource == nil && of != nil {
			name := o.name
			if o.kind == kindConfigMap {
				name = compile.ConfigMapName(name)
			}
			of.Secrets[name] = compile.Secret{Version: fmt.Sprintf("%d-%d", o.Created.Unix(), o.Generation), Data: o.values}
			of.inputs.objects = append(of.inputs.objects, inputOf(o))
		}
	}
	// A write key belongs to the oldest Source that has it.
	users := map[string][]*v1beta1.Source{}
	for _, of := range out {
		for _, o := range of.Objects {
			if source, ok := o.(*v1beta1.Source); ok {
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
	// status is a resource that contains the status that the compiler reads; nil for none.
	status any
}

func inputOf(o *stored) input {
	in := input{id: o.id, manifest: o.manifest, generation: o.Generation, created: o.Created}
	if o.resource != nil && o.of.Input != nil {
		in.status = o.resource // It is replaced with each change of the status.
	}
	return in
}

func (i input) equal(other input) bool {
	return i.id == other.id && bytes.Equal(i.manifest, other.manifest) && i.generation == other.generation &&
		i.created.Equal(&other.created) && i.status == other.status
}

func byAge(a, b *v1beta1.Source) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Namespace, b.Namespace),
		strings.Compare(a.Name, b.Name))
}

// state is the content of the state file. After a restart it restores objects whose
// manifests are invalid. Otherwise these objects would count as deleted, and their pending
// messages would be discarded.
type state struct {
	Version int           `json:"version"`
	Objects []stateObject `json:"objects"`
	// Heads has the heads of the last live configs, by namespace.
	Heads map[string]liveconfig.Head `json:"heads,omitempty"`
}

type stateObject struct {
	File string `json:"file"`
	record
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
		r, err := o.record()
		if err != nil {
			return fmt.Errorf("save manifests: %w", err)
		}
		out.Objects = append(out.Objects, stateObject{o.file, r, o.manifest})
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
	s.heads = in.Heads
	valid := map[[sha256.Size]byte]*object{}
	for _, f := range s.read(marks) {
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
		object := &stored{object: objects[i], file: o.File, version: o.version}
		object.setServerFields(nil, s.nextVersion())
		if err := o.restoreStatus(object); err != nil {
			return fmt.Errorf("restore manifests: the status of %s in %s is not valid; correct or remove it: %w", object.id, path, err)
		}
		s.objects[object.id] = object
	}
	return nil
}
