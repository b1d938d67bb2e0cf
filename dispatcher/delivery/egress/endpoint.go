package egress

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// userAgent of every request.
const userAgent = "Posthorn/1.0"

// Endpoint is a webhook that is prepared for Post. It holds secrets; printed, it shows only its
// name, scheme and host.
type Endpoint struct {
	name     string
	host     string       // the form that is resolved, checked and shown
	address  string       // host and port to dial
	head     []byte       // the constant part of the request, before the headers of an attempt
	marks    marks        // parts of head
	tls      *tls.Config  // nil for http
	redactor *Redactor    // removes the endpoint's secrets from a shown response
	pool     *pool        // nil before Client.Prepare
	released bool         // guarded by the client
	tokens   *tokens      // nil without OAuth 2.0
	proxy    *Proxy       // nil if requests do not use a proxy
	gzip     bool         // bodies are compressed
	refused  *atomic.Bool // true after the endpoint refused a compressed body

	keptAccepted int // 0 if Result.Accepted is not set
}

// marks are positions in a head: the end of the URL's path and of its query, and both ends of the value of Content-Type.
type marks struct{ path, query, contentType, rest int }

// Line is what a request has instead of what all requests of an endpoint have; the zero Line is that of a POST of JSON.
type Line struct {
	// Method and ContentType; empty for POST and application/json.
	Method, ContentType string
	// Path is appended to the path of the URL, and Query to its query; both are percent-encoded. Path has a leading slash.
	Path, Query string
}

// With returns the endpoint for a request with another line. It is used for Post only.
func (e *Endpoint) With(l Line) *Endpoint {
	if l == (Line{}) {
		return e
	}
	head := func(from, to int) string { return string(e.head[from:to]) }
	path, query := head(len(methodPost), e.marks.path), head(e.marks.path, e.marks.query)
	if l.Path != "" {
		path = strings.TrimSuffix(path, "/") + l.Path
	}
	switch {
	case l.Query == "":
	case query == "" || query == "?":
		query = "?" + l.Query
	default:
		query += "&" + l.Query
	}
	of := *e
	of.head = []byte(cmp.Or(l.Method, methodPost) + path + query + head(e.marks.query, e.marks.contentType) +
		cmp.Or(l.ContentType, head(e.marks.contentType, e.marks.rest)) + string(e.head[e.marks.rest:]))
	of.marks = marks{} // They are those of the other head.
	return &of
}

const methodPost = "POST"

// String returns the endpoint's name, scheme and host.
func (e Endpoint) String() string {
	scheme := "http"
	if e.tls != nil {
		scheme = "https"
	}
	return fmt.Sprintf("%s (%s://%s)", e.name, scheme, e.address)
}

// Format implements fmt.Formatter for every verb.
func (e Endpoint) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, e.String()) }

// LogValue implements slog.LogValuer.
func (e Endpoint) LogValue() slog.Value { return slog.StringValue(e.String()) }

// KeepAccepted makes Post set Result.Accepted, with the first n bytes of the body, at most 64 KiB. It must be called before the
// first Post.
func (e *Endpoint) KeepAccepted(n int) { e.keptAccepted = n }

// KeptAccepted returns n of KeepAccepted; 0 if it was not called.
func (e *Endpoint) KeptAccepted() int { return e.keptAccepted }

// Reject makes a failure of a 2xx whose response is kept. why is a text without data of the response.
func (e *Endpoint) Reject(r *Result, reason Reason, why string, now time.Time) {
	r.Reason = reason
	r.Message = fmt.Sprintf("%s answered %d %s, but %s", e.host, r.StatusCode, http.StatusText(r.StatusCode), why)
	r.RetryAfter = parseRetryAfter(r.Accepted.Headers["retry-after"], now)
	r.Response = r.Accepted.redact(r.Accepted.Body)
}

func (e *Endpoint) redactAccepted(c *Client) func([]byte) []byte {
	return func(body []byte) []byte {
		body = e.redactor.Redact(body)
		if e.proxied() {
			body = e.proxy.redact(c.log, body)
		}
		return body
	}
}

