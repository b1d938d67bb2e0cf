// Package liveconfig is the config that the controllers compile for the dispatchers: its types
// (Config), its encoding in a Secret (Encode, Decode), and its index for ingest and delivery (View).
//
// The dispatcher owns the format. It does not know custom resources; the controllers do not know
// queues. The opposite direction, the dispatcher's reports, is package adminapi.
package liveconfig

import (
	"strings"
	"time"
)

// FormatVersion is the version of the live-config format. A dispatcher rejects a config of an
// unknown version and keeps the current one.
const FormatVersion = 1

// Config is the live config of one namespace. It is compiled and replaced as a whole. It contains
// every existing Source and destination, also those that cannot work now (State), because a missing
// object counts as deleted by its owner.
type Config struct {
	// FormatVersion; see the constant.
	Version   int    `json:"version"`
	Namespace string `json:"namespace"`
	// Sources, sorted by name.
	Sources []Source `json:"sources,omitempty"`
	// Destinations, sorted by name.
	Destinations []Destination `json:"destinations,omitempty"`
	// Audiences, sorted by name.
	Audiences []Audience `json:"audiences,omitempty"`
	// Deletions, sorted by name.
	Deletions []Deletion `json:"deletions,omitempty"`
	// Redeliveries that may run, sorted by name.
	Redeliveries []Redelivery `json:"redeliveries,omitempty"`
}

// Source is a sender of calls.
type Source struct {
	Name string `json:"name"`
	// Generation of the object that this was compiled from.
	Generation int64 `json:"generation"`
	// Revision is the hash of this Source's compiled form without Revision and
	// Generation; a pod reports it back so that Programmed can be confirmed per object.
	Revision string `json:"revision"`
	// Suspended is true when calls must be answered 503.
	Suspended bool `json:"suspended,omitempty"`
	// WriteKeySHA256 holds the hash of each write key of this Source. It is empty if no write key
	// is valid; the Source then gets no calls.
	WriteKeySHA256 KeyHashes `json:"writeKeySHA256,omitempty"`
	// AllowedOrigins for CORS, in the form of CanonicalOrigin; see EntriesFor.
	AllowedOrigins []string `json:"allowedOrigins,omitempty"`
	// CallsPerSecond and Burst bound the calls of all dispatchers; 0 is no limit. See Shares.
	CallsPerSecond int `json:"callsPerSecond,omitempty"`
	Burst          int `json:"burst,omitempty"`
}

// The built-in Sources of forwarded dead letters and of notices. They exist in every namespace without
// an entry in Config.Sources, and have no write key.
const (
	SourceDeadLetters = "posthorn-dead-letters"
	SourceNotices     = "posthorn-notices"
)

// BuiltIn reports whether a Source is built in. No object of the kind Source has its name.
func BuiltIn(source string) bool { return source == SourceDeadLetters || source == SourceNotices }

// KeyHashes are lowercase hex SHA-256 sums of write keys.
type KeyHashes []string

// Deletion is a request to notify destinations that a user's data is to be deleted.
type Deletion struct {
	Name string `json:"name"`
	// Generation and Revision have the same meaning as in Source.
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// ID identifies the run by the object's namespace, name and spec, and UID is the
	// object's. ID is empty while the request is not accepted: then it has no effect.
	ID  string `json:"id,omitempty"`
	UID string `json:"uid,omitempty"`
	// Ended is true when the run has ended, so that no message is sent. The request still
	// suppresses calls.
	Ended  bool   `json:"ended,omitempty"`
	UserID string `json:"userId"`
	// Sources are the names of the affected Sources; empty means all of the namespace.
	Sources []string `json:"sources,omitempty"`
	// Suppress is true if calls of the user to these Sources are rejected.
	Suppress bool `json:"suppress,omitempty"`
	// DeadlineSeconds, counted from the start of the run, end it; 0 is no deadline.
	DeadlineSeconds int64 `json:"deadlineSeconds,omitempty"`
}

// RedeliveryPhase is what the dispatchers do for a Redelivery. A phase begins when every
// participating pod has reported the end of the previous one.
type RedeliveryPhase string

// The phases, in their order.
const (
	// RedeliveryBegin: each pod records that it takes part, or reports that the run
	// completed before. Nothing is redelivered yet.
	RedeliveryBegin RedeliveryPhase = "Begin"
	// RedeliveryRun: each pod that has recorded its part redelivers its dead letters.
	RedeliveryRun RedeliveryPhase = "Run"
	// RedeliveryRecord: each pod records that the whole run is complete.
	RedeliveryRecord RedeliveryPhase = "Record"
)

