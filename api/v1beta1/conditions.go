package v1beta1

// Condition types. Source, WebhookDestination and Audience have Accepted,
// ResolvedRefs, Programmed and Ready, and one condition for traffic (Receiving,
// Delivering, Synced). The traffic condition does not change Ready, because a
// receiver's outage is not an error in the spec and must not fail a rollout. Until
// the operator has processed an object, its conditions are Unknown with the reason Pending.
const (
	// ConditionAccepted reports whether the spec is valid and can take effect.
	ConditionAccepted = "Accepted"
	// ConditionResolvedRefs reports whether every Secret, ConfigMap, key and Source that the
	// spec refers to exists and has a usable value.
	ConditionResolvedRefs = "ResolvedRefs"
	// ConditionProgrammed reports whether every ready dispatcher pod has confirmed
	// that it runs this revision of the object. A pod that starts, stops or does not
	// respond to the operator does not change it.
	ConditionProgrammed = "Programmed"
	// ConditionReady is True when Accepted, ResolvedRefs and Programmed are True;
	// otherwise it has the reason and message of the first of them that is not. It is
	// the condition for `kubectl wait`.
	ConditionReady = "Ready"
	// ConditionStalled is present, and True, while a person has to change
	// something before the object can become Ready: the spec, or a value in a
	// Secret or a ConfigMap. Missing objects, dispatcher pods, receivers and traffic never set it.
	// Of a Redelivery or DeletionRequest it is also True when the run has failed, for any reason.
	ConditionStalled = "Stalled"
	// ConditionDelivering reports from real traffic whether a WebhookDestination's endpoints accept
	// messages. Unknown until the first delivery.
	ConditionDelivering = "Delivering"
	// ConditionReceiving reports from real traffic whether calls arrive for a Source. Unknown until
	// the first call.
	ConditionReceiving = "Receiving"
	// ConditionSynced reports the result of the last sync of an Audience. Unknown until the first
	// one.
	ConditionSynced = "Synced"
)

// Reasons of Accepted.
const (
	// ReasonAccepted: the spec is valid.
	ReasonAccepted = "Accepted"
	// ReasonInvalidSpec: spec.success.expression does not compile, or the spec breaks a rule that the API server
	// enforces, because the object was stored under the CRDs of an older release. Action: correct the field that
	// the message names.
	ReasonInvalidSpec = "InvalidSpec"
	// ReasonSuspended: spec.suspend is true. Accepted remains True with this reason; a
	// suspended Source rejects calls with 503, so that clients send them again, and the messages
	// of a suspended WebhookDestination wait, without an effect on their retry windows.
	// Action: set spec.suspend to false when calls are to be received or delivered again.
	ReasonSuspended = "Suspended"
	// ReasonInvalidURL: an endpoint's URL, given or read from a Secret, is not a usable http
	// or https URL. Action: correct the URL.
	ReasonInvalidURL = "InvalidURL"
	// ReasonInvalidFilter: spec.filter does not compile, or its evaluation may be too
	// expensive. Calls that are accepted during this time become dead letters FilterFailed.
	// Action: correct the filter; the message has the position. Then redeliver the dead letters.
	ReasonInvalidFilter = "InvalidFilter"
	// ReasonCeilingExceeded: the timeout or the retry window is above the installation's
	// ceiling. Action: lower it, or ask the administrator to raise the ceiling.
	ReasonCeilingExceeded = "CeilingExceeded"
	// ReasonEgressDenied: an endpoint's URL names an address that the administrator of
	// Posthorn does not allow. Action: use another URL, or ask the administrator to add the
	// address to egressAllow.
	ReasonEgressDenied = "EgressDenied"
	// ReasonWriteKeyConflict: another Source has the same write key and keeps it. Action: set
	// another write key, or delete the other Source.
	ReasonWriteKeyConflict = "WriteKeyConflict"
	// ReasonWriteKeyReserved: the write key belonged to a Source of another namespace, for
	// which it is reserved for 7 days after its removal. Action: set another write key, or ask
	// the administrator to release it.
	ReasonWriteKeyReserved = "WriteKeyReserved"
	// ReasonKeyConflict: another Audience of the same Source has the same key. The older
	// Audience keeps it. Action: set another spec.key.
	ReasonKeyConflict = "KeyConflict"
	// ReasonExpressionBudget: the expressions of the namespace, or of all namespaces, would need too much memory
	// of the dispatchers with this one. Accepted expressions are not taken back. Action: remove or shorten expressions;
	// the message contains the numbers.
	ReasonExpressionBudget = "ExpressionBudget"
	// ReasonConfigTooLarge: the namespace's live config would not fit into its Secrets with
	// this object. Messages of a destination are kept and not sent. Action: remove
	// destinations, headers or large certificates, or use another namespace.
	ReasonConfigTooLarge = "ConfigTooLarge"
)

