package compile

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// Encoded is an encoded config, with the verdicts that apply to it.
type Encoded struct {
	Config   liveconfig.Config
	Verdicts Verdicts
	// Chunks is nil if the last config remains in effect.
	Chunks liveconfig.Chunks
	// Parts are empty if the config and its head are in one Secret.
	Parts    liveconfig.Parts
	Revision string
	// TooLarge means that objects are not in effect because of the size limit.
	TooLarge bool
}

// Limit bounds an encoded live config.
type Limit struct {
	// SecretBytes bounds the content of a Secret.
	SecretBytes int
	// Parts is the largest number of parts of a config that does not fit into one Secret.
	Parts int
}

// DefaultLimit is what Kubernetes can store.
var DefaultLimit = Limit{SecretBytes: liveconfig.MaxEncodedBytes, Parts: liveconfig.MaxParts}

// partBytes bounds a part of several chunks. It is smaller than a Secret may be, so that an edit writes less.
func (l Limit) partBytes() int { return l.SecretBytes / 4 }

// split divides a config with a head of headBytes. It returns no parts if one Secret is sufficient, and
// false if the config does not fit.
func (l Limit) split(namespace string, chunks liveconfig.Chunks, headBytes int) (liveconfig.Parts, bool, error) {
	switch {
	case !chunks.Decodable():
		return liveconfig.Parts{}, false, nil
	case chunks.Len()+headBytes <= l.SecretBytes:
		return liveconfig.Parts{}, true, nil
	}
	parts, ok, err := chunks.Split(namespace, l.partBytes(), l.SecretBytes, l.Parts)
	return parts, ok && len(parts.Index)+headBytes <= l.SecretBytes, err
}

// String describes the limit for messages.
func (l Limit) String() string {
	if l.Parts == 0 {
		return fmt.Sprintf("one Secret of %d KiB", l.SecretBytes>>10)
	}
	return fmt.Sprintf("%d Secrets of %d KiB", l.Parts, l.partBytes()>>10)
}

// Encode encodes a config within a limit. If the config is larger, Encode evicts as many objects as
// necessary: the largest ones first, and the objects that are unchanged in the last
// config after all others. An evicted destination is paused; an evicted Audience,
// DeletionRequest or Redelivery is not in the config. Their verdict is ConfigTooLarge. Sources are not
// evicted, so that their calls are accepted and the messages kept.
//
// If that is not sufficient, the last config remains in effect. If there is none, Chunks is empty and
// not nil: an invalid config, so that the dispatchers answer 503 to calls. Encode calls last only if
// necessary; last returns false if there is no last config.
func (t Table) Encode(m *Memo, c liveconfig.Config, v Verdicts, limit Limit,
	last func() (liveconfig.Config, bool, error)) (Encoded, error) {
	chunks, revision, err := m.encode(c)
	if err != nil {
		return Encoded{}, err
	}
	return t.encode(m, Encoded{Config: c, Verdicts: v, Chunks: chunks, Revision: revision}, limit, 0, last)
}

// encode is Encode for an encoded config with a head of headBytes.
func (t Table) encode(m *Memo, e Encoded, limit Limit, headBytes int, last func() (liveconfig.Config, bool, error)) (Encoded, error) {
	var ok bool
	var err error
	if e.Parts, ok, err = limit.split(e.Config.Namespace, e.Chunks, headBytes); ok || err != nil {
		return e, err
	}
	before, exists, err := last()
	if err != nil {
		return Encoded{}, err
	}
	fitting, ok := t.fit(m, e, limit, headBytes, before)
	switch {
	case ok:
		return fitting, nil
	case exists:
		return Encoded{Config: before, Verdicts: t.tooLarge(e.Verdicts, e.Chunks.Len(), limit, before), TooLarge: true}, nil
	}
	return Encoded{Verdicts: t.tooLarge(e.Verdicts, e.Chunks.Len(), limit, before), Chunks: liveconfig.Chunks{}, Revision: "none",
		TooLarge: true}, nil
}

