package delivery

import (
	"context"
	"encoding/json"
	"log/slog"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// fairShare returns the largest limit with which all of the sizes (ascending) fit into total:
// smaller sizes are not cut.
func fairShare(sizes []int64, total int64) int64 {
	for i, size := range sizes {
		level := max(total, 0) / int64(len(sizes)-i)
		if size > level {
			return level
		}
		total -= size
	}
	return math.MaxInt64
}

// trimmer limits the dead letters in the store.
type trimmer struct {
	store Store
	log   *slog.Logger
	// total is Options.DeadLetterBytes; nil without a limit.
	total func() int64
	// since is the start of the engine.
	since time.Time
	// kept are the bounds of the sizes of the dead letters of destinations since their first trim, also while they are parked.
	kept map[string]keptLetters
}

// keptLetters is the bound of the size of a destination's dead letters in this dispatcher, for a total.
type keptLetters struct{ bytes, total int64 }

// bound returns the bound for dead letters of a size: the share of the total, or what a larger share has left. So a smaller
// share deletes nothing, until newer dead letters replace the oldest; a smaller total does. Dead letters from before
// the first trim of the destination are permitted up to the total.
func (t *trimmer) bound(key string, size, total int64, share liveconfig.Share) keptLetters {
	before, known := t.kept[key]
	if !known {
		before = keptLetters{total, total}
	}
	bytes := share.Bytes(total)
	if total >= before.total {
		bytes = max(bytes, min(size, before.bytes))
	}
	return keptLetters{bytes, total}
}

// trim limits the size to a part of each total and, if expire is true, the age of the dead letters of each destination of limits. It calls
// trimmed for each from which it removed some.
func (t *trimmer) trim(ctx context.Context, limits map[string]liveconfig.DeadLetters, part liveconfig.Share, expire bool, now time.Time,
	trimmed func(key string)) {
	sizes := map[string]int64{}
	for key := range limits {
		if s := t.store.DestinationStats(key); s.DeadLetters > 0 {
			sizes[key] = s.DeadLetterBytes
		}
	}
	share := int64(math.MaxInt64)
	if t.total != nil {
		share = fairShare(slices.Sorted(maps.Values(sizes)), t.total())
	}
	for key, limit := range limits {
		t.kept[key] = t.bound(key, sizes[key], limit.MaxBytes, part)
	}
	for key, size := range sizes {
		limit, kept, log := limits[key], t.kept[key], t.log.With(queue.LaneID{Destination: key}.LogArgs()...)
		if size > share && share < kept.bytes {
			log.Warn("dead-letter quota reached; removing this destination's oldest dead letters", "bytes", size, "allowed", share)
		}
		var before time.Time
		if expire {
			before = now.Add(-max(time.Duration(limit.RetentionMS)*time.Millisecond, deadLetterGrace))
		}
		n, err := t.store.TrimDeadLetters(ctx, key, before, now.Add(-deadLetterGrace), min(kept.bytes, share))
		if n > 0 {
			trimmed(key)
		}
		if err != nil && ctx.Err() == nil {
			log.Error("removing old dead letters failed; retrying", "error", err)
		}
	}
}

// deadLetterLimits returns the limits of the destinations' dead letters. A parked destination keeps all of its dead
// letters: it gets no new ones.
func (r *registry) deadLetterLimits() map[string]liveconfig.DeadLetters {
	limits := map[string]liveconfig.DeadLetters{}
	for key, d := range r.destinations {
		if d.trim != nil && !d.parked {
			limits[key] = *d.trim
		}
	}
	return limits
}

// trimDeadLetters limits the dead letters of every destination. A removed destination is deleted with its last dead
// letter.
func (e *Engine) trimDeadLetters(ctx context.Context, expire bool) {
	now := e.o.Now()
	if now.Sub(e.trimmer.since) < deadLetterGrace {
		return
	}
	e.mu.Lock()
	limits, part := e.registry.deadLetterLimits(), e.shares.Equal()
	e.mu.Unlock()
	e.trimmer.trim(ctx, limits, part, expire, now, e.markChanged)
	if e.applying.Acquire(ctx, 1) != nil {
		return
	}
	defer e.applying.Release(1)
	var removed []string
	e.mu.Lock()
	for key, d := range e.registry.destinations {
		if _, limited := limits[key]; limited && !d.parked && d.set == nil && len(d.lanes) == 0 {
			removed = append(removed, key)
		}
	}
	e.mu.Unlock()
	for _, key := range removed {
		if e.o.Store.DestinationStats(key).DeadLetters > 0 {
			continue
		}
		if err := e.o.Store.ForgetDestination(key); err != nil {
			e.o.Logger.With(queue.LaneID{Destination: key}.LogArgs()...).Error("deleting a removed destination failed; retrying", "error", err)
			continue
		}
		e.storeBounds(key, nil)
		e.putMeta(suspensionPrefix+key, nil, "the record remains in the store")
		e.mu.Lock()
		e.registry.deleteDestination(e.registry.destinations[key])
		delete(e.trimmer.kept, key)
		e.mu.Unlock()
	}
}

// boundsPrefix is the prefix of the names under which the store keeps the bounds of the dead
// letters of removed destinations.
const boundsPrefix = "deadletters/"

// storeBounds stores the bounds of a deleted destination's dead letters, or deletes them (nil).
func (e *Engine) storeBounds(key string, bounds *liveconfig.DeadLetters) {
	var value []byte
	if bounds != nil {
		value, _ = json.Marshal(bounds) // No field can fail to marshal.
	}
	e.putMeta(boundsPrefix+key, value, "after a restart the default retention applies to the dead letters of this deleted destination")
}
