//go:build e2e

package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"os"
	"os/exec"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// member is a change that a sync sends: a user and the trait's new value.
type member struct {
	user  string
	value any
}

// podURL is the URL for calls of one dispatcher.
func podURL(n int) string {
	return fmt.Sprintf("http://posthorn-dispatcher-%d.posthorn-dispatcher-pods.%s.svc.cluster.local:8080", n, system)
}

var _ = Describe("Several dispatchers", Serial, Ordered, func() {
	var t namespace
	var s sink
	var calls load

	BeforeAll(func() {
		t, s = running("scaled")
		calls = t.load(20)
		By("scaling to 3 under load")
		kubectl("-n", system, "scale", dispatcher, "--replicas=3")
		DeferCleanup(func() { kubectl("-n", system, "scale", dispatcher, "--replicas=1") })
		ready(dispatcher)
	})

	It("all accept calls", func() {
		t.waitReady("whd/crm", "psrc/web")
		for n := range 3 {
			event := fmt.Sprintf("At %d", n)
			Expect(sendTo(t, n, event)).To(Succeed())
			s.eventually(event)
		}
	})

	It("all reject the calls of a suppressed user", func() {
		t.apply(`{apiVersion: posthorn.dev/v1beta1, kind: DeletionRequest, metadata: {name: forgotten}, spec: {userID: forgotten, suppress: true}}`)
		t.kubectl("wait", "--for=condition=Complete", "--timeout=3m", "pdel/forgotten")
		for n := range 3 {
			Eventually(func() string {
				out, _ := t.posthorn("", "send", "track", "--address="+podURL(n), "--user-id=forgotten", "--event=No")
				return out
			}).Should(And(HavePrefix("403"), ContainSubstring("user_suppressed")))
		}
	})

	It("are all asked where a message is", func() {
		// Without further calls the attempts remain in memory, and the message is stored until held has it.
		t.secret("traced", "key", "traced-key", "secret", "s3cret")
		t.apply(`{apiVersion: posthorn.dev/v1beta1, kind: Source, metadata: {name: traced}, spec: {writeKeys: [{name: main, secretKeyRef: {name: traced, key: key}}]}}`)
		tracedTo := func(name, url string) {
			t.apply(fmt.Sprintf(`
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: %s}
spec:
  sourceRefs: [{name: traced}]
  endpoints: [{name: primary, url: %q}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: traced, key: secret}}]}`, name, url))
		}
		tracedTo("traced", s.url())
		tracedTo("held", "http://held."+t.name+".svc.cluster.local/in") // No such Service.
		defer t.kubectl("delete", "psrc/traced", "whd/traced", "whd/held")
		t.kubectl("wait", "--for=condition=Accepted", "--timeout=3m", "psrc/traced", "whd/traced", "whd/held")
		Eventually(func() error {
			_, err := t.posthorn("", "send", "track", "--address="+podURL(1), "--write-key=traced-key", `--json={"messageId":"traced-1","userId":"u1","event":"Traced"}`)
			return err
		}).Should(Succeed())
		s.eventually("Traced")
		Eventually(func() string {
			out, _ := command("", "kubectl", "posthorn", "trace", "traced-1", "-n", t.name)
			return strings.Join(strings.Fields(out), " ")
		}).Should(And(
			ContainSubstring(`pod posthorn-dispatcher-1: traced-1: track "Traced", accepted by Source `+t.name+"/traced"),
			ContainSubstring(t.name+"/traced primary Delivered answered 200"),
			ContainSubstring(t.name+"/held primary Retrying")))
		_, err := command("", "kubectl", "posthorn", "trace", "traced-2", "-n", t.name)
		Expect(err).To(MatchError(ContainSubstring("no message traced-2")))
	})

	It("are on one status page, which follows a replaced pod", func() {
		cmd := exec.Command("kubectl", "posthorn", "page", "-n", t.name)
		out, err := cmd.StdoutPipe()
		Expect(err).NotTo(HaveOccurred())
		var stderr strings.Builder
		cmd.Stderr = &stderr
		Expect(cmd.Start()).To(Succeed())
		DeferCleanup(func() {
			Expect(cmd.Process.Signal(os.Interrupt)).To(Succeed())
			_ = cmd.Wait()
		})
		lines := bufio.NewScanner(out)
		for range 2 {
			Expect(lines.Scan()).To(BeTrue(), stderr.String())
		}
		link := lines.Text()
		jar, _ := cookiejar.New(nil)
		browser := &http.Client{Jar: jar, Timeout: 20 * time.Second}
		get := func(client *http.Client, address string) (int, string) {
			resp, err := client.Get(address)
			if err != nil {
				return 0, err.Error()
			}
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			return resp.StatusCode, string(body)
		}
		page := func() string {
			_, body := get(browser, link)
			return body
		}
		Eventually(page).Should(And(ContainSubstring("3 dispatchers"), ContainSubstring("no problem found"), ContainSubstring(">crm<")))
		code, body := get(&http.Client{}, link)
		Expect(code).To(Equal(http.StatusForbidden), body)
		root, _, _ := strings.Cut(link, "?")
		_, body = get(browser, root+"page/destination/"+t.name+"/crm")
		Expect(body).To(And(ContainSubstring("posthorn-dispatcher-2"), ContainSubstring("delivered")))

		By("replacing a pod")
		pod := "pod/posthorn-dispatcher-2"
		uid := kubectl("-n", system, "get", pod, "-o", "jsonpath={.metadata.uid}")
		kubectl("-n", system, "delete", pod)
		Eventually(func() string {
			out, _ := command("", "kubectl", "-n", system, "get", pod, "-o", "jsonpath={.metadata.uid}")
			return out
		}).ShouldNot(Or(BeEmpty(), Equal(uid)))
		ready(dispatcher)
		Eventually(page).Should(And(ContainSubstring("3 dispatchers"), ContainSubstring("no problem found")))
	})

	It("have one state of an audience, which survives the restart of its owner", func() {
		a := newNamespace("audiences")
		a.secret("crm", "secret", "s3cret")
		js := a.newRecorder("js")
		a.destination("crm", js.url(), "")
		a.apply(`
apiVersion: posthorn.dev/v1beta1
kind: Audience
metadata: {name: shoppers}
spec: {sourceRef: {name: web}, key: first_time_shoppers}
---
apiVersion: posthorn.dev/v1beta1
kind: Audience
metadata: {name: spend}
spec: {sourceRef: {name: web}, key: spend, type: ComputedTrait}
`)
		a.waitReady("psrc/web", "whd/crm", "paud/shoppers", "paud/spend")

		sync := func(endpoint, key string, lines []string, flags ...string) (string, error) {
			return a.posthorn(strings.Join(lines, "\n"), append([]string{"audience", "sync", key, "-", "--address=" + endpoint}, flags...)...)
		}
		users := func(from, to int) (lines []string) {
			for i := from; i < to; i++ {
				lines = append(lines, fmt.Sprintf(`{"userId":"u%d"}`, i))
			}
			return lines
		}
		// received counts the identify calls for each change of a trait.
		received := func(key string) map[member]int {
			GinkgoHelper()
			changes := map[member]int{}
			for _, v := range js.verified("s3cret") {
				Expect(v.Message["type"]).To(Equal("identify"))
				traits := v.Message["traits"].(map[string]any)
				if value, ok := traits[key]; ok {
					Expect(traits).To(HaveLen(1))
					changes[member{v.Message["userId"].(string), value}]++
				}
			}
			return changes
		}
		// eventuallyReceived waits until the receiver has exactly these changes, at least once each.
		eventuallyReceived := func(key string, want map[member]bool) {
			GinkgoHelper()
			Eventually(func() error {
				got := received(key)
				for m := range got {
					if !want[m] {
						return StopTrying(fmt.Sprintf("unexpected change: %s of %s is %v", key, m.user, m.value))
					}
				}
				if len(got) != len(want) {
					return fmt.Errorf("changes of %s: got %d, want %d", key, len(got), len(want))
				}
				return nil
			}, defaultWait, time.Second).Should(Succeed())
		}

		By("sending the first sync through a pod that is not the owner: all members are sent")
		want := map[member]bool{}
		out, err := sync(podURL(1), "first_time_shoppers", users(0, 100))
		Expect(err).NotTo(HaveOccurred())
		Expect(out).To(ContainSubstring("members 100, added 100, removed 0"))
		for i := range 100 {
			want[member{fmt.Sprintf("u%d", i), true}] = true
		}
		eventuallyReceived("first_time_shoppers", want)

		By("sending the second sync through the Service: only the changes are sent")
		out, err = sync(ingest, "first_time_shoppers", users(10, 105))
		Expect(err).NotTo(HaveOccurred())
		Expect(out).To(ContainSubstring("members 95, added 5, removed 10"))
		for i := range 5 {
			want[member{fmt.Sprintf("u%d", 100+i), true}] = true
		}
		for i := range 10 {
			want[member{fmt.Sprintf("u%d", i), false}] = true
		}
		eventuallyReceived("first_time_shoppers", want)

		By("sending invalid syncs: they are rejected and change nothing")
		for _, c := range []struct {
			key, code string
			lines     []string
			flags     []string
		}{
			{"first_time_shoppers", "too_many_removals", users(10, 20), nil},
			{"first_time_shoppers", "empty_snapshot", nil, nil},
			{"first_time_shoppers", "(invalid_json): line 96", append(users(10, 105), "{"), nil},
			{"unknown", "unknown_audience", users(0, 1), nil},
			{"first_time_shoppers", "unknown_write_key", users(0, 1), []string{"--write-key=wrong"}},
		} {
			_, err := sync(ingest, c.key, c.lines, c.flags...)
			Expect(err).To(MatchError(ContainSubstring(c.code)))
		}
		a.eventually("paud/shoppers", "Synced", "False/SyncRefused")
		out, err = sync(podURL(2), "first_time_shoppers", users(10, 105), "--dry-run")
		Expect(err).NotTo(HaveOccurred())
		Expect(out).To(ContainSubstring("members 95, added 0, removed 0"))

		By("killing the owner right after it accepted a sync of 2,000 members")
		out, err = sync(podURL(2), "first_time_shoppers", users(10, 2000))
		Expect(err).NotTo(HaveOccurred())
		Expect(out).To(ContainSubstring("members 1990, added 1895, removed 0"))
		killDispatcher()
		for i := range 1895 {
			want[member{fmt.Sprintf("u%d", 105+i), true}] = true
		}

		By("syncing a computed trait until the owner is ready again")
		Eventually(func() error {
			out, err := sync(podURL(1), "spend", []string{`{"userId":"u1","value":12.5}`, `{"userId":"u2","value":"lots"}`})
			if err == nil {
				Expect(out).To(ContainSubstring("members 2, added 2"))
				return nil
			}
			Expect(err).To(MatchError(MatchRegexp("owner_unreachable|not_ready|unknown_audience|unknown_write_key")), "the answer asks for a retry")
			return err
		}).Should(Succeed())
		ready(dispatcher)
		eventuallyReceived("spend", map[member]bool{{"u1", 12.5}: true, {"u2", "lots"}: true})
		eventuallyReceived("first_time_shoppers", want)

		By("sending another sync: the state has survived, and only one removal is sent")
		out, err = sync(ingest, "first_time_shoppers", users(11, 2000))
		Expect(err).NotTo(HaveOccurred())
		Expect(out).To(ContainSubstring("members 1989, added 0, removed 1"))
		want[member{"u10", false}] = true
		eventuallyReceived("first_time_shoppers", want)
		a.eventually("paud/shoppers", "Synced", "True/Synced")
		Eventually(func() string { return a.kubectl("get", "paud") }).Should(MatchRegexp(`(?m)^shoppers\s+True\s+Ready\s+True\s+1989\s+0\s`))
	})

	It("together keep the rate of a destination, while one of them accepts most of the calls", func() {
		const total = 40 // Equal shares let 27 pass.
		limited := sink{t, "limited"}
		limited.start("s3cret")
		t.secret("limited", "secret", "s3cret")
		t.apply(fmt.Sprintf(`
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: limited}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: primary, url: %q}]
  delivery: {rateLimit: {requestsPerSecond: %d}}
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: limited, key: secret}}]}`, limited.url(), total))
		defer t.kubectl("delete", "whd/limited", "pod/limited", "pod/burst")
		t.kubectl("wait", "--for=condition=Programmed", "--timeout=3m", "whd/limited")
		t.pod("burst", env("E2E_TOOL"), "-url="+podURL(0), "-prefix=burst", "-rate=60") // And 7 a second at each by the load.
		rate := func() float64 {
			before, start := len(limited.received()), time.Now()
			time.Sleep(10 * time.Second)
			passed := float64(len(limited.received())-before) / time.Since(start).Seconds()
			By(fmt.Sprintf("%.1f of %d requests a second passed", passed, total))
			Expect(passed).To(BeNumerically("<", 1.15*total), "requests a second; logs are read with a delay")
			return passed
		}
		Eventually(rate, time.Minute).Should(BeNumerically(">=", 0.9*total))
	})

	It("are drained when they are scaled down under load", func() {
		kubectl("-n", system, "scale", dispatcher, "--replicas=1")
		Eventually(func() string {
			return kubectl("-n", system, "get", "pods", "-l", "app.kubernetes.io/component=dispatcher", "-o", "name")
		}).Should(Equal("pod/posthorn-dispatcher-0\n"))
		// A removed pod keeps its pending messages until it exists again.
		kubectl("-n", system, "scale", dispatcher, "--replicas=3")
		ready(dispatcher)
		calls.arrived(s)
		t.waitReady("whd/crm", "psrc/web")
	})
})
