package docs

import (
	"debug/buildinfo"
	"regexp"
	"testing"
)

// THIRD_PARTY_LICENSES.md lists every module that is linked into the binary, in its version, and no
// other. `make generate` writes it.
func TestLinkedModulesHaveLicences(t *testing.T) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	inBinary, listed := map[string]bool{}, map[string]bool{}
	for _, m := range info.Deps {
		if m.Path == "github.com/posthorn/posthorn/analytics" {
			continue // It has Posthorn's license.
		}
		if m.Replace != nil {
			m = m.Replace
		}
		inBinary[m.Path+" "+m.Version] = true
	}
	for _, m := range regexp.MustCompile(`(?m)^\| (\S+) \| (v\d\S*) \| \S.* \|$`).FindAllStringSubmatch(read(t,
		"THIRD_PARTY_LICENSES.md"), -1) {
		listed[m[1]+" "+m[2]] = true
	}
	differ(t, "THIRD_PARTY_LICENSES.md", listed, inBinary)
}
