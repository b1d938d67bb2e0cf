//go:build e2e

package e2e

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/posthorn/posthorn/test/signature"
)

var _ = Describe("A webhook", func() {
	It("receives signed calls, and every change of its destination takes effect", func() {
		shop := newNamespace("store")
		shop.secret("crm", "secret", "s3cret", "token", "Bearer abc")
		first := shop.newSink("first", "s3cret")
		shop.destination("crm", first.url(), "")
		shop.waitReady("psrc/web", "whd/crm")

		By("sending a call through the Service")
		Expect(shop.send("First")).To(ContainSubstring(`"success":true`))
		first.eventually("First")
		shop.eventually("whd/crm", "Delivering", "True/Delivering")
		shop.eventually("psrc/web", "Receiving", "True/Receiving")
		Expect(shop.field("psrc/web", "{.status.destinations}")).To(Equal(`["crm"]`))

		By("editing the URL")
		second := shop.newSink("second", "s3cret")
		shop.inEffect("whd/crm", func() { shop.destination("crm", second.url(), "") })
		shop.send("Moved")
		second.eventually("Moved")
		Expect(first.ids()).NotTo(HaveKey("Moved"))

		By("rotating the Secret: a receiver that has only the new secret accepts the calls")
		third := shop.newSink("third", "n3w")
		shop.inEffect("whd/crm", func() { shop.destination("crm", third.url(), "") })
		shop.inEffect("whd/crm", func() { shop.secret("crm", "secret", "n3w", "token", "Bearer abc") })
		shop.send("Rotated")
		third.eventually("Rotated")

		By("adding headers, and rotating with the previous secret: requests have both signatures")
		shop.secret("crm", "secret", "newest", "previous", "n3w", "token", "Bearer abc")
		wire := shop.newRecorder("wire")
		newest := shop.newSink("newest", "newest")
		shop.inEffect("whd/crm", func() {
			shop.apply(`
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  sourceRefs: [{name: web}]
  endpoints:
  - name: primary
    url: ` + newest.url() + `
  - name: wire
    url: ` + wire.url() + `
    headers:
    - {name: X-Env, value: e2e}
    - {name: Authorization, valueFrom: {secretKeyRef: {name: crm, key: token}}}
  successPolicy: EveryEndpoint
  signing:
    schemes:
    - {name: sha1, type: HMACSHA1, secretKeyRef: {name: crm, key: secret}, previousSecretKeyRef: {name: crm, key: previous}}
  delivery: {retry: {initialBackoff: 1s, maxBackoff: 3s}}
`)
		})
		shop.send("Both")
		newest.eventually("Both")
		Eventually(func() []verified { return wire.verified("newest") }).ShouldNot(BeEmpty())
		var request struct {
			Headers http.Header
			Body    string
		}
		line, _, _ := strings.Cut(shop.kubectl("logs", "wire"), "\n") // A delivery without an answer is repeated.
		Expect(json.Unmarshal([]byte(line), &request)).To(Succeed())
		for name, want := range map[string]string{
			"X-Env": "e2e", "Authorization": "Bearer abc", "Content-Type": "application/json", "User-Agent": "Posthorn/1.0",
			"X-Signature": signature.SHA1("newest", request.Body), "X-Signature-Previous": signature.SHA1("n3w", request.Body),
		} {
			Expect(request.Headers.Get(name)).To(Equal(want), name)
		}

		By("ending the rotation")
		shop.inEffect("whd/crm", func() { shop.destination("crm", newest.url(), "") })

		By("suspending the destination: calls are kept, and delivered after it is resumed")
		shop.kubectl("patch", "whd/crm", "--type=merge", "-p", `{"spec":{"suspend":true}}`)
		shop.eventually("whd/crm", "Accepted", "True/Suspended")
		shop.waitGeneration("whd/crm")
		shop.send("While suspended")
		shop.eventually("whd/crm", "Delivering", "False/Suspended")
		Eventually(func() string { return shop.field("whd/crm", "{.status.delivery.pending}") }).Should(Equal("1"))
		Expect(newest.ids()).NotTo(HaveKey("While suspended"))
		shop.kubectl("patch", "whd/crm", "--type=merge", "-p", `{"spec":{"suspend":false}}`)
		newest.eventually("While suspended")
		shop.eventually("whd/crm", "Accepted", "True/Accepted")

		By("deleting the Secret: no unsigned request is sent, and the status gives the reason")
		shop.kubectl("delete", "secret", "crm")
		shop.eventually("whd/crm", "ResolvedRefs", "False/SecretNotFound")
		shop.eventually("whd/crm", "Ready", "False/SecretNotFound")
		shop.send("Without secret")
		shop.secret("crm", "secret", "newest", "previous", "n3w", "token", "Bearer abc")
		newest.eventually("Without secret")
		for _, r := range newest.received() {
			Expect(r.Signature).To(Equal("ok"), r.Event)
		}
		shop.waitReady("whd/crm")

		By("stopping the receiver: the status reports it, and no call is lost")
		newest.stop()
		shop.send("While down")
		Eventually(func() string { return shop.condition("whd/crm", "Delivering") }).Should(HavePrefix("False/"))
		Expect(shop.condition("whd/crm", "Ready")).To(Equal("True/Ready"), "a receiver's outage must not fail a rollout")
		newest.start("newest")
		newest.eventually("While down")
		shop.eventually("whd/crm", "Delivering", "True/Delivering")

		By("suspending the Source: calls are rejected")
		shop.kubectl("patch", "psrc/web", "--type=merge", "-p", `{"spec":{"suspend":true}}`)
		shop.waitGeneration("psrc/web")
		out, err := shop.call("u1", "No")
		Expect(err).To(HaveOccurred())
		Expect(out).To(HavePrefix("503"))
		shop.kubectl("patch", "psrc/web", "--type=merge", "-p", `{"spec":{"suspend":false}}`)
		shop.waitGeneration("psrc/web")

		By("deleting the destination: no more calls arrive")
		shop.kubectl("delete", "whd/crm", "--timeout=3m")
		Eventually(func() string { return shop.field("psrc/web", "{.status.destinations}") }).Should(BeEmpty())
		shop.send("Deleted")
		Consistently(newest.ids, "2s").ShouldNot(HaveKey("Deleted"))
	})

	It("is readable in kubectl get and describe, without secrets", func() {
		t := newNamespace("columns")
		const secret = "hush-signing-secret"
		t.secret("crm", "secret", secret)
		s := t.newSink("crm", secret)
		t.destination("crm", s.url(), "")
		t.waitReady("psrc/web", "whd/crm")
		t.send("One")
		s.eventually("One")
		t.eventually("whd/crm", "Delivering", "True/Delivering")
		header, row, _ := strings.Cut(t.kubectl("get", "whd"), "\n")
		for _, column := range []string{"NAME", "READY", "REASON", "DELIVERING", "PENDING", "RETRYING", "LAST SUCCESS", "AGE"} {
			Expect(header).To(ContainSubstring(column))
		}
		Expect(row).To(MatchRegexp(`^crm\s+True\s+Ready\s+True\s+0\s+0\s`))
		Expect(t.kubectl("get", "posthorn")).To(And(ContainSubstring("source.posthorn.dev/web"),
			ContainSubstring("webhookdestination.posthorn.dev/crm")))
		Expect(t.kubectl("explain", "whd.spec.delivery.retry.window")).To(ContainSubstring("default 4h"))

		By("reading descriptions, events and logs: they contain no secret")
		for what, text := range map[string]string{
			"describe": t.kubectl("describe", "whd/crm", "psrc/web"), "events": t.kubectl("get", "events"),
			"operator": kubectl("-n", system, "logs", operator), "dispatcher": kubectl("-n", system, "logs", dispatcher),
		} {
			Expect(text).NotTo(Or(BeEmpty(), ContainSubstring(secret), ContainSubstring(t.key)), what)
		}
	})

	It("is rejected with an error that gives the fix", func() {
		t := newNamespace("wrong")
		_, err := command(`
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  sourceRefs: [{name: web}]
  endpoints:
  - {name: primary, url: "ftp://hooks.example/in"}
`, "kubectl", "apply", "-n", t.name, "-f", "-")
		Expect(err).To(MatchError(MatchRegexp(`spec.endpoints\[0\].*must be a full URL that starts with http:// or https://`)))

		By("using an address that the administrator does not allow")
		t.secret("crm", "secret", "s")
		t.destination("crm", "http://169.254.169.254/latest", "")
		t.eventually("whd/crm", "Accepted", "False/EgressDenied")

		By("using a name that resolves to such an address")
		t.destination("crm", "http://localhost/in", "")
		t.eventually("whd/crm", "Accepted", "False/EgressDenied")
	})

	It("has the reason InvalidSecret with a Secret of 1 MiB, and does not affect others", func() {
		t, s := running("huge")
		huge := filepath.Join(GinkgoT().TempDir(), "secret")
		random := make([]byte, 1<<20) // Random bytes cannot be compressed.
		_, _ = rand.Read(random)
		Expect(os.WriteFile(huge, random, 0o600)).To(Succeed())
		t.kubectl("create", "secret", "generic", "huge", "--from-file=secret="+huge)
		t.destination("huge", s.url()+"/huge", "")
		t.eventually("whd/huge", "ResolvedRefs", "False/InvalidSecret")
		t.send("Beside it")
		s.eventually("Beside it")
		Expect(t.condition("whd/crm", "Ready")).To(Equal("True/Ready"))

		By("using a Secret of the usual size")
		t.secret("usual", "secret", "s3cret")
		t.kubectl("patch", "whd/huge", "--type=merge", "-p", `{"spec":{"signing":{"schemes":[{"name":"sha1","type":"HMACSHA1","secretKeyRef":{"name":"usual","key":"secret"}}]}}}`)
		t.waitReady("whd/huge")
		t.send("Both")
		Eventually(func() map[string]bool {
			paths := map[string]bool{}
			for _, r := range s.received() {
				if r.Event == "Both" {
					paths[r.Path+" "+r.Signature] = true
				}
			}
			return paths
		}).Should(Equal(map[string]bool{"/in ok": true, "/in/huge ok": true}))
	})

	It("has no access to other namespaces", func() {
		a, b := newNamespace("team-a"), newNamespace("team-b")
		a.secret("crm", "secret", "of-a")
		sink := a.newSink("crm", "of-a")
		a.destination("crm", sink.url(), "")
		a.waitReady("psrc/web", "whd/crm")

		By("referring to a Secret of another namespace: it is not found")
		b.destination("crm", sink.url(), "")
		b.eventually("whd/crm", "ResolvedRefs", "False/SecretNotFound")

		By("referring to a Source of another namespace: it is not found")
		b.secret("crm", "secret", "of-a")
		b.waitReady("whd/crm")
		a.apply(`
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: ios}
spec: {writeKeys: [{name: main, secretKeyRef: {name: ios-key, key: writeKey}}]}
`)
		b.kubectl("patch", "whd/crm", "--type=merge", "-p", `{"spec":{"sourceRefs":[{"name":"ios"}]}}`)
		b.eventually("whd/crm", "ResolvedRefs", "False/NoSource")

		By("sending calls: each reaches only the destinations of its namespace")
		b.send("Of B")
		a.send("Of A")
		sink.eventually("Of A")
		Consistently(sink.ids, "2s").ShouldNot(HaveKey("Of B"))

		By("using the write key of another namespace: it is rejected")
		b.secret("web-key", "writeKey", a.key)
		b.eventually("psrc/web", "Accepted", "False/WriteKeyConflict")
		a.send("Still A")
		sink.eventually("Still A")
	})

	It("is served by accounts with minimal permissions", func() {
		can := func(account, verb, resource, namespace string) string {
			out, _ := command("", "kubectl", "auth", "can-i", verb, resource, "-n", namespace,
				"--as=system:serviceaccount:"+system+":"+release+"-"+account)
			return strings.TrimSpace(out)
		}
		for _, c := range []struct{ account, verb, resource, namespace, want string }{
			{"dispatcher", "list", "secrets", system, "yes"},
			{"dispatcher", "list", "secrets", "default", "no"},
			{"dispatcher", "get", "secrets", "kube-system", "no"},
			{"dispatcher", "create", "secrets", system, "no"},
			{"dispatcher", "get", "webhookdestinations.posthorn.dev", "default", "no"},
			{"operator", "get", "secrets", "default", "yes"},
			{"operator", "create", "secrets", system, "yes"},
			{"operator", "create", "secrets", "default", "no"},
			{"operator", "update", "webhookdestinations.posthorn.dev", "default", "no"},
			{"operator", "delete", "sources.posthorn.dev", "default", "no"},
			{"operator", "create", "pods", system, "no"},
		} {
			Expect(can(c.account, c.verb, c.resource, c.namespace)).To(Equal(c.want), "%s %s %s in %s", c.account, c.verb, c.resource, c.namespace)
		}

		By("reading the logs: each program limits its memory below that of its container")
		for _, component := range []string{"operator", "dispatcher"} {
			pod := strings.Fields(pods(component))[0]
			limit := resource.MustParse(kubectl("-n", system, "get", "pod", pod, "-o", "jsonpath={.spec.containers[0].resources.limits.memory}"))
			want := limit.Value() * 9 / 10
			if component == "dispatcher" { // dispatcher.memory, 400M by default, also bounds it.
				want = min(want, 400_000_000)
			}
			Expect(kubectl("-n", system, "logs", pod)).To(ContainSubstring(`"memoryLimit":%d`, want), component)
		}

		By("reading metrics without a token: the request is rejected")
		for component, port := range map[string]int{"operator": 8080, "dispatcher": 8081} {
			pod := strings.Fields(pods(component))[0]
			_, err := command("", "kubectl", "get", "--raw", fmt.Sprintf("/api/v1/namespaces/%s/pods/https:%s:%d/proxy/metrics", system, pod, port))
			Expect(err).To(MatchError(ContainSubstring("You must be logged in")), component)
		}
	})
})
