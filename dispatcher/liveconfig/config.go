// Package liveconfig is the contract between the two halves of Posthorn: the
// config that the controllers compile and the dispatcher runs (Config), the
// report that the dispatcher gives of what it runs and how it goes (Report), and
// what it is asked to do with dead letters (DeadLetterAction).
//
// The dispatcher owns the format. It knows nothing of custom resources; the
// controllers know nothing of queues.
package liveconfig

import (
	"encoding/json"
	"time"
)

// FormatVersion is the version of the live-config format. A dispatcher refuses
// a config of a version it does not know and keeps the one it runs.
const FormatVersion = 1

// Config is the live config of one tenant (one namespace). It is compiled as a
// whole and replaced as a whole. Every Source and destination that exists is in
// it, also those that cannot work right now (State), because what is missing
// here is taken as deleted by its owner.
type Config struct {
	// FormatVersion; see the constant.
	Version int `json:"version"`
	// Tenant is the namespace.
	Tenant string `json:"tenant"`
	// Sources, sorted by name.
	Sources []Source `json:"sources,omitempty"`
	// Destinations, sorted by name.
	Destinations []Destination `json:"destinations,omitempty"`
	// Audiences, sorted by name.
	Audiences []Audience `json:"audiences,omitempty"`
	// Deletions, sorted by name.
	Deletions []Deletion `json:"deletions,omitempty"`
}

// Source is who may send calls.
type Source struct {
	Name string `json:"name"`
	// Generation of the object that this was compiled from.
	Generation int64 `json:"generation"`
	// Revision is the hash of this Source's compiled form without Revision and
	// Generation; a pod reports it back so that Programmed can be confirmed per object.
	Revision string `json:"revision"`
	// Enabled is false when calls must be answered 403.
	Enabled bool `json:"enabled"`
	// WriteKeySHA256 holds the hash of each write key that names this Source.
	// Empty when no write key is usable: then no call can name it.
	WriteKeySHA256 KeyHashes `json:"writeKeySHA256,omitempty"`
	// AllowedOrigins for CORS; "*" allows every origin.
	AllowedOrigins []string `json:"allowedOrigins,omitempty"`
	// CallsPerSecond and Burst bound this pod's intake; 0 is no limit.
	CallsPerSecond int `json:"callsPerSecond,omitempty"`
	Burst          int `json:"burst,omitempty"`
}

// KeyHashes are lowercase hex SHA-256 sums of write keys. One alone is encoded as
// a string, which is the form that release 0.2.0 writes and reads.
type KeyHashes []string

// MarshalJSON implements json.Marshaler.
func (k KeyHashes) MarshalJSON() ([]byte, error) {
	if len(k) == 1 {
		return json.Marshal(k[0])
	}
	return json.Marshal([]string(k))
}

// UnmarshalJSON implements json.Unmarshaler.
func (k *KeyHashes) UnmarshalJSON(text []byte) error {
	var one string
	if json.Unmarshal(text, &one) == nil {
		*k = KeyHashes{one}
		return nil
	}
	return json.Unmarshal(text, (*[]string)(k))
}

// Deletion is a request to tell that a user's data is to be deleted.
type Deletion struct {
	Name string `json:"name"`
	// Generation and Revision are as a Source's.
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// ID changes with the user and the Sources; what was sent is remembered by
	// it. Empty when the request is not accepted: then nothing is sent.
	ID     string `json:"id,omitempty"`
	UserID string `json:"userId"`
	// Sources are the names of those that are affected; empty is all of the tenant.
	Sources []string `json:"sources,omitempty"`
	// Suppress: calls of the user to these Sources are refused.
	Suppress bool `json:"suppress,omitempty"`
}

// Kinds of an Audience, as in the API.
const (
	KindAudience      = "Audience"
	KindComputedTrait = "ComputedTrait"
)

// Audience is a set of users whose changes are told by identify calls.
type Audience struct {
	Name string `json:"name"`
	// Generation and Revision are as a Source's.
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// Source is the name of the Source, of the same tenant, whose write key
	// syncs the members and whose destinations get the calls.
	Source string `json:"source"`
	// Key names the trait, and the audience in the path of a sync; unique among
	// the Source's audiences. Empty when the audience is not accepted: then it
	// cannot be synced, and what is kept of it stays.
	Key string `json:"key,omitempty"`
	// Kind is KindAudience (the trait is true or false) or KindComputedTrait (the trait is a value).
	Kind string `json:"kind"`
	// MaxRemovalPercent is the share of members that a snapshot may remove.
	MaxRemovalPercent int `json:"maxRemovalPercent"`
}

// State says what the dispatcher does with a destination's messages.
type State string