// EncodeWithHead is Encode for a config whose head is in the same Secret, or in the root of the parts.
// headBytes returns the size of the head after a history, see History.HeadBytes. To avoid evictions, EncodeWithHead
// omits the routes of deleted destinations; it returns the history that the head must be made from.
func (t Table) EncodeWithHead(m *Memo, c liveconfig.Config, v Verdicts, limit Limit, h History,
	headBytes func(h History, exact bool) (int, error), last func() (liveconfig.Config, bool, error)) (Encoded, History, error) {
	chunks, revision, err := m.encode(c)
	if err != nil {
		return Encoded{}, h, err
	}
	all := Encoded{Config: c, Verdicts: v, Chunks: chunks, Revision: revision}
	most, err := headBytes(h, false)
	if err != nil || chunks.Decodable() && chunks.Len()+most <= limit.SecretBytes {
		return all, h, err
	}
	full, err := headBytes(h, true)
	if err != nil {
		return Encoded{}, h, err
	}
	encoded, err := t.encode(m, all, limit, full, last)
	if err != nil || !encoded.TooLarge {
		return encoded, h, err
	}
	brief, err := headBytes(h.WithoutRoutes(), true)
	if err != nil || brief == full {
		return encoded, h, err
	}
	encoded, err = t.encode(m, all, limit, brief, last)
	return encoded, h.WithoutRoutes(), err
}

// fit evicts as many objects as necessary from a config. It returns false if all evictions are not
// sufficient. It does not change the config.
func (t Table) fit(m *Memo, all Encoded, limit Limit, headBytes int, last liveconfig.Config) (Encoded, bool) {
	c, v := all.Config, all.Verdicts
	evictions := t.evictionOrder(c, last)
	var fitting Encoded
	var paused []map[string]string
	// The result of a binary search is its last success, so fitting is the result's config.
	n := sort.Search(len(evictions)+1, func(n int) bool {
		if n > len(evictions) {
			return true
		}
		rest, revisions := t.evict(c, evictions[:n])
		chunks, revision, err := m.encode(rest)
		if err != nil {
			return false
		}
		parts, ok, err := limit.split(c.Namespace, chunks, headBytes)
		if !ok || err != nil {
			return false
		}
		paused = revisions
		fitting = Encoded{Config: rest, Chunks: chunks, Parts: parts, Revision: revision, TooLarge: true}
		return true
	})
	if n > len(evictions) {
		return Encoded{}, false
	}
	message := func(effect string) string {
		return fmt.Sprintf("the live config of this namespace would have %d bytes compressed and does not fit into %s: %s; remove destinations, headers or large certificates, or use another namespace",
			all.Chunks.Len(), limit, effect)
	}
	fitting.Verdicts = make(Verdicts, len(v))
	for section, verdicts := range v {
		fitting.Verdicts[section] = maps.Clone(verdicts)
	}
	for _, e := range evictions[:n] {
		verdicts, effect := fitting.Verdicts[t[e.kind].Section], "this object has no effect until it fits"
		verdict := verdicts[e.name]
		if t[e.kind].pauses {
			verdict.Revision, effect = paused[e.kind][e.name], "this destination is paused"
		}
		verdicts[e.name] = verdict.refuse(message(effect))
	}
	for name, source := range fitting.Verdicts[sectionSources] {
		source.Destinations = slices.DeleteFunc(slices.Clone(source.Destinations), func(d string) bool {
			return fitting.Verdicts[sectionDestinations][d].State == liveconfig.Paused
		})
		fitting.Verdicts[sectionSources][name] = source
	}
	return fitting, true
}

// refuse sets Accepted to False. The reason is ConfigTooLarge, unless Accepted was False
// before for another reason.
func (v Verdict) refuse(message string) Verdict {
	return v.refuseFor(v1beta1.ReasonConfigTooLarge, message)
}

