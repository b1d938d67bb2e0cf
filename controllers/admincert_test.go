package controllers

import (
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/contract/adminapi"
)

var _ = Describe("The transport to the dispatchers", func() {
	It("accepts the certificate in the Secret and no other", func() {
		ctx := context.Background()
		own, err := client.New(server.As("posthorn-operator"), client.Options{})
		Expect(err).NotTo(HaveOccurred())
		key := client.ObjectKey{Namespace: release, Name: adminapi.CertificateSecret}
		DeferCleanup(func() {
			secret := &corev1.Secret{}
			secret.Namespace, secret.Name = key.Namespace, key.Name
			Expect(client.IgnoreNotFound(cluster.Delete(ctx, secret))).To(Succeed())
		})
		owner := secretOwner{direct: own, namespace: release}
		now := time.Now()
		a := newAdminCertificate(own, owner, func() time.Time { return now })
		read := func() tls.Certificate {
			GinkgoHelper()
			var secret corev1.Secret
			Expect(cluster.Get(ctx, key, &secret)).To(Succeed())
			Expect(secret.Type).To(Equal(corev1.SecretTypeTLS))
			pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
			Expect(err).NotTo(HaveOccurred())
			Expect(pair.Leaf.VerifyHostname(adminapi.ServerName)).To(Succeed())
			return pair
		}
		var authorization string
		// listener starts a server with this certificate.
		listener := func(pair tls.Certificate) string {
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				authorization = r.Header.Get("Authorization")
			}))
			s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}
			s.Config.ErrorLog = nil
			s.StartTLS()
			DeferCleanup(s.Close)
			return s.URL
		}
		token := filepath.Join(GinkgoT().TempDir(), "token")
		Expect(os.WriteFile(token, []byte("hush-token\n"), 0o600)).To(Succeed())
		transport := a.transport(token)
		get := func(url string) error {
			authorization = ""
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			Expect(err).NotTo(HaveOccurred())
			response, err := transport.RoundTrip(request)
			if err == nil {
				_, _ = io.Copy(io.Discard, response.Body)
				Expect(response.Body.Close()).To(Succeed())
			}
			return err
		}

		certificate, privateKey, _, err := makeCertificate(now)
		Expect(err).NotTo(HaveOccurred())
		impostor, err := tls.X509KeyPair(certificate, privateKey)
		Expect(err).NotTo(HaveOccurred())

		By("no request is sent before a certificate exists")
		Expect(get(listener(impostor))).To(MatchError(ContainSubstring("not loaded yet")))

		By("the operator creates a certificate and sends its token to a listener with it")
		Expect(a.ensure(ctx)).To(Succeed())
		first := read()
		Expect(get(listener(first))).To(Succeed())
		Expect(authorization).To(Equal("Bearer hush-token"))
		Expect(get(listener(impostor))).To(MatchError(ContainSubstring(adminapi.CertificateSecret)))
		Expect(authorization).To(BeEmpty())

		By("another operator uses the existing certificate")
		other := newAdminCertificate(own, owner, func() time.Time { return now })
		Expect(other.ensure(ctx)).To(Succeed())
		Expect(read().Certificate).To(Equal(first.Certificate))

		By("it is renewed in time, and dispatchers with the previous certificate are still accepted")
		now = now.Add(certificateLife - certificateRenewal + time.Minute)
		Expect(a.ensure(ctx)).To(Succeed())
		second := read()
		Expect(second.Certificate).NotTo(Equal(first.Certificate))
		Expect(get(listener(second))).To(Succeed())
		Expect(get(listener(first))).To(Succeed())

		By("an invalid certificate is replaced")
		var secret corev1.Secret
		Expect(cluster.Get(ctx, key, &secret)).To(Succeed())
		secret.Data[corev1.TLSPrivateKeyKey] = []byte("hush")
		Expect(cluster.Update(ctx, &secret)).To(Succeed())
		Expect(a.ensure(ctx)).To(Succeed())
		third := read()
		Expect(get(listener(third))).To(Succeed())
		Expect(get(listener(first))).NotTo(Succeed())
	})
})
