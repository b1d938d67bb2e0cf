package adminapi

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestMerge(t *testing.T) {
	namespace := func(name, revision string, destinations ...DestinationReport) NamespaceReport {
		return NamespaceReport{Namespace: name, Revision: revision, Destinations: destinations}
	}
	full := Report{Cursor: "1", Namespaces: []NamespaceReport{
		namespace("a", "1", DestinationReport{Name: "x", Revision: "1"}, DestinationReport{Name: "y", Revision: "1"}),
		namespace("b", "1"),
	}}
	removed := namespace("a", "2", DestinationReport{Name: "z", Revision: "2"})
	removed.Removed.Destinations = []string{"x"}
	complete := namespace("a", "2", DestinationReport{Name: "z", Revision: "2"})
	complete.Complete = true
	for _, test := range []struct {
		name    string
		report  Report
		want    Report
		changed []string
	}{
		{"an empty delta", Report{Cursor: "2", Delta: true, Ready: true}, Report{Cursor: "2", Ready: true, Namespaces: full.Namespaces}, nil},
		{
			"changed, added and removed objects", Report{Cursor: "2", Delta: true, Namespaces: []NamespaceReport{removed}},
			Report{Cursor: "2", Namespaces: []NamespaceReport{namespace("a", "2", DestinationReport{Name: "y", Revision: "1"}, DestinationReport{Name: "z", Revision: "2"}), full.Namespaces[1]}},
			[]string{"a"},
		},
		{
			"a complete namespace", Report{Cursor: "2", Delta: true, Namespaces: []NamespaceReport{complete}},
			Report{Cursor: "2", Namespaces: []NamespaceReport{namespace("a", "2", DestinationReport{Name: "z", Revision: "2"}), full.Namespaces[1]}},
			[]string{"a"},
		},
		{
			"added and removed namespaces", Report{Cursor: "2", Delta: true, Namespaces: []NamespaceReport{namespace("c", "1")}, RemovedNamespaces: []string{"a"}},
			Report{Cursor: "2", Namespaces: []NamespaceReport{full.Namespaces[1], namespace("c", "1")}},
			[]string{"a", "c"},
		},
		{"an equal full report", Report{Cursor: "2", Namespaces: full.Namespaces}, Report{Cursor: "2", Namespaces: full.Namespaces}, nil},
		{
			"another full report", Report{Cursor: "2", Namespaces: []NamespaceReport{full.Namespaces[0], namespace("c", "1")}},
			Report{Cursor: "2", Namespaces: []NamespaceReport{full.Namespaces[0], namespace("c", "1")}},
			[]string{"b", "c"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := NewIndex(full)
			got, changed := before.Merge(test.report)
			if diff := cmp.Diff(NewIndex(test.want), got, cmp.AllowUnexported(Index{}), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("merged (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.changed, changed); diff != "" {
				t.Errorf("changed namespaces (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(NewIndex(full), before, cmp.AllowUnexported(Index{})); diff != "" {
				t.Errorf("the Index before the merge was changed (-want +got):\n%s", diff)
			}
		})
	}
}
