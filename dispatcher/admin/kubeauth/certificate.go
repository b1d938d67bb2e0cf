package kubeauth

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// Certificate is the admin listener's certificate, as in the Secret.
type Certificate struct {
	current atomic.Pointer[tls.Certificate]
}

// Config configures a server that presents the newest certificate. Until there is one, handshakes
// fail.
func (c *Certificate) Config() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			if now := c.current.Load(); now != nil {
				return now, nil
			}
			return nil, errors.New("the operator has not made the Secret " + adminapi.CertificateSecret + " yet")
		},
	}
}

// Watch reads the certificate from the Secret AdminCertificateSecret of a namespace, and every
// change of it, until ctx is done. If the Secret is invalid or deleted, the last certificate
// remains in use. Watch needs permission to list and watch Secrets in that namespace.
func (c *Certificate) Watch(ctx context.Context, client kubernetes.Interface, namespace string, log *slog.Logger) error {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, adminapi.CertificateSecret).String()
		}))
	informer := factory.Core().V1().Secrets().Informer()
	if err := informer.SetWatchErrorHandler(func(_ *cache.Reflector, err error) {
		log.Warn("watching the admin listener's certificate failed; keeping the last one", "secret", adminapi.CertificateSecret, "error", err)
	}); err != nil {
		return fmt.Errorf("watch the admin listener's certificate: %w", err)
	}
	take := func(object any) {
		secret, ok := object.(*corev1.Secret)
		if !ok {
			return
		}
		pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
		if err != nil {
			log.Error("the admin listener's certificate is invalid; keeping the last one", "secret", secret.Name, "error", err)
			return
		}
		c.current.Store(&pair)
		log.Info("admin listener's certificate loaded", "secret", secret.Name)
	}
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: take, UpdateFunc: func(_, after any) {
		take(after)
	}}); err != nil {
		return fmt.Errorf("watch the admin listener's certificate: %w", err)
	}
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	<-ctx.Done()
	return nil
}