// Room is how many more requests should be started beside those in flight to the endpoint, so that
// each has a connection that is kept: as many as it needs while few connections exist, then until
// `needed` are in flight, and finally on the existing connections of its pool or its equal share. A
// new connection costs as much as several requests.
func (e *Endpoint) Room(needed, inFlight int) int {
	if e.pool == nil {
		return math.MaxInt
	}
	return e.pool.room(needed, inFlight)
}

// proxied reports whether the proxy reads the requests and may answer them. Through a tunnel it does
// neither.
func (e *Endpoint) proxied() bool { return e.proxy != nil && e.tls == nil }

// remote is the shown address of a connection. Owners of destinations do not see the proxy's address.
func (e *Endpoint) remote(c net.Conn) string {
	if e.proxy != nil {
		return e.proxy.address
	}
	return c.RemoteAddr().String()
}

// resolvedTo is the address of a connection that the endpoint's name was resolved to; zero if the proxy did it.
func (e *Endpoint) resolvedTo(c net.Conn) netip.Addr {
	if tcp, ok := c.RemoteAddr().(*net.TCPAddr); ok && e.proxy == nil {
		return tcp.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

func prepare(c liveconfig.Endpoint, proxy *Proxy) (*Endpoint, error) {
	fail := func(field, format string, args ...any) (*Endpoint, error) {
		return nil, fmt.Errorf("endpoint %q: %s: "+format, append([]any{c.Name, field}, args...)...)
	}
	// The parser's errors quote the URL, so they must not be returned.
	u, err := url.Parse(c.URL.Reveal())
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Opaque != "" || u.Host == "" {
		return fail("url", "must be a full http or https URL")
	}
	if u.User != nil {
		return fail("url", "must not contain a user name or password; send them in a header")
	}
	e := &Endpoint{name: c.Name, gzip: c.GZip, refused: new(atomic.Bool)}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	} else if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fail("url", "the port must be a number from 1 to 65535")
	}
	var addr netip.Addr
	if e.host, addr, err = parseHost(u.Hostname()); err != nil {
		return fail("url", "%w", err)
	}
	dialHost := e.host
	if !addr.IsValid() && strings.HasSuffix(u.Hostname(), ".") {
		dialHost += "." // the final dot disables search domains
	}
	e.address = net.JoinHostPort(dialHost, port)

	host := e.host
	if addr.Is6() {
		host = "[" + host + "]"
	}
	if u.Port() != "" {
		host += ":" + port
	}
	if proxy.serves(u) {
		e.proxy = proxy
	}
	target := escape(u.RequestURI(), func(b byte) bool { return b > ' ' && b < 0x7f })
	absolute := target
	if e.proxy != nil && u.Scheme == "http" {
		absolute = "http://" + host + target
	}
	head := methodPost + " " + absolute
	e.marks.query = len(head)
	e.marks.path = len(head) - len(target)
	if i := strings.IndexByte(target, '?'); i >= 0 {
		e.marks.path += i
	} else {
		e.marks.path = e.marks.query
	}
	head += " HTTP/1.1\r\nHost: " + host + "\r\nUser-Agent: " + userAgent + "\r\nContent-Type: "
	e.marks.contentType = len(head)
	head += "application/json"
	e.marks.rest = len(head)
	head += "\r\n"
	for _, h := range c.Headers {
		switch value := h.Value.Reveal(); {
		case !httpguts.ValidHeaderFieldName(h.Name):
			return fail("headers", "%q is not a header name", h.Name)
		case liveconfig.IsReservedHeader(h.Name):
			return fail("headers", "%q is reserved for headers that Posthorn or HTTP sets; remove it", h.Name)
		case !httpguts.ValidHeaderFieldValue(value):
			return fail("headers", "the value of %q holds a line break or another control character; remove it", h.Name)
		default:
			head += h.Name + ": " + value + "\r\n"
		}
	}
	e.head = []byte(head)
	e.redactor = NewRedactor(secretsOf(u, target, c.Headers)...)

	if u.Scheme == "http" {
		if c.TLS != nil {
			return fail("tls", "needs an https URL")
		}
		return e, nil
	}
	if e.tls, err = tlsConfig(e.host, c.TLS); err != nil {
		return fail("tls", "%w", err)
	}
	return e, nil
}

