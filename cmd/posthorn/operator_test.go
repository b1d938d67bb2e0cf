package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// The operator's metrics have the same access rule as the dispatchers': the caller is authorized by
// the API server and can verify the server's certificate.
func TestOperatorMetrics(t *testing.T) {
	server, kubectl := env.For(t)
	if err := server.Install(); err != nil {
		t.Fatal(err)
	}
	token := func(account string, more ...string) string {
		return kubectl("", append([]string{"create", "token", account, "-n", env.Release}, more...)...)
	}
	for _, account := range []string{"prometheus", "stranger"} {
		kubectl("", "create", "serviceaccount", account, "-n", env.Release)
	}
	kubectl("", "create", "clusterrolebinding", "prometheus", "--clusterrole=posthorn-metrics-reader",
		"--serviceaccount="+env.Release+":prometheus")
	// The operator has the rights that config/ gives it, and no more.
	dir := t.TempDir()
	kubeconfig, tokenFile := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "token")
	config, err := os.ReadFile(server.Kubeconfig())
	if err := errors.Join(err, os.WriteFile(kubeconfig, config, 0o600),
		os.WriteFile(tokenFile, []byte(token("posthorn-operator", "--audience", adminapi.TokenAudience)), 0o600)); err != nil {
		t.Fatal(err)
	}
	kubectl("", "--kubeconfig", kubeconfig, "config", "set-credentials", "operator", "--token", token("posthorn-operator"))
	kubectl("", "--kubeconfig", kubeconfig, "config", "set-context", "--current", "--user", "operator")
	operator := func(tokenFile string) (address string, stop func()) {
		address = process.FreeAddr()
		ctx, cancel := context.WithCancel(t.Context())
		cmd := newOperator()
		cmd.SetArgs([]string{"--system-namespace", env.Release, "--kubeconfig", kubeconfig, "--dispatcher-token-file", tokenFile,
			"--admin-listen", address, "--probe-listen", "0"})
		cmd.SetErr(io.Discard)
		done := make(chan error, 1)
		go func() { done <- cmd.ExecuteContext(ctx) }()
		return address, sync.OnceFunc(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	get := func(client *http.Client, url, token string) (status int, body string, err error) {
		request, err := http.NewRequest(http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			request.Header.Set("Authorization", "Bearer "+token)
		}
		response, err := client.Do(request)
		if err != nil {
			return 0, "", err
		}
		defer response.Body.Close()
		data, err := io.ReadAll(response.Body)
		return response.StatusCode, string(data), err
	}
	eventually := func(client *http.Client, url, token string, want int) string {
		t.Helper()
		for deadline := time.Now().Add(wait.Limit); ; time.Sleep(100 * time.Millisecond) {
			status, body, err := get(client, url, token)
			if status == want {
				return body
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d %s %v, want %d", status, body, err, want)
			}
		}
	}

	address, stop := operator(tokenFile)
	defer stop()
	var certificate []byte
	for deadline := time.Now().Add(wait.Limit); len(certificate) == 0; time.Sleep(100 * time.Millisecond) {
		text := kubectl("", "get", "secret", "-n", env.Release, "--field-selector=metadata.name="+adminapi.CertificateSecret, "-o",
			`jsonpath={.items[*].data.tls\.crt}`)
		if certificate, err = base64.StdEncoding.DecodeString(text); err != nil || time.Now().After(deadline) {
			t.Fatalf("no certificate: %v", err)
		}
	}
	authority := x509.NewCertPool()
	authority.AppendCertsFromPEM(certificate)
	secure := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: authority, ServerName: adminapi.ServerName}}}
	url := "https://" + address + "/metrics"
	if body := eventually(secure, url, token("prometheus"), http.StatusOK); !strings.Contains(body, "\nposthorn_") {
		t.Errorf("no metrics of Posthorn: %.300s", body)
	}
	for caller, want := range map[string]int{"": http.StatusUnauthorized, "no-token": http.StatusUnauthorized,
		token("stranger"): http.StatusForbidden} {
		if status, body, err := get(secure, url, caller); status != want || strings.Contains(body, "posthorn_") {
			t.Errorf("%.10s: %d %s %v, want %d", caller, status, body, err, want)
		}
	}
	if status, _, err := get(http.DefaultClient, "http://"+address+"/metrics", token("prometheus")); status == http.StatusOK {
		t.Errorf("metrics in clear text: %d %v", status, err)
	}
	stop()

	// If the dispatchers need no authentication, neither does the operator.
	address, stop = operator("")
	defer stop()
	eventually(http.DefaultClient, "http://"+address+"/metrics", "", http.StatusOK)
}
