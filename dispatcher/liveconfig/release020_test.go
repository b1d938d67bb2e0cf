package liveconfig

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A config of release 0.2.0 is decoded as its equivalent with the present names.
func TestConfigOfRelease020(t *testing.T) {
	const rest = `"success":"AnyEndpoint","delivery":{"retryWindowMS":1}}]}`
	old := `{"version":1,"tenant":"a","destinations":[{"name":"d","state":"Held","heldReason":"NoSource",` + rest
	got, _, err := Decode(compressed(t, old))
	if err != nil {
		t.Fatal(err)
	}
	want, _, err := Decode(compressed(t, `{"version":1,"namespace":"a","destinations":[{"name":"d","state":"Paused","pausedReason":"NoSource",`+rest))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the config of release 0.2.0 is read as (-want +got):\n%s", diff)
	}

	for name, c := range map[string]struct{ old, want string }{
		"both names of the namespace": {strings.Replace(old, `"tenant"`, `"namespace":"b","tenant"`, 1), `unknown field ` + `"tenant"`},
		"an unknown field":            {strings.Replace(old, `"tenant"`, `"extra":1,"tenant"`, 1), `unknown field "extra"`},
		"an unknown state":            {strings.Replace(old, `"Held"`, `"Off"`, 1), `state "Off" is unknown`},
		"destinations of no list":     {`{"version":1,"tenant":"a","destinations":1}`, "does not match the format"},
	} {
		if _, _, err := Decode(compressed(t, c.old)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, c.want)
		}
	}
}
