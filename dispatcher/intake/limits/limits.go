// Package limits holds the limits of the requests in progress. Each limit protects one resource,
// from one kind of sender, and acts at one step of a request. In the order of the steps:
//
//	step               limit        protects                 against                          excess
//	accept             [Conns]      file descriptors, 20 KB  idle and slow clients            closes the connection furthest behind
//	                                a connection
//	headers            net/http     memory of headers        large heads, slow heads          431, or closes the connection
//	header key known   [CallRate]   the Source's owner       a Source far above its rate      429 before the body is read
//	read the body      [Pool]       memory of the process    many or slow bodies              503
//	wait for the CPU   [Storing]    memory and the store     one Source's parallel requests   waits, with only the body in memory
//	                   [Scheduler]  CPU time                 one namespace's requests, small  waits; the namespace with the
//	                                                         bodies, large messages, filters  lowest usage is next
//	after the parse    [Pool]       memory of messages       small bodies, large messages     503
//	build messages     [CallRate]   the Source's owner       more calls than spec.rateLimit   429 with the time to wait
//	append             [Deadlines]  goroutines and memory    a disk that does not answer      503 after 30 s
//	commit, refusal    [Pace]       disk time of others      one Source's bulk                pauses the Source, only while
//	                                                                                          others store, too
//
// # Which Source is charged
//
// Each Source has a [Source], the requests without a known write key share one. So a limit never
// lets one Source use what another one needs: Pool gives a single namespace at most half, and less
// while others are busy; Scheduler gives its namespace at most half of the slots; Storing at most
// MaxStoring bytes in the store; Pace slows down only the Source that sends in bulk. Conns does not
// know Sources, because a connection has none before its first request.
//
// # Why no two limits deadlock
//
// Only Storing and Scheduler wait for other requests. A request waits for Storing while it holds
// only the memory of its body, never a turn; a request in a turn computes and never waits for
// Storing, Pool or the store. Pool and CallRate refuse instead of waiting. The wait for Storing
// ends with Deadlines at the latest.
//
// # Limits elsewhere
//
// The size of a call and of a batch is a limit of package event, the disk's high-water mark and a
// Source's quota are limits of the store; package admission asks for them. The rate of deliveries
// belongs to package delivery. The package does not know HTTP messages, configs or queues.
package limits

import (
	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"
)

// Source is one Source's share of every limit. Make it with NewSource.
type Source struct {
	Queue WaitQueue
	Calls CallRate

	storing *semaphore.Weighted // bytes of messages in progress
	bulk    *rate.Limiter       // bytes that it stores without pauses
}

// NewSource returns the limits of a Source without requests, in a namespace with a share of the CPU.
func NewSource(share *Share) *Source {
	return &Source{Queue: WaitQueue{share: share}, storing: semaphore.NewWeighted(MaxStoring), bulk: rate.NewLimiter(bulkRate, bulkBurst)}
}
