package liveconfig

// Names for the mutual authentication of a dispatcher's admin listener and its callers in a
// cluster. See docs/adr/0007-access-to-the-admin-listener.md.
const (
	// AdminAudience is the audience of tokens for dispatchers. A dispatcher cannot use such a token
	// for another purpose.
	AdminAudience = "posthorn.dev/dispatcher"
	// AdminServerName is the name in the admin listeners' certificate.
	AdminServerName = "posthorn-dispatcher"
	// AdminCertificateSecret is the kubernetes.io/tls Secret, in the release's namespace, with the
	// certificate and key of all admin listeners. The operator creates it.
	AdminCertificateSecret = "posthorn-dispatcher-admin"
)
