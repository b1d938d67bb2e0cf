package front

import (
	"encoding/hex"
	"slices"
	"sync"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/writekey"
)

// Index finds the namespace of a write key or of a page's origin in the live configs of all namespaces.
// It keeps only what it searches. The zero value has no namespaces. All methods may be called
// concurrently.
type Index struct {
	mu         sync.RWMutex
	namespaces map[string]entry
	// known has the namespaces of the keys of Sources, and reserved the namespaces of the keys that a namespace had
	// before. A key has several while it moves from one namespace to another.
	known, reserved byKey
	// origins has the namespaces by the entries of their Sources.
	origins map[string]map[string]bool
}

// byKey has namespaces by key, sorted.
type byKey map[writekey.Hash][]string

func (k byKey) add(hash writekey.Hash, namespace string) {
	if i, exists := slices.BinarySearch(k[hash], namespace); !exists {
		k[hash] = slices.Insert(k[hash], i, namespace)
	}
}

func (k byKey) remove(hash writekey.Hash, namespace string) {
	list := k[hash]
	if i, exists := slices.BinarySearch(list, namespace); exists {
		k[hash] = slices.Delete(list, i, i+1)
	}
	if len(k[hash]) == 0 {
		delete(k, hash)
	}
}

// entry is what the maps of an Index have of a namespace.
type entry struct {
	known, reserved []writekey.Hash
	origins         []string
}

// Set replaces the entries of a namespace by the entries of its live config.
func (x *Index) Set(namespace string, live liveconfig.Revisioned) {
	var e entry
	for _, s := range live.Sources {
		for _, hash := range s.WriteKeySHA256 {
			e.known = appendHash(e.known, hash)
		}
		e.origins = append(e.origins, s.AllowedOrigins...)
	}
	for _, key := range live.Head.Reserved {
		e.reserved = appendHash(e.reserved, key.SHA256)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.remove(namespace)
	x.add(namespace, e)
}

func appendHash(list []writekey.Hash, text string) []writekey.Hash {
	var hash writekey.Hash
	if n, err := hex.Decode(hash[:], []byte(text)); err != nil || n != len(hash) {
		return list // A decoded config has no such text.
	}
	return append(list, hash)
}

// Delete removes the entries of a namespace.
func (x *Index) Delete(namespace string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.remove(namespace)
}

// IsEmpty reports whether no namespace has entries.
func (x *Index) IsEmpty() bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.namespaces) == 0
}

// add adds the entries of a namespace. The mutex is held.
func (x *Index) add(namespace string, e entry) {
	if x.namespaces == nil {
		x.namespaces = map[string]entry{}
		x.known, x.reserved, x.origins = byKey{}, byKey{}, map[string]map[string]bool{}
	}
	x.namespaces[namespace] = e
	for _, hash := range e.known {
		x.known.add(hash, namespace)
	}
	for _, hash := range e.reserved {
		x.reserved.add(hash, namespace)
	}
	for _, origin := range e.origins {
		if x.origins[origin] == nil {
			x.origins[origin] = map[string]bool{}
		}
		x.origins[origin][namespace] = true
	}
}

// remove removes the entries of a namespace. The mutex is held.
func (x *Index) remove(namespace string) {
	e := x.namespaces[namespace]
	delete(x.namespaces, namespace)
	for _, hash := range e.known {
		x.known.remove(hash, namespace)
	}
	for _, hash := range e.reserved {
		x.reserved.remove(hash, namespace)
	}
	for _, origin := range e.origins {
		if delete(x.origins[origin], namespace); len(x.origins[origin]) == 0 {
			delete(x.origins, origin)
		}
	}
}

// Namespace returns the namespace whose Source has or had a write key: of several the first one by name, as
// in liveconfig.View.
func (x *Index) Namespace(key string) (namespace string, ok bool) {
	return x.OfHash(writekey.HashOf(key))
}

// OfHash is Namespace with the hash of a key.
func (x *Index) OfHash(hash writekey.Hash) (namespace string, ok bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for _, keys := range []byKey{x.known, x.reserved} {
		if list := keys[hash]; len(list) > 0 {
			return list[0], true
		}
	}
	return "", false
}

// Knows reports whether a Source has a write key. Reserved keys do not count.
func (x *Index) Knows(key string) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.known[writekey.HashOf(key)]) > 0
}

// Allowing returns a namespace with a Source that allows pages of an origin.
func (x *Index) Allowing(origin string) (namespace string, ok bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for entry := range liveconfig.EntriesFor(origin) {
		for namespace := range x.origins[entry] {
			return namespace, true
		}
	}
	return "", false
}
