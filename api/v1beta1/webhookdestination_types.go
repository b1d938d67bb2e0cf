package v1beta1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// WebhookDestinationSpec names the Sources whose calls are delivered, the URLs
// that receive them, and the rules of delivery.
// +kubebuilder:validation:XValidation:rule="has(self.sourceRefs) != has(self.sourceSelector)",message="set exactly one of sourceRefs and sourceSelector"
// +kubebuilder:validation:XValidation:rule="self.deletions != 'Only' || !has(self.filter)",message="with deletions: Only no calls are delivered; remove filter, or deletions"
// +kubebuilder:validation:XValidation:rule="!has(self.signing) || self.signing.schemes.all(s, !has(s.hmac) || s.hmac.header.lowerAscii() != 'authorization' || self.endpoints.all(e, !has(e.authentication)))",message="authentication of an endpoint and signing.schemes[].hmac.header set the header Authorization; remove one or choose another header"
// +kubebuilder:validation:XValidation:rule="!has(self.signing) || self.signing.schemes.all(s, !has(s.hmac) || self.endpoints.all(e, !has(e.headers) || e.headers.all(h, !(h.name.lowerAscii() in [s.hmac.header.lowerAscii(), s.hmac.header.lowerAscii() + '-previous']))))",message="a header of an endpoint has the name of the signature's header (signing.schemes[].hmac.header), or this name with the suffix -Previous; rename or remove one"
// +kubebuilder:validation:XValidation:rule="!has(self.request) || !has(self.request.headers) || self.request.headers.all(h, self.endpoints.all(e, h.name.lowerAscii() == 'authorization' && has(e.authentication) ? false : (!has(e.headers) || e.headers.all(g, g.name.lowerAscii() != h.name.lowerAscii()))))",message="a header of request is also set by endpoints[].headers or authentication; remove one"
// +kubebuilder:validation:XValidation:rule="!has(self.request) || !has(self.request.headers) || !has(self.signing) || self.signing.schemes.all(s, !has(s.hmac) || self.request.headers.all(h, !(h.name.lowerAscii() in [s.hmac.header.lowerAscii(), s.hmac.header.lowerAscii() + '-previous'])))",message="a header of request has the name of the signature's header (signing.schemes[].hmac.header), or this name with the suffix -Previous; rename or remove one"
// +kubebuilder:validation:XValidation:rule="!has(self.delivery) || !has(self.delivery.batch) || !has(self.request) || !(has(self.request.path) || has(self.request.query) || has(self.request.headers))",message="request.path, request.query and request.headers cannot be used with delivery.batch: a batch is one request, so its messages differ by their bodies only; remove them, or delivery.batch"
// +kubebuilder:validation:XValidation:rule="!has(self.delivery) || !has(self.delivery.batch) || !has(self.request) || !has(self.request.contentType) || self.request.contentType in ['JSON', 'CloudEvents']",message="delivery.batch needs the request.contentType JSON or CloudEvents, because a batch is a list of JSON values; change request.contentType, or remove delivery.batch"
// +kubebuilder:validation:XValidation:rule="!has(self.delivery) || !has(self.delivery.batch) || !has(self.delivery.batch.format) || self.delivery.batch.format != 'NDJSON' || !has(self.request) || !has(self.request.contentType) || self.request.contentType != 'CloudEvents'",message="a batch of CloudEvents is a JSON array; set delivery.batch.format to JSONArray, or request.contentType to JSON"
type WebhookDestinationSpec struct {
	// If true, messages wait, and are delivered when it is false again. The time does not
	// count towards their retry windows. Accepted and Delivering have the reason Suspended.
	// Default false.
	// +kubebuilder:default=false
	// +optional
	Suspend *bool `json:"suspend,omitempty"`

	// The Sources in this namespace whose calls are delivered, by name. If one does not
	// exist, ResolvedRefs is False (NoSource). The built-in Source posthorn-notices, which has
	// notices about this namespace, always exists. Set this or sourceSelector. 1 to 64.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:XValidation:rule="self.all(a, self.exists_one(b, a.name == b.name))",message="a Source is named twice; remove one of the two"
	// +listType=atomic
	// +optional
	SourceRefs []SourceReference `json:"sourceRefs,omitempty"`

	// The Sources in this namespace whose calls are delivered, by label. An empty
	// selector ({}) selects all of them, except for built-in ones. Set this or sourceRefs. At most 16 labels
	// and 16 expressions with 64 values each.
	// +kubebuilder:validation:XValidation:rule="!has(self.matchLabels) || self.matchLabels.size() <= 16",message="matchLabels must have at most 16 entries"
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.size() <= 16",message="matchExpressions must have at most 16 entries"
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, !has(e.values) || e.values.size() <= 64)",message="values must have at most 64 entries; use another label or several destinations"
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, e.operator in ['In', 'NotIn', 'Exists', 'DoesNotExist'])",message="operator must be In, NotIn, Exists or DoesNotExist"
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, (e.operator in ['In', 'NotIn']) == (has(e.values) && e.values.size() > 0))",message="In and NotIn need values; Exists and DoesNotExist must have none"
	// +optional
	SourceSelector *metav1.LabelSelector `json:"sourceSelector,omitempty"`

	// The webhooks: 1 to 5 URLs, each with its own headers.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=5
	// +listType=map
	// +listMapKey=name
	// +required
	Endpoints []Endpoint `json:"endpoints"`

	// The signatures of requests. If it is unset, requests have no signature.
	// +optional
	Signing *Signing `json:"signing,omitempty"`

	// The format of delivered bodies.
	// +kubebuilder:default={}
	// +optional
	Body Body `json:"body,omitempty"`

	// The condition under which a message counts as delivered. AnyEndpoint: every
	// URL gets one attempt, the message is retried until one URL accepts it, and then
	// it counts as delivered. EveryEndpoint: every URL must accept the message; each
	// URL is tracked and retried separately. Default AnyEndpoint.
	// +kubebuilder:validation:Enum=AnyEndpoint;EveryEndpoint
	// +kubebuilder:default=AnyEndpoint
	// +optional
	SuccessPolicy SuccessPolicy `json:"successPolicy,omitempty"`

	// Experimental: can change or be removed in a minor release.
	// The condition under which a 2xx response counts as a success. Default: every 2xx response does.
	// +optional
	Success *Success `json:"success,omitempty"`

	// Deliver: the destination gets the notifications of DeletionRequests, whatever the filter is. Only: it
	// gets them and no calls, so it has no filter. Ignore: it gets none, and DeletionRequests do not count it.
	// Default Deliver.
	// +kubebuilder:validation:Enum=Deliver;Only;Ignore
	// +kubebuilder:default=Deliver
	// +optional
	Deletions DeletionPolicy `json:"deletions,omitempty"`

	// Delivery timeout, retries and limits.
	// +kubebuilder:default={}
	// +optional
	Delivery Delivery `json:"delivery,omitempty"`

	// Selects the messages to deliver; if it is unset, all are delivered. The filter is applied
	// when a call is accepted; a changed filter applies to later calls. It does not apply to the
	// notifications of DeletionRequests; see deletions.
	// +optional
	Filter *Filter `json:"filter,omitempty"`

	// Experimental: can change or be removed in a minor release.
	// Values that are removed or replaced before a message is sent, or shown as a dead letter or an attempt. The store
	// keeps the message as it was accepted, and filters see it. Default: none.
	// +optional
	Redact *Redact `json:"redact,omitempty"`

	// Experimental: can change or be removed in a minor release.
	// The requests in place of a POST of the message: a body, method, path, query and headers made from
	// it by CEL expressions. They are evaluated when a message is sent: the message is stored as
	// it was accepted, so a changed expression applies to pending messages and to redelivered
	// ones. They read call (the message), source and destination (name, namespace). If one
	// fails for a message, it becomes a dead letter (TransformFailed). After 100 failures in a
	// row Delivering is False (TransformFailing), messages are kept, and one a minute is tried.
	// +optional
	Request *RequestShape `json:"request,omitempty"`

	// Retention, size limit and forwarding of dead letters.
	// +kubebuilder:default={}
	// +optional
	DeadLetters DeadLetters `json:"deadLetters,omitempty"`
}

