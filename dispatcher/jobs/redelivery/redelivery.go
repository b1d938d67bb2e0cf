// Package redelivery sends selected dead letters of a destination again, at a bounded
// rate. Run and Purge process them in one call; Service runs the Redelivery objects.
package redelivery

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// pageSize is the number of dead letters in memory at once. At a lower rate it is the
// number of one second.
const pageSize = 100

// matches reports whether a selector selects a dead letter.
func matches(s adminapi.DeadLetterSelector, d queue.DeadLetter) bool {
	return in(s.Keys, d.Key) && in(s.Reasons, d.Failure.Reason) && in(s.StatusCodes, d.Failure.StatusCode) && in(s.Types, d.Type) &&
		(len(s.Events) == 0 || d.Event != "" && liveconfig.MatchEvent(s.Events, d.Event)) &&
		(s.Since.IsZero() || !d.Failure.Time.Before(s.Since)) && (s.Until.IsZero() || d.Failure.Time.Before(s.Until))
}

// in reports whether a list selects a value; an empty one selects all.
func in[T comparable](list []T, v T) bool { return len(list) == 0 || slices.Contains(list, v) }

// Options configure Run and Purge.
type Options struct {
	// Rate is in dead letters a second; 0 is adminapi.DefaultRate.
	Rate float64
	// DryRun only counts the selected dead letters.
	DryRun bool
	// OnProgress, when set, is called after each page.
	OnProgress func(adminapi.DeadLetterProgress)
	// from is the key behind which the scan starts. onPage, when set, is called after
	// each page with the key of the last dead letter that was scanned; false ends the
	// scan, as does an error.
	from   string
	onPage func(p adminapi.DeadLetterProgress, after string) (bool, error)
	// limiter, when set, replaces Rate.
	limiter *rate.Limiter
	// Takes reports whether a lane accepts messages by the current config; nil for all lanes
	// of the store.
	Takes func(queue.LaneID) bool
	// Now is the clock; default time.Now.
	Now func() time.Time
}

// Store is the part of queue.Store that Run and Purge read and remove dead letters from. The
// messages of a redelivery are appended through admission.Gate.
type Store interface {
	queue.DeadLetters
	Lanes() []queue.LaneID
	LaneStats(queue.LaneID) queue.LaneStats
}

// Run appends the selected dead letters of a destination ("namespace/name") through gate to
// its lanes, as new messages with the same id and body, and removes the dead letters. The present filter
// decides about those whose filter failed (queue.ReasonFilterFailed), and about no others.
// It ignores dead letters that are added while it runs, so it ends. It keeps dead letters
// of a Source or an endpoint that the destination no longer has, and dead letters without
// a body (queue.ReasonDamaged): they count as matched, not as redelivered. If the
// destination's success policy has changed, the messages are appended to the lanes of the
// new policy. After a crash some may be delivered twice; none is lost. With an error, Run
// returns the progress up to it.
func Run(ctx context.Context, gate *admission.Gate, store Store, destination string, s adminapi.DeadLetterSelector,
	o Options) (adminapi.DeadLetterProgress, error) {
	limiter := o.limiter
	if limiter == nil {
		limiter = newLimiter(o.Rate)
	}
	size := limiter.Burst()
	return each(ctx, store, destination, s, o, size, func(page []queue.DeadLetter) (int, error) {
		lanes := o.lanes(store, destination)
		page = slices.DeleteFunc(page, func(d queue.DeadLetter) bool {
			return d.Failure.Reason == queue.ReasonDamaged || receiver(d.Lane, lanes) == ""
		})
		if len(page) == 0 {
			return 0, nil
		}
		if err := limiter.WaitN(ctx, len(page)); err != nil {
			return 0, err
		}
		routing := gate.Begin()
		defer routing.End()
		messages := make([]queue.Message, len(page))
		for i, d := range page {
			messages[i] = queue.Message{Source: d.Lane.Source, ID: d.ID, Type: d.Type, Event: d.Event, AcceptedAt: now(o),
				Only: receiver(d.Lane, lanes), LongNumbers: !event.IsFixedPoint(d.Body), Body: d.Body}
			if d.Failure.Reason == queue.ReasonFilterFailed {
				messages[i].Skip = routing.Refilter(d.Lane.Source, destination,
					&event.Call{Type: event.Type(d.Type), Event: d.Event, LongNumbers: messages[i].LongNumbers, Body: d.Body})
			}
		}
		if _, err := routing.Append(ctx, messages); err != nil {
			return 0, fmt.Errorf("redeliver: %w", err)
		}
		// If a lane ended before the append, no lane has the message, so its dead letter is kept.
		lanes = o.lanes(store, destination)
		var keys []string
		for i, d := range page {
			if receiver(d.Lane, lanes) == messages[i].Only {
				keys = append(keys, d.Key)
			}
		}
		// The messages are pending now, even if the caller no longer waits.
		return len(keys), store.DeleteDeadLetters(context.WithoutCancel(ctx), destination, keys...)
	})
}

