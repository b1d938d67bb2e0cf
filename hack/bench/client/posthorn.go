package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// startPosthorn builds Posthorn and runs it, in a process of its own, with a Source
// that takes the write key. stop ends it and leaves nothing behind.
func startPosthorn() (url string, stop func(), err error) {
	dir, err := os.MkdirTemp("", "posthorn-bench-")
	if err != nil {
		return "", nil, err
	}
	clean := func() { os.RemoveAll(dir) } //nolint:errcheck // a temporary folder
	defer func() {
		if err != nil {
			clean()
		}
	}()
	binary := filepath.Join(dir, "posthorn")
	if out, err := exec.Command("go", "build", "-C", "../../..", "-o", binary, "./cmd/posthorn").CombinedOutput(); err != nil {
		return "", nil, fmt.Errorf("build Posthorn, from hack/bench/client: %w\n%s", err, out)
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
  writeKeySecretRef: {name: key, key: writeKey}
`, *writeKey)
	if err := os.WriteFile(filepath.Join(manifests, "source.yaml"), []byte(source), 0o600); err != nil {
		return "", nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	addr := l.Addr().String()
	l.Close() //nolint:errcheck // only its port was wanted
	var log bytes.Buffer
	cmd := exec.Command(binary, "run", "--manifests", manifests, "--data", filepath.Join(dir, "data"), "--listen", addr, "--admin-listen", "127.0.0.1:0")
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	stop = func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-ended
		clean()
	}
	url = "http://" + addr
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for {
		if resp, err := http.Get(url + "/readyz"); err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return url, stop, nil
			}
		}
		select {
		case <-ended:
			return "", nil, errors.New("Posthorn ended: " + log.String())
		case <-ctx.Done():
			stop()
			return "", nil, errors.New("Posthorn is not ready: " + log.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
}
