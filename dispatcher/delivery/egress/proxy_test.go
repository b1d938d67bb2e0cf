package egress

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/need"
	"github.com/posthorn/posthorn/test/wait"
)

const proxyPassword = "p4ssw0rd-of.the_proxy"

// credentialsFolder returns a folder with the files username and password.
func credentialsFolder(t testing.TB, password string) string {
	t.Helper()
	folder := t.TempDir()
	writeFile(t, filepath.Join(folder, "username"), "posthorn\n")
	writeFile(t, filepath.Join(folder, "password"), password+"\n")
	return folder
}

func writeFile(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// proxyClient returns a client of the proxy at the address.
func proxyClient(t testing.TB, address, credentials string, exceptions []string, allow ...string) *Client {
	t.Helper()
	policy, err := ParsePolicy(allow)
	if err != nil {
		t.Fatal(err)
	}
	proxy, err := NewProxy("http://"+address, exceptions, credentials)
	if err != nil {
		t.Fatal(err)
	}
	c := New(Options{Policy: policy, Proxy: proxy})
	t.Cleanup(c.Close)
	return c
}

func TestProxyFaults(t *testing.T) {
	noLeaks(t)
	const page = "<html>proxy error: " + canary + "</html>"
	answer := func(status, headers string) func(int, net.Conn) {
		return answersAndCloses(fmt.Sprintf("HTTP/1.1 %s\r\nContent-Type: text/html\r\n%sContent-Length: %d\r\n\r\n%s", status, headers, len(page), page))
	}
	type want struct {
		reason  Reason
		status  int
		message string
	}
	for _, c := range []struct {
		name         string
		proxy        func(int, net.Conn)
		tunnel, http want
	}{
		{"resets", func(_ int, c net.Conn) { resets(c) }, want{ProxyFailed, 0, "closed the connection"}, want{ProxyFailed, 0, "closed the connection"}},
		{"asks for other credentials", answer("407 Proxy Authentication Required", "Proxy-Authenticate: Basic realm=x\r\n"), want{ProxyFailed, 0, "407 Proxy Authentication Required for hooks.example; it requires other credentials"}, want{ProxyFailed, 0, "it requires other credentials"}},
		{"502", answer("502 Bad Gateway", "Proxy-Status: x; error=destination_unavailable\r\n"),
			want{ProxyFailed, 0, "502 Bad Gateway for hooks.example; it has no connection"}, want{ProxyFailed, 0, "502 Bad Gateway"}},
		{"504", answer("504 Gateway Timeout", "X-Squid-Error: ERR_READ_TIMEOUT 0\r\n"), want{ProxyFailed, 0, "504 Gateway Timeout"},
			want{ProxyFailed, 0, "504 Gateway Timeout"}},
		{"denies the host", answer("403 Filtered", "Server: tinyproxy/1.11.1\r\n"), want{ProxyFailed, 0, "its rules deny this host"},
			want{ProxyFailed, 0, "its rules deny this host"}},
		{"redirects to a login", answer("302 Found", "Location: http://login.example\r\n"), want{ProxyFailed, 0, "302 Found"},
			want{Redirected, 302, "redirects are not followed"}},
		// Without a mark, the answer to an http URL is the receiver's.
		{"503 without a mark", answer("503 Service Unavailable", "Server: nginx\r\n"), want{ProxyFailed, 0, "503 Service Unavailable"},
			want{ServerError, 503, "hooks.example answered 503"}},
		{"is not a proxy", func(_ int, c net.Conn) { _, _ = io.WriteString(c, "220 mail.example ESMTP\r\n") },
			want{ProxyFailed, 0, "not valid HTTP"}, want{InvalidResponse, 0, "not valid HTTP"}},
		{"talks first", func(_ int, c net.Conn) {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\nhello")
			_, _ = io.Copy(io.Discard, c)
		}, want{ProxyFailed, 0, "sent data before the tunnel"}, want{TimedOut, 0, "no complete response"}},
		{"endless interim answers", func(_ int, c net.Conn) {
			for range 20 {
				_, _ = io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n")
			}
			_, _ = io.Copy(io.Discard, c)
		}, want{ProxyFailed, 0, "too many interim"}, want{InvalidResponse, 0, "too many interim"}},
		{"hangs", func(_ int, c net.Conn) { _, _ = io.Copy(io.Discard, c) }, want{ProxyFailed, 0, "within the timeout"}, want{TimedOut, 0, "through egress proxy"}},
		{"closes the tunnel", answersAndCloses("HTTP/1.1 200 OK\r\n\r\n"), want{TLSFailed, 0, "through egress proxy"}, want{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			proxy := listen(t, c.proxy)
			for scheme, want := range map[string]want{"https": c.tunnel, "http": c.http} {
				client := proxyClient(t, proxy.address, credentialsFolder(t, canary), nil)
				e := secretEndpoint(t, client, scheme+"://hooks.example", nil)
				var r Result
				check := func(timeout time.Duration) error {
					r = post(t, withTimeout(t, timeout), client, e)
					if r.Reason != want.reason || r.StatusCode != want.status && want.reason != "" {
						return fmt.Errorf("%s: got %s %d (%s), want %s %d", scheme, r.Reason, r.StatusCode, r.Message, want.reason, want.status)
					}
					if !strings.Contains(r.Message, want.message) {
						return fmt.Errorf("%s: message %q does not contain %q", scheme, r.Message, want.message)
					}
					return nil
				}
				if want.reason == TimedOut || strings.Contains(want.message, "within") {
					withTimeouts(t, check)
				} else if err := check(wait.Limit); err != nil {
					t.Error(err)
				}
				if scheme == "https" && r.Sent {
					t.Errorf("%s: Sent is true, but the tunnel was never open: %+v", scheme, r)
				}
				if strings.Contains(string(r.Response), canary) || r.Reason == ProxyFailed && len(r.Response) > 0 {
					t.Errorf("%s: the proxy's page is shown: %q", scheme, r.Response)
				}
			}
		})
	}
}

func TestProxyIsDown(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	missing := proxyClient(t, "proxy.example:3128", "", nil)
	missing.resolver = resolver(func(string) []string { return nil })
	for want, client := range map[string]*Client{
		"nothing listens there":     proxyClient(t, l.Addr().String(), "", nil),
		"its name does not resolve": missing,
	} {
		for _, url := range []string{"https://hooks.example", "http://hooks.example"} {
			r := post(t, withTimeout(t, wait.Limit), client, secretEndpoint(t, client, url, nil))
			if r.Reason != ProxyFailed || !strings.Contains(r.Message, want) || r.Sent {
				t.Errorf("%s: %+v, want ProxyFailed, %q and nothing sent", url, r, want)
			}
		}
	}
}

// The policy denies what needs no DNS before the proxy gets the host.
func TestPolicyBeforeTheProxy(t *testing.T) {
	proxy := listen(t, answers(ok))
	client := proxyClient(t, proxy.address, "", nil, "10.7.0.0/16")
	for _, url := range []string{
		"https://10.0.0.1", "http://10.0.0.1:8080", "http://169.254.169.254/latest", "https://[fd00::1]", "https://[::ffff:10.0.0.1]",
		"http://metadata.google.internal", "https://127.0.0.1", "http://localhost:8081", "https://x.localhost",
	} {
		e := secretEndpoint(t, client, strings.TrimSuffix(url, "/latest"), nil)
		if r := post(t, withTimeout(t, wait.Limit), client, e); r.Reason != AddressDenied || r.Sent {
			t.Errorf("%s: %+v, want AddressDenied", url, r)
		}
	}
	for _, url := range []string{"https://10.0.0.1/token", "http://169.254.169.254/token", "http://localhost/token"} {
		o := &liveconfig.OAuth2{TokenURL: url, ClientID: "posthorn", ClientSecret: liveconfig.NewSecret(clientSecret)}
		e, err := client.Prepare(liveconfig.Endpoint{Name: "primary", URL: liveconfig.NewSecret("https://hooks.example"), OAuth2: o})
		if err != nil {
			t.Fatal(err)
		}
		if r := post(t, withTimeout(t, wait.Limit), client, e); r.Reason != TokenFailed || r.Sent {
			t.Errorf("token URL %s: %+v, want TokenFailed and nothing sent", url, r)
		}
	}
	if n := proxy.connections.Load(); n != 0 {
		t.Errorf("the proxy got %d connections, want 0", n)
	}
	if r := post(t, withTimeout(t, wait.Limit), client, secretEndpoint(t, client, "http://10.7.0.1", nil)); r.StatusCode != 200 {
		t.Errorf("allowed address through the proxy: %+v, want 200", r)
	}
}

func TestProxyExceptions(t *testing.T) {
	proxy := listen(t, answers("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"))
	client := proxyClient(t, proxy.address, "", []string{".inside.example", "10.0.0.0/8", "crm.example:8443"})
	for url, want := range map[string]bool{
		"https://hooks.example": true, "http://hooks.example": true, "https://a.inside.example": false, "https://10.1.2.3": false,
		"https://crm.example": true, "https://crm.example:8443": false, "http://127.0.0.1:1": false,
	} {
		e := prepareURL(t, client, url)
		if got := e.proxy != nil; got != want {
			t.Errorf("%s uses the proxy: got %v, want %v", url, got, want)
		}
	}
}

// One connection to the proxy carries many requests, and new credentials need no restart.
func TestProxyCredentialsAreRenewed(t *testing.T) {
	var mu sync.Mutex
	var got []string
	targets := map[string]bool{}
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, r.Header.Get("Proxy-Authorization"))
		targets[r.RequestURI+" "+r.Host] = true
	}))
	defer server.Close()
	folder := credentialsFolder(t, "old")
	client := proxyClient(t, server.Listener.Addr().String(), folder, nil)
	e := prepareURL(t, client, "http://hooks.example:8080/in?a=b")
	send := func() {
		if r := client.Post(withTimeout(t, wait.Limit), e, nil, nil); r.StatusCode != 200 {
			t.Fatalf("%+v, want 200", r)
		}
	}
	reread := func() { client.proxy.credentials.readAt = time.Time{} }
	send()
	writeFile(t, filepath.Join(folder, "password"), "new")
	reread()
	send()
	if err := os.Remove(filepath.Join(folder, "password")); err != nil {
		t.Fatal(err)
	}
	reread()
	send()
	basic := func(password string) string {
		return "Basic " + base64.StdEncoding.EncodeToString([]byte("posthorn:"+password))
	}
	if diff := cmp.Diff([]string{basic("old"), basic("new"), basic("new")}, got); diff != "" {
		t.Errorf("credentials (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]bool{"http://hooks.example:8080/in?a=b hooks.example:8080": true}, targets); diff != "" {
		t.Errorf("request targets (-want +got):\n%s", diff)
	}
	if n := e.pool.open.Load(); n != 1 {
		t.Errorf("%d connections to the proxy, want 1", n)
	}
}