// Redelivery sends dead letters of a destination again, once.
type Redelivery struct {
	Name string `json:"name"`
	// Generation and Revision have the same meaning as in Source.
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// ID identifies the run by the object's namespace, name and spec, and UID is the
	// object's.
	ID  string `json:"id"`
	UID string `json:"uid"`
	// Destination is the name of the destination, in the same namespace.
	Destination string          `json:"destination"`
	Phase       RedeliveryPhase `json:"phase"`
	// DryRun only counts the selected dead letters.
	DryRun bool `json:"dryRun,omitempty"`
	// Rate is in dead letters per second and pod.
	Rate float64 `json:"rate"`
	// Reasons, StatusCodes (0 without a response), Types and Events (patterns of MatchEvent)
	// select dead letters; an empty list selects all.
	Reasons     []string `json:"reasons,omitempty"`
	StatusCodes []int    `json:"statusCodes,omitempty"`
	Types       []string `json:"types,omitempty"`
	Events      []string `json:"events,omitempty"`
	// Since and Until bound the time of the last failure; Until is exclusive, and not after
	// the start of the run. It is zero in the phase RedeliveryBegin.
	Since time.Time `json:"since,omitzero"`
	Until time.Time `json:"until,omitzero"`
}

// Kinds of an Audience, as in the API.
const (
	KindAudience      = "Audience"
	KindComputedTrait = "ComputedTrait"
)

// Audience is a set of users; its changes are sent as identify calls.
type Audience struct {
	Name string `json:"name"`
	// Generation and Revision have the same meaning as in Source.
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// Source is the name of the Source, in the same namespace, whose write key syncs the members
	// and whose destinations get the calls.
	Source string `json:"source"`
	// Key is the name of the trait, and identifies the audience in the path of a sync; it is unique
	// among the Source's audiences. It is empty while the audience is not accepted: then it cannot
	// be synced, and its members are kept.
	Key string `json:"key,omitempty"`
	// Kind is KindAudience (the trait is true or false) or KindComputedTrait (the trait is a value).
	Kind string `json:"kind"`
	// MaxRemovalPercent is the share of members that a snapshot may remove.
	MaxRemovalPercent int `json:"maxRemovalPercent"`
}

// State is how the dispatcher treats a destination's messages.
type State string

const (
	// Active means that messages are sent.
	Active State = "Active"
	// Suspended means that the owner has suspended the destination. Messages wait, and the time does not count towards
	// their retry windows.
	Suspended State = "Suspended"
	// Paused means: the destination cannot work (PausedReason). Messages are kept up to the retry
	// window.
	Paused State = "Paused"
)

// Success policies and signing schemes, as in the API.
const (
	AnyEndpoint      = "AnyEndpoint"
	EveryEndpoint    = "EveryEndpoint"
	HMACSHA1         = "HMACSHA1"
	StandardWebhooks = "StandardWebhooks"
	HMAC             = "HMAC"
)

// Destination is a receiver of messages. A destination that is not Active may lack URLs or secrets;
// nothing is sent to it.
type Destination struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	// Revision is the hash of this destination's compiled form without Revision
	// and Generation; a pod reports it back.
	Revision string `json:"revision"`
	State    State  `json:"state"`
	// PausedReason is a reason of the condition Accepted, when State is Paused.
	PausedReason string `json:"pausedReason,omitempty"`
	// Sources are the names of the Sources, in the same namespace, whose calls the destination
	// gets. Sorted.
	Sources []string `json:"sources,omitempty"`
	// SourcesUnknown is true if the Sources in the spec are not valid. The destination then
	// keeps its lanes and their messages.
	SourcesUnknown bool `json:"sourcesUnknown,omitempty"`
	// Endpoints, 1 to 5 when Active, in the order of the spec.
	Endpoints []Endpoint `json:"endpoints,omitempty"`
	// Signing is empty if requests are unsigned. Sorted by Name.
	Signing SigningSchemes `json:"signing,omitempty"`
	// Success is AnyEndpoint or EveryEndpoint.
	Success string `json:"success"`
	// SuccessRule decides which 2xx responses are a success; nil if all are.
	SuccessRule *SuccessRule `json:"successRule,omitempty"`
	// ExactNumbers is true if long numbers (see event.FixedPoint) are sent with all digits, not
	// as strings.
	ExactNumbers bool `json:"exactNumbers,omitempty"`
	// IgnoreDeletions is true if the destination gets no notifications of deletions.
	IgnoreDeletions bool     `json:"ignoreDeletions,omitempty"`
	Delivery        Delivery `json:"delivery"`
	Filter          *Filter  `json:"filter,omitempty"`
	// Request is nil if a request is a POST of the message.
	Request *Request `json:"request,omitempty"`
	// Batch is nil if a request has one message.
	Batch       *Batch      `json:"batch,omitempty"`
	DeadLetters DeadLetters `json:"deadLetters"`
	// Redact removes values before messages are sent or shown; nil sends them as they are.
	Redact *Redact `json:"redact,omitempty"`
}

