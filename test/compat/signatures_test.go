package compat

import (
	"fmt"
	"net/http"
	"testing"
)

// Receivers verify the signatures of each scheme with the libraries that they use for other
// webhooks, under the current secret, and during a rotation under both secrets.
func TestSignaturesByLibraries(t *testing.T) {
	needNode(t)
	const (
		current  = "whsec_bmV3LXNlY3JldC1vZi10aGUtcmVjZWl2ZXI="
		previous = "whsec_b2xkLXNlY3JldC1vZi10aGUtcmVjZWl2ZXI="
		unknown  = "whsec_YW5vdGhlci1zZWNyZXQtdGhhbi1laXRoZXI="

		github   = `{name: github, type: HMAC, secretKeyRef: {name: signing, key: current}, hmac: {header: X-Hub-Signature-256, value: "sha256={signature}"}}`
		stripe   = `{name: stripe, type: HMAC, secretKeyRef: {name: signing, key: current}, %s hmac: {header: Stripe-Signature, content: TimestampBody, value: "t={timestamp},v1={signature}", previousValue: ",v1={signature}"}}`
		standard = `{name: standard, type: StandardWebhooks, secretKeyRef: {name: signing, key: current}%s}`
		rotation = `, previousSecretKeyRef: {name: signing, key: previous}`
		sha1     = `, {name: sha1, type: HMACSHA1, secretKeyRef: {name: signing, key: previous}}`
	)
	all := github + sha1 + ", " + fmt.Sprintf(standard, "") + ", " + fmt.Sprintf(stripe, "")
	for _, test := range []struct {
		name, verifier, scheme, secret string
		authentic                      bool
	}{
		{"GitHub", "github", github, current, true},
		{"GitHub, another secret", "github", github, unknown, false},
		{"Stripe", "stripe", fmt.Sprintf(stripe, ""), current, true},
		{"Stripe, another secret", "stripe", fmt.Sprintf(stripe, ""), unknown, false},
		{"Stripe in rotation, new secret", "stripe", fmt.Sprintf(stripe, rotation[2:]+","), current, true},
		{"Stripe in rotation, old secret", "stripe", fmt.Sprintf(stripe, rotation[2:]+","), previous, true},
		{"Standard Webhooks", "standardwebhooks", fmt.Sprintf(standard, ""), current, true},
		{"Standard Webhooks, another secret", "standardwebhooks", fmt.Sprintf(standard, ""), unknown, false},
		{"Standard Webhooks in rotation, old secret", "standardwebhooks", fmt.Sprintf(standard, rotation), previous, true},
		{"four schemes, GitHub", "github", all, current, true},
		{"four schemes, Stripe", "stripe", all, current, true},
		{"four schemes, Standard Webhooks", "standardwebhooks", all, current, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			url := nodeReceiver(t, "node/signatures.js", "VERIFIER="+test.verifier, "SECRET="+test.secret)
			p := start(t, url, true, "")
			p.Write("crm.yaml", fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {name: signing}
stringData: {current: "%s", previous: "%s"}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: primary, url: %s}]
  signing: {schemes: [%s]}
`, current, previous, url, test.scheme))
			resp, err := send(p.Addr, recorded{Method: http.MethodPost, Path: "/v1/track",
				Body: `{"writeKey":"` + key + `","userId":"u1","event":"Signed"}`})
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			ledger := p.settled(1)
			if got := ledger.Delivered == 1; got != test.authentic {
				t.Errorf("authentic: got %t, want %t", got, test.authentic)
			}
			if got := ledger.DeadLettered == 1; got == test.authentic {
				t.Errorf("dead-lettered: got %t, want %t", got, !test.authentic)
			}
		})
	}
}
