package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

// hostsPerNet is the number of hosts in the last byte of an address.
const hostsPerNet = 250

// hostAddress is the address of a host, and hostNumber the reverse.
func hostAddress(i int) net.IP { return net.IPv4(127, 1, byte(i/hostsPerNet), byte(1+i%hostsPerNet)) }

func hostNumber(a net.Addr) int {
	ip := a.(*net.TCPAddr).IP.To4()
	return int(ip[2])*hostsPerNet + int(ip[3]) - 1
}

// tlsSinkRole runs the receiver. Its argument is the file for the root certificate.
func tlsSinkRole(args []string) error {
	issuer, err := newAuthority(args[0])
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "0.0.0.0:0") // 127.0.0.0/8, which has no other notation.
	if err != nil {
		return err
	}
	var mu sync.Mutex
	counts := make(hostCounts, reuseHosts)
	type firstRequest struct{} // the key of a *sync.Once in the context of a connection
	server := &http.Server{
		TLSConfig: &tls.Config{GetCertificate: issuer.of, NextProtos: []string{"http/1.1"}},
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
			return context.WithValue(ctx, firstRequest{}, new(sync.Once))
		},
		Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			mu.Lock()
			defer mu.Unlock()
			host := &counts[hostNumber(r.Context().Value(http.LocalAddrContextKey).(net.Addr))]
			host.Messages++
			r.Context().Value(firstRequest{}).(*sync.Once).Do(func() {
				host.Handshakes++
				if r.TLS.DidResume {
					host.Resumed++
				}
			})
		}),
	}
	go func() { _ = server.ServeTLS(l, "", "") }()
	control, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	fmt.Printf(`{"Port":%q,"Control":%q}`+"\n", port, control.Addr())
	return http.Serve(control, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { //nolint:gosec // a local control listener
		mu.Lock()
		defer mu.Unlock()
		_ = json.NewEncoder(w).Encode(counts)
		clear(counts)
	}))
}

// tlsAuthority issues a certificate for each address, by an intermediate authority.
type tlsAuthority struct {
	key, leafKey *ecdsa.PrivateKey // of the authorities, and of all receivers
	intermediate *x509.Certificate
	mu           sync.Mutex
	issued       map[string]*tls.Certificate
}

// newAuthority appends the root certificate to a file.
func newAuthority(file string) (*tlsAuthority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	leafKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &tlsAuthority{key: key, leafKey: leafKey, issued: map[string]*tls.Certificate{}}
	root, err := a.sign("root", nil, nil)
	if err != nil {
		return nil, err
	}
	if a.intermediate, err = a.sign("intermediate", root, nil); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return a, pem.Encode(f, &pem.Block{Type: "CERTIFICATE", Bytes: root.Raw})
}

// sign makes a certificate of an address, or of an authority without one.
func (a *tlsAuthority) sign(name string, issuer *x509.Certificate, address net.IP) (*x509.Certificate, error) {
	padding := make([]byte, 600) // As large as certificates of the web are, with their transparency logs and policies.
	_, _ = rand.Read(padding)
	serial, _ := rand.Int(rand.Reader, big.NewInt(1<<60))
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, IPAddresses: []net.IP{address},
		ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 11129, 2, 4, 2}, Value: padding}},
	}
	public := a.leafKey.Public()
	if address == nil {
		public = a.key.Public()
		template.IPAddresses, template.IsCA, template.BasicConstraintsValid = nil, true, true
		template.KeyUsage, template.ExtKeyUsage = x509.KeyUsageCertSign, nil
	}
	if issuer == nil {
		issuer = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, issuer, public, a.key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// of implements tls.Config.GetCertificate.
func (a *tlsAuthority) of(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	address := hello.Conn.LocalAddr().(*net.TCPAddr).IP
	a.mu.Lock()
	defer a.mu.Unlock()
	if found := a.issued[address.String()]; found != nil {
		return found, nil
	}
	leaf, err := a.sign(address.String(), a.intermediate, address)
	if err != nil {
		return nil, err
	}
	issued := &tls.Certificate{Certificate: [][]byte{leaf.Raw, a.intermediate.Raw}, PrivateKey: a.leafKey, Leaf: leaf}
	a.issued[address.String()] = issued
	return issued, nil
}
