package main

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// gatewayAddrs are the addresses of a gateway: it forwards TLS connections to the sink, either
// direct ones or those that an HTTP proxy would open by CONNECT, and issues OAuth 2.0 tokens.
type gatewayAddrs struct{ TLS, Proxy, Token, CA string }

func gatewayRole(args []string) error {
	ca, leaf, err := certificates()
	if err != nil {
		return err
	}
	config := &tls.Config{Certificates: []tls.Certificate{leaf}, MinVersion: tls.VersionTLS12}
	forward := func(c net.Conn) {
		defer c.Close()
		s, err := net.Dial("tcp", args[0])
		if err != nil {
			return
		}
		defer s.Close()
		secure := tls.Server(c, config)
		go func() { _, _ = io.Copy(s, secure); _ = s.Close() }()
		_, _ = io.Copy(secure, s)
	}
	direct, err := serve(forward)
	if err != nil {
		return err
	}
	proxy, err := serve(func(c net.Conn) {
		if r, err := http.ReadRequest(bufio.NewReader(c)); err != nil || r.Method != http.MethodConnect {
			_ = c.Close()
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		forward(c)
	})
	if err != nil {
		return err
	}
	tokens, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	hello, err := json.Marshal(gatewayAddrs{TLS: direct, Proxy: proxy, Token: tokens.Addr().String(), CA: ca})
	if err != nil {
		return err
	}
	fmt.Println(string(hello))
	return http.Serve(tokens, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { //nolint:gosec // a benchmark
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"access_token":"2YotnFZFEjr1zCsicMWpAA2YotnFZFEjr1zCsicMWpAA","token_type":"Bearer","expires_in":3600}`)
	}))
}

// serve calls handle for each connection.
func serve(handle func(net.Conn)) (address string, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go handle(c)
		}
	}()
	return l.Addr().String(), nil
}

// certificates returns a CA in PEM form, and a certificate of it for 127.0.0.1 and sink.bench.
func certificates() (ca string, leaf tls.Certificate, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", leaf, err
	}
	authority := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "bench"}, NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, authority, authority, key.Public(), key)
	if err != nil {
		return "", leaf, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "sink"}, NotAfter: time.Now().Add(24 * time.Hour),
		DNSNames: []string{"sink.bench"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", leaf, err
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, authority, own.Public(), key)
	if err != nil {
		return "", leaf, err
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		tls.Certificate{Certificate: [][]byte{signed}, PrivateKey: own}, nil
}

// measureReach compares destinations that use OAuth 2.0, another signature, and a proxy with the same
// destination without. Each comparison has its own base, measured before and after.
func measureReach(ctx context.Context, b *bench) ([]row, error) {
	p, err := spawn(ctx, "gateway", b.sink.Addr)
	if err != nil {
		return nil, err
	}
	defer p.stop()
	var g gatewayAddrs
	if err := json.Unmarshal(p.hello, &g); err != nil {
		return nil, err
	}
	measure := func(proxy string, change func(*liveconfig.Destination)) (sample, error) {
		return b.throughput(ctx, load{batch: 20, clients: 8}, []destination{{addr: b.sink.Addr, proxy: proxy, change: change}})
	}
	secure := func(host string) func(*liveconfig.Destination) {
		return func(d *liveconfig.Destination) {
			d.Endpoints[0].URL, d.Endpoints[0].TLS = liveconfig.NewSecret("https://"+host+"/in"), &liveconfig.TLS{CA: g.CA}
		}
	}
	var rows []row
	for _, c := range []struct {
		name           string
		proxy          string
		without, with  func(*liveconfig.Destination)
		goal           float64
		goalDescribing string
	}{
		{"CPU per message with OAuth 2.0, of one without", "", nil, func(d *liveconfig.Destination) {
			d.Endpoints[0].OAuth2 = &liveconfig.OAuth2{TokenURL: "http://" + g.Token + "/token", ClientID: "bench",
				ClientSecret: liveconfig.NewSecret(secret)}
		}, 1.1, "<= 1.1"},
		{"CPU per message with HMAC SHA-256, of SHA-1", "", nil, func(d *liveconfig.Destination) {
			d.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMAC, Secret: liveconfig.NewSecret(secret), Format: &liveconfig.HMACFormat{
				Header: "X-Hub-Signature-256", Algorithm: liveconfig.SHA256, Encoding: liveconfig.Hex, Content: liveconfig.SignBody, Value: "sha256={signature}",
			}}}
		}, 1.1, "<= 1.1"},
		{"CPU per https message through CONNECT, of direct", g.Proxy, secure(g.TLS), secure("sink.bench"), 1.2, "<= 1.2"},
	} {
		before, err := measure("", c.without)
		if err != nil {
			return nil, err
		}
		got, err := measure(c.proxy, c.with)
		if err != nil {
			return nil, err
		}
		after, err := measure("", c.without)
		if err != nil {
			return nil, err
		}
		base := before.mean(after)
		rows = append(rows, below(c.name, got.cpu/base.cpu, c.goal, fmt.Sprintf("%.2f (%.1f us)", got.cpu/base.cpu, got.cpu), c.goalDescribing))
	}
	return rows, nil
}
