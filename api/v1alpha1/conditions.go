package v1alpha1

// Condition types. Every kind carries Accepted, Programmed and Ready; traffic
// has a condition of its own (Delivering, Receiving), because a receiver's
// outage is not a mistake in the spec and must not fail a rollout.
const (
	// ConditionAccepted says whether the spec is valid and every reference in it resolves.
	ConditionAccepted = "Accepted"
	// ConditionProgrammed says whether every ready dispatcher pod has confirmed
	// that it runs what this generation of the object asks for.
	ConditionProgrammed = "Programmed"
	// ConditionReady is Accepted and Programmed. Wait on this one.
	ConditionReady = "Ready"
	// ConditionDelivering tells from real traffic whether a WebhookDestination's
	// endpoints take what is sent to them. Unknown until the first delivery.
	ConditionDelivering = "Delivering"
	// ConditionReceiving tells from real traffic whether calls arrive for a
	// Source. Unknown until the first call.
	ConditionReceiving = "Receiving"
	// ConditionSynced tells how the last sync of an Audience went. Unknown until the first one.
	ConditionSynced = "Synced"
	// ConditionFinished says whether every notification of a DeletionRequest has its final state.
	ConditionFinished = "Finished"
)

// Reasons of Accepted.
const (
	// ReasonAccepted: the spec is valid and every reference resolves.
	ReasonAccepted = "Accepted"
	// ReasonInvalidSpec: the spec breaks a rule that the API server enforces,
	// because the object was stored under older CRDs than this version's.
	ReasonInvalidSpec = "InvalidSpec"
	// ReasonDisabled: spec.enabled is false. Accepted stays True with this
	// reason; a disabled Source refuses calls, a disabled WebhookDestination
	// keeps them up to its retry window.
	ReasonDisabled = "Disabled"
	// ReasonSecretNotFound: a referenced Secret does not exist in the namespace.
	ReasonSecretNotFound = "SecretNotFound"
	// ReasonSecretKeyMissing: a referenced Secret has no such key, or it is empty.
	ReasonSecretKeyMissing = "SecretKeyMissing"
	// ReasonInvalidSecret: a referenced Secret's value cannot be used, for
	// example a certificate that does not parse or a header value with a line break.
	ReasonInvalidSecret = "InvalidSecret"
	// ReasonInvalidURL: an endpoint's URL, given or read from a Secret, is not a usable http or https URL.
	ReasonInvalidURL = "InvalidURL"
	// ReasonInvalidFilter: spec.filter does not compile, or may cost too much to evaluate.
	ReasonInvalidFilter = "InvalidFilter"
	// ReasonNoSource: spec.sources names a Source that does not exist, or its selector matches none.
	ReasonNoSource = "NoSource"
	// ReasonEgressDenied: an endpoint's URL names an address that the cluster's admin does not allow.
	ReasonEgressDenied = "EgressDenied"
	// ReasonWriteKeyConflict: another Source already uses the same write key. The older Source keeps it.
	ReasonWriteKeyConflict = "WriteKeyConflict"
	// ReasonKeyConflict: another Audience of the same Source already has the same key. The older Audience keeps it.
	ReasonKeyConflict = "KeyConflict"
	// ReasonConfigTooLarge: the namespace's live config would not fit into one
	// Secret with this object. A destination is held, its messages are kept.
	ReasonConfigTooLarge = "ConfigTooLarge"
)

// Reasons of Programmed.
const (
	// ReasonProgrammed: every ready dispatcher pod runs this generation.
	ReasonProgrammed = "Programmed"
	// ReasonPending: some ready dispatcher pods have not confirmed this generation yet.
	ReasonPending = "Pending"
	// ReasonNoDispatcher: no dispatcher pod is ready.
	ReasonNoDispatcher = "NoDispatcher"
	// ReasonConfigRefused: a dispatcher pod refused the config and keeps the one before.
	ReasonConfigRefused = "ConfigRefused"
	// ReasonNotAccepted: the object is not accepted, so there is nothing to program.
	ReasonNotAccepted = "NotAccepted"
)

// Reasons of Ready. When Ready is False its reason is that of the condition that keeps it False.
const (
	// ReasonReady: Accepted and Programmed are both True.
	ReasonReady = "Ready"
)

