package compile

import (
	"cmp"
	"strings"
	"unicode"

	"golang.org/x/text/unicode/norm"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// maxKeyBytes bounds a key that is derived from a display name; the API allows 200 in
// status.key.
const maxKeyBytes = 200

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
	c := liveconfig.Audience{Name: o.Name, Source: o.Spec.SourceRef.Name, Key: keyOf(o),
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
		r.add(v1beta1.ReasonInvalidSpec, "spec.key", "spec.displayName has no letter or digit to derive a key from; set spec.key")
	case len(c.Key) > maxKeyBytes:
		r.add(v1beta1.ReasonInvalidSpec, "spec.key", "the key derived from spec.displayName has more than %d bytes; set a shorter spec.key", maxKeyBytes)
	case owner != o.Name:
		r.add(v1beta1.ReasonKeyConflict, "spec.key", "Audience %q of the same Source has the key %q and keeps it, because it is older or, of equal age, first by name; set another spec.key", owner, c.Key)
	}
	v := Verdict{
		Accepted: true, Reason: v1beta1.ReasonAccepted, State: liveconfig.Active, Key: c.Key,
		Message: "the spec is valid; send members to /v1/audiences/" + c.Key + "/members",
	}
	if len(r.problems) > 0 {
		v.State, v.Key, c.Key = liveconfig.Paused, "", ""
		v.Message = "the spec is valid"
		r.apply(&v, "")
	}
	c.Revision = revision(c, nil, nil)
	c.Generation = o.Generation
	v.Revision = c.Revision
	return c, v
}

// keyOf returns the key of an Audience: the key in effect, the key in the spec, or the
// default, in this order. A key other than the one in effect would send every member
// again.
func keyOf(o *v1beta1.Audience) string {
	return cmp.Or(o.Status.Key, o.Spec.Key, SnakeCase(o.Spec.DisplayName))
}

// audienceKey identifies an audience in a namespace.
type audienceKey struct{ source, key string }

// keyOwners maps each key to the name of its owner: the oldest Audience that has it, and
// the first by name among Audiences of equal age.
func keyOwners(audiences []*v1beta1.Audience) map[audienceKey]string {
	owners := map[audienceKey]string{}
	for _, o := range byAge(audiences) {
		if key := (audienceKey{o.Spec.SourceRef.Name, keyOf(o)}); owners[key] == "" {
			owners[key] = o.Name
		}
	}
	return owners
}

// SnakeCase derives a trait name from a display name: "First Time Shoppers" becomes
// first_time_shoppers. It removes apostrophes and the accents of Latin and Greek letters
// (in other scripts a mark makes another letter). Any other character that is neither a
// letter nor a digit separates words, and so does a capital that begins a word in
// camelCase. Digits belong to the word before them.
func SnakeCase(name string) string {
	var runes []rune
	var base rune
	for _, r := range norm.NFKD.String(name) {
		if !unicode.IsMark(r) {
			base = r
		}
		accent := r != base && (!unicode.IsLetter(base) || unicode.In(base, unicode.Latin, unicode.Greek))
		if !accent && r != '\'' && r != '’' {
			runes = append(runes, r)
		}
	}
	var b strings.Builder
	separate := false
	for i, r := range runes {
		if !unicode.IsLetter(r) && !unicode.IsDigit(r) && !unicode.IsMark(r) {
			separate = true
			continue
		}
		if i > 0 && unicode.IsUpper(r) {
			before := runes[i-1]
			beginsWord := i+1 < len(runes) && unicode.IsLower(runes[i+1])
			// The B in fooBar, the F in 10Foo and the S in HTTPServer begin a word.
			separate = separate || unicode.IsLower(before) || unicode.IsDigit(before) && beginsWord || unicode.IsUpper(before) && beginsWord
		}
		if separate && b.Len() > 0 {
			b.WriteByte('_')
		}
		separate = false
		b.WriteRune(unicode.ToLower(r))
	}
	return norm.NFC.String(b.String())
}
