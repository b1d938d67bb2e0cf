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

// Chart is the folder of the chart, from the root of the repository.
const Chart = "charts/posthorn"

// Binary is the path of Helm in the version that hack/cluster/build pins. It is
// built when it is missing, which takes a minute.
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
		return "", fmt.Errorf("hack/cluster/build built no helm: %w", err)
	}
	return binary, nil
}
