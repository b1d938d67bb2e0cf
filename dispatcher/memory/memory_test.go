package memory

import (
	"testing"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

func TestMemoryPlan(t *testing.T) {
	const gib = int64(1) << 30
	for _, total := range []int64{Min, 256_000_000, Default, gib, 4 * gib, 64 * gib} {
		p := PlanFor(total)
		if got := p.Heap + programMemory; got != total {
			t.Errorf("%d: heap and program take %d", total, got)
		}
		parts := pebblestore.WriteBuffers*p.MemTable + p.Cache + p.Duplicates + p.Requests + int64(p.InFlight)*RequestBytes
		if parts > p.Heap {
			t.Errorf("%d: the parts take %d of a heap of %d", total, parts, p.Heap)
		}
		// One Source may hold half of the memory of requests: several requests of the largest size.
		if p.Requests/2 < 16*event.MaxBodyBytes {
			t.Errorf("%d: one Source has %d bytes for its requests", total, p.Requests/2)
		}
		if p.MemTable < 2<<20 {
			t.Errorf("%d: write buffers of %d bytes", total, p.MemTable)
		}
	}
	// The memory that a default store keeps after a burst fits into 90 MB.
	if p := PlanFor(Default); 2*p.MemTable > 18<<20 {
		t.Errorf("by default: write buffers of %d bytes", p.MemTable)
	}
}

// Deliveries in flight with messages of 1 KB: as many leased messages wait for their request as the engine permits,
// a sixteenth of the memory.
func TestDeliveriesInFlight(t *testing.T) {
	for total, want := range map[int64]int64{Default: 6000, 1 << 30: 16_000} {
		all := int64(PlanFor(total).InFlight) * RequestBytes
		if got := (all - all/16) / (RequestBytes + 1000); got < want {
			t.Errorf("%d bytes: got %d deliveries in flight, want at least %d", total, got, want)
		}
	}
}
