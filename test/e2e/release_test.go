//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/posthorn/posthorn/test/docs"
)

// Each spec first removes the release of the previous one. This order needs the fewest
// installations.
var _ = Describe("A release", Serial, Ordered, ContinueOnFailure, func() {
	It("delivers pending messages after it is uninstalled and installed again", func() {
		t, s := running("reinstalled")
		s.stop()
		t.send("Before the uninstall")
		Eventually(func() string { return t.field("whd/crm", "{.status.delivery.pending}") }).Should(Equal("1"))
		Expect(operatorSecrets()).To(And(ContainSubstring("secret/posthorn-live-"), ContainSubstring("secret/posthorn-dispatcher-admin")),
			"Secrets of the operator before the uninstall")
		uninstall()
		Expect(t.kubectl("get", "psrc,whd", "-o", "name")).To(And(ContainSubstring("source.posthorn.dev/web"),
			ContainSubstring("webhookdestination.posthorn.dev/crm")), "resources after the uninstall")
		Expect(kubectl("-n", system, "get", "pvc", "-o", "name")).To(ContainSubstring("data-posthorn-dispatcher-0"),
			"volumes after the uninstall")
		Eventually(operatorSecrets).Should(MatchRegexp(`^(secret/posthorn-(backlog|ledgers-\S+)\s*)*$`), "Secrets of the operator after the uninstall: only the records of what is on volumes")
		install()
		s.start("s3cret")
		s.eventually("Before the uninstall")
		t.waitReady("psrc/web", "whd/crm")
		t.send("After it")
		s.eventually("After it")
	})

	It("logs missing CRDs, and works after they are installed", Label(cleanStart), func() {
		uninstall()
		removeCRDs()
		// Without CRDs no pod becomes ready, so helm does not wait.
		helm(append([]string{"install", release, chart(), "--namespace", system, "--set", "crds.enabled=false"}, values()...)...)
		Eventually(func() string {
			out, _ := command("", "kubectl", "-n", system, "logs", operator)
			return out
		}).Should(MatchRegexp(`no matches for kind.*posthorn\.dev`), "the operator's log names the missing kinds")
		before := pods("operator")
		kubectl("apply", "--server-side", "-f", filepath.Join(env("E2E_RELEASE"), "posthorn_"+env("E2E_TAG")+"_crds-standard.yaml"))
		t, s := running("late")
		t.send("Late")
		s.eventually("Late")
		Expect(pods("operator")).To(Equal(before), "pods and restarts of the operator")
	})

	It("is upgraded from the previous commit with a backlog, and rolled back, pod by pod, under load", Label(cleanStart), func() {
		if os.Getenv("E2E_NO_PREVIOUS") != "" {
			Skip("the git history lacks the previous commit")
		}
		uninstall()
		removeCRDs()
		removeVolumes()
		const three = "dispatcher.replicas=3"
		deploy(env("E2E_PREVIOUS_CHART"), "--set", "image.tag="+env("E2E_PREVIOUS_TAG"), "--set", three)
		previous, current := env("E2E_PREVIOUS_TAG"), env("E2E_TAG")

		t, s := running("upgraded")
		load := t.load(40)
		// posthorn is the program of the operator's release.
		posthorn := env("E2E_PREVIOUS_POSTHORN")
		// works edits a destination beside dispatchers of these releases, and sends a call to each of
		// them: every call must be delivered as the edit requires.
		works := func(step string, tags ...string) {
			GinkgoHelper()
			Expect(images()).To(HaveExactElements(HaveSuffix(":"+tags[0]), HaveSuffix(":"+tags[1]), HaveSuffix(":"+tags[2])))
			t.waitReady("psrc/web", "whd/crm")
			t.inEffect("whd/crm", func() { t.destination("crm", s.url()+"/"+step, "") })
			for n := range tags {
				Expect(sendTo(t, n, fmt.Sprintf("%s at %d", step, n))).To(Succeed())
			}
			Eventually(func() (paths []string) {
				for _, r := range s.received() {
					if strings.HasPrefix(r.Event, step+" at ") {
						paths = append(paths, r.Event+": "+r.Path+" "+r.Signature)
					}
				}
				slices.Sort(paths) // A delivery without an answer is repeated.
				return slices.Compact(paths)
			}).Should(ConsistOf(fmt.Sprintf("%[1]s at 0: /in/%[1]s ok", step), fmt.Sprintf("%[1]s at 1: /in/%[1]s ok", step),
				fmt.Sprintf("%[1]s at 2: /in/%[1]s ok", step)))
			Eventually(func() error {
				out, err := command("", posthorn, "kubectl", "why", "crm", "-n", t.name)
				if err != nil {
					err = fmt.Errorf("%w: %s", err, out)
				}
				return err
			}).Should(Succeed())
		}
		// keep makes the StatefulSet update only the pods from a number on.
		keep := func(first int) {
			GinkgoHelper()
			kubectl("-n", system, "patch", dispatcher, "--type=merge", "-p", fmt.Sprintf(`{"spec":{"updateStrategy":{"rollingUpdate":{"partition":%d}}}}`, first))
		}
		late := sink{t, "late"}
		works("before", previous, previous, previous)

		By("collecting a backlog for a receiver that does not exist yet")
		t.secret("late", "secret", "s3cret")
		t.destination("late", late.url(), "")
		t.waitReady("whd/late")
		t.send("From the previous commit")
		Eventually(func() string { return t.field("whd/late", "{.status.delivery.pending}") }).ShouldNot(Or(BeEmpty(), Equal("0")))

		By("upgrading the operator and one of three dispatchers")
		keep(2)
		install("--set", three)
		ready(dispatcher)
		posthorn = "posthorn"
		works("first-upgraded", previous, previous, current)

		By("upgrading the second dispatcher")
		keep(1)
		ready(dispatcher)
		works("second-upgraded", previous, current, current)

		By("upgrading the last dispatcher")
		keep(0)
		ready(dispatcher)
		works("upgraded", current, current, current)
		late.start("s3cret")
		late.eventually("From the previous commit")
		Eventually(func() string { return t.field("whd/late", "{.status.delivery.pending}") }, "3m").Should(Equal("0"))
		Expect(t.field("whd/late", "{.status.delivery.discarded}")).To(Or(BeEmpty(), Equal("0")))

		By("rolling back the operator and one of three dispatchers")
		installed = false
		keep(2)
		helm("rollback", release, "-n", system, "--wait", "--timeout", "3m")
		ready(dispatcher)
		posthorn = env("E2E_PREVIOUS_POSTHORN")
		works("first-back", current, current, previous)
		keep(1)
		ready(dispatcher)
		works("second-back", current, previous, previous)
		keep(0)
		ready(dispatcher)
		works("back", previous, previous, previous)

		load.arrived(s)
		Eventually(func() error { return t.balanced(s, late) }, "2m", time.Second).Should(Succeed())
		Expect(t.kubectl("get", "whd")).To(And(MatchRegexp(`(?m)^crm\s+True\s+Ready\s+True\s+0\s+0\s`),
			MatchRegexp(`(?m)^late\s+True\s+Ready\s+True\s+0\s+0\s`)))
		uninstall()
		removeVolumes() // They have the stores of the previous commit.
	})

	It("is installed by the commands of INSTALL.md from its files alone", Label(cleanStart), func() {
		uninstall()
		removeCRDs()
		removeVolumes()
		// The commands write to a copy.
		dir := GinkgoT().TempDir()
		Expect(os.CopyFS(dir, os.DirFS(env("E2E_RELEASE")))).To(Succeed())
		blocks, err := docs.Blocks(dir, "INSTALL.md")
		Expect(err).NotTo(HaveOccurred())
		commands := "set -euo pipefail\ncd " + dir + "\n"
		for _, b := range blocks {
			where, err := b.Where()
			Expect(err).NotTo(HaveOccurred())
			if where != "skip" {
				commands += b.Commands()
			}
		}
		out, err := command("", "bash", "-c", commands)
		Expect(err).NotTo(HaveOccurred(), commands)
		Expect(out).To(And(ContainSubstring("INSTALL.md: OK"), ContainSubstring("Phase:          Succeeded"),
			ContainSubstring(env("E2E_TAG")+" (go")))
		images := strings.Fields(kubectl("-n", system, "get", "pods", "-o", "jsonpath={.items[*].spec.containers[*].image}"))
		Expect(images).To(And(HaveLen(2), HaveEach(posthornImage())), "images of the pods")
	})

	It("has documented commands that work in their order", Label(cleanStart), func() {
		uninstall()
		removeCRDs()
		removeVolumes()
		DeferCleanup(func() {
			kubectl("delete", "namespace", "shop", "--ignore-not-found", "--timeout=3m")
		})
		// The blocks write to a temporary directory.
		dir := GinkgoT().TempDir()
		Expect(os.Symlink(env("E2E_CHARTS"), filepath.Join(dir, "charts"))).To(Succeed())
		run := func(b docs.Block) string {
			GinkgoHelper()
			By(fmt.Sprintf("%s:%d, %s", b.Page, b.Line, b.Heading))
			// The exit code is 1 if there is a problem.
			text := regexp.MustCompile(`(?m)^(kubectl posthorn why [^#\n]*).*$`).ReplaceAllString(b.Commands(), "$1 || [[ $$? == 1 ]]")
			text = withLongWaits(text)
			text = "set -euo pipefail\ncd " + dir + "\n" + text
			out, err := command("", "bash", "-c", text)
			Expect(err).NotTo(HaveOccurred(), text)
			return out
		}
		var last []docs.Block
		printed := ""
		for _, page := range []string{"docs/install.md", "docs/operations.md"} {
			blocks, err := docs.Blocks(env("E2E_ROOT"), page)
			Expect(err).NotTo(HaveOccurred())
			for _, b := range blocks {
				where, err := b.Where()
				Expect(err).NotTo(HaveOccurred())
				switch {
				case where != "cluster":
				case b.Heading == "Removing it":
					last = append(last, b)
				default:
					printed += run(b)
				}
			}
		}
		Expect(printed).To(And(ContainSubstring("Phase:          Succeeded"), ContainSubstring(`"success":true`), MatchRegexp(`crm\s+True`)))
		Expect(last).To(HaveLen(3))
		for _, b := range last {
			run(b)
		}
		Expect(kubectl("get", "crd", "-o", "name")).NotTo(ContainSubstring("posthorn.dev"))
		Expect(kubectl("-n", system, "get", "pvc", "-o", "name")).To(BeEmpty())
		Expect(operatorSecrets()).To(BeEmpty())
	})
})

