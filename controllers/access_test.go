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

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

var _ = Describe("The way to the dispatchers", func() {
	It("is TLS with the certificate in the Secret, and no other", func() {
		ctx := context.Background()
		own, err := client.New(server.As("posthorn-operator"), client.Options{})
		Expect(err).NotTo(HaveOccurred())
		key := client.ObjectKey{Namespace: release, Name: liveconfig.AdminCertificateSecret}
		DeferCleanup(func() {
			secret := &corev1.Secret{}
			secret.Namespace, secret.Name = key.Namespace, key.Name
			Expect(client.IgnoreNotFound(cluster.Delete(ctx, secret))).To(Succeed())
		})
		now := time.Now()
		a := newAdminCertificate(own, own, release, func() time.Time { return now })
		read := func() tls.Certificate {
			GinkgoHelper()
			var secret corev1.Secret
			Expect(cluster.Get(ctx, key, &secret)).To(Succeed())
			Expect(secret.Type).To(Equal(corev1.SecretTypeTLS))
			pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
			Expect(err).NotTo(HaveOccurred())
			Expect(pair.Leaf.VerifyHostname(liveconfig.AdminServerName)).To(Succeed())
			return pair
		}
		var authorization string
		// listener is a dispatcher that shows this certificate.
		listener := func(pair tls.Certificate) string {
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { authorization = r.Header.Get("Authorization") }))
			s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}
			s.Config.ErrorLog = nil
			s.StartTLS()
			DeferCleanup(s.Close)
			return s.URL
		}
		token := filepath.Join(GinkgoT().TempDir(), "token")
		Expect(os.WriteFile(token, []byte("hush-token\n"), 0o600)).To(Succeed())
		way := a.transport(token)
		get := func(url string) error {
			authorization = ""
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			Expect(err).NotTo(HaveOccurred())
			response, err := way.RoundTrip(request)
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

		By("nobody is spoken to before there is a certificate")
		Expect(get(listener(impostor))).To(MatchError(ContainSubstring("not known yet")))

		By("the operator makes one and sends its token to who shows it")
		Expect(a.keep(ctx)).To(Succeed())
		first := read()
		Expect(get(listener(first))).To(Succeed())
		Expect(authorization).To(Equal("Bearer hush-token"))
		Expect(get(listener(impostor))).To(MatchError(ContainSubstring(liveconfig.AdminCertificateSecret)))
		Expect(authorization).To(BeEmpty())

		By("another operator takes what is there")
		other := newAdminCertificate(own, own, release, func() time.Time { return now })
		Expect(other.keep(ctx)).To(Succeed())
		Expect(read().Certificate).To(Equal(first.Certificate))

		By("it is renewed in time, and dispatchers that are late are still known")
		now = now.Add(certificateLife - certificateRenewal + time.Minute)
		Expect(a.keep(ctx)).To(Succeed())
		second := read()
		Expect(second.Certificate).NotTo(Equal(first.Certificate))
		Expect(get(listener(second))).To(Succeed())
		Expect(get(listener(first))).To(Succeed())

		By("what was damaged by hand is made again")
		var secret corev1.Secret
		Expect(cluster.Get(ctx, key, &secret)).To(Succeed())
		secret.Data[corev1.TLSPrivateKeyKey] = []byte("hush")
		Expect(cluster.Update(ctx, &secret)).To(Succeed())
		Expect(a.keep(ctx)).To(Succeed())
		third := read()
		Expect(get(listener(third))).To(Succeed())
		Expect(get(listener(first))).NotTo(Succeed())
	})
})
