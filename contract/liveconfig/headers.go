package liveconfig

import (
	"slices"
	"strings"
)

// ReservedHeaders are the names, in lower case, of the request headers that Posthorn, a proxy or HTTP itself sets, and
// ReservedPrefixes begin the names of those that Posthorn sets or may set later. A config has none of them. The rules of
// WebhookDestination name them, too.
var (
	ReservedHeaders = []string{
		"host", "connection", "content-length", "content-type", "content-encoding", "transfer-encoding", "te", "trailer",
		"upgrade", "keep-alive", "proxy-connection", "proxy-authorization", "expect", "user-agent", "idempotency-key",
		"traceparent", "tracestate", "baggage",
	}
	ReservedPrefixes = []string{"webhook-", "posthorn-", "x-posthorn-", "x-signature"}
)

// IsReservedHeader reports whether a header, in any case, is one of ReservedHeaders, or begins with one of ReservedPrefixes.
func IsReservedHeader(name string) bool {
	name = strings.ToLower(name)
	return slices.Contains(ReservedHeaders, name) ||
		slices.ContainsFunc(ReservedPrefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}
