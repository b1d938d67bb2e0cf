package liveconfig

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/writekey"
)

// View is the set of all namespaces' configs at one moment, indexed for ingest and delivery. It is
// immutable.
type View struct {
	namespaces map[string]Revisioned
	byKey      map[writekey.Hash]SourceRef
	keys       writekey.Book // Set by WithKeys; byKey has its known keys.
	unusable   map[string]bool
	parked     map[string]map[Ref]bool    // Set by WithParked.
	lost       map[string]map[string]Lost // Set by WithLost.
	complete   bool
	// suppressed maps the users whose calls are rejected to the Sources' names; no name means every
	// Source.
	suppressed map[namespaceUser][]string
}

type namespaceUser struct{ namespace, user string }

// Revisioned is a decoded Config with the revision of its bytes and its head.
type Revisioned struct {
	Config
	Revision string
	Head     Head
}

// SourceRef is a Source with its namespace.
type SourceRef struct {
	Namespace string
	Source    Source
}

// Key is the Source's name in the queue: "namespace/name".
func (r SourceRef) Key() string { return r.Namespace + "/" + r.Source.Name }

// NewView indexes configs. A write key that two namespaces share belongs to the namespace whose
// name sorts first; the controllers reject the other one.
//
// unusable lists namespaces that exist although they have no config here: it is missing or could not
// be loaded. Their messages are parked: neither sent nor discarded.
func NewView(configs []Revisioned, unusable ...string) *View {
	v := &View{namespaces: make(map[string]Revisioned, len(configs)), byKey: map[writekey.Hash]SourceRef{}, unusable: map[string]bool{},
		complete: len(unusable) == 0, suppressed: map[namespaceUser][]string{}}
	for _, namespace := range unusable {
		v.unusable[namespace] = true
	}
	for _, c := range configs {
		v.namespaces[c.Namespace] = c
	}
	for _, c := range configs {
		for _, d := range c.Deletions {
			id := namespaceUser{c.Namespace, d.UserID}
			sources, seen := v.suppressed[id]
			switch {
			case !d.Suppress || d.ID == "":
			case len(d.Sources) == 0 || seen && len(sources) == 0:
				v.suppressed[id] = nil
			default:
				v.suppressed[id] = slices.Concat(sources, d.Sources)
			}
		}
	}
	for _, namespace := range v.Namespaces() {
		for _, s := range v.namespaces[namespace].Sources {
			for _, hash := range s.WriteKeySHA256 {
				var sum writekey.Hash
				if n, err := hex.Decode(sum[:], []byte(hash)); err != nil || n != sha256.Size {
					continue
				}
				if _, taken := v.byKey[sum]; !taken {
					v.byKey[sum] = SourceRef{Namespace: namespace, Source: s}
				}
			}
		}
	}
	return v
}

// Namespaces lists the namespaces, sorted.
func (v *View) Namespaces() []string { return slices.Sorted(maps.Keys(v.namespaces)) }

// Namespace returns one namespace's config.
func (v *View) Namespace(name string) (Revisioned, bool) {
	c, ok := v.namespaces[name]
	return c, ok
}

// HasRevision reports whether a namespace has a config with a revision.
func (v *View) HasRevision(namespace, revision string) bool {
	c, ok := v.namespaces[namespace]
	return ok && c.Revision == revision
}

// Unusable reports whether a namespace exists whose config is missing or could not be loaded.
func (v *View) Unusable(namespace string) bool { return v.unusable[namespace] }

// WithParked returns the view with the parked objects of namespaces: they are neither in the
// namespace's config nor deleted.
func (v *View) WithParked(parked map[string]map[Ref]bool) *View {
	with := *v
	with.parked = parked
	return &with
}

// Parked reports whether an object's data must be kept and not be used, because its config is
// missing although it was not deleted.
func (v *View) Parked(namespace string, r Ref) bool {
	return v.unusable[namespace] || v.parked[namespace][r]
}

// WithLost returns the view with the lost connections of destinations, by namespace and name.
func (v *View) WithLost(lost map[string]map[string]Lost) *View {
	with := *v
	with.lost = lost
	return &with
}

// LostSince returns when a connection of a destination ("namespace/name") to a Source or an endpoint
// was lost; zero if it was not.
func (v *View) LostSince(destination, source, endpoint string) time.Time {
	namespace, name, _ := strings.Cut(destination, "/")
	if l := v.lost[namespace][name]; slices.Contains(l.Sources, source) || slices.Contains(l.Endpoints, endpoint) {
		return l.Since
	}
	return time.Time{}
}

// Differing returns the namespaces whose config, or whose parked or lost objects, differ between two
// views.
func (v *View) Differing(other *View) (namespaces []string) {
	all := map[string]bool{}
	for _, view := range []*View{v, other} {
		for namespace := range view.namespaces {
			all[namespace] = true
		}
		for namespace := range view.unusable {
			all[namespace] = true
		}
		for namespace := range view.parked {
			all[namespace] = true
		}
		for namespace := range view.lost {
			all[namespace] = true
		}
	}
	for namespace := range all {
		if !v.sameIn(namespace, other) {
			namespaces = append(namespaces, namespace)
		}
	}
	return namespaces
}