// newLimiter returns a limiter for a rate; its burst is the size of a page.
func newLimiter(perSecond float64) *rate.Limiter {
	if perSecond <= 0 {
		perSecond = adminapi.DefaultRate
	}
	return rate.NewLimiter(rate.Limit(perSecond), int(min(max(1, perSecond), pageSize)))
}

// lanes lists the lanes of a destination that accept messages.
func (o Options) lanes(store Store, destination string) []queue.LaneID {
	return slices.DeleteFunc(store.Lanes(), func(l queue.LaneID) bool {
		return l.Destination != destination || store.LaneStats(l).Ended || o.Takes != nil && !o.Takes(l)
	})
}

// receiver returns the receiver of a dead letter, given the lanes of its destination: its
// endpoint, or the destination. It is empty if no lane would get the message.
func receiver(from queue.LaneID, lanes []queue.LaneID) string {
	for _, to := range lanes {
		switch {
		case to.Source != from.Source:
		case to.Endpoint == from.Endpoint && to.Endpoint != "":
			return to.Destination + "/" + to.Endpoint
		}
	}
	for _, to := range lanes {
		if to.Source == from.Source && (to.Endpoint == "" || to.Any || from.Endpoint == "") {
			return to.Destination
		}
	}
	return ""
}

// Purge removes the selected dead letters permanently.
func Purge(ctx context.Context, store Store, destination string, s adminapi.DeadLetterSelector,
	o Options) (adminapi.DeadLetterProgress, error) {
	return each(ctx, store, destination, s, o, pageSize, func(page []queue.DeadLetter) (int, error) {
		keys := make([]string, len(page))
		for i, d := range page {
			keys[i] = d.Key
		}
		return len(page), store.DeleteDeadLetters(ctx, destination, keys...)
	})
}

// each calls act with pages of selected dead letters, up to a size. act returns the number
// that it processed, and may change the page.
func each(ctx context.Context, store Store, destination string, s adminapi.DeadLetterSelector, o Options, size int,
	act func([]queue.DeadLetter) (int, error)) (p adminapi.DeadLetterProgress, err error) {
	started := now(o)
	p.AsOf = started.Add(1) // Selector.Until is exclusive.
	for after, more := o.from, true; more; {
		var page []queue.DeadLetter
		more = false
		err := store.DeadLetters(ctx, destination, after, func(d queue.DeadLetter) bool {
			after = d.Key
			if d.Failure.Time.After(started) {
				return true
			}
			if matches(s, d) {
				d.Body = slices.Clone(d.Body)
				page = append(page, d)
			}
			more = len(page) == size
			return !more
		})
		if err != nil {
			return p, err
		}
		if len(page) == 0 {
			continue
		}
		matched, bytes := len(page), int64(0)
		for _, d := range page {
			bytes += int64(len(d.Body))
		}
		if !o.DryRun {
			n, err := act(page)
			p.Redelivered += int64(n)
			if err != nil {
				return p, err
			}
		}
		p.Matched += int64(matched)
		p.Bytes += bytes
		if o.OnProgress != nil {
			o.OnProgress(p)
		}
		if o.onPage != nil {
			if more, err := o.onPage(p, after); err != nil || !more {
				return p, err
			}
		}
	}
	if o.DryRun {
		return p, nil
	}
	// Another request may have removed dead letters that the scan did not find, and its removals may fail.
	return p, store.DeleteDeadLetters(ctx, destination)
}

func now(o Options) time.Time {
	if o.Now != nil {
		return o.Now()
	}
	return time.Now()
}
