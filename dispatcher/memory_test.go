package dispatcher

import (
	"strings"
	"testing"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

func TestMemoryPlan(t *testing.T) {
	const gib = int64(1) << 30
	for _, total := range []int64{MinMemory, 256_000_000, DefaultMemory, gib, 4 * gib, 64 * gib} {
		p := planMemory(total)
		if got := p.heap + programMemory; got != total {
			t.Errorf("%d: heap and program take %d", total, got)
		}
		parts := pebblestore.WriteBuffers*p.memTable + p.cache + p.duplicates + p.requests + int64(p.inFlight)*4*event.MaxCallBytes
		if parts > p.heap {
			t.Errorf("%d: the parts take %d of a heap of %d", total, parts, p.heap)
		}
		// One Source may hold half of the memory of requests: several requests of the largest size.
		if p.requests/2 < 16*event.MaxBodyBytes {
			t.Errorf("%d: one Source has %d bytes for its requests", total, p.requests/2)
		}
		if p.memTable < 2<<20 || p.inFlight < 256 || p.inFlight > 1024 {
			t.Errorf("%d: write buffers of %d bytes, %d deliveries in flight", total, p.memTable, p.inFlight)
		}
	}
	// The memory that a default store keeps after a burst fits into 90 MB.
	if p := planMemory(DefaultMemory); 2*p.memTable > 18<<20 || p.inFlight != 1024 {
		t.Errorf("by default: write buffers of %d bytes, %d deliveries in flight", p.memTable, p.inFlight)
	}
}

func TestTooLittleMemoryIsRefused(t *testing.T) {
	_, err := New(Options{DataDir: t.TempDir(), Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0", Memory: MinMemory - 1})
	if err == nil || !strings.Contains(err.Error(), "set --memory to 200000000 or more") {
		t.Errorf("New: %v, want an error with the minimum", err)
	}
}
