package compile

import (
	"cmp"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// Audiences are the kind Audience.
var Audiences = NewKind(Definition[*v1beta1.Audience, liveconfig.Audience]{
	Section: "audiences",
	Entries: func(c *liveconfig.Config) *[]liveconfig.Audience { return &c.Audiences },
	ID:      func(e liveconfig.Audience) (string, string) { return e.Name, e.Revision },
	Compiler: func(s Snapshot, _ liveconfig.Config, _ Verdicts, objects []*v1beta1.Audience) func(*v1beta1.Audience) (liveconfig.Audience,
		bool, Verdict) {
		sources, owners := objectsOf[*v1beta1.Source](s), keyOwners(objects)
		return func(o *v1beta1.Audience) (liveconfig.Audience, bool, Verdict) {
			entry, verdict := s.audience(o, sources, owners)
			return entry, true, verdict
		}
	},
	Weight: func(a liveconfig.Audience) int { return len(a.Name) + len(a.Key) },
})

// audience compiles one Audience. owners maps each key to the name of the Audience that
// it belongs to.
func (s Snapshot) audience(o *v1beta1.Audience, sources []*v1beta1.Source, owners map[audienceKey]string) (liveconfig.Audience, Verdict) {
	r := newResolver(nil)
	c := liveconfig.Audience{Name: o.Name, Source: o.Spec.SourceRef.Name, Key: o.Spec.Key,
		Kind: string(cmp.Or(o.Spec.Type, v1beta1.AudienceTypeAudience)), MaxRemovalPercent: 50}
	if percent := o.Spec.MaxRemovalPercent; percent != nil {
		c.MaxRemovalPercent = int(*percent)
	}
	if c.Kind != liveconfig.KindAudience && c.Kind != liveconfig.KindComputedTrait {
		r.add(v1beta1.ReasonInvalidSpec, "spec.type", "must be Audience or ComputedTrait")
		c.Kind = liveconfig.KindAudience // The object is not accepted, so it cannot be synced.
	}
	if c.MaxRemovalPercent < 0 || c.MaxRemovalPercent > 100 {
		r.add(v1beta1.ReasonInvalidSpec, "spec.maxRemovalPercent", "must be 0 to 100")
		c.MaxRemovalPercent = 50
	}
	if !contains(sources, c.Source) {
		r.add(v1beta1.ReasonNoSource, "spec.sourceRef.name", "Source %q does not exist in this namespace; create it or change the name", c.Source)
	}
	switch owner := owners[audienceKey{c.Source, c.Key}]; {
	case c.Key == "":
		r.add(v1beta1.ReasonInvalidSpec, "spec.key", "must be set")
	case owner != o.Name:
		r.add(v1beta1.ReasonKeyConflict, "spec.key", "Audience %q of the same Source has the key %q and keeps it, because it is older or, of equal age, first by name; delete this one and create it with another spec.key", owner, c.Key)
	}
	v := Verdict{
		Accepted: true, Reason: v1beta1.ReasonAccepted, State: liveconfig.Active,
		Message: "the spec is valid; send members to /v1/audiences/" + c.Key + "/members",
	}
	if len(r.problems) > 0 {
		v.State, c.Key = liveconfig.Paused, ""
		v.Message = "the spec is valid"
		r.apply(&v, "")
	}
	c.Revision = revision(c, nil, nil)
	c.Generation = o.Generation
	v.Revision = c.Revision
	return c, v
}

// audienceKey identifies an audience in a namespace.
type audienceKey struct{ source, key string }

// keyOwners maps each key to the name of its owner: the oldest Audience that has it, and
// the first by name among Audiences of equal age.
func keyOwners(audiences []*v1beta1.Audience) map[audienceKey]string {
	owners := map[audienceKey]string{}
	for _, o := range byAge(audiences) {
		if key := (audienceKey{o.Spec.SourceRef.Name, o.Spec.Key}); owners[key] == "" {
			owners[key] = o.Name
		}
	}
	return owners
}