// Reasons of ResolvedRefs.
const (
	// ReasonResolvedRefs: every reference resolves to a usable value.
	ReasonResolvedRefs = "ResolvedRefs"
	// ReasonSecretNotFound: a referenced Secret does not exist in the namespace. Action:
	// create the Secret, or correct the reference; no restart is necessary.
	ReasonSecretNotFound = "SecretNotFound"
	// ReasonSecretKeyMissing: a referenced Secret does not have the key, or its value is
	// empty. Action: add the key to the Secret, or correct the reference.
	ReasonSecretKeyMissing = "SecretKeyMissing"
	// ReasonInvalidSecret: the value in a referenced Secret cannot be used, for example a
	// certificate that does not parse or a header value with a line break. Action: correct
	// the value in the Secret.
	ReasonInvalidSecret = "InvalidSecret"
	// ReasonConfigMapNotFound: a referenced ConfigMap does not exist in the namespace. Action:
	// create the ConfigMap, or correct the reference; no restart is necessary.
	ReasonConfigMapNotFound = "ConfigMapNotFound"
	// ReasonConfigMapKeyMissing: a referenced ConfigMap does not have the key, or its value is
	// empty. Action: add the key to the ConfigMap, or correct the reference.
	ReasonConfigMapKeyMissing = "ConfigMapKeyMissing"
	// ReasonInvalidConfigMap: the value in a referenced ConfigMap cannot be used, for example a
	// certificate that does not parse. Action: correct the value in the ConfigMap.
	ReasonInvalidConfigMap = "InvalidConfigMap"
	// ReasonNoSource: a referenced Source does not exist in the namespace, or the selector
	// matches none. Action: create the Source, or correct the reference or the labels.
	ReasonNoSource = "NoSource"
	// ReasonInvalidForwardTarget: the destination in spec.deadLetters.forwardTo does not list the
	// Source posthorn-dead-letters, or forwards dead letters itself. Messages are delivered;
	// dead letters wait. Action: change that destination, or name another one.
	ReasonInvalidForwardTarget = "InvalidForwardTarget"
)

// ReasonsWithDelivery are the reasons of ResolvedRefs with which a WebhookDestination delivers
// messages, if one of its Sources exists.
var ReasonsWithDelivery = []string{ReasonInvalidForwardTarget, ReasonDestinationNotFound, ReasonNoSource}

// Reasons of Programmed.
const (
	// ReasonProgrammed: every ready dispatcher runs this revision.
	ReasonProgrammed = "Programmed"
	// ReasonPending: some ready dispatchers have not confirmed this revision yet; with
	// the status Unknown, the operator has not processed the object yet. Action: wait some
	// seconds; then check the logs of the dispatchers, or of the operator.
	ReasonPending = "Pending"
	// ReasonNoDispatcher: no dispatcher has been ready for 2 minutes, or the object was changed while none
	// was. Action: check the logs of the dispatchers.
	ReasonNoDispatcher = "NoDispatcher"
	// ReasonUnowned: no dispatcher has owned the namespace's part of the replicated log for a minute: its
	// calls get 503, and nothing is sent. Action: run kubectl posthorn slots, which shows the
	// reason of each dispatcher.
	ReasonUnowned = "Unowned"
	// ReasonConfigRefused: a dispatcher rejected the config and keeps the previous one.
	// Action: update operator and dispatchers to one version; the message contains the cause.
	ReasonConfigRefused = "ConfigRefused"
	// ReasonDispatcherTooOld: a dispatcher of an older release does not know a field of the destination, so it
	// sends nothing to it, and the messages wait there. Action: update the dispatchers.
	ReasonDispatcherTooOld = "DispatcherTooOld"
	// ReasonNotAccepted: Accepted is False, so the object has no effect. Action: see the
	// reason of Accepted.
	ReasonNotAccepted = "NotAccepted"
	// ReasonUnresolvedRefs: ResolvedRefs is False, so the object has no effect. Action: see
	// the reason of ResolvedRefs.
	ReasonUnresolvedRefs = "UnresolvedRefs"
)

