//go:build e2e

package e2e

import (
	"encoding/json"
	"slices"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("A Redelivery", func() {
	It("counts dead letters, and sends all or selected ones again", Serial, func() {
		t := newNamespace("redeliver")
		t.secret("crm", "secret", "s3cret")
		broken := t.newSink("broken", "s3cret", "--status-code=400")
		t.destination("crm", broken.url(), "")
		t.waitReady("psrc/web", "whd/crm")
		rejected := map[string]string{}
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
			rejected[l.Event] = l.MessageID
		}

		By("moving the destination to a working receiver")
		working := t.newSink("working", "s3cret")
		t.inEffect("whd/crm", func() { t.destination("crm", working.url(), "") })
		redeliver := func(name, spec string) {
			GinkgoHelper()
			t.apply(`{apiVersion: posthorn.dev/v1beta1, kind: Redelivery, metadata: {name: ` + name + `}, spec: {destinationRef: {name: crm}, ` + spec + `}}`)
			t.kubectl("wait", "--for=condition=Complete", "--timeout=3m", "redelivery/"+name)
		}
		numbers := func(name string) string {
			return t.field("redelivery/"+name, "{.status.matched} {.status.redelivered} {.status.notRedelivered}")
		}

		By("counting")
		redeliver("count", "dryRun: true")
		Expect(t.condition("redelivery/count", "Complete")).To(Equal("True/Counted"))
		Expect(numbers("count")).To(HavePrefix("3"))
		Expect(working.received()).To(BeEmpty())
		Expect(deadLetters()).To(HaveLen(3))

		By("selecting by event")
		redeliver("one", "match: {events: [One]}")
		Expect(t.condition("redelivery/one", "Complete")).To(Equal("True/Redelivered"))
		Expect(numbers("one")).To(HavePrefix("1 1"))
		working.eventually("One")
		Expect(working.ids()).To(HaveLen(1))

		By("selecting the rest by reason: the object is deleted at the end of its TTL")
		redeliver("none", "match: {reasons: [Expired]}")
		Expect(numbers("none")).To(MatchRegexp(`^0? ?0? ?0?$`))
		redeliver("rest", "match: {reasons: [Rejected]}, ttlSecondsAfterFinished: 30")
		working.eventually("Two")
		working.eventually("Three")
		redelivered := working.ids()
		for event, ids := range redelivered {
			redelivered[event] = slices.Compact(ids) // A delivery without an answer is repeated.
		}
		Expect(redelivered).To(Equal(map[string][]string{"One": {rejected["One"]}, "Two": {rejected["Two"]}, "Three": {rejected["Three"]}}),
			"under the same messageId")
		Expect(deadLetters()).To(BeEmpty())
		t.kubectl("wait", "--for=delete", "--timeout=3m", "redelivery/rest")
		Expect(t.kubectl("get", "rdl")).To(MatchRegexp(`(?m)^one\s+crm\s+True\s+False\s+Redelivered\s+1\s+1\s`))

		By("applying a completed object again: it has no effect; after a deletion and a restart of the dispatcher it is AlreadyDone")
		redeliver("one", "match: {events: [One]}")
		Expect(t.condition("redelivery/one", "Complete")).To(Equal("True/Redelivered"))
		t.kubectl("delete", "redelivery/one")
		kubectl("-n", system, "delete", "pod", "posthorn-dispatcher-0", "--wait=true")
		ready(dispatcher)
		redeliver("one", "match: {events: [One]}")
		Expect(t.condition("redelivery/one", "Complete")).To(Equal("True/AlreadyDone"))

		By("selecting a destination of another namespace: it is not found")
		other := newNamespace("redeliver-other")
		other.apply(`{apiVersion: posthorn.dev/v1beta1, kind: Redelivery, metadata: {name: theirs}, spec: {destinationRef: {name: crm}}}`)
		other.eventually("redelivery/theirs", "Complete", "False/DestinationNotFound")
	})
})

var _ = Describe("A DeletionRequest", func() {
	It("notifies each destination and reports each outcome", func() {
		t := newNamespace("forget")
		t.secret("ios-key", "writeKey", "key-of-forget-ios")
		t.source("ios")
		for _, name := range []string{"legal", "broken", "choosy", "ignoring"} {
			t.secret(name, "secret", "s3cret")
		}
		legal := t.newRecorder("legal")
		broken := t.newSink("broken", "s3cret", "--status-code=400")
		t.apply(`
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: legal}
spec:
  sourceRefs: [{name: web}, {name: ios}]
  endpoints: [{name: primary, url: "` + legal.url() + `"}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: legal, key: secret}}]}
`)
		t.destination("broken", broken.url(), "")
		t.destination("choosy", broken.url(), "  filter: {types: [track]}")
		t.destination("ignoring", broken.url(), "  deletions: Ignore")
		t.waitReady("psrc/web", "psrc/ios", "whd/legal", "whd/broken", "whd/choosy", "whd/ignoring")
		forget := func(name, spec, end string) {
			GinkgoHelper()
			t.apply(`{apiVersion: posthorn.dev/v1beta1, kind: DeletionRequest, metadata: {name: ` + name + `}, spec: {` + spec + `}}`)
			t.kubectl("wait", "--for=condition="+end, "--timeout=3m", "pdel/"+name)
		}

		By("requesting a deletion for all Sources: later calls are rejected")
		forget("u1", "userID: u1, suppress: true", "Failed")
		Expect(t.condition("pdel/u1", "Failed")).To(Equal("True/NotDelivered"))
		Expect(strings.Fields(t.field("pdel/u1", `{range .status.notifications[*]}{.source}/{.destination}/{.state}/{.reason}{"\n"}{end}`))).To(ConsistOf(
			"web/legal/Delivered/", "ios/legal/Delivered/", "web/broken/DeadLettered/Rejected", "web/choosy/DeadLettered/Rejected"),
			"a filter does not apply to notifications")
		Expect(t.field("pdel/u1", "{.status.total} {.status.delivered}")).To(Equal("4 2"))
		out, err := t.call("u1", "Late")
		Expect(err).To(HaveOccurred())
		Expect(out).To(And(HavePrefix("403"), ContainSubstring("user_suppressed")))
		out, err = t.call("u2", "Other")
		Expect(err).NotTo(HaveOccurred(), out)

		By("requesting a deletion for one Source: the object is deleted at the end of its TTL")
		forget("u3", "userID: u3, sourceRefs: [{name: ios}], ttlSecondsAfterFinished: 30", "Complete")
		Expect(t.condition("pdel/u3", "Complete")).To(Equal("True/Delivered"))
		t.kubectl("wait", "--for=delete", "--timeout=3m", "pdel/u3")

		By("verifying the notifications in JavaScript")
		notified := map[string]int{}
		Eventually(func() map[string]int {
			notified = map[string]int{}
			for _, v := range legal.verified("s3cret") {
				if user := v.Message["userId"].(string); v.Message["type"] == "delete" {
					Expect(v.Message).To(And(HaveLen(3), HaveKey("timestamp")), "a notification has only type, userId and timestamp")
					notified[user]++
				}
			}
			return notified
		}).Should(Equal(map[string]int{"u1": 2, "u3": 1}))

		By("deleting the request: the user's calls are accepted again")
		t.kubectl("delete", "pdel/u1")
		Eventually(func() error {
			_, err := t.call("u1", "Back")
			return err
		}).Should(Succeed())
	})
})
