//go:build !linux

package docs

import "errors"

// The commands of the pages are run only on Linux, in network namespaces.
const alone = "POSTHORN_DOCS_SCRIPT"

func runAlone(string) error { return errors.New("supported only on Linux") }
