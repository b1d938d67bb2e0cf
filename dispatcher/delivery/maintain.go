package delivery

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

const (
	// maintenance runs at least this often, and at most every minMaintenance.
	maintenanceInterval = time.Minute
	minMaintenance      = time.Second
	// deadLetterGrace is how long every dead letter is kept at least, and all of them after a
	// start, even if the destination keeps none, so that users can look up a recent message.
	deadLetterGrace = time.Minute
)

// maintain does the work that no request triggers: it expires old messages, drops lanes and dead
// letters, and ends idle workers.
func (e *Engine) maintain(ctx context.Context) {
	for ctx.Err() == nil {
		wait := e.maintainOnce(ctx)
		signal(nil).wait(ctx, minMaintenance)
		e.early.wait(ctx, wait-minMaintenance)
	}
}

// signal ends a wait, or the next one.
type signal chan struct{}

func (s signal) set() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// wait waits for the signal, but at most a time.
func (s signal) wait(ctx context.Context, most time.Duration) {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-s:
	}
}

// maintainOnce returns the time until the next work is due.
func (e *Engine) maintainOnce(ctx context.Context) time.Duration {
	e.mu.Lock()
	e.workers.tidy()
	e.mu.Unlock()
	e.storeHistory(historyInterval)
	e.endEditedWaits(ctx)
	wait := pausedInterval
	if e.maySend() {
		expire := e.settler.mayExpire()
		if expire {
			wait = min(e.buryExpired(ctx), e.dropLanes(ctx))
		}
		e.trimDeadLetters(ctx, expire) // The bounds of their sizes do not depend on the clock.
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return min(wait, e.registry.logStates(e.o.Logger, e.o.Now()))
}

// endEditedWaits ends the waits that receivers requested before their destinations were edited.
func (e *Engine) endEditedWaits(ctx context.Context) {
	var edited []*lane
	e.mu.Lock()
	for _, l := range e.registry.lanes {
		if !l.waitsEnded.IsZero() && l.opened {
			edited = append(edited, l)
		}
	}
	e.mu.Unlock()
	for _, l := range edited {
		e.mu.Lock()
		until := l.waitsEnded
		l.waits, l.waitsEnded = false, time.Time{}
		e.mu.Unlock()
		for e.endWaits(l, until) && ctx.Err() == nil {
		}
	}
}

// endWaits makes the store end waits of a lane until a time, and reports whether the lane has further ones until then.
// The lock is not held.
func (e *Engine) endWaits(l *lane, until time.Time) (more bool) {
	ended, left, err := e.o.Store.EndWaits(l.id, until)
	if err != nil && !errors.Is(err, queue.ErrClosed) && !errors.Is(err, queue.ErrNoLane) {
		e.o.Logger.With(l.id.LogArgs()...).Error("ending the requested waits of a lane failed; its messages are retried later", "error", err)
	}
	if left {
		e.mu.Lock()
		l.waits = true
		e.mu.Unlock()
	}
	if ended > 0 {
		e.markChanged(l.id.Destination)
	}
	return err == nil && ended > 0
}

// logStates logs the endpoint states that were suppressed. It returns how long to wait with the others.
func (r *registry) logStates(log *slog.Logger, now time.Time) time.Duration {
	next := maintenanceInterval
	for _, d := range r.destinations {
		for _, ep := range d.endpoints {
			if wait := ep.logSuppressed(log, now); wait > 0 {
				next = min(next, wait)
			}
		}
	}
	return next
}

// buryExpired applies the retry window to pending messages, also in parked lanes, but not in lanes of suspended destinations. Messages in
// flight are decided when their request ends.
func (e *Engine) buryExpired(ctx context.Context) time.Duration {
	type candidate struct {
		lane *lane
		set  *destinationConfig
	}
	var candidates []candidate
	e.mu.Lock()
	for _, l := range e.registry.lanes {
		if l.set != nil && l.dropAt.IsZero() && !l.set.suspensions.active() {
			candidates = append(candidates, candidate{l, l.set})
		}
	}
	e.mu.Unlock()
	next := maintenanceInterval
	for _, c := range candidates {
		now, window := e.o.Now(), c.set.policy.Window
		// A message that is accepted right after this pass is due one window later.
		due := window
		if oldest := e.o.Store.LaneStats(c.lane.id).OldestPending; !oldest.IsZero() {
			due = e.settler.windowEnd(c.set, oldest, now).Sub(now)
		}
		if due <= 0 {
			e.mu.Lock()
			if c.lane.set != c.set {
				e.mu.Unlock()
				continue // The config changed, which wakes the maintenance again.
			}
			f := c.lane.expiry(now)
			e.mu.Unlock()
			n, err := e.o.Store.BuryExpired(ctx, c.lane.id, c.set.suspensions.acceptedBy(now.Add(-window), now).Add(time.Millisecond), f)
			if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, queue.ErrClosed) && !errors.Is(err, queue.ErrNoLane) {
				e.o.Logger.With(c.lane.id.LogArgs()...).Error("expiring messages failed; retrying", "error", err)
			}
			if n > 0 {
				e.mu.Lock()
				c.lane.destination.changed.Numbers()
				c.lane.destination.countDead(f.Reason, int64(n))
				e.mu.Unlock()
				e.o.Logger.With(c.lane.id.LogArgs()...).Warn("retry window over; messages are now dead letters", "count", n)
			}
			due = minMaintenance
		}
		next = min(next, due)
	}
	return next
}