// Redact are the rules of package redact. A Destination that is not Active may lack the key.
type Redact struct {
	Allow []string    `json:"allow,omitempty"`
	Drop  []string    `json:"drop,omitempty"`
	Mask  []string    `json:"mask,omitempty"`
	Hash  *RedactHash `json:"hash,omitempty"`
}

// RedactHash are values that their HMAC-SHA-256 replaces.
type RedactHash struct {
	Key   Secret       `json:"key,omitzero"`
	Paths []HashedPath `json:"paths"`
}

// HashedPath is a path of values. Email is true if they are normalized as e-mail addresses before.
type HashedPath struct {
	Path  string `json:"path"`
	Email bool   `json:"email,omitempty"`
}

// Endpoint is one webhook URL. The URL is a credential and redacts itself.
type Endpoint struct {
	Name    string   `json:"name"`
	URL     Secret   `json:"url,omitzero"`
	Headers []Header `json:"headers,omitempty"`
	TLS     *TLS     `json:"tls,omitempty"`
	// OAuth2 is set if requests carry access tokens.
	OAuth2 *OAuth2 `json:"oauth2,omitempty"`
	// GZip is true if bodies of 1 KiB and more are compressed.
	GZip bool `json:"gzip,omitempty"`
}

// OAuth2 is a client of a token endpoint, for the client credentials grant of OAuth 2.0.
type OAuth2 struct {
	TokenURL     string `json:"tokenURL"`
	ClientID     string `json:"clientID"`
	ClientSecret Secret `json:"clientSecret"`
	// SecretInBody is true if the client authenticates by parameters of the request, and
	// false if it does by HTTP Basic authentication.
	SecretInBody bool     `json:"secretInBody,omitempty"`
	Scopes       []string `json:"scopes,omitempty"`
	// Parameters are additional parameters of the token request.
	Parameters map[string]string `json:"parameters,omitempty"`
	TLS        *TLS              `json:"tls,omitempty"`
}

// Header is a static request header. Every value is treated as a secret.
type Header struct {
	Name  string `json:"name"`
	Value Secret `json:"value"`
}

// TLS has PEM text. CA replaces the system's authorities. ClientCert and ClientKey are both set
// or both empty.
type TLS struct {
	CA         string `json:"ca,omitempty"`
	ClientCert string `json:"clientCert,omitempty"`
	ClientKey  Secret `json:"clientKey,omitzero"`
}

// SigningScheme is one way to sign requests, with its secrets.
type SigningScheme struct {
	// Name is unique within a destination.
	Name string `json:"name"`
	// Type is HMACSHA1, StandardWebhooks or HMAC.
	Type   string `json:"scheme"`
	Secret Secret `json:"secret"`
	// Previous is the secret before a rotation, or empty.
	Previous Secret `json:"previous,omitzero"`
	// Format is set for a scheme of the type HMAC only.
	Format *HMACFormat `json:"format,omitempty"`
}

// Writes returns what no two schemes of a destination share: the header that carries the signature, in lower
// case, or the type, which determines the header.
func (s SigningScheme) Writes() string {
	if s.Format == nil {
		return s.Type
	}
	return strings.ToLower(s.Format.Header)
}

// SigningSchemes are the schemes of a destination. Each writes other headers.
type SigningSchemes []SigningScheme

