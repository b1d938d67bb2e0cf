package egress

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/oauth2"
	"golang.org/x/oauth2/clientcredentials"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

const (
	// tokenTimeout bounds a token request. It may exceed the deadline of the attempt that
	// needs the token: the next attempt uses its result.
	tokenTimeout = 10 * time.Second
	// After a failed token request the next one waits for minTokenBackoff, doubled with every
	// failure in a row up to maxTokenBackoff.
	minTokenBackoff = time.Second
	maxTokenBackoff = time.Minute
	// minTokenAge is the least age at which a token that the endpoint has never accepted is
	// renewed because of a 401.
	minTokenAge = 30 * time.Second
	// minRenewalInterval bounds the renewals that an endpoint can cause which alternates
	// between accepting and refusing tokens.
	minRenewalInterval = time.Second
	maxTokenBytes      = 16 << 10
)

// tokens requests the access tokens of one endpoint by the client credentials grant of OAuth 2.0
// (RFC 6749, section 4.4), and keeps the current one. It is safe for concurrent use, and has at
// most one token request in progress.
type tokens struct {
	server   *Endpoint // the token endpoint
	config   clientcredentials.Config
	client   *http.Client
	redactor *Redactor // removes the client's secret from a shown answer

	mu       sync.Mutex
	current  *token // nil if there is none
	fetching *fetch // the request in progress, or nil
	failure  error  // of the last request; nil if it succeeded
	failures int    // failed requests in a row
	retryAt  time.Time
}

// token is an access token in the form of the header Authorization.
type token struct {
	authorization string
	obtained      time.Time
	// renewAt is when the next token is requested while this one is still used; expires is when
	// it is not used any more. Both are zero if the server gave no lifetime.
	renewAt, expires time.Time
	// accepted is true if the endpoint answered a request with this token by another status
	// than 401.
	accepted atomic.Bool
	redactor *Redactor
}

// fetch is a token request in progress. Its results may be read after done is closed.
type fetch struct {
	done  chan struct{}
	token *token
	err   error
}

func (c *Client) newTokens(name string, o *liveconfig.OAuth2) (*tokens, error) {
	server, err := prepare(liveconfig.Endpoint{Name: name, URL: liveconfig.NewSecret(o.TokenURL), TLS: o.TLS}, c.proxy)
	if err != nil {
		return nil, fmt.Errorf("oauth2: token endpoint: %w", err)
	}
	t := &tokens{
		server: server,
		config: clientcredentials.Config{
			ClientID: o.ClientID, ClientSecret: o.ClientSecret.Reveal(), TokenURL: o.TokenURL, Scopes: o.Scopes,
			AuthStyle: oauth2.AuthStyleInHeader, EndpointParams: url.Values{},
		},
		redactor: NewRedactor(o.ClientSecret.Reveal(), url.QueryEscape(o.ClientSecret.Reveal())),
	}
	if o.SecretInBody {
		t.config.AuthStyle = oauth2.AuthStyleInParams
	}
	for name, value := range o.Parameters {
		t.config.EndpointParams.Set(name, value)
	}
	t.client = &http.Client{
		Transport:     &tokenTransport{c.newTokenTransport(server), c, server},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return t, nil
}

// newTokenTransport returns a transport to one token endpoint that dials as Client does: the policy
// is checked for each address after DNS, and certificates are verified strictly.
func (c *Client) newTokenTransport(server *Endpoint) *http.Transport {
	dial := func(ctx context.Context) (net.Conn, error) {
		// The transport's dials have no deadline.
		ctx, cancel := context.WithTimeout(ctx, tokenTimeout)
		defer cancel()
		return c.connect(ctx, server)
	}
	var proxy func(*http.Request) (*url.URL, error)
	if server.proxied() {
		proxy = func(*http.Request) (*url.URL, error) {
			return &url.URL{Scheme: "http", Host: server.proxy.address}, nil
		}
	}
	return &http.Transport{
		Proxy:                  proxy,
		DisableKeepAlives:      true, // Tokens are requested rarely.
		MaxResponseHeaderBytes: 64 << 10,
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			raw, err := dial(ctx)
			if err != nil {
				return nil, err
			}
			conn := tls.Client(raw, server.tls)
			if err := conn.HandshakeContext(ctx); err != nil {
				_ = raw.Close()
				return nil, &handshakeError{err: err, remote: server.remote(raw)}
			}
			return conn, nil
		},
	}
}

// tokenTransport sets the headers User-Agent and Proxy-Authorization, and turns the proxy's own
// answers into errors.
type tokenTransport struct {
	http.RoundTripper
	client *Client
	server *Endpoint
}

