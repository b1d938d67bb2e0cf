package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/controllers/standalone"
)

// The summary counts objects, not their conditions.
func TestCompileSummary(t *testing.T) {
	problem := func(object string) manifest.Problem {
		return manifest.Problem{File: "a.yaml", Object: object, Message: "m"}
	}
	for _, c := range []struct {
		compiled standalone.Compiled
		want     string
	}{
		{standalone.Compiled{Objects: 1}, "1 valid object"},
		{standalone.Compiled{Objects: 5, NotAccepted: []manifest.Problem{problem("A"), problem("A"), problem("B")}},
			"5 valid objects (2 not accepted)"},
		{standalone.Compiled{Objects: 0, Problems: []manifest.Problem{problem("A")}, Warnings: []manifest.Problem{problem("C")}},
			"0 valid objects, 1 problem, 1 warning"},
	} {
		var out bytes.Buffer
		printVerdict(&out, c.compiled)
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if got := lines[len(lines)-1]; got != c.want {
			t.Errorf("summary: got %q, want %q", got, c.want)
		}
	}
}
