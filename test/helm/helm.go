// Package helm runs the pinned Helm on the chart, for tests.
package helm

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/posthorn/posthorn/test/env"
)

// Chart is the directory of the chart, relative to the root of the repository.
const Chart = "charts/posthorn"

// Binary returns the path of Helm in the version that hack/cluster/build pins. It builds
// Helm if necessary, which takes a minute.
func Binary() (string, error) {
	root, err := env.Root()
	if err != nil {
		return "", err
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(filepath.Join(root, "hack", "cluster", "build"), "helm")
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("build helm: %w: %s", err, stderr.String())
	}
	binary := filepath.Join(strings.TrimSpace(stdout.String()), "helm")
	if _, err := os.Stat(binary); err != nil {
		return "", fmt.Errorf("hack/cluster/build did not build helm: %w", err)
	}
	return binary, nil
}