// Reasons of Ready. If Ready is False, it has the reason of the first condition that is not True.
const (
	// ReasonReady: Accepted, ResolvedRefs and Programmed are True.
	ReasonReady = "Ready"
	// ReasonDiscardAhead: as Ready, but pending messages of the object will be discarded, because what
	// they belong to was deleted. The message contains the time. Action: to keep them, create what was deleted
	// again before that time.
	ReasonDiscardAhead = "DiscardAhead"
	// ReasonManifestRejected: posthorn run rejected the manifest of the object, and an earlier
	// version of it remains in effect. The message has the file, the line and the rule. Action:
	// correct the manifest; posthorn problems lists all problems.
	ReasonManifestRejected = "ManifestRejected"
)

// Reasons of Delivering. The reasons after CircuitOpen classify a failed attempt;
// status.endpoints[].lastFailure and dead letters have them, too.
const (
	// ReasonDelivering: the latest deliveries succeeded.
	ReasonDelivering = "Delivering"
	// ReasonNoTrafficYet: nothing has been sent to (or received for) this object yet, or not
	// since it was changed when deliveries failed. Action: send a call; check whether the
	// Source receives calls and whether the filter excludes them.
	ReasonNoTrafficYet = "NoTrafficYet"
	// ReasonPaused: messages are kept up to the retry window and not sent, because the
	// destination is not accepted or a reference does not resolve. Action: see the reasons of
	// Accepted and ResolvedRefs.
	ReasonPaused = "Paused"
	// ReasonEndpointFailing: deliveries to an endpoint fail, for more than one reason.
	// Action: see status.endpoints, or run posthorn why.
	ReasonEndpointFailing = "EndpointFailing"
	// ReasonEndpointGone: an endpoint returned 410 (Gone), so it gets one probe an hour.
	// Action: correct the URL, or remove the endpoint; a change of the destination triggers a
	// probe.
	ReasonEndpointGone = "EndpointGone"
	// ReasonCircuitOpen: an endpoint failed so often that only probes are sent to it.
	// Action: repair the receiver; the next probe that succeeds closes the circuit.
	ReasonCircuitOpen = "CircuitOpen"
	// ReasonTimedOut: the endpoint did not respond within the timeout. Action: let the
	// receiver store the message first and process it later; see spec.delivery.timeout.
	ReasonTimedOut = "TimedOut"
	// ReasonConnectionRefused: nothing listens at the endpoint's address. Action: start the
	// receiver, or correct host and port of the URL.
	ReasonConnectionRefused = "ConnectionRefused"
	// ReasonConnectionFailed: the connection broke, or could not be established for another reason.
	// Action: check the network between the dispatchers and the receiver.
	ReasonConnectionFailed = "ConnectionFailed"
	// ReasonDNSFailed: the endpoint's host name does not resolve. Action: correct the host
	// name, or its DNS record.
	ReasonDNSFailed = "DNSFailed"
	// ReasonCertificateRejected: the endpoint's TLS certificate cannot be verified
	// (self-signed, expired, unknown authority, wrong name). Nothing was sent. Action: use a
	// certificate of a known authority, or set endpoints[].tls.ca to the CA that
	// issued it; a self-signed certificate is rejected even if it is listed there.
	ReasonCertificateRejected = "CertificateRejected"
	// ReasonTLSFailed: the TLS handshake failed for another reason. Action: check that the
	// receiver accepts TLS at this port, and whether it requires a client certificate.
	ReasonTLSFailed = "TLSFailed"
	// ReasonAddressDenied: the endpoint's name resolves to an address that the egress policy
	// denies. Action: ask the administrator to add the address to egressAllow, or use
	// another URL.
	ReasonAddressDenied = "AddressDenied"
	// ReasonTokenFailed: no OAuth 2.0 access token for the endpoint could be obtained; nothing
	// was sent. Action: see the message; check endpoints[].authentication.oauth2 and the token
	// endpoint.
	ReasonTokenFailed = "TokenFailed"
	// ReasonProxyFailed: the release's egress proxy failed, or has no connection to the endpoint; the
	// message has the proxy's response. Messages are retried. Action: an administrator checks the proxy,
	// its rules and its credentials; if it has no connection to one host only, check the receiver.
	ReasonProxyFailed = "ProxyFailed"
	// ReasonServerError: the endpoint returned a 5xx status. Action: see the receiver's
	// log.
	ReasonServerError = "ServerError"
	// ReasonThrottled: the endpoint returned 429 or 408. Action: set spec.delivery.rateLimit
	// to what the receiver accepts.
	ReasonThrottled = "Throttled"
	// ReasonRejected: the endpoint returned a 4xx status that is not retried. Action:
	// correct the receiver, the URL, or the headers and secrets that it requires; then
	// redeliver the dead letters. See spec.delivery.retry.statusCodes.
	ReasonRejected = "Rejected"
	// ReasonRedirected: the endpoint returned a redirect; redirects are not followed.
	// Action: set the final URL.
	ReasonRedirected = "Redirected"
	// ReasonInvalidResponse: the endpoint's response is not valid HTTP, or, with delivery.batch.response: PerItem, the body
	// of a 2xx response is no valid list of rejected messages, so the batch is sent again. Action: check the port and the
	// scheme of the URL, or the body that the receiver returns.
	ReasonInvalidResponse = "InvalidResponse"
	// ReasonRejectedByExpression: the endpoint returned a 2xx status, but spec.success.expression is not true for
	// the response; the message of the attempt gives the cause. Action: see the response in posthorn attempts; correct the
	// receiver, or the expression. With onFalse: DeadLetter, redeliver the dead letters.
	ReasonRejectedByExpression = "RejectedByExpression"
	// ReasonTransformFailed: an expression of spec.request failed for the message, so nothing was sent; the
	// failure has the field, the position and the path. Action: correct the expression, then redeliver the dead
	// letters, for which the present expression is evaluated.
	ReasonTransformFailed = "TransformFailed"
	// ReasonTransformFailing: an expression of spec.request failed for so many messages in a row that one
	// message a minute is tried; the others are kept. Action: correct the expression; the next message that it
	// does not fail for ends this.
	ReasonTransformFailing = "TransformFailing"
	// ReasonExpired: the message was not delivered within the retry window. Action: repair
	// the receiver, then redeliver the dead letters.
	ReasonExpired = "Expired"
	// ReasonFilterFailed: the evaluation of spec.filter.expression failed for a call in the last 10 minutes, so it is
	// not known whether the destination wants it: it is a dead letter. Other calls are delivered. Action: correct the
	// expression, then redeliver the dead letters, for which the present expression is evaluated.
	ReasonFilterFailed = "FilterFailed"
)

