// Package crd carries the generated CustomResourceDefinitions, so that programs
// can validate and default objects as an API server does.
package crd

import "embed"

// Files are the generated CustomResourceDefinitions, one YAML file each.
//
//go:embed *.yaml
var Files embed.FS