// RequestShape describes the requests of a destination. Each expression has at most 8,192 bytes, all of
// them together cost at most 100,000 units for a message, and a result has at most 256 KiB.
// +kubebuilder:validation:XValidation:rule="has(self.body) || has(self.method) || has(self.path) || has(self.query) || has(self.headers)",message="set at least one of body, method, path, query and headers, or leave request out"
// +kubebuilder:validation:XValidation:rule="!has(self.contentType) || self.contentType == 'JSON' || has(self.body)",message="Form, Text and CloudEvents need a body"
type RequestShape struct {
	// The body: any value for JSON, an object of texts, numbers, booleans and lists of them for
	// Form, a text for Text. If it is null, the message is omitted: it is not sent, and
	// counts as omitted; for the notification of a DeletionRequest null is a failure. Default: the message.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=8192
	// +optional
	Body string `json:"body,omitempty"`

	// The format of the body, and the header Content-Type. JSON: application/json; the text is
	// canonical, so that signatures survive JSON.parse and JSON.stringify. Form:
	// application/x-www-form-urlencoded. Text: text/plain. CloudEvents: as JSON, with
	// application/cloudevents+json, for events in the structured mode. Default JSON.
	// +kubebuilder:validation:Enum=JSON;Form;Text;CloudEvents
	// +optional
	ContentType ContentType `json:"contentType,omitempty"`

	// The method. Default POST.
	// +kubebuilder:validation:Enum=POST;PUT;PATCH;DELETE
	// +optional
	Method RequestMethod `json:"method,omitempty"`

	// A list of segments, such as ['users', call.userId], which are percent-encoded and appended
	// to the path of the URL. A segment that is empty, . or .., or contains a slash, is a failure.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=8192
	// +optional
	Path string `json:"path,omitempty"`

	// An object such as {'event': call.event}, which is percent-encoded and appended to the query
	// of the URL. A list repeats its key, null leaves it out.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=8192
	// +optional
	Query string `json:"query,omitempty"`

	// Headers whose values are made from the message. At most 16.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:XValidation:rule="self.all(h, self.exists_one(g, g.name.lowerAscii() == h.name.lowerAscii()))",message="header names must be unique, regardless of case; remove one"
	// +optional
	Headers []RequestHeader `json:"headers,omitempty"`
}

// ContentType is the format of a body.
type ContentType string

// The content types.
const (
	ContentJSON ContentType = "JSON"
	ContentForm ContentType = "Form"
	ContentText ContentType = "Text"
	// ContentCloudEvents is JSON with the media type of CloudEvents.
	ContentCloudEvents ContentType = "CloudEvents"
)

// RequestMethod is a method of requests.
type RequestMethod string

// The methods.
const (
	MethodPost   RequestMethod = "POST"
	MethodPut    RequestMethod = "PUT"
	MethodPatch  RequestMethod = "PATCH"
	MethodDelete RequestMethod = "DELETE"
)

// RequestHeader is a header whose value is made from the message.
type RequestHeader struct {
	// Name of the header. Rejected: headers that Posthorn or HTTP sets, such as Content-Type,
	// Host and X-Signature, the headers of signing, authentication and endpoints[].headers.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:XValidation:rule="self.matches(r'^[!#$%&\\x27*+\\-.^_\\x60|~0-9A-Za-z]+$')",message="must be letters, digits and '-', as header names are; no spaces and no colon"
	// +kubebuilder:validation:XValidation:rule="!(self.lowerAscii() in ['host', 'connection', 'content-length', 'content-type', 'content-encoding', 'transfer-encoding', 'te', 'trailer', 'upgrade', 'keep-alive', 'proxy-connection', 'proxy-authorization', 'expect', 'user-agent', 'idempotency-key', 'traceparent', 'tracestate', 'baggage']) && !self.matches('(?i)^(webhook-|posthorn-|x-posthorn-|x-signature)')",message="this name is reserved for headers that Posthorn or HTTP sets; choose another name"
	// +required
	Name string `json:"name"`

	// The value: a text, number or boolean, as printable ASCII of at most 4,096 characters.
	// null leaves the header out.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=8192
	// +required
	Expression string `json:"expression"`
}

// SuccessPolicy defines when a message counts as delivered.
type SuccessPolicy string

// The success policies.
const (
	// AnyEndpoint: one URL accepted the message.
	AnyEndpoint SuccessPolicy = "AnyEndpoint"
	// EveryEndpoint: every URL accepted the message.
	EveryEndpoint SuccessPolicy = "EveryEndpoint"
)