func (t *tokenTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("User-Agent", userAgent)
	if authorization := t.client.proxyAuthorization(t.server); authorization != "" {
		r.Header.Set("Proxy-Authorization", authorization)
	}
	response, err := t.RoundTripper.RoundTrip(r)
	if err != nil || !t.server.proxied() || response.StatusCode < 400 {
		return response, err
	}
	a := answer{byProxy: response.StatusCode == http.StatusProxyAuthRequired}
	for name, values := range response.Header {
		_ = a.header([]byte(name+": "+strings.Join(values, ",")), false)
	}
	if a.byProxy {
		_ = response.Body.Close()
		return nil, t.server.proxy.answered(t.server, response.StatusCode)
	}
	return response, nil
}

// get returns a token. It waits for a token request until the deadline or until ctx is done.
// Shortly before the current token expires, get returns it and requests the next one.
func (t *tokens) get(ctx context.Context, deadline time.Time) (*token, error) {
	now := time.Now()
	t.mu.Lock()
	waiting := t.failure != nil && now.Before(t.retryAt)
	if current := t.current; current.usable(now) {
		if current.due(now) && !waiting {
			t.startFetch()
		}
		t.mu.Unlock()
		return current, nil
	}
	if waiting && t.fetching == nil {
		defer t.mu.Unlock()
		return nil, t.failure
	}
	f := t.startFetch()
	t.mu.Unlock()

	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-f.done:
		return f.token, f.err
	case <-timer.C:
		return nil, fmt.Errorf("no answer from %s within the timeout", t.server.host)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// renew returns another token than the one that the endpoint refused, and nil if the endpoint's 401
// is not about an outdated token: it has never accepted this one, which is new.
func (t *tokens) renew(ctx context.Context, deadline time.Time, refused *token) (*token, error) {
	t.mu.Lock()
	if t.current == refused {
		age, accepted := time.Since(refused.obtained), refused.accepted.Load()
		switch {
		case !accepted && age < minTokenAge:
			t.mu.Unlock()
			return nil, nil
		case age < minRenewalInterval:
			t.mu.Unlock()
			return nil, fmt.Errorf("the endpoint refuses a token of %s that it accepted before; tokens are renewed at most once in %v", t.server.host, minRenewalInterval)
		}
		t.current = nil
	}
	t.mu.Unlock()
	return t.get(ctx, deadline)
}

// startFetch returns the token request in progress, or starts one. The lock is held.
func (t *tokens) startFetch() *fetch {
	if t.fetching != nil {
		return t.fetching
	}
	f := &fetch{done: make(chan struct{})}
	t.fetching = f
	go func() {
		f.token, f.err = t.request()
		t.mu.Lock()
		defer t.mu.Unlock()
		t.fetching, t.failure = nil, f.err
		if f.err == nil {
			t.current, t.failures = f.token, 0
		} else {
			t.retryAt = time.Now().Add(min(minTokenBackoff<<min(t.failures, 10), maxTokenBackoff))
			t.failures++
		}
		close(f.done)
	}()
	return f
}

// request requests a token.
func (t *tokens) request() (*token, error) {
	// It does not end with the attempts that wait for it, nor with a change of the config.
	ctx, cancel := context.WithTimeout(context.WithValue(context.Background(), oauth2.HTTPClient, t.client), tokenTimeout)
	defer cancel()
	answer, err := t.config.Token(ctx)
	if err != nil {
		return nil, t.explain(ctx, err)
	}
	return t.accept(answer, time.Now())
}

// accept checks the server's answer.
func (t *tokens) accept(answer *oauth2.Token, now time.Time) (*token, error) {
	invalid := func(format string, args ...any) (*token, error) {
		return nil, fmt.Errorf("%s answered with "+format, append([]any{t.server.host}, args...)...)
	}
	value := answer.AccessToken
	switch {
	case !strings.EqualFold(answer.Type(), "Bearer"):
		return invalid("a token of the type %q; only bearer tokens are supported", clip(answer.TokenType))
	case len(value) > maxTokenBytes:
		return invalid("a token of more than %d bytes", maxTokenBytes)
	case !httpguts.ValidHeaderFieldValue(value) || strings.ContainsAny(value, " \t"):
		return invalid("a token that is not valid in a header")
	}
	fresh := &token{authorization: "Bearer " + value, obtained: now, redactor: NewRedactor(value)}
	// Extra returns "" for a missing parameter of a form.
	if in := answer.Extra("expires_in"); answer.Expiry.IsZero() && (in == nil || in == "") {
		return fresh, nil
	}
	lifetime := answer.Expiry.Sub(now)
	if lifetime <= 0 {
		return invalid("a token that has expired already (expires_in)")
	}
	fresh.expires = now.Add(lifetime - min(lifetime/10, 10*time.Second))
	fresh.renewAt = now.Add(lifetime - min(lifetime/4, time.Minute))
	return fresh, nil
}

func (t *token) usable(now time.Time) bool {
	return t != nil && (t.expires.IsZero() || now.Before(t.expires))
}

func (t *token) due(now time.Time) bool { return !t.renewAt.IsZero() && !now.Before(t.renewAt) }

// maxTokenErrorBytes bounds the quoted texts of a token endpoint.
const maxTokenErrorBytes = 200

// explain returns an error without secrets for a failed token request.
func (t *tokens) explain(ctx context.Context, err error) error {
	if refused, ok := errors.AsType[*oauth2.RetrieveError](err); ok {
		return t.explainRefusal(refused)
	}
	if _, ok := errors.AsType[*url.Error](err); ok {
		var r Result
		at := stageAnswer
		if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
			at = stageConnect
		}
		r.fail(ctx, t.server, at, err)
		if r.Reason == ProxyFailed {
			return &proxyError{r.Message}
		}
		return errors.New(r.Message)
	}
	return fmt.Errorf("the answer of %s is not a token in JSON; check the token URL", t.server.host)
}

