package compile

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/posthorn/posthorn/api/v1beta1"
)

// RedeliveryID returns the ID of a Redelivery's run; see jobID.
func RedeliveryID(namespace string, o *v1beta1.Redelivery) string {
	spec := o.Spec.DeepCopy()
	if spec.DeadLettersPerSecond == 0 {
		spec.DeadLettersPerSecond = v1beta1.DefaultRedeliveryRate
	}
	if s := spec.Match; s != nil {
		slices.Sort(s.Reasons)
		slices.Sort(s.StatusCodes)
		slices.Sort(s.Types)
		slices.Sort(s.Events)
	}
	spec.TTLSecondsAfterFinished = nil
	return jobID("Redelivery", namespace, o.Name, spec)
}

// DeletionRequestID returns the ID of a DeletionRequest's run; see jobID.
func DeletionRequestID(namespace string, o *v1beta1.DeletionRequest) string {
	spec := o.Spec.DeepCopy()
	slices.SortFunc(spec.SourceRefs, func(a, b v1beta1.ObjectReference) int { return cmp.Compare(a.Name, b.Name) })
	spec.TTLSecondsAfterFinished = nil
	return jobID("DeletionRequest", namespace, o.Name, spec)
}

// jobID returns the hash of the fields that identify a run: the kind, the namespace, the
// name, and the spec without its TTL and with sorted sets. Dispatchers keep IDs for 30
// days. So that an upgrade does not repeat a run, a new field of a spec must have no
// default and must be omitted from the JSON if it is not set.
func jobID(kind, namespace, name string, spec any) string {
	plain, err := json.Marshal(spec)
	if err != nil {
		panic(fmt.Sprintf("compile: marshal a spec: %v", err))
	}
	sum := sha256.Sum256([]byte(strings.Join([]string{kind, namespace, name, string(plain)}, "\n")))
	return hex.EncodeToString(sum[:16])
}
