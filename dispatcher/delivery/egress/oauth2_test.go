package egress

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/oauth2"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/wait"
)

const clientSecret = "s3cr3t of the client/+"

// identity is a token endpoint and a receiver that accepts its newest token.
type identity struct {
	tokens, hook *httptest.Server
	// answer writes the n-th answer of the token endpoint, from 1.
	answer func(n int, w http.ResponseWriter, r *http.Request)

	mu        sync.Mutex
	requested int
	valid     string   // the header Authorization that the receiver accepts
	got       []string // headers Authorization at the receiver
}

func newIdentity(t *testing.T) *identity {
	i := &identity{}
	i.answer = func(n int, w http.ResponseWriter, _ *http.Request) {
		i.grant(w, fmt.Sprintf("token-%d", n), `,"expires_in":3600`)
	}
	i.tokens = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i.mu.Lock()
		i.requested++
		n := i.requested
		i.mu.Unlock()
		i.answer(n, w, r)
	}))
	i.hook = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.got = append(i.got, r.Header.Get("Authorization"))
		if r.Header.Get("Authorization") != i.valid {
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = io.WriteString(w, "refused "+r.Header.Get("Authorization"))
		}
	}))
	t.Cleanup(i.tokens.Close)
	t.Cleanup(i.hook.Close)
	return i
}

// grant answers with a token, which is the valid one from then on.
func (i *identity) grant(w http.ResponseWriter, token, more string) {
	i.mu.Lock()
	i.valid = "Bearer " + token
	i.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_, _ = fmt.Fprintf(w, `{"access_token":%q,"token_type":"Bearer"%s}`, token, more)
}

func (i *identity) revoke() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.valid = "revoked"
}

func (i *identity) requests() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.requested
}

func (i *identity) received() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	got := i.got
	i.got = nil
	return got
}

func (i *identity) endpoint(t *testing.T, c *Client, change func(*liveconfig.OAuth2)) *Endpoint {
	t.Helper()
	o := &liveconfig.OAuth2{TokenURL: i.tokens.URL + "/token", ClientID: "posthorn", ClientSecret: liveconfig.NewSecret(clientSecret)}
	if change != nil {
		change(o)
	}
	e, err := c.Prepare(liveconfig.Endpoint{Name: "primary", URL: liveconfig.NewSecret(i.hook.URL), OAuth2: o})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Forget(e) })
	return e
}

// aged makes the current token older, as if it had been obtained long ago.
func aged(e *Endpoint, by time.Duration) {
	e.tokens.mu.Lock()
	defer e.tokens.mu.Unlock()
	c := e.tokens.current
	e.tokens.current = &token{authorization: c.authorization, redactor: c.redactor, obtained: c.obtained.Add(-by), renewAt: c.renewAt.Add(-by),
		expires: c.expires.Add(-by)}
}

func TestTokenRequest(t *testing.T) {
	for name, tc := range map[string]struct {
		change     func(*liveconfig.OAuth2)
		form       string
		user, pass string
	}{
		"header": {nil, "grant_type=client_credentials", "posthorn", "s3cr3t+of+the+client%2F%2B"},
		"body":   {func(o *liveconfig.OAuth2) { o.SecretInBody = true }, "client_id=posthorn&client_secret=s3cr3t+of+the+client%2F%2B&grant_type=client_credentials", "", ""},
		"scopes and parameters": {func(o *liveconfig.OAuth2) {
			o.Scopes, o.Parameters = []string{"write", "read"}, map[string]string{"audience": "https://api.example", "resource": "1"}
		}, "audience=https%3A%2F%2Fapi.example&grant_type=client_credentials&resource=1&scope=write+read", "posthorn", "s3cr3t+of+the+client%2F%2B"},
	} {
		t.Run(name, func(t *testing.T) {
			i := newIdentity(t)
			grant := i.answer
			i.answer = func(n int, w http.ResponseWriter, r *http.Request) {
				user, pass, _ := r.BasicAuth()
				if err := r.ParseForm(); err != nil {
					t.Error(err)
				}
				if diff := cmp.Diff([]string{tc.form, tc.user, tc.pass, userAgent},
					[]string{r.PostForm.Encode(), user, pass, r.UserAgent()}); diff != "" {
					t.Errorf("token request (-want +got):\n%s", diff)
				}
				grant(n, w, r)
			}
			c := newClient(t, "127.0.0.0/8")
			if r := c.Post(withTimeout(t, wait.Limit), i.endpoint(t, c, tc.change), nil, nil); r.Reason != "" {
				t.Errorf("%+v", r)
			}
		})
	}
}

