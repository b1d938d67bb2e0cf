package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
