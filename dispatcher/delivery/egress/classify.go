package egress

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// stage is the progress of an attempt.
type stage int

const (
	stageConnect stage = iota // DNS, TCP and TLS
	stageAnswer               // waiting for the first byte
	stageBody                 // reading the answer
)

// answered classifies a final response.
func (r *Result) answered(e *Endpoint, a answer, body []byte, now time.Time) {
	if e.proxied() && (a.status == http.StatusProxyAuthRequired || a.status >= 400 && a.byProxy) {
		r.Reason, r.Message = ProxyFailed, e.proxy.answered(e, a.status).Error()
		r.RetryAfter = parseRetryAfter(a.retryAfter, now)
		return
	}
	r.StatusCode = a.status
	switch {
	case a.status/100 == 2:
		return
	case a.status/100 == 3:
		r.Reason = Redirected
		r.Message = "; redirects are not followed: use the final URL"
	case a.status == http.StatusTooManyRequests || a.status == http.StatusRequestTimeout:
		r.Reason = Throttled
	case a.status/100 == 4:
		r.Reason = Rejected
	default:
		r.Reason = ServerError
	}
	r.Message = strings.TrimSpace(fmt.Sprintf("%s answered %d %s", e.host, a.status, http.StatusText(a.status))) + r.Message
	r.RetryAfter = parseRetryAfter(a.retryAfter, now)
	r.Response = e.redactor.Redact(body)
}

// fail classifies an attempt without a valid response. Its messages contain no error text that
// could quote the URL or data of the endpoint.
func (r *Result) fail(ctx context.Context, e *Endpoint, at stage, err error) {
	r.StatusCode = 0
	say := func(reason Reason, format string, args ...any) {
		r.Reason, r.Message = reason, fmt.Sprintf(format, args...)
	}
	if denied, ok := errors.AsType[*deniedError](err); ok {
		say(AddressDenied, "%s", denied)
		return
	}
	if denied, ok := errors.AsType[*deniedNameError](err); ok {
		say(AddressDenied, "%s", denied)
		return
	}
	if proxy, ok := errors.AsType[*proxyError](err); ok {
		say(ProxyFailed, "%s", proxy)
		return
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		say(ConnectionFailed, "canceled before %s answered", e.host)
		return
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		switch {
		case dns.IsNotFound:
			say(DNSFailed, "DNS lookup failed: no address for host %q", e.host)
		case dns.IsTimeout || isTimeout(err):
			say(DNSFailed, "DNS lookup timed out for host %q", e.host)
		default:
			say(DNSFailed, "DNS lookup failed for host %q", e.host)
		}
		return
	}
	handshake, handshaking := errors.AsType[*handshakeError](err)
	if handshaking {
		r.RemoteAddr = handshake.remote
	} else if op, ok := errors.AsType[*net.OpError](err); ok && at == stageConnect && op.Addr != nil {
		r.RemoteAddr = op.Addr.String()
	}
	address := r.RemoteAddr
	if address == "" {
		address = e.address
	}
	if e.proxy != nil {
		address = "through egress proxy " + e.proxy.address
	}
	if handshaking {
		if reason, message := handshakeFailure(e, handshake.err); reason != "" {
			say(reason, "%s", message)
			return
		}
	}
	var invalid protocolError
	var record tls.RecordHeaderError
	switch {
	case isTimeout(err) || ctx.Err() != nil:
		what := "no connection to " + address
		if handshaking {
			what = "no complete TLS handshake with " + address
		} else if at == stageAnswer {
			what = "no response from " + e.host + " (" + address + ")"
		} else if at == stageBody {
			what = "no complete response from " + e.host + " (" + address + ")"
		}
		say(TimedOut, "%s within the timeout", what)
	case handshaking:
		say(TLSFailed, "%s (%s) closed the connection during the TLS handshake", e.host, address)
	case errors.Is(err, syscall.ECONNREFUSED):
		say(ConnectionRefused, "%s (%s) refused the connection: nothing listens there", e.host, address)
	case errors.As(err, &invalid):
		say(InvalidResponse, "the response of %s is not valid HTTP: %s", e.host, invalid)
	case alertOf(err) != 0:
		// With TLS 1.3 an endpoint rejects the client certificate only after the handshake.
		say(TLSFailed, "%s", alertMessage(e, alertOf(err)))
	case errors.As(err, &record):
		say(TLSFailed, "%s (%s) sent data that is not TLS", e.host, address)
	case isDisconnect(err) && e.proxied():
		say(ProxyFailed, "egress proxy %s closed the connection before the end of the response of %s", e.proxy, e.host)
	case isDisconnect(err) && at == stageBody:
		say(ConnectionFailed, "%s (%s) closed the connection in the middle of its response", e.host, address)
	case isDisconnect(err):
		say(ConnectionFailed, "%s (%s) closed the connection without a response", e.host, address)
	default:
		why := "for an unknown reason"
		if errno, ok := errors.AsType[syscall.Errno](err); ok {
			why = errno.Error()
		}
		say(ConnectionFailed, "the connection to %s (%s) failed: %s", e.host, address, why)
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}

func isDisconnect(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) ||
		errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNABORTED)
}

