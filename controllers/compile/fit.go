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

// Encoded is a config as it goes to the dispatchers, with the verdicts that it comes to.
type Encoded struct {
	Config   liveconfig.Config
	Verdicts Verdicts
	// Data is nil when the last config is to stay in effect.
	Data     []byte
	Revision string
	// TooLarge: something was taken out of effect, because otherwise the config
	// would not fit into a Secret.
	TooLarge bool
}

// Encode encodes a config in at most limit bytes, which is liveconfig.MaxEncodedBytes
// for a Secret. When it does not fit, what is needed is taken out of effect: the largest objects first, and those last that
// are in effect in the last config as they are now. A destination is paused; a new
// Audience or DeletionRequest is left out. Their verdict is ConfigTooLarge. Sources
// stay, so that calls are taken and messages kept.
//
// When that is not enough either the last config stays, and where there is none
// Data is no config, which makes dispatchers ask callers to come again. last is
// called when it is needed; false is for none.
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

// fit takes out of a config of encodedBytes what is needed for it to fit. It
// returns false when nothing is enough, and changes neither v nor c.
func (v Verdicts) fit(c liveconfig.Config, encodedBytes, limit int, last liveconfig.Config) (Encoded, bool) {
	cuts := cutsOf(c, last)
	var fitting Encoded
	// The last success of a binary search is its result, so the encoded form is kept.
	n := sort.Search(len(cuts)+1, func(n int) bool {
		if n > len(cuts) {
			return true
		}
		rest := without(c, cuts[:n])
		data, revision, err := liveconfig.Encode(rest)
		if err != nil || len(data) > limit {
			return false
		}
		fitting = Encoded{Config: rest, Data: data, Revision: revision, TooLarge: true}
		return true
	})
	if n > len(cuts) {
		return Encoded{}, false
	}
	message := func(then string) string {
		return fmt.Sprintf("the live config of this namespace would have %d bytes compressed, and at most %d fit into one Secret: %s; remove destinations, headers or large certificates, or use another namespace",
			encodedBytes, limit, then)
	}
	v = Verdicts{Sources: maps.Clone(v.Sources), Destinations: maps.Clone(v.Destinations), Audiences: maps.Clone(v.Audiences), Deletions: maps.Clone(v.Deletions)}
	for _, d := range fitting.Config.Destinations {
		if verdict := v.Destinations[d.Name]; d.Revision != verdict.Revision {
			verdict.Revision, verdict.State = d.Revision, d.State
			v.Destinations[d.Name] = verdict.refuse(message("this destination is paused"))
		}
	}
	for _, cut := range cuts[:n] {
		switch left := message("this object waits until it fits"); cut.kind {
		case kindAudience:
			verdict := v.Audiences[cut.name]
			verdict.Key = ""
			v.Audiences[cut.name] = verdict.refuse(left)
		case kindDeletion:
			v.Deletions[cut.name] = v.Deletions[cut.name].refuse(left)
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

// refuse makes a verdict ConfigTooLarge, unless it has a reason of its own.
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

// cut is an object that can be taken out of effect.
type cut struct {
	kind     int
	name     string
	inEffect bool
	weight   int
}

// cutsOf lists what can be taken out of effect, in the order to do so.
func cutsOf(c, last liveconfig.Config) []cut {
	revisions := map[string]string{}
	for _, d := range last.Destinations {
		revisions[d.Name] = d.Revision
	}
	var cuts []cut
	for _, d := range c.Destinations {
		cuts = append(cuts, cut{kindDestination, d.Name, revisions[d.Name] == d.Revision, weight(d)})
	}
	// What the dispatchers know of these would be given up if they left the config.
	for _, a := range c.Audiences {
		if !slices.ContainsFunc(last.Audiences, func(b liveconfig.Audience) bool { return b.Name == a.Name }) {
			cuts = append(cuts, cut{kind: kindAudience, name: a.Name, weight: len(a.Name) + len(a.Key)})
		}
	}
	known := make(map[string]bool, len(last.Deletions))
	for _, d := range last.Deletions {
		known[d.Name] = true
	}
	for _, d := range c.Deletions {
		if !known[d.Name] {
			cuts = append(cuts, cut{kind: kindDeletion, name: d.Name, weight: len(d.Name) + len(d.UserID)})
		}
	}
	slices.SortFunc(cuts, func(a, b cut) int {
		if a.inEffect != b.inEffect {
			if a.inEffect {
				return 1
			}
			return -1
		}
		return cmp.Or(b.weight-a.weight, a.kind-b.kind, strings.Compare(a.name, b.name))
	})
	return cuts
}

// weight is about how many bytes holding a destination saves.
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

// without returns a config without what is cut.
func without(c liveconfig.Config, cuts []cut) liveconfig.Config {
	type id struct {
		kind int
		name string
	}
	gone := make(map[id]bool, len(cuts))
	for _, cut := range cuts {
		gone[id{cut.kind, cut.name}] = true
	}
	c.Destinations = slices.Clone(c.Destinations)
	for i := range c.Destinations {
		if d := &c.Destinations[i]; gone[id{kindDestination, d.Name}] {
			generation := d.Generation
			d.Endpoints, d.Signing, d.Revision, d.Generation = nil, nil, "", 0
			if d.State == liveconfig.Active {
				d.State, d.PausedReason = liveconfig.Paused, v1alpha1.ReasonConfigTooLarge
			}
			d.Revision, d.Generation = revision(*d, nil, nil), generation
		}
	}
	c.Audiences = slices.DeleteFunc(slices.Clone(c.Audiences), func(a liveconfig.Audience) bool { return gone[id{kindAudience, a.Name}] })
	c.Deletions = slices.DeleteFunc(slices.Clone(c.Deletions), func(d liveconfig.Deletion) bool { return gone[id{kindDeletion, d.Name}] })
	return c
}

// tooLarge returns the verdicts for a config that cannot be made to fit, so that
// the last one stays in effect: what is in that one as it is now keeps its
// verdict, everything else is not accepted (ConfigTooLarge). It does not change v.
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
	message := fmt.Sprintf("the live config of this namespace would have %d bytes compressed; at most %d fit into one Secret: the last config that did fit stays in effect; remove destinations or large certificates, or use another namespace",
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
