package podreport

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// Changes is what changed in a pod since its last reports.
type Changes struct {
	// Report is the pod's report; nil if nothing changed.
	Report *adminapi.Report
	// Slots has the reports of the slots that a pod of a replicated log owns, each nil if nothing changed.
	Slots map[int]*adminapi.Report
}

// Fetch requests what changed since the last state of the pod and of its slots, each of which may be
// nil. If the report of a slot fails, the Changes lack it and the reports of later slots.
func Fetch(ctx context.Context, c *adminapi.Client, last *Index, slots map[int]*Index) (changes Changes, err error) {
	if changes.Report, err = since(ctx, c, last); err != nil {
		return changes, err
	}
	var log *adminapi.ReplicationReport
	if changes.Report != nil {
		log = changes.Report.Replication
	} else if last != nil {
		log = last.Replication
	}
	if !log.HasSlots() {
		return changes, nil
	}
	changes.Slots = map[int]*adminapi.Report{}
	for _, slot := range log.Slots {
		report, err := since(ctx, c.Slot(slot), slots[slot])
		if status, ok := errors.AsType[*adminapi.StatusError](err); ok && status.StatusCode == http.StatusNotFound {
			continue // The pod has handed the slot over meanwhile.
		}
		if err != nil {
			return changes, fmt.Errorf("slot %d: %w", slot, err)
		}
		if report != nil || slots[slot] != nil {
			changes.Slots[slot] = report
		}
	}
	return changes, nil
}

// since returns what changed since the last state, or nil if nothing did.
func since(ctx context.Context, c *adminapi.Client, last *Index) (*adminapi.Report, error) {
	cursor := ""
	if last != nil {
		cursor = last.Cursor
	}
	report, err := c.Report(ctx, cursor)
	if errors.Is(err, adminapi.ErrNotModified) {
		return nil, nil
	}
	return report, err
}
