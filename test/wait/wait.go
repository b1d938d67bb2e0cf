// Package wait makes tests wait for events, so that no assertion depends on the
// speed of the machine. It must not know any other package of this repository.
package wait

import (
	"errors"
	"testing"
	"time"
)

// Limit bounds the wait for an event that must happen. It only ends a test that
// would hang otherwise: a wait ends with its event, and five minutes are much longer
// than any event takes on a busy machine.
const Limit = 5 * time.Minute

// final is an error that further polling cannot change.
type final struct{ error }

// Stop makes Until return err at once.
func Stop(err error) error { return final{err} }

// Until polls until check returns nil, and returns its last error after Limit.
func Until(check func() error) error {
	for deadline := time.Now().Add(Limit); ; time.Sleep(20 * time.Millisecond) {
		err := check()
		if _, ended := errors.AsType[final](err); err == nil || ended || time.Now().After(deadline) {
			return err
		}
	}
}

// For waits until check returns nil. The test fails with the last error after Limit.
func For(t testing.TB, event string, check func() error) {
	t.Helper()
	if err := Until(check); err != nil {
		t.Fatalf("no event within %v: %s: %v", Limit, event, err)
	}
}

// True is For for an event without an error.
func True(t testing.TB, event string, happened func() bool) {
	t.Helper()
	For(t, event, func() error {
		if !happened() {
			return errors.New("it has not happened")
		}
		return nil
	})
}
