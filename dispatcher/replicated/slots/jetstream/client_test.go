package jetstream

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/test/wait"
)

// config is a valid Config for one server.
func config(url string) Config {
	return Config{URL: url, Name: "test", Installation: "shop/posthorn", Replicas: 1, MaxBytes: MinBytes, AllowWeak: true}
}

func TestValidate(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"nats://HOST:PORT":               func(c *Config) { c.URL = "http://n:4222" },
		"letters, digits":                func(c *Config) { c.Name = "a.b" },
		"set --replication-installation": func(c *Config) { c.Installation = "" },
		"1 to 200 letters":               func(c *Config) { c.Installation = "a b" },
		"the loss of one server":         func(c *Config) { c.AllowWeak = false },
		"use 3 to 5":                     func(c *Config) { c.Replicas = 6 },
		"bytes per stream":               func(c *Config) { c.MaxBytes = 1 << 20 },
		"certificate needs its key":      func(c *Config) { c.Cert = "client.pem" },
	} {
		c := config("nats://n:4222")
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v", want, err)
		}
	}
}

// Errors have no passwords: /readyz has them, too.
func TestErrorsHaveNoPasswords(t *testing.T) {
	address := fmt.Sprintf("nats://127.0.0.1:%d", freePorts(t, 1)[0])
	c := config(strings.Replace(address, "nats://", "nats://posthorn:hidden@", 1) + ",nats://token-hidden@127.0.0.1:1")
	client, err := New(c, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	_, unreachable := client.OpenSlot(t.Context(), 0)
	wantText(t, "servers that are not there", unreachable, address+",nats://127.0.0.1:1 cannot be reached")
	c.URL = "http://posthorn:hidden@n:4222"
	for _, err := range []error{unreachable, c.Validate()} {
		if err == nil || strings.Contains(err.Error(), "hidden") {
			t.Errorf("got error %v, want one without the password", err)
		}
	}
}

// connected returns a client whose connection is open.
func connected(t *testing.T, c Config) *Client {
	t.Helper()
	client, err := New(c, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	if err := wait.Until(func() error { return client.checkServers(t.Context()) }); err != nil {
		t.Fatal(err)
	}
	return client
}

// openSlot opens a slot as soon as the connection is open, and returns the first other error.
func openSlot(t *testing.T, c Config) (slots.Remote, error) {
	t.Helper()
	client, err := New(c, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	for deadline := time.Now().Add(startTimeout); ; time.Sleep(10 * time.Millisecond) {
		r, err := client.OpenSlot(t.Context(), 0)
		if err == nil || !strings.Contains(err.Error(), "no answer yet") && !strings.Contains(err.Error(), "i/o timeout") ||
			time.Now().After(deadline) {
			return r, err
		}
	}
}

func wantText(t *testing.T, what string, err error, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: got error %v, want one with %q", what, err, text)
		}
	}
}

// Servers and streams that cannot keep the promises are refused; the error has the setting and the
// fix.
func TestWeakLogsAreRefused(t *testing.T) {
	t.Run("unreachable", func(t *testing.T) {
		client, err := New(config(fmt.Sprintf("nats://127.0.0.1:%d", freePorts(t, 1)[0])), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		_, err = client.OpenSlot(t.Context(), 0)
		wantText(t, "servers that are not there", err, "cannot be reached", "start the NATS servers")
	})
	t.Run("credentials", func(t *testing.T) {
		s := startServer(t, server.Options{Port: server.RANDOM_PORT, Username: "posthorn", Password: "secret"})
		for what, url := range map[string]string{
			"no user": s.ClientURL(), "a wrong password": strings.Replace(s.ClientURL(), "nats://", "nats://posthorn:wrong@", 1),
		} {
			_, err := openSlot(t, config(url))
			wantText(t, what, err, "refuse the user", "--replication-credentials")
		}
		c := config(s.ClientURL())
		c.Credentials = filepath.Join(t.TempDir(), "missing.creds")
		_, err := New(c, slog.New(slog.DiscardHandler))
		wantText(t, "a file that is missing", err, "missing.creds", "--replication-credentials")
	})
	t.Run("certificate", func(t *testing.T) {
		other := httptest.NewTLSServer(http.NotFoundHandler())
		defer other.Close()
		s := startServer(t, server.Options{Port: server.RANDOM_PORT,
			TLSConfig: &tls.Config{Certificates: other.TLS.Certificates, MinVersion: tls.VersionTLS12}})
		_, err := openSlot(t, config(s.ClientURL()))
		wantText(t, "an unknown certificate", err, "certificate", "set --replication-ca")
	})
	t.Run("version", func(t *testing.T) {
		_, err := openSlot(t, config(startFakeServer(t, "2.10.29", "")))
		wantText(t, "an old server", err, `version "2.10.29"`, "use 2.15.0 or later")
	})
	t.Run("JetStream", func(t *testing.T) {
		s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoLog: true, NoSigs: true})
		if err != nil {
			t.Fatal(err)
		}
		go s.Start()
		defer s.Shutdown()
		if !s.ReadyForConnections(startTimeout) {
			t.Fatal("the server is not ready")
		}
		_, err = openSlot(t, config(s.ClientURL()))
		wantText(t, "a server without JetStream", err, "enable JetStream")
	})
	t.Run("payload", func(t *testing.T) {
		s := startServer(t, server.Options{Port: server.RANDOM_PORT, MaxPayload: 512 << 10})
		_, err := openSlot(t, config(s.ClientURL()))
		wantText(t, "a small payload", err, "max_payload", "1048576")
	})
	t.Run("replicas", func(t *testing.T) {
		s := startServer(t, server.Options{Port: server.RANDOM_PORT})
		c := config(s.ClientURL())
		c.Replicas, c.AllowWeak = 3, false
		_, err := openSlot(t, c)
		wantText(t, "three replicas on one server", err, "PH_test_W0", "replicas")
	})
	t.Run("sync", func(t *testing.T) {
		s := startServer(t, server.Options{Port: server.RANDOM_PORT})
		always := false
		monitor := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"config":{"sync_always":%v}}`, always)
		}))
		defer monitor.Close()
		other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.HasPrefix(r.URL.Path, "/404") {
				w.WriteHeader(http.StatusNotFound)
				fmt.Fprint(w, "{}")
				return
			}
			fmt.Fprint(w, "hello")
		}))
		defer other.Close()
		client, err := New(config(s.ClientURL()), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		client.c.AllowWeak, client.c.Monitoring = false, monitor.URL
		err = client.check(t.Context())
		wantText(t, "no sync of each record", err, "sync_interval: always")
		for path, want := range map[string]string{"/404": "status 404; set --replication-monitoring",
			"/text": "did not answer with the state of JetStream"} {
			client.c.Monitoring = other.URL + path
			err := client.check(t.Context())
			wantText(t, "another server at "+path, err, want)
			if strings.Contains(err.Error(), "%!") {
				t.Errorf("another server at %s: got the malformed error %v", path, err)
			}
		}
		client.c.Monitoring = monitor.URL
		always = true
		second := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, `{"config":{"sync_always":false}}`)
		}))
		client.c.Monitoring = monitor.URL + "," + second.URL
		wantText(t, "a second server without sync", client.check(t.Context()), "sync_interval: always")
		second.Close()
		if err := client.check(t.Context()); err != nil {
			t.Errorf("a second server that is stopped: got error %v, want none", err)
		}
		disabled := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, map[string]string{"/jsz": `{"disabled":true,"config":{}}`, "/varz": `{"server_name":"n7"}`}[r.URL.Path])
		}))
		defer disabled.Close()
		client.c.Monitoring = disabled.URL + "/"
		wantText(t, "no server with JetStream", client.check(t.Context()), "JetStream is disabled in n7: check its disk, restart it")
		client.c.Monitoring = monitor.URL + "," + disabled.URL
		if err := client.check(t.Context()); err != nil {
			t.Errorf("a server that has disabled JetStream: got error %v, want none", err)
		}
		client.c.Monitoring = monitor.URL
		if err := client.check(t.Context()); err != nil {
			t.Errorf("sync of each record: got error %v, want none", err)
		}
	})
}

// refuser accepts one user, by its key, and counts the refused ones.
type refuser struct {
	accepted atomic.Pointer[nkeys.KeyPair]
	refused  atomic.Int64
}

// Check implements server.Authentication.
func (r *refuser) Check(c server.ClientAuthentication) bool {
	signature, err := base64.RawURLEncoding.DecodeString(c.GetOpts().Sig)
	if err == nil && (*r.accepted.Load()).Verify(c.GetNonce(), signature) == nil {
		return true
	}
	r.refused.Add(1)
	return false
}

// waitRefused waits until the server has refused a number of connections.
func (r *refuser) waitRefused(t *testing.T, n int64) {
	t.Helper()
	if err := wait.Until(func() error {
		if got := r.refused.Load(); got < n {
			return fmt.Errorf("the server has refused %d connections, want %d", got, n)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// newUser makes the key of a NATS user.
func newUser(t *testing.T) *nkeys.KeyPair {
	t.Helper()
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	return &user
}

// writeCredentials writes the file of a NATS user.
func writeCredentials(t *testing.T, path string, user *nkeys.KeyPair) {
	t.Helper()
	seed, err := (*user).Seed()
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("-----BEGIN NATS USER JWT-----\njwt\n------END NATS USER JWT------\n\n-----BEGIN USER NKEY SEED-----\n%s\n------END USER NKEY SEED------\n", seed)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A client whose user was refused several times connects when its file, or the servers, have been
// corrected: at the start, and when the servers get new credentials before the client.
func TestRefusedCredentialsAreTriedAgain(t *testing.T) {
	const more = 3 // Without IgnoreAuthErrorAbort, a connection is closed after two.
	users, first, second := &refuser{}, newUser(t), newUser(t)
	users.accepted.Store(first)
	s := startServer(t, server.Options{Port: server.RANDOM_PORT, CustomClientAuthentication: users, AlwaysEnableNonce: true})
	c := config(s.ClientURL())
	c.Credentials = filepath.Join(t.TempDir(), "user.creds")
	writeCredentials(t, c.Credentials, newUser(t))
	client, err := New(c, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	connects := func(step string) {
		t.Helper()
		if err := wait.Until(func() error { return client.check(t.Context()) }); err != nil {
			t.Fatalf("%s: %v", step, err)
		}
	}
	disconnect := func() int64 {
		t.Helper()
		refused := users.refused.Load()
		id, err := client.nc.GetClientID()
		if err == nil {
			err = s.DisconnectClientByID(id)
		}
		if err != nil {
			t.Fatal(err)
		}
		return refused
	}
	users.waitRefused(t, more)
	wantText(t, "a refused user", client.check(t.Context()), "refuse the user", "--replication-credentials")
	writeCredentials(t, c.Credentials, first)
	connects("with the corrected file")

	users.accepted.Store(second)
	users.waitRefused(t, disconnect()+more)
	writeCredentials(t, c.Credentials, second)
	connects("with the renewed file")

	users.accepted.Store(newUser(t))
	users.waitRefused(t, disconnect()+more)
	users.accepted.Store(second)
	connects("with the corrected server")
}

// A connection that is not opened again is reported, and the end of the process is not.
func TestClosedConnectionIsReported(t *testing.T) {
	client, err := New(config(startFakeServer(t, "2.15.0", "-ERR 'Invalid Client Protocol'\r\n")), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	wantText(t, "a closed connection", client.Watch(ctx), "was closed", "Invalid Client Protocol", "restart the process")

	other, err := New(config(startServer(t, server.Options{Port: server.RANDOM_PORT}).ClientURL()), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	ended, end := context.WithCancel(t.Context())
	end()
	if err := other.Watch(ended); err != nil {
		t.Errorf("watch at the end of the process: got error %v, want none", err)
	}
}

// logText has the text of log messages.
type logText struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements io.Writer.
func (l *logText) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(line)
}

// The client checks each server to which it connects, and a server whose settings were changed.
func TestServersAreCheckedAgain(t *testing.T) {
	port := freePorts(t, 1)[0]
	address := fmt.Sprintf("127.0.0.1:%d", port)
	file := filepath.Join(t.TempDir(), "nats.conf")
	configure := func(maxPayload int) {
		t.Helper()
		text := fmt.Sprintf("listen: %q\nmax_payload: %d\njetstream { store_dir: %q, sync_interval: always }\n", address, maxPayload, filepath.Dir(file))
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	start := func() *server.Server {
		t.Helper()
		o, err := server.ProcessConfigFile(file)
		if err != nil {
			t.Fatal(err)
		}
		o.NoLog, o.NoSigs = true, true
		s, err := server.NewServer(o)
		if err != nil {
			t.Fatal(err)
		}
		s.Start()
		t.Cleanup(func() {
			s.Shutdown()
			s.WaitForShutdown()
		})
		if !s.ReadyForConnections(startTimeout) {
			t.Fatal("the server is not ready")
		}
		return s
	}
	configure(maxPayload)
	s := start()
	logged := &logText{}
	client, err := New(config("nats://"+address), slog.New(slog.NewTextHandler(logged, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	var remote slots.Remote
	if err := wait.Until(func() error {
		remote, err = client.OpenSlot(t.Context(), 0)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	d, err := remote.Durability(t.Context())
	if err != nil || len(d.Weak) != 3 { // Each stream has one replica.
		t.Errorf("weak settings of a server with the right ones: got %q and error %v, want three", d.Weak, err)
	}
	configure(512 << 10)
	s.Shutdown()
	s.WaitForShutdown()
	start()
	want := "NATS server " + address + " accepts messages of 524288 bytes; set max_payload to 1048576 or more"
	if err := wait.Until(func() error {
		logged.mu.Lock()
		defer logged.mu.Unlock()
		if !strings.Contains(logged.text.String(), want) {
			return fmt.Errorf("the log is %q, want %q", logged.text.String(), want)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := wait.Until(func() error {
		d, err = remote.Durability(t.Context())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(d.Weak, "\n"); !strings.Contains(text, want) {
		t.Errorf("weak settings of a server with a small max_payload: got %q, want %q", text, want)
	}
}

// startFakeServer accepts connections as a server of a version does, sends each a text, and returns its
// URL.
func startFakeServer(t *testing.T, version, text string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprintf(c, "INFO {\"server_id\":\"fake\",\"version\":%q,\"proto\":1,\"headers\":true,\"max_payload\":1048576}\r\n", version)
				for lines := bufio.NewScanner(c); lines.Scan(); {
					if lines.Text() == "PING" {
						fmt.Fprint(c, "PONG\r\n"+text)
					}
				}
			}()
		}
	}()
	return "nats://" + l.Addr().String()
}

// administer returns the access of an administrator to the streams of a server.
func administer(t *testing.T, url string) jetstream.JetStream {
	t.Helper()
	// A server that is delayed has no effect.
	nc, err := nats.Connect(url, nats.Timeout(wait.Limit), nats.PingInterval(wait.Limit))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(wait.Limit))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// A stream that was deleted is not created again while its object store exists, and ends the readers of
// its records. An adoption creates it, with an id that replaces the former one.
func TestDeletedStream(t *testing.T) {
	s := startServer(t, server.Options{Port: server.RANDOM_PORT})
	remote, err := openSlot(t, config(s.ClientURL()))
	if err != nil {
		t.Fatal(err)
	}
	before, err := remote.Log.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() { read <- remote.Log.Tail(t.Context(), 1, func(slots.Entry) error { return nil }) }()
	js := administer(t, s.ClientURL())
	if err := js.DeleteStream(t.Context(), "PH_test_W0"); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-read:
		wantText(t, "reading the deleted stream", err, "read stream PH_test_W0")
	case <-time.After(wait.Limit):
		t.Error("reading the deleted stream did not end")
	}
	if _, err := remote.Log.State(t.Context()); !errors.Is(err, slots.ErrNoStream) {
		t.Errorf("state of the deleted stream: got error %v, want %v", err, slots.ErrNoStream)
	}
	if _, err := openSlot(t, config(s.ClientURL())); !errors.Is(err, slots.ErrNoStream) {
		t.Errorf("open the slot: got error %v, want %v", err, slots.ErrNoStream)
	} else {
		wantText(t, "open the slot", err, "PH_test_W0", "restore it", "posthorn replication adopt", "--data")
	}
	client, err := New(config(s.ClientURL()), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := wait.Until(func() (err error) {
		remote, err = client.OpenAdopted(t.Context(), 0)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	again, err := remote.Log.State(t.Context())
	if err == nil {
		err = remote.Rename(t.Context(), before.ID, "")
	}
	if err != nil {
		t.Fatal(err)
	}
	renamed, err := remote.Log.State(t.Context())
	if err != nil || again.ID == before.ID || renamed.ID == again.ID || renamed.ID == "" {
		t.Errorf("ids of the stream: got %q, %q and %q, and error %v, want three", before.ID, again.ID, renamed.ID, err)
	}
	if want := []string{before.ID, again.ID}; !slices.Equal(renamed.Replaced, want) {
		t.Errorf("replaced ids: got %q, want %q", renamed.Replaced, want)
	}
}

// A server that disables JetStream, because its disk is full, is named. It has no weak setting, and no copy.
func TestServerDisablesJetStream(t *testing.T) {
	servers := startServers(t)
	var monitoring []string
	for _, s := range servers {
		monitoring = append(monitoring, "http://"+s.MonitorAddr().String())
	}
	c := config(servers[0].ClientURL())
	c.Replicas, c.AllowWeak, c.Monitoring = MinReplicas, false, strings.Join(monitoring, ",")
	var remote slots.Remote
	if err := wait.Until(func() (err error) {
		remote, err = openSlot(t, c)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	read := func(current int) (d slots.Durability) {
		t.Helper()
		if err := wait.Until(func() (err error) {
			if d, err = remote.Durability(t.Context()); err == nil && d.Current != current {
				err = fmt.Errorf("got %d current copies, want %d", d.Current, current)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return d
	}
	if d := read(MinReplicas); len(d.Disabled) > 0 {
		t.Errorf("three servers: got %q, want no disabled one", d.Disabled)
	}
	if err := servers[2].DisableJetStream(); err != nil {
		t.Fatal(err)
	}
	d := read(MinReplicas - 1)
	if want := []string{"JetStream is disabled in n2: check its disk, restart it"}; !slices.Equal(d.Disabled, want) ||
		len(d.Weak)+len(d.Gaps) > 0 || d.Sync != slots.SyncAlways {
		t.Errorf("got %+v, want the disabled server %q and no other problem", d, want)
	}
}

// Settings that become weak while a slot is in use are reported with their fixes.
func TestDurability(t *testing.T) {
	url := startCluster(t).ClientURL()
	var always atomic.Bool
	always.Store(true)
	monitor := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"config":{"sync_always":%v}}`, always.Load())
	}))
	defer monitor.Close()
	c := config(url)
	c.Replicas, c.AllowWeak, c.Monitoring = MinReplicas, false, monitor.URL
	var remote slots.Remote
	if err := wait.Until(func() (err error) { // Servers without a leader do not answer.
		remote, err = openSlot(t, c)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	var d slots.Durability
	read := func(current int) {
		t.Helper()
		if err := wait.Until(func() (err error) { // A new stream needs a moment for its copies.
			if d, err = remote.Durability(t.Context()); err == nil && d.Current < current {
				err = fmt.Errorf("got %d current copies, want %d", d.Current, current)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	read(MinReplicas)
	if d.Sync != slots.SyncAlways || d.Replicas != MinReplicas || len(d.Weak) > 0 {
		t.Errorf("safe settings: got %+v", d)
	}
	js := administer(t, url)
	for stream, change := range map[string]func(*jetstream.StreamConfig){
		"PH_test_W0":             func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour },
		"OBJ_PH_test_W0":         func(c *jetstream.StreamConfig) { c.MaxAge = 24 * time.Hour },
		"OBJ_PH_test_W0_members": func(c *jetstream.StreamConfig) { c.Replicas = 1 },
	} {
		s, err := js.Stream(t.Context(), stream)
		if err != nil {
			t.Fatal(err)
		}
		settings := s.CachedInfo().Config
		change(&settings)
		if _, err := js.UpdateStream(t.Context(), settings); err != nil {
			t.Fatal(err)
		}
	}
	always.Store(false)
	read(0)
	text := strings.Join(d.Weak, "\n")
	for _, want := range []string{
		"stream PH_test_W0: the stream has max_age 1h0m0s; set it to 0",
		"stream OBJ_PH_test_W0: the stream has max_age 24h0m0s; set it to 0",
		"stream OBJ_PH_test_W0_members has num_replicas 1, so the loss of one server can lose calls; set it to 3",
		"set jetstream { sync_interval: always }",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("weak settings: got %q, want %q", text, want)
		}
	}
	if d.Sync != slots.SyncPeriodic || d.Replicas != 1 || len(d.Weak) != 4 {
		t.Errorf("weak settings: got %+v", d)
	}
	monitor.Close()
	if read(0); d.Sync != slots.SyncUnknown || len(d.Weak) != 3 {
		t.Errorf("without the monitoring port: got %+v", d)
	}
}

// A stream that was made by hand is refused if one of its settings can lose messages: the stream of a slot's
// records, of an object store, and of the directory.
func TestForeignSettingsAreRefused(t *testing.T) {
	s := startServer(t, server.Options{Port: server.RANDOM_PORT})
	js := administer(t, s.ClientURL())
	client := connected(t, config(s.ClientURL()))
	settings := map[string]func(*jetstream.StreamConfig){
		"subjects":             func(c *jetstream.StreamConfig) { c.Subjects = []string{"other"} },
		"storage":              func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage },
		"retention":            func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy },
		"discard":              func(c *jetstream.StreamConfig) { c.Discard = jetstream.DiscardOld },
		"max_age":              func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour },
		"max_msgs":             func(c *jetstream.StreamConfig) { c.MaxMsgs = 1000 },
		"max_msgs_per_subject": func(c *jetstream.StreamConfig) { c.MaxMsgsPerSubject = 1000 },
		"max_msg_size":         func(c *jetstream.StreamConfig) { c.MaxMsgSize = 1000 },
		"":                     func(*jetstream.StreamConfig) {},
	}
	with := func(more map[string]func(*jetstream.StreamConfig)) map[string]func(*jetstream.StreamConfig) {
		all := maps.Clone(settings)
		maps.Copy(all, more)
		return all
	}
	open := func() error {
		_, err := client.OpenSlot(t.Context(), 0)
		return err
	}
	rollup := map[string]func(*jetstream.StreamConfig){
		"allow_rollup_hdrs": func(c *jetstream.StreamConfig) { c.AllowRollup = false },
	}
	for _, stream := range []struct {
		config   jetstream.StreamConfig
		settings map[string]func(*jetstream.StreamConfig)
		open     func() error
	}{
		{jetstream.StreamConfig{Name: "PH_test_DIR", Subjects: []string{"ph.test.dir.*"}, Discard: jetstream.DiscardNew,
			MaxBytes: 2 * directoryBytes}, settings, func() error {
			_, err := client.OpenDirectory(t.Context(), 0)
			return err
		}},
		{jetstream.StreamConfig{Name: "PH_test_W0", Subjects: []string{"ph.test.w0"}, Discard: jetstream.DiscardNew, MaxBytes: 2 * MinBytes,
			Duplicates: time.Hour, DenyDelete: true}, with(map[string]func(*jetstream.StreamConfig){
			"duplicate_window": func(c *jetstream.StreamConfig) { c.Duplicates = time.Second },
			"deny_purge":       func(c *jetstream.StreamConfig) { c.DenyPurge = true },
		}), open},
		{jetstream.StreamConfig{Name: "OBJ_PH_test_W0", Subjects: []string{"$O.PH_test_W0.C.>", "$O.PH_test_W0.M.>"},
			Discard: jetstream.DiscardNew, MaxBytes: 4 * MinBytes, AllowRollup: true, AllowDirect: true}, with(rollup), open},
		{jetstream.StreamConfig{Name: "OBJ_PH_test_W0_members", Subjects: []string{"$O.PH_test_W0_members.C.>", "$O.PH_test_W0_members.M.>"},
			Discard: jetstream.DiscardNew, MaxBytes: -1, AllowRollup: true, AllowDirect: true}, with(rollup), open},
	} {
		for setting, change := range stream.settings {
			for list := js.StreamNames(t.Context()); ; {
				name, ok := <-list.Name()
				if !ok {
					break
				}
				if err := js.DeleteStream(t.Context(), name); err != nil {
					t.Fatal(err)
				}
			}
			c := stream.config
			c.Storage = jetstream.FileStorage
			change(&c)
			// The server may still remove the files of the last stream.
			if err := wait.Until(func() error {
				_, err := js.CreateStream(t.Context(), c)
				return err
			}); err != nil {
				t.Fatalf("%s: %v", setting, err)
			}
			if name := objectsPrefix + "PH_test_W0"; c.Name == name { // The slot's stream was not deleted.
				if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "PH_test_W0", Subjects: []string{"ph.test.w0"},
					Discard: jetstream.DiscardNew, MaxBytes: MinBytes}); err != nil {
					t.Fatal(err)
				}
			}
			err := stream.open()
			if setting != "" {
				wantText(t, c.Name+" with another "+setting, err, c.Name, " "+setting+" ", "set it to")
			} else if err != nil {
				t.Errorf("stream %s that keeps more: got error %v, want none", c.Name, err)
			}
		}
	}
}

