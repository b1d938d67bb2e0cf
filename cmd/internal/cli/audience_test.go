package cli

import (
	"testing"

	"github.com/posthorn/posthorn/contract/adminapi"
)

func TestProgressLines(t *testing.T) {
	for _, c := range []struct {
		sent, size int64
		end        bool
		want       string
	}{
		{0, 2e6, false, "[..............................]   0 %  0.0 of 2.0 MB"},
		{1e6, 2e6, false, "[###############...............]  50 %  1.0 of 2.0 MB"},
		{2e6, 2e6, true, "[##############################] 100 %  2.0 of 2.0 MB, comparing with the last sync"},
		{1500000, -1, false, "sent 1.5 MB"},
	} {
		if got := sentLine(c.sent, c.size, c.end); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	for want, a := range map[string]adminapi.SyncProgress{
		"[####..........................]  15 %  150 of 1000 queued": {SyncCounts: adminapi.SyncCounts{Added: 600,
			Removed: 400}, Unsent: 850},
		"[####..........................]  15 %  150 of 1000 queued; storage is filling up": {SyncCounts: adminapi.SyncCounts{Added: 600, Removed: 400}, Unsent: 850, Waits: "storage is filling up"},
		"[##############################] 100 %  0 of 0 queued":                             {},
	} {
		if got := queuedLine(&a); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
