package compile

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/posthorn/posthorn/api/v1alpha1"
)

// resolver looks up the secrets of one object, notes what is missing, and
// remembers the versions of what it used.
type resolver struct {
	secrets map[string]Secret
	used    map[string]string
	problems
}

func newResolver(secrets map[string]Secret) *resolver {
	return &resolver{secrets: secrets, used: map[string]string{}}
}

// secret returns a Secret, or notes that it is missing.
func (r *resolver) secret(field, name string) (Secret, bool) {
	s, ok := r.secrets[name]
	if !ok {
		r.used[name] = "" // no Secret has an empty version
		r.add(v1alpha1.ReasonSecretNotFound, field, "Secret %q does not exist in this namespace; create it or change the reference", name)
		return s, false
	}
	r.used[name] = "v" + s.Version
	return s, true
}

// value returns the value of a Secret's key, which is not empty, or notes that it is missing.
func (r *resolver) value(field string, ref v1alpha1.SecretKeyReference) ([]byte, bool) {
	s, ok := r.secret(field, ref.Name)
	if !ok {
		return nil, false
	}
	return r.key(field, ref.Name, s, ref.Key)
}

func (r *resolver) key(field, name string, s Secret, key string) ([]byte, bool) {
	value, ok := s.Data[key]
	switch {
	case !ok:
		r.add(v1alpha1.ReasonSecretKeyMissing, field, "Secret %q has no key %q; add the key or change the reference", name, key)
	case len(bytes.TrimSpace(value)) == 0:
		r.add(v1alpha1.ReasonSecretKeyMissing, field, "key %q of Secret %q is empty; fill it or change the reference", key, name)
		ok = false
	}
	return value, ok
}

const maxURLBytes = 2048

// checkURL applies the rules that the API has for spec.endpoints[].url. The
// answer is the rule that is broken, or "", and never holds the URL.
func checkURL(text string) (u *url.URL, broken string) {
	if len(text) > maxURLBytes {
		return nil, fmt.Sprintf("must have at most %d characters", maxURLBytes)
	}
	u, err := url.ParseRequestURI(text) // its error holds the URL
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "" {
		return nil, "must be a full URL that starts with http:// or https:// and names a host"
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			return nil, "must have a port between 1 and 65535"
		}
	}
	if strings.Contains(text, "#") {
		return nil, "must not have a fragment (#...); remove it"
	}
	if u.User != nil || strings.Contains(u.Host, "@") {
		return nil, "must not contain a user name or password; send them in a header with valueFrom"
	}
	return u, ""
}

const (
	maxHeaders          = 32
	maxHeaderNameBytes  = 128
	maxHeaderValueBytes = 4096
)

var (
	headerName  = regexp.MustCompile("^[!#$%&'*+\\-.^_`|~0-9A-Za-z]+$")
	headerValue = regexp.MustCompile(`^[\x20-\x7e\t]*$`)
	// reservedHeaders are set by Posthorn or by HTTP itself; as in the API.
	reservedHeaders = []string{
		"host", "connection", "content-length", "content-type", "content-encoding", "transfer-encoding", "te", "trailer",
		"upgrade", "keep-alive", "proxy-connection", "expect", "user-agent", "x-signature", "x-signature-previous",
		"idempotency-key", "webhook-id", "webhook-timestamp", "webhook-signature", "traceparent", "tracestate",
	}
)

// checkHeaderName returns the rule that a name breaks, or "".
func checkHeaderName(name string) string {
	switch {
	case len(name) > maxHeaderNameBytes || !headerName.MatchString(name):
		return "a header name must be a token of HTTP: letters, digits and !#$%&'*+-.^_`|~, at most 128"
	case slices.Contains(reservedHeaders, strings.ToLower(name)):
		return "this header is set by Posthorn or by HTTP itself; choose another name"
	}
	return ""
}

// checkHeaderValue returns the rule that a value breaks, or "".
func checkHeaderValue(value string) string {
	switch {
	case len(value) > maxHeaderValueBytes:
		return fmt.Sprintf("has more than %d characters; shorten it", maxHeaderValueBytes)
	case strings.ContainsAny(value, "\r\n"):
		return "has a line break, which a header cannot carry; remove it (echo -n makes none)"
	case !headerValue.MatchString(value):
		return "must be printable ASCII; remove other characters or encode them"
	}
	return ""
}

// authorities reads PEM certificates of authorities and returns them alone, in
// their own order, or the rule that is broken. Validity periods are not checked:
// a verdict must not change by time alone; deliveries show it.
func authorities(data []byte) (certificates, broken string) {
	var out bytes.Buffer
	for rest := data; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return "", fmt.Sprintf("holds a PEM block of type %q; keep only CERTIFICATE blocks", pemType(block.Type))
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return "", "holds a certificate that does not parse; replace it by the PEM of the authority's certificate"
		}
		// Without headers and comments, which are free text.
		_ = pem.Encode(&out, &pem.Block{Type: block.Type, Bytes: block.Bytes})
	}
	if out.Len() == 0 {
		return "", "holds no PEM certificate; put the authority's certificate there (-----BEGIN CERTIFICATE-----)"
	}
	return out.String(), ""
}

// pemType shows the usual types, and nothing that somebody may have put there by mistake.
func pemType(t string) string {
	if len(t) <= 32 && strings.HasSuffix(t, "PRIVATE KEY") || t == "PUBLIC KEY" || t == "CERTIFICATE REQUEST" {
		return t
	}
	return "unknown"
}

// clientCertificate reads the certificate chain and key of a kubernetes.io/tls
// Secret, or returns the rule that is broken.
func clientCertificate(cert, key []byte) (certPEM, keyPEM, broken string) {
	certPEM, broken = authorities(cert)
	if broken != "" {
		return "", "", corev1.TLSCertKey + " " + broken
	}
	if _, err := tls.X509KeyPair([]byte(certPEM), key); err != nil {
		return "", "", corev1.TLSPrivateKeyKey + " is not an unencrypted PEM key that fits the first certificate of " + corev1.TLSCertKey + "; replace the pair"
	}
	return certPEM, string(key), ""
}