// Success is the condition under which a 2xx response counts as a success.
type Success struct {
	// A CEL expression that must be true for a 2xx response, over "status" (a number), "headers" (first
	// values by lower-case names) and "response.json" (the body; null if it is longer than 4 KiB or is not
	// JSON), for example: response.json.ok == true. For a field that may be missing, write
	// response.json.?ok.orValue(true). An evaluation that fails counts as false. At most 1,024 characters.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +required
	Expression string `json:"expression"`

	// The outcome of a message when the expression is false (RejectedByExpression). Retry: it is retried, as
	// after a 5xx response. DeadLetter: it becomes a dead letter, as after a 422 response. Default Retry.
	// +kubebuilder:validation:Enum=Retry;DeadLetter
	// +kubebuilder:default=Retry
	// +optional
	OnFalse OnFalse `json:"onFalse,omitempty"`
}

// OnFalse is what happens to a message whose 2xx response is no success.
type OnFalse string

// The values of OnFalse.
const (
	OnFalseRetry      OnFalse = "Retry"
	OnFalseDeadLetter OnFalse = "DeadLetter"
)

// DeletionPolicy defines whether a destination gets the notifications of DeletionRequests.
type DeletionPolicy string

// The deletion policies.
const (
	DeliverDeletions DeletionPolicy = "Deliver"
	OnlyDeletions    DeletionPolicy = "Only"
	IgnoreDeletions  DeletionPolicy = "Ignore"
)

// Endpoint is one webhook URL.
// +kubebuilder:validation:XValidation:rule="!has(self.authentication) || !has(self.headers) || self.headers.all(h, h.name.lowerAscii() != 'authorization')",message="authentication sets the header Authorization; remove it from headers, or remove authentication"
// +kubebuilder:validation:XValidation:rule="has(self.url) != has(self.urlFrom)",message="set exactly one of url and urlFrom"
// +kubebuilder:validation:XValidation:rule="!has(self.tls) || !has(self.url) || self.url.lowerAscii().startsWith('https://')",message="tls requires an https:// URL; change the URL or remove tls"
type Endpoint struct {
	// Name of the endpoint within this destination, for status, metrics and dead letters.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",message="must be lower case letters, digits and '-', and begin and end with a letter or digit"
	// +required
	Name string `json:"name"`

	// The full URL, including http:// or https://. User names, passwords and
	// fragments are rejected: use a header from a Secret for credentials. At
	// most 2,048 characters.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	// +kubebuilder:validation:XValidation:rule="!self.matches('%([^0-9A-Fa-f]|.[^0-9A-Fa-f]|.?$)')",message="has a % that no two hexadecimal digits follow; write %25 for a percent sign"
	// +kubebuilder:validation:XValidation:rule="isURL(self) ? url(self).getScheme() in ['http', 'https'] && url(self).getHostname() != '' : self.matches('%([^0-9A-Fa-f]|.[^0-9A-Fa-f]|.?$)')",message="must be a full URL that starts with http:// or https:// and names a host"
	// +kubebuilder:validation:XValidation:rule="!isURL(self) || url(self).getPort() == '' || (int(url(self).getPort()) >= 1 && int(url(self).getPort()) <= 65535)",message="the port must be between 1 and 65535"
	// +kubebuilder:validation:XValidation:rule="!self.contains('#')",message="must not have a fragment (#...); remove it"
	// +kubebuilder:validation:XValidation:rule="!self.matches('^[a-zA-Z]+://[^/?]*@')",message="must not contain a user name or password; send them in a header with valueFrom"
	// +optional
	URL string `json:"url,omitempty"`

	// Reads the URL from a Secret, for URLs that are credentials.
	// +optional
	URLFrom *ValueFromSecret `json:"urlFrom,omitempty"`

	// Static headers, sent with every request to this URL. At most 32.
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:XValidation:rule="self.all(h, self.exists_one(g, g.name.lowerAscii() == h.name.lowerAscii()))",message="header names must be unique, regardless of case; remove one"
	// +optional
	Headers []Header `json:"headers,omitempty"`

	// TLS settings of an https URL. Default: the system's certificate authorities are trusted.
	// +optional
	TLS *EndpointTLS `json:"tls,omitempty"`

	// How requests authenticate. Default: not at all, apart from the headers.
	// +optional
	Authentication *Authentication `json:"authentication,omitempty"`
}

// Header is a static request header.
// +kubebuilder:validation:XValidation:rule="has(self.value) != has(self.valueFrom)",message="set exactly one of value and valueFrom"
type Header struct {
	// Name of the header. Rejected: headers that Posthorn or HTTP sets, such as
	// Content-Type, User-Agent, Host, Connection, traceparent and baggage, and the names reserved
	// for them: webhook-*, posthorn-*, x-posthorn-* and x-signature*.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:XValidation:rule="self.matches(r'^[!#$%&\\x27*+\\-.^_\\x60|~0-9A-Za-z]+$')",message="must be letters, digits and '-', as header names are; no spaces and no colon"
	// +kubebuilder:validation:XValidation:rule="!(self.lowerAscii() in ['host', 'connection', 'content-length', 'content-type', 'content-encoding', 'transfer-encoding', 'te', 'trailer', 'upgrade', 'keep-alive', 'proxy-connection', 'proxy-authorization', 'expect', 'user-agent', 'idempotency-key', 'traceparent', 'tracestate', 'baggage']) && !self.matches('(?i)^(webhook-|posthorn-|x-posthorn-|x-signature)')",message="this name is reserved for headers that Posthorn or HTTP sets; choose another name"
	// +required
	Name string `json:"name"`

	// Value of the header: printable ASCII, at most 4,096 characters.
	// +kubebuilder:validation:MaxLength=4096
	// +kubebuilder:validation:XValidation:rule="self.matches(r'^[ -~\\t]*$')",message="must be printable ASCII without line breaks; encode other characters"
	// +optional
	Value *string `json:"value,omitempty"`

	// Reads the value from a Secret.
	// +optional
	ValueFrom *ValueFromSecret `json:"valueFrom,omitempty"`
}

// EndpointTLS configures the CAs trusted for an endpoint and the client
// certificate presented to it. Verification cannot be disabled.
type EndpointTLS struct {
	// The CAs to trust for this endpoint, instead of the system's. A self-signed server
	// certificate is rejected even if it is one of them: use the CA that issued it.
	// +optional
	CA *CertificateAuthorities `json:"ca,omitempty"`

	// A Secret of type kubernetes.io/tls (keys tls.crt and tls.key) with the client
	// certificate to present.
	// +optional
	ClientCertSecretRef *SecretReference `json:"clientCertSecretRef,omitempty"`
}

