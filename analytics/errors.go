package analytics

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// FieldError is a call with a missing or invalid field. It was not queued. The vendor's library has the
// same text.
type FieldError struct {
	// Field is the field's name on the wire: "event", "userId", ...
	Field string
	text  string
}

func (e *FieldError) Error() string { return e.text }

// Errors of invalid calls. Each is a [*FieldError] and a fixed value, so == and [errors.Is] both
// work.
var (
	// ErrNoEvent is a Track without Event.
	ErrNoEvent error = &FieldError{"event", "You must pass 'event'."}
	// ErrNoUserOrAnonymousID is a call with neither UserId nor AnonymousId.
	ErrNoUserOrAnonymousID error = &FieldError{"userId", "You must pass either an 'anonymousId' or 'userId'."}
	// ErrNoGroupID is a Group without GroupId.
	ErrNoGroupID error = &FieldError{"groupId", "You must pass a 'groupId'."}
	// ErrNoUserID is an Alias without UserId.
	ErrNoUserID error = &FieldError{"userId", "You must pass a 'userId'."}
	// ErrNoPreviousID is an Alias without PreviousId.
	ErrNoPreviousID error = &FieldError{"previousId", "You must pass a 'previousId'."}
	// ErrMessageIDTooLong is a MessageId of more than 100 code points.
	ErrMessageIDTooLong error = &FieldError{"messageId", "The 'messageId' must not be longer than 100 characters."}
	// ErrInvalidID is a MessageId, UserId, AnonymousId, PreviousId or GroupId that is not UTF-8: two different ones
	// would become equal in JSON.
	ErrInvalidID error = &FieldError{"id", "The ids must be valid UTF-8."}
)

// Other errors of a call. It was not queued.
var (
	// ErrNilCall is a nil pointer in place of a call.
	ErrNilCall = errors.New("analytics: the call is nil")
	// ErrTooLarge is a call of more than 32 KB; see [SizeError].
	ErrTooLarge = errors.New("analytics: the call is too large")
	// ErrQueueFull means that the queue has reached its limit: the server does not answer, or is
	// slower than calls are made. The call is dropped.
	ErrQueueFull = errors.New("analytics: the queue is full")
	// ErrClosed is a call on a closed client. As a cause in a [DeliveryError] it means that Close
	// stopped before the call was delivered.
	ErrClosed = errors.New("analytics: the client is closed")
)

// SizeError is a call that exceeds the size limit. [errors.Is] finds [ErrTooLarge] in it.
type SizeError struct {
	// Type is the kind of call: "track", ...
	Type string
	// Size and Limit are in bytes of JSON. Size includes the client's [DefaultContext], which the
	// server merges into each call.
	Size, Limit int
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("analytics: the %s call is too large: %d bytes of JSON, at most %d are allowed; send less in its properties, traits or context", e.Type, e.Size, e.Limit)
}

// Is reports whether target is [ErrTooLarge].
func (e *SizeError) Is(target error) bool { return target == ErrTooLarge }

// EncodeError is a call with a value that JSON cannot represent: a channel, a function, NaN, a map
// that contains itself, ...
type EncodeError struct {
	// Field is the call's field with the value: "properties", ...
	Field string
	Err   error
}

func (e *EncodeError) Error() string {
	return "analytics: " + e.Field + " cannot be sent as JSON: " + e.Err.Error()
}

func (e *EncodeError) Unwrap() error { return e.Err }

// ConfigError is a client with an invalid setting. Every call returns it.
type ConfigError struct {
	// Field is the setting: "Endpoint", "writeKey", ...
	Field string
	text  string
}

func (e *ConfigError) Error() string { return "analytics: " + e.Field + " " + e.text }

// ResponseError is a response that rejects a whole request.
type ResponseError struct {
	// StatusCode is the HTTP status.
	StatusCode int
	// Code and Message are the response's, empty if it had none.
	Code, Message string
}

func (e *ResponseError) Error() string {
	text := "analytics: the server answered " + strconv.Itoa(e.StatusCode)
	if e.Code != "" {
		text += " " + e.Code
	}
	if e.Message != "" {
		text += ": " + e.Message
	}
	if e.StatusCode >= 300 && e.StatusCode < 400 {
		text += ": redirects are not followed; set Endpoint to the target of the redirect"
	}
	return text
}

// RejectedError is the server's rejection of one call of a batch. The other calls of the batch were
// accepted.
type RejectedError struct {
	// Code and Message are the response's.
	Code, Message string
}

func (e *RejectedError) Error() string {
	return "analytics: the server rejected the call: " + e.Code + ": " + e.Message
}

// Failure is a call that was not delivered.
type Failure struct {
	// Type is the kind of call: "track", ...
	Type string
	// MessageID is the call's id.
	MessageID string
	// Message is the call in JSON, as it was to be sent.
	Message json.RawMessage
	// Err is the reason: a [*ResponseError], a [*RejectedError], an error of the network, or
	// [ErrClosed] with the end of the context of [Client.CloseContext] and the error of the last attempt. If a request was in flight,
	// the call may have arrived nevertheless: send it again with the same MessageId.
	Err error
}

// DeliveryError lists the calls that [Client.Flush] or [Client.Close] could not deliver.
type DeliveryError struct {
	// Failed are the calls that are no longer retried. The client no longer has them.
	Failed []Failure
	// Pending counts calls that are still queued and retried: the context of Flush ended first.
	// Always 0 after Close.
	Pending int
	// Err is the error of the context, nil if the time was sufficient.
	Err error
}

func (e *DeliveryError) Error() string {
	text := "analytics: "
	if len(e.Failed) > 0 {
		text += fmt.Sprintf("%s not delivered (the first: %v)", calls(len(e.Failed)), e.Failed[0].Err)
	}
	if e.Pending > 0 {
		if len(e.Failed) > 0 {
			text += ", "
		}
		text += calls(e.Pending) + " still queued"
	}
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

func calls(n int) string {
	if n == 1 {
		return "1 call"
	}
	return fmt.Sprint(n, " calls")
}

// Unwrap returns the error of the context and the cause of the first failure.
func (e *DeliveryError) Unwrap() []error {
	var errs []error
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	if len(e.Failed) > 0 {
		errs = append(errs, e.Failed[0].Err)
	}
	return errs
}
