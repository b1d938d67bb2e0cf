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
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/test/wait"
)

// The processes of a log need an address at which the others reach them.
func TestPeerListen(t *testing.T) {
	for _, c := range []struct{ listen, log, podIP, got, want string }{
		{"", "", "", "", ""},
		{"10.0.0.7:8444", "nats://a:4222", "", "10.0.0.7:8444", ""},
		{"posthorn-0:8444", "nats://a:4222", "10.0.0.7", "posthorn-0:8444", ""},
		{":8444", "nats://a:4222", "10.0.0.7", "10.0.0.7:8444", ""},
		{":8444", "nats://a:4222", "2001:db8::7", "[2001:db8::7]:8444", ""},
		{"10.0.0.7:8444", "", "", "", "needs --replication-url"},
		{"", "nats://a:4222", "", "", "needs --peer-listen"},
		{":8444", "nats://a:4222", "", "", "name the host"},
		{"0.0.0.0:8444", "nats://a:4222", "", "", "name the host"},
		{"[::]:8444", "nats://a:4222", "", "", "name the host"},
		{"debian:8444", "nats://a:4222", "", "", "debian is 127.0.1.1 on this machine"},
		{"localhost:8444", "nats://a:4222", "", "localhost:8444", ""},
		{"127.0.0.1:8444", "nats://a:4222", "", "127.0.0.1:8444", ""},
	} {
		t.Setenv("POD_IP", c.podIP)
		d := dataFlags{}
		d.peerListen, d.log.config.URL = c.listen, c.log
		err := d.checkPeerListen(func(_, address string) (*net.TCPAddr, error) {
			ip := net.IPv4(10, 0, 0, 7)
			if address == "debian:8444" {
				ip = net.IPv4(127, 0, 1, 1)
			}
			return &net.TCPAddr{IP: ip}, nil
		})
		switch {
		case c.want == "" && (err != nil || d.peerListen != c.got):
			t.Errorf("%+v: got %q and error %v, want none", c, d.peerListen, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%+v: got error %v, want %q", c, err, c.want)
		}
	}
}

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

func TestMemoryBound(t *testing.T) {
	limited := func(bytes uint64) func() (uint64, error) {
		return func() (uint64, error) { return bytes, nil }
	}
	unlimited := func() (uint64, error) { return 0, errors.New("no limit") }
	for _, c := range []struct {
		flag      string
		container func() (uint64, error)
		want      int64
		err       string
	}{
		{flag: "400M", container: unlimited, want: 400_000_000},
		{flag: "1Gi", container: limited(4 << 30), want: 1 << 30},
		{flag: "400M", container: limited(300_000_000), want: 270_000_000},
		{flag: "200M", container: unlimited, want: 200_000_000},
		{flag: "199M", container: unlimited, err: "--memory 199M: too small; use 200M or more"},
		{flag: "-1", container: unlimited, err: "use 200M or more"},
		{flag: "much", container: unlimited, err: `--memory "much": use a size such as 400M or 1Gi`},
		{flag: "400M", container: limited(128 << 20), err: "the container's memory limit of 134217728 bytes is too small; set it to 212Mi or more"},
		{flag: "400M", container: limited(212 << 20), want: 212 << 20 / 10 * 9},
	} {
		got, err := memoryBound(c.flag, c.container)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("--memory %s: got %d, %v; want %d, %q", c.flag, got, err, c.want, c.err)
		}
	}
}

// A raised ceiling of the timeout raises the drain timeout, so that a stop cuts no request off.
func TestDrainFollowsCeiling(t *testing.T) {
	for _, tc := range []struct{ ceiling, drain, want time.Duration }{
		{5 * time.Second, 10 * time.Second, 10 * time.Second},
		{time.Minute, 10 * time.Second, 65 * time.Second},
		{time.Minute, 2 * time.Minute, 2 * time.Minute},
	} {
		c := ceilingFlags{timeout: tc.ceiling}
		if got := c.drain(tc.drain); got != tc.want {
			t.Errorf("drain timeout for a ceiling of %v and a setting of %v: got %v, want %v", tc.ceiling, tc.drain, got, tc.want)
		}
	}
}

// The flags of several slots are checked against each other.
func TestLogSlots(t *testing.T) {
	const log = "--replication-url=nats://a:4222 --peer-listen=127.0.0.1:8444 --replication-installation="
	for args, want := range map[string]string{
		"--replication-slots=3":                                        "--replication-slots needs --replication-url",
		"--replication-url=nats://a:4222":                              "--replication-url needs --peer-listen",
		"--replication-url=nats://a:4222 --peer-listen=127.0.0.1:8444": "",
		log:                             "--replication-url: the identity of the installation is missing; set --replication-installation",
		log + "a --replication-slots=0": "--replication-slots 0: use 1 to 1024",
		log + "a --replication-slots=3 --replication-standbys=5":        "--replication-standbys 5: use 0 to 4",
		log + "a --replication-slots=3 --replication-pin=shop=3":        "--replication-pin shop=3: use a slot from 0 to 2",
		log + "a --replication-pin=shop=0":                              "",
		log + "a --replication-slots=3 --replication-pin=shop=2,news=0": "",
		log + "a --replication-slots=1 --replication-standbys=0":        "",
	} {
		var d dataFlags
		cmd := &cobra.Command{Use: "x"}
		d.register(cmd, t.TempDir(), "", "")
		d.log.registerSlots(cmd)
		if err := cmd.ParseFlags(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		if err := d.parse(); err == nil && want != "" || err != nil && (want == "" || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: got error %v, want %q", args, err, want)
		}
	}
}
