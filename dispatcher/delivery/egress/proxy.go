package egress

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http/httpproxy"
)

// Proxy is the HTTP proxy of a release: https URLs use its method CONNECT, http URLs its absolute
// form. The administrator sets it, so its own address is not checked against the Policy. It holds
// credentials; printed, it shows only host and port.
type Proxy struct {
	address     string // host and port to dial, and the name in messages
	credentials *proxyCredentials
	applies     func(*url.URL) (*url.URL, error)
}

// NewProxy makes a Proxy from its URL (http://HOST:PORT), the exceptions in the form of the variable
// NO_PROXY, and a folder with the files username and password, or "" for a proxy without
// authentication. Changes of these files need no restart.
func NewProxy(rawURL string, exceptions []string, credentials string) (*Proxy, error) {
	// The parser's errors quote the URL, which may contain a password.
	u, err := url.Parse(rawURL)
	switch {
	case err != nil || u.Host == "" || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "":
		return nil, errors.New("the proxy must be a URL of the form http://HOST:PORT")
	case u.User != nil:
		return nil, errors.New("the proxy's URL must not contain credentials; put them into a folder with the files username and password")
	case u.Scheme != "http":
		return nil, errors.New("the proxy's URL must begin with http://; requests to https URLs are encrypted through the proxy")
	case u.Port() == "":
		return nil, errors.New("the proxy's URL has no port; use http://HOST:PORT")
	}
	host, addr, err := parseHost(u.Hostname())
	if err != nil {
		return nil, fmt.Errorf("the proxy's %w", err)
	}
	if !addr.IsValid() && strings.HasSuffix(u.Hostname(), ".") {
		host += "."
	}
	for _, entry := range exceptions {
		if entry == "" || strings.ContainsAny(entry, " \t,") {
			return nil, fmt.Errorf("exception %q is not a host name, a domain, an address or a CIDR", entry)
		}
	}
	rules := httpproxy.Config{HTTPProxy: u.String(), HTTPSProxy: u.String(), NoProxy: strings.Join(exceptions, ",")}
	p := &Proxy{address: net.JoinHostPort(host, u.Port()), applies: rules.ProxyFunc()}
	if credentials != "" {
		p.credentials = &proxyCredentials{folder: credentials}
		if _, err := p.credentials.read(); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// String returns the proxy's host and port.
func (p *Proxy) String() string { return p.address }

// Format implements fmt.Formatter for every verb.
func (p *Proxy) Format(f fmt.State, _ rune) { _, _ = fmt.Fprint(f, p.address) }

// LogValue implements slog.LogValuer.
func (p *Proxy) LogValue() slog.Value { return slog.StringValue(p.address) }

// serves reports whether requests to the URL use the proxy. Loopback addresses never do.
func (p *Proxy) serves(u *url.URL) bool {
	if p == nil {
		return false
	}
	via, err := p.applies(u)
	return err == nil && via != nil
}

// authorization returns the value of the header Proxy-Authorization, or "".
func (p *Proxy) authorization(log *slog.Logger) string {
	if p.credentials == nil {
		return ""
	}
	return p.credentials.current(log).header
}

// proxyAuthorization returns the header Proxy-Authorization of a request to the endpoint, or "".
// Requests through a tunnel have none.
func (c *Client) proxyAuthorization(e *Endpoint) string {
	if !e.proxied() {
		return ""
	}
	return e.proxy.authorization(c.log)
}

// redact removes the credentials from a shown response.
func (p *Proxy) redact(log *slog.Logger, response []byte) []byte {
	if p.credentials == nil || len(response) == 0 {
		return response
	}
	return p.credentials.current(log).redactor.Redact(response)
}

// credentialsAge is how long credentials are used before their files are read again.
const credentialsAge = 5 * time.Second

// proxyCredentials are the contents of a mounted Secret.
type proxyCredentials struct {
	folder string

	mu     sync.Mutex
	value  credentialsValue
	readAt time.Time
}

type credentialsValue struct {
	header   string
	redactor *Redactor
}

// current returns the credentials. While the files cannot be read, it returns the previous ones.
func (c *proxyCredentials) current(log *slog.Logger) credentialsValue {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.readAt) >= credentialsAge {
		if _, err := c.readLocked(); err != nil {
			log.Warn("reading the egress proxy's credentials failed; using the previous ones", "error", err)
		}
	}
	return c.value
}

func (c *proxyCredentials) read() (credentialsValue, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.readLocked()
}

func (c *proxyCredentials) readLocked() (credentialsValue, error) {
	c.readAt = time.Now()
	var parts [2]string
	for i, name := range []string{"username", "password"} {
		content, err := os.ReadFile(filepath.Join(c.folder, name))
		if err != nil {
			return c.value, err // the error has the path only
		}
		parts[i] = strings.TrimRight(string(content), "\r\n")
		if !httpguts.ValidHeaderFieldValue(parts[i]) {
			return c.value, fmt.Errorf("%s: contains a line break or another control character", filepath.Join(c.folder, name))
		}
	}
	user, password := parts[0], parts[1]
	if user == "" || strings.Contains(user, ":") {
		return c.value, fmt.Errorf("%s: must be a name without a colon", filepath.Join(c.folder, "username"))
	}
	encoded := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	c.value = credentialsValue{header: "Basic " + encoded, redactor: NewRedactor(password, user+":"+password, encoded)}
	return c.value, nil
}

// proxyError is a failure of the proxy, or one that the proxy reports. Its text has no data of the
// proxy's response except the status.
type proxyError struct{ text string }

func (e *proxyError) Error() string { return e.text }

// connect opens a TCP connection for requests to the endpoint: to the endpoint itself, to the proxy,
// or through the proxy. Before the proxy gets the host's name, the policy checks what can be checked
// without DNS: an address, and names of this machine and of metadata services.
func (c *Client) connect(ctx context.Context, e *Endpoint) (net.Conn, error) {
	if e.proxy == nil {
		return dialHost(ctx, c.dialer(e), e.address)
	}
	if err := c.policy.CheckHost(e.host); err != nil {
		if denied, ok := errors.AsType[*deniedError](err); ok {
			return nil, denied
		}
		return nil, &deniedNameError{err}
	}
	raw, err := dialHost(ctx, net.Dialer{Resolver: c.resolver}, e.proxy.address)
	if err != nil {
		return nil, e.proxy.failed(ctx, e, "no connection to it", err)
	}
	if e.tls == nil {
		return raw, nil
	}
	if err := c.openTunnel(ctx, e, raw); err != nil {
		_ = raw.Close()
		return nil, err
	}
	return raw, nil
}

// deniedNameError is a host that CheckHost denies without an address.
type deniedNameError struct{ error }

// openTunnel requests a tunnel to the endpoint by CONNECT.
func (c *Client) openTunnel(ctx context.Context, e *Endpoint, raw net.Conn) error {
	stop := context.AfterFunc(ctx, func() { _ = raw.SetDeadline(past) })
	defer stop()
	request := "CONNECT " + e.address + " HTTP/1.1\r\nHost: " + e.address + "\r\nUser-Agent: " + userAgent + "\r\n"
	if authorization := e.proxy.authorization(c.log); authorization != "" {
		request += "Proxy-Authorization: " + authorization + "\r\n"
	}
	if _, err := raw.Write([]byte(request + "\r\n")); err != nil {
		return e.proxy.failed(ctx, e, "it did not read CONNECT", err)
	}
	r, budget := bufio.NewReaderSize(raw, 4<<10), maxHeadBytes
	for range maxInterim {
		a, err := readHead(r, &budget, false)
		switch {
		case err != nil:
			return e.proxy.failed(ctx, e, "no answer to CONNECT", err)
		case a.status == http.StatusSwitchingProtocols || a.status >= 200 && a.status != http.StatusOK:
			return e.proxy.answered(e, a.status)
		case a.status != http.StatusOK:
			continue
		case r.Buffered() > 0:
			return &proxyError{fmt.Sprintf("egress proxy %s sent data before the tunnel to %s was used", e.proxy, e.host)}
		case !stop():
			return e.proxy.failed(ctx, e, "no answer to CONNECT", context.Cause(ctx))
		}
		return nil
	}
	return e.proxy.failed(ctx, e, "no answer to CONNECT", protocolError("too many interim (1xx) answers"))
}

// failed describes an error on a connection to the proxy; what is the failed step.
func (p *Proxy) failed(ctx context.Context, e *Endpoint, what string, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err()
	}
	why := "for an unknown reason"
	var invalid protocolError
	var dns *net.DNSError
	var errno syscall.Errno
	switch {
	case errors.As(err, &dns):
		why = "its name does not resolve"
	case isTimeout(err) || ctx.Err() != nil:
		why = "within the timeout"
	case errors.Is(err, syscall.ECONNREFUSED):
		why = "it refused the connection: nothing listens there"
	case errors.As(err, &invalid):
		why = "its response is not valid HTTP: " + invalid.Error()
	case isDisconnect(err):
		why = "it closed the connection"
	case errors.As(err, &errno):
		why = errno.Error()
	}
	return &proxyError{fmt.Sprintf("egress proxy %s, for %s: %s (%s)", p, e.host, what, why)}
}

// answered describes a response of the proxy itself.
func (p *Proxy) answered(e *Endpoint, status int) error {
	hint := ""
	switch status {
	case http.StatusProxyAuthRequired, http.StatusUnauthorized: // tinyproxy sends the second.
		hint = "; it requires other credentials: an administrator must correct them"
	case http.StatusForbidden, http.StatusMethodNotAllowed:
		hint = "; its rules deny this host or port"
	case http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		hint = "; it has no connection to this host"
	}
	return &proxyError{strings.TrimSpace(fmt.Sprintf("egress proxy %s answered %d %s", p, status,
		http.StatusText(status))) + " for " + e.host + hint}
}