// key returns the key of the endpoint's pool.
func (e *Endpoint) key(c *liveconfig.TLS) poolKey {
	key := poolKey{host: e.host, address: e.address}
	if e.tls != nil {
		key.tls = tlsIdentity(c)
	}
	return key
}

func tlsConfig(host string, c *liveconfig.TLS) (*tls.Config, error) {
	config := &tls.Config{
		ServerName:       host,
		MinVersion:       tls.VersionTLS12,
		NextProtos:       []string{"http/1.1"},
		VerifyConnection: refuseSelfSigned,
	}
	if c == nil {
		return config, nil
	}
	if c.CA != "" {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM([]byte(c.CA)) {
			return nil, errors.New("ca holds no certificate in PEM form")
		}
	}
	if key := c.ClientKey.Reveal(); c.ClientCert != "" || key != "" {
		cert, err := tls.X509KeyPair([]byte(c.ClientCert), []byte(key))
		if err != nil {
			return nil, fmt.Errorf("client certificate and key: %w", err)
		}
		// Presented for any list of authorities that the endpoint sends: the owner has chosen it.
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
	}
	return config, nil
}

// appendRequest appends the whole request to dst. encoding is the one of the body, or empty.
func (e *Endpoint) appendRequest(dst []byte, authorization, proxyAuthorization string, headers []Header, encoding string,
	body []byte) []byte {
	dst = append(dst, e.head...)
	if authorization != "" {
		dst = append(dst, "Authorization: "...)
		dst = append(dst, authorization...)
		dst = append(dst, "\r\n"...)
	}
	if proxyAuthorization != "" {
		dst = append(dst, "Proxy-Authorization: "...)
		dst = append(dst, proxyAuthorization...)
		dst = append(dst, "\r\n"...)
	}
	for _, h := range headers {
		dst = appendEscaped(dst, h.Name, validNameByte)
		dst = append(dst, ": "...)
		dst = appendEscaped(dst, h.Value, validValueByte)
		dst = append(dst, "\r\n"...)
	}
	if encoding != "" {
		dst = append(dst, "Content-Encoding: "...)
		dst = append(dst, encoding...)
		dst = append(dst, "\r\n"...)
	}
	dst = append(dst, "Content-Length: "...)
	dst = strconv.AppendInt(dst, int64(len(body)), 10)
	dst = append(dst, "\r\n\r\n"...)
	return append(dst, body...)
}

// Wire returns the whole request of an attempt without a proxy and without compression; an OAuth 2.0 access token in it is a placeholder.
func (e *Endpoint) Wire(headers []Header, body []byte) []byte {
	authorization := ""
	if e.tokens != nil {
		authorization = "Bearer posthorn-placeholder"
	}
	return e.appendRequest(nil, authorization, "", headers, "", body)
}

func validNameByte(b byte) bool  { return httpguts.IsTokenRune(rune(b)) }
func validValueByte(b byte) bool { return b >= ' ' && b != 0x7f || b == '\t' }

// appendEscaped appends s and percent-encodes invalid bytes: a value from a caller of the tracking
// API must not end its header.
func appendEscaped(dst []byte, s string, valid func(byte) bool) []byte {
	for i := range len(s) {
		if b := s[i]; valid(b) {
			dst = append(dst, b)
		} else {
			const hex = "0123456789ABCDEF"
			dst = append(dst, '%', hex[b>>4], hex[b&15])
		}
	}
	return dst
}

func escape(s string, valid func(byte) bool) string {
	return string(appendEscaped(nil, s, valid))
}
