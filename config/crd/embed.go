// Package crd carries the generated CustomResourceDefinitions, so that programs
// can validate and default objects as an API server does.
package crd

import "embed"

// Experimental begins the description of each field that only the experimental channel has: hack/chart removes it
// from the standard CRDs.
const Experimental = "Experimental: can change or be removed in a minor release."

// Files are the generated CustomResourceDefinitions of the experimental channel, which has all fields,
// one YAML file each in the folder experimental.
//
//go:embed experimental/*.yaml
var Files embed.FS
