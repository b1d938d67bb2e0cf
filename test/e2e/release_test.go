//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

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
		Expect(operatorSecrets()).To(And(ContainSubstring("secret/posthorn-live-"), ContainSubstring("secret/posthorn-dispatcher-admin")), "Secrets of the operator before the uninstall")
		uninstall()
		Expect(t.kubectl("get", "psrc,whd", "-o", "name")).To(And(ContainSubstring("source.posthorn.dev/web"), ContainSubstring("webhookdestination.posthorn.dev/crm")), "resources after the uninstall")
		Expect(kubectl("-n", system, "get", "pvc", "-o", "name")).To(ContainSubstring("data-posthorn-dispatcher-0"), "volumes after the uninstall")
		Eventually(operatorSecrets).Should(BeEmpty(), "Secrets of the operator after the uninstall")
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
		helm(append([]string{"install", release, file("charts/posthorn"), "--namespace", system, "--set", "crds.enabled=false"}, values(env("E2E_TAG"))...)...)
		Eventually(func() string {
			out, _ := command("", "kubectl", "-n", system, "logs", operator)
			return out
		}).Should(MatchRegexp(`no matches for kind.*posthorn\.dev`), "the operator's log names the missing kinds")
		before := pods("operator")
		install()
		t, s := running("late")
		t.send("Late")
		s.eventually("Late")
		Expect(pods("operator")).To(Equal(before), "pods and restarts of the operator")
	})

	It("is upgraded from the previous release with a backlog, and rolled back, under load", Label(cleanStart), func() {
		uninstall()
		removeCRDs()
		removeVolumes()
		previousCRDs := filepath.Join(env("E2E_PREVIOUS_CHART"), "files", "crds")
		deploy(env("E2E_PREVIOUS_CHART"), env("E2E_PREVIOUS_TAG"))
		// Without the git history the previous release is the current code.
		crd, err := os.ReadFile(filepath.Join(previousCRDs, "posthorn.dev_sources.yaml"))
		Expect(err).NotTo(HaveOccurred())
		previousAPI := strings.Contains(string(crd), "writeKeySecretRef")

		t, s := namespace{name: "upgraded", key: "key-of-upgraded", previousAPI: previousAPI}.created().running()
		load := t.load(40)
		works := func(step, tag string) {
			GinkgoHelper()
			Expect(image()).To(HaveSuffix(":" + tag))
			t.waitReady("psrc/web", "whd/crm")
			t.inEffect("whd/crm", func() { t.destination("crm", s.url()+"/"+step, "") })
			t.send(step)
			s.eventually(step)
		}
		late := sink{t, "late"}
		// move takes the namespace to another release, in the order of docs/upgrading.md.
		// While the operator is stopped, the dispatchers continue with their live configs.
		move := func(crds string, declare, release func()) {
			GinkgoHelper()
			kubectl("-n", system, "scale", operator, "--replicas=0")
			kubectl("-n", system, "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/component=operator", "--timeout=1m")
			kubectl("apply", "--server-side", "--force-conflicts", "--field-manager=helm", "-f", crds)
			declare()
			release()
		}
		works("before", env("E2E_PREVIOUS_TAG"))

		By("collecting a backlog for a receiver that does not exist yet")
		t.secret("late", "secret", "s3cret")
		t.destination("late", late.url(), "")
		t.waitReady("whd/late")
		t.send("From the previous release")
		Eventually(func() string { return t.field("whd/late", "{.status.delivery.pending}") }).ShouldNot(Or(BeEmpty(), Equal("0")))

		old := t.kubectl("get", "psrc,whd", "-o", "yaml")
		move(file("charts/posthorn/files/crds"), func() {
			t.previousAPI = false
			migrated, err := command(old, "posthorn", "migrate", "-f", "-")
			Expect(err).NotTo(HaveOccurred())
			t.apply(migrated)
		}, func() { install() })
		works("upgraded", env("E2E_TAG"))
		late.start("s3cret")
		late.eventually("From the previous release")
		Eventually(func() string { return t.field("whd/late", "{.status.delivery.pending}") }, "3m").Should(Equal("0"))
		Expect(t.field("whd/late", "{.status.delivery.discarded}")).To(Or(BeEmpty(), Equal("0")))

		installed = false
		move(previousCRDs, func() {
			t.previousAPI = previousAPI
			t.source("web")
			t.destination("crm", s.url(), "")
			t.destination("late", late.url(), "")
		}, func() { helm("rollback", release, "-n", system, "--wait", "--timeout", "3m") })
		works("back", env("E2E_PREVIOUS_TAG"))
		load.arrived(s)
	})

	It("has documented commands that work in their order", Label(cleanStart), func() {
		uninstall()
		removeCRDs()
		removeVolumes()
		DeferCleanup(func() {
			kubectl("delete", "namespace", "shop", "--ignore-not-found", "--timeout=2m")
		})
		image := env("E2E_REPOSITORY") + ":" + env("E2E_TAG")
		// The blocks write to a temporary directory.
		dir := GinkgoT().TempDir()
		Expect(os.Symlink(file("charts"), filepath.Join(dir, "charts"))).To(Succeed())
		settings := " --set image.repository=" + env("E2E_REPOSITORY") + " --set image.tag=" + env("E2E_TAG")
		run := func(b docs.Block) string {
			GinkgoHelper()
			By(fmt.Sprintf("%s:%d, %s", b.Page, b.Line, b.Heading))
			text := strings.ReplaceAll(b.Commands(), "ghcr.io/posthorn/posthorn:0.2.0", image)
			text = regexp.MustCompile(`(?m)^(helm (?:install|upgrade) .*)$`).ReplaceAllString(text, "$1"+settings)
			// The exit code is 1 if there is a problem.
			text = regexp.MustCompile(`(?m)^(kubectl posthorn why [^#\n]*).*$`).ReplaceAllString(text, "$1 || [[ $$? == 1 ]]")
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

func removeCRDs() {
	GinkgoHelper()
	for _, crd := range strings.Fields(kubectl("get", "crd", "-o", "name")) {
		if strings.HasSuffix(crd, ".posthorn.dev") {
			kubectl("delete", crd, "--timeout=2m")
		}
	}
}

func removeVolumes() {
	GinkgoHelper()
	kubectl("-n", system, "delete", "pvc", "-l", "app.kubernetes.io/name=posthorn", "--timeout=2m")
}
