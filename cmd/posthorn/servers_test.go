package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// Calls over TLS need an address, a certificate and its key.
func TestTLSFlags(t *testing.T) {
	server := httptest.NewTLSServer(nil)
	server.Close()
	own := server.TLS.Certificates[0]
	der, err := x509.MarshalPKCS8PrivateKey(own.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	file := func(name, kind string, der []byte) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cert, key := file("tls.crt", "CERTIFICATE", own.Certificate[0]), file("tls.key", "PRIVATE KEY", der)
	for _, c := range []struct{ listen, cert, key, want string }{
		{":0", "", "", "together"},
		{":0", cert, "", "together"},
		{"", cert, key, "together"},
		{":0", key, cert, "--tls-cert, --tls-key"},
		{":0", filepath.Join(t.TempDir(), "none"), key, "no such file"},
	} {
		d := dataFlags{certFile: c.cert, keyFile: c.key}
		d.options.TLSListen = c.listen
		if _, err := d.tls(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	var none dataFlags
	if run, err := none.tls(); err != nil || none.options.TLS != nil || run(t.Context()) != nil {
		t.Errorf("without flags: %v", err)
	}
	d := dataFlags{certFile: cert, keyFile: key}
	d.options.TLSListen = ":0"
	if _, err := d.tls(); err != nil {
		t.Fatal(err)
	}
	got, err := d.options.TLS.GetCertificate(&tls.ClientHelloInfo{})
	if err != nil || !bytes.Equal(got.Certificate[0], own.Certificate[0]) {
		t.Errorf("another certificate: %v", err)
	}
}

// A renewed certificate is taken up without a restart, written as the kubelet
// writes a Secret: a new folder, to which a link is turned at once.
func TestRenewedCertificate(t *testing.T) {
	dir := t.TempDir()
	renew := func(name string) {
		t.Helper()
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour)}
		cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		private, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(
			os.Mkdir(filepath.Join(dir, name), 0o700),
			os.WriteFile(filepath.Join(dir, name, "tls.crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}), 0o600),
			os.WriteFile(filepath.Join(dir, name, "tls.key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600),
			os.Symlink(name, filepath.Join(dir, "..new")),
			os.Rename(filepath.Join(dir, "..new"), filepath.Join(dir, "..data")),
		); err != nil {
			t.Fatal(err)
		}
	}
	renew("one")
	for _, name := range []string{"tls.crt", "tls.key"} {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	d := dataFlags{certFile: filepath.Join(dir, "tls.crt"), keyFile: filepath.Join(dir, "tls.key")}
	d.options.TLSListen = ":0"
	watch, err := d.tls()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- watch(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	served := func() string {
		t.Helper()
		c, err := d.options.TLS.GetCertificate(&tls.ClientHelloInfo{})
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := x509.ParseCertificate(c.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		return leaf.Subject.CommonName
	}
	if got := served(); got != "one" {
		t.Fatalf("the certificate of %q", got)
	}
	renew("two")
	for deadline := time.Now().Add(wait.Limit); served() != "two"; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the renewed certificate is not served")
		}
	}
}

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
	kubectl("", "create", "clusterrolebinding", "prometheus", "--clusterrole=posthorn-metrics-reader", "--serviceaccount="+env.Release+":prometheus")
	// The operator has the rights that config/ gives it, and no more.
	dir := t.TempDir()
	kubeconfig, tokenFile := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "token")
	config, err := os.ReadFile(server.Kubeconfig())
	if err := errors.Join(err, os.WriteFile(kubeconfig, config, 0o600), os.WriteFile(tokenFile, []byte(token("posthorn-operator", "--audience", adminapi.TokenAudience)), 0o600)); err != nil {
		t.Fatal(err)
	}
	kubectl("", "--kubeconfig", kubeconfig, "config", "set-credentials", "operator", "--token", token("posthorn-operator"))
	kubectl("", "--kubeconfig", kubeconfig, "config", "set-context", "--current", "--user", "operator")
	operator := func(tokenFile string) (address string, stop func()) {
		address = process.FreeAddr()
		ctx, cancel := context.WithCancel(t.Context())
		cmd := newOperator()
		cmd.SetArgs([]string{"--namespace", env.Release, "--kubeconfig", kubeconfig, "--dispatcher-token-file", tokenFile, "--metrics-bind-address", address, "--health-probe-bind-address", "0"})
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
		text := kubectl("", "get", "secret", "-n", env.Release, "--field-selector=metadata.name="+adminapi.CertificateSecret, "-o", `jsonpath={.items[*].data.tls\.crt}`)
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
	for caller, want := range map[string]int{"": http.StatusUnauthorized, "no-token": http.StatusUnauthorized, token("stranger"): http.StatusForbidden} {
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

// An address in use is named in the error, with the fix.
func TestInUse(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	dir := t.TempDir()
	for _, args := range [][]string{
		{"sink", "--listen", taken.Addr().String()},
		{"run", "--manifests", dir, "--data", t.TempDir(), "--listen", taken.Addr().String()},
		{"run", "--manifests", dir, "--data", t.TempDir(), "--listen", "127.0.0.1:0", "--admin-listen", taken.Addr().String()},
	} {
		var out bytes.Buffer
		code := Main(args, strings.NewReader(""), &out, &out)
		if code != command.ExitFailure || !strings.Contains(out.String(), taken.Addr().String()) || !strings.Contains(out.String(), "Stop it, or set another address: 'posthorn "+args[0]+" --help'") {
			t.Errorf("%v: exit code %d:\n%s", args, code, out.String())
		}
	}
}

// Mistakes on the command line are refused before any connection is opened, and the error names the fix.
func TestRefusedFlags(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "")
	for _, c := range []struct{ line, want string }{
		{"runn", `unknown command "runn"; did you mean run?`},
		{"dispatcher", "set --namespace or POD_NAMESPACE"},
		{"operator", "set --namespace or POD_NAMESPACE"},
		{"dispatcher --namespace x --trusted-proxies 10.0.0.0/8,nonsense", `--trusted-proxies: "nonsense" is neither a network (10.0.0.0/8, fd00::/8) nor an address`},
		{"run --manifests . --egress-allow https://hooks.example", "--egress-allow: egress entry"},
		{"run --manifests . --drain-timeout 10", `--drain-timeout "10": use a duration like 90s, 10m or 2h`},
		{"run --manifests . --drain-timeout -1s", "--drain-timeout -1s: use 0 to 1h0m0s"},
		{"run --manifests . --duplicate-window 48h", "--duplicate-window 48h0m0s: use 0 to 24h0m0s"},
		{"run --manifests . --source-quota -1", "auto for half of the disk space, or none"},
		{"run --manifests . --source-quota 5Gi", `--source-quota "5Gi": use a whole number of bytes`},
		{"run --manifests . --debug=maybe", `--debug "maybe": use true or false`},
		{"run --manifests . --listen 8080", `--listen "8080": use HOST:PORT or :PORT`},
		{"run --manifests . --log-level loud", "use debug, info, warn or error"},
		{"run", "set --manifests DIR"},
		{"run --manifests nowhere", `--manifests "nowhere" is not a folder`},
		{"dispatcher --namespace x --admin-auth basic --kubeconfig KUBECONFIG", "use kubernetes or none"},
		{"operator --namespace x --dispatcher-selector a=b=c", `--dispatcher-selector "a=b=c"`},
		{"operator --namespace x --dispatcher-admin-port 0", "use 1 to 65535"},
	} {
		t.Run(c.line, func(t *testing.T) {
			kubeconfig := filepath.Join(t.TempDir(), "config")
			text := "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]}"
			if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			code := Main(strings.Fields(strings.ReplaceAll(c.line, "KUBECONFIG", kubeconfig)), nil, &out, &out)
			if code != command.ExitUsage || !strings.Contains(out.String(), c.want) || !strings.Contains(out.String(), "--help'") {
				t.Errorf("exit %d, want %q in:\n%s", code, c.want, out.String())
			}
		})
	}
}

// The program is the plugin under the name by which kubectl finds it.
func TestPluginName(t *testing.T) {
	args := os.Args
	t.Cleanup(func() { os.Args = args })
	os.Args = []string{"/usr/local/bin/kubectl-posthorn"}
	var out bytes.Buffer
	if code := Main([]string{"why", "--help"}, nil, &out, &out); code != command.ExitOK {
		t.Errorf("exit code: got %d, want 0; output:\n%s", code, out.String())
	}
	for _, want := range []string{"kubectl posthorn why DESTINATION [flags]", "kubectl posthorn why crm -n shop"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("help: got\n%s\nwant a text with %q", out.String(), want)
		}
	}
}
