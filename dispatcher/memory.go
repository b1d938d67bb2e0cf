package dispatcher

import (
	"os"
	"runtime"
	"runtime/debug"

	"github.com/posthorn/posthorn/event"
)

// Bounds of Options.Memory, in bytes.
const (
	DefaultMemory = 400_000_000
	MinMemory     = 200_000_000
	// programMemory is what a process holds besides its Go heap: the pages of the
	// program that are in use, about 45 MB, and what the runtime does not count.
	programMemory = 64_000_000
)

// memoryPlan divides a bound of the resident memory. All parts together stay
// below heap, at which the garbage collector works as much as it must.
type memoryPlan struct {
	heap       int64 // limit of the Go runtime
	memTable   int64 // each of the store's write buffers
	cache      int64 // the store's blocks
	duplicates int64 // filters of the remembered messageIds
	requests   int64 // requests in progress
	inFlight   int   // deliveries in flight, for each of which four messages are leased
}

func planMemory(total int64) memoryPlan {
	heap := total - programMemory
	return memoryPlan{
		heap:       heap,
		memTable:   min(heap/48, 64<<20),
		cache:      min(heap/16, 256<<20),
		duplicates: min(heap/20, 256<<20),
		requests:   heap / 10 * 3,
		inFlight:   int(min(heap/10*4/leasedBytes, maxInFlight)),
	}
}

const (
	maxInFlight = 1024
	leasedBytes = 4 * event.MaxCallBytes
)

// quietGrowth is how much the heap of a quiet process may grow until the garbage
// collector runs, in percent: little, because it runs rarely then.
const quietGrowth = 10

// bound makes the garbage collector keep to the plan. GOMEMLIMIT takes precedence.
func (p memoryPlan) bound() {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(p.heap)
	}
}

// onQuiet returns memory to the machine when the store is quiet, once for each
// burst, and keeps the heap small until the next one.
func onQuiet() func(bool) {
	growth := debug.SetGCPercent(100)
	debug.SetGCPercent(growth)
	return func(quiet bool) {
		if !quiet {
			debug.SetGCPercent(growth)
			return
		}
		if growth < 0 || growth > quietGrowth {
			debug.SetGCPercent(quietGrowth)
		}
		// The first collection empties the pools for reuse, the second frees what they held.
		runtime.GC()
		debug.FreeOSMemory()
	}
}
