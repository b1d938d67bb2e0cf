package delivery

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

const (
	// suspensionPrefix is the prefix of the names under which the store keeps the suspensions of destinations.
	suspensionPrefix = "suspended/"
	// maxSuspensions bounds a record.
	maxSuspensions = 32
	// suspensionMargin is longer than the time between the acceptance of a message and its storage.
	suspensionMargin = time.Minute
)

// suspension is a time during which a destination was suspended. From and To are times of the wall clock; From also has the
// time of the monotonic clock if this process observed it.
type suspension struct {
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
	// Open is true while the destination is suspended. To is then the earliest end.
	Open bool `json:"open,omitempty"`
}

// suspensions are those that extend the windows of a destination's messages, in order and disjoint. The slice is immutable.
type suspensions []suspension

// active reports whether the destination is suspended.
func (s suspensions) active() bool { return len(s) > 0 && s[len(s)-1].Open }

// until returns the suspension as it is at a time: an open one ends then. If the clock was set back since its beginning,
// it ends later, so that it is as long as the monotonic clock shows.
func (s suspension) until(now time.Time) suspension {
	if end := s.From.Round(0).Add(max(now.Sub(s.From), now.Round(0).Sub(s.From))); s.Open && end.After(s.To) {
		s.To = end
	}
	return s
}

// windowStart returns the start of the retry window of a message: its acceptance, later by the suspensions after it. It never
// decreases with accepted.
func (s suspensions) windowStart(accepted, now time.Time) time.Time {
	start := accepted
	for _, one := range s {
		if one = one.until(now); accepted.Before(one.To) {
			start = start.Add(one.To.Sub(later(accepted, one.From.Round(0))))
		}
	}
	return start
}

// acceptedBy returns the latest acceptance of a message whose window starts at a time or before.
func (s suspensions) acceptedBy(start, now time.Time) time.Time {
	for _, one := range slices.Backward(s) {
		if one = one.until(now); !start.Before(one.To) {
			break
		}
		start = start.Add(one.From.Round(0).Sub(one.To))
	}
	return start
}

// change returns the suspensions after a change. The ones that ended before all pending messages were accepted, of which
// oldest is the first (zero for none), are removed.
func (s suspensions) change(suspended bool, oldest, now time.Time) suspensions {
	if oldest.IsZero() {
		oldest = now
	}
	next, last := slices.Clone(s), len(s)-1
	switch {
	case !suspended:
		next[last] = next[last].until(now)
		next[last].Open = false
	case last >= 0 && now.Before(next[last].To): // The clock was set back.
		next[last].Open = true
	default:
		next = append(next, suspension{From: now, To: now.Round(0), Open: true})
	}
	next = slices.DeleteFunc(next, func(one suspension) bool {
		return !one.Open && one.To.Before(oldest.Add(-suspensionMargin))
	})
	return next.bounded()
}

// bounded joins the two suspensions with the shortest time in between if there are too many, which only lengthens windows.
func (s suspensions) bounded() suspensions {
	if len(s) <= maxSuspensions {
		return s
	}
	at := 0
	for i := range len(s) - 1 {
		if s[i+1].From.Sub(s[i].To) < s[at+1].From.Sub(s[at].To) {
			at = i
		}
	}
	s[at+1].From = s[at].From
	return slices.Delete(s, at, at+1)
}

// suspend finds the suspensions that begin or end with changes. It stores those that begin, durably, before they are in effect.
func (e *Engine) suspend(changed []*change) error {
	var group errgroup.Group
	group.SetLimit(openAtOnce)
	for _, p := range changed {
		suspended := p.config.State == liveconfig.Suspended
		e.mu.Lock()
		d := e.registry.destination(p.key())
		var lanes []queue.LaneID
		for _, l := range d.lanes {
			lanes = append(lanes, l.id)
		}
		p.suspensions = d.suspensions
		e.mu.Unlock()
		if p.suspensions.active() == suspended {
			continue
		}
		p.oldest, p.resumed = oldestPending(e.o.Store, lanes), !suspended
		if p.resumed {
			continue // It ends when the change is in effect.
		}
		p.suspensions = p.suspensions.change(true, p.oldest, e.o.Now())
		group.Go(func() error {
			if err := e.o.Store.PutMetaDurable(suspensionPrefix+p.key(), p.suspensions.encode()); err != nil {
				return fmt.Errorf("store the suspension of destination %s: %w", p.key(), err)
			}
			return nil
		})
	}
	return group.Wait()
}

// storeResumed stores the suspensions that have ended with changes. Until then, the record lets them last until the next start.
func (e *Engine) storeResumed(changed []*change) {
	for _, p := range changed {
		if p.resumed {
			e.putMeta(suspensionPrefix+p.key(), p.suspensions.encode(), "after a restart, the suspension lasts until the config is in effect")
		}
	}
}

// later returns the later of two times.
func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// encode returns the record of suspensions; nil for none.
func (s suspensions) encode() []byte {
	if len(s) == 0 {
		return nil
	}
	value, _ := json.Marshal(s) // No field can fail to marshal.
	return value
}

// oldestPending returns the acceptance of the oldest pending message of lanes; zero if none is pending, and a time before all
// suspensions if it cannot be read.
func oldestPending(store queue.Stats, lanes []queue.LaneID) (oldest time.Time) {
	for _, id := range lanes {
		s := store.LaneStats(id)
		if s.Stale || s.Pending > 0 && s.OldestPending.IsZero() {
			return time.Unix(0, 0)
		}
		oldest = earlier(oldest, s.OldestPending)
	}
	return oldest
}
