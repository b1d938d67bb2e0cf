package compile

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// deletion compiles one DeletionRequest. One of which only some Sources exist is
// not accepted, and nobody is told until all do: who is told is decided once.
func (s Snapshot) deletion(o *v1alpha1.DeletionRequest, sources []*v1alpha1.Source) (liveconfig.Deletion, Verdict) {
	r := newResolver(nil)
	c := liveconfig.Deletion{Name: o.Name, UserID: o.Spec.UserID, Sources: slices.Clone(o.Spec.Sources), Suppress: o.Spec.Suppress}
	slices.Sort(c.Sources)
	if c.UserID == "" {
		r.add(v1alpha1.ReasonInvalidSpec, "spec.userId", "must be set")
	}
	for _, name := range c.Sources {
		if !slices.ContainsFunc(sources, func(source *v1alpha1.Source) bool { return source.Name == name }) {
			r.add(v1alpha1.ReasonNoSource, "spec.sources", "Source %q does not exist in this namespace; create it or remove the name", name)
		}
	}
	v := Verdict{Accepted: true, Reason: v1alpha1.ReasonAccepted, State: liveconfig.Active, Message: "the spec is valid and the Sources exist"}
	if len(r.problems) > 0 {
		v.Accepted, v.State = false, liveconfig.Held
		v.Reason, v.Message = r.verdict()
	} else {
		c.ID = deletionID(s.Namespace, o, c)
	}
	c.Revision = revision(c, nil, nil)
	c.Generation = o.Generation
	v.Revision = c.Revision
	return c, v
}

// deletionID is another one for another object, user or set of Sources: each of
// them is told anew.
func deletionID(namespace string, o *v1alpha1.DeletionRequest, c liveconfig.Deletion) string {
	plain, err := json.Marshal([]any{namespace, o.Name, o.UID, c.UserID, c.Sources})
	if err != nil {
		panic(fmt.Sprintf("compile: texts do not marshal: %v", err))
	}
	sum := sha256.Sum256(plain)
	return hex.EncodeToString(sum[:16])
}
