package liveconfig

import (
	"slices"
	"strings"
)

// ReservedHeaders are the names, in lower case, of the request headers that Posthorn, a proxy or HTTP itself sets. A
// config has none of them. The rules of WebhookDestination name them, too.
var ReservedHeaders = []string{
	"host", "connection", "content-length", "content-type", "content-encoding", "transfer-encoding", "te", "trailer",
	"upgrade", "keep-alive", "proxy-connection", "proxy-authorization", "expect", "user-agent", "x-signature",
	"x-signature-previous", "idempotency-key", "webhook-id", "webhook-timestamp", "webhook-signature", "traceparent",
	"tracestate",
}

// IsReservedHeader reports whether a header, in any case, is one of ReservedHeaders.
func IsReservedHeader(name string) bool {
	return slices.Contains(ReservedHeaders, strings.ToLower(name))
}
