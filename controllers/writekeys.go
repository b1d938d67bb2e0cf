package controllers

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
)

// keyHolder is a Source that uses a write key.
type keyHolder struct {
	namespace, name string
	created         time.Time
}

func (a keyHolder) compare(b keyHolder) int {
	return cmp.Or(a.created.Compare(b.created), strings.Compare(a.namespace, b.namespace), strings.Compare(a.name, b.name))
}

// writeKeys indexes the write keys of all namespaces by their hash. A key belongs to the namespace
// whose live config has it in effect or reserved; other namespaces cannot take it over. A key
// without such an owner belongs to the namespace with the oldest Source that uses it.
type writeKeys struct {
	mu          sync.Mutex
	byHash      map[string]map[string]keyHolder // hash -> namespace -> the namespace's oldest holder
	byNamespace map[string]map[string]keyHolder // namespace -> hash -> the same holder
	owners      map[string]keyOwner             // hash -> owner
	owned       map[string]map[string]bool      // namespace -> hashes that it owns
}

// keyOwner is the namespace whose live config has a write key.
type keyOwner struct {
	namespace string
	use       compile.KeyUse
}

func newWriteKeys() *writeKeys {
	return &writeKeys{
		byHash: map[string]map[string]keyHolder{}, byNamespace: map[string]map[string]keyHolder{},
		owners: map[string]keyOwner{}, owned: map[string]map[string]bool{},
	}
}

// set replaces the keys of a namespace. It returns the other namespaces whose
// verdicts may change as a result.
func (k *writeKeys) set(namespace string, holders map[string]keyHolder) (affected []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var touched []string
	for hash := range k.byNamespace[namespace] {
		if _, still := holders[hash]; !still {
			touched = append(touched, hash)
			delete(k.byHash[hash], namespace)
			if len(k.byHash[hash]) == 0 {
				delete(k.byHash, hash)
			}
		}
	}
	for hash, holder := range holders {
		if k.byNamespace[namespace][hash] == holder {
			continue
		}
		touched = append(touched, hash)
		if k.byHash[hash] == nil {
			k.byHash[hash] = map[string]keyHolder{}
		}
		k.byHash[hash][namespace] = holder
	}
	k.byNamespace[namespace] = holders
	if len(holders) == 0 {
		delete(k.byNamespace, namespace)
	}
	return k.others(namespace, touched)
}

// expire ends the reservations of a namespace for keys that no Source of the namespace uses. It returns
// the other namespaces whose verdicts may change as a result.
func (k *writeKeys) expire(namespace string, hashes []string) (affected []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var touched []string
	for _, hash := range hashes {
		_, used := k.byNamespace[namespace][hash]
		if !used && k.owners[hash] == (keyOwner{namespace, compile.KeyReserved}) {
			touched = append(touched, hash)
			delete(k.owners, hash)
			delete(k.owned[namespace], hash)
		}
	}
	return k.others(namespace, touched)
}

// others returns the other namespaces with a Source that has one of the keys, sorted.
func (k *writeKeys) others(namespace string, hashes []string) []string {
	all := map[string]bool{}
	for _, hash := range hashes {
		for other := range k.byHash[hash] {
			if other != namespace {
				all[other] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// foreign returns the keys of a namespace that belong to other namespaces. The namespace becomes the
// owner of its other keys, so only one of two concurrent compilations gets a key.
func (k *writeKeys) foreign(namespace string) map[string]compile.KeyUse {
	k.mu.Lock()
	defer k.mu.Unlock()
	found := map[string]compile.KeyUse{}
	for hash, own := range k.byNamespace[namespace] {
		if owner, owned := k.owners[hash]; owned {
			if owner.namespace != namespace {
				found[hash] = owner.use
			}
			continue
		}
		oldest := own
		for _, other := range k.byHash[hash] {
			if other.compare(oldest) < 0 {
				oldest = other
			}
		}
		if oldest.namespace != namespace {
			found[hash] = compile.KeyInUse
			continue
		}
		k.own(hash, keyOwner{namespace, compile.KeyInUse})
	}
	return found
}

// ownerOf returns the namespace that owns a key; empty if none does.
func (k *writeKeys) ownerOf(hash string) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.owners[hash].namespace
}

// own makes a namespace the owner of a key. The mutex is held.
func (k *writeKeys) own(hash string, owner keyOwner) {
	k.owners[hash] = owner
	if k.owned[owner.namespace] == nil {
		k.owned[owner.namespace] = map[string]bool{}
	}
	k.owned[owner.namespace][hash] = true
}

// setLive replaces the keys that a namespace's live config has in effect or reserved. It returns the
// other namespaces whose verdicts may change as a result. Keys that another namespace owns remain
// its own.
func (k *writeKeys) setLive(namespace string, live map[string]compile.KeyUse) (affected []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var touched []string
	for hash := range k.owned[namespace] {
		if live[hash] == "" {
			touched = append(touched, hash)
			delete(k.owners, hash)
			delete(k.owned[namespace], hash)
		}
	}
	for hash, use := range live {
		owner, owned := k.owners[hash]
		if owned && owner.namespace != namespace || owner.use == use {
			continue
		}
		touched = append(touched, hash)
		k.own(hash, keyOwner{namespace, use})
	}
	if len(k.owned[namespace]) == 0 {
		delete(k.owned, namespace)
	}
	return k.others(namespace, touched)
}

// holders returns the hashes of a namespace's write keys, each with the oldest
// Source that uses the key.
func holders(s compile.Snapshot) map[string]keyHolder {
	found := map[string]keyHolder{}
	for _, o := range s.Objects {
		source, ok := o.(*v1beta1.Source)
		if !ok {
			continue
		}
		holder := keyHolder{namespace: s.Namespace, name: source.Name, created: source.CreationTimestamp.Time}
		for _, hash := range compile.WriteKeySHA256(source, s.Secrets) {
			if other, taken := found[hash]; !taken || holder.compare(other) < 0 {
				found[hash] = holder
			}
		}
	}
	return found
}

// liveHolders is holders for a namespace whose Secrets cannot be read: it takes the write keys of
// its live config.
func liveHolders(live liveconfig.Config, objects []compile.Object) map[string]keyHolder {
	found := map[string]keyHolder{}
	for _, o := range objects {
		i := slices.IndexFunc(live.Sources, func(s liveconfig.Source) bool { return s.Name == o.GetName() })
		if _, ok := o.(*v1beta1.Source); !ok || i < 0 {
			continue
		}
		for _, hash := range live.Sources[i].WriteKeySHA256 {
			found[hash] = keyHolder{namespace: o.GetNamespace(), name: o.GetName(), created: o.GetCreationTimestamp().Time}
		}
	}
	return found
}