func TestNewProxyRefuses(t *testing.T) {
	broken := credentialsFolder(t, "a\nb")
	for _, c := range []struct {
		url, credentials, want string
		exceptions             []string
	}{
		{url: "proxy:3128", want: "form http://HOST:PORT"},
		{url: "http://proxy", want: "has no port"},
		{url: "https://proxy:3128", want: "must begin with http://"},
		{url: "socks5://proxy:1080", want: "must begin with http://"},
		{url: "http://user:" + canary + "@proxy:3128", want: "must not contain credentials"},
		{url: "http://pro xy:3128/" + canary, want: "form http://HOST:PORT"},
		{url: "http://proxy:3128/path", want: "form http://HOST:PORT"},
		{url: "http://0x7f.1:3128", want: "decimal numbers"},
		{url: "http://proxy:3128", exceptions: []string{"a, b"}, want: `exception "a, b"`},
		{url: "http://proxy:3128", credentials: t.TempDir(), want: "username"},
		{url: "http://proxy:3128", credentials: broken, want: "control character"},
	} {
		_, err := NewProxy(c.url, c.exceptions, c.credentials)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), canary) {
			t.Errorf("NewProxy(%q): %v, want %q and no secret", c.url, err, c.want)
		}
	}
	p, err := NewProxy("http://proxy:3128", nil, credentialsFolder(t, canary))
	if err != nil {
		t.Fatal(err)
	}
	if text := fmt.Sprintf("%v %+v %#v %s %q", p, p, p, p, p); strings.Contains(text, canary) {
		t.Errorf("printed, the proxy shows its password: %s", text)
	}
}

