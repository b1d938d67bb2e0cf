// Package memory divides the memory of a process among the parts of a dispatcher.
package memory

import (
	"cmp"
	"os"
	"runtime"
	"runtime/debug"
)

// Limits of the resident memory of a process, in bytes.
const (
	Default = 400_000_000
	Min     = 200_000_000
	// programMemory is the process memory outside of the Go heap: the resident pages of the
	// program, about 45 MB, and memory that the runtime does not count.
	programMemory = 64_000_000
)

// Plan divides a limit of the resident memory. The sum of all parts, in bytes, is below Heap.
type Plan struct {
	Heap       int64 // limit of the Go runtime, at which the garbage collector runs as often as necessary
	MemTable   int64 // each memtable of the store
	Cache      int64 // block cache of the store
	Duplicates int64 // filters of stored messageIds
	Requests   int64 // requests in progress
	InFlight   int   // deliveries in flight, with messages that are small beside RequestBytes
}

// PlanFor returns the plan for a limit of at least Min; 0 is Default.
func PlanFor(limit int64) Plan {
	heap := cmp.Or(limit, Default) - programMemory
	return Plan{
		Heap:       heap,
		MemTable:   min(heap/48, 64<<20),
		Cache:      min(heap/16, 256<<20),
		Duplicates: min(heap/20, 256<<20),
		Requests:   heap / 10 * 3,
		InFlight:   int(heap / 10 * 4 / RequestBytes),
	}
}

// Share returns the plan of one of n stores in a process.
func (p Plan) Share(n int) Plan {
	p.MemTable = max(p.MemTable/int64(n), minMemTable)
	p.Cache, p.Duplicates, p.Requests = p.Cache/int64(n), p.Duplicates/int64(n), p.Requests/int64(n)
	p.InFlight = max(p.InFlight/n, 1)
	return p
}

const minMemTable = 1 << 20

// RequestBytes is the memory of a delivery in flight beside its message: the connection with TLS, whose floor is about
// 15 KB with the goroutine that waits for the response, and the rest of the messages that share memory with this one.
const RequestBytes = 20_000

// quietGrowth is the growth of an idle process's heap, in percent, at which the garbage collector
// runs: small, because it runs rarely in an idle process.
const quietGrowth = 10

// Bound sets the garbage collector's limit. GOMEMLIMIT takes precedence.
func (p Plan) Bound() {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(p.Heap)
	}
}

// OnQuiet returns a function that is called when a store becomes idle or busy. It returns memory to the operating
// system once per burst, and keeps the heap small until the next burst.
func OnQuiet() func(bool) {
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