// operatorSecrets returns the names of the Secrets that the operator wrote: live configs with
// resolved credentials, the marker and the admin certificate.
func operatorSecrets() string {
	GinkgoHelper()
	return kubectl("-n", system, "get", "secret", "-l", "app.kubernetes.io/managed-by=posthorn-operator", "-o", "name")
}

// images returns the images of three dispatchers.
func images() []string {
	GinkgoHelper()
	return strings.Fields(kubectl("-n", system, "get", "pod/posthorn-dispatcher-0", "pod/posthorn-dispatcher-1", "pod/posthorn-dispatcher-2",
		"-o", "jsonpath={.items[*].spec.containers[0].image}"))
}

// sendTo sends one track call to a dispatcher. It retries while the name of a new pod has the old
// address.
func sendTo(t namespace, n int, event string, flags ...string) error {
	for deadline := time.Now().Add(defaultWait); ; time.Sleep(time.Second) {
		out, err := t.posthorn("", append([]string{"send", "track", "--address=" + podURL(n), "--user-id=u1", "--event=" + event}, flags...)...)
		if err == nil {
			return nil
		}
		if !regexp.MustCompile(unreached+`|i/o timeout|deadline exceeded`).MatchString(err.Error()) || time.Now().After(deadline) {
			return fmt.Errorf("%w; answer: %s", err, out)
		}
	}
}

