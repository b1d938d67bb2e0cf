// Package compile turns one namespace's objects into the live config that the
// dispatchers run and a verdict for each object.
//
// Compile is pure, total and deterministic: it does no I/O, takes any input,
// does not change it, and its result does not depend on the order of objects.
// A bad object gets a verdict of its own and changes nothing of the others.
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
	// Version changes whenever Data does. It stands for the content in
	// revisions, so that a revision tells nothing of a secret.
	Version string
	Data    map[string][]byte
}

// Snapshot is all that the config of one namespace is made of.
type Snapshot struct {
	Namespace string
	// Sources, Destinations, Audiences and Deletions of the namespace, in any order. They may come
	// without the API server's defaults.
	Sources      []v1alpha1.Source
	Destinations []v1alpha1.WebhookDestination
	Audiences    []v1alpha1.Audience
	Deletions    []v1alpha1.DeletionRequest
	// Secrets by name; those that SecretRefs names and that exist.
	Secrets map[string]Secret
	// CheckHost says why a URL's host may not be delivered to; nil allows all.
	CheckHost func(host string) error
	// ForeignWriteKeys are the write keys, as hex SHA-256, that an older Source
	// of another namespace uses; the value is its "namespace/name".
	ForeignWriteKeys map[string]string
}

// Verdict is what the compiler says of one object.
type Verdict struct {
	// Accepted, Reason and Message are the condition Accepted. Messages hold no secrets.
	Accepted bool   `json:"accepted"`
	Reason   string `json:"reason"`
	Message  string `json:"message"`
	// Unresolved is the condition ResolvedRefs while it is False; nil when every
	// reference resolves.
	Unresolved *Unresolved `json:"unresolved,omitempty"`
	// State is what the config makes of the object. A Source is Active, Disabled
	// (403), or Paused when it has no usable write key.
	State liveconfig.State `json:"state"`
	// Revision of the object in the config.
	Revision string `json:"revision"`
	// Destinations are, for a Source, the names of those that take its calls, sorted.
	Destinations []string `json:"destinations,omitempty"`
	// Key is, for an Audience, the key in effect; empty when it is not accepted.
	Key string `json:"key,omitempty"`
}

// Unresolved describes the references of an object that do not resolve.
type Unresolved struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// OK reports whether the object is accepted and every reference resolves.
func (v Verdict) OK() bool { return v.Accepted && v.Unresolved == nil }

// Cause returns the reason and message that a summary of the verdict has: those
// of Accepted if it is False or every reference resolves, else those of ResolvedRefs.
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

// Compile makes a namespace's live config. Every object is in the config: a
// destination that cannot work is paused, so that its messages are kept; a Source
// that cannot work has no write key, one with a write key that cannot be used has the other one.
//
// A destination of which only some Sources exist stays active for those, although
// its references do not all resolve (NoSource): holding it would delay their calls.
func Compile(s Snapshot) (liveconfig.Config, Verdicts) {
	sources := inOrder(s.Sources)
	destinations := inOrder(s.Destinations)

	config := liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: s.Namespace}
	verdicts := Verdicts{Sources: make(map[string]Verdict, len(sources)), Destinations: make(map[string]Verdict, len(destinations))}
	takers := map[string][]string{}
	for _, d := range destinations {
		compiled, verdict := s.destination(d, sources)
		config.Destinations = append(config.Destinations, compiled)
		verdicts.Destinations[d.Name] = verdict
		if verdict.OK() || verdict.State == liveconfig.Active {
			for _, source := range compiled.Sources {
				takers[source] = append(takers[source], d.Name)
			}
		}
	}
	owners := s.writeKeyOwners(sources)
	for _, source := range sources {
		compiled, verdict := s.source(source, owners)
		verdict.Destinations = takers[source.Name]
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

// SecretRefs returns the names of the Secrets that objects refer to, sorted and
// unique. It knows *Source and *WebhookDestination; others refer to none.
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

// inOrder returns pointers to the objects, sorted by name; the oldest of equal names alone.
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

// byAge returns objects with the oldest first, of equally old ones the first by name.
func byAge[O metav1.Object](objects []O) []O {
	return slices.SortedFunc(slices.Values(objects), func(a, b O) int {
		return cmp.Or(a.GetCreationTimestamp().Compare(b.GetCreationTimestamp().Time), strings.Compare(a.GetName(), b.GetName()))
	})
}

// revision hashes a compiled object. Its secrets print as "[redacted]" here;
// used names the versions of what stands in their place, and literals are those
// values of secret type that the spec itself shows.
func revision(compiled any, used map[string]string, literals []string) string {
	plain, err := json.Marshal(struct {
		Compiled any
		Used     map[string]string
		Literals []string
	}{compiled, used, literals})
	if err != nil {
		panic(fmt.Sprintf("compile: a config does not marshal: %v", err)) // it is made of strings, numbers and lists
	}
	sum := sha256.Sum256(plain)
	return hex.EncodeToString(sum[:])
}
