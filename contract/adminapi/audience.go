package adminapi

import "time"

// SyncCounts are the results of a sync of an audience.
type SyncCounts struct {
	// Before and Members are the numbers of members before and after the sync.
	Before  int64 `json:"before"`
	Members int64 `json:"members"`
	// Added users joined, Removed users left, Changed users have another value.
	Added   int64 `json:"added"`
	Removed int64 `json:"removed"`
	Changed int64 `json:"changed"`
	// Resent users are unchanged; they are sent because the sync requested it.
	Resent int64 `json:"resent,omitempty"`
}

// Changes returns the number of users with an identify call.
func (c SyncCounts) Changes() int64 { return c.Added + c.Removed + c.Changed + c.Resent }

// SyncResult is the answer to an accepted sync.
type SyncResult struct {
	// Sync identifies the sync.
	Sync string `json:"sync"`
	SyncCounts
	// Sent is true if every identify call is in the queue. Otherwise the sync is decided and will
	// be completed.
	Sent   bool `json:"sent"`
	DryRun bool `json:"dryRun,omitempty"`
}

// SyncProgress is the progress of an audience's last sync; it is zero before the first.
type SyncProgress struct {
	Sync string    `json:"sync,omitempty"`
	Time time.Time `json:"time,omitzero"`
	SyncCounts
	// Sent is true if every identify call is in the queue, so that another sync is possible. Unsent
	// is the number of the other calls, and Waits the reason of the wait.
	Sent   bool   `json:"sent"`
	Unsent int64  `json:"unsent"`
	Waits  string `json:"waits,omitempty"`
}
