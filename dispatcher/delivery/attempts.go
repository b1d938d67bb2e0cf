package delivery

import (
	"bytes"
	"context"
	"iter"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
)

// attempts is a ring buffer of the last attempts; the engine's lock guards it. It grows to its size
// and then allocates nothing: message ids are copied into place, because a string from the queue
// would keep the whole batch in memory.
type attempts struct {
	ring []record
	next int
	// answered is 1 more than the index of the only attempt with a Response, so that an endpoint
	// keeps at most one; 0 if there is none.
	answered int
}

// maxKeptResponse bounds the bytes of a response that are kept in memory, and in the record of the
// endpoint's health. The replacement of invalid UTF-8 can double them.
const maxKeptResponse = 512

type record struct {
	adminapi.Attempt
	id []byte
}

func (a *attempts) add(size int, t *adminapi.Attempt) {
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
}

// attempt returns a copy that does not change with the ring.
func (r *record) attempt() adminapi.Attempt {
	t := r.Attempt
	t.MessageID = event.ID(r.id)
	return t
}

// list returns the attempts, oldest first.
func (a *attempts) list() []adminapi.Attempt {
	out := make([]adminapi.Attempt, 0, len(a.ring))
	for i := range a.ring {
		out = append(out, a.ring[(a.next+i)%len(a.ring)].attempt())
	}
	return out
}

// lastFailed returns the last failed attempt for the next process; nil if the ring has none.
func (a *attempts) lastFailed() *adminapi.Attempt {
	for i := range a.ring {
		if r := &a.ring[(a.next+len(a.ring)-1-i)%len(a.ring)]; r.Reason != "" {
			t := r.attempt()
			t.CertificateExpires = time.Time{} // The certificate may be renewed by then.
			return &t
		}
	}
	return nil
}

// Attempts lists the last attempts at an endpoint, oldest first, or at all endpoints of the
// destination if endpoint is empty; nil if the endpoint is unknown. destination is
// "namespace/name".
func (e *Engine) Attempts(destination, endpoint string) (list []adminapi.Attempt) {
	e.mu.Lock()
	defer e.mu.Unlock()
	d := e.destinations[destination]
	if d == nil {
		return nil
	}
	for name, ep := range d.endpoints {
		if endpoint == "" || endpoint == name {
			list = append(list, ep.attempts.list()...)
		}
	}
	slices.SortStableFunc(list, func(a, b adminapi.Attempt) int { return a.Time.Compare(b.Time) })
	return list
}

// AttemptsOf lists the remembered attempts of a message, oldest first.
func (e *Engine) AttemptsOf(messageID string) (list []adminapi.Attempt) {
	e.mu.Lock()
	names := slices.Collect(maps.Keys(e.destinations))
	e.mu.Unlock()
	for _, name := range names {
		list = append(list, e.attemptsOf(name, messageID)...)
	}
	slices.SortStableFunc(list, func(a, b adminapi.Attempt) int { return a.Time.Compare(b.Time) })
	return list
}

// attemptsOf locks the engine for one destination only, because there can be thousands.
func (e *Engine) attemptsOf(destination, messageID string) (list []adminapi.Attempt) {
	e.mu.Lock()
	defer e.mu.Unlock()
	d := e.destinations[destination]
	if d == nil {
		return nil
	}
	for _, ep := range d.endpoints {
		for i := range ep.attempts.ring {
			if r := &ep.attempts.ring[i]; string(r.id) == messageID {
				list = append(list, r.attempt())
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

// Tail subscribes to attempts until ctx is done. An empty destination ("namespace/name") or endpoint
// matches all.
func (e *Engine) Tail(ctx context.Context, destination, endpoint string) *Tail {
	return e.subscribe(ctx, &Tail{destination: destination, endpoint: endpoint})
}

// TailWithBodies is Tail with the bodies of the requests.
func (e *Engine) TailWithBodies(ctx context.Context, destination, endpoint string) *Tail {
	return e.subscribe(ctx, &Tail{destination: destination, endpoint: endpoint, bodies: true})
}

func (e *Engine) subscribe(ctx context.Context, t *Tail) *Tail {
	t.out = make(chan adminapi.AttemptWithBody, tailBuffer)
	e.mu.Lock()
	e.tails[t] = struct{}{}
	e.mu.Unlock()
	context.AfterFunc(ctx, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.tails, t)
		close(t.out)
	})
	return t
}

// Attempts returns the attempts as they end. A slow reader misses attempts; the next one has their
// number.
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

// publish sends an attempt to all subscribers. The engine's lock is held.
func (e *Engine) publish(a *adminapi.Attempt, p *post) {
	for t := range e.tails {
		if t.destination != "" && t.destination != a.Destination || t.endpoint != "" && t.endpoint != a.Endpoint {
			continue
		}
		c := adminapi.AttemptWithBody{Attempt: *a}
		c.MessageID = event.ID(append([]byte(nil), a.MessageID...))
		if t.bodies {
			body := p.set.body(&p.message)
			if t.waiting.Load()+int64(len(body)) > maxTailBytes {
				t.dropped.Add(1)
				continue
			}
			c.Body = bytes.Clone(body)
		}
		select {
		case t.out <- c:
			t.waiting.Add(int64(len(c.Body)))
		default:
			t.dropped.Add(1)
		}
	}
}
