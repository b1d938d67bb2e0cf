package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/go-oauth2/oauth2/v4"
	"github.com/go-oauth2/oauth2/v4/manage"
	"github.com/go-oauth2/oauth2/v4/models"
	"github.com/go-oauth2/oauth2/v4/server"
	"github.com/go-oauth2/oauth2/v4/store"

	"github.com/posthorn/posthorn/test/signature"
)

// protect returns a handler that grants access tokens for a client ("ID:SECRET") at /token, and
// passes other requests only with a token and the signatures HMACSHA1 and Standard Webhooks.
func protect(client, secret string, next http.Handler) http.Handler {
	id, password, _ := strings.Cut(client, ":")
	clients := store.NewClientStore()
	if err := clients.Set(id, &models.Client{ID: id, Secret: password}); err != nil {
		fail(err)
	}
	manager := manage.NewDefaultManager()
	manager.SetClientTokenCfg(&manage.Config{AccessTokenExp: time.Hour})
	manager.MustTokenStorage(store.NewMemoryTokenStore())
	manager.MapClientStorage(clients)
	tokens := server.NewDefaultServer(manager)
	tokens.SetAllowedGrantType(oauth2.ClientCredentials)
	tokens.SetClientInfoHandler(server.ClientBasicHandler)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/token" {
			if err := tokens.HandleTokenRequest(w, r); err != nil {
				fmt.Fprintln(os.Stderr, "token request:", err)
			}
			return
		}
		body, err := io.ReadAll(r.Body)
		if err == nil {
			_, err = tokens.ValidationBearerToken(r)
		}
		if err == nil {
			err = verify(secret, r.Header, body)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "rejected:", err)
			http.Error(w, err.Error(), http.StatusUnauthorized)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		next.ServeHTTP(w, r)
	})
}

// verify checks both signatures as a receiver does that knows only their specifications.
func verify(secret string, h http.Header, body []byte) error {
	if want := signature.SHA1(secret, body); h.Get("X-Signature") != want {
		return fmt.Errorf("X-Signature: got %q, want %q", h.Get("X-Signature"), want)
	}
	want := signature.Standard(secret, h.Get("webhook-id"), h.Get("webhook-timestamp"), body)
	if h.Get("webhook-id") == "" || h.Get("webhook-timestamp") == "" || h.Get("webhook-signature") != want {
		return fmt.Errorf("webhook-signature: got %q, want %q", h.Get("webhook-signature"), want)
	}
	return nil
}
