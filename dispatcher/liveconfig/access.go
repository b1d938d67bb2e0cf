package liveconfig

// How callers and a dispatcher's admin listener know one another in a cluster.
// See docs/adr/0007-access-to-the-admin-listener.md.
const (
	// AdminAudience is the audience of a token that is meant for dispatchers. A
	// dispatcher cannot use such a token for anything else.
	AdminAudience = "posthorn.dev/dispatcher"
	// AdminServerName is the name in the admin listeners' certificate.
	AdminServerName = "posthorn-dispatcher"
	// AdminCertificateSecret is the kubernetes.io/tls Secret, in the release's
	// namespace, with the certificate and key of all admin listeners. The operator makes it.
	AdminCertificateSecret = "posthorn-dispatcher-admin"
)
