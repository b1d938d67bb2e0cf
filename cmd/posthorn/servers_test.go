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
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Calls over TLS need an address, a certificate and its key, and are told so.
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
		{":0", "", "", "belong together"},
		{":0", cert, "", "belong together"},
		{"", cert, key, "belong together"},
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
	for deadline := time.Now().Add(time.Minute); served() != "two"; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the renewed certificate is not served")
		}
	}
}