// selfSignedError is a self-signed leaf certificate.
type selfSignedError struct{ leaf *x509.Certificate }

func (*selfSignedError) Error() string { return "the certificate is self-signed" }

// refuseSelfSigned is a tls.Config's VerifyConnection. It rejects a self-signed certificate even if
// it is listed as an authority, which the verification of the chain accepts. The certificate of a resumed session
// was checked in the first handshake; the check is a fifth of a resumed one.
func refuseSelfSigned(state tls.ConnectionState) error {
	if leaf := state.PeerCertificates[0]; !state.DidResume && selfSigned(leaf) {
		return &selfSignedError{leaf}
	}
	return nil
}

func selfSigned(leaf *x509.Certificate) bool {
	err := leaf.CheckSignature(leaf.SignatureAlgorithm, leaf.RawTBSCertificate, leaf.Signature)
	if errors.Is(err, x509.ErrUnsupportedAlgorithm) || errors.As(err, new(x509.InsecureAlgorithmError)) {
		return bytes.Equal(leaf.RawSubject, leaf.RawIssuer)
	}
	return err == nil
}

// handshakeFailure explains a TLS error; "" if the connection broke.
func handshakeFailure(e *Endpoint, err error) (Reason, string) {
	rejected := func(leaf *x509.Certificate, why string) (Reason, string) {
		return CertificateRejected, fmt.Sprintf("certificate of %s rejected, nothing was sent: %s (%s)", e.host, why, describe(leaf))
	}
	if self, ok := errors.AsType[*selfSignedError](err); ok {
		return rejected(self.leaf, whySelfSigned)
	}
	if bad, ok := errors.AsType[*tls.CertificateVerificationError](err); ok && len(bad.UnverifiedCertificates) > 0 {
		leaf := bad.UnverifiedCertificates[0]
		return rejected(leaf, whyUnverified(e, bad))
	}
	if alert := alertOf(err); alert != 0 {
		return TLSFailed, alertMessage(e, alert)
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return TLSFailed, fmt.Sprintf("%s does not speak TLS at %s; is it an http URL?", e.host, e.address)
	}
	if isTimeout(err) || isDisconnect(err) || errors.Is(err, context.Canceled) || errors.As(err, new(syscall.Errno)) {
		return "", ""
	}
	// Texts of the TLS library; they contain no data of Posthorn except the host name.
	return TLSFailed, fmt.Sprintf("TLS handshake with %s failed: %s", e.host, clip(err.Error()))
}

const whySelfSigned = "it is self-signed, which is rejected even if tls.ca lists it; use a certificate that a CA issued, and set tls.ca to a private CA"

func whyUnverified(e *Endpoint, bad *tls.CertificateVerificationError) string {
	leaf, err := bad.UnverifiedCertificates[0], bad.Err
	if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok && invalid.Reason == x509.Expired {
		if now := time.Now(); now.Before(invalid.Cert.NotBefore) {
			return "it is not valid before " + invalid.Cert.NotBefore.UTC().Format(time.RFC3339)
		}
		return "it or a certificate above it expired at " + invalid.Cert.NotAfter.UTC().Format(time.RFC3339)
	}
	if selfSigned(leaf) {
		return whySelfSigned
	}
	if _, ok := errors.AsType[x509.HostnameError](err); ok {
		names := slices.Clone(leaf.DNSNames)
		for _, ip := range leaf.IPAddresses {
			names = append(names, ip.String())
		}
		if len(names) == 0 {
			return fmt.Sprintf("it has no subject alternative name (SAN); the common name %q does not count: issue it with the SAN %s", clip(leaf.Subject.CommonName), sanFor(e.host))
		}
		return fmt.Sprintf("it is not valid for this host, but for %q", clip(strings.Join(names, ", ")))
	}
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return whyUntrusted(bad.UnverifiedCertificates, e.tls != nil && e.tls.RootCAs != nil)
	}
	return clip(err.Error())
}

