package admission

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Codes of refusals that more than one API has. Each API adds its own.
const (
	CodeNotReady        = "not_ready"
	CodeNoWriteKey      = "no_write_key"
	CodeUnknownKey      = "unknown_write_key"
	CodeKeyRemoved      = "write_key_removed"
	CodeSourceSuspended = "source_suspended"
	CodeSuppressed      = "user_suppressed"
	CodeStorageFull     = "storage_full"
	CodeStorageFailed   = "storage_failed"
	CodeBusy            = "busy"
	CodeTooSlow         = "body_too_slow"
	CodeNotFound        = "not_found"
	CodeMethod          = "method_not_allowed"
	CodeEncoding        = "unsupported_encoding"
	CodeUnreadable      = "unreadable_body"
)

// Seconds after which a client may send a refused request again. A replicated log elects a leader
// in about retryAfterUnavailable.
const (
	retrySoon             = 1
	retryAfterUnavailable = 5
	retryAfterFull        = 10
	retryAfterRemove      = 10
	retryAfterSuspended   = 60
)

// Headers of refusals that browser libraries read.
const (
	HeaderRetryAfter = "Retry-After"
	HeaderReset      = "X-Ratelimit-Reset" // in seconds
)

// Refusal is the answer to a request that was not accepted. Nothing of the request was stored,
// unless the message says otherwise.
//
// Client libraries retry after 429 and 503 and stop after any other 4xx. Temporary faults therefore
// get 429 or 503, permanent ones another 4xx.
type Refusal struct {
	// Status is the HTTP status.
	Status int `json:"-"`
	// Code is for programs, Message for people.
	Code    string `json:"code"`
	Message string `json:"message"`
	// Line of the input, from 1; 0 if the error is not in a line.
	Line int64 `json:"line,omitempty"`
	// RetryAfter in seconds; 0 if a retry alone does not help.
	RetryAfter int `json:"-"`
	// Calls is the number of rejected calls, if known.
	Calls int `json:"-"`
}

// Refuse returns a permanent refusal.
func Refuse(status int, code, message string) *Refusal {
	return &Refusal{Status: status, Code: code, Message: message}
}

// Refusef is Refuse with a formatted message.
func Refusef(status int, code, format string, args ...any) *Refusal {
	return Refuse(status, code, fmt.Sprintf(format, args...))
}

// Retry returns a refusal with status 503 that a client may retry after that many seconds.
func Retry(seconds int, code, message string) *Refusal {
	return &Refusal{Status: http.StatusServiceUnavailable, Code: code, Message: message, RetryAfter: seconds}
}

// Error implements error.
func (r *Refusal) Error() string {
	if r.Line > 0 {
		return fmt.Sprintf("%s: line %d: %s", r.Code, r.Line, r.Message)
	}
	return r.Code + ": " + r.Message
}

// Write answers a request.
func (r *Refusal) Write(w http.ResponseWriter) {
	header := w.Header()
	header.Set("Content-Type", "application/json")
	if r.RetryAfter > 0 {
		header.Set(HeaderRetryAfter, strconv.Itoa(r.RetryAfter))
	}
	if r.Status == http.StatusTooManyRequests {
		header.Set(HeaderReset, strconv.Itoa(r.RetryAfter))
	}
	body, _ := json.Marshal(struct { // Texts and numbers always marshal.
		Success bool     `json:"success"`
		Error   *Refusal `json:"error"`
	}{Error: r})
	w.WriteHeader(r.Status)
	_, _ = w.Write(append(body, '\n'))
}

// NotStored returns the refusal of a request whose calls could not be appended, from the error of
// Append. full reports whether storage is full for the Source; expected is false if the error is one
// of the disk, to be logged.
func NotStored(err error) (r *Refusal, full, expected bool) {
	switch {
	case errors.Is(err, queue.ErrOverQuota):
		return Retry(retryAfterFull, CodeStorageFull, "this Source's undelivered calls fill its part of the storage (--source-quota); nothing of this request was stored, send it again later"), true, true
	case errors.Is(err, queue.ErrOverShare):
		return Retry(retryAfterFull, CodeStorageFull, "the stored calls of this namespace fill its share of the storage; nothing of this request was stored, send it again later"), true, true
	case errors.Is(err, queue.ErrFull):
		return Retry(retryAfterFull, CodeStorageFull, "storage is full; nothing of this request was stored, send it again later"), true, true
	case errors.Is(err, queue.ErrUnavailable):
		return Retry(retryAfterUnavailable, CodeNotReady, "the log that makes calls durable does not answer; send the request again"), false, true
	case errors.Is(err, queue.ErrClosed):
		return Retry(retrySoon, CodeNotReady, "Posthorn is shutting down; send the request again"), false, true
	}
	return Retry(retryAfterFull, CodeStorageFailed, "the calls could not be stored; send the request again"), false, false
}
