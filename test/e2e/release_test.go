//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// Each of these begins by removing what the one before left; in this order that
// costs the fewest installations.
var _ = Describe("A release", Serial, Ordered, ContinueOnFailure, func() {
	It("goes on with what was kept when it is uninstalled and installed again", func() {
		t, s := running("reinstalled")
		s.stop()
		t.send("Before the uninstall")
		Eventually(func() string { return t.field("whd/crm", "{.status.delivery.pending}") }).Should(Equal("1"))
		uninstall()
		Expect(t.kubectl("get", "psrc,whd", "-o", "name")).To(And(ContainSubstring("source.posthorn.dev/web"), ContainSubstring("webhookdestination.posthorn.dev/crm")), "resources must survive")
		Expect(kubectl("-n", system, "get", "pvc", "-o", "name")).To(ContainSubstring("data-posthorn-dispatcher-0"), "volumes must survive")
		install()
		s.start("s3cret")
		s.eventually("Before the uninstall")
		t.waitReady("psrc/web", "whd/crm")
		t.send("After it")
		s.eventually("After it")
	})

	It("says what is missing without its CRDs, and works as soon as they are there", Label(afresh), func() {
		uninstall()
		removeCRDs()
		// Nothing becomes ready, so there is nothing to wait for.
		helm(append([]string{"install", release, file("charts/posthorn"), "--namespace", system, "--set", "crds.enabled=false"}, values(env("E2E_TAG"))...)...)
		Eventually(func() string {
			out, _ := command("", "kubectl", "-n", system, "logs", operator)
			return out
		}).Should(MatchRegexp(`no matches for kind.*posthorn\.dev`), "the log must name what is missing")
		before := pods("operator")
		install()
		t, s := running("late")
		t.send("Late")
		s.eventually("Late")
		Expect(pods("operator")).To(Equal(before), "the operator was restarted")
	})

	It("is upgraded from the previous release and rolled back while calls flow", Label(afresh), func() {
		uninstall()
		removeCRDs()
		removeVolumes()
		deploy(env("E2E_PREVIOUS_CHART"), env("E2E_PREVIOUS_TAG"))
		t, s := running("upgraded")
		load := t.load(40)
		works := func(step, tag string) {
			GinkgoHelper()
			Expect(image()).To(HaveSuffix(":" + tag))
			t.waitReady("psrc/web", "whd/crm")
			t.inEffect("whd/crm", func() { t.destination("crm", s.url()+"/"+step, "") })
			t.send(step)
			s.eventually(step)
		}
		works("before", env("E2E_PREVIOUS_TAG"))
		install()
		works("upgraded", env("E2E_TAG"))
		installed = false
		helm("rollback", release, "-n", system, "--wait", "--timeout", "3m")
		works("back", env("E2E_PREVIOUS_TAG"))
		load.arrived(s)
	})

	It("is documented in commands that work, in their order", Label(afresh), func() {
		uninstall()
		removeCRDs()
		removeVolumes()
		DeferCleanup(func() {
			kubectl("delete", "namespace", "shop", "--ignore-not-found", "--wait=false")
		})
		image := env("E2E_REPOSITORY") + ":" + env("E2E_TAG")
		// What the blocks write goes to a folder of its own.
		dir := GinkgoT().TempDir()
		Expect(os.Symlink(file("charts"), filepath.Join(dir, "charts"))).To(Succeed())
		settings := " --set image.repository=" + env("E2E_REPOSITORY") + " --set image.tag=" + env("E2E_TAG")
		run := func(page, heading, text string) string {
			GinkgoHelper()
			By(page + ", " + heading)
			text = strings.ReplaceAll(text, "ghcr.io/posthorn/posthorn:0.1.0", image)
			text = regexp.MustCompile(`(?m)^(helm (?:install|upgrade) .*)$`).ReplaceAllString(text, "$1"+settings)
			// There is something to tell: hooks.example does not exist.
			text = regexp.MustCompile(`(?m)^(kubectl posthorn why [^#\n]*).*$`).ReplaceAllString(text, "if $1; then exit 9; else [[ $$? == 1 ]]; fi")
			text = "set -euo pipefail\ncd " + dir + "\n" + text
			out, err := command("", "bash", "-c", text)
			Expect(err).NotTo(HaveOccurred(), text)
			return out
		}
		var last []string
		printed := ""
		for _, page := range []string{"install.md", "operations.md"} {
			for _, b := range shellBlocks(page) {
				if b.heading == "Removing it" {
					last = append(last, b.text)
					continue
				}
				printed += run(page, b.heading, b.text)
			}
		}
		Expect(printed).To(And(ContainSubstring("Phase:          Succeeded"), ContainSubstring(`"success":true`), MatchRegexp(`crm\s+True`), ContainSubstring("hooks.example")))
		Expect(last).To(HaveLen(2))
		for _, text := range last {
			run("install.md", "Removing it", text)
		}
		Expect(kubectl("get", "crd", "-o", "name")).NotTo(ContainSubstring("posthorn.dev"))
		Expect(kubectl("-n", system, "get", "pvc", "-o", "name")).To(BeEmpty())
	})
})

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

// shellBlocks are the command blocks of a page, by the heading that they stand under.
func shellBlocks(page string) (blocks []struct{ heading, text string }) {
	GinkgoHelper()
	data, err := os.ReadFile(file("docs/" + page))
	Expect(err).NotTo(HaveOccurred())
	heading := ""
	for _, part := range regexp.MustCompile("(?m)^## .*$|(?ms)^```sh\n.*?^```$").FindAllString(string(data), -1) {
		if rest, ok := strings.CutPrefix(part, "## "); ok {
			heading = rest
			continue
		}
		blocks = append(blocks, struct{ heading, text string }{heading, strings.TrimSuffix(strings.TrimPrefix(part, "```sh\n"), "```")})
	}
	return blocks
}
