package adminapi

import (
	"encoding/json"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
)

// DeadLetter is a dead letter as the admin API shows it.
type DeadLetter struct {
	Key         string    `json:"key"`
	Source      string    `json:"source"`
	Destination string    `json:"destination"`
	Endpoint    string    `json:"endpoint,omitempty"`
	MessageID   event.ID  `json:"messageId"`
	Type        string    `json:"type"`
	Event       string    `json:"event,omitempty"`
	AcceptedAt  time.Time `json:"acceptedAt"`
	FailedAt    time.Time `json:"failedAt"`
	Attempts    int       `json:"attempts"`
	Reason      string    `json:"reason"`
	StatusCode  int       `json:"statusCode,omitempty"`
	Message     string    `json:"message,omitempty"`
	// Response holds the first bytes of the receiver's last response.
	Response string `json:"response,omitempty"`
	// Body is the message; only responses of BodiesPath have it.
	Body json.RawMessage `json:"body,omitempty"`
}

// DeadLetterCount is the answer to GET /deadletters/count.
type DeadLetterCount struct {
	Stored int64 `json:"stored"`
}

// DefaultRate is the default rate of a redelivery, in dead letters a second and dispatcher.
const DefaultRate = 100

// DeadLetterAction requests an action on a pod's dead letters: POST /deadletters/redeliver or
// /deadletters/purge. The response is a stream of JSON lines, each a DeadLetterProgress.
type DeadLetterAction struct {
	// Destination is "namespace/name".
	Destination string             `json:"destination"`
	Selector    DeadLetterSelector `json:"selector"`
	// DryRun only counts the selected dead letters.
	DryRun bool `json:"dryRun,omitempty"`
	// Rate is in dead letters a second, for redelivery; 0 is DefaultRate.
	Rate float64 `json:"rate,omitempty"`
}

// DeadLetterSelector selects dead letters. Its zero value selects all; every part that is set must
// match.
type DeadLetterSelector struct {
	// Keys of dead letters.
	Keys []string `json:"keys,omitempty"`
	// Reasons, status codes (0 without a response), types of call, and patterns of event names
	// (liveconfig.MatchEvent), which match track calls only.
	Reasons     []string `json:"reasons,omitempty"`
	StatusCodes []int    `json:"statusCodes,omitempty"`
	Types       []string `json:"types,omitempty"`
	Events      []string `json:"events,omitempty"`
	// Since and Until bound the time of the last failure; Until is exclusive.
	Since time.Time `json:"since,omitzero"`
	Until time.Time `json:"until,omitzero"`
}

// DeadLetterProgress counts processed dead letters. The last one has Done or Error.
type DeadLetterProgress struct {
	// Matched counts selected dead letters, Redelivered those that are pending again (or removed,
	// by a purge).
	Matched     int64 `json:"matched"`
	Redelivered int64 `json:"redelivered"`
	// Bytes of the matched bodies.
	Bytes int64 `json:"bytes"`
	// AsOf is the end of the time range of the action: dead letters that failed later are not selected.
	AsOf  time.Time `json:"asOf,omitzero"`
	Done  bool      `json:"done,omitempty"`
	Error string    `json:"error,omitempty"`
}