// CertificateAuthorities are CA certificates: one or more PEM certificates, in a Secret or, as
// trust-manager writes them, in a ConfigMap.
// +kubebuilder:validation:XValidation:rule="has(self.secretKeyRef) != has(self.configMapKeyRef)",message="set exactly one of secretKeyRef and configMapKeyRef"
type CertificateAuthorities struct {
	// The Secret key that contains the certificates.
	// +optional
	SecretKeyRef *SecretKeyReference `json:"secretKeyRef,omitempty"`

	// The ConfigMap key that contains the certificates. If it is missing, ResolvedRefs is False
	// (ConfigMapNotFound, ConfigMapKeyMissing), and messages are kept and not sent.
	// +optional
	ConfigMapKeyRef *ConfigMapKeyReference `json:"configMapKeyRef,omitempty"`
}

// Signing configures the signatures of requests.
type Signing struct {
	// The signing schemes, by name. With several schemes, every request carries all
	// signatures, each with its own secret, so that receivers can change from one
	// scheme to another. Two schemes must not write the same header. While a secret
	// of any scheme is missing, nothing is sent, messages are kept, and ResolvedRefs
	// is False. 1 to 4.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=4
	// +kubebuilder:validation:XValidation:rule="self.all(s, self.exists_one(t, (has(s.hmac) ? s.hmac.header.lowerAscii() : s.type) == (has(t.hmac) ? t.hmac.header.lowerAscii() : t.type)))",message="two schemes write the same header; use HMACSHA1 and StandardWebhooks once each, and give each scheme of the type HMAC another hmac.header"
	// +kubebuilder:validation:XValidation:rule="self.all(s, !has(s.hmac) || !self.exists(t, has(t.hmac) && t.hmac.header.lowerAscii() == s.hmac.header.lowerAscii() + '-previous'))",message="a scheme writes the header of another scheme with the suffix -Previous, which carries the signature of the other scheme's previous secret; choose another hmac.header"
	// +listType=map
	// +listMapKey=name
	// +required
	Schemes []SigningScheme `json:"schemes"`
}

// SigningScheme is a signature format and its secret.
// +kubebuilder:validation:XValidation:rule="(self.type == 'HMAC') == has(self.hmac)",message="set hmac with the type HMAC, and only with it"
type SigningScheme struct {
	// Name of the scheme within this destination, for messages, such as "sha1" or "github".
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",message="must be lower case letters, digits and '-', and begin and end with a letter or digit"
	// +required
	Name string `json:"name"`

	// HMACSHA1: header X-Signature, the lowercase hex HMAC-SHA1 of the body.
	// StandardWebhooks: headers webhook-id, webhook-timestamp and
	// webhook-signature (v1, HMAC-SHA256). HMAC: the header and the format of the
	// field hmac.
	// +kubebuilder:validation:Enum=HMACSHA1;StandardWebhooks;HMAC
	// +required
	Type SigningType `json:"type"`

	// The Secret key that contains the shared secret: at most 4,096 bytes. A line break at
	// its end is not used. StandardWebhooks: after a "whsec_" prefix the rest is base64.
	// +required
	SecretKeyRef SecretKeyReference `json:"secretKeyRef"`

	// The previous secret, during a rotation. While it is set, every request also
	// carries a signature made with it: in X-Signature-Previous, as a second
	// entry of webhook-signature, or as hmac.previousValue describes. Remove it when
	// all receivers use the new secret.
	// +optional
	PreviousSecretKeyRef *SecretKeyReference `json:"previousSecretKeyRef,omitempty"`

	// The format of a scheme of the type HMAC.
	// +optional
	HMAC *HMACFormat `json:"hmac,omitempty"`
}

// HMACFormat is a signature format that receivers of other webhooks verify already,
// such as GitHub's or Stripe's.
type HMACFormat struct {
	// Name of the header that carries the signature, such as X-Hub-Signature-256.
	// Rejected: the names that endpoints[].headers must not have, and, also with the suffix
	// -Previous, headers in endpoints[].headers.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:XValidation:rule="self.matches(r'^[!#$%&\\x27*+\\-.^_\\x60|~0-9A-Za-z]+$')",message="must be letters, digits and '-', as header names are; no spaces and no colon"
	// +kubebuilder:validation:XValidation:rule="!(self.lowerAscii() in ['host', 'connection', 'content-length', 'content-type', 'content-encoding', 'transfer-encoding', 'te', 'trailer', 'upgrade', 'keep-alive', 'proxy-connection', 'proxy-authorization', 'expect', 'user-agent', 'idempotency-key', 'traceparent', 'tracestate', 'baggage']) && !self.matches('(?i)^(webhook-|posthorn-|x-posthorn-|x-signature)')",message="this name is reserved for headers that Posthorn or HTTP sets; choose another name"
	// +required
	Header string `json:"header"`

	// The hash function of the HMAC. Default SHA256.
	// +kubebuilder:validation:Enum=SHA1;SHA256;SHA512
	// +optional
	Algorithm HMACAlgorithm `json:"algorithm,omitempty"`

	// The encoding of the signature: lowercase Hex, or Base64 with padding. Default
	// Hex.
	// +kubebuilder:validation:Enum=Hex;Base64
	// +optional
	Encoding SignatureEncoding `json:"encoding,omitempty"`

	// The signed content. Body: the body. TimestampBody: the time of the attempt in Unix
	// seconds, a dot and the body. IDTimestampBody: the ID of the message, a dot, the
	// time, a dot and the body. Requests carry the time and the ID in value, or
	// otherwise in the headers webhook-timestamp and webhook-id. Default Body.
	// +kubebuilder:validation:Enum=Body;TimestampBody;IDTimestampBody
	// +optional
	Content SignedContent `json:"content,omitempty"`

	// The value of the header: printable ASCII with {signature} once, and {timestamp}
	// and {id} where they are needed, such as "t={timestamp},v1={signature}". Default
	// {signature}.
	// +kubebuilder:validation:MinLength=11
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.matches(r'^[ -~]*$') && self.split('{signature}').size() == 2",message="must be printable ASCII and contain {signature} once"
	// +kubebuilder:validation:XValidation:rule="!self.replace('{signature}', '').replace('{timestamp}', '').replace('{id}', '').matches('[{}]')",message="braces are for {signature}, {timestamp} and {id} only; correct or remove the others"
	// +optional
	Value string `json:"value,omitempty"`

	// Text that is appended to the value while previousSecretKeyRef is set, such as
	// ",v1={signature}", with the signature of the previous secret. If it is unset,
	// that signature is in a header of its own, whose name has the suffix -Previous.
	// +kubebuilder:validation:MinLength=11
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.matches(r'^[ -~]*$') && self.split('{signature}').size() == 2",message="must be printable ASCII and contain {signature} once"
	// +kubebuilder:validation:XValidation:rule="!self.replace('{signature}', '').replace('{timestamp}', '').replace('{id}', '').matches('[{}]')",message="braces are for {signature}, {timestamp} and {id} only; correct or remove the others"
	// +optional
	PreviousValue string `json:"previousValue,omitempty"`
}

