// Package check has assertions for tests. Each one names the fact that it checks, and a
// failure shows the actual and the expected value.
package check

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Equal reports an error if got is not want.
func Equal[T comparable](t testing.TB, fact string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", fact, got, want)
	}
}

// Same reports the differences between two values that cannot be compared with ==.
func Same[T any](t testing.TB, fact string, got, want T, options ...cmp.Option) {
	t.Helper()
	if diff := cmp.Diff(want, got, options...); diff != "" {
		t.Errorf("%s (-want +got):\n%s", fact, diff)
	}
}

// NoError ends the test if an action failed.
func NoError(t testing.TB, action string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: got error %v, want none", action, err)
	}
}

// ErrorIs reports an error if err does not match want.
func ErrorIs(t testing.TB, action string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got error %v, want %v", action, err, want)
	}
}
