package memory

import (
	"strings"
	"testing"
)

func TestFitFiles(t *testing.T) {
	plan := PlanFor(Default)
	for limit, want := range map[int]int{1 << 20: plan.InFlight, plan.InFlight + otherFiles: plan.InFlight, 4096: 4096 - otherFiles,
		256: minInFlight} {
		got, err := plan.FitFiles(limit)
		if got.InFlight != want {
			t.Errorf("deliveries in flight with %d open files: got %d, want %d", limit, got.InFlight, want)
		}
		if named := err != nil && strings.Contains(err.Error(), "limit of open files"); named != (want < plan.InFlight) {
			t.Errorf("with %d open files: error %v", limit, err)
		}
	}
	if OpenFiles() < 1 {
		t.Errorf("OpenFiles: got %d", OpenFiles())
	}
}
