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

var _ = Describe("The pages other than install.md and operations.md", Serial, func() {
	// The namespace of install.md, with the objects of each page.
	const namespace = "shop"

	It("have command blocks that work", func() {
		root := env("E2E_ROOT")
		// The blocks write to a temporary directory.
		dir := GinkgoT().TempDir()
		Expect(os.Symlink(env("E2E_CHARTS"), filepath.Join(dir, "charts"))).To(Succeed())
		Expect(os.Symlink(filepath.Join(root, "config"), filepath.Join(dir, "config"))).To(Succeed())
		kubeconfig := filepath.Join(dir, "kubeconfig")
		config := kubectl("config", "view", "--raw")
		Expect(os.WriteFile(kubeconfig, []byte(config), 0o600)).To(Succeed())
		kubectl("--kubeconfig", kubeconfig, "config", "set-context", "--current", "--namespace", namespace)
		kubectl("create", "namespace", namespace)
		// The pages also have experimental fields.
		const channel = "crds.channel=experimental"
		install("--set", channel)
		DeferCleanup(func() {
			kubectl("delete", "namespace", namespace, "--timeout=3m") // Other specs use it, too.
			install()                                                 // Restore the suite's settings.
		})
		run := func(commands string) (string, error) {
			commands = withLongWaits(commands)
			// The release is already installed.
			commands = regexp.MustCompile(`(?m)^helm (?:install|upgrade) (.*)$`).ReplaceAllString(commands, "helm upgrade --install $1 --set "+channel)
			// The exit code is 1 if there is a problem.
			commands = regexp.MustCompile(`(?m)^(kubectl posthorn (?:why|status|test) [^#\n]*).*$`).ReplaceAllString(commands, "$1 || [[ $$? == 1 ]]")
			return command("", "bash", "-c", "set -euo pipefail\ncd "+dir+"\nexport KUBECONFIG="+kubeconfig+"\n"+commands)
		}
		pages, err := docs.Pages(root)
		Expect(err).NotTo(HaveOccurred())
		manifests := func(page string) {
			GinkgoHelper()
			blocks, err := docs.Blocks(root, page)
			Expect(err).NotTo(HaveOccurred())
			for _, b := range blocks {
				if b.Language == "yaml" && strings.Contains(b.Text, "\nkind: ") && strings.Contains(b.Text, "posthorn.dev/v1beta1") {
					_, err := command(b.Text, "kubectl", "apply", "-n", namespace, "-f", "-")
					Expect(err).NotTo(HaveOccurred(), "%s:%d", page, b.Line)
				}
			}
		}
		manifests("docs/source.md")
		manifests("docs/webhookdestination.md")
		kubectl("wait", "-n", namespace, "--for=condition=Ready", "psrc/web", "--timeout=3m")
		ran := map[string]bool{}
		for _, page := range pages {
			if name := filepath.Base(page); name == "install.md" || name == "operations.md" {
				continue // A spec of release_test.go runs these pages.
			}
			blocks, err := docs.Blocks(root, page)
			Expect(err).NotTo(HaveOccurred())
			for _, b := range blocks {
				where, err := b.Where()
				Expect(err).NotTo(HaveOccurred())
				if where != "cluster" {
					continue
				}
				if !ran[page] {
					ran[page] = true
					manifests(page)
				}
				By(fmt.Sprintf("%s:%d", page, b.Line))
				out, err := run(b.Commands())
				Expect(err).NotTo(HaveOccurred(), b.Commands())
				Expect(b.Missing(out)).To(BeEmpty(), "missing lines of %s:%d in the output:\n%s", page, b.Line, out)
			}
		}
		Expect(ran).To(And(HaveKey("README.md"), HaveKey("docs/kubectl.md"), HaveKey("docs/troubleshooting.md"), HaveKey("docs/quickstart.md"),
			HaveKey("docs/webhookdestination.md"), HaveKey("docs/redelivery.md"), HaveKey("docs/runbooks.md")))
	})
})
