package delivery

import (
	"context"
	"hash/maphash"
	"iter"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// attempts is a ring buffer of the last attempts; the engine's lock guards it. It grows to its size and then allocates
// nothing: message ids are copied into place, because a string from the queue would keep the whole batch in memory.
type attempts struct {
	ring []record
	next int
	// answered is 1 more than the index of the only attempt with a Response, so that an endpoint
	// keeps at most one; 0 if there is none.
	answered int
	// others is the number of record.others of all attempts.
	others int
}

// maxOthers bounds the messages of batches that are remembered beside the first one of each: with more, those of the oldest
// attempts are forgotten.
const maxOthers = 8192

// idSeed is that of the hashes of messageIds in memory.
var idSeed = maphash.MakeSeed()

// maxKeptResponse bounds the bytes of a response that are kept in memory, and in the record of the
// endpoint's health. The replacement of invalid UTF-8 can double them.
const maxKeptResponse = 512

type record struct {
	adminapi.Attempt
	id []byte
	// others are hashes of the further messageIds of a batch.
	others []uint64
}

// of reports whether an attempt was one of a message.
func (r *record) of(messageID string) bool {
	return string(r.id) == messageID || slices.Contains(r.others, maphash.String(idSeed, messageID))
}

// setOthers remembers the further messages of an attempt with a batch.
func (a *attempts) setOthers(r *record, batch []queue.Delivery) {
	a.others -= len(r.others)
	r.others = nil
	for i := 1; i < len(batch); i++ {
		r.others = append(r.others, maphash.String(idSeed, batch[i].ID))
	}
	a.others += len(r.others)
	for i := 0; i < len(a.ring) && a.others > maxOthers; i++ {
		if old := &a.ring[(a.next+i)%len(a.ring)]; old != r {
			a.others -= len(old.others)
			old.others = nil
		}
	}
}

func (a *attempts) add(size int, t *adminapi.Attempt, batch []queue.Delivery) {
	if len(a.ring) < size {
		a.ring = append(a.ring, record{})
		a.next = len(a.ring) - 1
	}
	if t.Response != "" {
		if a.answered > 0 {
			a.ring[a.answered-1].Response = ""
		}
		a.answered = a.next + 1
	}
	r := &a.ring[a.next]
	a.next = (a.next + 1) % size
	r.Attempt = *t
	r.id = append(r.id[:0], t.MessageID...)
	r.MessageID = ""
	a.setOthers(r, batch)
}

// forgetResponse removes the Response, which may repeat what was redacted by other rules.
func (a *attempts) forgetResponse() {
	if a.answered > 0 {
		a.ring[a.answered-1].Response = ""
	}
}

// attempt returns a copy that does not change with the ring.
func (r *record) attempt() adminapi.Attempt {
	t := r.Attempt
	t.MessageID = event.ID(r.id)
	return t
}

// oldestFirst iterates over the attempts.
func (a *attempts) oldestFirst() iter.Seq[*record] {
	return func(yield func(*record) bool) {
		for i := range a.ring {
			if !yield(&a.ring[(a.next+i)%len(a.ring)]) {
				return
			}
		}
	}
}

// lastFailed returns the last failed attempt for the next process; nil if the ring has none.
func (a *attempts) lastFailed() *adminapi.Attempt {
	for i := range a.ring {
		if r := &a.ring[(a.next+len(a.ring)-1-i)%len(a.ring)]; r.Reason != "" && !r.Test {
			t := r.attempt()
			t.CertificateExpires = time.Time{} // The certificate may be renewed by then.
			return &t
		}
	}
	return nil
}

// Attempts lists the last attempts at an endpoint, oldest first, or at all endpoints of the destination if endpoint is
// empty; nil if the endpoint is unknown. destination is "namespace/name".
func (e *Engine) Attempts(destination, endpoint string) []adminapi.Attempt {
	list := e.attempts(destination, func(name string, _ *record) bool { return endpoint == "" || endpoint == name })
	slices.SortStableFunc(list, earlierAttempt)
	return list
}

// AttemptsOf lists the remembered attempts of a message, oldest first. Those of batches have its MessageID.
func (e *Engine) AttemptsOf(messageID string) (list []adminapi.Attempt) {
	e.mu.Lock()
	names := slices.Collect(maps.Keys(e.registry.destinations))
	e.mu.Unlock()
	for _, name := range names {
		list = append(list, e.attempts(name, func(_ string, r *record) bool { return r.of(messageID) })...)
	}
	for i := range list {
		list[i].MessageID = event.ID(messageID) // It may be another one of a batch.
	}
	slices.SortStableFunc(list, earlierAttempt)
	return list
}

func earlierAttempt(a, b adminapi.Attempt) int { return a.Time.Compare(b.Time) }

// attempts lists the attempts of a destination that match. It locks the engine for one destination only, because there
// can be thousands.
func (e *Engine) attempts(destination string, match func(endpoint string, r *record) bool) (list []adminapi.Attempt) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if d := e.registry.destinations[destination]; d != nil {
		for name, ep := range d.endpoints {
			for r := range ep.attempts.oldestFirst() {
				if match(name, r) {
					list = append(list, r.attempt())
				}
			}
		}
	}
	return list
}

// tailBuffer is how many attempts a subscriber may lag behind.
const tailBuffer = 256

// maxTailBytes bounds the bodies that wait for one subscriber.
const maxTailBytes = 4 << 20

// Tail is a subscription to attempts.
type Tail struct {
	destination, endpoint string
	out                   chan adminapi.AttemptWithBody
	dropped               atomic.Int64
	// bodies is true for a subscriber that gets the bodies, of which waiting bytes are in out.
	bodies  bool
	waiting atomic.Int64
}

// Tail subscribes to attempts until ctx is done, with the bodies of the requests if bodies is true. An empty destination
// ("namespace/name") or endpoint matches all.
func (e *Engine) Tail(ctx context.Context, destination, endpoint string, bodies bool) *Tail {
	t := &Tail{destination: destination, endpoint: endpoint, bodies: bodies, out: make(chan adminapi.AttemptWithBody, tailBuffer)}
	e.mu.Lock()
	e.recorder.tails[t] = struct{}{}
	e.mu.Unlock()
	context.AfterFunc(ctx, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.recorder.tails, t)
		close(t.out)
	})
	return t
}

// Attempts returns the attempts as they end. A slow reader misses attempts; the next one has their number.
func (t *Tail) Attempts() iter.Seq[adminapi.AttemptWithBody] {
	return func(yield func(adminapi.AttemptWithBody) bool) {
		for a := range t.out {
			t.waiting.Add(-int64(len(a.Body)))
			a.Missed = t.dropped.Swap(0)
			if !yield(a) {
				return
			}
		}
	}
}
