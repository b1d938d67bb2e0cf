//go:build e2e

package e2e

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/client-go/util/cert"
)

// callsSecret is the Secret with the certificate for calls over TLS.
const callsSecret = "posthorn-calls"

// newCertificate returns a new authority, and a manifest of callsSecret with a certificate
// that it signed.
func newCertificate() (authority, manifest string) {
	GinkgoHelper()
	chain, key := certificate("posthorn-dispatcher", system)
	text, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": map[string]string{"name": callsSecret},
		"stringData": map[string]string{"tls.crt": chain, "tls.key": key},
	})
	Expect(err).NotTo(HaveOccurred())
	return last(chain), string(text)
}

// certificate returns a certificate of a Service, with its authority, and its key.
func certificate(service, namespace string) (chain, key string) {
	GinkgoHelper()
	host := service + "." + namespace + ".svc"
	c, k, err := cert.GenerateSelfSignedCertKey(host, nil, []string{host + ".cluster.local"})
	Expect(err).NotTo(HaveOccurred())
	return string(c), string(k)
}

// last returns the last certificate of a chain: its authority.
func last(chain string) string { return chain[strings.LastIndex(chain, "-----BEGIN"):] }

var _ = Describe("Calls over TLS", func() {
	It("use the certificate in the Secret, and a new one when the Secret changes", func() {
		t, s := running("tls")
		before := pods("dispatcher")
		chain, err := base64.StdEncoding.DecodeString(kubectl("-n", system, "get", "secret", callsSecret, "-o", `jsonpath={.data.tls\.crt}`))
		Expect(err).NotTo(HaveOccurred())
		authority, renewed := newCertificate()
		t.kubectl("create", "configmap", "authorities", "--from-literal=old="+last(string(chain)), "--from-literal=new="+authority)
		caller := func(trusting string) string {
			return `{name: ` + trusting + `, image: "` + posthornImage() + `", args: [sink, "--listen=:0", "--output=none"],
				env: [{name: SSL_CERT_FILE, value: /authorities/` + trusting + `}, {name: POSTHORN_WRITE_KEY, value: ` + t.key + `}],
				volumeMounts: [{name: authorities, mountPath: /authorities}],
				securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}}`
		}
		t.apply(`
apiVersion: v1
kind: Pod
metadata: {name: trusting}
spec:
  automountServiceAccountToken: false
  securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
  terminationGracePeriodSeconds: 1
  volumes: [{name: authorities, configMap: {name: authorities}}]
  containers: [` + caller("old") + `, ` + caller("new") + `]
`)
		t.waitReady("pod/trusting")
		// send sends a call through the Service from a client that trusts one of the authorities.
		send := func(trusting, event string) error {
			_, err := command("", "kubectl", "-n", t.name, "exec", "trusting", "-c", trusting, "--",
				"posthorn", "send", "track", "--address=https://posthorn-dispatcher."+system+".svc.cluster.local", "--user-id=u1", "--event="+event)
			return err
		}
		unknown := MatchError(ContainSubstring("certificate signed by unknown authority"))
		Expect(send("old", "With the first")).To(Succeed())
		s.eventually("With the first")
		Expect(send("new", "No")).To(unknown)

		By("replacing the Secret")
		apply(system, renewed)
		start := time.Now()
		Eventually(func() error { return send("new", "With the second") }, 3*time.Minute, 2*time.Second).Should(Succeed())
		By("the new certificate is used after " + time.Since(start).Round(time.Second).String())
		s.eventually("With the second")
		Expect(send("old", "No")).To(unknown)
		Expect(s.ids()).NotTo(HaveKey("No"))
		t.send("In clear text")
		s.eventually("In clear text")
		Expect(pods("dispatcher")).To(Equal(before), "pods and restarts of the dispatcher")
		ready(dispatcher)
	})
})
