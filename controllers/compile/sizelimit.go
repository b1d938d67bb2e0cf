package compile

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// Encoded is an encoded config, with the verdicts that apply to it.
type Encoded struct {
	Config   liveconfig.Config
	Verdicts Verdicts
	// Data is nil if the last config remains in effect.
	Data     []byte
	Revision string
	// TooLarge means that objects are not in effect because of the size limit.
	TooLarge bool
}

// Encode encodes a config in at most limit bytes; the limit of a Secret is
// liveconfig.MaxEncodedBytes. If the config is larger, Encode evicts as many objects as
// necessary: the largest ones first, and the objects that are unchanged in the last
// config after all others. An evicted destination is paused; an evicted Audience or
// DeletionRequest is not in the config. Their verdict is ConfigTooLarge. Sources are not
// evicted, so that their calls are accepted and the messages kept.
//
// If that is not sufficient, the last config remains in effect. If there is none, Data is
// an invalid config, so that the dispatchers answer 503 to calls. Encode calls last only if
// necessary; last returns false if there is no last config.
func Encode(c liveconfig.Config, v Verdicts, limit int, last func() (liveconfig.Config, bool, error)) (Encoded, error) {
	data, revision, err := liveconfig.Encode(c)
	if err != nil || len(data) <= limit {
		return Encoded{c, v, data, revision, false}, err
	}
	before, exists, err := last()
	if err != nil {
		return Encoded{}, err
	}
	fitting, ok := v.fit(c, len(data), limit, before)
	switch {
	case ok:
		return fitting, nil
	case exists:
		return Encoded{before, v.tooLarge(len(data), limit, before), nil, "", true}, nil
	}
	return Encoded{liveconfig.Config{}, v.tooLarge(len(data), limit, before), []byte{}, "none", true}, nil
}

// fit evicts as many objects as necessary from a config of encodedBytes. It returns false
// if all evictions are not sufficient. It changes neither v nor c.
func (v Verdicts) fit(c liveconfig.Config, encodedBytes, limit int, last liveconfig.Config) (Encoded, bool) {
	evictions := evictionOrder(c, last)
	var fitting Encoded
	// The result of a binary search is its last success, so fitting is the result's config.
	n := sort.Search(len(evictions)+1, func(n int) bool {
		if n > len(evictions) {
			return true
		}
		rest := evict(c, evictions[:n])
		data, revision, err := liveconfig.Encode(rest)
		if err != nil || len(data) > limit {
			return false
		}
		fitting = Encoded{Config: rest, Data: data, Revision: revision, TooLarge: true}
		return true
	})
	if n > len(evictions) {
		return Encoded{}, false
	}
	message := func(effect string) string {
		return fmt.Sprintf("the live config of this namespace would have %d bytes compressed, and at most %d fit into one Secret: %s; remove destinations, headers or large certificates, or use another namespace",
			encodedBytes, limit, effect)
	}
	v = Verdicts{Sources: maps.Clone(v.Sources), Destinations: maps.Clone(v.Destinations), Audiences: maps.Clone(v.Audiences), Deletions: maps.Clone(v.Deletions)}
	for _, d := range fitting.Config.Destinations {
		if verdict := v.Destinations[d.Name]; d.Revision != verdict.Revision {
			verdict.Revision, verdict.State = d.Revision, d.State
			v.Destinations[d.Name] = verdict.refuse(message("this destination is paused"))
		}
	}
	for _, e := range evictions[:n] {
		switch waiting := message("this object has no effect until it fits"); e.kind {
		case kindAudience:
			verdict := v.Audiences[e.name]
			verdict.Key = ""
			v.Audiences[e.name] = verdict.refuse(waiting)
		case kindDeletion:
			v.Deletions[e.name] = v.Deletions[e.name].refuse(waiting)
		}
	}
	for name, source := range v.Sources {
		source.Destinations = slices.DeleteFunc(slices.Clone(source.Destinations), func(d string) bool {
			return v.Destinations[d].State == liveconfig.Paused
		})
		v.Sources[name] = source
	}
	fitting.Verdicts = v
	return fitting, true
}

// refuse sets Accepted to False. The reason is ConfigTooLarge, unless Accepted was False
// before for another reason.
func (v Verdict) refuse(message string) Verdict {
	if v.Accepted {
		v.Reason, v.Message = v1alpha1.ReasonConfigTooLarge, message
	} else {
		v.Message = truncate(v.Message + "; " + message)
	}
	v.Accepted = false
	if v.State != liveconfig.Disabled {
		v.State = liveconfig.Paused
	}
	return v
}

const (
	kindDestination = iota
	kindAudience
	kindDeletion
)

// eviction is an object that can be evicted from a config.
type eviction struct {
	kind int
	name string
	// inEffect is true if the object is unchanged in the last config.
	inEffect bool
	weight   int
}

