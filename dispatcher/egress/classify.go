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

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// stage is how far an attempt got.
type stage int

const (
	stageConnect stage = iota // DNS, TCP and TLS
	stageAnswer               // waiting for the first byte
	stageBody                 // reading the answer
)

// answered classifies a final answer.
func (r *Result) answered(e *Endpoint, a answer, body []byte, now time.Time) {
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

// fail classifies an attempt that got no valid answer. None of its messages
// holds an error's text that could quote the URL or what the endpoint sent.
func (r *Result) fail(ctx context.Context, e *Endpoint, at stage, err error) {
	r.StatusCode = 0
	say := func(reason Reason, format string, args ...any) {
		r.Reason, r.Message = reason, fmt.Sprintf(format, args...)
	}
	if denied, ok := errors.AsType[*deniedError](err); ok {
		say(AddressDenied, "%s", denied)
		return
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		say(ConnectionFailed, "canceled before %s answered", e.host)
		return
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		switch {
		case dns.IsNotFound:
			say(DNSFailed, "DNS knows no address of host %q", e.host)
		case dns.IsTimeout || isTimeout(err):
			say(DNSFailed, "DNS did not answer in time for host %q", e.host)
		default:
			say(DNSFailed, "DNS failed for host %q", e.host)
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
		what := "no connection with " + address
		if handshaking {
			what = "no end of the TLS handshake with " + address
		} else if at == stageAnswer {
			what = "no answer of " + e.host + " (" + address + ")"
		} else if at == stageBody {
			what = "no complete answer of " + e.host + " (" + address + ")"
		}
		say(TimedOut, "%s within the timeout", what)
	case handshaking:
		say(TLSFailed, "%s (%s) closed the connection during the TLS handshake", e.host, address)
	case errors.Is(err, syscall.ECONNREFUSED):
		say(ConnectionRefused, "%s (%s) refused the connection: nothing listens there", e.host, address)
	case errors.As(err, &invalid):
		say(InvalidResponse, "the answer of %s is not valid HTTP: %s", e.host, invalid)
	case alertOf(err) != 0:
		// With TLS 1.3 an endpoint refuses our certificate only after the handshake.
		say(TLSFailed, "%s", alertMessage(e, alertOf(err)))
	case errors.As(err, &record):
		say(TLSFailed, "%s (%s) sent something that is not TLS", e.host, address)
	case isDisconnect(err) && at == stageBody:
		say(ConnectionFailed, "%s (%s) closed the connection in the middle of its answer", e.host, address)
	case isDisconnect(err):
		say(ConnectionFailed, "%s (%s) closed the connection without an answer", e.host, address)
	default:
		why := "for an unknown reason"
		if errno, ok := errors.AsType[syscall.Errno](err); ok {
			why = errno.Error()
		}
		say(ConnectionFailed, "the connection with %s (%s) failed: %s", e.host, address, why)
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

// selfSignedError is a leaf certificate that vouches for itself.
type selfSignedError struct{ leaf *x509.Certificate }

func (*selfSignedError) Error() string { return "the certificate is self-signed" }

// refuseSelfSigned is a tls.Config's VerifyConnection. A self-signed
// certificate is refused also where it is listed as an authority itself, which
// the chain's verification takes for trust.
func refuseSelfSigned(state tls.ConnectionState) error {
	if leaf := state.PeerCertificates[0]; selfSigned(leaf) {
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

// handshakeFailure explains what TLS itself says; "" when the connection broke.
func handshakeFailure(e *Endpoint, err error) (Reason, string) {
	rejected := func(leaf *x509.Certificate, why string) (Reason, string) {
		return CertificateRejected, fmt.Sprintf("certificate of %s is refused, nothing was sent: %s (%s)", e.host, why, describe(leaf))
	}
	if self, ok := errors.AsType[*selfSignedError](err); ok {
		return rejected(self.leaf, whySelfSigned)
	}
	if bad, ok := errors.AsType[*tls.CertificateVerificationError](err); ok && len(bad.UnverifiedCertificates) > 0 {
		leaf := bad.UnverifiedCertificates[0]
		return rejected(leaf, whyUnverified(leaf, bad.Err))
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
	// Texts of the TLS library; the endpoint has seen no more of us than its own name.
	return TLSFailed, fmt.Sprintf("TLS handshake with %s failed: %s", e.host, clip(err.Error()))
}

const whySelfSigned = "it is self-signed, which is never accepted; use one that an authority signed (a private authority's certificate can be given)"

func whyUnverified(leaf *x509.Certificate, err error) string {
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
		return fmt.Sprintf("it is not for this host, but for %q", clip(strings.Join(names, ", ")))
	}
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return "the authority that signed it is not trusted; a private authority's certificate can be given"
	}
	return clip(err.Error())
}

// describe tells which certificate it is.
func describe(leaf *x509.Certificate) string {
	return fmt.Sprintf("subject %q, issuer %q, expires %s, SHA-256 %x",
		clip(leaf.Subject.String()), clip(leaf.Issuer.String()), leaf.NotAfter.UTC().Format(time.RFC3339), sha256.Sum256(leaf.Raw))
}

// alertOf returns the alert with which the endpoint ended TLS, or 0. The
// library hides its type, but not its text.
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
			hint = "; it may want a client certificate, and none is configured"
		}
	case 70: // protocol_version
		hint = "; it has to support TLS 1.2 or 1.3"
	case 42, 43, 44, 45, 46, 48, 49, 116: // about our certificate
		hint = "; it refuses the client certificate"
		if unconfigured {
			hint = "; it asks for a client certificate, and none is configured"
		}
	case 120: // no_application_protocol
		hint = "; it has to support HTTP/1.1"
	}
	return fmt.Sprintf("%s ended the TLS handshake: %s%s", e.host, strings.TrimPrefix(alert.Error(), "tls: "), hint)
}

// clip bounds a text that comes from a certificate or a library.
func clip(s string) string {
	const bound = 200
	if len(s) > bound {
		return strings.ToValidUTF8(s[:bound], "") + "..."
	}
	return s
}

// secretsOf lists what an endpoint knows from Posthorn and may repeat in an
// answer: path and query as a whole and in their parts, header values and their
// words, and decoded Basic credentials. Shorter parts are left in the answer:
// they are no secrets, and their removal would make it unreadable.
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
