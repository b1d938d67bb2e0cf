package slots

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func wantEqual[T any](t *testing.T, name string, got, want T) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}
