package adminapi

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// ReplicationState is the part of a process in a slot of a replicated log, on GET /slots.
type ReplicationState struct {
	// Pod is the name of the process.
	Pod string `json:"pod"`
	// Heard is true for the state of another process than the one that was asked, by its heartbeats: only Slot, Owner,
	// Ready, Reason and MaySend are known.
	Heard bool `json:"heard,omitempty"`
	// Slot is the number of the slot.
	Slot int `json:"slot"`
	// Owner is true for the process that accepts and delivers the messages.
	Owner bool `json:"owner"`
	// Ready is true if the process may get calls, and Reason is why it does not.
	Ready  bool   `json:"ready"`
	Reason string `json:"reason,omitempty"`
	// Clock is why the clock of the process is wrong, with the fix; empty if it is right.
	Clock string `json:"clock,omitempty"`
	// Sequence is the number of the last record that the process has.
	Sequence uint64 `json:"sequence"`
	// OwnerName is the owner that a standby knows, with its address; empty for none.
	OwnerName string `json:"ownerName,omitempty"`

	// Of an owner:

	// Epoch is the number of its claim.
	Epoch uint64 `json:"epoch,omitempty"`
	// MaySend is false while the log does not answer: the owner then does not deliver.
	MaySend bool `json:"maySend,omitempty"`
	// Bytes in the stream, and its maximum; 0 for none.
	Bytes    int64 `json:"bytes,omitempty"`
	MaxBytes int64 `json:"maxBytes,omitempty"`
	// Snapshot is the time of the last snapshot; zero before the first one.
	Snapshot time.Time `json:"snapshot,omitzero"`
	// Sync is "Always" if a server has confirmed that it syncs each record to its disk, "Periodic" if it
	// does not, and "Unknown" without an answer of the monitoring port; empty before the first check.
	Sync string `json:"sync,omitempty"`
	// Replicas is the number of servers that should have a copy of each record, and CurrentReplicas the
	// number of those that have all records; 0 before the first check.
	Replicas        int `json:"replicas,omitempty"`
	CurrentReplicas int `json:"currentReplicas,omitempty"`
	// Weak are the settings of the servers with which a loss of servers can lose calls, and the namespaces
	// that the directory assigns to another slot than the one with their messages, with their fixes.
	Weak []string `json:"weak,omitempty"`
	// Disabled are the servers that have disabled JetStream, with the fix.
	Disabled []string `json:"disabled,omitempty"`
	// Gaps are the records and objects that the log, or the copy of one of its servers, lacks.
	Gaps []string `json:"gaps,omitempty"`
}

// Slots returns the parts of a process in the log, sorted by slot, or the part of a slot's owner with Slot; nil without
// a replicated log.
func (c *Client) Slots(ctx context.Context) ([]ReplicationState, error) {
	return orNone(read[[]ReplicationState](ctx, c, http.MethodGet, "/slots"))
}

// AllSlots is Slots with the parts of the other processes, as the process knows them.
func (c *Client) AllSlots(ctx context.Context) ([]ReplicationState, error) {
	return orNone(read[[]ReplicationState](ctx, c, http.MethodGet, "/slots?"+SlotsOfAll+"=true"))
}

// SlotsOfAll is the parameter of GET /slots with which the answer also has the parts of the other processes.
const SlotsOfAll = "all"

// orNone returns no error for the status 404.
func orNone[T any](value T, err error) (T, error) {
	if status, ok := errors.AsType[*StatusError](err); ok && status.StatusCode == http.StatusNotFound {
		err = nil
	}
	return value, err
}

// SlotPath is the path of the admin API of a slot, on each process with the log. A process that
// does not own the slot forwards the requests to the owner.
func SlotPath(slot int) string { return "/slots/" + strconv.Itoa(slot) }

// Slot returns a client of the admin API of a slot; see SlotPath.
func (c *Client) Slot(slot int) *Client {
	other := *c
	other.URL = strings.TrimSuffix(c.URL, "/") + SlotPath(slot)
	return &other
}
