//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("A destination behind an egress proxy", Serial, func() {
	It("gets access tokens and both signatures, after the credentials of the proxy are corrected", func() {
		t := newNamespace("proxied")
		files := func(name string, data map[string]string) {
			GinkgoHelper()
			text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]string{"name": name},
				"data": data})
			Expect(err).NotTo(HaveOccurred())
			t.apply(string(text))
		}
		files("proxy", map[string]string{"tinyproxy.conf": "Port 9000\nTimeout 60\nLogLevel Connect\nBasicAuth posthorn proxy-password\n"})
		t.serve("proxy", env("E2E_PROXY"), "-d", "-c", "/config/tinyproxy.conf")
		chain, key := certificate("hook", t.name)
		files("hook", map[string]string{"pair.pem": chain + key})
		t.serve("hook", env("E2E_TOOL"), "-listen=:9000", "-pair=/config/pair.pem", "-client=posthorn:client-password", "-secret=s3cret")

		By("installing the proxy with a wrong password")
		credentials := func(password string) {
			GinkgoHelper()
			apply(system, `{apiVersion: v1, kind: Secret, type: kubernetes.io/basic-auth, metadata: {name: egress-proxy}, stringData: {username: posthorn, password: `+password+`}}`)
		}
		credentials("wrong")
		DeferCleanup(func() { install() })
		install("--set", "egressProxy.url=http://proxy."+t.name+".svc.cluster.local:80", "--set",
			"egressProxy.credentialsSecretName=egress-proxy")
		ready(dispatcher)

		host := "hook." + t.name + ".svc.cluster.local:80"
		t.secret("crm", "secret", "s3cret", "client", "client-password", "ca.crt", last(chain))
		t.apply(fmt.Sprintf(`
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  sourceRefs: [{name: web}]
  endpoints:
  - name: primary
    url: https://%[1]s/in
    tls: {ca: {secretKeyRef: {name: crm, key: ca.crt}}}
    authentication:
      oauth2:
        tokenURL: https://%[1]s/token
        clientID: posthorn
        clientSecretKeyRef: {name: crm, key: client}
        tls: {ca: {secretKeyRef: {name: crm, key: ca.crt}}}
  signing:
    schemes:
    - {name: sha1, type: HMACSHA1, secretKeyRef: {name: crm, key: secret}}
    - {name: standard, type: StandardWebhooks, secretKeyRef: {name: crm, key: secret}}
  delivery: {retry: {initialBackoff: 1s, maxBackoff: 3s}}
`, host))
		t.waitReady("psrc/web", "whd/crm")
		before := pods("dispatcher")
		const calls = 5
		for n := range calls {
			t.send(fmt.Sprint("Order ", n))
		}
		t.eventually("whd/crm", "Delivering", "False/ProxyFailed")
		Expect(t.field("whd/crm", "{.status.endpoints[0].lastFailure.message}")).To(ContainSubstring("credentials"),
			"message of the last failure")

		By("correcting the password")
		credentials("proxy-password")
		start := time.Now()
		Eventually(func() string { return t.field("whd/crm", "{.status.delivery.delivered}") }, 5*time.Minute,
			time.Second).Should(Equal(fmt.Sprint(calls)))
		By("the messages are delivered after " + time.Since(start).Round(time.Second).String())
		t.eventually("whd/crm", "Delivering", "True/Delivering")
		Expect(t.field("whd/crm", "{.status.delivery.deadLettered}")).To(Or(BeEmpty(), Equal("0")), "dead letters")
		Expect(pods("dispatcher")).To(Equal(before), "pods and restarts of the dispatcher")

		// The receiver rejects and does not print requests without a token or with a wrong signature.
		events, tokens := map[string]bool{}, map[string]bool{}
		for line := range strings.Lines(t.kubectl("logs", "hook")) {
			var request struct {
				Headers map[string][]string
				Body    string
			}
			if json.Unmarshal([]byte(line), &request) != nil {
				continue // A log message of another kind.
			}
			var body struct{ Event string }
			Expect(json.Unmarshal([]byte(request.Body), &body)).To(Succeed(), request.Body)
			events[body.Event], tokens[request.Headers["Authorization"][0]] = true, true
		}
		Expect(events).To(HaveLen(calls), "delivered events")
		Expect(tokens).To(HaveLen(1), "access tokens")
		Expect(t.kubectl("logs", "proxy")).To(ContainSubstring("CONNECT "+host), "the proxy's log")
		Expect(t.kubectl("logs", "hook")).NotTo(ContainSubstring("rejected:"), "the receiver's log")
	})
})
