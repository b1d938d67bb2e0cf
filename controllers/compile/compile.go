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
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
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
	// Sources, Destinations, Audiences and Deletions of the namespace, in any order. They
	// may lack the API server's defaults.
	Sources      []v1alpha1.Source
	Destinations []v1alpha1.WebhookDestination
	Audiences    []v1alpha1.Audience
	Deletions    []v1alpha1.DeletionRequest
	// Secrets, by name, are the existing ones of those that SecretRefs returns.
	Secrets map[string]Secret
	// CheckHost returns the reason why deliveries to a URL's host are denied; nil allows
	// every host.
	CheckHost func(host string) error
	// ForeignWriteKeys are the write keys, as hex SHA-256, that an older Source in another
	// namespace uses; the value is that Source's "namespace/name".
	ForeignWriteKeys map[string]string
}

// Verdict is the compiler's result for one object.
type Verdict struct {
	// Accepted, Reason and Message are the condition Accepted. Messages contain no secrets.
	Accepted bool   `json:"accepted"`
	Reason   string `json:"reason"`
	Message  string `json:"message"`
	// Unresolved is the condition ResolvedRefs if it is False; nil if every reference
	// resolves.
	Unresolved *Unresolved `json:"unresolved,omitempty"`
	// State is the object's state in the config. A Source is Active, Disabled (its calls
	// are answered 403), or Paused if it has no usable write key.
	State liveconfig.State `json:"state"`
	// Revision of the object in the config.
	Revision string `json:"revision"`
	// Destinations of a Source are the sorted names of the destinations that get its calls.
	Destinations []string `json:"destinations,omitempty"`
	// Key of an Audience is the key in effect; empty if the Audience is not accepted.
	Key string `json:"key,omitempty"`
}

// Unresolved describes the references of an object that do not resolve.
type Unresolved struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// OK reports whether the object is accepted and every reference resolves.
func (v Verdict) OK() bool { return v.Accepted && v.Unresolved == nil }

// Cause returns the reason and message for a summary of the verdict: those of Accepted if
// it is False or every reference resolves, and otherwise those of ResolvedRefs.
func (v Verdict) Cause() (reason, message string) {
	if v.Accepted && v.Unresolved != nil {
		return v.Unresolved.Reason, v.Unresolved.Message
	}
	return v.Reason, v.Message
}

// Verdicts holds one Verdict per object, by name.
type Verdicts struct {
	Sources      map[string]Verdict `json:"sources"`
	Destinations map[string]Verdict `json:"destinations"`
	Audiences    map[string]Verdict `json:"audiences,omitempty"`
	Deletions    map[string]Verdict `json:"deletions,omitempty"`
}

// Compile returns a namespace's live config and the verdicts. The config contains every
// object. An invalid destination is paused, so that its messages are kept. An invalid
// Source has no write key, and a Source with one unusable write key has the other one.
//
// A destination whose Sources exist only in part is active for the existing ones,
// although it has an unresolved reference (NoSource): a pause would delay their calls.
func Compile(s Snapshot) (liveconfig.Config, Verdicts) {
	sources := inOrder(s.Sources)
	destinations := inOrder(s.Destinations)

	config := liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: s.Namespace}
	verdicts := Verdicts{Sources: make(map[string]Verdict, len(sources)), Destinations: make(map[string]Verdict, len(destinations))}
	receivers := map[string][]string{} // Source -> destinations
	for _, d := range destinations {
		compiled, verdict := s.destination(d, sources)
		config.Destinations = append(config.Destinations, compiled)
		verdicts.Destinations[d.Name] = verdict
		if verdict.OK() || verdict.State == liveconfig.Active {
			for _, source := range compiled.Sources {
				receivers[source] = append(receivers[source], d.Name)
			}
		}
	}
	owners := s.writeKeyOwners(sources)
	for _, source := range sources {
		compiled, verdict := s.source(source, owners)
		verdict.Destinations = receivers[source.Name]
		config.Sources = append(config.Sources, compiled)
		verdicts.Sources[source.Name] = verdict
	}
	audiences := inOrder(s.Audiences)
	if len(audiences) > 0 {
		verdicts.Audiences = make(map[string]Verdict, len(audiences))
	}
	keys := keyOwners(audiences)
	for _, audience := range audiences {
		compiled, verdict := s.audience(audience, sources, keys)
		config.Audiences = append(config.Audiences, compiled)
		verdicts.Audiences[audience.Name] = verdict
	}
	deletions := inOrder(s.Deletions)
	if len(deletions) > 0 {
		verdicts.Deletions = make(map[string]Verdict, len(deletions))
	}
	for _, deletion := range deletions {
		compiled, verdict := s.deletion(deletion, sources)
		if !compiled.Ended || compiled.Suppress {
			config.Deletions = append(config.Deletions, compiled)
		}
		verdicts.Deletions[deletion.Name] = verdict
	}
	return config, verdicts
}

// SecretRefs returns the names of the Secrets that objects refer to, sorted and unique.
// Only *Source and *WebhookDestination have such references.
func SecretRefs(objects ...runtime.Object) []string {
	var names []string
	for _, object := range objects {
		switch o := object.(type) {
		case *v1alpha1.Source:
			for _, key := range o.Spec.WriteKeys {
				names = append(names, key.SecretKeyRef.Name)
			}
		case *v1alpha1.WebhookDestination:
			for i := range o.Spec.Endpoints {
				e := &o.Spec.Endpoints[i]
				if e.URLFrom != nil {
					names = append(names, e.URLFrom.SecretKeyRef.Name)
				}
				for _, h := range e.Headers {
					if h.ValueFrom != nil {
						names = append(names, h.ValueFrom.SecretKeyRef.Name)
					}
				}
				if e.TLS != nil && e.TLS.CASecretKeyRef != nil {
					names = append(names, e.TLS.CASecretKeyRef.Name)
				}
				if e.TLS != nil && e.TLS.ClientCertSecretRef != nil {
					names = append(names, e.TLS.ClientCertSecretRef.Name)
				}
			}
			if signing := o.Spec.Signing; signing != nil {
				for i := range signing.Schemes {
					scheme := &signing.Schemes[i]
					names = append(names, scheme.SecretKeyRef.Name)
					if scheme.PreviousSecretKeyRef != nil {
						names = append(names, scheme.PreviousSecretKeyRef.Name)
					}
				}
			}
		}
	}
	names = slices.DeleteFunc(names, func(name string) bool { return name == "" })
	slices.Sort(names)
	return slices.Compact(names)
}

// inOrder returns pointers to the objects, sorted by name. Of several objects with one
// name it returns the oldest.
func inOrder[T any, O interface {
	*T
	metav1.Object
}](objects []T) []O {
	sorted := make([]O, 0, len(objects))
	for i := range objects {
		if o := O(&objects[i]); o.GetName() != "" {
			sorted = append(sorted, o)
		}
	}
	slices.SortFunc(sorted, func(a, b O) int {
		return cmp.Or(strings.Compare(a.GetName(), b.GetName()), a.GetCreationTimestamp().Compare(b.GetCreationTimestamp().Time), strings.Compare(string(a.GetUID()), string(b.GetUID())))
	})
	return slices.CompactFunc(sorted, func(a, b O) bool { return a.GetName() == b.GetName() })
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