// machineAddress returns an address of this machine that is not loopback: requests to loopback
// addresses never use a proxy.
func machineAddress(t *testing.T) string {
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if ip, ok := a.(*net.IPNet); ok && !ip.IP.IsLoopback() && ip.IP.To4() != nil {
			return ip.IP.String()
		}
	}
	need.Skip(t, errors.New("this machine has no address except loopback"))
	return ""
}

// startProxy runs a proxy program, with its configuration in a file, until the test ends. %[1]s is
// the folder of its files, %[2]s its port.
func startProxy(t *testing.T, config string, command func(file string) *exec.Cmd) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address = l.Addr().String()
	_, port, _ := net.SplitHostPort(address)
	_ = l.Close()
	// Squid changes to another user, which must be able to read its files.
	folder, err := os.MkdirTemp("", "proxy")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	if err := os.Chmod(folder, 0o755); err != nil { //nolint:gosec // read by another user
		t.Fatal(err)
	}
	authenticate := filepath.Join(folder, "authenticate")
	writeFile(t, authenticate,
		"#!/bin/sh\nwhile read -r user password; do if [ \"$user $password\" = 'posthorn "+proxyPassword+"' ]; then echo OK; else echo ERR; fi; done\n")
	if err := os.Chmod(authenticate, 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(folder, "denied"), "denied.example\n")
	file := filepath.Join(folder, "config")
	writeFile(t, file, fmt.Sprintf(config, folder, port))
	cmd := command(file)
	var output strings.Builder
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-exited //nolint:errcheck // killed
	})
	err = wait.Until(func() error {
		select {
		case err := <-exited:
			exited <- err
			return wait.Stop(fmt.Errorf("the proxy ended: %w\n%s", err, output.String()))
		default:
		}
		c, err := net.Dial("tcp", address)
		if err == nil {
			_ = c.Close()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return address
}

func startSquid(t *testing.T) string {
	program := need.Program(t, "squid")
	return startProxy(t, `http_port 127.0.0.1:%[2]s
auth_param basic program %[1]s/authenticate
auth_param basic children 1
acl known proxy_auth REQUIRED
acl denied dstdomain denied.example
http_access deny denied
http_access allow known
http_access deny all
cache deny all
pid_filename none
access_log none
cache_log /dev/null
coredump_dir %[1]s
forward_max_tries 1
shutdown_lifetime 0 seconds
`, func(file string) *exec.Cmd { return exec.Command(program, "-N", "-f", file) })
}

func startTinyproxy(t *testing.T) string {
	program := need.Program(t, "tinyproxy")
	return startProxy(t, `Listen 127.0.0.1
Port %[2]s
Timeout 60
LogLevel Critical
Filter "%[1]s/denied"
BasicAuth posthorn `+proxyPassword+`
`, func(file string) *exec.Cmd { return exec.Command(program, "-d", "-c", file) })
}

func TestRealProxies(t *testing.T) {
	machine := machineAddress(t)
	for name, start := range map[string]func(*testing.T) string{"squid": startSquid, "tinyproxy": startTinyproxy} {
		t.Run(name, func(t *testing.T) { tryProxy(t, machine, start(t)) })
	}
}

// receiver is a server at the machine's address.
func receiver(t *testing.T, machine string, config *tls.Config, handler http.HandlerFunc) string {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(machine, "0"))
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: handler}, TLS: config} //nolint:gosec // a test
	if config == nil {
		server.Start()
	} else {
		server.StartTLS()
	}
	t.Cleanup(server.Close)
	return server.URL
}

