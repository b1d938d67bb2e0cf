package delivery

import (
	"encoding/json"
	"errors"
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

// storeOrphans stores the records of new orphans, and deletes the records of lanes that are dropped or in the
// config of the view again. Only Apply and the maintenance call it, which exclude each other.
func (e *Engine) storeOrphans(v *liveconfig.View) {
	var added []*lane
	var removed []string
	e.mu.Lock()
	kept := map[string]bool{}
	for _, l := range e.lanes {
		name := orphanName(l.id)
		_, stored := e.orphanRecords[name]
		switch {
		case l.dropAt.IsZero():
			kept[name] = parkedLane(v, l.id)
		case !l.lost: // The time of a lost connection is in the history of the live config.
			if kept[name] = true; !stored {
				added = append(added, l)
			}
		}
	}
	for name := range e.orphanRecords {
		if !kept[name] {
			removed = append(removed, name)
		}
	}
	e.mu.Unlock()
	for _, l := range added {
		name, record := orphanName(l.id), orphanRecord{Pending: e.o.Store.LaneStats(discardUnit(l.id)).Pending}
		e.mu.Lock()
		record.RemovedAt, l.pendingAtRemoval = l.removedAt, record.Pending
		e.mu.Unlock()
		value, _ := json.Marshal(record) // No field can fail to marshal.
		if e.putOrphan(name, value) {
			e.orphanRecords[name] = record
		}
	}
	for _, name := range removed {
		if e.putOrphan(name, nil) {
			delete(e.orphanRecords, name)
		}
	}
}

func (e *Engine) putOrphan(name string, value []byte) bool {
	err := e.o.Store.PutMeta(name, value)
	if err != nil && !errors.Is(err, queue.ErrClosed) {
		e.log.Warn("storing the time of a removal failed; after a restart the grace period begins again", "record", name, "error", err)
	}
	return err == nil
}
