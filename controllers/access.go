package controllers

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
	"fmt"
	"math/big"
	"net/http"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/transport"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

const (
	certificateLife = 365 * 24 * time.Hour
	// certificateRenewal is how long before its end a certificate is replaced.
	certificateRenewal = 90 * 24 * time.Hour
	// certificateCheck is how often the Secret is looked at.
	certificateCheck = time.Minute
	// certificateWait is how long a request waits for the first certificate.
	certificateWait = time.Second
)

// adminCertificate keeps the Secret with the certificate of the dispatchers'
// admin listeners, and is what the operator knows them by: a listener is
// trusted when it shows this very certificate, or the one before.
type adminCertificate struct {
	client.Client
	direct  client.Reader
	release string
	now     func() time.Time

	mu     sync.Mutex
	pinned [][]byte // DER, the newest first
	first  chan struct{}
}

// +kubebuilder:rbac:groups="",resources=secrets,namespace=posthorn-system,verbs=create;patch

func newAdminCertificate(c client.Client, direct client.Reader, release string, now func() time.Time) *adminCertificate {
	return &adminCertificate{Client: c, direct: direct, release: release, now: now, first: make(chan struct{})}
}

// Start keeps the Secret until ctx is done. It implements manager.Runnable, for
// the leader only.
func (a *adminCertificate) Start(ctx context.Context) error {
	tick := time.NewTicker(certificateCheck)
	defer tick.Stop()
	for {
		if err := a.keep(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "The certificate of the dispatchers' admin listeners cannot be kept", "secret", liveconfig.AdminCertificateSecret)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// keep reads the Secret, and makes it when it is missing, broken or about to end.
func (a *adminCertificate) keep(ctx context.Context) error {
	key := types.NamespacedName{Namespace: a.release, Name: liveconfig.AdminCertificateSecret}
	var secret corev1.Secret
	err := a.direct.Get(ctx, key, &secret)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("read Secret %s: %w", key, err)
	}
	if err == nil {
		if pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey]); err == nil {
			a.pin(pair.Certificate[0])
			if a.now().Before(pair.Leaf.NotAfter.Add(-certificateRenewal)) {
				return nil
			}
		}
	}
	certificate, privateKey, der, err := makeCertificate(a.now())
	if err != nil {
		return err
	}
	wanted := corev1ac.Secret(key.Name, key.Namespace).
		WithType(corev1.SecretTypeTLS).
		WithLabels(map[string]string{"app.kubernetes.io/name": "posthorn", "app.kubernetes.io/managed-by": "posthorn-operator"}).
		WithData(map[string][]byte{corev1.TLSCertKey: certificate, corev1.TLSPrivateKeyKey: privateKey})
	if err := a.Apply(ctx, wanted, fieldOwner, client.ForceOwnership); err != nil {
		return fmt.Errorf("apply Secret %s: %w", key, err)
	}
	a.pin(der)
	log.FromContext(ctx).Info("Certificate of the dispatchers' admin listeners written", "secret", key.Name)
	return nil
}

func (a *adminCertificate) pin(der []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.pinned) > 0 && bytes.Equal(a.pinned[0], der) {
		return
	}
	if a.pinned == nil {
		close(a.first)
	}
	a.pinned = append([][]byte{der}, a.pinned[:min(1, len(a.pinned))]...)
}

func (a *adminCertificate) verify(state tls.ConnectionState) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(state.PeerCertificates) > 0 && slices.ContainsFunc(a.pinned, func(der []byte) bool { return bytes.Equal(der, state.PeerCertificates[0].Raw) }) {
		return nil
	}
	return errors.New("this is not the certificate in the Secret " + liveconfig.AdminCertificateSecret + ": not a dispatcher, or one that has not taken a new certificate yet")
}

// transport makes a way to the admin listeners: TLS with the pinned
// certificate, and the token in a file, read again as it is renewed.
func (a *adminCertificate) transport(tokenFile string) http.RoundTripper {
	base := &http.Transport{
		TLSClientConfig: &tls.Config{
			MinVersion: tls.VersionTLS13,
			ServerName: liveconfig.AdminServerName,
			// The certificate is compared with the pinned one instead, which says more
			// than a chain: only who holds its key can finish the handshake.
			InsecureSkipVerify: true,
			VerifyConnection:   a.verify,
		},
		DialContext:           dialer(),
		TLSHandshakeTimeout:   reportTimeout,
		MaxIdleConnsPerHost:   2,
		IdleConnTimeout:       time.Minute,
		ResponseHeaderTimeout: time.Minute,
	}
	withToken := transport.TokenSourceWrapTransport(transport.NewCachedFileTokenSource(tokenFile))(base)
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		wait := time.NewTimer(certificateWait)
		defer wait.Stop()
		select { // no request before the certificate is known: it would only fail
		case <-a.first:
		case <-wait.C:
			return nil, errors.New("the certificate of the dispatchers' admin listeners is not known yet")
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
		return withToken.RoundTrip(r)
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// makeCertificate makes a certificate that signs itself.
func makeCertificate(now time.Time) (certificate, key, der []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("make a key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, nil, nil, fmt.Errorf("make a serial number: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: liveconfig.AdminServerName},
		DNSNames:     []string{liveconfig.AdminServerName},
		NotBefore:    now.Add(-time.Hour), // clocks differ
		NotAfter:     now.Add(certificateLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if der, err = x509.CreateCertificate(rand.Reader, template, template, private.Public(), private); err != nil {
		return nil, nil, nil, fmt.Errorf("make a certificate: %w", err)
	}
	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("encode a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}), der, nil
}
