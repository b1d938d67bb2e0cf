package compile

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/expression"
)

// Memo keeps the results of one namespace's last compilation, so that the next one repeats only the
// work for what changed. Results with and without a Memo are equal. A Memo belongs to one Policy, and
// must not be used concurrently. A nil Memo keeps nothing.
type Memo struct {
	destinations, before map[types.UID]destinationMemo
	sources              string
	encoder              liveconfig.Encoder
}

// destinationMemo is the result for one generation of a destination, and the versions of the Secrets
// and the version of the forward target that it was compiled from.
type destinationMemo struct {
	generation int64
	target     targetVersion
	used       map[string]string
	entry      liveconfig.Destination
	verdict    Verdict
	size       expression.Size
}

// targetVersion is a version of the destination that gets the dead letters of another one; zero if
// it does not exist.
type targetVersion struct {
	uid        types.UID
	generation int64
}

// targetOf returns the version of a destination's forward target. all are sorted by name.
func targetOf(o *v1beta1.WebhookDestination, all []*v1beta1.WebhookDestination) targetVersion {
	if o.Spec.DeadLetters.ForwardTo == nil {
		return targetVersion{}
	}
	i, ok := slices.BinarySearchFunc(all, o.Spec.DeadLetters.ForwardTo.DestinationRef.Name,
		func(d *v1beta1.WebhookDestination, name string) int {
			return strings.Compare(d.Name, name)
		})
	if !ok {
		return targetVersion{}
	}
	return targetVersion{all[i].UID, all[i].Generation}
}

// begin starts a compilation. Its results replace the last ones.
func (m *Memo) begin(sources []*v1beta1.Source) {
	var list strings.Builder
	for _, s := range sources {
		list.WriteString(s.Name + "\n" + labels.Set(s.Labels).String() + "\n")
	}
	m.before, m.destinations = m.destinations, make(map[types.UID]destinationMemo, len(m.destinations))
	if m.sources != list.String() {
		m.before, m.sources = nil, list.String()
	}
}

// destination returns the result for a destination, which it compiles if an input has changed.
// The API server raises the generation with every change of the spec.
func (m *Memo) destination(s Snapshot, o *v1beta1.WebhookDestination, sources []*v1beta1.Source,
	all []*v1beta1.WebhookDestination) destinationMemo {
	if m == nil || o.UID == "" || o.Generation == 0 {
		return s.destination(o, sources, all)
	}
	last, ok := m.before[o.UID]
	target := targetOf(o, all)
	if !ok || last.target != target || last.generation != o.Generation || last.entry.Name != o.Name || !newResolver(s.Secrets).has(last.used) {
		last = s.destination(o, sources, all)
		last.generation, last.target = o.Generation, target
	}
	m.destinations[o.UID] = last
	return last
}

// encode returns a config in chunks.
func (m *Memo) encode(c liveconfig.Config) (liveconfig.Chunks, string, error) {
	if m == nil {
		m = &Memo{}
	}
	return m.encoder.EncodeChunks(c)
}