// Reasons of dead letters, in addition to the reasons of Delivering after CircuitOpen.
const (
	// ReasonEndpointRemoved: the endpoint was removed from the destination, or renamed,
	// while the message was pending. Action: none if the removal was intended; under
	// AnyEndpoint, a redelivery sends the message to the current endpoints.
	ReasonEndpointRemoved = "EndpointRemoved"
	// ReasonDamaged: the stored message is damaged and cannot be read, for example because of
	// a disk error. Action: check the disk; the sender has to send the message again.
	ReasonDamaged = "Damaged"
)

// DeadLetterReasons are the reasons that a dead letter can have.
var DeadLetterReasons = []string{
	ReasonExpired, ReasonRejected, ReasonRedirected, ReasonEndpointRemoved, ReasonDeadlineExceeded, ReasonDamaged, ReasonFilterFailed,
	ReasonTransformFailed, ReasonRejectedByExpression, ReasonTimedOut, ReasonConnectionRefused,
	ReasonConnectionFailed, ReasonDNSFailed, ReasonCertificateRejected, ReasonTLSFailed, ReasonAddressDenied, ReasonTokenFailed,
	ReasonProxyFailed, ReasonServerError, ReasonThrottled, ReasonInvalidResponse,
}

// Reasons of Receiving.
const (
	// ReasonReceiving: calls have been accepted for this Source.
	ReasonReceiving = "Receiving"
	// ReasonRejectingCalls: calls arrive for this Source, and the latest ones were all
	// rejected. Action: correct the sender; the message contains the error code.
	ReasonRejectingCalls = "RejectingCalls"
	// ReasonStoragePressure: calls get 503, because a dispatcher's storage, the
	// namespace's share of it, or this Source's quota is full; the message contains the numbers.
	// Action: repair the receivers with pending messages, or ask the administrator for more
	// storage.
	ReasonStoragePressure = "StoragePressure"
)

