package ingest

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// tracks is a batch of equal calls.
func tracks(n int) string {
	return `{"batch":[` + strings.TrimSuffix(strings.Repeat(`{"type":"track","userId":"u","event":"E"},`, n), ",") + `]}`
}

// The names of the destinations that do not get a call are stored with each message. They count as memory and in the
// size of a commit.
func TestNamesOfExcludedDestinationsAreBounded(t *testing.T) {
	const calls = 50
	names := make([]string, 2_000)
	for i := range names {
		names[i] = fmt.Sprintf("shop/destination-%05d", i)
	}
	each := len(names) * (nameBytes + len(names[0]))
	f := newFixture(t)
	f.Skip = func(string, *event.Call) []string { return slices.Clone(names) }
	stored, largest := 0, 0
	f.Append = func(_ context.Context, part []queue.Message) ([]bool, error) {
		stored += len(part)
		largest = max(largest, len(part))
		if used, want := f.memory.Used(), int64(storeCopies*each*len(part)); used < want {
			t.Errorf("memory for requests during a commit: got %d, want at least %d", used, want)
		}
		return make([]bool, len(part)), nil
	}
	if got := f.serve(post("/v1/batch", "web-key", tracks(calls))).Code; got != http.StatusOK {
		t.Errorf("status: got %d, want 200", got)
	}
	if most := maxCommitPart/each + 1; stored != calls || largest > most {
		t.Errorf("got %d messages in commits of at most %d; want %d in commits of at most %d", stored, largest, calls, most)
	}
	stored, f.memory.Max = 0, int64(storeCopies*each)
	if got := f.serve(post("/v1/batch", "web-key", tracks(calls))); got.Code != http.StatusServiceUnavailable || stored != 0 {
		t.Errorf("without memory for the names: got status %d and %d stored messages; want 503 and none", got.Code, stored)
	}
	if got := f.memory.Used(); got != 0 {
		t.Errorf("memory for requests at the end: got %d, want 0", got)
	}
}