// HMACAlgorithm is the hash function of an HMAC.
type HMACAlgorithm string

// The algorithms.
const (
	AlgorithmSHA1   HMACAlgorithm = "SHA1"
	AlgorithmSHA256 HMACAlgorithm = "SHA256"
	AlgorithmSHA512 HMACAlgorithm = "SHA512"
)

// SignatureEncoding is how a signature is written.
type SignatureEncoding string

// The encodings.
const (
	EncodingHex    SignatureEncoding = "Hex"
	EncodingBase64 SignatureEncoding = "Base64"
)

// SignedContent is what a signature covers.
type SignedContent string

// The signed contents.
const (
	ContentBody            SignedContent = "Body"
	ContentTimestampBody   SignedContent = "TimestampBody"
	ContentIDTimestampBody SignedContent = "IDTimestampBody"
)

// SigningType is the type of a signing scheme.
type SigningType string

// The types of signing schemes.
const (
	HMACSHA1         SigningType = "HMACSHA1"
	StandardWebhooks SigningType = "StandardWebhooks"
	HMAC             SigningType = "HMAC"
)

// Body configures the form of delivered bodies.
type Body struct {
	// The format of long numbers: integers that JavaScript would change, such
	// as 12345678901234567890, and numbers beyond the range of doubles, such as
	// 1e400. String: a JSON string with the same characters. Exact: the number as
	// the client sent it; then JSON.stringify(JSON.parse(body)) returns other bytes, and
	// a receiver must verify signatures over the received bytes. Default String.
	// +kubebuilder:validation:Enum=String;Exact
	// +kubebuilder:default=String
	// +optional
	Numbers NumberFormat `json:"numbers,omitempty"`
}

// NumberFormat is the format of long numbers.
type NumberFormat string

// The number formats.
const (
	NumbersString NumberFormat = "String"
	NumbersExact  NumberFormat = "Exact"
)

// Delivery configures the timeout, the retries and the limits.
// +kubebuilder:validation:XValidation:rule="!has(self.batch) || !has(self.batch.maxDelay) || !has(self.retry) || !has(self.retry.window) || duration(self.batch.maxDelay) < duration(self.retry.window)",message="batch.maxDelay (default 1s) must be shorter than retry.window (default 4h), or messages expire before they are sent; lower batch.maxDelay or raise retry.window"
type Delivery struct {
	// The maximum time for an endpoint's response. 100ms to the installation's ceiling
	// (--max-delivery-timeout, 5s unless it was raised, at most 60s), default 5s.
	// +kubebuilder:validation:XValidation:rule=`self.matches('^([0-9]{1,5}(h|m|s|ms)){1,4}$') && duration(self) >= duration('100ms') && duration(self) <= duration('60s')`,message="timeout must be between 100ms and 60s; write it like 500ms, 5s or 1m"
	// +kubebuilder:default="5s"
	// +optional
	Timeout *Duration `json:"timeout,omitempty"`

	// The backoff and the window of retries.
	// +kubebuilder:default={}
	// +optional
	Retry Retry `json:"retry,omitempty"`

	// The maximum number of requests in flight to each endpoint, from all dispatchers together. Each
	// dispatcher has a share, which follows the traffic, and can have at least one. 1 to 10,000,
	// default 1,000.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	// +kubebuilder:default=1000
	// +optional
	MaxInFlight int32 `json:"maxInFlight,omitempty"`

	// The limit of requests per second to each endpoint, from all dispatchers together. Messages above
	// it wait. Default: no limit.
	// +optional
	RateLimit *RequestRateLimit `json:"rateLimit,omitempty"`

	// Experimental: can change or be removed in a minor release.
	// The compression of bodies of 1 KiB and more. GZip sends them with Content-Encoding: gzip; a signature
	// is of the body before the compression. An endpoint that answers 415 gets uncompressed bodies, see
	// status.endpoints. None or GZip, default None.
	// +kubebuilder:validation:Enum=None;GZip
	// +kubebuilder:default=None
	// +optional
	Compression Compression `json:"compression,omitempty"`

	// Experimental: can change or be removed in a minor release.
	// Sends several messages of one Source as one request, which is signed as a whole. A message that is sent again can
	// be in another batch, so receivers recognize duplicates by the messageId of each message. The notification of a
	// DeletionRequest is always a batch of one message. Default: each message is a request of its own.
	// +optional
	Batch *Batch `json:"batch,omitempty"`
}

