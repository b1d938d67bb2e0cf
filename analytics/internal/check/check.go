// Package check has assertions for the tests of this module, with the functions of the
// repository's test/check, but without other modules. Each one names the fact that it checks,
// and a failure shows the actual and the expected value.
package check

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

// Equal reports an error if got is not want.
func Equal[T comparable](t testing.TB, fact string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", fact, got, want)
	}
}

// Same reports two values that cannot be compared with == and are not deeply equal.
func Same[T any](t testing.TB, fact string, got, want T) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s:\n got %+v\nwant %+v", fact, got, want)
	}
}

// SameText reports the lines in which two texts differ, from the first to the last one.
func SameText(t testing.TB, fact, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for len(g) > 0 && len(w) > 0 && g[0] == w[0] {
		g, w = g[1:], w[1:]
	}
	for len(g) > 0 && len(w) > 0 && g[len(g)-1] == w[len(w)-1] {
		g, w = g[:len(g)-1], w[:len(w)-1]
	}
	t.Errorf("%s (-want +got):\n-%s\n+%s", fact, strings.Join(w, "\n-"), strings.Join(g, "\n+"))
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
