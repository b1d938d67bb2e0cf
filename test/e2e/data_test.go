//go:build e2e

package e2e

import (
	"encoding/json"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("A Redelivery", func() {
	It("sends dead letters once more: counted, chosen, or all", Serial, func() {
		t := newNamespace("redeliver")
		t.secret("crm", "secret", "s3cret")
		broken := t.newSink("broken", "s3cret", "--status=400")
		t.destination("crm", broken.url(), "")
		t.waitReady("psrc/web", "whd/crm")
		refused := map[string]string{}
		for _, event := range []string{"One", "Two", "Three"} {
			t.send(event)
		}
		deadLetters := func() (list []struct{ MessageID, Event, Reason string }) {
			GinkgoHelper()
			for line := range strings.Lines(kubectl("posthorn", "deadletters", "list", "crm", "-n", t.name, "-o", "json")) {
				list = append(list, struct{ MessageID, Event, Reason string }{})
				Expect(json.Unmarshal([]byte(line), &list[len(list)-1])).To(Succeed(), line)
			}
			return list
		}
		Eventually(deadLetters).Should(HaveLen(3))
		for _, l := range deadLetters() {
			Expect(l.Reason).To(Equal("Rejected"))
			refused[l.Event] = l.MessageID
		}

		By("mending the receiver")
		mended := t.newSink("mended", "s3cret")
		t.inEffect("whd/crm", func() { t.destination("crm", mended.url(), "") })
		redeliver := func(name, spec string) {
			GinkgoHelper()
			t.apply(`{apiVersion: posthorn.dev/v1alpha1, kind: Redelivery, metadata: {name: ` + name + `}, spec: {destinationRef: {name: crm}, ` + spec + `}}`)
			t.kubectl("wait", "--for=condition=Complete", "--timeout=90s", "redelivery/"+name)
		}
		numbers := func(name string) string {
			return t.field("redelivery/"+name, "{.status.matched} {.status.redelivered} {.status.notRedelivered}")
		}

		By("counting")
		redeliver("count", "dryRun: true")
		Expect(t.condition("redelivery/count", "Complete")).To(Equal("True/Counted"))
		Expect(numbers("count")).To(HavePrefix("3"))
		Expect(mended.received()).To(BeEmpty())
		Expect(deadLetters()).To(HaveLen(3))

		By("choosing by event")
		redeliver("one", "selector: {events: [One]}")
		Expect(t.condition("redelivery/one", "Complete")).To(Equal("True/Redelivered"))
		Expect(numbers("one")).To(HavePrefix("1 1"))
		mended.eventually("One")
		Expect(mended.ids()).To(HaveLen(1))

		By("the rest, by reason, and the object is deleted when its TTL ends")
		redeliver("none", "selector: {reasons: [Expired]}")
		Expect(numbers("none")).To(MatchRegexp(`^0? ?0? ?0?$`))
		redeliver("rest", "selector: {reasons: [Rejected]}, ttlSecondsAfterFinished: 3")
		mended.eventually("Two")
		mended.eventually("Three")
		Expect(mended.ids()).To(Equal(map[string][]string{"One": {refused["One"]}, "Two": {refused["Two"]}, "Three": {refused["Three"]}}), "once each, under the same messageId")
		Expect(deadLetters()).To(BeEmpty())
		t.kubectl("wait", "--for=delete", "--timeout=90s", "redelivery/rest")
		Expect(t.kubectl("get", "rdl")).To(MatchRegexp(`(?m)^one\s+crm\s+True\s+False\s+Redelivered\s+1\s+1\s`))

		By("applied again it changes nothing; deleted and created again it is already done, also after a restart of the dispatcher")
		redeliver("one", "selector: {events: [One]}")
		Expect(t.condition("redelivery/one", "Complete")).To(Equal("True/Redelivered"))
		t.kubectl("delete", "redelivery/one")
		kubectl("-n", system, "delete", "pod", "posthorn-dispatcher-0", "--wait=true")
		ready(dispatcher)
		redeliver("one", "selector: {events: [One]}")
		Expect(t.condition("redelivery/one", "Complete")).To(Equal("True/AlreadyDone"))

		By("another namespace's destination is none of its own")
		other := newNamespace("redeliver-other")
		other.apply(`{apiVersion: posthorn.dev/v1alpha1, kind: Redelivery, metadata: {name: theirs}, spec: {destinationRef: {name: crm}}}`)
		other.eventually("redelivery/theirs", "Complete", "False/DestinationNotFound")
	})
})

var _ = Describe("A DeletionRequest", func() {
	It("tells each destination and follows each to its end", func() {
		t := newNamespace("forget")
		t.secret("ios-key", "writeKey", "key-of-forget-ios")
		t.source("ios")
		for _, name := range []string{"legal", "broken", "choosy", "disabled"} {
			t.secret(name, "secret", "s3cret")
		}
		legal := t.newRecorder("legal")
		broken := t.newSink("broken", "s3cret", "--status=400")
		t.apply(`
apiVersion: posthorn.dev/v1alpha1
kind: WebhookDestination
metadata: {name: legal}
spec:
  sourceRefs: [{name: web}, {name: ios}]
  endpoints: [{name: primary, url: "` + legal.url() + `"}]
  signing: {schemes: [{type: HMACSHA1, secretKeyRef: {name: legal, key: secret}}]}
`)
		t.destination("broken", broken.url(), "")
		t.destination("choosy", broken.url(), "  filter: {types: [track]}")
		t.destination("disabled", broken.url(), "  enabled: false")
		t.waitReady("psrc/web", "psrc/ios", "whd/legal", "whd/broken", "whd/choosy")
		t.eventually("whd/disabled", "Accepted", "True/Disabled")
		forget := func(name, spec, end string) {
			GinkgoHelper()
			t.apply(`{apiVersion: posthorn.dev/v1alpha1, kind: DeletionRequest, metadata: {name: ` + name + `}, spec: {` + spec + `}}`)
			t.kubectl("wait", "--for=condition="+end, "--timeout=90s", "pdel/"+name)
		}

		By("all Sources, and later calls are refused")
		forget("u1", "userId: u1, suppress: true", "Failed")
		Expect(t.condition("pdel/u1", "Failed")).To(Equal("True/NotDelivered"))
		Expect(strings.Fields(t.field("pdel/u1", `{range .status.notifications[*]}{.source}/{.destination}/{.state}/{.reason}{"\n"}{end}`))).To(ConsistOf(
			"web/legal/Delivered/", "ios/legal/Delivered/", "web/broken/DeadLettered/Rejected", "web/choosy/Filtered/"))
		Expect(t.field("pdel/u1", "{.status.total} {.status.delivered}")).To(Equal("4 2"))
		out, err := t.call("u1", "Late")
		Expect(err).To(HaveOccurred())
		Expect(out).To(And(HavePrefix("403"), ContainSubstring("user_suppressed")))
		out, err = t.call("u2", "Other")
		Expect(err).NotTo(HaveOccurred(), out)

		By("one Source only, and the object goes by itself")
		forget("u3", "userId: u3, sourceRefs: [{name: ios}], ttlSecondsAfterFinished: 3", "Complete")
		Expect(t.condition("pdel/u3", "Complete")).To(Equal("True/Delivered"))
		t.kubectl("wait", "--for=delete", "--timeout=90s", "pdel/u3")

		By("verifying in JavaScript what was told")
		told := map[string]int{}
		Eventually(func() map[string]int {
			told = map[string]int{}
			for _, v := range legal.verified("s3cret") {
				if user := v.Message["userId"].(string); v.Message["type"] == "delete" {
					Expect(v.Message).To(And(HaveLen(3), HaveKey("timestamp")), "type, userId and timestamp, and nothing else")
					told[user]++
				}
			}
			return told
		}).Should(Equal(map[string]int{"u1": 2, "u3": 1}))

		By("taking the request back: the user's calls are taken again")
		t.kubectl("delete", "pdel/u1")
		Eventually(func() error {
			_, err := t.call("u1", "Back")
			return err
		}).Should(Succeed())
	})
})