// Concurrent attempts share a token request, and later ones its token.
func TestTokenIsKept(t *testing.T) {
	i := newIdentity(t)
	c := newClient(t, "127.0.0.0/8")
	e := i.endpoint(t, c, nil)
	for range 3 {
		var posts sync.WaitGroup
		for range 20 {
			posts.Go(func() {
				if r := c.Post(withTimeout(t, wait.Limit), e, nil, nil); r.Reason != "" {
					t.Errorf("%+v", r)
				}
			})
		}
		posts.Wait()
	}
	if n := i.requests(); n != 1 {
		t.Errorf("%d token requests, want 1", n)
	}
}

// The next token is requested while the current one is still used.
func TestTokenIsRenewedBeforeItExpires(t *testing.T) {
	i := newIdentity(t)
	c := newClient(t, "127.0.0.0/8")
	e := i.endpoint(t, c, nil)
	post := func() { c.Post(withTimeout(t, wait.Limit), e, nil, nil) }
	post()
	aged(e, time.Hour-50*time.Second)
	held := make(chan struct{})
	grant := i.answer
	i.answer = func(n int, w http.ResponseWriter, r *http.Request) {
		<-held
		grant(n, w, r)
	}
	post()
	close(held)
	if err := wait.Until(func() error {
		if i.requests() != 2 || !e.tokens.idle() {
			return errors.New("no renewal")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	post()
	want := []string{"Bearer token-1", "Bearer token-1", "Bearer token-2"}
	if diff := cmp.Diff(want, i.received()); diff != "" {
		t.Errorf("tokens (-want +got):\n%s", diff)
	}
}

func (t *tokens) idle() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.fetching == nil
}

// An expired token is not sent; the attempt waits for the next one.
func TestExpiredTokenIsNotSent(t *testing.T) {
	i := newIdentity(t)
	c := newClient(t, "127.0.0.0/8")
	e := i.endpoint(t, c, nil)
	for range 2 {
		if r := c.Post(withTimeout(t, wait.Limit), e, nil, nil); r.Reason != "" {
			t.Fatalf("%+v", r)
		}
		aged(e, time.Hour)
	}
	if diff := cmp.Diff([]string{"Bearer token-1", "Bearer token-2"}, i.received()); diff != "" {
		t.Errorf("tokens (-want +got):\n%s", diff)
	}
}

func TestRefusedTokenIsRenewedOnce(t *testing.T) {
	for name, tc := range map[string]struct {
		age time.Duration
		// refuseAll is true if the receiver accepts no token.
		refuseAll bool
		want      []string
		reason    Reason
	}{
		"revoked":                {age: time.Minute, want: []string{"Bearer token-1", "Bearer token-2"}},
		"every token is refused": {age: time.Minute, refuseAll: true, want: []string{"Bearer token-1", "Bearer token-2"}, reason: Rejected},
		"a new token is refused": {refuseAll: true, want: []string{"Bearer token-1"}, reason: Rejected},
	} {
		t.Run(name, func(t *testing.T) {
			i := newIdentity(t)
			c := newClient(t, "127.0.0.0/8")
			e := i.endpoint(t, c, nil)
			if _, err := e.tokens.get(t.Context(), time.Now().Add(wait.Limit)); err != nil {
				t.Fatal(err)
			}
			if tc.age > 0 {
				aged(e, tc.age)
			}
			grant := i.answer
			i.answer = func(n int, w http.ResponseWriter, r *http.Request) {
				grant(n, w, r)
				if tc.refuseAll {
					i.revoke()
				}
			}
			i.revoke()
			r := c.Post(withTimeout(t, wait.Limit), e, nil, nil)
			if r.Reason != tc.reason {
				t.Errorf("reason %q, want %q (%s)", r.Reason, tc.reason, r.Message)
			}
			if diff := cmp.Diff(tc.want, i.received()); diff != "" {
				t.Errorf("tokens (-want +got):\n%s", diff)
			}
			if strings.Contains(string(r.Response), "token-") {
				t.Errorf("the response shows the token: %s", r.Response)
			}
		})
	}
}

// A receiver that accepted a token and refuses it soon after causes a renewal, but not with every
// attempt.
func TestRenewalsOfAFlappingReceiverAreBounded(t *testing.T) {
	i := newIdentity(t)
	c := newClient(t, "127.0.0.0/8")
	e := i.endpoint(t, c, nil)
	c.Post(withTimeout(t, wait.Limit), e, nil, nil)
	e.tokens.current.obtained = time.Now().Add(-minRenewalInterval)
	i.revoke()
	if r := c.Post(withTimeout(t, wait.Limit), e, nil, nil); r.Reason != "" {
		t.Errorf("after an accepted token: %+v", r)
	}
	e.tokens.current.obtained = time.Now().Add(time.Hour) // so that the test does not depend on its speed
	i.revoke()
	if r := c.Post(withTimeout(t, wait.Limit), e, nil, nil); r.Reason != TokenFailed {
		t.Errorf("within the interval: %+v", r)
	}
	if n := i.requests(); n != 2 {
		t.Errorf("%d token requests, want 2", n)
	}
}

func TestTokenFailures(t *testing.T) {
	asJSON := func(status int, text string) func(int, http.ResponseWriter, *http.Request) {
		return func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, text)
		}
	}
	for name, tc := range map[string]struct {
		answer func(int, http.ResponseWriter, *http.Request)
		want   string
	}{
		"wrong credentials": {asJSON(401, `{"error":"invalid_client","error_description":"no client `+clientSecret+`\u001b[31m"}`),
			`answered 401 Unauthorized: "invalid_client" ("no client`},
		"error with 200": {asJSON(200, `{"error":"invalid_scope"}`), `answered 200 OK: "invalid_scope"`},
		"server error":   {asJSON(503, ``), "answered 503 Service Unavailable"},
		"HTML": {func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, "<html>log in</html>")
		}, "is not a token in JSON; check the token URL"},
		"empty":            {asJSON(200, ``), "is not a token in JSON"},
		"no token":         {asJSON(200, `{"token_type":"Bearer"}`), "is not a token in JSON"},
		"another type":     {asJSON(200, `{"access_token":"x","token_type":"mac"}`), `a token of the type "mac"`},
		"0 seconds":        {asJSON(200, `{"access_token":"x","token_type":"Bearer","expires_in":0}`), "has expired already"},
		"negative seconds": {asJSON(200, `{"access_token":"x","token_type":"Bearer","expires_in":-5}`), "has expired already"},
		"a line break":     {asJSON(200, `{"access_token":"x\r\nX-Evil: 1","token_type":"Bearer"}`), "not valid in a header"},
		"long": {asJSON(200, `{"access_token":"`+strings.Repeat("x", maxTokenBytes+1)+`","token_type":"Bearer"}`),
			"more than 16384 bytes"},
		"redirect": {func(_ int, w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/other", http.StatusFound)
		}, "answered 302 Found; redirects are not followed"},
		"closes": {func(_ int, w http.ResponseWriter, _ *http.Request) {
			panic(http.ErrAbortHandler)
		}, "closed the connection without a response"},
	} {
		t.Run(name, func(t *testing.T) {
			i := newIdentity(t)
			i.answer = tc.answer
			c := newClient(t, "127.0.0.0/8")
			e := i.endpoint(t, c, nil)
			r := c.Post(withTimeout(t, wait.Limit), e, nil, nil)
			if r.Reason != TokenFailed || r.StatusCode != 0 || r.Sent {
				t.Errorf("%+v, want %s and nothing sent", r, TokenFailed)
			}
			if !strings.Contains(r.Message, tc.want) {
				t.Errorf("message %q does not contain %q", r.Message, tc.want)
			}
			if strings.Contains(r.Message, clientSecret) || strings.ContainsRune(r.Message, '\u001b') {
				t.Errorf("message %q shows a secret or control characters", r.Message)
			}
			// The next attempt does not request a token at once.
			before := i.requests()
			e.tokens.mu.Lock()
			e.tokens.retryAt = time.Now().Add(time.Hour)
			e.tokens.mu.Unlock()
			if again := c.Post(withTimeout(t, wait.Limit), e, nil, nil); again.Message != r.Message || i.requests() != before {
				t.Errorf("second attempt: %q, %d more token requests", again.Message, i.requests()-before)
			}
			if got := i.received(); len(got) > 0 {
				t.Errorf("the receiver got %q", got)
			}
		})
	}
}

