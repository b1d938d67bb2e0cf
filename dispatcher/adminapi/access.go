package adminapi

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
