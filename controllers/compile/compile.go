// Package compile turns one namespace's objects into the live config for the dispatchers
// and a verdict on each object.
//
// Compile is pure, total and deterministic: it does no I/O, accepts any input, does not
// change it, and its result does not depend on the order of the objects. An invalid
// object does not change the results of the others.
package compile

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// Secret is a Kubernetes Secret that an object refers to.
type Secret struct {
	// Version changes whenever Data changes. Revisions are computed from it instead of
	// Data, so that they reveal nothing about secrets.
	Version string
	Data    map[string][]byte
}

// Snapshot is the complete input of one namespace's config.
type Snapshot struct {
	Namespace string
	// Objects of the namespace, of any kind and in any order. They may lack the API
	// server's defaults.
	Objects []Object
	// Secrets are the existing Secrets and ConfigMaps of those that Table.SecretRefs returns: a Secret by its
	// name, a ConfigMap by ConfigMapName.
	Secrets map[string]Secret
	Policy
	// ForeignWriteKeys are the write keys, as hex SHA-256, that belong to another namespace.
	ForeignWriteKeys map[string]KeyUse
	// ExpressionsOver are the destinations whose expressions are above a budget; see Expressions.
	ExpressionsOver map[string]string
	// Memo of the namespace's last compilation; nil compiles and encodes everything.
	Memo *Memo
}

// KeyUse is how a namespace uses a write key.
type KeyUse string

const (
	// KeyInUse means that a Source of the namespace has the key.
	KeyInUse KeyUse = "InUse"
	// KeyReserved means that a Source of the namespace had the key until a while ago.
	KeyReserved KeyUse = "Reserved"
)

// Verdict is the compiler's result for one object.
type Verdict struct {
	// Accepted, Reason and Message are the condition Accepted. Messages contain no secrets.
	Accepted bool   `json:"accepted"`
	Reason   string `json:"reason"`
	Message  string `json:"message"`
	// Unresolved is the condition ResolvedRefs if it is False; nil if every reference
	// resolves.
	Unresolved *Unresolved `json:"unresolved,omitempty"`
	// State is the object's state in the config. A Source is Active, Suspended (its calls
	// are answered 503), or Paused if it has no usable write key.
	State liveconfig.State `json:"state"`
	// Revision of the object in the config.
	Revision string `json:"revision"`
	// Destinations of a Source are the sorted names of the destinations that get its calls, and Destinations of a DeletionRequest
	// those of the namespace that are suspended.
	Destinations []string `json:"destinations,omitempty"`
	// Waits is the reason why an accepted Redelivery does not start; empty if it may run.
	Waits string `json:"waits,omitempty"`
}

// Unresolved describes the references of an object that do not resolve.
type Unresolved struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// OK reports whether the object is accepted and every reference resolves.
func (v Verdict) OK() bool { return v.Accepted && v.Unresolved == nil }

// Cause returns the reason and message for a summary of the verdict: from Accepted if
// it is False or every reference resolves, and otherwise from ResolvedRefs.
func (v Verdict) Cause() (reason, message string) {
	if v.Accepted && v.Unresolved != nil {
		return v.Unresolved.Reason, v.Unresolved.Message
	}
	return v.Reason, v.Message
}

// Verdicts holds one Verdict per object, by the section of the kind and the object's name.
type Verdicts map[string]map[string]Verdict

// objectsOf returns the objects of a type, sorted by name. Of several objects with one name
// it returns the oldest.
func objectsOf[O Object](s Snapshot) []O {
	var sorted []O
	for _, object := range s.Objects {
		if o, ok := object.(O); ok && o.GetName() != "" {
			sorted = append(sorted, o)
		}
	}
	slices.SortFunc(sorted, func(a, b O) int {
		return cmp.Or(strings.Compare(a.GetName(), b.GetName()), a.GetCreationTimestamp().Compare(b.GetCreationTimestamp().Time),
			strings.Compare(string(a.GetUID()), string(b.GetUID())))
	})
	return slices.CompactFunc(sorted, func(a, b O) bool { return a.GetName() == b.GetName() })
}

// contains reports whether there is an object with a name.
func contains[O Object](objects []O, name string) bool {
	return slices.ContainsFunc(objects, func(o O) bool { return o.GetName() == name })
}

// byAge returns the objects sorted by age, the oldest first, and then by name.
func byAge[O metav1.Object](objects []O) []O {
	return slices.SortedFunc(slices.Values(objects), func(a, b O) int {
		return cmp.Or(a.GetCreationTimestamp().Compare(b.GetCreationTimestamp().Time), strings.Compare(a.GetName(), b.GetName()))
	})
}

// revision returns the hash of a compiled object. The secrets in it marshal as
// "[redacted]"; used has the versions of the Secrets that they are from, and literals
// are the values of type Secret that the spec contains as plain text.
func revision(compiled any, used map[string]string, literals []string) string {
	plain, err := json.Marshal(struct {
		Compiled any
		Used     map[string]string
		Literals []string
	}{compiled, used, literals})
	if err != nil {
		panic(fmt.Sprintf("compile: marshal a compiled object: %v", err)) // Impossible: it has only strings, numbers and lists.
	}
	sum := sha256.Sum256(plain)
	return hex.EncodeToString(sum[:])
}
