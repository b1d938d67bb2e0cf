package admin

import (
	"log/slog"
	"net/http"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// audit logs who read message bodies, or redelivered or purged dead letters. Its messages begin with
// "audit: ", which exempts them from the suppression of frequent messages.
type audit struct{ to *slog.Logger }

func (a audit) log(r *http.Request, message string, args ...any) {
	caller := adminapi.CallerOf(r.Context())
	if caller.User == "" {
		caller.User = "unauthenticated"
	}
	args = append([]any{"user", caller.User, "remoteAddr", r.RemoteAddr}, args...)
	if caller.CredentialID != "" {
		args = append(args, "credentialId", caller.CredentialID)
	}
	a.to.Info(message, args...) //nolint:sloglint // The callers pass constants.
}
