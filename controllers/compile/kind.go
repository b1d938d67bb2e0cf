package compile

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// Object is an object of one of the kinds.
type Object interface {
	metav1.Object
	runtime.Object
}

// The sections of the kinds that others refer to.
const (
	sectionSources      = "sources"
	sectionDestinations = "destinations"
)

// Table is a set of kinds, in the order in which they are compiled: a kind can use the
// entries and the verdicts of those before it. Package kinds has the table of the API.
type Table []Kind

// Kind compiles the objects of one kind. NewKind returns one.
type Kind struct {
	// Section is the name of the kind's part of Verdicts.
	Section string

	// is reports whether an object is of the kind.
	is         func(Object) bool
	compile    func(Snapshot, *liveconfig.Config, Verdicts)
	secretRefs func(Object) []string
	revisions  func(liveconfig.Config) map[string]string
	evictions  func(c, last liveconfig.Config) []eviction
	// evict removes or pauses the entries with these names, and returns the new revisions of
	// the paused ones.
	evict  func(c *liveconfig.Config, names map[string]bool) map[string]string
	pauses bool
}

// Definition defines the kind of the objects O, whose entries in a live config have the
// type E.
type Definition[O Object, E any] struct {
	// Section is the name of the kind's part of Verdicts.
	Section string
	// Entries returns the kind's part of a live config.
	Entries func(*liveconfig.Config) *[]E
	// ID returns the name and the revision of an entry.
	ID func(E) (name, revision string)
	// Compiler returns a function that compiles one object. objects are all objects of the
	// kind, sorted by name; c and v have the kinds before this one. The function returns
	// false for an object that is not in the config.
	Compiler func(s Snapshot, c liveconfig.Config, v Verdicts, objects []O) func(O) (E, bool, Verdict)
	// SecretRefs returns the names of the Secrets, and the ConfigMapNames, that an object refers to; nil for kinds
	// without such references.
	SecretRefs func(O) []string
	// Weight estimates the number of bytes that the eviction of an entry saves; nil for
	// kinds whose entries are not evicted.
	Weight func(E) int
	// Pause returns the form of an evicted entry; nil if evicted entries are removed.
	// Dispatchers delete the data of removed entries, so only entries that are not in the
	// last config are removed.
	Pause func(E) E
}

// NewKind returns the Kind of a definition.
func NewKind[O Object, E any](d Definition[O, E]) Kind {
	k := Kind{Section: d.Section, pauses: d.Pause != nil}
	k.compile = func(s Snapshot, c *liveconfig.Config, v Verdicts) {
		objects := objectsOf[O](s)
		if len(objects) == 0 {
			return
		}
		compile := d.Compiler(s, *c, v, objects)
		verdicts := make(map[string]Verdict, len(objects))
		entries := d.Entries(c)
		for _, o := range objects {
			entry, in, verdict := compile(o)
			if in {
				*entries = append(*entries, entry)
			}
			verdicts[o.GetName()] = verdict
		}
		v[d.Section] = verdicts
	}
	k.is = func(o Object) bool { _, own := o.(O); return own }
	k.secretRefs = func(o Object) []string {
		if own, ok := o.(O); ok && d.SecretRefs != nil {
			return d.SecretRefs(own)
		}
		return nil
	}
	k.revisions = func(c liveconfig.Config) map[string]string {
		revisions := map[string]string{}
		for _, e := range *d.Entries(&c) {
			name, revision := d.ID(e)
			revisions[name] = revision
		}
		return revisions
	}
	k.evictions = func(c, last liveconfig.Config) (evictions []eviction) {
		if d.Weight == nil {
			return nil
		}
		before := k.revisions(last)
		for _, e := range *d.Entries(&c) {
			name, revision := d.ID(e)
			if was, exists := before[name]; d.Pause != nil {
				evictions = append(evictions, eviction{name: name, inEffect: was == revision, weight: d.Weight(e)})
			} else if !exists {
				evictions = append(evictions, eviction{name: name, weight: d.Weight(e)})
			}
		}
		return evictions
	}
	k.evict = func(c *liveconfig.Config, names map[string]bool) map[string]string {
		entries := slices.Clone(*d.Entries(c))
		named := func(e E) bool { name, _ := d.ID(e); return names[name] }
		revisions := map[string]string{}
		if d.Pause == nil {
			entries = slices.DeleteFunc(entries, named)
		}
		for i, e := range entries {
			if named(e) {
				entries[i] = d.Pause(e)
				name, revision := d.ID(entries[i])
				revisions[name] = revision
			}
		}
		*d.Entries(c) = entries
		return revisions
	}
	return k
}

// Compile returns a namespace's live config and the verdicts. The config contains every
// Source and destination. An invalid destination is paused, so that its messages are kept.
// An invalid Source has no write key, and a Source with one unusable write key has the
// other one.
//
// A destination whose Sources exist only in part, or whose dead letters cannot be forwarded, is
// active although it has an unresolved reference: a pause would delay the other calls.
func (t Table) Compile(s Snapshot) (liveconfig.Config, Verdicts) {
	config := liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: s.Namespace}
	verdicts := Verdicts{}
	for _, k := range t {
		k.compile(s, &config, verdicts)
	}
	return config, verdicts
}

// SecretRefs returns the names of the Secrets, and the ConfigMapNames, that objects refer to, sorted and unique.
func (t Table) SecretRefs(objects ...Object) []string {
	var names []string
	for _, o := range objects {
		for _, k := range t {
			names = append(names, k.secretRefs(o)...)
		}
	}
	names = slices.DeleteFunc(names, func(name string) bool { return name == "" })
	slices.Sort(names)
	return slices.Compact(names)
}