const (
	// Active says that messages are sent.
	Active State = "Active"
	// Disabled says that the owner switched the destination off. Messages are kept up to the retry window.
	Disabled State = "Disabled"
	// Held says that the destination cannot work (HeldReason). Messages are kept up to the retry window.
	Held State = "Held"
)

// Success policies and signing schemes, as in the API.
const (
	AnyEndpoint      = "AnyEndpoint"
	EveryEndpoint    = "EveryEndpoint"
	HMACSHA1         = "HMACSHA1"
	StandardWebhooks = "StandardWebhooks"
)

// Destination is where messages go. A destination that is not Active may lack
// URLs or secrets; it is never sent to.
type Destination struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	// Revision is the hash of this destination's compiled form without Revision
	// and Generation; a pod reports it back.
	Revision string `json:"revision"`
	State    State  `json:"state"`
	// HeldReason is a reason of the condition Accepted, when State is Held.
	HeldReason string `json:"heldReason,omitempty"`
	// Sources are the names of the Sources, of the same tenant, whose calls come here. Sorted.
	Sources []string `json:"sources,omitempty"`
	// Endpoints, 1 to 5 when Active, in the order of the spec.
	Endpoints []Endpoint `json:"endpoints,omitempty"`
	// Signing is nil when requests go out unsigned by the owner's choice.
	Signing *Signing `json:"signing,omitempty"`
	// Success is AnyEndpoint or EveryEndpoint.
	Success string `json:"success"`
	// ExactNumbers says that long numbers are sent with their digits, not as
	// strings: event.FixedPoint has what they are.
	ExactNumbers bool        `json:"exactNumbers,omitempty"`
	Delivery     Delivery    `json:"delivery"`
	Filter       *Filter     `json:"filter,omitempty"`
	DeadLetters  DeadLetters `json:"deadLetters"`
}

// Endpoint is one webhook URL. The URL is a credential and redacts itself.
type Endpoint struct {
	Name    string   `json:"name"`
	URL     Secret   `json:"url,omitzero"`
	Headers []Header `json:"headers,omitempty"`
	TLS     *TLS     `json:"tls,omitempty"`
}

// Header is a static request header. Every value is treated as a secret.
type Header struct {
	Name  string `json:"name"`
	Value Secret `json:"value"`
}

// TLS holds PEM text. CA replaces the system's authorities; ClientCert and ClientKey go together.
type TLS struct {
	CA         string `json:"ca,omitempty"`
	ClientCert string `json:"clientCert,omitempty"`
	ClientKey  Secret `json:"clientKey,omitzero"`
}

// Signing holds the secrets of a destination.
type Signing struct {
	// Scheme is HMACSHA1 or StandardWebhooks.
	Scheme string `json:"scheme"`
	Secret Secret `json:"secret"`
	// Previous is the secret before a rotation, or empty.
	Previous Secret `json:"previous,omitzero"`
}

// Delivery holds timeout, retries and limits; all durations in milliseconds.
type Delivery struct {
	TimeoutMS     int64 `json:"timeoutMS"`
	RetryWindowMS int64 `json:"retryWindowMS"`
	MinBackoffMS  int64 `json:"minBackoffMS"`
	MaxBackoffMS  int64 `json:"maxBackoffMS"`
	MaxInFlight   int   `json:"maxInFlight"`
	// RequestsPerSecond per endpoint and pod; 0 is no limit.
	RequestsPerSecond int `json:"requestsPerSecond,omitempty"`
}

// Timeout returns TimeoutMS as a duration.
func (d Delivery) Timeout() time.Duration { return time.Duration(d.TimeoutMS) * time.Millisecond }

// RetryWindow returns RetryWindowMS as a duration.
func (d Delivery) RetryWindow() time.Duration {
	return time.Duration(d.RetryWindowMS) * time.Millisecond
}

// MinBackoff returns MinBackoffMS as a duration.
func (d Delivery) MinBackoff() time.Duration { return time.Duration(d.MinBackoffMS) * time.Millisecond }

// MaxBackoff returns MaxBackoffMS as a duration.
func (d Delivery) MaxBackoff() time.Duration { return time.Duration(d.MaxBackoffMS) * time.Millisecond }

// Filter chooses messages; every part that is set must pass.
type Filter struct {
	Types      []string `json:"types,omitempty"`
	Events     []string `json:"events,omitempty"`
	Expression string   `json:"expression,omitempty"`
}

// DeadLetters bounds what is kept per destination and pod.
type DeadLetters struct {
	RetentionMS int64 `json:"retentionMS"`
	MaxBytes    int64 `json:"maxBytes"`
}