// whyUntrusted explains a chain that does not end at a trusted CA; hasCA is true if the endpoint has CAs of its own.
func whyUntrusted(sent []*x509.Certificate, hasCA bool) string {
	leaf := sent[0]
	last := leaf
	for range sent {
		i := slices.IndexFunc(sent, func(c *x509.Certificate) bool { return bytes.Equal(c.RawSubject, last.RawIssuer) })
		if i < 0 || sent[i] == last {
			break
		}
		last = sent[i]
	}
	set := "set tls.ca to it"
	if hasCA {
		set = "add it to the certificates of tls.ca, which do not contain it"
	}
	issuer := clip(last.Issuer.String())
	const why = "the authority that signed it is not trusted"
	switch {
	case last == leaf && (hasCA || len(leaf.IssuingCertificateURL) > 0): // Certificates of public CAs have the URL.
		return fmt.Sprintf(why+", and the chain is incomplete: the server does not send the certificate of the issuer %q; "+
			"it must send the intermediate certificates after its own one; if the issuer is a private CA without intermediates, %s", issuer, set)
	case last == leaf:
		return fmt.Sprintf(why+": if %q is a private CA, %s; if it is an intermediate of another CA, the server must send it", issuer, set)
	case bytes.Equal(last.RawSubject, last.RawIssuer):
		return fmt.Sprintf(why+": the server sends the root CA %q; if it is a private CA, %s", issuer, set)
	}
	return fmt.Sprintf(why+": the last certificate that the server sends is from the CA %q; if it is a private CA, %s; if it is an intermediate, the server must send it, too", issuer, set)
}

// sanFor returns the subject alternative name of a host.
func sanFor(host string) string {
	if ip := net.ParseIP(strings.Trim(host, "[]")); ip != nil {
		return "IP:" + ip.String()
	}
	return "DNS:" + strings.TrimSuffix(host, ".")
}

// describe identifies a certificate.
func describe(leaf *x509.Certificate) string {
	return fmt.Sprintf("subject %q, issuer %q, expires %s, SHA-256 %x",
		clip(leaf.Subject.String()), clip(leaf.Issuer.String()), leaf.NotAfter.UTC().Format(time.RFC3339), sha256.Sum256(leaf.Raw))
}

// alertOf returns the alert with which the endpoint ended the TLS connection, or 0. The library
// does not export its type, so this uses the text.
func alertOf(err error) tls.AlertError {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "remote error" && op.Err != nil {
		for alert := tls.AlertError(1); alert != 0; alert++ {
			if alert.Error() == op.Err.Error() {
				return alert
			}
		}
	}
	return 0
}

func alertMessage(e *Endpoint, alert tls.AlertError) string {
	hint := ""
	unconfigured := e.tls != nil && e.tls.GetClientCertificate == nil
	switch alert {
	case 40: // handshake_failure
		if unconfigured {
			hint = "; it may require a client certificate, but none is configured"
		}
	case 70: // protocol_version
		hint = "; it must support TLS 1.2 or 1.3"
	case 42, 43, 44, 45, 46, 48, 49, 116: // about the client certificate
		hint = "; it rejects the client certificate"
		if unconfigured {
			hint = "; it requires a client certificate, but none is configured"
		}
	case 120: // no_application_protocol
		hint = "; it must support HTTP/1.1"
	}
	return fmt.Sprintf("%s ended the TLS handshake: %s%s", e.host, strings.TrimPrefix(alert.Error(), "tls: "), hint)
}

// clip shortens a text of a certificate or a library.
func clip(s string) string {
	const bound = 200
	if len(s) > bound {
		return strings.ToValidUTF8(s[:bound], "") + "..."
	}
	return s
}

// secretsOf lists the secrets that an endpoint gets from Posthorn and may repeat in a response:
// path and query as a whole and in parts, header values and their words, and decoded Basic
// credentials. Shorter parts are not secrets, and removing them would make the response unreadable.
func secretsOf(u *url.URL, target string, headers []liveconfig.Header) []string {
	var secrets []string
	add := func(least int, values ...string) {
		for _, v := range values {
			if len(v) >= least && !slices.Contains(secrets, v) {
				secrets = append(secrets, v)
			}
		}
	}
	add(2, target, u.EscapedPath(), u.Path)
	add(8, u.RawQuery)
	for _, text := range []string{u.EscapedPath(), u.Path} {
		add(8, strings.Split(text, "/")...)
	}
	for _, pair := range strings.Split(u.RawQuery, "&") {
		_, value, ok := strings.Cut(pair, "=")
		if !ok {
			value = pair
		}
		plain, _ := url.QueryUnescape(value)
		add(4, value, plain)
	}
	for _, h := range headers {
		value := h.Value.Reveal()
		add(4, value)
		words := strings.Fields(value)
		add(8, words...) // "Bearer ..."
		if len(words) == 2 && strings.EqualFold(words[0], "Basic") {
			if credentials, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(words[1], "=")); err == nil {
				_, password, _ := strings.Cut(string(credentials), ":")
				add(4, string(credentials), password)
			}
		}
	}
	return secrets
}
