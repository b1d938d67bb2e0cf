package compile

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/posthorn/posthorn/api/v1alpha1"
)

// RedeliveryID identifies the run of a Redelivery; see jobID.
func RedeliveryID(o *v1alpha1.Redelivery) string {
	spec := o.Spec.DeepCopy()
	if spec.Rate == 0 {
		spec.Rate = v1alpha1.DefaultRedeliveryRate
	}
	if s := spec.Selector; s != nil {
		slices.Sort(s.Reasons)
		slices.Sort(s.Types)
		slices.Sort(s.Events)
	}
	spec.TTLSecondsAfterFinished = nil
	return jobID("Redelivery", o.Namespace, o.Name, spec)
}

// DeletionRequestID identifies the run of a DeletionRequest; see jobID.
func DeletionRequestID(namespace string, o *v1alpha1.DeletionRequest) string {
	spec := o.Spec.DeepCopy()
	slices.SortFunc(spec.SourceRefs, func(a, b v1alpha1.ObjectReference) int { return cmp.Compare(a.Name, b.Name) })
	spec.TTLSecondsAfterFinished = nil
	return jobID("DeletionRequest", namespace, o.Name, spec)
}

// jobID hashes what identifies a run: the namespace, the name, and the spec without
// its TTL, with sets in order. Dispatchers keep it for 30 days, so a new field of a
// spec must be omitted from the JSON when it is not set, and must have no default;
// a run of an earlier release would otherwise be done once more.
func jobID(kind, namespace, name string, spec any) string {
	plain, err := json.Marshal(spec)
	if err != nil {
		panic(fmt.Sprintf("compile: a spec does not marshal: %v", err))
	}
	sum := sha256.Sum256([]byte(strings.Join([]string{kind, namespace, name, string(plain)}, "\n")))
	return hex.EncodeToString(sum[:16])
}
