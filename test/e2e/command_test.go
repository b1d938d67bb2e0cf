//go:build e2e

package e2e

import (
	"bytes"
	"fmt"
	"os/exec"
	"regexp"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// command runs a program. Its error contains the standard error of the program.
func command(stdin, name string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(name, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %s: %s", name, strings.Join(args, " "), err.Error(), stderr.String())
	}
	return stdout.String(), nil
}

// withLongWaits gives each kubectl wait in the commands of a page five minutes: the machine may be busy.
func withLongWaits(commands string) string {
	return regexp.MustCompile(`(?m)^(kubectl .*\bwait\b.*?)(?: --timeout=\w+)?( +#.*)?$`).ReplaceAllString(commands, "$1 --timeout=5m$2")
}

func kubectl(args ...string) string {
	GinkgoHelper()
	out, err := command("", "kubectl", args...)
	Expect(err).NotTo(HaveOccurred())
	return out
}

func helm(args ...string) string {
	GinkgoHelper()
	By("helm " + strings.Join(args, " "))
	out, err := command("", "helm", args...)
	Expect(err).NotTo(HaveOccurred())
	return out
}

// apply applies a manifest in a namespace, or without one if it is empty.
func apply(namespace, manifest string) {
	GinkgoHelper()
	args := []string{"apply", "-f", "-"}
	if namespace != "" {
		args = append(args, "-n", namespace)
	}
	_, err := command(manifest, "kubectl", args...)
	Expect(err).NotTo(HaveOccurred(), manifest)
}
