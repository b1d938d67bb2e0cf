package liveconfig

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"slices"
)

// View is all tenants' configs at one moment, indexed for ingest and delivery.
// It is never changed after it was made.
type View struct {
	tenants  map[string]Revisioned
	byKey    map[[sha256.Size]byte]SourceRef
	unusable map[string]bool
	// suppressed are the users whose calls are refused, each with the Sources'
	// names; none stands for every Source.
	suppressed map[tenantUser][]string
}

type tenantUser struct{ tenant, user string }

// Revisioned is a decoded Config with the revision of its bytes.
type Revisioned struct {
	Config
	Revision string
}

// SourceRef is a Source with its tenant.
type SourceRef struct {
	Tenant string
	Source Source
}

// Key is the Source's name in the queue: "namespace/name".
func (r SourceRef) Key() string { return r.Tenant + "/" + r.Source.Name }

// NewView indexes configs. A write key that two tenants share belongs to the
// tenant whose name sorts first; the controllers refuse the other one.
//
// unusable names tenants that have a config which could not be taken, and none
// from before: they exist, so nothing of theirs may be given up.
func NewView(configs []Revisioned, unusable ...string) *View {
	v := &View{tenants: make(map[string]Revisioned, len(configs)), byKey: map[[sha256.Size]byte]SourceRef{}, unusable: map[string]bool{}, suppressed: map[tenantUser][]string{}}
	for _, tenant := range unusable {
		v.unusable[tenant] = true
	}
	for _, c := range configs {
		v.tenants[c.Tenant] = c
	}
	for _, c := range configs {
		for _, d := range c.Deletions {
			id := tenantUser{c.Tenant, d.UserID}
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
	for _, tenant := range v.Tenants() {
		for _, s := range v.tenants[tenant].Sources {
			var sum [sha256.Size]byte
			if n, err := hex.Decode(sum[:], []byte(s.WriteKeySHA256)); err != nil || n != sha256.Size {
				continue
			}
			if _, taken := v.byKey[sum]; !taken {
				v.byKey[sum] = SourceRef{Tenant: tenant, Source: s}
			}
		}
	}
	return v
}

// Tenants lists the tenants, sorted.
func (v *View) Tenants() []string { return slices.Sorted(maps.Keys(v.tenants)) }

// Tenant returns one tenant's config.
func (v *View) Tenant(name string) (Revisioned, bool) {
	c, ok := v.tenants[name]
	return c, ok
}

// Unusable reports whether a tenant exists whose config could not be taken.
func (v *View) Unusable(tenant string) bool { return v.unusable[tenant] }

// Complete reports whether every tenant's config could be taken. While it is
// false an unknown write key may belong to a tenant that is not in the view.
func (v *View) Complete() bool { return len(v.unusable) == 0 }

// Suppressed reports whether a user's calls to a Source are refused.
func (v *View) Suppressed(ref SourceRef, userID string) bool {
	if len(v.suppressed) == 0 || userID == "" {
		return false
	}
	sources, ok := v.suppressed[tenantUser{ref.Tenant, userID}]
	return ok && (len(sources) == 0 || slices.Contains(sources, ref.Source.Name))
}

// SourceByWriteKey finds the Source that a write key belongs to. The key is
// looked up by its SHA-256, so the time it takes tells nothing about other keys.
func (v *View) SourceByWriteKey(key string) (SourceRef, bool) {
	ref, ok := v.byKey[sha256.Sum256([]byte(key))]
	return ref, ok
}
