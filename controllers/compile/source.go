package compile

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"k8s.io/utils/ptr"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

const (
	maxWriteKeyBytes = 256
	// maxWriteKeys is the bound in the API.
	maxWriteKeys = 2
)

// Sources are the kind Source.
var Sources = NewKind(Definition[*v1beta1.Source, liveconfig.Source]{
	Section: sectionSources,
	Entries: func(c *liveconfig.Config) *[]liveconfig.Source { return &c.Sources },
	ID:      func(e liveconfig.Source) (string, string) { return e.Name, e.Revision },
	Compiler: func(s Snapshot, c liveconfig.Config, v Verdicts, objects []*v1beta1.Source) func(*v1beta1.Source) (liveconfig.Source,
		bool, Verdict) {
		owners, receivers := s.writeKeyOwners(objects), receiversOf(c, v)
		return func(o *v1beta1.Source) (liveconfig.Source, bool, Verdict) {
			entry, verdict := s.source(o, owners)
			verdict.Destinations = receivers[o.Name]
			return entry, true, verdict
		}
	},
	SecretRefs: func(o *v1beta1.Source) (names []string) {
		for _, key := range o.Spec.WriteKeys {
			names = append(names, key.SecretKeyRef.Name)
		}
		return names
	},
})

// receiversOf returns the names of the destinations that get the calls of each Source.
func receiversOf(c liveconfig.Config, v Verdicts) map[string][]string {
	receivers := map[string][]string{}
	for _, d := range c.Destinations {
		if verdict := v[sectionDestinations][d.Name]; verdict.OK() || verdict.State == liveconfig.Active {
			for _, source := range d.Sources {
				receivers[source] = append(receivers[source], d.Name)
			}
		}
	}
	return receivers
}

// source compiles one Source. owners maps the hash of a write key to the name of the
// Source that it belongs to.
//
// A Source with one unusable write key is active with the other one: an error in the new
// key must not reject the calls with the old key.
func (s Snapshot) source(o *v1beta1.Source, owners map[string]string) (liveconfig.Source, Verdict) {
	r := newResolver(s.Secrets)
	c := liveconfig.Source{Name: o.Name, Suspended: ptr.Deref(o.Spec.Suspend, false)}
	for _, origin := range o.Spec.AllowedOrigins {
		c.AllowedOrigins = append(c.AllowedOrigins, cmp.Or(liveconfig.CanonicalOrigin(origin), origin))
	}
	if liveconfig.BuiltIn(o.Name) {
		r.add(v1beta1.ReasonInvalidSpec, "metadata.name", "is the name of a built-in Source; choose another name")
	}
	if limit := o.Spec.RateLimit; limit != nil {
		c.CallsPerSecond = int(limit.CallsPerSecond)
		c.Burst = 2 * c.CallsPerSecond
		if limit.Burst != nil {
			c.Burst = int(*limit.Burst)
		}
		if c.CallsPerSecond < 1 || c.Burst < c.CallsPerSecond {
			r.add(v1beta1.ReasonInvalidSpec, "spec.rateLimit", "callsPerSecond must be at least 1 and burst at least callsPerSecond; raise them or leave them out")
			c.CallsPerSecond, c.Burst = 0, 0
		}
	}
	if n := len(o.Spec.WriteKeys); n < 1 || n > maxWriteKeys {
		r.add(v1beta1.ReasonInvalidSpec, "spec.writeKeys", "has %d entries; set 1 or %d", n, maxWriteKeys)
	}
	invalid := len(r.problems) > 0
	// refs are the references of the write keys in c, for the revision.
	var refs []string
	for _, key := range o.Spec.WriteKeys {
		field, hash := writeKeyField(key), writeKey(r, key)
		foreign := s.ForeignWriteKeys[hash]
		switch owner := owners[hash]; {
		case hash == "":
		// The messages must not name the other Source: names of other namespaces are confidential.
		case foreign == KeyReserved:
			r.add(v1beta1.ReasonWriteKeyReserved, field, "this write key belonged to another namespace and is reserved for it, for 7 days after its removal; use another write key, or ask an administrator to release it")
		case foreign != "":
			r.add(v1beta1.ReasonWriteKeyConflict, field, "a Source of another namespace has the same write key and keeps it; use another write key")
		case owner != o.Name:
			r.add(v1beta1.ReasonWriteKeyConflict, field, "Source %q has the same write key and keeps it, because it is older or, of equal age, first by name; use another write key", owner)
		case slices.Contains(c.WriteKeySHA256, hash):
			r.notes = append(r.notes, field+": has the same value as the previous entry, so one write key is in effect; set another value or remove this entry")
		default:
			c.WriteKeySHA256 = append(c.WriteKeySHA256, hash)
			refs = append(refs, key.SecretKeyRef.Name+"/"+key.SecretKeyRef.Key)
		}
	}
	if invalid {
		c.WriteKeySHA256, refs = nil, nil
	}

	v := Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, State: liveconfig.Active, Message: "the spec is valid"}
	if c.Suspended {
		v.State, v.Reason, v.Message = liveconfig.Suspended, v1beta1.ReasonSuspended, "spec.suspend is true: calls are answered 503, and clients send them again"
	}
	switch {
	case len(c.WriteKeySHA256) == 0:
		v.State = liveconfig.Paused
		r.apply(&v, "")
	case len(r.problems) > 0:
		r.apply(&v, "; the other write key remains in effect")
	case len(r.notes) > 0:
		v.Message += "; " + strings.Join(r.notes, "; ")
	}
	redacted := c
	redacted.WriteKeySHA256 = refs
	c.Revision = revision(redacted, r.used, nil)
	c.Generation = o.Generation
	v.Revision = c.Revision
	return c, v
}

func writeKeyField(key v1beta1.WriteKey) string {
	return fmt.Sprintf("spec.writeKeys[%s].secretKeyRef", key.Name)
}

// writeKey returns the hex SHA-256 of a write key. For an unusable key it adds a problem
// and returns "".
func writeKey(r *resolver, key v1beta1.WriteKey) string {
	value, ok := r.text(writeKeyField(key), key.SecretKeyRef)
	if !ok {
		return ""
	}
	text := strings.TrimSpace(value)
	switch {
	case len(text) > maxWriteKeyBytes:
		r.add(v1beta1.ReasonInvalidSecret, writeKeyField(key), "the write key has more than %d bytes; use a shorter one", maxWriteKeyBytes)
		return ""
	case !utf8.ValidString(text) || strings.Contains(text, ":") || strings.ContainsFunc(text, unicode.IsControl):
		r.add(v1beta1.ReasonInvalidSecret, writeKeyField(key), "the write key has a colon or a control character or is not UTF-8, so it is not a valid HTTP Basic user name; use letters and digits")
		return ""
	}
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// writeKeyOwners maps the hash of each write key in the namespace to the name of its
// owner: the oldest Source that has it, and the first by name among Sources of equal age.
func (s Snapshot) writeKeyOwners(sources []*v1beta1.Source) map[string]string {
	owners := map[string]string{}
	for _, o := range byAge(sources) {
		for _, hash := range WriteKeySHA256(o, s.Secrets) {
			if _, taken := owners[hash]; !taken {
				owners[hash] = o.Name
			}
		}
	}
	return owners
}

// WriteKeySHA256 returns the hashes of a Source's usable write keys.
func WriteKeySHA256(source *v1beta1.Source, secrets map[string]Secret) (hashes []string) {
	r := newResolver(secrets)
	for _, key := range source.Spec.WriteKeys {
		if hash := writeKey(r, key); hash != "" {
			hashes = append(hashes, hash)
		}
	}
	return hashes
}
