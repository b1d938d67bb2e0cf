package adminapi

import (
	"encoding/json"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
)

// Attempt is one request to an endpoint and its result. It holds no secrets, of the message only
// the id, and of the response at most the first bytes.
type Attempt struct {
	// Time is the end of the attempt, Duration its length; durations are in nanoseconds.
	Time     time.Time     `json:"time"`
	Duration time.Duration `json:"durationNanos"`
	// Timing splits the duration.
	Timing Timing `json:"timing"`
	// Source and Destination are "namespace/name".
	Source      string `json:"source"`
	Destination string `json:"destination"`
	Endpoint    string `json:"endpoint"`
	// Seq and MessageID name the message, the first one of a batch. Messages is the number of messages of a batch, and 0 for
	// a request with a single message.
	Seq       uint64   `json:"seq"`
	MessageID event.ID `json:"messageId"`
	Messages  int      `json:"messages,omitempty"`
	// Generation is that of the destination from which the request was made.
	Generation int64 `json:"generation,omitempty"`
	// Number is 1 for a message's first attempt.
	Number int `json:"number"`
	// StatusCode is 0 if there was no response. Reason is empty for a success, or one of
	// the delivery reasons (egress.Reason); Message explains it.
	StatusCode int    `json:"statusCode,omitempty"`
	Reason     string `json:"reason,omitempty"`
	Message    string `json:"message,omitempty"`
	// RetryAfter is the wait that the response requested, at most a day; 0 if it requested none.
	RetryAfter time.Duration `json:"retryAfterNanos,omitempty"`
	// Response holds the first bytes of the response, with secrets redacted. Only the last failed
	// attempt of an endpoint that got a response with a body has it, and the result of Client.Test.
	Response string `json:"response,omitempty"`
	// RemoteAddr is the dialled address.
	RemoteAddr string `json:"remoteAddr,omitempty"`
	// CertificateExpires is when the endpoint's certificate expires; zero without TLS.
	CertificateExpires time.Time `json:"certificateExpires,omitzero"`
	// Probe is true for a circuit breaker's probe.
	Probe bool `json:"probe,omitempty"`
	// Test is true for a test event (Client.Test), which is no delivery.
	Test bool `json:"test,omitempty"`
}

// TestEvent is the event of the track call that Client.Test sends. Its messageId begins with "posthorn-test-".
const TestEvent = "Posthorn Test"

// AttemptWithBody is an attempt with the body of its request.
type AttemptWithBody struct {
	Attempt
	// Body is that of the request; one that is not JSON is a JSON string.
	Body json.RawMessage `json:"body,omitempty"`
	// Missed is the number of attempts before this one that were not sent, because the reader was
	// slower than the deliveries.
	Missed int64 `json:"missed,omitempty"`
}

// Timing splits the duration of an attempt. DNS, Connect and TLS are zero if an open connection was
// reused.
type Timing struct {
	DNS     time.Duration `json:"dnsNanos"`
	Connect time.Duration `json:"connectNanos"`
	TLS     time.Duration `json:"tlsNanos"`
	// FirstByte is the time from the request to the first byte of the response.
	FirstByte time.Duration `json:"firstByteNanos"`
	// Total is the duration of the whole attempt.
	Total time.Duration `json:"totalNanos"`
}
