package delivery

import (
	"encoding/json"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// orphanPrefix is the prefix of the names under which the store keeps the records of orphans, so that a restart
// does not postpone their discards.
const orphanPrefix = "orphan/"

// orphanRecord is what the store keeps of an orphan.
type orphanRecord struct {
	// RemovedAt is when the lane was first missing in the config.
	RemovedAt time.Time `json:"removedAt"`
	// Pending are the messages that were pending then. Later ones were accepted after the removal.
	Pending int64 `json:"pending"`
}

// discardUnit returns the lane, or its group, whose pending messages the ledger counts.
func discardUnit(id queue.LaneID) queue.LaneID {
	if id.Any {
		return id.Group()
	}
	return id
}

// orphanName returns the name of a lane's record.
func orphanName(id queue.LaneID) string {
	return orphanPrefix + strings.Join([]string{id.Source, id.Destination, id.Endpoint, strconv.FormatBool(id.Any)}, " ")
}

// orphans are the lanes with a dropAt, and their records.
type orphans struct {
	// grace is Options.OrphanGrace.
	grace time.Duration
	log   *slog.Logger
	// lanes is guarded by the engine's lock.
	lanes map[*lane]bool
	// stored are the records that the store has, by name. It is guarded by Engine.applying.
	stored map[string]orphanRecord
}

// add sets the time at which a lane without a place in the config is dropped. Only Apply calls it.
func (o *orphans) add(l *lane, v *liveconfig.View, now time.Time) {
	o.lanes[l] = true
	_, source := split(l.id.Source)
	lostAt := v.LostSince(l.id.Destination, source, l.id.Endpoint)
	if lost := !lostAt.IsZero(); l.dropAt.IsZero() || l.lost && !lost {
		l.lost, l.removedAt = lost, now
		if r, stored := o.stored[orphanName(l.id)]; stored && !lost && l.dropAt.IsZero() {
			l.removedAt, l.pendingAtRemoval = r.RemovedAt, r.Pending
		}
		l.dropAt = l.removedAt.Add(o.grace)
		if lost {
			l.dropAt = now.Add(o.grace)
			l.removedAt = lostAt
			if parked := lostAt.Add(liveconfig.ParkingTime); parked.After(l.dropAt) {
				l.dropAt = parked
			}
		}
		o.log.With(l.id.LogArgs()...).Warn("destination, endpoint or Source removed; its pending messages are discarded after the grace period", "dropAt", l.dropAt, "certain", !lost)
	}
}

// differing returns the lanes whose records the store does not have, and the names of the records of lanes that are
// dropped or in the config of the view again.
func (o *orphans) differing(lanes map[queue.LaneID]*lane, v *liveconfig.View) (added []*lane, removed []string) {
	kept := map[string]bool{}
	for _, l := range lanes {
		name := orphanName(l.id)
		_, stored := o.stored[name]
		switch {
		case l.dropAt.IsZero():
			kept[name] = parkedLane(v, l.id)
		case !l.lost: // The time of a lost connection is in the history of the live config.
			if kept[name] = true; !stored {
				added = append(added, l)
			}
		}
	}
	for name := range o.stored {
		if !kept[name] {
			removed = append(removed, name)
		}
	}
	return added, removed
}

// storeOrphans brings the stored records of the orphans up to date. Only Apply and the maintenance call it, which
// exclude each other.
func (e *Engine) storeOrphans(v *liveconfig.View) {
	const consequence = "after a restart the grace period of a removed destination begins again"
	e.mu.Lock()
	added, removed := e.orphans.differing(e.registry.lanes, v)
	e.mu.Unlock()
	for _, l := range added {
		name, record := orphanName(l.id), orphanRecord{Pending: e.o.Store.LaneStats(discardUnit(l.id)).Pending}
		e.mu.Lock()
		record.RemovedAt, l.pendingAtRemoval = l.removedAt, record.Pending
		e.mu.Unlock()
		value, _ := json.Marshal(record) // No field can fail to marshal.
		if e.putMeta(name, value, consequence) {
			e.orphans.stored[name] = record
		}
	}
	for _, name := range removed {
		if e.putMeta(name, nil, consequence) {
			delete(e.orphans.stored, name)
		}
	}
}