// Delivery has timeout, retries and limits; all durations in milliseconds.
type Delivery struct {
	TimeoutMS     int64 `json:"timeoutMS"`
	RetryWindowMS int64 `json:"retryWindowMS"`
	MinBackoffMS  int64 `json:"minBackoffMS"`
	MaxBackoffMS  int64 `json:"maxBackoffMS"`
	// MaxInFlight and RequestsPerSecond (0 is no limit) bound the requests of all dispatchers to an endpoint; see Shares.
	MaxInFlight       int `json:"maxInFlight"`
	RequestsPerSecond int `json:"requestsPerSecond,omitempty"`
	// RetryStatusCodes from 300 to 499 are retried, in addition to 408, 429 and 5xx.
	RetryStatusCodes []int `json:"retryStatusCodes,omitempty"`
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

// Filter selects messages; every part that is set must match.
type Filter struct {
	Types      []string `json:"types,omitempty"`
	Events     []string `json:"events,omitempty"`
	Expression string   `json:"expression,omitempty"`
	// Invalid is true if a part of the filter in the spec is not valid and is left out here. Whether a call matches is
	// then unknown if it matches the other parts.
	Invalid bool `json:"invalid,omitempty"`
}

// SuccessRule is the condition under which a 2xx response is a success.
type SuccessRule struct {
	// Expression is in the language of expression.CompileSuccess.
	Expression string `json:"expression"`
	// DeadLetter is true if a message for which it is not met becomes a dead letter without a retry.
	DeadLetter bool `json:"deadLetter,omitempty"`
}

// Request is what requests have instead of a POST of the message to the endpoint's URL. Each expression is one of
// expression.CompileTransform; an empty one changes nothing.
type Request struct {
	Body string `json:"body,omitempty"`
	// ContentType is Form, Text, CloudEvents, or empty for JSON.
	ContentType string `json:"contentType,omitempty"`
	// Method is empty for POST.
	Method  string          `json:"method,omitempty"`
	Path    string          `json:"path,omitempty"`
	Query   string          `json:"query,omitempty"`
	Headers []RequestHeader `json:"headers,omitempty"`
}

// The content types of a Request.
const (
	ContentForm = "Form"
	ContentText = "Text"
	// ContentCloudEvents is JSON with the media type of CloudEvents.
	ContentCloudEvents = "CloudEvents"
)

// RequestHeader is a header whose value is made from each message.
type RequestHeader struct {
	Name       string `json:"name"`
	Expression string `json:"expression"`
}

// Batch has the limits and the form of requests with several messages of a lane. The Request of the destination then has
// no Path, Query and Headers, and its body is JSON: only bodies differ by message.
type Batch struct {
	// MaxMessages, from 2 to MaxBatchMessages, MaxBytes, from MinBatchBytes to MaxBatchBytes, and MaxDelayMS, up to
	// MaxBatchDelay, end a batch: it is sent when it has so many messages, when the next message would make its
	// accepted messages longer, or so long after the acceptance of its oldest message.
	MaxMessages int   `json:"maxMessages"`
	MaxBytes    int64 `json:"maxBytes"`
	MaxDelayMS  int64 `json:"maxDelayMS"`
	// Format is BatchJSONArray or BatchNDJSON.
	Format string `json:"format"`
	// PerItem is true if the body of a 2xx response lists the messages that it rejects.
	PerItem bool `json:"perItem,omitempty"`
}

// MaxDelay returns MaxDelayMS as a duration.
func (b Batch) MaxDelay() time.Duration { return time.Duration(b.MaxDelayMS) * time.Millisecond }

// The formats of a Batch: a JSON array, and lines of JSON that each end with a line feed.
const (
	BatchJSONArray = "JSONArray"
	BatchNDJSON    = "NDJSON"
)

// The bounds of a Batch.
const (
	MaxBatchMessages = 4000
	MinBatchBytes    = 1 << 10
	MaxBatchBytes    = 4 << 20
	MaxBatchDelay    = time.Minute
)

// DeadLetters bounds the dead letters of a destination: MaxBytes those of all dispatchers.
type DeadLetters struct {
	RetentionMS int64 `json:"retentionMS"`
	MaxBytes    int64 `json:"maxBytes"`
	// ForwardTo is the name of the destination, in the same namespace, that also gets the dead
	// letters; empty if there is none. It may name a destination that does not exist, does not
	// get the messages of SourceDeadLetters, or forwards itself; dead letters then wait.
	ForwardTo string `json:"forwardTo,omitempty"`
}
