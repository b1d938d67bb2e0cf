package adminapi

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
)

// MessageTrace is what one dispatcher knows about a messageId, or about the pending messages and the dead
// letters of a user: the answer to GET /trace.
type MessageTrace struct {
	// MessageID or UserID is set: what was searched for.
	MessageID event.ID `json:"messageId,omitempty"`
	UserID    event.ID `json:"userId,omitempty"`
	// Accepted has an entry for each message, and each Source that accepted it.
	Accepted []AcceptedMessage `json:"accepted,omitempty"`
	// Attempts are the remembered ones, oldest first. DeadLetters have no bodies.
	Attempts    []Attempt    `json:"attempts,omitempty"`
	DeadLetters []DeadLetter `json:"deadLetters,omitempty"`
	// Scanned is the number of messages that were read outside the duplicate window, the last of which
	// was accepted at ScannedUntil.
	Scanned      int       `json:"scanned,omitempty"`
	ScannedUntil time.Time `json:"scannedUntil,omitzero"`
	// Incomplete names what was not searched because of a bound.
	Incomplete string `json:"incomplete,omitempty"`
}

// Found reports whether the dispatcher knows the message.
func (t *MessageTrace) Found() bool {
	return len(t.Accepted)+len(t.Attempts)+len(t.DeadLetters) > 0
}

// AcceptedMessage is a message that a Source accepted.
type AcceptedMessage struct {
	// MessageID is empty if the message is not stored.
	MessageID event.ID `json:"messageId,omitempty"`
	// Source is "namespace/name".
	Source     string    `json:"source"`
	AcceptedAt time.Time `json:"acceptedAt"`
	// Stored is false after the message was removed, because all destinations are done with it. Type,
	// Event and Destinations are then unknown.
	Stored       bool                `json:"stored"`
	Type         string              `json:"type,omitempty"`
	Event        string              `json:"event,omitempty"`
	Destinations []MessageAtEndpoint `json:"destinations,omitempty"`
}

// MessageAtEndpoint is the state of a message at an endpoint of a destination.
type MessageAtEndpoint struct {
	// Destination is "namespace/name". Endpoint is empty unless the endpoints get messages separately.
	Destination string       `json:"destination"`
	Endpoint    string       `json:"endpoint,omitempty"`
	State       MessageState `json:"state"`
	// NextAttempt is the time of the next attempt of a message in retry.
	NextAttempt time.Time `json:"nextAttempt,omitzero"`
	// FailedAttempts is the number of failed attempts of a message in retry.
	FailedAttempts int `json:"failedAttempts,omitempty"`
}

// MessageState is the state of a message at an endpoint.
type MessageState string

// Values of MessageState. An ended message was delivered or discarded, or its dead letter was removed.
const (
	MessageWaiting   MessageState = "Waiting"
	MessageInFlight  MessageState = "InFlight"
	MessageRetrying  MessageState = "Retrying"
	MessageFiltered  MessageState = "Filtered"
	MessageDelivered MessageState = "Delivered"
	MessageDead      MessageState = "DeadLetter"
	MessageEnded     MessageState = "Ended"
)

// Trace returns what the dispatcher knows about a messageId. Messages before the duplicate window are
// searched if they were accepted since a time that is not zero.
func (c *Client) Trace(ctx context.Context, messageID string, since time.Time) (*MessageTrace, error) {
	return c.trace(ctx, url.Values{"id": {messageID}}, since)
}

// TraceUser returns the pending messages and the dead letters of a user that were accepted since a time, or
// all of them.
func (c *Client) TraceUser(ctx context.Context, userID string, since time.Time) (*MessageTrace, error) {
	return c.trace(ctx, url.Values{"userId": {userID}}, since)
}

func (c *Client) trace(ctx context.Context, query url.Values, since time.Time) (*MessageTrace, error) {
	if !since.IsZero() {
		query.Set("since", since.UTC().Format(time.RFC3339Nano))
	}
	return read[*MessageTrace](ctx, c, http.MethodGet, "/trace?"+query.Encode())
}