// refuseFor is refuse with another reason.
func (v Verdict) refuseFor(reason, message string) Verdict {
	if v.Accepted {
		v.Reason, v.Message = reason, message
	} else {
		v.Message = Truncate(v.Message+"; "+message, maxMessageBytes)
	}
	v.Accepted = false
	if v.State != liveconfig.Suspended {
		v.State = liveconfig.Paused
	}
	return v
}

// eviction is an object that can be evicted from a config.
type eviction struct {
	// kind is the index of the kind in the table.
	kind int
	name string
	// inEffect is true if the object is unchanged in the last config.
	inEffect bool
	weight   int
}

// evictionOrder returns all possible evictions in their order.
func (t Table) evictionOrder(c, last liveconfig.Config) []eviction {
	var all []eviction
	for i, k := range t {
		for _, e := range k.evictions(c, last) {
			e.kind = i
			all = append(all, e)
		}
	}
	slices.SortFunc(all, func(a, b eviction) int {
		if a.inEffect != b.inEffect {
			if a.inEffect {
				return 1
			}
			return -1
		}
		return cmp.Or(b.weight-a.weight, a.kind-b.kind, strings.Compare(a.name, b.name))
	})
	return all
}

// weight estimates the number of bytes that the eviction of a destination saves.
func weight(d liveconfig.Destination) (n int) {
	for _, e := range d.Endpoints {
		n += len(e.Name) + len(e.URL.Reveal())
		for _, h := range e.Headers {
			n += len(h.Name) + len(h.Value.Reveal())
		}
		n += weightOfTLS(e.TLS)
		if o := e.OAuth2; o != nil {
			n += len(o.TokenURL) + len(o.ClientID) + len(o.ClientSecret.Reveal()) + weightOfTLS(o.TLS)
		}
	}
	for _, s := range d.Signing {
		n += len(s.Secret.Reveal()) + len(s.Previous.Reveal())
	}
	return n
}

func weightOfTLS(t *liveconfig.TLS) int {
	if t == nil {
		return 0
	}
	return len(t.CA) + len(t.ClientCert) + len(t.ClientKey.Reveal())
}

// evict returns a copy of a config after evictions, with the new revisions of the paused
// entries, by kind and name.
func (t Table) evict(c liveconfig.Config, evictions []eviction) (liveconfig.Config, []map[string]string) {
	names := make([]map[string]bool, len(t))
	for _, e := range evictions {
		if names[e.kind] == nil {
			names[e.kind] = map[string]bool{}
		}
		names[e.kind][e.name] = true
	}
	revisions := make([]map[string]string, len(t))
	for i, k := range t {
		if names[i] != nil {
			revisions[i] = k.evict(&c, names[i])
		}
	}
	return c, revisions
}

// tooLarge returns the verdicts for the case that the last config remains in effect
// because no eviction is sufficient. Objects that are unchanged in the last config keep
// their verdicts, all others are not accepted (ConfigTooLarge). It does not change v.
func (t Table) tooLarge(v Verdicts, encodedBytes int, limit Limit, last liveconfig.Config) Verdicts {
	message := fmt.Sprintf("the live config of this namespace would have %d bytes compressed and does not fit into %s: the last config remains in effect; remove destinations or large certificates, or use another namespace",
		encodedBytes, limit)
	refused := Verdicts{}
	for _, k := range t {
		if v[k.Section] == nil {
			continue
		}
		inEffect := k.revisions(last)
		out := make(map[string]Verdict, len(v[k.Section]))
		for name, verdict := range v[k.Section] {
			if inEffect[name] != verdict.Revision {
				state := verdict.State
				verdict = verdict.refuse(message)
				verdict.State = state // The last config decides it.
			}
			out[name] = verdict
		}
		refused[k.Section] = out
	}
	return refused
}
