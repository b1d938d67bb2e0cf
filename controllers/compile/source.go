package compile

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"unicode"
	"unicode/utf8"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

const maxWriteKeyBytes = 256

// source compiles one Source. owners tells, by hash, whose write key it is.
func (s Snapshot) source(o *v1alpha1.Source, owners map[string]string) (liveconfig.Source, Verdict) {
	const field = "spec.writeKeySecretRef"
	r := newResolver(s.Secrets)
	c := liveconfig.Source{
		Name:           o.Name,
		Enabled:        o.Spec.Enabled == nil || *o.Spec.Enabled,
		AllowedOrigins: slices.Clone(o.Spec.AllowedOrigins),
	}
	if limit := o.Spec.RateLimit; limit != nil {
		c.CallsPerSecond = int(limit.CallsPerSecond)
		c.Burst = 2 * c.CallsPerSecond
		if limit.Burst != nil {
			c.Burst = int(*limit.Burst)
		}
		if c.CallsPerSecond < 1 || c.Burst < c.CallsPerSecond {
			r.add(v1alpha1.ReasonInvalidSpec, "spec.rateLimit", "callsPerSecond must be at least 1 and burst at least callsPerSecond; raise them or leave them out")
			c.CallsPerSecond, c.Burst = 0, 0
		}
	}
	if hash := s.writeKey(r, o); hash != "" {
		_, foreign := s.ForeignWriteKeys[hash]
		switch owner := owners[hash]; {
		case foreign:
			// Which one stays unsaid: a namespace must not learn names of another.
			r.add(v1alpha1.ReasonWriteKeyConflict, field, "an older Source of another namespace has the same write key and keeps it; use another write key")
		case owner != o.Name:
			r.add(v1alpha1.ReasonWriteKeyConflict, field, "Source %q has the same write key and keeps it, because it is older or, of equal age, first by name; use another write key", owner)
		default:
			c.WriteKeySHA256 = hash
		}
	}

	v := Verdict{Accepted: true, Reason: v1alpha1.ReasonAccepted, State: liveconfig.Active, Message: "the spec is valid and the Secret resolves"}
	switch {
	case len(r.problems) > 0:
		c.WriteKeySHA256 = ""
		v.Accepted, v.State = false, liveconfig.Held
		v.Reason, v.Message = r.verdict()
	case !c.Enabled:
		v.State, v.Reason, v.Message = liveconfig.Disabled, v1alpha1.ReasonDisabled, "spec.enabled is false: calls are answered 403"
	}
	redacted := c
	if c.WriteKeySHA256 != "" {
		redacted.WriteKeySHA256 = "[redacted]"
	}
	c.Revision = revision(redacted, r.used, nil)
	c.Generation = o.Generation
	v.Revision = c.Revision
	return c, v
}

// writeKey returns the hex SHA-256 of a Source's write key, or "" and notes why.
func (s Snapshot) writeKey(r *resolver, o *v1alpha1.Source) string {
	const field = "spec.writeKeySecretRef"
	value, ok := r.value(field, o.Spec.WriteKeySecretRef)
	if !ok {
		return ""
	}
	key := bytes.TrimSpace(value)
	switch {
	case len(key) > maxWriteKeyBytes:
		r.add(v1alpha1.ReasonInvalidSecret, field, "the write key has more than %d bytes; use a shorter one", maxWriteKeyBytes)
		return ""
	case !utf8.Valid(key) || bytes.ContainsRune(key, ':') || bytes.ContainsFunc(key, unicode.IsControl):
		r.add(v1alpha1.ReasonInvalidSecret, field, "the write key has a colon, a control character or is not UTF-8, which an HTTP Basic user name cannot carry; use letters and digits")
		return ""
	}
	sum := sha256.Sum256(key)
	return hex.EncodeToString(sum[:])
}

// writeKeyOwners says which Source each write key of the namespace belongs to:
// the oldest, of equally old ones the first by name.
func (s Snapshot) writeKeyOwners(sources []*v1alpha1.Source) map[string]string {
	owners := map[string]string{}
	for _, o := range byAge(sources) {
		hash := s.writeKey(newResolver(s.Secrets), o)
		if _, taken := owners[hash]; hash != "" && !taken {
			owners[hash] = o.Name
		}
	}
	return owners
}

// WriteKeySHA256 returns the hash by which a Source's write key is known, for an
// index over namespaces; false when the Source has no usable one.
func WriteKeySHA256(source *v1alpha1.Source, secrets map[string]Secret) (string, bool) {
	hash := Snapshot{Secrets: secrets}.writeKey(newResolver(secrets), source)
	return hash, hash != ""
}
