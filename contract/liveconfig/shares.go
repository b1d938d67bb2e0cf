package liveconfig

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

const (
	// SharesName is the Secret (labelled LabelLive) with the Shares.
	SharesName = "posthorn-live-shares"
	// SharesKey is the only key of the Secret.
	SharesKey = "shares.json.gz"
	// SharesVersion is the version of the format of Shares. Decoding ignores unknown fields.
	SharesVersion = 1
	// Whole is the Share of a dispatcher that has the whole limit.
	Whole Share = 1_000_000_000
)

// SharesSink is a Sink that uses Shares. The limits of others are totals of the process.
type SharesSink interface {
	// SetShares provides the newest Shares. It is called before the first Synced if there are Shares.
	SetShares(s Shares)
}

// Share is the part of an object's limits that one dispatcher has, in parts of Whole.
type Share int64

// Rate returns the share of a rate.
func (s Share) Rate(total int) float64 { return float64(total) * float64(s) / float64(Whole) }

// Count returns the share of a number of things, rounded down. It is exact for equal shares of at most 10,000.
func (s Share) Count(total int) int { return int(s.Rate(total) + 1e-4) }

// Bytes returns the share of a size, rounded down.
func (s Share) Bytes(total int64) int64 { return int64(float64(total) * float64(s) / float64(Whole)) }

// Shares divide the limits of objects, which are totals over all dispatchers, among the dispatchers of a release.
//
// The shares of an object never add up to more than Whole, neither in one document nor while the dispatchers change from
// one document to the next. A dispatcher without a share begins nothing that a rate limits.
type Shares struct {
	// Version is SharesVersion.
	Version int `json:"version"`
	// Number is higher in each later document. A dispatcher reports the number that it applies.
	Number int64 `json:"number"`
	// Pods are the names of the dispatchers, sorted. The lists of shares have the same order.
	Pods []string `json:"pods"`
	// Default are the shares of the objects that are not in Objects.
	Default []Share `json:"default"`
	// Objects are the shares of other objects, by ShareKey.
	Objects map[string][]Share `json:"objects,omitempty"`
}

// ShareKey is the key of an object in Shares.
func ShareKey(namespace string, r Ref) string { return namespace + "/" + r.String() }

// PodShares are the shares of one dispatcher. Nil stands for a dispatcher that has all limits.
type PodShares struct {
	// Number is the number of the document.
	Number int64
	// Pods is the number of dispatchers in the document.
	Pods int
	// Listed is true if this dispatcher is one of them.
	Listed bool

	standard Share
	objects  map[string]Share
}

// Of returns the shares of a dispatcher.
func (s *Shares) Of(pod string) *PodShares {
	p := &PodShares{Number: s.Number, Pods: len(s.Pods)}
	i, ok := slices.BinarySearch(s.Pods, pod)
	if p.Listed = ok; !ok {
		return p
	}
	p.standard, p.objects = s.Default[i], make(map[string]Share, len(s.Objects))
	for key, list := range s.Objects {
		p.objects[key] = list[i]
	}
	return p
}

// Alone returns equal shares for a dispatcher that waits in vain: of those in the document, or of one more.
func (p *PodShares) Alone() *PodShares {
	pods := p.Pods
	if !p.Listed {
		pods++
	}
	return &PodShares{Number: p.Number, Pods: pods, standard: Whole / Share(pods)}
}

const (
	// leastUse is the part of an equal share from which on the use of a limit is reported.
	leastUse = 0.05
	// LimitUseFor is how long the report has a use of a limit without traffic.
	LimitUseFor = 20 * time.Second
)

// Divided reports whether other dispatchers have shares as well.
func (p *PodShares) Divided() bool { return p != nil && p.Pods > 1 }

// IsReported reports whether the use of a part of a total is enough for the report.
func (p *PodShares) IsReported(used float64) bool { return used*float64(p.Pods) >= leastUse }

// Waits reports whether the dispatcher has no share yet.
func (p *PodShares) Waits() bool { return p != nil && p.standard == 0 }

// For returns the share of an object.
func (p *PodShares) For(namespace string, r Ref) Share {
	if p == nil {
		return Whole
	}
	if len(p.objects) > 0 {
		if share, ok := p.objects[ShareKey(namespace, r)]; ok {
			return share
		}
	}
	return p.standard
}

// Equal returns the share of limits that are divided equally, whatever the traffic: sizes in bytes.
func (p *PodShares) Equal() Share {
	if p == nil {
		return Whole
	}
	return Whole / Share(max(1, p.Pods))
}

// EncodeShares returns the data of the Secret with the shares.
func EncodeShares(s Shares) (map[string][]byte, error) {
	s.Version = SharesVersion
	text, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("encode the shares: %w", err)
	}
	data, err := compress(text)
	return map[string][]byte{SharesKey: data}, err
}

// DecodeShares reads the output of EncodeShares.
func DecodeShares(data map[string][]byte) (s Shares, err error) {
	plain, err := decompress(data[SharesKey], 0)
	if err != nil {
		return Shares{}, fmt.Errorf("the shares: %w", err)
	}
	if err := json.Unmarshal(plain, &s); err != nil {
		return Shares{}, fmt.Errorf("the shares are invalid: %w", err)
	}
	return s, s.validate()
}

func (s *Shares) validate() error {
	switch {
	case s.Version != SharesVersion:
		return fmt.Errorf("the shares have version %d; this release knows version %d", s.Version, SharesVersion)
	case !slices.IsSorted(s.Pods):
		return fmt.Errorf("the pods of the shares are not sorted")
	case len(s.Default) != len(s.Pods):
		return fmt.Errorf("the shares have %d pods and %d shares", len(s.Pods), len(s.Default))
	}
	for key, list := range s.Objects {
		if len(list) != len(s.Pods) {
			return fmt.Errorf("the shares have %d pods and %d shares of %s", len(s.Pods), len(list), key)
		}
	}
	return nil
}