// balanced returns an error unless the status of the Source web and its destinations has exactly what
// the sinks received, and nothing else is recorded.
func (t namespace) balanced(sinks ...sink) error {
	GinkgoHelper()
	var total, got struct{ Accepted, Delivered, Filtered, DeadLettered, Discarded, Pending int64 }
	for _, s := range sinks {
		delivery := got
		if err := json.Unmarshal([]byte(t.field("whd/"+s.name, "{.status.delivery}")), &delivery); err != nil {
			return err
		}
		list, distinct := s.received(), map[string]bool{}
		for _, r := range list {
			if r.Signature != "ok" {
				return StopTrying(fmt.Sprintf("%s received a call whose signature is %s: %v", s.name, r.Signature, r))
			}
			distinct[r.Body.MessageID] = true
		}
		// A retry after a lost response is one delivery, and a call that the client repeats at another
		// pod is two.
		if delivery.Delivered > int64(len(list)) || delivery.Delivered < int64(len(distinct)) {
			return fmt.Errorf("status of %s: %+v, received: %d, different: %d", s.name, delivery, len(list), len(distinct))
		}
		By(fmt.Sprintf("status of %s: %+v, received: %d, different: %d", s.name, delivery, len(list), len(distinct)))
		total.Accepted += delivery.Accepted
		total.Delivered += delivery.Delivered
		if delivery.Accepted, delivery.Delivered = 0, 0; delivery != got {
			return fmt.Errorf("status of %s has other messages than delivered ones: %+v", s.name, delivery)
		}
	}
	if err := json.Unmarshal([]byte(t.field("psrc/web", "{.status.messages}")), &got); err != nil {
		return err
	}
	if got != total {
		return fmt.Errorf("status of the Source: %+v, of its destinations: %+v", got, total)
	}
	return nil
}

func removeCRDs() {
	GinkgoHelper()
	for _, crd := range strings.Fields(kubectl("get", "crd", "-o", "name")) {
		if strings.HasSuffix(crd, ".posthorn.dev") {
			kubectl("delete", crd, "--timeout=3m")
		}
	}
}

func removeVolumes() {
	GinkgoHelper()
	kubectl("-n", system, "delete", "pvc", "-l", "app.kubernetes.io/name=posthorn", "--timeout=3m")
}
