package adminapi

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A report of release 0.2.0 is decoded as its equivalent with the present names.
func TestReportOfRelease020(t *testing.T) {
	old := `{"pod":"p1","ready":true,"tenants":[{"tenant":"a","revision":"r1","sources":[{"name":"web","accepted":3}]},{"tenant":"b","revision":"r2"}]}`
	got, err := DecodeReport([]byte(old))
	if err != nil {
		t.Fatal(err)
	}
	want := Report{Pod: "p1", Ready: true, Namespaces: []NamespaceReport{
		{Namespace: "a", Revision: "r1", Sources: []SourceReport{{Name: "web", Accepted: 3}}},
		{Namespace: "b", Revision: "r2"},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the report of release 0.2.0 is read as (-want +got):\n%s", diff)
	}
	for _, text := range []string{`{`, `{"tenants":1}`, `{"namespaces":1}`} {
		if _, err := DecodeReport([]byte(text)); err == nil {
			t.Errorf("%s is read without an error", text)
		}
	}
}