// A process with a larger maximum raises the streams' maximum. One with a smaller maximum changes nothing.
func TestMaxBytesAreRaised(t *testing.T) {
	s := startServer(t, server.Options{Port: server.RANDOM_PORT, JetStreamMaxStore: 15 * MinBytes})
	js := administer(t, s.ClientURL())
	c := config(s.ClientURL())
	before, err := openSlot(t, c)
	if err != nil {
		t.Fatal(err)
	}
	state, err := before.Log.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct{ maxBytes, want int64 }{{2 * MinBytes, 2 * MinBytes}, {MinBytes, 2 * MinBytes}} {
		c.MaxBytes = step.maxBytes
		remote, err := openSlot(t, c)
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]int64{"PH_test_W0": step.want, "OBJ_PH_test_W0": 3 * step.want, "OBJ_PH_test_W0_members": step.want} {
			stream, err := js.Stream(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			if got := stream.CachedInfo().Config.MaxBytes; got != want {
				t.Errorf("max_bytes of %s with %d bytes per stream: got %d, want %d", name, step.maxBytes, got, want)
			}
		}
		if now, err := remote.Log.State(t.Context()); err != nil || now.ID != state.ID {
			t.Errorf("id of the stream: got %q and error %v, want %q", now.ID, err, state.ID)
		}
	}
	c.MaxBytes = 4 * MinBytes
	_, err = openSlot(t, c)
	wantText(t, "more than the server has", err, "PH_test_W0", "raise max_bytes", "max_file_store")
}

