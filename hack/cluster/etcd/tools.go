//go:build tools

// Package etcd pins the etcd that hack/cluster/build builds.
package etcd

import _ "go.etcd.io/etcd/server/v3"
