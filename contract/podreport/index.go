// Package podreport reads the reports of the dispatchers, and keeps them in little memory: the operator
// has one about each object from each dispatcher. Its main type is Index.
package podreport

import (
	"iter"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// Index is the state of one dispatcher as of its reports, by namespace and name. It is immutable:
// Merge returns another Index, which shares the unchanged parts.
type Index struct {
	// The fields of the last report.
	Pod         string
	Cursor      string
	Ready       bool
	Shares      int64
	AboveShares []string
	Storage     adminapi.StorageReport
	Configs     []adminapi.ConfigReport
	Replication *adminapi.ReplicationReport

	namespaces map[string]*NamespaceIndex
}

// NamespaceIndex is the state of one namespace in one dispatcher.
type NamespaceIndex struct {
	Revision string
	Refused  *adminapi.RefusedConfig
	// The reports of the objects, by name; for destinations, see Destinations.
	Sources      map[string]*adminapi.SourceReport
	Audiences    map[string]*adminapi.AudienceReport
	Deletions    map[string]*adminapi.DeletionReport
	Redeliveries map[string]*adminapi.RedeliveryReport

	destinations destinations
}

// NewIndex returns the Index of a full report.
func NewIndex(r adminapi.Report) *Index {
	x, _ := (*Index)(nil).Merge(r, nil)
	return x
}

// Namespace returns the state of a namespace, or nil.
func (x *Index) Namespace(name string) *NamespaceIndex {
	if x == nil {
		return nil
	}
	return x.namespaces[name]
}

// Namespaces returns the states of all namespaces, in no order.
func (x *Index) Namespaces() iter.Seq2[string, *NamespaceIndex] {
	if x == nil {
		return func(func(string, *NamespaceIndex) bool) {}
	}
	return maps.All(x.namespaces)
}

// Config returns the state of a namespace's live config; it is zero if the dispatcher has none.
func (x *Index) Config(namespace string) adminapi.ConfigReport {
	if x == nil {
		return adminapi.ConfigReport{}
	}
	i, ok := slices.BinarySearchFunc(x.Configs, namespace, func(c adminapi.ConfigReport, name string) int {
		return strings.Compare(c.Namespace, name)
	})
	if !ok {
		return adminapi.ConfigReport{}
	}
	return x.Configs[i]
}

// EqualExceptNumbers reports whether two states of a namespace differ at most in numbers: counts, and
// times and failures of the latest calls and attempts, as they change all the time under traffic. No
// condition depends on them. Each Index may be nil.
func (x *Index) EqualExceptNumbers(o *Index, namespace string) bool {
	return equalDiscards(x.Config(namespace).Discards, o.Config(namespace).Discards) &&
		x.Namespace(namespace).equalExceptNumbers(o.Namespace(namespace))
}

// equalDiscards reports whether two lists of discards announce the same: they may differ in the number
// of messages.
func equalDiscards(a, b []adminapi.Discard) bool {
	return slices.EqualFunc(withMessages(a), withMessages(b), func(a, b adminapi.Discard) bool {
		return a.Source == b.Source && a.Destination == b.Destination && a.At.Equal(b.At)
	})
}

// withMessages returns the discards of at least one message.
func withMessages(list []adminapi.Discard) []adminapi.Discard {
	none := func(d adminapi.Discard) bool { return d.Messages == 0 }
	if !slices.ContainsFunc(list, none) {
		return list
	}
	return slices.DeleteFunc(slices.Clone(list), none)
}

// equalExceptNumbers is Index.EqualExceptNumbers without the discards. Each state may be nil.
func (n *NamespaceIndex) equalExceptNumbers(o *NamespaceIndex) bool {
	if n == nil || o == nil {
		return n == o
	}
	return n.Revision == o.Revision && reflect.DeepEqual(n.Refused, o.Refused) &&
		reflect.DeepEqual(n.Audiences, o.Audiences) && reflect.DeepEqual(n.Deletions, o.Deletions) &&
		reflect.DeepEqual(n.Redeliveries, o.Redeliveries) &&
		maps.EqualFunc(n.Sources, o.Sources, func(a, b *adminapi.SourceReport) bool { return stateOf(a) == stateOf(b) }) &&
		n.destinations.equalExceptNumbers(&o.destinations)
}

// sourceState is a SourceReport without its numbers. The times are not numbers while the latest calls are
// rejected: the Source's condition depends on them.
type sourceState struct {
	adminapi.SourceReport
	rejecting bool
}

func stateOf(r *adminapi.SourceReport) sourceState {
	s := sourceState{*r, r.LastRejected.After(r.LastAccepted)}
	s.Accepted, s.Rejected, s.Duplicates, s.Messages, s.Defects = min(r.Accepted, 1), 0, 0, adminapi.Ledger{}, adminapi.CallDefects{}
	s.Limit = adminapi.LimitUse{}
	if !s.rejecting {
		s.LastAccepted = time.Time{}
	}
	return s
}

// Merge returns the Index after a report, and the names of the namespaces whose objects or discards
// ahead changed, sorted. A delta changes x; a full report replaces it. The result shares its strings
// with x and with like, the Index of another dispatcher, or nil.
func (x *Index) Merge(r adminapi.Report, like *Index) (next *Index, changed []string) {
	next = &Index{Pod: r.Pod, Cursor: r.Cursor, Ready: r.Ready, Shares: r.Shares, AboveShares: r.AboveShares, Storage: r.Storage,
		Configs: r.Configs, Replication: r.Replication,
		namespaces: map[string]*NamespaceIndex{}}
	before := map[string]*NamespaceIndex{}
	if x != nil {
		before = x.namespaces
	}
	if r.Delta {
		next.namespaces = maps.Clone(before)
	}
	for i := range r.Namespaces {
		n := &r.Namespaces[i]
		old := before[n.Namespace]
		var merged *NamespaceIndex
		if r.Delta && !n.Complete {
			merged = old.merge(n, old, like.Namespace(n.Namespace))
		} else if merged = (*NamespaceIndex)(nil).merge(n, old, like.Namespace(n.Namespace)); old != nil && reflect.DeepEqual(old, merged) {
			next.namespaces[n.Namespace] = old
			continue
		}
		next.namespaces[n.Namespace] = merged
		changed = append(changed, n.Namespace)
	}
	for _, name := range r.RemovedNamespaces {
		delete(next.namespaces, name)
	}
	for name := range before {
		if next.namespaces[name] == nil {
			changed = append(changed, name)
		}
	}
	for _, configs := range [][]adminapi.ConfigReport{x.configs(), next.Configs} {
		for _, c := range configs {
			if len(c.Discards) > 0 && !equalDiscards(x.Config(c.Namespace).Discards, next.Config(c.Namespace).Discards) {
				changed = append(changed, c.Namespace)
			}
		}
	}
	slices.Sort(changed)
	return next, slices.Compact(changed)
}

func (x *Index) configs() []adminapi.ConfigReport {
	if x == nil {
		return nil
	}
	return x.Configs
}

// merge returns the state after the changes of a report; n may be nil. Its strings are
// shared with the first one of likes that has equal ones.
func (n *NamespaceIndex) merge(r *adminapi.NamespaceReport, likes ...*NamespaceIndex) *NamespaceIndex {
	if n == nil {
		n = &NamespaceIndex{}
	}
	var same []*destinations
	for _, like := range likes {
		if like == nil {
			continue
		}
		for i := range r.Sources {
			if other := like.Sources[r.Sources[i].Name]; other != nil {
				shareStrings(&r.Sources[i], other)
			}
		}
		same = append(same, &like.destinations)
	}
	return &NamespaceIndex{
		Revision: r.Revision, Refused: r.Refused,
		Sources:      merge(n.Sources, r.Sources, r.Removed.Sources, func(o *adminapi.SourceReport) string { return o.Name }),
		Audiences:    merge(n.Audiences, r.Audiences, r.Removed.Audiences, func(o *adminapi.AudienceReport) string { return o.Name }),
		Deletions:    merge(n.Deletions, r.Deletions, r.Removed.Deletions, func(o *adminapi.DeletionReport) string { return o.Name }),
		Redeliveries: merge(n.Redeliveries, r.Redeliveries, r.Removed.Redeliveries, func(o *adminapi.RedeliveryReport) string { return o.Name }),
		destinations: n.destinations.merge(r.Destinations, r.Removed.Destinations, same...),
	}
}

// merge returns before itself if nothing changed, and a copy otherwise.
func merge[R any](before map[string]*R, changed []R, removed []string, name func(*R) string) map[string]*R {
	if len(changed) == 0 && len(removed) == 0 {
		return before
	}
	next := maps.Clone(before)
	if next == nil {
		next = make(map[string]*R, len(changed))
	}
	for _, name := range removed {
		delete(next, name)
	}
	for i := range changed {
		one := changed[i] // A copy, so that no object keeps the memory of a whole report.
		next[name(&one)] = &one
	}
	return next
}

// shareStrings replaces the strings of a report by equal ones of another report. There is a report of each
// object for each dispatcher, and the strings would need a third of the memory.
func shareStrings(r, other *adminapi.SourceReport) {
	share(&r.Name, other.Name)
	share(&r.Revision, other.Revision)
}

func share(s *string, other string) {
	if *s == other {
		*s = other
	}
}