func (v *View) sameIn(namespace string, other *View) bool {
	config, exists := v.namespaces[namespace]
	otherConfig, otherExists := other.namespaces[namespace]
	return exists == otherExists && config.Revision == otherConfig.Revision && v.unusable[namespace] == other.unusable[namespace] &&
		maps.Equal(v.parked[namespace], other.parked[namespace]) && maps.EqualFunc(v.lost[namespace], other.lost[namespace], Lost.equal)
}

func (l Lost) equal(other Lost) bool {
	return l.Since.Equal(other.Since) && slices.Equal(l.Sources, other.Sources) && slices.Equal(l.Endpoints, other.Endpoints)
}

// Complete reports whether the write keys of every namespace are known. While it is false an unknown
// write key may belong to a namespace without a config.
func (v *View) Complete() bool { return v.complete }

// ParkedKey reports whether a write key belongs to a Source whose config is missing, or was lost with an earlier
// config of its Source.
func (v *View) ParkedKey(key string) bool {
	hash := writekey.HashOf(key)
	entry, known := v.keys.Known(hash)
	_, active := v.byKey[hash]
	return known && !active && (!entry.LostAt.IsZero() || v.Parked(entry.Namespace, Ref{SectionSources, entry.Source}))
}

// Suppressed reports whether a user's calls to a Source are rejected.
func (v *View) Suppressed(ref SourceRef, userID string) bool {
	if len(v.suppressed) == 0 || userID == "" {
		return false
	}
	sources, ok := v.suppressed[namespaceUser{ref.Namespace, userID}]
	return ok && (len(sources) == 0 || slices.Contains(sources, ref.Source.Name))
}

// HasSource reports whether a config has a Source.
func (v *View) HasSource(o writekey.Owner) bool {
	return slices.ContainsFunc(v.namespaces[o.Namespace].Sources, func(s Source) bool { return s.Name == o.Source })
}

// KeyOwners returns the Source of each write key.
func (v *View) KeyOwners() map[writekey.Hash]writekey.Owner {
	owners := make(map[writekey.Hash]writekey.Owner, len(v.byKey))
	for hash, ref := range v.byKey {
		owners[hash] = writekey.Owner{Namespace: ref.Namespace, Source: ref.Source.Name}
	}
	return owners
}

// WithKeys returns the view with the removed and the parked keys of book.
func (v *View) WithKeys(keys writekey.Book) *View {
	with := *v
	with.keys, with.complete = keys, true
	for namespace := range v.unusable {
		with.complete = with.complete && keys.Knows(namespace)
	}
	return &with
}

// SourceByWriteKey finds the Source of a write key. It looks up the key's SHA-256, so its duration
// reveals nothing about other keys.
func (v *View) SourceByWriteKey(key string) (SourceRef, bool) {
	return v.SourceByHash(writekey.HashOf(key))
}

// SourceByHash is SourceByWriteKey with the hash of a key.
func (v *View) SourceByHash(hash writekey.Hash) (SourceRef, bool) {
	ref, ok := v.byKey[hash]
	return ref, ok
}

// RemovedKey is a write key that belonged to a Source until less than a grace period ago.
type RemovedKey struct {
	// Source has the name of the key's former Source; exists reports whether there is such a Source
	// now.
	Source SourceRef
	Exists bool
	// Reason is the reason of the removal, for callers. It names no object.
	Reason string
}

// RemovedWriteKey finds a write key that is removed at the given time. A caller with such a key
// should send the call again later.
func (v *View) RemovedWriteKey(key string, now time.Time) (RemovedKey, bool) {
	entry, ok := v.keys.Removed(writekey.HashOf(key), now)
	if !ok {
		return RemovedKey{}, false
	}
	removed := RemovedKey{Source: SourceRef{Namespace: entry.Namespace, Source: Source{Name: entry.Source}}}
	sources := v.namespaces[entry.Namespace].Sources
	i := slices.IndexFunc(sources, func(s Source) bool { return s.Name == entry.Source })
	since, until := entry.RemovedAt.UTC().Format(time.RFC3339), v.keys.Until(entry).UTC().Format(time.RFC3339)
	switch {
	case i < 0:
		removed.Reason = "the Source of this write key was removed at " + since + "; add it again, or stop the sender"
	case len(sources[i].WriteKeySHA256) == 0:
		removed.Exists = true
		removed.Reason = "the Source of this write key has had no usable write key since " + since + "; the condition Ready of the Source gives the reason"
	default:
		removed.Exists = true
		removed.Reason = "this write key was removed from its Source at " + since + "; use the current write key of the Source"
	}
	removed.Reason += ". Calls with it are answered 503 until " + until + ", so that clients send them again, and 401 after that"
	if removed.Exists {
		removed.Source.Source = sources[i]
	}
	return removed, true
}