// Batch has the limits and the form of requests with several messages.
type Batch struct {
	// The maximum number of messages in a batch. 2 to 4,000, default 100.
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=4000
	// +kubebuilder:default=100
	// +optional
	MaxMessages int32 `json:"maxMessages,omitempty"`

	// The maximum size of a batch: of its messages as they were accepted, and of the body that is made from them. A larger
	// message is a batch of its own. 1Ki to 4Mi, default 1Mi.
	// +kubebuilder:validation:XValidation:rule="quantity(string(self)).compareTo(quantity('1Ki')) >= 0 && quantity(string(self)).compareTo(quantity('4Mi')) <= 0",message="maxBytes must be between 1Ki and 4Mi"
	// +kubebuilder:default="1Mi"
	// +optional
	MaxBytes *resource.Quantity `json:"maxBytes,omitempty"`

	// How long a batch that is not full waits for more messages, from the acceptance of its oldest message. With 0s, it
	// contains the messages that are pending when it is sent. Retried messages do not wait. 0s to 1m, default 1s.
	// +kubebuilder:validation:XValidation:rule=`self.matches('^([0-9]{1,5}(h|m|s|ms)){1,4}$') && duration(self) >= duration('0s') && duration(self) <= duration('1m')`,message="maxDelay must be between 0s and 1m; write it like 500ms, 1s or 1m"
	// +kubebuilder:default="1s"
	// +optional
	MaxDelay *Duration `json:"maxDelay,omitempty"`

	// The format of the body. JSONArray: a JSON array of the messages, as application/json, or as
	// application/cloudevents-batch+json if request.contentType is CloudEvents. NDJSON: each message in a line that ends
	// with a line feed, as application/x-ndjson. Default JSONArray.
	// +kubebuilder:validation:Enum=JSONArray;NDJSON
	// +kubebuilder:default=JSONArray
	// +optional
	Format BatchFormat `json:"format,omitempty"`

	// The meaning of a 2xx response. Whole: the endpoint accepted all messages. PerItem: it accepted all except those that
	// its JSON body lists: {"failed":[{"index":0,"status":422}]}. index is the position in the batch; status, from 300 to
	// 599, counts as the response to this message alone. If the body has another form, the whole batch is sent again
	// (InvalidResponse). Default Whole.
	// +kubebuilder:validation:Enum=Whole;PerItem
	// +kubebuilder:default=Whole
	// +optional
	Response BatchResponse `json:"response,omitempty"`
}

// BatchFormat is the format of the body of a batch.
type BatchFormat string

// The formats of batches.
const (
	BatchJSONArray BatchFormat = "JSONArray"
	BatchNDJSON    BatchFormat = "NDJSON"
)

// BatchResponse is the meaning of a 2xx response to a batch.
type BatchResponse string

// The meanings of a response to a batch.
const (
	BatchResponseWhole   BatchResponse = "Whole"
	BatchResponsePerItem BatchResponse = "PerItem"
)

// Compression is the compression of request bodies.
type Compression string

// The compressions.
const (
	CompressionNone Compression = "None"
	CompressionGZip Compression = "GZip"
)

// Retry configures the retries of a message that an endpoint did not accept.
// +kubebuilder:validation:XValidation:rule="!has(self.initialBackoff) || !has(self.maxBackoff) || duration(self.initialBackoff) <= duration(self.maxBackoff)",message="initialBackoff (default 1s) must not be larger than maxBackoff (default 5m); lower initialBackoff or raise maxBackoff"
type Retry struct {
	// The retry window: the time after its acceptance during which a message is retried.
	// After that it becomes a dead letter. 1s to the installation's ceiling
	// (--max-retry-window, 4h unless it was raised, at most 720h), default 4h.
	// +kubebuilder:validation:XValidation:rule=`self.matches('^([0-9]{1,5}(h|m|s|ms)){1,4}$') && duration(self) >= duration('1s') && duration(self) <= duration('720h')`,message="window must be between 1s and 720h; write it like 30m, 4h or 1h30m"
	// +kubebuilder:default="4h"
	// +optional
	Window *Duration `json:"window,omitempty"`

	// Upper bound of the random wait before the second attempt; it doubles with
	// every attempt. 10ms to 1h, default 1s.
	// +kubebuilder:validation:XValidation:rule=`self.matches('^([0-9]{1,5}(h|m|s|ms)){1,4}$') && duration(self) >= duration('10ms') && duration(self) <= duration('1h')`,message="initialBackoff must be between 10ms and 1h; write it like 500ms, 90s or 5m"
	// +kubebuilder:default="1s"
	// +optional
	InitialBackoff *Duration `json:"initialBackoff,omitempty"`

	// The maximum wait between two attempts. 10ms to 1h, default 5m.
	// +kubebuilder:validation:XValidation:rule=`self.matches('^([0-9]{1,5}(h|m|s|ms)){1,4}$') && duration(self) >= duration('10ms') && duration(self) <= duration('1h')`,message="maxBackoff must be between 10ms and 1h; write it like 500ms, 90s or 5m"
	// +kubebuilder:default="5m"
	// +optional
	MaxBackoff *Duration `json:"maxBackoff,omitempty"`

	// Response codes that are retried, in addition to 408, 429 and 5xx. Without them, a response
	// from 300 to 499 makes the message a dead letter. 1 to 16 codes from 300 to 499.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Minimum=300
	// +kubebuilder:validation:items:Maximum=499
	// +listType=set
	// +optional
	StatusCodes []int32 `json:"statusCodes,omitempty"`
}

// RequestRateLimit bounds the requests that all dispatchers together send to an endpoint. Each has a share, which
// follows the traffic.
type RequestRateLimit struct {
	// Requests per second. 1 to 100,000.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	// +required
	RequestsPerSecond int32 `json:"requestsPerSecond"`
}

// Filter selects messages. A message must match every part that is set.
// +kubebuilder:validation:XValidation:rule="has(self.types) || has(self.events) || has(self.expression)",message="set at least one of types, events and expression, or leave filter out"
// +kubebuilder:validation:XValidation:rule="!has(self.events) || !has(self.types) || self.types == ['track']",message="events are the names of track calls, so no other type matches: set types to [track] or remove it, or use an expression"
type Filter struct {
	// Call types to deliver.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=6
	// +listType=set
	// +optional
	Types []CallType `json:"types,omitempty"`

	// Only track calls whose event name matches one of these patterns are delivered. "*" matches any
	// characters ("Order *"), and \* and \\ an asterisk and a backslash. Names are case-sensitive. At most 100.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=255
	// +kubebuilder:validation:items:XValidation:rule=`self.matches(r'^([^\\]|\\[*\\])*$')`,message="a backslash must be followed by * or by another backslash"
	// +listType=set
	// +optional
	Events []string `json:"events,omitempty"`

	// A CEL expression over "call" (the message as it would be delivered) that must
	// be true, for example: call.properties.total > 100. A call in which a field is
	// missing or has another type is not delivered. For a field that may be missing, write
	// call.?properties.?total.orValue(0) > 100. A call for which the evaluation fails for
	// another reason becomes a dead letter (FilterFailed). At most 1,024 characters.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +optional
	Expression string `json:"expression,omitempty"`
}

