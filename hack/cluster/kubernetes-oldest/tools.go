//go:build tools

// Package kubernetes pins the oldest supported Kubernetes, for tests of its API server.
package kubernetes

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kubectl"
)