// A slow token endpoint costs an attempt its timeout; the request continues, and a later attempt
// uses its token.
func TestSlowTokenEndpoint(t *testing.T) {
	i := newIdentity(t)
	held := make(chan struct{})
	grant := i.answer
	i.answer = func(n int, w http.ResponseWriter, r *http.Request) {
		<-held
		grant(n, w, r)
	}
	c := newClient(t, "127.0.0.0/8")
	e := i.endpoint(t, c, nil)
	if r := c.Post(withTimeout(t, 50*time.Millisecond), e, nil, nil); r.Reason != TokenFailed ||
		!strings.Contains(r.Message, "within the timeout") {
		t.Errorf("%+v", r)
	}
	close(held)
	if r := c.Post(withTimeout(t, wait.Limit), e, nil, nil); r.Reason != "" || i.requests() != 1 {
		t.Errorf("%d token requests; %+v", i.requests(), r)
	}
}

// A token endpoint that is down has the reason of the token, with its host, and the receiver gets
// nothing.
func TestTokenEndpointIsDown(t *testing.T) {
	i := newIdentity(t)
	i.tokens.Close()
	c := newClient(t, "127.0.0.0/8")
	c.resolver = resolver(func(string) []string { return nil })
	for tokenURL, want := range map[string]string{
		i.tokens.URL:                   "refused",
		"https://login.example/tokens": "login.example",
	} {
		r := c.Post(withTimeout(t, wait.Limit), i.endpoint(t, c, func(o *liveconfig.OAuth2) { o.TokenURL = tokenURL }), nil, nil)
		if r.Reason != TokenFailed || r.StatusCode != 0 || r.Sent || !strings.HasPrefix(r.Message, "no access token: ") ||
			!strings.Contains(r.Message, want) {
			t.Errorf("%s: %+v, want %s, nothing sent and %q", tokenURL, r, TokenFailed, want)
		}
	}
	if got := i.received(); len(got) > 0 {
		t.Errorf("the receiver got %q", got)
	}
}

