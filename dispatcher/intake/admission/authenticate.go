package admission

import (
	"encoding/base64"
	"net/http"
	"strings"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/writekey"
)

// NotReady returns the refusal of requests before the first full config.
func NotReady() *Refusal {
	return Retry(retrySoon, CodeNotReady, "Posthorn waits for its first config; send the request again")
}

// WriteKey returns the write key of a request's header: the user name of HTTP Basic authentication,
// or "". It tolerates a missing colon and missing padding, because old clients omit them.
func WriteKey(header http.Header) string {
	scheme, encoded, _ := strings.Cut(header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Basic") {
		return ""
	}
	decoded, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(strings.TrimSpace(encoded), "="))
	if err != nil {
		return ""
	}
	user, _, _ := strings.Cut(string(decoded), ":")
	return strings.TrimSpace(user)
}

// Authenticate finds the Source of a write key in a view. source is what a refusal of the request
// counts for: the Source, the former Source of a removed key, or Unidentified. The caller checks
// CheckSuspended next.
func (g *Gate) Authenticate(view *liveconfig.View, key string) (ref liveconfig.SourceRef, source *Source, bad *Refusal) {
	ref, ok := view.SourceByWriteKey(key)
	if ok {
		return ref, g.sourceOf(ref), nil
	}
	if removed, ok := view.RemovedWriteKey(key, g.Now()); ok {
		source := g.Unidentified
		if removed.Exists { // The Source's status shows that senders still use the key.
			source = g.sourceOf(removed.Source)
		}
		return ref, source, Retry(retryAfterRemove, CodeKeyRemoved, removed.Reason)
	}
	if view.ParkedKey(key) {
		return ref, g.Unidentified, Retry(retrySoon, CodeNotReady, "the config of this Source is missing; send the request again")
	}
	if !view.Complete() || g.Listed != nil && g.Listed(key) {
		return ref, g.Unidentified, Retry(retrySoon, CodeNotReady, "some Sources are not loaded yet; send the request again")
	}
	return ref, g.Unidentified, Refuse(http.StatusUnauthorized, CodeUnknownKey, "no accepted Source has this write key; compare it with the Source's Secret")
}

// NamespaceOf returns the namespace of the Source with a write key.
func (g *Gate) NamespaceOf(key writekey.Hash) (namespace string, ok bool) {
	view := g.View()
	if view == nil {
		return "", false
	}
	ref, ok := view.SourceByHash(key)
	return ref.Namespace, ok
}

// CheckSuspended returns the refusal of the requests of a suspended Source, or nil.
func CheckSuspended(s liveconfig.Source) *Refusal {
	if !s.Suspended {
		return nil
	}
	return Retry(retryAfterSuspended, CodeSourceSuspended, "the Source is suspended; send the request again when its spec.suspend is false")
}