// Reasons of Synced.
const (
	// ReasonSynced: the last sync was accepted, and every change is in the queue.
	ReasonSynced = "Synced"
	// ReasonSending: the last sync was accepted; its identify calls are being added to the
	// queue.
	ReasonSending = "Sending"
	// ReasonSyncRefused: the latest sync was rejected and changed nothing. Action: correct
	// the sync; the message has the line and the rule.
	ReasonSyncRefused = "SyncRefused"
	// ReasonNoSyncYet: no sync has been received yet. Action: send the members.
	ReasonNoSyncYet = "NoSyncYet"
)

// Conditions of Redelivery and DeletionRequest, which run once, as a Job of
// batch/v1 does. At the end of a run one of the two becomes True; this is final.
// Ready has the status of Complete, and Stalled is present and True if Failed is True.
const (
	// ConditionComplete reports whether the run completed.
	ConditionComplete = "Complete"
	// ConditionFailed reports whether the run failed.
	ConditionFailed = "Failed"
)

// Reasons of Complete and Failed. Both conditions have the same reason; before
// the end of a run it can also be one of Accepted or ResolvedRefs.
const (
	// ReasonDestinationNotFound: the WebhookDestination does not exist in the
	// namespace. The Redelivery, or the dead letters to forward, wait for it. Also a reason of
	// ResolvedRefs. Action: create it.
	ReasonDestinationNotFound = "DestinationNotFound"
	// ReasonWaiting: the run waits for other Redeliveries of the namespace, or for a dispatcher pod.
	ReasonWaiting = "Waiting"
	// ReasonRunning: dead letters are being redelivered, or notifications are pending.
	ReasonRunning = "Running"
	// ReasonRedelivered: Complete; every dead letter that matched was redelivered.
	ReasonRedelivered = "Redelivered"
	// ReasonCounted: Complete; a dry run has counted the dead letters that match.
	ReasonCounted = "Counted"
	// ReasonDelivered: Complete; every notification was delivered.
	ReasonDelivered = "Delivered"
	// ReasonNoDestinations: Complete; no affected Source has a WebhookDestination whose
	// spec.deletions is not Ignore.
	// Action: none, unless a destination should have been notified; then create it and set
	// another spec.requestID in a new request.
	ReasonNoDestinations = "NoDestinations"
	// ReasonAlreadyDone: Complete; an object with the same namespace, name and spec
	// completed within the last 30 days, so nothing was done. Action: set
	// spec.requestID to run it again.
	ReasonAlreadyDone = "AlreadyDone"
	// ReasonNotRedelivered: Failed; some dead letters that matched were not redelivered.
	// Action: fix the cause in the message, then create the Redelivery again.
	ReasonNotRedelivered = "NotRedelivered"
	// ReasonNotDelivered: Failed; some notifications were dead-lettered or discarded.
	// Action: repair the receiver, then redeliver the dead letters or create the request again.
	ReasonNotDelivered = "NotDelivered"
	// ReasonDeadlineExceeded: Failed; the run did not end within spec.activeDeadlineSeconds. The
	// dead letters of notifications that were pending then have the same reason. Action: repair
	// the receiver, or create the object again with a later deadline.
	ReasonDeadlineExceeded = "DeadlineExceeded"
)
