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
	"k8s.io/apimachinery/pkg/util/wait"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/transport"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/contract/adminapi"
)

const (
	certificateLife = 365 * 24 * time.Hour
	// certificateRenewal is the remaining lifetime at which a certificate is replaced.
	certificateRenewal = 90 * 24 * time.Hour
	// certificateCheck is the interval between two checks of the Secret.
	certificateCheck = time.Minute
	// certificateWait bounds the time that a request waits for the first certificate.
	certificateWait = time.Second
)

// adminCertificate maintains the Secret with the certificate of the dispatchers'
// admin listeners. The operator authenticates a listener by certificate pinning:
// it accepts the current certificate and the previous one, and no other.
type adminCertificate struct {
	client.Client
	owner secretOwner // has the release's namespace and reads from the API server
	now   func() time.Time

	mu     sync.Mutex
	pinned [][]byte // DER; the newest is first
	// ready is closed when the first certificate is pinned.
	ready chan struct{}
}

// +kubebuilder:rbac:groups="",resources=secrets,namespace=posthorn-system,verbs=create;patch

func newAdminCertificate(c client.Client, owner secretOwner, now func() time.Time) *adminCertificate {
	return &adminCertificate{Client: c, owner: owner, now: now, ready: make(chan struct{})}
}

// Start maintains the Secret until ctx is done. It implements manager.Runnable and
// runs on the leader only.
func (a *adminCertificate) Start(ctx context.Context) error {
	wait.NonSlidingUntilWithContext(ctx, func(ctx context.Context) {
		if err := a.ensure(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "maintaining the admin certificate failed", "secret", adminapi.CertificateSecret)
		}
	}, certificateCheck)
	return nil
}

// ensure pins the certificate in the Secret. It writes a new one if the Secret is
// missing or invalid, or if the certificate expires soon, and adds the owner to a Secret
// without one.
func (a *adminCertificate) ensure(ctx context.Context) error {
	key := types.NamespacedName{Namespace: a.owner.namespace, Name: adminapi.CertificateSecret}
	var secret corev1.Secret
	err := a.owner.direct.Get(ctx, key, &secret)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("read Secret %s: %w", key, err)
	}
	if err == nil {
		if pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey]); err == nil {
			a.pin(pair.Certificate[0])
			if a.now().Before(pair.Leaf.NotAfter.Add(-certificateRenewal)) {
				if a.owner.owns(&secret) || secret.Labels[labelManagedBy] != managedBy {
					return nil
				}
				return a.write(ctx, key, secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
			}
		}
	}
	certificate, privateKey, der, err := makeCertificate(a.now())
	if err != nil {
		return err
	}
	if err := a.write(ctx, key, certificate, privateKey); err != nil {
		return err
	}
	a.pin(der)
	return nil
}

// write applies the Secret with a certificate and key in PEM.
func (a *adminCertificate) write(ctx context.Context, key types.NamespacedName, certificate, privateKey []byte) error {
	wanted := corev1ac.Secret(key.Name, key.Namespace).
		WithType(corev1.SecretTypeTLS).
		WithData(map[string][]byte{corev1.TLSCertKey: certificate, corev1.TLSPrivateKeyKey: privateKey})
	if err := a.owner.apply(ctx, a.Client, wanted); err != nil {
		return err
	}
	log.FromContext(ctx).Info("admin certificate written", "secret", key.Name)
	return nil
}

func (a *adminCertificate) pin(der []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.pinned) > 0 && bytes.Equal(a.pinned[0], der) {
		return
	}
	if a.pinned == nil {
		close(a.ready)
	}
	a.pinned = append([][]byte{der}, a.pinned[:min(1, len(a.pinned))]...)
}

func (a *adminCertificate) verify(state tls.ConnectionState) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(state.PeerCertificates) > 0 && slices.ContainsFunc(a.pinned, func(der []byte) bool {
		return bytes.Equal(der, state.PeerCertificates[0].Raw)
	}) {
		return nil
	}
	return errors.New("the server's certificate is not the one in the Secret " + adminapi.CertificateSecret + ": the server is not a dispatcher, or it has not loaded a renewed certificate yet")
}

// transport returns a transport to the admin listeners: TLS with the pinned
// certificate, and a bearer token from a file, which is read again when it is renewed.
func (a *adminCertificate) transport(tokenFile string) http.RoundTripper {
	base := &http.Transport{
		TLSClientConfig: &tls.Config{
			MinVersion: tls.VersionTLS13,
			ServerName: adminapi.ServerName,
			// VerifyConnection compares the certificate with the pinned one. That is
			// stricter than a chain: only the owner of its key can complete the handshake.
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
		select { // Before a certificate is pinned, every handshake fails.
		case <-a.ready:
		case <-wait.C:
			return nil, errors.New("the admin certificate of the dispatchers is not loaded yet")
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
		return withToken.RoundTrip(r)
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// makeCertificate returns a self-signed certificate.
func makeCertificate(now time.Time) (certificate, key, der []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("generate a key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, nil, nil, fmt.Errorf("generate a serial number: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: adminapi.ServerName},
		DNSNames:     []string{adminapi.ServerName},
		NotBefore:    now.Add(-time.Hour), // for clock skew between nodes
		NotAfter:     now.Add(certificateLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if der, err = x509.CreateCertificate(rand.Reader, template, template, private.Public(), private); err != nil {
		return nil, nil, nil, fmt.Errorf("create a certificate: %w", err)
	}
	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("encode a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}), der, nil
}
