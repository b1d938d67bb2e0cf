package cli

import (
	"strings"
	"testing"

	"github.com/posthorn/posthorn/controllers/kinds"
)

// Each kind can be shown by its name.
func TestGetKnowsEveryKind(t *testing.T) {
	for _, k := range kinds.All {
		if name := strings.ToLower(k.Name()); resourceNames[name] == "" {
			t.Errorf("posthorn get does not know %s", name)
		}
	}
}
