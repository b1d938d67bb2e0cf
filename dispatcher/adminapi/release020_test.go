package adminapi

import (
	"encoding/json"
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

// A client of release 0.2.0 finds a report's namespaces under the old names, and only states that it
// knows. A present client gets the report unchanged.
func TestReportForRelease020(t *testing.T) {
	report := Report{Pod: "p1", Ready: true, ConfigFormat: ConfigFormat, Namespaces: []NamespaceReport{
		{Namespace: "a", Revision: "r1", Sources: []SourceReport{{Name: "web", Accepted: 3}}, Destinations: []DestinationReport{
			{Name: "crm", Endpoints: []EndpointReport{{Name: "x", State: EndpointGone}, {Name: "y", State: EndpointHealthy}}},
		}},
		{Namespace: "b", Refused: &RefusedConfig{Revision: "r2", Error: "because"}},
	}}
	text, err := EncodeReport020(report)
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeReport(text)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(report, got); diff != "" {
		t.Errorf("the report is read by this release as (-want +got):\n%s", diff)
	}
	var old struct {
		Tenants []struct {
			Tenant, Revision string
			Refused          *RefusedConfig
			Sources          []SourceReport
			Destinations     []struct {
				Name      string
				Endpoints []struct{ Name, State string }
			}
		}
	}
	want := old
	if err := json.Unmarshal([]byte(`{"Tenants": [
		{"Tenant": "a", "Revision": "r1", "Sources": [{"name": "web", "accepted": 3}], "Destinations": [{"Name": "crm", "Endpoints": [{"Name": "x", "State": "CircuitOpen"}, {"Name": "y", "State": "Healthy"}]}]},
		{"Tenant": "b", "Refused": {"revision": "r2", "error": "because"}}]}`), &want); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &old); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, old); diff != "" {
		t.Errorf("the report is read by release 0.2.0 as (-want +got):\n%s", diff)
	}
	if report.Namespaces[0].Destinations[0].Endpoints[0].State != EndpointGone {
		t.Error("the report itself was changed")
	}
}
