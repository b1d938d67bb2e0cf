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

// shellBlocks are the command blocks of a page, by the heading that they stand under.
func shellBlocks(page string) (blocks []struct{ heading, text string }) {
	GinkgoHelper()
	data, err := os.ReadFile(filepath.Join("..", "..", "docs", page))
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

var _ = Describe("The documentation", Serial, func() {
	It("has command blocks that work, in their order", func() {
		// The pages begin without Posthorn, and end without it.
		helm("uninstall", release, "-n", system, "--wait", "--timeout", "3m")
		DeferCleanup(func() {
			kubectl("delete", "namespace", "shop", "--ignore-not-found", "--timeout=2m")
			if CurrentSpecReport().Failed() {
				_, _ = command("", "helm", "uninstall", release, "-n", system, "--wait", "--timeout", "3m")
			}
			install()
		})
		image := env("E2E_REPOSITORY") + ":" + env("E2E_TAG")
		// What the blocks write goes to a folder of its own.
		dir := GinkgoT().TempDir()
		charts, err := filepath.Abs("../../charts")
		Expect(err).NotTo(HaveOccurred())
		Expect(os.Symlink(charts, filepath.Join(dir, "charts"))).To(Succeed())
		settings := " --set image.repository=" + env("E2E_REPOSITORY") + " --set image.tag=" + env("E2E_TAG")
		run := func(page, heading, text string) string {
			By(page + ", " + heading)
			text = strings.ReplaceAll(text, "ghcr.io/posthorn/posthorn:0.1.0", image)
			text = regexp.MustCompile(`(?m)^(helm (?:install|upgrade) .*)$`).ReplaceAllString(text, "$1"+settings)
			// What runs in the background needs a moment, and ends with the block.
			text = strings.ReplaceAll(text, " &\n", " &\nsleep 3\n")
			// There is something to tell: hooks.example does not exist.
			text = regexp.MustCompile(`(?m)^(kubectl posthorn why [^#\n]*).*$`).ReplaceAllString(text, "if $1; then exit 9; else [[ $$? == 1 ]]; fi")
			text = "set -euo pipefail\ncd " + dir + "\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + text
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
