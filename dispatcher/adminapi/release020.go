package adminapi

import (
	"encoding/json"
	"net/http"
	"strings"
)

// During an upgrade from release 0.2.0, the new operator reads reports of old dispatchers. That
// release has other names for some fields, and an ETag instead of a cursor. This file and its test can be removed with the support
// of such upgrades.

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
		Namespaces []struct {
			Namespace string `json:"tenant"`
			NamespaceReport
		} `json:"tenants"`
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
