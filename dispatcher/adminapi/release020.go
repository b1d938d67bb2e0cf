package adminapi

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
)

// During an upgrade from release 0.2.0, the new operator reads reports of old dispatchers, and during
// a rollback to it the old operator reads reports of new dispatchers. That release has other names for
// some fields, and an ETag instead of a cursor. This file and its test can be removed with the support
// of such upgrades.

type namespaceReport020 struct {
	Namespace string `json:"tenant"`
	NamespaceReport
}

// EncodeReport020 returns the JSON of a report that an operator of release 0.2.0 can read, too.
func EncodeReport020(r Report) ([]byte, error) {
	both := struct {
		Report
		Namespaces020 []namespaceReport020 `json:"tenants,omitempty"`
	}{Report: r}
	for _, n := range r.Namespaces {
		n.Destinations = slices.Clone(n.Destinations)
		for i := range n.Destinations {
			d := &n.Destinations[i]
			d.Endpoints = slices.Clone(d.Endpoints)
			for j := range d.Endpoints {
				if e := &d.Endpoints[j]; e.State == EndpointGone { // The CRD of 0.2.0 rejects a status with it.
					e.State = EndpointCircuitOpen
				}
			}
		}
		both.Namespaces020 = append(both.Namespaces020, namespaceReport020{n.Namespace, n})
	}
	return json.Marshal(both)
}

// DecodeReport reads a Report, including one of release 0.2.0.
func DecodeReport(text []byte) (Report, error) {
	var r Report
	if err := json.Unmarshal(text, &r); err != nil {
		return Report{}, err
	}
	if r.Namespaces != nil {
		return r, nil
	}
	var old struct {
		Namespaces []namespaceReport020 `json:"tenants"`
	}
	if err := json.Unmarshal(text, &old); err != nil {
		return Report{}, err
	}
	for _, n := range old.Namespaces {
		n.NamespaceReport.Namespace = n.Namespace
		r.Namespaces = append(r.Namespaces, n.NamespaceReport)
	}
	return r, nil
}

// setETag020 requests a report only if it changed since the ETag that is used as a cursor.
func setETag020(header http.Header, cursor string) {
	if strings.HasPrefix(cursor, `"`) {
		header.Set("If-None-Match", cursor)
	}
}
