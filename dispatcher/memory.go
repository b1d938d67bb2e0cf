package dispatcher

import (
	"os"
	"runtime"
	"runtime/debug"

	"github.com/posthorn/posthorn/analytics/event"
)

// Bounds of Options.Memory, in bytes.
const (
	DefaultMemory = 400_000_000
	MinMemory     = 200_000_000
	// programMemory is the process memory outside of the Go heap: the resident pages of the
	// program, about 45 MB, and memory that the runtime does not count.
	programMemory = 64_000_000
)

// memoryPlan divides a limit of the resident memory. The sum of all parts is below heap, the limit
// at which the garbage collector runs as often as necessary.
type memoryPlan struct {
	heap       int64 // limit of the Go runtime
	memTable   int64 // each memtable of the store
	cache      int64 // block cache of the store
	duplicates int64 // filters of stored messageIds
	requests   int64 // requests in progress
	inFlight   int   // deliveries in flight; four messages are leased for each
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

// share returns the plan of one of n stores in a process.
func (p memoryPlan) share(n int) memoryPlan {
	p.memTable = max(p.memTable/int64(n), minMemTable)
	p.cache, p.duplicates, p.requests = p.cache/int64(n), p.duplicates/int64(n), p.requests/int64(n)
	p.inFlight = max(p.inFlight/n, 1)
	return p
}

const (
	minMemTable = 1 << 20
	maxInFlight = 1024
	leasedBytes = 4 * event.MaxCallBytes
)

// quietGrowth is the growth of an idle process's heap, in percent, at which the garbage collector
// runs: small, because it runs rarely in an idle process.
const quietGrowth = 10

// bound sets the garbage collector's limit. GOMEMLIMIT takes precedence.
func (p memoryPlan) bound() {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(p.heap)
	}
}

// onQuiet returns memory to the operating system when the store becomes idle, once per burst, and
// keeps the heap small until the next burst.
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
		// The first collection empties the sync.Pools, the second frees their contents.
		runtime.GC()
		debug.FreeOSMemory()
	}
}
