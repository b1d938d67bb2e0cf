package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
)

const (
	// countersPrefix is the prefix of the names under which the store keeps the counters of Sources.
	countersPrefix = "calls/"
	// countersInterval is how often the counters that changed are stored. After a crash, the changes of
	// this time are missing.
	countersInterval = 10 * time.Second
)

// storedCounters are the counters of a Source that the store does not count. They survive restarts,
// so that the sums in a status do not decrease.
type storedCounters struct {
	Rejected      int64     `json:"rejected,omitempty"`
	Duplicates    int64     `json:"duplicates,omitempty"`
	LastAccepted  time.Time `json:"lastAccepted,omitzero"`
	LastRejected  time.Time `json:"lastRejected,omitzero"`
	LastRejection string    `json:"lastRejection,omitempty"`

	Defects adminapi.CallDefects `json:"defects,omitzero"`
}

// RecoverCounters reads the counters of an earlier run. It is called before the first config. The
// Source keeps them until RunCounters stores newer ones.
func (g *Gate) RecoverCounters(meta MetaStore) error {
	all, err := meta.AllMeta()
	if err != nil {
		return fmt.Errorf("read the counters of the Sources: %w", err)
	}
	for name, value := range all {
		key, ok := strings.CutPrefix(name, countersPrefix)
		if !ok {
			continue
		}
		var c storedCounters
		if err := json.Unmarshal(value, &c); err != nil {
			g.Logger.Warn("the counters of a Source are malformed; they begin at 0", "source", key, "error", err)
			continue
		}
		g.counters.Store(key, c)
	}
	return nil
}

// countersOf returns the counters of a Source as they are stored.
func (g *Gate) countersOf(key string) storedCounters {
	c := g.Counters(key)
	return storedCounters{c.Rejected, c.Duplicates, c.LastAccepted, c.LastRejected, c.LastRejection, c.Defects}
}

// restore sets the counters of a new Source.
func (s *Source) restore(c storedCounters) {
	s.rejectedCalls.Store(c.Rejected)
	s.duplicateCalls.Store(c.Duplicates)
	if !c.LastAccepted.IsZero() {
		s.lastAccepted.Store(c.LastAccepted.UnixNano())
	}
	if !c.LastRejected.IsZero() {
		s.lastRejected.Store(c.LastRejected.UnixNano())
	}
	for i, n := range c.Defects.ByName() {
		s.defects[i].Store(*n)
	}
	if c.LastRejection != "" {
		s.lastRejection.Store(&c.LastRejection)
	}
}

// RunCounters stores the counters that changed, every countersInterval and when ctx is done.
func (g *Gate) RunCounters(ctx context.Context, meta MetaStore) error {
	stored := map[string]storedCounters{}
	g.counters.Range(func(key, c any) bool {
		stored[key.(string)] = c.(storedCounters)
		return true
	})
	tick := time.NewTicker(countersInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			g.storeCounters(meta, stored)
			return nil
		}
		g.storeCounters(meta, stored)
	}
}

// storeCounters stores the counters that differ from the stored ones.
func (g *Gate) storeCounters(meta MetaStore, stored map[string]storedCounters) {
	g.sources.Range(func(k, _ any) bool {
		key := k.(string)
		now := g.countersOf(key)
		before := stored[key]
		// The store counts accepted calls itself: the time alone is not worth a write.
		if now.Rejected == before.Rejected && now.Duplicates == before.Duplicates && now.Defects == before.Defects &&
			now.LastAccepted.Sub(before.LastAccepted) < time.Minute {
			return true
		}
		value, _ := json.Marshal(now) // Numbers, times and texts always marshal.
		if err := meta.PutMeta(countersPrefix+key, value); err != nil {
			g.Logger.Warn("storing the counters of a Source failed; they are stored again later", "source", key, "error", err)
			return true
		}
		stored[key] = now
		return true
	})
}
