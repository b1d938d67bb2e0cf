package compat

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-oauth2/oauth2/v4"
	"github.com/go-oauth2/oauth2/v4/manage"
	"github.com/go-oauth2/oauth2/v4/models"
	"github.com/go-oauth2/oauth2/v4/server"
	"github.com/go-oauth2/oauth2/v4/store"

	"github.com/posthorn/posthorn/test/wait"
)

// provider is an OAuth 2.0 server of another project, and a receiver that accepts its tokens.
type provider struct {
	token, hook *httptest.Server
	ca          string
	// granted and accepted count token requests that succeeded, and accepted deliveries.
	granted, accepted atomic.Int64
	revoked           atomic.Bool
}

func newProvider(t *testing.T, clientInfo server.ClientInfoHandler, lifetime time.Duration) *provider {
	t.Helper()
	manager := manage.NewDefaultManager()
	manager.SetClientTokenCfg(&manage.Config{AccessTokenExp: lifetime})
	manager.MustTokenStorage(store.NewMemoryTokenStore())
	clients := store.NewClientStore()
	if err := clients.Set("posthorn", &models.Client{ID: "posthorn", Secret: "client-secret"}); err != nil {
		t.Fatal(err)
	}
	manager.MapClientStorage(clients)
	s := server.NewDefaultServer(manager)
	s.SetAllowedGrantType(oauth2.ClientCredentials)
	s.SetClientInfoHandler(clientInfo)
	p := &provider{}
	p.token = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		recorder := &statusRecorder{ResponseWriter: w}
		if err := s.HandleTokenRequest(recorder, r); err != nil {
			t.Error(err)
		}
		if recorder.status == http.StatusOK {
			p.granted.Add(1)
		}
	}))
	p.ca = startTLS(t, p.token)
	p.hook = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info, err := s.ValidationBearerToken(r)
		if err == nil && p.revoked.CompareAndSwap(true, false) {
			if err := manager.RemoveAccessToken(r.Context(), info.GetAccess()); err != nil {
				t.Error(err)
			}
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if err != nil || info.GetScope() != "hooks.write" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		p.accepted.Add(1)
	}))
	t.Cleanup(p.hook.Close)
	return p
}

// startTLS starts a server with a certificate of a new CA, and returns the CA's certificate in PEM.
func startTLS(t *testing.T, s *httptest.Server) (ca string) {
	t.Helper()
	sign := func(template, parent *x509.Certificate, key, parentKey ed25519.PrivateKey) []byte {
		template.NotAfter, template.SerialNumber = time.Now().Add(time.Hour), big.NewInt(1)
		der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), parentKey)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	_, caKey, _ := ed25519.GenerateKey(nil) // It fails only with a reader that fails.
	_, key, _ := ed25519.GenerateKey(nil)
	authority := &x509.Certificate{Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true}
	caDER := sign(authority, authority, caKey, caKey)
	own := sign(&x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}, authority, key, caKey)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{own}, PrivateKey: key}}, MinVersion: tls.VersionTLS12}
	s.StartTLS()
	t.Cleanup(s.Close)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: caDER}))
}

type statusRecorder struct {
	http.ResponseWriter
	status int
}

func (r *statusRecorder) WriteHeader(status int) {
	r.status = status
	r.ResponseWriter.WriteHeader(status)
}

func (p *provider) destination(style, secret string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {name: login}
stringData: {client: %s, ca.crt: %q}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  sourceRefs: [{name: web}]
  endpoints:
  - name: primary
    url: %s
    authentication:
      oauth2:
        tokenURL: %s
        clientID: posthorn
        clientSecretKeyRef: {name: login, key: client}
        clientAuthentication: %s
        scopes: [hooks.write]
        tls: {ca: {secretKeyRef: {name: login, key: ca.crt}}}
  delivery: {retry: {initialBackoff: 10ms, maxBackoff: 10ms}}
`, secret, p.ca, p.hook.URL, p.token.URL, style)
}

// Posthorn obtains tokens from a server of another project, in both styles of client authentication.
// It renews them before they expire and when they are revoked, and wrong credentials cost no message.
func TestOAuth2(t *testing.T) {
	for style, clientInfo := range map[string]server.ClientInfoHandler{"Header": server.ClientBasicHandler, "Body": server.ClientFormHandler} {
		t.Run(style, func(t *testing.T) {
			o := newProvider(t, clientInfo, time.Hour)
			p := start(t, o.hook.URL, true, "")
			track := func(n int) {
				for range n {
					resp, err := send(p.Addr, recorded{Method: http.MethodPost, Path: "/v1/track",
						Body: `{"writeKey":"` + key + `","userId":"u1","event":"Order"}`})
					if err != nil {
						t.Fatal(err)
					}
					_ = resp.Body.Close()
				}
			}
			p.Write("crm.yaml", o.destination(style, "wrong"))
			track(5)
			p.attempted("TokenFailed")
			p.Write("crm.yaml", o.destination(style, "client-secret"))
			if l := p.settled(5); l.Delivered != 5 || o.granted.Load() != 1 {
				t.Errorf("after the correction: %+v with %d tokens, want 5 delivered with 1", l, o.granted.Load())
			}
			o.revoked.Store(true)
			track(5)
			if l := p.settled(10); l.Delivered != 10 || l.DeadLettered != 0 {
				t.Errorf("after a revocation: %+v, want 10 delivered", l)
			}
		})
	}
}

// attempted waits for an attempt with a reason.
func (p *posthorn) attempted(reason string) {
	p.T.Helper()
	if err := wait.Until(func() error {
		for a, err := range p.AdminAPI().Attempts(context.Background(), "default/crm", "primary") {
			if err != nil {
				return err
			}
			if a.Reason == reason {
				return nil
			}
		}
		return fmt.Errorf("no attempt with the reason %s", reason)
	}); err != nil {
		p.T.Fatal(err)
	}
}