func tryProxy(t *testing.T, machine, address string) {
	var mu sync.Mutex
	var got []string
	handle := func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		body, _ := io.ReadAll(r.Body)
		switch {
		case strings.HasPrefix(r.URL.Path, "/token"):
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"access_token":"t1","token_type":"Bearer","expires_in":3600}`)
		case r.URL.Path == "/reject":
			w.WriteHeader(http.StatusForbidden)
		default:
			got = append(got, fmt.Sprintf("%s %s auth=%q proxy=%q", r.URL.Path, body, r.Header.Get("Authorization"),
				r.Header.Get("Proxy-Authorization")))
		}
	}
	received := func() []string {
		mu.Lock()
		defer mu.Unlock()
		defer func() { got = nil }()
		return got
	}
	ca := issue(t, nil, authority("ca of the proxy test"))
	cert := issue(t, ca, func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.ParseIP(machine)} })
	plain := receiver(t, machine, nil, handle)
	secure := receiver(t, machine, &tls.Config{Certificates: []tls.Certificate{cert.forServer}, MinVersion: tls.VersionTLS12}, handle)
	client := proxyClient(t, address, credentialsFolder(t, proxyPassword), nil, machine, "denied.example")
	send := func(client *Client, url string, oauth *liveconfig.OAuth2) Result {
		t.Helper()
		config := liveconfig.Endpoint{Name: "primary", URL: liveconfig.NewSecret(url), OAuth2: oauth}
		if strings.HasPrefix(url, "https") {
			config.TLS = &liveconfig.TLS{CA: ca.pem}
		}
		e := prepareConfig(t, client, config)
		defer client.Forget(e)
		return client.Post(withTimeout(t, wait.Limit), e, nil, []byte("{}"))
	}

	for _, base := range []string{plain, secure} {
		for range 3 {
			if r := send(client, base+"/in", nil); r.StatusCode != 200 || r.RemoteAddr != address {
				t.Errorf("%s: %+v, want 200 through %s", base, r, address)
			}
		}
		want := `/in {} auth="" proxy=""`
		if diff := cmp.Diff([]string{want, want, want}, received()); diff != "" {
			t.Errorf("%s: requests at the receiver (-want +got):\n%s", base, diff)
		}
		// The receiver's own 403 is the receiver's.
		if r := send(client, base+"/reject", nil); r.Reason != Rejected || r.StatusCode != 403 {
			t.Errorf("%s/reject: %+v, want Rejected 403", base, r)
		}
		oauth := &liveconfig.OAuth2{TokenURL: base + "/token", ClientID: "posthorn", ClientSecret: liveconfig.NewSecret(clientSecret)}
		if strings.HasPrefix(base, "https") {
			oauth.TLS = &liveconfig.TLS{CA: ca.pem}
		}
		if r := send(client, base+"/in", oauth); r.StatusCode != 200 {
			t.Errorf("%s with OAuth 2.0: %+v, want 200", base, r)
		}
		if diff := cmp.Diff([]string{`/in {} auth="Bearer t1" proxy=""`}, received()); diff != "" {
			t.Errorf("%s with OAuth 2.0: requests at the receiver (-want +got):\n%s", base, diff)
		}
	}

	l, err := net.Listen("tcp", net.JoinHostPort(machine, "0"))
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	_ = l.Close()
	wrong := proxyClient(t, address, credentialsFolder(t, "wrong"), nil, machine)
	failing := func(client *Client, url, want string) {
		t.Helper()
		r := send(client, url, nil)
		if r.Reason != ProxyFailed || r.StatusCode != 0 || len(r.Response) != 0 || !strings.Contains(r.Message, want) {
			t.Errorf("%s: %+v, want ProxyFailed, no status, no response, and %q", url, r, want)
		}
	}
	for _, scheme := range []string{"http", "https"} {
		failing(client, scheme+"://"+closed, "it has no connection to this host")
		failing(client, scheme+"://denied.example", "its rules deny this host")
		failing(client, scheme+"://missing.invalid", "it has no connection to this host")
	}
	const credentials = "it requires other credentials"
	for _, base := range []string{plain, secure} {
		failing(wrong, base+"/in", credentials)
		oauth := &liveconfig.OAuth2{TokenURL: base + "/token", ClientID: "posthorn", ClientSecret: liveconfig.NewSecret(clientSecret)}
		if r := send(wrong, base+"/in", oauth); r.Reason != ProxyFailed || !strings.HasPrefix(r.Message, "no access token: egress proxy "+address) {
			t.Errorf("token request with other credentials: %+v, want ProxyFailed", r)
		}
	}
	// The files get the correct password.
	writeFile(t, filepath.Join(wrong.proxy.credentials.folder, "password"), proxyPassword)
	wrong.proxy.credentials.readAt = time.Time{}
	if r := send(wrong, secure+"/in", nil); r.StatusCode != 200 {
		t.Errorf("corrected credentials: %+v, want 200", r)
	}
	if got := received(); len(got) != 1 {
		t.Errorf("requests at the receiver: %q, want one", got)
	}
	// Allowed names do not replace the check of addresses.
	if r := send(client, "https://10.0.0.1", nil); r.Reason != AddressDenied {
		t.Errorf("private address: %+v, want AddressDenied", r)
	}
	direct := proxyClient(t, address, "", []string{machine}, machine)
	if r := send(direct, secure+"/in", nil); r.StatusCode != 200 || r.RemoteAddr == address {
		t.Errorf("exception: %+v, want 200 without the proxy", r)
	}
}