// errorCodes are the codes of RFC 6749, sections 4.1.2.1 and 5.2.
var errorCodes = []string{
	"invalid_request", "invalid_client", "invalid_grant", "unauthorized_client", "unsupported_grant_type", "invalid_scope",
	"access_denied", "unsupported_response_type", "server_error", "temporarily_unavailable",
}

// explainRefusal describes an error response (RFC 6749, section 5.2).
func (t *tokens) explainRefusal(e *oauth2.RetrieveError) error {
	status := e.Response.StatusCode
	text := strings.TrimSpace(fmt.Sprintf("%s answered %d %s", t.server.host, status, http.StatusText(status)))
	quote := func(s string) string {
		s = string(t.redactor.Redact([]byte(s)))
		return strings.ToValidUTF8(s[:min(len(s), maxTokenErrorBytes)], "")
	}
	if slices.Contains(errorCodes, e.ErrorCode) {
		text += fmt.Sprintf(": %q", e.ErrorCode) // A secret can be a part of it.
	} else if e.ErrorCode != "" {
		text += fmt.Sprintf(": %q", quote(e.ErrorCode))
	}
	if e.ErrorDescription != "" {
		text += fmt.Sprintf(" (%q)", quote(e.ErrorDescription))
	}
	if status/100 == 3 {
		text += "; redirects are not followed: use the final URL"
	}
	return errors.New(text)
}

// postWithToken makes one attempt with an access token. If the endpoint refuses a token that it may
// have accepted before, the request is sent again, once, with a new token.
func (c *Client) postWithToken(ctx context.Context, e *Endpoint, deadline time.Time, headers []Header, body []byte) (r Result) {
	current, err := e.tokens.get(ctx, deadline)
	if err != nil {
		r.tokenFailed(ctx, err)
		return r
	}
	r = c.post(ctx, e, deadline, current.authorization, headers, body)
	if r.StatusCode == http.StatusUnauthorized {
		renewed, err := e.tokens.renew(ctx, deadline, current)
		if err != nil {
			r = Result{Sent: r.Sent, RemoteAddr: r.RemoteAddr, Timing: r.Timing}
			r.tokenFailed(ctx, err)
			return r
		}
		if renewed != nil {
			r.Response = current.redactor.Redact(r.Response)
			current = renewed
			r = c.post(ctx, e, deadline, current.authorization, headers, body)
		}
	}
	if r.StatusCode != 0 && r.StatusCode != http.StatusUnauthorized {
		current.accepted.Store(true)
	}
	r.Response = current.redactor.Redact(r.Response)
	if a := r.Accepted; a != nil {
		redact := a.redact
		a.redact = func(body []byte) []byte { return current.redactor.Redact(redact(body)) }
	}
	return r
}

// tokenFailed classifies an attempt for which no access token could be obtained.
func (r *Result) tokenFailed(ctx context.Context, err error) {
	r.Reason, r.Message = TokenFailed, "no access token: "+err.Error()
	if _, ok := errors.AsType[*proxyError](err); ok {
		r.Reason = ProxyFailed
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		r.Reason, r.Message = ConnectionFailed, "canceled before an access token was obtained"
	}
}
