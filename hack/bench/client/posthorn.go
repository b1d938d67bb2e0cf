package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/posthorn/posthorn/test/process"
)

// startPosthorn builds Posthorn and runs it in a separate process, with a Source
// with the write key. stop ends the process and removes its files.
func startPosthorn() (url string, stop func(), err error) {
	dir, err := os.MkdirTemp("", "posthorn-bench-")
	if err != nil {
		return "", nil, err
	}
	clean := func() { os.RemoveAll(dir) } //nolint:errcheck // a temporary directory
	defer func() {
		if err != nil {
			clean()
		}
	}()
	binary, err := process.Build(dir)
	if err != nil {
		return "", nil, err
	}
	manifests := filepath.Join(dir, "manifests")
	if err := os.Mkdir(manifests, 0o700); err != nil {
		return "", nil, err
	}
	source := fmt.Sprintf(`apiVersion: v1
kind: Secret
metadata: {name: key}
stringData: {writeKey: %q}
---
apiVersion: posthorn.dev/v1alpha1
kind: Source
metadata: {name: bench}
spec:
  writeKeys: [{secretKeyRef: {name: key, key: writeKey}}]
`, *writeKey)
	if err := os.WriteFile(filepath.Join(manifests, "source.yaml"), []byte(source), 0o600); err != nil {
		return "", nil, err
	}
	var log process.Log
	p := process.Run(binary, manifests, filepath.Join(dir, "data"))
	p.Log = &log
	if err := p.Start(); err != nil {
		return "", nil, fmt.Errorf("%w: %s", err, log.Tail())
	}
	return "http://" + p.Addr, func() { _ = p.Stop(syscall.SIGTERM); clean() }, nil
}