// Reasons of Delivering. The ones after CircuitOpen classify a failed attempt
// and are also the reasons of status.endpoints[].lastFailure and of dead letters.
const (
	// ReasonDelivering: the latest deliveries succeeded.
	ReasonDelivering = "Delivering"
	// ReasonNoTrafficYet: nothing has been sent to (or received for) this object
	// yet, or not since it was changed when deliveries failed.
	ReasonNoTrafficYet = "NoTrafficYet"
	// ReasonHeld: messages are kept and not sent, because the object is not accepted or is disabled.
	ReasonHeld = "Held"
	// ReasonEndpointFailing: deliveries to an endpoint fail, for more than one reason.
	ReasonEndpointFailing = "EndpointFailing"
	// ReasonCircuitOpen: an endpoint failed so often that only probes are sent to it.
	ReasonCircuitOpen = "CircuitOpen"
	// ReasonTimedOut: the endpoint did not answer within the timeout.
	ReasonTimedOut = "TimedOut"
	// ReasonConnectionRefused: nothing listens at the endpoint's address.
	ReasonConnectionRefused = "ConnectionRefused"
	// ReasonConnectionFailed: the connection broke, or could not be made for another reason.
	ReasonConnectionFailed = "ConnectionFailed"
	// ReasonDNSFailed: the endpoint's host name does not resolve.
	ReasonDNSFailed = "DNSFailed"
	// ReasonCertificateRejected: the endpoint's TLS certificate cannot be verified
	// (self-signed, expired, unknown authority, wrong name). Nothing was sent.
	ReasonCertificateRejected = "CertificateRejected"
	// ReasonTLSFailed: the TLS handshake failed for another reason.
	ReasonTLSFailed = "TLSFailed"
	// ReasonAddressDenied: the endpoint's name resolves to an address that the egress guard denies.
	ReasonAddressDenied = "AddressDenied"
	// ReasonServerError: the endpoint answered with a 5xx status.
	ReasonServerError = "ServerError"
	// ReasonThrottled: the endpoint answered 429 or 408.
	ReasonThrottled = "Throttled"
	// ReasonRejected: the endpoint answered with a 4xx status that is not retried.
	ReasonRejected = "Rejected"
	// ReasonRedirected: the endpoint answered with a redirect; redirects are not followed.
	ReasonRedirected = "Redirected"
	// ReasonInvalidResponse: the endpoint's answer is not valid HTTP.
	ReasonInvalidResponse = "InvalidResponse"
	// ReasonExpired: the message was not delivered within the retry window.
	ReasonExpired = "Expired"
)

// Reasons of Receiving.
const (
	// ReasonReceiving: calls have been accepted for this Source.
	ReasonReceiving = "Receiving"
	// ReasonRejectingCalls: calls arrive for this Source, and the latest ones were all refused.
	ReasonRejectingCalls = "RejectingCalls"
	// ReasonStoragePressure: the dispatcher refuses calls because its storage, or this Source's quota, is full.
	ReasonStoragePressure = "StoragePressure"
)

// Reasons of Synced.
const (
	// ReasonSynced: the last sync was taken, and every change is on its way.
	ReasonSynced = "Synced"
	// ReasonSending: the last sync was taken; its identify calls are being put into the queue.
	ReasonSending = "Sending"
	// ReasonSyncRefused: the latest sync was refused and changed nothing.
	ReasonSyncRefused = "SyncRefused"
	// ReasonNoSyncYet: no sync has come yet.
	ReasonNoSyncYet = "NoSyncYet"
)

// Of a Redelivery.
const (
	// ConditionComplete says whether a Redelivery has ended. False while it runs,
	// and with ReasonRedeliveryFailed when not all that matched could be redelivered.
	ConditionComplete = "Complete"
	// ReasonDestinationNotFound: the WebhookDestination does not exist in the
	// namespace. The Redelivery waits for it.
	ReasonDestinationNotFound = "DestinationNotFound"
	// ReasonWaiting: other Redeliveries run, or no dispatcher pod is ready.
	ReasonWaiting = "Waiting"
	// ReasonRunning: dead letters are counted or redelivered.
	ReasonRunning = "Running"
	// ReasonRedelivered: all that matched were redelivered.
	ReasonRedelivered = "Redelivered"
	// ReasonCounted: a dry run has counted what would be redelivered.
	ReasonCounted = "Counted"
	// ReasonRedeliveryFailed: it ended, and some that matched were not redelivered.
	ReasonRedeliveryFailed = "RedeliveryFailed"
)

// Reasons of Finished.
const (
	// ReasonDelivered: every notification was delivered, or filtered out.
	ReasonDelivered = "Delivered"
	// ReasonNotDelivered: some notifications were dead-lettered or discarded; all have their final state.
	ReasonNotDelivered = "NotDelivered"
	// ReasonNobodyToTell: no affected Source has an enabled WebhookDestination.
	ReasonNobodyToTell = "NobodyToTell"
	// ReasonNotifying: some notifications are pending.
	ReasonNotifying = "Notifying"
)
