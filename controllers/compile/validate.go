package compile

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// resolver looks up the Secrets of one object. It adds a problem for each missing value,
// and records the versions of the used Secrets.
type resolver struct {
	secrets map[string]Secret
	used    map[string]string
	problems
	// notes are warnings about valid but unusual values.
	notes []string
}

func newResolver(secrets map[string]Secret) *resolver {
	return &resolver{secrets: secrets, used: map[string]string{}}
}

// secret returns a Secret, or a ConfigMap by its ConfigMapName, or adds a problem if it does not exist.
func (r *resolver) secret(field, name string) (Secret, bool) {
	s, ok := r.secrets[name]
	r.used[name] = versionOf(s, ok)
	if !ok {
		k, name := valueKindOf(name)
		r.add(k.notFound, field, "%s %q does not exist in this namespace; create it or change the reference", k.kind, name)
		return s, false
	}
	return s, true
}

// has reports whether the Secrets have the versions that another resolver has recorded.
func (r *resolver) has(used map[string]string) bool {
	for name, version := range used {
		if s, ok := r.secrets[name]; version != versionOf(s, ok) {
			return false
		}
	}
	return true
}

// versionOf returns the recorded version of a Secret. No existing Secret has an empty one.
func versionOf(s Secret, exists bool) string {
	if !exists {
		return ""
	}
	return "v" + s.Version
}

// key returns the non-empty value of a key, or adds a problem.
func (r *resolver) key(field, name string, s Secret, key string) ([]byte, bool) {
	value, ok := s.Data[key]
	k, name := valueKindOf(name)
	switch {
	case !ok:
		r.add(k.keyMissing, field, "%s %q has no key %q; add the key or change the reference", k.kind, name, key)
	case len(bytes.TrimSpace(value)) == 0:
		r.add(k.keyMissing, field, "key %q of %s %q is empty; set it or change the reference", key, k.kind, name)
		ok = false
	}
	return value, ok
}

// text returns the value of a Secret's key that is a text of one line: without the line breaks at its end, which
// editors and echo add, and with a note about them. A value that is not UTF-8 is returned unchanged: a shared secret
// may be any bytes.
func (r *resolver) text(field string, ref v1beta1.SecretKeyReference) (string, bool) {
	s, ok := r.secret(field, ref.Name)
	if !ok {
		return "", false
	}
	return r.textOf(field, ref.Name, s, ref.Key)
}

func (r *resolver) textOf(field, name string, s Secret, key string) (string, bool) {
	value, ok := r.key(field, name, s, key)
	text := string(value)
	if !ok || !utf8.ValidString(text) {
		return text, ok
	}
	line := strings.TrimRight(text, "\r\n")
	if strings.ContainsAny(line, "\r\n") {
		r.add(v1beta1.ReasonInvalidSecret, field, "key %q of Secret %q has a line break before its end; store the value in one line", key, name)
		return "", false
	}
	if line != text {
		r.notes = append(r.notes, fmt.Sprintf("%s: key %q of Secret %q ends with a line break, which is not used; store the value without it (--from-literal, or a file written by printf %%s)", field, key, name))
	}
	return line, true
}

const maxURLBytes = 2048

// badPercent matches an invalid percent-encoding (RFC 3986, section 2.1).
var badPercent = regexp.MustCompile(`%([^0-9A-Fa-f]|.[^0-9A-Fa-f]|.?$)`)

// checkURL applies the rules of the API for spec.endpoints[].url. It returns the violated
// rule, or "". The rule does not contain the URL.
func checkURL(text string) (u *url.URL, broken string) {
	if len(text) > maxURLBytes {
		return nil, fmt.Sprintf("must have at most %d characters", maxURLBytes)
	}
	if badPercent.MatchString(text) {
		return nil, "has a % that no two hexadecimal digits follow; write %25 for a percent sign"
	}
	u, err := url.ParseRequestURI(text) // The error contains the URL, so it is not returned.
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
)

// checkHeaderName returns the rule that a name violates, or "".
func checkHeaderName(name string) string {
	switch {
	case len(name) > maxHeaderNameBytes || !headerName.MatchString(name):
		return "a header name must be an HTTP token: letters, digits and !#$%&'*+-.^_`|~, at most 128"
	case liveconfig.IsReservedHeader(name):
		return "this name is reserved for headers that Posthorn or HTTP sets; choose another name"
	}
	return ""
}

// checkHeaderValue returns the rule that a value violates, or "".
func checkHeaderValue(value string) string {
	switch {
	case len(value) > maxHeaderValueBytes:
		return fmt.Sprintf("has more than %d characters; shorten it", maxHeaderValueBytes)
	case strings.ContainsAny(value, "\r\n"):
		return "has a line break, which is not valid in a header; remove it (echo -n writes none)"
	case !headerValue.MatchString(value):
		return "must be printable ASCII; remove other characters or encode them"
	}
	return ""
}

// authorities returns the PEM certificates in data, without other text and in their order,
// or the violated rule. It does not check validity periods: a verdict must not change only
// because of time, and failed deliveries report an expired certificate.
func authorities(data []byte) (certificates, broken string) {
	var out bytes.Buffer
	for rest := data; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return "", fmt.Sprintf("contains a PEM block of type %q; keep only CERTIFICATE blocks", pemType(block.Type))
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return "", "contains a certificate that does not parse; replace it with the authority's certificate in PEM"
		}
		// Drop headers and comments, which are free text.
		_ = pem.Encode(&out, &pem.Block{Type: block.Type, Bytes: block.Bytes})
	}
	if out.Len() == 0 {
		return "", "contains no PEM certificate; store the authority's certificate there (-----BEGIN CERTIFICATE-----)"
	}
	return out.String(), ""
}

// pemType returns a common PEM type, or "unknown": another text may be confidential.
func pemType(t string) string {
	if len(t) <= 32 && strings.HasSuffix(t, "PRIVATE KEY") || t == "PUBLIC KEY" || t == "CERTIFICATE REQUEST" {
		return t
	}
	return "unknown"
}

// clientCertificate returns the certificate chain and the key of a kubernetes.io/tls
// Secret, or the violated rule.
func clientCertificate(cert, key []byte) (certPEM, keyPEM, broken string) {
	certPEM, broken = authorities(cert)
	if broken != "" {
		return "", "", corev1.TLSCertKey + " " + broken
	}
	if _, err := tls.X509KeyPair([]byte(certPEM), key); err != nil {
		return "", "", corev1.TLSPrivateKeyKey + " is not an unencrypted PEM key that matches the first certificate in " + corev1.TLSCertKey + "; replace both"
	}
	return certPEM, string(key), ""
}