// Redact names values of a message by paths: keys with dots between them (context.ip), * for any key or element, [*] for any
// element (properties.products[*].sku), and ["KEY"] for other keys (traits["first name"]). Of several rules for a value,
// drop takes precedence over mask, and mask over hash. type, messageId and event always pass. At most 64 paths in all.
// +kubebuilder:validation:XValidation:rule="has(self.allow) || has(self.drop) || has(self.mask) || has(self.hash)",message="set at least one of allow, drop, mask and hash, or leave redact out"
type Redact struct {
	// The only values that pass, each with all that it contains; everything else is removed. Default: all
	// values pass. 1 to 64.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +listType=set
	// +optional
	Allow []RedactPath `json:"allow,omitempty"`

	// Values that are removed. 1 to 64.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +listType=set
	// +optional
	Drop []RedactPath `json:"drop,omitempty"`

	// Values that the string "***" replaces; null remains. 1 to 64.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +listType=set
	// +optional
	Mask []RedactPath `json:"mask,omitempty"`

	// Values that a pseudonym replaces.
	// +optional
	Hash *RedactHash `json:"hash,omitempty"`
}

// RedactPath is the path of values in a message.
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=256
// +kubebuilder:validation:XValidation:rule="!self.startsWith('$') && !self.startsWith('.') && !self.endsWith('.')",message="must begin with a key of the message, without $ and dots, such as properties.email"
type RedactPath string

// RedactHash replaces values by their HMAC-SHA-256, as 64 lowercase hex digits: equal values have equal pseudonyms.
type RedactHash struct {
	// The Secret key that contains the key of the HMAC: 16 to 4,096 bytes. A line break at its end is not used. Another
	// key changes all pseudonyms. While it is missing, nothing is sent, messages are kept, and ResolvedRefs is False.
	// +required
	SecretKeyRef SecretKeyReference `json:"secretKeyRef"`

	// The values: of a string the characters, of other values the JSON text. null remains. Of a message, 256 values are
	// hashed, and further ones masked. 1 to 64.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=path
	// +required
	Paths []HashedPath `json:"paths"`
}

// HashedPath is the path of values that are hashed.
type HashedPath struct {
	// The path of the values.
	// +required
	Path RedactPath `json:"path"`

	// Email: white space around a string is removed, and its letters are lower case, before it is hashed. None: the
	// string is hashed as it is. Default None.
	// +kubebuilder:validation:Enum=None;Email
	// +optional
	Normalize Normalization `json:"normalize,omitempty"`
}

// Normalization is a change of a string before it is hashed.
type Normalization string

// The normalizations.
const (
	NormalizeNone  Normalization = "None"
	NormalizeEmail Normalization = "Email"
)

// CallType is a call type.
// +kubebuilder:validation:Enum=identify;track;page;screen;group;alias
type CallType string

// MessageType is a call type, or "delete" for the notification of a DeletionRequest.
// +kubebuilder:validation:Enum=identify;track;page;screen;group;alias;delete
type MessageType string

// DeadLetters bounds and forwards the dead letters of a destination.
type DeadLetters struct {
	// The time after which dead letters are deleted. Each is kept for at least a minute, also with 0s.
	// 0s to 8760h, default 168h (a week).
	// +kubebuilder:validation:XValidation:rule=`self.matches('^([0-9]{1,5}(h|m|s|ms)){1,4}$') && duration(self) <= duration('8760h')`,message="retention must be at most 8760h (a year); write it like 90m, 24h or 168h"
	// +kubebuilder:default="168h"
	// +optional
	Retention *Duration `json:"retention,omitempty"`

	// The size limit of this destination's dead letters, over all dispatchers: each keeps an equal part. Above
	// it the oldest are removed, after at least a minute; with 0, all are. A further dispatcher removes none. 0 to
	// 1Ti, default 1Gi.
	// +kubebuilder:validation:XValidation:rule="quantity(string(self)).compareTo(quantity('0')) >= 0 && quantity(string(self)).compareTo(quantity('1Ti')) <= 0",message="maxBytes must be between 0 and 1Ti"
	// +kubebuilder:default="1Gi"
	// +optional
	MaxBytes *resource.Quantity `json:"maxBytes,omitempty"`

	// Experimental: can change or be removed in a minor release.
	// Another destination that also gets each new dead letter. Default: none.
	// +optional
	ForwardTo *ForwardTo `json:"forwardTo,omitempty"`
}

// ForwardTo names the destination that also gets the dead letters of a destination.
type ForwardTo struct {
	// A WebhookDestination in this namespace that lists the built-in Source
	// posthorn-dead-letters, which has the dead letters that are forwarded to it, in sourceRefs, and
	// forwards none itself. Until there is one,
	// ResolvedRefs is False (DestinationNotFound, InvalidForwardTarget), messages are delivered,
	// and dead letters wait for it up to their retention.
	// +required
	DestinationRef ObjectReference `json:"destinationRef"`
}

// WebhookDestinationStatus is the observed state of a destination, from the spec and from real
// traffic.
type WebhookDestinationStatus struct {
	// The conditions Accepted, ResolvedRefs, Programmed, Ready and Delivering;
	// Stalled is present only while it is True. Conditions of other types, which
	// other controllers set, are kept.
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// The generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	Summary `json:",inline"`

	// Hash of the newest compiled form of the destination. It changes when the spec, a
	// referenced Secret or the set of Sources changes.
	// +kubebuilder:validation:MaxLength=64
	// +optional
	Revision string `json:"revision,omitempty"`

	// The time at which revision last changed.
	// +optional
	RevisionTime *metav1.Time `json:"revisionTime,omitempty"`

	// One entry per endpoint, from real traffic over all dispatcher pods.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=5
	// +optional
	Endpoints []EndpointStatus `json:"endpoints,omitempty"`

	// The time of the numbers in this status. They are written with every transition,
	// and otherwise at most every 30 s for an object and 20 times a second for all
	// objects.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`

	// The ledger of the destination, as of observedTime.
	// +optional
	Delivery *DeliveryStatus `json:"delivery,omitempty"`

	// The time of the last successful delivery, as of observedTime.
	// +optional
	LastSuccessTime *metav1.Time `json:"lastSuccessTime,omitempty"`
}

// EndpointState is the health of an endpoint.
// +kubebuilder:validation:Enum=Healthy;Degraded;CircuitOpen;Gone;Idle
type EndpointState string

