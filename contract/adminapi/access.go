package adminapi

import "context"

// Names for the mutual authentication of a dispatcher's admin listener and its callers in a
// cluster. See docs/adr/0007-access-to-the-admin-listener.md.
const (
	// TokenAudience is the audience of tokens for dispatchers. A dispatcher cannot use such a token
	// for another purpose.
	TokenAudience = "posthorn.dev/dispatcher"
	// ServerName is the name in the admin listeners' certificate.
	ServerName = "posthorn-dispatcher"
	// CertificateSecret is the kubernetes.io/tls Secret, in the release's namespace, with the
	// certificate and key of all admin listeners. The operator creates it.
	CertificateSecret = "posthorn-dispatcher-admin"
)

// BodiesPath begins the paths whose responses contain message bodies. They are a permission of
// their own.
const BodiesPath = "/bodies"

// Caller is an authenticated caller of the admin API. Its zero value is a caller of a server without
// authentication.
type Caller struct {
	User string
	// CredentialID names the token in the API server's audit log; empty if it is unknown.
	CredentialID string
}

type callerKey struct{}

// WithCaller returns a context with the caller of a request.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerOf returns the caller of a request.
func CallerOf(ctx context.Context) Caller {
	c, _ := ctx.Value(callerKey{}).(Caller)
	return c
}
