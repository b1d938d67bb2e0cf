package compile

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/config/crd"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// Each list of reserved headers in the CRD has the names that the live config excludes.
func TestReservedHeadersOfTheCRD(t *testing.T) {
	text, err := crd.Files.ReadFile("experimental/posthorn.dev_webhookdestinations.yaml")
	if err != nil {
		t.Fatal(err)
	}
	lists := regexp.MustCompile(`self\.lowerAscii\(\)\s+in\s+\[([^\]]*)\]`).FindAllStringSubmatch(string(text), -1)
	prefixes := regexp.MustCompile(`self\.matches\(''\(\?i\)\^\(([^)]*)\)''\)`).FindAllStringSubmatch(string(text), -1)
	if len(lists) != 3 || len(prefixes) != 3 {
		t.Fatalf("lists of reserved headers and of prefixes: got %d and %d, want 3 and 3, for static headers, signatures and headers of spec.request", len(lists), len(prefixes))
	}
	want := slices.Sorted(slices.Values(liveconfig.ReservedHeaders))
	for _, list := range lists {
		got := regexp.MustCompile(`[a-z-]{2,}`).FindAllString(strings.ToLower(list[1]), -1)
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("reserved headers (-live config +CRD):\n%s", diff)
		}
	}
	for _, list := range prefixes {
		if want := strings.Join(liveconfig.ReservedPrefixes, "|"); list[1] != want {
			t.Errorf("reserved prefixes in the CRD: got %s, want those of the live config, %s", list[1], want)
		}
	}
}