// The endpoint states.
const (
	// EndpointHealthy: the latest deliveries succeeded.
	EndpointHealthy EndpointState = "Healthy"
	// EndpointDegraded: deliveries fail, or the endpoint is recovering after an outage.
	EndpointDegraded EndpointState = "Degraded"
	// EndpointCircuitOpen: the endpoint failed so often that only probes are sent.
	EndpointCircuitOpen EndpointState = "CircuitOpen"
	// EndpointGone: the endpoint answered 410 (Gone), and one probe an hour is sent.
	EndpointGone EndpointState = "Gone"
	// EndpointIdle: nothing has been sent yet, or nothing since a change after failures.
	EndpointIdle EndpointState = "Idle"
)

// EndpointStatus is the health of one endpoint.
type EndpointStatus struct {
	// Name of the endpoint in spec.endpoints.
	// +kubebuilder:validation:MaxLength=63
	// +required
	Name string `json:"name"`
	// Healthy, Degraded, CircuitOpen, Gone or Idle; the worst over all dispatcher pods.
	// +required
	State EndpointState `json:"state"`
	// The time at which the endpoint last accepted a message.
	// +optional
	LastSuccessTime *metav1.Time `json:"lastSuccessTime,omitempty"`
	// The last failed attempt.
	// +optional
	LastFailure *DeliveryFailure `json:"lastFailure,omitempty"`
	// Messages that have not been sent to this endpoint yet. Under AnyEndpoint
	// another endpoint may have accepted them.
	// +optional
	FirstAttemptsPending int64 `json:"firstAttemptsPending"`
	// Under AnyEndpoint with several endpoints: messages that were never sent to
	// this one, because the retry window ended before, or because the disk was full
	// and another endpoint had accepted them. Messages that no endpoint accepted are
	// dead letters.
	// +optional
	FirstAttemptsSkipped int64 `json:"firstAttemptsSkipped"`
	// Experimental: can change or be removed in a minor release.
	// The endpoint answered 415 to a compressed request. It gets uncompressed ones until its definition
	// changes, or its dispatchers restart.
	// +optional
	CompressionRefused bool `json:"compressionRefused,omitempty"`
}

// DeliveryFailure is a failed attempt, without secrets.
type DeliveryFailure struct {
	// The time of the attempt.
	// +required
	Time metav1.Time `json:"time"`
	// A reason of the condition Delivering, for example TimedOut.
	// +kubebuilder:validation:MaxLength=64
	// +required
	Reason string `json:"reason"`
	// The HTTP status code of the response; absent if there was no response.
	// +optional
	StatusCode int32 `json:"statusCode,omitempty"`
	// A description of the failure.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	Message string `json:"message,omitempty"`
}

// DeliveryStatus counts messages, over all Sources and dispatcher pods.
// Accepted = delivered + filtered + omitted + deadLettered + discarded + pending.
type DeliveryStatus struct {
	// Messages that the destination got, counted by the logs of its Sources, not by their outcomes.
	// +required
	Accepted int64 `json:"accepted"`
	// Messages that were delivered.
	// +required
	Delivered int64 `json:"delivered"`
	// Messages that the filter or the call's integrations excluded.
	// +required
	Filtered int64 `json:"filtered"`
	// Experimental: can change or be removed in a minor release.
	// Messages for which spec.request.body is null.
	// +optional
	Omitted int64 `json:"omitted,omitempty"`
	// Messages that became dead letters, including those that were redelivered, removed
	// or expired since.
	// +required
	DeadLettered int64 `json:"deadLettered"`
	// Dead letters that are stored now.
	// +optional
	DeadLettersStored int64 `json:"deadLettersStored"`
	// Experimental: can change or be removed in a minor release.
	// Dead letters that were forwarded to the destination in spec.deadLetters.forwardTo, since
	// it was set; absent without it.
	// +optional
	DeadLettersForwarded *int64 `json:"deadLettersForwarded,omitempty"`
	// Messages that were discarded because their Source was removed from the destination.
	// +optional
	Discarded int64 `json:"discarded"`
	// Messages that are not attempted yet, in flight, or waiting for a retry. While
	// nothing is sent, they include messages that the filter will exclude.
	// +required
	Pending int64 `json:"pending"`
	// Pending messages that failed at least once and wait for their next attempt.
	// +required
	Retrying int64 `json:"retrying"`
	// The time at which the oldest pending message was accepted.
	// +optional
	OldestPendingTime *metav1.Time `json:"oldestPendingTime,omitempty"`
	// The time of the next retry or probe.
	// +optional
	NextAttemptTime *metav1.Time `json:"nextAttemptTime,omitempty"`
}

// WebhookDestination forwards the calls of its Sources as signed HTTP POSTs to
// up to five URLs. A call is acknowledged when its message is stored. Messages are
// retried until the retry window ends (4 hours by default), and are dead letters after that.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:validation:XValidation:rule="!has(self.spec.deadLetters) || !has(self.spec.deadLetters.forwardTo) || self.spec.deadLetters.forwardTo.destinationRef.name != self.metadata.name",message="spec.deadLetters.forwardTo must not name this destination; name another one"
// +kubebuilder:resource:shortName=whd;pwhd,categories=posthorn
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.reason`
// +kubebuilder:printcolumn:name="Delivering",type=string,JSONPath=`.status.conditions[?(@.type=="Delivering")].status`
// +kubebuilder:printcolumn:name="Pending",type=integer,JSONPath=`.status.delivery.pending`
// +kubebuilder:printcolumn:name="Retrying",type=integer,JSONPath=`.status.delivery.retrying`
// +kubebuilder:printcolumn:name="Last Success",type=date,JSONPath=`.status.lastSuccessTime`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Delivered",type=integer,JSONPath=`.status.delivery.delivered`,priority=1
// +kubebuilder:printcolumn:name="Dead",type=integer,JSONPath=`.status.delivery.deadLettersStored`,priority=1
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`,priority=1
type WebhookDestination struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec WebhookDestinationSpec `json:"spec"`
	// +kubebuilder:default={reason: "Pending", message: "waiting for the operator", conditions: {{type: "Accepted", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "ResolvedRefs", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Programmed", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Ready", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Delivering", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	// +optional
	Status WebhookDestinationStatus `json:"status,omitempty"`
}

// WebhookDestinationList is a list of WebhookDestinations.
// +kubebuilder:object:root=true
type WebhookDestinationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	// +required
	Items []WebhookDestination `json:"items"`
}
