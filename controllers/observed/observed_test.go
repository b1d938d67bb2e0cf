package observed

import (
	"testing"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/check"
)

// A path is unmatched if all reports with unmatched paths contain it.
func TestUnmatchedPaths(t *testing.T) {
	unmatched := func(messages int64, paths ...string) *adminapi.UnmatchedPaths {
		return &adminapi.UnmatchedPaths{Messages: messages, Paths: paths}
	}
	d := NewDestination(nil)
	for _, u := range []*adminapi.UnmatchedPaths{nil, unmatched(1000, "a", "b"), nil, unmatched(2000, "b", "c")} {
		d.Add(&adminapi.DestinationReport{Unmatched: u}, false)
	}
	d.Add(&adminapi.DestinationReport{Unmatched: unmatched(5000)}, true)
	check.Same(t, "unmatched paths", d.Unmatched, unmatched(3000, "b"))
}