// permissions are those in docs/replication.md. They allow neither the deletion of a stream nor
// access to other streams.
var permissions = []string{
	"ph.test.>", "$O.PH_test_W0.>", "$O.PH_test_W0_members.>", "$JS.API.INFO",
	"$JS.API.STREAM.*.PH_test_W0", "$JS.API.STREAM.*.OBJ_PH_test_W0", "$JS.API.STREAM.*.OBJ_PH_test_W0_members",
	"$JS.API.STREAM.*.PH_test_DIR",
	"$JS.API.STREAM.MSG.GET.*", "$JS.API.DIRECT.GET.>", "$JS.API.CONSUMER.>", "$JS.FC.>", "$JS.ACK.>",
}

var subscriptions = []string{"_INBOX.test.>", "ph.test.members"}

// The servers' clocks are read from the leaders of the streams.
func TestClocks(t *testing.T) {
	url := startCluster(t).ClientURL()
	c := config(url)
	c.Replicas, c.AllowWeak = MinReplicas, false
	var remote slots.Remote
	if err := wait.Until(func() (err error) { // Servers without a leader do not answer.
		remote, err = openSlot(t, c)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if len(remote.Clocks) != 3 {
		t.Errorf("clocks: got those of %d streams, want 3", len(remote.Clocks))
	}
	var ahead time.Duration
	w := slots.NewWallClock(func() time.Time { return time.Now().Add(ahead) }, nil)
	if err := w.Read(t.Context(), 0, remote.Clocks); err != nil {
		t.Fatal(err)
	}
	if skew := w.Skew(); skew != 0 {
		t.Errorf("clock of the same machine: got a skew of %v, want 0", skew)
	}
	ahead = 6 * time.Hour
	// The duration of an answer is not known to be less than a minute on a busy machine.
	if skew := w.Skew(); skew < ahead-time.Minute || skew > ahead {
		t.Errorf("clock that is ahead: got a skew of %v, want %v", skew, ahead)
	}
}

// The documented permissions suffice for a claim, a snapshot, and a restore, and with several slots for
// the directory and the heartbeats.
func TestPermissions(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/replication.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range append(slices.Clone(permissions), subscriptions...) {
		if !strings.Contains(string(page), strconv.Quote(p)) {
			t.Errorf("docs/replication.md: got no permission %q, want all that the test uses", p)
		}
	}
	s := startServer(t, server.Options{Port: server.RANDOM_PORT, Users: []*server.User{{
		Username: "posthorn", Password: "secret", Permissions: &server.Permissions{
			Publish:   &server.SubjectPermission{Allow: permissions, Deny: []string{"$JS.API.STREAM.DELETE.>"}},
			Subscribe: &server.SubjectPermission{Allow: subscriptions},
		},
	}}})
	url := strings.Replace(s.ClientURL(), "nats://", "nats://posthorn:secret@", 1)
	remote, err := openSlot(t, config(url))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for round := range 3 {
		slot := slots.Slot{Log: remote.Log, Objects: remote.Snapshots, Dir: t.TempDir() + "/queue",
			Store: pebblestore.Options{Logger: slog.New(slog.DiscardHandler)}}
		w, err := slot.TakeOver(ctx)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		o := slot.Store
		o.Log = w
		store, err := pebblestore.Open(slot.Dir, o)
		if err != nil {
			t.Fatal(err)
		}
		if err := store.PutMetaDurable(fmt.Sprint("round/", round), []byte("x")); err != nil {
			t.Fatal(err)
		}
		snapshots := &slots.Snapshotter{Log: remote.Log, Objects: remote.Snapshots, Writer: w, Store: store, FS: vfs.Default,
			Dir: slot.Dir + ".snapshot", Logger: o.Logger}
		if err := snapshots.Take(ctx); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		values, err := store.AllMeta()
		if err != nil || len(values) < round+1 {
			t.Errorf("round %d: got %d values and error %v, want those of all rounds", round, len(values), err)
		}
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
		if err := w.Release(ctx); err != nil {
			t.Fatal(err)
		}
	}
	client, err := New(config(url), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	heard := make(chan string, 1)
	stop, err := client.Subscribe(func(text []byte) { heard <- string(text) })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if err := wait.Until(func() error { return client.check(ctx) }); err != nil {
		t.Fatal(err)
	}
	if err := client.Publish([]byte("heartbeat")); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-heard:
		if got != "heartbeat" {
			t.Errorf("heartbeat: got %q", got)
		}
	case <-ctx.Done():
		t.Error("no heartbeat was received")
	}
	assignments, err := OpenAssignments(ctx, client.nc,
		DirectoryConfig{Name: client.directory(), Subject: "ph.test.dir", Replicas: 1, MaxBytes: directoryBytes})
	if err != nil {
		t.Fatal(err)
	}
	directory, err := slots.OpenDirectory(ctx, assignments, 2, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := directory.Assign(ctx, "shop", slots.PinNone); err != nil {
		t.Error(err)
	}
}

// recorded returns the installation in the metadata of a stream.
func recorded(t *testing.T, js jetstream.JetStream, name string) string {
	t.Helper()
	stream, err := js.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return stream.CachedInfo().Config.Metadata[metadataInstallation]
}

// A log belongs to the installation that creates it, and another one is refused, by its first slot or its directory.
func TestOtherInstallations(t *testing.T) {
	one := func(c *Client) error {
		_, err := c.OpenSlot(t.Context(), 0)
		return err
	}
	several := func(c *Client) error {
		if _, err := c.OpenDirectory(t.Context(), 2); err != nil {
			return err
		}
		_, err := c.OpenSlot(t.Context(), 1)
		return err
	}
	refused := map[string]func(*Client) error{
		"the first slot": one, "the directory": several,
		"another slot": func(c *Client) error {
			_, err := c.OpenSlot(t.Context(), 1)
			return err
		},
		"adopt a slot": func(c *Client) error {
			_, err := c.OpenAdopted(t.Context(), 0)
			return err
		},
		"adopt the directory": func(c *Client) error {
			_, err := c.AdoptDirectory(t.Context())
			return err
		},
	}
	for name, log := range map[string]struct {
		open    func(*Client) error
		streams []string
	}{
		"without a directory": {one, []string{"PH_test_W0"}},
		"with a directory":    {several, []string{"PH_test_DIR", "PH_test_W1"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, server.Options{Port: server.RANDOM_PORT})
			js := administer(t, s.ClientURL())
			client := func(installation string) *Client {
				c := config(s.ClientURL())
				c.Installation = installation
				return connected(t, c)
			}
			for range 2 {
				if err := log.open(client("shop/posthorn")); err != nil {
					t.Fatalf("the installation: %v", err)
				}
			}
			for what, open := range refused {
				err := open(client("news/posthorn"))
				wantError(t, what, err, slots.ErrOtherInstallation)
				wantText(t, what, err, `the log of "shop/posthorn"`, `this process belongs to "news/posthorn"`,
					"use another --replication-name (replication.jetStream.name in the chart)", `set --replication-installation (replication.jetStream.installation) to "shop/posthorn"`)
			}
			for _, stream := range log.streams {
				if got := recorded(t, js, stream); got != "shop/posthorn" {
					t.Errorf("installation of %s: got %q, want %q", stream, got, "shop/posthorn")
				}
			}
		})
	}
}

// A new log has the installation from its creation on. An adoption keeps it, and a directory that
// was created by hand does not become another installation's.
func TestInstallationIsKept(t *testing.T) {
	s := startServer(t, server.Options{Port: server.RANDOM_PORT})
	js := administer(t, s.ClientURL())
	c := config(s.ClientURL())
	client := connected(t, c)
	if _, err := client.OpenDirectory(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	for _, stream := range []string{"PH_test_DIR", "PH_test_W0", "PH_test_W1"} {
		if got := recorded(t, js, stream); got != c.Installation {
			t.Errorf("new stream %s: got the installation %q, want %q", stream, got, c.Installation)
		}
	}
	remote, err := connected(t, config(s.ClientURL())).OpenAdopted(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Rename(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := recorded(t, js, "PH_test_W0"); got != c.Installation {
		t.Errorf("after an adoption: got %q, want %q", got, c.Installation)
	}
	directory, err := js.Stream(t.Context(), "PH_test_DIR")
	if err != nil {
		t.Fatal(err)
	}
	settings := directory.CachedInfo().Config
	settings.Metadata = nil
	if err := js.DeleteStream(t.Context(), "PH_test_DIR"); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), settings); err != nil {
		t.Fatal(err)
	}
	other := config(s.ClientURL())
	other.Installation = "news/posthorn"
	_, err = connected(t, other).OpenDirectory(t.Context(), 2)
	wantError(t, "a directory that was created by hand", err, slots.ErrOtherInstallation)
	if got := recorded(t, js, "PH_test_DIR"); got != "" {
		t.Errorf("a directory that another installation opened: got the installation %q, want none", got)
	}
	if _, err := client.OpenDirectory(t.Context(), 2); err != nil {
		t.Errorf("the installation with a directory that was created by hand: %v", err)
	}
}

// A log that an earlier release made with one slot has no directory. It is refused until an adoption has created the
// directory, and can then get more slots.
func TestLogWithoutADirectory(t *testing.T) {
	s := startServer(t, server.Options{Port: server.RANDOM_PORT})
	client := connected(t, config(s.ClientURL()))
	if _, err := client.OpenSlot(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	_, err := client.OpenDirectory(t.Context(), 1)
	wantError(t, "the log without a directory", err, slots.ErrNoStream)
	wantText(t, "the log without a directory", err, "an earlier release made this log with one slot", "posthorn replication adopt")
	if _, err := client.AdoptDirectory(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, number := range []int{1, 3} {
		if _, err := client.OpenDirectory(t.Context(), number); err != nil {
			t.Errorf("%d slots with the directory: %v", number, err)
		}
	}
}

// A directory that was deleted is not created by a process. A running process reports it until it is restored.
func TestDeletedDirectory(t *testing.T) {
	s := startServer(t, server.Options{Port: server.RANDOM_PORT})
	client := connected(t, config(s.ClientURL()))
	assignments, err := client.OpenDirectory(t.Context(), 2)
	if err != nil {
		t.Fatal(err)
	}
	directory, err := slots.OpenDirectory(t.Context(), assignments, 2, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- directory.Run(ctx) }()
	js := administer(t, s.ClientURL())
	stream, err := js.Stream(t.Context(), "PH_test_DIR")
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteStream(t.Context(), "PH_test_DIR"); err != nil {
		t.Fatal(err)
	}
	want := []string{"PH_test_DIR", "was deleted", "restore it from a backup", "posthorn replication adopt"}
	_, err = client.OpenDirectory(t.Context(), 2)
	wantText(t, "slots without the directory", err, append(want, "PH_test_W0")...)
	if err := wait.Until(func() error {
		if directory.Err() == nil {
			return errors.New("the deletion was not reported")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	wantText(t, "a running process", directory.Err(), want...)
	if _, err := js.CreateStream(t.Context(), stream.CachedInfo().Config); err != nil {
		t.Fatal(err)
	}
	if err := wait.Until(directory.Err); err != nil {
		t.Errorf("with the restored directory: %v", err)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("follow the directory: got error %v, want %v", err, context.Canceled)
	}
}

// The directory is not opened while a slot has no streams.
func TestDirectoryNeedsRoomForAllSlots(t *testing.T) {
	const size = 10 * MinBytes // Two slots need 5 * size for each one.
	s := startServer(t, server.Options{Port: server.RANDOM_PORT, JetStreamMaxStore: 8 * size})
	c := config(s.ClientURL())
	c.MaxBytes = size
	client := connected(t, c)
	for range 2 { // Also when a part of the streams was created.
		_, err := client.OpenDirectory(t.Context(), 2)
		wantText(t, "two slots in the space of one", err, "slot 1 of 2", "max_file_store")
	}
	if _, err := client.OpenDirectory(t.Context(), 1); err != nil {
		t.Errorf("one slot: got %v, want no error", err)
	}
}

// A server that only lacks the records in progress has a copy.
func TestCurrentCopies(t *testing.T) {
	current := &jetstream.PeerInfo{Current: true, Active: time.Millisecond}
	for name, c := range map[string]struct {
		info jetstream.StreamInfo
		want int
	}{
		"one server":             {jetstream.StreamInfo{}, 1},
		"no leader":              {jetstream.StreamInfo{Cluster: &jetstream.ClusterInfo{Replicas: []*jetstream.PeerInfo{current, current}}}, 2},
		"all":                    {cluster(current, current), 3},
		"a few records behind":   {cluster(current, &jetstream.PeerInfo{Active: time.Millisecond, Lag: 5}), 3},
		"many records behind":    {cluster(current, &jetstream.PeerInfo{Active: time.Millisecond, Lag: 5000}), 2},
		"silent":                 {cluster(current, &jetstream.PeerInfo{Active: time.Minute, Lag: 5}), 2},
		"a gap":                  {cluster(current, &jetstream.PeerInfo{Name: "lacking", Current: true}), 2},
		"offline":                {cluster(current, &jetstream.PeerInfo{Active: time.Millisecond, Offline: true, Lag: 5}), 2},
		"not seen since a start": {cluster(current, &jetstream.PeerInfo{}), 2},
	} {
		t.Run(name, func(t *testing.T) {
			if got := currentCopies(&c.info, map[string]uint64{"lacking": 1}); got != c.want {
				t.Errorf("got %d copies, want %d", got, c.want)
			}
		})
	}
}

func cluster(replicas ...*jetstream.PeerInfo) jetstream.StreamInfo {
	return jetstream.StreamInfo{Cluster: &jetstream.ClusterInfo{Leader: "a", Replicas: replicas}}
}

// Servers that do not run need another fix than too few servers.
func TestErrorsHaveTheFix(t *testing.T) {
	for description, want := range map[string]string{
		"no suitable peers for placement, peer offline":         ErrOffline.Error(),
		"no suitable peers for placement, insufficient storage": "add servers or storage (max_file_store)",
		"insufficient resources":                                "add servers or storage (max_file_store)",
	} {
		err := explain(&jetstream.APIError{Code: 400, Description: description})
		if got := errors.Is(err, ErrOffline); got != (want == ErrOffline.Error()) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want it with %q", description, err, want)
		}
	}
}