// dropLanes drops orphans after their grace period and lanes that have drained.
func (e *Engine) dropLanes(ctx context.Context) time.Duration {
	next := maintenanceInterval
	if e.applying.Acquire(ctx, 1) != nil {
		return next
	}
	defer e.applying.Release(1)
	e.mu.Lock()
	namespaces := slices.Collect(maps.Keys(e.registry.perNamespace))
	e.mu.Unlock()
	e.endLanes(namespaces)
	now := e.o.Now()
	var drop, draining []*lane
	e.mu.Lock()
	for _, l := range e.registry.lanes {
		switch {
		case !l.dropAt.IsZero() && now.Before(l.dropAt):
			next = min(next, l.dropAt.Sub(now))
		case !l.dropAt.IsZero() && l.leased == 0:
			drop = append(drop, l)
		case l.draining && l.leased == 0:
			draining = append(draining, l)
		}
	}
	e.mu.Unlock()
	for _, l := range draining {
		if s := e.o.Store.LaneStats(l.id); s.Ended && s.Pending == 0 && !s.Stale {
			drop = append(drop, l)
		}
	}
	for _, l := range drop {
		if err := e.buryRemoved(ctx, l, now); errors.Is(err, context.DeadlineExceeded) {
			next = minMaintenance
			continue
		} else if err != nil {
			e.o.Logger.With(l.id.LogArgs()...).Error("making dead letters of a removed endpoint's messages failed; retrying", "error", err)
			continue
		}
		if err := e.o.Store.DropLane(ctx, l.id); err != nil && !errors.Is(err, queue.ErrNoLane) {
			e.o.Logger.With(l.id.LogArgs()...).Error("dropping a lane failed; retrying", "error", err)
			continue
		}
		e.o.Logger.With(l.id.LogArgs()...).Info("lane dropped")
		e.mu.Lock()
		e.registry.forget(l)
		delete(e.orphans.lanes, l)
		e.mu.Unlock()
		// The ledger of the Source counts the messages as discarded now.
		namespace, source, _ := strings.Cut(l.id.Source, "/")
		e.o.Changes.Object(changes.Sources, namespace, source).Numbers()
	}
	if len(drop) > 0 && e.applied != nil {
		e.storeOrphans(e.applied)
	}
	return next
}

// ReasonEndpointRemoved is the reason of dead letters whose endpoint was removed or renamed while the
// destination still receives the calls of their Source.
const ReasonEndpointRemoved = "EndpointRemoved"

// buryRemoved makes dead letters of the messages that were pending in the lane of a removed endpoint at its removal.
// Later messages were for the other endpoints. If a Source was disconnected or a destination deleted, dead letters
// would have no reader, so its messages are discarded with the lane.
func (e *Engine) buryRemoved(ctx context.Context, l *lane, now time.Time) error {
	e.mu.Lock()
	d := l.destination
	removed := l.id.Endpoint != "" && !l.dropAt.IsZero() && d.set != nil && slices.ContainsFunc(d.lanes, func(o *lane) bool {
		return o.id.Source == l.id.Source && o.dropAt.IsZero()
	})
	removedAt := l.removedAt
	var rules []byte
	if removed {
		rules = d.set.redaction.text
	}
	e.mu.Unlock()
	if !removed {
		return nil
	}
	// Configs wait for this pass; the next pass continues.
	ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	n, err := e.o.Store.BuryExpired(ctx, l.id, removedAt, queue.Failure{
		Time: now, Reason: ReasonEndpointRemoved, Message: "the endpoint was removed from the destination while the message was pending",
		Redact: rules,
	})
	if n > 0 {
		e.mu.Lock()
		d.changed.Numbers()
		d.countDead(ReasonEndpointRemoved, int64(n))
		e.mu.Unlock()
		e.o.Logger.With(l.id.LogArgs()...).Warn("endpoint removed; its messages are now dead letters", "count", n)
	}
	if errors.Is(err, queue.ErrNoLane) {
		return nil
	}
	return err
}