// Some servers answer with a form, and without a lifetime.
func TestTokenInAForm(t *testing.T) {
	i := newIdentity(t)
	i.answer = func(_ int, w http.ResponseWriter, _ *http.Request) {
		i.mu.Lock()
		i.valid = "Bearer form"
		i.mu.Unlock()
		w.Header().Set("Content-Type", "application/x-www-form-urlencoded")
		_, _ = io.WriteString(w, "access_token=form&token_type=bearer")
	}
	c := newClient(t, "127.0.0.0/8")
	if r := c.Post(withTimeout(t, wait.Limit), i.endpoint(t, c, nil), nil, nil); r.Reason != "" {
		t.Errorf("%+v", r)
	}
}

// The address guard applies to token endpoints.
func TestPrivateTokenURLIsDenied(t *testing.T) {
	var dialled atomic.Bool
	private := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { dialled.Store(true) }))
	defer private.Close()
	i := newIdentity(t)
	c := newClient(t)
	r := c.Post(withTimeout(t, wait.Limit), i.endpoint(t, c, func(o *liveconfig.OAuth2) { o.TokenURL = private.URL }), nil, nil)
	if r.Reason != TokenFailed || !strings.Contains(r.Message, "127.0.0.1") || !strings.Contains(r.Message, "egressAllow") {
		t.Errorf("%+v", r)
	}
	if dialled.Load() {
		t.Error("the token endpoint was dialled")
	}
}

// A token endpoint's certificate is verified as a receiver's is.
func TestTokenEndpointOverTLS(t *testing.T) {
	i := newIdentity(t)
	plain := i.tokens.Config.Handler
	i.tokens.Close()
	ca := issue(t, nil, authority("identity"))
	i.tokens = httptest.NewUnstartedServer(plain)
	i.tokens.TLS = &tls.Config{Certificates: []tls.Certificate{issue(t, ca, nil).forServer}}
	i.tokens.StartTLS()
	t.Cleanup(i.tokens.Close)
	c := newClient(t, "127.0.0.0/8")
	for name, tc := range map[string]struct {
		tls  *liveconfig.TLS
		want string
	}{
		"its authority":     {&liveconfig.TLS{CA: ca.pem}, ""},
		"unknown authority": {nil, "no access token: certificate of 127.0.0.1 rejected"},
	} {
		r := c.Post(withTimeout(t, wait.Limit), i.endpoint(t, c, func(o *liveconfig.OAuth2) { o.TLS = tc.tls }), nil, nil)
		if (r.Message == "") != (tc.want == "") || !strings.HasPrefix(r.Message, tc.want) {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// A standard error code is shown as it is, also if the client's secret begins like a part of it. Other codes are redacted.
func TestErrorCodesAreShown(t *testing.T) {
	for _, secret := range []string{"client", "client-s3cr3t", "invalid", "grant-s3cr3t", "unauthorized_client-s3cr3t"} {
		tokens := &tokens{server: &Endpoint{host: "login.example"}, redactor: NewRedactor(secret)}
		explain := func(code string) string {
			return tokens.explainRefusal(&oauth2.RetrieveError{Response: &http.Response{StatusCode: 401}, ErrorCode: code}).Error()
		}
		for _, code := range errorCodes {
			if got, want := explain(code), fmt.Sprintf("login.example answered 401 Unauthorized: %q", code); got != want {
				t.Errorf("secret %q: got %s, want %s", secret, got, want)
			}
		}
		if got := explain("no_" + secret); strings.Contains(got, secret) {
			t.Errorf("got %s, want it without %q", got, secret)
		}
	}
}