// evictionOrder returns all possible evictions in their order.
func evictionOrder(c, last liveconfig.Config) []eviction {
	revisions := map[string]string{}
	for _, d := range last.Destinations {
		revisions[d.Name] = d.Revision
	}
	var evictions []eviction
	for _, d := range c.Destinations {
		evictions = append(evictions, eviction{kindDestination, d.Name, revisions[d.Name] == d.Revision, weight(d)})
	}
	// The dispatchers would delete the data of Audiences and DeletionRequests in the last
	// config, so only new ones can be evicted.
	for _, a := range c.Audiences {
		if !slices.ContainsFunc(last.Audiences, func(b liveconfig.Audience) bool { return b.Name == a.Name }) {
			evictions = append(evictions, eviction{kind: kindAudience, name: a.Name, weight: len(a.Name) + len(a.Key)})
		}
	}
	deletions := make(map[string]bool, len(last.Deletions))
	for _, d := range last.Deletions {
		deletions[d.Name] = true
	}
	for _, d := range c.Deletions {
		if !deletions[d.Name] {
			evictions = append(evictions, eviction{kind: kindDeletion, name: d.Name, weight: len(d.Name) + len(d.UserID)})
		}
	}
	slices.SortFunc(evictions, func(a, b eviction) int {
		if a.inEffect != b.inEffect {
			if a.inEffect {
				return 1
			}
			return -1
		}
		return cmp.Or(b.weight-a.weight, a.kind-b.kind, strings.Compare(a.name, b.name))
	})
	return evictions
}

// weight estimates the number of bytes that the eviction of a destination saves.
func weight(d liveconfig.Destination) (n int) {
	for _, e := range d.Endpoints {
		n += len(e.Name) + len(e.URL.Reveal())
		for _, h := range e.Headers {
			n += len(h.Name) + len(h.Value.Reveal())
		}
		if e.TLS != nil {
			n += len(e.TLS.CA) + len(e.TLS.ClientCert) + len(e.TLS.ClientKey.Reveal())
		}
	}
	for _, s := range d.Signing {
		n += len(s.Secret.Reveal()) + len(s.Previous.Reveal())
	}
	return n
}

// evict returns a copy of a config after evictions.
func evict(c liveconfig.Config, evictions []eviction) liveconfig.Config {
	type id struct {
		kind int
		name string
	}
	evicted := make(map[id]bool, len(evictions))
	for _, e := range evictions {
		evicted[id{e.kind, e.name}] = true
	}
	c.Destinations = slices.Clone(c.Destinations)
	for i := range c.Destinations {
		if d := &c.Destinations[i]; evicted[id{kindDestination, d.Name}] {
			generation := d.Generation
			d.Endpoints, d.Signing, d.Revision, d.Generation = nil, nil, "", 0
			if d.State == liveconfig.Active {
				d.State, d.PausedReason = liveconfig.Paused, v1alpha1.ReasonConfigTooLarge
			}
			d.Revision, d.Generation = revision(*d, nil, nil), generation
		}
	}
	c.Audiences = slices.DeleteFunc(slices.Clone(c.Audiences), func(a liveconfig.Audience) bool { return evicted[id{kindAudience, a.Name}] })
	c.Deletions = slices.DeleteFunc(slices.Clone(c.Deletions), func(d liveconfig.Deletion) bool { return evicted[id{kindDeletion, d.Name}] })
	return c
}

// tooLarge returns the verdicts for the case that the last config remains in effect
// because no eviction is sufficient. Objects that are unchanged in the last config keep
// their verdicts, all others are not accepted (ConfigTooLarge). It does not change v.
func (v Verdicts) tooLarge(encodedBytes, limit int, last liveconfig.Config) Verdicts {
	inEffect := map[string]string{}
	for _, s := range last.Sources {
		inEffect["source/"+s.Name] = s.Revision
	}
	for _, d := range last.Destinations {
		inEffect["destination/"+d.Name] = d.Revision
	}
	for _, a := range last.Audiences {
		inEffect["audience/"+a.Name] = a.Revision
	}
	for _, d := range last.Deletions {
		inEffect["deletion/"+d.Name] = d.Revision
	}
	message := fmt.Sprintf("the live config of this namespace would have %d bytes compressed; at most %d fit into one Secret: the last config remains in effect; remove destinations or large certificates, or use another namespace",
		encodedBytes, limit)
	refuse := func(kind string, verdicts map[string]Verdict) map[string]Verdict {
		out := make(map[string]Verdict, len(verdicts))
		for name, verdict := range verdicts {
			if inEffect[kind+"/"+name] != verdict.Revision {
				if verdict.Accepted {
					verdict.Reason, verdict.Message = v1alpha1.ReasonConfigTooLarge, message
				} else {
					verdict.Message = truncate(verdict.Message + "; " + message)
				}
				verdict.Accepted = false
			}
			out[name] = verdict
		}
		return out
	}
	refused := Verdicts{Sources: refuse("source", v.Sources), Destinations: refuse("destination", v.Destinations)}
	if v.Audiences != nil {
		refused.Audiences = refuse("audience", v.Audiences)
	}
	if v.Deletions != nil {
		refused.Deletions = refuse("deletion", v.Deletions)
	}
	return refused
}
